//! Where the time of a decoder layer goes, operation by operation, at the sizes of the `bench`
//! preset: hidden 1536, 12 heads, 4 key and value heads of 128, feed-forward 4096.
//!
//! `cargo bench -p aquila-compute --bench layer -- [--isa NAME] [--threads N] [--rows 1,4,8]
//! [--context N] [--window N] [--format bf16|int8] [--repeat N]`
//!
//! Sixteen layers of weights are visited in turn, so that they come from memory as in a model.

use std::time::{Duration, Instant};

use aquila_compute::cpu::{CpuBackend, CpuKv, CpuPlan, CpuRows, CpuWeight, Isa, IsaChoice};
use aquila_compute::{
    Accumulate, Activation, AttentionParams, AttentionSpan, Backend, ForwardPlan, HeadShape,
    HostTensor, KvDtype, KvShape, PlanBounds, RopeTable, WeightFormat,
};

const HIDDEN: usize = 1536;
const FEED: usize = 4096;
const LAYERS: usize = 16;
const HEADS: HeadShape = HeadShape { heads: 12, kv_heads: 4, head_dim: 128 };
const STEPS: [&str; 9] =
    ["norm", "qkv", "write_kv", "attend", "out", "norm", "gate_up", "gate", "down"];

struct Layer {
    qkv: CpuWeight,
    out: CpuWeight,
    gate_up: CpuWeight,
    down: CpuWeight,
}

struct Buffers {
    x: CpuRows,
    normed: CpuRows,
    qkv: CpuRows,
    attended: CpuRows,
    gate_up: CpuRows,
    gated: CpuRows,
}

struct Bench<'a> {
    backend: &'a CpuBackend,
    layers: &'a [Layer],
    norm: Vec<f32>,
    window: Option<usize>,
    rope: RopeTable,
}

impl Bench<'_> {
    /// One pass over all layers; adds what each step took.
    fn pass(&self, plan: &CpuPlan, kv: &mut CpuKv, rows: usize, b: &mut Buffers) -> [Duration; 9] {
        let backend = self.backend;
        let params = AttentionParams { heads: HEADS, scale: 0.088, window: self.window };
        let mut took = [Duration::ZERO; 9];
        for (index, layer) in self.layers.iter().enumerate() {
            let mut since = Instant::now();
            let mut lap = |step: usize| {
                let now = Instant::now();
                took[step] += now - since;
                since = now;
            };
            backend.rms_norm(&b.x, &self.norm, 1e-5, rows, &mut b.normed).expect("fits");
            lap(0);
            backend
                .project(&layer.qkv, None, &b.normed, rows, Accumulate::Set, &mut b.qkv)
                .expect("fits");
            lap(1);
            backend.write_kv(&mut b.qkv, HEADS, None, &self.rope, plan, kv, index).expect("fits");
            lap(2);
            backend.attend(&b.qkv, params, plan, kv, index, &mut b.attended).expect("fits");
            lap(3);
            backend
                .project(&layer.out, None, &b.attended, rows, Accumulate::Set, &mut b.x)
                .expect("fits");
            lap(4);
            backend.rms_norm(&b.x, &self.norm, 1e-5, rows, &mut b.normed).expect("fits");
            lap(5);
            let up = &mut b.gate_up;
            backend
                .project(&layer.gate_up, None, &b.normed, rows, Accumulate::Set, up)
                .expect("fits");
            lap(6);
            backend.gate(Activation::Silu, &b.gate_up, rows, &mut b.gated).expect("fits");
            lap(7);
            backend
                .project(&layer.down, None, &b.gated, rows, Accumulate::Set, &mut b.x)
                .expect("fits");
            lap(8);
        }
        took
    }
}

fn plan_of(context: usize, rows: usize) -> ForwardPlan {
    let mut plan = ForwardPlan::default();
    plan.add_table(0..(context + rows) as u32);
    for row in 0..rows {
        let position = (context + row) as u32;
        plan.tokens.push(0);
        plan.positions.push(position);
        plan.writes.push(position);
        plan.spans.push(AttentionSpan { prefix: position + 1, ..AttentionSpan::default() });
    }
    plan
}

