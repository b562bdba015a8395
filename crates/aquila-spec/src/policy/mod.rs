//! How large the trees of a round are: decided before it, from what settled rounds taught.
//!
//! - [`Policy`]: the trait. The scheduler asks once before each decode round, and hands every
//!   result back when it arrives, however late.
//! - [`Fixed`]: one shape, exactly as given.
//! - [`Adaptive`] and its [`AdaptiveTable`]: SGLang's controller, slots by batch size.
//! - [`Auto`]: the most expected tokens per second, from a [`CostTable`] and [`Acceptance`], with a
//!   [`LossAccount`] that bounds what it can lose against plain decoding.
//!
//! The one invariant: a policy decides from what it was told and from nothing else (no clock, no
//! randomness), so the same views and outcomes in the same order give the same shapes again.

mod acceptance;
mod account;
mod adaptive;
mod adaptive_table;
mod auto;
mod costs;
mod error;
mod slots;

pub use acceptance::Acceptance;
pub use account::LossAccount;
pub use adaptive::Adaptive;
pub use adaptive_table::{AdaptiveTable, SlotSettings};
pub use auto::{Auto, AutoSettings};
pub use costs::{CostTable, Timed, Timing};
pub use error::PolicyError;
pub use slots::BatchSlots;

use crate::Shape;

/// Decides how large the trees of each round are.
pub trait Policy: Send {
    /// The shapes of the round that begins.
    fn choose(&mut self, round: &RoundView<'_>) -> Decision;

    /// Takes the result of a round, in any later round. Every round with requests that decode has
    /// a result, be it one without requests.
    fn learn(&mut self, outcome: &RoundOutcome<'_>);

    /// The request of this number has ended: what was kept for it may go.
    fn leave(&mut self, _request: u64) {}

    /// The shapes that it chooses among, for reservations and for what is captured beforehand. A
    /// request may get less than one of them, never more.
    fn shapes(&self) -> Vec<Shape>;

    /// Those of them for a batch of this size that are worth capturing beforehand.
    fn shapes_of(&self, _batch: usize) -> Vec<Shape> {
        self.shapes()
    }

    /// Whether the draft of a request is to process its prompt. The request joins a batch of
    /// `batch`, itself included. If not, it is decoded plainly to its end. Asked once for each
    /// request that may be drafted for.
    fn reads_prompt(&mut self, _batch: usize, _prompt: PromptRows) -> bool {
        true
    }

    /// What it was told rounds cost, if it asks.
    fn costs(&self) -> Option<&CostTable> {
        None
    }

    /// Where it stands, for people.
    fn state(&self) -> PolicyState;
}

/// The requests that decode in a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundView<'a> {
    /// They, in the order of the batch.
    pub requests: &'a [RequestView],
}

/// What is known of a request before its tree is drafted.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestView {
    /// Its number.
    pub id: u64,
    /// The most steps it may get: what it asked for, what room is left, 0 where its draft was
    /// paused for too long to resume. None: as many as the policy likes.
    pub cap: Option<usize>,
    /// Rows that its draft missed while it was paused, and processes first when it resumes.
    pub behind: usize,
}

impl RequestView {
    /// A request without a cap, whose draft missed nothing.
    pub fn new(id: u64) -> Self {
        Self { id, cap: None, behind: 0 }
    }

    fn most_steps(&self) -> usize {
        self.cap.unwrap_or(usize::MAX)
    }
}

/// What it takes that the draft of a request processes its prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PromptRows {
    /// Rows of the draft: what of the prompt is not cached for both.
    pub draft: usize,
    /// Rows of the target that are computed only for it: what is cached for the target alone.
    pub target: usize,
}

impl PromptRows {
    /// Those of a prompt of which nothing is cached.
    pub fn of(tokens: usize) -> Self {
        Self { draft: tokens, target: 0 }
    }
}

/// What a round was run with. It travels with the round and comes back with its outcome.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Setting {
    /// Requests that decode.
    pub batch: usize,
    /// The policy's slot: the least batch size of it.
    pub slot: usize,
    /// The largest tree of the round.
    pub shape: Shape,
}

