//! What an EAGLE-3 head is made of: one layer that reads a token's embedding beside a hidden state.
//!
//! Sizes come from the config; optional parts and the names of tensors come from the tensors, since
//! publishers agree on those better than on settings. The invariant: what would be computed
//! otherwise than the head was trained is refused by name, since a head that is run wrongly still
//! drafts, only badly.

use serde_json::Value;

use super::aux_layers::{AuxLayerConvention, AuxLayers, LAYER_IDS, USUAL_COUNT};
use super::first_embedding::FirstEmbedding;
use super::kind::layer_spec;
use crate::config::Settings;
use crate::layer_spec::{FeedForward, LayerSpec, Mixer};
use crate::layout::{Expected, LayerLayout, LinearLayout};
use crate::source::TensorSource;
use crate::{Error, ModelSpec, Result, arch};

/// What the names have in them of heads that are published in the manner of vLLM and speculators.
const BOUNDARY_PUBLISHERS: &[&str] =
    &["Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM", "Speculator", "DraftModel"];

/// The older names of the norms of each hidden state, low to high.
const OLD_NORMS: [&str; 3] = ["aux_norm_low", "aux_norm_mid", "aux_norm_high"];

/// More layers than any head has.
const MOST_LAYERS: usize = 64;

/// What users decide of a head where its config may mislead.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct HeadOptions {
    /// How the layers are numbered whose hidden states it reads.
    pub aux_layer_convention: AuxLayerConvention,
    /// The base of its rotary frequencies, instead of the config's.
    pub rope_theta: Option<f64>,
    /// Whether it must have a layer for each step.
    pub multi_layer: bool,
    /// What an MTP head takes for the embedding at position 0.
    pub first_embedding: FirstEmbedding,
}

/// How the target's hidden states are normed before `fc` joins them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeatureNorm {
    /// Not at all.
    None,
    /// All of them as one vector (`input_norm`).
    Whole,
    /// Each by itself (`fc_norm.N`).
    Each,
}

/// The description of an EAGLE-3 head.
#[derive(Debug, Clone, PartialEq)]
pub struct Eagle3Spec {
    /// Its layers, mostly one; the vocabulary is that of the model it drafts for.
    pub layer: ModelSpec,
    /// Width of the hidden states it reads.
    pub target_hidden_size: usize,
    /// Tokens that it can draft.
    pub draft_vocab_size: usize,
    /// How many hidden states `fc` joins; 0 means that the head has no `fc` and reads what the
    /// target's language-model head reads.
    pub aux_count: usize,
    /// Which layers they are the outputs of.
    pub aux_layers: AuxLayers,
    /// How they are normed.
    pub feature_norm: FeatureNorm,
    /// Whether the residual stream goes on from the normed hidden state.
    pub norm_before_residual: bool,
    /// Whether the next step takes the hidden state after the last norm.
    pub norm_output: bool,
    /// Whether the embedding table is the head's own, not the target's.
    pub own_embedding: bool,
    /// Whether the language-model head is the head's own, not the target's.
    pub own_lm_head: bool,
    fc_bias: bool,
    names: HeadNames,
}

/// What a publisher calls the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct HeadNames {
    /// What most names begin with.
    root: &'static str,
    layer: &'static str,
    lm_head: &'static str,
    old_norms: bool,
    /// Whether layers after the first name the norm of what they read `hidden_norm`.
    later_hidden_norm: bool,
}

impl HeadNames {
    const ORIGINAL: Self = Self {
        root: "",
        layer: "midlayer",
        lm_head: "",
        old_norms: false,
        later_hidden_norm: false,
    };

    fn of(tensors: &dyn TensorSource) -> Self {
        let names = tensors.names();
        let any = |start: &str| names.iter().any(|name| name.starts_with(start));
        let rooted = ["model.midlayer.", "model.layers.0.", "model.fc."].into_iter().any(any);
        let (root, layer) = match (rooted, any("layers.0.") || any("model.layers.0.")) {
            (false, false) => ("", "midlayer"),
            (false, true) => ("", "layers.0"),
            (true, false) => ("model.", "model.midlayer"),
            (true, true) => ("model.", "model.layers.0"),
        };
        let lm_head = if any("model.lm_head.") { "model." } else { "" };
        let old_norms = tensors.contains(&format!("{root}{}.weight", OLD_NORMS[0]));
        let second = |norm: &str| {
            let layers = layer.strip_suffix('0').unwrap_or_default();
            tensors.contains(&format!("{layers}1.{norm}.weight"))
        };
        let later_hidden_norm = second("hidden_norm") && !second("input_layernorm");
        Self { root, layer, lm_head, old_norms, later_hidden_norm }
    }

