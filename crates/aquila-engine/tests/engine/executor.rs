//! The seam between scheduler and executor, over one whose slots remember what was written: every
//! order of arrivals, ends and failures of a few requests, without and with overlap.

use std::sync::{Arc, Mutex};

use aquila_engine::{EngineConfig, FinishReason, Request, Scheduler};
use aquila_spec::Shape;

use crate::support::simulated::Simulated;
use crate::support::{Heard, Notes, Numbers, config, request, run};

fn scheduler(config: &EngineConfig, overlapped: bool, fails: Option<u64>) -> Scheduler {
    let mut compute = Simulated::new(config);
    compute.fails = fails;
    let engine = Scheduler::over(compute, config.clone()).unwrap();
    if overlapped { engine.overlapped().unwrap() } else { engine }
}

/// A few requests: two that begin alike, one that its listener stops, one long one.
fn few(index: usize) -> (Request, Arc<Mutex<Heard>>) {
    let prompts: [&[u32]; 4] = [&[5, 6, 7, 8, 9], &[5, 6, 7, 8, 4, 4], &[11; 9], &[3]];
    let (mut request, heard) = request(prompts[index], [6, 9, 12, 20][index]);
    if index == 2 {
        request.listener = Box::new(Notes { heard: heard.clone(), stop_after: Some(5) });
    }
    (request, heard)
}

/// What the few requests get alone.
fn wanted(config: &EngineConfig) -> Vec<Heard> {
    let alone = |index| {
        let (request, heard) = few(index);
        let mut engine = scheduler(config, false, None);
        engine.submit(request).unwrap();
        run(&mut engine);
        let heard = heard.lock().unwrap();
        heard.clone()
    };
    (0..4).map(alone).collect()
}

/// Something that happens between two steps.
#[derive(Debug, Clone, Copy)]
struct Event {
    /// Which request arrives late, and is given up later.
    which: usize,
    arrives: usize,
    aborted: Option<usize>,
    fails: Option<u64>,
}

fn check(config: &EngineConfig, overlapped: bool, event: Event, wanted: &[Heard]) {
    let mut engine = scheduler(config, overlapped, event.fails);
    let mut heard: Vec<Option<Arc<Mutex<Heard>>>> = vec![None; 4];
    let mut id = None;
    for step in 0.. {
        for (index, heard) in heard.iter_mut().enumerate() {
            let arrives = if index == event.which { event.arrives } else { 0 };
            if step == arrives {
                let (request, ear) = few(index);
                let submitted = engine.submit(request).unwrap();
                if index == event.which {
                    id = Some(submitted);
                }
                *heard = Some(ear);
            }
        }
        if let Some(id) = id.filter(|_| event.aborted == Some(step)) {
            engine.abort(id);
        }
        engine.step();
        engine.check().unwrap();
        if engine.is_idle() && step > event.arrives {
            break;
        }
    }
    let mut failed = 0;
    for (index, (heard, wanted)) in heard.iter().flatten().zip(wanted).enumerate() {
        let heard = heard.lock().unwrap();
        match heard.reason() {
            FinishReason::Abort(why) if why == "aborted" => {
                assert_eq!(index, event.which, "{event:?}");
                assert!(wanted.tokens.starts_with(&heard.tokens), "{event:?}, request {index}");
            }
            FinishReason::Abort(why) => {
                assert!(why.contains("this round was told to fail"), "{event:?}: {why}");
                assert!(wanted.tokens.starts_with(&heard.tokens), "{event:?}, request {index}");
                failed += 1;
            }
            reason => {
                assert_eq!(reason, wanted.reason(), "{event:?}, request {index}");
                assert_eq!(heard.tokens, wanted.tokens, "{event:?}, request {index}");
                assert_eq!(heard.usage().spec, wanted.usage().spec, "{event:?}, request {index}");
            }
        }
    }
    assert!(event.fails.is_some() || failed == 0, "{event:?}");
    engine.flush_cache();
    engine.check().unwrap();
    assert_eq!(engine.stats().snapshot().used_slots, 0, "{event:?}");
}

