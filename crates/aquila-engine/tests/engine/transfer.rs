//! Prompts that one engine processes and answers that another decodes: texts, verify counts and
//! histograms are those of one engine, whatever drafts, and no slot is lost on either side.

use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Arc, Condvar, Mutex};

use aquila_engine::{
    Alter, Claim, Delivery, EngineConfig, EngineHandle, EnginePair, FinishReason, HandOver, KvRows,
    Prefilled, Priorities, Request, RequestId, Source, Transfer,
};
use aquila_spec::policy::{Auto, AutoSettings, CostTable, Timed, Timing};
use aquila_spec::{Shape, Verify};

use crate::support::across::{
    across, counts, heard_across, pair, request, run_pair, some_prompts, unseeded,
};
use crate::support::answers::*;
use crate::support::learning::live_policies;
use crate::support::shipped::{config, inline};

const TARGET_ONLY: Verify = Verify::TargetOnly { single: 1.0, accumulated: 1.0 };

#[test]
fn answers_from_two_engines_equal_those_from_one() {
    let prompts = some_prompts(4);
    // A covering sample: every algorithm, chains and trees, verifications, ways to choose tokens,
    // pages on both sides, overlap on neither, either and both.
    let cases = [
        ("EAGLE3", Shape::chain(3), Verify::Match, greedy as Change, (1, 1), (false, false)),
        ("EAGLE3", shape(5, 4, 16), Verify::Match, unseeded, (16, 1), (false, true)),
        ("EAGLE3", shape(3, 4, 12), Verify::Rejection, hot, (64, 16), (false, false)),
        ("EAGLE3", Shape::chain(4), TARGET_ONLY, warm, (1, 64), (true, true)),
        ("EAGLE", Shape::chain(5), Verify::Match, penalized, (16, 16), (false, false)),
        ("EAGLE", shape(3, 2, 8), Verify::Rejection, unseeded, (1, 16), (true, false)),
        ("MTP", Shape::chain(3), Verify::Match, hot, (64, 64), (false, true)),
        ("MTP", shape(3, 4, 12), Verify::Rejection, warm, (16, 64), (false, false)),
        ("STANDALONE", Shape::chain(4), Verify::Rejection, hot, (1, 1), (true, true)),
        ("STANDALONE", shape(4, 4, 12), Verify::Match, greedy, (64, 1), (false, false)),
        ("NGRAM", shape(4, 2, 8), Verify::Match, warm, (16, 16), (false, true)),
        ("EAGLE3+NGRAM", shape(3, 4, 12), Verify::Match, penalized, (16, 1), (true, false)),
        ("STANDALONE+NGRAM", Shape::chain(3), TARGET_ONLY, unseeded, (1, 16), (false, false)),
        ("MTP+NGRAM", Shape::chain(3), Verify::Rejection, hot, (1, 1), (false, false)),
        ("NONE", Shape::PLAIN, Verify::Match, unseeded, (16, 64), (false, true)),
    ];
    for (name, shape, verify, change, pages, overlaps) in cases {
        let what = format!("{name}, {shape}, {verify}, pages {pages:?}, overlap {overlaps:?}");
        let base = EngineConfig { verify, ..config(shape) };
        let want = answers(&mut inline(name, base.clone()), &prompts, 32, change);
        let engine = |page_size, overlap| {
            let engine = inline(name, EngineConfig { page_size, ..base.clone() });
            if overlap {
                engine.overlapped().unwrap().with_output_thread().unwrap()
            } else {
                engine
            }
        };
        let (prefill, decode) = (engine(pages.0, overlaps.0), engine(pages.1, overlaps.1));
        let mut pair = EnginePair::new(prefill, decode);
        let got = across(&mut pair, &prompts, 32, change);
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "{what}: prompt {index}");
        }
        let (prefill, decode) = (counts(&pair.prefill), counts(&pair.decode));
        assert_eq!(prefill.handed_over, prompts.len() as u64, "{what}");
        assert_eq!(decode.received, prompts.len() as u64, "{what}");
        assert_eq!((decode.rebuilt_drafts, decode.lost_drafts), (0, 0), "{what}");
        assert_eq!(decode.prompt_tokens, 0, "{what}: the prompts were processed elsewhere");
        run_pair(&mut pair);
    }
}

