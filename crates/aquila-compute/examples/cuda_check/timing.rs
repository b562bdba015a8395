//! How long projections take, against the speed of the memory.

use aquila_compute::cuda::{CudaBackend, Graph, ProjectionKernel, TILE_SHAPES, TileShape};
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
    time(b, random, &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048], |_| vec![None]).map(|_| ())
}

/// The same by each kernel that so many rows could go to, and which of them is fastest.
pub fn kernels(b: &mut CudaBackend, random: &mut Random) -> Result<()> {
    use ProjectionKernel::{Many, Middle, Tiles};
    let counts = [32, 64, 128, 192, 256, 384, 512, 1024, 2048];
    let timed = time(b, random, &counts, |rows| {
        let tiles = TILE_SHAPES.into_iter().filter(|shape| {
            let of_cluster = shape.rows * shape.share_weights;
            of_cluster >= rows.min(128) && shape.rows <= rows
        });
        [Middle, Many].into_iter().chain(tiles.map(Tiles)).map(Some).collect()
    })?;
    println!("\n| projection | rows | fastest | µs | without tiles, µs |");
    println!("|---|---|---|---|---|");
    let least = |of: &mut dyn Iterator<Item = &Timed>| {
        of.min_by(|a, b| a.micros.total_cmp(&b.micros)).map(|timed| (timed.kernel, timed.micros))
    };
    for of_rows in timed.chunk_by(|a, b| (a.projection, a.rows) == (b.projection, b.rows)) {
        let old = |timed: &&Timed| !matches!(timed.kernel, Some(Tiles(_)));
        let fastest = least(&mut of_rows.iter());
        let (Some((kernel, micros)), Some((_, before))) =
            (fastest, least(&mut of_rows.iter().filter(old)))
        else {
            continue;
        };
        let Timed { projection, rows, .. } = of_rows[0];
        println!("| {projection} | {rows} | {} | {micros:.2} | {before:.2} |", name_of(kernel));
    }
    Ok(())
}

/// How long a kernel took for a projection of some rows.
struct Timed {
    projection: &'static str,
    rows: usize,
    kernel: Option<ProjectionKernel>,
    micros: f64,
}

fn name_of(kernel: Option<ProjectionKernel>) -> String {
    match kernel {
        None => "chosen".into(),
        Some(ProjectionKernel::Tiles(TileShape { rows, share_weights, share_rows })) => {
            format!("tiles of {rows}, {share_weights}x{share_rows}")
        }
        Some(kernel) => format!("{kernel:?}"),
    }
}

/// Over copies that take turns in one graph, so that none is read from the cache.
fn time(
    b: &mut CudaBackend,
    random: &mut Random,
    counts: &[usize],
    kernels: impl Fn(usize) -> Vec<Option<ProjectionKernel>>,
) -> Result<Vec<Timed>> {
    println!("\n| projection | rows | kernel | µs | 10 % to 90 % | GB/s of weights | TFLOP/s |");
    println!("|---|---|---|---|---|---|---|");
    let shapes = [
        ("qkv", 6144, 4096, false),
        ("o", 4096, 4096, false),
        ("gate and up", 28672, 4096, true),
        ("down", 4096, 14336, false),
        ("head", 128_256, 4096, false),
    ];
    let mut timed = Vec::new();
    for (name, outputs, inputs, gated) in shapes {
        let bytes = 2 * outputs * inputs;
        let copies = (600_000_000 / bytes).clamp(2, 16);
        let tensor = random.tensor(&[outputs, inputs], 0.05)?;
        let copies: Vec<_> = (0..copies)
            .map(|_| b.pack(std::slice::from_ref(&tensor), WeightFormat::Bf16))
            .collect::<Result<_>>()?;
        let cases = counts.iter().filter(|&&rows| rows <= 256 || name != "head");
        for (rows, kernel) in
            cases.flat_map(|&rows| kernels(rows).into_iter().map(move |kernel| (rows, kernel)))
        {
            b.prefer_projection(kernel);
            let input = b.rows_of(inputs, &random.values(rows * inputs, Kind::Even))?;
            let mut both = b.rows(rows, outputs)?;
            let mut out = b.rows(rows, outputs / 2)?;
            let mut project = |b: &CudaBackend, weight| match gated {
                true => {
                    let (both, out) = (&mut both, &mut out);
                    b.project_gated(weight, None, Activation::Silu, &input, rows, both, out)
                }
                false => b.project(weight, None, &input, rows, Accumulate::Set, &mut both),
            };
            // The first makes room for what the kernel works in.
            project(b, &copies[0])?;
            let turns = if rows > 64 { copies.len().min(4) } else { 2 * copies.len() };
            let graph = b.graph_of(|b| {
                copies.iter().cycle().take(turns).try_for_each(|weight| project(b, weight))
            })?;
            let Spread { median, low, high } = replays(b, &graph)?;
            let each = |seconds: f64| seconds / turns as f64 * 1e6;
            println!(
                "| {name}, {outputs} by {inputs} | {rows} | {} | {:.2} | {:.2} to {:.2} | {:.0} | {:.1} |",
                name_of(kernel),
                each(median),
                each(low),
                each(high),
                bytes as f64 / each(median) / 1e3,
                rows as f64 * bytes as f64 / each(median) / 1e6,
            );
            timed.push(Timed { projection: name, rows, kernel, micros: each(median) });
        }
    }
    b.prefer_projection(None);
    Ok(timed)
}
