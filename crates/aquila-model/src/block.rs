//! A decoder layer after the norm of its input: what models and draft heads have in common.
//!
//! The invariant: nothing here looks at more than one row at a time except attention, which the
//! backend does.

use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, ForwardPlan, HeadShape, Normed, PlanBounds,
};

use crate::layer_spec::LayerSpec;
use crate::memory::{FeedForwardRows, attention_rows, ffn_rows, norms_after};
use crate::{Error, ModelSpec, Result};

/// A projection and its bias, if it has one.
pub(crate) struct Linear<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Vector>,
}

/// Mixer and feed-forward part of one layer.
pub(crate) struct Block<B: Backend> {
    pub attention: AttentionParams,
    pub qkv: Linear<B>,
    pub qk_norms: Option<[B::Vector; 2]>,
    pub o: Linear<B>,
    pub attention_output_norm: Option<B::Vector>,
    pub ffn_norm: B::Vector,
    pub ffn: FeedForwardPart<B>,
    pub activation: Activation,
    pub ffn_output_norm: Option<B::Vector>,
    /// Which of the pass's buffers are this layer's.
    pub places: Places,
}

/// The weights of a feed-forward part.
pub(crate) enum FeedForwardPart<B: Backend> {
    Dense { gate_up: Linear<B>, down: Linear<B> },
    Experts { router: B::Weight, experts: B::Experts, normalized: bool },
}

/// What all layers of one pass share.
pub(crate) struct Pass<'a, B: Backend> {
    pub backend: &'a B,
    pub epsilon: f32,
    pub rows: usize,
}

/// The plan of a pass, its residual stream, and the buffers that layers use anew: one set for each
/// shape that layers have.
pub(crate) struct Work<B: Backend> {
    pub plan: B::Plan,
    pub residual: B::Rows,
    /// Room for the stream normed; no part reads what another left there.
    pub normed: B::Rows,
    attention: Vec<AttentionBuffers<B>>,
    ffn: Vec<FeedForwardBuffers<B>>,
    /// What a part made, and that normed, where layers norm it.
    outputs: Option<[B::Rows; 2]>,
}

struct AttentionBuffers<B: Backend> {
    qkv: B::Rows,
    attended: B::Rows,
}

enum FeedForwardBuffers<B: Backend> {
    Dense { gate_up: B::Rows, activated: B::Rows },
    Experts { logits: B::Rows, routing: B::Routing, gate_up: B::Rows, activated: B::Rows },
}

