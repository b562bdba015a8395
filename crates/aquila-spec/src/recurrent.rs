//! The proposer of every draft that is one recurrent model: all requests at once, level by level.
//! Which rows its passes have is in `aquila_compute::round`.

use aquila_compute::round::{ExtendRows, Extent, PassRows};
use aquila_compute::{Backend, DraftIds, Error, KvDtype, KvShape, PlanBounds};
use aquila_model::{Hidden, RecurrentHead, Result};

use crate::algorithm::{Declaration, DraftBound, Proposer};
use crate::packed::{Packer, Unpacker};

/// The form in which what a tree begins with is packed.
const VERSION: u8 = 1;

/// A model that drafts recurrently, with keys and values of its own in one slot space.
///
/// Rows whose tokens are certain are run by `extend`; rows of the tree being drafted by `expand`,
/// whose keys and values nothing reads after the round.
pub trait Drafter<B: Backend>: Send {
    /// What it needs: one slot space.
    fn declaration(&self) -> &Declaration;

    /// The stores of its keys and values for `slots` rows.
    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape>;

    /// Which tokens it knows, if not all of the target's.
    fn ids(&self) -> Option<DraftIds<'_>>;

    /// Where the plan of the next pass is placed.
    fn plan_mut(&mut self) -> &mut B::Plan;

    /// Runs certain rows. `hidden` has the target's rows, where declared; the plan's sources say
    /// which each row takes. Logits are left for the plan's outputs, whose rows are the seeds of
    /// the next trees and go to the plan's destinations.
    fn extend(&mut self, backend: &B, hidden: Option<&B::Rows>, kv: &mut [B::Kv]) -> Result<()>;

    /// Runs one level of trees. The plan's sources say which seed each row goes on from (`first`),
    /// or which row of the level before.
    fn expand(&mut self, backend: &B, first: bool, kv: &mut [B::Kv]) -> Result<()>;

    /// The logits of the last pass.
    fn logits(&self) -> &B::Rows;

    /// The hidden states that trees go on from, one for each place; none where it needs none.
    fn seeds(&self) -> Option<&B::Rows>;

    /// The hidden states that trees go on from, to be replaced.
    fn seeds_mut(&mut self) -> Option<&mut B::Rows>;
}

/// A drafter that is a model or a head with its buffers.
pub struct HeadDrafter<B: Backend, H: RecurrentHead<B>> {
    declaration: Declaration,
    head: H,
    scratch: H::Scratch,
}

impl<B: Backend, H: RecurrentHead<B>> HeadDrafter<B, H> {
    /// Drafts with `head`, in passes up to `bounds`.
    pub(crate) fn with(
        backend: &B,
        declaration: Declaration,
        head: H,
        bounds: PlanBounds,
    ) -> Result<Self> {
        let scratch = head.scratch(backend, bounds)?;
        Ok(Self { declaration, head, scratch })
    }
}

impl<B: Backend, H: RecurrentHead<B>> Drafter<B> for HeadDrafter<B, H> {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn kv_shapes(&self, slots: usize, dtype: KvDtype) -> Vec<KvShape> {
        self.head.kv_shapes(slots, dtype)
    }

    fn ids(&self) -> Option<DraftIds<'_>> {
        self.head.draft_ids()
    }

    fn plan_mut(&mut self) -> &mut B::Plan {
        H::plan_mut(&mut self.scratch)
    }

    fn extend(&mut self, backend: &B, hidden: Option<&B::Rows>, kv: &mut [B::Kv]) -> Result<()> {
        self.head.extend_placed(backend, hidden, kv, &mut self.scratch)
    }

    fn expand(&mut self, backend: &B, first: bool, kv: &mut [B::Kv]) -> Result<()> {
        let from = if first { Hidden::Seeds } else { Hidden::Last };
        self.head.expand_placed(backend, from, kv, &mut self.scratch)
    }

    fn logits(&self) -> &B::Rows {
        H::logits(&self.scratch)
    }

    fn seeds(&self) -> Option<&B::Rows> {
        H::seeds(&self.scratch)
    }

    fn seeds_mut(&mut self) -> Option<&mut B::Rows> {
        H::seeds_mut(&mut self.scratch)
    }
}

