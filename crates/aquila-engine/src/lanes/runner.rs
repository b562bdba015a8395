//! The model on its backend, with the KV store, scratch and draft of one engine.

use std::sync::Arc;

use aquila_compute::choose::{Ask, Choice, Weights};
use aquila_compute::{Backend, ForwardPlan};
use aquila_model::{Capture, Decoder, Scratch};
use aquila_spec::{
    Algorithm, Declaration, Drafting, Extending, HiddenStates, Kept, KvRows, NodeRows, PassRows,
    Seed, Tree, commit,
};

use crate::config::EngineConfig;
use crate::error::{Error, Result};

/// Runs the steps of a round on the backend.
pub struct Runner<B: Backend> {
    backend: Arc<B>,
    decoder: Decoder<B>,
    kv: B::Kv,
    scratch: Scratch<B>,
    /// The target's hidden rows of the last pass, where the draft declares that it takes them.
    capture: Option<Capture<B>>,
    algorithm: Option<Box<dyn Algorithm<B>>>,
}

impl<B: Backend> Runner<B> {
    /// Makes room for what `config` allows; `algorithm` drafts, if there is one.
    pub fn new(
        backend: Arc<B>,
        decoder: Decoder<B>,
        algorithm: Option<Box<dyn Algorithm<B>>>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let kv = backend.kv(decoder.kv_shape(config.slots(), config.kv_dtype))?;
        let scratch = decoder.scratch(&backend, config.bounds())?;
        let hidden = algorithm.as_ref().map(|a| &a.declaration().hidden);
        let capture = match hidden.unwrap_or(&HiddenStates::None) {
            HiddenStates::None => None,
            HiddenStates::Layers(layers) => {
                Some(decoder.capture(&backend, layers, config.hidden_rows())?)
            }
            HiddenStates::Final => Some(decoder.capture_final(&backend, config.hidden_rows())?),
        };
        Ok(Self { backend, decoder, kv, scratch, capture, algorithm })
    }

    /// The size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.decoder.spec().vocab_size
    }

    /// What the draft needs, if there is one.
    pub fn declaration(&self) -> Option<&Declaration> {
        self.algorithm.as_ref().map(|algorithm| algorithm.declaration())
    }

    /// Whether hidden rows of the target are kept for the draft.
    pub fn captures(&self) -> bool {
        self.capture.is_some()
    }

    /// Drafts a tree for each request.
    pub fn draft(&mut self, requests: &[Drafting<'_>]) -> Result<Vec<Tree>> {
        let Some(algorithm) = self.algorithm.as_mut().filter(|_| !requests.is_empty()) else {
            return Ok(Vec::new());
        };
        let trees = algorithm.draft(&self.backend, requests)?;
        let vocabulary = self.decoder.spec().vocab_size;
        let all = trees.len() == requests.len();
        if !all || !trees.iter().zip(requests).all(|(tree, r)| r.admits(tree, vocabulary)) {
            return Err(Error::Draft(algorithm.declaration().name));
        }
        Ok(trees)
    }

    /// One pass of the target; `drafts` says whether it has rows that a draft takes in.
    pub fn run(&mut self, plan: &ForwardPlan, drafts: bool) -> Result<()> {
        let capture = self.capture.as_mut().filter(|_| drafts);
        Ok(self.decoder.forward(&self.backend, plan, &mut self.kv, &mut self.scratch, capture)?)
    }

    /// A choice for each ask about the last pass.
    pub fn choose(&self, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        match asks {
            [] => Ok(Vec::new()),
            asks => Ok(self.backend.choose(self.scratch.logits(), asks)?),
        }
    }

    /// The distribution that each ask about the last pass is answered from.
    pub fn weigh(&self, asks: &[Ask<'_>]) -> Result<Vec<Weights>> {
        match asks {
            [] => Ok(Vec::new()),
            asks => Ok(self.backend.weigh(self.scratch.logits(), asks, None)?),
        }
    }

    /// Moves what a round keeps to where it belongs.
    pub fn commit(&mut self, kept: &Kept) -> Result<()> {
        let mut kv = KvRows::<B>(&mut self.kv);
        let mut hidden = self.capture.as_mut().map(|c| PassRows::<B>(c.rows_mut()));
        let mut stores: Vec<&mut dyn NodeRows<B>> = vec![&mut kv];
        stores.extend(hidden.as_mut().map(|rows| rows as &mut dyn NodeRows<B>));
        #[cfg(feature = "known-bugs")]
        aquila_spec::known_bugs::spoil_stores(&mut stores);
        Ok(commit(&*self.backend, kept, &mut stores)?)
    }

    /// Moves hidden rows of the target to where they wait for a draft.
    pub fn park(&mut self, moves: &[(u32, u32)]) -> Result<()> {
        match &mut self.capture {
            Some(capture) if !moves.is_empty() => {
                Ok(self.backend.move_rows(capture.rows_mut(), moves)?)
            }
            _ => Ok(()),
        }
    }

    /// Lets the draft take in what has become certain.
    pub fn extend(&mut self, requests: &[Extending<'_>]) -> Result<Vec<Option<Seed>>> {
        match &mut self.algorithm {
            Some(algorithm) if !requests.is_empty() => {
                let hidden = self.capture.as_ref().map(Capture::rows);
                Ok(algorithm.extend(&self.backend, requests, hidden)?)
            }
            _ => Ok(requests.iter().map(|_| None).collect()),
        }
    }

    /// Lets the draft forget what the texts of requests have taught it.
    pub fn begin_anew(&mut self) {
        if let Some(algorithm) = &mut self.algorithm {
            algorithm.begin_anew();
        }
    }

    /// Tells the draft that a request holds nothing any more.
    pub fn leave(&mut self, request: u64, tokens: &[u32]) {
        if let Some(algorithm) = &mut self.algorithm {
            algorithm.leave(request, tokens);
        }
    }
}
