//! The steps of a round on the device, as [`crate::round`] defines them: the rows of all running requests
//! and their trees, what is planned, chosen, accepted and moved, and what the host reads when it is over.

mod admission;
mod choose;
mod grammar;
mod host_round;
mod layout;
mod outcome;
mod seed;
mod state;
mod state_sizes;
mod steps;

pub(super) use choose::TokensOf;
pub use state::CudaState;
