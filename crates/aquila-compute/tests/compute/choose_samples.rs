//! Samples follow the filtered softmax: chi-square tests, over fixed seeds.
//!
//! A statistic of `df` degrees of freedom becomes a standard score (Wilson and Hilferty, 1931);
//! scores beyond 4 have a chance of 1 in 30 000, and the seeds never change.

use aquila_compute::sampling::{History, SampleQuery, Sampling, choose, noise};

const LIMIT: f64 = 4.0;

/// How many standard deviations the counts are from what is expected; bins of less than five
/// expected counts are joined.
fn score(counts: &[u64], probabilities: &[f64]) -> f64 {
    let total: u64 = counts.iter().sum();
    let (mut statistic, mut bins) = (0.0, 0);
    let (mut rest, mut rest_expected) = (0.0, 0.0);
    let mut add = |count: f64, expected: f64| {
        statistic += (count - expected).powi(2) / expected;
        bins += 1;
    };
    for (&count, &p) in counts.iter().zip(probabilities) {
        let expected = p * total as f64;
        if expected >= 5.0 {
            add(count as f64, expected);
        } else {
            rest += count as f64;
            rest_expected += expected;
        }
    }
    if rest_expected > 0.0 {
        add(rest, rest_expected);
    } else {
        assert_eq!(rest, 0.0, "a token without probability was chosen");
    }
    standard_score(statistic, f64::from(bins - 1))
}

fn standard_score(statistic: f64, df: f64) -> f64 {
    let spread = 2.0 / (9.0 * df);
    ((statistic / df).cbrt() - (1.0 - spread)) / spread.sqrt()
}

/// The filtered softmax, in f64 with the system's functions.
fn softmax(logits: &[f64], sampling: &Sampling) -> Vec<f64> {
    let weights: Vec<f64> =
        logits.iter().map(|l| (l / f64::from(sampling.temperature)).exp()).collect();
    let mut order: Vec<usize> = (0..weights.len()).collect();
    order.sort_by(|&a, &b| weights[b].total_cmp(&weights[a]));
    if sampling.top_k > 0 {
        order.truncate(sampling.top_k as usize);
    }
    let total: f64 = order.iter().map(|&v| weights[v]).sum();
    let mut reached = 0.0;
    order.retain(|&v| {
        let wanted = reached < f64::from(sampling.top_p) * total;
        reached += weights[v];
        wanted
    });
    let most = weights[order[0]];
    order.retain(|&v| weights[v] >= f64::from(sampling.min_p) * most);
    let total: f64 = order.iter().map(|&v| weights[v]).sum();
    let mut probabilities = vec![0.0; weights.len()];
    order.iter().for_each(|&v| probabilities[v] = weights[v] / total);
    probabilities
}

/// Counts of many draws, over seeds, choices and positions.
fn draw(logits: &[f32], sampling: &Sampling, draws: u32) -> Vec<u64> {
    let mut history = History::of_prompt(&[1, 2]);
    [2, 3, 3].iter().for_each(|&token| history.push(token));
    let mut sampling = sampling.clone();
    let mut counts = vec![0; logits.len()];
    for i in 0..draws {
        sampling.seed = u64::from(i % 7);
        let query = SampleQuery {
            row: 0,
            sampling: &sampling,
            history: &history,
            path: &[4],
            position: i / 21,
            choice: i / 7 % 3,
            banned: &[],
            allowed: None,
            top_logprobs: None,
            given: None,
        };
        counts[choose(logits, &query).token as usize] += 1;
    }
    counts
}

/// A row whose logits are spread like those of a model: a few large, a long tail.
fn row(tokens: usize) -> Vec<f32> {
    (0..tokens).map(|i| 3.0 - 1.3 * ((i * 7 % tokens) as f32 + 1.0).ln()).collect()
}

fn check(name: &str, tokens: usize, draws: u32, sampling: &Sampling) {
    let logits = row(tokens);
    let exact: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
    let counts = draw(&logits, sampling, draws);
    let got = score(&counts, &softmax(&exact, sampling));
    assert!(got.abs() < LIMIT, "{name}, {tokens} tokens: {got:.2} standard deviations");
}

fn at(temperature: f32) -> Sampling {
    Sampling { temperature, ..Sampling::default() }
}

#[test]
fn samples_follow_the_softmax_under_every_filter() {
    for tokens in [8, 23, 50] {
        check("plain", tokens, 60_000, &at(1.0));
        check("cool", tokens, 60_000, &at(0.6));
        check("hot", tokens, 60_000, &at(1.7));
        check("top-k", tokens, 60_000, &Sampling { top_k: 5, ..at(1.0) });
        check("top-p", tokens, 60_000, &Sampling { top_p: 0.83, ..at(1.0) });
        check("min-p", tokens, 60_000, &Sampling { min_p: 0.07, ..at(1.0) });
        let all = Sampling { top_k: 7, top_p: 0.95, min_p: 0.05, ..at(1.3) };
        check("all filters", tokens, 60_000, &all);
    }
}

#[test]
fn samples_of_a_wide_row_follow_the_softmax() {
    check("plain", 2000, 200_000, &at(1.0));
    check("flat", 2000, 200_000, &at(5.0));
    check("top-p", 2000, 200_000, &Sampling { top_p: 0.9, ..at(1.0) });
    check("top-k", 2000, 200_000, &Sampling { top_k: 100, ..at(1.5) });
}