#[test]
fn policies_that_learn_change_no_text_across_engines() {
    let prompts = some_prompts(5);
    let config = EngineConfig { parked_rows: 16, ..config(Shape::chain(7)) };
    let plain = answers(
        &mut inline("NONE", EngineConfig { shape: Shape::PLAIN, ..config.clone() }),
        &prompts,
        32,
        warm,
    );
    for name in ["EAGLE3", "STANDALONE+NGRAM"] {
        for policy in live_policies() {
            let what = format!("{name}, {}", policy.state().name);
            let mut pair = pair(name, config.clone(), config.clone());
            pair.decode.draft_by(policy).unwrap();
            assert_eq!(texts(&across(&mut pair, &prompts, 32, warm)), texts(&plain), "{what}");
            run_pair(&mut pair);
        }
    }
}

#[test]
fn a_policy_keeps_no_draft_from_prompts_of_others() {
    // Drafts cost so much that the policy would rather not have them read a prompt.
    let time = |timing| -> Result<Option<Timed>, ()> {
        Ok(Some(match timing {
            Timing::Round { batch, steps } => {
                Timed { rows: batch * (steps + 1), verify: 1e-3, draft: 1e-6 * steps as f64 }
            }
            Timing::DraftRow => Timed { rows: 0, verify: 0.0, draft: 1.0 },
        }))
    };
    let table = CostTable::measure("made up".into(), &[1, 8], 3, time).unwrap();
    let auto = || Box::new(Auto::new(AutoSettings::new(Shape::chain(3)), table.clone()));
    let config = EngineConfig { parked_rows: 64, ..config(Shape::chain(3)) };
    let prompts = some_prompts(8);
    let mut one = inline("EAGLE3", config.clone());
    one.draft_by(auto()).unwrap();
    let alone = answers(&mut one, &prompts, 24, greedy);
    assert!(alone.iter().all(|a| a.spec.proposed_drafts == 0), "the policy keeps drafts away");
    let mut pair = pair("EAGLE3", config.clone(), config);
    pair.prefill.draft_by(auto()).unwrap();
    let got = across(&mut pair, &prompts, 24, greedy);
    assert_eq!(texts(&got), texts(&alone));
    assert!(got.iter().any(|a| a.spec.correct_drafts > 0), "drafts were handed over: {got:?}");
    assert_eq!(counts(&pair.decode).lost_drafts, 0);
}

/// Counts the rows of the target that are delivered, by those of its first layer.
fn counting(rows: &Arc<AtomicUsize>) -> Alter {
    let rows = rows.clone();
    Box::new(move |_, delivery| {
        if let Delivery::Rows(piece) = &delivery
            && (piece.group, piece.layers.start) == (0, 0)
        {
            rows.fetch_add(piece.rows.len(), Relaxed);
        }
        vec![delivery]
    })
}

#[test]
fn cached_pages_of_a_decode_engine_are_not_sent() {
    let prompts = some_prompts(4);
    for (name, shape, page_size) in [
        ("EAGLE3", Shape::chain(3), 4),
        ("MTP", shape(3, 2, 8), 16),
        ("STANDALONE+NGRAM", shape(4, 4, 12), 1),
    ] {
        let config = EngineConfig { page_size, ..config(shape) };
        let want = answers(&mut inline(name, config.clone()), &prompts, 24, warm);
        let sent = Arc::new(AtomicUsize::new(0));
        let mut pair = pair(name, config.clone(), config).altered(counting(&sent));
        assert_eq!(across(&mut pair, &prompts, 24, warm), want, "{name}");
        let tokens: usize = prompts.iter().map(Vec::len).sum();
        let first = sent.swap(0, Relaxed);
        assert!(first <= tokens && first * 10 > tokens * 7, "{name}: {first} rows of {tokens}");
        assert_eq!(across(&mut pair, &prompts, 24, warm), want, "{name}: cached");
        let again = sent.swap(0, Relaxed);
        assert!(again * 3 < first, "{name}: {first} rows, then {again}");
        // The other engine has its prefixes too, though this one has lost them.
        pair.decode.flush_cache();
        let computed = counts(&pair.prefill).prompt_tokens;
        assert_eq!(across(&mut pair, &prompts, 24, warm), want, "{name}: cached there");
        assert!(sent.load(Relaxed) * 10 > first * 9, "{name}: all rows come again");
        let computed = (counts(&pair.prefill).prompt_tokens - computed) as usize;
        assert!(computed * 3 < tokens, "{name}: {computed} rows of {tokens} were computed");
        run_pair(&mut pair);
    }
}

