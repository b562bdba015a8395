//! What a round keeps: one operation over everything that has a row per node.
//!
//! A store of such rows takes part by being in the list; there is no second place that could
//! forget it.

use aquila_compute::Backend;
use aquila_model::Result;

/// Which rows of a round are kept, and where they belong. Moves are made in order, and none
/// overwrites what a later one reads.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Kept {
    /// From slot to slot, for what is kept in slots.
    pub slots: Vec<(u32, u32)>,
    /// From row to row of the pass, for what has a row for each row of it.
    pub rows: Vec<(u32, u32)>,
}

impl Kept {
    /// Keeps the nodes of `path`: the i-th goes to the place of node i. `slots` has the slot of
    /// each node, `first_row` is the row of the root.
    pub fn path(&mut self, path: &[usize], slots: &[u32], first_row: usize) {
        for (to, &from) in path.iter().enumerate().filter(|&(to, &from)| to != from) {
            self.slots.push((slots[from], slots[to]));
            self.rows.push(((first_row + from) as u32, (first_row + to) as u32));
        }
    }
}

/// Something that has a row for every node of a round.
pub trait NodeRows<B: Backend> {
    /// Moves what is kept to where it belongs.
    fn keep(&mut self, backend: &B, kept: &Kept) -> Result<()>;
}

/// Keys and values, which are in slots.
pub struct KvRows<'a, B: Backend>(pub &'a mut B::Kv);

impl<B: Backend> NodeRows<B> for KvRows<'_, B> {
    fn keep(&mut self, backend: &B, kept: &Kept) -> Result<()> {
        Ok(backend.move_slots(self.0, &kept.slots)?)
    }
}

/// Rows of activations, one for each row of the pass.
pub struct PassRows<'a, B: Backend>(pub &'a mut B::Rows);

impl<B: Backend> NodeRows<B> for PassRows<'_, B> {
    fn keep(&mut self, backend: &B, kept: &Kept) -> Result<()> {
        Ok(backend.move_rows(self.0, &kept.rows)?)
    }
}

/// Moves the kept rows of every store.
pub fn commit<B: Backend>(
    backend: &B,
    kept: &Kept,
    stores: &mut [&mut dyn NodeRows<B>],
) -> Result<()> {
    if kept.slots.is_empty() {
        return Ok(());
    }
    stores.iter_mut().try_for_each(|store| store.keep(backend, kept))
}
