//! The operations, each one launch or a few.

use std::convert::Infallible;
use std::sync::Arc;

use cudarc::driver::sys::CUdevice_attribute;

use super::attention::{Attention, fits};
use super::device::{Device, failed};
use super::kernels::{Kernels, PROJECT_ROWS};
use super::memory::{
    CudaKv, CudaPlan, CudaRope, CudaRows, CudaTable, CudaVector, CudaWeight, MOVES,
};
use super::{Graph, Mark, arguments};
use crate::round::{
    Batch, ExtendRows, Extent, KeptLayout, PassRows, RequestOutput, ReturnedRows, Simulate,
    StateBounds, Tree, TreeLimits,
};
use crate::{
    Accumulate, Activation, AttentionParams, Backend, DraftIds, Error, ForwardPlan, HeadShape,
    HostTensor, KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};

/// Threads of a block in kernels that give each element a thread, and in most others.
const THREADS: usize = 256;

fn no_rounds() -> Error {
    Error::Unavailable("the steps of a round do not run on CUDA yet".into())
}

/// Refuses what has no kernel yet.
fn unavailable(what: &str) -> Error {
    Error::Unavailable(format!("{what} is not available on CUDA yet"))
}

/// One CUDA device, with its kernels.
pub struct CudaBackend {
    device: Arc<Device>,
    kernels: Kernels,
    attention: Attention,
    description: String,
    multiprocessors: usize,
}

impl CudaBackend {
    /// Opens device `ordinal`; [`Error::Unavailable`] says what the machine lacks.
    pub fn new(ordinal: usize) -> Result<Self> {
        let device = Device::open(ordinal)?;
        let about = failed("asking about the device");
        let (major, minor) = device.context.compute_capability().map_err(&about)?;
        let count = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT;
        let multiprocessors = device.attribute(count)? as usize;
        let name = device.context.name().map_err(&about)?;
        let gib = device.context.total_mem().map_err(&about)? as f64 / (1u64 << 30) as f64;
        let kernels = Kernels::compile(&device.context, major, minor)?;
        Ok(Self {
            device: Arc::new(device),
            kernels,
            attention: Attention::default(),
            description: format!(
                "cuda:{ordinal}, {name}, compute capability {major}.{minor}, \
                 {multiprocessors} multiprocessors, {gib:.0} GiB"
            ),
            multiprocessors,
        })
    }

    /// The graph of the operations that `enqueue` calls, which are not run.
    ///
    /// The row counts of now are the graph's; a plan placed later may have fewer rows and any
    /// lengths. Run the pass once before, so that all memory is there.
    pub fn graph_of(&self, enqueue: impl FnOnce(&Self) -> Result<()>) -> Result<Graph> {
        Graph::capture(&self.device, || enqueue(self))
    }

    /// A mark behind all that was enqueued so far, for timing.
    pub fn mark(&self) -> Result<Mark> {
        self.device.outside_capture("a mark")?;
        Mark::new(&self.device)
    }
}

impl Backend for CudaBackend {
    type Rows = CudaRows;
    type Weight = CudaWeight;
    /// Experts do not run on CUDA yet, so there are none.
    type Experts = Infallible;
    /// As [`Self::Experts`].
    type Routing = Infallible;
    type Vector = CudaVector;
    type Table = CudaTable;
    type Rope = CudaRope;
    type Kv = CudaKv;
    type Plan = CudaPlan;
    /// Rounds do not run on CUDA yet, so there is none.
    type State = Infallible;
    type Graph = Graph;

