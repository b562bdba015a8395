//! Bugs that speculative stacks have had and that no type here forbids, to be put back one at a
//! time: a test that does not see its bug tests nothing.
//!
//! Only builds with debug assertions, as tests are, can put one back: elsewhere [`Bug::alive`] is
//! false and what it guards is not compiled. A bug is alive on the thread that put it back, for as
//! long as its guard is held.

use std::cell::Cell;

use crate::round::Shape;

/// A bug to put back.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Bug {
    /// A node of a tree that is drafted runs one position too far.
    DraftPosition,
    /// A node attends to whatever was in the slots of its branch, not to its ancestors.
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
    /// A graph is found without the bounds of its passes, and has the width of another round.
    GraphWidth,
    /// A graph is found without who takes hidden rows, and leaves them where they were.
    GraphTakers,
    /// A graph keeps positions: a replay leaves them advanced, and the next one begins with them.
    GraphPositions,
    /// A padding row of a graph writes slot 0, whichever request has it.
    GraphPadding,
    /// A batch beyond what was captured gets the largest graph.
    GraphPruned,
}

impl Bug {
    /// All bugs that can be put back.
    pub const ALL: [Bug; 16] = [
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
        Bug::GraphWidth,
        Bug::GraphTakers,
        Bug::GraphPositions,
        Bug::GraphPadding,
        Bug::GraphPruned,
    ];

    /// Whether it is alive on this thread.
    pub fn alive(self) -> bool {
        cfg!(debug_assertions) && ALIVE.get() == Some(self)
    }

    /// Puts it back until the guard is dropped.
    ///
    /// # Panics
    /// In a build without debug assertions.
    pub fn put_back(self) -> Alive {
        if !cfg!(debug_assertions) {
            panic!("bugs can be put back in builds with debug assertions alone");
        }
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

/// Spoils the lookahead of a standalone draft.
pub fn spoiled_lookahead(lookahead: usize) -> usize {
    lookahead + usize::from(Bug::ShiftedText.alive())
}

/// Spoils how many slots a draft reserves for a tree.
pub fn spoil_footprint(rows: usize, shape: Shape, page_size: usize) -> usize {
    if !Bug::PageFootprint.alive() {
        return rows;
    }
    let branch = (page_size - 1 + shape.steps()).div_ceil(page_size) * page_size;
    rows.max(shape.topk() * branch)
}
