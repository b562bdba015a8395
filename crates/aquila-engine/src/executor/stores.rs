//! Everything that has a row for each node of a round.
//!
//! The list follows from what the model and the algorithm declare, and a pass gets its stores from
//! the list: what is not in it cannot be written, and what is in it is compacted.

use aquila_compute::Backend;
use aquila_model::{Capture, Decoder};
use aquila_spec::{Declaration, HiddenStates};

#[cfg(feature = "known-bugs")]
use aquila_spec::known_bugs::Bug;

use crate::config::EngineConfig;
use crate::error::Result;

/// One store.
enum Store<B: Backend> {
    /// Keys and values of the target, in slots: one of each KV group.
    Kv(Vec<B::Kv>),
    /// Hidden rows of the target, one for each row of the pass.
    Hidden(Capture<B>),
}

/// All stores that the target's pass writes.
pub(super) struct Stores<B: Backend>(Vec<Store<B>>);

impl<B: Backend> Stores<B> {
    /// Those of `decoder`, and what the algorithm declares that it takes of it.
    pub fn new(
        backend: &B,
        decoder: &Decoder<B>,
        declaration: Option<&Declaration>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let kv = decoder.kv(backend, config.slots(), config.kv_dtype)?;
        let mut stores = vec![Store::Kv(kv)];
        let rows = config.hidden_rows();
        match declaration.map_or(&HiddenStates::None, |declaration| &declaration.hidden) {
            HiddenStates::None => {}
            HiddenStates::Layers(layers) => {
                stores.push(Store::Hidden(decoder.capture(backend, layers, rows)?));
            }
            HiddenStates::Final => {
                stores.push(Store::Hidden(decoder.capture_final(backend, rows)?))
            }
        }
        Ok(Self(stores))
    }

    /// What a pass writes.
    pub fn of_pass(&mut self) -> (&mut [B::Kv], Option<&mut Capture<B>>) {
        let (mut kv, mut hidden) = (None, None);
        for store in &mut self.0 {
            match store {
                Store::Kv(store) => kv = Some(store),
                Store::Hidden(store) => hidden = Some(store),
            }
        }
        (kv.expect("every model has keys and values"), hidden)
    }

    /// The target's hidden rows, where they are kept.
    pub fn hidden(&self) -> Option<&Capture<B>> {
        self.0.iter().find_map(|store| match store {
            Store::Hidden(capture) => Some(capture),
            Store::Kv(_) => None,
        })
    }

    /// Moves the accepted rows of every store to where they belong.
    pub fn compact(&mut self, backend: &B, state: &B::State) -> Result<()> {
        for store in &mut self.0 {
            #[cfg(feature = "known-bugs")]
            if (Bug::KvNotMoved.alive() && matches!(store, Store::Kv(_)))
                || (Bug::HiddenNotMoved.alive() && matches!(store, Store::Hidden(_)))
            {
                continue;
            }
            match store {
                Store::Kv(groups) => {
                    groups.iter_mut().try_for_each(|kv| backend.compact_slots(state, kv))?
                }
                Store::Hidden(capture) => backend.compact_rows(state, capture.rows_mut())?,
            }
        }
        Ok(())
    }
}
