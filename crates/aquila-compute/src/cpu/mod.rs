//! The CPU backend: kernels of our own, written once in [`lanes`] and compiled per instruction
//! set, threads of our own in [`pool`]. Results equal [`crate::reference`] bit for bit.

mod attend;
mod backend;
mod int8;
mod isa;
mod kv;
mod lanes;
mod memory;
mod plan;
mod pool;
mod project;
mod rows;
mod rowwise;
mod weight;

pub use backend::{CpuBackend, CpuTable};
pub use isa::{Isa, IsaChoice};
pub use kv::CpuKv;
pub use plan::CpuPlan;
pub use rows::CpuRows;
pub use weight::CpuWeight;
