//! How far what rounds cost is from what a table says, as logarithms, and how sure that is.
//!
//! A round that takes longer than the table says does so because the machine is slower than it was,
//! because all drafting is, or because the table is wrong about rounds of its kind. None of these is
//! seen alone, and all of them change. A Kalman filter follows them: what is common to all kinds,
//! what is common to those that draft, and one value for each kind. So a machine that becomes slower
//! is so for rounds too that are not run, and rounds of two kinds, one after the other, tell the
//! kinds apart.
//!
//! The one invariant: the covariance is symmetric, and rows of kinds that are not known are zero.

use super::rounds::Kind;

/// The variance of one round about what it costs on average.
const NOISE: f64 = 0.045 * 0.045;
/// By how many deviations a round counts at most: the others are hiccups.
const MOST_DEVIATIONS: f64 = 3.0;
/// What is common to all kinds, to those that draft, and a kind's own: how large each is expected to
/// be before anything was seen, and by how much it changes from round to round.
const MACHINE: Wander = Wander { variance: 0.3 * 0.3, change: 6e-5 };
const DRAFTING: Wander = Wander { variance: 0.1 * 0.1, change: 3e-7 };
const OWN: Wander = Wander { variance: 0.03 * 0.03, change: 4.5e-7 };
/// What is left of a kind's own part after a round: what a moment of the machine did to a kind that is
/// not run any more is forgotten, in time. It changes by as much as keeps its variance.
const KEPT: f64 = 1.0 - OWN.change / (2.0 * OWN.variance);

/// Where the machine and drafting are in the state; kinds are behind them.
const OF_MACHINE: usize = 0;
const OF_DRAFTING: usize = 1;
const KINDS: usize = 2;
/// Kinds that are followed at a time.
const MOST_KINDS: usize = 22;
const SIZE: usize = KINDS + MOST_KINDS;
/// Rounds that are let pass at once: together they change hardly anything.
const MOST_PASSED: u32 = 16;

struct Wander {
    variance: f64,
    change: f64,
}

/// The filter.
#[derive(Debug, Clone)]
pub(super) struct Drift {
    state: [f64; SIZE],
    covariance: Box<[[f64; SIZE]; SIZE]>,
    /// The kinds that are followed, and the round in which each was seen last.
    kinds: Vec<(Kind, u64)>,
    rounds: u64,
    /// Rounds that have passed since it was changed by that.
    passed: u32,
}

/// Parts of the state that a kind's rounds are the sum of.
#[derive(Debug, Clone, Copy)]
struct Parts {
    drafting: bool,
    own: Option<usize>,
}

impl Parts {
    fn sum(self, of: impl Fn(usize) -> f64) -> f64 {
        let drafting = if self.drafting { of(OF_DRAFTING) } else { 0.0 };
        of(OF_MACHINE) + drafting + self.own.map_or(0.0, of)
    }
}

impl Drift {
    /// Nothing was seen.
    pub(super) fn new() -> Self {
        let mut covariance = Box::new([[0.0; SIZE]; SIZE]);
        covariance[OF_MACHINE][OF_MACHINE] = MACHINE.variance;
        covariance[OF_DRAFTING][OF_DRAFTING] = DRAFTING.variance;
        Self { state: [0.0; SIZE], covariance, kinds: Vec::new(), rounds: 0, passed: 0 }
    }

    /// How much slower everything is.
    pub(super) fn of_machine(&self) -> f64 {
        self.state[OF_MACHINE]
    }

    /// How much slower rounds of this kind are.
    pub(super) fn of(&self, kind: Kind) -> f64 {
        self.parts(kind).sum(|at| self.state[at])
    }

    /// The deviation of how much slower rounds of one kind are than those of another.
    pub(super) fn doubt(&self, one: Kind, other: Kind) -> f64 {
        let (a, b) = (self.parts(one), self.parts(other));
        let between = |a: Parts, b: Parts| a.sum(|i| b.sum(|j| self.covariance[i][j]));
        let unknown = [a, b].iter().filter(|parts| parts.own.is_none()).count() as f64;
        let variance = between(a, a) + between(b, b) - 2.0 * between(a, b);
        (variance + unknown * OWN.variance).max(0.0).sqrt()
    }

    /// A round has passed.
    pub(super) fn pass(&mut self) {
        self.rounds += 1;
        self.passed += 1;
        if self.passed >= MOST_PASSED {
            self.change();
        }
    }

    /// Lets everything change as it may have in the rounds that have passed.
    fn change(&mut self) {
        let rounds = f64::from(std::mem::take(&mut self.passed));
        self.covariance[OF_MACHINE][OF_MACHINE] += rounds * MACHINE.change;
        self.covariance[OF_DRAFTING][OF_DRAFTING] += rounds * DRAFTING.change;
        let kept = 1.0 - rounds * (1.0 - KEPT);
        let known = KINDS + self.kinds.len();
        for at in KINDS..known {
            self.state[at] *= kept;
            for other in 0..known {
                self.covariance[at][other] *= kept;
                self.covariance[other][at] *= kept;
            }
            self.covariance[at][at] += rounds * OWN.change;
        }
    }

    /// A round of this kind was so much slower than the table says.
    pub(super) fn see(&mut self, kind: Kind, slower: f64) {
        self.change();
        let own = self.follow(kind);
        let parts = Parts { own: Some(own), ..self.parts(kind) };
        let known = KINDS + self.kinds.len();
        let mut gain = [0.0; SIZE];
        for (at, gain) in gain[..known].iter_mut().enumerate() {
            *gain = parts.sum(|part| self.covariance[at][part]);
        }
        let with_all = gain;
        let variance = parts.sum(|part| gain[part]) + NOISE;
        let most = MOST_DEVIATIONS * variance.sqrt();
        let off = (slower - parts.sum(|part| self.state[part])).clamp(-most, most);
        for gain in &mut gain[..known] {
            *gain /= variance;
        }
        for (at, &gain) in gain[..known].iter().enumerate() {
            self.state[at] += gain * off;
            for (other, &with_all) in with_all[..known].iter().enumerate() {
                self.covariance[at][other] -= gain * with_all;
            }
        }
    }

