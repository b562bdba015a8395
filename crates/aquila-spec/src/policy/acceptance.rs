//! How likely drafts are to be accepted: running rates by depth and by rank among siblings, and a
//! rate for each request, shrunk to that of all.
//!
//! The one invariant: a depth that was not tried lately counts as the one above it, and a request
//! of which little is known as all requests.

use std::collections::HashMap;

use super::RequestOutcome;

/// Depths and ranks that are told apart; deeper and later ones count as the last.
const DEPTHS: usize = 16;
const RANKS: usize = 8;
/// Drafted rounds that are remembered, and trials of one request.
const MEMORY: f64 = 48.0;
/// Trials without which the depth above counts in place of those that are missing.
const ENOUGH: f64 = 4.0;
/// Trials that all requests count for in the rate of one.
const OF_ALL: f64 = 16.0;
/// How likely a candidate of rank 1 or later is to be right where those before it were not, before
/// anything is known.
const FIRST_LATER_RATE: f64 = 0.2;
/// A rate is never taken to be certain, nor its opposite.
const MOST: f64 = 0.99;
/// Answers whose lengths are remembered, and the tokens of one before any has ended.
const ANSWERS: f64 = 16.0;
const FIRST_ANSWER: f64 = 128.0;

/// Trials and how many of them were right, with older ones fading.
#[derive(Debug, Clone, Copy, Default)]
struct Tally {
    right: f64,
    trials: f64,
}

impl Tally {
    fn add(&mut self, right: bool) {
        self.trials += 1.0;
        self.right += f64::from(u8::from(right));
    }

    fn fade(&mut self, keep: f64) {
        self.right *= keep;
        self.trials *= keep;
    }

    fn rate(&self, prior: f64) -> f64 {
        let missing = (ENOUGH - self.trials).max(0.0);
        ((self.right + missing * prior) / (self.trials + missing)).clamp(1.0 - MOST, MOST)
    }
}

/// What is remembered of one request.
#[derive(Debug, Clone, Copy, Default)]
struct Record {
    drafts: Tally,
    tokens: usize,
}

/// The rates.
#[derive(Debug, Clone)]
pub struct Acceptance {
    first_rate: f64,
    /// Of the first candidate at each depth, where its parent was accepted.
    depths: [Tally; DEPTHS],
    /// Of a candidate of each rank, where its parent was accepted and its earlier siblings were not.
    ranks: [Tally; RANKS],
    /// Of all drafts of all requests.
    all: Tally,
    requests: HashMap<u64, Record>,
    answer: f64,
}

impl Acceptance {
    /// Nothing is known but how likely a first draft is thought to be right.
    pub fn new(first_rate: f64) -> Self {
        Self {
            first_rate,
            depths: Default::default(),
            ranks: Default::default(),
            all: Tally::default(),
            requests: HashMap::new(),
            answer: FIRST_ANSWER,
        }
    }

    /// Whether drafts were ever verified.
    pub fn is_known(&self) -> bool {
        self.all.trials > 0.0
    }

    /// The rates of the first candidate at depths 1 to `steps`, each given that its parent was
    /// accepted.
    pub fn by_depth(&self, steps: usize) -> Vec<f64> {
        let mut above = self.first_rate;
        let rate = |depth: usize| {
            above = self.depths[depth.min(DEPTHS) - 1].rate(above);
            above
        };
        (1..=steps).map(rate).collect()
    }

    /// The rate of a candidate of this rank, given that its parent was accepted and its earlier
    /// siblings were not.
    pub fn of_rank(&self, rank: usize) -> f64 {
        self.ranks[rank.min(RANKS - 1)].rate(FIRST_LATER_RATE)
    }

    /// By how much a request's rate differs from that of all, as a factor.
    pub fn of_request(&self, request: u64) -> f64 {
        let all = self.all.rate(self.first_rate);
        let own = |Record { drafts, .. }: &Record| {
            (drafts.right + OF_ALL * all) / (drafts.trials + OF_ALL) / all
        };
        self.requests.get(&request).map_or(1.0, own)
    }

    /// The rate of a request's drafts, whatever their depth.
    pub fn rate_of(&self, request: u64) -> f64 {
        (self.of_request(request) * self.all.rate(self.first_rate)).min(MOST)
    }

    /// Tokens of an answer, on average.
    pub fn answer_tokens(&self) -> f64 {
        self.answer
    }

    /// Learns from the requests of a round.
    pub fn learn(&mut self, outcomes: &[RequestOutcome<'_>]) {
        for outcome in outcomes {
            self.requests.entry(outcome.id).or_default().tokens += outcome.correct + 1;
        }
        if outcomes.iter().all(|outcome| outcome.correct + outcome.refused == 0) {
            return;
        }
        self.tallies().for_each(|tally| tally.fade(1.0 - 1.0 / MEMORY));
        for outcome in outcomes {
            let own = &mut self.requests.entry(outcome.id).or_default().drafts;
            own.fade(1.0 - 1.0 / MEMORY);
            for at in 0..outcome.correct + usize::from(outcome.refused > 0) {
                let right = at < outcome.correct;
                let rank = outcome.ranks.get(at).map_or(0, |&rank| usize::from(rank));
                let depth = &mut self.depths[at.min(DEPTHS - 1)];
                for tally in [depth, own, &mut self.all] {
                    tally.add(right && rank == 0);
                }
                // Those before the accepted one were wrong, or all that there were.
                let tried = if right { rank + 1 } else { outcome.refused };
                for (sibling, tally) in self.ranks.iter_mut().enumerate().take(tried).skip(1) {
                    tally.add(right && sibling == rank);
                }
            }
        }
    }

    /// Lets what was learned so far count for at most so many trials.
    pub fn discount(&mut self, trials: f64) {
        self.tallies().for_each(|tally| tally.fade((trials / tally.trials).min(1.0)));
    }

    fn tallies(&mut self) -> impl Iterator<Item = &mut Tally> {
        self.depths.iter_mut().chain(&mut self.ranks).chain([&mut self.all])
    }

    /// A request has ended.
    pub fn leave(&mut self, request: u64) {
        if let Some(record) = self.requests.remove(&request).filter(|record| record.tokens > 0) {
            self.answer += (record.tokens as f64 - self.answer) / ANSWERS;
        }
    }
}
