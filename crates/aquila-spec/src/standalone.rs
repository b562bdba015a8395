//! STANDALONE: an ordinary language model as the draft. It needs no hidden state anywhere, and
//! sees every token, the first included.

use aquila_compute::{Backend, PlanBounds};
use aquila_model::{Checkpoint, Decoder, Needs, Result, memory, same_tokens};

use crate::registry::{Allowance, DraftFor, Entry, LoadOn, Opened, Opening};
use crate::{
    Algorithm, Declaration, DraftGroup, Error, HeadDrafter, HiddenStates, RecurrentDraft, TreeRows,
};

/// A model that drafts.
pub type Standalone<B> = HeadDrafter<B, Decoder<B>>;

impl<B: Backend> Standalone<B> {
    /// Drafts with `decoder`, in passes up to `bounds`.
    pub fn new(backend: &B, decoder: Decoder<B>, bounds: PlanBounds) -> Result<Self> {
        let lookahead = 0;
        let lookahead = crate::known_bugs::spoiled_lookahead(lookahead);
        let declaration = Declaration {
            name: "STANDALONE",
            hidden: HiddenStates::None,
            groups: vec![DraftGroup { lookahead, tree: TreeRows::EveryLevel }],
        };
        Self::with(backend, declaration, decoder, bounds)
    }
}

/// STANDALONE by name.
pub(crate) struct StandaloneEntry;

impl Entry for StandaloneEntry {
    fn name(&self) -> &'static str {
        "STANDALONE"
    }

    fn draft_for(&self, model: &str) -> DraftFor {
        if model == "tiny" { DraftFor::Model("draft".into()) } else { DraftFor::Unknown }
    }

    fn open(&self, opening: &Opening<'_>) -> crate::Result<Box<dyn Opened>> {
        let (name, location) = opening.draft()?;
        let draft = Checkpoint::open(location, opening.load)?;
        let refuse =
            |why: String| Error::Refused(format!("{name} cannot draft for this model: {why}"));
        let (ours, theirs) = (opening.target.spec().vocab_size, draft.spec().vocab_size);
        if ours != theirs {
            return Err(refuse(format!("it has {theirs} tokens, the model {ours}")));
        }
        if !same_tokens(opening.target.folder(), draft.folder())? {
            return Err(refuse("their tokenizer.json give tokens other ids".into()));
        }
        Ok(Box::new(OpenedStandalone { draft }))
    }
}

struct OpenedStandalone {
    draft: Checkpoint,
}

impl Opened for OpenedStandalone {
    fn needs(&self, allowance: &Allowance) -> Needs {
        let spec = self.draft.spec();
        Needs {
            weights: memory::weight_bytes(spec, allowance.format),
            scratch: memory::scratch_bytes(spec, allowance.bounds)
                + memory::rope_bytes(spec, allowance.positions),
            logits: memory::logit_bytes(spec, allowance.bounds.outputs),
            kv_per_token: memory::kv_bytes_per_token(spec, allowance.kv_dtype),
            ..Needs::default()
        }
    }
}

impl<B: Backend> LoadOn<B> for OpenedStandalone {
    fn load(
        &self,
        backend: &B,
        _target: &Decoder<B>,
        allowance: &Allowance,
    ) -> crate::Result<Algorithm<B>> {
        let Allowance { format, kv_dtype, slots, positions, bounds, .. } = *allowance;
        let decoder = Decoder::load(backend, &self.draft, format, positions, &mut |_| ())?;
        let drafter = Box::new(Standalone::new(backend, decoder, bounds)?);
        Ok(Algorithm::on_device(RecurrentDraft::new(backend, drafter, slots, kv_dtype)?))
    }
}
