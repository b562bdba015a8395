//! Many requests at once: each gets what it would get alone, and no slot is lost.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use aquila_engine::{EngineConfig, EngineHandle, FinishReason, Request};

use crate::support::*;

/// What one request of a workload asks.
#[derive(Clone)]
struct Case {
    prompt: Vec<u32>,
    tokens: usize,
    seed: Option<u64>,
    penalties: bool,
    logprobs: bool,
    abort_after: Option<u64>,
}

impl Case {
    fn request(&self) -> (Request, Arc<Mutex<Heard>>) {
        let (mut request, heard) = request(&self.prompt, self.tokens);
        if let Some(seed) = self.seed {
            request.sampling.temperature = 0.8;
            request.sampling.top_p = 0.95;
            request.sampling.seed = seed;
            request.seeded = true;
        }
        if self.penalties {
            request.sampling.repetition_penalty = 1.2;
            request.sampling.frequency_penalty = 0.3;
        }
        request.logprobs = self.logprobs.then_some(2);
        request.limits.stop_ids = vec![1];
        (request, heard)
    }
}

/// 64 requests of random lengths; many begin alike, some are aborted.
fn workload(numbers: &mut Numbers) -> Vec<Case> {
    let stem = numbers.prompt(24);
    (0..64)
        .map(|_| {
            let shared = numbers.below(3) * 12;
            let own = 1 + numbers.below(40) as usize;
            let prompt = [&stem[..shared as usize], &numbers.prompt(own)].concat();
            Case {
                prompt,
                tokens: 1 + numbers.below(70) as usize,
                seed: (numbers.below(2) == 0).then(|| numbers.below(1000)),
                penalties: numbers.below(4) == 0,
                logprobs: numbers.below(4) == 0,
                abort_after: (numbers.below(6) == 0).then(|| numbers.below(60)),
            }
        })
        .collect()
}

/// The answers of every case, each alone on a fresh cache.
fn alone(cases: &[Case]) -> Vec<Heard> {
    let mut engine = engine(EngineConfig { prefix_cache: false, ..config() });
    let run_one = |case: &Case| {
        let (request, heard) = case.request();
        engine.submit(request).unwrap();
        run(&mut engine);
        let heard = heard.lock().unwrap();
        heard.clone()
    };
    cases.iter().map(run_one).collect()
}

/// Runs all cases at once and compares each with itself alone; answers how many were preempted.
fn together(cases: &[Case], want: &[Heard], config: EngineConfig) -> u64 {
    let what = format!("page size {}, chunk {}", config.page_size, config.chunked_prefill_size);
    let mut engine = engine(config);
    let mut aborts: HashMap<u64, Vec<aquila_engine::RequestId>> = HashMap::new();
    let heard: Vec<Arc<Mutex<Heard>>> = cases
        .iter()
        .map(|case| {
            let (request, heard) = case.request();
            let id = engine.submit(request).unwrap();
            if let Some(round) = case.abort_after {
                aborts.entry(round).or_default().push(id);
            }
            heard
        })
        .collect();
    let mut round = 0;
    while !engine.is_idle() {
        for id in aborts.remove(&round).unwrap_or_default() {
            engine.abort(id);
        }
        engine.step();
        engine.check().unwrap();
        round += 1;
    }
    for ((case, want), heard) in cases.iter().zip(want).zip(&heard) {
        let heard = heard.lock().unwrap();
        match heard.reason() {
            FinishReason::Abort(_) => {
                assert!(case.abort_after.is_some(), "{what}: {:?}", heard.reason());
                assert_eq!(heard.tokens[..], want.tokens[..heard.tokens.len()], "{what}");
            }
            reason => {
                assert_eq!(reason, want.reason(), "{what}");
                assert_eq!(heard.tokens, want.tokens, "{what}");
            }
        }
    }
    engine.flush_cache();
    engine.check().unwrap();
    assert_eq!(engine.stats().snapshot().used_slots, 0, "{what}");
    engine.stats().snapshot().preemptions
}

