//! Where the time of a decoding round goes, by operation.

use std::collections::BTreeMap;
use std::time::Instant;

use aquila_compute::choose::{Ask, History, Sampling};
use aquila_compute::cpu::CpuBackend;
use aquila_compute::{Backend, WeightFormat};

use crate::Options;
use crate::machine::Machine;
use crate::scene::Scene;
use crate::timed::{Operation, Timed};

/// The times of one operation, one per round, with its calls in a round.
type Samples = BTreeMap<Operation, (Vec<f64>, usize)>;

pub fn run(backend: CpuBackend, machine: Machine, options: &Options) {
    let backend = Timed::new(backend);
    let requests = options.rows.iter().copied().max().unwrap_or(1);
    let mut scenes: Vec<Scene<Timed>> = options
        .formats
        .iter()
        .map(|&format| Scene::load(&backend, format, options.context, requests))
        .collect();
    let mut samples = vec![vec![Samples::new(); options.rows.len()]; scenes.len()];
    let mut totals = vec![vec![Vec::new(); options.rows.len()]; scenes.len()];
    for repetition in 0..=options.repeat {
        for (at, &rows) in options.rows.iter().enumerate() {
            for (format, scene) in scenes.iter_mut().enumerate() {
                backend.take();
                let total = round(&backend, scene, rows, options.context);
                let ledger = backend.take();
                if repetition == 0 {
                    continue;
                }
                totals[format][at].push(total);
                for (operation, (seconds, calls)) in ledger {
                    let entry = samples[format][at].entry(operation).or_default();
                    entry.0.push(seconds);
                    entry.1 = calls;
                }
            }
        }
    }
    for (format, scene) in scenes.iter().enumerate() {
        for (at, &rows) in options.rows.iter().enumerate() {
            let total = median(&mut totals[format][at]);
            report(scene, rows, options.context, total, &mut samples[format][at], machine);
        }
    }
}

/// One round: a row of each request, and a greedy choice for each.
fn round(backend: &Timed, scene: &mut Scene<Timed>, requests: usize, context: usize) -> f64 {
    let plan = scene.last_row_of_each(requests);
    let (sampling, history) = (Sampling::default(), History::default());
    let asks: Vec<Ask<'_>> = (0..requests)
        .map(|row| Ask {
            row,
            sampling: &sampling,
            history: &history,
            path: &[],
            position: context as u32,
            choice: 0,
            banned: &[],
            top_logprobs: None,
            given: None,
        })
        .collect();
    let since = Instant::now();
    scene.forward(backend, &plan);
    backend.choose(scene.logits(), &asks).expect("the rows were computed");
    since.elapsed().as_secs_f64()
}

fn median(samples: &mut [f64]) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples[samples.len() / 2]
}

fn report(
    scene: &Scene<Timed>,
    rows: usize,
    context: usize,
    total: f64,
    samples: &mut Samples,
    machine: Machine,
) {
    println!(
        "\n{:?}, {rows} requests of one row, context {context}: {:.2} ms a round",
        scene.format,
        total * 1e3
    );
    println!("  operation        calls   median ms   share    µs/call    floor ms  over it");
    let mut noted = 0.0;
    for (operation, (times, calls)) in samples {
        let seconds = median(times);
        noted += seconds;
        print!(
            "  {:<15} {calls:6} {:11.3} {:6.1} % {:10.1}",
            name(*operation, scene),
            seconds * 1e3,
            seconds / total * 100.0,
            seconds / *calls as f64 * 1e6
        );
        match floor(*operation, scene.format, rows, *calls, machine) {
            Some(floor) => println!(" {:11.3} {:8.2}", floor * 1e3, seconds / floor),
            None => println!(),
        }
    }
    let rest = (total - noted) / total * 100.0;
    println!("  {:<15} {:6} {:11.3} {rest:6.1} %", "rest", "", (total - noted) * 1e3);
}

fn name(operation: Operation, scene: &Scene<Timed>) -> &'static str {
    match operation {
        Operation::Named(name) => name,
        Operation::Project(outputs, inputs) => scene
            .projections()
            .into_iter()
            .find(|&(_, o, i, _)| (o, i) == (outputs, inputs))
            .map_or("project", |(name, ..)| name),
    }
}

/// The least that a projection can take: all its bytes at the machine's bandwidth, or all its
/// work at the machine's peak.
fn floor(
    operation: Operation,
    format: WeightFormat,
    rows: usize,
    calls: usize,
    machine: Machine,
) -> Option<f64> {
    let Operation::Project(outputs, inputs) = operation else { return None };
    let bytes = CpuBackend::packed_bytes(outputs, inputs, format) as f64;
    let work = 2.0 * (rows * outputs * inputs) as f64;
    let peak = if format == WeightFormat::Int8 { machine.int8_ops } else { machine.flops };
    Some(calls as f64 * (bytes / machine.bandwidth).max(work / peak))
}
