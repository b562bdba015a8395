//! A clock at each operation of the CPU backend.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Instant;

use aquila_compute::cpu::{Operation, Watch};

/// Seconds and calls of each operation.
pub type Ledger = BTreeMap<Operation, (f64, usize)>;

/// What operations took, and when the one under way began.
#[derive(Default)]
pub struct Clock(Mutex<(Ledger, Option<Instant>)>);

impl Clock {
    /// What was noted since the last time.
    pub fn take(&self) -> Ledger {
        std::mem::take(&mut self.noted().0)
    }

    fn noted(&self) -> MutexGuard<'_, (Ledger, Option<Instant>)> {
        self.0.lock().expect("no panic under the lock")
    }
}

impl Watch for Clock {
    fn begin(&self, _operation: Operation) {
        self.noted().1 = Some(Instant::now());
    }

    fn end(&self, operation: Operation) {
        let now = Instant::now();
        let (ledger, began) = &mut *self.noted();
        let began = began.take().expect("operations follow each other");
        let entry = ledger.entry(operation).or_default();
        entry.0 += (now - began).as_secs_f64();
        entry.1 += 1;
    }
}
