//! A way to draft whose trees are written down.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use aquila_compute::Backend;
use aquila_compute::cpu::CpuBackend;
use aquila_model::Result;
use aquila_spec::{Algorithm, Declaration, Drafting, Extending, Seed, Tree};

/// The trees of each request, round by round.
pub type Trees = Arc<Mutex<BTreeMap<u64, Vec<Tree>>>>;

pub struct Watched {
    pub drafts: super::shipped::Drafts,
    pub trees: Trees,
}

impl Algorithm<CpuBackend> for Watched {
    fn declaration(&self) -> &Declaration {
        self.drafts.declaration()
    }

    fn draft(&mut self, backend: &CpuBackend, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let drafted = self.drafts.draft(backend, requests)?;
        let mut trees = self.trees.lock().unwrap();
        for (request, tree) in requests.iter().zip(&drafted) {
            trees.entry(request.request).or_default().push(tree.clone());
        }
        Ok(drafted)
    }

    fn extend(
        &mut self,
        backend: &CpuBackend,
        requests: &[Extending<'_>],
        hidden: Option<&<CpuBackend as Backend>::Rows>,
    ) -> Result<Vec<Option<Seed>>> {
        self.drafts.extend(backend, requests, hidden)
    }

    fn leave(&mut self, request: u64, tokens: &[u32]) {
        self.drafts.leave(request, tokens);
    }
}
