//! Two engines that differ, peers that err, and pools that are too small: texts are still those of
//! one engine, and what fails fails alone.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Mutex};

use aquila_compute::round::HostRows;
use aquila_engine::{
    Alter, Claim, Delivery, EngineConfig, FinishReason, HandOver, KvRows, Prefilled, Priorities,
    Request, RequestId, Source, TokenRows, Transfer,
};
use aquila_spec::{Shape, Verify};

use crate::support::across::{
    across, counts, heard_across, pair, request, run_pair, some_prompts, unseeded,
};
use crate::support::answers::*;
use crate::support::shipped::{config, inline};

#[test]
fn the_first_tree_has_the_candidates_that_it_needs() {
    let prompts = some_prompts(5);
    let (narrow, wide) = (Shape::chain(4), shape(4, 4, 12));
    for (name, prefill, decode, verify, change) in [
        ("EAGLE3", narrow, wide, Verify::Match, greedy as Change),
        ("EAGLE3", wide, narrow, Verify::Match, warm),
        ("EAGLE", narrow, wide, Verify::Rejection, hot),
        ("MTP", Shape::chain(3), shape(3, 4, 12), Verify::Match, hot),
        ("STANDALONE", shape(2, 2, 4), shape(5, 8, 24), Verify::Match, greedy),
        ("EAGLE3+NGRAM", narrow, wide, Verify::Match, greedy),
    ] {
        let config = |shape| EngineConfig { verify, ..config(shape) };
        let want = answers(&mut inline(name, config(decode)), &prompts, 24, change);
        let mut pair = pair(name, config(prefill), config(decode));
        let got = across(&mut pair, &prompts, 24, change);
        assert_eq!(got, want, "{name}: {prefill} for {decode}");
        assert_eq!(counts(&pair.decode).rebuilt_drafts, 0, "{name}");
        run_pair(&mut pair);
    }
}

/// Changes what is said of the request that it claims.
struct Claiming {
    inner: Arc<Mutex<Vec<(RequestId, Claim)>>>,
    candidates: usize,
}

impl Source for Claiming {
    fn begin(&mut self, request: RequestId, claim: Claim) {
        let claim = Claim { candidates: self.candidates, ..claim };
        self.inner.lock().unwrap().push((request, claim));
    }
}

/// Keeps what a prompt leaves.
#[derive(Default)]
struct Kept {
    deliveries: Mutex<Vec<Delivery>>,
    full: AtomicBool,
    /// Rows of the target's first layer.
    rows: AtomicUsize,
}

impl HandOver for Kept {
    fn has_room(&self) -> bool {
        !self.full.load(Relaxed)
    }

    fn rows(&self, rows: KvRows) {
        if (rows.group, rows.layers.start) == (0, 0) {
            self.rows.fetch_add(rows.rows.len(), Relaxed);
        }
        self.deliveries.lock().unwrap().push(Delivery::Rows(rows));
    }

    fn prefilled(&self, prefilled: Prefilled) {
        self.deliveries.lock().unwrap().push(Delivery::Prefilled(Box::new(prefilled)));
    }

    fn failed(&self, why: &str) {
        self.deliveries.lock().unwrap().push(Delivery::Failed(why.into()));
    }
}

#[test]
fn candidates_of_any_number_change_no_text() {
    let prompt = some_prompts(1).swap_remove(3);
    let config = config(shape(4, 4, 12));
    for verify in [Verify::Match, Verify::Rejection] {
        let config = EngineConfig { verify, ..config.clone() };
        let want = answers(
            &mut inline("EAGLE3", config.clone()),
            std::slice::from_ref(&prompt),
            24,
            greedy,
        );
        for candidates in [0, 1, 2, 64, usize::MAX] {
            let mut prefill = inline("EAGLE3", config.clone());
            let mut decode = inline("EAGLE3", config.clone());
            let (kept, claims) = (Arc::new(Kept::default()), Arc::default());
            let (mut first, _) = request(&prompt, 24, greedy, 0);
            first.transfer = Transfer::HandOver(kept.clone());
            let (mut second, heard) = request(&prompt, 24, greedy, 0);
            let source = Claiming { inner: Arc::clone(&claims), candidates };
            second.transfer = Transfer::Receive(Box::new(source));
            let (there, _) = (prefill.submit(first).unwrap(), decode.submit(second).unwrap());
            decode.step();
            let [(here, claim)] = claims.lock().unwrap()[..] else { panic!("it is claimed once") };
            assert!(prefill.claim(there, claim));
            crate::support::run(&mut prefill);
            for delivery in kept.deliveries.lock().unwrap().drain(..) {
                assert!(decode.deliver(here, delivery));
            }
            crate::support::run(&mut decode);
            let got = Answer::of(&heard.lock().unwrap());
            assert_eq!(texts(&[got]), texts(&want), "{verify}, {candidates} candidates");
            assert_eq!(counts(&decode).rebuilt_drafts, 0, "{candidates} candidates");
        }
    }
}

