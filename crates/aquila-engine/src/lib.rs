//! Requests into rounds: admission, batching, overlap, preemption, results. Token ids in, token
//! ids out.
//!
//! - [`Request`] and [`Listener`]: what is asked, and who hears the tokens.
//! - [`Scheduler`]: the rounds, on the caller's thread, or with the executor on a thread of its own.
//! - [`executor`]: what runs rounds, and what it and the scheduler tell each other.
//! - [`EngineHandle`]: the engine on a thread of its own, behind a bounded queue.
//! - [`Transfer`]: a request between two engines, one of which processes its prompt;
//!   [`EnginePair`]: both in one process.
//! - [`EngineFailure`]: why an engine serves no more.
//! - [`Budget`]: what memory goes where, told before anything is served.
//!
//! The one invariant: what a request gets depends on that request alone, never on what else runs,
//! when it was admitted, whether it was preempted and resumed, or whether rounds overlapped.

mod awaited;
mod budget;
mod config;
mod engine_pair;
mod error;
pub mod executor;
mod failure;
mod handle;
mod listener;
mod request;
mod scheduler;
mod stats;
mod times;
mod transfer;

pub use aquila_compute::round::{HostRows, Node as TreeNode, Returned, VerifiedTree};
pub use budget::{Budget, BudgetError, BudgetLine, available_memory};
pub use config::{ConfigError, EngineConfig};
pub use engine_pair::{Alter, EnginePair};
pub use error::{Error, PromptBound, Result, ReturnedKind, RoundError, SubmitError};
pub use executor::Runner;
pub use failure::EngineFailure;
pub use handle::EngineHandle;
pub use listener::{FinishReason, Listener, Outcome, StopCause, Token, TokenRows, Usage, Verdict};
pub use request::{Limits, Request, RequestId, Speculation};
pub use scheduler::{AdmissionOrder, Priorities, Scheduler};
pub use stats::{DraftingState, Snapshot, Stats};
pub use times::Times;
pub use transfer::{Claim, Delivery, HandOver, KvRows, Prefilled, Source, Transfer};
