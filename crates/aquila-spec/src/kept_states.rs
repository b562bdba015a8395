//! Hidden states that outlive a pass: what layers of multi-token prediction leave for each other,
//! and what each request keeps from round to round.
//!
//! A store has the rows of the last pass first, then the kept rows of every seat. The invariant: a
//! pass writes rows of a pass only, so what is kept stays until [`KeptStates::keep`].

use std::collections::HashMap;

use aquila_compute::Backend;
use aquila_model::{Error, Result};

/// Which kept rows are whose.
pub(crate) struct Seats {
    taken: HashMap<u64, usize>,
    free: Vec<usize>,
}

impl Seats {
    pub fn new(count: usize) -> Self {
        Self { taken: HashMap::new(), free: (0..count).rev().collect() }
    }

    /// The seat of a request that has one.
    pub fn of(&self, request: u64) -> Result<usize> {
        let missing = || Error::Plan(format!("request {request} has kept no hidden states"));
        self.taken.get(&request).copied().ok_or_else(missing)
    }

    /// The seat of a request, taken now if need be.
    pub fn take(&mut self, request: u64) -> Result<usize> {
        if let Some(&seat) = self.taken.get(&request) {
            return Ok(seat);
        }
        let full = || Error::Plan("more requests than hidden states are kept for".into());
        let seat = self.free.pop().ok_or_else(full)?;
        self.taken.insert(request, seat);
        Ok(seat)
    }

    /// Gives a seat back, if the request has one.
    pub fn leave(&mut self, request: u64) {
        self.free.extend(self.taken.remove(&request));
    }
}

/// The hidden states of all layers, or of the target where layers are not chained.
pub(crate) struct KeptStates<B: Backend> {
    chained: bool,
    /// Chained: what each layer made. Else: the target's, then what the last pass made.
    stores: Vec<B::Rows>,
    /// Rows of a pass; kept ones come behind.
    passes: usize,
    /// Rows that are kept for each request.
    depth: usize,
}

impl<B: Backend> KeptStates<B> {
    pub fn new(
        backend: &B,
        layers: usize,
        chained: bool,
        passes: usize,
        requests: usize,
        width: usize,
    ) -> Result<Self> {
        // A layer looks back one row at the layer before it, or as many at the target as it is
        // steps ahead.
        let depth = if chained { 1 } else { layers.saturating_sub(1).max(1) };
        let stores = if chained { layers } else { 2 };
        let rows = passes + requests * depth;
        let stores = (0..stores).map(|_| Ok(backend.rows(rows, width)?)).collect::<Result<_>>()?;
        Ok(Self { chained, stores, passes, depth })
    }

    /// Where the row that is `back` rows before the last certain one is kept.
    pub fn kept(&self, seat: usize, back: usize) -> u32 {
        debug_assert!(back < self.depth, "no row that far back is kept");
        (self.passes + seat * self.depth + back) as u32
    }

    /// What a layer behind the first reads, and where its pass leaves what it makes.
    pub fn behind(&mut self, layer: usize) -> (&B::Rows, &mut B::Rows) {
        let from = if self.chained { layer - 1 } else { 0 };
        let (before, made) = self.stores.split_at_mut(from + 1);
        (&before[from], &mut made[0])
    }

    /// Where the first layer leaves what it makes.
    pub fn first(&mut self) -> &mut B::Rows {
        let at = if self.chained { 0 } else { 1 };
        &mut self.stores[at]
    }

    /// The target's rows of the pass, where layers are not chained.
    pub fn target(&mut self) -> Option<&mut B::Rows> {
        (!self.chained).then(|| &mut self.stores[0])
    }

    /// Of `rows` new rows of a request that begin at `first` of what `layer` reads next, keeps the
    /// last ones.
    pub fn keep(
        &mut self,
        backend: &B,
        layer: usize,
        ranges: impl Iterator<Item = (usize, usize, usize)>,
    ) -> Result<()> {
        let mut moves = Vec::new();
        for (seat, first, rows) in ranges {
            // From the oldest on, so that none is overwritten before it has moved.
            for back in (0..self.depth).rev() {
                let to = self.kept(seat, back);
                if back < rows {
                    moves.push(((first + rows - 1 - back) as u32, to));
                } else if rows > 0 {
                    moves.push((self.kept(seat, back - rows), to));
                }
            }
        }
        let store = if self.chained { layer } else { 0 };
        Ok(backend.move_rows(&mut self.stores[store], &moves)?)
    }
}
