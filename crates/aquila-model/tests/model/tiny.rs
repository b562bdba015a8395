//! The shipped model against transformers' fp32 outputs: ids, log-probabilities, int8.

use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};
use aquila_model::{Checkpoint, Decoder, LoadFormat};
use serde_json::Value;

use crate::sequence::{Sequence, argmax, fixture, shipped};

fn tiny() -> Checkpoint {
    Checkpoint::open(&shipped("tiny"), LoadFormat::Auto).unwrap()
}

fn decoder(backend: &CpuBackend, format: WeightFormat) -> Decoder<CpuBackend> {
    Decoder::load(backend, &tiny(), format, 512, &mut |_| {}).unwrap()
}

struct Reference {
    prompt: Vec<u32>,
    greedy: Vec<u32>,
    first_top: Vec<(u32, f64)>,
    prompt_logprob_sum: f64,
}

fn references() -> Vec<Reference> {
    let text = std::fs::read(fixture("tiny-golden.json")).unwrap();
    let list: Vec<Value> = serde_json::from_slice(&text).unwrap();
    let ids =
        |v: &Value| v.as_array().unwrap().iter().map(|i| i.as_u64().unwrap() as u32).collect();
    let pair = |v: &Value| (v[0].as_u64().unwrap() as u32, v[1].as_f64().unwrap());
    list.iter()
        .map(|v| Reference {
            prompt: ids(&v["prompt_ids"]),
            greedy: ids(&v["greedy_ids"]),
            first_top: v["first_token_top10"].as_array().unwrap().iter().map(pair).collect(),
            prompt_logprob_sum: v["prompt_logprob_sum"].as_f64().unwrap(),
        })
        .collect()
}

fn logprobs(logits: &[f32]) -> Vec<f64> {
    let max = logits.iter().fold(f32::NEG_INFINITY, |m, &x| m.max(x));
    let total: f64 = logits.iter().map(|&x| f64::from(x - max).exp()).sum();
    logits.iter().map(|&x| f64::from(x - max) - total.ln()).collect()
}

#[test]
fn tiny_writes_what_transformers_writes() {
    let backend = CpuBackend::new(IsaChoice::Auto, 0).unwrap();
    let decoder = decoder(&backend, WeightFormat::Bf16);
    let vocabulary = decoder.spec().vocab_size;
    let references = references();
    assert_eq!(references.len(), 12);
    for (number, reference) in references.iter().enumerate() {
        let mut ids = reference.prompt.clone();
        let mut sequence =
            Sequence::in_order(&backend, &decoder, ids.len() + reference.greedy.len());
        let logits = sequence.run(&ids, ids.len());
        let rows: Vec<Vec<f64>> = logits.chunks(vocabulary).map(logprobs).collect();

        let pairs = rows.iter().zip(&ids[1..]);
        let sum: f64 = pairs.map(|(row, &next)| row[next as usize]).sum();
        let sum_off = (sum - reference.prompt_logprob_sum).abs();
        let mut worst = 0f64;
        assert!(sum_off < 0.05, "prompt {number}: log-probability sum {sum} is off by {sum_off}");

        let first = rows.last().unwrap();
        let mut order: Vec<u32> = (0..vocabulary as u32).collect();
        order.sort_by(|&a, &b| first[b as usize].total_cmp(&first[a as usize]));
        for (&ours, &(theirs, logprob)) in order.iter().zip(&reference.first_top) {
            let off = (first[theirs as usize] - logprob).abs();
            worst = worst.max(off);
            assert!(off < 1e-3, "prompt {number}: token {theirs} is off by {off}");
            let tie = (first[ours as usize] - first[theirs as usize]).abs();
            assert!(ours == theirs || tie < 1e-3, "prompt {number}: {ours} ranks above {theirs}");
        }

        println!("prompt {number}: sum off by {sum_off:e}, top ten by {worst:e}");

        let mut next = argmax(&logits[logits.len() - vocabulary..]);
        for &want in &reference.greedy {
            assert_eq!(next, want, "prompt {number}, after {} tokens", ids.len());
            ids.push(next);
            next = argmax(&sequence.run(&ids, ids.len()));
        }
    }
}

/// What bf16 chooses at these positions is what transformers chose: see above.
#[test]
fn int8_agrees_with_bf16_at_99_of_100_positions() {
    let backend = CpuBackend::new(IsaChoice::Auto, 0).unwrap();
    let decoder = decoder(&backend, WeightFormat::Int8);
    let (mut same, mut all) = (0, 0);
    for reference in references() {
        let ids = [&reference.prompt[..], &reference.greedy].concat();
        let mut sequence = Sequence::in_order(&backend, &decoder, ids.len());
        sequence.run(&ids, reference.prompt.len() - 1);
        let logits = sequence.run(&ids, ids.len() - 1);
        let ours = logits.chunks(decoder.spec().vocab_size).map(argmax);
        all += reference.greedy.len();
        same += ours.zip(&reference.greedy).filter(|(ours, bf16)| ours == *bf16).count();
    }
    println!("int8 agrees at {same} of {all} positions");
    assert_eq!(all, 713);
    assert!(same * 100 >= all * 99, "int8 agrees at {same} of {all} positions");
}
