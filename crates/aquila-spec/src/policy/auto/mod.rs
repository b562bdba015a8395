//! The policy `auto`: each round, the draft steps and the rows to verify with the most expected
//! tokens per second.
//!
//! One rule: a row is worth verifying if the chance that it is accepted is at least what it costs.
//! The chances are those of [`Acceptance`], the costs those of [`CostTable`]; plain decoding is
//! the plan of 0 steps. `docs/auto.md` explains it for users.
//!
//! The one invariant: what `auto` may lose against plain decoding is in its [`LossAccount`] before
//! it is spent.

mod plans;
mod probes;

use std::collections::VecDeque;

use self::plans::{Choice, Plan};
use self::probes::Probes;
use super::{
    Acceptance, CostTable, Decision, LossAccount, Policy, PolicyState, PromptRows, RequestView,
    RoundOutcome, RoundView, Setting, SlotState,
};
use crate::Shape;

/// What `auto` is given.
#[derive(Debug, Clone, PartialEq)]
pub struct AutoSettings {
    /// The largest tree that it may choose.
    pub largest: Shape,
    /// By how much another number of steps must be faster to be taken.
    pub margin: f64,
    /// Rounds for which a number of steps is kept at least.
    pub dwell: u32,
    /// The loss against plain decoding that may be run up at once, in plain rounds.
    pub loss_limit: f64,
    /// The share of plain decoding's time that may be lost for good.
    pub loss_allowance: f64,
    /// How likely a first draft is to be right before anything is known.
    pub first_rate: f64,
}

impl AutoSettings {
    /// The default settings with trees up to `largest`.
    pub fn new(largest: Shape) -> Self {
        Self {
            largest,
            margin: 0.02,
            dwell: 8,
            loss_limit: 7.0,
            loss_allowance: 0.01,
            first_rate: 0.6,
        }
    }
}

/// How fast the scale of all costs follows what rounds take, and that of drafting what is left of
/// the difference; and the rounds for which a plain one tells how fast the machine is.
const MACHINE_GAIN: f64 = 0.1;
const DRAFTING_GAIN: f64 = 0.02;
const RECENT: u32 = 16;
/// The most that one round's time is taken to differ from what was expected.
const MOST_SURPRISE: f64 = 0.5;

/// A round whose result has not arrived.
#[derive(Debug, Clone, Copy)]
struct InFlight {
    /// Seconds expected by the table, before the scales; none where drafts caught up too.
    expected: Option<f64>,
    /// What was charged for its trees, in plain rounds, and the requests that drafted.
    charged: f64,
    drafting: usize,
}

/// The policy.
#[derive(Debug, Clone)]
pub struct Auto {
    settings: AutoSettings,
    costs: CostTable,
    /// Logarithms of what rounds take against the table, and what those that draft take beyond
    /// that.
    machine: f64,
    drafting: f64,
    /// Rounds that drafted since a plain one.
    since_plain: u32,
    acceptance: Acceptance,
    account: LossAccount,
    /// None where something was learned since it was made.
    choice: Option<Choice>,
    steps: usize,
    /// Rounds since the steps changed, and since drafting began.
    held: u32,
    drafted: u32,
    probes: Probes,
    in_flight: VecDeque<InFlight>,
    last_batch: usize,
    /// Drafts that the last round's plan expected to be right, for each request.
    expected_drafts: f64,
    rounds: u64,
    switches: u64,
}

impl Auto {
    /// Begins with a table of costs and nothing known of acceptance.
    pub fn new(settings: AutoSettings, costs: CostTable) -> Self {
        Self {
            acceptance: Acceptance::new(settings.first_rate),
            account: LossAccount::new(settings.loss_limit, settings.loss_allowance),
            costs,
            machine: 0.0,
            drafting: 0.0,
            since_plain: RECENT,
            choice: None,
            steps: 0,
            held: settings.dwell,
            drafted: 0,
            probes: Probes::START,
            in_flight: VecDeque::new(),
            last_batch: 1,
            expected_drafts: 0.0,
            rounds: 0,
            switches: 0,
            settings,
        }
    }

    /// What it may still lose.
    pub fn account(&self) -> &LossAccount {
        &self.account
    }

