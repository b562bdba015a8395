//! EAGLE (1/2) heads: one layer over `fc([embedding, hidden])`, read out by the target's head.
//!
//! Row p takes the token at p + 1 and the target's hidden state at p, after its final norm. The
//! layer has no norm of its input and none of its output. An embedding table or a language-model
//! head in the checkpoint is a copy of the target's, which is used instead. Names may all begin
//! with `model.`, or some of them.

use aquila_compute::{KvDtype, PlanBounds, WeightFormat};

use super::fused_checkpoint::{FusedCheckpoint, Stored};
use super::fusion::FusedLayout;
use super::is_eagle3;
use super::kind::{HeadKind, check_target, layer_spec, refuse_unknown_kinds, seed, stored};
use super::strip_prefix::StripModelPrefix;
use crate::checkpoint::{Configs, LoadFormat};
use crate::config::Settings;
use crate::dummy::Dummy;
use crate::layout::{self, Expected, LinearLayout};
use crate::source::TensorSource;
use crate::{Location, ModelSpec, Result, arch, memory};

const WANTED: &str = "an EAGLE head";
const LAYER: &str = "layers.0";

/// Copies of the target's tensors, which are left alone.
const COPIES: &[&str] = &["embed_tokens.weight", "lm_head.weight"];

/// Tensors of heads that compute something else.
const OTHER_TENSORS: &[&str] = &["norm.weight", "layers.0.input_layernorm.weight"];

/// The description of an EAGLE head.
#[derive(Debug, Clone, PartialEq)]
pub struct EagleSpec {
    /// Its one layer; width and vocabulary are those of the model it drafts for.
    pub layer: ModelSpec,
    /// Whether the projection that joins embedding and hidden state has a bias.
    pub fc_bias: bool,
    /// Tensors in the checkpoint that the target's are used instead of.
    pub ignored: Vec<&'static str>,
}

impl EagleSpec {
    /// Reads a config, and from the tensors, where there are any, what the layer has.
    pub(crate) fn read(
        config: &Settings<'_>,
        architecture: &str,
        tensors: Option<&dyn TensorSource>,
    ) -> Result<Self> {
        let has = |name: &str| tensors.is_some_and(|t| t.contains(name));
        if let Some(name) = OTHER_TENSORS.iter().find(|name| has(name)) {
            return Err(config.unsupported(format!("an EAGLE head with a tensor {name}")));
        }
        let layers = config.size_if_any("num_hidden_layers")?.unwrap_or(1);
        if layers != 1 || has("layers.1.self_attn.q_proj.weight") {
            let problem = format!("must be 1 in an EAGLE head, found {layers}");
            return Err(config.wrong("num_hidden_layers", problem));
        }
        let layer = layer_spec(config, architecture, tensors, LAYER)?;
        let fc_bias = match tensors {
            Some(_) => has("fc.bias") || config.flag("bias", false)?,
            // The reference's own default.
            None => config.flag("bias", true)?,
        };
        let ignored = COPIES.iter().copied().filter(|name| has(name)).collect();
        Ok(Self { layer, fc_bias, ignored })
    }

    /// Reads the config of a whole checkpoint and checks that its tensors are there.
    pub(crate) fn of(
        config: &Settings<'_>,
        architecture: &str,
        tensors: &dyn TensorSource,
    ) -> Result<Self> {
        let tensors = StripModelPrefix(tensors);
        let spec = Self::read(&layer_config(config)?, architecture, Some(&tensors))?;
        layout::check(spec.tensors(), &tensors)?;
        Ok(spec)
    }

    fn layout(&self) -> FusedLayout {
        let hidden = self.layer.hidden_size;
        let weight = Expected::new("fc.weight".into(), vec![hidden, 2 * hidden]);
        let bias = Expected::new("fc.bias".into(), vec![hidden]);
        FusedLayout {
            embedding_norm: None,
            hidden_norm: None,
            hidden_first: false,
            join: LinearLayout {
                weights: vec![weight],
                biases: if self.fc_bias { vec![bias] } else { Vec::new() },
            },
            input_norm: false,
            layer: self.layer.layer_at(LAYER, &self.layer.layers[0], hidden),
            output_norm: None,
        }
    }

    /// Every tensor that is read.
    pub fn tensors(&self) -> impl Iterator<Item = Expected> {
        self.layout().tensors()
    }

    /// Bytes of the head's weights once packed.
    pub fn weight_bytes(&self, format: WeightFormat) -> u64 {
        memory::tensor_bytes(self.tensors(), format)
    }

    /// Bytes of the head's keys and values that one token takes.
    pub fn kv_bytes_per_token(&self, dtype: KvDtype) -> u64 {
        memory::kv_bytes_per_token(&self.layer, dtype)
    }

    /// Bytes of the buffers of the head's passes, which tell `tokens` tokens.
    pub fn scratch_bytes(&self, bounds: PlanBounds, tokens: usize) -> u64 {
        memory::fused_scratch_bytes(&self.layer, bounds, tokens)
    }
}

/// An EAGLE head that fits its target: everything but its weights has been read and checked.
pub type EagleCheckpoint = FusedCheckpoint<EagleSpec>;

impl EagleCheckpoint {
    /// Opens the head at `location` for `target`; refuses what is no EAGLE head, what lacks a
    /// tensor and what was made for another model, by name.
    pub fn open(location: &Location, load: LoadFormat, target: &ModelSpec) -> Result<Self> {
        let Configs { origin, config, folder, .. } = Configs::read(location)?;
        let settings = Settings::new(&origin, &config)?;
        refuse_unknown_kinds(&settings, arch::named(&config).unwrap_or_default())?;
        let stored = stored(folder.as_deref(), load)?;
        let architecture = arch::named(&config).unwrap_or_default();
        match stored.as_deref().map(|tensors| (HeadKind::of(tensors), tensors)) {
            Some((HeadKind::Eagle, _)) => {}
            Some((other, tensors)) => return Err(other.refusal(tensors, WANTED)),
            None if is_eagle3(&config) || !architecture.contains("Eagle") => {
                return Err(settings.unsupported("is not the config of an EAGLE head"));
            }
            None => {}
        }
        let stored = stored.map(StripModelPrefix);
        let named = stored.as_ref().map(|tensors| tensors as &dyn TensorSource);
        let layer = layer_config(&settings)?;
        let spec = EagleSpec::read(&layer, architecture, named)?;
        check_target(&spec.layer, &layer, target)?;
        let tensors: Box<dyn TensorSource> = match stored {
            Some(tensors) => Box::new(tensors),
            None => Box::new(Dummy::of(architecture, spec.tensors(), seed(load))),
        };
        let tensor_bytes = layout::check(spec.tensors(), &*tensors)?;
        let (layer, layouts) = (spec.layer.clone(), vec![spec.layout()]);
        Ok(Self::new(
            spec,
            Stored { layer, layouts, chained: true, zeroes_first: false, tensors, tensor_bytes },
        ))
    }
}

/// The config of the layer, which older converters for vLLM put into an object of its own.
fn layer_config<'a>(config: &Settings<'a>) -> Result<Settings<'a>> {
    let wrapped = config.text("model_type")? == Some("eagle");
    Ok(if wrapped { config.object("model")? } else { None }.unwrap_or(*config))
}
