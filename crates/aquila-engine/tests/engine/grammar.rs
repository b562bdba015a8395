//! Answers that keep to a grammar: the same with drafts as without, whatever else is going on.

use std::sync::Arc;

use aquila_compute::round::{RateSchedule, Simulate};
use aquila_engine::{EngineConfig, EnginePair, FinishReason, Request, StopCause, SubmitError};
use aquila_spec::{Shape, Verify};

use crate::support::across::across;
use crate::support::answers::*;
use crate::support::parity::{Parity, keeps_to};
use crate::support::shipped::{config, inline, named};

const TARGET_ONLY: Verify = Verify::TargetOnly { single: 1.0, accumulated: 1.0 };
fn held_by(request: &mut Request, rule: Parity) {
    request.grammar = Some(Arc::new(rule));
}

fn some_prompts() -> Vec<Vec<u32>> {
    prompts().into_iter().map(|(_, ids)| ids).step_by(5).collect()
}

const CASES: [(&str, (usize, usize, usize), Verify); 15] = [
    ("EAGLE3", (3, 1, 4), Verify::Match),
    ("EAGLE3", (5, 4, 16), Verify::Match),
    ("EAGLE3", (3, 4, 12), Verify::Match),
    ("EAGLE", (3, 2, 8), Verify::Rejection),
    ("EAGLE3", (3, 4, 12), Verify::Rejection),
    ("STANDALONE", (4, 4, 12), Verify::Rejection),
    ("MTP+NGRAM", (3, 1, 4), TARGET_ONLY),
    ("EAGLE3", (4, 1, 5), TARGET_ONLY),
    ("STANDALONE", (4, 1, 5), TARGET_ONLY),
    ("EAGLE", (3, 1, 4), Verify::Match),
    ("MTP", (3, 4, 12), Verify::Match),
    ("STANDALONE", (4, 1, 5), Verify::Match),
    ("NGRAM", (4, 2, 8), Verify::Match),
    ("EAGLE3+NGRAM", (3, 4, 12), Verify::Match),
    // Deeper than it has nodes.
    ("EAGLE3", (5, 4, 4), Verify::Match),
];

fn plain_answers(change: Change) -> Vec<Answer> {
    answers(&mut inline("NONE", config(Shape::PLAIN)), &some_prompts(), 40, change)
}

#[test]
fn answers_keep_to_the_grammar_and_equal_those_without_drafts() {
    let ways: [(Change, bool); 3] = [
        (|request, _| held_by(request, Parity::default()), true),
        (
            |request, index| {
                warm(request, index);
                held_by(request, Parity::default());
            },
            false,
        ),
        (
            |request, index| {
                penalized(request, index);
                held_by(request, Parity { length: 21 + index, ..Parity::default() });
            },
            true,
        ),
    ];
    let plain = ways.map(|(change, _)| plain_answers(change));
    assert!(plain.iter().flatten().all(|answer| keeps_to(Parity::default(), answer)));
    // A covering sample: every algorithm, and every verification with every way to choose tokens.
    for (at, (name, (steps, topk, nodes), verify)) in CASES.into_iter().enumerate() {
        let ((change, is_greedy), want) = (ways[at % 3], &plain[at % 3]);
        let config = EngineConfig { verify, ..config(shape(steps, topk, nodes)) };
        let got = answers(&mut named(name, config), &some_prompts(), 40, change);
        let what = format!("{name}, {steps}/{topk}/{nodes}, {verify}");
        assert!(got.iter().all(|answer| keeps_to(Parity::default(), answer)), "{what}");
        // Other verifications draw other samples of the same distribution.
        if verify == Verify::Match || is_greedy {
            assert_eq!(texts(&got), texts(want), "{what}");
        }
    }
}

#[test]
fn an_answer_ends_with_the_token_that_completes_it() {
    for length in [1, 2, 3, 5, 8, 12] {
        let rule = Parity { length, ..Parity::default() };
        let mut engine = named("EAGLE3", config(shape(5, 4, 16)));
        let got = answers_with(&mut engine, rule);
        for answer in got {
            assert_eq!(answer.ids.len(), length, "nothing follows");
            assert_eq!(answer.reason, Some(FinishReason::Stop(StopCause::Grammar)));
            assert_eq!(answer.logprobs.len(), length);
        }
    }
}

/// Answers of requests that are all held by `rule`.
fn answers_with(engine: &mut aquila_engine::Scheduler, rule: Parity) -> Vec<Answer> {
    answers(engine, &some_prompts(), 40, |request, _| held_by(request, rule))
}

