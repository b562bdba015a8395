//! Heads of multi-token prediction: one layer that recurs, or one layer for each drafted token.
//!
//! Row p of layer j takes the token at p + 1 + j and the hidden state of layer j - 1 at p (layer
//! 0: the target's, after its final norm; so all layers where they are not chained), and runs at
//! position p + j. What its last norm leaves is read out by the target's language-model head and
//! is the hidden state of the next step. Embedding tables and language-model heads in the
//! checkpoint are copies of the target's, which are used instead.

use aquila_compute::{KvDtype, PlanBounds, WeightFormat};

use super::first_embedding::FirstEmbedding;
use super::fused_checkpoint::{FusedCheckpoint, Stored};
use super::fusion::FusedLayout;
use super::kind::{HeadKind, check_target, layer_spec, refuse_unknown_kinds, seed, stored};
use super::mtp_names::other_family;
use super::spec::HeadOptions;
use crate::checkpoint::{Configs, LoadFormat};
use crate::config::Settings;
use crate::dummy::Dummy;
use crate::layout::{self, Expected, LinearLayout};
use crate::source::TensorSource;
use crate::{Location, ModelSpec, Result, Setting, arch, memory};

pub use super::mtp_names::MtpNaming;

const WANTED: &str = "MTP layers";

/// The setting that says how many layers there are.
const COUNT: &str = "num_nextn_predict_layers";

/// The setting by which a head says whether a layer takes the hidden states of the one before.
const CHAINED: &str = "chain_mtp_hidden_states";

/// More layers than any head has; each is a step of its own.
const MOST_LAYERS: usize = 64;

/// The description of a head of multi-token prediction.
#[derive(Debug, Clone, PartialEq)]
pub struct MtpSpec {
    /// One of its layers; width and vocabulary are those of the model it drafts for.
    pub layer: ModelSpec,
    /// How the checkpoint names its tensors.
    pub naming: MtpNaming,
    /// Whether a layer takes the hidden states of the layer before it, or the target's as the
    /// first one does.
    pub chained: bool,
    /// Whether zeros stand for the embedding at position 0, and why.
    pub zeroes_first: (bool, &'static str),
    /// The numbers of the layers in their names, ascending.
    numbers: Vec<usize>,
}

impl MtpSpec {
    /// Reads a config, and from the tensors, where there are any, how many layers there are and
    /// what they have.
    pub(crate) fn read(
        config: &Settings<'_>,
        architecture: &str,
        tensors: Option<(&dyn TensorSource, MtpNaming)>,
        first_embedding: FirstEmbedding,
    ) -> Result<Self> {
        let (naming, numbers) = match tensors {
            Some((tensors, naming)) => (naming, naming.numbers(&tensors.names())),
            None => (MtpNaming::MiMo, (0..config.size_if_any(COUNT)?.unwrap_or(1)).collect()),
        };
        if numbers.len() > MOST_LAYERS {
            let problem =
                format!("is {}; more than {MOST_LAYERS} are not supported", numbers.len());
            return Err(config.wrong(COUNT, problem));
        }
        let first = naming.layer(numbers[0]);
        let mut layer = layer_spec(config, architecture, tensors.map(|(t, _)| t), &first)?;
        layer.norm.one_plus = naming.norms_from_one();
        let chained = config.flag(CHAINED, true)?;
        let zeroes_first = first_embedding.zeroed(architecture);
        Ok(Self { layer, naming, chained, zeroes_first, numbers })
    }

    /// How many layers there are; one recurs for any number of steps.
    pub fn layers(&self) -> usize {
        self.numbers.len()
    }

    fn layouts(&self) -> Vec<FusedLayout> {
        let hidden = self.layer.hidden_size;
        let vector = |name: String| Some(Expected::new(name, vec![hidden]));
        let layout = |&number: &usize| {
            let names = self.naming.parts(number);
            FusedLayout {
                embedding_norm: vector(names.embedding_norm),
                hidden_norm: vector(names.hidden_norm),
                hidden_first: self.naming.hidden_first(),
                join: LinearLayout {
                    weights: vec![Expected::new(names.join, vec![hidden, 2 * hidden])],
                    biases: Vec::new(),
                },
                input_norm: true,
                layer: self.layer.layer_at(
                    &self.naming.layer(number),
                    &self.layer.layers[0],
                    hidden,
                ),
                output_norm: vector(names.output_norm),
            }
        };
        self.numbers.iter().map(layout).collect()
    }

