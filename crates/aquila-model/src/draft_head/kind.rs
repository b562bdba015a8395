//! What kind of draft a checkpoint holds, by its tensors and not by its name; and the spec of a
//! head's layer, whose optional parts are also known by their tensors.
//!
//! The invariant: what would be computed otherwise than the head was trained is refused by a
//! sentence, since a head that is run wrongly still drafts, only badly.

use crate::checkpoint::LoadFormat;
use crate::config::Settings;
use crate::layer_spec::{ExpertsSpec, FeedForward};
use crate::layout::TensorNames;
use crate::model_spec::{Family, refuse_windows};
use crate::source::{TensorSource, open_folder};
use crate::{Error, Location, ModelSpec, Result, Setting};

use super::mtp::MtpNaming;

/// What a checkpoint is, to one who wants to draft with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum HeadKind {
    Eagle,
    Eagle3,
    Mtp(MtpNaming),
    /// An ordinary model.
    Model,
    Unknown,
}

impl HeadKind {
    pub fn of(tensors: &dyn TensorSource) -> Self {
        let names = tensors.names();
        // Some publishers put all but the language-model head under `model`.
        let bare = |name: &str| name.strip_prefix("model.").unwrap_or(name).to_owned();
        let bare: std::collections::BTreeSet<String> = names.iter().map(|n| bare(n)).collect();
        let any = |start: &str| bare.iter().any(|name| name.starts_with(start));
        let has = |name: &str| bare.contains(name);
        if let Some(naming) = MtpNaming::of(&names) {
            return HeadKind::Mtp(naming);
        }
        // A layer that reads an embedding beside a hidden state, each normed.
        if any("midlayer.") || has("layers.0.hidden_norm.weight") || has("d2t") {
            return HeadKind::Eagle3;
        }
        if has("fc.weight") {
            return HeadKind::Eagle;
        }
        if any("layers.0.") { HeadKind::Model } else { HeadKind::Unknown }
    }

    /// The tensors by which the kind is known.
    pub fn known_by(self) -> &'static str {
        match self {
            HeadKind::Eagle => "fc beside a layer without hidden_norm",
            HeadKind::Eagle3 => "a layer with hidden_norm, or a draft vocabulary (d2t)",
            HeadKind::Mtp(_) => "a projection that joins the norms of embedding and hidden state",
            HeadKind::Model => "layers without any projection of hidden states",
            HeadKind::Unknown => "nothing",
        }
    }

    /// Why this is not what was `wanted`, and what would run it.
    pub fn refusal(self, tensors: &dyn TensorSource, wanted: &str) -> Error {
        let origin = tensors.origin().to_owned();
        let (what, algorithm) = match self {
            HeadKind::Eagle => ("is an EAGLE head", "EAGLE"),
            HeadKind::Eagle3 => ("is an EAGLE-3 head", "EAGLE3"),
            HeadKind::Mtp(_) => ("holds MTP layers", "MTP"),
            HeadKind::Model => ("is an ordinary model", "STANDALONE"),
            HeadKind::Unknown => {
                let reason = format!("has no tensor by which {wanted} is known");
                return Error::Unsupported { origin, reason };
            }
        };
        let reason = format!(
            "{what}, not {wanted}: it has {}; the algorithm {algorithm} drafts with it",
            self.known_by()
        );
        Error::Setting { origin, reason, setting: Setting::Algorithm(algorithm) }
    }
}

/// Whether the files at `location` hold MTP layers, alone or beside those of a model. Files that
/// cannot be read hold none: what opens them says what is wrong.
pub fn holds_mtp_layers(location: &Location) -> bool {
    let Location::Folder(folder) = location else { return false };
    open_folder(folder).is_ok_and(|tensors| matches!(HeadKind::of(&*tensors), HeadKind::Mtp(_)))
}

/// The files of a folder, unless weights are to be random.
pub(super) fn stored(
    folder: Option<&std::path::Path>,
    load: LoadFormat,
) -> Result<Option<Box<dyn TensorSource>>> {
    match (folder, load) {
        (Some(folder), LoadFormat::Auto) => open_folder(folder).map(Some),
        _ => Ok(None),
    }
}

/// Drafts that are neither of the kinds above nor models: what marks a config as theirs, and their
/// names.
const UNKNOWN_KINDS: &[(&str, &str)] = &[
    ("dflash", "DFLASH"),
    ("dspark", "DSPARK"),
    ("peagle", "P-EAGLE"),
    ("p_eagle", "P-EAGLE"),
    ("frozenkv", "FROZEN_KV_MTP"),
    ("mlpspeculator", "an MLP speculator"),
    ("medusa", "Medusa"),
];

/// Refuses by name drafts that other servers run and this one does not yet.
pub(super) fn refuse_unknown_kinds(config: &Settings<'_>, architecture: &str) -> Result<()> {
    let declared = config.text("speculators_model_type")?.unwrap_or_default();
    let marks = format!("{declared} {architecture}").to_lowercase();
    match UNKNOWN_KINDS.iter().find(|(mark, _)| marks.contains(mark)) {
        Some((_, name)) => {
            Err(config.unsupported(format!("is a draft of the kind {name}: not supported yet")))
        }
        None => Ok(()),
    }
}

