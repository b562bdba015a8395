//! The forward pass of a decoder: rows of tokens in, logits out.
//!
//! The invariant: nothing here looks at more than one row at a time except attention, which the
//! backend does, so a row's logits depend on that row and on what it sees alone.

use std::sync::Arc;

use aquila_compute::round::Extent;
use aquila_compute::{Accumulate, Backend, ForwardPlan, KvDtype, PlanBounds, WeightFormat};

use crate::block::{Block, Input, Pass, Work, check_plan};
use crate::capture::Capture;
use crate::layer_spec::{AttentionSpec, Mixer};
use crate::loading::{Loading, Progress, check_positions};
use crate::memory::KvGroup;
use crate::{Checkpoint, Error, LmHead, ModelSpec, Result};

/// A model on a backend.
pub struct Decoder<B: Backend> {
    spec: ModelSpec,
    positions: usize,
    embedding: Arc<B::Table>,
    /// The rotary table of each KV group.
    ropes: Vec<B::Rope>,
    layers: Vec<Layer<B>>,
    final_norm: B::Vector,
    head: Arc<B::Weight>,
}

/// Hears that a pass has written the keys and values of a layer: the store, its KV group, and which
/// layer of it. Later layers have not run yet.
pub type LayerWritten<'a, B> = dyn FnMut(&<B as Backend>::Kv, usize, usize) -> Result<()> + 'a;

/// Hears of logits, those of outputs from a number on, before the next ones take their place.
pub type LogitsTold<'a, B> = dyn FnMut(&<B as Backend>::Rows, usize) -> Result<()> + 'a;

struct Layer<B: Backend> {
    norm: B::Vector,
    block: Block<B>,
    /// Its KV group, and which layer of it this is.
    group: usize,
    index: usize,
}

/// The buffers that a forward pass works in; made once, for the largest pass.
pub struct Scratch<B: Backend> {
    bounds: PlanBounds,
    work: Work<B>,
    gathered: B::Rows,
    hidden: B::Rows,
    /// As many rows as come at a time.
    logits: B::Rows,
    pieces: usize,
}

impl<B: Backend> Scratch<B> {
    /// The logits of the last pass, one row per output of its plan, in order; of its last piece where
    /// they come in pieces.
    pub fn logits(&self) -> &B::Rows {
        &self.logits
    }

    /// Where the plan of the next pass is placed.
    pub fn plan_mut(&mut self) -> &mut B::Plan {
        &mut self.work.plan
    }

    /// What the head read in the last pass: normed hidden states, in the order of the logits.
    pub fn hidden(&self) -> &B::Rows {
        &self.hidden
    }

    /// The largest plan that fits.
    pub fn bounds(&self) -> PlanBounds {
        self.bounds
    }
}

impl<B: Backend> Decoder<B> {
    /// Puts a checkpoint on a backend, for contexts of up to `positions` tokens.
    pub fn load(
        backend: &B,
        checkpoint: &Checkpoint,
        format: WeightFormat,
        positions: usize,
        progress: &mut dyn FnMut(Progress),
    ) -> Result<Self> {
        check_positions(positions)?;
        let spec = checkpoint.spec().clone();
        let (source, bytes) = (checkpoint.tensors(), checkpoint.tensor_bytes());
        let mut loading = Loading::begin(backend, source, format, bytes, progress);
        let table = loading.tensor(&spec.embedding())?;
        let embedding = Arc::new(backend.table(&table)?);
        let groups = spec.kv_groups();
        let mut counts = vec![0; groups.len()];
        let mut layers = Vec::with_capacity(spec.layers.len());
        for (number, layer) in spec.layers.iter().enumerate() {
            let layout = spec.layer(number);
            let kind = groups.iter().position(|group| group.mixer == layer.mixer);
            let group = kind.expect("every layer's mixer has a group");
            let index = counts[group];
            counts[group] += 1;
            let norm = loading.norm(&layout.attention_norm, &spec)?;
            let block = loading.block(&layout, &spec, layer)?;
            layers.push(Layer { norm, block, group, index });
        }
        let final_norm = loading.norm(&spec.final_norm(), &spec)?;
        let head = Arc::new(if spec.tied_embeddings {
            backend.pack(&[table], format)?
        } else {
            loading.weight(&[spec.head()])?
        });
        let ropes: Result<_> = groups.iter().map(|group| rope(backend, group, positions)).collect();
        Ok(Self { ropes: ropes?, spec, positions, embedding, layers, final_norm, head })
    }

    /// What the model is.
    pub fn spec(&self) -> &ModelSpec {
        &self.spec
    }

    /// How many positions a context may have.
    pub fn positions(&self) -> usize {
        self.positions
    }

    /// The embedding table, for heads that draft with it.
    pub fn embedding(&self) -> Arc<B::Table> {
        self.embedding.clone()
    }

    /// The language-model head, for heads that draft with it.
    pub fn lm_head(&self) -> LmHead<B> {
        LmHead::whole(self.head.clone(), self.spec.vocab_size)
    }

    /// Room for what the language-model head reads, the stream after the final norm, of all rows
    /// of passes up to `rows` rows.
    pub fn capture_final(&self, backend: &B, rows: usize) -> Result<Capture<B>> {
        Capture::of_final(backend, &self.spec, rows)
    }

    /// Room for the stream at these boundaries of layers, in passes up to `rows` rows: 0 is before
    /// the first layer, as many as there are layers behind the last.
    pub fn capture(&self, backend: &B, boundaries: &[usize], rows: usize) -> Result<Capture<B>> {
        Capture::new(backend, &self.spec, boundaries, rows)
    }

