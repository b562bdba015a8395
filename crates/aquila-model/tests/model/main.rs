//! The crate through its public surface.

mod bits;
mod configs;
mod files;
mod golden;
mod inspection;
mod places;
mod random_weights;
mod sequence;
mod tiny;
