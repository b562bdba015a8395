//! One block of positions as an attention goes through it.

use super::attend::Attention;
use super::simd::LANES;
use crate::AttentionSpan;
use crate::reference::BLOCK;

/// One block of one row: where its keys and values are, and the scores of every head.
pub(super) struct Block {
    pub count: usize,
    /// Elements before each position's head; repeated to a multiple of 16 positions.
    pub at: [usize; BLOCK],
    /// The same for the block that is asked for meanwhile, as many as it has.
    pub ahead: [usize; BLOCK],
    pub ahead_count: usize,
    pub scores: [[f32; BLOCK]; MOST_HEADS],
    /// What is merged: whether this is the first block, and the factors of old and new.
    pub first: bool,
    pub old: [[f32; LANES]; MOST_HEADS],
    pub new: [[f32; LANES]; MOST_HEADS],
}

/// Query heads, of one row or of several that see the same, that go through a block together.
pub(super) const MOST_HEADS: usize = 24;

/// Where within the block at `start` what a row sees begins, if it does.
fn begins(a: &Attention<'_>, span: &AttentionSpan, start: usize) -> Option<usize> {
    a.params.first_seen(span.len()).checked_sub(start)
}

/// How many rows from `row` on see the same positions of the block at `start`: from one block
/// table, up to the end of the block, and from the same position on if not from its beginning.
pub(super) fn rows_alike(a: &Attention<'_>, row: usize, last: usize, start: usize) -> usize {
    let first = a.plan.spans[row];
    let whole = (start + BLOCK) as u64;
    let begin = begins(a, &first, start);
    let alike = a.plan.spans[row..last].iter().take_while(|s| {
        s.start == first.start && u64::from(s.prefix) >= whole && begins(a, s, start) == begin
    });
    alike.count().max(1)
}

impl Block {
    /// A block of nothing.
    pub(super) fn new() -> Self {
        Self {
            count: 0,
            at: [0; BLOCK],
            ahead: [0; BLOCK],
            ahead_count: 0,
            scores: [[0.0; BLOCK]; MOST_HEADS],
            first: true,
            old: [[0.0; LANES]; MOST_HEADS],
            new: [[0.0; LANES]; MOST_HEADS],
        }
    }

    /// Finds the positions that `row` sees of the block at `start`; false if there are none.
    pub(super) fn find(
        &mut self,
        a: &Attention<'_>,
        row: usize,
        kv_head: usize,
        start: usize,
    ) -> bool {
        let span = a.plan.spans[row];
        let begin = begins(a, &span, start);
        let (end, start) = (span.len().min(start + BLOCK), start + begin.unwrap_or(0));
        if start >= end {
            return false;
        }
        self.count = end - start;
        self.first = begin.is_some();
        let head = a.kv.layer + kv_head * a.kv.head_stride;
        let near = a.tables.prefix(&span);
        let far = &a.plan.tree_slots[span.tree_start as usize..][..span.tail as usize];
        let place = |slot: &u32| head + *slot as usize * a.kv.width;
        if start + self.count <= near.len() {
            // The usual case.
            for (at, slot) in self.at.iter_mut().zip(&near[start..][..self.count]) {
                *at = place(slot);
            }
        } else {
            let seen = near.iter().chain(far).skip(start);
            for (at, slot) in self.at.iter_mut().zip(seen).take(self.count) {
                *at = place(slot);
            }
        }
        let last = self.at[self.count - 1];
        self.at[self.count..self.count.next_multiple_of(LANES)].fill(last);
        true
    }

    /// Finds the block at `start` of `row`, to be asked for while this block is worked on.
    pub(super) fn look_ahead(
        &mut self,
        a: &Attention<'_>,
        row: usize,
        kv_head: usize,
        start: usize,
    ) {
        let span = a.plan.spans[row];
        let head = a.kv.layer + kv_head * a.kv.head_stride;
        let near = a.tables.prefix(&span);
        let unseen = begins(a, &span, start).unwrap_or(0).min(BLOCK);
        let next = near.iter().skip(start + unseen).take(BLOCK - unseen);
        self.ahead_count = next.len();
        for (at, slot) in self.ahead.iter_mut().zip(next) {
            *at = head + *slot as usize * a.kv.width;
        }
    }
}
