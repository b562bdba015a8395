//! Our numbers against transformers' in fp32 on the same weights.

use aquila_compute::Backend;
use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};

use crate::sequence::{Sequence, argmax, golden, load};

const FIXTURES: [&str; 8] = [
    "llama3-rope",
    "llama-bias",
    "qwen2",
    "qwen2-yarn",
    "qwen3",
    "qwen3-moe",
    "qwen3-moe-dense",
    "gemma3",
];

fn largest_difference(ours: &[f32], theirs: &[f32]) -> f32 {
    assert_eq!(ours.len(), theirs.len());
    ours.iter().zip(theirs).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max)
}

#[test]
fn logits_and_hidden_states_are_those_of_transformers() {
    let backend = CpuBackend::new(IsaChoice::Auto, 0).unwrap();
    for name in FIXTURES {
        let decoder = load(&backend, name, WeightFormat::Bf16);
        let golden = golden(name);
        let rows = golden.input_ids.len();
        assert_eq!(rows, 40);
        let mut sequence = Sequence::in_order(&backend, &decoder, rows);
        let logits = sequence.run(&golden.input_ids, rows);
        let hidden = backend.read(sequence.scratch.hidden(), rows).unwrap();
        let off = largest_difference(&logits, &golden.logits);
        println!("{name}: logits off by {off:e}");
        assert!(off < 1e-3, "{name}: logits off by {off}");
        let off = largest_difference(&hidden, &golden.last_hidden);
        assert!(off < 1e-3, "{name}: hidden states off by {off}");
    }
}

#[test]
fn greedy_ids_of_every_fixture_are_those_of_transformers() {
    let backend = CpuBackend::new(IsaChoice::Auto, 0).unwrap();
    for name in FIXTURES {
        let decoder = load(&backend, name, WeightFormat::Bf16);
        let golden = golden(name);
        let vocabulary = decoder.spec().vocab_size;
        let mut ids = golden.input_ids.clone();
        let mut sequence = Sequence::in_order(&backend, &decoder, ids.len() + 24);
        for _ in 0..golden.greedy_ids.len() {
            let logits = sequence.run(&ids, ids.len());
            ids.push(argmax(&logits[logits.len() - vocabulary..]));
        }
        assert_eq!(ids[golden.input_ids.len()..], golden.greedy_ids, "{name}");
    }
}

#[test]
fn routed_experts_are_those_of_transformers() {
    let backend = CpuBackend::new(IsaChoice::Auto, 0).unwrap();
    let decoder = load(&backend, "qwen3-moe-dense", WeightFormat::Bf16);
    let golden = golden("qwen3-moe-dense");
    let rows = golden.input_ids.len();
    let mut capture = decoder.capture_experts(&backend, rows).unwrap();
    let mut sequence = Sequence::in_order(&backend, &decoder, rows);
    sequence.run_with(&golden.input_ids, rows, Some(&mut capture));
    let ours = backend.read(capture.rows(), rows).unwrap();
    let ours: Vec<u32> = ours.iter().map(|&id| id as u32).collect();
    assert_eq!(ours.len(), rows * 3 * 2);
    assert_eq!(ours, golden.routed_experts);
    let dense: Vec<u32> = ours.chunks(6).flat_map(|row| row[2..4].to_vec()).collect();
    assert!(dense.iter().all(|&id| id == 0) && ours.contains(&7));

    let llama = load(&backend, "llama3-rope", WeightFormat::Bf16);
    let refusal = llama.capture_experts(&backend, 1).err().unwrap().to_string();
    assert!(refusal.contains("a model without any"), "{refusal}");
}
