//! Embedding tables.
//!
//! A table is copied when it is loaded. The tensor that it comes from may be a mapped file, and
//! whoever truncates such a file kills the process that reads the mapping next.

use bytes::Bytes;

use super::memory::{Region, Shared};
use super::pool::Pool;
use crate::{HostTensor, Result};

/// Bytes that a thread copies at a time.
const CHUNK: usize = 4 << 20;

/// An embedding table, stored as the checkpoint has it.
pub struct CpuTable {
    tensor: HostTensor,
    tokens: usize,
    width: usize,
}

impl CpuTable {
    /// Copies a tensor `[tokens, width]`, chunks in parallel.
    pub(super) fn copy(tensor: &HostTensor, pool: &Pool) -> Result<Self> {
        let (tokens, width) = tensor.matrix()?;
        // Refuses integer tensors now rather than when a token is read.
        tensor.read_f32(0, &mut [])?;
        let size = tensor.byte_len();
        let mut region = Region::new(size, "an embedding table")?;
        let to = Shared::new(region.as_mut_ptr());
        pool.run(size.div_ceil(CHUNK), &|chunk| {
            let start = chunk * CHUNK;
            let length = CHUNK.min(size - start);
            // SAFETY: the region has room for all bytes, and chunks do not overlap.
            let part = unsafe { std::slice::from_raw_parts_mut(to.get().add(start), length) };
            tensor.read_bytes(start / tensor.dtype().size(), part);
        });
        let (name, dtype, shape) = (tensor.name(), tensor.dtype(), tensor.shape().to_vec());
        let tensor = HostTensor::new(name, dtype, shape, Bytes::from_owner(region))?;
        Ok(Self { tensor, tokens, width })
    }

    /// How many tokens there are.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The width of a row.
    pub(super) fn width(&self) -> usize {
        self.width
    }

    /// The row of a token, widened to f32; `out` has the table's width.
    pub(super) fn read(&self, token: u32, out: &mut [f32]) {
        let start = token as usize * self.width;
        self.tensor.read_f32(start, out).expect("the element type was checked");
    }
}
