//! Draft trees from places where a context has been seen before.

use std::cmp::Ordering;
use std::collections::{BinaryHeap, VecDeque};

use super::{MatchType, NgramSettings};
use crate::{Shape, Tree};

/// What follows in some text, and how often it did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Child {
    pub token: u32,
    pub count: u32,
    /// What is asked for to go on behind it.
    pub place: u32,
}

/// Texts in which contexts are looked up.
pub(super) trait Source {
    /// The continuations of a place, at most `most`, in the order in which they are worth a try.
    fn children(&self, place: u32, most: usize, order: MatchType, found: &mut Vec<Child>);
}

/// A place in a source where the last `length` tokens of a context were seen.
#[derive(Clone, Copy)]
pub(super) struct Anchor<'a> {
    pub source: &'a dyn Source,
    pub length: usize,
    pub place: u32,
}

/// What n-grams say of a next token.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Guess {
    /// The token that they would try first.
    pub token: u32,
    /// How many tokens before it were seen there.
    pub length: usize,
    /// Whether nothing else ever followed them.
    pub sole: bool,
}

/// What comes first behind an anchor.
pub(super) fn first_guess(settings: &NgramSettings, anchor: &Anchor<'_>) -> Option<Guess> {
    let mut children = Vec::new();
    anchor.source.children(anchor.place, 2, settings.match_type, &mut children);
    let first = children.first()?;
    Some(Guess { token: first.token, length: anchor.length, sole: children.len() == 1 })
}

/// A node whose continuations come next. `breadth` narrows with every level.
struct Open {
    node: usize,
    place: u32,
    breadth: f64,
}

/// The tree below `bonus` from anchors, the most trusted first. A token that several propose behind
/// the same path is one node.
pub(super) fn grow(
    settings: &NgramSettings,
    shape: Shape,
    bonus: u32,
    anchors: &[Anchor<'_>],
) -> Tree {
    let mut tree = Tree::root(bonus);
    for anchor in anchors {
        if tree.len() >= shape.nodes() {
            break;
        }
        match settings.match_type {
            MatchType::Bfs => by_levels(settings, shape, anchor, &mut tree),
            MatchType::Prob => by_probability(settings, shape, anchor, &mut tree),
        }
    }
    tree
}

/// Level by level. A match of the longest kind begins with the least branches, shorter ones with
/// more in proportion; each level below has one step of that proportion less.
fn by_levels(settings: &NgramSettings, shape: Shape, anchor: &Anchor<'_>, tree: &mut Tree) {
    let longest = settings.longest_match() as f64;
    let (least, most) = (settings.min_bfs_breadth as f64, settings.max_bfs_breadth as f64);
    let step = (most - least) / longest;
    let breadth = (longest - anchor.length as f64).max(0.0) * step + least;
    let mut open = VecDeque::from([Open { node: 0, place: anchor.place, breadth }]);
    let mut children = Vec::new();
    while let Some(Open { node, place, breadth }) = open.pop_front() {
        if tree.nodes()[node].depth >= shape.steps() {
            continue;
        }
        let most = (breadth as usize).clamp(1, shape.topk());
        anchor.source.children(place, most, MatchType::Bfs, &mut children);
        let shares = shares(&children);
        for (child, share) in children.iter().zip(shares) {
            let Some(node) = join(tree, shape, node, child.token, share) else { return };
            let breadth = (breadth - step).max(1.0);
            open.push_back(Open { node, place: child.place, breadth });
        }
    }
}

/// The path of the best joint probability first.
fn by_probability(settings: &NgramSettings, shape: Shape, anchor: &Anchor<'_>, tree: &mut Tree) {
    let most = settings.max_bfs_breadth.min(shape.topk());
    let mut heap = BinaryHeap::new();
    let mut proposed = 0;
    let mut children = Vec::new();
    let mut push = |heap: &mut BinaryHeap<Continuation>, parent, place, score: f32| {
        anchor.source.children(place, most, MatchType::Prob, &mut children);
        for (child, share) in children.iter().zip(shares(&children)) {
            proposed += 1;
            let joint = score * share;
            heap.push(Continuation { joint, share, number: proposed, parent, child: *child });
        }
    };
    if shape.steps() > 0 {
        push(&mut heap, 0, anchor.place, 1.0);
    }
    while let Some(Continuation { joint, share, parent, child, .. }) = heap.pop() {
        let Some(node) = join(tree, shape, parent, child.token, share) else { return };
        if tree.nodes()[node].depth < shape.steps() {
            push(&mut heap, node, child.place, joint);
        }
    }
}

/// The node of `token` below `parent`, added if need be; none where the tree is full.
fn join(tree: &mut Tree, shape: Shape, parent: usize, token: u32, share: f32) -> Option<usize> {
    if let Some(node) = tree.child(parent, token) {
        return Some(node);
    }
    (tree.len() < shape.nodes()).then(|| tree.add(parent, token, share))
}

/// The share of each child in how often all of them followed.
fn shares(children: &[Child]) -> impl Iterator<Item = f32> {
    let all: u64 = children.iter().map(|child| u64::from(child.count)).sum();
    children.iter().map(move |child| child.count as f32 / all.max(1) as f32)
}

/// A continuation that is not in the tree yet.
struct Continuation {
    joint: f32,
    share: f32,
    /// The earlier goes first where probabilities are equal.
    number: usize,
    parent: usize,
    child: Child,
}

impl Ord for Continuation {
    fn cmp(&self, other: &Self) -> Ordering {
        self.joint.total_cmp(&other.joint).then(other.number.cmp(&self.number))
    }
}

impl PartialOrd for Continuation {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl PartialEq for Continuation {
    fn eq(&self, other: &Self) -> bool {
        self.cmp(other).is_eq()
    }
}

impl Eq for Continuation {}
