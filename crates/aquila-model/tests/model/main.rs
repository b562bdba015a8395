//! The crate through its public surface.

mod bad_files;
mod bits;
mod configs;
mod golden;
mod inspection;
mod places;
mod random_weights;
mod sequence;
mod tiny;
