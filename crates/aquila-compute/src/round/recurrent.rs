//! The passes of a draft that is one recurrent model.
//!
//! Let L be the target's committed rows and the bonus token L. A draft of lookahead a has the
//! rows 0 to L - a when it begins: its row p consumed token p + a, the last one the bonus. A node
//! of depth d runs at the position behind those and its ancestors. Positions are computed from
//! these counts, never kept.

use super::state::RoundState;
use crate::AttentionSpan;

impl RoundState {
    /// The rows whose tokens have become certain.
    pub(super) fn plan_recurrent_extend(&mut self, hidden: bool) {
        let lookahead = self.bounds.groups[0].lookahead;
        for at in 0..self.extending.len() {
            let start = self.table_start(1, self.extending[at].place);
            let Self { extending, sequences, plan, .. } = self;
            let extending = &extending[at];
            let rows = extending.groups[0].clone();
            let sequence = sequences[extending.place].as_mut().expect("it runs");
            sequence.place_table(plan, 1, start, rows.end);
            for row in rows {
                plan.tokens.push(sequence.tokens[row + lookahead]);
                plan.positions.push(row as u32);
                plan.writes.push(sequence.tables[1][row]);
                plan.spans.push(AttentionSpan::in_table(start, row + 1));
                if hidden {
                    plan.sources.push(extending.target.of(row));
                }
            }
            if extending.seed {
                plan.outputs.push(plan.rows() as u32 - 1);
                plan.destinations.push(extending.place as u32);
            }
        }
        self.spoil_extend();
    }

    /// A row for every node of every beam. The hidden rows of seeds lie at their requests' places.
    pub(super) fn plan_recurrent_level(&mut self, first: bool) {
        self.level.clear();
        for at in 0..self.rows.len() {
            let start = self.table_start(1, self.rows[at].place);
            let Self { rows, sequences, plan, level, .. } = self;
            let place = rows[at].place;
            let Some(tree) = rows[at].draft.as_mut().filter(|tree| tree.builder.goes_on()) else {
                continue;
            };
            let sequence = sequences[place].as_mut().expect("it runs");
            let certain = sequence.rows[1];
            sequence.place_table(plan, 1, start, certain);
            let mut run = std::collections::HashMap::new();
            for &node in tree.builder.beam() {
                let depth = tree.builder.depth();
                let own = sequence.tables[1][certain + tree.slots.len()];
                tree.slots.insert(node, own);
                // Where all levels have one node, the path is what the block table goes on with.
                let span = if tree.slots.len() == depth {
                    sequence.place_table(plan, 1, start, certain + depth);
                    AttentionSpan::in_table(start, certain + depth)
                } else {
                    let ancestors =
                        std::iter::successors(Some(node), |&node| tree.builder.parent(node));
                    let mut path: Vec<u32> = ancestors.map(|node| tree.slots[&node]).collect();
                    path.reverse();
                    plan.span_of_path(start, certain, path)
                };
                let source = match tree.builder.parent(node) {
                    Some(parent) if !first => tree.rows[&parent],
                    _ => place as u32,
                };
                run.insert(node, plan.rows() as u32);
                plan.outputs.push(plan.rows() as u32);
                plan.tokens.push(tree.builder.token(node));
                plan.positions.push((certain + depth - 1) as u32);
                plan.writes.push(own);
                plan.sources.push(source);
                plan.spans.push(span);
                level.push((at, tree.builder.path_tokens(node)));
            }
            tree.rows = run;
        }
        self.spoil_level();
    }
}
