//! Where the tensors of a checkpoint come from.

use aquila_compute::{DType, HostTensor};

use crate::Result;

/// What is known of a tensor before its bytes are read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// The element type, where it is one that Aquila reads.
    pub dtype: Option<DType>,
    /// The element type as the file names it.
    pub stored_as: String,
    /// The shape, outermost dimension first.
    pub shape: Vec<usize>,
    /// How many bytes it has.
    pub bytes: u64,
    /// The file it is in.
    pub origin: String,
}

impl TensorInfo {
    /// Whether the tensor can be weights.
    pub fn is_float(&self) -> bool {
        matches!(self.dtype, Some(DType::Bf16 | DType::F16 | DType::F32))
    }
}

/// Named tensors: a file, several, or random numbers.
pub trait TensorSource: Send + Sync {
    /// Where the tensors come from, for error texts.
    fn origin(&self) -> &str;

    /// All names, sorted.
    fn names(&self) -> Vec<&str>;

    /// What is known of a tensor, if it exists.
    fn info(&self, name: &str) -> Option<TensorInfo>;

    /// A tensor; refused by name if it does not exist or cannot be read.
    fn get(&self, name: &str) -> Result<HostTensor>;

    /// Whether a tensor exists.
    fn contains(&self, name: &str) -> bool {
        self.info(name).is_some()
    }
}
