//! A draft that writes down what it was asked to run.

use std::sync::{Arc, Mutex};

use aquila_compute::cpu::CpuBackend;
use aquila_compute::round::{ExtendRows, RoundState, Shape, StateBounds, Verify};
use aquila_compute::{Backend, DraftIds, ForwardPlan, KvDtype, KvShape};
use aquila_model::Result;
use aquila_spec::{Declaration, DraftBound, Drafter, Proposer, RecurrentDraft};

/// One pass of a draft.
#[derive(Debug, Clone)]
pub struct Pass {
    /// Whether it ran certain rows, or nodes of trees.
    pub certain: bool,
    pub plan: ForwardPlan,
    /// Whether there were hidden states of the target to read.
    pub hidden: bool,
}

/// What a draft ran.
pub type Passes = Arc<Mutex<Vec<Pass>>>;

pub struct Recorded {
    pub draft: super::shipped::Draft,
    pub passes: Passes,
}

impl Recorded {
    fn note(&mut self, certain: bool, hidden: bool) {
        let plan = self.draft.plan_mut().host().clone();
        self.passes.lock().unwrap().push(Pass { certain, plan, hidden });
    }
}

type Rows = <CpuBackend as Backend>::Rows;
type Kv = <CpuBackend as Backend>::Kv;
type Plan = <CpuBackend as Backend>::Plan;

impl Drafter<CpuBackend> for Recorded {
    fn declaration(&self) -> &Declaration {
        self.draft.declaration()
    }

    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape> {
        self.draft.kv_shapes(slots, dtype)
    }

    fn ids(&self) -> Option<DraftIds<'_>> {
        self.draft.ids()
    }

    fn plan_mut(&mut self) -> &mut Plan {
        self.draft.plan_mut()
    }

    fn extend(&mut self, backend: &CpuBackend, hidden: Option<&Rows>, kv: &mut [Kv]) -> Result<()> {
        self.note(true, hidden.is_some());
        self.draft.extend(backend, hidden, kv)
    }

    fn expand(&mut self, backend: &CpuBackend, first: bool, kv: &mut [Kv]) -> Result<()> {
        self.note(false, false);
        self.draft.expand(backend, first, kv)
    }

    fn logits(&self) -> &Rows {
        self.draft.logits()
    }

    fn seeds(&self) -> Option<&Rows> {
        self.draft.seeds()
    }

    fn seeds_mut(&mut self) -> Option<&mut Rows> {
        self.draft.seeds_mut()
    }
}

/// Lets a draft draft and extend for a batch of nothing.
pub fn run_nothing(backend: &CpuBackend, draft: super::shipped::Draft) {
    let groups = draft.declaration().groups.clone();
    let mut draft = RecurrentDraft::new(backend, draft, 16, KvDtype::F32).unwrap();
    let mut state = RoundState::new(StateBounds {
        places: 2,
        stride: 8,
        drafts: true,
        groups,
        hidden: false,
        first_parked: 0,
        parked_rows: 0,
        chunk: 8,
        shape: Shape::chain(3),
        verify: Verify::Match,
        vocabulary: 0,
        outputs: 0,
        logits: 0,
        simulate: None,
    });
    let bound = DraftBound { steps: 3, beam: 2, rows: 8, requests: 2 };
    draft.extend(backend, &mut state, ExtendRows::CatchUp(0), bound, None).unwrap();
    draft.draft(backend, &mut state, bound).unwrap();
    draft.extend(backend, &mut state, ExtendRows::Round, bound, None).unwrap();
}
