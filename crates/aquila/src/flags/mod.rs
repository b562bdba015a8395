//! Flags that commands share: one home for each, with its help and default.

mod access;
mod disaggregation;
mod engine;
mod graphs;
mod head;
mod log_level;
mod model;
pub mod named;
mod ngram;
mod number;
#[cfg(test)]
mod page;
mod policy;
mod sampling;
mod server;
pub mod sglang;
mod speculative;
mod verify;

pub use access::AccessFlags;
pub use disaggregation::DisaggregationFlags;
pub use engine::{EngineFlags, SchedulePolicy};
pub use graphs::GraphFlags;
pub use log_level::{LogFormat, LogLevel};
pub use model::{Device, ModelFlags};
pub use number::whole;
pub use policy::PolicyPlan;
pub use sampling::SamplingFlags;
pub use server::ServerFlags;
pub use speculative::{Speculative, SpeculativeFlags};
