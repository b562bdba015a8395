//! The operations, each one launch or a few.

use std::ops::Range;
use std::sync::PoisonError;
use std::time::Duration;

use super::attention::Attention;
use super::attention::fits;
use super::backend::CudaBackend;
use super::device::Memory;
use super::experts::{CudaExperts, CudaRouting};
use super::launch::GRID_ROWS;
use super::limits;
use super::memory::{CudaKv, CudaRope, CudaTable, CudaVector, MOVES};
use super::plan::CudaPlan;
use super::projection::Projection;
use super::round::{CudaState, TokensOf};
use super::rows::CudaRows;
use super::transfer;
use super::weight::CudaWeight;
use super::{Arithmetic, Graph, Mark, arguments};
use crate::round::{
    Batch, Candidates, ExtendRows, Extent, GraphKey, KeptLayout, PassRows, RequestOutput,
    ReturnedRows, StateBounds, Tree,
};
use crate::{
    Accumulate, Activation, AttentionParams, Backend, DraftIds, Error, ForwardPlan, HeadShape,
    HostTensor, KvDtype, KvShape, Normed, PlanBounds, Result, RopeTable, WeightFormat,
};

impl Backend for CudaBackend {
    type Rows = CudaRows;
    type Weight = CudaWeight;
    type Experts = CudaExperts;
    type Routing = CudaRouting;
    type Vector = CudaVector;
    type Table = CudaTable;
    type Rope = CudaRope;
    type Kv = CudaKv;
    type Plan = CudaPlan;
    type State = CudaState;
    type Graph = Graph;
    type Moment = Mark;

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn kernel_family(&self) -> String {
        self.family.clone()
    }

