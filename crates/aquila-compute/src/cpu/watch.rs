//! Reports each operation of the CPU backend to a [`Watch`]: for profiles, and for tests that count
//! operations or interfere with them.

use std::sync::Arc;

use super::{CpuBackend, CpuWeight};
use crate::round::Tree;

/// An operation of a backend, named as its methods are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Operation {
    Rows {
        capacity: usize,
        width: usize,
    },
    Place,
    Embed,
    RmsNorm,
    /// Gated or not.
    Project {
        outputs: usize,
        inputs: usize,
    },
    WriteKv,
    Attend,
    Gate,
    Add,
    SoftCap,
    Route,
    ProjectExperts,
    Routed,
    CopyColumns,
    TakeColumns,
    GatherSources,
    GatherOutputs,
    MoveSlots,
    MoveRows,
    ScatterOutputs,
    ClearFirst,
    Propose,
    Sample,
    Outputs,
    Read,
    ReadSlots,
    WriteSlots,
}

impl Operation {
    pub(super) fn project(weight: &CpuWeight) -> Self {
        Self::Project { outputs: weight.outputs(), inputs: weight.inputs() }
    }
}

/// Is told of the operations of a [`CpuBackend`], on the thread that calls them.
pub trait Watch: Send + Sync + 'static {
    /// An operation begins.
    fn begin(&self, operation: Operation);

    /// An operation that began has ended.
    fn end(&self, _operation: Operation) {}

    /// A tree was drafted for the request of this number, and not pruned yet.
    fn tree(&self, _request: u64, _tree: &Tree) {}
}

/// An operation under way; its end is reported when this is dropped.
pub(super) struct Reported<'a>(Option<(&'a dyn Watch, Operation)>);

impl Drop for Reported<'_> {
    fn drop(&mut self) {
        if let Some((watch, operation)) = self.0 {
            watch.end(operation);
        }
    }
}

impl CpuBackend {
    /// The same backend, which tells `watch` of its operations.
    pub fn watched(mut self, watch: Arc<dyn Watch>) -> Self {
        self.watch = Some(watch);
        self
    }

    /// Reports that an operation begins, and that it ends when the value is dropped. Without a
    /// watch this is one comparison.
    #[inline]
    pub(super) fn report(&self, operation: Operation) -> Reported<'_> {
        let watch = self.watch.as_deref();
        if let Some(watch) = watch {
            watch.begin(operation);
        }
        Reported(watch.map(|watch| (watch, operation)))
    }
}
