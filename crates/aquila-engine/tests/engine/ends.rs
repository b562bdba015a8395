//! Where texts end under speculation: inside an accepted run as anywhere else, they end exactly
//! where plain decoding ends them, with the same log-probabilities.

use std::sync::{Arc, Mutex};

use aquila_engine::{FinishReason, Request, Scheduler, StopCause, Token};
use aquila_spec::Shape;

use crate::support::answers::{Change, greedy, hot, penalized, prompts, shape, warm};
use crate::support::shipped::{Algorithm, config, engine};
use crate::support::{Heard, Notes, run};

/// What ends a request.
#[derive(Debug, Clone)]
enum Ending {
    MaxTokens(usize),
    /// One of these tokens, within 24.
    StopIds(Vec<u32>),
    /// A listener, as for a stop string, within 24.
    Listener(usize),
}

/// Runs all requests at once; answers what each heard.
fn heard(engine: &mut Scheduler, requests: &[(Vec<u32>, Ending)], change: Change) -> Vec<Heard> {
    let submit = |(index, (prompt, ending)): (usize, &(Vec<u32>, Ending))| {
        let heard = Arc::new(Mutex::new(Heard::default()));
        let stop_after = match ending {
            Ending::Listener(tokens) => Some(*tokens),
            _ => None,
        };
        let listener = Box::new(Notes { heard: heard.clone(), stop_after });
        let mut request = Request::new(prompt.clone(), 24, listener);
        request.logprobs = Some(3);
        match ending {
            Ending::MaxTokens(tokens) => request.limits.max_tokens = *tokens,
            Ending::StopIds(ids) => request.limits.stop_ids = ids.clone(),
            Ending::Listener(_) => (),
        }
        change(&mut request, index);
        engine.submit(request).unwrap();
        heard
    };
    let all: Vec<_> = requests.iter().enumerate().map(submit).collect();
    run(engine);
    all.into_iter().map(|heard| heard.lock().unwrap().clone()).collect()
}

/// What a user sees: the tokens with all that was asked about them, and why they ended; how they
/// came apart.
fn seen(heard: &[Heard]) -> Vec<(Vec<Token>, FinishReason, usize)> {
    let plain = |token: &Token| Token { drafted: None, ..token.clone() };
    let seen = |h: &Heard| {
        let tokens = h.tokens.iter().map(plain).collect();
        (tokens, h.reason().clone(), h.usage().completion_tokens)
    };
    heard.iter().map(seen).collect()
}

fn plain() -> Scheduler {
    engine(Algorithm::None, config(Shape::PLAIN))
}

const DRAFTS: [(Algorithm, (usize, usize, usize)); 4] = [
    (Algorithm::Eagle3, (5, 1, 6)),
    (Algorithm::Eagle3, (4, 4, 12)),
    (Algorithm::Standalone, (5, 1, 6)),
    (Algorithm::Standalone, (4, 4, 12)),
];

#[test]
fn texts_end_where_plain_decoding_ends_them() {
    // Every request draws the same noise wherever it stands in the list.
    fn sampled(request: &mut Request, _: usize) {
        warm(request, 11);
    }
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(30).map(|(_, ids)| ids).collect();
    for change in [greedy as Change, sampled] {
        let free: Vec<_> = prompts.iter().map(|p| (p.clone(), Ending::MaxTokens(24))).collect();
        let texts = heard(&mut plain(), &free, change);
        let mut requests = Vec::new();
        let mut wanted = Vec::new();
        for (prompt, text) in prompts.iter().zip(&texts) {
            for length in [1, 2, 3, 4, 5, 7, 12, 20] {
                let stop = text.tokens[length - 1].id;
                let first = text.tokens.iter().position(|token| token.id == stop).unwrap() + 1;
                let cause = |cause| FinishReason::Stop(cause);
                for (ending, end, reason) in [
                    (Ending::MaxTokens(length), length, FinishReason::Length),
                    (Ending::StopIds(vec![stop]), first, cause(StopCause::Token(stop))),
                    (Ending::Listener(length), length, cause(StopCause::Listener)),
                ] {
                    requests.push((prompt.clone(), ending));
                    wanted.push((text.tokens[..end].to_vec(), reason, end));
                }
            }
        }
        assert_eq!(seen(&heard(&mut plain(), &requests, change)), wanted);
        for (algorithm, (steps, topk, nodes)) in DRAFTS {
            let shape = shape(steps, topk, nodes);
            let mut engine = engine(algorithm, config(shape));
            let got = seen(&heard(&mut engine, &requests, change));
            for (at, (got, wanted)) in got.iter().zip(&wanted).enumerate() {
                assert_eq!(got, wanted, "{algorithm:?}, {shape}, {:?}", requests[at].1);
            }
            // The ends lay inside of accepted runs, not only between rounds.
            let runs = heard(&mut engine, &free, change);
            assert!(runs.iter().any(|h| h.runs.iter().any(|&run| run > 2)), "{algorithm:?}");
        }
    }
}

#[test]
fn texts_that_end_by_themselves_end_where_plain_texts_do() {
    fn ends(request: &mut Request, _: usize) {
        request.limits.stop_ids = vec![0, 2];
        request.limits.max_tokens = 160;
    }
    let math = prompts().into_iter().filter(|(kind, _)| kind == "math");
    let requests: Vec<_> = math.step_by(2).map(|(_, ids)| (ids, Ending::MaxTokens(160))).collect();
    let want = heard(&mut plain(), &requests, ends);
    let ended = |h: &&Heard| matches!(h.reason(), FinishReason::Stop(StopCause::Token(_)));
    assert!(want.iter().filter(ended).count() >= 3, "some of the texts come to an end");
    for (algorithm, (steps, topk, nodes)) in DRAFTS {
        let shape = shape(steps, topk, nodes);
        let got = heard(&mut engine(algorithm, config(shape)), &requests, ends);
        assert_eq!(seen(&got), seen(&want), "{algorithm:?}, {shape}");
    }
}

#[test]
fn accepted_tokens_have_the_log_probabilities_of_plain_decoding() {
    let prompts = prompts().into_iter().step_by(6);
    let requests: Vec<_> = prompts.map(|(_, ids)| (ids, Ending::MaxTokens(32))).collect();
    for change in [greedy as Change, hot, penalized] {
        let want = heard(&mut plain(), &requests, change);
        assert!(
            want.iter().flat_map(|h| &h.tokens).all(|t| t.logprob.is_some() && t.top.len() == 3)
        );
        for (algorithm, (steps, topk, nodes)) in DRAFTS {
            let shape = shape(steps, topk, nodes);
            let got = heard(&mut engine(algorithm, config(shape)), &requests, change);
            assert_eq!(seen(&got), seen(&want), "{algorithm:?}, {shape}");
            assert!(got.iter().any(|h| h.spec.correct_drafts > 0), "{algorithm:?}, {shape}");
        }
    }
}
