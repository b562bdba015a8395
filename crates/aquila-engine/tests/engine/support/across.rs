//! The answers of two engines, one of which processes the prompts.

use std::sync::{Arc, Mutex};

use aquila_engine::{EngineConfig, EnginePair, Request, Scheduler, Snapshot};

use super::answers::{Answer, Change, prompts};
use super::shipped::inline;
use super::{Heard, Notes};

/// A request and what its listener hears.
pub fn request(
    prompt: &[u32],
    tokens: usize,
    change: Change,
    index: usize,
) -> (Request, Arc<Mutex<Heard>>) {
    let heard = Arc::new(Mutex::new(Heard::default()));
    let notes = Notes { heard: heard.clone(), stop_after: None };
    let mut request = Request::new(prompt.to_vec(), tokens, Box::new(notes));
    request.limits.stop_ids = vec![0, 2];
    request.logprobs = Some(0);
    change(&mut request, index);
    (request, heard)
}

/// What each prompt gets, and what the engine that has processed it said of it.
pub fn heard_across(
    pair: &mut EnginePair,
    prompts: &[Vec<u32>],
    tokens: usize,
    change: Change,
) -> Vec<(Heard, Heard)> {
    let submit = |(index, prompt): (usize, &Vec<u32>)| {
        let (first, processed) = request(prompt, tokens, change, index);
        let (second, decoded) = request(prompt, tokens, change, index);
        pair.submit(first, second).unwrap();
        (processed, decoded)
    };
    let all: Vec<_> = prompts.iter().enumerate().map(submit).collect();
    while !pair.is_idle() {
        pair.step();
        pair.prefill.check().unwrap();
        pair.decode.check().unwrap();
    }
    pair.prefill.wait_for_listeners();
    pair.decode.wait_for_listeners();
    let heard = |heard: &Arc<Mutex<Heard>>| heard.lock().unwrap().clone();
    all.iter().map(|(processed, decoded)| (heard(processed), heard(decoded))).collect()
}

/// What each prompt gets.
pub fn across(
    pair: &mut EnginePair,
    prompts: &[Vec<u32>],
    tokens: usize,
    change: Change,
) -> Vec<Answer> {
    let heard = heard_across(pair, prompts, tokens, change);
    let answer = |(processed, heard): &(Heard, Heard)| {
        assert!(processed.tokens.len() <= 1, "a prompt leaves one token");
        assert_eq!(processed.tokens, heard.tokens[..processed.tokens.len()], "the same token");
        Answer::of(heard)
    };
    heard.iter().map(answer).collect()
}

/// Some of the prompts of the acceptance tables, and very short ones.
pub fn some_prompts(every: usize) -> Vec<Vec<u32>> {
    let mut prompts: Vec<_> = prompts().into_iter().map(|(_, ids)| ids).step_by(every).collect();
    // Texts that are shorter than the layers of a draft look ahead.
    prompts.extend([vec![17], vec![5, 900]]);
    prompts
}

/// Runs both until nothing is left to do; no slot may be lost.
pub fn run_pair(pair: &mut EnginePair) {
    let mut steps = 0;
    while !pair.is_idle() {
        pair.step();
        pair.prefill.check().unwrap();
        pair.decode.check().unwrap();
        steps += 1;
        let engines = [&pair.prefill, &pair.decode].map(counts);
        assert!(steps < 100_000, "they do not come to an end: {engines:?}");
    }
    for engine in [&mut pair.prefill, &mut pair.decode] {
        engine.wait_for_listeners();
        engine.flush_cache();
        engine.check().unwrap();
        assert_eq!(engine.stats().snapshot().used_slots, 0, "no slot is lost");
    }
}

/// Two engines of this algorithm.
pub fn pair(name: &str, prefill: EngineConfig, decode: EngineConfig) -> EnginePair {
    EnginePair::new(inline(name, prefill), inline(name, decode))
}

/// Tokens chosen by chance, with seeds that the engine derives.
pub fn unseeded(request: &mut Request, _: usize) {
    request.sampling.temperature = 0.8;
    request.limits.min_tokens = 12;
}

/// What an engine has counted.
pub fn counts(engine: &Scheduler) -> Snapshot {
    engine.stats().snapshot()
}
