//! What every model that drafts recurrently does: it extends over tokens that are certain, and
//! expands its own continuations level by level.

use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape, PlanBounds};

use crate::{Decoder, Error, Result, Scratch};

/// Whose hidden states the rows of [`RecurrentHead::expand`] go on from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Hidden {
    /// The outputs of earlier extends, where their plans' destinations said.
    Seeds,
    /// All rows of the last expand.
    Last,
}

/// A model or head that drafts recurrently. Passes run the plan that stands in their scratch.
pub trait RecurrentHead<B: Backend>: Send {
    /// The buffers that passes work in, and what they leave for each other.
    type Scratch: Send;

    /// Which tokens of the target the columns of the logits are; none where they are all, in order.
    fn draft_ids(&self) -> Option<DraftIds<'_>>;

    /// The stores of keys and values that it needs for `slots` tokens, one for each KV group.
    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape>;

    /// Room for the keys and values of `slots` tokens.
    fn kv(&self, backend: &B, slots: usize, dtype: KvDtype) -> Result<Vec<B::Kv>> {
        let shapes = self.kv_shapes(slots, dtype);
        shapes.into_iter().map(|shape| Ok(backend.kv(shape)?)).collect()
    }

    /// Buffers for passes up to `bounds`, extending and expanding alike.
    fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<Self::Scratch>;

    /// Where the plan of the next pass is placed.
    fn plan_mut(scratch: &mut Self::Scratch) -> &mut B::Plan;

    /// The logits of the last pass, one row per output of its plan.
    fn logits(scratch: &Self::Scratch) -> &B::Rows;

    /// The hidden states that expanding begins with, where extends leave any.
    fn seeds(scratch: &Self::Scratch) -> Option<&B::Rows>;

    /// The hidden states that expanding begins with, to be replaced.
    fn seeds_mut(scratch: &mut Self::Scratch) -> Option<&mut B::Rows>;

    /// Refuses a plan that would read or write out of bounds.
    fn check(&self, plan: &ForwardPlan, scratch: &Self::Scratch) -> Result<()>;

    /// Runs rows of tokens that are certain; a head's row r takes the target's hidden state
    /// `hidden[sources[r]]`. Leaves the logits of the plan's outputs, and their hidden states as
    /// seeds for expanding, at the plan's destinations.
    fn extend_placed(
        &self,
        backend: &B,
        hidden: Option<&B::Rows>,
        kv: &mut [B::Kv],
        scratch: &mut Self::Scratch,
    ) -> Result<()>;

    /// Runs rows that take the head's own hidden states: row r reads row `sources[r]` of `from`.
    /// Leaves the logits of the plan's outputs, and the hidden states of all rows for the next
    /// expand.
    fn expand_placed(
        &self,
        backend: &B,
        from: Hidden,
        kv: &mut [B::Kv],
        scratch: &mut Self::Scratch,
    ) -> Result<()>;

    /// [`RecurrentHead::extend_placed`] of a plan of the host's.
    fn extend(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        hidden: Option<&B::Rows>,
        kv: &mut [B::Kv],
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        self.check(plan, scratch)?;
        backend.place(plan, Self::plan_mut(scratch))?;
        self.extend_placed(backend, hidden, kv, scratch)
    }

    /// [`RecurrentHead::expand_placed`] of a plan of the host's.
    fn expand(
        &self,
        backend: &B,
        plan: &ForwardPlan,
        from: Hidden,
        kv: &mut [B::Kv],
        scratch: &mut Self::Scratch,
    ) -> Result<()> {
        self.check(plan, scratch)?;
        backend.place(plan, Self::plan_mut(scratch))?;
        self.expand_placed(backend, from, kv, scratch)
    }
}

/// The target's hidden states, for a head that cannot do without.
pub(super) fn required<Rows>(hidden: Option<&Rows>) -> Result<&Rows> {
    hidden.ok_or_else(|| Error::Plan("a head without the target's hidden states".into()))
}

/// Refuses a head's plan whose rows do not say which hidden state each takes.
pub(super) fn check_sources(plan: &ForwardPlan) -> Result<()> {
    let (rows, sources) = (plan.rows(), plan.sources.len());
    if sources != rows {
        return Err(Error::Plan(format!("{sources} sources for {rows} rows of a head")));
    }
    Ok(())
}

/// An ordinary language model drafts without hidden states.
impl<B: Backend> RecurrentHead<B> for Decoder<B> {
    type Scratch = Scratch<B>;

    fn draft_ids(&self) -> Option<DraftIds<'_>> {
        None
    }

    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape> {
        self.spec().kv_shapes(slots, dtype)
    }

    fn scratch(&self, backend: &B, bounds: PlanBounds) -> Result<Scratch<B>> {
        Decoder::scratch(self, backend, bounds)
    }

    fn plan_mut(scratch: &mut Scratch<B>) -> &mut B::Plan {
        scratch.plan_mut()
    }

    fn logits(scratch: &Scratch<B>) -> &B::Rows {
        scratch.logits()
    }

    fn seeds(_: &Scratch<B>) -> Option<&B::Rows> {
        None
    }

    fn seeds_mut(_: &mut Scratch<B>) -> Option<&mut B::Rows> {
        None
    }

    fn check(&self, plan: &ForwardPlan, scratch: &Scratch<B>) -> Result<()> {
        self.check_plan(plan, scratch.bounds())
    }

    fn extend_placed(
        &self,
        backend: &B,
        _: Option<&B::Rows>,
        kv: &mut [B::Kv],
        scratch: &mut Scratch<B>,
    ) -> Result<()> {
        self.forward_unheard(backend, kv, scratch, &mut [])
    }

    fn expand_placed(
        &self,
        backend: &B,
        _: Hidden,
        kv: &mut [B::Kv],
        scratch: &mut Scratch<B>,
    ) -> Result<()> {
        self.forward_unheard(backend, kv, scratch, &mut [])
    }
}
