//! Plain arithmetic: the same operations on both backends, compared after each.

use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::cuda::CudaBackend;
use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, ForwardPlan, HeadShape, HostTensor, KvDtype,
    KvShape, PlanBounds, Result, RopeTable, WeightFormat,
};

use crate::Findings;
use crate::random::{Kind, Random};

const TOKENS: usize = 97;

struct Shape {
    hidden: usize,
    heads: HeadShape,
    ffn: usize,
    half: usize,
    norms: bool,
    format: WeightFormat,
    kv: KvDtype,
}

/// Values that both backends start from.
struct Values {
    table: HostTensor,
    contexts: HostTensor,
    norm: HostTensor,
    head_norms: [HostTensor; 2],
    qkv: HostTensor,
    bias: HostTensor,
    o: HostTensor,
    gate_up: HostTensor,
    down: HostTensor,
}

impl Values {
    fn new(shape: &Shape, random: &mut Random) -> Result<Self> {
        let &Shape { hidden, heads, ffn, .. } = shape;
        let mut tensor = |sizes: &[usize], kind: Kind| {
            let values = random.values(sizes.iter().product(), kind);
            HostTensor::from_f32("random", sizes.to_vec(), &values)
        };
        Ok(Self {
            table: tensor(&[TOKENS, hidden], Kind::Outliers)?,
            contexts: tensor(&[TOKENS, heads.qkv_width()], Kind::Even)?,
            norm: tensor(&[hidden], Kind::Even)?,
            head_norms: [
                tensor(&[heads.head_dim], Kind::Even)?,
                tensor(&[heads.head_dim], Kind::Even)?,
            ],
            qkv: tensor(&[heads.qkv_width(), hidden], Kind::Even)?,
            bias: tensor(&[heads.qkv_width()], Kind::Even)?,
            o: tensor(&[hidden, heads.q_width()], Kind::Wide)?,
            gate_up: tensor(&[2 * ffn, hidden], Kind::Even)?,
            down: tensor(&[hidden, ffn], Kind::Even)?,
        })
    }
}

/// Runs everything once; answers what came out of each operation, by name.
fn exercise<B: Backend>(
    b: &B,
    shape: &Shape,
    v: &Values,
    (plan, slots): &(ForwardPlan, usize),
    fill: &ForwardPlan,
) -> Result<Vec<(&'static str, Vec<f32>)>> {
    let &Shape { hidden, heads, ffn, half, norms, format, kv } = shape;
    let rows = plan.rows();
    let capacity = rows.max(fill.rows());
    let one = std::slice::from_ref::<HostTensor>;
    let frequencies: Vec<f64> = (0..half).map(|i| 0.7f64.powi(i as i32)).collect();
    let rope = b.rope(&RopeTable::new(2048, &frequencies, 1.0))?;
    let mut kv = b.kv(KvShape {
        layers: 2,
        slots: *slots,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        dtype: kv,
    })?;
    let bounds = PlanBounds { rows: capacity, outputs: capacity, slots: 4 * slots + 64 };
    let mut placed = b.plan(bounds)?;
    let make = |width: usize| b.rows(capacity, width);
    let (mut residual, mut normed, mut qkv) =
        (make(hidden)?, make(hidden)?, make(heads.qkv_width())?);
    let (mut attended, mut both, mut gated) = (make(heads.q_width())?, make(2 * ffn)?, make(ffn)?);
    let (query_norm, key_norm) =
        (b.vector(one(&v.head_norms[0]))?, b.vector(one(&v.head_norms[1]))?);
    let norm = b.vector(one(&v.norm))?;
    let mut out = Vec::new();

    b.place(fill, &mut placed)?;
    b.embed(&b.table(&v.contexts)?, 1.0, &placed, &mut qkv)?;
    b.write_kv(&mut qkv, heads, None, &rope, &placed, &mut kv, 1)?;

    b.place(plan, &mut placed)?;
    b.embed(&b.table(&v.table)?, 1.7, &placed, &mut residual)?;
    out.push(("embed", b.read(&residual, rows)?));
    b.rms_norm(&residual, &norm, 1e-5, rows, &mut normed)?;
    out.push(("rms_norm", b.read(&normed, rows)?));
    let (weight, bias) = (b.pack(one(&v.qkv), format)?, b.vector(one(&v.bias))?);
    b.project(&weight, Some(&bias), &normed, rows, Accumulate::Set, &mut qkv)?;
    out.push(("project", b.read(&qkv, rows)?));
    let norms = norms.then_some((&query_norm, &key_norm, 1e-6));
    b.write_kv(&mut qkv, heads, norms, &rope, &placed, &mut kv, 1)?;
    // What stands in place of the keys is undefined on a device.
    let queries = |b: &B, qkv: &B::Rows| -> Result<Vec<f32>> {
        let all = b.read(qkv, rows)?;
        Ok(all.chunks(heads.qkv_width()).flat_map(|row| row[..heads.q_width()].to_vec()).collect())
    };
    out.push(("write_kv", queries(b, &qkv)?));
    let scale = 1.0 / (heads.head_dim as f32).sqrt();
    for window in [1, 2, 50, 63, 64, 65, 130] {
        let params = AttentionParams { heads, scale, window: Some(window) };
        b.attend(&qkv, params, &placed, &kv, 1, &mut attended)?;
        out.push(("attend within a window", b.read(&attended, rows)?));
    }
    let params = AttentionParams { heads, scale, window: None };
    b.attend(&qkv, params, &placed, &kv, 1, &mut attended)?;
    out.push(("attend", b.read(&attended, rows)?));
    b.project(&b.pack(one(&v.o), format)?, None, &attended, rows, Accumulate::Add, &mut residual)?;
    out.push(("project, added", b.read(&residual, rows)?));
    let weight = b.pack(one(&v.gate_up), format)?;
    for activation in [Activation::GeluTanh, Activation::Silu] {
        b.project_gated(&weight, None, activation, &normed, rows, &mut both, &mut gated)?;
        out.push(("project_gated", b.read(&gated, rows)?));
    }
    b.project(&b.pack(one(&v.down), format)?, None, &gated, rows, Accumulate::Add, &mut residual)?;
    out.push(("down", b.read(&residual, rows)?));
    b.add(&normed, rows, &mut residual)?;
    out.push(("add", b.read(&residual, rows)?));
    b.soft_cap(&mut residual, rows, 30.0)?;
    out.push(("soft_cap", b.read(&residual, rows)?));

    b.gather_sources(&residual, &placed, &mut normed)?;
    out.push(("gather_sources", b.read(&normed, rows)?));
    let mut joined = make(2 * hidden + 1)?;
    b.copy_columns(&residual, rows, hidden + 1, &mut joined)?;
    b.copy_columns(&normed, rows, 0, &mut joined)?;
    out.push(("copy_columns", b.read(&joined, rows)?));
    b.take_columns(&joined, rows, hidden / 2, &mut normed)?;
    out.push(("take_columns", b.read(&normed, rows)?));
    let mut outputs = make(hidden)?;
    let count = b.gather_outputs(&residual, &placed, 0, &mut outputs)?;
    out.push(("gather_outputs", b.read(&outputs, count)?));
    b.scatter_outputs(&outputs, &placed, &mut normed)?;
    out.push(("scatter_outputs", b.read(&normed, rows)?));
    b.clear_first(&placed, &mut normed)?;
    out.push(("clear_first", b.read(&normed, rows)?));
    let last = rows as u32 - 1;
    b.move_rows(&mut joined, &[(last, 0), (0, last / 2), (last / 3, last)])?;
    out.push(("move_rows", b.read(&joined, rows)?));

    // Every third slot goes to where the one before is, and attention shows it.
    let moves: Vec<(u32, u32)> = (0..*slots as u32 / 3).map(|i| (3 * i + 1, 3 * i)).collect();
    b.move_slots(&mut kv, &moves)?;
    b.attend(&qkv, params, &placed, &kv, 1, &mut attended)?;
    out.push(("move_slots, attend", b.read(&attended, rows)?));
    Ok(out)
}

