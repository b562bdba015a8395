//! How many of its drafts the target keeps, against the figures of the code that trained the head.

use std::sync::OnceLock;

use aquila_compute::ForwardPlan;
use aquila_compute::cpu::CpuBackend;
use aquila_model::RecurrentHead as _;
use aquila_model::{Capture, Decoder, Hidden};
use serde_json::Value;
use tokenizers::Tokenizer;

use crate::head::{Pair, node};
use crate::sequence::{Sequence, argmax, fixture, shipped};

const NEW_TOKENS: usize = 160;
const SHORTEST: usize = 16;
const END: [u32; 2] = [0, 2];
const STEPS: usize = 4;

/// A prompt of `kind`, then the target's own greedy text.
pub struct Text {
    pub kind: String,
    pub ids: Vec<u32>,
    pub prompt: usize,
}

/// The texts of all prompts, made once for all tests.
pub fn texts(backend: &CpuBackend, target: &Decoder<CpuBackend>) -> &'static [Text] {
    static TEXTS: OnceLock<Vec<Text>> = OnceLock::new();
    TEXTS.get_or_init(|| written(backend, target))
}

fn written(backend: &CpuBackend, target: &Decoder<CpuBackend>) -> Vec<Text> {
    let aquila_model::Location::Folder(folder) = shipped("tiny") else { unreachable!() };
    let tokenizer = Tokenizer::from_file(folder.join("tokenizer.json")).unwrap();
    let prompts = std::fs::read_to_string(fixture("acceptance-prompts.jsonl")).unwrap();
    let text = |line: &str| {
        let value: Value = serde_json::from_str(line).unwrap();
        let prompt = value["prompt"].as_str().unwrap();
        let mut ids = tokenizer.encode(prompt, false).unwrap().get_ids().to_vec();
        let prompt = ids.len();
        let mut sequence = Sequence::in_order(backend, target, prompt + NEW_TOKENS);
        let vocabulary = target.spec().vocab_size;
        while ids.len() < prompt + NEW_TOKENS {
            let logits = sequence.run(&ids, ids.len());
            ids.push(argmax(&logits[logits.len() - vocabulary..]));
            if END.contains(ids.last().unwrap()) {
                break;
            }
        }
        Text { kind: value["kind"].as_str().unwrap().to_owned(), ids, prompt }
    };
    prompts.lines().map(text).filter(|t| t.ids.len() - t.prompt > SHORTEST).collect()
}

/// For every token of the text but the last: the chain that the head drafts after it.
fn chains(pair: &Pair, text: &Text) -> Vec<Vec<u32>> {
    let Text { ids, prompt, .. } = text;
    let all = ids.len() - 1;
    let captured: Capture<_> = pair.capture(&ids[..all]);
    let width = pair.head.spec().draft_vocab_size;
    let draft = pair.head.draft_ids().unwrap().ids;
    let best = |logits: &[f32]| -> Vec<u32> {
        logits.chunks(width).map(|row| draft[argmax(row) as usize]).collect()
    };
    let slots = all + all * STEPS;
    let mut drafting = pair.drafting(all, slots);
    let logits = drafting.extend(ids, &captured, 0, all);
    let firsts = best(&logits).split_off(prompt - 1);
    let mut chains: Vec<Vec<u32>> = firsts.iter().map(|&token| vec![token]).collect();
    for step in 1..STEPS {
        let mut plan = ForwardPlan::default();
        for (c, chain) in chains.iter().enumerate() {
            let row = prompt - 1 + c;
            let tail: Vec<u32> = (0..step).map(|s| (all + row * STEPS + s) as u32).collect();
            let source = if step == 1 { row } else { c };
            node(&mut plan, *chain.last().unwrap(), source as u32, row + 1, &tail);
        }
        let from = if step == 1 { Hidden::Seeds } else { Hidden::Last };
        let next = best(&drafting.expand(plan, from));
        chains.iter_mut().zip(next).for_each(|(chain, token)| chain.push(token));
    }
    chains
}

/// Compares how many drafts the target keeps of `chains`, one for every token of each text's answer,
/// with the table of the code that trained the head called `name`.
pub fn compare(name: &str, texts: &[Text], chains: &[Vec<Vec<u32>>], most_steps: usize) {
    let table = std::fs::read(fixture("tiny-acceptance.json")).unwrap();
    let table: Value = serde_json::from_slice(&table).unwrap();
    for kind in ["code", "docs", "math"] {
        for steps in 1..=most_steps {
            let (mut tokens, mut verifications) = (0, 0);
            for (text, chains) in texts.iter().zip(chains).filter(|(t, _)| t.kind == kind) {
                // The bonus is the last token that stands; the first came from the prefill.
                let mut bonus = text.prompt;
                while bonus + 1 < text.ids.len() {
                    let drafts = &chains[bonus - text.prompt][..steps];
                    let truth = &text.ids[bonus + 1..];
                    let kept = drafts.iter().zip(truth).take_while(|(d, t)| d == t).count();
                    let accepted = (kept + 1).min(truth.len());
                    tokens += accepted;
                    verifications += 1;
                    bonus += accepted;
                }
            }
            let ours = tokens as f64 / verifications as f64;
            let theirs = table[name][kind][steps.to_string()].as_f64().unwrap();
            println!("{name}, {kind}, {steps} steps: {ours:.3}, trained {theirs}");
            assert!((ours / theirs - 1.0).abs() < 0.02, "{kind}, {steps}: {ours}, not {theirs}");
        }
    }
}

#[test]
fn greedy_chains_are_within_2_percent_of_training() {
    let pair = Pair::tiny();
    let texts = texts(&pair.backend, &pair.target);
    let chains: Vec<_> = texts.iter().map(|text| chains(&pair, text)).collect();
    compare("eagle3", texts, &chains, STEPS);
}

#[test]
fn draft_ids_ascend_and_are_tokens_of_the_target() {
    let pair = Pair::tiny();
    let ids = pair.head.draft_ids().unwrap();
    assert_eq!((ids.ids.len(), ids.vocabulary), (4096, 8192));
    assert!(ids.ids.is_sorted_by(|a, b| a < b) && *ids.ids.last().unwrap() < 8192);
}
