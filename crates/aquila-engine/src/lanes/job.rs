//! What the lanes tell each other: a [`Job`] for each round, a [`Done`] for each job, in order.
//!
//! Plain data and nothing shared. A job says what the host lane knows, slots and row ranges; how
//! many tokens a request has by then, the compute lane alone knows.

use std::ops::Range;
use std::sync::Arc;

use aquila_compute::round::{DraftFeedback, RequestParams, RowWork};
use aquila_spec::Declaration;

use crate::listener::{FinishReason, Token};
use crate::request::RequestId;
use crate::times::Times;

/// What runs rounds: a model, or something that pretends to be one.
pub trait Compute: Send + 'static {
    /// What the host lane must know of it.
    fn profile(&self) -> Profile;

    /// Forgets what the texts of requests have taught; there are none now.
    fn begin_anew(&mut self) {}

    /// Runs one round. A panic fails the round and every one of the same era behind it.
    fn run(&mut self, job: Job) -> Done;
}

/// What the host lane knows of what computes.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The size of the vocabulary.
    pub vocabulary: usize,
    /// What the draft needs, if there is one.
    pub declaration: Option<Declaration>,
}

/// One round, as the compute lane is told it. What left is told before what was admitted, then
/// slots, then parts.
#[derive(Debug, Default)]
pub struct Job {
    /// Jobs are numbered from 0 on.
    pub number: u64,
    /// Where a round fails, those of its era that are on their way fail with it.
    pub era: u64,
    /// Requests that hold nothing any more.
    pub left: Vec<Left>,
    /// Requests that hold KV from now on.
    pub admitted: Vec<Admission>,
    /// Changes of slot tables.
    pub tables: Vec<TableChange>,
    /// The slots of all changes, side by side.
    pub slots: Vec<u32>,
    /// Rows that all trees together may have in the verify pass; none: as many as were drafted.
    pub row_budget: Option<usize>,
    /// Whether trees that come out smaller than their shape are filled up, to time what those of
    /// that shape take.
    pub fill_trees: bool,
    /// What runs.
    pub parts: Vec<Part>,
}

/// A request that ended, or was retracted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Left {
    /// Which.
    pub request: RequestId,
    /// How many of its tokens are its text; what was chosen beyond them is void.
    pub tokens: usize,
}

/// A request that begins, or goes on after it was retracted.
#[derive(Debug)]
pub struct Admission {
    /// What it asks.
    pub params: Arc<RequestParams>,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    /// How many of them have rows already, in each of its groups.
    pub matched: usize,
    /// How many of its drafts were verified so far.
    pub rounds: u64,
}

/// The slots of a request in one group, from the row `from` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    /// Whose.
    pub request: RequestId,
    /// The target's group is 0, those of the draft follow.
    pub group: usize,
    /// The first row whose slot is told.
    pub from: usize,
    /// Which of the job's slots.
    pub slots: Range<usize>,
}

/// What one request does in a round.
#[derive(Debug, Clone, PartialEq)]
pub struct Part {
    /// Which.
    pub request: RequestId,
    /// What.
    pub task: RowWork,
}

/// What came of a job.
#[derive(Debug)]
pub struct Done {
    /// The job's number.
    pub number: u64,
    /// What each part yields, in order: nothing where the request had ended before. Or why the
    /// round failed.
    pub outcome: Result<Vec<Option<Yield>>, String>,
    /// How long the steps took.
    pub times: Times,
}

/// What one part of a round yields. Its widths are its own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Yield {
    /// Tokens of the prompt with what was asked about them.
    pub prompt: Vec<Token>,
    /// Tokens of the answer; none where nothing was to be chosen.
    pub tokens: Vec<Token>,
    /// Drafts that were verified.
    pub proposed: usize,
    /// Drafts that were right, as far as the tree goes: the text may end before.
    pub correct: usize,
    /// What ended the text by the request's own rules.
    pub ended: Option<FinishReason>,
    /// How many tokens of the text the draft has taken in.
    pub known: usize,
    /// What the round teaches about drafts.
    pub lesson: DraftFeedback,
}
