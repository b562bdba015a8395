//! Tensors that some publishers keep under `model` and others do not, by their bare names.

use std::ops::Deref;

use aquila_compute::HostTensor;

use crate::Result;
use crate::source::{TensorInfo, TensorSource};

const ROOT: &str = "model.";

/// Tensors whose names may begin with `model.`, and are the same without.
pub(super) struct StripModelPrefix<S>(pub S);

impl<S: Deref<Target: TensorSource>> StripModelPrefix<S> {
    /// The name under which a tensor is stored.
    fn stored(&self, name: &str) -> String {
        let rooted = format!("{ROOT}{name}");
        if !self.0.contains(name) && self.0.contains(&rooted) { rooted } else { name.to_owned() }
    }
}

impl<S: Deref<Target: TensorSource> + Send + Sync> TensorSource for StripModelPrefix<S> {
    fn origin(&self) -> &str {
        self.0.origin()
    }

    fn names(&self) -> Vec<&str> {
        let mut names = self.0.names();
        names.iter_mut().for_each(|name| *name = name.strip_prefix(ROOT).unwrap_or(name));
        names.sort_unstable();
        names.dedup();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        self.0.info(&self.stored(name))
    }

    fn get(&self, name: &str) -> Result<HostTensor> {
        self.0.get(&self.stored(name))
    }
}
