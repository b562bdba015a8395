//! A policy that follows a script: what a request gets depends on its number and on how many
//! rounds it has had, and on nothing that others do.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use aquila_engine::Scheduler;
use aquila_engine::lanes::Compute;
use aquila_spec::Shape;
use aquila_spec::policy::{
    Decision, Policy, PolicyState, Reading, RoundOutcome, RoundView, Setting,
};

/// What a request gets in its n-th round: a tree, or a look at its draft.
pub type Script = fn(request: u64, round: usize) -> (Shape, bool);

/// What came of a round of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    pub request: u64,
    pub shape: Shape,
    pub correct: usize,
    /// Whether there were drafts behind those that were right.
    pub refused: bool,
    pub watched: Option<bool>,
}

pub struct Scripted {
    pub script: Script,
    pub shapes: Vec<Shape>,
    /// The largest batch in which requests are drafted for that come to it.
    pub most: usize,
    /// All that was heard, in order.
    pub heard: Arc<Mutex<Vec<Round>>>,
    /// What it was told that drafts would read, in order.
    pub asked: Arc<Mutex<Vec<Reading>>>,
    rounds: HashMap<u64, usize>,
}

impl Scripted {
    pub fn new(shapes: &[Shape], script: Script) -> Self {
        Self {
            script,
            shapes: shapes.to_vec(),
            most: usize::MAX,
            heard: Arc::default(),
            asked: Arc::default(),
            rounds: HashMap::new(),
        }
    }
}

/// Trees of many shapes, looks and rounds without either, for an engine with room for trees of 5
/// steps, 16 branches and 64 nodes.
pub fn any_tree(request: u64, round: usize) -> (Shape, bool) {
    let tree = |steps, topk, nodes| (Shape::new(steps, topk, nodes).unwrap(), false);
    match super::Numbers(request * 1009 + round as u64 + 1).below(8) {
        0 => (Shape::PLAIN, false),
        1 => (Shape::PLAIN, true),
        2 => tree(2, 1, 3),
        3 => tree(5, 1, 6),
        4 => tree(3, 4, 12),
        _ => tree(5, 16, 64),
    }
}

/// Lets `engine` switch as [`any_tree`] says.
pub fn switch<C: Compute>(engine: &mut Scheduler<C>) {
    let all = Shape::new(5, 16, 64).unwrap();
    engine.draft_by(Box::new(Scripted::new(&[all], any_tree))).unwrap();
}

impl Policy for Scripted {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let mut shapes = Vec::new();
        let mut watch = Vec::new();
        for (at, request) in round.requests.iter().enumerate() {
            let rounds = self.rounds.entry(request.id).or_default();
            let (shape, watches) = (self.script)(request.id, *rounds);
            *rounds += 1;
            let most = request.cap.unwrap_or(usize::MAX);
            shapes.push(shape.capped(most));
            if watches && most > 0 {
                watch.push(at);
            }
        }
        let shape = Shape::covering(shapes.iter().copied());
        let watches = !watch.is_empty();
        let setting = Setting { batch: shapes.len(), slot: 1, shape, watches };
        Decision { setting, shapes, expected: None, watch }
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let round = |r: &aquila_spec::policy::RequestOutcome<'_>| Round {
            request: r.id,
            shape: r.shape,
            correct: r.correct,
            refused: r.refused > 0,
            watched: r.watched,
        };
        self.heard.lock().unwrap().extend(outcome.requests.iter().map(round));
    }

    fn leave(&mut self, request: u64) {
        self.rounds.remove(&request);
    }

    fn shapes(&self) -> Vec<Shape> {
        self.shapes.clone()
    }

    fn admits(&mut self, batch: usize, reading: Reading) -> bool {
        self.asked.lock().unwrap().push(reading);
        batch <= self.most
    }

    fn state(&self) -> PolicyState {
        PolicyState { name: "scripted", ..PolicyState::default() }
    }
}
