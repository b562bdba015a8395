//! What the backend keeps on the device beside rows, projections and plans: vectors, tables, keys and
//! values.
//!
//! The one invariant: a thing is made once, at one address, and never moves.

use super::copies::Mailbox;
use super::device::{Device, Memory};
use super::kernels::Kernels;
use super::limits;
use super::random::DeviceRandom;
use crate::{DType, Error, HostTensor, KvDtype, KvShape, Result, RopeTable};

/// Values converted and sent at a time.
const PIECE: usize = 1 << 24;
/// Pairs of slots that one launch moves.
pub(super) const MOVES: usize = 1024;

/// A vector of f32 on the device.
pub struct CudaVector {
    pub(super) memory: Memory,
    pub(super) len: usize,
}

impl CudaVector {
    pub(super) fn new(device: &Device, parts: &[HostTensor]) -> Result<Self> {
        let mut values = Vec::new();
        for part in parts {
            values.extend(part.to_f32()?);
        }
        let memory = device.allocate_uncompared("a vector", values.len() * 4)?;
        device.write(&memory, 0, &values)?;
        Ok(Self { memory, len: values.len() })
    }
}

/// An embedding table on the device: bfloat16 as it comes, anything else as f32.
pub struct CudaTable {
    pub(super) memory: Memory,
    pub(super) tokens: usize,
    pub(super) width: usize,
    pub(super) bf16: bool,
}

impl CudaTable {
    pub(super) fn new(device: &Device, kernels: &Kernels, tensor: &HostTensor) -> Result<Self> {
        let (tokens, width) = tensor.matrix()?;
        let bf16 = tensor.dtype() == DType::Bf16;
        let size = if bf16 { 2 } else { 4 };
        let memory = device.allocate_uncompared("an embedding table", tokens * width * size)?;
        if let Some(elements) = tensor.random_elements() {
            let random = DeviceRandom::new(device, &kernels.random, elements)?;
            random.draw(device, 0..tensor.len(), bf16, &memory, 0)?;
        } else if bf16 {
            device.write(&memory, 0, &tensor.bytes())?;
        } else {
            let mut values = vec![0.0f32; PIECE.min(tensor.len())];
            for start in (0..tensor.len()).step_by(PIECE) {
                let values = &mut values[..PIECE.min(tensor.len() - start)];
                tensor.read_f32(start, values)?;
                device.write(&memory, start * 4, values)?;
            }
        }
        Ok(Self { memory, tokens, width, bf16 })
    }
}

/// Cosines and sines on the device.
pub struct CudaRope {
    pub(super) cos: Memory,
    pub(super) sin: Memory,
    pub(super) half: usize,
    pub(super) positions: usize,
}

impl CudaRope {
    pub(super) fn new(device: &Device, table: &RopeTable) -> Result<Self> {
        let cos = device.allocate_uncompared("a rope table", table.cos.len() * 4)?;
        let sin = device.allocate_uncompared("a rope table", table.sin.len() * 4)?;
        device.write(&cos, 0, &table.cos)?;
        device.write(&sin, 0, &table.sin)?;
        Ok(Self { cos, sin, half: table.half, positions: table.positions() })
    }
}

/// Keys and values of one group on the device: layer, then slot, then head.
pub struct CudaKv {
    pub(super) keys: Memory,
    pub(super) values: Memory,
    pub(super) shape: KvShape,
    pub(super) moves: Mailbox,
}

impl CudaKv {
    pub(super) fn new(device: &Device, shape: KvShape) -> Result<Self> {
        limits::check_head(shape.head_dim)?;
        let bytes = shape.bytes_per_slot() / 2 * shape.slots;
        Ok(Self {
            keys: device.allocate("keys", bytes)?,
            values: device.allocate("values", bytes)?,
            shape,
            moves: Mailbox::new(device, "moves", 2 * MOVES)?,
        })
    }

    /// Where the keys and the values of `layer` begin, in bytes.
    pub(super) fn layer(&self, layer: usize) -> Result<usize> {
        if layer >= self.shape.layers {
            return Err(Error::Tensor(format!(
                "layer {layer} of a group of {} layers",
                self.shape.layers
            )));
        }
        Ok(layer * self.shape.bytes_per_slot() / (2 * self.shape.layers) * self.shape.slots)
    }

    pub(super) fn bf16(&self) -> bool {
        self.shape.dtype == KvDtype::Bf16
    }
}
