//! Multi-token prediction by name: one layer recurs, several are one for each step.

use aquila_compute::Backend;
use aquila_model::{Decoder, MtpCheckpoint, Needs};

use crate::eagle::LmHeadSource;
use crate::registry::{Allowance, DraftFlag, DraftFor, Entry, LoadOn, Opened, Opening};
use crate::{Algorithm, Eagle, Error, Mtp, MtpRoom, RecurrentDraft};

/// MTP by name.
pub(crate) struct MtpEntry;

impl Entry for MtpEntry {
    fn name(&self) -> &'static str {
        "MTP"
    }

    fn aliases(&self) -> &'static [&'static str] {
        &["NEXTN"]
    }

    fn draft_for(&self, model: &str) -> DraftFor {
        DraftFor::shipped_head(model, "mtp").unwrap_or(DraftFor::Itself)
    }

    fn takes(&self) -> &'static [DraftFlag] {
        &[DraftFlag::TokenMap, DraftFlag::MultiLayer, DraftFlag::FirstEmbedding]
    }

    fn open(&self, opening: &Opening<'_>) -> crate::Result<Box<dyn Opened>> {
        let (name, location) = opening.draft()?;
        let (load, target) = (opening.load, opening.target.spec());
        let layers = MtpCheckpoint::open_with(location, load, target, &opening.head)?;
        if opening.head.multi_layer && layers.spec().layers() == 1 {
            return Err(Error::OneLayer(name.to_owned()));
        }
        Ok(Box::new(OpenedMtp { layers, lm_head_source: LmHeadSource::of(opening)? }))
    }
}

struct OpenedMtp {
    layers: MtpCheckpoint,
    lm_head_source: LmHeadSource,
}

impl OpenedMtp {
    /// Whether the one layer recurs.
    fn recurs(&self) -> bool {
        self.layers.spec().layers() == 1
    }

    fn room(&self, allowance: &Allowance) -> MtpRoom {
        let Allowance { bounds, shape, requests, slots, kv_dtype: dtype, .. } = *allowance;
        MtpRoom { bounds, shape, requests, slots, dtype }
    }
}

impl Opened for OpenedMtp {
    /// One for each layer, where it does not recur.
    fn most_steps(&self) -> Option<usize> {
        (!self.recurs()).then(|| self.layers.spec().layers())
    }

    fn needs(&self, allowance: &Allowance) -> Needs {
        let (spec, tokens) = (self.layers.spec(), self.lm_head_source.tokens());
        let scratch = if self.recurs() {
            spec.scratch_bytes(allowance.bounds, tokens)
        } else {
            let room = self.room(allowance);
            spec.scratch_bytes(room.passes(), tokens) + room.state_bytes(spec.layer.hidden_size)
        };
        let own = Needs {
            weights: spec.weight_bytes(allowance.format),
            scratch,
            kv_per_token: spec.kv_bytes_per_token(allowance.kv_dtype, allowance.shape.steps()),
            ..Needs::default()
        };
        self.lm_head_source.needs(allowance, &spec.layer, own)
    }
}

impl<B: Backend> LoadOn<B> for OpenedMtp {
    fn load(
        &self,
        backend: &B,
        target: &Decoder<B>,
        allowance: &Allowance,
    ) -> crate::Result<Algorithm<B>> {
        let Allowance { format, kv_dtype, slots, bounds, .. } = *allowance;
        let lm_head = self.lm_head_source.lm_head(backend, target, format)?;
        let head = self.layers.load(backend, format, target, lm_head, &mut |_| ())?;
        if self.recurs() {
            let drafter = Box::new(Eagle::new(backend, "MTP", head, bounds)?);
            let draft = RecurrentDraft::new(backend, drafter, slots, kv_dtype)?;
            return Ok(Algorithm::on_device(draft));
        }
        Ok(Algorithm::on_device(Mtp::new(backend, head, self.room(allowance))?))
    }
}
