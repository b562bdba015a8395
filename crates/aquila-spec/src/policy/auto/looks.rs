//! What `auto` spends to know how drafts would do: looks at them, trials, which are verified, and
//! prompts that they read.
//!
//! Looks are free where a draft has said already what it would draft. The others, and prompts where
//! plain decoding is faster, are paid from a share of plain decoding's time that is saved up.

use super::super::worth::{Plan, group, weigh};
use super::super::{Reading, RequestView, RoundView};
use super::Auto;
use crate::Shape;

/// The most requests that are watched at once: more would not tell more.
const WATCHED: usize = 8;
/// Nats that make a look at drafts promising, so that the next look is at once.
const PROMISING: f64 = 0.5;
/// What may be saved up for looks, in plain rounds, and in looks where these are dear.
const MOST_PROBING: f64 = 0.15;
const SAVED_LOOKS: f64 = 8.0;
/// How many times what a look costs at best makes it too dear to be had at once.
const DEAR: f64 = 1.5;
/// What a look costs, in plain rounds, that is dear; and drafts in a row that are verified then instead
/// of looks: to bring drafts back is what costs most, and what is right pays for itself.
const DEAR_LOOK: f64 = 0.5;
const IN_A_ROW: f64 = 6.0;
/// What may be spent to know of drafts, as a share of what they could give at best.
const SHARE_OF_LEAD: f64 = 0.0125;
/// Rounds between two looks at requests that are left out of drafting.
const LEFT_OUT_ROUNDS: u64 = 8;
/// Rounds after which the result of a look is taken to be lost.
const LOST_ROUNDS: u32 = 64;
/// Rounds after which what is known of drafts is old.
const STALE: u64 = 500;
/// How far drafts must be ahead at best for it to matter that what is known of them is old.
const LEAST_LEAD: f64 = 0.1;
/// The share of time that they are hoped to save then.
const HOPE: f64 = 0.25;

/// Whose drafts are tried to find out.
#[derive(Debug, Clone, Default)]
pub(super) struct Probe {
    pub(super) requests: Vec<usize>,
    /// The shape with which they are verified, and what of the cost was not saved up before; none
    /// where they are only looked at.
    pub(super) verified: Option<(Shape, f64)>,
}

/// Requests that came between two rounds: what they read is read together.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Arrivals {
    before: u64,
    asked: usize,
    admitted: usize,
}

impl Auto {
    /// Saves up for looks and prompts: the share of so many rounds.
    pub(super) fn save_up(&mut self, rounds: u32, batch: usize, plain_seconds: f64) {
        self.since_probe = self.since_probe.saturating_add(rounds);
        let looks = SAVED_LOOKS * self.look(batch, plain_seconds);
        let most = self.saving_for + MOST_PROBING.max(looks);
        let lead = self.best.map_or(0.0, |(_, times)| times - 1.0).max(0.0);
        let share = self.settings.probe_share.min(SHARE_OF_LEAD * lead);
        self.probing = (self.probing + f64::from(rounds) * share).min(most);
    }

