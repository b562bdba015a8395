//! The tensors that a spec consists of: names and shapes, in the order a decoder loads them.
//!
//! One list serves the loader, the check before loading and the random weights, so they cannot
//! disagree about what a model is.

use crate::layer_spec::{FeedForward, LayerSpec};
use crate::source::TensorSource;
use crate::{Error, ModelSpec, Result};

/// What a family of checkpoints calls its tensors; the names of a layer follow its prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TensorNames {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
    pub layer: &'static str,
    pub attention_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub o: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub attention_output_norm: &'static str,
    pub ffn_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
    pub router: &'static str,
    pub experts: &'static str,
    pub expert_gate: &'static str,
    pub expert_up: &'static str,
    pub expert_down: &'static str,
    pub ffn_output_norm: &'static str,
}

impl TensorNames {
    /// The names of Llama and Qwen in transformers.
    pub const HUGGING_FACE: Self = Self {
        embedding: "model.embed_tokens",
        final_norm: "model.norm",
        head: "lm_head",
        layer: "model.layers",
        attention_norm: "input_layernorm",
        q: "self_attn.q_proj",
        k: "self_attn.k_proj",
        v: "self_attn.v_proj",
        o: "self_attn.o_proj",
        q_norm: "self_attn.q_norm",
        k_norm: "self_attn.k_norm",
        attention_output_norm: "post_self_attn_layernorm",
        ffn_norm: "post_attention_layernorm",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
        router: "mlp.gate",
        experts: "mlp.experts",
        expert_gate: "gate_proj",
        expert_up: "up_proj",
        expert_down: "down_proj",
        ffn_output_norm: "post_mlp_layernorm",
    };
}

/// A tensor that a model must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
    /// Whether it is kept as it is where weights are quantized.
    pub exact: bool,
}

impl Expected {
    /// A weight or a vector.
    pub fn new(name: String, shape: Vec<usize>) -> Self {
        Self { name, shape, exact: false }
    }

    /// How many elements it has.
    pub(crate) fn elements(&self) -> u128 {
        self.shape.iter().map(|&n| n as u128).product()
    }
}

/// Matrices of equal inputs that become one projection, with their biases if they have any.
pub(crate) struct LinearLayout {
    pub weights: Vec<Expected>,
    pub biases: Vec<Expected>,
}

pub(crate) struct LayerLayout {
    pub attention_norm: Expected,
    pub qkv: LinearLayout,
    pub qk_norms: Option<[Expected; 2]>,
    pub o: LinearLayout,
    pub attention_output_norm: Option<Expected>,
    pub ffn_norm: Expected,
    pub ffn: FeedForwardLayout,
    pub ffn_output_norm: Option<Expected>,
}

pub(crate) enum FeedForwardLayout {
    Dense(GatedLayout),
    Experts { router: Expected, experts: Vec<GatedLayout> },
}

/// A gated projection up and a projection down.
pub(crate) struct GatedLayout {
    pub gate_up: LinearLayout,
    pub down: LinearLayout,
}

impl LinearLayout {
    fn tensors(self) -> impl Iterator<Item = Expected> {
        self.weights.into_iter().chain(self.biases)
    }
}

impl GatedLayout {
    fn tensors(self) -> impl Iterator<Item = Expected> {
        self.gate_up.tensors().chain(self.down.tensors())
    }
}

impl LayerLayout {
    /// Every tensor of the layer.
    pub fn tensors(self) -> impl Iterator<Item = Expected> {
        let (router, gated) = match self.ffn {
            FeedForwardLayout::Dense(dense) => (None, vec![dense]),
            FeedForwardLayout::Experts { router, experts } => (Some(router), experts),
        };
        [self.attention_norm, self.ffn_norm]
            .into_iter()
            .chain(self.qk_norms.into_iter().flatten())
            .chain(self.attention_output_norm)
            .chain(self.ffn_output_norm)
            .chain(self.qkv.tensors())
            .chain(self.o.tensors())
            .chain(router)
            .chain(gated.into_iter().flat_map(GatedLayout::tensors))
    }
}

fn linear(parts: &[(String, usize)], inputs: usize, bias: bool) -> LinearLayout {
    let weight = |(name, outputs): &(String, usize)| {
        Expected::new(format!("{name}.weight"), vec![*outputs, inputs])
    };
    let vector =
        |(name, outputs): &(String, usize)| Expected::new(format!("{name}.bias"), vec![*outputs]);
    LinearLayout {
        weights: parts.iter().map(weight).collect(),
        biases: parts.iter().filter(|_| bias).map(vector).collect(),
    }
}

