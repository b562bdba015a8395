//! How much memory a model takes, from its spec alone: for the table at start and for `inspect`.

use aquila_compute::{INT8_GROUP, KvDtype, KvShape, PlanBounds, WeightFormat};

use crate::layout::Expected;
use crate::{Eagle3Spec, FeatureNorm, ModelSpec};

/// What a model takes, known before the KV pool is sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Bytes of the packed weights.
    pub weights: u64,
    /// Bytes of the activations of the largest round.
    pub scratch: u64,
    /// Bytes of keys and values of one token.
    pub kv_per_token: u64,
    /// Bytes of texts that drafts are looked up in.
    pub texts: u64,
}

impl ModelSpec {
    /// The store of keys and values for `slots` tokens.
    pub fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        KvShape {
            layers: self.layers,
            slots,
            kv_heads: self.heads.kv_heads,
            head_dim: self.heads.head_dim,
            dtype,
        }
    }
}

/// Bytes of all weights once packed, the embedding table included.
pub fn weight_bytes(spec: &ModelSpec, format: WeightFormat) -> u64 {
    let hidden = spec.hidden_size;
    let layer = layer_bytes(spec, hidden, format);
    spec.layers as u64 * layer
        + table_bytes(spec)
        + matrix_bytes(spec.vocab_size, hidden, format)
        + 4 * hidden as u64
}

pub(crate) fn matrix_bytes(outputs: usize, inputs: usize, format: WeightFormat) -> u64 {
    let per_output = match format {
        WeightFormat::Bf16 => 2 * inputs,
        WeightFormat::F32 => 4 * inputs,
        WeightFormat::Int8 => inputs.next_multiple_of(INT8_GROUP) + 2 * inputs.div_ceil(INT8_GROUP),
    };
    outputs as u64 * per_output as u64
}

/// The table stays as the checkpoint has it: rows are looked up, not multiplied.
fn table_bytes(spec: &ModelSpec) -> u64 {
    (spec.vocab_size * spec.hidden_size * spec.dtype.size()) as u64
}

/// A layer whose attention reads rows of `width`.
fn layer_bytes(spec: &ModelSpec, width: usize, format: WeightFormat) -> u64 {
    let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
    matrix_bytes(spec.heads.qkv_width(), width, format)
        + matrix_bytes(hidden, spec.heads.q_width(), format)
        + matrix_bytes(2 * inner, hidden, format)
        + matrix_bytes(hidden, inner, format)
        + 4 * vector_elements_of_a_layer(spec)
}

fn vector_elements_of_a_layer(spec: &ModelSpec) -> u64 {
    let on = |flag: bool, n: usize| if flag { n as u64 } else { 0 };
    2 * spec.hidden_size as u64
        + on(spec.qk_norm, 2 * spec.heads.head_dim)
        + on(spec.qkv_bias, spec.heads.qkv_width())
        + on(spec.output_bias, spec.hidden_size)
        + on(spec.mlp_bias, 2 * spec.intermediate_size + spec.hidden_size)
}

/// Bytes of keys and values that one token takes.
pub fn kv_bytes_per_token(spec: &ModelSpec, dtype: KvDtype) -> u64 {
    spec.kv_shape(1, dtype).bytes_per_slot() as u64
}

/// Bytes of the buffers of a forward pass.
pub fn scratch_bytes(spec: &ModelSpec, bounds: PlanBounds) -> u64 {
    let per_row = spec.hidden_size + work_width(spec);
    let per_output = 2 * spec.hidden_size + spec.vocab_size;
    buffer_bytes(bounds, per_row, per_output)
}

/// Bytes of a capture of `layers` layers in passes up to `rows` rows.
pub fn capture_bytes(spec: &ModelSpec, layers: usize, rows: usize) -> u64 {
    4 * rows as u64 * (layers * spec.hidden_size) as u64
}

/// What a row takes in the buffers that every layer uses anew, and in the residual stream.
fn work_width(spec: &ModelSpec) -> usize {
    spec.hidden_size + spec.heads.qkv_width() + spec.heads.q_width() + 3 * spec.intermediate_size
}

fn buffer_bytes(bounds: PlanBounds, per_row: usize, per_output: usize) -> u64 {
    4 * (bounds.rows as u64 * per_row as u64
        + bounds.outputs as u64 * per_output as u64
        + bounds.slots as u64)
}

/// Bytes of the rotary table for contexts of `positions` tokens.
pub fn rope_bytes(spec: &ModelSpec, positions: usize) -> u64 {
    4 * positions as u64 * spec.heads.head_dim as u64
}

/// Bytes of `tensors` once packed: matrices in `format`, vectors as float32.
pub(crate) fn tensor_bytes(tensors: impl Iterator<Item = Expected>, format: WeightFormat) -> u64 {
    let bytes = |tensor: Expected| match tensor.shape[..] {
        [outputs, inputs] => matrix_bytes(outputs, inputs, format),
        _ => 4 * tensor.shape.iter().product::<usize>() as u64,
    };
    tensors.map(bytes).sum()
}

/// Bytes of the buffers of a head whose layer is `layer` and which tells `tokens` tokens.
pub(crate) fn fused_scratch_bytes(layer: &ModelSpec, bounds: PlanBounds, tokens: usize) -> u64 {
    let hidden = layer.hidden_size;
    // And a row of zeros.
    buffer_bytes(bounds, work_width(layer) + 6 * hidden, 2 * hidden + tokens)
        + (hidden * size_of::<f32>()) as u64
}

impl Eagle3Spec {
    /// Bytes of the head's weights once packed; tables and language-model head only where they are
    /// its own.
    pub fn weight_bytes(&self, format: WeightFormat) -> u64 {
        let table = self.embedding().name;
        let weights = self.tensors().filter(|tensor| tensor.name != table);
        tensor_bytes(weights, format)
            + if self.own_embedding { table_bytes(&self.layer) } else { 0 }
    }

    /// Bytes of the head's keys and values that one token takes.
    pub fn kv_bytes_per_token(&self, dtype: KvDtype) -> u64 {
        kv_bytes_per_token(&self.layer, dtype)
    }

    /// Bytes of the buffers of the head's passes.
    pub fn scratch_bytes(&self, bounds: PlanBounds) -> u64 {
        let hidden = self.layer.hidden_size;
        let norms = match self.feature_norm {
            FeatureNorm::None => 0,
            FeatureNorm::Whole => self.fc_inputs(),
            FeatureNorm::Each => 2 * self.target_hidden_size,
        };
        let per_row = work_width(&self.layer) + self.fc_inputs() + norms + 5 * hidden;
        buffer_bytes(bounds, per_row, 3 * hidden + self.draft_vocab_size)
    }

    /// Bytes of the head's rotary table for contexts of `positions` tokens.
    pub fn rope_bytes(&self, positions: usize) -> u64 {
        rope_bytes(&self.layer, positions)
    }
}
