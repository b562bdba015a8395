//! The prefix cache under speculation, where its pages run out: what a request gets and what is
//! drafted for it do not depend on whose pages it found, lost, or took.

use std::sync::{Arc, Mutex};

use aquila_engine::{EngineConfig, Request, Scheduler, Speculation};
use aquila_spec::{Shape, SpecStats};

use crate::support::answers::{hot, prompts, shape};
use crate::support::shipped::{Algorithm, config, engine};
use crate::support::{Heard, Notes, Numbers};

const TOKENS: usize = 20;

/// Prompts that begin alike and part at random places, some of them the same throughout.
fn branching_prompts(count: usize) -> Vec<Vec<u32>> {
    let trunks: Vec<Vec<u32>> = prompts().into_iter().step_by(8).map(|(_, ids)| ids).collect();
    let mut random = Numbers(3);
    let mut all: Vec<Vec<u32>> = Vec::new();
    while all.len() < count {
        let again = !all.is_empty() && random.below(4) == 0;
        let trunk = if again {
            &all[random.below(all.len() as u64) as usize]
        } else {
            &trunks[random.below(trunks.len() as u64) as usize]
        };
        let kept = 1 + random.below(trunk.len() as u64) as usize;
        let mut prompt = trunk[..kept].to_vec();
        let tail = random.below(12) as usize;
        prompt.extend(random.prompt(tail));
        all.push(prompt);
    }
    all
}

fn submit(engine: &mut Scheduler, prompt: &[u32], index: usize) -> Arc<Mutex<Heard>> {
    let heard = Arc::new(Mutex::new(Heard::default()));
    let listener = Box::new(Notes { heard: heard.clone(), stop_after: None });
    let mut request = Request::new(prompt.to_vec(), TOKENS, listener);
    if index % 3 == 1 {
        hot(&mut request, index);
    }
    if index % 5 == 4 {
        // It leaves pages of the target behind, and none of the draft.
        request.speculation = Speculation::Off;
    }
    engine.submit(request).unwrap();
    heard
}

fn got(heard: &Arc<Mutex<Heard>>) -> (Vec<u32>, SpecStats) {
    let heard = heard.lock().unwrap();
    (heard.ids(), heard.spec.clone())
}

/// Runs `prompts` in random bunches in a pool of `slots`, and compares each with itself alone.
fn stress(algorithm: Algorithm, shape: Shape, page_size: usize, slots: usize) {
    let prompts = branching_prompts(18);
    let what = format!("{algorithm:?}, {shape}, pages of {page_size}");
    let roomy = EngineConfig { max_running_requests: 1, prefix_cache: false, ..config(shape) };
    let mut alone = engine(algorithm, roomy);
    let wanted: Vec<_> = prompts
        .iter()
        .enumerate()
        .map(|(index, prompt)| {
            let heard = submit(&mut alone, prompt, index);
            crate::support::run(&mut alone);
            got(&heard)
        })
        .collect();

    let small = EngineConfig {
        page_size,
        max_total_tokens: slots,
        max_running_requests: 6,
        chunked_prefill_size: 32,
        ..config(shape)
    };
    let mut crowded = engine(algorithm, small);
    let mut random = Numbers(17 + page_size as u64);
    // Twice, in two random orders: the second time finds what the first has left.
    let mut order: Vec<usize> = (0..prompts.len()).chain(0..prompts.len()).collect();
    for at in (1..order.len()).rev() {
        order.swap(at, random.below(at as u64 + 1) as usize);
    }
    let mut all = Vec::new();
    let mut next = 0;
    while next < order.len() || !crowded.is_idle() {
        for _ in 0..random.below(4) {
            if let Some(&index) = order.get(next) {
                all.push((index, submit(&mut crowded, &prompts[index], index)));
                next += 1;
            }
        }
        for _ in 0..=random.below(6) {
            crowded.step();
            crowded.check().unwrap();
        }
    }
    for (index, heard) in &all {
        assert_eq!(got(heard), wanted[*index], "{what}: request {index}");
    }
    let counts = crowded.stats().snapshot();
    assert!(counts.cached_tokens > 0, "{what}: something was found");
    // Every row that was computed is offered to the cache at the end of its request.
    let rows = counts.prompt_tokens + counts.completion_tokens;
    assert!(rows > 2 * slots as u64, "{what}: {rows} rows make the cache evict");
    assert_eq!(counts.used_slots, 0, "{what}");
}

#[test]
fn a_head_drafts_the_same_whatever_the_cache_evicts() {
    stress(Algorithm::Eagle3, Shape::chain(4), 1, 420);
    stress(Algorithm::Eagle3, shape(4, 4, 12), 16, 512);
}

#[test]
fn a_standalone_draft_drafts_the_same_whatever_the_cache_evicts() {
    stress(Algorithm::Standalone, Shape::chain(4), 4, 420);
    stress(Algorithm::Standalone, shape(4, 4, 12), 1, 420);
}

#[test]
fn trees_in_pages_of_64_draft_the_same() {
    stress(Algorithm::Eagle3, shape(5, 8, 48), 64, 64 * 8);
    stress(Algorithm::Standalone, shape(5, 4, 16), 64, 64 * 8);
}
