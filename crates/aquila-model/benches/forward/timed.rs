//! A clock at each operation of the CPU backend.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use aquila_compute::cpu::{Operation, Watch, Watched};

/// Seconds and calls of each operation.
pub type Ledger = BTreeMap<Operation, (f64, usize)>;

/// A backend that keeps a ledger.
pub type Timed = Watched<Clock>;

#[derive(Default)]
pub struct Clock(Mutex<Ledger>);

impl Clock {
    /// What was noted since the last time.
    pub fn take(&self) -> Ledger {
        std::mem::take(&mut *self.0.lock().expect("no panic under the lock"))
    }
}

impl Watch for Clock {
    fn around<T>(&self, operation: Operation, run: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        let result = run();
        let seconds = since.elapsed().as_secs_f64();
        let mut ledger = self.0.lock().expect("no panic under the lock");
        let entry = ledger.entry(operation).or_default();
        entry.0 += seconds;
        entry.1 += 1;
        result
    }
}