#[test]
fn samples_follow_the_softmax_of_penalized_and_biased_logits() {
    let logits = [1.0f32, 0.8, -0.4, 1.5, 0.9, 0.0, -1.0, 0.3];
    let sampling = Sampling {
        repetition_penalty: 1.25,
        frequency_penalty: 0.3,
        presence_penalty: 0.2,
        logit_bias: vec![(6, 1.1), (0, -0.7)],
        ..at(0.9)
    };
    // Prompt 1 2, output 2 3 3, path 4.
    let adjusted = [
        1.0 - 0.7,
        0.8 / 1.25,
        -0.4 * 1.25 - 0.3 - 0.2,
        1.5 / 1.25 - 2.0 * 0.3 - 0.2,
        0.9 / 1.25 - 0.3 - 0.2,
        0.0,
        -1.0 + 1.1,
        0.3,
    ];
    let counts = draw(&logits, &sampling, 60_000);
    let got = score(&counts, &softmax(&adjusted, &at(0.9)));
    assert!(got.abs() < LIMIT, "{got:.2} standard deviations");
}

#[test]
fn the_test_notices_a_temperature_3_percent_wrong() {
    let logits = row(50);
    let exact: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
    let counts = draw(&logits, &at(1.0), 60_000);
    assert!(score(&counts, &softmax(&exact, &at(1.03))) > LIMIT);
}

#[test]
fn uniform_numbers_are_uniform_over_tokens_positions_choices_and_seeds() {
    const BINS: usize = 256;
    let flat = [1.0 / BINS as f64; BINS];
    let check = |name: &str, draw: &dyn Fn(u32) -> f64| {
        let mut counts = [0; BINS];
        (0..200_000).for_each(|i| counts[(draw(i) * BINS as f64) as usize] += 1);
        let got = score(&counts, &flat);
        assert!(got.abs() < LIMIT, "over {name}: {got:.2} standard deviations");
    };
    check("tokens", &|i| noise::uniform(noise::key(1, 0, 5), i));
    check("positions", &|i| noise::uniform(noise::key(1, 0, i), 17));
    check("choices", &|i| noise::uniform(noise::key(1, i, 5), 17));
    check("seeds", &|i| noise::uniform(noise::key(u64::from(i), 0, 5), 17));
}

#[test]
fn gumbel_noise_has_its_distribution() {
    const BINS: usize = 200;
    let mut counts = [0; BINS];
    for i in 0..200_000 {
        // The distribution function of the noise makes it uniform.
        let p = (-(-noise::gumbel(3, 1, i / 100, i % 100)).exp()).exp();
        counts[((p * BINS as f64) as usize).min(BINS - 1)] += 1;
    }
    let got = score(&counts, &[1.0 / BINS as f64; BINS]);
    assert!(got.abs() < LIMIT, "{got:.2} standard deviations");
}

#[test]
fn noise_of_neighbours_is_independent() {
    const N: u32 = 100_000;
    type Noise = fn(u32, u32) -> f64;
    let pairs: [(&str, Noise); 4] = [
        ("tokens", |i, step| noise::uniform(noise::key(9, 0, 4), i + step)),
        ("positions", |i, step| noise::uniform(noise::key(9, 0, i + step), 300)),
        ("choices", |i, step| noise::uniform(noise::key(9, step, i), 300)),
        ("seeds", |i, step| noise::uniform(noise::key(u64::from(9 + step), 0, i), 300)),
    ];
    for (name, noise) in pairs {
        for step in 1..=4 {
            // A correlation of n independent pairs has standard deviation 1 / sqrt n.
            let sum: f64 = (0..N).map(|i| (noise(i, 0) - 0.5) * (noise(i, step) - 0.5)).sum();
            let got = sum / f64::from(N) * 12.0 * f64::from(N).sqrt();
            assert!(got.abs() < LIMIT, "{name} {step} apart: {got:.2} standard deviations");
            // And pairs fill the square evenly.
            let mut counts = [0; 256];
            for i in 0..N {
                let cell = |x: f64| (x * 16.0) as usize;
                counts[cell(noise(i, 0)) * 16 + cell(noise(i, step))] += 1;
            }
            let got = score(&counts, &[1.0 / 256.0; 256]);
            assert!(got.abs() < LIMIT, "{name} {step} apart: {got:.2} standard deviations");
        }
    }
}

#[test]
fn successive_samples_are_independent() {
    let logits = [0.3f32, -0.2, 0.9, 0.0];
    let sampling = at(1.0);
    let history = History::default();
    let token = |position, choice| {
        let query = SampleQuery {
            row: 0,
            sampling: &sampling,
            history: &history,
            path: &[],
            position,
            choice,
            banned: &[],
            allowed: None,
            top_logprobs: None,
            given: None,
        };
        choose(&logits, &query).token as usize
    };
    let exact: Vec<f64> = logits.iter().map(|&l| f64::from(l)).collect();
    let p = softmax(&exact, &sampling);
    let both: Vec<f64> = p.iter().flat_map(|a| p.iter().map(move |b| a * b)).collect();
    let (mut positions, mut choices) = ([0; 16], [0; 16]);
    for i in 0..80_000 {
        positions[token(2 * i, 0) * 4 + token(2 * i + 1, 0)] += 1;
        choices[token(i, 1) * 4 + token(i, 2)] += 1;
    }
    for (name, counts) in [("positions", positions), ("choices", choices)] {
        let got = score(&counts, &both);
        assert!(got.abs() < LIMIT, "{name}: {got:.2} standard deviations");
    }
}
