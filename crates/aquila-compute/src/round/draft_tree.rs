//! Draft trees: how they grow, and which of their nodes are verified.
//!
//! The one invariant: a node never comes before its parent, neither in the order of nodes nor in
//! the choice of which to keep. A child's score is its parent's times a probability, so it is
//! never larger; where it is equal, or both have underflowed to zero, the earlier node wins, and
//! parents are earlier.

use std::collections::HashMap;
use std::sync::Arc;

use crate::sampling::{Candidate, Weights};

use super::Shape;

/// A node of a tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Node {
    /// Its token.
    pub token: u32,
    /// Its parent's place among the nodes; the root is its own.
    pub parent: usize,
    /// How far it is below the root.
    pub depth: usize,
    /// The product of the probabilities on the path to it.
    pub score: f32,
}

/// A tree to verify. Node 0 is the bonus token, which is certain; parents come before children.
#[derive(Debug, Clone, PartialEq)]
pub struct Tree {
    nodes: Vec<Node>,
    /// For nodes whose children were drawn, the distribution they were drawn from.
    proposals: HashMap<usize, Arc<Weights>>,
}

impl Tree {
    /// The bonus alone: what plain decoding verifies.
    pub fn root(token: u32) -> Self {
        let root = Node { token, parent: 0, depth: 0, score: 1.0 };
        Self { nodes: vec![root], proposals: HashMap::new() }
    }

    /// The nodes, parents before children.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// How many nodes there are, the root included.
    pub fn len(&self) -> usize {
        self.nodes.len()
    }

    /// Whether there is no node, which there always is.
    pub fn is_empty(&self) -> bool {
        self.nodes.is_empty()
    }

    /// Adds a child of `parent`, which the draft gives `probability` behind it; answers its place.
    pub fn add(&mut self, parent: usize, token: u32, probability: f32) -> usize {
        let Node { depth, score, .. } = self.nodes[parent];
        let score = child_score(score, probability);
        self.nodes.push(Node { token, parent, depth: depth + 1, score });
        self.nodes.len() - 1
    }

    /// The path from the root to a node, both included.
    pub fn path(&self, node: usize) -> Vec<usize> {
        let mut path = vec![node];
        let mut at = node;
        while at != 0 {
            at = self.nodes[at].parent;
            path.push(at);
        }
        path.reverse();
        path
    }

    /// The child of `node` that carries `token`; of several, the first.
    pub fn child(&self, node: usize, token: u32) -> Option<usize> {
        (node + 1..self.len())
            .find(|&c| self.nodes[c].parent == node && self.nodes[c].token == token)
    }

    /// The children of a node, first to last.
    pub fn children(&self, node: usize) -> impl Iterator<Item = usize> + '_ {
        (node + 1..self.len()).filter(move |&c| self.nodes[c].parent == node)
    }

    /// The distribution from which the children of a node were drawn, if they were.
    pub fn proposal(&self, node: usize) -> Option<&Weights> {
        self.proposals.get(&node).map(|weights| &**weights)
    }

    /// Keeps the nodes that `kept` says, which has the parent of each.
    pub fn retain(&mut self, kept: &[bool]) {
        let mut place = vec![usize::MAX; self.len()];
        let mut nodes = Vec::with_capacity(self.len());
        for (at, &node) in self.nodes.iter().enumerate().filter(|(at, _)| kept[*at]) {
            place[at] = nodes.len();
            debug_assert!(place[node.parent] != usize::MAX, "a node is kept with its parent");
            nodes.push(Node { parent: place[node.parent], ..node });
        }
        self.nodes = nodes;
        let proposals = std::mem::take(&mut self.proposals).into_iter();
        self.proposals =
            proposals.filter(|(at, _)| kept[*at]).map(|(at, w)| (place[at], w)).collect();
    }

    /// The first child of a node: the one that its draft liked best.
    pub fn first_child(&self, node: usize) -> Option<usize> {
        (node + 1..self.len()).find(|&c| self.nodes[c].parent == node)
    }
}

/// A tree that is being drafted.
///
/// At each depth, the draft proposes the best children of every node of the beam; all of them join
/// the pool, and the best go on as the next beam. In the end the best of the pool are the tree.
#[derive(Debug, Clone)]
pub struct TreeBuilder {
    shape: Shape,
    /// Everything proposed, in the order of being proposed. Parents are places in the pool.
    pool: Vec<Proposed>,
    /// The nodes that go on, best first.
    beam: Vec<usize>,
    /// What the children of a node of the pool, or of the root, were drawn from.
    proposals: HashMap<Option<usize>, Arc<Weights>>,
}

