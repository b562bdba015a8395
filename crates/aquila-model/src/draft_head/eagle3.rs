//! The passes of an EAGLE-3 head: a token and a hidden state in, logits of the next token out.
//!
//! A row takes the token at p + 1 and the hidden state at p, runs at position p and predicts the
//! token at p + 2. The hidden state is the target's (through `fc`, where the head has one) in
//! [`RecurrentHead::extend`] and the head's own in [`RecurrentHead::expand`]. The invariant: no pass reads a hidden state from a
//! buffer that it writes.

use std::sync::Arc;

use aquila_compute::round::Extent;
use aquila_compute::{
    Backend, DraftIds, ForwardPlan, HostTensor, KvDtype, KvShape, Normed, PlanBounds, WeightFormat,
};

use super::features::{FeatureRows, Features};
use super::recurrent_head::{Hidden, RecurrentHead, check_sources, required};
use super::{Eagle3Spec, HeadCheckpoint, LmHead};
use crate::block::{Block, Input, Pass, Work, check_plan};
use crate::layer_spec::LayerSpec;
use crate::layout::LayerLayout;
use crate::loading::{Loading, Progress, check_positions};
use crate::{Decoder, Error, Result};

/// An EAGLE-3 head on a backend.
pub struct Eagle3Head<B: Backend> {
    spec: Eagle3Spec,
    boundaries: Vec<usize>,
    ids: Option<Vec<u32>>,
    positions: usize,
    embedding: Arc<B::Table>,
    rope: B::Rope,
    features: Option<Features<B>>,
    hidden_norm: B::Vector,
    layers: Vec<HeadLayer<B>>,
    norm: B::Vector,
    lm_head: LmHead<B>,
}

struct HeadLayer<B: Backend> {
    /// Of the embedding in the first layer, of the stream in others.
    norm: B::Vector,
    block: Block<B>,
}

/// The buffers that passes of a head work in, and what they leave for each other.
pub struct HeadScratch<B: Backend> {
    bounds: PlanBounds,
    work: Work<B>,
    features: Option<FeatureRows<B>>,
    embedded: B::Rows,
    joined: B::Rows,
    seeds: B::Rows,
    last: B::Rows,
    gathered: B::Rows,
    hidden: B::Rows,
    logits: B::Rows,
}

impl<B: Backend> HeadScratch<B> {
    /// The logits of the last pass, one row per output of its plan.
    pub fn logits(&self) -> &B::Rows {
        &self.logits
    }

    /// The hidden states that extends have left, as expanding goes on from them.
    pub fn seeds(&self) -> &B::Rows {
        &self.seeds
    }

    /// The hidden states of all rows of the last expand, as expanding goes on from them.
    pub fn last(&self) -> &B::Rows {
        &self.last
    }
}

impl<B: Backend> Eagle3Head<B> {
    /// Puts a head on a backend, for the contexts of `target`, whose tables it uses where it has
    /// none of its own.
    pub fn load_for(
        backend: &B,
        checkpoint: &HeadCheckpoint,
        format: WeightFormat,
        target: &Decoder<B>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        let tables = (target.embedding(), Some(target.lm_head()));
        Self::load_beside(backend, checkpoint, format, target.positions(), tables, progress)
    }

    /// Puts a head on a backend, for positions up to `positions`. The embedding table is that of
    /// the target, unless the head brings its own; the language-model head must be its own.
    pub fn load(
        backend: &B,
        checkpoint: &HeadCheckpoint,
        format: WeightFormat,
        positions: usize,
        embedding: Arc<B::Table>,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        Self::load_beside(backend, checkpoint, format, positions, (embedding, None), progress)
    }