fn main() {
    let mut isas: Vec<Isa> =
        Isa::available().into_iter().filter(|isa| *isa != Isa::Portable).collect();
    let (mut threads, mut context, mut repeat) = (0, 128, 30);
    let mut window = None;
    let mut all_rows = vec![1, 2, 4, 8, 16, 32];
    let mut format = WeightFormat::Bf16;
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{flag} needs a value"));
        match flag.as_str() {
            "--isa" => {
                let name = value();
                isas = Isa::available().into_iter().filter(|i| i.to_string() == name).collect();
            }
            "--threads" => threads = value().parse().expect("a number"),
            "--context" => context = value().parse().expect("a number"),
            "--window" => window = Some(value().parse().expect("a number")),
            "--repeat" => repeat = value().parse().expect("a number"),
            "--rows" => {
                all_rows = value().split(',').map(|r| r.parse().expect("a number")).collect();
            }
            "--format" => {
                format = match value().as_str() {
                    "int8" => WeightFormat::Int8,
                    _ => WeightFormat::Bf16,
                };
            }
            _ => {}
        }
    }
    for isa in isas {
        let backend = CpuBackend::new(IsaChoice::Only(isa), threads).expect("available");
        let pack = |outputs: usize, inputs: usize| {
            let values: Vec<f32> = (0..outputs * inputs)
                .map(|i| (((i * 2_654_435_761) % 1009) as f32 / 1009.0 - 0.5) * 0.05)
                .collect();
            let tensor = HostTensor::from_f32_as_bf16("w", vec![outputs, inputs], &values);
            backend.pack(&[tensor.expect("fits")], format).expect("memory")
        };
        let layers: Vec<Layer> = (0..LAYERS)
            .map(|_| Layer {
                qkv: pack(HEADS.qkv_width(), HIDDEN),
                out: pack(HIDDEN, HEADS.q_width()),
                gate_up: pack(2 * FEED, HIDDEN),
                down: pack(HIDDEN, FEED),
            })
            .collect();
        let frequencies: Vec<f64> =
            (0..HEADS.head_dim / 2).map(|i| 0.9f64.powi(i as i32)).collect();
        let most = all_rows.iter().copied().max().unwrap_or(1);
        let rope = RopeTable::new(context + most, &frequencies, 1.0);
        let norm = vec![1.0; HIDDEN];
        let bench = Bench { backend: &backend, layers: &layers, norm, window, rope };
        let mut kv = backend
            .kv(KvShape {
                layers: LAYERS,
                slots: context + most,
                kv_heads: HEADS.kv_heads,
                head_dim: HEADS.head_dim,
                dtype: KvDtype::F32,
            })
            .expect("memory");
        let rows_of = |width: usize| backend.rows(most, width).expect("memory");
        let mut buffers = Buffers {
            x: rows_of(HIDDEN),
            normed: rows_of(HIDDEN),
            qkv: rows_of(HEADS.qkv_width()),
            attended: rows_of(HEADS.q_width()),
            gate_up: rows_of(2 * FEED),
            gated: rows_of(FEED),
        };
        for row in 0..most {
            for (i, x) in buffers.x.row_mut(row).iter_mut().enumerate() {
                *x = ((i * 7 + row) % 23) as f32 / 23.0 - 0.5;
            }
        }
        let bounds = PlanBounds { rows: most, outputs: most, slots: context + most };
        let mut plan = backend.plan(bounds).expect("memory");
        // Keys and values of the context are written first: what was never written is one zero page.
        for start in (0..context).step_by(most) {
            backend.place(&plan_of(start, most), &mut plan).expect("whole");
            for layer in 0..LAYERS {
                for row in 0..most {
                    for (i, x) in buffers.qkv.row_mut(row).iter_mut().enumerate() {
                        *x = ((i * 5 + row * 3 + start) % 29) as f32 / 29.0 - 0.5;
                    }
                }
                let qkv = &mut buffers.qkv;
                backend
                    .write_kv(qkv, HEADS, None, &bench.rope, &plan, &mut kv, layer)
                    .expect("fits");
            }
        }
        println!("\n{}, {format:?}, context {context}: best µs of all layers", backend.describe());
        println!("  rows    total  {}", STEPS.map(|s| format!("{s:>9}")).join(""));
        let mut best = vec![[Duration::MAX; 10]; all_rows.len()];
        for _ in 0..repeat {
            for (best, &rows) in best.iter_mut().zip(&all_rows) {
                backend.place(&plan_of(context, rows), &mut plan).expect("whole");
                let took = bench.pass(&plan, &mut kv, rows, &mut buffers);
                for (best, took) in best.iter_mut().zip(took) {
                    *best = (*best).min(took);
                }
                best[9] = best[9].min(took.iter().sum());
            }
        }
        for (best, rows) in best.iter().zip(&all_rows) {
            let steps: Vec<String> =
                best[..9].iter().map(|t| format!("{:9.0}", t.as_secs_f64() * 1e6)).collect();
            println!("  {rows:4} {:8.0}  {}", best[9].as_secs_f64() * 1e6, steps.join(""));
        }
    }
}