/// The seed of random weights.
pub(super) fn seed(load: LoadFormat) -> u64 {
    match load {
        LoadFormat::Auto => 0,
        LoadFormat::Dummy { seed } => seed,
    }
}

/// The one layer whose tensors begin with `prefix`: sizes from the config, optional parts from the
/// tensors, where there are any.
pub(super) fn layer_spec(
    config: &Settings<'_>,
    architecture: &str,
    tensors: Option<&dyn TensorSource>,
    prefix: &str,
) -> Result<ModelSpec> {
    refuse_windows(config)?;
    let family = match tensors {
        Some(tensors) => {
            refuse_other_blocks(config, tensors, prefix)?;
            let has = |part: &str| tensors.contains(&format!("{prefix}.{part}"));
            Family {
                head_dim: head_dim(config, tensors, prefix)?,
                qk_norm: has("self_attn.q_norm.weight"),
                qkv_bias: has("self_attn.q_proj.bias"),
                output_bias: has("self_attn.o_proj.bias"),
                mlp_bias: has("mlp.gate_proj.bias"),
                names: TensorNames::HUGGING_FACE,
            }
        }
        None => {
            let attention_bias = config.flag("attention_bias", false)?;
            Family {
                head_dim: None,
                qk_norm: false,
                qkv_bias: attention_bias,
                output_bias: attention_bias,
                mlp_bias: config.flag("mlp_bias", false)?,
                names: TensorNames::HUGGING_FACE,
            }
        }
    };
    let mut spec = ModelSpec::read(config, architecture, family)?;
    spec.layers.truncate(1);
    let layer = &mut spec.layers[0];
    if tensors.is_some_and(|t| t.contains(&format!("{prefix}.mlp.gate.weight"))) {
        let experts = ExpertsSpec::read(config, layer.ffn.activation())?;
        let none = || config.wrong("num_experts", "is 0, and the head has a router");
        layer.ffn = FeedForward::Experts(experts.ok_or_else(none)?);
    }
    spec.checked(config)
}

/// The width of a head as the queries have it.
fn head_dim(
    config: &Settings<'_>,
    tensors: &dyn TensorSource,
    prefix: &str,
) -> Result<Option<usize>> {
    let heads = config.size("num_attention_heads")?;
    let info = tensors.info(&format!("{prefix}.self_attn.q_proj.weight"));
    let rows = info.and_then(|info| info.shape.first().copied());
    Ok(rows.filter(|rows| *rows > 0 && rows % heads == 0).map(|rows| rows / heads))
}

fn refuse_other_blocks(
    config: &Settings<'_>,
    tensors: &dyn TensorSource,
    prefix: &str,
) -> Result<()> {
    let has = |part: &str| tensors.contains(&format!("{prefix}.{part}"));
    let within = |part: &str| {
        let start = format!("{prefix}.{part}");
        tensors.names().iter().any(|name| name.starts_with(&start))
    };
    let refuse = |what: &str| {
        let reason = format!(
            "{prefix} has {what}, which is not supported; layers of Llama's, Qwen3's and \
             Qwen3-MoE's kind are"
        );
        Err(Error::Unsupported { origin: tensors.origin().into(), reason })
    };
    if has("self_attn.kv_a_proj_with_mqa.weight") || has("self_attn.q_a_proj.weight") {
        return refuse("latent attention (MLA)");
    }
    if within("mlp.shared_expert") {
        return refuse("shared experts (mlp.shared_expert)");
    }
    if has("mlp.gate.e_score_correction_bias") {
        return refuse("a bias on the choice of experts (e_score_correction_bias)");
    }
    if within("mlp.experts.") && !has("mlp.experts.0.gate_proj.weight") {
        return refuse("experts whose weights are stored together (mlp.experts)");
    }
    if let Some(score) = config.text("scoring_func")?
        && score != "softmax"
    {
        return refuse(&format!("experts scored by {score:?} (scoring_func)"));
    }
    if config.flag("attn_output_gate", false)? {
        return refuse("an output gate on its attention (attn_output_gate)");
    }
    Ok(())
}

/// Refuses a head of another width or vocabulary than its target's.
pub(super) fn check_target(
    spec: &ModelSpec,
    config: &Settings<'_>,
    target: &ModelSpec,
) -> Result<()> {
    let fields = [
        ("hidden_size", spec.hidden_size, target.hidden_size),
        ("vocab_size", spec.vocab_size, target.vocab_size),
    ];
    match fields.into_iter().find(|(_, ours, theirs)| ours != theirs) {
        None => Ok(()),
        Some((field, ours, theirs)) => Err(config.wrong(
            field,
            format!("is {ours}, but the target's is {theirs}: the head was made for another model"),
        )),
    }
}
