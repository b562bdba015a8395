//! How long a whole step of Llama-3.1-8B takes without an engine, and which operations take it.

use aquila_compute::cuda::CudaBackend;
use aquila_compute::{
    Accumulate, Activation, AttentionParams, AttentionSpan, Backend, ForwardPlan, HeadShape,
    HostTensor, KvDtype, KvShape, Normed, PlanBounds, Result, RopeTable, WeightFormat,
};

use crate::random::Random;
use crate::timing::replays;

const HIDDEN: usize = 4096;
const FFN: usize = 14336;
const VOCABULARY: usize = 128_256;
const HEADS: HeadShape = HeadShape { heads: 32, kv_heads: 8, head_dim: 128 };
const PARAMS: AttentionParams = AttentionParams { heads: HEADS, scale: 0.088, window: None };
const LAYERS: usize = 32;
/// Layers with weights of their own; the others use them again, long after they left the cache.
const DISTINCT: usize = 4;
const CONTEXT: usize = 512;
const SLOTS: usize = 65_536;
const EPSILON: f32 = 1e-5;

type Rows = <CudaBackend as Backend>::Rows;
type Vector = <CudaBackend as Backend>::Vector;
type Weight = <CudaBackend as Backend>::Weight;

struct Layer {
    norms: [Vector; 2],
    qkv: Weight,
    o: Weight,
    gate_up: Weight,
    down: Weight,
}

/// Parts of a step that can be left out, to see what they cost.
#[derive(Clone, Copy, PartialEq)]
enum Without {
    Nothing,
    /// Without projections that norm what they read: norms are operations of their own.
    NormedInputs,
    /// Without norms of their own for up to eight rows: projections norm what they read.
    NormsOfEight,
    Attention,
    Norms,
    WriteKv,
    Head,
}

/// Rows that are normed where they are projected.
fn before<'a>(input: &'a Rows, weight: &'a Vector, room: &'a mut Rows) -> Normed<'a, CudaBackend> {
    Normed { input, weight, epsilon: EPSILON, room }
}

