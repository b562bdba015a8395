//! The whole grid over which speculation must be invisible: token ids and log-probabilities of
//! every answer are those of the plain engine.
//!
//! `cargo run --release -p aquila-engine --example speculation_grid [FROM [EVERY]] [NAMES]` runs
//! each EVERY-th engine from the FROM-th on, of the algorithms of these names; without numbers
//! and names, all of all, which takes hours. An engine (an algorithm, a shape, a page size, a
//! batch) answers in every mode, one after the other: the first finds an empty prefix cache, the
//! others the prompts in it, and which is first changes from engine to engine.

#[path = "../tests/engine/support/mod.rs"]
mod support;

use std::time::Instant;

use aquila_engine::EngineConfig;
use aquila_spec::Shape;
use support::Numbers;
use support::answers::*;
use support::shipped::{Algorithm, config, engine, named};

/// Beginnings of texts, beside those of the acceptance tables.
const TEXTS: [&str; 25] = [
    "The ship left the harbour at dawn, and",
    "fn main() {\n    let mut total = 0;\n",
    "Once upon a time there was a miller who had",
    "| name | size |\n|------|------|\n| a | 1 |\n",
    "1, 2, 3, 5, 8, 13,",
    "Dear Sir,\n\nI have received your letter of",
    "impl Iterator for Countdown {\n    type Item = u32;\n",
    "To be, or not to be: that is",
    "# Installation\n\nFirst, clone the repository and",
    "{\"name\": \"aquila\", \"version\": ",
    "What is the capital of France?",
    "pub struct Stack<T> {\n    items: Vec<T>,\n}\n",
    "It was raining when the train arrived, so we",
    "SELECT name, age FROM people WHERE",
    "a",
    "\n\n\n",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "for (int i = 0; i < n; i++) {\n",
    "She opened the letter slowly. \"Well,\" she said,",
    "use std::collections::HashMap;\n\n/// Counts words.\n",
    "Äpfel, Öl und Übermut:",
    "    assert_eq!(add(2, 2), 4);\n    assert_eq!(add(",
    "In the year 1815, after a long war,",
    "match value {\n    Some(x) =>",
    "The answer is",
];

fn main() {
    let (numbers, mut names): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.parse::<usize>().is_ok());
    let mut numbers = numbers.iter().flat_map(|number| number.parse());
    let from: usize = numbers.next().unwrap_or(0);
    let every: usize = numbers.next().unwrap_or(1);
    if names.is_empty() {
        names = ["EAGLE3", "STANDALONE", "EAGLE", "MTP", "NGRAM"].map(String::from).to_vec();
    }

    let mut prompts: Vec<Vec<u32>> = prompts().into_iter().map(|(_, ids)| ids).collect();
    let tokenizer = tokenizer();
    prompts
        .extend(TEXTS.iter().map(|text| tokenizer.encode(*text, true).unwrap().get_ids().to_vec()));
    // Texts that nobody would write, from one token up.
    let mut random = Numbers(5);
    prompts.extend((1..=25).map(|tokens| random.prompt(2 * tokens - 1)));

    let modes: [Change; 4] = [greedy, warm, hot, penalized];
    let plain =
        |change| answers(&mut engine(Algorithm::None, config(Shape::PLAIN)), &prompts, 32, change);
    let plain: Vec<Vec<Answer>> = modes.iter().map(|&change| plain(change)).collect();

    let mut grid = Vec::new();
    for algorithm in &names {
        // The shipped MTP head has three layers, one for each step.
        let (chains, steps) =
            if algorithm == "MTP" { (&[1, 3][..], 3) } else { (&[1, 3, 5, 8][..], 5) };
        let mut shapes: Vec<Shape> = chains.iter().map(|&steps| Shape::chain(steps)).collect();
        for topk in [2, 4, 8, 16] {
            let most = Shape::most_nodes(steps, topk);
            let nodes = [8, 16, 32, 64].into_iter().filter(|&nodes| nodes <= most);
            shapes.extend(nodes.map(|nodes| shape(steps, topk, nodes)));
        }
        for shape in shapes {
            for page_size in [1, 4, 16] {
                grid.extend([1, 3, 8].map(|batch| (algorithm, shape, page_size, batch)));
            }
        }
    }
    let all = grid.len() * modes.len();
    let grid: Vec<_> = grid.into_iter().enumerate().skip(from).step_by(every.max(1)).collect();
    let began = Instant::now();
    let (mut answered, mut mismatches) = (0, 0);
    for (done, &(index, (algorithm, shape, page_size, batch))) in grid.iter().enumerate() {
        let config = EngineConfig { page_size, max_running_requests: batch, ..config(shape) };
        let mut engine = named(algorithm, config);
        let (mut wrong, mut idle) = (0, 0);
        for turn in 0..modes.len() {
            let mode = (index + turn) % modes.len();
            let got = answers(&mut engine, &prompts, 32, modes[mode]);
            answered += got.len();
            wrong += texts(&got).iter().zip(texts(&plain[mode])).filter(|(a, b)| *a != b).count();
            idle += got.iter().filter(|a| a.ids.len() > 1 && a.spec.verify_ct == 0).count();
        }
        mismatches += wrong + idle;
        let each = began.elapsed().div_f64(done as f64 + 1.0);
        let left = each.mul_f64((grid.len() - done - 1) as f64);
        println!(
            "{index}: {algorithm}, {shape}, pages of {page_size}, batch {batch}: {wrong} answers \
             differ, {idle} were not drafted for; {} s left",
            left.as_secs()
        );
    }
    println!(
        "{} of {all} combinations, {} prompts each, {answered} answers, {mismatches} mismatches, {} s",
        grid.len() * modes.len(),
        prompts.len(),
        began.elapsed().as_secs()
    );
    std::process::exit(i32::from(mismatches > 0));
}
