//! What can go wrong below the model.

use std::fmt;

use crate::cpu::Isa;

/// An error of a backend; its text says what the user must change.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Memory that the machine would not give.
    #[error("cannot allocate {} for {what}", size(*bytes))]
    OutOfMemory {
        /// What the memory was for.
        what: String,
        /// How much was asked for.
        bytes: usize,
    },
    /// More than the kernels of a backend take.
    #[error("{asked} {what}: the device takes {most} at most")]
    Limit {
        /// What there is too much of.
        what: Limit,
        /// How much was asked for.
        asked: usize,
        /// The most that there may be.
        most: usize,
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

/// What kernels take only so much of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Limit {
    /// Rows of one pass.
    PassRows,
    /// Nodes of one level of a draft tree that go on.
    Topk,
    /// Outputs of all requests whose logits come at a time.
    Outputs,
    /// Values of one attention head.
    HeadWidth,
}

impl fmt::Display for Limit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Limit::PassRows => {
                "rows of a pass (prompt tokens of a round, and a tree for each running request)"
            }
            Limit::Topk => "nodes of each level of a draft tree",
            Limit::Outputs => {
                "outputs at a time (nodes of a level of the trees of all running requests)"
            }
            Limit::HeadWidth => "values in an attention head",
        })
    }
}

/// Bytes in words: the unit that leaves a number below 1024.
fn size(bytes: usize) -> String {
    let units = ["KiB", "MiB", "GiB", "TiB"];
    let power = (bytes.max(1).ilog2() as usize / 10).min(units.len());
    match power {
        0 => format!("{bytes} B"),
        _ => format!("{:.1} {}", bytes as f64 / (1u64 << (10 * power)) as f64, units[power - 1]),
    }
}

/// The result of a backend operation.
pub type Result<T> = std::result::Result<T, Error>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_was_refused_is_told_in_units_for_people() {
        let told = |bytes| Error::OutOfMemory { what: "keys".into(), bytes }.to_string();
        assert_eq!(told(1000), "cannot allocate 1000 B for keys");
        assert_eq!(told(3 << 29), "cannot allocate 1.5 GiB for keys");
        assert_eq!(told(usize::MAX), "cannot allocate 16777216.0 TiB for keys");
    }
}
