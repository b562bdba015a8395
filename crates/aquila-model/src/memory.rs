//! How much memory a model takes, from its spec alone: for the table at start and for `inspect`.

use aquila_compute::{INT8_GROUP, KvDtype, KvShape, PlanBounds, WeightFormat};

use crate::ModelSpec;

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
    let matrix = |outputs: usize, inputs: usize| -> u64 {
        let per_output = match format {
            WeightFormat::Bf16 => 2 * inputs,
            WeightFormat::F32 => 4 * inputs,
            WeightFormat::Int8 => {
                inputs.next_multiple_of(INT8_GROUP) + 2 * inputs.div_ceil(INT8_GROUP)
            }
        };
        outputs as u64 * per_output as u64
    };
    let (hidden, inner) = (spec.hidden_size, spec.intermediate_size);
    let layer = matrix(spec.heads.qkv_width(), hidden)
        + matrix(hidden, spec.heads.q_width())
        + matrix(2 * inner, hidden)
        + matrix(hidden, inner)
        + 4 * vector_elements_of_a_layer(spec);
    // The table stays as the checkpoint has it: rows are looked up, not multiplied.
    let table = (spec.vocab_size * hidden * spec.dtype.size()) as u64;
    spec.layers as u64 * layer + table + matrix(spec.vocab_size, hidden) + 4 * hidden as u64
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
    let per_row = 2 * spec.hidden_size
        + spec.heads.qkv_width()
        + spec.heads.q_width()
        + 3 * spec.intermediate_size;
    let per_output = 2 * spec.hidden_size + spec.vocab_size;
    4 * (bounds.rows as u64 * per_row as u64
        + bounds.outputs as u64 * per_output as u64
        + bounds.slots as u64)
}

/// Bytes of the rotary table for contexts of `positions` tokens.
pub fn rope_bytes(spec: &ModelSpec, positions: usize) -> u64 {
    4 * positions as u64 * spec.heads.head_dim as u64
}