#[test]
fn tokens_that_must_follow_are_drafted_without_a_draft_model() {
    // Nothing in these texts repeats, so n-grams have nothing to propose.
    let config = || config(shape(4, 1, 5));
    let knows = answers_with(&mut inline("NGRAM", config()), Parity::default());
    let blind = Parity { guides_drafts: false, ..Parity::default() };
    let does_not = answers_with(&mut inline("NGRAM", config()), blind);
    assert_eq!(texts(&knows), texts(&does_not));
    let rounds = |answers: &[Answer]| answers.iter().map(|a| a.spec.verify_ct).sum::<u64>();
    assert!(rounds(&knows) < rounds(&does_not), "{} rounds, {}", rounds(&knows), rounds(&does_not));
}

#[test]
fn drafts_that_know_the_grammar_are_right_more_often() {
    for name in ["EAGLE3", "EAGLE", "MTP", "STANDALONE"] {
        let config = || config(shape(3, 2, 6));
        let knows = answers_with(&mut named(name, config()), Parity::default());
        let blind = Parity { guides_drafts: false, ..Parity::default() };
        let does_not = answers_with(&mut named(name, config()), blind);
        assert_eq!(texts(&knows), texts(&does_not), "{name}");
        let rounds = |answers: &[Answer]| answers.iter().map(|a| a.spec.verify_ct).sum::<u64>();
        assert!(rounds(&knows) < rounds(&does_not), "{name}");
    }
}

#[test]
fn a_grammar_that_fails_ends_its_request_alone() {
    let prompts = some_prompts();
    for place in [0, 5, 12] {
        let change = move |request: &mut Request, index: usize| {
            let fails_at = index.is_multiple_of(2).then_some(place);
            held_by(request, Parity { fails_at, ..Parity::default() });
        };
        let plain = answers(&mut inline("NONE", config(Shape::PLAIN)), &prompts, 30, change);
        for name in ["EAGLE3", "NGRAM"] {
            let mut engine = named(name, config(shape(4, 2, 8)));
            let got = answers(&mut engine, &prompts, 30, change);
            assert_eq!(texts(&got), texts(&plain), "{name}");
        }
        for (index, answer) in plain.iter().enumerate() {
            let failed = matches!(answer.reason, Some(FinishReason::GrammarFailed(_)));
            assert_eq!(failed, index.is_multiple_of(2), "{:?}", answer.reason);
            assert!(!failed || answer.ids.len() == place);
        }
    }
}

#[test]
fn a_preempted_request_goes_on_within_its_grammar() {
    let want = answers_with(&mut inline("NONE", config(Shape::PLAIN)), Parity::default());
    for name in ["NONE", "EAGLE3", "NGRAM"] {
        let shape = if name == "NONE" { Shape::PLAIN } else { Shape::chain(3) };
        let small = EngineConfig { max_total_tokens: 420, context_length: 400, ..config(shape) };
        let mut engine = named(name, small);
        let got = answers_with(&mut engine, Parity::default());
        assert_eq!(texts(&got), texts(&want), "{name}");
        assert!(engine.stats().snapshot().preemptions > 0, "{name}: nothing was preempted");
    }
}

#[test]
fn a_grammar_holds_across_two_engines() {
    let prompts = some_prompts();
    let change: Change = |request, index| {
        held_by(request, Parity { length: 1 + 4 * index, ..Parity::default() });
    };
    for name in ["NONE", "EAGLE3", "MTP"] {
        let shape = if name == "NONE" { Shape::PLAIN } else { Shape::chain(3) };
        let want = answers(&mut inline(name, config(shape)), &prompts, 30, change);
        let mut pair = EnginePair::new(inline(name, config(shape)), inline(name, config(shape)));
        assert_eq!(across(&mut pair, &prompts, 30, change), want, "{name}");
    }
}

#[test]
fn grammars_are_refused_where_acceptance_is_simulated() {
    let simulate = Some(Simulate::Rate(RateSchedule { rates: vec![(0.5, 1)] }));
    let mut engine = inline("EAGLE3", EngineConfig { simulate, ..config(Shape::chain(3)) });
    let listener = crate::support::Notes { heard: Arc::default(), stop_after: None };
    let mut request = Request::new(vec![5, 6], 4, Box::new(listener));
    held_by(&mut request, Parity::default());
    assert_eq!(engine.submit(request), Err(SubmitError::NoGrammars));
}
