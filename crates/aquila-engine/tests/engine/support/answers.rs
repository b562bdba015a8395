//! Prompts, ways to choose tokens, and the answers of engines to compare.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use aquila_engine::{EngineConfig, FinishReason, Request, Scheduler};
use aquila_spec::{Shape, SpecStats};
use serde_json::Value;
use tokenizers::Tokenizer;

use super::shipped::{Algorithm, config, engine};
use super::{Notes, run};

/// What a request got.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    pub ids: Vec<u32>,
    pub logprobs: Vec<Option<u32>>,
    pub reason: Option<FinishReason>,
    pub spec: SpecStats,
    /// The bits of the hidden states that it asked for.
    pub states: Vec<u32>,
    pub experts: Vec<u32>,
}

/// The shipped model's.
pub fn tokenizer() -> Tokenizer {
    let folder = match aquila_model::resolve("tiny").unwrap() {
        aquila_model::Location::Folder(folder) => folder,
        other => panic!("{other:?}"),
    };
    Tokenizer::from_file(folder.join("tokenizer.json")).unwrap()
}

/// The prompts of the acceptance tables, by kind, tokenized.
pub fn prompts() -> Vec<(String, Vec<u32>)> {
    let tokenizer = tokenizer();
    let path = super::fixture("acceptance-prompts.jsonl");
    let text = std::fs::read_to_string(path).unwrap();
    text.lines()
        .map(|line| {
            let line: Value = serde_json::from_str(line).unwrap();
            let ids = tokenizer.encode(line["prompt"].as_str().unwrap(), true).unwrap();
            (line["kind"].as_str().unwrap().to_owned(), ids.get_ids().to_vec())
        })
        .collect()
}

/// How a request is changed before it is submitted.
pub type Change = fn(&mut Request, usize);

pub fn greedy(_: &mut Request, _: usize) {}

pub fn warm(request: &mut Request, index: usize) {
    request.sampling.temperature = 0.7;
    request.sampling.top_p = 0.9;
    request.sampling.seed = index as u64;
    request.seeded = true;
}

pub fn hot(request: &mut Request, index: usize) {
    warm(request, index + 1000);
    request.sampling.temperature = 1.0;
    request.sampling.top_p = 0.95;
}

pub fn penalized(request: &mut Request, _: usize) {
    request.sampling.repetition_penalty = 1.2;
    request.sampling.presence_penalty = 0.5;
    request.sampling.frequency_penalty = 0.4;
}

/// Runs all prompts at once, as far as the engine lets them.
pub fn answers(
    engine: &mut Scheduler,
    prompts: &[Vec<u32>],
    tokens: usize,
    change: impl Fn(&mut Request, usize),
) -> Vec<Answer> {
    let submit = |(index, prompt): (usize, &Vec<u32>)| {
        let heard = Arc::new(Mutex::new(super::Heard::default()));
        let notes = Notes { heard: heard.clone(), stop_after: None };
        let mut request = Request::new(prompt.clone(), tokens, Box::new(notes));
        request.limits.stop_ids = vec![0, 2];
        request.logprobs = Some(0);
        change(&mut request, index);
        engine.submit(request).unwrap();
        heard
    };
    let all: Vec<_> = prompts.iter().enumerate().map(submit).collect();
    run(engine);
    all.iter().map(|heard| Answer::of(&heard.lock().unwrap())).collect()
}