#[derive(Debug, Clone, Copy)]
struct Proposed {
    token: u32,
    /// None for children of the root.
    parent: Option<usize>,
    depth: usize,
    score: f32,
}

impl TreeBuilder {
    /// A tree with what was proposed after the bonus, best first.
    pub fn start(shape: Shape, first: &[Candidate]) -> Self {
        let (pool, beam) = (Vec::new(), Vec::new());
        let mut builder = Self { shape, pool, beam, proposals: HashMap::new() };
        if shape.steps() > 0 {
            builder.add_children(None, first);
            builder.choose_beam(0);
        }
        builder
    }

    /// The nodes whose continuations the draft is to continue next: places in the pool.
    pub fn beam(&self) -> &[usize] {
        &self.beam
    }

    /// Whether the draft is to be run again.
    pub fn goes_on(&self) -> bool {
        self.depth() < self.shape.steps() && !self.beam.is_empty()
    }

    /// The depth of the beam.
    pub fn depth(&self) -> usize {
        self.beam.first().map_or(self.shape.steps(), |&at| self.pool[at].depth)
    }

    /// The token of a node of the pool.
    pub fn token(&self, at: usize) -> u32 {
        self.pool[at].token
    }

    /// The parent of a node of the pool; none below the root.
    pub fn parent(&self, at: usize) -> Option<usize> {
        self.pool[at].parent
    }

    /// The tokens on the path to a node of the pool, the root left out, the node's own last.
    pub fn path_tokens(&self, at: usize) -> Vec<u32> {
        let mut tokens = Vec::with_capacity(self.pool[at].depth);
        let mut next = Some(at);
        while let Some(at) = next {
            tokens.push(self.pool[at].token);
            next = self.pool[at].parent;
        }
        tokens.reverse();
        tokens
    }

    /// Notes that the children of a node of the pool, or of the root, were or will be drawn.
    pub fn propose(&mut self, parent: Option<usize>, from: Arc<Weights>) {
        self.proposals.insert(parent, from);
    }

    /// Adds what was proposed after each node of the beam, best first, and moves the beam down.
    pub fn grow(&mut self, proposed: &[Vec<Candidate>]) {
        assert_eq!(proposed.len(), self.beam.len(), "candidates for each node of the beam");
        let first = self.pool.len();
        for (parent, children) in std::mem::take(&mut self.beam).into_iter().zip(proposed) {
            self.add_children(Some(parent), children);
        }
        self.choose_beam(first);
    }

    fn add_children(&mut self, parent: Option<usize>, children: &[Candidate]) {
        let (depth, score) = match parent {
            Some(at) => (self.pool[at].depth + 1, self.pool[at].score),
            None => (1, 1.0),
        };
        for child in children.iter().take(self.shape.topk()) {
            let score = child_score(score, child.probability);
            self.pool.push(Proposed { token: child.token, parent, depth, score });
        }
    }

    fn choose_beam(&mut self, first: usize) {
        self.beam = (first..self.pool.len()).collect();
        sort_best_first(&mut self.beam, &self.pool);
        self.beam.truncate(self.shape.topk());
    }

    /// The tree below `bonus`: the best nodes of the pool, in the order of being proposed.
    pub fn finish(self, bonus: u32) -> Tree {
        let mut kept: Vec<usize> = (0..self.pool.len()).collect();
        sort_best_first(&mut kept, &self.pool);
        kept.truncate(self.shape.nodes() - 1);
        kept.sort_unstable();
        let mut tree = Tree::root(bonus);
        let mut place = vec![usize::MAX; self.pool.len()];
        for at in kept {
            let Proposed { token, parent, depth, score } = self.pool[at];
            place[at] = tree.nodes.len();
            let parent = parent.map_or(0, |parent| place[parent]);
            debug_assert!(parent != usize::MAX, "a node is kept only with its parent");
            tree.nodes.push(Node { token, parent, depth, score });
        }
        let kept = |parent: Option<usize>| parent.map_or(0, |parent| place[parent]);
        let proposals = self.proposals.into_iter().map(|(parent, from)| (kept(parent), from));
        tree.proposals = proposals.filter(|(node, _)| *node != usize::MAX).collect();
        tree
    }
}

/// The score of a child. A probability that rounding pushed above one must not lift it over its
/// parent.
fn child_score(parent: f32, probability: f32) -> f32 {
    (parent * probability).min(parent).max(0.0)
}

/// Sorts by score, the earlier first where scores are equal.
fn sort_best_first(places: &mut [usize], pool: &[Proposed]) {
    places.sort_unstable_by(|&a, &b| pool[b].score.total_cmp(&pool[a].score).then(a.cmp(&b)));
}