/// A drafter with its keys and values.
pub struct RecurrentDraft<B: Backend> {
    drafter: Box<dyn Drafter<B>>,
    kv: Vec<B::Kv>,
}

impl<B: Backend> RecurrentDraft<B> {
    /// Over `drafter`, with room for the keys and values of `slots` rows.
    pub fn new(
        backend: &B,
        drafter: Box<dyn Drafter<B>>,
        slots: usize,
        dtype: KvDtype,
    ) -> Result<Self> {
        let shapes = drafter.kv_shapes(slots, dtype).into_iter();
        let kv = shapes.map(|shape| Ok(backend.kv(shape)?)).collect::<Result<_>>()?;
        Ok(Self { drafter, kv })
    }
}

impl<B: Backend> Proposer<B> for RecurrentDraft<B> {
    fn declaration(&self) -> &Declaration {
        self.drafter.declaration()
    }

    fn draft(&mut self, backend: &B, state: &mut B::State, bound: DraftBound) -> Result<()> {
        let extent = Extent { rows: bound.beam, outputs: bound.beam };
        for step in 1..bound.steps {
            let first = step == 1;
            let pass = PassRows::RecurrentLevel { first };
            backend.plan_rows(state, pass, extent, self.drafter.plan_mut())?;
            if backend.extent(self.drafter.plan_mut()).rows == 0 {
                break;
            }
            self.drafter.expand(backend, first, &mut self.kv)?;
            backend.propose(state, self.drafter.logits(), self.drafter.ids())?;
        }
        Ok(())
    }

    fn extend(
        &mut self,
        backend: &B,
        state: &mut B::State,
        rows: ExtendRows,
        bound: DraftBound,
        hidden: Option<&B::Rows>,
    ) -> Result<()> {
        backend.begin_extend(state, rows)?;
        let extent = Extent { rows: bound.rows, outputs: bound.requests };
        let pass = PassRows::RecurrentExtend { hidden: hidden.is_some() };
        backend.plan_rows(state, pass, extent, self.drafter.plan_mut())?;
        let idle = backend.extent(self.drafter.plan_mut()).rows == 0;
        let idle = idle && !crate::known_bugs::Bug::IdlePass.alive();
        if idle {
            return Ok(());
        }
        self.drafter.extend(backend, hidden, &mut self.kv)?;
        Ok(backend.seed_trees(state, self.drafter.logits(), self.drafter.ids())?)
    }

    fn kv(&self, _group: usize) -> &[B::Kv] {
        &self.kv
    }

    fn kv_mut(&mut self, _group: usize) -> &mut [B::Kv] {
        &mut self.kv
    }

    /// What the next tree begins with, and the hidden state behind it.
    fn pack(&self, backend: &B, state: &B::State, place: usize) -> Result<Vec<u8>> {
        let mut packed = Packer::new(VERSION);
        packed.seed(backend.read_seed(state, place)?.as_ref());
        if let Some(seeds) = self.drafter.seeds() {
            packed.row(&backend.read_row(seeds, place)?);
        }
        Ok(packed.finish())
    }

    fn unpack(
        &mut self,
        backend: &B,
        state: &mut B::State,
        place: usize,
        packed: &[u8],
    ) -> Result<bool> {
        let hidden = self.drafter.seeds_mut();
        let parts = Unpacker::read_all(packed, VERSION, |packed| {
            let seed = packed.seed()?;
            let row = if hidden.is_some() { Some(packed.row()?) } else { None };
            Some((seed, row))
        });
        let Some((seed, row)) = parts else { return Ok(false) };
        if let (Some(seeds), Some(row)) = (hidden, row) {
            match backend.write_row(seeds, place, &row) {
                // The row is of another width.
                Err(Error::Tensor(_)) => return Ok(false),
                written => written?,
            }
        }
        backend.write_seed(state, place, seed)?;
        Ok(true)
    }
}
