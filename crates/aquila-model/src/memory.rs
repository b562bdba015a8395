//! How much memory a model takes, from its spec alone: for the table at start and for `inspect`.

use std::fmt;

use aquila_compute::{HeadShape, INT8_GROUP, KvDtype, KvShape, PlanBounds, WeightFormat};

use crate::layer_spec::{AttentionSpec, FeedForward, Mixer};
use crate::layout::Expected;
use crate::{Eagle3Spec, FeatureNorm, ModelSpec};

/// What a model takes, known before the KV pool is sized.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Needs {
    /// Bytes of the packed weights.
    pub weights: u64,
    /// Bytes of the activations of the largest round.
    pub scratch: u64,
    /// Bytes of the logits that come at a time.
    pub logits: u64,
    /// Bytes of the target's hidden rows that a draft takes.
    pub hidden: u64,
    /// Bytes of the rows of running requests, their trees and what is drawn for them.
    pub rounds: u64,
    /// Bytes of keys and values of one token.
    pub kv_per_token: u64,
    /// Bytes of texts that drafts are looked up in.
    pub texts: u64,
}

impl std::ops::Add for Needs {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            weights: self.weights + other.weights,
            scratch: self.scratch + other.scratch,
            logits: self.logits + other.logits,
            hidden: self.hidden + other.hidden,
            rounds: self.rounds + other.rounds,
            kv_per_token: self.kv_per_token + other.kv_per_token,
            texts: self.texts + other.texts,
        }
    }
}

/// A number of bytes, written for people.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByteSize(pub u64);

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
        let power = (self.0.max(1).ilog2() / 10) as usize;
        match power {
            0 => write!(f, "{} B", self.0),
            _ => write!(f, "{:.1} {}", self.0 as f64 / (1u64 << (10 * power)) as f64, units[power]),
        }
    }
}

/// Layers of equal mixers, which share a store of keys and values.
#[derive(Debug, Clone, PartialEq)]
pub struct KvGroup {
    /// What the layers are.
    pub mixer: Mixer,
    /// How many there are.
    pub layers: usize,
}

impl ModelSpec {
    /// The KV groups, in the order in which their first layers come.
    pub fn kv_groups(&self) -> Vec<KvGroup> {
        let mut groups: Vec<KvGroup> = Vec::new();
        for layer in &self.layers {
            match groups.iter_mut().find(|group| group.mixer == layer.mixer) {
                Some(group) => group.layers += 1,
                None => groups.push(KvGroup { mixer: layer.mixer.clone(), layers: 1 }),
            }
        }
        groups
    }

    /// The stores of keys and values for `slots` tokens, one for each KV group.
    pub fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape> {
        self.kv_groups().iter().map(|group| group.shape(slots, dtype)).collect()
    }
}

impl KvGroup {
    fn shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        let Mixer::Attention(AttentionSpec { heads, .. }) = &self.mixer;
        KvShape {
            layers: self.layers,
            slots,
            kv_heads: heads.kv_heads,
            head_dim: heads.head_dim,
            dtype,
        }
    }
}

/// Bytes of all weights once packed, the embedding table included.
pub fn weight_bytes(spec: &ModelSpec, format: WeightFormat) -> u64 {
    let table = spec.embedding().name;
    let rest = spec.tensors().filter(|tensor| tensor.name != table);
    let tied = spec.tied_embeddings.then(|| spec.head());
    table_bytes(spec) + tensor_bytes(rest.chain(tied), format)
}

pub(crate) fn matrix_bytes(outputs: usize, inputs: usize, format: WeightFormat) -> u64 {
    let per_output = match format {
        WeightFormat::Bf16 => 2 * inputs,
        WeightFormat::F32 => 4 * inputs,
        WeightFormat::Int8 => inputs.next_multiple_of(INT8_GROUP) + 2 * inputs.div_ceil(INT8_GROUP),
    };
    outputs as u64 * per_output as u64
}

/// How a matrix is kept that is not to be quantized.
pub(crate) fn exact(format: WeightFormat) -> WeightFormat {
    match format {
        WeightFormat::Int8 => WeightFormat::Bf16,
        other => other,
    }
}

/// The table stays as the checkpoint has it: rows are looked up, not multiplied.
fn table_bytes(spec: &ModelSpec) -> u64 {
    (spec.vocab_size * spec.hidden_size * spec.dtype.size()) as u64
}

/// Bytes of keys and values that one token takes.
pub fn kv_bytes_per_token(spec: &ModelSpec, dtype: KvDtype) -> u64 {
    spec.kv_shapes(1, dtype).iter().map(|shape| shape.bytes_per_slot() as u64).sum()
}

/// Bytes of the buffers of a forward pass, but for the logits.
pub fn scratch_bytes(spec: &ModelSpec, bounds: PlanBounds) -> u64 {
    buffer_bytes(bounds, work_width(spec), 2 * spec.hidden_size)
}

