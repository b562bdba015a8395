//! Rows of the target that requests get: hidden states and experts of each token, once and in its
//! place, whatever was drafted and whatever became of the request meanwhile.

use std::sync::{Arc, Mutex};

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_compute::round::Returned;
use aquila_engine::{
    EngineConfig, Error, Request, ReturnedKind, Runner, Scheduler, SubmitError, TokenRows,
};
use aquila_model::{Checkpoint, Decoder, LoadFormat, Location, Safetensors, TensorSource};
use aquila_spec::Shape;
use aquila_spec::ngram::{NgramScope, NgramSettings};

use crate::ngram::engine_at;
use crate::support::answers::*;
use crate::support::shipped::{Algorithm, config, engine, inline, named};
use crate::support::{Heard, Notes, Numbers, fixture, run};

const HIDDEN: Returned = Returned { hidden_states: true, routed_experts: false };
const BOTH: Returned = Returned { hidden_states: true, routed_experts: true };

fn hidden(request: &mut Request, _: usize) {
    request.returned = HIDDEN;
    // So that they grow as long as they may.
    request.limits.stop_ids.clear();
}

fn sampled_hidden(request: &mut Request, index: usize) {
    hot(request, index);
    hidden(request, index);
}

fn both(request: &mut Request, index: usize) {
    hidden(request, index);
    request.returned = BOTH;
}

/// Of others, every second asks for rows, so that passes have rows of both.
fn every_second(request: &mut Request, index: usize) {
    if index.is_multiple_of(2) {
        request.returned = HIDDEN;
    }
}

/// An engine over a fixture, with trees of n-grams where `shape` has them.
fn over(name: &str, shape: Shape, config: EngineConfig) -> Scheduler {
    let settings = (shape != Shape::PLAIN)
        .then(|| NgramSettings { scope: NgramScope::Request, ..NgramSettings::default() });
    let location = Location::Folder(fixture(name));
    engine_at(&location, settings, EngineConfig { shape, ..config }).0
}

fn small_context(returned: Returned) -> EngineConfig {
    EngineConfig { context_length: 256, returned, ..config(Shape::PLAIN) }
}

/// Prompts that repeat themselves, so that n-grams find something.
fn repeated(count: usize) -> Vec<Vec<u32>> {
    let mut numbers = Numbers(5);
    (0..count).map(|_| numbers.prompt(10).repeat(3)).collect()
}

/// Submits one request as `change` makes it; its listener stops it after `stop_after` tokens.
fn submit(
    engine: &mut Scheduler,
    prompt: &[u32],
    tokens: usize,
    stop_after: Option<usize>,
    change: impl FnOnce(&mut Request),
) -> Arc<Mutex<Heard>> {
    let heard = Arc::new(Mutex::new(Heard::default()));
    let notes = Notes { heard: heard.clone(), stop_after };
    let mut request = Request::new(prompt.to_vec(), tokens, Box::new(notes));
    change(&mut request);
    engine.submit(request).unwrap();
    heard
}

/// The rows of one request that ran to its end.
fn rows_of(
    engine: &mut Scheduler,
    prompt: &[u32],
    tokens: usize,
    stop_after: Option<usize>,
    change: impl FnOnce(&mut Request),
) -> TokenRows {
    let heard = submit(engine, prompt, tokens, stop_after, change);
    run(engine);
    let heard = heard.lock().unwrap();
    heard.rows.clone()
}

#[test]
fn rows_of_prompts_are_those_of_transformers() {
    for (name, returned) in
        [("qwen3", HIDDEN), ("gemma3", HIDDEN), ("qwen3-moe", BOTH), ("qwen3-moe-dense", BOTH)]
    {
        let file = Safetensors::open_file(&fixture(name).join("golden.safetensors")).unwrap();
        let ids = |tensor: &str| -> Vec<u32> {
            let bytes = file.get(tensor).unwrap().bytes().to_vec();
            let id = |b: &[u8]| i64::from_le_bytes(b.try_into().unwrap()) as u32;
            bytes.chunks_exact(8).map(id).collect()
        };
        let prompt = ids("input_ids");
        let config = EngineConfig { chunked_prefill_size: 16, ..small_context(returned) };
        let mut engine = over(name, Shape::PLAIN, config);
        let rows = rows_of(&mut engine, &prompt, 1, None, |request| request.returned = returned);
        let theirs = file.get("last_hidden").unwrap().to_f32().unwrap();
        assert_eq!(rows.hidden_states.values.len(), theirs.len(), "{name}");
        let off = rows.hidden_states.values.iter().zip(&theirs).map(|(a, b)| (a - b).abs());
        let off = off.fold(0.0, f32::max);
        assert!(off < 1e-3, "{name}: hidden states off by {off}");
        if file.info("routed_experts").is_some() {
            assert_eq!(rows.routed_experts.values, ids("routed_experts"), "{name}");
        }
    }
}

