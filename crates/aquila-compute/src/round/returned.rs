//! Rows of the target's pass that requests get back.
//!
//! They are read after compaction, when the rows of the tokens that a round committed for a
//! request lie behind its first row, in the order of the tokens.

use super::row::Work;
use super::state::RoundState;
use super::{RequestOutput, Returned};

/// What the target's pass left of all its rows, where a request of the round asked for it.
#[derive(Debug)]
pub struct ReturnedRows<'a, R> {
    /// The stream after the final norm.
    pub hidden_states: Option<&'a R>,
    /// Ids of experts as numbers, those of all layers side by side.
    pub routed_experts: Option<&'a R>,
}

/// Rows of one width, one after the other.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HostRows<T> {
    /// How many values a row has.
    pub width: usize,
    /// The values of all rows.
    pub values: Vec<T>,
}

impl<T: Clone> HostRows<T> {
    /// How many rows there are.
    pub fn len(&self) -> usize {
        self.values.len().checked_div(self.width).unwrap_or(0)
    }

    /// Whether there is none.
    pub fn is_empty(&self) -> bool {
        self.values.is_empty()
    }

    /// The rows, one after the other.
    pub fn rows(&self) -> std::slice::ChunksExact<'_, T> {
        self.values.chunks_exact(self.width.max(1))
    }

    /// Adds a row.
    pub fn push(&mut self, row: impl ExactSizeIterator<Item = T>) {
        self.width = row.len();
        self.values.extend(row);
    }

    /// Adds the rows of `other` from its row `from` on.
    pub fn extend(&mut self, mut other: HostRows<T>, from: usize) {
        self.width = self.width.max(other.width);
        let first = (from * other.width).min(other.values.len());
        self.values.extend(other.values.drain(first..));
    }

    /// Keeps the first `rows` rows.
    pub fn truncate(&mut self, rows: usize) {
        self.values.truncate(rows * self.width);
    }
}

impl RoundState {
    /// Adds the rows that requests get to their outputs; `values` answers those of a row.
    pub fn take_returned<R>(
        &mut self,
        returned: ReturnedRows<'_, R>,
        values: impl Fn(&R, usize) -> &[f32],
    ) {
        for row in &mut self.rows {
            let sequence = self.sequences[row.place].as_ref().expect("it runs");
            let Returned { hidden_states, routed_experts } = sequence.params.returned;
            let committed = match &row.work {
                Work::Prefill { rows, .. } => rows.len(),
                Work::Verify { .. } => row.output.tokens.len(),
            };
            let RequestOutput { hidden_states: states, routed_experts: ids, .. } = &mut row.output;
            for at in row.first_row..row.first_row + committed {
                if let Some(rows) = returned.hidden_states.filter(|_| hidden_states) {
                    states.push(values(rows, at).iter().copied());
                }
                if let Some(rows) = returned.routed_experts.filter(|_| routed_experts) {
                    // Ids are far below the whole numbers that a f32 cannot hold.
                    ids.push(values(rows, at).iter().map(|&id| id as u32));
                }
            }
        }
    }
}
