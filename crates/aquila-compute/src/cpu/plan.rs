//! Plans in host memory, checked once so that kernels may trust them in every layer.

use crate::{AttentionParams, BlockTables, Error, ForwardPlan, Result};

/// A plan in host memory.
#[derive(Default)]
pub struct CpuPlan {
    host: ForwardPlan,
    tables: BlockTables,
    slots: usize,
    positions: usize,
    seen: usize,
    writes_apart: bool,
}

impl CpuPlan {
    /// Copies `host` here, changes block tables as it says, and checks that it is whole.
    pub(super) fn place(&mut self, host: &ForwardPlan) -> Result<()> {
        let rows = host.rows();
        self.tables.change(host);
        let whole = host.positions.len() == rows
            && host.writes.len() == rows
            && host.spans.len() == rows
            && host.outputs.iter().all(|&row| (row as usize) < rows)
            && host.spans.iter().all(|s| {
                !s.is_empty()
                    && self.tables.hold(s)
                    && s.tree_start as usize + s.tail as usize <= host.tree_slots.len()
            });
        if !whole {
            return Err(Error::Tensor(
                "a plan refers to rows or slots that it does not have".into(),
            ));
        }
        let slots = host.writes.iter().chain(&host.tree_slots).max();
        self.slots = slots.map_or(0, |&slot| slot as usize + 1).max(self.tables.bound());
        self.positions = host.positions.iter().max().map_or(0, |&p| p as usize + 1);
        self.seen = host.spans.iter().map(|span| span.len()).sum();
        self.host.clone_from(host);
        let mut writes = host.writes.clone();
        writes.sort_unstable();
        self.writes_apart = writes.windows(2).all(|pair| pair[0] != pair[1]);
        Ok(())
    }

    /// The plan as the host made it.
    pub fn host(&self) -> &ForwardPlan {
        &self.host
    }

    /// The block tables as the plans so far have left them.
    pub fn tables(&self) -> &BlockTables {
        &self.tables
    }

    /// One more than the largest slot.
    pub(super) fn slots(&self) -> usize {
        self.slots
    }

    /// One more than the largest position.
    pub(super) fn positions(&self) -> usize {
        self.positions
    }

    /// Whether every row writes a slot of its own, so that rows may be written at once.
    pub(super) fn writes_apart(&self) -> bool {
        self.writes_apart
    }

    /// How many slots all rows see, together.
    pub(super) fn seen(&self, params: AttentionParams) -> usize {
        match params.window {
            None => self.seen,
            Some(window) => self.host.spans.iter().map(|span| span.len().min(window)).sum(),
        }
    }
}
