//! What one request gets.

use std::time::{Duration, Instant};

use aquila_engine::{FinishReason, StopCause, SubmitError};
use safetensors::SafeTensors;

use crate::support::*;

fn golden() -> (Vec<u32>, Vec<u32>) {
    let bytes = std::fs::read(fixture("qwen2").join("golden.safetensors")).unwrap();
    let tensors = SafeTensors::deserialize(&bytes).unwrap();
    let ids = |name: &str| {
        let view = tensors.tensor(name).unwrap();
        view.data()
            .chunks_exact(8)
            .map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32)
            .collect::<Vec<u32>>()
    };
    (ids("input_ids"), ids("greedy_ids"))
}

/// Runs one request alone on a fresh engine.
fn alone(change: impl FnOnce(&mut aquila_engine::Request), prompt: &[u32], tokens: usize) -> Heard {
    let mut engine = engine(config());
    let (mut request, heard) = request(prompt, tokens);
    change(&mut request);
    engine.submit(request).unwrap();
    run(&mut engine);
    let heard = heard.lock().unwrap();
    heard.clone()
}

#[test]
fn a_greedy_answer_is_the_one_of_transformers() {
    let (prompt, want) = golden();
    let heard = alone(|_| (), &prompt, want.len());
    assert_eq!(heard.ids(), want);
    assert_eq!(*heard.reason(), FinishReason::Length);
    let usage = heard.usage();
    assert_eq!((usage.prompt_tokens, usage.completion_tokens), (prompt.len(), want.len()));
}

#[test]
fn a_stop_token_ends_the_text_and_is_counted() {
    let (prompt, want) = golden();
    let stop = want[5];
    let end = want.iter().position(|&id| id == stop).unwrap();
    let heard = alone(|r| r.limits.stop_ids = vec![stop], &prompt, 24);
    assert_eq!(heard.ids(), want[..=end]);
    assert_eq!(*heard.reason(), FinishReason::Stop(StopCause::Token(stop)));
}

#[test]
fn no_stop_token_is_chosen_before_min_tokens() {
    let (prompt, want) = golden();
    let stop = want[0];
    let change = |r: &mut aquila_engine::Request| {
        r.limits.stop_ids = vec![stop];
        r.limits.min_tokens = 10;
    };
    let heard = alone(change, &prompt, 24);
    assert!(heard.tokens.len() >= 10);
    assert!(!heard.ids()[..10].contains(&stop));
}

#[test]
fn a_listener_ends_the_text_where_it_says() {
    let (prompt, want) = golden();
    let mut engine = engine(config());
    let (mut request, heard) = request(&prompt, 24);
    request.listener = Box::new(Notes { heard: heard.clone(), stop_after: Some(7) });
    engine.submit(request).unwrap();
    run(&mut engine);
    let heard = heard.lock().unwrap();
    assert_eq!(heard.ids(), want[..7]);
    assert_eq!(*heard.reason(), FinishReason::Stop(StopCause::Listener));
    assert_eq!(heard.usage().completion_tokens, 7);
}

#[test]
fn the_context_ends_an_answer() {
    let (prompt, want) = golden();
    let mut engine = engine(aquila_engine::EngineConfig { context_length: 50, ..config() });
    let (request, heard) = request(&prompt, 1000);
    engine.submit(request).unwrap();
    run(&mut engine);
    let heard = heard.lock().unwrap();
    assert_eq!(heard.ids(), want[..10]);
    assert_eq!(*heard.reason(), FinishReason::Length);
}

#[test]
fn a_prompt_can_be_read_without_an_answer() {
    let (prompt, _) = golden();
    let heard = alone(|r| r.prompt_logprobs = Some(2), &prompt, 0);
    assert_eq!(*heard.reason(), FinishReason::Length);
    assert!(heard.tokens.is_empty());
    assert_eq!(heard.prompt.iter().map(|t| t.id).collect::<Vec<_>>(), prompt);
    assert!(heard.prompt[0].logprob.is_none());
    assert!(heard.prompt[1..].iter().all(|t| t.logprob.is_some() && t.top.len() == 2));
}

#[test]
fn log_probabilities_of_a_prompt_do_not_depend_on_chunks() {
    let (prompt, _) = golden();
    let read = |chunk: usize| {
        let mut engine =
            engine(aquila_engine::EngineConfig { chunked_prefill_size: chunk, ..config() });
        let (mut request, heard) = request(&prompt, 3);
        request.prompt_logprobs = Some(3);
        request.logprobs = Some(3);
        engine.submit(request).unwrap();
        run(&mut engine);
        let heard = heard.lock().unwrap();
        (heard.prompt.clone(), heard.tokens.clone())
    };
    let whole = read(64);
    assert_eq!(whole.0.len(), prompt.len());
    for chunk in [1, 3, 16, 39, 40] {
        assert_eq!(read(chunk), whole, "chunks of {chunk}");
    }
}

#[test]
fn a_request_that_cannot_be_served_is_refused() {
    let mut engine = engine(aquila_engine::EngineConfig {
        context_length: 100,
        max_total_tokens: 80,
        max_queued_requests: 1,
        ..config()
    });
    let mut submit = |prompt: &[u32], tokens: usize| engine.submit(request(prompt, tokens).0);
    assert_eq!(submit(&[], 1), Err(SubmitError::EmptyPrompt));
    assert!(submit(&[1; 80], 1).unwrap_err().to_string().contains("the KV pool"));
    assert!(submit(&[1, VOCABULARY], 1).unwrap_err().to_string().contains("at index 1"));
    assert!(submit(&[1; 80], 0).is_ok());
    assert_eq!(submit(&[1], 1), Err(SubmitError::QueueFull(1)));
}

#[test]
fn a_deadline_ends_a_request_wherever_it_is() {
    let (prompt, _) = golden();
    let mut engine = engine(aquila_engine::EngineConfig { max_running_requests: 2, ..config() });
    let deadline = Instant::now() + Duration::from_millis(20);
    let mut submit = |tokens: usize, deadline: Option<Instant>| {
        let (mut request, heard) = request(&prompt, tokens);
        request.deadline = deadline;
        engine.submit(request).unwrap();
        heard
    };
    let running = submit(400, Some(deadline));
    let other = submit(5, None);
    let waiting = submit(400, Some(deadline));
    engine.step();
    while Instant::now() < deadline {
        std::hint::spin_loop();
    }
    run(&mut engine);
    for late in [running, waiting] {
        let reason = late.lock().unwrap().reason().clone();
        assert_eq!(reason, FinishReason::Abort("deadline exceeded".into()));
    }
    assert_eq!(*other.lock().unwrap().reason(), FinishReason::Length);
}

#[test]
fn answers_of_one_request_share_the_prompt_and_differ() {
    let (prompt, _) = golden();
    let mut engine = engine(config());
    let mut all = Vec::new();
    for choice in 0..3 {
        let (mut request, heard) = request(&prompt, 12);
        request.sampling.temperature = 1.0;
        request.sampling.seed = 5;
        request.seeded = true;
        request.choice = choice;
        request.family = Some(1);
        engine.submit(request).unwrap();
        all.push(heard);
    }
    run(&mut engine);
    let all: Vec<Heard> = all.iter().map(|heard| heard.lock().unwrap().clone()).collect();
    assert_eq!(all[0].usage().cached_tokens, 0);
    assert!(all[1..].iter().all(|heard| heard.usage().cached_tokens == prompt.len() - 1));
    assert!(all[0].ids() != all[1].ids() && all[1].ids() != all[2].ids());
}
