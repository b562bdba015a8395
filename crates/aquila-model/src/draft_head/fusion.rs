//! Heads whose layers take a token's embedding beside a hidden state, joined by one projection:
//! what EAGLE heads and layers of multi-token prediction have in common.
//!
//! What a layer makes of a row is both what the target's language-model head reads tokens from and
//! what the next step takes as its hidden state. The invariant: no pass reads a hidden state from
//! a buffer that it writes before it has read all of them.

use std::sync::Arc;

use aquila_compute::round::Extent;
use aquila_compute::{
    Accumulate, Backend, DraftIds, ForwardPlan, KvDtype, KvShape, PlanBounds, WeightFormat,
};

use super::LmHead;
use super::fused_checkpoint::Stored;
use super::recurrent_head::{Hidden, RecurrentHead, check_sources, required};
use crate::block::{Block, Input, Linear, Pass, Work, check_plan};
use crate::layout::{Expected, LayerLayout, LinearLayout};
use crate::loading::{Loading, Progress, check_positions};
use crate::{Decoder, ModelSpec, Result};

/// The tensors of one layer.
pub(super) struct FusedLayout {
    pub embedding_norm: Option<Expected>,
    pub hidden_norm: Option<Expected>,
    /// Whether the hidden state comes before the embedding.
    pub hidden_first: bool,
    pub join: LinearLayout,
    /// Whether attention reads the joined stream normed, or as it is.
    pub input_norm: bool,
    pub layer: LayerLayout,
    pub output_norm: Option<Expected>,
}

impl FusedLayout {
    pub fn tensors(self) -> impl Iterator<Item = Expected> {
        let unused = (!self.input_norm).then(|| self.layer.attention_norm.name.clone());
        let layer = self.layer.tensors().filter(move |t| unused.as_ref() != Some(&t.name));
        let norms = [self.embedding_norm, self.hidden_norm, self.output_norm];
        let join = self.join.weights.into_iter().chain(self.join.biases);
        norms.into_iter().flatten().chain(join).chain(layer)
    }
}

struct FusedLayer<B: Backend> {
    embedding_norm: Option<B::Vector>,
    hidden_norm: Option<B::Vector>,
    hidden_first: bool,
    join: Linear<B>,
    input_norm: Option<B::Vector>,
    block: Block<B>,
    output_norm: Option<B::Vector>,
}

/// A head on a backend, of one layer that recurs or of one layer for each step.
pub struct FusedHead<B: Backend> {
    spec: ModelSpec,
    positions: usize,
    embedding: Arc<B::Table>,
    rope: B::Rope,
    layers: Vec<FusedLayer<B>>,
    chained: bool,
    zeroes_first: bool,
    lm_head: LmHead<B>,
}

/// The buffers that the pass of one layer works in.
pub struct LayerScratch<B: Backend> {
    bounds: PlanBounds,
    work: Work<B>,
    embedded: B::Rows,
    hidden: B::Rows,
    joined: B::Rows,
    gathered: B::Rows,
    logits: B::Rows,
}

impl<B: Backend> LayerScratch<B> {
    /// The logits of the last pass that had outputs, one row per output of its plan.
    pub fn logits(&self) -> &B::Rows {
        &self.logits
    }

    /// Where the plan of the next pass is placed.
    pub fn plan_mut(&mut self) -> &mut B::Plan {
        &mut self.work.plan
    }

    /// The plan of the last pass.
    pub fn plan(&self) -> &B::Plan {
        &self.work.plan
    }

    /// The hidden states that the rows of the last pass took.
    pub fn hidden(&self) -> &B::Rows {
        &self.hidden
    }

    /// The largest plan that fits.
    pub fn bounds(&self) -> PlanBounds {
        self.bounds
    }
}

/// The buffers of a head whose one layer recurs, and what its passes leave for each other.
pub struct FusedScratch<B: Backend> {
    layer: LayerScratch<B>,
    seeds: B::Rows,
    last: B::Rows,
}

impl<B: Backend> FusedScratch<B> {
    /// The logits of the last pass, one row per output of its plan.
    pub fn logits(&self) -> &B::Rows {
        &self.layer.logits
    }

    /// The hidden states of the last extend's outputs.
    pub fn seeds(&self) -> &B::Rows {
        &self.seeds
    }

    /// The hidden states of all rows of the last expand.
    pub fn last(&self) -> &B::Rows {
        &self.last
    }
}

