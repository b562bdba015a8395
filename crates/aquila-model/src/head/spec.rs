//! What an EAGLE-3 head is made of: one layer that reads a token's embedding beside a hidden state.
//!
//! The invariant: what would be computed otherwise than this head computes is refused by name,
//! since a head that is run wrongly still drafts, only badly.

use serde_json::Value;

use crate::config::{Settings, shown};
use crate::layout::{Expected, LayerLayout, LinearLayout};
use crate::source::TensorSource;
use crate::{ModelSpec, Result, arch};

/// The names under which publishers ship EAGLE-3 heads of Llama's family.
const ARCHITECTURES: &[&str] =
    &["LlamaForCausalLM", "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"];

/// The setting that says which layers of the target are captured.
pub(super) const LAYER_IDS: &str = "eagle_aux_hidden_state_layer_ids";

/// How many layers are captured where the config is silent.
const USUAL_AUX_LAYERS: usize = 3;

/// Settings under which a head computes something else.
const OTHER_HEADS: &[&str] =
    &["norm_before_residual", "norm_before_fc", "use_aux_norm", "norm_output"];

/// How the names of tensors begin that belong to such heads.
const OTHER_TENSORS: &[&str] =
    &["input_norm.", "fc_norm.", "aux_norm_", "mask_hidden", "layers.1."];

/// The description of an EAGLE-3 head.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Spec {
    /// Its one layer; the vocabulary is that of the model it drafts for.
    pub layer: ModelSpec,
    /// Width of the hidden states it reads.
    pub target_hidden_size: usize,
    /// Tokens that it can draft.
    pub draft_vocab_size: usize,
    /// The layers, from 0, whose outputs it reads, low to high; none means the usual three.
    pub aux_layers: Option<Vec<usize>>,
    fc_bias: bool,
    prefix: &'static str,
}

/// Whether a config describes an EAGLE-3 head.
pub(crate) fn is_eagle3(config: &Value) -> bool {
    let set = |field: &str| config.get(field).is_some_and(|v| !v.is_null());
    arch::named(config).is_some_and(|name| name.contains("Eagle3"))
        || set("draft_vocab_size")
        || set("eagle_config")
}

impl Eagle3Spec {
    /// Reads a config, and from the tensors, where there are any, how they are named.
    pub(crate) fn read(
        config: &Settings<'_>,
        architecture: &str,
        tensors: Option<&dyn TensorSource>,
    ) -> Result<Self> {
        if !ARCHITECTURES.contains(&architecture) {
            return Err(config.unsupported(format!(
                "architecture {architecture:?} is not supported as an EAGLE-3 head; supported are {}",
                ARCHITECTURES.join(", ")
            )));
        }
        let eagle = config.object("eagle_config")?;
        refuse_other_heads(config, eagle.as_ref(), tensors)?;
        let mut layer = arch::read_llama(config)?;
        layer.architecture = architecture.into();
        if layer.layers != 1 {
            return Err(config.wrong(
                "num_hidden_layers",
                format!("must be 1 in an EAGLE-3 head, found {}", layer.layers),
            ));
        }
        let draft_vocab_size = config.size_if_any("draft_vocab_size")?.unwrap_or(layer.vocab_size);
        if draft_vocab_size > layer.vocab_size {
            return Err(config.wrong(
                "draft_vocab_size",
                format!(
                    "must be at most vocab_size {}, found {draft_vocab_size}",
                    layer.vocab_size
                ),
            ));
        }
        let target_hidden_size =
            config.size_if_any("target_hidden_size")?.unwrap_or(layer.hidden_size);
        let nested = eagle.filter(|e| e.get(LAYER_IDS).is_some());
        let aux_layers = layer_ids(nested.as_ref().unwrap_or(config))?;
        let has = |name: &str| tensors.is_some_and(|t| t.contains(name));
        let fc_bias = has("fc.bias");
        let alias = has("layers.0.self_attn.q_proj.weight");
        let prefix = if alias { "layers.0" } else { "midlayer" };
        Ok(Self { layer, target_hidden_size, draft_vocab_size, aux_layers, fc_bias, prefix })
    }

    /// How many layers of the target it reads.
    pub fn aux_count(&self) -> usize {
        self.aux_layers.as_ref().map_or(USUAL_AUX_LAYERS, Vec::len)
    }

