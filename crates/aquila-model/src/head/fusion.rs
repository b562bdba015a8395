//! Heads whose layers take a token's embedding beside a hidden state, joined by one projection:
//! what EAGLE heads and layers of multi-token prediction have in common.
//!
//! What a layer makes of a row is both what the target's language-model head reads tokens from and
//! what the next step takes as its hidden state. The invariant: no pass reads a hidden state from
//! a buffer that it writes before it has read all of them.

use std::sync::Arc;

use aquila_compute::{
    Backend, DraftIds, ForwardPlan, KvDtype, KvShape, PlanBounds, Sink, WeightFormat,
};

use super::fused_checkpoint::Stored;
use super::{Hidden, LmHead};
use crate::block::{Block, Linear, Pass, Work, check_plan};
use crate::layout::{Expected, LayerLayout, LinearLayout};
use crate::loading::{Loading, Progress, check_positions};
use crate::{Decoder, Error, ModelSpec, Result};

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
        let unused = (!self.input_norm).then(|| self.layer.input_norm.name.clone());
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
    /// Rows whose embeddings are zeros, as moves from the row that is.
    zeroed: Vec<(u32, u32)>,
    hidden: B::Rows,
    normed: B::Rows,
    joined: B::Rows,
    gathered: B::Rows,
    logits: B::Rows,
}

impl<B: Backend> LayerScratch<B> {
    /// The logits of the last pass that had outputs, one row per output of its plan.
    pub fn logits(&self) -> &B::Rows {
        &self.logits
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
    seed_rows: usize,
    last: B::Rows,
    last_rows: usize,
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

/// Hidden states that rows of a pass may take.
#[derive(Clone, Copy)]
pub struct Sources<'a, B: Backend> {
    /// Where they are.
    pub rows: &'a B::Rows,
    /// How many there are.
    pub count: usize,
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
        let mut loading = Loading {
            backend,
            source: &*stored.tensors,
            format,
            done_bytes: 0,
            total_bytes: stored.tensor_bytes,
            progress,
        };
        let (chained, zeroes_first) = (stored.chained, stored.zeroes_first);
        let layers: Result<Vec<_>> =
            stored.layouts.iter().map(|l| layer(&mut loading, l)).collect();
        let rope = backend.rope(&spec.rope.table(spec.heads.head_dim, positions))?;
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

    /// Which tokens of the target the columns of the logits are; none where they are all, in order.
    pub fn draft_ids(&self) -> Option<DraftIds<'_>> {
        self.lm_head.draft_ids()
    }