/// Times steps of `requests` requests with `nodes` rows each.
pub fn time(b: &mut CudaBackend, random: &mut Random) -> Result<()> {
    let mut weight = |outputs: usize, inputs: usize| {
        let tensor = random.tensor(&[outputs, inputs], (3.0 / inputs as f32).sqrt())?;
        b.pack(&[tensor], WeightFormat::Bf16)
    };
    let vector =
        |value: f32| b.vector(&[HostTensor::from_f32("norm", vec![HIDDEN], &vec![value; HIDDEN])?]);
    let layers: Vec<Layer> = (0..DISTINCT)
        .map(|_| {
            Ok(Layer {
                norms: [vector(1.0)?, vector(0.9)?],
                qkv: weight(HEADS.qkv_width(), HIDDEN)?,
                o: weight(HIDDEN, HEADS.q_width())?,
                gate_up: weight(2 * FFN, HIDDEN)?,
                down: weight(HIDDEN, FFN)?,
            })
        })
        .collect::<Result<_>>()?;
    let head = weight(VOCABULARY, HIDDEN)?;
    let table = b.table(&random.tensor(&[1000, HIDDEN], 1.0)?)?;
    let frequencies: Vec<f64> = (0..64).map(|i| 500_000f64.powf(-f64::from(i) / 64.0)).collect();
    let rope = b.rope(&RopeTable::new(2048, &frequencies, 1.0))?;
    let mut kv = b.kv(KvShape {
        layers: LAYERS,
        slots: SLOTS,
        kv_heads: HEADS.kv_heads,
        head_dim: HEADS.head_dim,
        dtype: KvDtype::Bf16,
    })?;
    let rows = 256;
    let bounds = PlanBounds { rows, outputs: rows, slots: 2 * SLOTS };
    let mut plan = b.plan(bounds)?;
    let make = |width: usize| b.rows(rows, width);
    let (mut residual, mut normed, mut qkv) =
        (make(HIDDEN)?, make(HIDDEN)?, make(HEADS.qkv_width())?);
    let (mut attended, mut both, mut gated) = (make(HEADS.q_width())?, make(2 * FFN)?, make(FFN)?);
    let mut logits = make(VOCABULARY)?;
    let bytes = 2
        * (LAYERS * (HEADS.qkv_width() * HIDDEN + HIDDEN * HEADS.q_width() + 3 * FFN * HIDDEN)
            + VOCABULARY * HIDDEN);

    println!(
        "\n| step of Llama-3.1-8B, {CONTEXT} positions | ms | 10 % to 90 % | GB/s of weights |"
    );
    println!("|---|---|---|---|");
    let chains =
        [(1, 1), (1, 4), (1, 8), (1, 16), (4, 1), (16, 1), (32, 1), (64, 1), (16, 4), (64, 4)];
    let chains = chains.map(|(requests, nodes)| (requests, nodes, false));
    for (requests, nodes, is_tree) in chains.into_iter().chain([(1, 16, true)]) {
        let host = decode(requests, nodes, is_tree);
        let count = host.rows();
        b.place(&host, &mut plan)?;
        let parts: &[Without] = match (requests, nodes) {
            (1, 8) => {
                use Without::{Attention, Norms, NormsOfEight, Nothing, WriteKv};
                &[Nothing, NormsOfEight, Attention, Norms, WriteKv]
            }
            (1, 1) | (16 | 64, 1) => {
                use Without::{Attention, Head, NormedInputs, Norms, Nothing, WriteKv};
                &[Nothing, NormedInputs, Attention, Norms, WriteKv, Head]
            }
            (1, 4) => &[Without::Nothing, Without::NormedInputs],
            _ => &[Without::Nothing],
        };
        for &without in parts {
            b.norm_where_projected(if without == Without::NormsOfEight { 8 } else { 4 });
            let b = &*b;
            let (set, silu) = (Accumulate::Set, Activation::Silu);
            let apart = matches!(without, Without::NormedInputs | Without::Norms);
            let norm = |input: &Rows, weight: &Vector, out: &mut Rows| match without {
                Without::Norms => Ok(()),
                _ => b.rms_norm(input, weight, EPSILON, count, out),
            };
            let mut step = |b: &CudaBackend| -> Result<()> {
                b.embed(&table, 1.0, &plan, &mut residual)?;
                for at in 0..LAYERS {
                    let layer = &layers[at % DISTINCT];
                    if apart {
                        norm(&residual, &layer.norms[0], &mut normed)?;
                        b.project(&layer.qkv, None, &normed, count, set, &mut qkv)?;
                    } else {
                        let normed = before(&residual, &layer.norms[0], &mut normed);
                        b.project_normed(&layer.qkv, None, normed, count, set, &mut qkv)?;
                    }
                    if without != Without::WriteKv {
                        b.write_kv(&mut qkv, HEADS, None, &rope, &plan, &mut kv, at)?;
                    }
                    if without != Without::Attention {
                        b.attend(&qkv, PARAMS, &plan, &kv, at, &mut attended)?;
                    }
                    b.project(&layer.o, None, &attended, count, Accumulate::Add, &mut residual)?;
                    let (w, both, gated) = (&layer.gate_up, &mut both, &mut gated);
                    if apart {
                        norm(&residual, &layer.norms[1], &mut normed)?;
                        b.project_gated(w, None, silu, &normed, count, both, gated)?;
                    } else {
                        let normed = before(&residual, &layer.norms[1], &mut normed);
                        b.project_gated_normed(w, None, silu, normed, count, both, gated)?;
                    }
                    b.project(&layer.down, None, gated, count, Accumulate::Add, &mut residual)?;
                }
                norm(&residual, &layers[0].norms[0], &mut normed)?;
                if without != Without::Head {
                    b.project(&head, None, &normed, count, Accumulate::Set, &mut logits)?;
                }
                Ok(())
            };
            step(b)?;
            let graph = b.graph_of(|b| step(b))?;
            let spread = replays(b, &graph)?;
            let left_out = match without {
                Without::Nothing => "",
                Without::NormedInputs => ", norms on their own",
                Without::NormsOfEight => ", norms of eight rows where they are projected",
                Without::Attention => ", without attention",
                Without::Norms => ", without norms",
                Without::WriteKv => ", without write_kv",
                Without::Head => ", without the head",
            };
            println!(
                "| {requests} requests of {nodes} rows{}{left_out} | {:.3} | {:.3} to {:.3} | {:.0} |",
                if is_tree { " as a tree" } else { "" },
                spread.median * 1e3,
                spread.low * 1e3,
                spread.high * 1e3,
                bytes as f64 / spread.median / 1e9
            );
            if without == Without::Nothing {
                let start = b.mark()?;
                for _ in 0..10 {
                    step(b)?;
                }
                let eager = start.seconds_until(&b.mark()?)? / 10.0;
                println!("| the same, launched one by one | {:.3} | | |", eager * 1e3);
            }
        }
    }
    Ok(())
}

/// Requests of `CONTEXT` positions each, with chains of `nodes` rows behind them; or with as many rows
/// that see their ancestors as those of trees do.
fn decode(requests: usize, nodes: usize, is_tree: bool) -> ForwardPlan {
    let mut plan = ForwardPlan::default();
    for r in 0..requests {
        let first = (r * (CONTEXT + nodes)) as u32;
        let fresh = first + CONTEXT as u32;
        let start = plan.add_table(first..fresh + nodes as u32);
        for node in 0..nodes as u32 {
            plan.tokens.push((37 * r as u32 + node) % 1000);
            plan.positions.push(CONTEXT as u32 + node);
            plan.writes.push(fresh + node);
            plan.outputs.push(plan.rows() as u32 - 1);
            let span = match is_tree {
                false => AttentionSpan::in_table(start, CONTEXT + node as usize + 1),
                true => plan.span_of_path(start, CONTEXT, fresh..=fresh + node),
            };
            plan.spans.push(span);
        }
    }
    plan
}
