//! The model on its backend, with the state, stores and draft of one engine: the steps of a round,
//! enqueued one after the other. Only [`Runner::outputs`] waits.

use std::sync::Arc;

use aquila_compute::Backend;
use aquila_compute::round::{
    Batch, ExtendRows, Extent, PassRows, RequestOutput, Simulate, StateBounds, Tree, TreeLimits,
};
use aquila_model::{Decoder, Scratch};
use aquila_spec::{Algorithm, Declaration, DraftBound, DraftRequest, HostProposer};

use super::batch::RowWidths;
use super::stores::{Stores, Takers};
use crate::config::EngineConfig;
use crate::error::{Error, Result};

/// Runs the steps of a round on the backend.
pub struct Runner<B: Backend> {
    backend: Arc<B>,
    decoder: Decoder<B>,
    scratch: Scratch<B>,
    stores: Stores<B>,
    state: B::State,
    algorithm: Option<Algorithm<B>>,
}

impl<B: Backend> Runner<B> {
    /// Makes room for what `config` allows; `algorithm` drafts, if there is one.
    pub fn new(
        backend: Arc<B>,
        decoder: Decoder<B>,
        algorithm: Option<Algorithm<B>>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let declaration = algorithm.as_ref().map(Algorithm::declaration);
        let stores = Stores::new(&*backend, &decoder, declaration, config)?;
        let scratch = decoder.scratch(&backend, config.bounds())?;
        let state = backend.state(StateBounds {
            places: config.max_running_requests,
            stride: config.longest_sequence(),
            drafts: algorithm.as_ref().is_some_and(|algorithm| algorithm.device.is_some()),
            groups: declaration.map_or_else(Vec::new, |declaration| declaration.groups.clone()),
            hidden: stores.hidden().is_some(),
            first_parked: config.max_rows(),
            parked_rows: config.parked_rows,
            chunk: config.chunked_prefill_size,
            steps: config.shape.steps(),
        })?;
        Ok(Self { backend, decoder, scratch, stores, state, algorithm })
    }

    /// The size of the vocabulary.
    pub fn vocabulary(&self) -> usize {
        self.decoder.spec().vocab_size
    }

    /// How wide the rows are that requests may get.
    pub fn row_widths(&self) -> RowWidths {
        let spec = self.decoder.spec();
        let experts = spec.experts_per_token().unwrap_or(0);
        RowWidths { hidden_states: spec.hidden_size, routed_experts: spec.layers.len() * experts }
    }

    /// What the draft needs, if there is one.
    pub fn declaration(&self) -> Option<&Declaration> {
        self.algorithm.as_ref().map(Algorithm::declaration)
    }

    /// Whether hidden rows of the target are kept for the draft.
    pub fn captures(&self) -> bool {
        self.stores.hidden().is_some()
    }

    /// What drafts on the host, if something does.
    pub(super) fn host(&mut self) -> Option<&mut dyn HostProposer> {
        match &mut self.algorithm {
            Some(Algorithm { host: Some(host), .. }) => Some(&mut **host),
            _ => None,
        }
    }

    /// Whether a model drafts.
    pub(super) fn drafts_on_device(&self) -> bool {
        self.algorithm.as_ref().is_some_and(|algorithm| algorithm.device.is_some())
    }

    /// The host's tree for a request, if it drafts one.
    pub(super) fn host_tree(&mut self, request: &DraftRequest<'_>) -> Result<Option<Tree>> {
        let vocabulary = self.vocabulary();
        let tree = self.host().and_then(|host| host.draft(request));
        match tree {
            Some(tree) if !request.admits(&tree, vocabulary) => {
                Err(Error::Draft(self.declaration().map_or("", |declaration| declaration.name)))
            }
            tree => Ok(tree),
        }
    }

    /// Begins a round.
    pub(super) fn begin(&mut self, batch: Batch) -> Result<()> {
        Ok(self.backend.begin_round(&mut self.state, batch)?)
    }

    /// Drafts the trees of all requests that decode, but for those that the host has drafted.
    pub(super) fn draft(
        &mut self,
        given: Vec<(usize, Tree)>,
        bound: DraftBound,
        limits: TreeLimits,
    ) -> Result<()> {
        let Self { backend, state, algorithm, .. } = self;
        backend.start_trees(state, given)?;
        if let Some(Algorithm { device: Some(device), .. }) = algorithm
            && bound.beam > 0
        {
            device.draft(backend, state, bound)?;
        }
        Ok(backend.build_trees(state, limits)?)
    }

    /// One pass of the target, and what is sampled at its outputs; `takers` take its rows.
    pub(super) fn verify(&mut self, bound: Extent, takers: Takers) -> Result<()> {
        let Self { backend, decoder, scratch, stores, state, .. } = self;
        backend.plan_rows(state, PassRows::Target, bound, scratch.plan_mut())?;
        let (kv, mut captures) = stores.of_pass(takers);
        decoder.forward_placed(backend, kv, scratch, &mut captures)?;
        Ok(backend.sample(state, scratch.logits())?)
    }

    /// Accepts what the target confirms; `simulate` replaces that, if given.
    pub(super) fn accept(&mut self, simulate: Option<&Simulate>) -> Result<()> {
        Ok(self.backend.accept(&mut self.state, self.scratch.logits(), simulate)?)
    }

    /// Moves what a round keeps to where it belongs, and publishes it to the next round.
    pub(super) fn compact(&mut self) -> Result<()> {
        let Self { backend, stores, state, .. } = self;
        stores.compact(backend, state)?;
        backend.publish(state)?;
        if let Some(hidden) = stores.hidden_mut() {
            backend.park_rows(state, hidden)?;
        }
        Ok(())
    }

    /// Lets the draft process tokens that are certain.
    pub(super) fn extend(&mut self, rows: ExtendRows, bound: DraftBound) -> Result<()> {
        let Self { backend, stores, state, algorithm, .. } = self;
        let Some(Algorithm { device: Some(device), .. }) = algorithm else { return Ok(()) };
        Ok(device.extend(backend, state, rows, bound, stores.hidden())?)
    }

    /// What came of each row of the batch.
    pub(super) fn outputs(&mut self) -> Result<Vec<Option<RequestOutput>>> {
        Ok(self.backend.outputs(&mut self.state, self.stores.returned())?)
    }
}
