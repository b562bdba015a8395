//! The crate through its public surface.

mod behaviour;
mod random_steps;
