//! Drafts that are verified now and then among plain rounds, to find out whether they would pay.

use super::plans::Choice;
use super::{Auto, RoundView};

/// Rounds before plain decoding is first interrupted by a probe, and the most between two: each
/// that finds nothing doubles the time to the next.
const PROBE_INTERVAL: (u32, u32) = (32, 256);
/// Drafts that a probe verifies, and requests whose drafts it verifies in one round.
const PROBE_TRIALS: usize = 8;
const PROBED_REQUESTS: usize = 4;
/// Trials that what was known before a probe counts for.
const PROBE_KEEPS: f64 = 4.0;
/// How close to plain decoding a probe must find drafting for the next to come soon.
const PROMISING: f64 = 0.98;

/// Verified drafts among plain rounds.
#[derive(Debug, Clone, Copy)]
pub(super) struct Probes {
    /// Rounds from one probe to the next, and those since the last.
    pub interval: u32,
    pub since: u32,
    /// Drafts that the probe under way is still to verify.
    pub left: usize,
    pub count: u64,
}

impl Probes {
    pub const START: Self = Self { interval: PROBE_INTERVAL.0, since: 0, left: 0, count: 0 };

    pub fn is_due(&self) -> bool {
        self.left > 0 || self.since >= self.interval
    }

    /// Plain decoding begins after so many rounds that drafted. If they were few, a probe was
    /// mistaken, and the next is not to come sooner for it.
    pub fn pause(&mut self, drafted: u32) {
        let interval = if drafted > self.interval { PROBE_INTERVAL.0 } else { self.interval };
        *self = Self { interval, since: 0, left: 0, ..*self };
    }
}

impl Auto {
    /// The requests of a plain round whose drafts are verified to find out how they do, and the
    /// steps; none while no probe is due, or where one cannot be afforded.
    pub(super) fn probe(&mut self, round: &RoundView<'_>, choice: &Choice) -> (Vec<usize>, usize) {
        self.probes.since = self.probes.since.saturating_add(1);
        let none = (Vec::new(), 0);
        let Some(best) = choice.best_drafting() else { return none };
        if !choice.could_pay || !self.probes.is_due() {
            return none;
        }
        let mut requests: Vec<usize> =
            (0..choice.batch).filter(|&at| round.requests[at].most_steps() > 0).collect();
        requests.sort_by_key(|&at| round.requests[at].behind);
        requests.truncate(PROBED_REQUESTS);
        let begins = self.probes.left == 0;
        let trials = if begins { PROBE_TRIALS } else { self.probes.left };
        let plain = self.plain(choice.batch);
        let rows = choice.batch + requests.len() * best.steps;
        let extra = self.seconds(choice.batch, rows, requests.len(), best.steps) / plain - 1.0;
        let missed: usize = requests.iter().map(|&at| round.requests[at].behind).sum();
        if !self.account.affords(self.catch_up(missed) / plain + extra) {
            return none;
        }
        if begins {
            self.acceptance.discount(PROBE_KEEPS);
            self.probes.count += 1;
        }
        self.probes.left = trials.saturating_sub(requests.len());
        if self.probes.left == 0 {
            let promising = best.speed() > choice.plans[0].speed() * PROMISING;
            let next = if promising { PROBE_INTERVAL.0 } else { 2 * self.probes.interval };
            self.probes.interval = next.min(PROBE_INTERVAL.1);
            self.probes.since = 0;
        }
        (requests, best.steps)
    }
}