    fn check_limits(
        &self,
        passes: PlanBounds,
        bounds: &StateBounds,
        heads: HeadShape,
    ) -> Result<()> {
        limits::check(passes, bounds, heads)
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<CudaWeight> {
        let weight = CudaWeight::new(&self.device, &self.kernels, parts, format, self.arithmetic)?;
        self.projections.prepare(&self.device, &self.kernels.project_tensor, &weight)?;
        Ok(weight)
    }

    fn experts(&self, gate_up: Vec<CudaWeight>, down: Vec<CudaWeight>) -> Result<CudaExperts> {
        CudaExperts::new(&self.device, gate_up, down)
    }

    fn routing(&self, rows: usize, per_token: usize) -> Result<CudaRouting> {
        CudaRouting::new(&self.device, rows, per_token)
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<CudaVector> {
        CudaVector::new(&self.device, parts)
    }

    fn table(&self, tensor: &HostTensor) -> Result<CudaTable> {
        CudaTable::new(&self.device, &self.kernels, tensor)
    }

    fn rope(&self, table: &RopeTable) -> Result<CudaRope> {
        CudaRope::new(&self.device, table)
    }

    fn kv(&self, shape: KvShape) -> Result<CudaKv> {
        if self.arithmetic == Arithmetic::Tensor {
            if shape.dtype != KvDtype::Bf16 {
                return Err(Error::Unavailable(
                    "tensor cores read keys and values as bfloat16; float32 needs plain arithmetic"
                        .into(),
                ));
            }
            self.attention.prepare(&self.device, shape.head_dim)?;
        }
        CudaKv::new(&self.device, shape)
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<CudaRows> {
        self.new_rows(capacity, width)
    }

    fn logits(&self, capacity: usize, width: usize) -> Result<CudaRows> {
        CudaRows::new(&self.device, capacity, width, false)
    }

    fn plan(&self, bounds: PlanBounds) -> Result<CudaPlan> {
        CudaPlan::new(&self.device, bounds)
    }

    fn place(&self, host: &ForwardPlan, plan: &mut CudaPlan) -> Result<()> {
        plan.place(&self.device, &self.kernels.change_tables, host)
    }

    fn embed(
        &self,
        table: &CudaTable,
        scale: f32,
        plan: &CudaPlan,
        out: &mut CudaRows,
    ) -> Result<()> {
        out.hold("embeddings", plan.rows, table.width)?;
        if plan.tokens > table.tokens {
            return Err(Error::Tensor(format!(
                "token {} is beyond the {} tokens of the embedding table",
                plan.tokens - 1,
                table.tokens
            )));
        }
        let arguments = arguments::Embed {
            plan: plan.parts(),
            out: out.parts(),
            table: table.memory.at(0),
            width: table.width as u32,
            tokens: table.tokens as u32,
            scale,
        };
        let names = plan.memory().into_iter().chain(out.memory()).chain([&table.memory]);
        let kernel = self.kernels.embed.of(table.bf16);
        // SAFETY: the result fits, and tokens are clamped in the kernel.
        unsafe { self.by_value(kernel, table.width, plan.rows, &arguments, names) }
    }

    fn add(&self, input: &CudaRows, rows: usize, out: &mut CudaRows) -> Result<()> {
        input.hold("rows to add", rows, out.width)?;
        out.hold("rows to add to", rows, out.width)?;
        let width = out.width;
        let arguments =
            arguments::Add { input: input.parts(), out: out.parts(), width: width as u32 };
        let names = input.memory().chain(out.memory());
        // SAFETY: input and result were checked.
        unsafe { self.by_value(&self.kernels.add, width, rows, &arguments, names) }
    }

    fn soft_cap(&self, rows_of: &mut CudaRows, rows: usize, cap: f32) -> Result<()> {
        rows_of.hold("rows to cap", rows, rows_of.width)?;
        let arguments = arguments::SoftCap { rows: rows_of.parts(), cap };
        let (kernel, width) = (&self.kernels.soft_cap, rows_of.width);
        // SAFETY: the rows were checked.
        unsafe { self.by_value(kernel, width, rows, &arguments, rows_of.memory()) }
    }

    fn rms_norm_columns(
        &self,
        input: &CudaRows,
        weight: &CudaVector,
        epsilon: f32,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        input.hold("a norm's input", rows, weight.len)?;
        out.hold("a norm's result", rows, column + weight.len)?;
        let arguments = arguments::Norm {
            input: input.parts(),
            out: out.parts_from_column(column),
            weight: weight.memory.at(0),
            width: weight.len as u32,
            epsilon,
        };
        let names: Vec<_> = input.memory().chain(out.memory()).chain([&weight.memory]).collect();
        let kernel = match self.arithmetic {
            Arithmetic::Plain => &self.kernels.rms_norm_plain,
            Arithmetic::Tensor => &self.kernels.rms_norm_tensor,
        };
        // SAFETY: input and result were checked.
        unsafe { self.device.launch(kernel, [rows, 1, 1], 256, 0, &arguments, &names) }
    }

    fn project(
        &self,
        weight: &CudaWeight,
        bias: Option<&CudaVector>,
        input: &CudaRows,
        rows: usize,
        accumulate: Accumulate,
        out: &mut CudaRows,
    ) -> Result<()> {
        let projection = Projection { weight, bias, input, norm: None, rows, accumulate };
        self.projections.run(&self.device, &self.kernels, &projection, false, out)
    }

    fn project_normed(
        &self,
        weight: &CudaWeight,
        bias: Option<&CudaVector>,
        normed: Normed<'_, Self>,
        rows: usize,
        accumulate: Accumulate,
        out: &mut CudaRows,
    ) -> Result<()> {
        let (input, norm) = self.norm_for(weight, normed, rows)?;
        let projection = Projection { weight, bias, input, norm, rows, accumulate };
        self.projections.run(&self.device, &self.kernels, &projection, false, out)
    }

    fn project_gated(
        &self,
        weight: &CudaWeight,
        bias: Option<&CudaVector>,
        activation: Activation,
        input: &CudaRows,
        rows: usize,
        both: &mut CudaRows,
        out: &mut CudaRows,
    ) -> Result<()> {
        let accumulate = Accumulate::Set;
        let projection = Projection { weight, bias, input, norm: None, rows, accumulate };
        self.run_gated(&projection, activation, both, out)
    }

    fn project_gated_normed(
        &self,
        weight: &CudaWeight,
        bias: Option<&CudaVector>,
        activation: Activation,
        normed: Normed<'_, Self>,
        rows: usize,
        both: &mut CudaRows,
        out: &mut CudaRows,
    ) -> Result<()> {
        let (input, norm) = self.norm_for(weight, normed, rows)?;
        let accumulate = Accumulate::Set;
        let projection = Projection { weight, bias, input, norm, rows, accumulate };
        self.run_gated(&projection, activation, both, out)
    }

    fn write_kv(
        &self,
        qkv: &mut CudaRows,
        heads: HeadShape,
        norms: Option<(&CudaVector, &CudaVector, f32)>,
        rope: &CudaRope,
        plan: &CudaPlan,
        kv: &mut CudaKv,
        layer: usize,
    ) -> Result<()> {
        fits(heads, plan, kv)?;
        qkv.hold("queries, keys and values", plan.rows, heads.qkv_width())?;
        if 2 * rope.half > heads.head_dim || rope.positions < plan.positions {
            return Err(Error::Tensor(format!(
                "a rope of {} positions and width {} does not cover {} positions of heads of {}",
                rope.positions,
                2 * rope.half,
                plan.positions,
                heads.head_dim
            )));
        }
        if norms.is_some_and(|(q, k, _)| q.len.min(k.len) < heads.head_dim) {
            return Err(Error::Tensor("norms of queries and keys have the head's width".into()));
        }
        let offset = kv.layer(layer)?;
        let arguments = arguments::WriteKv {
            plan: plan.parts(),
            qkv: qkv.parts(),
            query_norm: norms.map_or(0, |(query, _, _)| query.memory.at(0)),
            key_norm: norms.map_or(0, |(_, key, _)| key.memory.at(0)),
            cos: rope.cos.at(0),
            sin: rope.sin.at(0),
            keys: kv.keys.at(offset),
            values: kv.values.at(offset),
            heads: heads.heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            half: rope.half as u32,
            positions: rope.positions as u32,
            slots: kv.shape.slots as u32,
            epsilon: norms.map_or(0.0, |(_, _, epsilon)| epsilon),
        };
        let mut names: Vec<&Memory> = plan.memory().into_iter().chain(qkv.memory()).collect();
        names.extend([&rope.cos, &rope.sin, &kv.keys, &kv.values]);
        names.extend(norms.iter().flat_map(|(query, key, _)| [&query.memory, &key.memory]));
        let grid = [(heads.heads + 2 * heads.kv_heads).div_ceil(4), plan.rows, 1];
        let kernel = match self.arithmetic {
            Arithmetic::Plain => self.kernels.write_kv_plain.of(kv.bf16()),
            Arithmetic::Tensor => &self.kernels.write_kv_tensor,
        };
        // SAFETY: sizes were checked; positions and slots are checked in the kernel.
        unsafe { self.device.launch(kernel, grid, 128, 0, &arguments, &names) }
    }

    fn attend(
        &self,
        qkv: &CudaRows,
        params: AttentionParams,
        plan: &CudaPlan,
        kv: &CudaKv,
        layer: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        let (device, kernels, arithmetic) = (&self.device, &self.kernels, self.arithmetic);
        self.attention.attend(device, kernels, arithmetic, qkv, params, plan, kv, layer, out)
    }

    fn gate(
        &self,
        activation: Activation,
        gate_up: &CudaRows,
        rows: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        let width = gate_up.width / 2;
        gate_up.hold("gates and ups", rows, 2 * width)?;
        out.hold("gated values", rows, width)?;
        // Experts have a row for each row that goes to them, which may be more than a grid has.
        for first in (0..rows).step_by(GRID_ROWS) {
            let arguments = arguments::Gate {
                input: gate_up.parts_from(first),
                out: out.parts_from(first),
                width: width as u32,
                gelu: u32::from(activation == Activation::GeluTanh),
            };
            let (names, count) =
                (gate_up.memory().chain(out.memory()), GRID_ROWS.min(rows - first));
            // SAFETY: input and result were checked.
            unsafe { self.by_value(&self.kernels.gate, width, count, &arguments, names) }?;
        }
        Ok(())
    }

    fn route(
        &self,
        logits: &CudaRows,
        rows: usize,
        normalize: bool,
        out: &mut CudaRouting,
    ) -> Result<()> {
        self.choose_experts(logits, rows, normalize, out)
    }

    fn project_experts(
        &self,
        experts: &CudaExperts,
        activation: Activation,
        input: &CudaRows,
        rows: usize,
        routing: &CudaRouting,
        both: &mut CudaRows,
        activated: &mut CudaRows,
        accumulate: Accumulate,
        out: &mut CudaRows,
    ) -> Result<()> {
        let work = (both, activated);
        self.run_experts(experts, activation, input, rows, routing, work, accumulate, out)
    }

    fn routed(
        &self,
        routing: &CudaRouting,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        self.tell_experts(routing, rows, column, out)
    }

    fn copy_columns(
        &self,
        input: &CudaRows,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        self.copy(input, 0, rows, input.width, out, column)
    }

    fn take_columns(
        &self,
        input: &CudaRows,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        self.copy(input, column, rows, out.width, out, 0)
    }

    fn gather_sources(&self, input: &CudaRows, plan: &CudaPlan, out: &mut CudaRows) -> Result<()> {
        if !plan.has_sources {
            return Err(Error::Tensor("the plan does not say where its rows come from".into()));
        }
        let parts = plan.parts();
        self.gather(input, plan, parts.counts, parts.sources, 0..plan.rows, out)
    }

    fn gather_outputs(
        &self,
        input: &CudaRows,
        plan: &CudaPlan,
        first: usize,
        out: &mut CudaRows,
    ) -> Result<usize> {
        let parts = plan.parts();
        input.hold("rows to gather from", plan.rows, out.width)?;
        let piece = first..plan.outputs.min(first + out.capacity);
        self.gather(input, plan, parts.counts + 4, parts.outputs, piece.clone(), out)?;
        Ok(piece.len())
    }

    fn move_slots(&self, kv: &mut CudaKv, moves: &[(u32, u32)]) -> Result<()> {
        if let Some(bad) = moves.iter().find(|m| m.0.max(m.1) as usize >= kv.shape.slots) {
            return Err(Error::Tensor(format!("move {bad:?} of {} slots", kv.shape.slots)));
        }
        // In words of 16 bits.
        let width = kv.shape.kv_heads * kv.shape.head_dim * kv.shape.dtype.size() / 2;
        for moves in moves.chunks(MOVES) {
            let (count, list) = kv.moves.post_pairs(&self.device, moves)?;
            let arguments = arguments::MoveSlots {
                keys: kv.keys.at(0),
                values: kv.values.at(0),
                moves: list,
                count,
                slots: kv.shape.slots as u32,
                width: width as u32,
            };
            let names = [&kv.keys, &kv.values, &kv.moves.memory];
            let (kernel, layers) = (&self.kernels.move_slots, kv.shape.layers);
            // SAFETY: slots were checked.
            unsafe { self.by_value(kernel, width, layers, &arguments, names) }?;
        }
        Ok(())
    }

    fn move_rows(&self, rows: &mut CudaRows, moves: &[(u32, u32)]) -> Result<()> {
        let end = moves.iter().map(|m| m.0.max(m.1) as usize + 1).max().unwrap_or(0);
        rows.hold("rows to move", end, rows.width)?;
        for moves in moves.chunks(MOVES) {
            let mut list = self.moves.lock().unwrap_or_else(PoisonError::into_inner);
            let (count, moves) = list.post_pairs(&self.device, moves)?;
            let arguments = arguments::MoveRows {
                rows: rows.parts(),
                moves,
                count,
                capacity: rows.capacity as u32,
            };
            let names = rows.memory().chain([&list.memory]);
            // SAFETY: both rows of each move are there.
            unsafe { self.by_value(&self.kernels.move_rows, rows.width, 1, &arguments, names) }?;
        }
        Ok(())
    }

    fn scatter_outputs(&self, input: &CudaRows, plan: &CudaPlan, out: &mut CudaRows) -> Result<()> {
        input.hold("rows to scatter", plan.outputs, out.width)?;
        let parts = plan.parts();
        let arguments = arguments::Gather {
            count: parts.counts + 4,
            list: parts.destinations,
            input: input.parts(),
            out: out.parts(),
            rows: out.capacity as u32,
            first: 0,
        };
        let names = plan.memory().into_iter().chain(input.memory()).chain(out.memory());
        // SAFETY: the input is there, and destinations are checked in the kernel.
        unsafe { self.by_value(&self.kernels.scatter, out.width, plan.outputs, &arguments, names) }
    }

    fn clear_first(&self, plan: &CudaPlan, rows: &mut CudaRows) -> Result<()> {
        rows.hold("rows to clear", plan.rows, rows.width)?;
        let arguments = arguments::Clear { plan: plan.parts(), rows: rows.parts() };
        let names = plan.memory().into_iter().chain(rows.memory());
        // SAFETY: the rows are there.
        unsafe {
            self.by_value(&self.kernels.clear_first, rows.width, plan.rows, &arguments, names)
        }
    }

    fn extent(&self, plan: &CudaPlan) -> Extent {
        Extent { rows: plan.rows, outputs: plan.outputs }
    }

    fn graph_key(&self, state: &CudaState) -> Option<GraphKey> {
        state.graph_key()
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        self.graph_of(|_| enqueue()).map(Some)
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        graph.replay()
    }

    fn check_replay(
        &self,
        graph: &Graph,
        enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<String>> {
        graph.check_replay(enqueue)
    }

    fn moment(&self) -> Result<Mark> {
        self.mark()
    }

    fn time_between(&self, from: &Mark, to: &Mark) -> Result<Duration> {
        from.time_until(to)
    }

    fn state(&self, bounds: StateBounds) -> Result<CudaState> {
        CudaState::new(&self.device, bounds)
    }

    fn round_bytes(&self, bounds: &StateBounds, heads: HeadShape) -> u64 {
        let attention = match self.arithmetic {
            Arithmetic::Plain => 0,
            Arithmetic::Tensor => Attention::bytes(heads, bounds.stride),
        };
        (CudaState::bytes(bounds) + attention) as u64
    }

    fn begin_round(&self, state: &mut CudaState, batch: Batch) -> Result<()> {
        state.begin(&self.device, &self.kernels, batch)
    }

    fn plan_rows(
        &self,
        state: &mut CudaState,
        pass: PassRows,
        bound: Extent,
        plan: &mut CudaPlan,
    ) -> Result<()> {
        state.plan_rows(&self.device, &self.kernels, pass, bound, plan)
    }

    fn start_trees(&self, state: &mut CudaState, given: Vec<(usize, Tree)>) -> Result<()> {
        state.start_trees(&self.device, &self.kernels, given)
    }

    fn propose(
        &self,
        state: &mut CudaState,
        logits: &CudaRows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        state.choose(&self.device, &self.kernels, TokensOf::Level, logits, 0, ids)?;
        state.grow(&self.device, &self.kernels)
    }

    fn build_trees(&self, state: &mut CudaState) -> Result<()> {
        state.build_trees(&self.device, &self.kernels)
    }

    fn sample(&self, state: &mut CudaState, logits: &CudaRows, first: usize) -> Result<()> {
        state.choose(&self.device, &self.kernels, TokensOf::Target, logits, first, None)
    }

    fn accept(&self, state: &mut CudaState) -> Result<()> {
        state.accept(&self.device, &self.kernels)
    }

    fn compact_slots(&self, state: &CudaState, kv: &mut CudaKv) -> Result<()> {
        state.compact_slots(&self.device, &self.kernels, kv)
    }

    fn compact_rows(&self, state: &CudaState, rows: &mut CudaRows) -> Result<()> {
        state.compact_rows(&self.device, &self.kernels, rows)
    }

    fn publish(&self, state: &mut CudaState) -> Result<()> {
        state.publish(&self.device, &self.kernels)
    }

    fn park_rows(&self, state: &CudaState, rows: &mut CudaRows) -> Result<()> {
        state.park_rows(&self.device, &self.kernels, rows)
    }

    fn begin_extend(&self, state: &mut CudaState, rows: ExtendRows) -> Result<()> {
        state.begin_extend(&self.device, &self.kernels, rows)
    }

    fn seed_trees(
        &self,
        state: &mut CudaState,
        logits: &CudaRows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        state.choose(&self.device, &self.kernels, TokensOf::Seeds, logits, 0, ids)?;
        state.take_seeds(&self.device, &self.kernels)
    }

    fn keep_states(
        &self,
        state: &CudaState,
        layer: usize,
        kept: KeptLayout,
        rows: &mut CudaRows,
    ) -> Result<()> {
        state.keep_states(&self.device, &self.kernels, layer, kept, rows)
    }

    fn defers(&self) -> bool {
        true
    }

    fn copy_outputs(
        &self,
        state: &mut CudaState,
        returned: ReturnedRows<'_, CudaRows>,
    ) -> Result<()> {
        state.copy_outputs(&self.device, returned)
    }

    fn outputs(&self, state: &mut CudaState) -> Result<Vec<Option<RequestOutput>>> {
        state.outputs()
    }

    fn read(&self, rows_of: &CudaRows, rows: usize) -> Result<Vec<f32>> {
        rows_of.hold("rows to read", rows, rows_of.width)?;
        let mut values = self.device.read(&rows_of.values, rows * rows_of.stride)?;
        if rows_of.stride != rows_of.width {
            for row in 1..rows {
                let start = row * rows_of.stride;
                values.copy_within(start..start + rows_of.width, row * rows_of.width);
            }
            values.truncate(rows * rows_of.width);
        }
        Ok(values)
    }

    fn kv_shape(&self, kv: &CudaKv) -> KvShape {
        kv.shape
    }

    fn read_slots(
        &self,
        kv: &CudaKv,
        layers: Range<usize>,
        slots: &[u32],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.read_slots(&self.device, kv, layers, slots, out)
    }

    fn write_slots(
        &self,
        kv: &mut CudaKv,
        layers: Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()> {
        let mut staging = self.staging.lock().unwrap_or_else(PoisonError::into_inner);
        staging.write_slots(&self.device, kv, layers, slots, bytes)
    }

    fn read_row(&self, rows: &CudaRows, row: usize) -> Result<Vec<f32>> {
        transfer::read_row(&self.device, rows, row)
    }

    fn write_row(&self, rows: &mut CudaRows, row: usize, values: &[f32]) -> Result<()> {
        transfer::write_row(&self.device, rows, row, values)
    }

    fn read_seed(&self, state: &CudaState, place: usize) -> Result<Option<Candidates>> {
        state.read_seed(&self.device, place)
    }

    fn write_seed(
        &self,
        state: &mut CudaState,
        place: usize,
        seed: Option<Candidates>,
    ) -> Result<()> {
        state.write_seed(&self.device, place, seed.as_ref())
    }
}

impl CudaBackend {
    /// What a projection of normed rows reads: `input` where it norms them itself, else what a norm
    /// makes of them.
    fn norm_for<'a>(
        &self,
        weight: &CudaWeight,
        normed: Normed<'a, Self>,
        rows: usize,
    ) -> Result<(&'a CudaRows, Option<(&'a CudaVector, f32)>)> {
        let Normed { input, weight: norm, epsilon, .. } = normed;
        if input.width == weight.inputs && self.projections.norms(&self.kernels, weight, norm, rows)
        {
            return Ok((input, Some((norm, epsilon))));
        }
        Ok((normed.rows(self, rows)?, None))
    }

    /// Projects and gates: in one launch where there is a kernel for it.
    fn run_gated(
        &self,
        projection: &Projection<'_>,
        activation: Activation,
        both: &mut CudaRows,
        out: &mut CudaRows,
    ) -> Result<()> {
        let (device, kernels, rows) = (&self.device, &self.kernels, projection.rows);
        if activation == Activation::Silu
            && self.projections.gates(kernels, projection.weight, rows)
        {
            return self.projections.run(device, kernels, projection, true, out);
        }
        self.projections.run(device, kernels, projection, false, both)?;
        self.gate(activation, both, rows, out)
    }
}
