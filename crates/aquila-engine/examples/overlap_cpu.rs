//! What overlap gives on the CPU, where the executor share cores: alternate runs with the executor
//! without and with overlap, and the ratio of their times with its 95 % interval.
//!
//! `cargo run --release -p aquila-engine --example overlap_cpu [RUNS]`

#[path = "../tests/engine/support/mod.rs"]
mod support;

use std::time::Instant;

use aquila_engine::{EngineConfig, Scheduler};
use aquila_spec::Shape;
use support::answers::prompts;
use support::request;
use support::shipped::{Algorithm, config, runner};

/// Seconds that a batch takes.
fn time(engine: &mut Scheduler, prompts: &[Vec<u32>]) -> f64 {
    for prompt in prompts {
        engine.submit(request(prompt, 96).0).unwrap();
    }
    let began = Instant::now();
    while !engine.is_idle() {
        engine.step();
    }
    began.elapsed().as_secs_f64()
}

fn main() {
    let runs: usize = std::env::args().nth(1).map_or(24, |n| n.parse().expect("RUNS is a number"));
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).collect();
    for (algorithm, shape) in
        [(Algorithm::None, Shape::PLAIN), (Algorithm::Eagle3, Shape::chain(3))]
    {
        let config = EngineConfig { prefix_cache: false, ..config(shape) };
        let engine = || Scheduler::new(runner(algorithm, &config), config.clone()).unwrap();
        let (mut inline, mut overlapped) = (engine(), engine().overlapped().unwrap());
        for batch in [1, 8] {
            let mut ratios = Vec::new();
            for run in 0..runs {
                let first = run * batch % (prompts.len() - batch + 1);
                let batch = &prompts[first..first + batch];
                // Who begins changes from run to run.
                let (off, on) = if run % 2 == 0 {
                    let off = time(&mut inline, batch);
                    (off, time(&mut overlapped, batch))
                } else {
                    let on = time(&mut overlapped, batch);
                    (time(&mut inline, batch), on)
                };
                ratios.push((on / off).ln());
            }
            let mean = ratios.iter().sum::<f64>() / runs as f64;
            let spread = ratios.iter().map(|r| (r - mean).powi(2)).sum::<f64>();
            let error = 1.96 * (spread / (runs as f64 - 1.0) / runs as f64).sqrt();
            println!(
                "{shape}, batch {batch}: overlap takes {:.3} of the time without ({:.3} to {:.3})",
                mean.exp(),
                (mean - error).exp(),
                (mean + error).exp()
            );
        }
    }
}
