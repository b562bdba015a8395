//! The CUDA backend. In every build: the driver and the run-time compiler are looked for when a
//! backend is opened, and a machine without them is told so.
//!
//! The one invariant: everything goes to one stream, in program order, at fixed addresses. So an
//! operation only enqueues, a sequence of operations can be captured as a [`Graph`] and replayed
//! with another plan placed, and memory that a graph names lives as long as the graph.
//!
//! A row gives the same bits alone and among others (`kernels.cu` says how); against the CPU it is
//! equal within rounding, since sums are made in another order.

mod arguments;
mod attention;
mod backend;
mod device;
mod graph;
mod kernels;
mod memory;

pub use backend::CudaBackend;
pub use graph::{Graph, Mark};
pub use memory::{CudaKv, CudaPlan, CudaRope, CudaRows, CudaTable, CudaVector, CudaWeight};
