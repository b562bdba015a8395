//! The crate through its public surface.

mod attention;
mod choose;
mod choose_samples;
mod cuda_absent;
mod experts;
mod made;
mod projections;
mod random_weights;
mod rowwise;
mod transfer;
