//! Speculation: what is drafted, and what of it the target confirms.
//!
//! - [`Shape`]: how large a draft tree is.
//! - [`Growth`] and [`Tree`]: how a tree is drafted, and what of it is verified.
//! - [`accept`]: which drafts the target confirms; [`Simulate`] where that is only pretended.
//! - [`SpecStats`]: what came of it.
//!
//! The one invariant: what is drafted changes how many rounds an answer takes, never the answer.

mod accept;
mod shape;
mod simulate;
mod stats;
mod tree;

pub use accept::{Accepted, accept};
pub use aquila_compute::choose::Candidate;
pub use shape::{MOST_STEPS, MOST_TOPK, Shape, ShapeError};
pub use simulate::{Simulate, SimulateMethod};
pub use stats::SpecStats;
pub use tree::{Growth, Node, Tree};
