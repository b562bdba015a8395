//! Puts one decoder layer through the backend trait on CUDA and compares it with the CPU.
//!
//! For a small odd shape twice and for the shape of a Llama-3.1-8B layer: eager against the CPU,
//! rows among others against the same rows alone (bit for bit), a captured graph replayed with
//! other plans against both; then times. Ends with tables; exits with 1 where anything disagrees,
//! with 2 where there is no CUDA device.
//!
//! `cargo run --release -p aquila-compute --example cuda_layer [check|time]`

mod layer;
mod scene;
mod timing;

use std::process::ExitCode;

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::CudaBackend;
use aquila_compute::{
    Backend, Error, ForwardPlan, HeadShape, HostTensor, KvDtype, PlanBounds, Result, WeightFormat,
};

use crate::layer::{Layer, Shape, Tensors, layer};
use crate::scene::{CONTEXTS, Scene, alone};

const LLAMA: Shape = Shape {
    name: "llama-3.1-8b",
    hidden: 4096,
    heads: HeadShape { heads: 32, kv_heads: 8, head_dim: 128 },
    ffn: 14336,
    half: 64,
    extras: false,
    format: WeightFormat::Bf16,
    kv: KvDtype::F32,
};

/// Widths that are no multiple of anything, biases, head norms, a rope that turns part of a head.
const ODD: Shape = Shape {
    name: "odd",
    hidden: 301,
    heads: HeadShape { heads: 6, kv_heads: 2, head_dim: 24 },
    ffn: 77,
    half: 8,
    extras: true,
    format: WeightFormat::Bf16,
    kv: KvDtype::F32,
};

/// More query heads than one thread block takes, f32 weights, bfloat16 keys and values.
const ODD_F32: Shape = Shape {
    name: "odd, f32 weights, bf16 kv",
    hidden: 100,
    heads: HeadShape { heads: 11, kv_heads: 1, head_dim: 40 },
    ffn: 530,
    half: 20,
    extras: false,
    format: WeightFormat::F32,
    kv: KvDtype::Bf16,
};

/// What was compared and whether it held.
#[derive(Default)]
struct Findings {
    table: Vec<String>,
    failed: usize,
}

impl Findings {
    fn add(&mut self, shape: &Shape, what: &str, holds: bool, value: String) {
        let verdict = if holds { "holds" } else { "FAILS" };
        eprintln!("{}: {what}: {value} {verdict}", shape.name);
        self.table.push(format!("| {} | {what} | {value} | {verdict} |", shape.name));
        self.failed += usize::from(!holds);
    }
}

/// `‖a − b‖ / ‖b‖`; infinite where a value is not finite or one is missing.
fn distance(a: &[f32], b: &[f32]) -> f64 {
    if a.len() != b.len() || a.iter().chain(b).any(|x| !x.is_finite()) {
        return f64::INFINITY;
    }
    let square = |x: f64| x * x;
    let difference: f64 = a.iter().zip(b).map(|(&a, &b)| square(f64::from(a) - f64::from(b))).sum();
    let norm: f64 = b.iter().map(|&b| square(f64::from(b))).sum();
    (difference / norm).sqrt()
}

fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// Both backends with the same weights and the same contexts.
struct Pair<'a> {
    cpu: &'a CpuBackend,
    cuda: &'a CudaBackend,
    on_cpu: Layer<CpuBackend>,
    on_cuda: Layer<CudaBackend>,
    scene: Scene,
    shape: Shape,
}