    fn parts(&self, kind: Kind) -> Parts {
        let own = self.kinds.iter().position(|&(known, _)| known == kind);
        Parts { drafting: kind.drafts(), own: own.map(|at| KINDS + at) }
    }

    /// Where the own part of a kind is, which is followed from now on: the one that was seen
    /// longest ago makes room.
    fn follow(&mut self, kind: Kind) -> usize {
        let now = self.rounds;
        if let Some(at) = self.kinds.iter().position(|&(known, _)| known == kind) {
            self.kinds[at].1 = now;
            return KINDS + at;
        }
        let at = if self.kinds.len() < MOST_KINDS {
            self.kinds.push((kind, now));
            self.kinds.len() - 1
        } else {
            let oldest = (0..MOST_KINDS).min_by_key(|&at| self.kinds[at].1).unwrap_or(0);
            self.kinds[oldest] = (kind, now);
            oldest
        };
        let at = KINDS + at;
        self.state[at] = 0.0;
        self.covariance[at] = [0.0; SIZE];
        self.covariance.iter_mut().for_each(|row| row[at] = 0.0);
        self.covariance[at][at] = OWN.variance;
        at
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Kind = Kind { batch: 1, rows: 2, steps: 0, topk: 1 };
    const CHAIN: Kind = Kind { batch: 1, rows: 4, steps: 1, topk: 1 };
    const LONGER: Kind = Kind { batch: 1, rows: 6, steps: 2, topk: 1 };

    fn see(drift: &mut Drift, kind: Kind, slower: f64, times: usize) {
        for _ in 0..times {
            drift.pass();
            drift.see(kind, slower);
        }
    }

    #[test]
    fn the_first_round_is_shared_out_by_how_large_each_part_may_be() {
        let mut drift = Drift::new();
        drift.see(CHAIN, 0.1);
        // By hand: variances of 0.09, 0.01 and 0.0009, and 0.002025 of noise.
        let all = 0.09 + 0.01 + 0.0009 + 0.002025;
        assert!((drift.of_machine() - 0.1 * 0.09 / all).abs() < 1e-12);
        assert!((drift.of(LONGER) - 0.1 * 0.1 / all).abs() < 1e-12);
        assert!((drift.of(CHAIN) - 0.1 * 0.1009 / all).abs() < 1e-12);
    }

    #[test]
    fn a_machine_that_becomes_slower_is_so_for_all_kinds_once_they_are_known() {
        let mut drift = Drift::new();
        see(&mut drift, PLAIN, 0.0, 100);
        see(&mut drift, CHAIN, 0.05, 100);
        see(&mut drift, CHAIN, 0.35, 200);
        assert!((drift.of(CHAIN) - 0.35).abs() < 0.01, "{}", drift.of(CHAIN));
        assert!((drift.of(PLAIN) - 0.3).abs() < 0.06, "{}", drift.of(PLAIN));
    }

    #[test]
    fn kinds_that_follow_one_another_are_told_apart() {
        let mut drift = Drift::new();
        see(&mut drift, PLAIN, 0.2, 200);
        see(&mut drift, CHAIN, 0.4, 30);
        assert!((drift.of(PLAIN) - 0.2).abs() < 0.04, "{}", drift.of(PLAIN));
        assert!((drift.of(CHAIN) - 0.4).abs() < 0.03, "{}", drift.of(CHAIN));
        // What drafts was slower than the table says, so what drafts longer may be.
        assert!(drift.of(LONGER) > 0.3, "{}", drift.of(LONGER));
    }

    #[test]
    fn doubt_shrinks_with_what_is_seen_of_both_and_grows_with_time() {
        let mut drift = Drift::new();
        let unknown = drift.doubt(CHAIN, PLAIN);
        assert!((unknown - (0.01_f64 + 2.0 * 0.0009).sqrt()).abs() < 1e-12, "{unknown}");
        see(&mut drift, CHAIN, 0.0, 100);
        let half = drift.doubt(CHAIN, PLAIN);
        see(&mut drift, PLAIN, 0.0, 8);
        let known = drift.doubt(CHAIN, PLAIN);
        assert!(known < 0.03 && known < half && half <= unknown, "{unknown} {half} {known}");
        see(&mut drift, CHAIN, 0.0, 3000);
        assert!(drift.doubt(CHAIN, PLAIN) > 1.5 * known);
    }

    #[test]
    fn more_kinds_than_are_followed_leave_room_for_the_last() {
        let mut drift = Drift::new();
        let kind = |rows| Kind { batch: 1, rows, steps: 1, topk: 1 };
        for rows in 0..3 * MOST_KINDS {
            see(&mut drift, kind(rows), 0.1 + 0.001 * rows as f64, 20);
        }
        assert_eq!(drift.kinds.len(), MOST_KINDS);
        let (last, first) = (kind(3 * MOST_KINDS - 1), kind(0));
        assert!((drift.of(last) - 0.165).abs() < 0.02, "{}", drift.of(last));
        assert!(drift.of(first).is_finite() && drift.doubt(first, last) > 0.0);
        for (i, row) in drift.covariance.iter().enumerate() {
            assert!((0..SIZE).all(|j| (row[j] - drift.covariance[j][i]).abs() < 1e-12));
        }
    }
}
