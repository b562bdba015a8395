//! Speculation: what is drafted, and what of it the target confirms.
//!
//! - [`Algorithm`] and its [`Declaration`]: what a draft algorithm is; [`Proposer`] drafts on the
//!   backend, [`HostProposer`] on the host.
//! - [`RecurrentDraft`]: the proposer of every [`Drafter`], a model that drafts recurrently:
//!   a [`HeadDrafter`] of [`Eagle3`], [`Eagle`] or [`Standalone`].
//! - [`Mtp`]: the proposer of heads that have a layer for each step.
//! - [`ngram`]: drafts from what followed the same tokens before, without any model.
//! - [`TrustedNgrams`]: n-grams where they have been right, beside a model.
//! - [`Packer`], [`Unpacker`]: what of a request's draft travels to another machine, as [`bytes`].
//! - [`Registry`]: algorithms by name, from the flag to something that drafts.
//! - Trees, verification and the other steps of a round are `aquila_compute::round`'s.
//! - [`policy`]: how large the trees of each round are.
//! - [`SpecStats`]: what came of it.
//!
//! The one invariant: what is drafted changes how many rounds an answer takes, never the answer.

mod algorithm;
pub mod bytes;
mod eagle;
mod eagle3;
mod error;
mod mixed;
mod mixed_entry;
mod mtp;
mod mtp_entry;
pub mod ngram;
mod packed;
pub mod policy;
mod recurrent;
mod registry;
mod standalone;
mod stats;

pub use algorithm::{
    Algorithm, Declaration, DraftBound, DraftRequest, HiddenStates, HostProposer, Placed, Proposer,
};
pub use aquila_compute::known_bugs;
pub use aquila_compute::round::{
    Accepted, Candidates, Coins, DraftGroup, Kept, MOST_DRAFT_GROUPS, MOST_STEPS, MOST_TOPK, Node,
    Proposal, RateSchedule, Shape, ShapeError, Simulate, SimulateMethod, SimulatedRound, Tree,
    TreeBuilder, TreeRows, Verify, Weighted, accept, prune_to_rows,
};
pub use aquila_compute::sampling::Candidate;
pub use eagle::Eagle;
pub use eagle3::Eagle3;
pub use error::{Error, Result};
pub use mixed::{Drafted, TrustedNgrams};
pub use mtp::{Mtp, MtpRoom};
pub use packed::{Packer, Unpacker};
pub use recurrent::{Drafter, HeadDrafter, RecurrentDraft};
pub use registry::{
    Allowance, AskedShape, DraftFlag, DraftFor, DraftOption, DraftOptions, Entry, LoadOn, NONE,
    Opened, Opening, Registry,
};
pub use standalone::Standalone;
pub use stats::SpecStats;
