//! Passes whose operations are all enqueued before the host waits, against the same passes with a wait
//! behind every operation: a kernel that reads too early what one before it writes gets something else.

use aquila_compute::cuda::CudaBackend;
use aquila_compute::{
    Accumulate, Activation, AttentionParams, Backend, ForwardPlan, HeadShape, HostTensor, KvDtype,
    KvShape, Normed, PlanBounds, Result, RopeTable, WeightFormat,
};

use crate::Findings;
use crate::random::{Kind, Random, Request, RowKind};

const HIDDEN: usize = 160;
const FFN: usize = 96;
const TOKENS: usize = 61;
const LAYERS: usize = 2;
const POSITIONS: usize = 512;
const EPSILON: f32 = 1e-5;

type Vector = <CudaBackend as Backend>::Vector;
type Weight = <CudaBackend as Backend>::Weight;

/// A model, all of whose layers have the same weights.
struct Model {
    heads: HeadShape,
    table: <CudaBackend as Backend>::Table,
    rope: <CudaBackend as Backend>::Rope,
    norms: [Vector; 2],
    head_norms: [Vector; 2],
    qkv: Weight,
    o: Weight,
    gate_up: Weight,
    down: Weight,
}

/// Passes of few rows, of some and of many, placed one after the other. Keys and values that no row of
/// theirs has written are zeros.
pub fn check(b: &CudaBackend, random: &mut Random, findings: &mut Findings) -> Result<()> {
    for head_dim in [32, 64, 128] {
        let model = Model::new(b, random, HeadShape { heads: 4, kv_heads: 2, head_dim })?;
        let request = |kind| move |context, rows| Request { context, rows, kind };
        let (chunk, tree) = (request(RowKind::Chunk), request(RowKind::Tree));
        let passes = [
            &[tree(130, 3)][..],
            &[tree(40, 7), chunk(0, 5), tree(129, 9)],
            &[chunk(100, 30), tree(17, 12), chunk(0, 40)],
            &[tree(9, 1)],
        ];
        let mut slots = 0;
        let mut plans = Vec::new();
        for requests in passes {
            let (plan, needed) = random.plan_of(requests, TOKENS);
            slots = slots.max(needed);
            plans.push(plan);
        }
        let want = model.run(b, &plans, slots, true)?;
        let got = model.run(b, &plans, slots, false)?;
        for (at, (got, want)) in got.iter().zip(&want).enumerate() {
            let rows = plans[at].rows();
            findings.compare(&format!("pass {at} of {rows} rows, heads of {head_dim}"), got, want);
        }
    }
    Ok(())
}

impl Model {
    fn new(b: &CudaBackend, random: &mut Random, heads: HeadShape) -> Result<Self> {
        let mut values = |shape: Vec<usize>| {
            let count = shape.iter().product();
            HostTensor::from_f32("random", shape, &random.values(count, Kind::Even))
        };
        let mut weight = |outputs: usize, inputs: usize| {
            b.pack(&[values(vec![outputs, inputs])?], WeightFormat::Bf16)
        };
        let (qkv, o) = (weight(heads.qkv_width(), HIDDEN)?, weight(HIDDEN, heads.q_width())?);
        let (gate_up, down) = (weight(2 * FFN, HIDDEN)?, weight(HIDDEN, FFN)?);
        let mut vector = |width: usize| b.vector(&[values(vec![width])?]);
        let norms = [vector(HIDDEN)?, vector(HIDDEN)?];
        let head_norms = [vector(heads.head_dim)?, vector(heads.head_dim)?];
        let table = b.table(&values(vec![TOKENS, HIDDEN])?)?;
        let frequencies: Vec<f64> =
            (0..heads.head_dim / 2).map(|i| 0.7f64.powi(i as i32)).collect();
        let rope = b.rope(&RopeTable::new(POSITIONS, &frequencies, 1.0))?;
        Ok(Self { heads, table, rope, norms, head_norms, qkv, o, gate_up, down })
    }

    /// What is left of each row of each pass; `waits` says whether the host waits behind every operation.
    fn run(
        &self,
        b: &CudaBackend,
        plans: &[ForwardPlan],
        slots: usize,
        waits: bool,
    ) -> Result<Vec<Vec<f32>>> {
        let heads = self.heads;
        let most = plans.iter().map(ForwardPlan::rows).max().unwrap_or(1);
        let bounds = PlanBounds { rows: most, outputs: most, slots: 8 * slots };
        let dtype = if b.kernel_family() == "cpu" { KvDtype::F32 } else { KvDtype::Bf16 };
        let (kv_heads, head_dim) = (heads.kv_heads, heads.head_dim);
        let mut kv = b.kv(KvShape { layers: LAYERS, slots, kv_heads, head_dim, dtype })?;
        let mut plan = b.plan(bounds)?;
        let (mut room, mut qkv) = (b.rows(most, HIDDEN)?, b.rows(most, heads.qkv_width())?);
        let (mut attended, mut both) = (b.rows(most, heads.q_width())?, b.rows(most, 2 * FFN)?);
        let mut gated = b.rows(most, FFN)?;
        let mut outs = Vec::new();
        for _ in plans {
            outs.push(b.rows(most, HIDDEN)?);
        }
        let params = AttentionParams { heads, scale: 0.1, window: None };
        let head_norms = Some((&self.head_norms[0], &self.head_norms[1], EPSILON));
        let (set, add) = (Accumulate::Set, Accumulate::Add);
        for (host, out) in plans.iter().zip(&mut outs) {
            let rows = host.rows();
            let wait = |out: &_| if waits { b.read(out, 1).map(|_| ()) } else { Ok(()) };
            b.place(host, &mut plan)?;
            b.embed(&self.table, 1.0, &plan, out)?;
            wait(out)?;
            for layer in 0..LAYERS {
                let normed = Normed {
                    input: out,
                    weight: &self.norms[0],
                    epsilon: EPSILON,
                    room: &mut room,
                };
                b.project_normed(&self.qkv, None, normed, rows, set, &mut qkv)?;
                wait(&qkv)?;
                b.write_kv(&mut qkv, heads, head_norms, &self.rope, &plan, &mut kv, layer)?;
                wait(&qkv)?;
                b.attend(&qkv, params, &plan, &kv, layer, &mut attended)?;
                wait(&attended)?;
                b.project(&self.o, None, &attended, rows, add, out)?;
                wait(out)?;
                b.rms_norm(out, &self.norms[1], EPSILON, rows, &mut room)?;
                wait(&room)?;
                let silu = Activation::Silu;
                b.project_gated(&self.gate_up, None, silu, &room, rows, &mut both, &mut gated)?;
                wait(&gated)?;
                b.project(&self.down, None, &gated, rows, add, out)?;
                wait(out)?;
            }
        }
        plans.iter().zip(&outs).map(|(host, out)| b.read(out, host.rows())).collect()
    }
}
