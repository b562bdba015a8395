//! Known bugs, put back into the passes of a round.

use super::state::RoundState;
use super::{Extent, PassRows};
use crate::ForwardPlan;
use crate::known_bugs::Bug;

impl RoundState {
    /// Spoils a pass over what has become certain.
    pub(super) fn spoil_extend(&mut self) {
        let Self { plan, extending, sequences, .. } = self;
        let mut end = 0;
        for extending in extending {
            let first = end;
            let rows = extending.groups[0].len();
            end += rows;
            if Bug::ChunkTail.alive() && !extending.seed && rows > 0 {
                let sequence = sequences[extending.place].as_ref().expect("it runs");
                plan.tokens[end - 1] = sequence.tokens[0];
            }
            if Bug::ExtendWidth.alive() && rows > 1 {
                plan.tokens.remove(first);
                plan.positions.remove(first);
                plan.writes.remove(first);
                plan.spans.remove(first);
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

    /// Plans the rows of a pass and fills them up to `bound` with rows that write slot 0.
    pub(crate) fn plan_padded_rows(&mut self, pass: PassRows, bound: Extent) -> &ForwardPlan {
        self.plan_rows(pass);
        let plan = &mut self.plan;
        while (1..bound.rows).contains(&plan.rows()) {
            plan.tokens.push(0);
            plan.positions.push(0);
            plan.writes.push(0);
            plan.spans.push(plan.spans[0]);
            if !plan.sources.is_empty() {
                plan.sources.push(0);
            }
        }
        plan
    }

    /// Spoils a level of trees.
    pub(super) fn spoil_level(&mut self) {
        let Self { plan, level, rows, sequences, .. } = self;
        if Bug::DraftPosition.alive() {
            plan.positions.iter_mut().for_each(|position| *position += 1);
        }
        if Bug::BranchSlots.alive() {
            for (row, &(owner, _)) in level.iter().enumerate() {
                let rank = level[..row].iter().filter(|path| path.0 == owner).count();
                let sequence = sequences[rows[owner].place].as_ref().expect("it runs");
                let topk = rows[owner].shape.topk();
                let levels = &sequence.tables[1][sequence.rows[1]..];
                let span = plan.spans[row];
                let tail = &mut plan.tree_slots[span.tree_start as usize..][..span.tail as usize];
                for (level, seen) in tail.iter_mut().enumerate() {
                    *seen = levels[level * topk + rank];
                }
            }
        }
    }
}
