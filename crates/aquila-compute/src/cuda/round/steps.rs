//! The steps of a round, each a launch or a few.

use super::choose::TokensOf;
use super::layout::{
    AcceptArgs, BuildArgs, CompactRowsArgs, CompactSlotsArgs, KeepArgs, PlanArgs, SIMULATE_LENGTH,
    SIMULATE_NOTHING, SIMULATE_RATE, StartArgs, StepArgs,
};
use super::state::{CudaState, copy};
use crate::Result;
use crate::cuda::device::Device;
use crate::cuda::kernels::{Kernel, Kernels};
use crate::cuda::memory::CudaKv;
use crate::cuda::plan::CudaPlan;
use crate::cuda::rows::CudaRows;
use crate::round::{
    ExtendRows, Extent, KeptLayout, PassRows, Simulate, SimulateMethod, Tree, TreeLimits,
};

/// Threads of kernels that give each value of a row a thread.
const THREADS: usize = 256;

impl CudaState {
    /// Launches a step in which each row of the round has a thread.
    pub(super) fn by_row(&self, device: &Device, kernel: &Kernel) -> Result<()> {
        let arguments = StepArgs { state: self.parts, pass: 0 };
        let grid = [self.round.bound.div_ceil(128), 1, 1];
        // SAFETY: the step reads and writes the state alone.
        unsafe { device.launch(kernel, grid, 128, 0, &arguments, &self.names()) }
    }

    /// Launches a step in which each row of the round has a thread block.
    fn by_block(&self, device: &Device, kernel: &Kernel, threads: u32) -> Result<()> {
        let arguments = StepArgs { state: self.parts, pass: 0 };
        let grid = [self.round.bound, 1, 1];
        // SAFETY: the step reads and writes the state alone.
        unsafe { device.launch(kernel, grid, threads, 0, &arguments, &self.names()) }
    }

    /// Plans the rows of a pass.
    pub(in crate::cuda) fn plan_rows(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        pass: PassRows,
        bound: Extent,
        plan: &mut CudaPlan,
    ) -> Result<()> {
        let Extent { rows, outputs } = bound;
        plan.holds(rows, outputs)?;
        self.check_outputs(outputs)?;
        let sources = !matches!(pass, PassRows::Target);
        plan.bound(self.tables(), bound, self.round.bound, sources, self.longest());
        // Only the first layer of an extend has outputs, and its queries stand until they are answered.
        if !matches!(pass, PassRows::LayerExtend { layer: 1.., .. }) {
            self.asked = outputs;
        }
        let steps = &kernels.steps;
        let mut arguments = PlanArgs {
            state: self.parts,
            plan: plan.parts(),
            most_rows: rows as u32,
            most_outputs: outputs as u32,
            first: 0,
            layer: 0,
            by_layer: 0,
            chained: 0,
            kept_rows: 0,
            kept_depth: 0,
        };
        let mut of_layer = |layer: usize, kept: KeptLayout| {
            (arguments.layer, arguments.by_layer) = (layer as u32, 1);
            arguments.chained = u32::from(kept.chained);
            (arguments.kept_rows, arguments.kept_depth) = (kept.passes as u32, kept.depth as u32);
        };
        let kernel = match pass {
            PassRows::Target => &steps.plan_target,
            PassRows::RecurrentExtend { .. } => &steps.plan_extend,
            PassRows::RecurrentLevel { first } => {
                arguments.first = u32::from(first);
                &steps.plan_level
            }
            PassRows::LayerExtend { layer, kept } => {
                of_layer(layer, kept);
                &steps.plan_extend
            }
            PassRows::LayerLevel { depth, kept } => {
                of_layer(depth, kept);
                &steps.plan_layer_level
            }
        };
        // A pass of a round without requests has no rows, and a thread block must say so.
        let grid = [self.round.bound.max(1), 1, 1];
        let mut names = self.names();
        names.extend(plan.memory());
        // SAFETY: the plan holds as many rows and outputs, and the step writes no more.
        unsafe { device.launch(kernel, grid, 128, 0, &arguments, &names)? };
        match pass {
            PassRows::Target => self.fetch_queries(device, TokensOf::Target),
            PassRows::RecurrentLevel { .. } | PassRows::LayerLevel { .. } => {
                self.fetch_queries(device, TokensOf::Level)
            }
            PassRows::RecurrentExtend { .. } | PassRows::LayerExtend { layer: 0, .. } => {
                self.fetch_queries(device, TokensOf::Seeds)
            }
            PassRows::LayerExtend { .. } => Ok(()),
        }
    }

