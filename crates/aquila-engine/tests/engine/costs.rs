//! What rounds cost is measured before anything is served, and leaves no trace.

use std::time::Duration;

use aquila_engine::{EngineConfig, Scheduler};
use aquila_spec::{Shape, SpecStats};

use crate::support::answers::*;
use crate::support::shipped::{Algorithm, config, engine, inline};

#[test]
fn measuring_costs_leaves_the_engine_as_it_was() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(6).collect();
    let plain = answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 24, greedy);
    for algorithm in ["EAGLE3", "STANDALONE", "MTP", "NGRAM"] {
        let mut engine = inline(algorithm, config(Shape::chain(3)));
        let limit = Duration::from_secs(600);
        let table = engine.measure_costs("test".into(), limit).unwrap().unwrap();
        assert_eq!(table.rows, [1, 2, 4, 8, 16, 32], "{algorithm}");
        assert_eq!(table.batches, [1, 8], "{algorithm}");
        assert_eq!(table.steps, [1, 3], "{algorithm}");
        assert!(table.verify(8, 32) >= table.verify(1, 1), "{algorithm}: {table:?}");
        assert!(table.verify(1, 1) > 0.0, "{algorithm}: {table:?}");
        assert!(table.draft(8, 3) >= table.draft(8, 1), "{algorithm}: {table:?}");
        assert!(algorithm == "NGRAM" || table.draft(1, 1) > 0.0, "{algorithm}: {table:?}");
        assert!(algorithm == "NGRAM" || table.draft_row > 0.0, "{algorithm}: {table:?}");
        assert_eq!(engine.stats().snapshot().rounds, 0);
        engine.check().unwrap();
        let got = answers(&mut engine, &prompts, 24, greedy);
        assert_eq!(texts(&got), texts(&plain));
        all_is_counted(&engine, &got);
    }
}

/// Checks that the engine has counted these answers and nothing else.
fn all_is_counted(engine: &Scheduler, answers: &[Answer]) {
    let (stats, mut spec) = (engine.stats(), SpecStats::default());
    answers.iter().for_each(|answer| spec.add(&answer.spec));
    let tokens = answers.iter().map(|answer| answer.ids.len() as u64).sum();
    let counts = stats.snapshot();
    assert_eq!((counts.completion_tokens, counts.finished), (tokens, answers.len() as u64));
    assert_eq!(stats.speculation(), spec);
}

#[test]
fn answers_are_counted_after_a_warm_up() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).step_by(10).collect();
    for on_thread in [false, true] {
        let mut engine = inline("EAGLE3", config(Shape::chain(3)));
        if on_thread {
            engine = engine.with_output_thread().unwrap();
        }
        engine.capture_graphs(&[1, 4], &mut |_| ()).unwrap();
        let got = answers(&mut engine, &prompts, 24, greedy);
        all_is_counted(&engine, &got);
    }
}

#[test]
fn what_was_not_timed_costs_in_proportion() {
    let config =
        EngineConfig { max_total_tokens: 200, chunked_prefill_size: 3, ..config(shape(3, 4, 12)) };
    let mut engine = inline("EAGLE3", config);
    let table = engine.measure_costs("test".into(), Duration::ZERO).unwrap().unwrap();
    assert_eq!((&table.batches[..], &table.rows[..]), (&[1][..], &[1, 5, 12][..]));
    let (few, many) = (table.verify(1, 12), table.verify(1, 96));
    assert!((many / few - 8.0).abs() < 1e-6, "{few} {many}");
    let again = engine.measure_costs("test".into(), Duration::from_secs(1)).unwrap().unwrap();
    assert!(again.verify(8, 96) >= again.verify(1, 1));
    engine.check().unwrap();
}

#[test]
fn costs_are_not_measured_while_rounds_overlap() {
    let mut engine = inline("STANDALONE", config(Shape::chain(3))).overlapped().unwrap();
    let why = engine.measure_costs("test".into(), Duration::ZERO).unwrap_err().to_string();
    assert!(why.contains("before anything is served"), "{why}");
}

#[test]
fn an_engine_too_small_to_measure_still_serves() {
    let prompts = [vec![5, 6, 7]];
    let small = |shape| EngineConfig { max_total_tokens: 16, context_length: 9, ..config(shape) };
    let plain = answers(&mut engine(Algorithm::None, small(Shape::PLAIN)), &prompts, 4, greedy);
    for prefix_cache in [true, false] {
        let config = EngineConfig { prefix_cache, ..small(Shape::chain(3)) };
        let mut engine = inline("EAGLE3", config);
        assert!(engine.measure_costs("test".into(), Duration::from_secs(1)).unwrap().is_none());
        assert_eq!(texts(&answers(&mut engine, &prompts, 4, greedy)), texts(&plain));
    }
}
