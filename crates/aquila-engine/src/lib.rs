//! Requests into rounds: admission, batching, retraction, results. Token ids in, token ids out.
//!
//! - [`Request`] and [`Listener`]: what is asked, and who hears the tokens.
//! - [`Engine`]: the rounds, one after the other, on the caller's thread.
//! - [`EngineHandle`]: the engine on a thread of its own, behind a bounded queue.
//! - [`Budget`]: what memory goes where, told before anything is served.
//!
//! The one invariant: what a request gets depends on that request alone, never on what else runs,
//! when it was admitted, or whether it was retracted and resumed.

mod budget;
mod config;
mod engine;
mod error;
mod handle;
mod life;
mod listener;
mod queue;
mod report;
mod request;
mod round;
mod runner;
mod stats;
mod times;

pub use budget::{Budget, BudgetLine, available_memory};
pub use config::EngineConfig;
pub use engine::Engine;
pub use error::{Error, Result, SubmitError};
pub use handle::EngineHandle;
pub use listener::{FinishReason, Listener, Outcome, StopCause, Token, Usage, Verdict};
pub use request::{Limits, Request, RequestId, Speculation};
pub use runner::Runner;
pub use stats::{Snapshot, Stats};
pub use times::Times;
