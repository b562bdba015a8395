//! Who decides the trees of a run, and what they decided.
//!
//! The one invariant: a policy that learns goes through the phases of a pass as one, however many
//! others the engine has had in between.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use aquila_engine::Speculation;
use aquila_spec::Shape;
use aquila_spec::policy::{
    Adaptive, AdaptiveTable, Auto, AutoSettings, CostTable, Decision, Fixed, Policy, PolicyState,
    Reading, RoundOutcome, RoundView,
};

use crate::error::{Error, Result};

/// The steps of chains and trees that never change.
const FIXED_STEPS: [usize; 4] = [1, 3, 5, MOST_STEPS];
/// The most steps that any contender but `auto` takes.
pub const MOST_STEPS: usize = 7;

/// A way of deciding.
#[derive(Debug, Clone, PartialEq)]
pub enum Contender {
    /// No draft at all.
    Plain,
    /// The same tree in every round.
    Fixed(Shape),
    /// SGLang's controller with its own table.
    Adaptive,
    /// The most expected tokens per second.
    Auto(AutoSettings, Arc<CostTable>),
}

impl Contender {
    /// Plain decoding first, then all that an engine with room for `room` can run; and the names
    /// of those that it cannot.
    pub fn all(
        room: Shape,
        mut settings: AutoSettings,
        costs: Arc<CostTable>,
    ) -> Result<(Vec<Self>, Vec<String>)> {
        let fits = |shapes: &[Shape]| Shape::covering(shapes.iter().copied().chain([room])) == room;
        let mut all = vec![Contender::Plain];
        let mut left_out = Vec::new();
        for steps in FIXED_STEPS {
            match room.steps() >= steps {
                true => all.push(Contender::Fixed(room.capped(steps))),
                false => left_out.push(Contender::Fixed(Shape::chain(steps)).name()),
            }
        }
        match fits(&Contender::Adaptive.policy()?.shapes()) {
            true => all.push(Contender::Adaptive),
            false => left_out.push(Contender::Adaptive.name()),
        }
        settings.candidates.retain(|&shape| fits(&[shape]));
        all.push(Contender::Auto(settings, costs));
        Ok((all, left_out))
    }

    /// As people know it.
    pub fn name(&self) -> String {
        match self {
            Contender::Plain => "plain".into(),
            Contender::Fixed(shape) if shape.steps() == 1 => "fixed, 1 step".into(),
            Contender::Fixed(shape) => format!("fixed, {} steps", shape.steps()),
            Contender::Adaptive => "SGLang's adaptive".into(),
            Contender::Auto(..) => "auto".into(),
        }
    }

    /// What its requests say.
    pub fn speculation(&self) -> Speculation {
        match self {
            Contender::Plain => Speculation::Off,
            _ => Speculation::Free,
        }
    }

    /// It, knowing nothing yet.
    pub fn begin(&self) -> Result<Observed> {
        let seen = Seen { policy: self.policy()?, chosen: Chosen::default() };
        Ok(Observed(Arc::new(Mutex::new(seen))))
    }

    fn policy(&self) -> Result<Box<dyn Policy>> {
        Ok(match self {
            Contender::Plain => Box::new(Fixed::new(Shape::PLAIN)),
            Contender::Fixed(shape) => Box::new(Fixed::new(*shape)),
            Contender::Adaptive => {
                let policy = Adaptive::new(AdaptiveTable::default(), None, Vec::new());
                Box::new(policy.map_err(|e| Error::Other(e.to_string()))?)
            }
            Contender::Auto(settings, costs) => {
                Box::new(Auto::new(settings.clone(), CostTable::clone(costs)))
            }
        })
    }
}

/// What was decided, summed over requests and rounds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Chosen {
    /// Trees, those of the certain token alone included.
    pub trees: u64,
    /// Their steps.
    pub steps: u64,
    /// Their nodes.
    pub nodes: u64,
}

impl Chosen {
    /// Adds what was decided elsewhere.
    pub fn add(&mut self, other: &Chosen) {
        self.trees += other.trees;
        self.steps += other.steps;
        self.nodes += other.nodes;
    }

    /// Steps of a tree on average.
    pub fn mean_steps(&self) -> f64 {
        self.steps as f64 / self.trees.max(1) as f64
    }

    /// Nodes of a tree on average, the certain one included.
    pub fn mean_nodes(&self) -> f64 {
        self.nodes as f64 / self.trees.max(1) as f64
    }
}

/// A policy that an engine may be given again and again, and whose decisions are counted.
#[derive(Clone)]
pub struct Observed(Arc<Mutex<Seen>>);

struct Seen {
    policy: Box<dyn Policy>,
    chosen: Chosen,
}

impl Observed {
    /// What it decided since this was asked last.
    pub fn take_chosen(&self) -> Chosen {
        std::mem::take(&mut self.seen().chosen)
    }

    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Policy for Observed {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let mut seen = self.seen();
        let decision = seen.policy.choose(round);
        for shape in &decision.shapes {
            let one = Chosen { trees: 1, steps: shape.steps() as u64, nodes: shape.nodes() as u64 };
            seen.chosen.add(&one);
        }
        decision
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        self.seen().policy.learn(outcome);
    }

    fn leave(&mut self, request: u64) {
        self.seen().policy.leave(request);
    }

    fn shapes(&self) -> Vec<Shape> {
        self.seen().policy.shapes()
    }

    fn admits(&mut self, batch: usize, reading: Reading) -> bool {
        self.seen().policy.admits(batch, reading)
    }

    fn weighs_confidence(&self) -> bool {
        self.seen().policy.weighs_confidence()
    }

    fn state(&self) -> PolicyState {
        self.seen().policy.state()
    }
}
