//! What went to and came from each peer, for metrics.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Peers that are told apart; later ones are counted together.
const MOST: usize = 256;

/// The counts of one peer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct PeerCounts {
    /// Requests whose rows went over as a whole.
    pub transfers: u64,
    /// Requests of which that failed.
    pub failures: u64,
    /// Bytes of messages about requests.
    pub bytes: u64,
    /// From the claim of a room to its first rows.
    pub waited: Duration,
    /// From the first rows of a room to its end.
    pub transferred: Duration,
}

/// The counts of all peers.
#[derive(Debug, Default)]
pub struct Peers {
    counts: Mutex<BTreeMap<String, PeerCounts>>,
    strangers: AtomicU64,
}

impl Peers {
    fn counts(&self) -> MutexGuard<'_, BTreeMap<String, PeerCounts>> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Counts something of a peer.
    pub(crate) fn count(&self, peer: &str, change: impl FnOnce(&mut PeerCounts)) {
        let mut counts = self.counts();
        let known = counts.contains_key(peer) || counts.len() < MOST;
        change(counts.entry(if known { peer } else { "others" }.to_owned()).or_default());
    }

    /// Counts a connection that did not become a peer.
    pub(crate) fn count_stranger(&self) {
        self.strangers.fetch_add(1, Ordering::Relaxed);
    }

    /// The counts by peer.
    pub fn snapshot(&self) -> Vec<(String, PeerCounts)> {
        self.counts().iter().map(|(peer, counts)| (peer.clone(), counts.clone())).collect()
    }

    /// Connections that were dropped before they were peers: they spoke something else, or did not
    /// fit.
    pub fn strangers(&self) -> u64 {
        self.strangers.load(Ordering::Relaxed)
    }
}