#[test]
fn preemption_of_received_requests_changes_nothing() {
    let cut = |ids: Vec<u32>| ids[ids.len().saturating_sub(48)..].to_vec();
    let prompts: Vec<Vec<u32>> = some_prompts(3).into_iter().map(cut).collect();
    for (name, shape, change) in [
        ("EAGLE3", shape(4, 4, 12), warm as Change),
        ("MTP", Shape::chain(3), greedy),
        ("STANDALONE+NGRAM", Shape::chain(3), hot),
    ] {
        let roomy = config(shape);
        let want = answers(&mut inline(name, roomy.clone()), &prompts, 40, change);
        let small = EngineConfig { max_total_tokens: 260, ..roomy.clone() };
        let chunks = EngineConfig { chunked_prefill_size: 16, ..small.clone() };
        let mut pair = pair(name, chunks, small);
        assert_eq!(across(&mut pair, &prompts, 40, change), want, "{name}");
        assert!(counts(&pair.decode).preemptions > 0, "{name}: the pool was meant to be too small");
        run_pair(&mut pair);
    }
}

#[test]
fn a_prompt_preempted_in_its_middle_is_sent_once() {
    let mut prompts = some_prompts(1);
    prompts.sort_by_key(|prompt| std::cmp::Reverse(prompt.len()));
    prompts.truncate(2);
    fn with_priority(request: &mut Request, index: usize) {
        warm(request, index);
        request.priority = Some(10 * index as i64);
    }
    let config = EngineConfig { chunked_prefill_size: 16, ..config(shape(3, 2, 8)) };
    let want = answers(&mut inline("MTP", config.clone()), &prompts, 24, with_priority);
    let one_at_a_time = EngineConfig { max_running_requests: 1, ..config.clone() };
    let sent = Arc::new(AtomicUsize::new(0));
    let mut pair = pair("MTP", one_at_a_time, config).altered(counting(&sent));
    pair.prefill
        .prioritize(Priorities::Ranked { low_values_first: false, preemption_threshold: 1 });
    let mut all = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let (first, _) = request(prompt, 24, with_priority, index);
        let (second, heard) = request(prompt, 24, with_priority, index);
        pair.submit(first, second).unwrap();
        all.push(heard);
        // The first is in the middle of its prompt when the second comes.
        (0..4).for_each(|_| pair.step());
    }
    run_pair(&mut pair);
    assert!(counts(&pair.prefill).preemptions > 0, "the second was meant to go first");
    assert_eq!(sent.load(Relaxed), prompts.iter().map(Vec::len).sum::<usize>());
    for (heard, want) in all.iter().zip(&want) {
        let heard = heard.lock().unwrap();
        assert_eq!((heard.ids(), &heard.spec), (want.ids.clone(), &want.spec));
    }
}

