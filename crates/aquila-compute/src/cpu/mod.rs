//! The CPU backend: kernels of our own, written once in 16 virtual lanes and compiled for each
//! instruction set, and threads of our own. Results equal [`mod@crate::reference`] bit for bit,
//! whatever the rows, threads, slots and instructions.
//!
//! - `simd`: the vocabulary of the kernels, for AVX-512, AVX2 and any machine.
//! - `matmul` and `int8` of a `product`, `attend` with `block`, `rowwise`: the kernels; `moe`:
//!   products with experts.
//! - `weight`, `table`, `kv`, `rows`, `plan`: what they work on; `memory` is where that lives.
//! - `backend`: what the CPU owns; `operations`: what it does, with `attention` and `moe`; `share`:
//!   how that is shared out; `pool`: the threads; `watch`: reports of each operation, for profiles
//!   and tests.

mod attend;
mod attention_tasks;
mod backend;
mod block;
mod int8;
mod isa;
mod kv;
mod matmul;
mod memory;
mod moe;
mod operations;
mod plan;
mod pool;
mod product;
mod rows;
mod rowwise;
mod share;
mod simd;
mod table;
mod watch;
mod weight;

pub use backend::CpuBackend;
pub use isa::{Isa, IsaChoice};
pub use kv::CpuKv;
pub use moe::{CpuExperts, CpuRouting};
pub use plan::CpuPlan;
pub use rows::CpuRows;
pub use table::CpuTable;
pub use watch::{Operation, Watch};
pub use weight::CpuWeight;
