//! What the host tells a round, and what it reads of it. Plain data; nothing grows with the
//! context.

use std::ops::Range;
use std::sync::Arc;

use super::layers::KeptLayout;
use super::{DraftGroup, HostRows, Node, RequestParams, Shape, Simulate, Verify};
use crate::sampling::Choice;

/// What a state must have room for.
#[derive(Debug, Clone, PartialEq)]
pub struct StateBounds {
    /// Requests that hold KV at a time. Each has a place from 0 on.
    pub places: usize,
    /// Slots of one request's block table.
    pub stride: usize,
    /// Whether a model drafts on the backend.
    pub drafts: bool,
    /// The groups of that model.
    pub groups: Vec<DraftGroup>,
    /// Whether it takes the target's hidden rows.
    pub hidden: bool,
    /// The first hidden row behind those of a pass of the target.
    pub first_parked: usize,
    /// Hidden rows that are kept for a request while its draft is paused.
    pub parked_rows: usize,
    /// Rows of the largest pass that processes what a paused draft missed.
    pub chunk: usize,
    /// The largest tree.
    pub shape: Shape,
    /// How the drafts of sampled requests are verified.
    pub verify: Verify,
    /// Tokens of the target's vocabulary.
    pub vocabulary: usize,
    /// Outputs of the target's largest pass.
    pub outputs: usize,
    /// Those whose logits come at a time.
    pub logits: usize,
    /// Acceptance that is only simulated, if it is.
    pub simulate: Option<Simulate>,
}

/// One round, as the host tells it: departures before admissions, then block tables, then rows.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// The number of the round.
    pub round: u64,
    /// Places whose requests hold nothing any more.
    pub departed: Vec<usize>,
    /// Requests that hold KV from now on.
    pub admitted: Vec<Admitted>,
    /// Changes of block tables.
    pub tables: Vec<TableChange>,
    /// The slots of all changes, side by side.
    pub slots: Vec<u32>,
    /// What runs.
    pub rows: Vec<BatchRow>,
    /// Rows that the steps of the round are enqueued for, if more than these: what is captured then
    /// serves every batch up to it.
    pub bound: usize,
    /// What bounds the trees, beside their shapes.
    pub limits: TreeLimits,
}

/// A request that begins, or goes on after it was preempted.
#[derive(Debug, Clone)]
pub struct Admitted {
    /// Its place.
    pub place: usize,
    /// What it queries.
    pub params: Arc<RequestParams>,
    /// Prompt and answer so far.
    pub tokens: Vec<u32>,
    /// How many of them have rows already, in each of its groups.
    pub matched: usize,
    /// Whether all of them but the last have, in every group as many as are certain: it decodes
    /// next.
    pub complete: bool,
    /// How many of its drafts were verified so far.
    pub rounds: u64,
}

/// The slots of a request in one group, from the row `from` on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TableChange {
    /// Whose.
    pub place: usize,
    /// The target's group is 0, those of the draft follow.
    pub group: usize,
    /// The first row whose slot is told.
    pub from: usize,
    /// Which of the batch's slots.
    pub slots: Range<usize>,
}

/// What one request does in a round.
#[derive(Debug, Clone, PartialEq)]
pub struct BatchRow {
    /// Where the request is.
    pub place: usize,
    /// What it does.
    pub work: RowWork,
}

/// A chunk of a prefill, or a tree.
#[derive(Debug, Clone, PartialEq)]
pub enum RowWork {
    /// The rows of tokens `rows`; the logits of those in `outputs`, which end where `rows` end,
    /// are sampled. `last` says that nothing of the prompt is left.
    Prefill {
        /// Which rows.
        rows: Range<usize>,
        /// Which of them are sampled.
        outputs: Range<usize>,
        /// Whether decoding is next.
        last: bool,
    },
    /// A tree below the last token, or that token alone.
    Decode {
        /// The largest tree that the round's policy grants it.
        shape: Shape,
        /// How likely its drafts are to be right, where the row budget is short.
        rate: f32,
        /// Whether its draft is paused where it gets no tree.
        pause: bool,
    },
}

