//! A round that panics fails its requests, and the server serves on.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use aquila_compute::choose::{Ask, Candidate, Choice};
use aquila_compute::cpu::CpuBackend;
use aquila_compute::{
    Backend, DraftIds, ForwardPlan, HeadShape, HostTensor, KvShape, PlanBounds, Result, RopeTable,
    Sink, WeightFormat,
};
use serde_json::{Value, json};

use crate::support::{Running, engine_config, generator_on, settings};

/// A backend that panics in the middle of a forward pass when it is told to.
struct Faulty {
    cpu: CpuBackend,
    fault: Arc<AtomicBool>,
}

impl Backend for Faulty {
    type Rows = <CpuBackend as Backend>::Rows;
    type Weight = <CpuBackend as Backend>::Weight;
    type Vector = <CpuBackend as Backend>::Vector;
    type Table = <CpuBackend as Backend>::Table;
    type Rope = <CpuBackend as Backend>::Rope;
    type Kv = <CpuBackend as Backend>::Kv;
    type Plan = <CpuBackend as Backend>::Plan;

    fn swiglu(&self, gate_up: &Self::Rows, rows: usize, out: &mut Self::Rows) -> Result<()> {
        if self.fault.swap(false, Ordering::AcqRel) {
            panic!("a fault was injected");
        }
        self.cpu.swiglu(gate_up, rows, out)
    }

    fn describe(&self) -> String {
        self.cpu.describe()
    }
    fn pack(&self, parts: &[HostTensor], format: WeightFormat) -> Result<Self::Weight> {
        self.cpu.pack(parts, format)
    }
    fn vector(&self, parts: &[HostTensor]) -> Result<Self::Vector> {
        self.cpu.vector(parts)
    }
    fn table(&self, tensor: &HostTensor) -> Result<Self::Table> {
        self.cpu.table(tensor)
    }
    fn rope(&self, table: &RopeTable) -> Result<Self::Rope> {
        self.cpu.rope(table)
    }
    fn kv(&self, shape: KvShape) -> Result<Self::Kv> {
        self.cpu.kv(shape)
    }
    fn rows(&self, capacity: usize, width: usize) -> Result<Self::Rows> {
        self.cpu.rows(capacity, width)
    }
    fn plan(&self, bounds: PlanBounds) -> Result<Self::Plan> {
        self.cpu.plan(bounds)
    }
    fn place(&self, host: &ForwardPlan, plan: &mut Self::Plan) -> Result<()> {
        self.cpu.place(host, plan)
    }
    fn embed(&self, table: &Self::Table, plan: &Self::Plan, out: &mut Self::Rows) -> Result<()> {
        self.cpu.embed(table, plan, out)
    }
    fn rms_norm(
        &self,
        input: &Self::Rows,
        weight: &Self::Vector,
        epsilon: f32,
        rows: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.cpu.rms_norm(input, weight, epsilon, rows, out)
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
        self.cpu.project(weight, bias, input, rows, sink, out)
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
        self.cpu.write_kv(qkv, heads, norms, rope, plan, kv, layer)
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
        self.cpu.attend(qkv, heads, scale, plan, kv, layer, out)
    }
    fn copy_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.cpu.copy_columns(input, rows, column, out)
    }

    fn take_columns(
        &self,
        input: &Self::Rows,
        rows: usize,
        column: usize,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.cpu.take_columns(input, rows, column, out)
    }

    fn gather_sources(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<()> {
        self.cpu.gather_sources(input, plan, out)
    }

    fn move_rows(&self, rows: &mut Self::Rows, moves: &[(u32, u32)]) -> Result<()> {
        self.cpu.move_rows(rows, moves)
    }

    fn offer(
        &self,
        logits: &Self::Rows,
        asks: &[Ask<'_>],
        count: usize,
        ids: Option<DraftIds<'_>>,
    ) -> Result<Vec<Vec<Candidate>>> {
        self.cpu.offer(logits, asks, count, ids)
    }

    fn gather_outputs(
        &self,
        input: &Self::Rows,
        plan: &Self::Plan,
        out: &mut Self::Rows,
    ) -> Result<usize> {
        self.cpu.gather_outputs(input, plan, out)
    }
    fn move_slots(&self, kv: &mut Self::Kv, moves: &[(u32, u32)]) -> Result<()> {
        self.cpu.move_slots(kv, moves)
    }
    fn choose(&self, logits: &Self::Rows, asks: &[Ask<'_>]) -> Result<Vec<Choice>> {
        self.cpu.choose(logits, asks)
    }
    fn read(&self, rows_of: &Self::Rows, rows: usize) -> Result<Vec<f32>> {
        self.cpu.read(rows_of, rows)
    }
}

#[test]
fn a_panic_in_a_round_fails_its_requests_and_the_server_serves_on() {
    let fault = Arc::new(AtomicBool::new(false));
    let injected = fault.clone();
    let generator = generator_on(engine_config(), |cpu| Faulty { cpu, fault: injected });
    let server = Running::start(generator, settings());
    let short = json!({ "prompt": "fn main", "max_tokens": 8, "temperature": 0 }).to_string();
    let before = server.post("/v1/completions", &short).ok();

    let long = |stream: bool| {
        let body = json!({
            "prompt": "use std", "max_tokens": 480, "ignore_eos": true, "stream": stream,
        });
        body.to_string().into_bytes()
    };
    let mut whole = server.connect().post("/v1/completions", &long(false));
    let mut stream = server.connect().post("/v1/completions", &long(true));
    server.wait_until("both run", |s| s.running == 2 && s.completion_tokens > 20);
    fault.store(true, Ordering::Release);

    let reply = whole.reply();
    assert_eq!(reply.status, 500);
    let error = &reply.json()["error"];
    assert_eq!(error["type"], "server_error");
    assert!(error["message"].as_str().unwrap().contains("a fault was injected"));
    let reply = stream.reply();
    let last = reply.body.trim_end().rsplit("\n\n").next().unwrap();
    let last: Value = serde_json::from_str(last.strip_prefix("data: ").unwrap()).unwrap();
    assert_eq!(last["error"]["type"], "server_error");
    assert!(!reply.body.contains("[DONE]"));

    server.wait_until_idle();
    assert_eq!(server.stats().failed_rounds, 1);
    assert_eq!(server.get("/health_generate").status, 200);
    let after = server.post("/v1/completions", &short).ok();
    assert_eq!(after["choices"], before["choices"]);
}