    /// Every tensor that is read.
    pub fn tensors(&self) -> impl Iterator<Item = Expected> {
        self.layouts().into_iter().flat_map(FusedLayout::tensors)
    }

    /// Bytes of the head's weights once packed.
    pub fn weight_bytes(&self, format: WeightFormat) -> u64 {
        memory::tensor_bytes(self.tensors(), format)
    }

    /// The layers that drafts of `steps` steps use.
    fn used_layers(&self, steps: usize) -> usize {
        self.layers().min(steps)
    }

    /// Bytes of the keys and values that one token takes in the layers of `steps` steps.
    pub fn kv_bytes_per_token(&self, dtype: KvDtype, steps: usize) -> u64 {
        self.used_layers(steps) as u64 * memory::kv_bytes_per_token(&self.layer, dtype)
    }

    /// Bytes of the buffers of the passes of one layer, which tell `tokens` tokens.
    pub fn scratch_bytes(&self, bounds: PlanBounds, tokens: usize) -> u64 {
        memory::fused_scratch_bytes(&self.layer, bounds, tokens)
    }
}

/// MTP layers that fit their target: everything but their weights has been read and checked.
pub type MtpCheckpoint = FusedCheckpoint<MtpSpec>;

impl MtpCheckpoint {
    /// Opens the layers at `location`, a folder of their own or the target's, for `target`;
    /// refuses what holds none, what lacks a tensor and what was made for another model, by name.
    pub fn open(location: &Location, load: LoadFormat, target: &ModelSpec) -> Result<Self> {
        Self::open_with(location, load, target, &HeadOptions::default())
    }

    /// As [`Self::open`], with what users decide where the config may mislead.
    pub fn open_with(
        location: &Location,
        load: LoadFormat,
        target: &ModelSpec,
        options: &HeadOptions,
    ) -> Result<Self> {
        let Configs { origin, config, folder, .. } = Configs::read(location)?;
        let settings = Settings::new(&origin, &config)?;
        refuse_unknown_kinds(&settings, arch::named(&config).unwrap_or_default())?;
        let stored = stored(folder.as_deref(), load)?;
        let architecture = arch::named(&config).unwrap_or_default();
        if let Some(reason) = stored.as_deref().and_then(|t| other_family(&t.names())) {
            return Err(settings.unsupported(reason));
        }
        let named = match stored.as_deref() {
            Some(tensors) => match HeadKind::of(tensors) {
                HeadKind::Mtp(naming) => Some((tensors, naming)),
                _ if settings.get(COUNT).is_some() => {
                    let problem = "declares MTP layers, but no tensor of one is there: \
                                   they may have been lost when the model was tuned";
                    return Err(settings.wrong(COUNT, problem));
                }
                HeadKind::Model => {
                    let reason = "has no MTP layers; name a folder that has";
                    return Err(settings.needs(Setting::Draft(None), reason));
                }
                other => return Err(other.refusal(tensors, WANTED)),
            },
            None if settings.get(COUNT).is_none() => {
                return Err(settings.unsupported("is not the config of MTP layers"));
            }
            None => None,
        };
        let spec = MtpSpec::read(&settings, architecture, named, options.first_embedding)?;
        check_target(&spec.layer, &settings, target)?;
        let tensors: Box<dyn TensorSource> = match stored {
            Some(tensors) => tensors,
            None => Box::new(Dummy::of(architecture, spec.tensors(), seed(load))),
        };
        let tensor_bytes = layout::check(spec.tensors(), &*tensors)?;
        let stored = Stored {
            layer: spec.layer.clone(),
            layouts: spec.layouts(),
            chained: spec.chained,
            zeroes_first: spec.zeroes_first.0,
            tensors,
            tensor_bytes,
        };
        Ok(Self::new(spec, stored))
    }
}
