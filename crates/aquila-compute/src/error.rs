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
    /// A CUDA device of an index that there is not.
    #[error("there is no CUDA device {ordinal}: there {}", counted(*count))]
    NoSuchDevice {
        /// The index that was asked for.
        ordinal: usize,
        /// How many there are.
        count: usize,
    },
    /// A CUDA device that there are no kernels for.
    #[error(
        "the CUDA device has compute capability {major}.{minor}; 8.0 (Ampere) or newer is needed"
    )]
    Capability {
        /// The first number of its compute capability.
        major: i32,
        /// The second.
        minor: i32,
    },
    /// A device that reported a failure.
    #[error("device error: {0}")]
    Device(String),
    /// A device that computes no more in this process: whatever it is asked from now on fails alike.
    #[error("the device is lost: {0}")]
    DeviceLost(String),
}

fn counted(devices: usize) -> String {
    match devices {
        1 => "is one GPU, cuda:0".into(),
        _ => format!("are {devices} GPUs, cuda:0 to cuda:{}", devices.saturating_sub(1)),
    }
}

/// The result of a backend operation.
pub type Result<T> = std::result::Result<T, Error>;