/// What attention reads.
pub(crate) enum Input<'a, B: Backend> {
    /// The residual stream, normed with this weight.
    Normed(&'a B::Vector),
    /// The residual stream as it is.
    Stream,
    /// What a layer joins beside the stream.
    Joined(&'a B::Rows),
}

/// Which buffers of [`Work`] a layer uses.
#[derive(Clone, Copy)]
pub(crate) struct Places {
    attention: usize,
    ffn: usize,
}

impl Places {
    /// Those of `layer`, a layer of `spec`.
    pub fn of(spec: &ModelSpec, layer: &LayerSpec) -> Self {
        let heads = layer.attention().heads;
        let ffn = FeedForwardRows::of(&layer.ffn);
        let found = "the buffers are made from the same list of layers";
        Self {
            attention: attention_rows(spec).iter().position(|h| *h == heads).expect(found),
            ffn: ffn_rows(spec).iter().position(|f| *f == ffn).expect(found),
        }
    }
}

impl<B: Backend> Work<B> {
    /// Room for layers of `spec` in passes up to `bounds`.
    pub fn new(backend: &B, spec: &ModelSpec, bounds: PlanBounds) -> Result<Self> {
        let rows = bounds.rows;
        let hidden = || backend.rows(rows, spec.hidden_size);
        let attention = |heads: &HeadShape| -> Result<_> {
            Ok(AttentionBuffers {
                qkv: backend.rows(rows, heads.qkv_width())?,
                attended: backend.rows(rows, heads.q_width())?,
            })
        };
        let ffn = |ffn: &FeedForwardRows| -> Result<_> {
            Ok(match *ffn {
                FeedForwardRows::Dense { width } => FeedForwardBuffers::Dense {
                    gate_up: backend.rows(rows, 2 * width)?,
                    activated: backend.rows(rows, width)?,
                },
                FeedForwardRows::Experts { experts, per_token, width } => {
                    FeedForwardBuffers::Experts {
                        logits: backend.rows(rows, experts)?,
                        routing: backend.routing(rows, per_token)?,
                        gate_up: backend.rows(rows * per_token, 2 * width)?,
                        activated: backend.rows(rows * per_token, width)?,
                    }
                }
            })
        };
        Ok(Self {
            plan: backend.plan(bounds)?,
            residual: hidden()?,
            normed: hidden()?,
            attention: attention_rows(spec).iter().map(attention).collect::<Result<_>>()?,
            ffn: ffn_rows(spec).iter().map(ffn).collect::<Result<_>>()?,
            outputs: norms_after(spec)
                .then(|| Ok::<_, Error>([hidden()?, hidden()?]))
                .transpose()?,
        })
    }
}

impl<B: Backend> Block<B> {
    /// Adds to the residual stream what attention makes of `input`.
    pub fn attend(
        &self,
        pass: &Pass<'_, B>,
        rope: &B::Rope,
        input: Input<'_, B>,
        kv: &mut B::Kv,
        layer: usize,
        w: &mut Work<B>,
    ) -> Result<()> {
        let &Pass { backend, epsilon, rows } = pass;
        let Work { plan, residual, normed: room, attention, outputs, .. } = w;
        let AttentionBuffers { qkv, attended } = &mut attention[self.places.attention];
        let norms = self.qk_norms.as_ref().map(|[q, k]| (q, k, epsilon));
        let Linear { weight, bias } = &self.qkv;
        let (bias, set) = (bias.as_ref(), Accumulate::Set);
        match input {
            Input::Normed(norm) => {
                let normed = Normed { input: residual, weight: norm, epsilon, room };
                backend.project_normed(weight, bias, normed, rows, set, qkv)?;
            }
            Input::Stream => backend.project(weight, bias, residual, rows, set, qkv)?,
            Input::Joined(input) => backend.project(weight, bias, input, rows, set, qkv)?,
        }
        backend.write_kv(qkv, self.attention.heads, norms, rope, plan, kv, layer)?;
        backend.attend(qkv, self.attention, plan, kv, layer, attended)?;
        pass.add(self.attention_output_norm.as_ref(), outputs, residual, |accumulate, out| {
            self.o.project(backend, attended, rows, accumulate, out)
        })
    }

    /// Adds to the residual stream what the feed-forward part makes of it; leaves in `routed`, if
    /// given, which experts rows went to, from a column on.
    pub fn feed_forward(
        &self,
        pass: &Pass<'_, B>,
        w: &mut Work<B>,
        routed: Option<(&mut B::Rows, usize)>,
    ) -> Result<()> {
        let &Pass { backend, epsilon, rows } = pass;
        let Work { residual, normed: room, ffn, outputs, .. } = w;
        let ffn_norm = &self.ffn_norm;
        let (norm, activation) = (self.ffn_output_norm.as_ref(), self.activation);
        match (&self.ffn, &mut ffn[self.places.ffn]) {
            (
                FeedForwardPart::Dense { gate_up: Linear { weight, bias }, down },
                FeedForwardBuffers::Dense { gate_up, activated },
            ) => {
                let bias = bias.as_ref();
                let normed = Normed { input: residual, weight: ffn_norm, epsilon, room };
                backend.project_gated_normed(
                    weight, bias, activation, normed, rows, gate_up, activated,
                )?;
                pass.add(norm, outputs, residual, |accumulate, out| {
                    down.project(backend, activated, rows, accumulate, out)
                })
            }
            (
                FeedForwardPart::Experts { router, experts, normalized },
                FeedForwardBuffers::Experts { logits, routing, gate_up, activated },
            ) => {
                // The router reads it, and the experts.
                backend.rms_norm(residual, ffn_norm, epsilon, rows, room)?;
                let normed = &*room;
                backend.project(router, None, normed, rows, Accumulate::Set, logits)?;
                backend.route(logits, rows, *normalized, routing)?;
                if let Some((out, column)) = routed {
                    backend.routed(routing, rows, column, out)?;
                }
                pass.add(norm, outputs, residual, |accumulate, out| {
                    Ok(backend.project_experts(
                        experts, activation, normed, rows, routing, gate_up, activated, accumulate,
                        out,
                    )?)
                })
            }
            _ => unreachable!("a layer's buffers are those of its own feed-forward part"),
        }
    }
}

impl<B: Backend> Pass<'_, B> {
    /// Adds to the stream what `make` makes: at once, or normed where there is a norm.
    fn add(
        &self,
        norm: Option<&B::Vector>,
        outputs: &mut Option<[B::Rows; 2]>,
        residual: &mut B::Rows,
        mut make: impl FnMut(Accumulate, &mut B::Rows) -> Result<()>,
    ) -> Result<()> {
        let (Some(norm), Some([made, normed])) = (norm, outputs) else {
            return make(Accumulate::Add, residual);
        };
        make(Accumulate::Set, made)?;
        self.backend.rms_norm(made, norm, self.epsilon, self.rows, normed)?;
        Ok(self.backend.add(normed, self.rows, residual)?)
    }
}

