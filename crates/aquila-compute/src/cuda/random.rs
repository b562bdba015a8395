//! Random weights, drawn on the device: the bits that the host would draw ([`RandomWeights`]).
//!
//! [`RandomWeights`]: crate::RandomWeights

use std::ops::Range;

use super::arguments;
use super::backend::CudaBackend;
use super::device::{Device, Memory};
use super::kernels::ByElement;
use crate::random_weights::{PER_NUMBER, RandomElements};
use crate::{Error, HostTensor, Result};

/// Threads of a block.
const THREADS: usize = 256;

/// The random weights of one tensor, ready to be drawn.
pub(super) struct DeviceRandom<'a> {
    kernels: &'a ByElement,
    samples: Memory,
    state: u64,
}

impl<'a> DeviceRandom<'a> {
    /// What the weights of a tensor are drawn from, on the device.
    pub(super) fn new(
        device: &Device,
        kernels: &'a ByElement,
        elements: &RandomElements,
    ) -> Result<Self> {
        let samples: Vec<u16> = elements.samples.iter().map(|sample| sample.to_bits()).collect();
        let memory =
            device.allocate_uncompared("what random weights are drawn from", 2 * samples.len())?;
        device.write(&memory, 0, &samples)?;
        Ok(Self { kernels, samples: memory, state: elements.state })
    }

    /// Draws `elements` of the tensor to byte `offset` of `out`, as bfloat16 or as f32.
    pub(super) fn draw(
        &self,
        device: &Device,
        elements: Range<usize>,
        bf16: bool,
        out: &Memory,
        offset: usize,
    ) -> Result<()> {
        let size = if bf16 { 2 } else { 4 };
        assert!(offset + elements.len() * size <= out.bytes(), "weights stay within their memory");
        let arguments = arguments::Random {
            samples: self.samples.at(0),
            out: out.at(offset),
            state: self.state,
            first: elements.start as u64,
            end: elements.end as u64,
        };
        let numbers = elements.end.div_ceil(PER_NUMBER) - elements.start / PER_NUMBER;
        let grid = [numbers.div_ceil(THREADS), 1, 1];
        let (kernel, names) = (self.kernels.of(bf16), [&self.samples, out]);
        // SAFETY: the range was checked, and 12 bits choose one of the 4,096 samples.
        unsafe { device.launch(kernel, grid, THREADS as u32, 0, &arguments, &names) }
    }
}

impl CudaBackend {
    /// Draws elements of random weights, from `first` on, to the bytes `range` of `bytes`, all of which
    /// go to the device and come back: for checks.
    pub fn draw_random(
        &self,
        tensor: &HostTensor,
        first: usize,
        bf16: bool,
        bytes: &mut [u8],
        range: Range<usize>,
    ) -> Result<()> {
        let Some(elements) = tensor.random_elements() else {
            return Err(Error::Tensor(format!("tensor {} is not random", tensor.name())));
        };
        let memory = self.device.allocate("weights to check", bytes.len())?;
        self.device.write(&memory, 0, bytes)?;
        let last = first + range.len() / if bf16 { 2 } else { 4 };
        DeviceRandom::new(&self.device, &self.kernels.random, elements)?.draw(
            &self.device,
            first..last,
            bf16,
            &memory,
            range.start,
        )?;
        // SAFETY: as much memory was allocated.
        unsafe { self.device.read_at(memory.at(0), bytes) }
    }
}
