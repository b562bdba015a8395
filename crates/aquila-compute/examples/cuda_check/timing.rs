//! How long projections take, against the speed of the memory.

use aquila_compute::cuda::{
    CudaBackend, FEW_OUTPUTS, Graph, PREDICTED, ProjectionClass, ProjectionKernel, TILE_SHAPES,
    TileShape,
};
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

/// The same by each kernel that so many rows could go to, which of them is fastest, and what
/// `tensor_projection.rs` would say of that.
pub fn kernels(b: &mut CudaBackend, random: &mut Random) -> Result<()> {
    use ProjectionKernel::{Many, Middle, Tiles};
    println!("\n| tiles | clusters at a time |");
    println!("|---|---|");
    for (shape, clusters) in b.clusters_of_tiles() {
        println!("| {} | {clusters} |", name_of(Some(Tiles(shape))));
    }
    let counts = [32, 64, 128, 192, 256, 384, 512, 1024, 2048];
    let timed = time(b, random, &counts, |rows| {
        // Two thread blocks that share weights have 256 rows.
        let tiles = TILE_SHAPES.into_iter().filter(|shape| match rows {
            ..=128 => shape.share_weights == 1 && shape.rows >= rows,
            _ => shape.share_weights > 1,
        });
        [Middle, Many].into_iter().chain(tiles.map(Tiles)).map(Some).collect()
    })?;
    println!("\n| projection | rows | fastest | µs | without tiles, µs | predicted | µs |");
    println!("|---|---|---|---|---|---|---|");
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
        let Timed { projection, class, rows, .. } = of_rows[0];
        let predicted = PREDICTED[class as usize].iter().find(|(most, _)| rows <= *most);
        let predicted = predicted.map(|(_, kernel)| *kernel);
        let theirs = of_rows.iter().find(|timed| timed.kernel == predicted);
        println!(
            "| {projection} | {rows} | {} | {micros:.2} | {before:.2} | {} | {:.2} |",
            name_of(kernel),
            name_of(predicted),
            theirs.map_or(f64::NAN, |timed| timed.micros),
        );
    }
    print_fastest(&timed);
    Ok(())
}

/// Prints `FASTEST` of `tensor_projection.rs` as these times would have it: of each class the kernel that
/// is off the fastest of each projection by the smallest factor, up to the rows that were timed.
fn print_fastest(timed: &[Timed]) {
    println!("\n```rust\nconst FASTEST: [&Fastest; 3] = [");
    for class in ProjectionClass::ALL {
        let mut entries: Vec<(usize, ProjectionKernel)> = Vec::new();
        let of_class: Vec<&Timed> = timed.iter().filter(|timed| timed.class == class).collect();
        let mut counts: Vec<usize> = of_class.iter().map(|timed| timed.rows).collect();
        counts.sort_unstable();
        counts.dedup();
        for rows in counts {
            let at_rows = || of_class.iter().filter(|timed| timed.rows == rows);
            let least = |projection: &str| {
                let of_projection = at_rows().filter(|timed| timed.projection == projection);
                of_projection.map(|timed| timed.micros).fold(f64::INFINITY, f64::min)
            };
            let slower = |kernel: Option<ProjectionKernel>| -> f64 {
                let of_kernel = at_rows().filter(|timed| timed.kernel == kernel);
                of_kernel.map(|timed| timed.micros / least(timed.projection)).product()
            };
            let fastest = at_rows().min_by(|a, b| slower(a.kernel).total_cmp(&slower(b.kernel)));
            let Some(kernel) = fastest.and_then(|timed| timed.kernel) else { continue };
            match entries.last_mut() {
                Some((most, last)) if *last == kernel => *most = rows,
                _ => entries.push((rows, kernel)),
            }
        }
        match class {
            ProjectionClass::FewOutputs => {
                println!("    // One group of inputs, up to {FEW_OUTPUTS} outputs.");
            }
            ProjectionClass::ManyOutputs => println!("    // One group of inputs, more outputs."),
            ProjectionClass::Groups => println!("    // Several groups of inputs."),
        }
        println!("    &[\n        (SKINNY_ROWS, Skinny),");
        for (i, (most, kernel)) in entries.iter().enumerate() {
            let most = if i + 1 == entries.len() { "usize::MAX".into() } else { most.to_string() };
            let kernel = match kernel {
                ProjectionKernel::Tiles(TileShape { rows, share_weights, share_rows }) => {
                    format!("tiles({rows}, {share_weights}, {share_rows})")
                }
                kernel => format!("{kernel:?}"),
            };
            println!("        ({most}, {kernel}),");
        }
        println!("    ],");
    }
    println!("];\n```");
}

/// How long a kernel took for a projection of some rows.
struct Timed {
    projection: &'static str,
    class: ProjectionClass,
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
            // So many that beginning a graph does not show in one of them.
            let turns = if rows > 64 { 8 } else { (2 * copies.len()).max(8) };
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
            let class = ProjectionClass::of(inputs, outputs);
            timed.push(Timed { projection: name, class, rows, kernel, micros: each(median) });
        }
    }
    b.prefer_projection(None);
    Ok(timed)
}
