//! The CPU backend, counting the rows that are made and the copies of rows.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use aquila_compute::choose::{Ask, Candidate, Choice};
use aquila_compute::cpu::CpuBackend;
use aquila_compute::{
    Backend, DraftIds, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable,
    Sink, WeightFormat,
};

/// A backend that counts.
pub struct Counting {
    inner: CpuBackend,
    made: AtomicU64,
    copies: AtomicU64,
}

impl Counting {
    pub fn new(inner: CpuBackend) -> Self {
        Self { inner, made: AtomicU64::new(0), copies: AtomicU64::new(0) }
    }

    /// Bytes of all rows that there is room for.
    pub fn made(&self) -> u64 {
        self.made.load(Relaxed)
    }

    /// How often rows were copied beside others, gathered for a head, or moved.
    pub fn copies(&self) -> u64 {
        self.copies.load(Relaxed)
    }
}

impl Backend for Counting {
    type Rows = <CpuBackend as Backend>::Rows;
    type Weight = <CpuBackend as Backend>::Weight;
    type Vector = <CpuBackend as Backend>::Vector;
    type Table = <CpuBackend as Backend>::Table;
    type Rope = <CpuBackend as Backend>::Rope;
    type Kv = <CpuBackend as Backend>::Kv;
    type Plan = <CpuBackend as Backend>::Plan;

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
        self.made.fetch_add((capacity * width * 4) as u64, Relaxed);
        self.inner.rows(capacity, width)
    }

    fn plan(&self, bounds: PlanBounds) -> Result<Self::Plan> {
        self.inner.plan(bounds)
    }

    fn place(&self, host: &ForwardPlan, plan: &mut Self::Plan) -> Result<()> {
        self.inner.place(host, plan)
    }

    fn embed(&self, table: &Self::Table, plan: &Self::Plan, out: &mut Self::Rows) -> Result<()> {
        self.inner.embed(table, plan, out)
    }

    fn rms_norm(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.inner.rms_norm(input, weight, epsilon, rows, out)
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
        self.inner.project(weight, bias, input, rows, sink, out)
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
        self.inner.write_kv(qkv, heads, norms, rope, plan, kv, layer)
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
        self.inner.attend(qkv, heads, scale, plan, kv, layer, out)
    }

    fn swiglu(&self, gate_up: &Self::Rows, rows: usize, out: &mut Self::Rows) -> Result<()> {
        self.inner.swiglu(gate_up, rows, out)
    }

    fn copy_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.copies.fetch_add(1, Relaxed);
        self.inner.copy_columns(input, rows, column, out)
    }

    fn take_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.copies.fetch_add(1, Relaxed);
        self.inner.take_columns(input, rows, column, out)
    }

    fn gather_sources(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.copies.fetch_add(1, Relaxed);
        self.inner.gather_sources(input, plan, out)
    }

    fn move_rows(&self, rows: &mut Self::Rows, moves: &[(u32, u32)]) -> Result<()> {
        self.copies.fetch_add(1, Relaxed);
        self.inner.move_rows(rows, moves)
    }

    fn offer(
        &self,
        logits: &Self::Rows,
        asks: &[Ask<'_>],
        count: usize,
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Vec<Candidate>>> {
        self.inner.offer(logits, asks, count, ids)
    }

    fn gather_outputs(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<usize> {
        self.inner.gather_outputs(input, plan, out)
    }

    fn move_slots(&self, kv: &mut Self::Kv, moves: &[(u32, u32)]) -> Result<()> {
        self.inner.move_slots(kv, moves)
    }

    fn choose(&self, logits: &Self::Rows, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        self.inner.choose(logits, asks)
    }

    fn read(&self, rows_of: &Self::Rows, rows: usize) -> Result<Vec<f32>> {
        self.inner.read(rows_of, rows)
    }
}
