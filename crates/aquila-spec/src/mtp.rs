//! Multi-token prediction with a layer for each step. Which rows its passes have, and which hidden
//! states outlive them, is in `aquila_compute::round`.

use aquila_compute::round::{
    DraftGroup, ExtendRows, Extent, KeptLayout, PassRows, Shape, TreeRows,
};
use aquila_compute::{Backend, KvDtype, PlanBounds};
use aquila_model::{Error, FusedHead, LayerScratch, RecurrentHead, Result, Setting};

use crate::packed::{Packer, Unpacker};
use crate::{Declaration, DraftBound, HiddenStates, Proposer};

/// The form in which what is kept of a request is packed.
const VERSION: u8 = 1;

/// What there must be room for.
#[derive(Debug, Clone, Copy)]
pub struct MtpRoom {
    /// The largest pass of a draft with one row for each node.
    pub bounds: PlanBounds,
    /// The largest tree.
    pub shape: Shape,
    /// Requests that run at a time.
    pub requests: usize,
    /// Slots of each group.
    pub slots: usize,
    /// How keys and values are kept.
    pub dtype: KvDtype,
}

impl MtpRoom {
    /// The largest pass: a branch has as many rows as it is deep.
    pub fn passes(&self) -> PlanBounds {
        let depth = self.shape.steps().saturating_sub(1);
        let branches = self.requests * self.shape.topk();
        PlanBounds {
            rows: self.bounds.rows + branches * depth,
            outputs: self.bounds.outputs,
            // Each layer has block tables of its own.
            slots: self.bounds.slots * self.shape.steps().max(1) + branches * depth * depth,
        }
    }

    /// Bytes of the hidden states of `width` that passes leave and requests keep.
    pub fn state_bytes(&self, width: usize) -> u64 {
        let steps = self.shape.steps().max(2);
        4 * width as u64 * (steps * (self.passes().rows + self.requests)) as u64
    }
}

/// MTP layers that draft, one for each step.
pub struct Mtp<B: Backend> {
    declaration: Declaration,
    head: FusedHead<B>,
    kv: Vec<B::Kv>,
    scratch: LayerScratch<B>,
    layout: KeptLayout,
    /// Chained: the states that each layer made. Else: the target's, then what the last pass made.
    /// Each has the rows of a pass, then the kept ones.
    states: Vec<B::Rows>,
}

impl<B: Backend> Mtp<B> {
    /// Drafts with the layers of `head`; refuses more steps than it has layers.
    pub fn new(backend: &B, head: FusedHead<B>, room: MtpRoom) -> Result<Self> {
        Self::check_steps(head.layers(), room.shape)?;
        let steps = room.shape.steps();
        let group = |layer| DraftGroup { lookahead: 1 + layer, tree: TreeRows::Level(layer) };
        let width = head.spec().hidden_size;
        let declaration = Declaration {
            name: "MTP",
            hidden: HiddenStates::Final,
            groups: (0..steps).map(group).collect(),
        };
        let shape = head.kv_shapes(room.slots, room.dtype)[0];
        let kv = (0..steps).map(|_| Ok(backend.kv(shape)?)).collect::<Result<_>>()?;
        let passes = room.passes();
        let scratch = head.layer_scratch(backend, passes)?;
        let chained = head.chained();
        // A layer looks back one row at the layer before it, or as many at the target as it is
        // steps ahead.
        let depth = if chained { 1 } else { steps.saturating_sub(1).max(1) };
        let layout = KeptLayout { chained, passes: passes.rows, depth };
        let rows = passes.rows + room.requests * depth;
        let stores = if chained { steps } else { 2 };
        let states = (0..stores).map(|_| Ok(backend.rows(rows, width)?)).collect::<Result<_>>()?;
        Ok(Self { declaration, head, kv, scratch, layout, states })
    }

    /// Refuses trees deeper than there are layers.
    fn check_steps(layers: usize, shape: Shape) -> Result<()> {
        let steps = shape.steps();
        if steps <= layers {
            return Ok(());
        }
        let reason = format!("the head has {layers} MTP layers, one for each step");
        let (origin, setting) = (format!("{steps} draft steps"), Setting::Steps(layers));
        Err(Error::Setting { origin, reason, setting })
    }

    /// How many of `states` outlive a round.
    fn keeping(&self) -> usize {
        if self.layout.chained { self.kv.len().saturating_sub(1) } else { 1 }
    }