    /// Whose drafts to try in a plain round: those who have said already what they would draft, else
    /// a few in turn, as rarely as their share of time asks, or at once while what is seen is
    /// promising.
    pub(super) fn probe(&mut self, round: &RoundView<'_>, plain_seconds: f64) -> Probe {
        let batch = round.requests.len();
        if self.since_probe >= LOST_ROUNDS {
            self.in_flight = 0;
            self.charged.clear();
        }
        if !self.may_pay(batch) {
            return Probe::default();
        }
        // Spread over the batch, as neighbours may be alike.
        let stride = batch.div_ceil(WATCHED);
        let turn = (0..stride).flat_map(|first| (first..batch).step_by(stride));
        let turn = turn.map(|at| (at + self.probes as usize) % batch);
        let mut watch: Vec<usize> =
            turn.filter(|&at| round.requests[at].most_steps() > 0).collect();
        // Those that missed least cost least, and those that missed nothing nothing.
        watch.sort_by_key(|&at| round.requests[at].behind);
        watch.truncate(WATCHED);
        let free = watch.iter().filter(|&&at| round.requests[at].behind == 0).count();
        if free > 0 {
            watch.truncate(free);
        } else if watch.is_empty() || self.in_flight > 0 {
            return Probe::default();
        }
        let extra = self.looking(round, &watch, plain_seconds);
        let look = self.look(batch, plain_seconds);
        let shape = self.ladders.first().map_or(Shape::PLAIN, |ladder| ladder.largest.capped(1));
        let tried = (0..batch).map(|at| if watch.contains(&at) { shape } else { Shape::PLAIN });
        let trial = extra + self.seconds(tried) / plain_seconds - 1.0;
        let right = watch.len() as f64 / batch as f64 * self.survival.rate(1);
        // Looks at once leave enough to draft with what they find.
        let dear = extra > DEAR * look;
        let at_once = self.looks_on() && self.is_affluent() && !dear;
        // What is saved for a prompt is not spent on looks, be they at once, but lent to trials: a
        // draft that is verified pays for itself where it is right.
        let surplus = (self.probing - self.saving_for).max(0.0);
        let others = self.in_a_row(look, trial - extra - right);
        if !at_once && free == 0 && self.probing < extra + others {
            return Probe::default();
        }
        let in_a_row = free > 0 && look > DEAR_LOOK && self.probing >= trial - right;
        let drafts = trial - right < extra.max(look)
            && (at_once || (self.probing >= trial && surplus >= trial - right) || in_a_row)
            && self.account.affords(trial);
        if !(drafts || at_once || free > 0 || surplus >= extra) {
            return Probe::default();
        }
        let (extra, most) = if drafts { (trial, self.probing) } else { (extra, surplus) };
        self.second_looks = self.second_looks.saturating_sub(watch.len());
        let paid = extra.min(most);
        self.probing -= paid;
        self.since_probe = 0;
        self.probes += 1;
        Probe { requests: watch, verified: drafts.then_some((shape, extra - paid)) }
    }

    /// How many times as fast as plain decoding a batch of so many could be, were the drafts of all
    /// requests right, or those of one.
    pub(super) fn at_best(&self, batch: usize) -> f64 {
        let plain = batch as f64 / self.costs.plain(batch);
        let speed = |shape: &Shape, requests: usize| {
            let (steps, others) = (shape.steps(), batch - requests);
            let tokens = (batch + requests * steps) as f64;
            let rows = others + requests * shape.nodes();
            tokens / self.costs.round(batch, rows, &vec![requests; steps], shape.topk())
        };
        let drafts = self.settings.candidates.iter().filter(|shape| shape.steps() > 0);
        let speeds = drafts.map(|shape| speed(shape, batch).max(speed(shape, 1)));
        speeds.fold(0.0, f64::max) / plain
    }

    /// Whether drafts may pay in the batch of this round.
    pub(super) fn may_pay(&self, batch: usize) -> bool {
        let least = 1.0 + self.settings.margin_to_draft;
        self.best.is_some_and(|(of, times)| of == batch && times > least)
    }

    /// What drafts in a row cost where looks are dear, of which each costs `trial` beyond what it
    /// gives.
    fn in_a_row(&self, look: f64, trial: f64) -> f64 {
        if look > DEAR_LOOK { IN_A_ROW * trial.max(0.0) } else { 0.0 }
    }

    /// Whether drafts are to be looked at again at once.
    pub(super) fn looks_on(&self) -> bool {
        self.second_looks > 0 || self.survival.promise() > PROMISING
    }

    /// Whether there is enough to draft with after something was spent.
    pub(super) fn is_affluent(&self) -> bool {
        self.account.balance() > self.settings.loss_limit / 4.0
    }

