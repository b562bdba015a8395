//! The policy `auto`: each round, the shapes with the most expected tokens per second.
//!
//! The one invariant: it never spends what its [`LossAccount`] does not hold, so whatever is
//! accepted, it is not slower than plain decoding by more than the account's bound.

use super::costs::RoundCosts;
use super::worth::{Group, Ladder, Plan, group, share, weigh};
use super::{
    CostTable, Decision, LossAccount, Policy, PolicyState, RoundOutcome, RoundView, Setting,
    SlotState, Survival,
};
use crate::Shape;

/// What `auto` is given. The defaults hold its bars.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoSettings {
    /// Shapes among which it chooses; plain decoding always is one.
    pub candidates: Vec<Shape>,
    /// By how much another shape must be faster to be taken.
    pub margin: f64,
    /// Rounds that a shape is kept for at least.
    pub dwell: u32,
    /// The loss against plain decoding that may be run up at once, in plain rounds.
    pub loss_limit: f64,
    /// The share of plain decoding's time that may be lost for good.
    pub loss_allowance: f64,
    /// The share of plain decoding's time that probes may take while nothing is drafted.
    pub probe_share: f64,
    /// How likely a first draft is to be right before anything is known.
    pub first_rate: f64,
}

impl AutoSettings {
    /// The default settings with chains of 1 to `most` steps.
    pub fn chains(most: usize) -> Self {
        let candidates = (1..=most).map(Shape::chain).collect();
        Self { candidates, ..Self::default() }
    }
}

impl Default for AutoSettings {
    fn default() -> Self {
        Self {
            candidates: (1..=7).map(Shape::chain).collect(),
            margin: 0.01,
            dwell: 3,
            loss_limit: 9.0,
            loss_allowance: 0.01,
            probe_share: 0.0075,
            first_rate: 0.6,
        }
    }
}

/// The most requests that a probe drafts for: more would not tell more.
const PROBED: usize = 8;
/// Rounds between two looks at requests that are left out of drafting.
const LEFT_OUT_ROUNDS: u64 = 16;
/// Rounds after which the result of a probe is taken to be lost.
const LOST_ROUNDS: u32 = 64;
/// Results after which trees are put in order anew.
const TREE_RESULTS: u32 = 8;

/// The policy.
#[derive(Debug, Clone)]
pub struct Auto {
    settings: AutoSettings,
    costs: RoundCosts,
    survival: Survival,
    account: LossAccount,
    ladders: Vec<Ladder>,
    held: Plan,
    held_batch: usize,
    held_rounds: u32,
    unsettled: bool,
    /// Rounds since the last probe, and probes in a row that were right.
    since_probe: u32,
    streak: u32,
    in_flight: u32,
    results_since_trees: u32,
    rounds: u64,
    switches: u64,
    probes: u64,
    groups: Vec<Group>,
    group_of: Vec<usize>,
    at_level: Vec<usize>,
}

impl Auto {
    /// Begins with a table of costs and nothing known of acceptance.
    pub fn new(settings: AutoSettings, costs: CostTable) -> Self {
        let survival = Survival::new(settings.first_rate);
        let mut ladders = Ladder::all(&settings.candidates);
        ladders.iter_mut().for_each(|ladder| ladder.climb(&survival));
        let account = LossAccount::new(settings.loss_limit, settings.loss_allowance);
        let costs = RoundCosts::new(costs);
        let held = Plan::plain(1, costs.plain(1));
        Self {
            settings,
            costs,
            survival,
            account,
            ladders,
            held,
            held_batch: 0,
            held_rounds: 0,
            unsettled: true,
            since_probe: 0,
            streak: 0,
            in_flight: 0,
            results_since_trees: 0,
            rounds: 0,
            switches: 0,
            probes: 0,
            groups: Vec::new(),
            group_of: Vec::new(),
            at_level: Vec::new(),
        }
    }

    /// What it knows of costs.
    pub fn costs(&self) -> &RoundCosts {
        &self.costs
    }

    /// What it knows of acceptance.
    pub fn survival(&self) -> &Survival {
        &self.survival
    }