    /// The layers that are captured of a model with `layers` layers.
    pub(super) fn capture_layers(
        &self,
        config: &Settings<'_>,
        layers: usize,
    ) -> Result<Vec<usize>> {
        match &self.aux_layers {
            Some(ids) => match ids.iter().find(|&&id| id >= layers) {
                Some(id) => Err(config.wrong(
                    LAYER_IDS,
                    format!("must name layers of the target, which has {layers}; found {id}"),
                )),
                None => Ok(ids.clone()),
            },
            // EAGLE's own choice: the inputs of layers 2, L / 2 and L - 3.
            None if layers >= 5 => Ok(vec![1, layers / 2 - 1, layers - 4]),
            None => Err(config.wrong(
                LAYER_IDS,
                format!("is missing, and the usual layers do not exist in a target of {layers}"),
            )),
        }
    }

    /// Whether the head brings an embedding table of its own: that of the target has another width.
    pub(crate) fn own_embedding(&self) -> bool {
        self.target_hidden_size != self.layer.hidden_size
    }

    pub(crate) fn fc_bias(&self) -> bool {
        self.fc_bias
    }

    pub(crate) fn fc_inputs(&self) -> usize {
        self.aux_count() * self.target_hidden_size
    }

    pub(super) fn fc(&self) -> LinearLayout {
        let hidden = self.layer.hidden_size;
        let bias = Expected { name: "fc.bias".into(), shape: vec![hidden] };
        LinearLayout {
            weights: vec![Expected {
                name: "fc.weight".into(),
                shape: vec![hidden, self.fc_inputs()],
            }],
            biases: if self.fc_bias { vec![bias] } else { Vec::new() },
        }
    }

    pub(super) fn hidden_norm(&self) -> Expected {
        self.vector(format!("{}.hidden_norm.weight", self.prefix))
    }

    pub(super) fn layer_layout(&self) -> LayerLayout {
        self.layer.layer_at(self.prefix, 2 * self.layer.hidden_size)
    }

    pub(super) fn norm(&self) -> Expected {
        self.vector("norm.weight".into())
    }

    pub(super) fn lm_head(&self) -> Expected {
        let shape = vec![self.draft_vocab_size, self.layer.hidden_size];
        Expected { name: "lm_head.weight".into(), shape }
    }

    pub(super) fn embedding(&self) -> Expected {
        let shape = vec![self.layer.vocab_size, self.layer.hidden_size];
        Expected { name: "embed_tokens.weight".into(), shape }
    }

    fn vector(&self, name: String) -> Expected {
        Expected { name, shape: vec![self.layer.hidden_size] }
    }

    /// Every tensor of weights.
    pub fn tensors(&self) -> impl Iterator<Item = Expected> + '_ {
        let fc = self.fc();
        let own = self.own_embedding().then(|| self.embedding());
        fc.weights
            .into_iter()
            .chain(fc.biases)
            .chain([self.hidden_norm()])
            .chain(self.layer_layout().tensors())
            .chain([self.norm(), self.lm_head()])
            .chain(own)
    }

    /// How many parameters the head has.
    pub fn parameters(&self) -> u64 {
        let count = |t: Expected| t.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64));
        self.tensors().map(count).fold(0, u64::saturating_add)
    }
}

fn refuse_other_heads(
    config: &Settings<'_>,
    eagle: Option<&Settings<'_>>,
    tensors: Option<&dyn TensorSource>,
) -> Result<()> {
    for settings in [Some(config), eagle].into_iter().flatten() {
        for field in OTHER_HEADS {
            if settings.flag(field, false)? {
                return Err(config.unsupported(format!("an EAGLE-3 head with {field}")));
            }
        }
        if !settings.flag("use_aux_hidden_state", true)? {
            return Err(config.unsupported("an EAGLE-3 head without use_aux_hidden_state"));
        }
    }
    let names = tensors.map(TensorSource::names).unwrap_or_default();
    let other = |name: &&&str| OTHER_TENSORS.iter().any(|start| name.starts_with(start));
    match names.iter().find(other) {
        Some(name) => Err(config.unsupported(format!("an EAGLE-3 head with a tensor {name}"))),
        None => Ok(()),
    }
}

fn layer_ids(settings: &Settings<'_>) -> Result<Option<Vec<usize>>> {
    let Some(value) = settings.get(LAYER_IDS) else { return Ok(None) };
    let wrong = |problem: &str| {
        Err(settings.wrong(LAYER_IDS, format!("must {problem}, found {}", shown(value))))
    };
    let ids: Option<Vec<usize>> = value.as_array().and_then(|list| {
        list.iter().map(|v| v.as_u64().and_then(|n| usize::try_from(n).ok())).collect()
    });
    match ids {
        Some(ids) if ids.is_empty() => wrong("name at least one layer"),
        Some(ids) if !ids.is_sorted_by(|a, b| a < b) => wrong("be ascending"),
        Some(ids) => Ok(Some(ids)),
        None => wrong("be a list of layers"),
    }
}