    /// What the names of a layer begin with.
    fn layer(&self, number: usize) -> String {
        match self.layer.strip_suffix('0') {
            Some(layers) => format!("{layers}{number}"),
            None => self.layer.to_owned(),
        }
    }
}

/// Whether a config describes an EAGLE-3 head.
pub(crate) fn is_eagle3(config: &Value) -> bool {
    let set = |field: &str| config.get(field).is_some_and(|v| !v.is_null());
    arch::named(config).is_some_and(|name| name.contains("Eagle3"))
        || config.get("speculators_model_type").and_then(Value::as_str) == Some("eagle3")
        || set("draft_vocab_size")
        || set("eagle_config")
}

impl Eagle3Spec {
    /// Reads a config, and from the tensors, where there are any, what the head has and how that
    /// is called.
    pub(crate) fn read(
        config: &Settings<'_>,
        architecture: &str,
        tensors: Option<&dyn TensorSource>,
        options: &HeadOptions,
    ) -> Result<Self> {
        let sizes = config.object("transformer_layer_config")?;
        let by_speculators = sizes.is_some() || config.get("speculators_model_type").is_some();
        let sizes = sizes.unwrap_or(*config);
        let eagle = config.object("eagle_config")?;
        let names = tensors.map_or(HeadNames::ORIGINAL, HeadNames::of);
        let has = |part: &str| tensors.is_some_and(|t| t.contains(part));
        let stored = |part: &str| has(&format!("{}{part}.weight", names.root));
        let flag = |field: &str| -> Result<Option<bool>> {
            let places = [Some(config), eagle.as_ref()].into_iter().flatten();
            let mut given = places.filter(|s| s.get(field).is_some());
            given.next().map(|settings| settings.flag(field, false)).transpose()
        };
        refuse_other_heads(config, tensors, names.root)?;
        let layer = layers(&sizes, architecture, tensors, &names, options)?;
        let hidden = layer.hidden_size;
        let target_hidden_size = config.size_if_any("target_hidden_size")?.unwrap_or(hidden);

        let lm_head = format!("{}lm_head.weight", names.lm_head);
        let rows = tensors.and_then(|t| t.info(&lm_head)).and_then(|i| i.shape.first().copied());
        let declared = config.size_if_any("draft_vocab_size")?;
        let draft_vocab_size = declared.or(rows).unwrap_or(layer.vocab_size);
        if draft_vocab_size > layer.vocab_size {
            let most = layer.vocab_size;
            let problem = format!("must be at most vocab_size {most}, found {draft_vocab_size}");
            return Err(config.wrong("draft_vocab_size", problem));
        }

        let by_boundary =
            by_speculators || BOUNDARY_PUBLISHERS.iter().any(|name| architecture.contains(name));
        let asked = options.aux_layer_convention;
        let aux_layers = AuxLayers::read(config, eagle.as_ref(), asked, by_boundary)?;
        let joins = flag("use_aux_hidden_state")?.unwrap_or(true);
        let named = aux_layers.ids.as_ref().map(Vec::len);
        let fc = tensors.and_then(|t| t.info(&format!("{}fc.weight", names.root)));
        let aux_count = match fc.filter(|_| joins) {
            _ if !joins => 0,
            Some(info) => match info.shape[..] {
                [_, columns] if columns > 0 && columns % target_hidden_size == 0 => {
                    columns / target_hidden_size
                }
                _ => {
                    let problem = format!(
                        "has shape {:?}, which joins no whole number of hidden states of width \
                         {target_hidden_size}",
                        info.shape
                    );
                    return Err(Error::tensor(&info.origin, "fc.weight", problem));
                }
            },
            None => config.size_if_any("num_aux_hidden_states")?.or(named).unwrap_or(USUAL_COUNT),
        };
        if joins && aux_count != named.unwrap_or(USUAL_COUNT) {
            let problem = match named {
                Some(named) => format!("names {named} layers, but fc joins {aux_count}"),
                None => format!("is missing, and fc joins {aux_count} layers, not the usual three"),
            };
            return Err(config.wrong(LAYER_IDS, problem));
        }
        if !joins && target_hidden_size != hidden {
            let problem = format!(
                "must be hidden_size {hidden} where use_aux_hidden_state is false, found \
                 {target_hidden_size}"
            );
            return Err(config.wrong("target_hidden_size", problem));
        }

        let whole = flag("norm_before_fc")?.unwrap_or(false) || stored("input_norm");
        let each = flag("fc_norm")?.unwrap_or(false)
            || flag("use_aux_norm")?.unwrap_or(false)
            || stored("fc_norm.0")
            || names.old_norms;
        let feature_norm = match (joins && whole, joins && each) {
            (false, false) => FeatureNorm::None,
            (true, false) => FeatureNorm::Whole,
            (false, true) => FeatureNorm::Each,
            (true, true) => {
                let reason = "an EAGLE-3 head that norms hidden states both together and singly";
                return Err(config.unsupported(reason));
            }
        };
        if names.old_norms && aux_count != OLD_NORMS.len() {
            let reason = format!("{} norms three hidden states, and fc joins others", OLD_NORMS[0]);
            return Err(config.unsupported(reason));
        }
        Ok(Self {
            target_hidden_size,
            draft_vocab_size,
            aux_count,
            aux_layers,
            feature_norm,
            // What vLLM assumes of speculators' heads, and of no others.
            norm_before_residual: flag("norm_before_residual")?.unwrap_or(by_speculators),
            norm_output: flag("norm_output")?.unwrap_or(false),
            own_embedding: stored("embed_tokens") || target_hidden_size != hidden,
            own_lm_head: tensors.is_none()
                || rows.is_some()
                || draft_vocab_size != layer.vocab_size
                || target_hidden_size != hidden,
            fc_bias: has(&format!("{}fc.bias", names.root)),
            names,
            layer,
        })
    }

