//! Counts the rows that are made and the copies of rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquila_compute::cpu::{CpuBackend, IsaChoice, Operation, Watch};

/// A backend that counts, and its counts.
pub fn counting() -> (Arc<CpuBackend>, Arc<Counts>) {
    let counts = Arc::new(Counts::default());
    let backend = CpuBackend::new(IsaChoice::Auto, 1).unwrap().watched(counts.clone());
    (Arc::new(backend), counts)
}

#[derive(Default)]
pub struct Counts {
    made: AtomicU64,
    copies: AtomicU64,
}

impl Counts {
    /// Bytes of all rows that there is room for.
    pub fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    /// How often rows were copied beside others, gathered for a head, or moved.
    pub fn copies(&self) -> u64 {
        self.copies.load(Relaxed)
    }
}

impl Watch for Counts {
    fn begin(&self, operation: Operation) {
        use Operation::*;
        match operation {
            Rows { capacity, width } => {
                self.made.fetch_add((capacity * width * 4) as u64, Relaxed);
            }
            CopyColumns | TakeColumns | GatherSources | MoveRows => {
                self.copies.fetch_add(1, Relaxed);
            }
            _ => {}
        }
    }
}
