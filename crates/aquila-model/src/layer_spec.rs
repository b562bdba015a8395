//! What one layer of a model is made of: a mixer, which looks at other rows, and a feed-forward
//! part, which does not.
//!
//! A model is a list of these. Tensors, parameters, memory and buffers all follow from it, so they
//! cannot disagree about what a layer is.

use aquila_compute::{Activation, HeadShape};

use crate::Result;
use crate::config::Settings;
use crate::rope::RopeSpec;

/// One layer.
#[derive(Debug, Clone, PartialEq)]
pub struct LayerSpec {
    /// What mixes rows.
    pub mixer: Mixer,
    /// What works on single rows.
    pub ffn: FeedForward,
    /// Where the stream is normed.
    pub norms: Norms,
}

/// How a layer mixes rows. Layers of equal mixers share a KV group.
#[derive(Debug, Clone, PartialEq)]
pub enum Mixer {
    /// Attention over keys and values.
    Attention(AttentionSpec),
}

/// Grouped-query attention with rotary positions.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionSpec {
    /// The heads.
    pub heads: HeadShape,
    /// What the products of queries and keys are multiplied by.
    pub scale: f32,
    /// How many positions a row sees, itself included; all before it where there is none.
    pub window: Option<usize>,
    /// Rotary embedding.
    pub rope: RopeSpec,
    /// Whether each query and key head is normed before it is rotated.
    pub qk_norm: bool,
    /// Whether the projections to queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the projection out of attention has a bias.
    pub output_bias: bool,
}

/// The part of a layer that works on single rows.
#[derive(Debug, Clone, PartialEq)]
pub enum FeedForward {
    /// One gated projection up and one down.
    Dense(DenseSpec),
    /// Many of them, of which a row takes a few.
    Experts(ExpertsSpec),
}

/// A dense feed-forward part.
#[derive(Debug, Clone, PartialEq)]
pub struct DenseSpec {
    /// Its inner width.
    pub width: usize,
    /// Whether its projections have biases.
    pub bias: bool,
    /// What the gate goes through.
    pub activation: Activation,
}

/// A mixture of experts.
#[derive(Debug, Clone, PartialEq)]
pub struct ExpertsSpec {
    /// How many there are.
    pub experts: usize,
    /// How many a row takes.
    pub per_token: usize,
    /// The inner width of each.
    pub width: usize,
    /// Whether the weights of a row's experts are scaled to sum to 1.
    pub normalized: bool,
    /// What the gate goes through.
    pub activation: Activation,
}

/// Where a layer norms the stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Norms {
    /// What the mixer and the feed-forward part read.
    Before,
    /// What they read and what they make, before it is added to the stream.
    BeforeAndAfter,
}

impl Norms {
    /// Whether what a part makes is normed.
    pub fn after(self) -> bool {
        self == Norms::BeforeAndAfter
    }
}

impl LayerSpec {
    /// The attention of the layer.
    pub fn attention(&self) -> &AttentionSpec {
        let Mixer::Attention(attention) = &self.mixer;
        attention
    }
}

impl FeedForward {
    /// What the gate goes through.
    pub fn activation(&self) -> Activation {
        match self {
            FeedForward::Dense(dense) => dense.activation,
            FeedForward::Experts(experts) => experts.activation,
        }
    }

    /// The experts, where there are any.
    pub fn experts(&self) -> Option<&ExpertsSpec> {
        match self {
            FeedForward::Dense(_) => None,
            FeedForward::Experts(experts) => Some(experts),
        }
    }
}

impl ExpertsSpec {
    /// Reads the settings that Qwen's sparse models share, with transformers' defaults; none where
    /// there are no experts.
    pub(crate) fn read(config: &Settings<'_>, activation: Activation) -> Result<Option<Self>> {
        let [local, all] = ["num_local_experts", "num_experts"].map(|field| config.count(field));
        let experts = match (local?, all?) {
            (Some(local), Some(all)) if local != all => {
                let problem = format!("is {all}, but num_local_experts is {local}");
                return Err(config.wrong("num_experts", problem));
            }
            (local, all) => local.or(all).unwrap_or(128),
        };
        if experts == 0 {
            return Ok(None);
        }
        let per_token = config.size_if_any("num_experts_per_tok")?.unwrap_or(8);
        if per_token > experts {
            let problem = format!("must be at most the {experts} experts, found {per_token}");
            return Err(config.wrong("num_experts_per_tok", problem));
        }
        Ok(Some(Self {
            experts,
            per_token,
            width: config.size_if_any("moe_intermediate_size")?.unwrap_or(768),
            normalized: config.flag("norm_topk_prob", false)?,
            activation,
        }))
    }
}
