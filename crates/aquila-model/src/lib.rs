//! Checkpoints into forward passes.
//!
//! - [`resolve`]: from a name to a [`Location`]: a preset, a folder, a shipped model, the hub.
//! - [`Checkpoint`]: a config that was understood and tensors that fit it.
//! - [`ModelSpec`]: what a model is, a list of [`LayerSpec`]s; tensors, memory and passes follow.
//! - [`TensorSource`]: named tensors, from [`Safetensors`] or [`TorchTensors`] files or random
//!   ([`Dummy`]).
//! - [`Decoder`]: the model on a backend; [`Scratch`]: what its passes work in.
//! - [`Capture`]: the hidden states that a pass leaves for a head to draft from.
//! - [`HeadCheckpoint`], [`Eagle3Head`]: a head that drafts for a model.
//! - [`EagleCheckpoint`], [`MtpCheckpoint`], [`FusedHead`]: heads that read the model's last hidden state.
//! - [`Inspection`]: a report on a checkpoint, servable or not.
//! - [`memory`]: what a model will take, from its spec alone.
//!
//! A new architecture is a page in `arch/` that reads its config into a [`ModelSpec`].

#![deny(unsafe_code)]

pub mod memory;

mod arch;
mod block;
mod capture;
mod checkpoint;
mod config;
mod decoder;
mod draft_head;
mod dummy;
mod error;
mod fingerprint;
mod hub;
mod inspect;
mod layer_spec;
mod layout;
mod loading;
mod location;
mod mapped;
mod model_spec;
mod pairing;
mod preset;
mod rope;
mod safetensors;
mod shipped;
mod source;
mod torch_file;

pub use arch::supported_architectures;
pub use capture::Capture;
pub use checkpoint::{Checkpoint, LoadFormat};
pub use decoder::{Decoder, LayerWritten, LogitsTold, Scratch};
pub use draft_head::{
    AuxLayerConvention, AuxLayers, DraftTokens, Eagle3Head, Eagle3Spec, EagleCheckpoint, EagleSpec,
    FeatureNorm, FirstEmbedding, FusedCheckpoint, FusedHead, FusedScratch, HeadCheckpoint,
    HeadOptions, HeadScratch, Hidden, LayerScratch, LmHead, MtpCheckpoint, MtpNaming, MtpSpec,
    RecurrentHead, TokenMap, holds_mtp_layers,
};
pub use dummy::Dummy;
pub use error::{Error, Result, Setting};
pub use hub::{Hub, HubEvent};
pub use inspect::{DraftHead, FileSize, Inspection, MemoryEstimate};
pub use layer_spec::{AttentionSpec, DenseSpec, ExpertsSpec, FeedForward, LayerSpec, Mixer, Norms};
pub use layout::{Expected, TensorNames};
pub use loading::Progress;
pub use location::{Location, Places, resolve};
pub use memory::{KvGroup, Needs};
pub use model_spec::{ModelSpec, NormSpec};
pub use pairing::same_tokens;
pub use preset::presets;
pub use rope::{RopeKind, RopeSpec};
pub use safetensors::Safetensors;
pub use shipped::shipped_models;
pub use source::{TensorInfo, TensorSource};
pub use torch_file::TorchTensors;
