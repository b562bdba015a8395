//! The CPU backend with a clock at each operation.
//!
//! Operations of the CPU backend are complete when they return, so the clock sees all of them.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::Instant;

use aquila_compute::choose::{Ask, Candidate, Choice};
use aquila_compute::cpu::CpuBackend;
use aquila_compute::{
    Backend, DraftIds, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable,
    Sink, WeightFormat,
};

/// What an operation is called in a profile.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    Named(&'static str),
    /// A projection, by outputs and inputs.
    Project(usize, usize),
}

/// Seconds and calls of each operation.
pub type Ledger = BTreeMap<Operation, (f64, usize)>;

/// A backend that keeps a ledger.
pub struct Timed {
    inner: CpuBackend,
    ledger: Mutex<Ledger>,
}

impl Timed {
    pub fn new(inner: CpuBackend) -> Self {
        Self { inner, ledger: Mutex::default() }
    }

    /// What was noted since the last time.
    pub fn take(&self) -> Ledger {
        std::mem::take(&mut *self.ledger.lock().expect("no panic under the lock"))
    }

    fn note<T>(&self, operation: Operation, work: impl FnOnce() -> T) -> T {
        let since = Instant::now();
        let result = work();
        let seconds = since.elapsed().as_secs_f64();
        let mut ledger = self.ledger.lock().expect("no panic under the lock");
        let entry = ledger.entry(operation).or_default();
        entry.0 += seconds;
        entry.1 += 1;
        result
    }
}

type Cpu = CpuBackend;
use Operation::Named;

impl Backend for Timed {
    type Rows = <Cpu as Backend>::Rows;
    type Weight = <Cpu as Backend>::Weight;
    type Vector = <Cpu as Backend>::Vector;
    type Table = <Cpu as Backend>::Table;
    type Rope = <Cpu as Backend>::Rope;
    type Kv = <Cpu as Backend>::Kv;
    type Plan = <Cpu as Backend>::Plan;

    fn describe(&self) -> String {
        self.inner.describe()
    }

    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<Self::Weight> {
        self.inner.pack(parts, format)
    }

    fn vector(&self, parts: &[HostTensor]) -> Result<Self::Vector> {
        self.inner.vector(parts)
    }

    fn table(&self, tensor: &HostTensor) -> Result<Self::Table> {
        self.inner.table(tensor)
    }

    fn rope(&self, table: &RopeTable) -> Result<Self::Rope> {
        self.inner.rope(table)
    }

    fn kv(&self, shape: KvShape) -> Result<Self::Kv> {
        self.inner.kv(shape)
    }

    fn rows(&self, capacity: usize, width: usize) -> Result<Self::Rows> {
        self.inner.rows(capacity, width)
    }

    fn plan(&self, bounds: PlanBounds) -> Result<Self::Plan> {
        self.inner.plan(bounds)
    }

    fn place(&self, host: &ForwardPlan, plan: &mut Self::Plan) -> Result<()> {
        self.note(Named("place"), || self.inner.place(host, plan))
    }

    fn embed(&self, table: &Self::Table, plan: &Self::Plan, out: &mut Self::Rows) -> Result<()> {
        self.note(Named("embed"), || self.inner.embed(table, plan, out))
    }

    fn rms_norm(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Named("norm"), || self.inner.rms_norm(input, weight, epsilon, rows, out))
    }

    fn project(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        input: &Self::Rows,
        rows: usize,
        sink: Sink,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Operation::Project(weight.outputs(), weight.inputs()), || {
            self.inner.project(weight, bias, input, rows, sink, out)
        })
    }

    fn project_gated(
        &self,
        weight: &Self::Weight,
        bias: Option<&Self::Vector>,
        input: &Self::Rows,
        rows: usize,
        both: &mut Self::Rows,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Operation::Project(weight.outputs(), weight.inputs()), || {
            self.inner.project_gated(weight, bias, input, rows, both, out)
        })
    }

    fn write_kv(
        &self,
        qkv: &mut Self::Rows,
        heads: HeadShape,
        norms: Option<(&Self::Vector, &Self::Vector, f32)>,
        rope: &Self::Rope,
        plan: &Self::Plan,
        kv: &mut Self::Kv,
        layer: usize,
    ) -> Result<()> {
        self.note(Named("turn and write"), || {
            self.inner.write_kv(qkv, heads, norms, rope, plan, kv, layer)
        })
    }

    fn attend(
        &self,
        qkv: &Self::Rows,
        heads: HeadShape,
        scale: f32,
        plan: &Self::Plan,
        kv: &Self::Kv,
        layer: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Named("attend"), || self.inner.attend(qkv, heads, scale, plan, kv, layer, out))
    }

    fn swiglu(&self, gate_up: &Self::Rows, rows: usize, out: &mut Self::Rows) -> Result<()> {
        self.note(Named("gate"), || self.inner.swiglu(gate_up, rows, out))
    }

    fn copy_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Named("copy"), || self.inner.copy_columns(input, rows, column, out))
    }

    fn take_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Named("copy"), || self.inner.take_columns(input, rows, column, out))
    }

    fn gather_sources(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.note(Named("gather"), || self.inner.gather_sources(input, plan, out))
    }

    fn move_rows(&self, rows: &mut Self::Rows, moves: &[(u32, u32)]) -> Result<()> {
        self.note(Named("move"), || self.inner.move_rows(rows, moves))
    }

    fn offer(
        &self,
        logits: &Self::Rows,
        asks: &[Ask<'_>],
        count: usize,
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Vec<Candidate>>> {
        self.note(Named("offer"), || self.inner.offer(logits, asks, count, ids))
    }

    fn gather_outputs(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<usize> {
        self.note(Named("gather"), || self.inner.gather_outputs(input, plan, out))
    }

    fn move_slots(&self, kv: &mut Self::Kv, moves: &[(u32, u32)]) -> Result<()> {
        self.note(Named("move"), || self.inner.move_slots(kv, moves))
    }

    fn choose(&self, logits: &Self::Rows, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        self.note(Named("choose"), || self.inner.choose(logits, asks))
    }

    fn read(&self, rows_of: &Self::Rows, rows: usize) -> Result<Vec<f32>> {
        self.note(Named("read"), || self.inner.read(rows_of, rows))
    }
}