/// Compares answers and drafts of one request at a time with those in batches, by other pages and
/// chunks, with cached prefixes, and with preemptions in a pool of `small` tokens.
pub fn same_in_any_company(
    what: &str,
    prompts: &[Vec<u32>],
    mode: Change,
    config: EngineConfig,
    small: usize,
    make: impl Fn(EngineConfig) -> Scheduler,
) {
    let base = EngineConfig { max_running_requests: 1, chunked_prefill_size: 2048, ..config };
    let want = answers(&mut make(base.clone()), prompts, 40, mode);
    let check = |got: &[Answer], how: &str| assert_eq!(got, want, "{what}: {how}");
    let variants = [
        ("batch 8", EngineConfig { max_running_requests: 8, ..base.clone() }),
        ("pages of 16", EngineConfig { page_size: 16, ..base.clone() }),
        ("chunks of 4", EngineConfig { chunked_prefill_size: 4, ..base.clone() }),
        (
            "chunks of 64, batch 8",
            EngineConfig { chunked_prefill_size: 64, max_running_requests: 8, ..base.clone() },
        ),
    ];
    for (how, config) in variants {
        check(&answers(&mut make(config), prompts, 40, mode), how);
    }
    let mut again = make(EngineConfig { page_size: 4, ..base.clone() });
    answers(&mut again, prompts, 40, mode);
    check(&answers(&mut again, prompts, 40, mode), "prefixes found in the cache");

    let small = EngineConfig { max_running_requests: 8, max_total_tokens: small, ..base };
    let mut crowded = make(small);
    check(&answers(&mut crowded, prompts, 40, mode), "a pool that is too small");
    let preemptions = crowded.stats().snapshot().preemptions;
    assert!(preemptions > 0, "{what}: the pool was meant to be too small");
}

impl Answer {
    /// What was heard.
    pub fn of(heard: &super::Heard) -> Self {
        Self {
            ids: heard.ids(),
            logprobs: heard.tokens.iter().map(|t| t.logprob.map(f32::to_bits)).collect(),
            reason: Some(heard.reason().clone()),
            spec: heard.spec.clone(),
            states: heard.rows.hidden_states.values.iter().map(|x| x.to_bits()).collect(),
            experts: heard.rows.routed_experts.values.clone(),
        }
    }
}

/// Tokens per verification by kind of prompt, as the acceptance tables count them: the sum of
/// completion tokens less one each, over the sum of verifications.
pub fn acceptance(algorithm: Algorithm, shape: Shape) -> BTreeMap<String, f64> {
    acceptance_of(shape, |config| engine(algorithm, config))
}

/// The same for the engine that `make` makes.
pub fn acceptance_of(
    shape: Shape,
    make: impl FnOnce(EngineConfig) -> Scheduler,
) -> BTreeMap<String, f64> {
    acceptance_in(&accepted(shape, make), |_| true)
}

/// The greedy answers to the prompts of the acceptance tables.
pub fn accepted(shape: Shape, make: impl FnOnce(EngineConfig) -> Scheduler) -> Vec<Answer> {
    let config =
        EngineConfig { max_running_requests: 30, max_total_tokens: 40_000, ..config(shape) };
    let ids: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).collect();
    answers(&mut make(config), &ids, 160, |r, _| r.logprobs = None)
}

/// Tokens per verification of those answers whose number is kept, by kind of prompt.
pub fn acceptance_in(heard: &[Answer], kept: impl Fn(usize) -> bool) -> BTreeMap<String, f64> {
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for (at, ((kind, _), heard)) in prompts().iter().zip(heard).enumerate() {
        // The tables leave out texts that end within 16 tokens.
        if heard.ids.len() > 16 && kept(at) {
            let sum = sums.entry(kind.clone()).or_default();
            sum.0 += heard.ids.len() as u64 - 1;
            sum.1 += heard.spec.verify_ct;
        }
    }
    sums.into_iter().map(|(kind, (tokens, rounds))| (kind, tokens as f64 / rounds as f64)).collect()
}

/// An acceptance table: by algorithm, kind of prompt and shape.
pub fn table(file: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(super::fixture(file)).unwrap()).unwrap()
}

/// What users see of an answer: everything but what speculation did.
pub fn texts(heard: &[Answer]) -> Vec<Answer> {
    heard.iter().map(|h| Answer { spec: SpecStats::default(), ..h.clone() }).collect()
}

pub fn shape(steps: usize, topk: usize, nodes: usize) -> Shape {
    Shape::new(steps, topk, nodes).unwrap()
}