    pub(in crate::cuda) fn start_trees(
        &mut self,
        device: &Device,
        kernels: &Kernels,
        mut given: Vec<(usize, Tree)>,
    ) -> Result<()> {
        self.keep_to_grammars(&mut given);
        if self.round.rows.is_empty() || (given.is_empty() && !self.bounds.drafts) {
            return Ok(());
        }
        let mut arguments =
            StartArgs { state: self.parts, given: 0, words: 0, given_count: given.len() as u32 };
        let mut memory = None;
        if !given.is_empty() {
            self.round.branches = true;
            let nodes: usize = given.iter().map(|(_, tree)| tree.len()).sum();
            let words = 4 * given.len() + 4 * nodes;
            let mailbox = Self::mailbox(device, &mut self.given, words)?;
            mailbox.post(device, |words| {
                let (mut at, mut first) = (0, 0u32);
                for (place, tree) in &given {
                    copy(words, &mut at, &[*place as u32, tree.len() as u32, first, 0]);
                    first += 4 * tree.len() as u32;
                }
                for node in given.iter().flat_map(|(_, tree)| tree.nodes()) {
                    let (parent, depth) = (node.parent as u32, node.depth as u32);
                    copy(words, &mut at, &[node.token, parent, depth, node.score.to_bits()]);
                }
                at
            })?;
            arguments.given = mailbox.memory.at(0);
            arguments.words = mailbox.memory.at(16 * given.len());
            memory = Some(mailbox.memory.clone());
        }
        let mut names = self.names();
        names.extend(&memory);
        let grid = [self.round.bound, 1, 1];
        // SAFETY: trees are no larger than the state was made for: the engine checks them.
        unsafe { device.launch(&kernels.steps.start_trees, grid, 64, 0, &arguments, &names) }
    }

    /// Grows the trees by what was proposed.
    pub(in crate::cuda) fn grow(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        self.by_block(device, &kernels.steps.grow, 128)
    }

    /// Leaves what was proposed as the seeds of trees.
    pub(in crate::cuda) fn take_seeds(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        self.by_block(device, &kernels.steps.take_seeds, 64)
    }

    pub(in crate::cuda) fn build_trees(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        let TreeLimits { row_budget, fill } = self.round.limits;
        if !self.bounds.drafts && !fill && row_budget.is_none() {
            return Ok(());
        }
        let (fill, weigh) = (u32::from(fill), u32::from(row_budget.is_some()));
        let build = BuildArgs { state: self.parts, fill, weigh };
        let (steps, names) = (&kernels.steps, self.names());
        let grid = [self.round.bound, 1, 1];
        // SAFETY: the step reads and writes the state alone.
        unsafe { device.launch(&steps.build_trees, grid, 128, 0, &build, &names)? };
        if row_budget.is_none() {
            return Ok(());
        }
        self.by_block(device, &steps.prune_trees, 128)?;
        self.by_block(device, &steps.retain_nodes, 128)
    }

    pub(in crate::cuda) fn accept(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        if self.round.rows.is_empty() {
            return Ok(());
        }
        let (kind, mean) = match &self.bounds.simulate {
            None => (SIMULATE_NOTHING, 0.0),
            Some(Simulate::Length { mean, method: SimulateMethod::MatchExpected }) => {
                (SIMULATE_LENGTH, *mean)
            }
            Some(_) => (SIMULATE_RATE, 0.0),
        };
        let rates = self.rates.memory.at(0);
        let arguments = AcceptArgs { state: self.parts, rates, mean, simulate: kind };
        let mut names = self.names();
        names.push(&self.rates.memory);
        let grid = [self.round.bound, 1, 1];
        // SAFETY: the step reads and writes the state, and reads a rate for each number of drafts.
        unsafe { device.launch(&kernels.steps.accept, grid, 32, 0, &arguments, &names) }
    }

