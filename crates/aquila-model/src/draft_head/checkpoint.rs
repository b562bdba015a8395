//! A head on disk, or a preset, checked against the model that it is to draft for.

use serde_json::Value;

use crate::checkpoint::{Checkpoint, Configs, LoadFormat};
use crate::config::Settings;
use crate::dummy::Dummy;
use crate::layout::{self, Expected};
use crate::source::TensorSource;
use crate::{Error, Location, ModelSpec, Result, arch};

use super::kind::{HeadKind, refuse_unknown_kinds, seed, stored};
use super::spec::{Eagle3Spec, HeadOptions, is_eagle3};
use super::vocabulary::DraftVocabulary;

/// An EAGLE-3 head that fits its target: everything but its weights has been read and checked.
pub struct HeadCheckpoint {
    spec: Eagle3Spec,
    boundaries: Vec<usize>,
    pub(super) vocabulary: Option<DraftVocabulary>,
    tensors: Box<dyn TensorSource>,
    tensor_bytes: u64,
}

impl HeadCheckpoint {
    /// Opens the head at `location` for `target`; refuses what is no EAGLE-3 head, what lacks a
    /// tensor and what was made for another model, by name.
    pub fn open(location: &Location, load: LoadFormat, target: &ModelSpec) -> Result<Self> {
        Self::read(location, load, target, None, &HeadOptions::default())
    }

    /// [`HeadCheckpoint::open`] with what users decide; tables that are copies of the target's
    /// are shared with it.
    pub fn open_with(
        location: &Location,
        load: LoadFormat,
        target: &Checkpoint,
        options: &HeadOptions,
    ) -> Result<Self> {
        Self::read(location, load, target.spec(), Some(target.tensors()), options)
    }

    fn read(
        location: &Location,
        load: LoadFormat,
        target: &ModelSpec,
        targets: Option<&dyn TensorSource>,
        options: &HeadOptions,
    ) -> Result<Self> {
        let Configs { origin, config, folder, .. } = Configs::read(location)?;
        let settings = Settings::new(&origin, &config)?;
        let architecture = arch::named(&config).unwrap_or_default();
        refuse_unknown_kinds(&settings, architecture)?;
        let stored = stored(folder.as_deref(), load)?;
        match stored.as_deref().map(|tensors| (HeadKind::of(tensors), tensors)) {
            Some((HeadKind::Eagle3 | HeadKind::Unknown, _)) => {}
            Some((other, tensors)) => return Err(other.refusal(tensors, "an EAGLE-3 head")),
            None if is_eagle3(&config) => {}
            None => return Err(settings.unsupported("is not the config of an EAGLE-3 head")),
        }
        check_target(&settings, target)?;
        let mut spec = Eagle3Spec::read(&settings, architecture, stored.as_deref(), options)?;
        let boundaries = match spec.aux_count {
            0 => Vec::new(),
            _ => spec.aux_layers.boundaries(&settings, target.layers.len())?,
        };
        let tensors: Box<dyn TensorSource> = match stored {
            Some(tensors) => tensors,
            None => Box::new(random(&spec, load)?),
        };
        layout::check(spec.tensors(), &*tensors)?;
        let vocabulary = DraftVocabulary::read(&spec, &*tensors)?;
        if vocabulary.is_some() && !spec.own_lm_head {
            let problem = "is missing, and the target's has its tokens in another order than d2t";
            return Err(Error::tensor(tensors.origin(), &spec.lm_head().name, problem));
        }
        if let Some(targets) = targets {
            let same = |ours: Expected, theirs: Expected| {
                is_copy(&*tensors, &ours.name, targets, &theirs.name)
            };
            spec.own_embedding &= !same(spec.embedding(), target.embedding())?;
            if vocabulary.is_none() {
                spec.own_lm_head &= !same(spec.lm_head(), target.head())?;
            }
        }
        let tensor_bytes = layout::check(spec.tensors(), &*tensors)?;
        Ok(Self { spec, boundaries, vocabulary, tensors, tensor_bytes })
    }

    /// What the head is.
    pub fn spec(&self) -> &Eagle3Spec {
        &self.spec
    }

    /// The boundaries of the target's layers at which the head reads hidden states, in the order
    /// it reads them: 0 is the embedding, any other the end of the layer before it. None where it
    /// reads what the target's language-model head reads.
    pub fn boundaries(&self) -> &[usize] {
        &self.boundaries
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
    let dummy = Dummy::of(&spec.layer.architecture, spec.tensors(), seed(load));
    Ok(dummy.with(DraftVocabulary::evenly_spread(spec)?))
}

/// Whether a tensor is, to the bit, one of the target's.
fn is_copy(
    ours: &dyn TensorSource,
    our_name: &str,
    theirs: &dyn TensorSource,
    their_name: &str,
) -> Result<bool> {
    match (ours.info(our_name), theirs.info(their_name)) {
        (Some(a), Some(b)) if a.shape == b.shape && a.dtype.is_some() && a.dtype == b.dtype => {
            Ok(ours.get(our_name)?.equals(&theirs.get(their_name)?))
        }
        _ => Ok(false),
    }
}

/// Refuses a head that its config shows to be made for another model.
fn check_target(config: &Settings<'_>, target: &ModelSpec) -> Result<()> {
    let sizes = config.object("transformer_layer_config")?.unwrap_or(*config);
    let (width, field, settings) = match config.size_if_any("target_hidden_size")? {
        Some(width) => (width, "target_hidden_size", config),
        None => (sizes.size("hidden_size")?, "hidden_size", &sizes),
    };
    if width != target.hidden_size {
        let problem = format!(
            "is {width}, but the hidden size of the target is {}: the head was made for another \
             model",
            target.hidden_size
        );
        return Err(settings.wrong(field, problem));
    }
    let vocabulary = sizes.size("vocab_size")?;
    if vocabulary != target.vocab_size {
        let problem = format!(
            "is {vocabulary}, but the target has {} tokens: the head was made for another model",
            target.vocab_size
        );
        return Err(sizes.wrong("vocab_size", problem));
    }
    let speculators = config.object("speculators_config")?;
    let verifier = speculators.map(|s| s.object("verifier")).transpose()?.flatten();
    let Some(verifier) = verifier else { return Ok(()) };
    let Some(Value::Array(made_for)) = verifier.get("architectures") else { return Ok(()) };
    let ours = |name: &Value| name.as_str() == Some(&target.architecture);
    if made_for.is_empty() || made_for.iter().any(ours) {
        return Ok(());
    }
    let names: Vec<_> = made_for.iter().filter_map(Value::as_str).collect();
    let problem = format!(
        "are {}, but the target is a {}: the head was made for another model",
        names.join(", "),
        target.architecture
    );
    Err(verifier.wrong("architectures", problem))
}