#[test]
fn a_lost_draft_state_is_rebuilt_and_counted() {
    let prompts = some_prompts(5);
    let garbage: [fn(&mut Option<Vec<u8>>); 4] = [
        |draft| *draft = None,
        |draft| *draft = Some(vec![7; 40]),
        |draft| draft.as_mut().unwrap().truncate(30),
        |draft| draft.as_mut().unwrap()[0] = 99,
    ];
    for (name, shape, verify, change) in [
        ("EAGLE3", shape(4, 4, 12), Verify::Match, warm as Change),
        ("EAGLE", Shape::chain(3), Verify::Rejection, hot),
        ("MTP", shape(3, 2, 8), Verify::Match, greedy),
        ("STANDALONE", Shape::chain(4), TARGET_ONLY, hot),
        ("EAGLE3+NGRAM", Shape::chain(3), Verify::Match, greedy),
    ] {
        let config = EngineConfig { verify, page_size: 4, ..config(shape) };
        let want = answers(&mut inline(name, config.clone()), &prompts, 24, change);
        let alter: Alter = Box::new(move |number, mut delivery| {
            if let Delivery::Prefilled(prefilled) = &mut delivery {
                // Every other one is as it should be, and does not notice.
                if number % 2 == 0 {
                    garbage[number / 2 % garbage.len()](&mut prefilled.draft);
                }
            }
            vec![delivery]
        });
        let mut pair = pair(name, config.clone(), config).altered(alter);
        let got = across(&mut pair, &prompts, 24, change);
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            assert_eq!(got, want, "{name}, prompt {index}");
        }
        let rebuilt = counts(&pair.decode).rebuilt_drafts;
        assert_eq!(rebuilt, prompts.len().div_ceil(2) as u64, "{name}");
        run_pair(&mut pair);
    }
}

#[test]
fn without_rows_of_its_draft_a_request_is_plain_and_counted() {
    let prompts = some_prompts(6);
    let config = config(Shape::chain(3));
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 24, warm);
    let alter: Alter = Box::new(|number, mut delivery| {
        match &mut delivery {
            Delivery::Rows(rows) if number == 1 && rows.group > 0 => return Vec::new(),
            Delivery::Prefilled(prefilled) if number == 1 => prefilled.groups = 1,
            _ => (),
        }
        vec![delivery]
    });
    let mut pair = pair("EAGLE3", config.clone(), config).altered(alter);
    let got = across(&mut pair, &prompts, 24, warm);
    assert_eq!(texts(&got), texts(&want));
    for (index, (got, want)) in got.iter().zip(&want).enumerate() {
        assert_eq!(got.spec == want.spec, index != 1, "{index}: {:?}", got.spec);
        assert_eq!(got.spec.proposed_drafts == 0, index == 1, "{index}: {:?}", got.spec);
    }
    assert_eq!(counts(&pair.decode).lost_drafts, 1);
    run_pair(&mut pair);
}

#[test]
fn rows_that_never_come_end_their_request_alone() {
    let prompts = some_prompts(6);
    let config = config(Shape::chain(3));
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 24, warm);
    for (group, layer) in [(0, 0), (0, 5), (1, 0)] {
        let is_lost = move |rows: &KvRows| (rows.group, rows.layers.start) == (group, layer);
        let alter: Alter = Box::new(move |number, delivery| match &delivery {
            Delivery::Rows(rows) if number == 1 && is_lost(rows) => Vec::new(),
            _ => vec![delivery],
        });
        let mut pair = pair("EAGLE3", config.clone(), config.clone()).altered(alter);
        let got = heard_across(&mut pair, &prompts, 24, warm);
        for (index, ((_, got), want)) in got.iter().zip(&want).enumerate() {
            if index != 1 {
                assert_eq!(
                    Answer::of(got),
                    *want,
                    "layer {layer} of group {group}: prompt {index}"
                );
                continue;
            }
            let FinishReason::Abort(why) = got.reason() else { panic!("{got:?}") };
            assert!(why.contains("not all of its rows were sent"), "{why}");
        }
        run_pair(&mut pair);
    }
}

/// The rows of a layer, each of its own.
fn row_by_row(piece: &KvRows) -> Vec<KvRows> {
    let (keys, values) = piece.bytes.split_at(piece.bytes.len() / 2);
    let width = keys.len() / piece.rows.len();
    let halves = keys.chunks(width).zip(values.chunks(width));
    let one = |(row, (key, value)): (usize, (&[u8], &[u8]))| KvRows {
        rows: row..row + 1,
        bytes: [key, value].concat(),
        layers: piece.layers.clone(),
        ..*piece
    };
    piece.rows.clone().zip(halves).map(one).collect()
}

