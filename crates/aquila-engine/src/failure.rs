//! An engine that serves no more: why, and who wants to hear of it.
//!
//! The one invariant: a failure is final. It is known before any request ends for it, and no request is
//! taken after it.

use std::sync::{Mutex, OnceLock, PoisonError};

/// Why an engine serves no more, whatever it is asked.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum EngineFailure {
    /// The device computes no more in this process; what it reported.
    #[error("the device is lost: {0}")]
    DeviceLost(String),
    /// What runs rounds is not there any more.
    #[error("the executor's thread has ended")]
    ExecutorGone,
    /// The engine's own thread panicked; what it said.
    #[error("the engine's thread panicked: {0}")]
    Panicked(String),
}

/// Hears why an engine failed.
type Hears = Box<dyn FnOnce(&EngineFailure) + Send>;

/// Where the failure of an engine is noted.
#[derive(Default)]
pub(crate) struct FailureCell {
    failure: OnceLock<EngineFailure>,
    waiting: Mutex<Vec<Hears>>,
}

impl FailureCell {
    /// Why the engine failed, if it did.
    pub fn get(&self) -> Option<&EngineFailure> {
        self.failure.get()
    }

    /// Notes a failure and tells who waits for one; the first stays. Answers the one that counts.
    pub fn set(&self, failure: EngineFailure) -> &EngineFailure {
        let failure = self.failure.get_or_init(|| failure);
        let waiting = std::mem::take(&mut *self.lock());
        waiting.into_iter().for_each(|hears| hears(failure));
        failure
    }

    /// Has `hears` called once, when the engine fails, or now if it did.
    pub fn when_set(&self, hears: Hears) {
        let mut waiting = self.lock();
        match self.failure.get() {
            None => waiting.push(hears),
            Some(failure) => {
                drop(waiting);
                hears(failure);
            }
        }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<Hears>> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
