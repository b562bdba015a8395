//! EAGLE: a head that takes the target's last hidden state and predicts the token after the next.
//! An MTP head of one layer drafts the same way, under its own name.

use aquila_compute::{Backend, PlanBounds, WeightFormat};
use aquila_model::{
    Decoder, DraftTokens, EagleCheckpoint, FusedHead, LmHead, ModelSpec, Needs, Result, memory,
};

use crate::registry::{Allowance, DraftFlag, DraftFor, Entry, LoadOn, Opened, Opening};
use crate::{
    Algorithm, Declaration, DraftGroup, HeadDrafter, HiddenStates, RecurrentDraft, TreeRows,
};

/// A head of one layer that drafts recurrently.
pub type Eagle<B> = HeadDrafter<B, FusedHead<B>>;

impl<B: Backend> Eagle<B> {
    /// Drafts with the first layer of `head`, as the algorithm called `name`, in passes up to
    /// `bounds`.
    pub fn new(
        backend: &B,
        name: &'static str,
        head: FusedHead<B>,
        bounds: PlanBounds,
    ) -> Result<Self> {
        let declaration = Declaration {
            name,
            hidden: HiddenStates::Final,
            groups: vec![DraftGroup { lookahead: 1, tree: TreeRows::EveryLevel }],
        };
        Self::with(backend, declaration, head, bounds)
    }
}

/// EAGLE by name.
pub(crate) struct EagleEntry;

impl Entry for EagleEntry {
    fn name(&self) -> &'static str {
        "EAGLE"
    }

    fn draft_for(&self, model: &str) -> DraftFor {
        DraftFor::shipped_head(model, "eagle").unwrap_or(DraftFor::Unknown)
    }

    fn takes(&self) -> &'static [DraftFlag] {
        &[DraftFlag::TokenMap]
    }

    fn open(&self, opening: &Opening<'_>) -> crate::Result<Box<dyn Opened>> {
        let (_, location) = opening.draft()?;
        let head = EagleCheckpoint::open(location, opening.load, opening.target.spec())?;
        Ok(Box::new(OpenedEagle { head, lm_head_source: LmHeadSource::of(opening)? }))
    }
}

struct OpenedEagle {
    head: EagleCheckpoint,
    lm_head_source: LmHeadSource,
}

impl Opened for OpenedEagle {
    fn needs(&self, allowance: &Allowance) -> Needs {
        let spec = self.head.spec();
        let scratch = spec.scratch_bytes(allowance.bounds, self.lm_head_source.tokens());
        self.lm_head_source.needs(
            allowance,
            &spec.layer,
            Needs {
                weights: spec.weight_bytes(allowance.format),
                scratch,
                kv_per_token: spec.kv_bytes_per_token(allowance.kv_dtype),
                ..Needs::default()
            },
        )
    }
}

impl<B: Backend> LoadOn<B> for OpenedEagle {
    fn load(
        &self,
        backend: &B,
        target: &Decoder<B>,
        allowance: &Allowance,
    ) -> crate::Result<Algorithm<B>> {
        let Allowance { format, kv_dtype, slots, bounds, .. } = *allowance;
        let lm_head = self.lm_head_source.lm_head(backend, target, format)?;
        let head = self.head.load(backend, format, target, lm_head, &mut |_| ())?;
        let drafter = Box::new(Eagle::new(backend, "EAGLE", head, bounds)?);
        Ok(Algorithm::on_device(RecurrentDraft::new(backend, drafter, slots, kv_dtype)?))
    }
}

/// How tokens are read out of hidden states: by the target's head, or by some rows of it.
pub(crate) struct LmHeadSource {
    target: ModelSpec,
    draftable: Option<DraftTokens>,
}

impl LmHeadSource {
    pub fn of(opening: &Opening<'_>) -> crate::Result<Self> {
        let draftable = opening.token_map.map(|map| DraftTokens::of(opening.target, map));
        Ok(Self { target: opening.target.spec().clone(), draftable: draftable.transpose()? })
    }

    /// How many tokens can be drafted.
    pub fn tokens(&self) -> usize {
        self.draftable.as_ref().map_or(self.target.vocab_size, DraftTokens::count)
    }

    pub fn lm_head<B: Backend>(
        &self,
        backend: &B,
        target: &Decoder<B>,
        format: WeightFormat,
    ) -> crate::Result<LmHead<B>> {
        match &self.draftable {
            Some(tokens) => Ok(tokens.lm_head(backend, format)?),
            None => Ok(target.lm_head()),
        }
    }

    /// What a head takes: `own`, and what it reads with and from.
    pub fn needs(&self, allowance: &Allowance, layer: &ModelSpec, own: Needs) -> Needs {
        let rows = self.draftable.as_ref().map_or(0, |t| t.weight_bytes(allowance.format));
        Needs {
            weights: own.weights + rows,
            scratch: own.scratch + memory::rope_bytes(layer, allowance.positions),
            hidden: memory::capture_bytes(&self.target, 1, allowance.target_rows),
            ..own
        }
    }
}
