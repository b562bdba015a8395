//! Heads that draft for a model from its hidden states.
//!
//! - [`RecurrentHead`]: what every model that drafts recurrently does.
//! - [`Eagle3Spec`]: what an EAGLE-3 head is, from its config and the names of its tensors.
//! - [`HeadCheckpoint`]: a head that was checked against the model it is to draft for.
//! - [`Eagle3Head`]: the head on a backend; [`HeadScratch`]: what its passes work in and leave.
//! - [`EagleCheckpoint`], [`MtpCheckpoint`]: heads of EAGLE (1/2) and of multi-token prediction,
//!   both a [`FusedCheckpoint`]; [`FusedHead`]: either on a backend, which reads tokens out by an
//!   [`LmHead`].

mod aux_layers;
mod checkpoint;
mod eagle;
mod eagle3;
mod features;
mod first_embedding;
mod fused_checkpoint;
mod fusion;
mod kind;
mod lm_head;
mod mtp;
mod mtp_names;
mod recurrent_head;
mod spec;
mod strip_prefix;
mod token_map;
mod vocabulary;

pub use aux_layers::{AuxLayerConvention, AuxLayers};
pub use checkpoint::HeadCheckpoint;
pub use eagle::{EagleCheckpoint, EagleSpec};
pub use eagle3::{Eagle3Head, HeadScratch};
pub use first_embedding::FirstEmbedding;
pub use fused_checkpoint::FusedCheckpoint;
pub use fusion::{FusedHead, FusedScratch, LayerScratch};
pub use kind::holds_mtp_layers;
pub use lm_head::{DraftTokens, LmHead};
pub use mtp::{MtpCheckpoint, MtpNaming, MtpSpec};
pub use recurrent_head::{Hidden, RecurrentHead};
pub use spec::{Eagle3Spec, FeatureNorm, HeadOptions};
pub use token_map::TokenMap;

pub(crate) use kind::HeadKind;
pub(crate) use spec::is_eagle3;
