//! The random workload of `tests/engine/overlap.rs`, larger: texts without and with overlap are
//! those of plain decoding, and drafts are the same, under several schedules with delays and with
//! trees that switch from round to round.
//!
//! `cargo run --release -p aquila-engine --example overlap_workload [REQUESTS [SCHEDULES]]`

#[path = "../tests/engine/support/mod.rs"]
mod support;

use std::time::Instant;

use aquila_engine::executor::ModelExecutor;
use aquila_engine::{EngineConfig, FinishReason, Scheduler, Snapshot};
use aquila_spec::Shape;
use support::Numbers;
use support::answers::shape;
use support::delayed::Delayed;
use support::scripted::switch;
use support::shipped::{Algorithm, config, engine, runner};
use support::workload::{Size, alone, together, workload};

fn main() {
    let mut numbers =
        std::env::args().skip(1).map(|n| n.parse().expect("REQUESTS and SCHEDULES are numbers"));
    let requests = numbers.next().unwrap_or(300);
    let schedules = numbers.next().unwrap_or(3);
    let cases = workload(Size { requests, prompt: 48, tokens: 160 }, 7);
    let roomy = EngineConfig { max_running_requests: 1, ..config(Shape::PLAIN) };
    let plain = alone(&mut engine(Algorithm::None, roomy), &cases);
    let config = EngineConfig {
        max_total_tokens: 4500,
        max_running_requests: 80,
        chunked_prefill_size: 2048,
        parked_rows: 64,
        ..config(shape(5, 16, 64))
    };
    let mut inline = Scheduler::new(runner(Algorithm::Eagle3, &config), config.clone()).unwrap();
    switch(&mut inline);
    let wanted = together(&mut inline, &cases, &mut Numbers(7));
    let aborted = FinishReason::Abort("aborted".into());
    for (index, (got, wanted)) in wanted.iter().zip(&plain).enumerate() {
        assert!(got.is(wanted, false), "inline, request {index}: {got:?}, not {wanted:?}");
    }
    // Who loses its KV in the middle of its text is what this is about.
    let preemptions = |counts: Snapshot| {
        let least = requests as u64 / 25;
        assert!(counts.preemptions >= least, "fewer than {least} preemptions: {counts:?}");
        counts.preemptions
    };
    println!(
        "inline: {requests} texts are those of plain decoding, {} preemptions; {:?}",
        preemptions(inline.stats().snapshot()),
        inline.stats().snapshot()
    );
    for schedule in 0..schedules {
        let began = Instant::now();
        let compute = ModelExecutor::new(runner(Algorithm::Eagle3, &config), config.clone());
        let delayed = Delayed { compute, schedule: Numbers(schedule as u64) };
        let mut overlapped =
            Scheduler::over(delayed, config.clone()).unwrap().overlapped().unwrap();
        switch(&mut overlapped);
        let got = together(&mut overlapped, &cases, &mut Numbers(100 + schedule as u64));
        let mut compared = 0;
        for (index, ((got, wanted), plain)) in got.iter().zip(&wanted).zip(&plain).enumerate() {
            assert!(got.is(plain, false), "overlapped, request {index}: {got:?}, not {plain:?}");
            if got.reason != aborted && wanted.reason != aborted {
                assert!(
                    got.is(wanted, true),
                    "overlapped, request {index}: {got:?}, not {wanted:?}"
                );
                compared += 1;
            }
        }
        println!(
            "overlapped, schedule {schedule}: {requests} texts are those of plain decoding, {compared} \
             have the same drafts (the others were aborted from outside), {} preemptions; {:?}, \
             {:.0?}",
            preemptions(overlapped.stats().snapshot()),
            overlapped.stats().snapshot(),
            began.elapsed()
        );
    }
}
