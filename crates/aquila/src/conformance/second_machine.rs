//! Whether a machine to which a request comes drafts as the one that has seen the request grow.
//!
//! What drafts on the host is loaded twice. One copy hears of a text piece by piece and drafts after
//! each; the other gets all of it at once, with what the first has packed. Their trees must be
//! equal. Then two engines answer prompts together, one of which processes them, which takes what
//! drafts on the backend along.

use std::sync::{Arc, Mutex};

use aquila_compute::cpu::CpuBackend;
use aquila_compute::{KvDtype, PlanBounds, WeightFormat};
use aquila_engine::{EnginePair, Request, Scheduler};
use aquila_model::{Checkpoint, Decoder};
use aquila_spec::{Allowance, DraftRequest, HostProposer, LoadOn, MOST_DRAFT_GROUPS, Shape};

use super::{Ear, Heard, TOKENS, parse};
use crate::Algorithms;
use crate::error::{Error, Result};
use crate::start::{build, open_draft};

/// Tokens that become certain after a prompt, piece by piece.
const PIECES: [usize; 5] = [1, 3, 1, 6, 2];

/// What two machines differ in that have heard of a text in different ways, each in a sentence.
pub(super) fn failures_of_trees(
    algorithms: &Algorithms,
    flags: &[&str],
    prompts: &[Vec<u32>],
) -> Result<Vec<String>> {
    let (model, engine) = parse(flags)?;
    let Some(mut speculative) = engine.speculative.resolve(model.name(), None, algorithms)? else {
        return Ok(Vec::new());
    };
    let checkpoint = Checkpoint::open(&model.find(true)?, model.load_format())?;
    let (ngram, _) = engine.speculative.ngram.sources(&checkpoint)?;
    let opened = open_draft(&model, &speculative, &checkpoint, Some(&ngram), true)?;
    speculative.fit(opened.most_steps())?;
    let shape = speculative.policy.covering();
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0) + PIECES.iter().sum::<usize>();
    let backend = CpuBackend::new(model.isa(), model.threads)?;
    let format = WeightFormat::Bf16;
    let decoder = Decoder::load(&backend, &checkpoint, format, longest + 1, &mut |_| ())?;
    let load = || -> Result<Option<Box<dyn HostProposer>>> {
        let allowance = allowance(shape, longest);
        Ok(LoadOn::<CpuBackend>::load(&*opened, &backend, &decoder, &allowance)?.host)
    };
    let mut failures = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let Some(mut one) = load()? else { break };
        let mut tokens = prompt.clone();
        for piece in [0].iter().chain(&PIECES) {
            // A text that repeats itself, so that there is something to draft from.
            tokens.extend_from_within(..(*piece).min(tokens.len()));
            let request = DraftRequest { request: 0, tokens: &tokens, shape };
            one.read(0, &tokens);
            let Some(mut other) = load()? else { break };
            let taken = other.unpack(0, &tokens, &one.pack(0));
            if !taken || one.draft(&request) != other.draft(&request) {
                failures.push(format!(
                    "prompt {index}, {shape}, {} tokens: a machine that has the tokens and what \
                     was packed drafts otherwise",
                    tokens.len()
                ));
                break;
            }
        }
    }
    Ok(failures)
}

/// What an algorithm may use that drafts for one text.
fn allowance(shape: Shape, longest: usize) -> Allowance {
    let level = shape.topk() * (shape.steps() + 1);
    let slots = longest + level * (shape.steps() + 1);
    Allowance {
        format: WeightFormat::Bf16,
        kv_dtype: KvDtype::F32,
        slots,
        positions: longest + shape.steps(),
        bounds: PlanBounds {
            rows: longest + level,
            outputs: level,
            slots: slots * MOST_DRAFT_GROUPS,
        },
        target_rows: longest,
        requests: 1,
        shape,
    }
}

/// What answers differ in where one engine processes prompts and another decodes, each in a
/// sentence; what was drafted is compared only where it is `invariant`.
pub(super) fn failures_of_answers(
    algorithms: &Algorithms,
    flags: &[&str],
    prompts: &[Vec<u32>],
    invariant: bool,
) -> Result<Vec<String>> {
    let engine = || -> Result<Scheduler> {
        let (model, engine) = parse(flags)?;
        Ok(build(&model, &engine, algorithms, true)?.engine)
    };
    let refused = |error: aquila_engine::SubmitError| Error::Other(error.to_string());
    let mut one = engine()?;
    let mut pair = EnginePair::new(engine()?, engine()?);
    let mut all = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let request = |heard: &Arc<Mutex<Heard>>| {
            let mut request = Request::new(prompt.clone(), TOKENS, Box::new(Ear(heard.clone())));
            request.logprobs = Some(0);
            if index % 2 == 1 {
                request.seeded = true;
                (request.sampling.temperature, request.sampling.seed) = (0.9, index as u64);
            }
            request
        };
        let (alone, across) = (Arc::default(), Arc::default());
        one.submit(request(&alone)).map_err(refused)?;
        pair.submit(request(&Arc::default()), request(&across)).map_err(refused)?;
        all.push((alone, across));
    }
    while !one.is_idle() {
        one.step();
    }
    let mut failures = Vec::new();
    while !pair.is_idle() {
        pair.step();
        if let Err(lost) = pair.prefill.check().and_then(|()| pair.decode.check()) {
            failures.push(format!("between two engines: {lost}"));
            break;
        }
    }
    for (index, (alone, across)) in all.into_iter().enumerate() {
        let (alone, across) = (Ear(alone), Ear(across));
        let (alone, across) = (alone.heard(), across.heard());
        if (&alone.tokens, &alone.ended) != (&across.tokens, &across.ended) {
            failures.push(format!("prompt {index}: two engines answer otherwise than one"));
        } else if invariant && alone.spec != across.spec {
            failures.push(format!(
                "prompt {index}: where another engine has processed the prompt, something else is \
                 drafted: {:?}, not {:?}",
                across.spec, alone.spec
            ));
        }
    }
    Ok(failures)
}
