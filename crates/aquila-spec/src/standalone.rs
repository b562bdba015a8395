//! STANDALONE: an ordinary language model as the draft. It needs no hidden state anywhere, and
//! sees every token, the first included.

use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape, PlanBounds};
use aquila_model::{Decoder, Result, Scratch};

use crate::{Declaration, DraftGroup, Drafter, HiddenStates, TreeRows};

/// A model that drafts.
pub struct Standalone<B: Backend> {
    declaration: Declaration,
    decoder: Decoder<B>,
    scratch: Scratch<B>,
}

impl<B: Backend> Standalone<B> {
    /// Drafts with `decoder`, in passes up to `bounds`.
    pub fn new(backend: &B, decoder: Decoder<B>, bounds: PlanBounds) -> Result<Self> {
        let declaration = Declaration {
            name: "STANDALONE",
            hidden: HiddenStates::None,
            groups: vec![DraftGroup { lookahead: 0, tree: TreeRows::EveryLevel }],
        };
        let scratch = decoder.scratch(backend, bounds)?;
        Ok(Self { declaration, decoder, scratch })
    }
}

impl<B: Backend> Drafter<B> for Standalone<B> {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn kv_shape(&self, slots: usize, dtype: KvDtype) -> KvShape {
        self.decoder.kv_shape(slots, dtype)
    }

    fn ids(&self) -> Option<DraftIds<'_>> {
        None
    }

    fn extend(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        _hidden: Option<&B::Rows>,
        kv: &mut B::Kv,
    ) -> Result<()> {
        self.decoder.forward(backend, plan, kv, &mut self.scratch, None)
    }

    fn expand(
        &mut self,
        backend: &B,
        plan: &ForwardPlan,
        _first: bool,
        kv: &mut B::Kv,
    ) -> Result<()> {
        self.decoder.forward(backend, plan, kv, &mut self.scratch, None)
    }

    fn logits(&self) -> &B::Rows {
        self.scratch.logits()
    }
}
