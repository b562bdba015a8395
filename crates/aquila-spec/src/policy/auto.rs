//! The policy `auto`: each round, the shapes with the most expected tokens per second.
//!
//! The one invariant: it never spends what its [`LossAccount`] does not hold, so whatever is
//! accepted, it is not slower than plain decoding by more than the account's bound.

use std::collections::VecDeque;

use super::answers::Answers;
use super::worth::{Group, Ladder, Plan, group, share, weigh};
use super::{
    CostTable, Decision, LossAccount, Policy, PolicyState, Reading, RequestView, RoundCosts,
    RoundOutcome, RoundView, Setting, SlotState, Survival,
};
use crate::Shape;

mod doubts;
mod looks;

use doubts::{Doubts, TRIED};
use looks::{Arrivals, Probe};

/// What `auto` is given. The defaults hold its bars.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoSettings {
    /// Shapes among which it chooses; plain decoding always is one.
    pub candidates: Vec<Shape>,
    /// By how much another shape must be faster to be taken, unless it is plain decoding.
    pub margin: f64,
    /// By how much a shape must be faster than plain decoding to begin drafting.
    pub margin_to_draft: f64,
    /// Rounds that a shape is kept for at least.
    pub dwell: u32,
    /// The loss against plain decoding that may be run up at once, in plain rounds.
    pub loss_limit: f64,
    /// The share of plain decoding's time that may be lost for good.
    pub loss_allowance: f64,
    /// The share of plain decoding's time that drafts may take to be looked at and to read prompts
    /// while none are verified.
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
            margin_to_draft: 0.025,
            dwell: 3,
            loss_limit: 9.0,
            loss_allowance: 0.011,
            probe_share: 0.009,
            first_rate: 0.6,
        }
    }
}

/// Drafts that are looked at once after the text has changed or drafting has ended, where that rests
/// on few results.
const SECOND_LOOKS: usize = 8;
/// First drafts that are not few.
const WELL_KNOWN: f64 = 60.0;
/// Plain rounds between two thoughts about drafting while nothing is heard.
const RECONSIDERED: u64 = 4;
/// Rounds after which it asks anew whether drafts could pay.
const REPRICED: u64 = 64;
/// Results after which trees are put in order anew.
const TREE_RESULTS: u32 = 8;