    /// Chooses the steps: another number is taken if it is faster by the margin and the last was
    /// kept long enough; plain decoding is taken without a margin.
    fn decide(&mut self, choice: &Choice) -> Plan {
        let at = |steps: usize| choice.plans[steps.min(choice.plans.len() - 1)];
        let (held, best) = (at(self.steps), Choice::best(&choice.plans));
        let margin = if best.steps == 0 { 0.0 } else { self.settings.margin };
        let faster = best.speed() > held.speed() * (1.0 + margin) && self.may_draft();
        self.held = self.held.saturating_add(1);
        self.drafted = self.drafted.saturating_add(1);
        if best.steps != self.steps && faster && self.held > self.settings.dwell {
            self.switch(best.steps);
        }
        at(self.steps)
    }

    fn switch(&mut self, steps: usize) {
        if steps == 0 {
            self.probes.pause(self.drafted);
        }
        if self.steps == 0 {
            self.drafted = 0;
        }
        self.steps = steps;
        self.held = 0;
        self.switches += 1;
    }

    /// What the requests that may draft are to the plans.
    fn drafting(&self, round: &RoundView<'_>) -> Vec<(f64, usize)> {
        let factor = |r: &RequestView| (self.acceptance.of_request(r.id), r.most_steps());
        round.requests.iter().filter(|r| r.most_steps() > 0).map(factor).collect()
    }

    /// What the account must hold for drafting to begin: after losses, half of them must be earned
    /// back.
    fn to_begin(&self) -> f64 {
        self.settings.loss_limit / 2.0
    }

    /// Whether drafting is under way, or may begin.
    fn may_draft(&self) -> bool {
        self.steps > 0 || self.account.affords(self.to_begin())
    }

    /// Charges what an answer should repay: no more than leaves enough to begin drafting.
    fn charge_repaid(&mut self, rounds: f64) {
        self.account.charge(rounds.min(self.account.balance() - self.to_begin()));
    }

    /// Learns from what a round took. One that drafts soon after a plain one tells what drafting
    /// costs against plain rounds; any other tells how fast the machine is.
    fn follow(&mut self, expected: f64, drafted: bool, seconds: f64) {
        let scale = self.machine + if drafted { self.drafting } else { 0.0 };
        let surprise = (seconds / expected).ln() - scale;
        if !surprise.is_finite() {
            return;
        }
        self.since_plain = if drafted { self.since_plain.saturating_add(1) } else { 0 };
        let compares = drafted && self.since_plain <= RECENT;
        let (scale, gain) = match compares {
            true => (&mut self.drafting, DRAFTING_GAIN),
            false => (&mut self.machine, MACHINE_GAIN),
        };
        *scale += gain * surprise.clamp(-MOST_SURPRISE, MOST_SURPRISE);
    }
}

