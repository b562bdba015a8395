//! Whole forward passes of a model, `preset:bench` unless told, against what the machine gives.
//!
//! `cargo bench -p aquila-model --bench forward -- [--model NAME]
//! [--isa avx512|avx2|portable] [--threads N] [--format bf16|int8] [--rows 1,2,4] [--context N] [--repeat N] [--profile rows|requests]`
//!
//! One request whose last M positions are the rows of the pass, all with logits. A repetition
//! visits every format and row count once, so that whatever else the machine does meets all of
//! them; the median counts. `--profile` says instead where the time goes, of M rows of one request or of
//! M requests of one row each.
//!
//! Work counts the products with weights alone, so the bounds are a little tighter than they need
//! be.

use std::time::Instant;

use aquila_compute::cpu::{CpuBackend, Isa, IsaChoice};
use aquila_compute::{Backend, WeightFormat};

#[path = "../../../aquila-compute/benches/machine/mod.rs"]
mod machine;
mod profile;
mod scene;
mod timed;

use machine::Machine;
use scene::{Batch, Scene};

struct Options {
    model: String,
    isas: Vec<Isa>,
    threads: usize,
    formats: Vec<WeightFormat>,
    rows: Vec<usize>,
    context: usize,
    repeat: usize,
    profile: Option<Batch>,
}

fn options() -> Options {
    let mut options = Options {
        model: "preset:bench".into(),
        isas: Isa::available().into_iter().filter(|isa| *isa != Isa::Portable).collect(),
        threads: 0,
        formats: vec![WeightFormat::Bf16, WeightFormat::Int8],
        rows: Vec::new(),
        context: 128,
        repeat: 40,
        profile: None,
    };
    let mut args = std::env::args().skip(1);
    while let Some(flag) = args.next() {
        let mut value = || args.next().unwrap_or_else(|| panic!("{flag} needs a value"));
        match flag.as_str() {
            "--isa" => {
                let name = value();
                options.isas =
                    Isa::available().into_iter().filter(|i| i.to_string() == name).collect();
                assert!(!options.isas.is_empty(), "this machine has no {name}");
            }
            "--model" => options.model = value(),
            "--threads" => options.threads = value().parse().expect("a number"),
            "--repeat" => options.repeat = value().parse().expect("a number"),
            "--context" => options.context = value().parse().expect("a number"),
            "--rows" => {
                options.rows = value().split(',').map(|r| r.parse().expect("a number")).collect();
            }
            "--format" => {
                options.formats = vec![match value().as_str() {
                    "bf16" => WeightFormat::Bf16,
                    "int8" => WeightFormat::Int8,
                    other => panic!("no format {other}"),
                }];
            }
            "--profile" => {
                options.profile = Some(match value().as_str() {
                    "rows" => Batch::RowsOfOne,
                    "requests" => Batch::OneRowOfEach,
                    other => panic!("no profile of {other}"),
                });
            }
            // Cargo tells every benchmark that it is one.
            "--bench" => {}
            other => panic!("no flag {other}"),
        }
    }
    if options.rows.is_empty() {
        options.rows =
            if options.profile.is_some() { vec![1, 8] } else { vec![1, 2, 4, 8, 16, 32] };
    }
    assert!(options.rows.contains(&1), "--rows must contain 1, which the others are held to");
    let most = options.rows.iter().copied().max().unwrap_or(1);
    assert!(most < options.context, "--context must exceed the largest of --rows");
    options
}

fn main() {
    let options = options();
    for &isa in &options.isas {
        let backend = CpuBackend::new(IsaChoice::Only(isa), options.threads).expect("available");
        println!("\n{}; load average {}", backend.describe(), load_average());
        let machine = Machine::measure(isa, backend.threads());
        println!(
            "reads {:.1} GB/s, f32 {:.0} GFLOP/s, int8 {:.0} GOP/s",
            machine.bandwidth / 1e9,
            machine.flops / 1e9,
            machine.int8_ops / 1e9
        );
        if let Some(batch) = options.profile {
            profile::run(backend, machine, batch, &options);
        } else {
            measure(&backend, machine, &options);
        }
        println!("load average {}", load_average());
    }
}

