//! Random weights (`--load-format dummy`): which they are.
//!
//! A tensor's weights are drawn from one sequence of 64-bit numbers (splitmix64) that begins with the
//! seed and the tensor's name. The one invariant: any element follows from its place alone, so whoever
//! draws a stretch of a tensor, a thread of the host or a kernel (`cuda/kernels/random.cu`), gets the
//! same bits.

use std::sync::Arc;

use half::bf16;

use crate::sampling::noise;
use crate::{HostTensor, Result};

/// The standard deviation of weights, as models are initialized.
const DEVIATION: f32 = 0.02;
/// Values that weights are drawn from.
const SAMPLES: usize = 1 << SAMPLE_BITS;
/// Bits of a number that choose a value.
const SAMPLE_BITS: usize = 12;
/// Weights that one number of the sequence draws.
pub(crate) const PER_NUMBER: usize = 5;
/// What the state of the sequence grows by from number to number.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// Number `place` of the splitmix64 sequence that begins with `state`.
fn number(state: u64, place: u64) -> u64 {
    noise::mix(state.wrapping_add((place + 1).wrapping_mul(INCREMENT)))
}

/// The random weights of one seed.
#[derive(Debug, Clone)]
pub struct RandomWeights {
    seed: u64,
    /// Drawn once from a normal-like distribution; weights are drawn from here.
    samples: Arc<[bf16]>,
}

impl RandomWeights {
    /// The weights of `seed`.
    pub fn new(seed: u64) -> Self {
        let sample = |at: usize| {
            // The sum of twelve uniform numbers has variance 1.
            let places = 12 * at as u64..12 * (at as u64 + 1);
            let sum: f32 =
                places.map(|place| (number(seed, place) >> 40) as f32 / (1 << 24) as f32).sum();
            bf16::from_f32((sum - 6.0) * DEVIATION)
        };
        Self { seed, samples: (0..SAMPLES).map(sample).collect() }
    }

    /// The bfloat16 tensor of this name, none of which is drawn yet; refused where a tensor of this
    /// shape cannot be.
    pub fn tensor(&self, name: &str, shape: Vec<usize>) -> Result<HostTensor> {
        let state =
            name.bytes().fold(self.seed, |s, b| (s ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        HostTensor::random(name, shape, RandomElements { samples: self.samples.clone(), state })
    }
}

/// The random weights of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct RandomElements {
    /// What the weights are drawn from.
    pub samples: Arc<[bf16]>,
    /// What the sequence begins with.
    pub state: u64,
}

impl RandomElements {
    /// Draws the elements from `first` on, each converted.
    pub fn draw<T>(&self, first: usize, out: &mut [T], convert: impl Fn(bf16) -> T) {
        let mut place = (first / PER_NUMBER) as u64;
        // A stretch may begin within what a number draws.
        let passed = first % PER_NUMBER;
        let (begun, whole) = out.split_at_mut((PER_NUMBER - passed).min(out.len()));
        let mut draw = |weights: &mut [T], passed: usize| {
            let mut bits = number(self.state, place) >> (SAMPLE_BITS * passed);
            place += 1;
            for weight in weights {
                *weight = convert(self.samples[bits as usize % SAMPLES]);
                bits >>= SAMPLE_BITS;
            }
        };
        draw(begun, passed);
        whole.chunks_mut(PER_NUMBER).for_each(|weights| draw(weights, 0));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// splitmix64 as it is published.
    fn next(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// `elements` weights of the tensor "w" of seed 3, one after the other.
    fn in_order(elements: usize) -> Vec<bf16> {
        let mut state = 3;
        let mut uniform = || (next(&mut state) >> 40) as f32 / (1 << 24) as f32;
        let mut sample = || bf16::from_f32(((0..12).map(|_| uniform()).sum::<f32>() - 6.0) * 0.02);
        let samples: Vec<bf16> = (0..4096).map(|_| sample()).collect();
        let mut state = (3 ^ u64::from(b'w')).wrapping_mul(0x100_0000_01b3);
        let mut weights = Vec::new();
        while weights.len() < elements {
            let bits = next(&mut state);
            weights.extend((0..5).map(|i| samples[(bits >> (12 * i)) as usize % 4096]));
        }
        weights.truncate(elements);
        weights
    }

    #[test]
    fn weights_drawn_in_any_pieces_follow_one_sequence() {
        let (rows, columns) = (37, 83);
        let want = in_order(rows * columns);
        let tensor = RandomWeights::new(3).tensor("w", vec![rows, columns]).expect("a matrix");
        let bytes: Vec<u8> = want.iter().flat_map(|weight| weight.to_le_bytes()).collect();
        assert_eq!(tensor.bytes(), bytes);
        for length in [0, 1, 2, 4, 5, 6, 11, columns] {
            for first in (0..=20).chain([want.len() - length]) {
                let mut values = vec![f32::NAN; length];
                tensor.read_f32(first, &mut values).expect("weights");
                let want = &want[first..first + length];
                assert_eq!(values, want.iter().map(|weight| weight.to_f32()).collect::<Vec<_>>());
                let mut stored = vec![0xff; 2 * length];
                tensor.read_bytes(first, &mut stored);
                assert_eq!(stored, bytes[2 * first..2 * (first + length)]);
            }
        }
    }

    #[test]
    fn tensors_larger_than_memory_are_refused_or_not_made() {
        let weights = RandomWeights::new(0);
        let huge = weights.tensor("w", vec![1 << 30, 1 << 30]).expect("it is not drawn");
        let mut last = [0.0; 3];
        huge.read_f32(huge.len() - 3, &mut last).expect("weights");
        assert!(last.iter().all(|&weight| weight != 0.0));
        assert!(weights.tensor("w", vec![1 << 40, 1 << 40]).is_err());
        assert!(weights.tensor("w", vec![1 << 63]).is_err());
    }
}
