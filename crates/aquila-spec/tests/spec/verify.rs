//! Verification by probability keeps the target's distribution: chi-square tests over trees whose
//! drafts come from another distribution, with filters on both.

use aquila_compute::sampling::{History, SampleQuery, Sampling, Weights, filtered_probs};
use aquila_spec::{Accepted, Candidates, Coins, Proposal, Shape, Tree, Verify};

const VOCABULARY: usize = 7;
const RUNS: u64 = 25_000;

/// What the target or the draft thinks after a path; any fixed numbers will do, if they differ.
fn logits(path: &[u32], who: f32) -> Vec<f32> {
    let path = path.iter().fold(0.3, |sum, &token| sum * 1.7 + token as f32 + 1.0);
    (0..VOCABULARY)
        .map(|v| 1.6 * (path * 0.9 + who * 1.3 + v as f32 * (1.9 + 0.2 * who)).sin())
        .collect()
}

const TARGET: f32 = 1.0;
const DRAFT: f32 = 1.4;

fn filters() -> [Sampling; 4] {
    let plain = Sampling { temperature: 1.0, ..Sampling::default() };
    [
        plain.clone(),
        Sampling { top_k: 3, ..plain.clone() },
        Sampling { top_p: 0.8, temperature: 0.8, ..plain.clone() },
        Sampling { top_k: 5, min_p: 0.2, ..plain },
    ]
}

fn weights(path: &[u32], who: f32, sampling: &Sampling) -> Weights {
    let history = History::default();
    let query = SampleQuery {
        row: 0,
        sampling,
        history: &history,
        path: &[],
        position: 0,
        choice: 0,
        banned: &[],
        allowed: None,
        top_logprobs: None,
        given: None,
    };
    filtered_probs(&logits(path, who), &query, None)
}

/// The filtered softmax, worked out with the standard library alone.
fn expected(path: &[u32], sampling: &Sampling) -> Vec<f64> {
    let mut kept: Vec<(usize, f64)> = logits(path, TARGET)
        .iter()
        .map(|&l| (f64::from(l) / f64::from(sampling.temperature)).exp())
        .enumerate()
        .collect();
    kept.sort_by(|a, b| b.1.total_cmp(&a.1));
    let best = kept[0].1;
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k as usize);
    }
    let all: f64 = kept.iter().map(|k| k.1).sum();
    let mut reached = 0.0;
    kept.retain(|k| {
        let goes_on = reached < f64::from(sampling.top_p) * all;
        reached += k.1;
        goes_on && k.1 >= f64::from(sampling.min_p) * best
    });
    let all: f64 = kept.iter().map(|k| k.1).sum();
    let mut expected = vec![0.0; VOCABULARY];
    kept.into_iter().for_each(|(v, weight)| expected[v] = weight / all);
    expected
}

/// A tree of drafts: drawn for rejection, the likeliest for thresholds.
fn tree(shape: Shape, verify: Verify, sampling: &Sampling, seed: u64) -> Tree {
    let propose = |path: &[u32]| {
        let from = weights(path, DRAFT, sampling);
        let position = 1 + path.len() as u32;
        let candidate = |rank: usize, token| aquila_spec::Candidate {
            token,
            probability: Proposal::prior(rank),
        };
        if verify == Verify::Rejection {
            let drawn = Proposal::draw(from, seed, 0, position, shape.topk());
            let candidates = drawn.tokens.iter().enumerate().map(|(rank, &t)| candidate(rank, t));
            return Candidates { candidates: candidates.collect(), drawn_from: Some(drawn.from) };
        }
        let mut likely = from.tokens.clone();
        likely.sort_by(|a, b| b.1.total_cmp(&a.1));
        let likely = likely.iter().take(shape.topk()).enumerate();
        let candidates = likely.map(|(rank, &(token, _))| candidate(rank, token)).collect();
        Candidates { candidates, drawn_from: None }
    };
    let mut builder = propose(&[]).begin(shape);
    while builder.goes_on() {
        let beam = builder.beam().to_vec();
        let offers = beam.iter().map(|&at| propose(&builder.path_tokens(at))).collect();
        Candidates::grow(&mut builder, offers);
    }
    builder.finish(0)
}

/// What many runs yield: the first token, and the second where the first was a draft.
struct Counts {
    first: Vec<u64>,
    second: Vec<Vec<u64>>,
    tokens: u64,
}