/// What bounds the trees of a round beside their shapes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct TreeLimits {
    /// Rows that all trees together may have; none: as many as were drafted.
    pub row_budget: Option<usize>,
    /// Whether trees that come out smaller than their shape are filled up, to time what those of
    /// that shape take.
    pub fill: bool,
}

/// What the operations of a round depend on, beside the bounds of its passes: those of rounds with
/// equal keys differ in nothing but what lies on the device.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct GraphKey(pub Vec<u64>);

/// How many rows a pass has, and how many of them have logits; or bounds on both, where they are
/// not known yet.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub struct Extent {
    /// Rows.
    pub rows: usize,
    /// Rows with logits.
    pub outputs: usize,
}

/// Which tokens of a text a draft processes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExtendRows {
    /// Those that a paused draft missed, before it drafts again: the pass of this number. The last
    /// such pass leaves the seeds.
    CatchUp(usize),
    /// Those that the round made certain.
    Round,
}

/// Which rows a pass has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PassRows {
    /// The target's: chunks of prefills, and trees.
    Target,
    /// The certain rows of a draft that recurs. With `hidden`, each takes the target's hidden row.
    RecurrentExtend {
        /// Whether hidden rows are taken.
        hidden: bool,
    },
    /// One level of the trees of a draft that recurs: a row for each node of a beam. `first` rows
    /// go on from the hidden rows of their request's seed, others from their parent's.
    RecurrentLevel {
        /// Whether the level is the first.
        first: bool,
    },
    /// The certain rows of one layer of a draft with a layer for each step.
    LayerExtend {
        /// Which layer.
        layer: usize,
        /// Where hidden states are kept.
        kept: KeptLayout,
    },
    /// One level of the trees of such a draft: for each node of a beam as many rows as it is deep.
    LayerLevel {
        /// How deep the nodes are.
        depth: usize,
        /// Where hidden states are kept.
        kept: KeptLayout,
    },
}

/// What came of a request's row of a round. Its widths are its own.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RequestOutput {
    /// Tokens of the prompt with what was asked about them.
    pub prompt: Vec<Choice>,
    /// Tokens of the answer; none where nothing was sampled.
    pub tokens: Vec<Choice>,
    /// Drafts that were verified.
    pub proposed: usize,
    /// Drafts that were right, as far as the tree goes: the text may end before.
    pub correct: usize,
    /// What ended the text by the request's own rules.
    pub ended: Option<Ended>,
    /// How many tokens of the text the draft has processed.
    pub known: usize,
    /// What the round says about drafts.
    pub feedback: DraftFeedback,
    /// Hidden states of the rows that the round committed, in order; none where not asked for.
    pub hidden_states: HostRows<f32>,
    /// The experts of the same rows.
    pub routed_experts: HostRows<u32>,
    /// The tree that was verified; none where not asked for.
    pub tree: Option<Box<VerifiedTree>>,
}

/// A tree, and what of it was accepted.
#[derive(Debug, Clone, PartialEq)]
pub struct VerifiedTree {
    /// Parents before children; node 0 is the bonus token of the round before.
    pub nodes: Vec<Node>,
    /// The nodes on the accepted path, the root first. The text may end before the last of them.
    pub accepted: Vec<usize>,
}

/// What ended a text by the request's own rules.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ended {
    /// The target chose this stop token.
    Token(u32),
    /// It is as long as it may become.
    Length,
    /// Its grammar allows nothing more.
    Grammar,
    /// What its grammar allows next cannot be found out, for this reason.
    GrammarFailed(String),
}

/// What a policy learns of a request's row of a round, beside how many drafts were right.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DraftFeedback {
    /// How deep its tree was.
    pub depth: usize,
    /// For each draft that was right, how many siblings came before it.
    pub ranks: Vec<u8>,
    /// Drafts at the end of the accepted path, all of them wrong.
    pub refused: usize,
}
