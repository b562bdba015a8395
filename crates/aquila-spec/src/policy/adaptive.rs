//! SGLang's controller: each slot of batch sizes moves among its candidate steps by a running
//! mean of the drafts that were right.
//!
//! The one invariant: a result changes the slot that its round was run in, and no other, however
//! late it comes and whatever size the batch has by then.

use super::{
    AdaptiveTable, BatchSlots, Decision, Policy, PolicyError, PolicyState, RoundOutcome, RoundView,
    SlotSettings, SlotState,
};
use crate::Shape;

/// SGLang's policy.
#[derive(Debug, Clone)]
pub struct Adaptive {
    routes: BatchSlots,
    slots: Vec<Slot>,
    switches: u64,
}

impl Adaptive {
    /// Starts every slot at `num_steps` where that is its candidate, else in the middle of its
    /// candidates. `captured` are the batch sizes to which the engine pads; none on a CPU.
    pub fn new(
        table: AdaptiveTable,
        num_steps: Option<usize>,
        captured: Vec<usize>,
    ) -> Result<Self, PolicyError> {
        let launch = table.launch_steps(num_steps)?;
        let routes = BatchSlots::new(table.slots.keys().copied().collect(), captured);
        let slots = table.slots.into_values().map(|settings| Slot::new(settings, launch));
        Ok(Self { routes, slots: slots.collect(), switches: 0 })
    }

    /// The running mean of right drafts in the slot of a batch size.
    pub fn ema(&self, batch: usize) -> f64 {
        self.slots[self.routes.index(batch)].ema
    }
}

impl Policy for Adaptive {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let at = self.routes.index(round.requests.len());
        // As in SGLang, a draft follows the text while its slot is plain.
        let decision = Decision::uniform(round, self.routes.bound(at), self.slots[at].shape());
        Decision { pause: false, ..decision }
    }

    /// A result counts in its own slot always. It moves that slot's mean only if both drafted:
    /// its round, since a plain one says nothing about drafts, and the slot now, since SGLang
    /// holds the mean while a slot is plain. Where the slot went from one number of steps to
    /// another meanwhile, the result counts as it is.
    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let Some(at) = self.routes.of_bound(outcome.setting.slot) else { return };
        let drafted = outcome.setting.shape.steps() > 0;
        // Requests that may not speculate would pull the mean of the others down.
        let heard = outcome.requests.iter().filter(|r| !drafted || r.shape.steps() > 0);
        let (count, correct) = heard.fold((0, 0), |(n, sum), r| (n + 1, sum + r.correct));
        if count > 0 && self.slots[at].update(drafted, correct as f64 / count as f64) {
            self.switches += 1;
        }
    }

    fn shapes(&self) -> Vec<Shape> {
        let mut all = Vec::new();
        for shape in self.slots.iter().flat_map(Slot::shapes) {
            if !all.contains(&shape) {
                all.push(shape);
            }
        }
        all
    }

    /// Those of its slot: no other graph of this size could be asked for.
    fn shapes_of(&self, batch: usize) -> Vec<Shape> {
        self.slots[self.routes.index(batch)].shapes().collect()
    }

    fn state(&self) -> PolicyState {
        let slot = |(at, slot): (usize, &Slot)| SlotState {
            batch: self.routes.bound(at),
            shape: slot.shape(),
            expected_drafts: slot.ema,
            rounds: slot.count,
        };
        let slots = self.slots.iter().enumerate().map(slot).collect();
        PolicyState { name: "adaptive", slots, switches: self.switches, probes: 0 }
    }
}

/// One slot: where it is among its candidates, and the running mean of right drafts.
#[derive(Debug, Clone)]
struct Slot {
    settings: SlotSettings,
    at: usize,
    ema: f64,
    count: u64,
}

impl Slot {
    fn new(settings: SlotSettings, launch: usize) -> Self {
        let steps = &settings.candidate_steps;
        let at = steps.iter().position(|&s| s == launch).unwrap_or(steps.len() / 2);
        // One less than the steps neither rises nor drops; a slot that starts plain gets -1,
        // which marks it as never having drafted.
        let ema = steps[at] as f64 - 1.0;
        Self { settings, at, ema, count: 0 }
    }

    /// What it chooses among.
    fn shapes(&self) -> impl Iterator<Item = Shape> + '_ {
        self.settings.candidate_steps.iter().map(|&steps| self.settings.shape(steps))
    }

    fn steps(&self) -> usize {
        self.settings.candidate_steps[self.at]
    }

    fn shape(&self) -> Shape {
        self.settings.shape(self.steps())
    }

    /// Takes in a round's mean of right drafts; says whether the steps changed.
    fn update(&mut self, drafted: bool, mean: f64) -> bool {
        if drafted && self.steps() > 0 {
            let alpha = self.settings.ema_alpha;
            self.ema = (1.0 - alpha) * self.ema + alpha * mean;
        }
        self.count += 1;
        let Some(since) = self.count.checked_sub(self.settings.warmup_batches) else {
            return false;
        };
        if since == 0 || since % self.settings.update_interval != 0 {
            return false;
        }
        let from = self.at;
        self.at = if self.steps() == 0 { self.retry() } else { self.settle() };
        self.at != from
    }

    /// From plain decoding, the next candidate is tried, for want of anything to decide by.
    fn retry(&mut self) -> usize {
        let at = (self.at + 1).min(self.settings.candidate_steps.len() - 1);
        let steps = self.settings.candidate_steps[at];
        if steps > 0 && self.ema < 0.0 {
            self.ema = steps as f64 - 1.0;
        }
        at
    }

    fn settle(&self) -> usize {
        let steps = &self.settings.candidate_steps;
        let drops = |at: usize| {
            let below = match steps[at - 1] {
                0 => 0.5,
                below => below as f64 - 0.5,
            };
            self.ema <= below + self.settings.down_hysteresis
        };
        let rises = |at: usize| self.ema > steps[at] as f64 - 0.5 + self.settings.up_hysteresis;
        let mut at = self.at;
        while at > 0 && drops(at) {
            at -= 1;
        }
        while at >= self.at && at + 1 < steps.len() && rises(at) {
            at += 1;
        }
        self.under_ceiling(at)
    }

    /// The ceiling lowers steps and never hinders a rise, which is how more steps are tried.
    fn under_ceiling(&self, mut at: usize) -> usize {
        let (steps, coeff) = (&self.settings.candidate_steps, self.settings.ceiling_coeff);
        if coeff > 0.0 && at <= self.at {
            let ceiling = (self.ema * coeff).ceil().max(1.0);
            while at > 0 && steps[at] as f64 > ceiling {
                at -= 1;
            }
        }
        at
    }
}
