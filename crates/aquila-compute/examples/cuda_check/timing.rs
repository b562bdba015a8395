//! How long projections take, against the speed of the memory.

use aquila_compute::cuda::{CudaBackend, Graph, ProjectionKernel};
use aquila_compute::{Accumulate, Activation, Backend, Result, WeightFormat};

use crate::random::{Kind, Random};

const SAMPLES: usize = 20;

/// Seconds of one replay: median, 10th and 90th percentile.
pub struct Spread {
    pub median: f64,
    pub low: f64,
    pub high: f64,
}

pub fn replays(b: &CudaBackend, graph: &Graph) -> Result<Spread> {
    for _ in 0..3 {
        graph.replay()?;
    }
    let mut samples = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let start = b.mark()?;
        graph.replay()?;
        samples.push(start.seconds_until(&b.mark()?)?);
    }
    samples.sort_by(f64::total_cmp);
    Ok(Spread {
        median: samples[SAMPLES / 2],
        low: samples[SAMPLES / 10],
        high: samples[SAMPLES - 1 - SAMPLES / 10],
    })
}

/// The projections of Llama-3.1-8B by the kernels that are chosen.
pub fn projections(b: &mut CudaBackend, random: &mut Random) -> Result<()> {
    time(b, random, &[None], &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048])
}

/// The same by each kernel that many rows could go to.
pub fn kernels(b: &mut CudaBackend, random: &mut Random) -> Result<()> {
    use ProjectionKernel::{Many, Middle, Pairs, Quads};
    let kernels = [Middle, Many, Pairs, Quads].map(Some);
    time(b, random, &kernels, &[64, 128, 192, 256, 384, 512, 1024, 2048])
}

/// Over copies that take turns in one graph, so that none is read from the cache.
fn time(
    b: &mut CudaBackend,
    random: &mut Random,
    kernels: &[Option<ProjectionKernel>],
    counts: &[usize],
) -> Result<()> {
    println!("\n| projection | rows | kernel | µs | 10 % to 90 % | GB/s of weights | TFLOP/s |");
    println!("|---|---|---|---|---|---|---|");
    let shapes = [
        ("qkv", 6144, 4096, false),
        ("o", 4096, 4096, false),
        ("gate and up", 28672, 4096, true),
        ("down", 4096, 14336, false),
        ("head", 128_256, 4096, false),
    ];
    for (name, outputs, inputs, gated) in shapes {
        let bytes = 2 * outputs * inputs;
        let copies = (600_000_000 / bytes).clamp(2, 16);
        let tensor = random.tensor(&[outputs, inputs], 0.05)?;
        let copies: Vec<_> = (0..copies)
            .map(|_| b.pack(std::slice::from_ref(&tensor), WeightFormat::Bf16))
            .collect::<Result<_>>()?;
        let cases = counts.iter().filter(|&&rows| rows <= 256 || name != "head");
        for (&rows, &kernel) in
            cases.flat_map(|rows| kernels.iter().map(move |kernel| (rows, kernel)))
        {
            b.prefer_projection(kernel);
            let input = b.rows_of(inputs, &random.values(rows * inputs, Kind::Even))?;
            let mut both = b.rows(rows, outputs)?;
            let mut out = b.rows(rows, outputs / 2)?;
            let turns = if rows > 64 { copies.len().min(4) } else { 2 * copies.len() };
            let graph = b.graph_of(|b| {
                copies.iter().cycle().take(turns).try_for_each(|w| match gated {
                    true => b.project_gated(
                        w,
                        None,
                        Activation::Silu,
                        &input,
                        rows,
                        &mut both,
                        &mut out,
                    ),
                    false => b.project(w, None, &input, rows, Accumulate::Set, &mut both),
                })
            })?;
            let Spread { median, low, high } = replays(b, &graph)?;
            let each = |seconds: f64| seconds / turns as f64 * 1e6;
            println!(
                "| {name}, {outputs} by {inputs} | {rows} | {} | {:.2} | {:.2} to {:.2} | {:.0} | {:.1} |",
                kernel.map_or("chosen".into(), |kernel| format!("{kernel:?}")),
                each(median),
                each(low),
                each(high),
                bytes as f64 / each(median) / 1e3,
                rows as f64 * bytes as f64 / each(median) / 1e6,
            );
        }
    }
    b.prefer_projection(None);
    Ok(())
}
