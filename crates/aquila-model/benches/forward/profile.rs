//! Where the time of a round goes, by operation.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use aquila_compute::cpu::{CpuBackend, Operation};
use aquila_compute::sampling::{self, History, SampleQuery, Sampling};
use aquila_compute::{ForwardPlan, WeightFormat};

use crate::Options;
use crate::machine::Machine;
use crate::scene::{Batch, Scene};
use crate::timed::Clock;

/// The times of one operation, one per round, with its calls in a round.
type Samples = BTreeMap<Operation, (Vec<f64>, usize)>;

pub fn run(backend: CpuBackend, machine: Machine, batch: Batch, options: &Options) {
    let clock = Arc::new(Clock::default());
    let backend = backend.watched(clock.clone());
    let requests = match batch {
        Batch::RowsOfOne => 1,
        Batch::OneRowOfEach => options.rows.iter().copied().max().unwrap_or(1),
    };
    let mut scenes: Vec<Scene<CpuBackend>> = options
        .formats
        .iter()
        .map(|&format| Scene::load(&backend, &options.model, format, options.context, requests))
        .collect();
    let mut samples = vec![vec![Samples::new(); options.rows.len()]; scenes.len()];
    let mut totals = vec![vec![Vec::new(); options.rows.len()]; scenes.len()];
    for repetition in 0..=options.repeat {
        for (at, &rows) in options.rows.iter().enumerate() {
            for (format, scene) in scenes.iter_mut().enumerate() {
                let plan = scene.plan(batch, rows);
                clock.take();
                let total = round(&backend, scene, &plan);
                let ledger = clock.take();
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
            let total = ordered(&mut totals[format][at]);
            report(scene, &scene.plan(batch, rows), total, &mut samples[format][at], machine);
        }
    }
}

/// One round: a pass, and a greedy choice for each of its rows.
fn round(backend: &CpuBackend, scene: &mut Scene<CpuBackend>, plan: &ForwardPlan) -> f64 {
    let (sampling, history) = (Sampling::default(), History::default());
    let queries: Vec<SampleQuery<'_>> = plan
        .positions
        .iter()
        .enumerate()
        .map(|(row, &position)| SampleQuery {
            row,
            sampling: &sampling,
            history: &history,
            path: &[],
            position: position + 1,
            choice: 0,
            banned: &[],
            allowed: None,
            top_logprobs: None,
            given: None,
        })
        .collect();
    let since = Instant::now();
    scene.forward(backend, plan);
    let logits = scene.logits();
    queries.iter().for_each(|query| drop(sampling::choose(logits.row(query.row), query)));
    since.elapsed().as_secs_f64()
}

/// The least of some times, and their median.
fn ordered(times: &mut [f64]) -> (f64, f64) {
    times.sort_by(f64::total_cmp);
    (times[0], times[times.len() / 2])
}

/// Shares and floors are those of the medians; best times of different operations come from
/// different rounds, so they do not add up to a round.
fn report(
    scene: &Scene<CpuBackend>,
    plan: &ForwardPlan,
    (best, total): (f64, f64),
    samples: &mut Samples,
    machine: Machine,
) {
    println!(
        "\n{:?}, {} rows over {} slots: a round takes {:.2} ms, at best {:.2}",
        scene.format,
        plan.rows(),
        plan.slots.len(),
        total * 1e3,
        best * 1e3
    );
    println!("  operation       calls median ms   share  µs/call    best ms  floor ms  over it");
    let mut noted = 0.0;
    for (operation, (times, calls)) in samples {
        let (best, median) = ordered(times);
        noted += median;
        print!(
            "  {:<14} {calls:6} {:9.3} {:5.1} % {:8.1} {:10.3}",
            name(*operation, scene),
            median * 1e3,
            median / total * 100.0,
            median / *calls as f64 * 1e6,
            best * 1e3
        );
        match floor(*operation, scene, plan, *calls, machine) {
            Some(floor) => println!(" {:9.3} {:8.2}", floor * 1e3, median / floor),
            None => println!(),
        }
    }
    println!("  {:<14} {:6} {:9.3} {:5.1} %", "rest", "", (total - noted) * 1e3, {
        (total - noted) / total * 100.0
    });
}

fn name(operation: Operation, scene: &Scene<CpuBackend>) -> &'static str {
    match operation {
        Operation::Project { outputs, inputs } => scene
            .projections()
            .into_iter()
            .find(|&(_, o, i, _)| (o, i) == (outputs, inputs))
            .map_or("project", |(name, ..)| name),
        Operation::Rows { .. } => "make rows",
        Operation::Place => "place",
        Operation::Embed => "embed",
        Operation::RmsNorm => "norm",
        Operation::WriteKv => "rope and write",
        Operation::Attend => "attend",
        Operation::Gate => "gate",
        Operation::Add => "add",
        Operation::SoftCap => "soft cap",
        Operation::Route | Operation::Routed => "route",
        Operation::ProjectExperts => "experts",
        Operation::CopyColumns | Operation::TakeColumns => "copy",
        Operation::GatherSources | Operation::GatherOutputs => "gather",
        Operation::MoveSlots | Operation::MoveRows | Operation::ScatterOutputs => "move",
        Operation::ClearFirst => "clear",
        Operation::Propose => "propose",
        Operation::Sample => "sample",
        Operation::Outputs | Operation::Read | Operation::ReadSlots => "read",
        Operation::WriteSlots => "write",
    }
}

/// The least that an operation over weights or keys and values can take: all its bytes at the
/// machine's bandwidth, or all its work at the machine's peak.
fn floor(
    operation: Operation,
    scene: &Scene<CpuBackend>,
    plan: &ForwardPlan,
    calls: usize,
    machine: Machine,
) -> Option<f64> {
    let (rows, heads) = (plan.rows(), scene.spec().first_attention().heads);
    let seen: usize = plan.spans.iter().map(|span| span.len()).sum();
    let (bytes, work, peak) = match operation {
        Operation::Project { outputs, inputs } => {
            let int8 = scene.format == WeightFormat::Int8;
            (
                CpuBackend::packed_bytes(outputs, inputs, scene.format),
                2 * rows * outputs * inputs,
                if int8 { machine.int8_ops } else { machine.flops },
            )
        }
        Operation::Attend => (
            2 * plan.slots.len() * heads.kv_width() * size_of::<f32>(),
            4 * seen * heads.q_width(),
            machine.flops,
        ),
        _ => return None,
    };
    Some(calls as f64 * (bytes as f64 / machine.bandwidth).max(work as f64 / peak))
}
