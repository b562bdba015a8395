//! Warnings that come again and again: at most one of a kind in a second is written.
//!
//! A kind is a place in the code, whatever the values in its text. Those that are held back are
//! counted, and the next one of their kind that is written says how many.

use std::collections::HashMap;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use tracing::callsite::Identifier;

/// How far apart lines of a kind are.
const APART: Duration = Duration::from_secs(1);

/// What was written of each kind of warning.
#[derive(Default)]
pub struct Repeats(Mutex<HashMap<Identifier, Written>>);

struct Written {
    last: Instant,
    held_back: u64,
}

impl Repeats {
    /// Whether a warning of this kind is written now, and how many of its kind were held back
    /// since the last.
    pub fn admit(&self, kind: Identifier, now: Instant) -> Option<u64> {
        // Every change is a single step, so a panic leaves it whole.
        let mut kinds = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(written) = kinds.get_mut(&kind) else {
            kinds.insert(kind, Written { last: now, held_back: 0 });
            return Some(0);
        };
        if now.duration_since(written.last) < APART {
            written.held_back += 1;
            return None;
        }
        written.last = now;
        Some(std::mem::take(&mut written.held_back))
    }
}
