//! What is known of the parts of rounds, by key: met once, captured, or not to be captured.
//!
//! The one invariant: graphs and other keys have a bound each, and what was met longest ago goes
//! first. So keys that never come again take no room from graphs, nor do graphs of requests that
//! have gone.

use std::collections::HashMap;
use std::hash::Hash;

use super::CapturedPart;

/// Graphs that are kept at most.
const MOST_GRAPHS: usize = 1024;
/// Keys without a graph that are kept at most.
const MOST_KEYS: usize = 1024;

/// What is known of a key.
pub(super) enum Entry<G> {
    /// It was met once, and launched.
    Launched,
    /// The next round that meets it replays this.
    Captured(G, CapturedPart),
    /// The backend could not capture it, or could not replay what it had captured.
    Refused,
}

impl<G> Entry<G> {
    fn captured(&self) -> Option<&CapturedPart> {
        match self {
            Entry::Captured(_, part) => Some(part),
            Entry::Launched | Entry::Refused => None,
        }
    }
}

/// Entries by key, each with the time at which it was met last.
pub(super) struct Kept<K, G> {
    entries: HashMap<K, (u64, Entry<G>)>,
    most_graphs: usize,
    most_keys: usize,
    time: u64,
}

impl<K: Clone + Eq + Hash, G> Kept<K, G> {
    pub fn new() -> Self {
        Self::with_room(MOST_GRAPHS, MOST_KEYS)
    }

    fn with_room(most_graphs: usize, most_keys: usize) -> Self {
        Self { entries: HashMap::new(), most_graphs, most_keys, time: 0 }
    }

    /// What is known of a key that is met now.
    pub fn meet(&mut self, key: &K) -> Option<&mut Entry<G>> {
        self.time += 1;
        let (time, entry) = self.entries.get_mut(key)?;
        *time = self.time;
        Some(entry)
    }

    /// Notes what is known of a key now; another goes where there are too many like it.
    pub fn set(&mut self, key: K, entry: Entry<G>) {
        self.time += 1;
        let graph = entry.captured().is_some();
        let most = if graph { self.most_graphs } else { self.most_keys };
        self.entries.insert(key, (self.time, entry));
        let alike = |(_, (_, entry)): &(&K, &(u64, Entry<G>))| entry.captured().is_some() == graph;
        if self.entries.iter().filter(alike).count() > most {
            let oldest = self.entries.iter().filter(alike).min_by_key(|(_, (time, _))| *time);
            if let Some(oldest) = oldest.map(|(key, _)| key.clone()) {
                self.entries.remove(&oldest);
            }
        }
    }

    /// The parts that there are graphs of.
    pub fn captured(&self) -> Vec<CapturedPart> {
        self.entries.values().filter_map(|(_, entry)| entry.captured().copied()).collect()
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::GraphPart;
    use super::*;

    fn graph(rows: usize) -> Entry<()> {
        let (part, time) = (GraphPart::Verify, Duration::ZERO);
        Entry::Captured((), CapturedPart { part, rows, steps: 0, time, checks: 0 })
    }

    fn rows(kept: &Kept<usize, ()>) -> Vec<usize> {
        let mut rows: Vec<usize> = kept.captured().iter().map(|part| part.rows).collect();
        rows.sort_unstable();
        rows
    }

    #[test]
    fn the_graph_that_was_replayed_longest_ago_makes_room() {
        let mut kept = Kept::with_room(3, 1);
        (1..=3).for_each(|key| kept.set(key, graph(key)));
        assert!(kept.meet(&1).is_some());
        kept.set(4, graph(4));
        assert_eq!(rows(&kept), [1, 3, 4]);
        assert!(kept.meet(&2).is_none(), "it is captured anew when it is met twice");
    }

    #[test]
    fn keys_without_a_graph_take_no_room_from_graphs() {
        let mut kept = Kept::with_room(2, 3);
        (1..=2).for_each(|key| kept.set(key, graph(key)));
        (10..100).for_each(|key| kept.set(key, Entry::Launched));
        assert_eq!(rows(&kept), [1, 2]);
        // A key that was met lately is captured, whatever came between.
        assert!(matches!(kept.meet(&99), Some(Entry::Launched)));
        assert!(kept.meet(&96).is_none());
        kept.set(99, graph(99));
        assert_eq!(rows(&kept), [2, 99]);
    }

    #[test]
    fn a_refused_key_that_comes_again_stays_refused() {
        let mut kept = Kept::with_room(1, 2);
        kept.set(0, Entry::Refused);
        for key in 1..100 {
            kept.set(key, graph(key));
            kept.set(key + 1000, Entry::Launched);
            assert!(matches!(kept.meet(&0), Some(Entry::Refused)), "after {key} others");
        }
    }
}