    /// What it may still lose.
    pub fn account(&self) -> &LossAccount {
        &self.account
    }

    /// The plan of a round: the one held, unless another is faster by the margin.
    fn plan(&mut self, batch: usize, plain_seconds: f64) -> Plan {
        let most_seconds = plain_seconds * (1.0 + self.account.balance());
        let ladders = (&self.ladders[..], &self.groups[..]);
        let choice = weigh(ladders, &self.costs, batch, self.held, most_seconds);
        let free = self.unsettled || self.held_batch != batch;
        let plan = match choice.held {
            Some(held) if !free && self.held_rounds < self.settings.dwell => held,
            Some(held) if choice.best.speed() <= held.speed() * (1.0 + self.settings.margin) => {
                held
            }
            _ => choice.best,
        };
        if plan.is_like(&self.held) {
            self.held_rounds = self.held_rounds.saturating_add(1);
        } else {
            self.held_rounds = 0;
            self.switches += 1;
        }
        self.held = plan;
        self.held_batch = batch;
        self.unsettled = false;
        plan
    }

    /// The shapes of a probe, if one is due: a short chain for a few requests, as rarely as the
    /// share of time for probes asks, or at once while probes are right.
    fn probe(&mut self, round: &RoundView<'_>, plain_seconds: f64) -> Option<Vec<Shape>> {
        self.since_probe = self.since_probe.saturating_add(1);
        let chains = self.ladders.first().filter(|ladder| ladder.largest.is_chain());
        let most = chains.map_or(1, |ladder| ladder.largest.steps());
        let steps = (1 << self.streak.min(3)).min(most);
        let batch = round.requests.len();
        let may = round.requests.iter().filter(|r| r.most_steps() > 0).count();
        let waits = self.in_flight > 0 && self.since_probe < LOST_ROUNDS;
        if may == 0 || self.ladders.is_empty() || waits {
            return None;
        }
        let extra = |requests: usize| {
            let at_level = [requests; 8];
            let rows = batch + requests * steps;
            self.costs.round(batch, rows, &at_level[..steps], 1) / plain_seconds - 1.0
        };
        let sizes = [1, 2, 4, PROBED].map(|size| size.min(may));
        // Of two probes the one that tells more for what it costs; a fixed part makes large ones
        // worth it.
        let tells = |size: usize| size as f64 / extra(size).max(1e-6);
        let size = sizes.into_iter().max_by(|&a, &b| tells(a).total_cmp(&tells(b)))?;
        let extra = extra(size);
        let due = f64::from(self.since_probe) * self.settings.probe_share >= extra;
        if !(due || self.streak > 0) || !self.account.affords(extra) {
            return None;
        }
        let mut shapes = vec![Shape::PLAIN; batch];
        let start = self.probes as usize * PROBED % batch;
        let eligible = (0..batch).map(|i| (start + i) % batch);
        let eligible = eligible.filter(|&at| round.requests[at].most_steps() > 0);
        for at in eligible.take(size) {
            shapes[at] = Shape::chain(steps).capped(round.requests[at].most_steps());
        }
        self.since_probe = 0;
        self.probes += 1;
        Some(shapes)
    }

    fn shared_out(&self, plan: &Plan, round: &RoundView<'_>) -> Vec<Shape> {
        let Some(ladder) = plan.ladder.map(|at| &self.ladders[at]) else {
            return vec![Shape::PLAIN; round.requests.len()];
        };
        let by_group: Vec<Shape> =
            self.groups.iter().map(|group| share(ladder, group, plan)).collect();
        let mut shapes: Vec<Shape> = self.group_of.iter().map(|&at| by_group[at]).collect();
        if self.rounds.is_multiple_of(LEFT_OUT_ROUNDS) {
            let one = Shape::chain(1);
            for (shape, request) in shapes.iter_mut().zip(round.requests) {
                if shape.steps() == 0 {
                    *shape = one.capped(request.most_steps());
                }
            }
        }
        shapes
    }

    /// What a round of these shapes costs.
    fn seconds(&mut self, shapes: impl Iterator<Item = Shape> + Clone) -> f64 {
        let (batch, rows, topk) = self.count(shapes);
        self.costs.round(batch, rows, &self.at_level, topk)
    }

