//! The pictures of `docs/speculative-decoding.md`, drawn from real rounds of the shipped model.
//!
//! `cargo run --release -p aquila-engine --example round_pictures docs/images` writes them into
//! that folder and prints the figures that they show. The arithmetic is the same on every CPU, so
//! are the pictures.

#[path = "../../tests/engine/support/mod.rs"]
mod support;

mod bars;
mod curves;
mod rounds;
mod svg;
mod tree;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use aquila_engine::EngineConfig;
use aquila_spec::{Shape, SpecStats};
use support::answers::{answers, prompts, shape, tokenizer};
use support::shipped::{Algorithm, config, engine_watched, named};
use support::watched::Trees;

/// The request whose rounds are drawn.
const PROMPT: &str = "A Deployment provides declarative updates for Pods and";
/// How many of its tokens are asked for.
const TOKENS: usize = 40;

fn main() -> std::io::Result<()> {
    let folder = std::env::args_os().nth(1).map_or_else(|| "docs/images".into(), PathBuf::from);
    std::fs::create_dir_all(&folder)?;
    let write = |name: &str, picture: String| std::fs::write(folder.join(name), picture);

    let drawn = rounds_of(shape(5, 4, 16));
    let best = drawn.iter().max_by_key(|round| round.interest()).expect("there are rounds");
    write("tree-of-a-round.svg", tree::picture(best))?;
    write("rounds-of-an-answer.svg", rounds::picture(&drawn))?;

    println!("| algorithm | depth 1 | 2 | 3 | 4 | 5 | 6 | 7 |\n|---|---|---|---|---|---|---|---|");
    let mut curves = Vec::new();
    for (name, steps) in [("EAGLE3", 7), ("EAGLE", 7), ("MTP", 3), ("STANDALONE", 7), ("NGRAM", 7)]
    {
        let stats = stats_of(name, Shape::chain(steps)).into_iter().map(|(_, stats)| stats);
        let all = stats.fold(SpecStats::default(), |mut sum, stats| {
            sum.add(&stats);
            sum
        });
        let rates = rates_by_depth(&all, steps);
        let cells: Vec<String> =
            rates.iter().map(|rate| format!("{:.0} %", 100.0 * rate)).collect();
        println!("| {name} | {} |", cells.join(" | "));
        curves.push((name, rates));
    }
    write("acceptance-by-depth.svg", curves::picture(&curves))?;

    println!("\n| algorithm | tree | code | docs | math |\n|---|---|---|---|---|");
    let mut groups = Vec::new();
    for (name, shape) in [
        ("NONE", Shape::PLAIN),
        ("NGRAM", Shape::chain(3)),
        ("EAGLE", Shape::chain(3)),
        ("MTP", Shape::chain(3)),
        ("STANDALONE", Shape::chain(3)),
        ("EAGLE3", Shape::chain(3)),
        ("EAGLE3+NGRAM", Shape::chain(3)),
        ("EAGLE3", shape(3, 4, 16)),
        ("EAGLE3", shape(5, 4, 16)),
        ("EAGLE3", shape(5, 8, 48)),
    ] {
        let lengths: Vec<(String, f64)> = match shape.steps() {
            // A pass of plain decoding yields its one token.
            0 => ["code", "docs", "math"].map(|kind| (kind.to_owned(), 1.0)).to_vec(),
            _ => stats_of(name, shape).into_iter().map(|(k, s)| (k, s.accept_length())).collect(),
        };
        let cells: Vec<String> = lengths.iter().map(|(_, length)| format!("{length:.2}")).collect();
        println!("| {name} | {shape} | {} |", cells.join(" | "));
        groups.push(bars::Group { name, shape, lengths });
    }
    write("tokens-per-round.svg", bars::picture(&groups))?;
    println!("\nwritten to {}", Path::new(&folder).display());
    Ok(())
}

/// A round of the request that is drawn.
pub struct Round {
    tree: aquila_spec::Tree,
    /// The tokens that the round yielded: the drafts that were right, then the bonus.
    yielded: Vec<u32>,
    /// The text of each token id.
    words: Arc<dyn Fn(u32) -> String>,
}

impl Round {
    /// The nodes that were accepted, the root first.
    fn path(&self) -> Vec<usize> {
        let (mut path, mut at) = (vec![0], 0);
        for &token in &self.yielded {
            let Some(child) = self.tree.child(at, token) else { break };
            path.push(child);
            at = child;
        }
        path
    }

    /// How much of what a tree does it shows: accepted drafts that were not their parent's first
    /// candidate, and then how many were accepted.
    fn interest(&self) -> (usize, usize) {
        let path = self.path();
        let first = |pair: &[usize]| self.tree.children(pair[0]).next() == Some(pair[1]);
        let later = path.windows(2).filter(|pair| !first(pair)).count();
        // One that a chain would have missed suffices; more drafts make the better example.
        (later.min(1), path.len())
    }
}

fn rounds_of(shape: Shape) -> Vec<Round> {
    let trees = Arc::new(Trees::default());
    let mut engine = engine_watched(Algorithm::Eagle3, config(shape), trees.clone());
    let tokenizer = tokenizer();
    let prompt = tokenizer.encode(PROMPT, true).expect("it has no special tokens");
    let (request, heard) = support::request(prompt.get_ids(), TOKENS);
    engine.submit(request).expect("it fits");
    support::run(&mut engine);
    let heard = heard.lock().expect("nobody panicked");
    let trees = trees.0.lock().expect("nobody panicked");
    let trees = trees.values().next().expect("one request drafted");
    let words: Arc<dyn Fn(u32) -> String> = Arc::new(move |id| svg::shown(&tokenizer, id));
    // The first run of tokens is the prefill's.
    let ids = heard.ids();
    let mut at = heard.runs[0];
    let mut rounds = Vec::new();
    for (tree, &run) in trees.iter().zip(&heard.runs[1..]) {
        let yielded = ids[at..at + run].to_vec();
        rounds.push(Round { tree: tree.clone(), yielded, words: words.clone() });
        at += run;
    }
    rounds
}

/// What drafts of this algorithm did on the prompts of the acceptance tables, by kind.
fn stats_of(name: &str, shape: Shape) -> Vec<(String, SpecStats)> {
    let prompts = prompts();
    let ids: Vec<Vec<u32>> = prompts.iter().map(|(_, ids)| ids.clone()).collect();
    let config =
        EngineConfig { max_running_requests: 30, max_total_tokens: 40_000, ..config(shape) };
    let heard = answers(&mut named(name, config), &ids, 160, |request, _| request.logprobs = None);
    let mut kinds: Vec<(String, SpecStats)> = Vec::new();
    for ((kind, _), answer) in prompts.iter().zip(&heard) {
        if !kinds.iter().any(|(known, _)| known == kind) {
            kinds.push((kind.clone(), SpecStats::default()));
        }
        let sum = kinds.iter_mut().find(|(known, _)| known == kind).expect("it was added");
        sum.1.add(&answer.spec);
    }
    kinds.sort_by(|a, b| a.0.cmp(&b.0));
    kinds
}

/// The share of rounds whose draft at each depth was accepted.
fn rates_by_depth(stats: &SpecStats, steps: usize) -> Vec<f64> {
    let reached = |depth: usize| stats.histogram.iter().skip(depth).sum::<u64>();
    (1..=steps).map(|depth| reached(depth) as f64 / stats.verify_ct as f64).collect()
}
