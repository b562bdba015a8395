//! The forward pass of a decoder: rows of tokens in, logits out.
//!
//! The invariant: nothing here looks at more than one row at a time except attention, which the
//! backend does, so a row's logits depend on that row and on what it sees alone.

use aquila_compute::{
    Backend, ForwardPlan, HostTensor, KvDtype, KvShape, PlanBounds, Sink, WeightFormat,
};

use crate::layout::{Expected, LayerLayout, LinearLayout};
use crate::{Checkpoint, Error, ModelSpec, Result};

/// The longest context; its rotary table is made at load.
const LONGEST_CONTEXT: usize = 1 << 24;

/// How far loading has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Progress {
    /// Bytes of the checkpoint that are on the backend.
    pub done_bytes: u64,
    /// All of them.
    pub total_bytes: u64,
}

/// A model on a backend.
pub struct Decoder<B: Backend> {
    spec: ModelSpec,
    positions: usize,
    embedding: B::Table,
    rope: B::Rope,
    layers: Vec<Layer<B>>,
    final_norm: B::Vector,
    head: B::Weight,
}

struct Layer<B: Backend> {
    input_norm: B::Vector,
    qkv: Linear<B>,
    qk_norms: Option<[B::Vector; 2]>,
    o: Linear<B>,
    post_norm: B::Vector,
    gate_up: Linear<B>,
    down: Linear<B>,
}

struct Linear<B: Backend> {
    weight: B::Weight,
    bias: Option<B::Vector>,
}

/// The buffers that a forward pass works in; made once, for the largest pass.
pub struct Scratch<B: Backend> {
    bounds: PlanBounds,
    plan: B::Plan,
    residual: B::Rows,
    normed: B::Rows,
    qkv: B::Rows,
    attended: B::Rows,
    gate_up: B::Rows,
    activated: B::Rows,
    gathered: B::Rows,
    hidden: B::Rows,
    logits: B::Rows,
}

impl<B: Backend> Scratch<B> {
    /// The logits of the last pass, one row per output of its plan, in order.
    pub fn logits(&self) -> &B::Rows {
        &self.logits
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
        if !(1..=LONGEST_CONTEXT).contains(&positions) {
            let problem = format!("a context of {positions}; it may have 1 to {LONGEST_CONTEXT}");
            return Err(Error::Plan(problem));
        }
        let spec = checkpoint.spec().clone();
        let mut loading = Loading { backend, checkpoint, format, done: 0, progress };
        let table = loading.tensor(&spec.embedding())?;
        let embedding = backend.table(&table)?;
        let layers =
            (0..spec.layers).map(|i| loading.layer(spec.layer(i))).collect::<Result<Vec<_>>>()?;
        let final_norm = loading.vector(&[spec.final_norm()])?;
        let head = if spec.tied_embeddings {
            backend.pack(&[table], format)?
        } else {
            loading.weight(&[spec.head()])?
        };
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
            plan: backend.plan(bounds)?,
            residual: backend.rows(rows, spec.hidden_size)?,
            normed: backend.rows(rows, spec.hidden_size)?,
            qkv: backend.rows(rows, spec.heads.qkv_width())?,
            attended: backend.rows(rows, spec.heads.q_width())?,
            gate_up: backend.rows(rows, 2 * spec.intermediate_size)?,
            activated: backend.rows(rows, spec.intermediate_size)?,
            gathered: backend.rows(outputs, spec.hidden_size)?,
            hidden: backend.rows(outputs, spec.hidden_size)?,
            logits: backend.rows(outputs, spec.vocab_size)?,
        })
    }

    /// Runs a plan: writes the keys and values of its rows, and leaves the logits of its outputs
    /// in `scratch`. A plan without rows does nothing.
    pub fn forward(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        kv: &mut B::Kv,
        scratch: &mut Scratch<B>,
    ) -> Result<()> {
        self.check(plan, scratch.bounds)?;
        let rows = plan.rows();
        if rows == 0 {
            return Ok(());
        }
        let (s, epsilon) = (scratch, self.spec.norm_epsilon);
        backend.place(plan, &mut s.plan)?;
        backend.embed(&self.embedding, &s.plan, &mut s.residual)?;
        for (index, layer) in self.layers.iter().enumerate() {
            self.layer(backend, index, layer, rows, kv, s)?;
        }
        let outputs = backend.gather_outputs(&s.residual, &s.plan, &mut s.gathered)?;
        if outputs > 0 {
            backend.rms_norm(&s.gathered, &self.final_norm, epsilon, outputs, &mut s.hidden)?;
            backend.project(&self.head, None, &s.hidden, outputs, Sink::Set, &mut s.logits)?;
        }
        Ok(())
    }

    fn layer(
        &self,
        backend: &B,
        index: usize,
        layer: &Layer<B>,
        rows: usize,
        kv: &mut B::Kv,
        s: &mut Scratch<B>,
    ) -> Result<()> {
        let (heads, epsilon) = (self.spec.heads, self.spec.norm_epsilon);
        let scale = 1.0 / (heads.head_dim as f32).sqrt();
        let norms = layer.qk_norms.as_ref().map(|[q, k]| (q, k, epsilon));

        backend.rms_norm(&s.residual, &layer.input_norm, epsilon, rows, &mut s.normed)?;
        layer.qkv.project(backend, &s.normed, rows, Sink::Set, &mut s.qkv)?;
        backend.write_kv(&mut s.qkv, heads, norms, &self.rope, &s.plan, kv, index)?;
        backend.attend(&s.qkv, heads, scale, &s.plan, kv, index, &mut s.attended)?;
        layer.o.project(backend, &s.attended, rows, Sink::Add, &mut s.residual)?;

        backend.rms_norm(&s.residual, &layer.post_norm, epsilon, rows, &mut s.normed)?;
        layer.gate_up.project(backend, &s.normed, rows, Sink::Set, &mut s.gate_up)?;
        backend.swiglu(&s.gate_up, rows, &mut s.activated)?;
        layer.down.project(backend, &s.activated, rows, Sink::Add, &mut s.residual)
    }

    /// Refuses a plan that would read or write out of bounds; slots are the backend's to check.
    fn check(&self, plan: &ForwardPlan, bounds: PlanBounds) -> Result<()> {
        let refuse = |what: String| Err(Error::Plan(what));
        let rows = plan.rows();
        if [plan.positions.len(), plan.writes.len(), plan.sights.len()] != [rows; 3] {
            return refuse(format!(
                "{rows} tokens, but other counts of positions, writes or sights"
            ));
        }
        let slots = plan.slots.len() + plan.tails.len();
        if rows > bounds.rows || plan.outputs.len() > bounds.outputs || slots > bounds.slots {
            return refuse(format!(
                "{rows} rows, {} outputs and {slots} slots exceed {bounds:?}",
                plan.outputs.len()
            ));
        }
        if let Some(token) = plan.tokens.iter().find(|&&t| t as usize >= self.spec.vocab_size) {
            return refuse(format!("token {token}, vocabulary {}", self.spec.vocab_size));
        }
        if let Some(position) = plan.positions.iter().find(|&&p| p as usize >= self.positions) {
            return refuse(format!("position {position}, context {}", self.positions));
        }
        if let Some(output) = plan.outputs.iter().find(|&&o| o as usize >= rows) {
            return refuse(format!("output {output} of {rows} rows"));
        }
        let outside = plan.sights.iter().find(|s| {
            s.is_empty()
                || s.start as usize + s.prefix as usize > plan.slots.len()
                || s.tail_start as usize + s.tail as usize > plan.tails.len()
        });
        if let Some(sight) = outside {
            return refuse(format!("{sight:?} leaves the slot lists"));
        }
        Ok(())
    }
}

