//! The steps of a round, as operations of a backend: their plain data, and their reference.
//!
//! A round is draft, tree, verify, accept, compact, publish, extend. What it works on is the
//! [`RoundState`]: a row for each running request, which lives in the backend. The host tells a
//! round what changed (a [`Batch`]), enqueues the steps, and reads one small [`RequestOutput`] for
//! each request at the end.
//!
//! - [`RequestParams`], [`DraftLimits`]: what a request asks of every round; never changes.
//! - [`Batch`], [`BatchRow`], [`RowWork`]: what the host tells a round.
//! - [`RoundState`]: the rows of all requests, and the reference of every step. The CPU backend
//!   runs it as it is.
//! - [`Shape`], [`Tree`], [`TreeBuilder`], [`prune_to_rows`]: draft trees.
//! - [`Candidates`], [`SamplingContext`]: what a draft proposes after a token.
//! - [`Grammar`], [`GrammarState`]: which tokens may follow.
//! - [`accept`], [`Verify`], [`Simulate`]: which drafts the target confirms.
//! - [`Kept`]: which rows of a round are kept, and where they belong.
//! - [`ReturnedRows`], [`HostRows`]: rows of the target that a request gets, on the backend and on
//!   the host.
//!
//! The one invariant: what a request gets in a round depends on its row of the state, its slots
//! and the batch's row for it, and on nothing that another request does.

mod batch;
mod compaction;
mod draft_tree;
mod grammar;
mod known_bugs;
mod layers;
mod params;
mod paused_drafts;
mod proposal;
mod recurrent;
mod returned;
mod row;
mod row_budget;
mod sequence;
mod shape;
mod simulate;
mod state;
mod target;
mod verify;

pub use batch::{
    Admitted, Batch, BatchRow, DraftFeedback, Ended, ExtendRows, Extent, GraphKey, PassRows,
    RequestOutput, RowWork, StateBounds, TableChange, TreeLimits, VerifiedTree,
};
pub use compaction::Kept;
pub use draft_tree::{Node, Tree, TreeBuilder};
pub(crate) use grammar::GrammarRow;
pub use grammar::{Grammar, GrammarState};
pub use layers::KeptLayout;
pub use params::{DraftGroup, DraftLimits, MOST_DRAFT_GROUPS, RequestParams, Returned, TreeRows};
pub use proposal::{Candidates, DraftQuery, SamplingContext};
pub use returned::{HostRows, ReturnedRows};
pub use row_budget::{Weighted, prune_to_rows};
pub use shape::{MOST_STEPS, MOST_TOPK, Shape, ShapeError};
pub use simulate::{RateSchedule, Simulate, SimulateMethod, SimulatedRound};
pub use state::RoundState;
pub use target::{FollowedPath, TreeQuery};
pub use verify::{Accepted, Coins, Proposal, Verify, accept};
