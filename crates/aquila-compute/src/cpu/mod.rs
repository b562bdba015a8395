//! The CPU backend: kernels of our own, written once in [`lanes`] and compiled per instruction
//! set, threads of our own in [`pool`]. Results equal [`crate::reference`] bit for bit.

mod backend;
mod int8;
mod isa;
mod lanes;
mod memory;
mod pool;
mod project;
mod rows;
mod weight;

pub use backend::{CpuBackend, CpuKv, CpuPlan, CpuTable};
pub use isa::{Isa, IsaChoice};
pub use rows::CpuRows;
pub use weight::CpuWeight;
