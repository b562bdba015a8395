//! Random weights from a config alone, for measuring without a checkpoint.
//!
//! A tensor depends on its name, its shape and the seed, so every machine makes the same ones, and
//! each is made when it is asked for.

use std::collections::BTreeMap;

use aquila_compute::{DType, HostTensor};
use half::bf16;

use crate::layout::Expected;
use crate::source::{TensorInfo, TensorSource};
use crate::{Error, ModelSpec, Result};

/// The standard deviation of weights, as models are initialized.
const DEVIATION: f32 = 0.02;

/// Random numbers in the shape of a model.
pub struct Dummy {
    origin: String,
    seed: u64,
    shapes: BTreeMap<String, Vec<usize>>,
    /// Drawn once from a normal-like distribution; weights are drawn from here.
    samples: Vec<bf16>,
    given: BTreeMap<String, HostTensor>,
}

impl Dummy {
    /// Random weights for `spec`.
    pub fn new(spec: &ModelSpec, seed: u64) -> Self {
        Self::of(&spec.architecture, spec.tensors(), seed)
    }

    /// Random weights in the shape of `tensors`.
    pub(crate) fn of(what: &str, tensors: impl Iterator<Item = Expected>, seed: u64) -> Self {
        let mut state = seed;
        let samples = (0..4096)
            .map(|_| {
                // The sum of twelve uniform numbers has variance 1.
                let sum: f32 =
                    (0..12).map(|_| (mix(&mut state) >> 40) as f32 / (1 << 24) as f32).sum();
                bf16::from_f32((sum - 6.0) * DEVIATION)
            })
            .collect();
        Self {
            origin: format!("random weights of {what}"),
            seed,
            shapes: tensors.map(|t| (t.name, t.shape)).collect(),
            samples,
            given: BTreeMap::new(),
        }
    }

    /// Adds a tensor that is no weight and cannot be random.
    pub(crate) fn with(mut self, tensor: HostTensor) -> Self {
        self.given.insert(tensor.name().to_owned(), tensor);
        self
    }
}

impl TensorSource for Dummy {
    fn origin(&self) -> &str {
        &self.origin
    }

    fn names(&self) -> Vec<&str> {
        let mut names: Vec<&str> =
            self.shapes.keys().chain(self.given.keys()).map(String::as_str).collect();
        names.sort_unstable();
        names
    }

    fn info(&self, name: &str) -> Option<TensorInfo> {
        if let Some(tensor) = self.given.get(name) {
            return Some(TensorInfo {
                dtype: Some(tensor.dtype()),
                stored_as: tensor.dtype().to_string(),
                shape: tensor.shape().to_vec(),
                bytes: tensor.bytes().len() as u64,
                origin: self.origin.clone(),
            });
        }
        self.shapes.get(name).map(|shape| TensorInfo {
            dtype: Some(DType::Bf16),
            stored_as: "BF16".into(),
            shape: shape.clone(),
            bytes: 2 * shape.iter().product::<usize>() as u64,
            origin: self.origin.clone(),
        })
    }

    fn get(&self, name: &str) -> Result<HostTensor> {
        if let Some(tensor) = self.given.get(name) {
            return Ok(tensor.clone());
        }
        let shape = self
            .shapes
            .get(name)
            .ok_or_else(|| Error::tensor(&self.origin, name, "is not part of the model"))?;
        let elements: usize = shape.iter().product();
        let mut bytes = Vec::new();
        bytes.try_reserve_exact(2 * elements).map_err(|e| Error::tensor(&self.origin, name, e))?;
        // A vector that is no bias scales: ones keep the stream as random layers make it.
        if shape.len() == 1 && !name.ends_with(".bias") {
            bytes.extend(std::iter::repeat_n(bf16::ONE.to_le_bytes(), elements).flatten());
        } else {
            bytes.resize(2 * elements, 0);
            self.fill(name, &mut bytes);
        }
        Ok(HostTensor::new(name, DType::Bf16, shape.clone(), bytes.into())?)
    }
}

impl Dummy {
    /// Writes the weights of the tensor `name`, on all cores where there are many.
    fn fill(&self, name: &str, bytes: &mut [u8]) {
        let state =
            name.bytes().fold(self.seed, |s, b| (s ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let draws = bytes.len().div_ceil(DRAWN);
        let of_thread = draws.div_ceil(threads).max(DRAWS_OF_THREAD);
        std::thread::scope(|scope| {
            for (part, bytes) in bytes.chunks_mut(of_thread * DRAWN).enumerate() {
                scope.spawn(move || {
                    let skipped = (part * of_thread) as u64;
                    let mut state = state.wrapping_add(skipped.wrapping_mul(INCREMENT));
                    for weights in bytes.chunks_mut(DRAWN) {
                        let mut bits = mix(&mut state);
                        for weight in weights.chunks_exact_mut(2) {
                            weight
                                .copy_from_slice(&self.samples[bits as usize % 4096].to_le_bytes());
                            bits >>= 12;
                        }
                    }
                });
            }
        });
    }
}

/// Bytes of the weights that one number of the sequence draws: 12 bits for each of five.
const DRAWN: usize = 10;
/// Numbers below which a thread is not worth its start.
const DRAWS_OF_THREAD: usize = 1 << 16;
/// What the state of the sequence grows by, so that any place of it can be reached at once.
const INCREMENT: u64 = 0x9e37_79b9_7f4a_7c15;

/// The next number of a splitmix64 sequence.
fn mix(state: &mut u64) -> u64 {
    *state = state.wrapping_add(INCREMENT);
    let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_drawn_on_all_cores_follow_one_sequence() {
        let elements = 3 * DRAWS_OF_THREAD * DRAWN / 2 + 7;
        let tensor = Expected { name: "w".into(), shape: vec![elements], exact: false };
        let dummy = Dummy::of("a test", std::iter::once(tensor), 3);
        let mut drawn = vec![0; 2 * elements];
        dummy.fill("w", &mut drawn);
        let mut state = (3 ^ u64::from(b'w')).wrapping_mul(0x100_0000_01b3);
        for five in drawn.chunks(DRAWN) {
            let bits = mix(&mut state);
            for (i, weight) in five.chunks(2).enumerate() {
                let sample = dummy.samples[(bits >> (12 * i)) as usize % 4096];
                assert_eq!(weight, sample.to_le_bytes());
            }
        }
    }
}
