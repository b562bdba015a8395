//! EAGLE-3: a head that takes hidden states of the target and predicts the token after the next.

use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape, PlanBounds};
use aquila_model::{Eagle3Head, Error, HeadScratch, Hidden, Result};

use crate::{Declaration, DraftGroup, Drafter, HiddenStates, TreeRows};

/// An EAGLE-3 head that drafts.
pub struct Eagle3<B: Backend> {
    declaration: Declaration,
    head: Eagle3Head<B>,
    scratch: HeadScratch<B>,
}

impl<B: Backend> Eagle3<B> {
    /// Drafts with `head`, in passes up to `bounds`.
    pub fn new(backend: &B, head: Eagle3Head<B>, bounds: PlanBounds) -> Result<Self> {
        let declaration = Declaration {
            name: "EAGLE3",
            hidden: HiddenStates::Layers(head.capture_layers().to_vec()),
            groups: vec![DraftGroup { lookahead: 1, tree: TreeRows::EveryLevel }],
        };
        let scratch = head.scratch(backend, bounds)?;
        Ok(Self { declaration, head, scratch })
    }
}

impl<B: Backend> Drafter<B> for Eagle3<B> {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        self.head.kv_shape(slots, dtype)
    }

    fn ids(&self) -> Option<DraftIds<'_>> {
        self.head.draft_ids()
    }

    fn extend(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        hidden: Option<&B::Rows>,
        kv: &mut B::Kv,
    ) -> Result<()> {
        let missing = || Error::Plan("an EAGLE-3 head without the target's hidden states".into());
        let hidden = hidden.ok_or_else(missing)?;
        self.head.extend(backend, plan, hidden, kv, &mut self.scratch)
    }

    fn expand(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        first: bool,
        kv: &mut B::Kv,
    ) -> Result<()> {
        let from = if first { Hidden::Seeds } else { Hidden::Last };
        self.head.expand(backend, plan, from, kv, &mut self.scratch)
    }

    fn logits(&self) -> &B::Rows {
        self.scratch.logits()
    }
}
