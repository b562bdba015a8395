//! What a report says of a head that drafts.

use std::fmt;

use serde::Serialize;

use crate::draft_head::HeadKind;
use crate::{AuxLayerConvention, Eagle3Spec, EagleSpec, FeatureNorm, ModelSpec, MtpSpec};

/// What a draft head drafts, and from what.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct DraftHead {
    /// The algorithm that it is for.
    pub algorithm: &'static str,
    /// Width of the models that it can draft for.
    pub target_hidden_size: u64,
    /// Tokens that it can draft.
    pub draft_vocab_size: u64,
    /// The layers of the model whose outputs it reads; none where the config leaves that open.
    pub aux_layers: Option<Vec<usize>>,
    /// How the config numbers those layers, and why that was assumed.
    pub aux_layer_convention: Option<String>,
    /// What it does otherwise than most, and what it shares with its model.
    pub particulars: Vec<String>,
    /// The tensors by which its kind is known.
    pub known_by: Option<&'static str>,
}

impl DraftHead {
    pub(super) fn of_eagle3(spec: &Eagle3Spec, kind: Option<HeadKind>) -> Self {
        let (convention, why) = spec.aux_layers.convention(None);
        let ids = spec.aux_layers.ids.as_ref().filter(|_| spec.aux_count > 0);
        let (shift, what) = match convention {
            AuxLayerConvention::Boundary => (1, "boundaries"),
            _ => (0, "outputs"),
        };
        let embedding = shift == 1 && ids.is_some_and(|ids| ids.contains(&0));
        let particulars = [
            on(spec.aux_count == 0, "no fc: reads what the model's language-model head reads"),
            on(embedding, "reads the embedding beside the outputs of layers"),
            on(spec.feature_norm == FeatureNorm::Whole, "norms hidden states together before fc"),
            on(spec.feature_norm == FeatureNorm::Each, "norms each hidden state before fc"),
            on(spec.norm_before_residual, "norm_before_residual"),
            on(
                spec.norm_output,
                "norm_output: the next step takes the hidden state after the norm",
            ),
            qk_norms(&spec.layer),
            qkv_biases(&spec.layer),
            on(spec.own_embedding, "an embedding table of its own"),
            on(!spec.own_lm_head, "the language-model head of the model"),
        ];
        Self {
            algorithm: "EAGLE3",
            target_hidden_size: spec.target_hidden_size as u64,
            draft_vocab_size: spec.draft_vocab_size as u64,
            aux_layers: ids.map(|ids| ids.iter().filter_map(|id| id.checked_sub(shift)).collect()),
            aux_layer_convention: ids.map(|ids| format!("{ids:?} are {what}: {why}")),
            particulars: particulars.into_iter().flatten().collect(),
            known_by: kind.map(HeadKind::known_by),
        }
    }

    pub(super) fn of_mtp(spec: &MtpSpec) -> Self {
        let layers = match spec.layers() {
            1 => "one layer, which recurs".to_owned(),
            n if spec.chained => format!("{n} layers, one for each step, chained"),
            n => format!("{n} layers, one for each step, each on the model's hidden states"),
        };
        let order = if spec.naming.hidden_first() { "hidden state" } else { "embedding" };
        let (zeroed, why) = spec.zeroes_first;
        let first = if zeroed { "zeros" } else { "the embedding" };
        let particulars = [
            Some(layers),
            Some(format!("joins the {order} first")),
            Some(format!("takes {first} at position 0: {why}")),
            on(spec.naming.norms_from_one(), "weights of norms are kept less one"),
            qk_norms(&spec.layer),
            qkv_biases(&spec.layer),
        ];
        Self::of_one_hidden_state("MTP", &spec.layer, HeadKind::Mtp(spec.naming), particulars)
    }

    pub(super) fn of_eagle(spec: &EagleSpec) -> Self {
        let ignored = spec.ignored.join(", ");
        let particulars = [
            on(spec.fc_bias, "a bias on fc"),
            qk_norms(&spec.layer),
            qkv_biases(&spec.layer),
            on(!ignored.is_empty(), &format!("the model's own are used for {ignored}")),
        ];
        Self::of_one_hidden_state("EAGLE", &spec.layer, HeadKind::Eagle, particulars)
    }

    /// A head that reads what the model's own head reads.
    fn of_one_hidden_state(
        algorithm: &'static str,
        layer: &ModelSpec,
        kind: HeadKind,
        particulars: impl IntoIterator<Item = Option<String>>,
    ) -> Self {
        Self {
            algorithm,
            target_hidden_size: layer.hidden_size as u64,
            draft_vocab_size: layer.vocab_size as u64,
            aux_layers: None,
            aux_layer_convention: None,
            particulars: particulars.into_iter().flatten().collect(),
            known_by: Some(kind.known_by()),
        }
    }
}

fn on(holds: bool, what: &str) -> Option<String> {
    holds.then(|| what.to_owned())
}

fn qk_norms(layer: &ModelSpec) -> Option<String> {
    on(layer.first_attention().qk_norm, "norms on queries and keys")
}

fn qkv_biases(layer: &ModelSpec) -> Option<String> {
    on(layer.first_attention().qkv_bias, "biases on queries, keys and values")
}

impl fmt::Display for DraftHead {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { algorithm, target_hidden_size, draft_vocab_size, aux_layers, .. } = self;
        write!(f, "{algorithm} for models of width {target_hidden_size}, ")?;
        write!(f, "draft vocabulary {draft_vocab_size}, ")?;
        match aux_layers {
            Some(ids) => write!(f, "reads the outputs of layers {ids:?}"),
            None if *algorithm != "EAGLE3" => write!(f, "reads what the model's own head reads"),
            None => write!(f, "reads the outputs of the usual three layers"),
        }
    }
}
