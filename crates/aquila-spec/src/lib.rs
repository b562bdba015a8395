//! Speculation: what is drafted, and what of it the target confirms.
//!
//! - [`Shape`]: how large a draft tree is.
//! - [`Growth`] and [`Tree`]: how a tree is drafted, and what of it is verified.
//! - [`Algorithm`] and its [`Declaration`]: what a draft algorithm is.
//! - [`Speculator`]: the algorithm of every [`Drafter`], a model that drafts recurrently; [`Eagle3`],
//!   [`Eagle`] and [`Standalone`] are three.
//! - [`Mtp`]: the algorithm of heads that have a layer for each step.
//! - [`ngram`]: drafts from what followed the same tokens before, without any model.
//! - [`Mixed`]: a model and n-grams together, whichever promises more.
//! - [`Registry`]: algorithms by name, from the flag to something that drafts.
//! - [`prune_to_rows`]: which nodes of a batch's trees are verified where rows are few.
//! - [`accept`]: which drafts the target confirms; [`Verify`] where that is a matter of
//!   probability, [`Simulate`] where it is only pretended.
//! - [`commit()`]: one operation over everything that has a row per node.
//! - [`policy`]: how large the trees of each round are.
//! - [`SpecStats`]: what came of it.
//!
//! The one invariant: what is drafted changes how many rounds an answer takes, never the answer.

mod accept;
mod algorithm;
mod commit;
mod draft;
mod eagle;
mod eagle3;
mod error;
mod kept_states;
#[cfg(feature = "known-bugs")]
pub mod known_bugs;
mod mixed;
mod mixed_entry;
mod mtp;
mod mtp_entry;
pub mod ngram;
pub mod policy;
mod registry;
mod row_budget;
mod shape;
mod simulate;
mod standalone;
mod stats;
mod tree;
mod verify;

pub use accept::{Accepted, accept};
pub use algorithm::{
    Algorithm, Asking, BlockTable, Declaration, DraftAsk, DraftGroup, Drafting, Extending,
    GroupRows, HiddenStates, MOST_DRAFT_GROUPS, Offer, Seed, TargetRows, Travels, TreeRows,
};
pub use aquila_compute::choose::Candidate;
pub use commit::{Kept, KvRows, NodeRows, PassRows, commit};
pub use draft::{Drafter, Speculator};
pub use eagle::Eagle;
pub use eagle3::Eagle3;
pub use error::{Error, Result};
pub use mixed::{Drafted, Mixed};
pub use mtp::{Mtp, MtpRoom};
pub use registry::{
    Allowance, AskedShape, DraftFlag, DraftFor, DraftOption, DraftOptions, Entry, LoadOn, NONE,
    Opened, Opening, Registry,
};
pub use row_budget::{Weighted, prune_to_rows};
pub use shape::{MOST_STEPS, MOST_TOPK, Shape, ShapeError};
pub use simulate::{RateSchedule, Simulate, SimulateMethod, SimulatedRound};
pub use standalone::Standalone;
pub use stats::SpecStats;
pub use tree::{Growth, Node, Tree};
pub use verify::{Coins, Proposal, Verify};
