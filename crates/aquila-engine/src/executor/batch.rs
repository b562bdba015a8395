//! What the scheduler and the executor tell each other: a [`ScheduledBatch`] for each round, a
//! [`BatchOutput`] for each batch, in order.
//!
//! Plain data and nothing shared. A batch says what the scheduler knows, slots and row ranges; how
//! many tokens a request has by then, only the backend's state knows.

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use aquila_compute::KvShape;
use aquila_compute::round::{RequestOutput, RequestParams, RowWork};
use aquila_spec::Declaration;

use super::graphs::GraphPart;
use crate::error::RoundError;
use crate::request::RequestId;
use crate::times::Times;
use crate::transfer::{HandOver, KvRows};

/// What runs rounds: a model, or something that pretends to be one.
pub trait Executor: Send + 'static {
    /// What the scheduler must know of it.
    fn profile(&self) -> Profile;

    /// Forgets what the texts of requests have taught; there are none now.
    fn begin_anew(&mut self) {}

    /// The parts of rounds that were captured so far.
    fn captured(&self) -> Vec<CapturedPart> {
        Vec::new()
    }

    /// Whether a round can be enqueued while the one before it runs: whether nothing that the host
    /// reads of that one decides what is enqueued.
    fn runs_ahead(&self, _batch: &ScheduledBatch) -> bool {
        false
    }

    /// Enqueues a round, or runs it at once. A panic fails the round and every one of the same epoch
    /// behind it.
    fn enqueue(&mut self, batch: ScheduledBatch);

    /// Waits for the oldest round that was enqueued and not finished, and says what came of it. A panic
    /// has the same consequences.
    fn finish(&mut self) -> BatchOutput;
}

/// A part of rounds that was captured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CapturedPart {
    /// Which.
    pub part: GraphPart,
    /// The rows of its passes.
    pub rows: usize,
    /// The steps of a draft.
    pub steps: usize,
    /// How long the capture took.
    pub time: Duration,
    /// How many of its replays were compared with launches.
    pub checks: u64,
}

impl fmt::Display for CapturedPart {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { rows, steps, .. } = self;
        match self.part {
            GraphPart::Draft => write!(f, "a draft of {steps} steps in {rows} rows"),
            GraphPart::Verify => write!(f, "a verification of {rows} rows"),
            GraphPart::Extend => write!(f, "an extend of {rows} rows"),
        }
    }
}

/// What the scheduler knows of an executor.
#[derive(Debug, Clone)]
pub struct Profile {
    /// The size of the vocabulary.
    pub vocabulary: usize,
    /// What the draft needs, if there is one.
    pub declaration: Option<Declaration>,
    /// How wide the rows are that requests may get.
    pub row_widths: RowWidths,
    /// Whether it keeps to grammars.
    pub grammars: bool,
    /// The stores of keys and values of each group, the target's first.
    pub kv: Vec<Vec<KvShape>>,
}

/// How many values the rows have that requests may get.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RowWidths {
    /// Of hidden states.
    pub hidden_states: usize,
    /// Of routed experts, those of all layers together; 0 where no layer has experts.
    pub routed_experts: usize,
}

/// One round, as the executor is told it: departures before admissions, then slots, rows that came
/// from elsewhere, then requests, then what goes elsewhere.
#[derive(Debug, Default)]
pub struct ScheduledBatch {
    /// Batches are numbered from 0 on.
    pub number: u64,
    /// Where a round fails, those of its epoch that are on their way fail with it.
    pub epoch: u64,
    /// Requests that hold nothing any more.
    pub departed: Vec<Departed>,
    /// Requests that hold KV from now on.
    pub admitted: Vec<Admission>,
    /// Changes of block tables.
    pub tables: Vec<TableChange>,
    /// The slots of all changes, side by side.
    pub slots: Vec<u32>,
    /// Rows that all trees together may have in the verify pass; none: as many as were drafted.
    pub row_budget: Option<usize>,
    /// Whether trees that come out smaller than their shape are filled up, to time what those of
    /// that shape take.
    pub fill_trees: bool,
    /// Rows that came from another engine.
    pub imports: Vec<Import>,
    /// Admitted requests whose drafts were packed by another engine.
    pub unpack: Vec<Unpack>,
    /// What runs.
    pub requests: Vec<RequestWork>,
    /// Rows that go to another engine.
    pub exports: Vec<Export>,
    /// Requests whose drafts are packed for another engine.
    pub pack: Vec<RequestId>,
}

/// Rows that came from another engine, and their slots.
#[derive(Debug)]
pub struct Import {
    /// The rows.
    pub rows: KvRows,
    /// Where each of them goes.
    pub slots: Vec<u32>,
}

/// An admitted request whose draft was packed by another engine.
#[derive(Debug)]
pub struct Unpack {
    /// Which.
    pub request: RequestId,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    /// What was packed; nothing where nothing is drafted for it.
    pub packed: Vec<u8>,
}

/// Rows that the round makes certain, and go to another engine: those of the target layer by layer
/// while its pass runs, those of a draft when the round is over.
pub struct Export {
    /// Who takes them.
    pub to: Arc<dyn HandOver>,
    /// The target's group is 0, those of the draft follow.
    pub group: usize,
    /// Which rows of the request.
    pub rows: Range<usize>,
    /// Where each of them is.
    pub slots: Vec<u32>,
}

impl fmt::Debug for Export {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rows {:?} of group {}", self.rows, self.group)
    }
}

/// A request that ended, or was preempted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Departed {
    /// Which.
    pub request: RequestId,
    /// How many of its tokens are its text; what was chosen beyond them is void.
    pub tokens: usize,
}

/// A request that begins, or goes on after it was preempted.
#[derive(Debug)]
pub struct Admission {
    /// What it asks.
    pub params: Arc<RequestParams>,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    /// How many of them have rows already, in each of its groups.
    pub matched: usize,
    /// Whether all of them but the last have: its rows came from another engine.
    pub complete: bool,
    /// How many of its drafts were verified so far.
    pub rounds: u64,
}

/// The slots of a request in one group, from the row `from` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    /// Which request.
    pub request: RequestId,
    /// The target's group is 0, those of the draft follow.
    pub group: usize,
    /// The first row whose slot is told.
    pub from: usize,
    /// Which of the batch's slots.
    pub slots: Range<usize>,
}

/// What one request does in a round.
#[derive(Debug, Clone, PartialEq)]
pub struct RequestWork {
    /// Which request.
    pub request: RequestId,
    /// What it does.
    pub work: RowWork,
}

/// What came of a batch.
#[derive(Debug)]
pub struct BatchOutput {
    /// The batch's number.
    pub number: u64,
    /// What came of each request, in order: nothing where it had ended before. Or why the round
    /// failed.
    pub outcome: Result<Vec<Option<RequestOutput>>, RoundError>,
    /// Whether what was packed for each request could be used, in the order of the batch.
    pub unpacked: Vec<bool>,
    /// What was packed for each request, in the order of the batch.
    pub packed: Vec<Vec<u8>>,
    /// How long the steps took.
    pub times: Times,
}