#[test]
fn rows_may_come_token_by_token_and_in_several_layers() {
    let prompts = some_prompts(8);
    let config = config(shape(3, 2, 8));
    for name in ["EAGLE3", "MTP"] {
        let want = answers(&mut inline(name, config.clone()), &prompts, 16, warm);
        let mut joined = HashMap::<usize, KvRows>::new();
        let alter: Alter = Box::new(move |number, delivery| {
            let Delivery::Rows(piece) = delivery else { return vec![delivery] };
            if number % 2 == 0 {
                return row_by_row(&piece).into_iter().map(Delivery::Rows).collect();
            }
            // The target's layers come two at a time.
            if piece.group > 0 {
                return vec![Delivery::Rows(piece)];
            }
            let Some(mut first) = joined.remove(&number) else {
                joined.insert(number, piece);
                return Vec::new();
            };
            assert_eq!((&first.rows, first.layers.end), (&piece.rows, piece.layers.start));
            first.layers.end = piece.layers.end;
            first.bytes.extend(piece.bytes);
            vec![Delivery::Rows(first)]
        });
        let mut pair = pair(name, config.clone(), config.clone()).altered(alter);
        assert_eq!(across(&mut pair, &prompts, 16, warm), want, "{name}");
    }
}

#[test]
fn rows_that_cannot_be_right_end_their_request_alone() {
    let prompts = some_prompts(8);
    let config = config(Shape::chain(3));
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 16, greedy);
    type Spoil = fn(&mut KvRows);
    let spoils: [(Spoil, &str); 6] = [
        (|rows| rows.group = 9, "there is no store 0 of group 9"),
        (|rows| rows.store = 3, "there is no store 3 of group"),
        (|rows| rows.layers.end = 77, "layers 0..77"),
        (|rows| rows.rows = 5..rows.rows.end + 5, "rows 5.."),
        (|rows| rows.rows.end += 1000, "rows 0.."),
        (|rows| rows.bytes.truncate(rows.bytes.len() - 1), "bytes of store 0 of group"),
    ];
    for (spoil, why) in spoils {
        let mut spoiled = false;
        let alter: Alter = Box::new(move |number, mut delivery| {
            if let Delivery::Rows(rows) = &mut delivery
                && number == 1
                && !std::mem::replace(&mut spoiled, true)
            {
                spoil(rows);
            }
            vec![delivery]
        });
        let mut pair = pair("EAGLE3", config.clone(), config.clone()).altered(alter);
        let got = across(&mut pair, &prompts, 16, greedy);
        for (index, (got, want)) in got.iter().zip(&want).enumerate() {
            if index != 1 {
                assert_eq!(got, want, "{why}: prompt {index}");
                continue;
            }
            let Some(FinishReason::Abort(said)) = &got.reason else { panic!("{got:?}") };
            assert!(said.contains(why), "{said:?}, not {why:?}");
        }
        run_pair(&mut pair);
    }
}

#[test]
fn answers_of_no_token_and_of_one_end_where_they_must() {
    let prompts = some_prompts(6);
    fn with_prompt_logprobs(request: &mut Request, _: usize) {
        request.prompt_logprobs = Some(2);
        request.logprobs = Some(3);
    }
    let config = config(Shape::chain(3));
    for tokens in [0, 1, 2, 9] {
        let mut one = inline("EAGLE3", config.clone());
        let submit = |prompt: &Vec<u32>| {
            let (request, heard) = request(prompt, tokens, with_prompt_logprobs, 0);
            one.submit(request).unwrap();
            heard
        };
        let all: Vec<_> = prompts.iter().map(submit).collect();
        crate::support::run(&mut one);
        let mut pair = pair("EAGLE3", config.clone(), config.clone());
        let got = heard_across(&mut pair, &prompts, tokens, with_prompt_logprobs);
        for ((processed, got), want) in got.iter().zip(&all) {
            let want = want.lock().unwrap();
            assert_eq!((&got.prompt, &got.tokens), (&want.prompt, &want.tokens), "{tokens}");
            assert_eq!(processed.prompt, want.prompt, "{tokens}");
            assert_eq!((got.reason(), &got.spec), (want.reason(), &want.spec), "{tokens}");
            assert_eq!(got.usage().completion_tokens, want.usage().completion_tokens);
        }
        run_pair(&mut pair);
    }
    // A first token that ends the text.
    fn ends_at_once(request: &mut Request, _: usize) {
        request.limits.stop_ids = (0..8192).collect();
    }
    let mut pair = pair("EAGLE3", config.clone(), config);
    for answer in across(&mut pair, &prompts, 16, ends_at_once) {
        assert!(matches!(answer.reason, Some(FinishReason::Stop(_))) && answer.ids.len() == 1);
    }
    run_pair(&mut pair);
}