impl Policy for Auto {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let batch = round.requests.len();
        if batch == 0 {
            return Decision::uniform(round, 1, Shape::PLAIN);
        }
        self.rounds += 1;
        self.last_batch = batch;
        self.account.earn();
        let may_draft = |r: &&RequestView| r.most_steps() > 0;
        let drafting = round.requests.iter().filter(may_draft).count();
        let known = self.choice.take().filter(|c| (c.batch, c.drafting) == (batch, drafting));
        let choice = known.unwrap_or_else(|| {
            let missed = round.requests.iter().filter(may_draft).map(|r| r.behind).sum();
            self.compare(batch, &self.drafting(round), missed)
        });
        let plan = self.decide(&choice);
        self.expected_drafts = plan.tokens / batch as f64 - 1.0;
        let plain = self.plain(batch);
        let missed =
            |requests: &[usize]| requests.iter().map(|&at| round.requests[at].behind).sum();
        let (mut requests, mut steps, mut rows) = match plan.steps {
            0 => {
                let (requests, steps) = self.probe(round, &choice);
                let rows = batch + requests.len() * steps;
                let budget = (steps > 0).then_some(rows);
                (requests, steps, budget)
            }
            steps => {
                let all = (0..batch).filter(|&at| round.requests[at].most_steps() > 0).collect();
                (all, steps, Some(plan.rows))
            }
        };
        self.choice = Some(choice);
        let verified = rows.unwrap_or(batch);
        let mut extra = self.seconds(batch, verified, requests.len(), steps) / plain - 1.0;
        let mut catch_up = self.catch_up(missed(&requests)) / plain;
        if !self.account.affords(extra) {
            if self.steps > 0 {
                self.switch(0);
            }
            (requests, steps, rows, extra, catch_up) = (Vec::new(), 0, None, 0.0, 0.0);
        }
        self.account.charge(extra);
        self.charge_repaid(catch_up);
        let mut shapes = vec![Shape::PLAIN; batch];
        for &at in &requests {
            let steps = steps.min(round.requests[at].most_steps());
            shapes[at] = self.settings.largest.capped(steps);
        }
        let verified = rows.unwrap_or(batch);
        let table = self.costs.verify(batch, verified) + self.costs.draft(requests.len(), steps);
        let expected = (catch_up == 0.0).then_some(table);
        let drafting = requests.len();
        self.in_flight.push_back(InFlight { expected, charged: extra, drafting });
        let weight = |r: &RequestView| self.acceptance.rate_of(r.id) as f32;
        let shape = self.settings.largest.capped(steps);
        Decision {
            setting: Setting { batch, slot: 1, shape },
            weights: rows.map(|_| round.requests.iter().map(weight).collect()).unwrap_or_default(),
            rows,
            shapes,
            pause: true,
            expected: Some(if steps == plan.steps { plan.tokens } else { batch as f64 }),
        }
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let batch = outcome.setting.batch.max(1);
        let Some(round) = self.in_flight.pop_front() else { return };
        let drafted = outcome.setting.shape.steps() > 0;
        let correct: usize = outcome.requests.iter().map(|r| r.correct).sum();
        self.acceptance.learn(outcome.requests);
        if drafted {
            // Trees that were looked up may have come out smaller, or not at all.
            let rows: usize = outcome.requests.iter().map(|r| r.shape.nodes()).sum();
            let shape = outcome.setting.shape;
            // What void requests had is not known: trees of the full shape at most.
            let void = batch.saturating_sub(outcome.requests.len()) * shape.nodes();
            let (rows, steps) = (rows + void, shape.steps());
            let seconds = self.seconds(batch, rows, round.drafting, steps);
            let extra = (seconds / self.plain(batch) - 1.0).max(0.0);
            self.account.pay_back((round.charged - extra).max(0.0));
            self.account.pay_back(correct as f64 / batch as f64);
            self.choice = None;
        }
        if let (Some(expected), Some(seconds)) = (round.expected, outcome.seconds) {
            self.follow(expected, drafted, seconds);
        }
    }

    fn leave(&mut self, request: u64) {
        self.acceptance.leave(request);
    }

    fn shapes(&self) -> Vec<Shape> {
        let largest = self.settings.largest;
        (0..=largest.steps()).map(|steps| largest.capped(steps)).collect()
    }

    /// Plain decoding and the largest trees: those between come as they are needed.
    fn shapes_of(&self, _batch: usize) -> Vec<Shape> {
        vec![Shape::PLAIN, self.settings.largest]
    }

    /// A prompt is worth processing where drafting is faster although it is; else now and then, as
    /// a probe.
    fn reads_prompt(&mut self, batch: usize, prompt: PromptRows) -> bool {
        let batch = batch.max(1);
        let average = vec![(1.0, usize::MAX); batch];
        let target = self.costs.verify(1, 1 + prompt.target) - self.costs.verify(1, 1);
        let choice = self.compare(batch, &average, batch * prompt.draft);
        let best = Choice::best(&choice.plans);
        let cost = (self.catch_up(prompt.draft) + target) / self.plain(batch);
        if best.steps > 0 && self.may_draft() {
            self.charge_repaid(cost);
            return true;
        }
        let due = self.probes.is_due() || !self.acceptance.is_known();
        if !choice.could_pay || !due || !self.account.affords(cost) {
            return false;
        }
        self.account.charge(cost);
        self.probes.since = self.probes.interval;
        true
    }

    fn costs(&self) -> Option<&CostTable> {
        Some(&self.costs)
    }

    fn state(&self) -> PolicyState {
        let slot = SlotState {
            batch: self.last_batch,
            shape: self.settings.largest.capped(self.steps),
            expected_drafts: self.expected_drafts,
            rounds: self.rounds,
        };
        let (switches, probes) = (self.switches, self.probes.count);
        PolicyState { name: "auto", slots: vec![slot], switches, probes }
    }
}
