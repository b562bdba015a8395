//! What a backend does, and the CPU and CUDA backends that do it.
//!
//! - [`Backend`]: the operations of a forward pass, in the words of the domain.
//! - [`ForwardPlan`]: what every row of one pass is, writes and sees; plain data.
//! - [`HostTensor`]: a tensor of a checkpoint, before a backend packs it.
//! - [`RandomWeights`]: tensors without a checkpoint, drawn where they are read.
//! - [`mod@reference`]: every operation once more, plain and slow. It *defines* the bits of the
//!   CPU backend; the CUDA backend's plain arithmetic too.
//! - [`math`]: our own `exp`, `ln`, `sin`, `cos` and `powf`, equal on every machine.
//! - [`round`]: the steps of a round, with their plain reference.
//! - [`sampling`]: from logits to a token; the one rule for greedy and sampled requests.
//! - [`cpu`]: the CPU backend.
//! - [`cuda`]: the CUDA backend, whose libraries are looked for at run time.
//!
//! The one invariant: what a row computes depends on that row alone, never on how many rows,
//! threads, pages or chunks there are.

pub mod cpu;
pub mod cuda;
pub mod known_bugs;
pub mod math;
pub mod reference;
pub mod round;
pub mod sampling;

mod backend;
mod error;
mod forward_plan;
mod random_weights;
mod shape;
mod tensor;

pub use backend::{Accumulate, Backend, DraftIds, Normed};
pub use error::{Error, Limit, Result};
pub use forward_plan::{AttentionSpan, BlockTables, ForwardPlan, PlanBounds};
pub use random_weights::RandomWeights;
pub use shape::{
    Activation, AttentionParams, HeadShape, INT8_GROUP, KvDtype, KvShape, RopeTable, WeightFormat,
};
pub use tensor::{DType, HostTensor};