fn run(shape: Shape, verify: Verify, sampling: &Sampling) -> Counts {
    let mut counts = Counts {
        first: vec![0; VOCABULARY],
        second: vec![vec![0; VOCABULARY]; VOCABULARY],
        tokens: 0,
    };
    for seed in 0..RUNS {
        let tree = tree(shape, verify, sampling, seed);
        let target: Vec<Weights> = (0..tree.len())
            .map(|node| {
                let path = tree.path(node);
                let path: Vec<u32> = path[1..].iter().map(|&n| tree.nodes()[n].token).collect();
                weights(&path, TARGET, sampling)
            })
            .collect();
        let coins = Coins { seed, choice: 0, position: 1 };
        let mut accepted = Accepted::default();
        // In two pieces, of which the first ends at any node.
        let end = seed as usize % (tree.len() + 1);
        verify
            .follow(&tree, coins, &mut accepted, |node| (node < end).then(|| target[node].clone()));
        assert!(accepted.is_complete() || accepted.path.last() >= Some(&end));
        verify.follow(&tree, coins, &mut accepted, |node| Some(target[node].clone()));
        assert!(accepted.is_complete());
        counts.tokens += accepted.tokens.len() as u64;
        counts.first[accepted.tokens[0] as usize] += 1;
        if let [first, second, ..] = accepted.tokens[..] {
            counts.second[first as usize][second as usize] += 1;
        }
    }
    counts
}

/// How far counts are from what is expected, in standard deviations of the chi-square statistic;
/// infinite where something happened that cannot.
fn distance(counts: &[u64], expected: &[f64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let possible = expected.iter().filter(|&&p| p > 0.0).count();
    if counts.iter().zip(expected).any(|(&count, &p)| count > 0 && p == 0.0) {
        return f64::INFINITY;
    }
    if possible < 2 {
        return 0.0;
    }
    let chi: f64 = counts
        .iter()
        .zip(expected)
        .filter(|(_, p)| **p > 0.0)
        .map(|(&count, &p)| (count as f64 - p * total as f64).powi(2) / (p * total as f64))
        .sum();
    let freedom = (possible - 1) as f64;
    (chi - freedom) / (2.0 * freedom).sqrt()
}

fn worst(counts: &Counts, sampling: &Sampling) -> f64 {
    let mut worst = distance(&counts.first, &expected(&[], sampling));
    for (token, second) in (0u32..).zip(&counts.second) {
        if second.iter().sum::<u64>() > 250 {
            worst = worst.max(distance(second, &expected(&[token], sampling)));
        }
    }
    worst
}

fn shapes() -> [Shape; 4] {
    [Shape::chain(1), Shape::chain(3), Shape::new(2, 3, 7).unwrap(), Shape::new(3, 4, 12).unwrap()]
}

#[test]
fn rejection_keeps_the_targets_distribution_over_chains_and_trees() {
    for sampling in filters() {
        for shape in shapes() {
            let counts = run(shape, Verify::Rejection, &sampling);
            let worst = worst(&counts, &sampling);
            assert!(worst < 5.0, "{shape}, {sampling:?}: {worst} deviations");
            assert!(counts.tokens > RUNS * 5 / 4, "{shape}: drafts are accepted now and then");
        }
    }
}

#[test]
fn thresholds_of_one_keep_the_targets_distribution() {
    let exact = Verify::TargetOnly { single: 1.0, accumulated: 1.0 };
    for sampling in filters() {
        for shape in shapes() {
            let counts = run(shape, exact, &sampling);
            let worst = worst(&counts, &sampling);
            assert!(worst < 5.0, "{shape}, {sampling:?}: {worst} deviations");
        }
    }
}

#[test]
fn thresholds_below_one_accept_more_and_are_lossy() {
    let shape = Shape::new(2, 3, 7).unwrap();
    let exact = Verify::TargetOnly { single: 1.0, accumulated: 1.0 };
    let [sampling, ..] = filters();
    let all = run(shape, exact, &sampling).tokens;
    let lossy = [(0.3, 1.0), (1.0, 0.5)];
    for verify in lossy.map(|(single, accumulated)| Verify::TargetOnly { single, accumulated }) {
        let counts = run(shape, verify, &sampling);
        assert!(!verify.is_lossless() && counts.tokens > all);
        assert!(worst(&counts, &sampling) > 10.0, "the test above could fail");
    }
}

#[test]
fn the_same_seed_gives_the_same_tokens() {
    let [sampling, ..] = filters();
    let shape = Shape::new(3, 4, 12).unwrap();
    for seed in 0..50 {
        let once = tree(shape, Verify::Rejection, &sampling, seed);
        assert_eq!(once, tree(shape, Verify::Rejection, &sampling, seed));
        for node in 0..once.len() {
            let tokens: Vec<u32> = once.children(node).map(|c| once.nodes()[c].token).collect();
            let mut different = tokens.clone();
            different.sort_unstable();
            different.dedup();
            assert_eq!(different.len(), tokens.len(), "no child is drawn twice");
        }
    }
}
