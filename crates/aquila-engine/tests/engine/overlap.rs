//! Overlap: what a request gets and what is drafted for it do not depend on whether rounds
//! overlap, under schedules that delay both sides.

use aquila_engine::executor::ModelExecutor;
use aquila_engine::{EngineConfig, Priorities, Scheduler, Snapshot};
use aquila_spec::{Shape, Verify};

use crate::support::Numbers;
use crate::support::answers::shape;
use crate::support::delayed::Delayed;
use crate::support::learning::live_policies;
use crate::support::scripted::switch;
use crate::support::shipped::{Algorithm, config, engine, runner};
use crate::support::workload::{Came, Case, Size, alone, together, workload};

fn delayed(algorithm: Algorithm, config: &EngineConfig, seed: u64) -> Scheduler {
    let compute = ModelExecutor::new(runner(algorithm, config), config.clone());
    let delayed = Delayed { compute, schedule: Numbers(seed) };
    Scheduler::over(delayed, config.clone()).unwrap().overlapped().unwrap()
}

fn compare(cases: &[Case], got: &[Came], wanted: &[Came], drafts: bool, what: &str) {
    for (index, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        let case = &cases[index];
        assert!(got.is(wanted, drafts), "{what}: {index}, {case:?}\n{got:?}\n{wanted:?}");
    }
}

/// Runs a workload without overlap and, under three schedules, with it: texts are those of plain
/// decoding alone, and drafts are the same everywhere, though trees may switch from round to round.
/// There are `preemptions` preemptions or more.
fn same_with_overlap(
    algorithm: Algorithm,
    config: EngineConfig,
    size: Size,
    seed: u64,
    preemptions: u64,
    switches: bool,
) {
    let what = format!("{algorithm:?}, {}, pages of {}", config.shape, config.page_size);
    let cases = workload(size, seed);
    let roomy =
        EngineConfig { max_running_requests: 1, ..crate::support::shipped::config(Shape::PLAIN) };
    let plain = alone(&mut engine(Algorithm::None, roomy), &cases);

    let mut inline = Scheduler::new(runner(algorithm, &config), config.clone()).unwrap();
    if switches {
        switch(&mut inline);
    }
    let wanted = together(&mut inline, &cases, &mut Numbers(seed));
    compare(&cases, &wanted, &plain, false, &format!("{what}, inline"));
    let too_small = |counts: Snapshot| {
        let found = counts.preemptions;
        assert!(found >= preemptions, "{what}: {found} preemptions, not {preemptions}");
    };
    too_small(inline.stats().snapshot());
    for schedule in 0..3 {
        // The executor on a thread, listeners on a thread, and both.
        let overlapped = match schedule {
            0 => delayed(algorithm, &config, schedule),
            1 => Scheduler::new(runner(algorithm, &config), config.clone()).unwrap(),
            _ => delayed(algorithm, &config, schedule),
        };
        let mut overlapped =
            if schedule > 0 { overlapped.with_output_thread().unwrap() } else { overlapped };
        if switches {
            switch(&mut overlapped);
        }
        let got = together(&mut overlapped, &cases, &mut Numbers(seed + schedule));
        compare(&cases, &got, &plain, false, &format!("{what}, schedule {schedule}"));
        // Who was aborted is compared with the plain text alone.
        let finished = |came: &Came| came.reason != aborted();
        let (wanted, got): (Vec<Came>, Vec<Came>) = wanted
            .iter()
            .cloned()
            .zip(got)
            .filter(|(wanted, got)| finished(wanted) && finished(got))
            .unzip();
        assert!(got.len() * 2 > cases.len());
        for (got, wanted) in got.iter().zip(&wanted) {
            assert!(got.is(wanted, true), "{what}, schedule {schedule}\n{got:?}\n{wanted:?}");
        }
        let counts = overlapped.stats().snapshot();
        assert!(counts.cached_tokens > 0, "{what}: prefixes were shared");
        too_small(counts);
    }
}

/// So many requests of the usual size.
fn of(requests: usize) -> Size {
    Size { requests, prompt: 48, tokens: 100 }
}

fn aborted() -> aquila_engine::FinishReason {
    aquila_engine::FinishReason::Abort("aborted".into())
}

#[test]
fn switching_trees_in_small_pools_are_the_same_with_overlap() {
    let config = EngineConfig {
        max_total_tokens: 320,
        max_running_requests: 40,
        chunked_prefill_size: 2048,
        parked_rows: 64,
        ..config(shape(5, 16, 64))
    };
    let size = Size { requests: 28, prompt: 48, tokens: 160 };
    same_with_overlap(Algorithm::Eagle3, config, size, 7, 12, true);
}

