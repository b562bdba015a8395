//! The operations: those of a forward pass are shared out to the pool's threads, the steps of a
//! round are [`RoundState`]'s.

use std::ops::Range;
use std::time::{Duration, Instant};

use super::CpuBackend;
use super::kv::CpuKv;
use super::moe::{CpuExperts, CpuRouting, Mixture};
use super::plan::CpuPlan;
use super::product::Finish;
use super::rows::CpuRows;
use super::rowwise;
use super::share::check;
use super::simd::LANES;
use super::table::CpuTable;
use super::watch::Operation;
use super::weight::CpuWeight;
use crate::round::{
    Batch, Candidates, DraftQuery, ExtendRows, Extent, KeptLayout, PassRows, RequestOutput,
    ReturnedRows, RoundState, StateBounds, Tree,
};
use crate::sampling;
use crate::{
    Accumulate, Activation, AttentionParams, Backend, DraftIds, Error, ForwardPlan, HeadShape,
    HostTensor, KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};

use crate::known_bugs::Bug;

impl Backend for CpuBackend {
    type Rows = CpuRows;
    type Weight = CpuWeight;
    type Experts = CpuExperts;
    type Routing = CpuRouting;
    type Vector = Vec<f32>;
    type Table = CpuTable;
    type Rope = RopeTable;
    type Kv = CpuKv;
    type Plan = CpuPlan;
    type State = RoundState;
    type Graph = std::convert::Infallible;
    type Moment = Instant;

    fn describe(&self) -> String {
        format!("cpu, {}, {} threads", self.isa(), self.threads())
    }

