//! The forward pass of a decoder: rows of tokens in, logits out.
//!
//! The invariant: nothing here looks at more than one row at a time except attention, which the
//! backend does, so a row's logits depend on that row and on what it sees alone.

use std::sync::Arc;

use aquila_compute::round::Extent;
use aquila_compute::{
    Accumulate, Backend, ForwardPlan, KvDtype, KvShape, PlanBounds, WeightFormat,
};

use crate::block::{Block, Pass, Work, check_plan};
use crate::capture::Capture;
use crate::loading::{Loading, Progress, check_positions};
use crate::{Checkpoint, Error, LmHead, ModelSpec, Result};

/// A model on a backend.
pub struct Decoder<B: Backend> {
    spec: ModelSpec,
    positions: usize,
    embedding: Arc<B::Table>,
    rope: B::Rope,
    layers: Vec<Layer<B>>,
    final_norm: B::Vector,
    head: Arc<B::Weight>,
}

struct Layer<B: Backend> {
    input_norm: B::Vector,
    block: Block<B>,
}

/// The buffers that a forward pass works in; made once, for the largest pass.
pub struct Scratch<B: Backend> {
    bounds: PlanBounds,
    work: Work<B>,
    normed: B::Rows,
    gathered: B::Rows,
    hidden: B::Rows,
    logits: B::Rows,
}

impl<B: Backend> Scratch<B> {
    /// The logits of the last pass, one row per output of its plan, in order.
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
        let mut loading = Loading {
            backend,
            source: checkpoint.tensors(),
            format,
            done_bytes: 0,
            total_bytes: checkpoint.tensor_bytes(),
            progress,
        };
        let table = loading.tensor(&spec.embedding())?;
        let embedding = Arc::new(backend.table(&table)?);
        let layers = (0..spec.layers)
            .map(|index| {
                let layout = spec.layer(index);
                let input_norm = loading.vector(std::slice::from_ref(&layout.input_norm))?;
                Ok(Layer { input_norm, block: loading.block(&layout)? })
            })
            .collect::<Result<Vec<_>>>()?;
        let final_norm = loading.vector(&[spec.final_norm()])?;
        let head = Arc::new(if spec.tied_embeddings {
            backend.pack(&[table], format)?
        } else {
            loading.weight(&[spec.head()])?
        });
        let rope = backend.rope(&spec.rope.table(spec.heads.head_dim, positions))?;
        Ok(Self { spec, positions, embedding, rope, layers, final_norm, head })
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

    /// The store of keys and values that the model needs for `slots` tokens.
    pub fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        self.spec.kv_shape(slots, dtype)
    }

    /// Buffers for passes up to `bounds`.
    pub fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<Scratch<B>> {
        let PlanBounds { rows, outputs, .. } = bounds;
        let spec = &self.spec;
        Ok(Scratch {
            bounds,
            work: Work::new(backend, spec, bounds)?,
            normed: backend.rows(rows, spec.hidden_size)?,
            gathered: backend.rows(outputs, spec.hidden_size)?,
            hidden: backend.rows(outputs, spec.hidden_size)?,
            logits: backend.rows(outputs, spec.vocab_size)?,
        })
    }

    /// Refuses a plan that would read or write out of bounds.
    pub(crate) fn check_plan(&self, plan: &ForwardPlan, bounds: PlanBounds) -> Result<()> {
        check_plan(plan, bounds, self.spec.vocab_size, self.positions)
    }

    /// Runs a plan: writes the keys and values of its rows, and leaves the logits of its outputs
    /// in `scratch` and, where asked for, hidden states of all rows in `capture`. A plan without rows
    /// does nothing.
    pub fn forward(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        kv: &mut B::Kv,
        scratch: &mut Scratch<B>,
        capture: Option<&mut Capture<B>>,
    ) -> Result<()> {
        self.check_plan(plan, scratch.bounds)?;
        backend.place(plan, &mut scratch.work.plan)?;
        self.forward_placed(backend, kv, scratch, capture)
    }

    /// The same for the plan that stands in `scratch`.
    pub fn forward_placed(
        &self,
        backend: &B,
        kv: &mut B::Kv,
        scratch: &mut Scratch<B>,
        mut capture: Option<&mut Capture<B>>,
    ) -> Result<()> {
        let Extent { rows, .. } = backend.extent(&scratch.work.plan);
        if let Some(capacity) = capture.as_ref().map(|c| c.capacity()).filter(|&c| rows > c) {
            return Err(Error::Plan(format!("{rows} rows, and {capacity} can be captured")));
        }
        if rows == 0 {
            return Ok(());
        }
        let (s, heads, epsilon) = (scratch, self.spec.heads, self.spec.norm_epsilon);
        let pass = Pass { backend, rope: &self.rope, heads, epsilon, rows };
        backend.embed(&self.embedding, 1.0, &s.work.plan, &mut s.work.residual)?;
        if let Some(capture) = capture.as_deref_mut() {
            capture.take(backend, 0, &s.work.residual, rows)?;
        }
        for (index, Layer { input_norm, block }) in self.layers.iter().enumerate() {
            backend.rms_norm(&s.work.residual, input_norm, epsilon, rows, &mut s.normed)?;
            block.attend(&pass, &s.normed, kv, index, &mut s.work)?;
            block.feed_forward(&pass, &mut s.normed, &mut s.work)?;
            if let Some(capture) = capture.as_deref_mut() {
                capture.take(backend, index + 1, &s.work.residual, rows)?;
            }
        }
        let outputs = match capture.and_then(Capture::final_rows) {
            // A norm looks at one row, so the head may read rows that were normed with all others.
            Some(all) => {
                backend.rms_norm(&s.work.residual, &self.final_norm, epsilon, rows, all)?;
                backend.gather_outputs(all, &s.work.plan, &mut s.hidden)?
            }
            None => {
                let residual = &s.work.residual;
                let outputs = backend.gather_outputs(residual, &s.work.plan, &mut s.gathered)?;
                if outputs > 0 {
                    let norm = &self.final_norm;
                    backend.rms_norm(&s.gathered, norm, epsilon, outputs, &mut s.hidden)?;
                }
                outputs
            }
        };
        if outputs > 0 {
            backend.project(
                &self.head,
                None,
                &s.hidden,
                outputs,
                Accumulate::Set,
                &mut s.logits,
            )?;
        }
        Ok(())
    }
}
