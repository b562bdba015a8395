//! What `auto` does about costs that it is not sure of: it decodes plainly for a while when drafting
//! may not be ahead, and drafts for a while when it may be.
//!
//! To begin and to end drafting costs something where a model and its draft share a cache, so a
//! change is for several rounds, and the first of them say little.

use super::super::rounds::UNLIKE;
use super::super::worth::{Choice, Plan, group, weigh};
use super::super::{RequestView, RoundOutcome, RoundView};
use super::Auto;

/// Plain rounds in a row while drafting, to compare with: some are after others unlike them.
const COMPARED: u32 = UNLIKE + 5;
/// Rounds between two comparisons at least.
const COMPARED_EVERY: u32 = 400;
/// The doubt about what drafting costs beside plain decoding that calls for a comparison, also as a
/// share of how far drafting is ahead.
const DOUBT: f64 = 0.02;
const DOUBT_OF_LEAD: f64 = 0.5;
/// Rounds that are drafted in a row to find out what they cost, and rounds between two such tries.
pub(super) const TRIED: u32 = UNLIKE + 5;
const TRIED_EVERY: u64 = 256;
/// Rounds for which plain decoding is held before drafting is tried for that.
const SETTLED: u32 = 64;
/// The most that doubt about costs makes drafts look better.
const MOST_HOPE: f64 = 0.1;

/// What it does about them.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Doubts {
    /// The round in which drafting was last tried to find out what it costs.
    tried: u64,
    /// Rounds since the last comparison with plain ones, and those of it that are left.
    since_compared: u32,
    left_to_compare: u32,
    aside: Option<Aside>,
}

/// The return of a draft among plain rounds.
#[derive(Debug, Clone, Copy)]
struct Aside {
    /// Seconds that it was expected to take.
    expected: f64,
    /// Those that it and the rounds after it took longer than without it.
    took: f64,
    /// Rounds after it.
    rounds: u32,
}

impl Auto {
    /// Whether it is but what drafts say of their next tokens that speaks for drafting, where plain
    /// decoding is held, or against it. To begin and to end costs more than a round can give.
    pub(super) fn is_of_the_moment(&self, round: &RoundView<'_>, most_seconds: f64) -> bool {
        if round.requests.iter().all(|request| request.confidence.is_none()) {
            return false;
        }
        let view = |&request: &RequestView| RequestView { confidence: None, ..request };
        let views: Vec<RequestView> = round.requests.iter().map(view).collect();
        let (mut groups, mut group_of) = (Vec::new(), Vec::new());
        group(&views, &self.survival, &mut groups, &mut group_of);
        let ladders = (&self.ladders[..], &groups[..]);
        let best = weigh(ladders, &self.costs, views.len(), self.held, most_seconds).best;
        best.ladder.is_some() == self.held.ladder.is_some()
    }

    /// A plan that drafts while plain decoding is held, though it does not look faster: it may be,
    /// for all that is known of its cost.
    pub(super) fn try_out(&mut self, choice: &Choice, batch: usize) -> Option<Plan> {
        let plan = choice.drafting.filter(|_| self.held.ladder.is_none())?;
        let due = self.doubts.tried == 0
            || (self.held_rounds >= SETTLED && self.rounds >= self.doubts.tried + TRIED_EVERY);
        let topk = plan.ladder.map_or(1, |at| self.ladders[at].largest.topk());
        let hope = || self.costs.doubt(batch, plan.rows, plan.steps, topk).min(MOST_HOPE).exp();
        let least = self.held.speed() * (1.0 + self.settings.margin_to_draft);
        let known = self.survival.known() > 0.0 && self.is_affluent();
        if !(due && known && self.may_pay(batch) && plan.speed() * hope() > least) {
            return None;
        }
        self.doubts.tried = self.rounds;
        Some(plan)
    }

    /// Whether a round of a plan that drafts is decoded plainly to hear what that takes now: where
    /// it is not known well enough by how much the plan is ahead.
    pub(super) fn compares(&mut self, plan: &Plan, batch: usize, plain_seconds: f64) -> bool {
        let Some(ladder) = plan.ladder.map(|at| &self.ladders[at]) else {
            self.doubts.left_to_compare = 0;
            return false;
        };
        if self.doubts.left_to_compare == 0 {
            self.doubts.since_compared = self.doubts.since_compared.saturating_add(1);
            if self.doubts.since_compared < COMPARED_EVERY || self.held_rounds <= UNLIKE {
                return false;
            }
            let ahead = plan.speed() * plain_seconds / batch as f64 - 1.0;
            let topk = ladder.largest.topk();
            let doubt = self.costs.doubt(batch, plan.rows, plan.steps, topk);
            if doubt <= DOUBT.max(DOUBT_OF_LEAD * ahead) {
                return false;
            }
            self.doubts.since_compared = 0;
            self.doubts.left_to_compare = COMPARED;
        }
        self.doubts.left_to_compare -= 1;
        true
    }

    /// Takes in what a round took that was `like_the_table`, or in which drafts returned that were
    /// expected to take so many seconds for that.
    pub(super) fn take_in_costs(
        &mut self,
        outcome: &RoundOutcome<'_>,
        like_the_table: bool,
        returns: f64,
    ) {
        let (batch, rows, topk) = self.count(outcome.requests.iter().map(|r| r.shape));
        let expected = |this: &Self| this.costs.round(batch, rows, &this.at_level, topk);
        if let Some(mut aside) = self.doubts.aside.take() {
            // The rounds after it find less of what they need in the caches.
            let after = outcome.seconds.filter(|_| like_the_table && self.at_level.is_empty());
            aside.took += after.map_or(0.0, |seconds| seconds - expected(self));
            aside.rounds += 1;
            if after.is_some() && aside.rounds < UNLIKE {
                self.doubts.aside = Some(aside);
            } else {
                self.costs.refine_return(aside.expected, aside.took);
            }
        }
        match outcome.seconds {
            Some(seconds) if like_the_table => {
                self.costs.refine((batch, rows), &self.at_level, topk, seconds);
            }
            seconds => {
                let whole = outcome.requests.len() == outcome.setting.batch && returns > 0.0;
                let took = seconds.filter(|_| whole && self.costs.is_among_plain());
                let took = took.map(|seconds| seconds - expected(self));
                self.doubts.aside = took.map(|took| Aside { expected: returns, took, rounds: 0 });
                self.costs.interrupt(returns == 0.0);
            }
        }
    }
}
