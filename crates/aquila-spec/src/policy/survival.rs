//! How likely drafts are to be right: by depth and branch rank for all requests, by a factor for
//! each request, by a factor for how sure the draft says it is.
//!
//! The one invariant: what has not been seen is taken to be as what is nearest to it: a request as
//! all requests, a depth as the one above it.

use std::collections::HashMap;

use super::RequestOutcome;

/// Depths that are told apart; deeper ones are taken to be as the last.
const DEPTHS: usize = 16;
/// Ranks that are told apart.
const RANKS: usize = 8;
/// Rounds, and drafts, after which the memory has forgotten all but a third; whichever come first.
const MEMORY_ROUNDS: f64 = 150.0;
const MEMORY_TRIALS: f64 = 600.0;
/// The same for rounds in which drafts were only watched: they are few, and old ones mislead.
const WATCHED_ROUNDS: f64 = 32.0;
/// The same for a depth that is not drafted: it becomes unknown again, and worth a try.
const IDLE_ROUNDS: f64 = 30.0;
/// How many nats a change of the odds must explain a run of results better than none before what
/// was known is given up. Rounds with more trials need half a nat more for each e-fold.
const CHANGE: f64 = 5.5;
/// The same where drafts were only watched: to be misled costs a few rounds, to be late many.
const CHANGE_WATCHED: f64 = 4.5;
/// The change of the log-odds that is looked for.
const TILT: f64 = 2.0;
/// Trials that the depth above counts for.
const PULL_DEPTH: f64 = 4.0;
/// Trials that the guess before anything was seen counts for.
const PULL_FIRST: f64 = 1.0;
/// Trials that what was known counts for after a change.
const AFTERTHOUGHT: f64 = 2.0;
/// Trials that all requests count for in the factor of one.
const PULL_REQUEST: f64 = 12.0;
/// Trials that a request's factor remembers.
const REQUEST_TRIALS: f64 = 60.0;
/// The share of misses after which a second, third, … candidate is right, before anything is
/// known.
const FIRST_SHARES: [f64; RANKS] = [0.0, 0.30, 0.14, 0.09, 0.06, 0.045, 0.035, 0.03];
const SURE: f64 = 0.995;

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

    fn fade(&mut self, by: f64) {
        self.right *= by;
        self.trials *= by;
    }

    fn rate(&self, prior: f64, weight: f64) -> f64 {
        (self.right + weight * prior) / (self.trials + weight)
    }
}

/// What was right against what was expected, as a factor on the odds.
#[derive(Debug, Clone, Copy, Default)]
struct Odds {
    right: f64,
    wrong: f64,
    expected_right: f64,
    expected_wrong: f64,
}

impl Odds {
    fn add(&mut self, right: bool, expected: f64, keep: f64) {
        let (hit, miss) = if right { (1.0, 0.0) } else { (0.0, 1.0) };
        self.right = self.right * keep + hit;
        self.wrong = self.wrong * keep + miss;
        self.expected_right = self.expected_right * keep + expected;
        self.expected_wrong = self.expected_wrong * keep + (1.0 - expected);
    }

    fn factor(&self, pull: f64) -> f64 {
        let pull = pull / 2.0;
        (self.right + pull) / (self.expected_right + pull) * (self.expected_wrong + pull)
            / (self.wrong + pull)
    }
}

/// A cumulative sum test for odds that have changed one way.
#[derive(Debug, Clone, Default)]
struct Drift {
    /// Nats by which the results since `since` began speak for a change.
    sum: f64,
    since: [Tally; DEPTHS],
}

impl Drift {
    /// Takes in a round's tallies, judged by the rates before it.
    fn see(&mut self, round: &[Tally; DEPTHS], rates: &[f64; DEPTHS], tilt: f64) {
        for (tally, &rate) in round.iter().zip(rates).filter(|(tally, _)| tally.trials > 0.0) {
            // What is almost never right hardly gets worse, nor the opposite better.
            if if tilt > 0.0 { rate > 0.95 } else { rate < 0.05 } {
                continue;
            }
            let rate = rate.clamp(0.02, 0.98);
            let tilted = rate * tilt.exp() / (1.0 - rate + rate * tilt.exp());
            self.sum += tally.right * (tilted / rate).ln();
            self.sum += (tally.trials - tally.right) * ((1.0 - tilted) / (1.0 - rate)).ln();
        }
        if self.sum <= 0.0 {
            *self = Self::default();
            return;
        }
        for (since, tally) in self.since.iter_mut().zip(round) {
            since.right += tally.right;
            since.trials += tally.trials;
        }
    }
}

/// Running survival rates.
#[derive(Debug, Clone)]
pub struct Survival {
    memory: [Tally; DEPTHS],
    better: Drift,
    worse: Drift,
    shares: [Tally; RANKS],
    sureness: [Odds; 8],
    requests: HashMap<u64, Odds>,
    rates: [f64; DEPTHS],
    first: f64,
}

impl Survival {
    /// Nothing known but what is likely of a first draft.
    pub fn new(first: f64) -> Self {
        Self {
            memory: Default::default(),
            better: Drift::default(),
            worse: Drift::default(),
            shares: Default::default(),
            sureness: Default::default(),
            requests: HashMap::new(),
            rates: [first; DEPTHS],
            first,
        }
    }

