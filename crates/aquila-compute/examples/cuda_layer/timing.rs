//! How long a layer takes, eager and replayed, and each projection for itself.

use aquila_compute::cuda::CudaBackend;
use aquila_compute::{
    Accumulate, AttentionSpan, Backend, ForwardPlan, HostTensor, PlanBounds, Result,
};

use crate::layer::{Layer, Random, Tensors, layer};

/// Read bandwidth of an H200 that we measure against, in bytes per second.
const BANDWIDTH: f64 = 4560e9;
const SAMPLES: usize = 40;
/// Passes between two marks.
const PASSES: usize = 10;
/// Copies of a projection that take turns, so that none is read from the cache.
const COPIES: usize = 8;

/// Seconds of one pass: median, 10th and 90th percentile.
struct Spread {
    median: f64,
    low: f64,
    high: f64,
}

fn time(b: &CudaBackend, mut pass: impl FnMut() -> Result<()>) -> Result<Spread> {
    for _ in 0..2 * PASSES {
        pass()?;
    }
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let start = b.mark()?;
        for _ in 0..PASSES {
            pass()?;
        }
        samples.push(start.seconds_until(&b.mark()?)? / PASSES as f64);
    }
    samples.sort_by(f64::total_cmp);
    Ok(Spread {
        median: samples[SAMPLES / 2],
        low: samples[SAMPLES / 10],
        high: samples[SAMPLES - 1 - SAMPLES / 10],
    })
}

fn row(what: &str, rows: usize, spread: &Spread, bytes: usize) -> String {
    let rate = bytes as f64 / spread.median;
    format!(
        "| {what} | {rows} | {:.1} | {:.1} to {:.1} | {:.0} | {:.0} % |",
        spread.median * 1e6,
        spread.low * 1e6,
        spread.high * 1e6,
        rate / 1e9,
        100.0 * rate / BANDWIDTH
    )
}

/// The head of the table that [`layers`] and [`projections`] make rows of.
pub const HEAD: &str = "| what | rows | µs, median | µs, 10 % to 90 % | GB/s of weights | of 4560 |\n\
                        |---|---|---|---|---|---|";

/// Times the layer over each plan.
pub fn layers(
    b: &CudaBackend,
    tensors: &Tensors,
    on: &mut Layer<CudaBackend>,
    plans: &[ForwardPlan],
) -> Result<Vec<String>> {
    let mut table = Vec::new();
    for plan in plans {
        let rows = plan.rows();
        b.place(plan, &mut on.plan)?;
        let eager = time(b, || layer(b, on, rows))?;
        let graph = b.graph_of(|b| layer(b, on, rows))?;
        let replay = time(b, || graph.replay())?;
        let placed = time(b, || {
            b.place(plan, &mut on.plan)?;
            graph.replay()
        })?;
        table.push(row("layer, eager", rows, &eager, tensors.bytes()));
        table.push(row("layer, replayed", rows, &replay, tensors.bytes()));
        table.push(row("layer, placed and replayed", rows, &placed, tensors.bytes()));
    }
    Ok(table)
}

/// Random values in 8 rows, by way of an embedding: what a product is fed can change its speed.
fn fill(b: &CudaBackend, width: usize, rows: &mut <CudaBackend as Backend>::Rows) -> Result<()> {
    let table = b.table(&Random(11).tensor(&[8, width], 0.0, 1.0)?)?;
    let mut plan = b.plan(PlanBounds { rows: 8, outputs: 0, slots: 1 })?;
    let span = AttentionSpan { prefix: 1, ..AttentionSpan::default() };
    let host = ForwardPlan {
        tokens: (0..8).collect(),
        positions: vec![0; 8],
        writes: vec![0; 8],
        spans: vec![span; 8],
        changes: vec![(0, 1)],
        slots: vec![0],
        ..ForwardPlan::default()
    };
    b.place(&host, &mut plan)?;
    b.embed(&table, 1.0, &plan, rows)
}

/// Times each projection, over copies that take turns in one graph.
pub fn projections(b: &CudaBackend, t: &Tensors, row_counts: &[usize]) -> Result<Vec<String>> {
    let mut table = Vec::new();
    let parts: [(&str, &[HostTensor]); 4] = [
        ("qkv", &t.qkv),
        ("o", std::slice::from_ref(&t.o)),
        ("gate and up", &t.gate_up),
        ("down", std::slice::from_ref(&t.down)),
    ];
    for (name, parts) in parts {
        let inputs = parts[0].matrix()?.1;
        let outputs: usize = parts.iter().map(|part| part.shape()[0]).sum();
        let copies = (0..COPIES).map(|_| b.pack(parts, t.shape.format));
        let copies = copies.collect::<Result<Vec<_>>>()?;
        let mut input = b.rows(8, inputs)?;
        fill(b, inputs, &mut input)?;
        let mut out = b.rows(8, outputs)?;
        for &rows in row_counts {
            let graph = b.graph_of(|b| {
                copies
                    .iter()
                    .try_for_each(|w| b.project(w, None, &input, rows, Accumulate::Set, &mut out))
            })?;
            let mut spread = time(b, || graph.replay())?;
            for seconds in [&mut spread.median, &mut spread.low, &mut spread.high] {
                *seconds /= COPIES as f64;
            }
            let name = format!("{name}, {outputs} by {inputs}");
            table.push(row(&name, rows, &spread, 2 * inputs * outputs));
        }
    }
    Ok(table)
}
