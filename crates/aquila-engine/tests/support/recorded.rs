//! A draft that writes down what it was asked to run.

use std::sync::{Arc, Mutex};

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape};
use aquila_model::Result;
use aquila_spec::{Declaration, Drafter};

/// One pass of a draft.
#[derive(Debug, Clone)]
pub struct Pass {
    /// Whether it ran certain rows, or nodes of trees.
    pub certain: bool,
    pub plan: ForwardPlan,
    /// Whether there were hidden states of the target to read.
    pub hidden: bool,
}

/// What a draft ran.
pub type Passes = Arc<Mutex<Vec<Pass>>>;

pub struct Recorded {
    pub draft: super::shipped::Draft,
    pub passes: Passes,
}

impl Recorded {
    fn note(&self, certain: bool, plan: &ForwardPlan, hidden: bool) {
        self.passes.lock().unwrap().push(Pass { certain, plan: plan.clone(), hidden });
    }
}

type Rows = <CpuBackend as Backend>::Rows;
type Kv = <CpuBackend as Backend>::Kv;

impl Drafter<CpuBackend> for Recorded {
    fn declaration(&self) -> &Declaration {
        self.draft.declaration()
    }

    fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        self.draft.kv_shape(slots, dtype)
    }

    fn ids(&self) -> Option<DraftIds<'_>> {
        self.draft.ids()
    }

    fn extend(
        &mut self,
        backend: &CpuBackend,
        plan: &ForwardPlan,
        hidden: Option<&Rows>,
        kv: &mut Kv,
    ) -> Result<()> {
        self.note(true, plan, hidden.is_some());
        self.draft.extend(backend, plan, hidden, kv)
    }

    fn expand(
        &mut self,
        backend: &CpuBackend,
        plan: &ForwardPlan,
        first: bool,
        kv: &mut Kv,
    ) -> Result<()> {
        self.note(false, plan, false);
        self.draft.expand(backend, plan, first, kv)
    }

    fn logits(&self) -> &Rows {
        self.draft.logits()
    }
}