#[test]
fn every_order_of_arrivals_gives_equal_texts_and_no_loss() {
    for shape in [Shape::PLAIN, Shape::chain(3), Shape::new(3, 4, 12).unwrap()] {
        let roomy = EngineConfig { shape, chunked_prefill_size: 4, ..config() };
        let wanted = wanted(&roomy);
        // Enough for two or three of them: some are preempted.
        let small = EngineConfig { max_total_tokens: 40, ..roomy.clone() };
        let paged = EngineConfig { page_size: 4, max_total_tokens: 48, ..roomy };
        for config in [small, paged] {
            for overlapped in [false, true] {
                for which in 0..4 {
                    for arrives in 0..6 {
                        let aborted = (0..8).map(|after| Some(arrives + after)).chain([None]);
                        for aborted in aborted {
                            let event = Event { which, arrives, aborted, fails: None };
                            check(&config, overlapped, event, &wanted);
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_failed_round_fails_later_ones_and_serving_goes_on() {
    let config = EngineConfig { shape: Shape::chain(3), chunked_prefill_size: 4, ..config() };
    let wanted = wanted(&config);
    for overlapped in [false, true] {
        for which in 0..4 {
            for arrives in 0..8 {
                for fails in 0..8 {
                    for aborted in [None, Some(arrives + 1), Some(arrives + 3)] {
                        let event = Event { which, arrives, aborted, fails: Some(fails) };
                        check(&config, overlapped, event, &wanted);
                    }
                }
            }
        }
    }
}

#[test]
fn a_round_is_planned_while_the_one_before_it_runs() {
    let config = EngineConfig { max_running_requests: 4, ..config() };
    let mut engine = scheduler(&config, true, None);
    let (request, heard) = request(&[1, 2, 3], 8);
    engine.submit(request).unwrap();
    engine.step();
    assert!(heard.lock().unwrap().tokens.is_empty(), "the first round is not waited for");
    engine.step();
    assert_eq!(heard.lock().unwrap().tokens.len(), 1, "the second is on its way before its token");
    run(&mut engine);
    assert_eq!(heard.lock().unwrap().tokens.len(), 8);
    assert_eq!(engine.stats().snapshot().rounds, 8, "no round runs for a text that is complete");
}

#[test]
fn shared_prefixes_change_slots_while_rounds_are_in_flight() {
    // Requests that begin alike read the same prompt at the same time; the second gives its
    // pages up for those of the first.
    for (page_size, seed) in [(1, 1), (4, 2), (16, 3)] {
        let config = EngineConfig {
            page_size,
            max_total_tokens: 640,
            shape: Shape::new(3, 4, 12).unwrap(),
            chunked_prefill_size: 48,
            ..config()
        };
        let mut engine = scheduler(&config, true, None);
        let mut random = Numbers(seed);
        let stem = random.prompt(32);
        let mut all = Vec::new();
        for index in 0..200 {
            let kept = random.below(32) as usize;
            let own = 1 + random.below(3) as usize;
            let prompt = [&stem[..kept], &random.prompt(own)].concat();
            let (request, heard) = request(&prompt, 1 + random.below(30) as usize);
            engine.submit(request).unwrap();
            all.push((prompt, heard));
            if index % 3 == 0 {
                engine.step();
                engine.check().unwrap();
            }
        }
        run(&mut engine);
        let mut alone = scheduler(&config, false, None);
        for (prompt, heard) in &all {
            let heard = heard.lock().unwrap();
            let (request, wanted) = request(prompt, heard.tokens.len());
            alone.submit(request).unwrap();
            run(&mut alone);
            assert_eq!(heard.ids(), wanted.lock().unwrap().ids(), "pages of {page_size}");
        }
        assert!(engine.stats().snapshot().cached_tokens > 0);
    }
}
