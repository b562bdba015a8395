//! What every row of one forward pass is. Plain data, made by the engine, placed by a backend.

/// What one row attends to, in position order: a prefix of its request's slot list, then a tail
/// of its own. In a prefill and in plain decoding the tail is empty and the prefix ends with the
/// row itself; a node of a draft tree sees the committed prefix, then its ancestors, then itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Sight {
    /// Where the request's slot list begins in [`ForwardPlan::slots`].
    pub start: u32,
    /// How many slots of that list the row sees.
    pub prefix: u32,
    /// Where the row's tail begins in [`ForwardPlan::tails`].
    pub tail_start: u32,
    /// How many slots the tail has.
    pub tail: u32,
}

impl Sight {
    /// How many slots the row sees. The slot at index i holds position i, so a row at position p
    /// sees p + 1 of them.
    pub fn len(&self) -> usize {
        self.prefix as usize + self.tail as usize
    }

    /// Whether the row sees nothing, which no planned row does.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}

/// The rows of one forward pass, over all requests in the batch.
///
/// Rows of one request are adjacent, and a row that another one sees is in the same pass or was
/// written by an earlier one. All keys and values of a layer are written before any row attends.
#[derive(Debug, Clone, Default)]
pub struct ForwardPlan {
    /// The token of each row.
    pub tokens: Vec<u32>,
    /// The position of each row, for rotary embedding.
    pub positions: Vec<u32>,
    /// The slot in which each row leaves its keys and values.
    pub writes: Vec<u32>,
    /// What each row sees.
    pub sights: Vec<Sight>,
    /// Slot lists of the requests, one after the other, each in position order.
    pub slots: Vec<u32>,
    /// Tails of the rows that have one.
    pub tails: Vec<u32>,
    /// The rows whose logits are wanted, ascending.
    pub outputs: Vec<u32>,
    /// For passes that go on from rows of another one: which of its rows each row takes. Empty
    /// for all others.
    pub sources: Vec<u32>,
}

impl ForwardPlan {
    /// How many rows the pass has.
    pub fn rows(&self) -> usize {
        self.tokens.len()
    }

    /// Empties the plan and keeps its memory.
    pub fn clear(&mut self) {
        self.tokens.clear();
        self.positions.clear();
        self.writes.clear();
        self.sights.clear();
        self.slots.clear();
        self.tails.clear();
        self.outputs.clear();
        self.sources.clear();
    }

    /// The slots that `row` sees, in position order.
    pub fn seen(&self, row: usize) -> impl Iterator<Item = u32> + '_ {
        let sight = self.sights[row];
        let prefix = &self.slots[sight.start as usize..][..sight.prefix as usize];
        let tail = &self.tails[sight.tail_start as usize..][..sight.tail as usize];
        prefix.iter().chain(tail).copied()
    }
}

/// The largest plan that will ever be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanBounds {
    /// Rows of one pass.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub outputs: usize,
    /// Slots of all lists and tails together.
    pub slots: usize,
}