    pub(crate) fn fc_inputs(&self) -> usize {
        self.aux_count * self.target_hidden_size
    }

    /// The projection of the target's hidden states, where the head has one.
    pub(super) fn fc(&self) -> Option<LinearLayout> {
        let (hidden, root) = (self.layer.hidden_size, self.names.root);
        let part = |name: &str, shape: Vec<usize>| Expected::new(format!("{root}fc.{name}"), shape);
        (self.aux_count > 0).then(|| LinearLayout {
            weights: vec![part("weight", vec![hidden, self.fc_inputs()])],
            biases: self.fc_bias.then(|| part("bias", vec![hidden])).into_iter().collect(),
        })
    }

    /// The norms of the target's hidden states: none, one, or one for each.
    pub(super) fn feature_norms(&self) -> Vec<Expected> {
        let norm = |name: String, width: usize| {
            Expected::new(format!("{}{name}.weight", self.names.root), vec![width])
        };
        match self.feature_norm {
            FeatureNorm::None => Vec::new(),
            FeatureNorm::Whole => vec![norm("input_norm".into(), self.fc_inputs())],
            FeatureNorm::Each => {
                let name = |i: usize| match self.names.old_norms {
                    true => OLD_NORMS[i].to_owned(),
                    false => format!("fc_norm.{i}"),
                };
                (0..self.aux_count).map(|i| norm(name(i), self.target_hidden_size)).collect()
            }
        }
    }

    pub(super) fn hidden_norm(&self) -> Expected {
        self.vector(format!("{}.hidden_norm.weight", self.names.layer))
    }

    /// The layers: the first reads embedding and hidden state side by side, others the stream.
    pub(super) fn layer_layouts(&self) -> Vec<LayerLayout> {
        let hidden = self.layer.hidden_size;
        let layout = |(number, layer): (usize, &LayerSpec)| {
            let prefix = self.names.layer(number);
            let width = if number == 0 { 2 * hidden } else { hidden };
            let mut layout = self.layer.layer_at(&prefix, layer, width);
            if number > 0 && self.names.later_hidden_norm {
                layout.attention_norm = self.vector(format!("{prefix}.hidden_norm.weight"));
            }
            layout
        };
        self.layer.layers.iter().enumerate().map(layout).collect()
    }

    pub(super) fn norm(&self) -> Expected {
        self.vector(format!("{}norm.weight", self.names.root))
    }

