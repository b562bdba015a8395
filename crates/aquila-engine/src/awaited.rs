//! Since when a round is awaited, for whoever watches over the engine.
//!
//! The one invariant: writing costs the engine a store of moments that it knows anyway.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::{Duration, Instant};

/// The moment since which the oldest round on its way is awaited.
#[derive(Debug)]
pub(crate) struct Awaited {
    base: Instant,
    /// In microseconds after the base, counted from 1; 0 where no round is on its way.
    since: AtomicU64,
}

impl Default for Awaited {
    fn default() -> Self {
        Self { base: Instant::now(), since: AtomicU64::new(0) }
    }
}

impl Awaited {
    /// A round is awaited since this moment.
    pub fn begin(&self, at: Instant) {
        self.since.store(at.saturating_duration_since(self.base).as_micros() as u64 + 1, Relaxed);
    }

    /// No round is on its way.
    pub fn end(&self) {
        self.since.store(0, Relaxed);
    }

    /// How long a round has been awaited until `now`, if one is.
    pub fn time(&self, now: Instant) -> Option<Duration> {
        let since = self.since.load(Relaxed).checked_sub(1)?;
        Some(now.saturating_duration_since(self.base + Duration::from_micros(since)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_round_is_awaited_from_its_beginning_to_its_end() {
        let awaited = Awaited::default();
        let at = |seconds| awaited.base + Duration::from_secs(seconds);
        assert_eq!(awaited.time(at(9)), None);
        awaited.begin(at(2));
        assert_eq!(awaited.time(at(9)), Some(Duration::from_secs(7)));
        assert_eq!(awaited.time(at(1)), Some(Duration::ZERO));
        awaited.begin(at(5));
        assert_eq!(awaited.time(at(9)), Some(Duration::from_secs(4)));
        awaited.end();
        assert_eq!(awaited.time(at(9)), None);
    }
}