impl<B: Backend> FusedHead<B> {
    pub(super) fn load(
        backend: &B,
        stored: &Stored,
        format: WeightFormat,
        target: &Decoder<B>,
        lm_head: LmHead<B>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let positions = target.positions();
        check_positions(positions)?;
        let spec = stored.layer.clone();
        let (source, bytes) = (&*stored.tensors, stored.tensor_bytes);
        let mut loading = Loading::begin(backend, source, format, bytes, progress);
        let (chained, zeroes_first) = (stored.chained, stored.zeroes_first);
        let layers: Result<Vec<_>> =
            stored.layouts.iter().map(|l| layer(&mut loading, &spec, l)).collect();
        let attention = spec.first_attention();
        let rope = backend.rope(&attention.rope.table(attention.heads.head_dim, positions))?;
        let embedding = target.embedding();
        let layers = layers?;
        Ok(Self { spec, positions, embedding, rope, layers, chained, zeroes_first, lm_head })
    }

    /// What one of its layers is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// How many layers it has.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Whether a layer takes the hidden states of the layer before it, or the target's as the first
    /// one does.
    pub fn chained(&self) -> bool {
        self.chained
    }

    /// Buffers for passes of single layers up to `bounds`.
    pub fn layer_scratch(&self, backend: &B, bounds: PlanBounds) -> Result<LayerScratch<B>> {
        let PlanBounds { rows, outputs, .. } = bounds;
        let hidden = self.spec.hidden_size;
        Ok(LayerScratch {
            bounds,
            work: Work::new(backend, &self.spec, bounds)?,
            embedded: backend.rows(rows, hidden)?,
            hidden: backend.rows(rows, hidden)?,
            joined: backend.rows(rows, 2 * hidden)?,
            gathered: backend.rows(outputs, hidden)?,
            logits: backend.logits(outputs, self.lm_head.tokens())?,
        })
    }

    /// Runs rows of one layer: row r reads the hidden state `from[sources[r]]`. Leaves the hidden
    /// states of all rows in `states`, from its first row on, and the logits of the plan's outputs.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        backend: &B,
        layer: usize,
        plan: &ForwardPlan,
        from: &B::Rows,
        kv: &mut B::Kv,
        scratch: &mut LayerScratch<B>,
        states: &mut B::Rows,
    ) -> Result<()> {
        check_plan(plan, scratch.bounds, self.spec.vocab_size, self.positions)?;
        check_sources(plan)?;
        backend.place(plan, &mut scratch.work.plan)?;
        self.run_placed(backend, layer, from, kv, scratch, states)
    }

    /// The same for the plan that stands in `scratch`.
    pub fn run_placed(
        &self,
        backend: &B,
        layer: usize,
        from: &B::Rows,
        kv: &mut B::Kv,
        scratch: &mut LayerScratch<B>,
        states: &mut B::Rows,
    ) -> Result<()> {
        let Extent { rows, .. } = backend.extent(&scratch.work.plan);
        if rows == 0 {
            return Ok(());
        }
        backend.gather_sources(from, &scratch.work.plan, &mut scratch.hidden)?;
        self.pass(backend, layer, rows, kv, scratch, states)?;
        self.outputs(backend, scratch, states)
    }

    /// A layer over the rows that were placed.
    fn pass(
        &self,
        backend: &B,
        layer: usize,
        rows: usize,
        kv: &mut B::Kv,
        s: &mut LayerScratch<B>,
        states: &mut B::Rows,
    ) -> Result<()> {
        let layer = &self.layers[layer];
        let (epsilon, width) = (self.spec.norm.epsilon, self.spec.hidden_size);
        let pass = Pass { backend, epsilon, rows };
        backend.embed(&self.embedding, 1.0, &s.work.plan, &mut s.embedded)?;
        if self.zeroes_first {
            backend.clear_first(&s.work.plan, &mut s.embedded)?;
        }
        let (first, second) = if layer.hidden_first { (width, 0) } else { (0, width) };
        for (input, norm, column) in
            [(&s.embedded, &layer.embedding_norm, first), (&s.hidden, &layer.hidden_norm, second)]
        {
            let joined = &mut s.joined;
            match norm {
                Some(norm) => {
                    backend.rms_norm_columns(input, norm, epsilon, rows, column, joined)?
                }
                None => backend.copy_columns(input, rows, column, joined)?,
            }
        }
        layer.join.project(backend, &s.joined, rows, Accumulate::Set, &mut s.work.residual)?;
        let input = layer.input_norm.as_ref().map_or(Input::Stream, Input::Normed);
        layer.block.attend(&pass, &self.rope, input, kv, 0, &mut s.work)?;
        layer.block.feed_forward(&pass, &mut s.work, None)?;
        match &layer.output_norm {
            Some(norm) => backend.rms_norm(&s.work.residual, norm, epsilon, rows, states)?,
            None => backend.copy_columns(&s.work.residual, rows, 0, states)?,
        }
        Ok(())
    }

    /// The logits of the outputs of the plan that was placed.
    fn outputs(&self, backend: &B, s: &mut LayerScratch<B>, states: &B::Rows) -> Result<()> {
        let outputs = backend.gather_outputs(states, &s.work.plan, 0, &mut s.gathered)?;
        self.lm_head.read_out(backend, &s.gathered, outputs, &mut s.logits)
    }
}