impl Pair<'_> {
    /// f32 sums in another order differ by rounding alone. A stored bfloat16 may fall on the other
    /// side of a half on either backend.
    fn bound(&self) -> f64 {
        match self.shape.kv {
            KvDtype::F32 => 1e-5,
            KvDtype::Bf16 => 1e-3,
        }
    }

    fn eager(&mut self, plans: &[(String, ForwardPlan)], findings: &mut Findings) -> Result<()> {
        for (name, plan) in plans {
            let cpu = self.on_cpu.run(self.cpu, plan)?;
            let cuda = self.on_cuda.run(self.cuda, plan)?;
            let distance = distance(&cuda, &cpu);
            let (holds, value) = (distance <= self.bound(), format!("{distance:.1e}"));
            findings.add(&self.shape, &format!("eager = cpu, {name}"), holds, value);
        }
        Ok(())
    }

    /// A row among others has the bits of the same row alone.
    fn rows_alone(&mut self, findings: &mut Findings) -> Result<()> {
        let width = self.shape.hidden;
        for rows in [4, 8, 13] {
            for plan in [self.scene.tree(2, rows), self.scene.batch(rows)] {
                let together = self.on_cuda.run(self.cuda, &plan)?;
                let mut equal = 0;
                for row in 0..rows {
                    let single = self.on_cuda.run(self.cuda, &alone(&plan, row))?;
                    let expected = &together[row * width..(row + 1) * width];
                    equal += usize::from(same_bits(&single[..width], expected));
                }
                let what = format!("a row alone = among {rows}, bits");
                findings.add(&self.shape, &what, equal == rows, format!("{equal} of {rows}"));
            }
        }
        Ok(())
    }

    /// A graph captured at 8 rows, replayed with plans of other lengths, tokens and row counts.
    fn replays(&mut self, with_cpu: bool, findings: &mut Findings) -> Result<()> {
        let first = self.scene.batch(8);
        self.on_cuda.run(self.cuda, &first)?;
        let on_cuda = &mut self.on_cuda;
        let graph = self.cuda.graph_of(|b| layer(b, on_cuda, 8))?;
        let plans = [
            ("tree of 8, context 1000", self.scene.tree(3, 8)),
            ("tree of 5, context 64", self.scene.tree(1, 5)),
            ("batch of 8", self.scene.batch(8)),
            ("tree of 8, context 5", self.scene.tree(0, 8)),
            ("batch of 3", self.scene.batch(3)),
        ];
        for (i, (name, plan)) in plans.iter().enumerate() {
            let eager = self.on_cuda.run(self.cuda, plan)?;
            // Another plan in between, so that a replay which did nothing would be seen.
            self.on_cuda.run(self.cuda, &first)?;
            self.cuda.place(plan, &mut self.on_cuda.plan)?;
            graph.replay()?;
            let replayed = self.on_cuda.read(self.cuda, plan)?;
            let equal = same_bits(&replayed, &eager);
            let what = format!("replay = eager, bits, {name}");
            let value = if equal { "equal" } else { "different" };
            findings.add(&self.shape, &what, equal, value.into());
            if with_cpu || i < 2 {
                let distance = distance(&replayed, &self.on_cpu.run(self.cpu, plan)?);
                let (holds, value) = (distance <= self.bound(), format!("{distance:.1e}"));
                findings.add(&self.shape, &format!("replay = cpu, {name}"), holds, value);
            }
        }
        Ok(())
    }

    /// Rows that change places, on both backends.
    fn rows(&mut self, findings: &mut Findings) -> Result<()> {
        let values: Vec<f32> = (0..7 * 37).map(|i| i as f32 * 0.37 - 11.0).collect();
        let table = HostTensor::from_f32("table", vec![7, 37], &values)?;
        let plan = ForwardPlan {
            tokens: (0..6).map(|i| 6 - i).collect(),
            positions: vec![0; 6],
            writes: (0..6).collect(),
            spans: vec![aquila_compute::AttentionSpan { prefix: 1, ..Default::default() }; 6],
            changes: vec![(0, 1)],
            slots: vec![0],
            sources: vec![3, 3, 0, 5, 1, 2],
            ..ForwardPlan::default()
        };
        let equal =
            same_bits(&shuffled(self.cuda, &table, &plan)?, &shuffled(self.cpu, &table, &plan)?);
        let value = if equal { "equal" } else { "different" };
        findings.add(&self.shape, "rows gathered, joined and moved, bits", equal, value.into());
        Ok(())
    }

    /// Slots moved in chains, then seen from where they went.
    fn moves(&mut self, findings: &mut Findings) -> Result<()> {
        let list = self.scene.lists[2].clone();
        let end = CONTEXTS[2];
        // The spare slots of the request take its first ones, one of them by way of another.
        let mut moves: Vec<(u32, u32)> = (0..30).map(|i| (list[i], list[end + 20 + i])).collect();
        moves.push((list[end + 20], list[end + 60]));
        moves.push((list[end + 60], list[7]));
        self.cpu.move_slots(&mut self.on_cpu.kv, &moves)?;
        self.cuda.move_slots(&mut self.on_cuda.kv, &moves)?;
        self.scene.lists[2][..30].copy_from_slice(&list[end + 20..end + 50]);
        self.scene.lists[2][7] = list[7];
        let plan = self.scene.tree(2, 4);
        self.eager(&[("after moves".into(), plan)], findings)
    }
}

/// Rows gathered, put side by side and moved: what speculation does between passes.
fn shuffled<B: Backend>(backend: &B, table: &HostTensor, plan: &ForwardPlan) -> Result<Vec<f32>> {
    let (count, width) = (plan.rows(), table.matrix()?.1);
    let bounds = PlanBounds { rows: count, outputs: count, slots: plan.slots.len() };
    let mut placed = backend.plan(bounds)?;
    backend.place(plan, &mut placed)?;
    let mut rows = backend.rows(count, width)?;
    backend.embed(&backend.table(table)?, 1.0, &placed, &mut rows)?;
    let mut gathered = backend.rows(count, width)?;
    backend.gather_sources(&rows, &placed, &mut gathered)?;
    let mut joined = backend.rows(count, 2 * width)?;
    backend.copy_columns(&rows, count, width, &mut joined)?;
    backend.copy_columns(&gathered, count, 0, &mut joined)?;
    backend.move_rows(&mut joined, &[(5, 1), (1, 0), (4, 2)])?;
    backend.read(&joined, count)
}