    fn describe(&self) -> String {
        self.description.clone()
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<CudaWeight> {
        CudaWeight::new(&self.device, parts, format)
    }

    fn experts(&self, _: Vec<CudaWeight>, _: Vec<CudaWeight>) -> Result<Infallible> {
        Err(unavailable("a mixture of experts"))
    }

    fn routing(&self, _: usize, _: usize) -> Result<Infallible> {
        Err(unavailable("a mixture of experts"))
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<CudaVector> {
        CudaVector::new(&self.device, parts)
    }

    fn table(&self, tensor: &HostTensor) -> Result<CudaTable> {
        CudaTable::new(&self.device, tensor)
    }

    fn rope(&self, table: &RopeTable) -> Result<CudaRope> {
        CudaRope::new(&self.device, table)
    }

    fn kv(&self, shape: KvShape) -> Result<CudaKv> {
        CudaKv::new(&self.device, shape)
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<CudaRows> {
        CudaRows::new(&self.device, capacity, width)
    }

    fn plan(&self, bounds: PlanBounds) -> Result<CudaPlan> {
        CudaPlan::new(&self.device, bounds)
    }

    fn place(&self, host: &ForwardPlan, plan: &mut CudaPlan) -> Result<()> {
        plan.place(&self.device, host)
    }

    fn embed(
        &self,
        table: &CudaTable,
        scale: f32,
        plan: &CudaPlan,
        out: &mut CudaRows,
    ) -> Result<()> {
        if scale != 1.0 {
            return Err(unavailable("an embedding with a scale"));
        }
        out.hold("embeddings", plan.rows, table.width)?;
        let arguments = arguments::Embed {
            plan: plan.parts(),
            table: table.memory.at(0),
            out: out.memory.at(0),
            width: table.width as u32,
            tokens: table.tokens as u32,
            out_stride: out.stride as u32,
        };
        let grid = [table.width.div_ceil(THREADS), plan.rows, 1];
        let names = [plan.memory(), &table.memory, &out.memory];
        let kernel = self.kernels.embed.of(table.bf16);
        // SAFETY: the result fits, and tokens are clamped in the kernel.
        unsafe { self.launch(kernel, grid, &arguments, &names) }
    }

    fn add(&self, _: &CudaRows, _: usize, _: &mut CudaRows) -> Result<()> {
        Err(unavailable("the addition of rows"))
    }

    fn soft_cap(&self, _: &mut CudaRows, _: usize, _: f32) -> Result<()> {
        Err(unavailable("a soft cap"))
    }

    fn rms_norm(
        &self,
        input: &CudaRows,
        weight: &CudaVector,
        epsilon: f32,
        rows: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        input.hold("a norm's input", rows, weight.len)?;
        out.hold("a norm's result", rows, weight.len)?;
        let arguments = arguments::Norm {
            input: input.memory.at(0),
            weight: weight.memory.at(0),
            out: out.memory.at(0),
            width: weight.len as u32,
            in_stride: input.stride as u32,
            out_stride: out.stride as u32,
            epsilon,
        };
        let names = [&input.memory, &weight.memory, &out.memory];
        // SAFETY: input and result were checked.
        unsafe { self.launch(&self.kernels.rms_norm, [rows, 1, 1], &arguments, &names) }
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
        input.hold("a projection's input", rows, weight.inputs)?;
        out.hold("a projection's result", rows, weight.outputs)?;
        if bias.is_some_and(|bias| bias.len < weight.outputs) {
            return Err(Error::Tensor(format!("a bias of less than {} values", weight.outputs)));
        }
        let mut names = vec![&weight.memory, &input.memory, &out.memory];
        names.extend(bias.map(|bias| &bias.memory));
        for first in (0..rows).step_by(PROJECT_ROWS) {
            let count = PROJECT_ROWS.min(rows - first);
            let arguments = arguments::Project {
                weight: weight.memory.at(0),
                input: input.memory.at(first * input.stride * 4),
                bias: bias.map_or(0, |bias| bias.memory.at(0)),
                out: out.memory.at(first * out.stride * 4),
                inputs: weight.inputs as u32,
                outputs: weight.outputs as u32,
                weight_stride: weight.stride as u32,
                in_stride: input.stride as u32,
                out_stride: out.stride as u32,
                rows: count as u32,
                add: u32::from(accumulate == Accumulate::Add),
            };
            let (kernel, per_warp) =
                self.kernels.project(weight.bf16, count, weight.outputs, self.multiprocessors);
            let grid = [weight.outputs.div_ceil(per_warp * THREADS / 32), 1, 1];
            // SAFETY: input, bias and result were checked; room for rows comes in whole groups.
            unsafe { self.launch(kernel, grid, &arguments, &names) }?;
        }
        Ok(())
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
        fits(heads, kv)?;
        qkv.hold("queries, keys and values", plan.rows, heads.qkv_width())?;
        if 2 * rope.half > heads.head_dim || rope.positions == 0 {
            return Err(Error::Tensor(format!(
                "a rope table of {} positions and {} angles does not fit heads of width {}",
                rope.positions, rope.half, heads.head_dim
            )));
        }
        if norms.is_some_and(|(q, k, _)| q.len.min(k.len) < heads.head_dim) {
            return Err(Error::Tensor("norms of queries and keys have the head's width".into()));
        }
        let offset = kv.layer(layer)?;
        let arguments = arguments::WriteKv {
            plan: plan.parts(),
            qkv: qkv.memory.at(0),
            query_norm: norms.map_or(0, |(query, _, _)| query.memory.at(0)),
            key_norm: norms.map_or(0, |(_, key, _)| key.memory.at(0)),
            cos: rope.cos.at(0),
            sin: rope.sin.at(0),
            keys: kv.keys.at(offset),
            values: kv.values.at(offset),
            heads: heads.heads as u32,
            kv_heads: heads.kv_heads as u32,
            head_dim: heads.head_dim as u32,
            qkv_stride: qkv.stride as u32,
            half: rope.half as u32,
            positions: rope.positions as u32,
            slots: kv.shape.slots as u32,
            epsilon: norms.map_or(0.0, |(_, _, epsilon)| epsilon),
        };
        let mut names =
            vec![plan.memory(), &qkv.memory, &rope.cos, &rope.sin, &kv.keys, &kv.values];
        names.extend(norms.iter().flat_map(|(query, key, _)| [&query.memory, &key.memory]));
        let grid = [(heads.heads + 2 * heads.kv_heads).div_ceil(4), plan.rows, 1];
        if plan.rows == 0 {
            return Ok(());
        }
        let kernel = self.kernels.write_kv.of(kv.bf16());
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
        if params.window.is_some() {
            return Err(unavailable("attention within a window"));
        }
        let (device, kernels) = (&self.device, &self.kernels);
        self.attention.attend(device, kernels, qkv, params, plan, kv, layer, out)
    }

    fn gate(
        &self,
        activation: Activation,
        gate_up: &CudaRows,
        rows: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        if activation != Activation::Silu {
            return Err(unavailable("a gated unit of GELU"));
        }
        let width = gate_up.width / 2;
        gate_up.hold("gates and ups", rows, 2 * width)?;
        out.hold("gated values", rows, width)?;
        let arguments = arguments::Swiglu {
            gate_up: gate_up.memory.at(0),
            out: out.memory.at(0),
            width: width as u32,
            in_stride: gate_up.stride as u32,
            out_stride: out.stride as u32,
        };
        let grid = [width.div_ceil(THREADS), rows, 1];
        let names = [&gate_up.memory, &out.memory];
        // SAFETY: input and result were checked.
        unsafe { self.launch(&self.kernels.swiglu, grid, &arguments, &names) }
    }

    fn route(&self, _: &CudaRows, _: usize, _: bool, routing: &mut Infallible) -> Result<()> {
        match *routing {}
    }

    fn project_experts(
        &self,
        experts: &Infallible,
        _: Activation,
        _: &CudaRows,
        _: usize,
        _: &Infallible,
        _: &mut CudaRows,
        _: &mut CudaRows,
        _: Accumulate,
        _: &mut CudaRows,
    ) -> Result<()> {
        match *experts {}
    }

    fn routed(&self, routing: &Infallible, _: usize, _: usize, _: &mut CudaRows) -> Result<()> {
        match *routing {}
    }

    fn copy_columns(
        &self,
        input: &CudaRows,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        input.hold("rows to copy", rows, input.width)?;
        out.hold("rows to copy into", rows, column + input.width)?;
        let arguments = arguments::Copy {
            input: input.memory.at(0),
            out: out.memory.at(0),
            width: input.width as u32,
            in_stride: input.stride as u32,
            out_stride: out.stride as u32,
            column: column as u32,
        };
        let grid = [input.width.div_ceil(THREADS), rows, 1];
        let names = [&input.memory, &out.memory];
        // SAFETY: both sides hold these rows and columns.
        unsafe { self.launch(&self.kernels.copy_columns, grid, &arguments, &names) }
    }

    fn take_columns(
        &self,
        input: &CudaRows,
        rows: usize,
        column: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        input.hold("rows to take columns of", rows, column + out.width)?;
        out.hold("rows to put them in", rows, out.width)?;
        let arguments = arguments::Copy {
            input: input.memory.at(4 * column),
            out: out.memory.at(0),
            width: out.width as u32,
            in_stride: input.stride as u32,
            out_stride: out.stride as u32,
            column: 0,
        };
        let grid = [out.width.div_ceil(THREADS), rows, 1];
        let names = [&input.memory, &out.memory];
        // SAFETY: both sides hold these rows and columns.
        unsafe { self.launch(&self.kernels.copy_columns, grid, &arguments, &names) }
    }

    fn gather_sources(&self, input: &CudaRows, plan: &CudaPlan, out: &mut CudaRows) -> Result<()> {
        let parts = plan.parts();
        self.gather(input, plan, parts.counts, parts.sources, plan.rows, out)
    }

    fn gather_outputs(
        &self,
        input: &CudaRows,
        plan: &CudaPlan,
        out: &mut CudaRows,
    ) -> Result<usize> {
        let parts = plan.parts();
        input.hold("rows to gather from", plan.rows, out.width)?;
        self.gather(input, plan, parts.counts + 4, parts.outputs, plan.outputs, out)?;
        Ok(plan.outputs)
    }

    fn move_slots(&self, kv: &mut CudaKv, moves: &[(u32, u32)]) -> Result<()> {
        if let Some(bad) = moves.iter().find(|m| m.0.max(m.1) as usize >= kv.shape.slots) {
            return Err(Error::Tensor(format!("move {bad:?} of {} slots", kv.shape.slots)));
        }
        let width = kv.shape.kv_heads * kv.shape.head_dim;
        for moves in moves.chunks(MOVES) {
            kv.moves.post(&self.device, |words| {
                for (pair, &(from, to)) in words.chunks_exact_mut(2).zip(moves) {
                    pair.copy_from_slice(&[from, to]);
                }
                2 * moves.len()
            })?;
            let arguments = arguments::Move {
                keys: kv.keys.at(0),
                values: kv.values.at(0),
                moves: kv.moves.memory.at(0),
                count: moves.len() as u32,
                slots: kv.shape.slots as u32,
                width: width as u32,
            };
            let grid = [width.div_ceil(THREADS), kv.shape.layers, 1];
            let names = [&kv.keys, &kv.values, &kv.moves.memory];
            let kernel = self.kernels.move_slots.of(kv.bf16());
            // SAFETY: slots were checked.
            unsafe { self.launch(kernel, grid, &arguments, &names) }?;
        }
        Ok(())
    }

    fn move_rows(&self, rows: &mut CudaRows, moves: &[(u32, u32)]) -> Result<()> {
        // Few rows move in a round, and the stream keeps their order.
        for &(from, to) in moves {
            rows.hold("rows to move", from.max(to) as usize + 1, rows.width)?;
            let at = |row: u32| rows.memory.at(4 * row as usize * rows.stride);
            let arguments = arguments::Copy {
                input: at(from),
                out: at(to),
                width: rows.width as u32,
                in_stride: rows.stride as u32,
                out_stride: rows.stride as u32,
                column: 0,
            };
            let grid = [rows.width.div_ceil(THREADS), 1, 1];
            // SAFETY: both rows are there.
            unsafe { self.launch(&self.kernels.copy_columns, grid, &arguments, &[&rows.memory]) }?;
        }
        Ok(())
    }

    fn scatter_outputs(&self, _: &CudaRows, _: &CudaPlan, _: &mut CudaRows) -> Result<()> {
        Err(no_rounds())
    }

    fn clear_first(&self, _: &CudaPlan, _: &mut CudaRows) -> Result<()> {
        Err(no_rounds())
    }

    fn extent(&self, plan: &CudaPlan) -> Extent {
        Extent { rows: plan.rows, outputs: plan.outputs }
    }

    fn capture(&self, enqueue: &mut dyn FnMut() -> Result<()>) -> Result<Option<Graph>> {
        Ok(Some(self.graph_of(|_| enqueue())?))
    }

    fn replay(&self, graph: &Graph) -> Result<()> {
        graph.replay()
    }

    fn state(&self, _: StateBounds) -> Result<Infallible> {
        Err(no_rounds())
    }

    fn begin_round(&self, state: &mut Infallible, _: Batch) -> Result<()> {
        match *state {}
    }

    fn plan_rows(
        &self,
        state: &mut Infallible,
        _: PassRows,
        _: Extent,
        _: &mut CudaPlan,
    ) -> Result<()> {
        match *state {}
    }

    fn start_trees(&self, state: &mut Infallible, _: Vec<(usize, Tree)>) -> Result<()> {
        match *state {}
    }

    fn propose(&self, state: &mut Infallible, _: &CudaRows, _: Option<DraftIds<'_>>) -> Result<()> {
        match *state {}
    }

    fn build_trees(&self, state: &mut Infallible, _: TreeLimits) -> Result<()> {
        match *state {}
    }

    fn sample(&self, state: &mut Infallible, _: &CudaRows) -> Result<()> {
        match *state {}
    }

    fn accept(&self, state: &mut Infallible, _: &CudaRows, _: Option<&Simulate>) -> Result<()> {
        match *state {}
    }

    fn compact_slots(&self, state: &Infallible, _: &mut CudaKv) -> Result<()> {
        match *state {}
    }

    fn compact_rows(&self, state: &Infallible, _: &mut CudaRows) -> Result<()> {
        match *state {}
    }

    fn publish(&self, state: &mut Infallible) -> Result<()> {
        match *state {}
    }

    fn park_rows(&self, state: &Infallible, _: &mut CudaRows) -> Result<()> {
        match *state {}
    }

    fn begin_extend(&self, state: &mut Infallible, _: ExtendRows) -> Result<()> {
        match *state {}
    }

    fn seed_trees(
        &self,
        state: &mut Infallible,
        _: &CudaRows,
        _: Option<DraftIds<'_>>,
    ) -> Result<()> {
        match *state {}
    }

    fn keep_states(
        &self,
        state: &Infallible,
        _: usize,
        _: KeptLayout,
        _: &mut CudaRows,
    ) -> Result<()> {
        match *state {}
    }

    fn outputs(
        &self,
        state: &mut Infallible,
        _: ReturnedRows<'_, CudaRows>,
    ) -> Result<Vec<Option<RequestOutput>>> {
        match *state {}
    }

    fn read(&self, rows_of: &CudaRows, rows: usize) -> Result<Vec<f32>> {
        rows_of.hold("rows to read", rows, rows_of.width)?;
        let mut values = self.device.read(&rows_of.memory, rows * rows_of.stride)?;
        if rows_of.stride != rows_of.width {
            for row in 1..rows {
                let start = row * rows_of.stride;
                values.copy_within(start..start + rows_of.width, row * rows_of.width);
            }
            values.truncate(rows * rows_of.width);
        }
        Ok(values)
    }
}

impl CudaBackend {
    /// `out[i] = input[list[i]]`, for as many as the plan counts, `bound` at most.
    fn gather(
        &self,
        input: &CudaRows,
        plan: &CudaPlan,
        count: arguments::Address,
        list: arguments::Address,
        bound: usize,
        out: &mut CudaRows,
    ) -> Result<()> {
        input.hold("rows to gather from", 1, out.width)?;
        out.hold("gathered rows", bound, out.width)?;
        let arguments = arguments::Gather {
            count,
            list,
            input: input.memory.at(0),
            out: out.memory.at(0),
            width: out.width as u32,
            rows: input.capacity as u32,
            in_stride: input.stride as u32,
            out_stride: out.stride as u32,
        };
        let grid = [out.width.div_ceil(THREADS), bound, 1];
        let names = [plan.memory(), &input.memory, &out.memory];
        // SAFETY: the result fits, and source rows are clamped in the kernel.
        unsafe { self.launch(&self.kernels.gather, grid, &arguments, &names) }
    }

    /// Launches in blocks of [`THREADS`]; nothing where there is nothing to do.
    ///
    /// # Safety
    /// As [`Device::launch`].
    unsafe fn launch<A: cudarc::driver::DeviceRepr>(
        &self,
        kernel: &cudarc::driver::CudaFunction,
        grid: [usize; 3],
        arguments: &A,
        names: &[&super::device::Memory],
    ) -> Result<()> {
        if grid.contains(&0) {
            return Ok(());
        }
        // SAFETY: the caller's promise.
        unsafe { self.device.launch(kernel, grid, THREADS as u32, 0, arguments, names) }
    }
}
