//! Everything that has a row for each node of a round.
//!
//! The list follows from what the model, the algorithm and the settings declare, and a pass gets
//! its stores from the list: what is not in it cannot be written, and what a pass has written is
//! compacted.

use aquila_compute::Backend;
use aquila_compute::round::{Returned, ReturnedRows};
use aquila_model::{Capture, Decoder};
use aquila_spec::{Declaration, HiddenStates};

use aquila_spec::known_bugs::Bug;

use crate::config::EngineConfig;
use crate::error::{Error, Result};

/// Who takes rows of the target's pass.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash)]
pub(super) struct Takers {
    /// The draft takes hidden rows.
    pub draft: bool,
    /// Requests get rows.
    pub returned: Returned,
}

impl Takers {
    fn meet(self, other: Self) -> bool {
        (self.draft && other.draft)
            || (self.returned.hidden_states && other.returned.hidden_states)
            || (self.returned.routed_experts && other.returned.routed_experts)
    }
}

/// What has a row for each row of a pass, if the pass is for a request or a draft that takes it.
struct RowStore<B: Backend> {
    capture: Capture<B>,
    takers: Takers,
}

/// All stores that the target's pass writes.
pub(super) struct Stores<B: Backend> {
    /// Keys and values of the target, in slots: one of each KV group.
    kv: Vec<B::Kv>,
    rows: Vec<RowStore<B>>,
    /// Who takes rows of the last pass.
    takers: Takers,
}

impl<B: Backend> Stores<B> {
    /// Those of `decoder`, what the algorithm declares that it takes of it, and what requests may
    /// get.
    pub fn new(
        backend: &B,
        decoder: &Decoder<B>,
        declaration: Option<&Declaration>,
        config: &EngineConfig,
    ) -> Result<Self> {
        let kv = decoder.kv(backend, config.slots(), config.kv_dtype)?;
        let mut rows = Vec::new();
        let mut add = |capture, draft, hidden_states, routed_experts| {
            let returned = Returned { hidden_states, routed_experts };
            rows.push(RowStore { capture, takers: Takers { draft, returned } });
        };
        let Returned { mut hidden_states, routed_experts } = config.returned;
        match declaration.map_or(&HiddenStates::None, |declaration| &declaration.hidden) {
            HiddenStates::None => {}
            HiddenStates::Layers(layers) => {
                let capture = decoder.capture(backend, layers, config.hidden_rows())?;
                add(capture, true, false, false);
            }
            HiddenStates::Final => {
                let capture = decoder.capture_final(backend, config.hidden_rows())?;
                add(capture, true, std::mem::take(&mut hidden_states), false);
            }
        }
        if hidden_states {
            add(decoder.capture_final(backend, config.max_rows())?, false, true, false);
        }
        if routed_experts {
            if decoder.spec().experts_per_token().is_none() {
                return Err(Error::NoExperts);
            }
            add(decoder.capture_experts(backend, config.max_rows())?, false, false, true);
        }
        Ok(Self { kv, rows, takers: Takers::default() })
    }

    /// The stores of keys and values.
    pub fn kv(&self) -> &[B::Kv] {
        &self.kv
    }

    /// The same, to be written.
    pub fn kv_mut(&mut self) -> &mut [B::Kv] {
        &mut self.kv
    }

    /// Notes who takes rows of the pass that comes.
    pub fn begin_pass(&mut self, takers: Takers) {
        self.takers = takers;
    }

    /// What the pass writes.
    pub fn of_pass(&mut self) -> (&mut [B::Kv], Vec<&mut Capture<B>>) {
        let takers = self.takers;
        let rows = self.rows.iter_mut().filter(|store| store.takers.meet(takers));
        (&mut self.kv, rows.map(|store| &mut store.capture).collect())
    }

    fn taken_by(&self, takers: Takers) -> Option<&B::Rows> {
        self.rows.iter().find(|store| store.takers.meet(takers)).map(|store| store.capture.rows())
    }

    /// The target's hidden rows, where they are kept for a draft.
    pub fn hidden(&self) -> Option<&B::Rows> {
        self.taken_by(Takers { draft: true, ..Takers::default() })
    }

    /// The same, to be moved about.
    pub fn hidden_mut(&mut self) -> Option<&mut B::Rows> {
        let store = self.rows.iter_mut().find(|store| store.takers.draft);
        store.map(|store| store.capture.rows_mut())
    }

    /// What requests get of the last pass.
    pub fn returned(&self) -> ReturnedRows<'_, B::Rows> {
        let Returned { hidden_states, routed_experts } = self.takers.returned;
        let of = |returned| self.taken_by(Takers { draft: false, returned });
        ReturnedRows {
            hidden_states: of(Returned { hidden_states, routed_experts: false }),
            routed_experts: of(Returned { hidden_states: false, routed_experts }),
        }
    }

    /// Moves the accepted rows of every store that the last pass has written to where they belong.
    pub fn compact(&mut self, backend: &B, state: &B::State) -> Result<()> {
        let (kv_moves, rows_move) = (!Bug::KvNotMoved.alive(), !Bug::HiddenNotMoved.alive());
        for kv in self.kv.iter_mut().filter(|_| kv_moves) {
            backend.compact_slots(state, kv)?;
        }
        for store in self.rows.iter_mut().filter(|_| rows_move) {
            if store.takers.meet(self.takers) {
                backend.compact_rows(state, store.capture.rows_mut())?;
            }
        }
        Ok(())
    }
}
