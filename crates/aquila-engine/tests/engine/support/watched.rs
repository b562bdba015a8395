//! A backend whose trees are written down.

use std::collections::BTreeMap;
use std::sync::Mutex;

use aquila_compute::cpu::{Operation, Watch};
use aquila_spec::Tree;

/// The trees of each request, round by round.
#[derive(Default)]
pub struct Trees(pub Mutex<BTreeMap<u64, Vec<Tree>>>);

impl Watch for Trees {
    fn begin(&self, _operation: Operation) {}

    fn tree(&self, request: u64, tree: &Tree) {
        self.0.lock().unwrap().entry(request).or_default().push(tree.clone());
    }
}