fn load_average() -> String {
    let text = std::fs::read_to_string("/proc/loadavg").unwrap_or_default();
    text.split(' ').take(3).collect::<Vec<_>>().join(" ")
}

/// The times of one pass, ascending.
struct Times(Vec<f64>);

impl Times {
    fn quantile(&self, share: f64) -> f64 {
        self.0[((self.0.len() - 1) as f64 * share).round() as usize]
    }

    fn median(&self) -> f64 {
        self.quantile(0.5)
    }
}

fn measure(backend: &CpuBackend, machine: Machine, options: &Options) {
    let mut scenes: Vec<Scene<CpuBackend>> = options
        .formats
        .iter()
        .map(|&format| Scene::load(backend, &options.model, format, options.context, 1))
        .collect();
    let rows = &options.rows;
    let mut times = vec![vec![Vec::new(); rows.len()]; scenes.len()];
    let cases = scenes.len() * rows.len();
    for repetition in 0..=options.repeat {
        for step in 0..cases {
            // Each repetition begins elsewhere, so that no case always follows the same one.
            let case = (step + repetition) % cases;
            let (format, at) = (case % scenes.len(), case / scenes.len());
            let plan = scenes[format].plan(Batch::RowsOfOne, rows[at]);
            let since = Instant::now();
            scenes[format].forward(backend, &plan);
            if repetition > 0 {
                times[format][at].push(since.elapsed().as_secs_f64());
            }
        }
    }
    for (scene, times) in scenes.iter().zip(times) {
        let times = times
            .into_iter()
            .map(|mut times| {
                times.sort_by(f64::total_cmp);
                Times(times)
            })
            .collect::<Vec<_>>();
        report(scene, backend.isa(), &times, machine, options);
    }
}

/// How a figure stands to its bound.
fn verdict(median: f64, best: f64, bound: f64) -> String {
    let word = match () {
        () if median <= bound => "pass",
        () if best <= bound => "pass at best",
        () => "MISS",
    };
    format!("{:.2} {word}", median / bound)
}

fn report(
    scene: &Scene<CpuBackend>,
    isa: Isa,
    times: &[Times],
    machine: Machine,
    options: &Options,
) {
    let (share, peak, slack) = match scene.format {
        WeightFormat::Int8 => (0.6, machine.int8_ops, 1.3),
        _ => (0.7, machine.flops, 1.25),
    };
    let one = &times[options.rows.iter().position(|&rows| rows == 1).expect("checked")];
    let bytes = scene.weight_bytes() as f64;
    println!(
        "\n{:?}, {:.0} MB of weights; one row reads {:.1} GB/s, {:.0} % of what the machine gives",
        scene.format,
        bytes / 1e6,
        bytes / one.median() / 1e9,
        bytes / one.median() / machine.bandwidth * 100.0
    );
    println!("  rows   best ms  median ms  10 % to 90 %      / one row  of its bound");
    for (times, &rows) in times.iter().zip(&options.rows) {
        let (best, median) = (times.quantile(0.0), times.median());
        let work = 2.0 * (rows * scene.weight_elements()) as f64 / (share * peak);
        print!(
            "  {rows:4} {:9.2} {:10.2}  {:6.2} to {:6.2} {:10.2}",
            best * 1e3,
            median * 1e3,
            times.quantile(0.1) * 1e3,
            times.quantile(0.9) * 1e3,
            median / one.median(),
        );
        if rows > 1 {
            print!("     {}", verdict(median, best, slack * one.median().max(work)));
        }
        if rows == 4 && scene.format == WeightFormat::Bf16 && isa == Isa::Avx512 {
            print!("; of 1.12 x one row: {}", verdict(median, best, 1.12 * one.median()));
        }
        println!();
    }
}