    fn kernel_family(&self) -> String {
        // Instruction sets change the speed and nothing else.
        "cpu".into()
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<CpuWeight> {
        CpuWeight::pack(parts, format, &self.pool)
    }

    fn experts(&self, gate_up: Vec<CpuWeight>, down: Vec<CpuWeight>) -> Result<CpuExperts> {
        CpuExperts::new(gate_up, down)
    }

    fn routing(&self, rows: usize, per_token: usize) -> Result<CpuRouting> {
        Ok(CpuRouting::new(rows, per_token))
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<Vec<f32>> {
        let mut all = Vec::new();
        for part in parts {
            all.extend(part.to_f32()?);
        }
        Ok(all)
    }

    fn table(&self, tensor: &HostTensor) -> Result<CpuTable> {
        CpuTable::copy(tensor, &self.pool)
    }

    fn rope(&self, table: &RopeTable) -> Result<RopeTable> {
        Ok(table.clone())
    }

    fn kv(&self, shape: KvShape) -> Result<CpuKv> {
        CpuKv::new(shape)
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<CpuRows> {
        let _reported = self.report(Operation::Rows { capacity, width });
        CpuRows::new(capacity, width)
    }

    fn plan(&self, _bounds: PlanBounds) -> Result<CpuPlan> {
        Ok(CpuPlan::default())
    }

    fn place(&self, host: &ForwardPlan, plan: &mut CpuPlan) -> Result<()> {
        let _reported = self.report(Operation::Place);
        plan.place(host)
    }

    fn embed(&self, table: &CpuTable, scale: f32, plan: &CpuPlan, out: &mut CpuRows) -> Result<()> {
        let _reported = self.report(Operation::Embed);
        let tokens = &plan.host().tokens;
        let width = table.width();
        check(out.width() == width, || {
            format!("an embedding of width {width} does not fit rows of {}", out.width())
        })?;
        if let Some(token) = tokens.iter().find(|&&token| token as usize >= table.tokens()) {
            return Err(Error::Tensor(format!(
                "token {token} is beyond the {} tokens of the embedding table",
                table.tokens()
            )));
        }
        let shared = out.shared();
        self.over_rows(tokens.len(), width, &|row| {
            // SAFETY: each row is written by one task.
            let out = unsafe { shared.row_mut(row) };
            table.read(tokens[row], out);
            out.iter_mut().for_each(|x| *x *= scale);
        });
        Ok(())
    }

    fn add(&self, input: &CpuRows, rows: usize, out: &mut CpuRows) -> Result<()> {
        let _reported = self.report(Operation::Add);
        let width = out.width();
        check(input.width() == width, || {
            format!("rows of {} cannot be added to rows of {width}", input.width())
        })?;
        assert!(rows <= input.capacity() && rows <= out.capacity(), "rows beyond the buffers");
        let (isa, shared) = (self.isa, out.shared());
        self.over_rows(rows, width, &|row| {
            // SAFETY: both have `width` values, and each row is written by one task.
            unsafe {
                let out = shared.row_mut(row).as_mut_ptr();
                rowwise::add(isa, input.row(row).as_ptr(), width, out);
            }
        });
        Ok(())
    }

    fn soft_cap(&self, rows_of: &mut CpuRows, rows: usize, cap: f32) -> Result<()> {
        let _reported = self.report(Operation::SoftCap);
        let width = rows_of.width();
        assert!(rows <= rows_of.capacity(), "rows beyond the buffer");
        let (isa, shared) = (self.isa, rows_of.shared());
        self.over_rows(rows, 8 * width, &|row| {
            // SAFETY: each row is written by one task.
            unsafe { rowwise::soft_cap(isa, shared.row_mut(row).as_mut_ptr(), width, cap) }
        });
        Ok(())
    }

    fn rms_norm_columns(
        &self,
        input: &CpuRows,
        weight: &Vec<f32>,
        epsilon: f32,
        rows: usize,
        column: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::RmsNorm);
        let width = weight.len();
        check(input.width() == width, || {
            format!("a norm of {width} weights does not fit rows of {}", input.width())
        })?;
        let columns = out.columns(column, width)?;
        assert!(rows <= input.capacity() && rows <= out.capacity(), "rows beyond the buffers");
        let (isa, shared) = (self.isa, out.shared());
        self.over_rows(rows, width, &|row| {
            // SAFETY: all have `width` values, and each row is written by one task.
            unsafe {
                let out = shared.row_mut(row)[columns.clone()].as_mut_ptr();
                let x = input.row(row).as_ptr();
                rowwise::rms_norm(isa, x, weight.as_ptr(), width, epsilon, out);
            }
        });
        Ok(())
    }

    fn project(
        &self,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        input: &CpuRows,
        rows: usize,
        accumulate: Accumulate,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::project(weight));
        self.run_product(weight, bias, input, rows, Finish::Outputs(accumulate), out)
    }

    fn project_gated(
        &self,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        activation: Activation,
        input: &CpuRows,
        rows: usize,
        both: &mut CpuRows,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::project(weight));
        if weight.outputs().is_multiple_of(2 * LANES) && out.width() == weight.outputs() / 2 {
            // A thread gates what it has just summed up: other threads' sums are far away.
            let finish = Finish::Gated(weight.panels() / 2, activation);
            return self.run_product(weight, bias, input, rows, finish, out);
        }
        self.run_product(weight, bias, input, rows, Finish::Outputs(Accumulate::Set), both)?;
        self.gate_rows(activation, both, rows, out)
    }

    fn write_kv(
        &self,
        qkv: &mut CpuRows,
        heads: HeadShape,
        norms: Option<(&Vec<f32>, &Vec<f32>, f32)>,
        rope: &RopeTable,
        plan: &CpuPlan,
        kv: &mut CpuKv,
        layer: usize,
    ) -> Result<()> {
        let _reported = self.report(Operation::WriteKv);
        self.place_kv(qkv, heads, norms, rope, plan, (kv, layer))
    }

