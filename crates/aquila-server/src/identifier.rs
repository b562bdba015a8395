//! Names of requests that no other request has.

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::sync::atomic::{AtomicU64, Ordering};

/// Makes names; those of two makers differ too.
#[derive(Debug, Default)]
pub(crate) struct Identifiers {
    keys: (RandomState, RandomState),
    next: AtomicU64,
}

impl Identifiers {
    /// A name for a call of a tool.
    pub fn call(&self) -> String {
        self.next("call_")
    }

    /// A new name.
    pub fn next(&self, prefix: &str) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!(
            "{prefix}{:016x}{:016x}",
            self.keys.0.hash_one(number),
            self.keys.1.hash_one(number)
        )
    }
}
