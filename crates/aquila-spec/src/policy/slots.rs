//! From a batch size to the slot that serves it.

/// Slots by least batch size, and the sizes to which the engine pads a batch before it runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BatchSlots {
    bounds: Vec<usize>,
    captured: Vec<usize>,
}

impl BatchSlots {
    /// Slots with these least batch sizes (at least one). `captured` is empty where batches run
    /// at their own size, as on a CPU.
    pub fn new(mut bounds: Vec<usize>, mut captured: Vec<usize>) -> Self {
        assert!(!bounds.is_empty(), "a policy has at least one slot");
        bounds.sort_unstable();
        captured.sort_unstable();
        Self { bounds, captured }
    }

    /// The size at which the engine will run a batch: the next captured one, or its own beyond
    /// the largest.
    pub fn padded(&self, batch: usize) -> usize {
        let at = self.captured.partition_point(|&size| size < batch);
        self.captured.get(at).copied().unwrap_or(batch)
    }

    /// The index of the slot of a batch: the last whose least size it reaches, else the first.
    pub fn index(&self, batch: usize) -> usize {
        let padded = self.padded(batch);
        self.bounds.partition_point(|&bound| bound <= padded).saturating_sub(1)
    }

    /// The least batch size of the slot with this index.
    pub fn bound(&self, index: usize) -> usize {
        self.bounds[index]
    }

    /// The slot with exactly this least batch size.
    pub fn of_bound(&self, bound: usize) -> Option<usize> {
        self.bounds.binary_search(&bound).ok()
    }
}
