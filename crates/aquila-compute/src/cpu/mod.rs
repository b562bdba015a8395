//! The CPU backend.

mod backend;
mod isa;

pub use backend::{CpuBackend, CpuKv, CpuPlan, CpuRows, CpuTable, CpuWeight};
pub use isa::{Isa, IsaChoice};
