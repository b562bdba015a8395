//! Random weights from a config alone, for measuring without a checkpoint.
//!
//! A tensor depends on its name, its shape and the seed, so every machine makes the same ones
//! ([`RandomWeights`]), and a backend draws each where it keeps it.

use std::collections::BTreeMap;

use aquila_compute::{DType, HostTensor, RandomWeights};
use half::bf16;

use crate::layout::Expected;
use crate::source::{TensorInfo, TensorSource};
use crate::{Error, ModelSpec, Result};

/// Random numbers in the shape of a model.
pub struct Dummy {
    origin: String,
    shapes: BTreeMap<String, Vec<usize>>,
    weights: RandomWeights,
    given: BTreeMap<String, HostTensor>,
}

impl Dummy {
    /// Random weights for `spec`.
    pub fn new(spec: &ModelSpec, seed: u64) -> Self {
        Self::of(&spec.architecture, spec.tensors(), seed)
    }

    /// Random weights in the shape of `tensors`.
    pub(crate) fn of(what: &str, tensors: impl Iterator<Item = Expected>, seed: u64) -> Self {
        Self {
            origin: format!("random weights of {what}"),
            shapes: tensors.map(|t| (t.name, t.shape)).collect(),
            weights: RandomWeights::new(seed),
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
                bytes: tensor.byte_len() as u64,
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
        // A vector that is no bias scales: ones keep the stream as random layers make it.
        if shape.len() == 1 && !name.ends_with(".bias") {
            let elements: usize = shape.iter().product();
            let mut bytes = Vec::new();
            bytes
                .try_reserve_exact(2 * elements)
                .map_err(|e| Error::tensor(&self.origin, name, e))?;
            bytes.extend(std::iter::repeat_n(bf16::ONE.to_le_bytes(), elements).flatten());
            return Ok(HostTensor::new(name, DType::Bf16, shape.clone(), bytes.into())?);
        }
        Ok(self.weights.tensor(name, shape.clone())?)
    }
}
