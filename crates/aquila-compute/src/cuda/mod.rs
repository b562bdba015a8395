//! The CUDA backend. In every build: the driver is looked for when a backend is opened, and a machine
//! without it is told so. Nothing else is needed, since the kernels are shipped compiled.
//!
//! The one invariant: everything goes to one stream, in program order, at fixed addresses. So an
//! operation only enqueues, a sequence of operations can be captured as a [`Graph`] and replayed
//! with another plan placed, and memory that a graph names lives as long as the graph.
//!
//! A row gives the same bits alone and among others. Which bits, a plain reference says:
//! [`contract`] for tensor cores, [`crate::reference`] for plain arithmetic.

pub mod contract;

mod arguments;
mod attention;
mod backend;
mod c_layout;
mod copies;
mod device;
mod experts;
mod failure;
mod found;
mod graph;
mod kernels;
mod launch;
mod limits;
mod memory;
mod operations;
mod plan;
mod projection;
mod random;
mod round;
mod rows;
mod snapshot;
mod tensor_projection;
mod tile_projection;
mod transfer;
mod weight;

pub use backend::CudaBackend;
pub use experts::{CudaExperts, CudaRouting};
pub use found::{FoundDevice, FoundDriver, NEEDED_CUDA, find_driver, try_device};
pub use graph::{Graph, Mark};
pub use memory::{CudaKv, CudaRope, CudaTable, CudaVector};
pub use plan::CudaPlan;
pub use round::CudaState;
pub use rows::CudaRows;
pub use tensor_projection::{FEW_OUTPUTS, Fastest, PREDICTED, ProjectionClass, ProjectionKernel};
pub use tile_projection::{TILE_SHAPES, TileShape};
pub use weight::CudaWeight;

/// How a [`CudaBackend`] multiplies and adds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Arithmetic {
    /// By tensor cores, with bfloat16 weights, inputs, keys and values and f32 sums: [`contract`].
    Tensor,
    /// By ordinary multiply-adds in f32, in the order of [`crate::reference`], whatever the weights
    /// are: the bits are those of the CPU backend. For tests; slow.
    Plain,
}

impl std::fmt::Display for Arithmetic {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Arithmetic::Tensor => "tensor cores",
            Arithmetic::Plain => "plain arithmetic",
        })
    }
}
