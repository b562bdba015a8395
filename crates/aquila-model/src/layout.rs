//! The tensors that a spec consists of: names and shapes, in the order a decoder loads them.
//!
//! One list serves the loader, the check before loading and the random weights, so they cannot
//! disagree about what a model is.

use crate::source::TensorSource;
use crate::{Error, ModelSpec, Result};

/// What a family of checkpoints calls its tensors; the names of a layer follow its prefix.
#[derive(Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub struct TensorNames {
    pub embedding: &'static str,
    pub final_norm: &'static str,
    pub head: &'static str,
    pub layer: &'static str,
    pub input_norm: &'static str,
    pub q: &'static str,
    pub k: &'static str,
    pub v: &'static str,
    pub o: &'static str,
    pub q_norm: &'static str,
    pub k_norm: &'static str,
    pub post_norm: &'static str,
    pub gate: &'static str,
    pub up: &'static str,
    pub down: &'static str,
}

impl TensorNames {
    /// The names of Llama and Qwen in transformers.
    pub const HUGGING_FACE: Self = Self {
        embedding: "model.embed_tokens",
        final_norm: "model.norm",
        head: "lm_head",
        layer: "model.layers",
        input_norm: "input_layernorm",
        q: "self_attn.q_proj",
        k: "self_attn.k_proj",
        v: "self_attn.v_proj",
        o: "self_attn.o_proj",
        q_norm: "self_attn.q_norm",
        k_norm: "self_attn.k_norm",
        post_norm: "post_attention_layernorm",
        gate: "mlp.gate_proj",
        up: "mlp.up_proj",
        down: "mlp.down_proj",
    };
}

/// A tensor that a model must have.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Expected {
    /// Its name.
    pub name: String,
    /// Its shape.
    pub shape: Vec<usize>,
}

/// Matrices of equal inputs that become one projection, with their biases if they have any.
pub(crate) struct LinearLayout {
    pub weights: Vec<Expected>,
    pub biases: Vec<Expected>,
}

pub(crate) struct LayerLayout {
    pub input_norm: Expected,
    pub qkv: LinearLayout,
    pub qk_norms: Option<[Expected; 2]>,
    pub o: LinearLayout,
    pub post_norm: Expected,
    pub gate_up: LinearLayout,
    pub down: LinearLayout,
}

impl LayerLayout {
    /// Every tensor of the layer.
    pub fn tensors(self) -> impl Iterator<Item = Expected> {
        let linears = [self.qkv, self.o, self.gate_up, self.down];
        [self.input_norm, self.post_norm]
            .into_iter()
            .chain(self.qk_norms.into_iter().flatten())
            .chain(linears.into_iter().flat_map(|l| l.weights.into_iter().chain(l.biases)))
    }
}

fn linear(parts: &[(String, usize)], inputs: usize, bias: bool) -> LinearLayout {
    let weights = parts
        .iter()
        .map(|(name, outputs)| Expected {
            name: format!("{name}.weight"),
            shape: vec![*outputs, inputs],
        })
        .collect();
    let biases = parts
        .iter()
        .filter(|_| bias)
        .map(|(name, outputs)| Expected { name: format!("{name}.bias"), shape: vec![*outputs] })
        .collect();
    LinearLayout { weights, biases }
}

impl ModelSpec {
    pub(crate) fn embedding(&self) -> Expected {
        Expected {
            name: format!("{}.weight", self.names.embedding),
            shape: vec![self.vocab_size, self.hidden_size],
        }
    }

    pub(crate) fn final_norm(&self) -> Expected {
        Expected {
            name: format!("{}.weight", self.names.final_norm),
            shape: vec![self.hidden_size],
        }
    }

    /// The language-model head: a tensor of its own, or the embedding.
    pub(crate) fn head(&self) -> Expected {
        if self.tied_embeddings {
            return self.embedding();
        }
        Expected {
            name: format!("{}.weight", self.names.head),
            shape: vec![self.vocab_size, self.hidden_size],
        }
    }

    pub(crate) fn layer(&self, layer: usize) -> LayerLayout {
        self.layer_at(&format!("{}.{layer}", self.names.layer), self.hidden_size)
    }

    /// The layer whose names begin with `prefix` and whose attention reads rows of `width`.
    pub(crate) fn layer_at(&self, prefix: &str, width: usize) -> LayerLayout {
        let names = self.names;
        let at = |part: &str| format!("{prefix}.{part}");
        let norm = |part: &str, width: usize| Expected {
            name: format!("{}.weight", at(part)),
            shape: vec![width],
        };
        let (hidden, inner) = (self.hidden_size, self.intermediate_size);
        let (q, kv) = (self.heads.q_width(), self.heads.kv_width());
        let head = self.heads.head_dim;
        LayerLayout {
            input_norm: norm(names.input_norm, hidden),
            qkv: linear(
                &[(at(names.q), q), (at(names.k), kv), (at(names.v), kv)],
                width,
                self.qkv_bias,
            ),
            qk_norms: self.qk_norm.then(|| [norm(names.q_norm, head), norm(names.k_norm, head)]),
            o: linear(&[(at(names.o), hidden)], q, self.output_bias),
            post_norm: norm(names.post_norm, hidden),
            gate_up: linear(
                &[(at(names.gate), inner), (at(names.up), inner)],
                hidden,
                self.mlp_bias,
            ),
            down: linear(&[(at(names.down), hidden)], inner, self.mlp_bias),
        }
    }

    /// Every tensor of the model; a tied head is not listed twice.
    pub fn tensors(&self) -> impl Iterator<Item = Expected> + '_ {
        let layers = (0..self.layers).flat_map(|layer| self.layer(layer).tensors());
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
