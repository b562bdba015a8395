//! What every row of one forward pass is. Plain data, made by the engine, placed by a backend.

/// What one row attends to, in position order: a prefix of its request's block table, then tree
/// slots of its own. In a prefill, in plain decoding and in chains there are none and the prefix ends
/// with the row itself; other nodes of a draft tree see the committed prefix, then their ancestors, then
/// themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct AttentionSpan {
    /// Where the request's block table begins among the plan's [`BlockTables`].
    pub start: u32,
    /// How many slots of that table the row sees.
    pub prefix: u32,
    /// Where the row's tree slots begin in [`ForwardPlan::tree_slots`].
    pub tree_start: u32,
    /// How many tree slots it has.
    pub tail: u32,
}

impl AttentionSpan {
    /// Of a row that sees the first `rows` slots of a table and nothing else.
    pub fn in_table(start: u32, rows: usize) -> Self {
        Self { start, prefix: rows as u32, ..Self::default() }
    }

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
    pub spans: Vec<AttentionSpan>,
    /// Changes of block tables: where each begins and how many of `slots` it has, in order. What
    /// is not changed stays as the plans placed before have left it.
    pub changes: Vec<(u32, u32)>,
    /// The slots of all changes, one after the other.
    pub slots: Vec<u32>,
    /// Tails of the rows that have one.
    pub tree_slots: Vec<u32>,
    /// The rows whose logits are wanted, ascending.
    pub outputs: Vec<u32>,
    /// For passes that go on from rows of another one: which of its rows each row takes. Empty
    /// for all others.
    pub sources: Vec<u32>,
    /// For passes whose outputs are kept for later ones: the row at which each is kept. Empty where
    /// output i is kept at row i.
    pub destinations: Vec<u32>,
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
        self.spans.clear();
        self.changes.clear();
        self.slots.clear();
        self.tree_slots.clear();
        self.outputs.clear();
        self.sources.clear();
        self.destinations.clear();
    }

    /// Changes block tables from `at` on.
    pub fn change_table(&mut self, at: usize, slots: &[u32]) {
        if !slots.is_empty() {
            self.changes.push((at as u32, slots.len() as u32));
            self.slots.extend_from_slice(slots);
        }
    }

    /// Adds the tree slots of a row that sees `prefix` slots of a table and then these.
    pub fn span_of_path(
        &mut self,
        start: u32,
        prefix: usize,
        path: impl IntoIterator<Item = u32>,
    ) -> AttentionSpan {
        let tree_start = self.tree_slots.len();
        self.tree_slots.extend(path);
        let tail = (self.tree_slots.len() - tree_start) as u32;
        AttentionSpan { start, prefix: prefix as u32, tree_start: tree_start as u32, tail }
    }

    /// Adds a block table behind those that this plan has changed so far; answers where it begins.
    pub fn add_table(&mut self, slots: impl IntoIterator<Item = u32>) -> u32 {
        let end = |&(at, count): &(u32, u32)| at + count;
        let at = self.changes.iter().map(end).max().unwrap_or(0);
        let slots: Vec<u32> = slots.into_iter().collect();
        self.change_table(at as usize, &slots);
        at
    }
}

/// The block tables of all requests, side by side, as the plans placed so far have left them: the
/// slot of each position of each request.
#[derive(Debug, Clone, Default)]
pub struct BlockTables {
    slots: Vec<u32>,
    /// One more than the largest slot that was ever in them.
    bound: usize,
}

impl BlockTables {
    /// Makes the changes of a plan.
    pub fn change(&mut self, plan: &ForwardPlan) {
        let mut from = 0;
        for &(at, count) in &plan.changes {
            let (at, count) = (at as usize, count as usize);
            let slots = &plan.slots[from..from + count];
            from += count;
            if self.slots.len() < at + count {
                self.slots.resize(at + count, 0);
            }
            self.slots[at..at + count].copy_from_slice(slots);
            let most = slots.iter().max().map_or(0, |&slot| slot as usize + 1);
            self.bound = self.bound.max(most);
        }
    }

    /// How many slots all tables have room for.
    pub fn len(&self) -> usize {
        self.slots.len()
    }

    /// Whether there is no table.
    pub fn is_empty(&self) -> bool {
        self.slots.is_empty()
    }

    /// One more than the largest slot that was ever in them.
    pub fn bound(&self) -> usize {
        self.bound
    }

    /// All tables, side by side.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Whether a row sees no more of its request's table than there is.
    pub fn hold(&self, span: &AttentionSpan) -> bool {
        // A row that sees nothing of its table may be there before the table is.
        span.prefix == 0 || span.start as usize + span.prefix as usize <= self.slots.len()
    }

    /// The part of a request's table that a row sees.
    pub fn prefix(&self, span: &AttentionSpan) -> &[u32] {
        match span.prefix {
            0 => &[],
            prefix => &self.slots[span.start as usize..][..prefix as usize],
        }
    }

    /// The slots that a row of a plan sees, in position order.
    pub fn seen<'a>(&'a self, plan: &'a ForwardPlan, row: usize) -> impl Iterator<Item = u32> + 'a {
        let span = plan.spans[row];
        let tail = &plan.tree_slots[span.tree_start as usize..][..span.tail as usize];
        self.prefix(&span).iter().chain(tail).copied()
    }
}

/// The largest plan that will ever be placed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PlanBounds {
    /// Rows of one pass.
    pub rows: usize,
    /// Rows whose logits are wanted.
    pub outputs: usize,
    /// Slots of all block tables and tree_slots together.
    pub slots: usize,
}