    /// What a layer behind the first reads, and where its pass leaves what it makes.
    fn behind(states: &mut [B::Rows], chained: bool, layer: usize) -> (&B::Rows, &mut B::Rows) {
        let from = if chained { layer - 1 } else { 0 };
        let (before, made) = states.split_at_mut(from + 1);
        (&before[from], &mut made[0])
    }
}

impl<B: Backend> Proposer<B> for Mtp<B> {
    fn declaration(&self) -> &Declaration {
        &self.declaration
    }

    fn draft(&mut self, backend: &B, state: &mut B::State, bound: DraftBound) -> Result<()> {
        let Self { head, kv, scratch, layout, states, .. } = self;
        for (depth, kv) in kv.iter_mut().enumerate().take(bound.steps).skip(1) {
            let extent = Extent { rows: bound.beam * depth, outputs: bound.beam };
            let pass = PassRows::LayerLevel { depth, kept: *layout };
            backend.plan_rows(state, pass, extent, scratch.plan_mut())?;
            if backend.extent(scratch.plan()).rows == 0 {
                break;
            }
            let (from, made) = Self::behind(states, layout.chained, depth);
            head.run_placed(backend, depth, from, kv, scratch, made)?;
            backend.propose(state, scratch.logits(), head.draft_ids())?;
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
        let missing = || Error::Plan("MTP layers without the target's hidden states".into());
        let hidden = hidden.ok_or_else(missing)?;
        backend.begin_extend(state, rows)?;
        let keeping = self.keeping();
        let Self { head, kv, scratch, layout, states, .. } = self;
        let chained = layout.chained;
        for (layer, kv) in kv.iter_mut().enumerate() {
            // Only the first layer has outputs, so its logits stand until they are read.
            let outputs = if layer == 0 { bound.requests } else { 0 };
            let extent = Extent { rows: bound.rows, outputs };
            let pass = PassRows::LayerExtend { layer, kept: *layout };
            backend.plan_rows(state, pass, extent, scratch.plan_mut())?;
            if layer > 0 {
                let (from, made) = Self::behind(states, chained, layer);
                head.run_placed(backend, layer, from, kv, scratch, made)?;
                continue;
            }
            let made = &mut states[if chained { 0 } else { 1 }];
            head.run_placed(backend, layer, hidden, kv, scratch, made)?;
            if !chained {
                let rows = backend.extent(scratch.plan()).rows;
                backend.copy_columns(scratch.hidden(), rows, 0, &mut states[0])?;
            }
        }
        for (layer, states) in states.iter_mut().enumerate().take(keeping) {
            backend.keep_states(state, layer, *layout, states)?;
        }
        Ok(backend.seed_trees(state, scratch.logits(), head.draft_ids())?)
    }

    fn kv(&self, group: usize) -> &[B::Kv] {
        std::slice::from_ref(&self.kv[group])
    }

    fn kv_mut(&mut self, group: usize) -> &mut [B::Kv] {
        std::slice::from_mut(&mut self.kv[group])
    }

    /// What the next tree begins with, and the states that are kept for the request.
    fn pack(&self, backend: &B, state: &B::State, place: usize) -> Result<Vec<u8>> {
        let mut packed = Packer::new(VERSION);
        packed.seed(backend.read_seed(state, place)?.as_ref());
        for states in &self.states[..self.keeping()] {
            for row in self.layout.rows(place) {
                packed.row(&backend.read_row(states, row)?);
            }
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
        let width = self.head.spec().hidden_size;
        let (rows, keeping) = (self.layout.rows(place), self.keeping());
        let parts = Unpacker::read_all(packed, VERSION, |packed| {
            let seed = packed.seed()?;
            let row = |_| packed.row().filter(|row| row.len() == width);
            let kept: Option<Vec<Vec<f32>>> = (0..keeping * rows.len()).map(row).collect();
            Some((seed, kept?))
        });
        let Some((seed, kept)) = parts else { return Ok(false) };
        for (states, kept) in self.states[..keeping].iter_mut().zip(kept.chunks(rows.len())) {
            for (row, values) in rows.clone().zip(kept) {
                backend.write_row(states, row, values)?;
            }
        }
        backend.write_seed(state, place, seed)?;
        Ok(true)
    }
}
