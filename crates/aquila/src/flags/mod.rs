//! Flags that commands share: one home for each, with its help and default.

mod engine;
mod model;
mod sampling;

pub use engine::EngineFlags;
pub use model::ModelFlags;
pub use sampling::SamplingFlags;
