//! Requests whose prompt is processed by one engine and whose answer is decoded by another.
//!
//! A request is handed over by one engine ([`HandOver`]) and received by another ([`Source`]); what
//! is between them is not the engine's. The engine that decodes reserves slots first and says how
//! many rows it has cached; only then the other one begins, so none holds KV for a request that
//! cannot go on.

use std::ops::Range;
use std::sync::Arc;

use crate::listener::{FinishReason, Token, TokenRows};
use crate::request::RequestId;

/// Which other engine has a part in a request.
#[derive(Default)]
pub enum Transfer {
    /// No other engine: the request is processed and decoded here.
    #[default]
    None,
    /// Its prompt is processed here and its answer decoded elsewhere. It waits until
    /// [`claim`](crate::Scheduler::claim) says that the other engine has room.
    HandOver(Arc<dyn HandOver>),
    /// Its prompt is processed elsewhere; what that leaves comes by
    /// [`deliver`](crate::Scheduler::deliver).
    Receive(Box<dyn Source>),
}

/// What the engine that decodes a request says when it has slots for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Claim {
    /// Of the request's rows, the first so many of every group are there.
    pub have: usize,
    /// The seed of the request, given or derived: both engines choose with this one.
    pub seed: u64,
    /// How many candidates its first tree begins with.
    pub candidates: usize,
}

/// Takes what a prompt leaves, on the engine's threads: it must be quick and never block.
pub trait HandOver: Send + Sync {
    /// Whether the next chunk of the prompt may be processed; asked again until it may.
    fn has_room(&self) -> bool {
        true
    }

    /// Rows of one layer that are certain, in the order of their tokens in every layer; later layers
    /// may still run.
    fn rows(&self, rows: KvRows);

    /// The prompt is processed and all its rows were given; nothing follows.
    fn prefilled(&self, prefilled: Prefilled);

    /// The request was given up; nothing follows.
    fn failed(&self, why: &str);
}

/// Brings what a prompt has left elsewhere. It is dropped when all of that is here, or when nothing
/// of it is wanted any more.
pub trait Source: Send {
    /// The slots of the request of this engine's number are reserved.
    fn begin(&mut self, request: RequestId, claim: Claim);
}

/// Keys and values of some rows of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KvRows {
    /// The target's group is 0, those of the draft follow.
    pub group: usize,
    /// Which of the group's stores: a model may have several that share its slots.
    pub store: usize,
    /// Which layers of the store.
    pub layers: Range<usize>,
    /// Which rows of the request.
    pub rows: Range<usize>,
    /// As [`Backend::read_slots`](aquila_compute::Backend::read_slots) orders them.
    pub bytes: Vec<u8>,
}

/// What a prompt leaves beside rows.
#[derive(Debug, Clone, PartialEq)]
pub struct Prefilled {
    /// The first token of the answer; none where no answer was wanted.
    pub tokens: Vec<Token>,
    /// Why the answer ends with it, if it does. Rows are then of no use.
    pub ended: Option<FinishReason>,
    /// The prompt's tokens with log-probabilities, where asked for.
    pub prompt: Vec<Token>,
    /// What was asked for of the rows of the prompt's tokens.
    pub rows: TokenRows,
    /// Groups whose rows come along: the target's, then the draft's.
    pub groups: usize,
    /// Tokens of the prompt that were found in the prefix cache.
    pub cached_tokens: usize,
    /// What the algorithm has packed to go on drafting, if it was there to do so.
    pub draft: Option<Vec<u8>>,
}

/// What comes for a request that is received.
#[derive(Debug, Clone, PartialEq)]
pub enum Delivery {
    /// Rows, in the order of their tokens in every layer.
    Rows(KvRows),
    /// Some of what was asked for of the rows of the prompt's tokens, in the order of those; the
    /// rest comes with the end of the prompt.
    Returned(TokenRows),
    /// The end of the prompt.
    Prefilled(Box<Prefilled>),
    /// Nothing more, for this reason.
    Failed(String),
}
