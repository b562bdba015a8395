//! Heads that draft for a model from its hidden states.
//!
//! - [`Eagle3Spec`]: what an EAGLE-3 head is, from its config and the names of its tensors.
//! - [`HeadCheckpoint`]: a head that was checked against the model it is to draft for.
//! - [`Eagle3Head`]: the head on a backend; [`HeadScratch`]: what its passes work in and leave.

mod checkpoint;
mod eagle3;
mod spec;
mod vocabulary;

pub use checkpoint::HeadCheckpoint;
pub use eagle3::{Eagle3Head, HeadScratch, Hidden};
pub use spec::Eagle3Spec;

pub(crate) use spec::is_eagle3;