#[test]
fn hidden_states_of_prompts_come_along() {
    let prompts = some_prompts(6);
    fn with_states(request: &mut Request, index: usize) {
        request.returned.hidden_states = true;
        request.returned_from = index % 3;
    }
    let mut config = EngineConfig { page_size: 4, ..config(Shape::chain(3)) };
    config.returned.hidden_states = true;
    let want = answers(&mut inline("EAGLE", config.clone()), &prompts, 16, with_states);
    assert!(want.iter().all(|answer| !answer.states.is_empty()));
    let mut pair = pair("EAGLE", config.clone(), config);
    assert_eq!(across(&mut pair, &prompts, 16, with_states), want);
    assert_eq!(across(&mut pair, &prompts, 16, with_states), want, "cached");
}

#[test]
fn several_answers_to_a_prompt_receive_it_once() {
    let prompt = some_prompts(1).into_iter().max_by_key(Vec::len).unwrap();
    let prompts = vec![prompt.clone(), prompt.clone(), prompt];
    fn family(request: &mut Request, index: usize) {
        unseeded(request, index);
        request.seeded = true;
        request.sampling.seed = 5;
        request.choice = index as u32;
        request.family = Some(1);
    }
    let config = EngineConfig { page_size: 4, ..config(Shape::chain(3)) };
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 24, family);
    let rows = Arc::new(AtomicUsize::new(0));
    let mut pair = pair("EAGLE3", config.clone(), config).altered(counting(&rows));
    assert_eq!(across(&mut pair, &prompts, 24, family), want);
    assert!(want[0].ids != want[1].ids, "choices differ");
    let (sent, prompt) = (rows.load(Relaxed), prompts[0].len());
    assert!(sent < prompt + 2 * 8, "{sent} rows of prompts of {prompt}");
}

#[test]
fn requests_given_up_on_either_side_leave_nothing_behind() {
    let prompts = some_prompts(4);
    let config = EngineConfig { chunked_prefill_size: 16, ..config(Shape::chain(3)) };
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 24, greedy);
    for aborted_after in 0..6 {
        let mut pair = pair("EAGLE3", config.clone(), config.clone());
        let mut all = Vec::new();
        for (index, prompt) in prompts.iter().enumerate() {
            let (first, _) = request(prompt, 24, greedy, index);
            let (second, heard) = request(prompt, 24, greedy, index);
            all.push((pair.submit(first, second).unwrap(), heard));
        }
        (0..aborted_after).for_each(|_| pair.step());
        for (index, ((prefill, decode), _)) in all.iter().enumerate() {
            match index % 3 {
                0 => drop(pair.prefill.abort(*prefill)),
                1 => drop(pair.decode.abort(*decode)),
                _ => (),
            }
        }
        run_pair(&mut pair);
        for (index, ((_, heard), want)) in all.iter().zip(&want).enumerate() {
            let heard = heard.lock().unwrap();
            match heard.reason() {
                FinishReason::Abort(_) => assert_ne!(index % 3, 2, "nobody gave it up"),
                _ => assert_eq!(heard.ids(), want.ids),
            }
            assert!(want.ids.starts_with(&heard.ids()));
        }
    }
}

