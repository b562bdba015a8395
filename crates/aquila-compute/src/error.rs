//! What can go wrong below the model.

use crate::cpu::Isa;

/// An error of a backend; its text says what the user must change.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory that the machine would not give.
    #[error("cannot allocate {bytes} bytes for {what}")]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// How much was asked for.
        bytes: usize,
    },
    /// A tensor whose shape or type an operation cannot take.
    #[error("{0}")]
    Tensor(String),
    /// An instruction set, device or library that this machine lacks.
    #[error("{0}")]
    Unavailable(String),
    /// Kernels for instructions that this machine does not have.
    #[error(
        "this machine has no instructions of {0}; it has {has}",
        has = Isa::available().iter().map(Isa::to_string).collect::<Vec<_>>().join(", ")
    )]
    NoSuchIsa(Isa),
    /// A device that reported a failure.
    #[error("device error: {0}")]
    Device(String),
}

/// The result of a backend operation.
pub type Result<T> = std::result::Result<T, Error>;
