//! Counters that others may read while the engine runs.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use aquila_spec::SpecStats;
use aquila_spec::policy::{CostTable, PolicyState, Setting};

use crate::awaited::Awaited;
use crate::times::Times;

/// Counters of a running engine.
#[derive(Debug, Default)]
pub struct Stats {
    pub(crate) waiting: AtomicUsize,
    pub(crate) running: AtomicUsize,
    pub(crate) used_slots: AtomicUsize,
    pub(crate) total_slots: AtomicUsize,
    pub(crate) rounds: AtomicU64,
    pub(crate) prompt_tokens: AtomicU64,
    pub(crate) cached_tokens: AtomicU64,
    pub(crate) completion_tokens: AtomicU64,
    pub(crate) preemptions: AtomicU64,
    pub(crate) finished: AtomicU64,
    pub(crate) failed_rounds: AtomicU64,
    pub(crate) receiving: AtomicUsize,
    pub(crate) handed_over: AtomicU64,
    pub(crate) received: AtomicU64,
    pub(crate) rebuilt_drafts: AtomicU64,
    pub(crate) lost_drafts: AtomicU64,
    pub(crate) awaited: Awaited,
    speculation: Mutex<SpecStats>,
    drafting: Mutex<DraftingState>,
    times: Mutex<Times>,
}

/// The counters at one moment.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Snapshot {
    /// Requests that wait.
    pub waiting: usize,
    /// Requests that hold KV.
    pub running: usize,
    /// Slots that requests hold; cached prefixes that no request uses count as free.
    pub used_slots: usize,
    /// Slots of the pool.
    pub total_slots: usize,
    /// Rounds run.
    pub rounds: u64,
    /// Prompt rows computed.
    pub prompt_tokens: u64,
    /// Prompt tokens found in the prefix cache.
    pub cached_tokens: u64,
    /// Tokens of answers.
    pub completion_tokens: u64,
    /// Requests that lost their KV to others.
    pub preemptions: u64,
    /// Requests that ended.
    pub finished: u64,
    /// Rounds that failed.
    pub failed_rounds: u64,
    /// Requests that have slots and whose rows come from another engine.
    pub receiving: usize,
    /// Requests whose prompt was processed here for another engine.
    pub handed_over: u64,
    /// Requests whose prompt was processed by another engine.
    pub received: u64,
    /// Those of them whose last rows were run again, for their drafts to go on.
    pub rebuilt_drafts: u64,
    /// Those of them that came without rows of their draft and are decoded plainly.
    pub lost_drafts: u64,
}

/// How the trees of rounds are decided.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct DraftingState {
    /// Where the policy stands.
    pub policy: PolicyState,
    /// What it was told rounds cost, if it asked.
    pub costs: Option<Arc<CostTable>>,
    /// What the last round was decided with.
    pub setting: Option<Setting>,
    /// Rounds that the policy expected something of, as of all that follows.
    pub rounds: u64,
    /// Tokens that it expected of them.
    pub expected_tokens: f64,
    /// Tokens that they yielded.
    pub real_tokens: u64,
    /// Requests whose draft was paused for longer than the target's hidden states are kept, and
    /// which are decoded plainly from then on.
    pub left_plain: u64,
}

impl Stats {
    /// How the trees of rounds are decided.
    pub fn drafting(&self) -> DraftingState {
        self.drafting.lock().map(|state| state.clone()).unwrap_or_default()
    }

    pub(crate) fn change_drafting(&self, change: impl FnOnce(&mut DraftingState)) {
        if let Ok(mut state) = self.drafting.lock() {
            change(&mut state);
        }
    }

    /// What came of drafting, over all requests that have ended.
    pub fn speculation(&self) -> SpecStats {
        self.speculation.lock().map(|sum| sum.clone()).unwrap_or_default()
    }

    pub(crate) fn add_speculation(&self, spec: &SpecStats) {
        if let Ok(mut sum) = self.speculation.lock() {
            sum.add(spec);
        }
    }

    /// Where the time of decoding went so far.
    pub fn times(&self) -> Times {
        self.times.lock().map(|sum| *sum).unwrap_or_default()
    }

    pub(crate) fn add_times(&self, times: &Times) {
        if let Ok(mut sum) = self.times.lock() {
            sum.add(times);
        }
    }

    /// How long the oldest round on its way has been awaited until `now`; none where no round is.
    pub fn awaited(&self, now: Instant) -> Option<Duration> {
        self.awaited.time(now)
    }

    /// The counters as they are now.
    pub fn snapshot(&self) -> Snapshot {
        Snapshot {
            waiting: self.waiting.load(Relaxed),
            running: self.running.load(Relaxed),
            used_slots: self.used_slots.load(Relaxed),
            total_slots: self.total_slots.load(Relaxed),
            rounds: self.rounds.load(Relaxed),
            prompt_tokens: self.prompt_tokens.load(Relaxed),
            cached_tokens: self.cached_tokens.load(Relaxed),
            completion_tokens: self.completion_tokens.load(Relaxed),
            preemptions: self.preemptions.load(Relaxed),
            finished: self.finished.load(Relaxed),
            failed_rounds: self.failed_rounds.load(Relaxed),
            receiving: self.receiving.load(Relaxed),
            handed_over: self.handed_over.load(Relaxed),
            received: self.received.load(Relaxed),
            rebuilt_drafts: self.rebuilt_drafts.load(Relaxed),
            lost_drafts: self.lost_drafts.load(Relaxed),
        }
    }
}