impl<B: Backend> Linear<B> {
    pub fn project(
        &self,
        backend: &B,
        input: &B::Rows,
        rows: usize,
        accumulate: Accumulate,
        out: &mut B::Rows,
    ) -> Result<()> {
        Ok(backend.project(&self.weight, self.bias.as_ref(), input, rows, accumulate, out)?)
    }
}

/// Refuses a plan that would read or write out of bounds; slots are the backend's to check.
pub(crate) fn check_plan(
    plan: &ForwardPlan,
    bounds: PlanBounds,
    vocabulary: usize,
    positions: usize,
) -> Result<()> {
    let refuse = |what: String| Err(Error::Plan(what));
    let rows = plan.rows();
    if [plan.positions.len(), plan.writes.len(), plan.spans.len()] != [rows; 3] {
        return refuse(format!("{rows} tokens, but other counts of positions, writes or spans"));
    }
    let reach = plan.changes.iter().map(|&(at, count)| at as usize + count as usize).max();
    let slots = reach.unwrap_or(0) + plan.tree_slots.len();
    if rows > bounds.rows || plan.outputs.len() > bounds.outputs || slots > bounds.slots {
        return refuse(format!(
            "{rows} rows, {} outputs and {slots} slots exceed {bounds:?}",
            plan.outputs.len()
        ));
    }
    if let Some(token) = plan.tokens.iter().find(|&&t| t as usize >= vocabulary) {
        return refuse(format!("token {token}, vocabulary {vocabulary}"));
    }
    if let Some(position) = plan.positions.iter().find(|&&p| p as usize >= positions) {
        return refuse(format!("position {position}, context {positions}"));
    }
    if let Some(output) = plan.outputs.iter().find(|&&o| o as usize >= rows) {
        return refuse(format!("output {output} of {rows} rows"));
    }
    if plan.changes.iter().map(|&(_, count)| count as usize).sum::<usize>() != plan.slots.len() {
        return refuse("changes of block tables that do not have the slots they say".into());
    }
    let outside = plan.spans.iter().find(|s| {
        s.is_empty()
            || s.start as usize + s.prefix as usize > bounds.slots
            || s.tree_start as usize + s.tail as usize > plan.tree_slots.len()
    });
    if let Some(span) = outside {
        return refuse(format!("{span:?} leaves the block tables"));
    }
    Ok(())
}
