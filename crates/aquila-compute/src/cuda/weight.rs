//! Projections on the device.

use std::ops::Range;

use half::bf16;

use super::Arithmetic;
use super::arguments;
use super::contract::{GROUP, PAIR};
use super::device::{Device, Memory};
use super::kernels::Kernels;
use super::launch::GRID_ROWS;
use super::random::DeviceRandom;
use crate::{DType, Error, HostTensor, Result, WeightFormat};

/// Outputs of one tile.
pub(super) const TILE: usize = 16;
/// Bytes of weights that are converted and sent at a time.
const PIECE: usize = 1 << 25;
/// Elements that are converted at a time.
const CONVERTED: usize = 1 << 16;

/// How a projection lies in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Layout {
    /// Outputs one after the other, each with its inputs side by side; bfloat16 or f32.
    Plain { bf16: bool },
    /// As tensor cores take them: `kernels/pack.cu`.
    Tiles,
}

/// A projection on the device.
pub struct CudaWeight {
    pub(super) memory: Memory,
    pub(super) inputs: usize,
    pub(super) outputs: usize,
    pub(super) layout: Layout,
}

impl CudaWeight {
    pub(super) fn new(
        device: &Device,
        kernels: &Kernels,
        parts: &[HostTensor],
        format: WeightFormat,
        arithmetic: Arithmetic,
    ) -> Result<Self> {
        let layout = layout(format, arithmetic)?;
        let (mut outputs, mut inputs) = (0, None);
        for part in parts {
            let (rows, columns) = part.matrix()?;
            if *inputs.get_or_insert(columns) != columns {
                return Err(Error::Tensor(format!(
                    "tensor {}: projections joined must have equal inputs",
                    part.name()
                )));
            }
            outputs += rows;
        }
        let inputs = inputs.unwrap_or(0);
        let memory = device.allocate_uncompared("weights", bytes(layout, outputs, inputs))?;
        let weight = Self { memory, inputs, outputs, layout };
        let mut first = 0;
        for part in parts {
            weight.send(device, kernels, part, first)?;
            first += part.matrix()?.0;
        }
        Ok(weight)
    }

    /// Groups that the inputs fall into.
    pub(super) fn groups(&self) -> usize {
        self.inputs.div_ceil(PAIR).div_ceil(GROUP).max(1)
    }

    /// Sends one matrix whose first row is output `first`, piece by piece; random weights are drawn on
    /// the device.
    fn send(
        &self,
        device: &Device,
        kernels: &Kernels,
        part: &HostTensor,
        first: usize,
    ) -> Result<()> {
        let (rows, inputs) = part.matrix()?;
        let kept = match self.layout {
            Layout::Plain { bf16: false } => DType::F32,
            _ => DType::Bf16,
        };
        let row_bytes = inputs * kept.size();
        let step = (PIECE / row_bytes.max(1)).clamp(1, rows.clamp(1, GRID_ROWS));
        let staging = match self.layout {
            Layout::Tiles => {
                Some(device.allocate_uncompared("weights on their way", step * row_bytes)?)
            }
            Layout::Plain { .. } => None,
        };
        let random = part.random_elements().map(|e| DeviceRandom::new(device, &kernels.random, e));
        let random = random.transpose()?;
        let mut converted = Vec::new();
        for start in (0..rows).step_by(step) {
            let count = step.min(rows - start);
            let elements = start * inputs..(start + count) * inputs;
            let (to, at) = match &staging {
                Some(staging) => (staging, 0),
                None => (&self.memory, (first + start) * row_bytes),
            };
            if let Some(random) = &random {
                random.draw(device, elements, kept == DType::Bf16, to, at)?;
            } else if part.dtype() == kept {
                let bytes = start * row_bytes..(start + count) * row_bytes;
                device.write(to, at, &part.bytes()[bytes])?;
            } else {
                convert(part, elements, kept, &mut converted)?;
                device.write(to, at, &converted)?;
            }
            let Some(staging) = &staging else { continue };
            let arguments = arguments::Pack {
                input: staging.at(0),
                out: self.memory.at(0),
                rows: count as u32,
                inputs: inputs as u32,
                first: (first + start) as u32,
            };
            let grid = [inputs.div_ceil(512), count, 1];
            // SAFETY: the staging memory has `count` rows, and the outputs are within the weight.
            unsafe {
                device.launch(&kernels.pack, grid, 256, 0, &arguments, &[staging, &self.memory])?;
            }
        }
        Ok(())
    }
}

/// Writes `elements` of a tensor as they are kept.
fn convert(
    part: &HostTensor,
    elements: Range<usize>,
    kept: DType,
    out: &mut Vec<u8>,
) -> Result<()> {
    out.clear();
    let mut values = vec![0.0f32; CONVERTED.min(elements.len())];
    for start in elements.clone().step_by(CONVERTED) {
        let values = &mut values[..CONVERTED.min(elements.end - start)];
        part.read_f32(start, values)?;
        match kept {
            DType::F32 => out.extend(values.iter().flat_map(|x| x.to_le_bytes())),
            _ => out.extend(values.iter().flat_map(|&x| bf16::from_f32(x).to_le_bytes())),
        }
    }
    Ok(())
}

fn layout(format: WeightFormat, arithmetic: Arithmetic) -> Result<Layout> {
    match (format, arithmetic) {
        (WeightFormat::Bf16, Arithmetic::Tensor) => Ok(Layout::Tiles),
        (WeightFormat::Bf16, Arithmetic::Plain) => Ok(Layout::Plain { bf16: true }),
        (WeightFormat::F32, Arithmetic::Plain) => Ok(Layout::Plain { bf16: false }),
        (WeightFormat::F32, Arithmetic::Tensor) => Err(Error::Unavailable(
            "tensor cores take bfloat16 weights; float32 weights need plain arithmetic".into(),
        )),
        (WeightFormat::Int8, _) => Err(Error::Unavailable(
            "int8 weights are not available on CUDA yet; choose bfloat16".into(),
        )),
    }
}

fn bytes(layout: Layout, outputs: usize, inputs: usize) -> usize {
    match layout {
        Layout::Plain { bf16 } => outputs * inputs * if bf16 { 2 } else { 4 },
        Layout::Tiles => outputs.next_multiple_of(TILE) * inputs.next_multiple_of(PAIR) * 2,
    }
}