#[test]
fn a_request_that_nobody_claims_waits_and_holds_nothing() {
    let mut pair = pair("EAGLE3", config(Shape::chain(3)), config(Shape::chain(3)));
    let (mut first, heard) = request(&[5, 6, 7], 8, greedy, 0);
    struct Nobody;
    impl HandOver for Nobody {
        fn rows(&self, _: KvRows) {
            panic!("nothing is sent unasked");
        }
        fn prefilled(&self, _: Prefilled) {
            panic!("nothing is processed unasked");
        }
        fn failed(&self, why: &str) {
            assert_eq!(why, "aborted");
        }
    }
    first.transfer = Transfer::HandOver(Arc::new(Nobody));
    let id = pair.prefill.submit(first).unwrap();
    let (other, answered) = request(&[5, 6, 7], 8, greedy, 0);
    pair.prefill.submit(other).unwrap();
    for _ in 0..20 {
        pair.prefill.step();
    }
    assert_eq!(answered.lock().unwrap().tokens.len(), 8, "others go on");
    assert_eq!(counts(&pair.prefill).used_slots, 0);
    assert!(heard.lock().unwrap().end.is_none());
    assert!(pair.prefill.abort(id));
    let claim = Claim { have: 0, seed: 0, candidates: 1 };
    assert!(!pair.prefill.claim(id, claim), "it is gone");
    assert_eq!(*heard.lock().unwrap().reason(), FinishReason::Abort("aborted".into()));
}

/// Gives what a prompt leaves to an engine on another thread, once the name there is known.
struct ToHandle {
    to: EngineHandle,
    name: Mutex<Option<RequestId>>,
    named: Condvar,
}

impl ToHandle {
    fn deliver(&self, delivery: Delivery) {
        let name = self.named.wait_while(self.name.lock().unwrap(), |name| name.is_none());
        self.to.deliver(name.unwrap().unwrap(), delivery);
    }
}

impl HandOver for ToHandle {
    fn rows(&self, rows: KvRows) {
        self.deliver(Delivery::Rows(rows));
    }

    fn prefilled(&self, prefilled: Prefilled) {
        self.deliver(Delivery::Prefilled(Box::new(prefilled)));
    }

    fn failed(&self, why: &str) {
        self.deliver(Delivery::Failed(why.into()));
    }
}

struct FromHandle(EngineHandle, RequestId);

impl Source for FromHandle {
    fn begin(&mut self, _: RequestId, claim: Claim) {
        self.0.claim(self.1, claim);
    }
}

#[test]
fn engines_on_threads_of_their_own_share_requests() {
    let prompts = some_prompts(4);
    let config = EngineConfig { page_size: 4, ..config(shape(3, 2, 8)) };
    let want = answers(&mut inline("EAGLE3", config.clone()), &prompts, 24, warm);
    let engine = || inline("EAGLE3", config.clone());
    let prefill = EngineHandle::start(engine()).unwrap();
    let decode = EngineHandle::start(engine().overlapped().unwrap()).unwrap();
    let mut all = Vec::new();
    for (index, prompt) in prompts.iter().enumerate() {
        let (mut first, _) = request(prompt, 24, warm, index);
        let (mut second, heard) = request(prompt, 24, warm, index);
        let (name, named) = (Mutex::default(), Condvar::new());
        let to = Arc::new(ToHandle { to: decode.clone(), name, named });
        first.transfer = Transfer::HandOver(to.clone());
        let id = prefill.submit(first).unwrap();
        second.transfer = Transfer::Receive(Box::new(FromHandle(prefill.clone(), id)));
        *to.name.lock().unwrap() = Some(decode.submit(second).unwrap());
        to.named.notify_all();
        all.push(heard);
    }
    // Neither stops before its requests have ended.
    prefill.drain();
    decode.drain();
    for (heard, want) in all.iter().zip(&want) {
        let heard = heard.lock().unwrap();
        assert_eq!((heard.ids(), &heard.spec), (want.ids.clone(), &want.spec));
    }
    assert_eq!(prefill.stats().snapshot().used_slots, 0);
    assert_eq!(decode.stats().snapshot().received, prompts.len() as u64);
}