/// What a round was charged.
#[derive(Debug, Clone, Copy, Default)]
struct Charge {
    /// For its trees, in plain rounds.
    trees: f64,
    /// What it was expected to take that drafts return, in seconds, which no table tells round by
    /// round.
    returns: f64,
    /// What of it was not saved up before, where it was only to find out.
    unsaved: Option<f64>,
}

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
    /// Rounds for which the plan is held at least.
    least_rounds: u32,
    doubts: Doubts,
    /// Rounds in which plain decoding went on, since one was thought about.
    went_on: u32,
    unsettled: bool,
    /// What drafts could give at best at the batch size of the last round.
    best: Option<(usize, f64)>,
    /// Whether a result about drafts came since the last decision, and the round it came in last.
    heard: bool,
    last_heard: u64,
    /// What may be spent on looks and on prompts, in plain rounds.
    probing: f64,
    /// What the last prompt would have taken to read, while it decoded plainly.
    saving_for: f64,
    arrivals: Arrivals,
    since_probe: u32,
    second_looks: usize,
    in_flight: u32,
    /// What the rounds in flight that draft or look were charged, oldest first.
    charged: VecDeque<Charge>,
    results_since_trees: u32,
    rounds: u64,
    switches: u64,
    probes: u64,
    answers: Answers,
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
            least_rounds: 0,
            doubts: Doubts::default(),
            went_on: 0,
            unsettled: true,
            best: None,
            heard: false,
            last_heard: 0,
            probing: 0.0,
            saving_for: 0.0,
            arrivals: Arrivals::default(),
            since_probe: 0,
            second_looks: 0,
            in_flight: 0,
            charged: VecDeque::new(),
            results_since_trees: 0,
            rounds: 0,
            switches: 0,
            probes: 0,
            answers: Answers::default(),
            groups: Vec::new(),
            group_of: Vec::new(),
            at_level: Vec::new(),
        }
    }

    /// What it knows of acceptance.
    pub fn survival(&self) -> &Survival {
        &self.survival
    }

    /// What it may still lose.
    pub fn account(&self) -> &LossAccount {
        &self.account
    }

    /// Whether plain decoding goes on without a thought: nothing was heard of drafts, and none can be
    /// looked at for nothing.
    fn goes_on(&self, round: &RoundView<'_>) -> bool {
        let free = |request: &RequestView| request.behind == 0 && request.most_steps() > 0;
        self.held.ladder.is_none()
            && self.held_batch == round.requests.len()
            && !(self.heard || self.unsettled || self.looks_on())
            && !self.rounds.is_multiple_of(RECONSIDERED)
            && !round.requests.iter().any(free)
    }

    /// The plan of a round: the one held, unless another is faster by the margin.
    fn plan(&mut self, round: &RoundView<'_>, plain_seconds: f64) -> Plan {
        let batch = round.requests.len();
        self.heard = false;
        group(round.requests, &self.survival, &mut self.groups, &mut self.group_of);
        let most_seconds = plain_seconds * (1.0 + self.account.balance());
        let ladders = (&self.ladders[..], &self.groups[..]);
        let choice = weigh(ladders, &self.costs, batch, self.held, most_seconds);
        let free = self.unsettled || self.held_batch != batch;
        let margin = match (self.held.ladder, choice.best.ladder) {
            (None, _) => self.settings.margin_to_draft,
            (Some(_), Some(_)) => self.settings.margin,
            (Some(_), None) => 0.0,
        };
        let is_new = |held: &Plan| choice.best.speed() > held.speed() * (1.0 + margin);
        let mut least_rounds = self.settings.dwell;
        let plan = match choice.held {
            Some(held) if !free && self.held_rounds < self.least_rounds => held,
            Some(held) if !is_new(&held) => match self.try_out(&choice, batch) {
                Some(plan) => {
                    least_rounds = TRIED;
                    plan
                }
                None => held,
            },
            _ => choice.best,
        };
        let plan = match plan.ladder.is_some() == self.held.ladder.is_some() {
            false if !free && self.is_of_the_moment(round, most_seconds) => {
                // However sure of the next token a draft is, or not.
                let drafting = choice.drafting.filter(|_| plan.ladder.is_none());
                drafting.unwrap_or(Plan::plain(batch, plain_seconds))
            }
            _ => plan,
        };
        if plan.is_like(&self.held) {
            self.held_rounds = self.held_rounds.saturating_add(1);
        } else {
            self.held_rounds = 0;
            self.least_rounds = least_rounds;
            self.switches += 1;
            if plan.ladder.is_none() && self.survival.known() < WELL_KNOWN {
                self.second_looks = SECOND_LOOKS;
            }
        }
        self.held = plan;
        self.held_batch = batch;
        self.unsettled = false;
        plan
    }

    fn shared_out(&self, plan: &Plan, round: &RoundView<'_>) -> Vec<Shape> {
        let Some(ladder) = plan.ladder.map(|at| &self.ladders[at]) else {
            return vec![Shape::PLAIN; round.requests.len()];
        };
        let by_group: Vec<Shape> =
            self.groups.iter().map(|group| share(ladder, group, plan)).collect();
        self.group_of.iter().map(|&at| by_group[at]).collect()
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
        if self.goes_on(round) {
            self.held_rounds = self.held_rounds.saturating_add(1);
            self.went_on += 1;
            let setting = Setting { batch, slot: 1, shape: Shape::PLAIN, watches: false };
            let (shapes, expected) = (vec![Shape::PLAIN; batch], Some(batch as f64));
            return Decision { setting, shapes, expected, watch: Vec::new() };
        }
        let known = self.best.is_some_and(|(of, _)| of == batch);
        if !known || self.rounds.is_multiple_of(REPRICED) {
            self.best = Some((batch, self.at_best(batch)));
        }
        let plain_seconds = self.costs.plain(batch);
        let mut plan = self.plan(round, plain_seconds);
        let compares = self.compares(&plan, batch, plain_seconds);
        if compares {
            plan = Plan::plain(batch, plain_seconds);
        }
        let rounds = 1 + std::mem::take(&mut self.went_on);
        self.save_up(rounds, batch, plain_seconds);
        let mut shapes = self.shared_out(&plan, round);
        let Probe { requests: mut watch, verified } = match plan.ladder {
            None if compares => Probe::default(),
            None => self.probe(round, plain_seconds),
            Some(_) => self.left_out(&shapes, round, plain_seconds),
        };
        let mut expected = plan.tokens;
        if let Some((shape, _)) = verified {
            expected += watch.len() as f64 * self.survival.rate(1);
            watch.drain(..).for_each(|at| shapes[at] = shape);
        }
        // In plain rounds, what trees cost and what it costs that drafts return.
        let extra = |this: &mut Self, shapes: &[Shape], watch: &[usize]| {
            let drafts = |&at: &usize| shapes[at].steps() > 0 || watch.contains(&at);
            let missed = (0..batch).filter(drafts).map(|at| round.requests[at].behind);
            let returning = this.costs.returning(batch, missed) / plain_seconds;
            (this.seconds(shapes.iter().copied()) / plain_seconds - 1.0, returning)
        };
        let (mut trees, mut returning) = extra(self, &shapes, &watch);
        if !self.account.affords(trees + returning) && !watch.is_empty() {
            watch.clear();
            (trees, returning) = extra(self, &shapes, &watch);
        }
        if !self.account.affords(trees + returning) {
            shapes.fill(Shape::PLAIN);
            (trees, returning, expected) = (0.0, 0.0, batch as f64);
        }
        self.account.charge(trees + returning);
        let largest = shapes.iter().copied().max_by_key(|s| (s.steps(), s.nodes()));
        let shape = largest.unwrap_or(Shape::PLAIN);
        if shape.steps() > 0 || !watch.is_empty() {
            self.in_flight += 1;
            let (trees, returns) = (trees.max(0.0), returning * plain_seconds);
            let unsaved = verified.map(|(_, unsaved)| unsaved);
            self.charged.push_back(Charge { trees, returns, unsaved });
        }
        let setting = Setting { batch, slot: 1, shape, watches: !watch.is_empty() };
        Decision { setting, shapes, expected: Some(expected), watch }
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let batch = outcome.setting.batch.max(1);
        let watched = outcome.setting.watches;
        let drafted = outcome.setting.shape.steps() > 0;
        let whole = outcome.requests.len() == batch;
        self.answers.grow(outcome.requests.iter().map(|r| r.correct + 1).sum());
        let mut like_the_table = whole;
        let correct: usize = outcome.requests.iter().map(|r| r.correct).sum();
        let earned = correct as f64 / batch as f64;
        let (mut unsaved, mut returns) = (None, 0.0);
        if drafted || watched {
            let charge = self.charged.pop_front().unwrap_or_default();
            unsaved = charge.unsaved;
            like_the_table &= charge.returns == 0.0;
            returns = charge.returns;
            if whole {
                // Trees that were looked up may have come out smaller, or not at all.
                let seconds = self.seconds(outcome.requests.iter().map(|r| r.shape));
                let spent = (seconds / self.costs.plain(batch) - 1.0).max(0.0);
                self.account.pay_back((charge.trees - spent).max(0.0));
            }
        }
        self.take_in_costs(outcome, like_the_table, returns);
        if !drafted && !watched {
            return;
        }
        self.heard = true;
        self.last_heard = self.rounds;
        self.in_flight = self.in_flight.saturating_sub(1);
        self.account.pay_back(earned);
        self.probing += unsaved.map_or(0.0, |unsaved| (earned - unsaved).max(0.0));
        let changed = self.survival.learn(outcome.requests, unsaved.is_some() || !drafted);
        self.unsettled |= changed;
        if changed {
            self.second_looks = SECOND_LOOKS;
        }
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
        self.answers.end();
    }

    fn shapes(&self) -> Vec<Shape> {
        let mut shapes = vec![Shape::PLAIN];
        shapes.extend(self.settings.candidates.iter().filter(|shape| shape.steps() > 0));
        shapes
    }

    fn admits(&mut self, batch: usize, reading: Reading) -> bool {
        self.admit(batch.max(1), reading)
    }

    fn weighs_confidence(&self) -> bool {
        self.costs.table().affords_confidence()
    }

    fn costs(&self) -> Option<&CostTable> {
        Some(self.costs.table())
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