    fn load_beside(
        backend: &B,
        checkpoint: &HeadCheckpoint,
        format: WeightFormat,
        positions: usize,
        (embedding, targets_lm_head): (Arc<B::Table>, Option<LmHead<B>>),
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        check_positions(positions)?;
        let spec = checkpoint.spec().clone();
        let (source, bytes) = (checkpoint.tensors(), checkpoint.tensor_bytes());
        let mut loading = Loading::begin(backend, source, format, bytes, progress);
        let embedding = if spec.own_embedding {
            Arc::new(backend.table(&loading.tensor(&spec.embedding())?)?)
        } else {
            embedding
        };
        let features = Features::load(&mut loading, &spec)?;
        let hidden_norm = loading.norm(&spec.hidden_norm(), &spec.layer)?;
        let layer = |(layout, layer): (&LayerLayout, &LayerSpec)| -> Result<_> {
            let norm = loading.norm(&layout.attention_norm, &spec.layer)?;
            Ok(HeadLayer { norm, block: loading.block(layout, &spec.layer, layer)? })
        };
        let layouts = spec.layer_layouts();
        let layers = layouts.iter().zip(&spec.layer.layers).map(layer).collect::<Result<_>>()?;
        let norm = loading.norm(&spec.norm(), &spec.layer)?;
        let vocabulary = checkpoint.vocabulary.as_ref();
        let lm_head = if spec.own_lm_head {
            let mut stored = loading.tensor(&spec.lm_head())?;
            if let Some(order) = vocabulary.and_then(|v| v.order.as_deref()) {
                stored = reordered(&stored, order)?;
            }
            LmHead::whole(Arc::new(backend.pack(&[stored], format)?), spec.draft_vocab_size)
        } else {
            let name = spec.lm_head().name;
            let missing = "is missing, and the target's is not at hand";
            targets_lm_head
                .ok_or_else(|| Error::tensor(checkpoint.tensors().origin(), &name, missing))?
        };
        let attention = spec.layer.first_attention();
        let rope = backend.rope(&attention.rope.table(attention.heads.head_dim, positions))?;
        Ok(Self {
            boundaries: checkpoint.boundaries().to_vec(),
            ids: vocabulary.map(|v| v.ids.clone()),
            spec,
            positions,
            embedding,
            rope,
            features,
            hidden_norm,
            layers,
            norm,
            lm_head,
        })
    }

    /// What the head is.
    pub fn spec(&self) -> &Eagle3Spec {
        &self.spec
    }

    /// How many positions a context may have.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The boundaries of the target's layers that must be captured for [`RecurrentHead::extend`];
    /// none where it takes the stream after the target's final norm.
    pub fn boundaries(&self) -> &[usize] {
        &self.boundaries
    }

    /// The layers, over the hidden states that stand in the residual stream.
    fn run_layers(
        &self,
        backend: &B,
        rows: usize,
        kv: &mut B::Kv,
        s: &mut HeadScratch<B>,
    ) -> Result<()> {
        let (epsilon, width) = (self.spec.layer.norm.epsilon, self.spec.layer.hidden_size);
        let pass = Pass { backend, epsilon, rows };
        for (number, HeadLayer { norm, block }) in self.layers.iter().enumerate() {
            let input = if number == 0 {
                backend.embed(&self.embedding, 1.0, &s.work.plan, &mut s.embedded)?;
                backend.rms_norm_columns(&s.embedded, norm, epsilon, rows, 0, &mut s.joined)?;
                let (stream, norm) = (&s.work.residual, &self.hidden_norm);
                backend.rms_norm_columns(stream, norm, epsilon, rows, width, &mut s.joined)?;
                if self.spec.norm_before_residual {
                    backend.take_columns(&s.joined, rows, width, &mut s.work.residual)?;
                }
                Input::Joined(&s.joined)
            } else {
                Input::Normed(norm)
            };
            block.attend(&pass, &self.rope, input, kv, number, &mut s.work)?;
            block.feed_forward(&pass, &mut s.work, None)?;
        }
        Ok(())
    }

    /// What the language-model head reads: `stream` after the head's norm.
    fn states<'a>(&'a self, stream: &'a B::Rows, room: &'a mut B::Rows) -> Normed<'a, B> {
        let epsilon = self.spec.layer.norm.epsilon;
        Normed { input: stream, weight: &self.norm, epsilon, room }
    }
}

impl<B: Backend> RecurrentHead<B> for Eagle3Head<B> {
    type Scratch = HeadScratch<B>;