/// What a capture must refuse, and that it leaves a stream that works.
fn refusals(pair: &mut Pair<'_>, findings: &mut Findings) -> Result<()> {
    let plan = pair.scene.batch(4);
    let before = pair.on_cuda.run(pair.cuda, &plan)?;
    let refused = [
        pair.cuda.graph_of(|b| b.rows(8, 8).map(drop)).is_err(),
        pair.cuda.graph_of(|b| b.read(&pair.on_cuda.rows.hidden, 1).map(drop)).is_err(),
        pair.cuda.graph_of(|b| b.place(&plan, &mut pair.on_cuda.plan)).is_err(),
    ];
    let after = pair.on_cuda.run(pair.cuda, &plan)?;
    let holds = refused == [true; 3] && same_bits(&before, &after);
    findings.add(&pair.shape, "captures refuse room, read, place", holds, format!("{refused:?}"));
    Ok(())
}

fn check(cpu: &CpuBackend, cuda: &CudaBackend, t: &Tensors, all: bool) -> Result<Findings> {
    let shape = t.shape;
    let (mut on_cpu, mut on_cuda) = (Layer::new(cpu, t)?, Layer::new(cuda, t)?);
    let scene = Scene::new(7);
    scene.fill(cpu, &mut on_cpu)?;
    scene.fill(cuda, &mut on_cuda)?;
    let mut pair = Pair { cpu, cuda, on_cpu, on_cuda, scene, shape };
    let mut findings = Findings::default();
    let mut plans = Vec::new();
    for (i, rows) in [1, 4, 8, 13].into_iter().enumerate() {
        for (r, context) in CONTEXTS.into_iter().enumerate() {
            if all || r == CONTEXTS.len() - 1 - i {
                let name = format!("tree of {rows}, context {context}");
                plans.push((name, pair.scene.tree(r, rows)));
            }
        }
        if all || rows == 4 {
            plans.push((format!("batch of {rows}"), pair.scene.batch(rows)));
        }
    }
    if all {
        plans.push(("batch of 77".into(), pair.scene.batch(77)));
    }
    pair.eager(&plans, &mut findings)?;
    pair.rows_alone(&mut findings)?;
    pair.replays(all, &mut findings)?;
    pair.moves(&mut findings)?;
    pair.rows(&mut findings)?;
    refusals(&mut pair, &mut findings)?;
    Ok(findings)
}

fn times(cuda: &CudaBackend, t: &Tensors) -> Result<Vec<String>> {
    let mut on_cuda = Layer::new(cuda, t)?;
    let mut scene = Scene::new(7);
    scene.fill(cuda, &mut on_cuda)?;
    let plans = [1, 2, 4, 8, 16].map(|rows| scene.tree(CONTEXTS.len() - 1, rows));
    let mut table = timing::layers(cuda, t, &mut on_cuda, &plans)?;
    table.extend(timing::projections(cuda, t, &[1, 2, 4, 8])?);
    Ok(table)
}

fn run(checks: bool, timing: bool) -> Result<usize> {
    let cuda = CudaBackend::new(0)?;
    let cpu = CpuBackend::new(IsaChoice::Auto, 0)?;
    eprintln!("{}\n{}", cuda.describe(), cpu.describe());
    let mut all = Findings::default();
    if checks {
        for (shape, seed) in [(ODD, 1), (ODD_F32, 2)] {
            let findings = check(&cpu, &cuda, &Tensors::random(shape, seed)?, true)?;
            all.table.extend(findings.table);
            all.failed += findings.failed;
        }
    }
    let llama = Tensors::random(LLAMA, 3)?;
    // Times first: they cost seconds, and the CPU's side of the comparison costs minutes.
    let table = if timing { times(&cuda, &llama)? } else { Vec::new() };
    for line in &table {
        eprintln!("{line}");
    }
    if checks {
        let findings = check(&cpu, &cuda, &llama, false)?;
        all.table.extend(findings.table);
        all.failed += findings.failed;
    }
    println!("{}", cuda.describe());
    if checks {
        println!("\n| layer | what | found | verdict |\n|---|---|---|---|");
        all.table.iter().for_each(|line| println!("{line}"));
        println!("\n{} comparisons, {} failed", all.table.len(), all.failed);
    }
    if timing {
        println!("\n{}", timing::HEAD);
        table.iter().for_each(|line| println!("{line}"));
    }
    Ok(all.failed)
}

fn main() -> ExitCode {
    let part = std::env::args().nth(1);
    let part = part.as_deref().unwrap_or("all");
    match run(part != "time", part != "check") {
        Ok(0) => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(1),
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(if matches!(error, Error::Unavailable(_)) { 2 } else { 1 })
        }
    }
}