#[test]
fn chains_and_trees_are_the_same_with_overlap() {
    let small =
        EngineConfig { max_total_tokens: 400, chunked_prefill_size: 32, ..config(Shape::chain(4)) };
    same_with_overlap(Algorithm::Eagle3, small.clone(), of(30), 1, 1, false);
    let pages = EngineConfig { page_size: 16, max_total_tokens: 368, ..small.clone() };
    same_with_overlap(Algorithm::Standalone, pages, of(30), 2, 1, false);
    let trees =
        EngineConfig { shape: shape(4, 4, 12), page_size: 4, max_total_tokens: 420, ..small };
    same_with_overlap(Algorithm::Standalone, trees, of(30), 3, 1, false);
}

#[test]
fn plain_decoding_is_the_same_with_overlap() {
    let small =
        EngineConfig { max_total_tokens: 320, chunked_prefill_size: 16, ..config(Shape::PLAIN) };
    same_with_overlap(Algorithm::None, small, of(40), 4, 1, false);
}

#[test]
fn priorities_change_no_text_and_no_draft_with_overlap() {
    let trees = EngineConfig { max_total_tokens: 400, ..config(shape(4, 4, 12)) };
    let ranked = Priorities::Ranked { low_values_first: false, preemption_threshold: 10 };
    let cases = workload(of(30), 6);
    let roomy = EngineConfig { max_running_requests: 1, ..config(trees.shape) };
    let wanted = alone(&mut engine(Algorithm::Eagle3, roomy), &cases);
    let mut inline = Scheduler::new(runner(Algorithm::Eagle3, &trees), trees.clone()).unwrap();
    inline.prioritize(ranked);
    compare(&cases, &together(&mut inline, &cases, &mut Numbers(1)), &wanted, true, "inline");
    let mut overlapped = delayed(Algorithm::Eagle3, &trees, 1);
    overlapped.prioritize(ranked);
    compare(
        &cases,
        &together(&mut overlapped, &cases, &mut Numbers(2)),
        &wanted,
        true,
        "overlapped",
    );
    for counts in [inline.stats().snapshot(), overlapped.stats().snapshot()] {
        assert!(counts.preemptions > 0, "{counts:?}");
    }
}

#[test]
fn sampled_verification_is_the_same_with_overlap() {
    for verify in [Verify::Rejection, Verify::TargetOnly { single: 1.0, accumulated: 1.0 }] {
        let config = EngineConfig { verify, max_total_tokens: 400, ..config(shape(3, 4, 12)) };
        let cases = workload(Size { tokens: 24, ..of(30) }, 9);
        let mut inline =
            Scheduler::new(runner(Algorithm::Eagle3, &config), config.clone()).unwrap();
        let wanted = together(&mut inline, &cases, &mut Numbers(1));
        let got = together(&mut delayed(Algorithm::Eagle3, &config, 1), &cases, &mut Numbers(1));
        for (got, wanted) in got.iter().zip(&wanted) {
            if got.reason != aborted() && wanted.reason != aborted() {
                assert!(got.is(wanted, true), "{verify}\n{got:?}\n{wanted:?}");
            }
        }
    }
}

#[test]
fn policies_that_learn_change_no_text_with_overlap() {
    let small = EngineConfig { max_total_tokens: 500, parked_rows: 16, ..config(Shape::chain(7)) };
    let cases = workload(of(30), 11);
    let roomy = EngineConfig { max_running_requests: 1, ..config(Shape::PLAIN) };
    let plain = alone(&mut engine(Algorithm::None, roomy), &cases);
    for (joined_by, apart_by) in live_policies().into_iter().zip(live_policies()) {
        let name = joined_by.state().name;
        let mut inline = Scheduler::new(runner(Algorithm::Eagle3, &small), small.clone()).unwrap();
        inline.draft_by(joined_by).unwrap();
        compare(&cases, &together(&mut inline, &cases, &mut Numbers(1)), &plain, false, name);
        let mut overlapped = delayed(Algorithm::Eagle3, &small, 3);
        overlapped.draft_by(apart_by).unwrap();
        compare(&cases, &together(&mut overlapped, &cases, &mut Numbers(2)), &plain, false, name);
        for stats in [inline.stats(), overlapped.stats()] {
            assert!(stats.drafting().policy.switches > 0, "{name}: {:?}", stats.drafting());
            assert!(stats.snapshot().preemptions > 0, "{name}: {:?}", stats.snapshot());
        }
    }
}
