//! The CPU backend with somebody who hears of each operation: for profiles, and for tests that
//! count or interfere.

use super::{CpuBackend, CpuKv, CpuPlan, CpuRows, CpuTable, CpuWeight};
use crate::choose::{Ask, Candidate, Choice, Weights};
use crate::{
    Backend, DraftIds, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable,
    Sink, WeightFormat,
};

/// An operation of a backend, named as its methods are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[allow(missing_docs)]
pub enum Operation {
    Rows {
        capacity: usize,
        width: usize,
    },
    Place,
    Embed,
    RmsNorm,
    /// Gated or not.
    Project {
        outputs: usize,
        inputs: usize,
    },
    WriteKv,
    Attend,
    Swiglu,
    CopyColumns,
    TakeColumns,
    GatherSources,
    GatherOutputs,
    MoveSlots,
    MoveRows,
    Choose,
    Offer,
    Weigh,
    Read,
}

/// Who hears of operations.
pub trait Watch: Send + Sync + 'static {
    /// Runs one.
    fn around<T>(&self, operation: Operation, run: impl FnOnce() -> T) -> T;
}

/// The CPU backend under a watch. Its operations are complete when they return.
pub struct Watched<W> {
    cpu: CpuBackend,
    /// Who watches.
    pub watch: W,
}

impl<W> Watched<W> {
    /// Puts a backend under a watch.
    pub fn new(cpu: CpuBackend, watch: W) -> Self {
        Self { cpu, watch }
    }
}

impl<W: Watch> Backend for Watched<W> {
    type Rows = CpuRows;
    type Weight = CpuWeight;
    type Vector = Vec<f32>;
    type Table = CpuTable;
    type Rope = RopeTable;
    type Kv = CpuKv;
    type Plan = CpuPlan;

    fn describe(&self) -> String {
        self.cpu.describe()
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<CpuWeight> {
        self.cpu.pack(parts, format)
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<Vec<f32>> {
        self.cpu.vector(parts)
    }

    fn table(&self, tensor: &HostTensor) -> Result<CpuTable> {
        self.cpu.table(tensor)
    }

    fn rope(&self, table: &RopeTable) -> Result<RopeTable> {
        self.cpu.rope(table)
    }

    fn kv(&self, shape: KvShape) -> Result<CpuKv> {
        self.cpu.kv(shape)
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<CpuRows> {
        let operation = Operation::Rows { capacity, width };
        self.watch.around(operation, || self.cpu.rows(capacity, width))
    }

    fn plan(&self, bounds: PlanBounds) -> Result<CpuPlan> {
        self.cpu.plan(bounds)
    }

    fn place(&self, host: &ForwardPlan, plan: &mut CpuPlan) -> Result<()> {
        self.watch.around(Operation::Place, || self.cpu.place(host, plan))
    }

    fn embed(&self, table: &CpuTable, plan: &CpuPlan, out: &mut CpuRows) -> Result<()> {
        self.watch.around(Operation::Embed, || self.cpu.embed(table, plan, out))
    }

    fn rms_norm(
        &self,
        input: &CpuRows,
        weight: &Vec<f32>,
        epsilon: f32,
        rows: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let run = || self.cpu.rms_norm(input, weight, epsilon, rows, out);
        self.watch.around(Operation::RmsNorm, run)
    }

    fn project(
        &self,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        input: &CpuRows,
        rows: usize,
        sink: Sink,
        out: &mut CpuRows,
    ) -> Result<()> {
        let run = || self.cpu.project(weight, bias, input, rows, sink, out);
        self.watch.around(projection(weight), run)
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
        let run = || self.cpu.write_kv(qkv, heads, norms, rope, plan, kv, layer);
        self.watch.around(Operation::WriteKv, run)
    }

    fn attend(
        &self,
        qkv: &CpuRows,
        heads: HeadShape,
        scale: f32,
        plan: &CpuPlan,
        kv: &CpuKv,
        layer: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let run = || self.cpu.attend(qkv, heads, scale, plan, kv, layer, out);
        self.watch.around(Operation::Attend, run)
    }

    fn swiglu(&self, gate_up: &CpuRows, rows: usize, out: &mut CpuRows) -> Result<()> {
        self.watch.around(Operation::Swiglu, || self.cpu.swiglu(gate_up, rows, out))
    }

    fn project_gated(
        &self,
        weight: &CpuWeight,
        bias: Option<&Vec<f32>>,
        input: &CpuRows,
        rows: usize,
        both: &mut CpuRows,
        out: &mut CpuRows,
    ) -> Result<()> {
        let run = || self.cpu.project_gated(weight, bias, input, rows, both, out);
        self.watch.around(projection(weight), run)
    }

    fn copy_columns(
        &self,
        input: &CpuRows,
        rows: usize,
        column: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let run = || self.cpu.copy_columns(input, rows, column, out);
        self.watch.around(Operation::CopyColumns, run)
    }

    fn take_columns(
        &self,
        input: &CpuRows,
        rows: usize,
        column: usize,
        out: &mut CpuRows,
    ) -> Result<()> {
        let run = || self.cpu.take_columns(input, rows, column, out);
        self.watch.around(Operation::TakeColumns, run)
    }

    fn gather_sources(&self, input: &CpuRows, plan: &CpuPlan, out: &mut CpuRows) -> Result<()> {
        let run = || self.cpu.gather_sources(input, plan, out);
        self.watch.around(Operation::GatherSources, run)
    }

    fn gather_outputs(&self, input: &CpuRows, plan: &CpuPlan, out: &mut CpuRows) -> Result<usize> {
        let run = || self.cpu.gather_outputs(input, plan, out);
        self.watch.around(Operation::GatherOutputs, run)
    }

    fn move_slots(&self, kv: &mut CpuKv, moves: &[(u32, u32)]) -> Result<()> {
        self.watch.around(Operation::MoveSlots, || self.cpu.move_slots(kv, moves))
    }

    fn move_rows(&self, rows: &mut CpuRows, moves: &[(u32, u32)]) -> Result<()> {
        self.watch.around(Operation::MoveRows, || self.cpu.move_rows(rows, moves))
    }

    fn choose(&self, logits: &CpuRows, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        self.watch.around(Operation::Choose, || self.cpu.choose(logits, asks))
    }

    fn offer(
        &self,
        logits: &CpuRows,
        asks: &[Ask<'_>],
        count: usize,
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Vec<Candidate>>> {
        self.watch.around(Operation::Offer, || self.cpu.offer(logits, asks, count, ids))
    }

    fn weigh(
        &self,
        logits: &CpuRows,
        asks: &[Ask<'_>],
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Weights>> {
        self.watch.around(Operation::Weigh, || self.cpu.weigh(logits, asks, ids))
    }

    fn read(&self, rows_of: &CpuRows, rows: usize) -> Result<Vec<f32>> {
        self.watch.around(Operation::Read, || self.cpu.read(rows_of, rows))
    }
}

fn projection(weight: &CpuWeight) -> Operation {
    Operation::Project { outputs: weight.outputs(), inputs: weight.inputs() }
}