#[test]
fn hidden_states_of_drafted_runs_are_those_of_plain_runs() {
    let mut prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(5).map(|(_, ids)| ids).collect();
    prompts.iter_mut().for_each(|prompt| prompt.truncate(24));
    let plain = |change: Change| {
        let config = EngineConfig { returned: HIDDEN, ..config(Shape::PLAIN) };
        texts(&answers(&mut engine(Algorithm::None, config), &prompts, 40, change))
    };
    let modes = [hidden as Change, sampled_hidden, every_second];
    let wanted = modes.map(plain);
    for (answer, prompt) in wanted[0].iter().zip(&prompts) {
        let rows = prompt.len() + answer.ids.len() - 1;
        assert!(!answer.states.is_empty() && answer.states.len().is_multiple_of(rows));
    }
    let (chain, tree) = (Shape::chain(3), shape(3, 4, 12));
    for (name, shape, page_size, chunk, mode) in [
        ("EAGLE3", chain, 1, 256, 0),
        ("EAGLE3", tree, 16, 4, 1),
        ("EAGLE", chain, 16, 16, 1),
        ("EAGLE", tree, 1, 4, 2),
        ("MTP", chain, 1, 16, 2),
        ("MTP", tree, 16, 256, 0),
        ("STANDALONE", chain, 16, 4, 0),
        ("STANDALONE", tree, 1, 256, 1),
        ("NGRAM", tree, 16, 16, 0),
        ("NGRAM", shape(8, 1, 9), 1, 4, 2),
        ("EAGLE3+NGRAM", tree, 1, 16, 0),
    ] {
        let what = format!("{name}, {shape}, pages of {page_size}, chunks of {chunk}");
        let (returned, chunked_prefill_size) = (HIDDEN, chunk);
        let base = EngineConfig { page_size, chunked_prefill_size, returned, ..config(shape) };
        let mut roomy = named(name, base.clone());
        for time in ["first", "with prefixes in the cache"] {
            let got = answers(&mut roomy, &prompts, 40, modes[mode]);
            assert_eq!(texts(&got), wanted[mode], "{what}: {time}");
            assert!(got.iter().any(|answer| answer.spec.correct_drafts > 0), "{what}");
        }
        let crowd = EngineConfig { max_total_tokens: 112, chunked_prefill_size: 16, ..base };
        let mut overlapped = inline(name, crowd).overlapped().unwrap();
        let got = answers(&mut overlapped, &prompts, 40, modes[mode]);
        assert_eq!(texts(&got), wanted[mode], "{what}: a small pool, with overlap");
        let preemptions = overlapped.stats().snapshot().preemptions;
        assert!(preemptions > 0, "{what}: the pool was meant to be too small");
    }
}

#[test]
fn trees_of_n_grams_change_no_row_of_any_architecture() {
    let prompts = repeated(12);
    for (name, returned, change) in [
        ("qwen3-moe-dense", BOTH, both as Change),
        ("qwen3-moe", BOTH, both),
        ("gemma3", HIDDEN, hidden),
    ] {
        let base = small_context(returned);
        let mut plain = over(name, Shape::PLAIN, base.clone());
        let wanted = texts(&answers(&mut plain, &prompts, 40, change));
        assert!(wanted.iter().all(|answer| !answer.states.is_empty()));
        assert_eq!(wanted.iter().all(|answer| !answer.experts.is_empty()), returned == BOTH);
        for page_size in [1, 16] {
            let shape = shape(5, 4, 16);
            let what = format!("{name}, pages of {page_size}");
            let chunked = EngineConfig { page_size, chunked_prefill_size: 8, ..base.clone() };
            let mut engine = over(name, shape, chunked.clone());
            for time in ["first", "with prefixes in the cache"] {
                let got = answers(&mut engine, &prompts, 40, change);
                assert_eq!(texts(&got), wanted, "{what}: {time}");
                assert!(got.iter().any(|answer| answer.spec.correct_drafts > 0), "{what}");
            }
            let crowd = EngineConfig { max_total_tokens: 192, chunked_prefill_size: 20, ..chunked };
            let mut crowded = over(name, shape, crowd);
            let got = answers(&mut crowded, &prompts, 40, change);
            assert_eq!(texts(&got), wanted, "{what}: a small pool");
            assert!(crowded.stats().snapshot().preemptions > 0, "{what}");
        }
    }
}

/// The whole run of one prompt, and its two kinds of rows.
fn whole_run() -> (Vec<u32>, TokenRows) {
    let prompt = repeated(1).remove(0);
    let mut engine = over("qwen3-moe-dense", Shape::PLAIN, small_context(BOTH));
    let rows = rows_of(&mut engine, &prompt, 20, None, |request| request.returned = BOTH);
    assert_eq!(rows.hidden_states.len(), prompt.len() + 19);
    assert_eq!(rows.routed_experts.len(), prompt.len() + 19);
    (prompt, rows)
}