    fn attend(
        &self,
        qkv: &CpuRows,
        params: AttentionParams,
        plan: &CpuPlan,
        kv: &CpuKv,
        layer: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::Attend);
        self.attend_placed(qkv, params, plan, (kv, layer), out)
    }

    fn gate(
        &self,
        activation: Activation,
        gate_up: &CpuRows,
        rows: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::Gate);
        self.gate_rows(activation, gate_up, rows, out)
    }

    fn route(
        &self,
        logits: &CpuRows,
        rows: usize,
        normalize: bool,
        out: &mut CpuRouting,
    ) -> Result<()> {
        let _reported = self.report(Operation::Route);
        self.choose_experts(logits, rows, normalize, out)
    }

    fn project_experts(
        &self,
        experts: &CpuExperts,
        activation: Activation,
        input: &CpuRows,
        rows: usize,
        routing: &CpuRouting,
        both: &mut CpuRows,
        activated: &mut CpuRows,
        accumulate: Accumulate,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::ProjectExperts);
        let mixture = Mixture { experts, routing, rows };
        self.run_experts(&mixture, activation, input, (both, activated), accumulate, out)
    }

    fn routed(
        &self,
        routing: &CpuRouting,
        rows: usize,
        column: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::Routed);
        let columns = out.columns(column, routing.per_token())?;
        assert!(rows <= routing.rows(), "rows beyond those that were routed");
        for row in 0..rows {
            let to = out.row_mut(row)[columns.clone()].iter_mut();
            to.zip(routing.row(row)).for_each(|(to, &(id, _))| *to = id as f32);
        }
        Ok(())
    }

    fn copy_columns(
        &self,
        input: &CpuRows,
        rows: usize,
        column: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::CopyColumns);
        let columns = out.columns(column, input.width())?;
        for row in 0..rows {
            out.row_mut(row)[columns.clone()].copy_from_slice(input.row(row));
        }
        Ok(())
    }

    fn take_columns(
        &self,
        input: &CpuRows,
        rows: usize,
        column: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let _reported = self.report(Operation::TakeColumns);
        let end = column + out.width();
        check(end <= input.width(), || {
            format!("columns up to {end} are not in rows of {}", input.width())
        })?;
        for row in 0..rows {
            out.row_mut(row).copy_from_slice(&input.row(row)[column..end]);
        }
        Ok(())
    }

    fn gather_sources(&self, input: &CpuRows, plan: &CpuPlan, out: &mut CpuRows) -> Result<()> {
        let _reported = self.report(Operation::GatherSources);
        let host = plan.host();
        check(input.width() == out.width() && host.sources.len() == host.rows(), || {
            format!(
                "{} sources of width {} for {} rows of width {}",
                host.sources.len(),
                input.width(),
                host.rows(),
                out.width()
            )
        })?;
        let outside = host.sources.iter().find(|&&source| source as usize >= input.capacity());
        if let Some(source) = outside {
            let there = input.capacity();
            return Err(Error::Tensor(format!("source {source} of {there} hidden states")));
        }
        out.copy_rows(input, host.sources.iter().map(|&source| source as usize).zip(0..))
    }

    fn gather_outputs(
        &self,
        input: &CpuRows,
        plan: &CpuPlan,
        first: usize,
        out: &mut CpuRows,
    ) -> Result<usize> {
        let _reported = self.report(Operation::GatherOutputs);
        let outputs = plan.host().outputs.get(first..).unwrap_or_default();
        let outputs = &outputs[..outputs.len().min(out.capacity())];
        out.copy_rows(input, outputs.iter().map(|&row| row as usize).zip(0..))?;
        Ok(outputs.len())
    }

    fn move_slots(&self, kv: &mut CpuKv, moves: &[(u32, u32)]) -> Result<()> {
        if !moves.is_empty() {
            let _reported = self.report(Operation::MoveSlots);
            moves.iter().for_each(|&(from, to)| kv.move_slot(from, to));
        }
        Ok(())
    }

    fn move_rows(&self, rows: &mut CpuRows, moves: &[(u32, u32)]) -> Result<()> {
        if !moves.is_empty() {
            let _reported = self.report(Operation::MoveRows);
            moves.iter().for_each(|&(from, to)| rows.move_row(from as usize, to as usize));
        }
        Ok(())
    }

    fn scatter_outputs(&self, input: &CpuRows, plan: &CpuPlan, out: &mut CpuRows) -> Result<()> {
        let _reported = self.report(Operation::ScatterOutputs);
        let ForwardPlan { outputs, destinations, .. } = plan.host();
        let to = |i| destinations.get(i).map_or(i, |&to| to as usize);
        out.copy_rows(input, (0..outputs.len()).map(|i| (i, to(i))))
    }

    fn clear_first(&self, plan: &CpuPlan, rows: &mut CpuRows) -> Result<()> {
        let _reported = self.report(Operation::ClearFirst);
        let positions = plan.host().positions.iter().enumerate();
        positions.filter(|(_, at)| **at == 0).for_each(|(row, _)| rows.row_mut(row).fill(0.0));
        Ok(())
    }

    fn extent(&self, plan: &CpuPlan) -> Extent {
        Extent { rows: plan.host().rows(), outputs: plan.host().outputs.len() }
    }

    fn replay(&self, graph: &Self::Graph) -> Result<()> {
        match *graph {}
    }

    fn check_replay(
        &self,
        graph: &Self::Graph,
        _enqueue: &mut dyn FnMut() -> Result<()>,
    ) -> Result<Option<String>> {
        match *graph {}
    }

    fn moment(&self) -> Result<Instant> {
        Ok(Instant::now())
    }

    fn time_between(&self, from: &Instant, to: &Instant) -> Result<Duration> {
        Ok(to.saturating_duration_since(*from))
    }

    fn state(&self, bounds: StateBounds) -> Result<RoundState> {
        Ok(RoundState::new(bounds))
    }

    fn begin_round(&self, state: &mut RoundState, batch: Batch) -> Result<()> {
        state.begin(batch);
        Ok(())
    }

    fn plan_rows(
        &self,
        state: &mut RoundState,
        pass: PassRows,
        _bound: Extent,
        plan: &mut CpuPlan,
    ) -> Result<()> {
        let _reported = self.report(Operation::Place);
        if Bug::GraphPadding.alive() {
            return plan.place(state.plan_padded_rows(pass, _bound));
        }
        plan.place(state.plan_rows(pass))
    }

    fn start_trees(&self, state: &mut RoundState, given: Vec<(usize, Tree)>) -> Result<()> {
        state.start_trees(given);
        Ok(())
    }

    fn propose(
        &self,
        state: &mut RoundState,
        logits: &CpuRows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let _reported = self.report(Operation::Propose);
        let proposed = self.candidates(state.level_queries(), logits, ids);
        state.take_level(proposed);
        Ok(())
    }

    fn build_trees(&self, state: &mut RoundState) -> Result<()> {
        let drafted = state.finish_trees();
        if let Some(watch) = &self.watch {
            let trees = drafted.into_iter().filter_map(|row| state.tree(row));
            trees.for_each(|(request, tree)| watch.tree(request, tree));
        }
        state.limit_trees();
        Ok(())
    }

    fn sample(&self, state: &mut RoundState, logits: &CpuRows, first: usize) -> Result<()> {
        let _reported = self.report(Operation::Sample);
        let (chosen, trees) = state.sample_queries(first..first + logits.capacity());
        let row = |output: usize| logits.row(output - first);
        let choices = self.pool.map(&chosen, |query| sampling::choose(row(query.row), query));
        let paths = self.pool.map(&trees, |tree| tree.follow(row));
        state.take_samples(first, choices, paths);
        Ok(())
    }

    fn accept(&self, state: &mut RoundState) -> Result<()> {
        state.accept();
        Ok(())
    }

    fn compact_slots(&self, state: &RoundState, kv: &mut CpuKv) -> Result<()> {
        self.move_slots(kv, &state.kept().slots)
    }

    fn compact_rows(&self, state: &RoundState, rows: &mut CpuRows) -> Result<()> {
        self.move_rows(rows, &state.kept().rows)
    }

    fn publish(&self, state: &mut RoundState) -> Result<()> {
        state.publish();
        Ok(())
    }

    fn park_rows(&self, state: &RoundState, rows: &mut CpuRows) -> Result<()> {
        self.move_rows(rows, state.parked())
    }

    fn begin_extend(&self, state: &mut RoundState, rows: ExtendRows) -> Result<()> {
        state.begin_extend(rows);
        Ok(())
    }

    fn seed_trees(
        &self,
        state: &mut RoundState,
        logits: &CpuRows,
        ids: Option<DraftIds<'_>>,
    ) -> Result<()> {
        let _reported = self.report(Operation::Propose);
        let seeds = self.candidates(state.seed_queries(), logits, ids);
        state.take_seeds(seeds);
        Ok(())
    }

    fn keep_states(
        &self,
        state: &RoundState,
        layer: usize,
        kept: KeptLayout,
        rows: &mut CpuRows,
    ) -> Result<()> {
        self.move_rows(rows, &state.kept_states(layer, kept))
    }

    fn copy_outputs(
        &self,
        state: &mut RoundState,
        returned: ReturnedRows<'_, CpuRows>,
    ) -> Result<()> {
        let _reported = self.report(Operation::Outputs);
        state.take_returned(returned, CpuRows::row);
        state.copy_outputs();
        Ok(())
    }

    fn outputs(&self, state: &mut RoundState) -> Result<Vec<Option<RequestOutput>>> {
        state
            .take_outputs()
            .ok_or_else(|| Error::Device("no outputs of a round were copied".into()))
    }

    fn read(&self, rows_of: &CpuRows, rows: usize) -> Result<Vec<f32>> {
        let _reported = self.report(Operation::Read);
        Ok((0..rows).flat_map(|row| rows_of.row(row)).copied().collect())
    }

    fn kv_shape(&self, kv: &CpuKv) -> KvShape {
        kv.shape()
    }

    fn read_slots(
        &self,
        kv: &CpuKv,
        layers: Range<usize>,
        slots: &[u32],
        out: &mut Vec<u8>,
    ) -> Result<()> {
        let _reported = self.report(Operation::ReadSlots);
        kv.read_slots(layers, slots, out)
    }

    fn write_slots(
        &self,
        kv: &mut CpuKv,
        layers: Range<usize>,
        slots: &[u32],
        bytes: &[u8],
    ) -> Result<()> {
        let _reported = self.report(Operation::WriteSlots);
        kv.write_slots(layers, slots, bytes)
    }

    fn read_row(&self, rows: &CpuRows, row: usize) -> Result<Vec<f32>> {
        check(row < rows.capacity(), || format!("row {row} of {}", rows.capacity()))?;
        Ok(rows.row(row).to_vec())
    }

    fn write_row(&self, rows: &mut CpuRows, row: usize, values: &[f32]) -> Result<()> {
        let (capacity, width) = (rows.capacity(), rows.width());
        check(row < capacity && values.len() == width, || {
            format!("{} values for row {row} of {capacity} rows of {width}", values.len())
        })?;
        rows.row_mut(row).copy_from_slice(values);
        Ok(())
    }

    fn read_seed(&self, state: &RoundState, place: usize) -> Result<Option<Candidates>> {
        Ok(state.seed(place).cloned())
    }

    fn write_seed(
        &self,
        state: &mut RoundState,
        place: usize,
        seed: Option<Candidates>,
    ) -> Result<()> {
        state.set_seed(place, seed);
        Ok(())
    }
}

impl CpuBackend {
    /// What a draft proposes by each query.
    fn candidates(
        &self,
        (queries, count): (Vec<DraftQuery<'_>>, usize),
        logits: &CpuRows,
        ids: Option<DraftIds<'_>>,
    ) -> Vec<Candidates> {
        self.pool.map(&queries, |query| query.answer(logits.row(query.query.row), count, ids))
    }
}
