//! Which drafts the target confirms.

use super::Tree;

/// The path that the target's own choices take through a tree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Accepted {
    /// The nodes on the path, the root first. Their rows are committed.
    pub path: Vec<usize>,
    /// What the target chose at each of them: the tokens that the round yields. The last one is
    /// the new bonus; the others are drafts that were right.
    pub tokens: Vec<u32>,
}

impl Accepted {
    /// How many drafts were right.
    pub fn correct(&self) -> usize {
        self.path.len() - 1
    }
}

/// Follows the target's choices down a tree: a node's child is accepted if it carries the token
/// that the target chooses at that node.
pub fn accept(tree: &Tree, chosen: &[u32]) -> Accepted {
    assert_eq!(tree.len(), chosen.len(), "one choice for each node");
    let mut path = vec![0];
    let mut tokens = vec![chosen[0]];
    let mut at = 0;
    while let Some(child) = tree.child(at, chosen[at]) {
        path.push(child);
        tokens.push(chosen[child]);
        at = child;
    }
    Accepted { path, tokens }
}
