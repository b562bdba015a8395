//! Our numbers against transformers' in fp32 on the same weights.

use aquila_compute::Backend;
use aquila_compute::WeightFormat;
use aquila_compute::cpu::{CpuBackend, IsaChoice};

use crate::sequence::{Sequence, argmax, golden, load};

const FIXTURES: [&str; 7] =
    ["llama3-rope", "llama-bias", "qwen2", "qwen2-yarn", "qwen3", "qwen3-moe", "gemma3"];

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
