//! Holds an engine before its passes, so that a test sees requests where they are in their lives
//! however fast or busy the machine is.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex};

use aquila_compute::cpu::{Operation, Watch};

/// Holds an engine before its passes, and makes them panic.
pub struct Gate {
    /// How many passes may begin; all where there is no number.
    passes: Mutex<Option<usize>>,
    changed: Condvar,
    faulty: AtomicBool,
}

impl Gate {
    pub fn closed() -> Self {
        Self {
            passes: Mutex::new(Some(0)),
            changed: Condvar::new(),
            faulty: AtomicBool::new(false),
        }
    }

    /// Has the next attention panic.
    pub fn inject_fault(&self) {
        self.faulty.store(true, Ordering::Release);
    }

    /// Lets so many passes begin, or all.
    pub fn allow(&self, passes: Option<usize>) {
        *self.passes.lock().unwrap() = passes;
        self.changed.notify_all();
    }

    /// Whether passes have to wait.
    pub fn holds(&self) -> bool {
        self.passes.lock().unwrap().is_some()
    }
}

impl Watch for Gate {
    fn begin(&self, operation: Operation) {
        // A pass begins with its embeddings.
        if operation == Operation::Embed {
            let passes = self.passes.lock().unwrap();
            let mut passes = self.changed.wait_while(passes, |passes| *passes == Some(0)).unwrap();
            if let Some(passes) = &mut *passes {
                *passes -= 1;
            }
        }
        if operation == Operation::Attend && self.faulty.swap(false, Ordering::AcqRel) {
            panic!("a fault was injected");
        }
    }
}
