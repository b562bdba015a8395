//! EAGLE heads and MTP layers on disk, or presets, once they are known to fit their target.

use aquila_compute::{Backend, WeightFormat};

use super::LmHead;
use super::fusion::{FusedHead, FusedLayout};
use crate::loading::Progress;
use crate::source::TensorSource;
use crate::{Decoder, ModelSpec, Result};

/// A head that fits its target: everything but its weights has been read and checked. `S` says
/// what it is.
pub struct FusedCheckpoint<S> {
    spec: S,
    stored: Stored,
}

/// What a head is loaded from.
pub(super) struct Stored {
    /// What one layer of the head is.
    pub layer: ModelSpec,
    pub layouts: Vec<FusedLayout>,
    /// Whether a layer takes the hidden states of the one before it, or the target's.
    pub chained: bool,
    /// Whether zeros stand for the embedding at position 0.
    pub zeroes_first: bool,
    pub tensors: Box<dyn TensorSource>,
    pub tensor_bytes: u64,
}

impl<S> FusedCheckpoint<S> {
    pub(super) fn new(spec: S, stored: Stored) -> Self {
        Self { spec, stored }
    }

    /// What the head is.
    pub fn spec(&self) -> &S {
        &self.spec
    }

    /// The tensors, as the head uses them.
    pub fn tensors(&self) -> &dyn TensorSource {
        &*self.stored.tensors
    }

    /// Bytes of the head's weights as they are stored.
    pub fn tensor_bytes(&self) -> u64 {
        self.stored.tensor_bytes
    }

    /// Puts the head on a backend, for the contexts of `target`, whose embedding table it uses.
    /// `lm_head` is the target's, or some rows of it.
    pub fn load<B: Backend>(
        &self,
        backend: &B,
        format: WeightFormat,
        target: &Decoder<B>,
        lm_head: LmHead<B>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<FusedHead<B>> {
        FusedHead::load(backend, &self.stored, format, target, lm_head, progress)
    }
}