/// With the first layer, which recurs.
impl<B: Backend> RecurrentHead<B> for FusedHead<B> {
    type Scratch = FusedScratch<B>;

    fn draft_ids(&self) -> Option<DraftIds<'_>> {
        self.lm_head.draft_ids()
    }

    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape> {
        self.spec.kv_shapes(slots, dtype)
    }

    fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<FusedScratch<B>> {
        let hidden = self.spec.hidden_size;
        Ok(FusedScratch {
            layer: self.layer_scratch(backend, bounds)?,
            seeds: backend.rows(bounds.outputs, hidden)?,
            last: backend.rows(bounds.rows, hidden)?,
        })
    }

    fn plan_mut(scratch: &mut FusedScratch<B>) -> &mut B::Plan {
        &mut scratch.layer.work.plan
    }

    fn logits(scratch: &FusedScratch<B>) -> &B::Rows {
        scratch.logits()
    }

    fn seeds(scratch: &FusedScratch<B>) -> Option<&B::Rows> {
        Some(&scratch.seeds)
    }

    fn seeds_mut(scratch: &mut FusedScratch<B>) -> Option<&mut B::Rows> {
        Some(&mut scratch.seeds)
    }

    fn check(&self, plan: &ForwardPlan, scratch: &FusedScratch<B>) -> Result<()> {
        check_plan(plan, scratch.layer.bounds, self.spec.vocab_size, self.positions)?;
        check_sources(plan)
    }

    fn extend_placed(
        &self,
        backend: &B,
        hidden: Option<&B::Rows>,
        kv: &mut [B::Kv],
        scratch: &mut FusedScratch<B>,
    ) -> Result<()> {
        let FusedScratch { layer, seeds, last } = scratch;
        self.run_placed(backend, 0, required(hidden)?, &mut kv[0], layer, last)?;
        Ok(backend.scatter_outputs(&layer.gathered, &layer.work.plan, seeds)?)
    }

    fn expand_placed(
        &self,
        backend: &B,
        from: Hidden,
        kv: &mut [B::Kv],
        scratch: &mut FusedScratch<B>,
    ) -> Result<()> {
        let FusedScratch { layer, seeds, last } = scratch;
        let Extent { rows, .. } = backend.extent(&layer.work.plan);
        if rows == 0 {
            return Ok(());
        }
        // `last` is read in full before any of it is written.
        let hidden = if from == Hidden::Seeds { &*seeds } else { &*last };
        backend.gather_sources(hidden, &layer.work.plan, &mut layer.hidden)?;
        self.pass(backend, 0, rows, &mut kv[0], layer, last)?;
        self.outputs(backend, layer, last)
    }
}

fn layer<B: Backend>(
    loading: &mut Loading<'_, B>,
    spec: &ModelSpec,
    layout: &FusedLayout,
) -> Result<FusedLayer<B>> {
    let mut norm =
        |expected: Option<&Expected>| expected.map(|e| loading.norm(e, spec)).transpose();
    Ok(FusedLayer {
        embedding_norm: norm(layout.embedding_norm.as_ref())?,
        hidden_norm: norm(layout.hidden_norm.as_ref())?,
        input_norm: norm(layout.input_norm.then_some(&layout.layer.attention_norm))?,
        output_norm: norm(layout.output_norm.as_ref())?,
        hidden_first: layout.hidden_first,
        join: loading.linear(&layout.join)?,
        block: loading.block(&layout.layer, spec, &spec.layers[0])?,
    })
}
