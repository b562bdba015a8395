//! Requests into rounds: admission, batching, overlap, retraction, results. Token ids in, token
//! ids out.
//!
//! - [`Request`] and [`Listener`]: what is asked, and who hears the tokens.
//! - [`Scheduler`]: the rounds, on the caller's thread, or with the compute lane on a thread of its own.
//! - [`lanes`]: what the host lane and the compute lane tell each other.
//! - [`EngineHandle`]: the engine on a thread of its own, behind a bounded queue.
//! - [`Budget`]: what memory goes where, told before anything is served.
//!
//! The one invariant: what a request gets depends on that request alone, never on what else runs,
//! when it was admitted, whether it was retracted and resumed, or which lane was ahead.

mod budget;
mod config;
mod costs;
mod engine;
mod error;
mod handle;
pub mod lanes;
mod life;
mod listener;
mod output_processor;
mod plan;
mod priority;
mod queue;
mod report;
mod request;
mod retract;
mod settle;
mod stats;
mod times;

pub use budget::{Budget, BudgetLine, available_memory};
pub use config::EngineConfig;
pub use engine::Scheduler;
pub use error::{Error, Result, SubmitError};
pub use handle::EngineHandle;
pub use lanes::Runner;
pub use listener::{FinishReason, Listener, Outcome, StopCause, Token, Usage, Verdict};
pub use priority::Priorities;
pub use queue::AdmissionOrder;
pub use request::{Limits, Request, RequestId, Speculation};
pub use stats::{DraftingState, Snapshot, Stats};
pub use times::Times;
