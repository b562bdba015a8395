//! A head on disk, or a preset, checked against the model that it is to draft for.

use crate::checkpoint::{Configs, LoadFormat};
use crate::config::Settings;
use crate::dummy::Dummy;
use crate::source::{TensorSource, open_folder};
use crate::{Error, Location, ModelSpec, Result, arch, layout};

use super::spec::{Eagle3Spec, is_eagle3};
use super::vocabulary::DraftVocabulary;

/// An EAGLE-3 head that fits its target: everything but its weights has been read and checked.
pub struct HeadCheckpoint {
    spec: Eagle3Spec,
    capture_layers: Vec<usize>,
    pub(super) vocabulary: Option<DraftVocabulary>,
    tensors: Box<dyn TensorSource>,
    tensor_bytes: u64,
}

impl HeadCheckpoint {
    /// Opens the head at `location` for `target`; refuses what is no EAGLE-3 head, what lacks a
    /// tensor and what was made for another model, by name.
    pub fn open(location: &Location, load: LoadFormat, target: &ModelSpec) -> Result<Self> {
        let Configs { origin, config, folder, .. } = Configs::read(location)?;
        let settings = Settings::new(&origin, &config)?;
        let stored = match (&folder, load) {
            (Some(folder), LoadFormat::Auto) => Some(open_folder(folder)?),
            _ => None,
        };
        let named = stored.as_deref();
        match named {
            Some(tensors) => refuse_other_kinds(tensors)?,
            None if is_eagle3(&config) => {}
            None => return Err(settings.unsupported("is not the config of an EAGLE-3 head")),
        }
        let architecture = arch::named(&config).unwrap_or_default();
        let spec = Eagle3Spec::read(&settings, architecture, named)?;
        check_target(&spec, &settings, target)?;
        let capture_layers = spec.capture_layers(&settings, target.layers)?;
        let tensors: Box<dyn TensorSource> = match stored {
            Some(tensors) => tensors,
            None => Box::new(random(&spec, load)?),
        };
        let tensor_bytes = layout::check(spec.tensors(), &*tensors)?;
        let vocabulary = DraftVocabulary::read(&spec, &*tensors)?;
        Ok(Self { spec, capture_layers, vocabulary, tensors, tensor_bytes })
    }

    /// What the head is.
    pub fn spec(&self) -> &Eagle3Spec {
        &self.spec
    }

    /// The layers of the target, from 0, whose outputs the head reads, in the order it reads them.
    pub fn capture_layers(&self) -> &[usize] {
        &self.capture_layers
    }

    /// The tensors.
    pub fn tensors(&self) -> &dyn TensorSource {
        &*self.tensors
    }

    /// Bytes of the head's weights as they are stored.
    pub fn tensor_bytes(&self) -> u64 {
        self.tensor_bytes
    }
}

fn random(spec: &Eagle3Spec, load: LoadFormat) -> Result<Dummy> {
    let seed = match load {
        LoadFormat::Auto => 0,
        LoadFormat::Dummy { seed } => seed,
    };
    let dummy = Dummy::of(&spec.layer.architecture, spec.tensors(), seed);
    Ok(dummy.with(DraftVocabulary::evenly_spread(spec)?))
}

/// Refuses what its tensors show to be something else.
fn refuse_other_kinds(tensors: &dyn TensorSource) -> Result<()> {
    let refuse = |reason: &str| {
        Err(Error::Unsupported { origin: tensors.origin().into(), reason: reason.into() })
    };
    let names = tensors.names();
    let any = |start: &str| names.iter().any(|name| name.starts_with(start));
    let has = |name: &str| names.contains(&name);
    if !has("fc.weight") {
        if any("model.mtp_layers.") {
            return refuse("holds MTP layers, not an EAGLE-3 head");
        }
        if any("model.layers.") {
            return refuse(
                "is an ordinary model, not an EAGLE-3 head; \
                 it may draft with --speculative-algorithm STANDALONE",
            );
        }
        return Ok(());
    }
    let parts = ["lm_head.weight", "midlayer.hidden_norm.weight", "layers.0.hidden_norm.weight"];
    if parts.into_iter().any(has) {
        return Ok(());
    }
    refuse("is an EAGLE head, not an EAGLE-3 head: it has neither hidden_norm nor lm_head")
}

fn check_target(spec: &Eagle3Spec, config: &Settings<'_>, target: &ModelSpec) -> Result<()> {
    if spec.target_hidden_size != target.hidden_size {
        let given = config.get("target_hidden_size").is_some();
        let field = if given { "target_hidden_size" } else { "hidden_size" };
        let problem = format!(
            "is {}, but the hidden size of the target is {}: the head was made for another model",
            spec.target_hidden_size, target.hidden_size
        );
        return Err(config.wrong(field, problem));
    }
    if spec.layer.vocab_size != target.vocab_size {
        let problem = format!(
            "is {}, but the target has {} tokens: the head was made for another model",
            spec.layer.vocab_size, target.vocab_size
        );
        return Err(config.wrong("vocab_size", problem));
    }
    Ok(())
}
