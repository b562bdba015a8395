//! Bugs that speculative stacks have had and that no type here forbids, to be put back one at a
//! time: a test that does not see its bug tests nothing.
//!
//! Compiled with the feature `known-bugs` alone, which only tests turn on. A bug is alive on the
//! thread that put it back, for as long as its guard is held.

use std::cell::Cell;

use aquila_compute::{Backend, ForwardPlan};

use crate::{Declaration, Drafting, Extending, NodeRows, Shape};

/// A bug to put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A node of a tree that is drafted runs one position too far.
    DraftPosition,
    /// A node attends to whoever sat in the slots of its branch, not to its ancestors.
    BranchSlots,
    /// The oldest row that became certain is left out when the draft catches up.
    ExtendWidth,
    /// The last row of a chunk takes a token that is not the prompt's next one.
    ChunkTail,
    /// A draft without rows to run runs a pass.
    IdlePass,
    /// A standalone draft reads the text as a head does, and never sees its first token.
    ShiftedText,
    /// Choices are cut by the largest tree, not by the tree that each request had.
    ChoiceStride,
    /// Keys and values of the accepted path are moved, hidden rows are not.
    HiddenNotMoved,
    /// Hidden rows of the accepted path are moved, keys and values are not.
    KvNotMoved,
    /// Every branch of a tree takes pages of its own.
    PageFootprint,
    /// Cached rows of a head are found by the tokens before them alone.
    LookaheadLost,
}

impl Bug {
    /// All of them.
    pub const ALL: [Bug; 11] = [
        Bug::DraftPosition,
        Bug::BranchSlots,
        Bug::ExtendWidth,
        Bug::ChunkTail,
        Bug::IdlePass,
        Bug::ShiftedText,
        Bug::ChoiceStride,
        Bug::HiddenNotMoved,
        Bug::KvNotMoved,
        Bug::PageFootprint,
        Bug::LookaheadLost,
    ];

    /// Whether it is alive on this thread.
    pub fn alive(self) -> bool {
        ALIVE.get() == Some(self)
    }

    /// Puts it back until the guard is dropped.
    pub fn put_back(self) -> Alive {
        ALIVE.set(Some(self));
        Alive(())
    }
}

thread_local! {
    static ALIVE: Cell<Option<Bug>> = const { Cell::new(None) };
}

/// Keeps a bug alive.
#[must_use = "the bug dies with its guard"]
pub struct Alive(());

impl Drop for Alive {
    fn drop(&mut self) {
        ALIVE.set(None);
    }
}

/// Spoils a level of trees; `paths` has the request of each row, and its path.
pub(crate) fn spoil_level(
    plan: &mut ForwardPlan,
    requests: &[Drafting<'_>],
    paths: &[(usize, Vec<u32>)],
) {
    if Bug::DraftPosition.alive() {
        plan.positions.iter_mut().for_each(|position| *position += 1);
    }
    if Bug::BranchSlots.alive() {
        for (row, &(owner, _)) in paths.iter().enumerate() {
            let rank = paths[..row].iter().filter(|path| path.0 == owner).count();
            let (group, topk) = (&requests[owner].groups[0], requests[owner].shape.topk());
            let levels = &group.slots[group.rows.end..];
            let sight = plan.sights[row];
            let tail = &mut plan.tails[sight.tail_start as usize..][..sight.tail as usize];
            for (level, seen) in tail.iter_mut().enumerate() {
                *seen = levels[level * topk + rank];
            }
        }
    }
}

/// Spoils a pass over what has become certain.
pub(crate) fn spoil_extend(plan: &mut ForwardPlan, requests: &[Extending<'_>]) {
    let mut end = 0;
    for request in requests {
        let first = end;
        let rows = request.groups[0].rows.len();
        end += rows;
        if Bug::ChunkTail.alive() && request.seed.is_none() && rows > 0 {
            plan.tokens[end - 1] = request.tokens[0];
        }
        if Bug::ExtendWidth.alive() && rows > 1 {
            plan.tokens.remove(first);
            plan.positions.remove(first);
            plan.writes.remove(first);
            plan.sights.remove(first);
            if !plan.sources.is_empty() {
                plan.sources.remove(first);
            }
            for output in plan.outputs.iter_mut().filter(|output| **output > first as u32) {
                *output -= 1;
            }
            end -= 1;
        }
    }
}

/// Spoils what a standalone draft declares.
pub(crate) fn spoil_standalone(declaration: &mut Declaration) {
    declaration.groups[0].lookahead = usize::from(Bug::ShiftedText.alive());
}

/// Spoils which stores are compacted: the keys and values first, then hidden rows.
pub fn spoil_stores<B: Backend>(stores: &mut Vec<&mut dyn NodeRows<B>>) {
    if Bug::HiddenNotMoved.alive() {
        stores.truncate(1);
    }
    if Bug::KvNotMoved.alive() {
        stores.remove(0);
    }
}

/// Spoils how many slots a draft reserves for a tree.
pub fn spoil_footprint(rows: usize, shape: Shape, page_size: usize) -> usize {
    if !Bug::PageFootprint.alive() {
        return rows;
    }
    let branch = (page_size - 1 + shape.steps()).div_ceil(page_size) * page_size;
    rows.max(shape.topk() * branch)
}
