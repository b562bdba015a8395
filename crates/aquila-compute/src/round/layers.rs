//! The passes of a draft with a layer for each step.
//!
//! Let L be the target's committed rows and the bonus token L. Row p of layer j takes token
//! p + 1 + j and the hidden state of layer j - 1 at row p (the target's for layer 0), and runs at
//! position p + j; so layer j has L - j certain rows. A node of depth d goes on by layer d, whose
//! last d rows rest on the tokens of its path: they are run anew for every branch, behind the
//! certain rows, and nobody sees them after the round.
//!
//! The first of those rows takes the last certain hidden state of the layer before, and so does
//! the first row that becomes certain next. That state is kept for each request. The invariant:
//! what is kept changes only after all passes of an extend have read it.

use std::collections::HashMap;

use super::state::RoundState;
use crate::AttentionSpan;

/// Where hidden states that outlive a pass are: behind the rows of a pass, some for each place.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KeptLayout {
    /// Whether a layer takes the states of the layer before it, or the target's as the first does.
    pub chained: bool,
    /// Rows of the largest pass.
    pub passes: usize,
    /// States that are kept for each request.
    pub depth: usize,
}

impl KeptLayout {
    /// Where the states of the request at `place` are kept.
    pub fn rows(&self, place: usize) -> std::ops::Range<usize> {
        let first = self.passes + place * self.depth;
        first..first + self.depth
    }

    /// Where the state that is `back` rows before the last certain one is kept.
    fn row(&self, place: usize, back: usize) -> u32 {
        debug_assert!(back < self.depth, "no row that far back is kept");
        (self.passes + place * self.depth + back) as u32
    }
}

impl RoundState {
    /// The rows of `layer` whose tokens have become certain.
    pub(super) fn plan_layer_extend(&mut self, layer: usize, kept: KeptLayout) {
        let group = layer + 1;
        let before = if kept.chained { self.firsts.last() } else { self.firsts.first() };
        let before = before.cloned().unwrap_or_default();
        let mut firsts = Vec::with_capacity(self.extending.len());
        for at in 0..self.extending.len() {
            let start = self.table_start(group, self.extending[at].place);
            let Self { extending, sequences, plan, .. } = self;
            let extending = &extending[at];
            let place = extending.place;
            let sequence = sequences[place].as_mut().expect("it runs");
            firsts.push(plan.rows());
            sequence.place_table(plan, group, start, extending.groups[layer].end);
            for row in extending.groups[layer].clone() {
                plan.tokens.push(sequence.tokens[row + 1 + layer]);
                plan.positions.push((row + layer) as u32);
                plan.writes.push(sequence.tables[group][row]);
                plan.spans.push(AttentionSpan::in_table(start, row + 1));
                plan.sources.push(if layer == 0 {
                    extending.target.of(row)
                } else {
                    let new = extending.groups[if kept.chained { layer - 1 } else { 0 }].start;
                    match row.checked_sub(new) {
                        Some(behind) => (before[at] + behind) as u32,
                        None => kept.row(place, new - 1 - row),
                    }
                });
            }
            if layer == 0 && extending.seed {
                plan.outputs.push(plan.rows() as u32 - 1);
            }
        }
        self.firsts.push(firsts);
    }

    /// The rows of every node of every beam, all of them at `depth`.
    pub(super) fn plan_layer_level(&mut self, depth: usize, kept: KeptLayout) {
        let group = depth + 1;
        self.level.clear();
        for at in 0..self.rows.len() {
            let start = self.table_start(group, self.rows[at].place);
            let Self { rows, sequences, plan, level, .. } = self;
            let place = rows[at].place;
            let Some(tree) = rows[at].draft.as_mut().filter(|tree| tree.builder.goes_on()) else {
                continue;
            };
            let sequence = sequences[place].as_mut().expect("it runs");
            let (committed, certain) = (sequence.tokens.len() - 1, sequence.rows[group]);
            // Where the parent's rows of the layer before begin.
            let before = committed.saturating_sub(depth - 1);
            sequence.place_table(plan, group, start, committed);
            let mut own = sequence.tables[group][certain..].iter();
            let mut run = HashMap::new();
            for (at_beam, &node) in tree.builder.beam().iter().enumerate() {
                let path = tree.builder.path_tokens(node);
                let parent = tree.builder.parent(node).and_then(|at| tree.rows.get(&at));
                let tree_start = plan.tree_slots.len() as u32;
                run.insert(node, plan.rows() as u32);
                // Near the beginning of a text there are fewer rows than the node is deep.
                for (row, &slot) in (certain..committed).zip(own.by_ref()) {
                    plan.tokens.push(path[row + depth - committed]);
                    plan.positions.push((row + depth) as u32);
                    plan.writes.push(slot);
                    plan.sources.push(match parent {
                        _ if !kept.chained => kept.row(place, committed - 1 - row),
                        Some(first) if row >= before => first + (row - before) as u32,
                        _ => kept.row(place, 0),
                    });
                    // The rows of the first node are what the block table goes on with.
                    plan.spans.push(match at_beam {
                        0 => AttentionSpan::in_table(start, row + 1),
                        _ => {
                            plan.tree_slots.push(slot);
                            let tail = plan.tree_slots.len() as u32 - tree_start;
                            AttentionSpan { start, prefix: certain as u32, tree_start, tail }
                        }
                    });
                }
                plan.outputs.push(plan.rows() as u32 - 1);
                level.push((at, path));
            }
            tree.rows = run;
        }
    }

    /// Moves that keep the last states of the rows that `layer` has made certain.
    pub fn kept_states(&self, layer: usize, kept: KeptLayout) -> Vec<(u32, u32)> {
        let mut moves = Vec::new();
        let Some(firsts) = self.firsts.get(layer) else { return moves };
        for (extending, first) in self.extending.iter().zip(firsts) {
            let (place, rows) = (extending.place, extending.groups[layer].len());
            // From the oldest on, so that none is overwritten before it has moved.
            for back in (0..kept.depth).rev() {
                let to = kept.row(place, back);
                if back < rows {
                    moves.push(((first + rows - 1 - back) as u32, to));
                } else if rows > 0 {
                    moves.push((kept.row(place, back - rows), to));
                }
            }
        }
        moves
    }
}
