//! EAGLE-3: a head that takes hidden states of the target and predicts the token after the next.

use aquila_compute::{Backend, PlanBounds};
use aquila_model::{Decoder, Eagle3Head, HeadCheckpoint, ModelSpec, Needs, Result, memory};

use crate::registry::{Allowance, DraftFlag, DraftFor, Entry, LoadOn, Opened, Opening};
use crate::{
    Algorithm, Declaration, DraftGroup, HeadDrafter, HiddenStates, RecurrentDraft, TreeRows,
};

/// An EAGLE-3 head that drafts.
pub type Eagle3<B> = HeadDrafter<B, Eagle3Head<B>>;

impl<B: Backend> Eagle3<B> {
    /// Drafts with `head`, in passes up to `bounds`.
    pub fn new(backend: &B, head: Eagle3Head<B>, bounds: PlanBounds) -> Result<Self> {
        let hidden = match head.boundaries() {
            [] => HiddenStates::Final,
            boundaries => HiddenStates::Layers(boundaries.to_vec()),
        };
        let declaration = Declaration {
            name: "EAGLE3",
            hidden,
            groups: vec![DraftGroup { lookahead: 1, tree: TreeRows::EveryLevel }],
        };
        Self::with(backend, declaration, head, bounds)
    }
}

/// EAGLE-3 by name.
pub(crate) struct Eagle3Entry;

impl Entry for Eagle3Entry {
    fn name(&self) -> &'static str {
        "EAGLE3"
    }

    fn draft_for(&self, model: &str) -> DraftFor {
        DraftFor::shipped_head(model, "eagle3").unwrap_or(DraftFor::Unknown)
    }

    fn takes(&self) -> &'static [DraftFlag] {
        &[DraftFlag::AuxLayerConvention, DraftFlag::RopeTheta]
    }

    fn open(&self, opening: &Opening<'_>) -> crate::Result<Box<dyn Opened>> {
        let (_, location) = opening.draft()?;
        let (load, target) = (opening.load, opening.target.spec().clone());
        let head = HeadCheckpoint::open_with(location, load, opening.target, &opening.head)?;
        Ok(Box::new(OpenedEagle3 { head, target }))
    }
}

struct OpenedEagle3 {
    head: HeadCheckpoint,
    target: ModelSpec,
}

impl Opened for OpenedEagle3 {
    fn needs(&self, allowance: &Allowance) -> Needs {
        let Allowance { format, kv_dtype, positions, bounds, target_rows, .. } = *allowance;
        let spec = self.head.spec();
        // The stream after the final norm is as wide as the output of one layer.
        let layers = self.head.boundaries().len().max(1);
        Needs {
            weights: spec.weight_bytes(format),
            scratch: spec.scratch_bytes(bounds) + spec.rope_bytes(positions),
            hidden: memory::capture_bytes(&self.target, layers, target_rows),
            kv_per_token: spec.kv_bytes_per_token(kv_dtype),
            ..Needs::default()
        }
    }
}

impl<B: Backend> LoadOn<B> for OpenedEagle3 {
    fn load(
        &self,
        backend: &B,
        target: &Decoder<B>,
        allowance: &Allowance,
    ) -> crate::Result<Algorithm<B>> {
        let Allowance { format, kv_dtype, slots, bounds, .. } = *allowance;
        let head = Eagle3Head::load_for(backend, &self.head, format, target, &mut |_| ())?;
        let drafter = Box::new(Eagle3::new(backend, head, bounds)?);
        Ok(Algorithm::on_device(RecurrentDraft::new(backend, drafter, slots, kv_dtype)?))
    }
}