    /// Room for the experts that rows go to in every layer, in passes up to `rows` rows; refused
    /// where no layer has experts.
    pub fn capture_experts(&self, backend: &B, rows: usize) -> Result<Capture<B>> {
        Capture::of_experts(backend, &self.spec, rows)
    }

    /// Room for the keys and values of `slots` tokens: a store for each KV group.
    pub fn kv(&self, backend: &B, slots: usize, dtype: KvDtype) -> Result<Vec<B::Kv>> {
        let shapes = self.spec.kv_shapes(slots, dtype);
        shapes.into_iter().map(|shape| Ok(backend.kv(shape)?)).collect()
    }

    /// Buffers for passes up to `bounds`.
    pub fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<Scratch<B>> {
        self.scratch_in_pieces(backend, bounds, bounds.outputs)
    }

    /// The same, with the logits of `pieces` outputs at a time.
    pub fn scratch_in_pieces(
        &self,
        backend: &B,
        bounds: PlanBounds,
        pieces: usize,
    ) -> Result<Scratch<B>> {
        let spec = &self.spec;
        Ok(Scratch {
            bounds,
            work: Work::new(backend, spec, bounds)?,
            gathered: backend.rows(pieces, spec.hidden_size)?,
            hidden: backend.rows(pieces, spec.hidden_size)?,
            logits: backend.logits(pieces, spec.vocab_size)?,
            pieces,
        })
    }

    /// Refuses a plan that would read or write out of bounds.
    pub(crate) fn check_plan(&self, plan: &ForwardPlan, bounds: PlanBounds) -> Result<()> {
        check_plan(plan, bounds, self.spec.vocab_size, self.positions)
    }

    /// Runs a plan: writes the keys and values of its rows, and leaves the logits of its outputs
    /// in `scratch` and what `captures` take of all rows in them. A plan without rows does nothing.
    pub fn forward(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        kv: &mut [B::Kv],
        scratch: &mut Scratch<B>,
        captures: &mut [&mut Capture<B>],
    ) -> Result<()> {
        self.check_plan(plan, scratch.bounds)?;
        backend.place(plan, &mut scratch.work.plan)?;
        self.forward_unheard(backend, kv, scratch, captures)
    }

    /// The same for the plan that stands in `scratch`.
    pub(crate) fn forward_unheard(
        &self,
        backend: &B,
        kv: &mut [B::Kv],
        scratch: &mut Scratch<B>,
        captures: &mut [&mut Capture<B>],
    ) -> Result<()> {
        let (written, told) = (&mut |_: &_, _, _| Ok(()), &mut |_: &_, _| Ok(()));
        self.forward_placed(backend, kv, scratch, captures, written, told)
    }

    /// The same; `written` hears of each layer, `told` of each
    /// piece of the logits.
    pub fn forward_placed(
        &self,
        backend: &B,
        kv: &mut [B::Kv],
        scratch: &mut Scratch<B>,
        captures: &mut [&mut Capture<B>],
        written: &mut LayerWritten<'_, B>,
        told: &mut LogitsTold<'_, B>,
    ) -> Result<()> {
        let Extent { rows, outputs } = backend.extent(&scratch.work.plan);
        if let Some(capacity) = captures.iter().map(|c| c.capacity()).find(|&c| rows > c) {
            return Err(Error::Plan(format!("{rows} rows, and {capacity} can be captured")));
        }
        if rows == 0 {
            return Ok(());
        }
        let (s, epsilon) = (scratch, self.spec.norm.epsilon);
        let pass = Pass { backend, epsilon, rows };
        let scale = self.spec.embedding_scale;
        backend.embed(&self.embedding, scale, &s.work.plan, &mut s.work.residual)?;
        for capture in captures.iter_mut() {
            capture.take(backend, 0, &s.work.residual, rows)?;
        }
        for (number, Layer { norm, block, group, index }) in self.layers.iter().enumerate() {
            let (rope, kv) = (&self.ropes[*group], &mut kv[*group]);
            block.attend(&pass, rope, Input::Normed(norm), kv, *index, &mut s.work)?;
            written(kv, *group, *index)?;
            let routed = captures.iter_mut().find_map(|c| c.expert_columns(number));
            block.feed_forward(&pass, &mut s.work, routed)?;
            for capture in captures.iter_mut() {
                capture.take(backend, number + 1, &s.work.residual, rows)?;
            }
        }
        let (plan, norm) = (&s.work.plan, &self.final_norm);
        // A norm looks at one row, so the head may read rows that were normed with all others.
        let mut normed = captures.iter_mut().find_map(|c| c.final_rows());
        if let Some(normed) = &mut normed {
            backend.rms_norm(&s.work.residual, norm, epsilon, rows, normed)?;
        }
        for first in (0..outputs).step_by(s.pieces.max(1)) {
            let count = match &normed {
                Some(normed) => backend.gather_outputs(normed, plan, first, &mut s.hidden)?,
                None => {
                    let residual = &s.work.residual;
                    let count = backend.gather_outputs(residual, plan, first, &mut s.gathered)?;
                    backend.rms_norm(&s.gathered, norm, epsilon, count, &mut s.hidden)?;
                    count
                }
            };
            let logits = &mut s.logits;
            backend.project(&self.head, None, &s.hidden, count, Accumulate::Set, logits)?;
            if let Some(cap) = self.spec.logit_cap {
                backend.soft_cap(logits, count, cap)?;
            }
            told(logits, first)?;
        }
        Ok(())
    }
}

/// The rotary table of a KV group.
fn rope<B: Backend>(backend: &B, group: &KvGroup, positions: usize) -> Result<B::Rope> {
    let Mixer::Attention(AttentionSpec { rope, heads, .. }) = &group.mixer;
    Ok(backend.rope(&rope.table(heads.head_dim, positions))?)
}