    pub(super) fn lm_head(&self) -> Expected {
        let shape = vec![self.draft_vocab_size, self.layer.hidden_size];
        Expected::new(format!("{}lm_head.weight", self.names.lm_head), shape)
    }

    pub(crate) fn embedding(&self) -> Expected {
        let shape = vec![self.layer.vocab_size, self.layer.hidden_size];
        Expected::new(format!("{}embed_tokens.weight", self.names.root), shape)
    }

    fn vector(&self, name: String) -> Expected {
        Expected::new(name, vec![self.layer.hidden_size])
    }

    /// Every tensor of weights that is the head's own.
    pub fn tensors(&self) -> impl Iterator<Item = Expected> + '_ {
        let fc = self.fc().into_iter().flat_map(|fc| fc.weights.into_iter().chain(fc.biases));
        fc.chain(self.feature_norms())
            .chain([self.hidden_norm()])
            .chain(self.layer_layouts().into_iter().flat_map(LayerLayout::tensors))
            .chain([self.norm()])
            .chain(self.own_lm_head.then(|| self.lm_head()))
            .chain(self.own_embedding.then(|| self.embedding()))
    }

    /// How many parameters the head has.
    pub fn parameters(&self) -> u64 {
        let count = |t: Expected| t.shape.iter().fold(1u64, |n, &d| n.saturating_mul(d as u64));
        self.tensors().map(count).fold(0, u64::saturating_add)
    }
}

/// The layers, with what users decide of them.
fn layers(
    sizes: &Settings<'_>,
    architecture: &str,
    tensors: Option<&dyn TensorSource>,
    names: &HeadNames,
    options: &HeadOptions,
) -> Result<ModelSpec> {
    let count = sizes.size("num_hidden_layers")?;
    if count > MOST_LAYERS {
        let problem = format!("must be at most {MOST_LAYERS} in an EAGLE-3 head, found {count}");
        return Err(sizes.wrong("num_hidden_layers", problem));
    }
    let mut spec = layer_spec(sizes, architecture, tensors, &names.layer(0))?;
    // Llama 4 keeps the width of its dense layers under another name.
    if sizes.text("model_type")? == Some("llama4_text")
        && let Some(width) = sizes.size_if_any("intermediate_size_mlp")?
        && let FeedForward::Dense(dense) = &mut spec.layers[0].ffn
    {
        dense.width = width;
    }
    if let Some(theta) = options.rope_theta {
        let Mixer::Attention(attention) = &mut spec.layers[0].mixer;
        attention.rope.theta = theta;
    }
    let beyond = format!("{}layers.{count}.", names.root);
    let stored = tensors.map(TensorSource::names).unwrap_or_default();
    if let Some(name) = stored.iter().find(|name| name.starts_with(&beyond)) {
        let problem = format!("is {count}, and the head has {name}");
        return Err(sizes.wrong("num_hidden_layers", problem));
    }
    for number in 1..count {
        let prefix = names.layer(number);
        let [hidden, input] = ["hidden_norm", "input_layernorm"]
            .map(|norm| tensors.is_some_and(|t| t.contains(&format!("{prefix}.{norm}.weight"))));
        if prefix == names.layer(0) && tensors.is_some() {
            let problem = format!("is {count}, and the head has the one layer {prefix}");
            return Err(sizes.wrong("num_hidden_layers", problem));
        }
        if hidden && input {
            return Err(sizes.unsupported(format!(
                "{prefix} has both hidden_norm and input_layernorm, and publishers disagree about \
                 which of them it reads"
            )));
        }
        let mut layer = layer_spec(sizes, architecture, tensors, &prefix)?.layers.remove(0);
        layer.mixer = spec.layers[0].mixer.clone();
        spec.layers.push(layer);
    }
    Ok(spec)
}

fn refuse_other_heads(
    config: &Settings<'_>,
    tensors: Option<&dyn TensorSource>,
    root: &str,
) -> Result<()> {
    let names = tensors.map(TensorSource::names).unwrap_or_default();
    let start = "mask_hidden";
    let other =
        names.iter().find(|name| name.strip_prefix(root).unwrap_or(name).starts_with(start));
    match other {
        Some(name) => {
            let what = "an EAGLE-3 head with parallel drafting (P-EAGLE)";
            Err(config.unsupported(format!("{what} is not supported yet: it has {name}")))
        }
        None => Ok(()),
    }
}
