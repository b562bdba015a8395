//! What users decide of a head where its config may mislead.

use std::path::PathBuf;

use aquila_model::{AuxLayerConvention, FirstEmbedding, HeadOptions};
use aquila_spec::DraftFlag;
use clap::{Args, ValueEnum};

/// The flags about heads, of which each is for some algorithms.
#[derive(Args, Debug, Clone, Default)]
pub struct HeadFlags {
    /// A list of the only tokens that an EAGLE or MTP head may draft, written by torch.save or as
    /// JSON (FR-Spec); a path, or org/name/file of the hub
    #[arg(long, value_name = "FILE")]
    speculative_token_map: Option<PathBuf>,

    /// How an EAGLE3 head numbers the layers whose hidden states it reads; `aquila inspect HEAD`
    /// says what auto chooses, and why
    #[arg(long, value_enum, default_value_t = Convention::Auto, value_name = "WAY")]
    speculative_aux_layer_convention: Convention,

    /// The base of an EAGLE3 head's rotary frequencies, where it was not trained with the one that
    /// its config declares
    #[arg(long, value_name = "THETA", value_parser = theta, allow_negative_numbers = true)]
    speculative_draft_rope_theta: Option<f64>,

    /// Insist on an MTP head with a layer for each step; one that has several is run so by itself
    #[arg(long)]
    enable_multi_layer_eagle: bool,

    /// What an MTP head takes for the embedding at position 0; `aquila inspect HEAD` says what auto
    /// chooses, and why
    #[arg(long, value_enum, default_value_t = First::Auto, value_name = "WAY")]
    speculative_mtp_first_embedding: First,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Convention {
    /// As the numbers force, else as the publisher of the head does
    #[default]
    Auto,
    /// By the layer whose output is read (SGLang, SpecForge)
    Output,
    /// By the boundary before a layer (vLLM, speculators)
    Boundary,
}

#[derive(ValueEnum, Debug, Clone, Copy, PartialEq, Eq, Default)]
enum First {
    /// As the engines do that agree for its model, else as SGLang does
    #[default]
    Auto,
    /// The embedding
    Keep,
    /// Zeros
    Zero,
}

impl HeadFlags {
    /// The flags about heads that are given.
    pub fn given(&self) -> impl Iterator<Item = DraftFlag> {
        let head = self.options();
        let convention = head.aux_layer_convention != AuxLayerConvention::Auto;
        let given = [
            (DraftFlag::TokenMap, self.speculative_token_map.is_some()),
            (DraftFlag::AuxLayerConvention, convention),
            (DraftFlag::RopeTheta, head.rope_theta.is_some()),
            (DraftFlag::MultiLayer, head.multi_layer),
            (DraftFlag::FirstEmbedding, head.first_embedding != FirstEmbedding::Auto),
        ];
        given.into_iter().filter_map(|(flag, given)| given.then_some(flag))
    }

    /// The file that names the only tokens to draft.
    pub fn token_map(&self) -> Option<PathBuf> {
        self.speculative_token_map.clone()
    }

    /// What they decide of a head.
    pub fn options(&self) -> HeadOptions {
        HeadOptions {
            aux_layer_convention: match self.speculative_aux_layer_convention {
                Convention::Auto => AuxLayerConvention::Auto,
                Convention::Output => AuxLayerConvention::Output,
                Convention::Boundary => AuxLayerConvention::Boundary,
            },
            rope_theta: self.speculative_draft_rope_theta,
            multi_layer: self.enable_multi_layer_eagle,
            first_embedding: match self.speculative_mtp_first_embedding {
                First::Auto => FirstEmbedding::Auto,
                First::Keep => FirstEmbedding::Keep,
                First::Zero => FirstEmbedding::Zero,
            },
        }
    }
}

/// The base of rotary frequencies.
fn theta(text: &str) -> std::result::Result<f64, String> {
    match text.parse() {
        Ok(number) if (1.0..1e30).contains(&number) => Ok(number),
        _ => Err("expected a number of at least 1".into()),
    }
}
