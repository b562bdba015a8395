//! The model on its backend, with the state, stores and draft of one engine: the steps of a round,
//! enqueued one after the other. Only [`Runner::outputs`] waits.

use std::sync::Arc;
use std::time::Duration;

use aquila_compute::round::{
    Batch, Candidates, ExtendRows, Extent, GraphKey, PassRows, RequestOutput, RequestParams,
    StateBounds, Tree,
};
use aquila_compute::{Backend, KvShape};
use aquila_model::{Decoder, Scratch};
use aquila_spec::{Algorithm, Declaration, DraftBound, DraftRequest, HostProposer, Placed, Verify};

use super::batch::{Export, RowWidths, Unpack};
use super::stores::{Stores, Takers};
use crate::config::EngineConfig;
use crate::error::{Error, Result};
use crate::transfer::KvRows;

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
        let scratch = decoder.scratch_in_pieces(&backend, config.bounds(), config.logit_rows())?;
        let groups = declaration.map_or_else(Vec::new, |declaration| declaration.groups.clone());
        let drafts = algorithm.as_ref().is_some_and(|algorithm| algorithm.device.is_some());
        let state = backend.state(StateBounds {
            drafts,
            hidden: stores.hidden().is_some(),
            ..config.state_bounds(groups, decoder.spec().vocab_size)
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

    /// Whether something drafts on the host.
    pub(super) fn drafts_on_host(&self) -> bool {
        self.algorithm.as_ref().is_some_and(|algorithm| algorithm.host.is_some())
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

    /// The moment at which what was enqueued so far is done.
    pub(super) fn moment(&self) -> Result<B::Moment> {
        Ok(self.backend.moment()?)
    }

    /// The time between two moments, after the outputs of a round were read.
    pub(super) fn time_between(&self, from: &B::Moment, to: &B::Moment) -> Result<Duration> {
        Ok(self.backend.time_between(from, to)?)
    }

    /// Begins a round.
    pub(super) fn begin(&mut self, batch: Batch) -> Result<()> {
        Ok(self.backend.begin_round(&mut self.state, batch)?)
    }

    /// Starts the trees of all requests that decode; `given` are those that the host has drafted.
    pub(super) fn start_trees(&mut self, given: Vec<(usize, Tree)>) -> Result<()> {
        Ok(self.backend.start_trees(&mut self.state, given)?)
    }

    /// Drafts the trees that were started, and ends them.
    pub(super) fn draft(&mut self, bound: DraftBound) -> Result<()> {
        let Self { backend, state, algorithm, .. } = self;
        if let Some(Algorithm { device: Some(device), .. }) = algorithm
            && bound.beam > 0
        {
            device.draft(backend, state, bound)?;
        }
        Ok(backend.build_trees(state)?)
    }

    /// Notes who takes rows of the target's pass.
    pub(super) fn begin_pass(&mut self, takers: Takers) {
        self.stores.begin_pass(takers);
    }

    /// What the operations of the round that runs depend on, where they may be captured.
    pub(super) fn graph_key(&self) -> Option<GraphKey> {
        self.backend.graph_key(&self.state)
    }

    /// The backend.
    pub(super) fn backend(&self) -> &Arc<B> {
        &self.backend
    }

    /// One pass of the target, and what is sampled at its outputs. Rows of
    /// the target that go to another engine leave layer by layer, while later layers run.
    pub(super) fn verify(&mut self, bound: Extent, exports: &[Export]) -> Result<()> {
        let Self { backend, decoder, scratch, stores, state, .. } = self;
        backend.plan_rows(state, PassRows::Target, bound, scratch.plan_mut())?;
        let (kv, mut captures) = stores.of_pass();
        let mut written = |kv: &B::Kv, store: usize, layer: usize| {
            let mut exports = exports.iter().filter(|export| export.group == 0);
            Ok(exports.try_for_each(|export| give_layer(&**backend, kv, store, layer, export))?)
        };
        let mut told = |logits: &B::Rows, first| Ok(backend.sample(state, logits, first)?);
        decoder.forward_placed(backend, kv, scratch, &mut captures, &mut written, &mut told)?;
        Ok(())
    }

    /// Accepts what the target confirms.
    pub(super) fn accept(&mut self) -> Result<()> {
        Ok(self.backend.accept(&mut self.state)?)
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

    /// The stores of a group: the target's group is 0, those of the draft follow.
    fn kv(&self, group: usize) -> &[B::Kv] {
        match (group.checked_sub(1), &self.algorithm) {
            (None, _) => self.stores.kv(),
            (Some(group), Some(Algorithm { device: Some(device), .. })) => device.kv(group),
            (Some(_), _) => &[],
        }
    }

    /// The sizes of the stores of each group.
    pub(super) fn kv_shapes(&self) -> Vec<Vec<KvShape>> {
        let drafts = self.declaration().map_or(0, |declaration| declaration.groups.len());
        let shape = |kv| self.backend.kv_shape(kv);
        (0..=drafts).map(|group| self.kv(group).iter().map(shape).collect()).collect()
    }

    /// Gives rows of the draft to another engine.
    pub(super) fn give_draft_rows(&self, exports: &[Export]) -> Result<()> {
        for export in exports.iter().filter(|export| export.group > 0) {
            for (store, kv) in self.kv(export.group).iter().enumerate() {
                let mut layers = 0..self.backend.kv_shape(kv).layers;
                layers
                    .try_for_each(|layer| give_layer(&*self.backend, kv, store, layer, export))?;
            }
        }
        Ok(())
    }

    /// Writes rows that came from another engine.
    pub(super) fn write_rows(&mut self, rows: &KvRows, slots: &[u32]) -> Result<()> {
        let Self { backend, stores, algorithm, .. } = self;
        let kv = match (rows.group.checked_sub(1), algorithm) {
            (None, _) => stores.kv_mut(),
            (Some(group), Some(Algorithm { device: Some(device), .. })) => device.kv_mut(group),
            (Some(_), _) => &mut [],
        };
        let kv = kv.get_mut(rows.store).expect("the scheduler has checked which stores there are");
        Ok(backend.write_slots(kv, rows.layers.clone(), slots, &rows.bytes)?)
    }

    /// What another engine needs to go on drafting for the request at `place`.
    pub(super) fn pack(&mut self, place: usize, request: u64) -> Result<Vec<u8>> {
        let Self { backend, state, algorithm, .. } = self;
        let placed = Placed { request, place, tokens: &[] };
        let packed = algorithm.as_mut().map(|algorithm| algorithm.pack(backend, state, placed));
        Ok(packed.transpose()?.unwrap_or_default())
    }

    /// Takes what another engine has packed for the request at `place`; false where nothing can be
    /// drafted with it.
    pub(super) fn unpack(
        &mut self,
        place: usize,
        params: &RequestParams,
        unpack: &Unpack,
    ) -> Result<bool> {
        let vocabulary = self.vocabulary();
        let Self { backend, state, algorithm, .. } = self;
        let Some(algorithm) = algorithm.as_mut().filter(|_| params.drafts()) else {
            return Ok(true);
        };
        let placed = Placed { request: params.id, place, tokens: &unpack.tokens };
        if !algorithm.unpack(backend, state, placed, &unpack.packed)? {
            return Ok(false);
        }
        let seed = backend.read_seed(state, place)?;
        Ok(seed.is_none_or(|seed| can_begin(&seed, params, vocabulary)))
    }

    /// Copies what came of each row of the batch to the host.
    pub(super) fn copy_outputs(&mut self) -> Result<()> {
        Ok(self.backend.copy_outputs(&mut self.state, self.stores.returned())?)
    }

    /// What came of each row of the oldest batch whose outputs were copied and not taken yet.
    pub(super) fn outputs(&mut self) -> Result<Vec<Option<RequestOutput>>> {
        Ok(self.backend.outputs(&mut self.state)?)
    }
}

/// Rows that are given to another engine at once: a request that finds a long prefix in the cache
/// has many.
const MOST_ROWS: usize = 1024;

/// Gives one layer of rows to another engine.
fn give_layer<B: Backend>(
    backend: &B,
    kv: &B::Kv,
    store: usize,
    layer: usize,
    export: &Export,
) -> aquila_compute::Result<()> {
    let Export { to, group, rows, slots } = export;
    let starts = rows.clone().step_by(MOST_ROWS);
    for (start, slots) in starts.zip(slots.chunks(MOST_ROWS)) {
        let (layers, rows, mut bytes) = (layer..layer + 1, start..start + slots.len(), Vec::new());
        backend.read_slots(kv, layers.clone(), slots, &mut bytes)?;
        to.rows(KvRows { group: *group, store, layers, rows, bytes });
    }
    Ok(())
}

/// Whether the tree of a request can begin with what came from another engine: tokens that there
/// are, drawn where drafts are drawn.
fn can_begin(seed: &Candidates, params: &RequestParams, vocabulary: usize) -> bool {
    let known = |token: u32| (token as usize) < vocabulary;
    let weights = seed.drawn_from.iter().flat_map(|weights| &weights.tokens);
    seed.drawn_from.is_some() == (params.limits.verify == Verify::Rejection)
        && seed.candidates.iter().all(|c| known(c.token) && c.probability.is_finite())
        && weights.into_iter().all(|&(token, weight)| known(token) && weight.is_finite())
}