#[test]
fn rows_follow_the_tokens_that_are_reported() {
    let (prompt, whole) = whole_run();
    for (shape, overlaps) in
        [(Shape::PLAIN, false), (shape(5, 4, 16), false), (shape(5, 4, 16), true)]
    {
        let mut engine = over("qwen3-moe-dense", shape, small_context(BOTH));
        if overlaps {
            engine = engine.overlapped().unwrap().with_output_thread().unwrap();
        }
        for (tokens, stop_after) in
            (0..4).map(|tokens| (tokens, None)).chain((1..12).map(|stop| (20, Some(stop))))
        {
            let change = |request: &mut Request| request.returned = BOTH;
            let rows = rows_of(&mut engine, &prompt, tokens, stop_after, change);
            let reported = stop_after.unwrap_or(tokens);
            let last = prompt.len() + reported - 1;
            let what = format!("{shape}, overlap {overlaps}, {reported} tokens");
            // The head reads all of the prompt, also where it chooses nothing.
            let states = last.max(prompt.len());
            assert_eq!(rows.hidden_states.len(), states, "{what}");
            assert_eq!(rows.routed_experts.len(), last, "{what}");
            assert!(whole.hidden_states.values.starts_with(&rows.hidden_states.values), "{what}");
            assert!(whole.routed_experts.values.starts_with(&rows.routed_experts.values), "{what}");
        }
    }
}

#[test]
fn rows_before_the_first_reported_token_may_come_from_the_cache() {
    let (prompt, whole) = whole_run();
    let mut engine = over("qwen3-moe-dense", shape(5, 4, 16), small_context(BOTH));
    rows_of(&mut engine, &prompt, 20, None, |_| ());
    let experts = Returned { hidden_states: false, routed_experts: true };
    for from in [0, 1, 17, prompt.len()] {
        let heard = submit(&mut engine, &prompt, 20, None, |request| {
            (request.returned, request.returned_from) = (experts, from);
        });
        run(&mut engine);
        let heard = heard.lock().unwrap();
        // The last row of a prompt is always computed.
        assert_eq!(heard.usage().cached_tokens, from.min(prompt.len() - 1));
        let width = whole.routed_experts.width;
        assert_eq!(heard.rows.routed_experts.values, whole.routed_experts.values[from * width..]);
        assert!(heard.rows.hidden_states.is_empty());
    }
}

#[test]
fn an_aborted_request_has_the_rows_that_it_computed() {
    let (prompt, whole) = whole_run();
    let config = EngineConfig { chunked_prefill_size: 4, ..small_context(BOTH) };
    for steps in 0..20_usize {
        let mut engine = over("qwen3-moe-dense", Shape::PLAIN, config.clone());
        let heard = submit(&mut engine, &prompt, 20, None, |request| request.returned = BOTH);
        for _ in 0..steps {
            engine.step();
        }
        engine.abort_all("aborted");
        run(&mut engine);
        let heard = heard.lock().unwrap();
        let (states, experts) = (&heard.rows.hidden_states, &heard.rows.routed_experts);
        assert!(whole.hidden_states.values.starts_with(&states.values), "after {steps} steps");
        assert!(whole.routed_experts.values.starts_with(&experts.values), "after {steps} steps");
        assert!(states.len() >= (4 * steps.saturating_sub(1)).min(prompt.len()), "{steps} steps");
    }
}

#[test]
fn rows_that_the_engine_does_not_keep_are_refused() {
    for (returned, kind) in [
        (HIDDEN, ReturnedKind::HiddenStates),
        (Returned { hidden_states: false, routed_experts: true }, ReturnedKind::RoutedExperts),
    ] {
        let mut engine = over("qwen3-moe-dense", Shape::PLAIN, small_context(Returned::default()));
        let listener = Notes { heard: Arc::default(), stop_after: None };
        let mut request = Request::new(vec![5], 1, Box::new(listener));
        request.returned = returned;
        assert_eq!(engine.submit(request).unwrap_err(), SubmitError::NotReturned(kind));
    }
}

#[test]
fn experts_of_a_model_without_any_are_refused_at_start() {
    let backend = Arc::new(CpuBackend::new(IsaChoice::Auto, 1).unwrap());
    let location = Location::Folder(fixture("gemma3"));
    let checkpoint = Checkpoint::open(&location, LoadFormat::Auto).unwrap();
    let format = WeightFormat::Bf16;
    let decoder = Decoder::load(&*backend, &checkpoint, format, 256, &mut |_| ()).unwrap();
    let refused = Runner::new(backend, decoder, None, &small_context(BOTH));
    assert!(matches!(refused, Err(Error::NoExperts)));
}