fn gated([gate, up, down]: [String; 3], hidden: usize, inner: usize, bias: bool) -> GatedLayout {
    GatedLayout {
        gate_up: linear(&[(gate, inner), (up, inner)], hidden, bias),
        down: linear(&[(down, hidden)], inner, bias),
    }
}

impl ModelSpec {
    pub(crate) fn embedding(&self) -> Expected {
        let name = format!("{}.weight", self.names.embedding);
        Expected::new(name, vec![self.vocab_size, self.hidden_size])
    }

    pub(crate) fn final_norm(&self) -> Expected {
        Expected::new(format!("{}.weight", self.names.final_norm), vec![self.hidden_size])
    }

    /// The language-model head: a tensor of its own, or the embedding.
    pub(crate) fn head(&self) -> Expected {
        if self.tied_embeddings {
            return self.embedding();
        }
        let name = format!("{}.weight", self.names.head);
        Expected::new(name, vec![self.vocab_size, self.hidden_size])
    }

    pub(crate) fn layer(&self, layer: usize) -> LayerLayout {
        let prefix = format!("{}.{layer}", self.names.layer);
        self.layer_at(&prefix, &self.layers[layer], self.hidden_size)
    }

    /// The tensors of a layer whose names begin with `prefix` and whose attention reads rows of
    /// `width`.
    pub(crate) fn layer_at(&self, prefix: &str, layer: &LayerSpec, width: usize) -> LayerLayout {
        let names = &self.names;
        let at = |part: &str| format!("{prefix}.{part}");
        let norm =
            |part: &str, width: usize| Expected::new(format!("{}.weight", at(part)), vec![width]);
        let hidden = self.hidden_size;
        let attention = layer.attention();
        let heads = attention.heads;
        let (q, kv, head) = (heads.q_width(), heads.kv_width(), heads.head_dim);
        let after = |part: &str| layer.norms.after().then(|| norm(part, hidden));
        let qkv = [(at(names.q), q), (at(names.k), kv), (at(names.v), kv)];
        LayerLayout {
            attention_norm: norm(names.attention_norm, hidden),
            qkv: linear(&qkv, width, attention.qkv_bias),
            qk_norms: attention
                .qk_norm
                .then(|| [norm(names.q_norm, head), norm(names.k_norm, head)]),
            o: linear(&[(at(names.o), hidden)], q, attention.output_bias),
            attention_output_norm: after(names.attention_output_norm),
            ffn_norm: norm(names.ffn_norm, hidden),
            ffn: match &layer.ffn {
                FeedForward::Dense(dense) => {
                    let parts = [names.gate, names.up, names.down].map(at);
                    FeedForwardLayout::Dense(gated(parts, hidden, dense.width, dense.bias))
                }
                FeedForward::Experts(spec) => {
                    let router = format!("{}.weight", at(names.router));
                    let expert = |number: usize| {
                        let part = |part| format!("{prefix}.{}.{number}.{part}", names.experts);
                        let parts = [names.expert_gate, names.expert_up, names.expert_down];
                        gated(parts.map(part), hidden, spec.width, false)
                    };
                    FeedForwardLayout::Experts {
                        router: Expected {
                            exact: true,
                            ..Expected::new(router, vec![spec.experts, hidden])
                        },
                        experts: (0..spec.experts).map(expert).collect(),
                    }
                }
            },
            ffn_output_norm: after(names.ffn_output_norm),
        }
    }

    /// Every tensor of the model; a tied head is not listed twice.
    pub fn tensors(&self) -> impl Iterator<Item = Expected> + '_ {
        let layers = (0..self.layers.len()).flat_map(|layer| self.layer(layer).tensors());
        let head = (!self.tied_embeddings).then(|| self.head());
        [self.embedding(), self.final_norm()].into_iter().chain(layers).chain(head)
    }
}

/// Refuses a source that lacks one of `tensors` or has it in another shape or type; answers how
/// many bytes they have.
pub(crate) fn check(
    tensors: impl Iterator<Item = Expected>,
    source: &dyn TensorSource,
) -> Result<u64> {
    let mut bytes = 0u64;
    for expected in tensors {
        let Some(found) = source.info(&expected.name) else {
            return Err(Error::tensor(
                source.origin(),
                &expected.name,
                format!("is missing; expected shape {:?}", expected.shape),
            ));
        };
        if found.shape != expected.shape {
            return Err(Error::tensor(
                &found.origin,
                &expected.name,
                format!("expected shape {:?}, found {:?}", expected.shape, found.shape),
            ));
        }
        if !found.is_float() {
            return Err(Error::tensor(
                &found.origin,
                &expected.name,
                format!("expected BF16, F16 or F32, found {}", found.stored_as),
            ));
        }
        bytes += found.bytes;
    }
    Ok(bytes)
}
