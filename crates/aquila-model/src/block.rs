//! A decoder layer after the norm of its input: what models and draft heads have in common.
//!
//! The invariant: nothing here looks at more than one row at a time except attention, which the
//! backend does.

use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, ForwardPlan, HeadShape, PlanBounds,
};

use crate::{Error, ModelSpec, Result};

/// A projection and its bias, if it has one.
pub(crate) struct Linear<B: Backend> {
    pub weight: B::Weight,
    pub bias: Option<B::Vector>,
}

/// Attention and feed-forward part of one layer.
pub(crate) struct Block<B: Backend> {
    pub qkv: Linear<B>,
    pub qk_norms: Option<[B::Vector; 2]>,
    pub o: Linear<B>,
    pub post_norm: B::Vector,
    pub gate_up: Linear<B>,
    pub down: Linear<B>,
}

/// What all layers of one pass share.
pub(crate) struct Pass<'a, B: Backend> {
    pub backend: &'a B,
    pub rope: &'a B::Rope,
    pub heads: HeadShape,
    pub epsilon: f32,
    pub rows: usize,
}

/// The plan of a pass, its residual stream, and the buffers that every layer uses anew.
pub(crate) struct Work<B: Backend> {
    pub plan: B::Plan,
    pub residual: B::Rows,
    qkv: B::Rows,
    attended: B::Rows,
    gate_up: B::Rows,
    activated: B::Rows,
}

impl<B: Backend> Work<B> {
    /// Room for layers of `spec` in passes up to `bounds`.
    pub fn new(backend: &B, spec: &ModelSpec, bounds: PlanBounds) -> Result<Self> {
        let rows = bounds.rows;
        Ok(Self {
            plan: backend.plan(bounds)?,
            residual: backend.rows(rows, spec.hidden_size)?,
            qkv: backend.rows(rows, spec.heads.qkv_width())?,
            attended: backend.rows(rows, spec.heads.q_width())?,
            gate_up: backend.rows(rows, 2 * spec.intermediate_size)?,
            activated: backend.rows(rows, spec.intermediate_size)?,
        })
    }
}

impl<B: Backend> Block<B> {
    /// Adds to the residual stream what attention makes of `input`, the normed stream.
    pub fn attend(
        &self,
        pass: &Pass<'_, B>,
        input: &B::Rows,
        kv: &mut B::Kv,
        layer: usize,
        w: &mut Work<B>,
    ) -> Result<()> {
        let &Pass { backend, rope, heads, epsilon, rows } = pass;
        let scale = 1.0 / (heads.head_dim as f32).sqrt();
        let norms = self.qk_norms.as_ref().map(|[q, k]| (q, k, epsilon));
        self.qkv.project(backend, input, rows, Accumulate::Set, &mut w.qkv)?;
        backend.write_kv(&mut w.qkv, heads, norms, rope, &w.plan, kv, layer)?;
        let params = AttentionParams { heads, scale, window: None };
        backend.attend(&w.qkv, params, &w.plan, kv, layer, &mut w.attended)?;
        self.o.project(backend, &w.attended, rows, Accumulate::Add, &mut w.residual)
    }

    /// Adds to the residual stream what the feed-forward part makes of it; leaves in `normed` what
    /// that part read.
    pub fn feed_forward(
        &self,
        pass: &Pass<'_, B>,
        normed: &mut B::Rows,
        w: &mut Work<B>,
    ) -> Result<()> {
        let &Pass { backend, epsilon, rows, .. } = pass;
        backend.rms_norm(&w.residual, &self.post_norm, epsilon, rows, normed)?;
        let Linear { weight, bias } = &self.gate_up;
        let (both, out) = (&mut w.gate_up, &mut w.activated);
        let bias = bias.as_ref();
        backend.project_gated(weight, bias, Activation::Silu, normed, rows, both, out)?;
        self.down.project(backend, &w.activated, rows, Accumulate::Add, &mut w.residual)
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