#[test]
fn what_cannot_be_right_beside_rows_ends_its_request_alone() {
    fn with_all(request: &mut Request, _: usize) {
        request.returned.hidden_states = true;
        request.returned_from = 1;
        request.prompt_logprobs = Some(1);
    }
    let prompts = some_prompts(8);
    let mut config = config(Shape::chain(3));
    config.returned.hidden_states = true;
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 16, with_all);
    type Spoil = fn(&mut Prefilled);
    let spoils: [(Spoil, &str); 7] = [
        (|p| p.rows.hidden_states.values.truncate(7), "values of hidden states"),
        (|p| p.rows.hidden_states.values.extend([0.0; 900]), "values of hidden states"),
        (|p| p.rows.hidden_states.width += 1, "values of hidden states"),
        (|p| p.rows.routed_experts.values.push(3), "values of routed experts"),
        (|p| drop(p.prompt.pop()), "log-probabilities of another prompt"),
        (|p| p.prompt[0].id += 1, "log-probabilities of another prompt"),
        (|p| p.tokens[0].id = u32::MAX, "the first token is none"),
    ];
    for (spoil, why) in spoils {
        let alter: Alter = Box::new(move |number, mut delivery| {
            if let Delivery::Prefilled(prefilled) = &mut delivery
                && number == 1
            {
                spoil(prefilled);
            }
            vec![delivery]
        });
        let mut pair = pair("EAGLE3", config.clone(), config.clone()).altered(alter);
        let mut all = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let (first, _) = request(prompt, 16, with_all, index);
            let (second, heard) = request(prompt, 16, with_all, index);
            pair.submit(first, second).unwrap();
            all.push(heard);
        }
        run_pair(&mut pair);
        for (index, (heard, want)) in all.iter().zip(&want).enumerate() {
            let heard = heard.lock().unwrap();
            if index != 1 {
                assert_eq!(Answer::of(&heard), *want, "{why}: prompt {index}");
                continue;
            }
            let FinishReason::Abort(said) = heard.reason() else { panic!("{heard:?}") };
            assert!(said.contains(why), "{said:?}, not {why:?}");
        }
    }
}

#[test]
fn a_received_request_is_preempted_first_and_keeps_its_seed() {
    let prompts: Vec<Vec<u32>> = (0..3).map(|at| vec![40 + at; 30]).collect();
    // What is there suffices for the prompts, and not for the answers.
    let small = EngineConfig { max_total_tokens: 150, ..config(Shape::chain(3)) };
    fn ignoring_ends(request: &mut Request, index: usize) {
        unseeded(request, index);
        request.limits.stop_ids.clear();
    }
    fn urgent_last(request: &mut Request, index: usize) {
        ignoring_ends(request, index);
        request.priority = Some(index as i64);
    }
    let roomy = config(Shape::chain(3));
    let want = answers(&mut inline("EAGLE3", roomy), &prompts, 60, ignoring_ends);
    for (change, left) in [(ignoring_ends as Change, 0), (urgent_last, 1)] {
        // The rows of the last one never come.
        let alter: Alter =
            Box::new(|number, delivery| if number == 2 { Vec::new() } else { vec![delivery] });
        let mut pair = pair("EAGLE3", small.clone(), small.clone()).altered(alter);
        for engine in [&mut pair.prefill, &mut pair.decode] {
            engine.prioritize(Priorities::Ranked {
                low_values_first: false,
                preemption_threshold: 10,
            });
        }
        // The numbers of requests differ, so each engine would derive seeds of its own.
        pair.prefill.submit(request(&[5], 1, greedy, 0).0).unwrap();
        let mut all = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let (first, _) = request(prompt, 60, change, index);
            let (second, heard) = request(prompt, 60, change, index);
            all.push((pair.submit(first, second).unwrap(), heard));
        }
        let mut steps = 0;
        while counts(&pair.decode).preemptions == 0 {
            pair.step();
            steps += 1;
            assert!(steps < 1000, "the pool was meant to be too small");
        }
        assert_eq!(counts(&pair.decode).receiving, left, "requests that are still received");
        // The first two end in any case; a request whose rows do not come waits, unless it has lost
        // its slots.
        let ended = |index: usize| all[index].1.lock().unwrap().end.is_some();
        while !(ended(0) && ended(1)) {
            pair.step();
            steps += 1;
            assert!(steps < 1000, "they should have ended");
        }
        if left > 0 {
            pair.decode.abort(all[2].0.1);
        }
        run_pair(&mut pair);
        for (index, ((_, heard), want)) in all.iter().zip(&want).enumerate() {
            let heard = heard.lock().unwrap();
            match heard.reason() {
                FinishReason::Abort(_) => assert_eq!((index, left), (2, 1)),
                _ => assert_eq!(heard.ids(), want.ids, "request {index}"),
            }
        }
    }
}

