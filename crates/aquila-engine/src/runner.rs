//! The model on its backend, with the KV store, scratch and draft of one engine.

use std::sync::Arc;

use aquila_compute::choose::{Ask, Choice};
use aquila_compute::{Backend, ForwardPlan};
use aquila_model::{Capture, Decoder, Scratch};
use aquila_spec::{
    Drafter, Drafting, Extending, Kept, KvRows, NodeRows, PassRows, Seed, Speculator, Tree, commit,
};

use crate::config::EngineConfig;
use crate::error::Result;

/// Runs the steps of a round on the backend.
pub struct Runner<B: Backend> {
    backend: Arc<B>,
    decoder: Decoder<B>,
    kv: B::Kv,
    scratch: Scratch<B>,
    /// The target's hidden rows of the last pass, where the draft declares that it takes them.
    capture: Option<Capture<B>>,
    speculator: Option<Speculator<B>>,
}

impl<B: Backend> Runner<B> {
    /// Makes room for what `config` allows; `drafter` drafts, if there is one.
    pub fn new(
        backend: Arc<B>,
        decoder: Decoder<B>,
        drafter: Option<Box<dyn Drafter<B>>>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let slots = config.pages() * config.page_size;
        let kv = backend.kv(decoder.kv_shape(slots, config.kv_dtype))?;
        let scratch = decoder.scratch(&backend, config.bounds())?;
        let layers = drafter.as_ref().map_or(&[][..], |d| &d.declaration().hidden_layers);
        let capture = match layers {
            [] => None,
            layers => Some(decoder.capture(&backend, layers, config.max_rows())?),
        };
        let speculator = match drafter {
            Some(drafter) => {
                let kv = backend.kv(drafter.kv_shape(slots, config.kv_dtype))?;
                Some(Speculator::new(drafter, kv))
            }
            None => None,
        };
        Ok(Self { backend, decoder, kv, scratch, capture, speculator })
    }

    /// The size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.decoder.spec().vocab_size
    }

    /// How many tokens beyond its position a row of the draft depends on; none without a draft.
    pub fn lookahead(&self) -> Option<usize> {
        self.speculator.as_ref().map(|s| s.drafter().declaration().lookahead)
    }

    /// The name of the algorithm that drafts, if one does.
    pub fn algorithm(&self) -> Option<&'static str> {
        self.speculator.as_ref().map(|s| s.drafter().declaration().name)
    }

    /// Whether the draft takes the target's hidden rows.
    pub fn captures(&self) -> bool {
        self.capture.is_some()
    }

    /// Drafts a tree for each request.
    pub fn draft(&mut self, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        match &mut self.speculator {
            Some(speculator) if !requests.is_empty() => {
                Ok(speculator.draft(&self.backend, requests)?)
            }
            _ => Ok(Vec::new()),
        }
    }

    /// One pass of the target, and a choice for each of its outputs.
    pub fn run(&mut self, plan: &ForwardPlan, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        let capture = self.capture.as_mut();
        self.decoder.forward(&self.backend, plan, &mut self.kv, &mut self.scratch, capture)?;
        if asks.is_empty() {
            return Ok(Vec::new());
        }
        Ok(self.backend.choose(self.scratch.logits(), asks)?)
    }

    /// Moves what a round keeps to where it belongs.
    pub fn commit(&mut self, kept: &Kept) -> Result<()> {
        let mut kv = KvRows::<B>(&mut self.kv);
        let mut hidden = self.capture.as_mut().map(|c| PassRows::<B>(c.rows_mut()));
        let mut stores: Vec<&mut dyn NodeRows<B>> = vec![&mut kv];
        stores.extend(hidden.as_mut().map(|rows| rows as &mut dyn NodeRows<B>));
        Ok(commit(&*self.backend, kept, &mut stores)?)
    }

    /// Runs rows of the draft that have become certain.
    pub fn extend(&mut self, requests: &[Extending<'_>]) -> Result<Vec<Option<Seed>>> {
        match &mut self.speculator {
            Some(speculator) if !requests.is_empty() => {
                let hidden = self.capture.as_ref().map(Capture::rows);
                Ok(speculator.extend(&self.backend, requests, hidden)?)
            }
            _ => Ok(requests.iter().map(|_| None).collect()),
        }
    }
}