/// Bytes of the logits of so many outputs.
pub fn logit_bytes(spec: &ModelSpec, outputs: usize) -> u64 {
    4 * outputs as u64 * spec.vocab_size as u64
}

/// Bytes of a capture of `layers` layers in passes up to `rows` rows.
pub fn capture_bytes(spec: &ModelSpec, layers: usize, rows: usize) -> u64 {
    4 * rows as u64 * (layers * spec.hidden_size) as u64
}

/// What a row takes in the buffers that every layer uses anew, and in the residual stream.
fn work_width(spec: &ModelSpec) -> usize {
    let (attention, ffn) = (attention_rows(spec), ffn_rows(spec));
    let mixers = attention.iter().map(|heads| heads.qkv_width() + heads.q_width());
    let parts = ffn.iter().map(|ffn| match ffn {
        FeedForwardRows::Dense { width } => 3 * width,
        FeedForwardRows::Experts { experts, per_token, width } => {
            experts + per_token * (2 + 3 * width)
        }
    });
    let outputs = if norms_after(spec) { 2 * spec.hidden_size } else { 0 };
    2 * spec.hidden_size + mixers.sum::<usize>() + parts.sum::<usize>() + outputs
}

/// The different shapes of heads, each of which has buffers of its own.
pub(crate) fn attention_rows(spec: &ModelSpec) -> Vec<HeadShape> {
    distinct(spec.layers.iter().map(|layer| layer.attention().heads))
}

/// The sizes of a feed-forward part's buffers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FeedForwardRows {
    Dense { width: usize },
    Experts { experts: usize, per_token: usize, width: usize },
}

impl FeedForwardRows {
    pub fn of(ffn: &FeedForward) -> Self {
        match ffn {
            FeedForward::Dense(dense) => Self::Dense { width: dense.width },
            FeedForward::Experts(spec) => Self::Experts {
                experts: spec.experts,
                per_token: spec.per_token,
                width: spec.width,
            },
        }
    }
}

/// The different shapes of feed-forward parts, each of which has buffers of its own.
pub(crate) fn ffn_rows(spec: &ModelSpec) -> Vec<FeedForwardRows> {
    distinct(spec.layers.iter().map(|layer| FeedForwardRows::of(&layer.ffn)))
}

/// Whether a layer norms what its parts make, which then needs buffers.
pub(crate) fn norms_after(spec: &ModelSpec) -> bool {
    spec.layers.iter().any(|layer| layer.norms.after())
}

fn distinct<T: PartialEq>(items: impl Iterator<Item = T>) -> Vec<T> {
    items.fold(Vec::new(), |mut all, item| {
        if !all.contains(&item) {
            all.push(item);
        }
        all
    })
}

fn buffer_bytes(bounds: PlanBounds, per_row: usize, per_output: usize) -> u64 {
    4 * (bounds.rows as u64 * per_row as u64
        + bounds.outputs as u64 * per_output as u64
        + bounds.slots as u64)
}

/// Bytes of the rotary tables for contexts of `positions` tokens.
pub fn rope_bytes(spec: &ModelSpec, positions: usize) -> u64 {
    let width = |group: &KvGroup| match &group.mixer {
        Mixer::Attention(attention) => attention.heads.head_dim as u64,
    };
    4 * positions as u64 * spec.kv_groups().iter().map(width).sum::<u64>()
}

/// Bytes of `tensors` once packed: matrices in `format`, vectors as float32.
pub(crate) fn tensor_bytes(tensors: impl Iterator<Item = Expected>, format: WeightFormat) -> u64 {
    let bytes = |tensor: Expected| match tensor.shape[..] {
        [outputs, inputs] if tensor.exact => matrix_bytes(outputs, inputs, exact(format)),
        [outputs, inputs] => matrix_bytes(outputs, inputs, format),
        _ => 4 * tensor.shape.iter().product::<usize>() as u64,
    };
    tensors.map(bytes).sum()
}

/// Bytes of the buffers of a head whose layer is `layer` and which tells `tokens` tokens.
pub(crate) fn fused_scratch_bytes(layer: &ModelSpec, bounds: PlanBounds, tokens: usize) -> u64 {
    let hidden = layer.hidden_size;
    // And a row of zeros.
    buffer_bytes(bounds, work_width(layer) + 5 * hidden, 2 * hidden + tokens)
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
            FeatureNorm::Each => self.target_hidden_size,
        };
        let per_row = work_width(&self.layer) + self.fc_inputs() + norms + 4 * hidden;
        buffer_bytes(bounds, per_row, 3 * hidden + self.draft_vocab_size)
    }

    /// Bytes of the head's rotary table for contexts of `positions` tokens.
    pub fn rope_bytes(&self, positions: usize) -> u64 {
        rope_bytes(&self.layer, positions)
    }
}
