//! N-grams and a model that draft together: invisible in the output, invariant in the scope of a
//! request, and no worse than the better of them alone.

use std::collections::BTreeMap;

use aquila_engine::EngineConfig;
use aquila_spec::{Shape, Verify};

use crate::support::answers::*;
use crate::support::shipped::{Algorithm, config, engine, named};

#[test]
fn mixes_are_invisible_in_the_output() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    let modes: [Change; 4] = [greedy, warm, hot, penalized];
    let plain = modes.map(|mode| {
        answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 32, mode)
    });
    let cases = [
        ("standalone+ngram", Shape::chain(3), 1, 8, 0),
        ("STANDALONE+NGRAM", shape(5, 4, 16), 16, 3, 1),
        ("Eagle3+Ngram", Shape::chain(5), 4, 1, 2),
        ("EAGLE3+NGRAM", shape(3, 4, 12), 16, 8, 3),
        ("MTP+NGRAM", Shape::chain(3), 4, 8, 0),
        ("NEXTN+NGRAM", shape(3, 2, 8), 1, 3, 2),
        ("EAGLE+NGRAM", Shape::chain(2), 4, 3, 1),
    ];
    for (name, shape, page_size, batch, mode) in cases {
        let config = EngineConfig { page_size, max_running_requests: batch, ..config(shape) };
        let mut engine = named(name, config);
        let got = answers(&mut engine, &prompts, 32, modes[mode]);
        assert_eq!(texts(&got), texts(&plain[mode]), "{name}, {shape}, mode {mode}");
        assert!(got.iter().any(|answer| answer.spec.correct_drafts > 0), "{name}, {shape}");
    }
}

#[test]
fn drafts_do_not_depend_on_other_requests_or_memory() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    for (name, shape, mode) in [
        ("STANDALONE+NGRAM", Shape::chain(3), greedy as Change),
        ("EAGLE3+NGRAM", shape(3, 4, 12), hot),
    ] {
        let base =
            EngineConfig { max_running_requests: 1, chunked_prefill_size: 2048, ..config(shape) };
        let want = answers(&mut named(name, base.clone()), &prompts, 40, mode);
        let variants = [
            ("batch 8", EngineConfig { max_running_requests: 8, ..base.clone() }),
            ("pages of 16", EngineConfig { page_size: 16, ..base.clone() }),
            ("chunks of 4", EngineConfig { chunked_prefill_size: 4, ..base.clone() }),
        ];
        for (what, config) in variants {
            let got = answers(&mut named(name, config), &prompts, 40, mode);
            assert_eq!(got, want, "{name}: {what}");
        }
        let mut again = named(name, EngineConfig { page_size: 4, ..base.clone() });
        answers(&mut again, &prompts, 40, mode);
        assert_eq!(answers(&mut again, &prompts, 40, mode), want, "{name}: prefixes in the cache");
        let small = EngineConfig { max_running_requests: 8, max_total_tokens: 430, ..base };
        let mut crowded = named(name, small);
        let got = answers(&mut crowded, &prompts, 40, mode);
        assert_eq!(got, want, "{name}: a pool that is too small");
        assert!(crowded.stats().snapshot().preemptions > 0, "the pool was meant to be too small");
    }
}

#[test]
fn sampled_drafts_mix_with_n_grams() {
    let prompts: Vec<Vec<u32>> = prompts().into_iter().step_by(4).map(|(_, ids)| ids).collect();
    for (name, shape) in [("STANDALONE+NGRAM", Shape::chain(3)), ("EAGLE3+NGRAM", shape(3, 4, 12))]
    {
        let base = EngineConfig { verify: Verify::Rejection, ..config(shape) };
        let alone = EngineConfig { max_running_requests: 1, ..base.clone() };
        let want = answers(&mut named(name, alone), &prompts, 40, hot);
        let got = answers(&mut named(name, base), &prompts, 40, hot);
        assert_eq!(got, want, "{name}: a seeded run repeats at any batch");
        let drafts: u64 = want.iter().map(|answer| answer.spec.correct_drafts).sum();
        assert!(drafts > 40, "{name}: {drafts}");
    }
}

/// Tokens per verification by kind of prompt, counted as the acceptance tables are.
fn acceptance(name: &str, shape: Shape, tokens: usize, mode: Change) -> BTreeMap<String, f64> {
    let prompts = prompts();
    let config =
        EngineConfig { max_running_requests: 30, max_total_tokens: 40_000, ..config(shape) };
    let ids: Vec<Vec<u32>> = prompts.iter().map(|(_, ids)| ids.clone()).collect();
    let heard = answers(&mut named(name, config), &ids, tokens, mode);
    let mut sums: BTreeMap<String, (u64, u64)> = BTreeMap::new();
    for ((kind, _), heard) in prompts.iter().zip(&heard).filter(|(_, h)| h.ids.len() > 16) {
        let sum = sums.entry(kind.clone()).or_default();
        sum.0 += heard.ids.len() as u64 - 1;
        sum.1 += heard.spec.verify_ct;
    }
    sums.into_iter().map(|(kind, (tokens, rounds))| (kind, tokens as f64 / rounds as f64)).collect()
}

#[test]
fn a_mix_accepts_99_percent_of_its_better_sides_length() {
    let shape = Shape::chain(3);
    let ngram = acceptance("NGRAM", shape, 160, greedy);
    for (model, mix) in [("STANDALONE", "STANDALONE+NGRAM"), ("EAGLE3", "EAGLE3+NGRAM")] {
        let alone = acceptance(model, shape, 160, greedy);
        for (kind, mixed) in acceptance(mix, shape, 160, greedy) {
            let (alone, ngram) = (alone[&kind], ngram[&kind]);
            let what = format!("{kind}: {model} {alone:.3}, NGRAM {ngram:.3}, mixed {mixed:.3}");
            println!("{what}");
            assert!(mixed >= 0.99 * alone.max(ngram), "{what}");
        }
    }
}

#[test]
fn a_sampled_mix_accepts_98_percent_of_its_models_length() {
    let alone = acceptance("STANDALONE", Shape::chain(3), 80, hot);
    for (kind, mixed) in acceptance("STANDALONE+NGRAM", Shape::chain(3), 80, hot) {
        println!("{kind}: STANDALONE {:.3}, mixed {mixed:.3}", alone[&kind]);
        assert!(mixed >= 0.98 * alone[&kind], "{kind}: {mixed} of {}", alone[&kind]);
    }
}
