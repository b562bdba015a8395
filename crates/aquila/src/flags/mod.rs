//! Flags that commands share: one home for each, with its help and default.

mod engine;
mod head;
mod log_level;
mod model;
mod ngram;
mod number;
mod policy;
mod sampling;
pub mod sglang;
mod speculative;
mod verify;

pub use engine::{EngineFlags, SchedulePolicy};
pub use log_level::LogLevel;
pub use model::ModelFlags;
pub use number::whole;
pub use policy::PolicyPlan;
pub use sampling::SamplingFlags;
pub use speculative::{Speculative, SpeculativeFlags};
