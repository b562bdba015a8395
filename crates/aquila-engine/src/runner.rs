//! The model on its backend, with the KV store and scratch of one engine.

use std::sync::Arc;

use aquila_compute::choose::{Ask, Choice};
use aquila_compute::{Backend, ForwardPlan};
use aquila_model::{Decoder, Scratch};

use crate::config::EngineConfig;
use crate::error::Result;

/// Runs forward passes and the choices after them.
pub struct Runner<B: Backend> {
    backend: Arc<B>,
    decoder: Decoder<B>,
    kv: B::Kv,
    scratch: Scratch<B>,
}

impl<B: Backend> Runner<B> {
    /// Makes room for what `config` allows.
    pub fn new(backend: Arc<B>, decoder: Decoder<B>, config: &EngineConfig) -> Result<Self> {
        let kv = backend.kv(decoder.kv_shape(config.pages() * config.page_size, config.kv_dtype))?;
        let scratch = decoder.scratch(&backend, config.bounds())?;
        Ok(Self { backend, decoder, kv, scratch })
    }

    /// The size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.decoder.spec().vocab_size
    }

    /// One pass, and a choice for each of its outputs.
    pub fn run(&mut self, plan: &ForwardPlan, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        self.decoder.forward(&self.backend, plan, &mut self.kv, &mut self.scratch)?;
        if asks.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.backend.choose(self.scratch.logits(), asks)?)
    }
}
