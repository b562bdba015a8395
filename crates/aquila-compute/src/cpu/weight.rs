//! Projections as the kernels read them: packed once, at load, in one layout for every
//! instruction set.
//!
//! Outputs come in panels of 16, one to a lane; what is missing in the last one is zero. In a
//! panel, one 64-byte line holds
//! - bf16: two inputs k and k + 1 of all 16 outputs, as words with k in the low half;
//! - f32: one input of all 16 outputs;
//! - int8: four inputs of all 16 outputs, each byte the value plus 128. Eight lines are a group.
//!   Before every two groups comes a line with their scales, 16 bfloat16 each, so that a panel is
//!   read as one stream.

use half::bf16;

use super::memory::{Region, Shared};
use super::pool::Pool;
use super::simd::LANES;
use crate::shape::INT8_GROUP;
use crate::{Error, HostTensor, Result, WeightFormat, reference};

/// Bytes of one line.
pub(super) const LINE: usize = 64;
/// Lines of one int8 group.
pub(super) const GROUP_LINES: usize = INT8_GROUP / 4;
/// Bytes of two int8 groups and their scales.
pub(super) const PAIR_BYTES: usize = (2 * GROUP_LINES + 1) * LINE;

/// A packed projection.
pub struct CpuWeight {
    inputs: usize,
    outputs: usize,
    format: WeightFormat,
    region: Region,
}

/// Bytes of one panel.
fn panel_bytes(inputs: usize, format: WeightFormat) -> usize {
    match format {
        WeightFormat::Bf16 => inputs.div_ceil(2) * LINE,
        WeightFormat::F32 => inputs * LINE,
        WeightFormat::Int8 => {
            let groups = inputs.div_ceil(INT8_GROUP);
            (groups * GROUP_LINES + groups.div_ceil(2)) * LINE
        }
    }
}

impl CpuWeight {
    /// Bytes that a projection takes once packed.
    pub(super) fn packed_bytes(outputs: usize, inputs: usize, format: WeightFormat) -> usize {
        outputs.div_ceil(LANES) * panel_bytes(inputs, format)
    }

    /// Packs matrices of equal inputs, panels in parallel.
    pub(super) fn pack(parts: &[HostTensor], format: WeightFormat, pool: &Pool) -> Result<Self> {
        let Some(first) = parts.first() else {
            return Err(Error::Tensor("a projection needs at least one matrix".into()));
        };
        let inputs = first.matrix()?.1;
        let mut outputs = 0;
        for part in parts {
            let (rows, columns) = part.matrix()?;
            if columns != inputs {
                return Err(Error::Tensor(format!(
                    "tensor {}: {columns} inputs, but {} beside it has {inputs}",
                    part.name(),
                    first.name()
                )));
            }
            // Refuses integer tensors before any task reads them.
            part.read_f32(0, &mut [])?;
            outputs += rows;
        }
        let bytes = Self::packed_bytes(outputs, inputs, format);
        let mut region = Region::new(bytes, "packed weights")?;
        let at = Shared::new(region.as_mut_ptr());
        let size = panel_bytes(inputs, format);
        // Where each output of the whole is found: its part, and the row in it.
        let mut sources = Vec::with_capacity(outputs);
        for part in parts {
            sources.extend((0..part.matrix()?.0).map(|row| (part, row)));
        }
        pool.run(outputs.div_ceil(LANES), &|panel| {
            let mut rows = vec![0.0f32; inputs * LANES];
            for (lane, row) in rows.chunks_exact_mut(inputs.max(1)).enumerate() {
                if let Some((part, source)) = sources.get(panel * LANES + lane) {
                    part.read_f32(source * inputs, row).expect("the element type was checked");
                }
            }
            // SAFETY: panels do not overlap and lie within the region.
            let bytes = unsafe { std::slice::from_raw_parts_mut(at.get().add(panel * size), size) };
            match format {
                WeightFormat::Bf16 => pack_bf16(&rows, inputs, bytes),
                WeightFormat::F32 => pack_f32(&rows, inputs, bytes),
                WeightFormat::Int8 => pack_int8(&rows, inputs, bytes),
            }
        });
        Ok(Self { inputs, outputs, format, region })
    }

    /// Inputs of the projection.
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Outputs of the projection.
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// How the values are kept.
    pub fn format(&self) -> WeightFormat {
        self.format
    }

    /// Bytes that the packed values take.
    pub fn bytes(&self) -> usize {
        self.region.bytes()
    }

    pub(super) fn panels(&self) -> usize {
        self.outputs.div_ceil(LANES)
    }

    pub(super) fn panel_bytes(&self) -> usize {
        panel_bytes(self.inputs, self.format)
    }

    pub(super) fn as_ptr(&self) -> *const u8 {
        self.region.as_ptr()
    }
}

fn pack_bf16(rows: &[f32], inputs: usize, bytes: &mut [u8]) {
    for (i, line) in bytes.chunks_exact_mut(LINE).enumerate() {
        for (lane, word) in line.chunks_exact_mut(4).enumerate() {
            let row = &rows[lane * inputs..(lane + 1) * inputs];
            let low = bf16::from_f32(row[2 * i]).to_bits();
            let high = row.get(2 * i + 1).map_or(0, |&x| bf16::from_f32(x).to_bits());
            word.copy_from_slice(&(u32::from(low) | u32::from(high) << 16).to_ne_bytes());
        }
    }
}

fn pack_f32(rows: &[f32], inputs: usize, bytes: &mut [u8]) {
    for (k, line) in bytes.chunks_exact_mut(LINE).enumerate() {
        for (lane, word) in line.chunks_exact_mut(4).enumerate() {
            word.copy_from_slice(&rows[lane * inputs + k].to_ne_bytes());
        }
    }
}

fn pack_int8(rows: &[f32], inputs: usize, bytes: &mut [u8]) {
    bytes.fill(128);
    for (lane, row) in rows.chunks_exact(inputs.max(1)).enumerate() {
        for (group, weights) in row.chunks(INT8_GROUP).enumerate() {
            let (quantized, scale) = reference::quantize_weights(weights);
            for (k, q) in quantized.into_iter().enumerate() {
                let line = group * GROUP_LINES + group / 2 + 1 + k / 4;
                bytes[line * LINE + lane * 4 + k % 4] = q.cast_unsigned().wrapping_add(128);
            }
            let at = group / 2 * PAIR_BYTES + (group % 2 * LANES + lane) * 2;
            bytes[at..at + 2].copy_from_slice(&bf16::from_f32(scale).to_bits().to_ne_bytes());
        }
    }
}