#[test]
fn a_prompt_waits_while_its_rows_cannot_be_sent() {
    let mut prompts = some_prompts(1);
    prompts.sort_by_key(Vec::len);
    let long = prompts.pop().unwrap();
    assert!(long.len() > 64);
    let mut engine =
        inline("EAGLE3", EngineConfig { chunked_prefill_size: 16, ..config(Shape::chain(3)) });
    let kept = Arc::new(Kept::default());
    let (mut first, _) = request(&long, 8, greedy, 0);
    first.transfer = Transfer::HandOver(kept.clone());
    let id = engine.submit(first).unwrap();
    assert!(engine.claim(id, Claim { have: 0, seed: 0, candidates: 1 }));
    engine.step();
    engine.step();
    let sent = kept.rows.load(Relaxed);
    assert!(sent > 0 && sent < long.len(), "{sent} rows were sent");
    kept.full.store(true, Relaxed);
    let (other, answered) = request(&[5, 6, 7], 8, greedy, 0);
    engine.submit(other).unwrap();
    for _ in 0..20 {
        engine.step();
    }
    assert_eq!(answered.lock().unwrap().tokens.len(), 8, "others go on");
    assert_eq!(kept.rows.load(Relaxed), sent, "nothing more was processed");
    kept.full.store(false, Relaxed);
    crate::support::run(&mut engine);
    assert_eq!(kept.rows.load(Relaxed), long.len());
    let deliveries = kept.deliveries.lock().unwrap();
    assert!(matches!(deliveries.last(), Some(Delivery::Prefilled(_))));
}

#[test]
fn engines_without_requests_have_nothing_to_do() {
    let mut pair = pair("EAGLE3", config(Shape::chain(3)), config(Shape::chain(3)));
    let idle = |pair: &mut aquila_engine::EnginePair| {
        (0..3).for_each(|_| pair.step());
        assert!(pair.is_idle() && !pair.prefill.step() && !pair.decode.step());
        assert!(!pair.decode.deliver(RequestId(9), Delivery::Failed("none".into())));
    };
    idle(&mut pair);
    let prompts = some_prompts(8);
    let want = answers(&mut inline("EAGLE3", config(Shape::chain(3))), &prompts, 8, warm);
    assert_eq!(across(&mut pair, &prompts, 8, warm), want);
    idle(&mut pair);
}

#[test]
fn rows_beyond_what_is_reserved_end_their_request_alone() {
    // Slots of two prompts in pages of one token, with nothing behind them.
    let prompts = [vec![40; 30], vec![41; 30]];
    let config = config(Shape::chain(3));
    assert_eq!(config.page_size, 1);
    let want = answers(&mut inline("STANDALONE", config.clone()), &prompts, 16, greedy);
    // Its rows come some rounds before anything else does.
    let alter: Alter = Box::new(|number, delivery| match &delivery {
        Delivery::Prefilled(_) if number == 0 => Vec::new(),
        _ => vec![delivery],
    });
    let mut pair = pair("STANDALONE", config.clone(), config).altered(alter);
    let mut all = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let (first, _) = request(prompt, 16, greedy, index);
        // The first one wants no answer of the engine that decodes, where the other gives one.
        let wanted = if index == 0 { 0 } else { 16 };
        let (second, heard) = request(prompt, wanted, greedy, index);
        pair.submit(first, second).unwrap();
        all.push(heard);
    }
    run_pair(&mut pair);
    let refused = all[0].lock().unwrap();
    let FinishReason::Abort(why) = refused.reason() else { panic!("{refused:?}") };
    assert!(why.contains("rows 0..31 of store 0 of group 1, not of 0..30"), "{why}");
    assert_eq!(Answer::of(&all[1].lock().unwrap()), want[1]);
}

#[test]
fn rows_of_tokens_may_come_in_pieces() {
    fn with_states(request: &mut Request, _: usize) {
        request.returned.hidden_states = true;
        request.returned_from = 1;
    }
    let prompts = some_prompts(8);
    let mut config = config(Shape::chain(3));
    config.returned.hidden_states = true;
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 16, with_states);
    for too_many in [false, true] {
        let alter: Alter = Box::new(move |number, mut delivery| {
            let Delivery::Prefilled(prefilled) = &mut delivery else { return vec![delivery] };
            let states = std::mem::take(&mut prefilled.rows.hidden_states);
            let piece = |row: &[f32]| {
                let hidden_states = HostRows { width: states.width, values: row.to_vec() };
                Delivery::Returned(TokenRows { hidden_states, ..TokenRows::default() })
            };
            let mut all: Vec<Delivery> = states.rows().map(piece).collect();
            if too_many && number == 0 {
                all.extend(states.rows().next().map(piece));
            }
            all.push(delivery);
            all
        });
        let mut pair = pair("EAGLE3", config.clone(), config.clone()).altered(alter);
        let got = heard_across(&mut pair, &prompts, 16, with_states);
        for (index, ((_, got), want)) in got.iter().zip(&want).enumerate() {
            if !too_many || index != 0 {
                assert_eq!(Answer::of(got), *want, "prompt {index}");
                continue;
            }
            let FinishReason::Abort(why) = got.reason() else { panic!("{got:?}") };
            assert!(why.contains("values of hidden states"), "{why}");
        }
        run_pair(&mut pair);
    }
}
