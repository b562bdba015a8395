//! A policy that follows a script: what a request gets depends on its number and on how many
//! rounds it has had, and on nothing that others do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use aquila_engine::Scheduler;
use aquila_spec::Shape;
use aquila_spec::policy::{
    Decision, Policy, PolicyState, PromptRows, RequestView, RoundOutcome, RoundView, Setting,
};

/// The tree that a request gets in its n-th round.
pub type Script = fn(request: u64, round: usize) -> Shape;

/// What came of a round of a request.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Round {
    pub request: u64,
    pub shape: Shape,
    pub correct: usize,
    /// Whether there were drafts behind those that were right.
    pub refused: bool,
}

pub struct Scripted {
    pub script: Script,
    pub shapes: Vec<Shape>,
    /// The largest batch in which requests are drafted for that come to it.
    pub most: usize,
    /// All that was heard, in order.
    pub heard: Arc<Mutex<Vec<Round>>>,
    /// What it was told of prompts, in order.
    pub asked: Arc<Mutex<Vec<PromptRows>>>,
    /// Rows that each request of a batch may have on average, where they are bounded.
    pub rows_each: Option<usize>,
    /// The rows of all rounds that were bounded, together.
    pub granted: Arc<AtomicUsize>,
    /// Whether drafts without a tree are paused.
    pub pause: bool,
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
            rows_each: None,
            granted: Arc::default(),
            pause: true,
            rounds: HashMap::new(),
        }
    }
}

/// Trees of many shapes and rounds without one, for an engine with room for trees of 5 steps, 16
/// branches and 64 nodes.
pub fn any_tree(request: u64, round: usize) -> Shape {
    let tree = |steps, topk, nodes| Shape::new(steps, topk, nodes).unwrap();
    match super::Numbers(request * 1009 + round as u64 + 1).below(8) {
        0 | 1 => Shape::PLAIN,
        2 => tree(2, 1, 3),
        3 => tree(5, 1, 6),
        4 => tree(3, 4, 12),
        _ => tree(5, 16, 64),
    }
}

/// Lets `engine` switch as [`any_tree`] says.
pub fn switch(engine: &mut Scheduler) {
    let all = Shape::new(5, 16, 64).unwrap();
    engine.draft_by(Box::new(Scripted::new(&[all], any_tree))).unwrap();
}

impl Policy for Scripted {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        let mut shapes = Vec::new();
        for request in round.requests {
            let rounds = self.rounds.entry(request.id).or_default();
            let shape = (self.script)(request.id, *rounds);
            *rounds += 1;
            shapes.push(shape.capped(request.cap.unwrap_or(usize::MAX)));
        }
        let shape = Shape::covering(shapes.iter().copied());
        let setting = Setting { batch: shapes.len(), slot: 1, shape };
        let rows = self.rows_each.map(|rows| rows * shapes.len());
        self.granted.fetch_add(rows.unwrap_or(0), Ordering::Relaxed);
        let rate = |request: &RequestView| 0.3 + 0.1 * (request.id % 7) as f32;
        Decision {
            setting,
            rows,
            weights: round.requests.iter().map(rate).collect(),
            shapes,
            pause: self.pause,
            expected: None,
        }
    }

    fn learn(&mut self, outcome: &RoundOutcome<'_>) {
        let round = |r: &aquila_spec::policy::RequestOutcome<'_>| Round {
            request: r.id,
            shape: r.shape,
            correct: r.correct,
            refused: r.refused > 0,
        };
        self.heard.lock().unwrap().extend(outcome.requests.iter().map(round));
    }

    fn leave(&mut self, request: u64) {
        self.rounds.remove(&request);
    }

    fn shapes(&self) -> Vec<Shape> {
        self.shapes.clone()
    }

    fn reads_prompt(&mut self, batch: usize, prompt: PromptRows) -> bool {
        self.asked.lock().unwrap().push(prompt);
        batch <= self.most
    }

    fn state(&self) -> PolicyState {
        PolicyState { name: "scripted", ..PolicyState::default() }
    }
}