/// The shapes of a round.
#[derive(Debug, Clone, PartialEq)]
pub struct Decision {
    /// What the outcome must carry.
    pub setting: Setting,
    /// The largest tree of each request, in the order of the view; none exceeds `setting.shape`.
    pub shapes: Vec<Shape>,
    /// Rows that the whole batch verifies at most, the bonus tokens included; none where every tree
    /// is verified as it was drafted.
    pub rows: Option<usize>,
    /// With `rows`, how likely a draft of each request is to be right.
    pub weights: Vec<f32>,
    /// Whether drafts without a tree are paused; if not, they process what becomes certain.
    pub pause: bool,
    /// Tokens that the policy expects of the round, where it has an opinion.
    pub expected: Option<f64>,
}

impl Decision {
    fn uniform(round: &RoundView<'_>, slot: usize, shape: Shape) -> Self {
        let shapes: Vec<_> = round.requests.iter().map(|r| shape.capped(r.most_steps())).collect();
        let setting = Setting { batch: round.requests.len(), slot, shape };
        Self { setting, shapes, rows: None, weights: Vec::new(), pause: true, expected: None }
    }

    /// The most rows of the verify pass.
    pub fn most_rows(&self) -> usize {
        self.shapes.iter().map(Shape::nodes).sum()
    }
}

/// What came of a round.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RoundOutcome<'a> {
    /// What the decision said.
    pub setting: Setting,
    /// Its requests, without those whose row turned out void.
    pub requests: &'a [RequestOutcome<'a>],
    /// What it took, in seconds, draft and extend included. None where something else ran with
    /// it, such as a chunk of a prompt.
    pub seconds: Option<f64>,
}

/// What came of a request's tree.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct RequestOutcome<'a> {
    /// Its number.
    pub id: u64,
    /// The shape of what was verified.
    pub shape: Shape,
    /// Drafts that were right.
    pub correct: usize,
    /// For each of them how many siblings came before it; may be empty where all came first.
    pub ranks: &'a [u8],
    /// Drafts at the end of the accepted path, all of them wrong; 0 where the tree ended there.
    pub refused: usize,
}

impl RequestOutcome<'static> {
    /// The outcome of a chain of which `correct` drafts were right.
    pub fn chain(id: u64, shape: Shape, correct: usize) -> Self {
        let refused = usize::from(correct < shape.steps());
        Self { id, shape, correct, ranks: &[], refused }
    }
}

/// Where a policy stands.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PolicyState {
    /// The policy's name, as the flag takes it.
    pub name: &'static str,
    /// Its slots, smallest batch first.
    pub slots: Vec<SlotState>,
    /// How often a slot's steps changed.
    pub switches: u64,
    /// Probes: runs of verified drafts among plain rounds.
    pub probes: u64,
}

/// Where a slot stands.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SlotState {
    /// Its least batch size.
    pub batch: usize,
    /// The shape that its next round gets.
    pub shape: Shape,
    /// Drafts that it expects to be right in a round of one request, if it keeps such a count.
    pub expected_drafts: f64,
    /// Results that it has heard.
    pub rounds: u64,
}

/// One shape for every round.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fixed {
    shape: Shape,
    rounds: u64,
}

impl Fixed {
    /// Always this shape, less what a request's cap cuts.
    pub fn new(shape: Shape) -> Self {
        Self { shape, rounds: 0 }
    }
}

impl Policy for Fixed {
    fn choose(&mut self, round: &RoundView<'_>) -> Decision {
        Decision::uniform(round, 1, self.shape)
    }

    fn learn(&mut self, _outcome: &RoundOutcome<'_>) {
        self.rounds += 1;
    }

    fn shapes(&self) -> Vec<Shape> {
        vec![self.shape]
    }

    fn state(&self) -> PolicyState {
        let expected_drafts = self.shape.steps() as f64;
        let slot = SlotState { batch: 1, shape: self.shape, expected_drafts, rounds: self.rounds };
        PolicyState { name: "fixed", slots: vec![slot], ..PolicyState::default() }
    }
}