/// Compares all operations of a CUDA backend with those of the CPU backend.
pub fn check(
    cuda: &CudaBackend,
    random: &mut Random,
    small: bool,
    findings: &mut Findings,
) -> Result<()> {
    let cpu = CpuBackend::new(IsaChoice::Auto, 0)?;
    let heads = |heads, kv_heads, head_dim| HeadShape { heads, kv_heads, head_dim };
    let (f32s, halves) = (WeightFormat::F32, WeightFormat::Bf16);
    let shapes = [
        Shape {
            hidden: 64,
            heads: heads(4, 2, 16),
            ffn: 96,
            half: 8,
            norms: false,
            format: f32s,
            kv: KvDtype::F32,
        },
        Shape {
            hidden: 301,
            heads: heads(6, 2, 24),
            ffn: 77,
            half: 8,
            norms: true,
            format: halves,
            kv: KvDtype::F32,
        },
        Shape {
            hidden: 100,
            heads: heads(11, 1, 40),
            ffn: 530,
            half: 20,
            norms: true,
            format: f32s,
            kv: KvDtype::Bf16,
        },
        Shape {
            hidden: 512,
            heads: heads(8, 2, 128),
            ffn: 1024,
            half: 64,
            norms: false,
            format: halves,
            kv: KvDtype::F32,
        },
    ];
    for shape in &shapes {
        let values = Values::new(shape, random)?;
        let requests = [&[64usize, 63, 1][..], &[0], &[5], &[130, 700, 65, 0], &[40; 60]];
        for contexts in requests.into_iter().take(if small { 1 } else { usize::MAX }) {
            let plan = random.plan(contexts, TOKENS);
            let fill = random.fill(&plan.0, TOKENS);
            let want = exercise(&cpu, shape, &values, &plan, &fill)?;
            let got = exercise(cuda, shape, &values, &plan, &fill)?;
            for ((what, want), (_, got)) in want.iter().zip(&got) {
                let heads = shape.heads;
                let what = format!("{what}, {heads:?}, {} rows, {contexts:?}", plan.0.rows());
                findings.compare(&what, got, want);
            }
        }
    }
    Ok(())
}