impl<B: Backend> Linear<B> {
    fn project(
        &self,
        backend: &B,
        input: &B::Rows,
        rows: usize,
        sink: Sink,
        out: &mut B::Rows,
    ) -> Result<()> {
        Ok(backend.project(&self.weight, self.bias.as_ref(), input, rows, sink, out)?)
    }
}

/// A load on its way.
struct Loading<'a, B: Backend> {
    backend: &'a B,
    checkpoint: &'a Checkpoint,
    format: WeightFormat,
    done: u64,
    progress: &'a mut dyn FnMut(Progress),
}

impl<B: Backend> Loading<'_, B> {
    /// A tensor, its shape as the checkpoint was checked for when it was opened.
    fn tensor(&mut self, expected: &Expected) -> Result<HostTensor> {
        let source = self.checkpoint.tensors();
        let tensor = source.get(&expected.name)?;
        self.done += tensor.bytes().len() as u64;
        let total_bytes = self.checkpoint.tensor_bytes();
        (self.progress)(Progress { done_bytes: self.done, total_bytes });
        Ok(tensor)
    }

    fn tensors(&mut self, expected: &[Expected]) -> Result<Vec<HostTensor>> {
        expected.iter().map(|e| self.tensor(e)).collect()
    }

    fn vector(&mut self, expected: &[Expected]) -> Result<B::Vector> {
        let parts = self.tensors(expected)?;
        Ok(self.backend.vector(&parts)?)
    }

    fn weight(&mut self, expected: &[Expected]) -> Result<B::Weight> {
        let parts = self.tensors(expected)?;
        Ok(self.backend.pack(&parts, self.format)?)
    }

    fn linear(&mut self, layout: LinearLayout) -> Result<Linear<B>> {
        let weight = self.weight(&layout.weights)?;
        let bias = match layout.biases.as_slice() {
            [] => None,
            biases => Some(self.vector(biases)?),
        };
        Ok(Linear { weight, bias })
    }

    fn layer(&mut self, layout: LayerLayout) -> Result<Layer<B>> {
        Ok(Layer {
            input_norm: self.vector(&[layout.input_norm])?,
            qkv: self.linear(layout.qkv)?,
            qk_norms: match layout.qk_norms {
                Some([q, k]) => Some([self.vector(&[q])?, self.vector(&[k])?]),
                None => None,
            },
            o: self.linear(layout.o)?,
            post_norm: self.vector(&[layout.post_norm])?,
            gate_up: self.linear(layout.gate_up)?,
            down: self.linear(layout.down)?,
        })
    }
}