#[test]
fn every_text_is_as_if_alone_though_memory_runs_out() {
    for seed in 0..2 {
        let cases = workload(&mut Numbers(seed));
        let want = alone(&cases);
        let mut preempted = 0;
        for (page_size, chunk, prefix_cache) in [
            (1, 64, true),
            (1, 7, false),
            (4, 32, true),
            (16, 64, true),
            (16, 5, false),
            (64, 64, true),
        ] {
            let config = EngineConfig {
                page_size,
                max_total_tokens: if page_size == 64 { 512 } else { 224 },
                chunked_prefill_size: chunk,
                prefix_cache,
                ..config()
            };
            preempted += together(&cases, &want, config);
        }
        assert!(preempted > 20, "the pool was meant to be too small; {preempted} preemptions");
    }
}

#[test]
fn a_text_found_in_the_cache_is_the_text_computed() {
    let cases = workload(&mut Numbers(3));
    let want = alone(&cases);
    let mut engine = engine(config());
    for pass in 0..2 {
        for (case, want) in cases.iter().zip(&want) {
            let (request, heard) = case.request();
            engine.submit(request).unwrap();
            run(&mut engine);
            let heard = heard.lock().unwrap();
            assert_eq!(heard.tokens, want.tokens);
            if pass == 1 {
                assert_eq!(heard.usage().cached_tokens, case.prompt.len() - 1);
            }
        }
    }
}

#[test]
fn an_engine_on_its_own_thread_answers_alike_and_drains() {
    let cases = workload(&mut Numbers(9));
    let want = alone(&cases);
    let engine = engine(EngineConfig { max_total_tokens: 300, ..config() });
    let handle = EngineHandle::start(engine).unwrap();
    let heard: Vec<_> = cases
        .iter()
        .map(|case| {
            let (request, heard) = case.request();
            handle.submit(request).unwrap();
            heard
        })
        .collect();
    handle.drain();
    for (heard, want) in heard.iter().zip(&want) {
        assert_eq!(heard.lock().unwrap().tokens, want.tokens);
    }
    let refused = handle.submit(request(&[1], 1).0);
    assert_eq!(refused, Err(aquila_engine::SubmitError::ShuttingDown));
    let stats = handle.stats().snapshot();
    assert_eq!((stats.finished, stats.running, stats.waiting), (64, 0, 0));
}

#[test]
fn a_full_queue_refuses_until_it_has_room() {
    let config = EngineConfig { max_queued_requests: 2, max_running_requests: 1, ..config() };
    let handle = EngineHandle::start(engine(config)).unwrap();
    let mut refused = 0;
    let mut taken = Vec::new();
    for _ in 0..50 {
        let (request, heard) = request(&[5; 60], 30);
        match handle.submit(request) {
            Ok(_) => taken.push(heard),
            Err(aquila_engine::SubmitError::QueueFull(_)) => refused += 1,
            Err(other) => panic!("{other}"),
        }
    }
    assert!(refused > 0, "fifty requests at once do not fit into a queue of two");
    handle.drain();
    assert!(taken.iter().all(|heard| heard.lock().unwrap().tokens.len() == 30));
}

#[test]
fn a_stopped_engine_ends_every_request() {
    let handle = EngineHandle::start(engine(config())).unwrap();
    let heard: Vec<_> = (0..40)
        .map(|i| {
            let (request, heard) = request(&[i, 2, 3], 400);
            handle.submit(request).unwrap();
            heard
        })
        .collect();
    handle.stop();
    for heard in &heard {
        assert!(heard.lock().unwrap().end.is_some());
    }
}

#[test]
fn a_request_whose_tree_does_not_fit_waits() {
    use crate::support::{answers, shipped};
    let shape = answers::shape(5, 16, 64);
    // Of 150 slots two prompts and one tree leave too few for the other tree.
    let prompts = [vec![40; 10], vec![41; 10]];
    let want = answers::answers(
        &mut shipped::inline("EAGLE3", shipped::config(shape)),
        &prompts,
        40,
        answers::greedy,
    );
    let small = EngineConfig { max_total_tokens: 150, ..shipped::config(shape) };
    let mut engine = shipped::inline("EAGLE3", small);
    let got = answers::answers(&mut engine, &prompts, 40, answers::greedy);
    assert_eq!(answers::texts(&got), answers::texts(&want));
    let counts = engine.stats().snapshot();
    assert!(counts.preemptions <= 2, "{} preemptions", counts.preemptions);
}