    /// Requests, rows and width of a round, and into `at_level` the requests at each level.
    fn count(&mut self, shapes: impl Iterator<Item = Shape> + Clone) -> (usize, usize, usize) {
        self.at_level.clear();
        let (mut batch, mut rows, mut topk) = (0, 0, 1);
        for shape in shapes {
            batch += 1;
            rows += shape.nodes();
            topk = topk.max(shape.topk());
            if self.at_level.len() < shape.steps() {
                self.at_level.resize(shape.steps(), 0);
            }
            self.at_level[..shape.steps()].iter_mut().for_each(|n| *n += 1);
        }
        (batch, rows, topk)
    }
}

impl Policy for Auto {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let batch = round.requests.len();
        if batch == 0 {
            return Decision::uniform(round, 1, Shape::PLAIN);
        }
        self.rounds += 1;
        self.account.earn();
        group(round.requests, &self.survival, &mut self.groups, &mut self.group_of);
        let plain_seconds = self.costs.plain(batch);
        let plan = self.plan(batch, plain_seconds);
        let mut shapes = self.shared_out(&plan, round);
        let mut probe = false;
        if plan.ladder.is_none()
            && let Some(probing) = self.probe(round, plain_seconds)
        {
            (shapes, probe) = (probing, true);
        }
        let mut extra = self.seconds(shapes.iter().copied()) / plain_seconds - 1.0;
        if !self.account.affords(extra) {
            shapes.fill(Shape::PLAIN);
            (extra, probe) = (0.0, false);
        }
        self.account.charge(extra);
        let largest = shapes.iter().copied().max_by_key(|s| (s.steps(), s.nodes()));
        let shape = largest.unwrap_or(Shape::PLAIN);
        self.in_flight += u32::from(shape.steps() > 0);
        let setting = Setting { batch, slot: 1, shape };
        Decision { setting, shapes, expected: Some(plan.tokens), probe }
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let batch = outcome.setting.batch.max(1);
        if let Some(seconds) = outcome.seconds
            && outcome.requests.len() == batch
        {
            let (batch, rows, topk) = self.count(outcome.requests.iter().map(|r| r.shape));
            self.costs.refine((batch, rows), &self.at_level, topk, seconds);
        }
        if outcome.setting.shape.steps() == 0 {
            return;
        }
        self.in_flight = self.in_flight.saturating_sub(1);
        let correct: usize = outcome.requests.iter().map(|r| r.correct).sum();
        self.account.pay_back(correct as f64 / batch as f64);
        let changed = self.survival.learn(outcome.requests);
        self.unsettled |= changed;
        // A probe that found more than half of its drafts right is followed up at once.
        let drafted: usize = outcome.requests.iter().map(|r| r.shape.steps()).sum();
        self.streak = if correct * 2 > drafted { self.streak + 1 } else { 0 };
        self.results_since_trees += 1;
        let trees_due = changed || self.results_since_trees >= TREE_RESULTS;
        for ladder in &mut self.ladders {
            if ladder.largest.is_chain() || trees_due {
                ladder.climb(&self.survival);
            }
        }
        if trees_due {
            self.results_since_trees = 0;
        }
    }

    fn leave(&mut self, request: u64) {
        self.survival.leave(request);
    }

    fn shapes(&self) -> Vec<Shape> {
        let mut shapes = vec![Shape::PLAIN];
        shapes.extend(self.settings.candidates.iter().filter(|shape| shape.steps() > 0));
        shapes
    }

    fn state(&self) -> PolicyState {
        let shape = match self.held.ladder {
            Some(at) => self.ladders[at].largest.capped(self.held.steps),
            None => Shape::PLAIN,
        };
        let batch = self.held_batch.max(1);
        let expected_drafts = self.held.tokens / batch as f64 - 1.0;
        let slot = SlotState { batch, shape, expected_drafts, rounds: self.rounds };
        PolicyState {
            name: "auto",
            slots: vec![slot],
            switches: self.switches,
            probes: self.probes,
        }
    }
}