    /// Sends how likely drafts are taken to be right, by the drafts of a tree, where that changed.
    pub(super) fn send_rates(&mut self, device: &Device) -> Result<()> {
        let Some(simulate) = &self.bounds.simulate else { return Ok(()) };
        let rates: Vec<f64> = (0..=self.bounds.shape.steps())
            .map(|drafts| simulate.rate(drafts, self.round.number))
            .collect();
        if rates == self.sent_rates {
            return Ok(());
        }
        self.rates.post(device, |words| {
            let mut at = 0;
            copy(words, &mut at, &rates);
            at
        })?;
        self.sent_rates = rates;
        Ok(())
    }

    pub(in crate::cuda) fn compact_slots(
        &self,
        device: &Device,
        kernels: &Kernels,
        kv: &CudaKv,
    ) -> Result<()> {
        // The nodes of a chain lie where its path belongs.
        if !self.round.branches {
            return Ok(());
        }
        // In words of 16 bits.
        let width = kv.shape.kv_heads * kv.shape.head_dim * kv.shape.dtype.size() / 2;
        let arguments = CompactSlotsArgs {
            state: self.parts,
            keys: kv.keys.at(0),
            values: kv.values.at(0),
            slots: kv.shape.slots as u32,
            width: width as u32,
        };
        let mut names = self.names();
        names.extend([&kv.keys, &kv.values]);
        let grid = [width.div_ceil(THREADS), kv.shape.layers, self.round.bound];
        let kernel = &kernels.steps.compact_slots;
        // SAFETY: slots are checked in the kernel.
        unsafe { device.launch(kernel, grid, THREADS as u32, 0, &arguments, &names) }
    }

    pub(in crate::cuda) fn compact_rows(
        &self,
        device: &Device,
        kernels: &Kernels,
        rows: &CudaRows,
    ) -> Result<()> {
        match self.round.branches {
            true => self.move_rows(device, &kernels.steps.compact_rows, rows),
            false => Ok(()),
        }
    }

    pub(in crate::cuda) fn publish(&self, device: &Device, kernels: &Kernels) -> Result<()> {
        match self.bounds.drafts {
            true => self.by_row(device, &kernels.steps.publish),
            false => Ok(()),
        }
    }

    pub(in crate::cuda) fn park_rows(
        &self,
        device: &Device,
        kernels: &Kernels,
        rows: &CudaRows,
    ) -> Result<()> {
        match self.round.pauses && self.bounds.parked_rows > 0 {
            true => self.move_rows(device, &kernels.steps.park_rows, rows),
            false => Ok(()),
        }
    }

    /// Launches a step that moves rows of the target's pass.
    fn move_rows(&self, device: &Device, kernel: &Kernel, rows: &CudaRows) -> Result<()> {
        let (parts, capacity) = (rows.parts(), rows.capacity as u32);
        let arguments = CompactRowsArgs { state: self.parts, rows: parts, capacity };
        let mut names = self.names();
        names.extend(rows.memory());
        let grid = [rows.width.div_ceil(THREADS), self.round.bound, 1];
        // SAFETY: rows are checked in the kernel.
        unsafe { device.launch(kernel, grid, THREADS as u32, 0, &arguments, &names) }
    }

    pub(in crate::cuda) fn begin_extend(
        &self,
        device: &Device,
        kernels: &Kernels,
        rows: ExtendRows,
    ) -> Result<()> {
        let (kernel, pass) = match rows {
            ExtendRows::Round => (&kernels.steps.begin_extend, 0),
            ExtendRows::CatchUp(pass) => (&kernels.steps.begin_catch_up, pass as u32),
        };
        let arguments = StepArgs { state: self.parts, pass };
        // SAFETY: the step reads and writes the state alone.
        unsafe { device.launch(kernel, [1, 1, 1], 256, 0, &arguments, &self.names()) }
    }

    pub(in crate::cuda) fn keep_states(
        &self,
        device: &Device,
        kernels: &Kernels,
        layer: usize,
        kept: KeptLayout,
        rows: &CudaRows,
    ) -> Result<()> {
        let arguments = KeepArgs {
            state: self.parts,
            rows: rows.parts(),
            layer: layer as u32,
            kept_rows: kept.passes as u32,
            kept_depth: kept.depth as u32,
            capacity: rows.capacity as u32,
        };
        let mut names = self.names();
        names.extend(rows.memory());
        let grid = [rows.width.div_ceil(THREADS), self.round.bound, 1];
        let kernel = &kernels.steps.keep_states;
        // SAFETY: rows are checked in the kernel.
        unsafe { device.launch(kernel, grid, THREADS as u32, 0, &arguments, &names) }
    }
}