    /// The store of keys and values that one layer needs for `slots` tokens.
    pub fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        self.spec.kv_shape(slots, dtype)
    }

    /// Buffers for passes of single layers up to `bounds`.
    pub fn layer_scratch(&self, backend: &B, bounds: PlanBounds) -> Result<LayerScratch<B>> {
        let PlanBounds { rows, outputs, .. } = bounds;
        let hidden = self.spec.hidden_size;
        Ok(LayerScratch {
            bounds,
            work: Work::new(backend, &self.spec, bounds)?,
            // A row of zeros behind those of a pass.
            embedded: backend.rows(rows + 1, hidden)?,
            zeroed: Vec::new(),
            hidden: backend.rows(rows, hidden)?,
            normed: backend.rows(rows, hidden)?,
            joined: backend.rows(rows, 2 * hidden)?,
            gathered: backend.rows(outputs, hidden)?,
            logits: backend.rows(outputs, self.lm_head.tokens())?,
        })
    }

    /// Buffers for extending and expanding with the first layer, up to `bounds`.
    pub fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<FusedScratch<B>> {
        let hidden = self.spec.hidden_size;
        Ok(FusedScratch {
            layer: self.layer_scratch(backend, bounds)?,
            seeds: backend.rows(bounds.outputs, hidden)?,
            seed_rows: 0,
            last: backend.rows(bounds.rows, hidden)?,
            last_rows: 0,
        })
    }

    /// Runs rows that take the target's hidden states, after its final norm: row r reads
    /// `captured[sources[r]]`. Leaves the logits of the plan's outputs, and their hidden states as
    /// seeds for expanding.
    pub fn extend(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        captured: &B::Rows,
        kv: &mut B::Kv,
        scratch: &mut FusedScratch<B>,
    ) -> Result<()> {
        let s = scratch;
        (s.seed_rows, s.last_rows) = (0, 0);
        // The target's pass had as many rows as the engine made room for, which it knows.
        let from = Sources { rows: captured, count: usize::MAX };
        if self.states(backend, 0, plan, from, kv, &mut s.layer, &mut s.last)? == 0 {
            return Ok(());
        }
        s.seed_rows = backend.gather_outputs(&s.last, &s.layer.work.plan, &mut s.seeds)?;
        self.lm_head.read_out(backend, &s.seeds, s.seed_rows, &mut s.layer.logits)
    }

    /// Runs rows that take the head's own hidden states: row r reads row `sources[r]` of `from`.
    /// Leaves the logits of the plan's outputs, and the hidden states of all rows for the next
    /// expand.
    pub fn expand(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        from: Hidden,
        kv: &mut B::Kv,
        scratch: &mut FusedScratch<B>,
    ) -> Result<()> {
        let s = scratch;
        // `last` is read in full before any of it is written, but the borrow cannot know that.
        let rows = match from {
            Hidden::Seeds => {
                let from = Sources { rows: &s.seeds, count: s.seed_rows };
                self.gather(backend, plan, from, &mut s.layer)?
            }
            Hidden::Last => {
                let from = Sources { rows: &s.last, count: s.last_rows };
                self.gather(backend, plan, from, &mut s.layer)?
            }
        };
        s.last_rows = 0;
        if rows == 0 {
            return Ok(());
        }
        self.pass(backend, 0, rows, kv, &mut s.layer, &mut s.last)?;
        s.last_rows = rows;
        self.outputs(backend, &mut s.layer, &s.last)
    }

    /// Runs rows of one layer: row r reads the hidden state `from[sources[r]]`. Leaves the hidden
    /// states of all rows in `states`, from its first row on, and the logits of the plan's outputs.
    #[allow(clippy::too_many_arguments)]
    pub fn run(
        &self,
        backend: &B,
        layer: usize,
        plan: &ForwardPlan,
        from: Sources<'_, B>,
        kv: &mut B::Kv,
        scratch: &mut LayerScratch<B>,
        states: &mut B::Rows,
    ) -> Result<()> {
        match self.states(backend, layer, plan, from, kv, scratch, states)? {
            0 => Ok(()),
            _ => self.outputs(backend, scratch, states),
        }
    }

    /// The hidden states that a layer makes of a plan's rows; answers how many.
    #[allow(clippy::too_many_arguments)]
    fn states(
        &self,
        backend: &B,
        layer: usize,
        plan: &ForwardPlan,
        from: Sources<'_, B>,
        kv: &mut B::Kv,
        s: &mut LayerScratch<B>,
        states: &mut B::Rows,
    ) -> Result<usize> {
        let rows = self.gather(backend, plan, from, s)?;
        if rows > 0 {
            self.pass(backend, layer, rows, kv, s, states)?;
        }
        Ok(rows)
    }

    /// Places a plan, with the hidden states that its rows take; answers how many.
    fn gather(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        from: Sources<'_, B>,
        s: &mut LayerScratch<B>,
    ) -> Result<usize> {
        check_plan(plan, s.bounds, self.spec.vocab_size, self.positions)?;
        let rows = plan.rows();
        if plan.sources.len() != rows {
            let sources = plan.sources.len();
            return Err(Error::Plan(format!("{sources} sources for {rows} rows of a head")));
        }
        if let Some(source) = plan.sources.iter().find(|&&s| s as usize >= from.count) {
            let there = from.count;
            return Err(Error::Plan(format!("source {source} of {there} hidden states")));
        }
        if rows > 0 {
            backend.place(plan, &mut s.work.plan)?;
            backend.gather_sources(from.rows, &s.work.plan, &mut s.hidden)?;
        }
        let first = |(row, &position): (usize, &u32)| (position == 0).then_some(row as u32);
        s.zeroed.clear();
        if self.zeroes_first {
            let first = plan.positions.iter().enumerate().filter_map(first);
            s.zeroed.extend(first.map(|row| (s.bounds.rows as u32, row)));
        }
        Ok(rows)
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
        let (heads, epsilon, width) =
            (self.spec.heads, self.spec.norm_epsilon, self.spec.hidden_size);
        let pass = Pass { backend, rope: &self.rope, heads, epsilon, rows };
        backend.embed(&self.embedding, &s.work.plan, &mut s.embedded)?;
        if !s.zeroed.is_empty() {
            backend.move_rows(&mut s.embedded, &s.zeroed)?;
        }
        let (first, second) = if layer.hidden_first { (width, 0) } else { (0, width) };
        for (input, norm, column) in
            [(&s.embedded, &layer.embedding_norm, first), (&s.hidden, &layer.hidden_norm, second)]
        {
            let input = match norm {
                Some(norm) => {
                    backend.rms_norm(input, norm, epsilon, rows, &mut s.normed)?;
                    &s.normed
                }
                None => input,
            };
            backend.copy_columns(input, rows, column, &mut s.joined)?;
        }
        layer.join.project(backend, &s.joined, rows, Sink::Set, &mut s.work.residual)?;
        match &layer.input_norm {
            Some(norm) => backend.rms_norm(&s.work.residual, norm, epsilon, rows, &mut s.normed)?,
            None => backend.copy_columns(&s.work.residual, rows, 0, &mut s.normed)?,
        }
        layer.block.attend(&pass, &s.normed, kv, 0, &mut s.work)?;
        layer.block.feed_forward(&pass, &mut s.normed, &mut s.work)?;
        match &layer.output_norm {
            Some(norm) => backend.rms_norm(&s.work.residual, norm, epsilon, rows, states)?,
            None => backend.copy_columns(&s.work.residual, rows, 0, states)?,
        }
        Ok(())
    }

    /// The logits of the outputs of the plan that was placed.
    fn outputs(&self, backend: &B, s: &mut LayerScratch<B>, states: &B::Rows) -> Result<()> {
        let outputs = backend.gather_outputs(states, &s.work.plan, &mut s.gathered)?;
        self.lm_head.read_out(backend, &s.gathered, outputs, &mut s.logits)
    }
}

fn layer<B: Backend>(loading: &mut Loading<'_, B>, layout: &FusedLayout) -> Result<FusedLayer<B>> {
    let mut norm = |expected: Option<&Expected>| {
        expected.map(|e| loading.vector(std::slice::from_ref(e))).transpose()
    };
    Ok(FusedLayer {
        embedding_norm: norm(layout.embedding_norm.as_ref())?,
        hidden_norm: norm(layout.hidden_norm.as_ref())?,
        input_norm: norm(layout.input_norm.then_some(&layout.layer.input_norm))?,
        output_norm: norm(layout.output_norm.as_ref())?,
        hidden_first: layout.hidden_first,
        join: loading.linear(&layout.join)?,
        block: loading.block(&layout.layer)?,
    })
}