    /// What a look costs at drafts that have just been looked at, in plain rounds.
    fn look(&self, batch: usize, plain_seconds: f64) -> f64 {
        let missed = std::iter::repeat_n(1, batch.min(WATCHED));
        self.costs.returning(batch, missed) / plain_seconds
    }

    /// Requests that get nothing while others do are watched now and then, lest a bad start stick.
    pub(super) fn left_out(
        &mut self,
        shapes: &[Shape],
        round: &RoundView<'_>,
        plain_seconds: f64,
    ) -> Probe {
        if !self.rounds.is_multiple_of(LEFT_OUT_ROUNDS) {
            return Probe::default();
        }
        let idle = |&at: &usize| shapes[at].steps() == 0 && round.requests[at].most_steps() > 0;
        let mut watch: Vec<usize> = (0..shapes.len()).filter(idle).collect();
        // Those that missed least cost least.
        watch.sort_by_key(|&at| round.requests[at].behind);
        watch.truncate(WATCHED);
        let extra = self.looking(round, &watch, plain_seconds);
        if extra > self.probing {
            return Probe::default();
        }
        self.probing -= extra;
        Probe { requests: watch, verified: None }
    }

    /// What looking at the drafts of these requests costs, in plain rounds.
    fn looking(&self, round: &RoundView<'_>, watch: &[usize], plain_seconds: f64) -> f64 {
        let missed = watch.iter().map(|&at| round.requests[at].behind);
        self.costs.returning(round.requests.len(), missed) / plain_seconds
    }

    /// Whether the draft of one that comes to a batch of `batch` reads its prompt.
    pub(super) fn admit(&mut self, batch: usize, reading: Reading) -> bool {
        let any = [RequestView::new(u64::MAX)];
        group(&any, &self.survival, &mut self.groups, &mut self.group_of);
        self.groups[0].repeat(batch);
        let ladders = (&self.ladders[..], &self.groups[..]);
        let best = weigh(ladders, &self.costs, batch, self.held, f64::INFINITY).best;
        let plain = Plan::plain(batch, self.costs.plain(batch));
        if self.arrivals.before != self.rounds {
            self.arrivals = Arrivals { before: self.rounds, ..Arrivals::default() };
        }
        let reading = self.costs.reading(self.arrivals.admitted, reading) / plain.seconds;
        self.arrivals.asked += 1;
        // Where plain decoding is faster, drafts read as much as their share of time allows.
        // Results that are old say little of that, and no results nothing.
        let lead = self.at_best(batch) - 1.0;
        let old = self.rounds - self.last_heard > STALE && lead > LEAST_LEAD;
        let stale = self.survival.known() == 0.0 || old;
        let rationed = (best.ladder.is_none() && !stale) || !self.is_affluent();
        let can_be_had = if rationed {
            // One that comes alone leaves enough for the first of many that may come together.
            let affords = self.account.affords(reading);
            let look = self.look(batch, plain.seconds);
            let trial = self.costs.round(batch, batch + 1, &[1], 1) / plain.seconds - 1.0;
            let others = self.in_a_row(look, trial - self.survival.rate(1) / batch as f64);
            let most = others + if batch > 1 { 2.0 * reading } else { reading };
            self.saving_for = if affords { most } else { 0.0 };
            affords && self.probing >= if self.arrivals.asked == 1 { most } else { reading }
        } else {
            let saved = match best.ladder {
                Some(_) => 1.0 - plain.speed() / best.speed(),
                None => HOPE,
            };
            self.account.affords(reading) || self.answers.tokens() / batch as f64 * saved > reading
        };
        if !can_be_had || lead <= self.settings.margin_to_draft {
            return false;
        }
        self.arrivals.admitted += 1;
        if self.held.ladder.is_none() {
            self.costs.interrupt(false);
        }
        if rationed {
            self.probing -= reading;
        }
        // What is dearer than all there is leaves enough to draft with.
        let most = self.account.balance();
        let left = self.settings.loss_limit / 4.0;
        self.account.charge(if reading <= most { reading } else { most - left });
        true
    }
}