    /// The rate at which the best draft of this depth (from 1) is right where its parent was.
    pub fn rate(&self, depth: usize) -> f64 {
        self.rates[depth.clamp(1, DEPTHS) - 1]
    }

    /// The rate at which the candidate of this rank is right, where its parent was.
    pub fn rate_of_rank(&self, depth: usize, rank: usize) -> f64 {
        match rank {
            0 => self.rate(depth),
            _ => (1.0 - self.rate(depth)) * self.share(rank),
        }
    }

    fn share(&self, rank: usize) -> f64 {
        let rank = rank.min(RANKS - 1);
        self.shares[rank].rate(FIRST_SHARES[rank], 20.0)
    }

    /// By how much the odds of a request's drafts are better than those of all.
    pub fn factor(&self, request: u64) -> f64 {
        self.requests.get(&request).map_or(1.0, |odds| odds.factor(PULL_REQUEST))
    }

    /// By how much the odds of a first draft are better where the draft is so sure of it.
    pub fn factor_of_confidence(&self, confidence: Option<f32>) -> f64 {
        confidence.map_or(1.0, |sure| self.sureness[bucket(sure)].factor(20.0))
    }

    /// The rate of a depth with odds that are better by a factor.
    pub fn rate_by(&self, depth: usize, factor: f64) -> f64 {
        let rate = self.rate(depth);
        let odds = rate / (1.0 - rate).max(1.0 - SURE) * factor;
        (odds / (1.0 + odds)).min(SURE)
    }

    /// How many nats the latest results speak for better odds than those known.
    pub fn promise(&self) -> f64 {
        self.better.sum
    }

    /// First drafts that the rates rest on.
    pub fn known(&self) -> f64 {
        self.memory[0].trials
    }

    /// Forgets a request.
    pub fn leave(&mut self, request: u64) {
        self.requests.remove(&request);
    }

    /// Takes in the drafts of a round; says whether they show that the text has changed. Then what
    /// was known of all requests is given up for what came since. `probed` says that they were only
    /// to find out, as few are.
    pub fn learn(&mut self, outcomes: &[RequestOutcome<'_>], probed: bool) -> bool {
        let mut round = [Tally::default(); DEPTHS];
        for outcome in outcomes {
            self.learn_one(outcome, &mut round);
        }
        let trials: f64 = round.iter().map(|tally| tally.trials).sum();
        if trials == 0.0 {
            return false;
        }
        let rounds = if probed { WATCHED_ROUNDS } else { MEMORY_ROUNDS };
        let keep = (1.0 - 1.0 / rounds).min(1.0 - trials / (trials + MEMORY_TRIALS));
        for (memory, tally) in self.memory.iter_mut().zip(&round) {
            let idle = tally.trials == 0.0;
            memory.fade(if idle { keep.min(1.0 - 1.0 / IDLE_ROUNDS) } else { keep });
            memory.right += tally.right;
            memory.trials += tally.trials;
        }
        self.better.see(&round, &self.rates, TILT);
        self.worse.see(&round, &self.rates, -TILT);
        let needed = if probed { CHANGE_WATCHED } else { CHANGE } + 0.5 * trials.ln();
        let drift = if self.better.sum > self.worse.sum { &self.better } else { &self.worse };
        let changed = drift.sum > needed;
        if changed {
            // The run that shows a change is more extreme than what comes after it.
            let old = Tally { right: AFTERTHOUGHT * self.rates[0], trials: AFTERTHOUGHT };
            self.memory = drift.since;
            self.memory[0].right += old.right;
            self.memory[0].trials += old.trials;
            self.better = Drift::default();
            self.worse = Drift::default();
        }
        self.estimate();
        changed
    }

    fn learn_one(&mut self, outcome: &RequestOutcome<'_>, round: &mut [Tally; DEPTHS]) {
        let keep_request = 1.0 - 1.0 / REQUEST_TRIALS;
        let (correct, refused) = match (outcome.shape.steps(), outcome.watched) {
            (0, Some(right)) => (usize::from(right), usize::from(!right)),
            _ => (outcome.correct, outcome.refused),
        };
        for depth in 1..=correct + usize::from(refused > 0) {
            let wrong = depth > correct;
            let rank = outcome.ranks.get(depth - 1).map_or(0, |&rank| rank as usize);
            let right = !wrong && rank == 0;
            let at = depth.min(DEPTHS) - 1;
            let expected = self.rates[at];
            round[at].add(right);
            self.requests.entry(outcome.id).or_default().add(right, expected, keep_request);
            if let (1, Some(sure)) = (depth, outcome.confidence) {
                self.sureness[bucket(sure)].add(right, expected, 0.99);
            }
            if !right {
                let offered = if wrong { refused } else { rank + 1 };
                for other in 1..offered.min(RANKS) {
                    self.shares[other].fade(0.995);
                    self.shares[other].add(!wrong && other == rank);
                }
            }
        }
    }

    fn estimate(&mut self) {
        let (mut prior, mut pull) = (self.first, PULL_FIRST);
        for (rate, tally) in self.rates.iter_mut().zip(&self.memory) {
            *rate = tally.rate(prior, pull).min(SURE);
            (prior, pull) = (*rate, PULL_DEPTH);
        }
    }
}

fn bucket(sure: f32) -> usize {
    ((sure.clamp(0.0, 1.0) * 8.0) as usize).min(7)
}
