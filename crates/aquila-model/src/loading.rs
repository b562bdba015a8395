//! Tensors of a checkpoint on their way to a backend.

use aquila_compute::{AttentionParams, Backend, HostTensor, WeightFormat};

use crate::block::{Block, FeedForwardPart, Linear, Places};
use crate::layer_spec::{AttentionSpec, LayerSpec};
use crate::layout::{Expected, FeedForwardLayout, GatedLayout, LayerLayout, LinearLayout};
use crate::memory::exact;
use crate::{Error, ModelSpec, Result, TensorSource};

/// The longest context; its rotary table is made at load.
const LONGEST_CONTEXT: usize = 1 << 24;

/// How far loading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the checkpoint that are on the backend.
    pub done_bytes: u64,
    /// All bytes of the checkpoint that are needed.
    pub total_bytes: u64,
}

/// Refuses contexts for which no rotary table is made.
pub(crate) fn check_positions(positions: usize) -> Result<()> {
    if (1..=LONGEST_CONTEXT).contains(&positions) {
        return Ok(());
    }
    let problem = format!("a context of {positions}; it may have 1 to {LONGEST_CONTEXT}");
    Err(Error::Plan(problem))
}

/// The load of a checkpoint, while it goes on.
pub(crate) struct Loading<'a, B: Backend> {
    backend: &'a B,
    source: &'a dyn TensorSource,
    format: WeightFormat,
    done_bytes: u64,
    total_bytes: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl<'a, B: Backend> Loading<'a, B> {
    /// Begins to load the tensors of `source`, of which `total_bytes` are needed.
    pub fn begin(
        backend: &'a B,
        source: &'a dyn TensorSource,
        format: WeightFormat,
        total_bytes: u64,
        progress: &'a mut dyn FnMut(Progress),
    ) -> Self {
        Self { backend, source, format, done_bytes: 0, total_bytes, progress }
    }

    /// A tensor, its shape as the checkpoint was checked for when it was opened.
    pub fn tensor(&mut self, expected: &Expected) -> Result<HostTensor> {
        let tensor = self.source.get(&expected.name)?;
        self.done_bytes += tensor.byte_len() as u64;
        let (done_bytes, total_bytes) = (self.done_bytes, self.total_bytes);
        (self.progress)(Progress { done_bytes, total_bytes });
        Ok(tensor)
    }

    fn tensors(&mut self, expected: &[Expected]) -> Result<Vec<HostTensor>> {
        expected.iter().map(|e| self.tensor(e)).collect()
    }

    /// Vectors that are added: biases.
    pub fn vector(&mut self, expected: &[Expected]) -> Result<B::Vector> {
        let parts = self.tensors(expected)?;
        Ok(self.backend.vector(&parts)?)
    }

    /// The weights of a norm, one added where the checkpoint keeps them less one.
    pub fn norm(&mut self, expected: &Expected, spec: &ModelSpec) -> Result<B::Vector> {
        let stored = self.tensor(expected)?;
        let weights = if spec.norm.one_plus { one_more(&stored)? } else { stored };
        Ok(self.backend.vector(&[weights])?)
    }

    pub fn weight(&mut self, expected: &[Expected]) -> Result<B::Weight> {
        let parts = self.tensors(expected)?;
        let quantized = !expected.iter().any(|part| part.exact);
        let format = if quantized { self.format } else { exact(self.format) };
        Ok(self.backend.pack(&parts, format)?)
    }

    pub fn linear(&mut self, layout: &LinearLayout) -> Result<Linear<B>> {
        let weight = self.weight(&layout.weights)?;
        let bias = match layout.biases.as_slice() {
            [] => None,
            biases => Some(self.vector(biases)?),
        };
        Ok(Linear { weight, bias })
    }

    /// A layer of `spec` but for the norm of its input.
    pub fn block(
        &mut self,
        layout: &LayerLayout,
        spec: &ModelSpec,
        layer: &LayerSpec,
    ) -> Result<Block<B>> {
        let AttentionSpec { heads, scale, window, .. } = *layer.attention();
        let norm = |loading: &mut Self, expected: &Option<Expected>| {
            expected.as_ref().map(|e| loading.norm(e, spec)).transpose()
        };
        Ok(Block {
            attention: AttentionParams { heads, scale, window },
            qkv: self.linear(&layout.qkv)?,
            qk_norms: match &layout.qk_norms {
                Some([q, k]) => Some([self.norm(q, spec)?, self.norm(k, spec)?]),
                None => None,
            },
            o: self.linear(&layout.o)?,
            attention_output_norm: norm(self, &layout.attention_output_norm)?,
            ffn_norm: self.norm(&layout.ffn_norm, spec)?,
            ffn: match (&layout.ffn, &layer.ffn) {
                (FeedForwardLayout::Dense(dense), _) => FeedForwardPart::Dense {
                    gate_up: self.linear(&dense.gate_up)?,
                    down: self.linear(&dense.down)?,
                },
                (FeedForwardLayout::Experts { router, experts }, ffn) => FeedForwardPart::Experts {
                    router: self.weight(std::slice::from_ref(router))?,
                    experts: self.experts(experts)?,
                    normalized: ffn.experts().is_some_and(|experts| experts.normalized),
                },
            },
            activation: layer.ffn.activation(),
            ffn_output_norm: norm(self, &layout.ffn_output_norm)?,
            places: Places::of(spec, layer),
        })
    }

    fn experts(&mut self, layouts: &[GatedLayout]) -> Result<B::Experts> {
        let mut gate_up = Vec::with_capacity(layouts.len());
        let mut down = Vec::with_capacity(layouts.len());
        for layout in layouts {
            gate_up.push(self.weight(&layout.gate_up.weights)?);
            down.push(self.weight(&layout.down.weights)?);
        }
        Ok(self.backend.experts(gate_up, down)?)
    }
}

/// A vector with one added to each element.
fn one_more(stored: &HostTensor) -> Result<HostTensor> {
    let weights: Vec<f32> = stored.to_f32()?.into_iter().map(|w| 1.0 + w).collect();
    Ok(HostTensor::from_f32(stored.name(), stored.shape().to_vec(), &weights)?)
}