    fn draft_ids(&self) -> Option<DraftIds<'_>> {
        let vocabulary = self.spec.layer.vocab_size;
        self.ids.as_deref().map(|ids| DraftIds { ids, vocabulary })
    }

    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape> {
        self.spec.layer.kv_shapes(slots, dtype)
    }

    fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<HeadScratch<B>> {
        let PlanBounds { rows, outputs, .. } = bounds;
        let hidden = self.spec.layer.hidden_size;
        Ok(HeadScratch {
            bounds,
            work: Work::new(backend, &self.spec.layer, bounds)?,
            features: self.features.as_ref().map(|f| f.rows(backend, rows)).transpose()?,
            embedded: backend.rows(rows, hidden)?,
            joined: backend.rows(rows, 2 * hidden)?,
            seeds: backend.rows(outputs, hidden)?,
            last: backend.rows(rows, hidden)?,
            gathered: backend.rows(outputs, hidden)?,
            hidden: backend.rows(outputs, hidden)?,
            logits: backend.logits(outputs, self.spec.draft_vocab_size)?,
        })
    }

    fn plan_mut(scratch: &mut HeadScratch<B>) -> &mut B::Plan {
        &mut scratch.work.plan
    }

    fn logits(scratch: &HeadScratch<B>) -> &B::Rows {
        scratch.logits()
    }

    fn seeds(scratch: &HeadScratch<B>) -> Option<&B::Rows> {
        Some(&scratch.seeds)
    }

    fn seeds_mut(scratch: &mut HeadScratch<B>) -> Option<&mut B::Rows> {
        Some(&mut scratch.seeds)
    }

    fn check(&self, plan: &ForwardPlan, scratch: &HeadScratch<B>) -> Result<()> {
        check_plan(plan, scratch.bounds, self.spec.layer.vocab_size, self.positions)?;
        check_sources(plan)
    }

    fn extend_placed(
        &self,
        backend: &B,
        hidden: Option<&B::Rows>,
        kv: &mut [B::Kv],
        s: &mut HeadScratch<B>,
    ) -> Result<()> {
        let hidden = required(hidden)?;
        let Extent { rows, .. } = backend.extent(&s.work.plan);
        if rows == 0 {
            return Ok(());
        }
        match (&self.features, &mut s.features) {
            (Some(features), Some(given)) => {
                backend.gather_sources(hidden, &s.work.plan, &mut given.given)?;
                features.join(backend, rows, given, &mut s.work.residual)?;
            }
            _ => backend.gather_sources(hidden, &s.work.plan, &mut s.work.residual)?,
        }
        self.run_layers(backend, rows, &mut kv[0], s)?;
        let seeds = backend.gather_outputs(&s.work.residual, &s.work.plan, 0, &mut s.gathered)?;
        let states = self.states(&s.gathered, &mut s.hidden);
        let left = if self.spec.norm_output {
            let states = states.rows(backend, seeds)?;
            self.lm_head.read_out(backend, states, seeds, &mut s.logits)?;
            &s.hidden
        } else {
            self.lm_head.read_out_normed(backend, states, seeds, &mut s.logits)?;
            &s.gathered
        };
        Ok(backend.scatter_outputs(left, &s.work.plan, &mut s.seeds)?)
    }

    fn expand_placed(
        &self,
        backend: &B,
        from: Hidden,
        kv: &mut [B::Kv],
        s: &mut HeadScratch<B>,
    ) -> Result<()> {
        let Extent { rows, .. } = backend.extent(&s.work.plan);
        if rows == 0 {
            return Ok(());
        }
        let hidden = if from == Hidden::Seeds { &s.seeds } else { &s.last };
        backend.gather_sources(hidden, &s.work.plan, &mut s.work.residual)?;
        self.run_layers(backend, rows, &mut kv[0], s)?;
        let (plan, residual) = (&s.work.plan, &s.work.residual);
        if self.spec.norm_output {
            self.states(residual, &mut s.last).rows(backend, rows)?;
            let outputs = backend.gather_outputs(&s.last, plan, 0, &mut s.hidden)?;
            self.lm_head.read_out(backend, &s.hidden, outputs, &mut s.logits)
        } else {
            backend.copy_columns(residual, rows, 0, &mut s.last)?;
            let outputs = backend.gather_outputs(residual, plan, 0, &mut s.gathered)?;
            let states = self.states(&s.gathered, &mut s.hidden);
            self.lm_head.read_out_normed(backend, states, outputs, &mut s.logits)
        }
    }
}

/// The rows of a matrix in another order.
fn reordered(tensor: &HostTensor, order: &[usize]) -> Result<HostTensor> {
    let (_, columns) = tensor.matrix()?;
    let stride = columns * tensor.dtype().size();
    let mut bytes = vec![0; order.len() * stride];
    for (bytes, &row) in bytes.chunks_exact_mut(stride.max(1)).zip(order) {
        tensor.read_bytes(row * columns, bytes);
    }
    let shape = tensor.shape().to_vec();
    Ok(HostTensor::new(tensor.name(), tensor.dtype(), shape, bytes.into())?)
}
