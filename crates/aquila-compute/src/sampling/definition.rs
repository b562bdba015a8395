//! The choice of a token, plain and slow. This module defines the tokens.
//!
//! A logit that is not a number counts as minus infinity. Probabilities are in proportion to
//! [`weight`]s, which are multiples of 2^-34: their sums are exact in f64 for up to 2^19 tokens,
//! so no order of adding is part of the definition.

use super::{Candidate, Choice, SampleQuery, Sampling, Weights, noise};
use crate::math;

/// `e^d` to the nearest multiple of 2^-34, half to even, where `d` is a logit less the largest
/// one; zero for what is not a number.
///
/// The operations of [`math::exp`] without fusing any, so that it is as quick, and the same, where
/// no fused instruction is to be had.
#[inline(always)]
pub fn weight(d: f32) -> f64 {
    const ROUND_F32: f32 = 12_582_912.0; // 1.5 * 2^23, where neighbours are 1 apart.
    const ROUND_F64: f64 = 393_216.0; // 1.5 * 2^18, where neighbours are 2^-34 apart.
    let shifted = d * std::f32::consts::LOG2_E + ROUND_F32;
    let n = shifted - ROUND_F32;
    // The first product is exact: the constant has ten bits.
    let r = (d - n * math::EXP_LN2[0]) - n * math::EXP_LN2[1];
    let mut p = math::EXP_POLY[0];
    for c in &math::EXP_POLY[1..] {
        p = p * r + *c;
    }
    let p = (p * (r * r) + r) + 1.0;
    // The low bits of the shifted number are the integer itself, without a conversion.
    let n = shifted.to_bits().wrapping_sub(ROUND_F32.to_bits());
    let power = f32::from_bits(n.wrapping_add(127) << 23);
    let e = if d >= WEIGHTLESS { p * power } else { 0.0 };
    (f64::from(e) + ROUND_F64) - ROUND_F64
}

/// A logit this far below the largest one has no weight: `e^-24.3 < 2^-35`.
pub(super) const WEIGHTLESS: f32 = -24.3;

/// Chooses for one row; `logits` are that row's.
pub fn choose(logits: &[f32], query: &SampleQuery<'_>) -> Choice {
    let token = query.given.unwrap_or_else(|| token(logits, query));
    let Some(top) = query.top_logprobs else {
        return Choice { token, logprob: None, top: Vec::new() };
    };
    let logprobs = logprobs(logits);
    let logprob = logprobs.get(token as usize).copied().unwrap_or(f32::NEG_INFINITY);
    let values: Vec<f32> = logits.iter().map(|&l| scaled(l, 1.0)).collect();
    let top = best_first(&values).into_iter().take(top).map(|v| (v, logprobs[v as usize]));
    Choice { token, logprob: Some(logprob), top: top.collect() }
}

/// The log-probability of every token.
fn logprobs(logits: &[f32]) -> Vec<f32> {
    let values: Vec<f32> = logits.iter().map(|&l| scaled(l, 1.0)).collect();
    let max = values.iter().fold(f32::NEG_INFINITY, |m, &l| if l > m { l } else { m });
    let total: f64 = values.iter().map(|&l| weight(l - max)).sum();
    let of = |l: f32| (f64::from(l - max) - math::ln(total)) as f32;
    values.iter().map(|&l| if l > f32::NEG_INFINITY { of(l) } else { f32::NEG_INFINITY }).collect()
}

/// The token alone.
fn token(logits: &[f32], query: &SampleQuery<'_>) -> u32 {
    let sampling = query.sampling;
    let values = adjusted(logits, query);
    if sampling.is_greedy() {
        let best = best_first(&values).first().copied();
        return best.unwrap_or_else(|| lowest_allowed(query, logits.len()));
    }
    let values: Vec<f32> = values.iter().map(|&l| scaled(l, sampling.temperature)).collect();
    let kept = filtered(&values, sampling);
    let score = |v: u32| {
        let noise = noise::gumbel(sampling.seed, query.choice, query.position, v);
        f64::from(values[v as usize]) + noise
    };
    kept.into_iter()
        .reduce(|a, b| if (score(b), a) > (score(a), b) { b } else { a })
        .unwrap_or_else(|| lowest_allowed(query, logits.len()))
}

/// What a draft offers after one row; see [`super::topk_candidates`].
pub fn topk_candidates(logits: &[f32], query: &SampleQuery<'_>, count: usize) -> Vec<Candidate> {
    let sampling = query.sampling;
    let values = adjusted(logits, query);
    // Each token with how far its score is below the best one.
    let below: Vec<(f32, u32)> = if sampling.is_greedy() {
        let values: Vec<f32> = values.iter().map(|&l| scaled(l, 1.0)).collect();
        let order = best_first(&values);
        let max = order.first().map_or(0.0, |&v| values[v as usize]);
        order.into_iter().map(|v| (values[v as usize] - max, v)).collect()
    } else {
        let values: Vec<f32> = values.iter().map(|&l| scaled(l, sampling.temperature)).collect();
        let noisy = |v: u32| {
            let noise = noise::gumbel(sampling.seed, query.choice, query.position, v);
            (f64::from(values[v as usize]) + noise, v)
        };
        let mut scores: Vec<_> = filtered(&values, sampling).into_iter().map(noisy).collect();
        scores.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
        let best = scores.first().map_or(0.0, |s| s.0);
        scores.retain(|s| s.0 >= best - super::row::NEAR);
        scores.into_iter().map(|(score, v)| ((score - best) as f32, v)).collect()
    };
    let total: f64 = below.iter().map(|&(d, _)| weight(d)).sum();
    let share = |d: f32| if count == 1 { 1.0 } else { (weight(d) / total) as f32 };
    let candidate = |&(d, token): &(f32, u32)| Candidate { token, probability: share(d) };
    below.iter().take(count).map(candidate).collect()
}

/// The distribution of which the token is a sample; a greedy one is certain.
pub fn filtered_probs(logits: &[f32], query: &SampleQuery<'_>) -> Weights {
    if query.sampling.is_greedy() {
        return Weights::certain(token(logits, query));
    }
    let values = adjusted(logits, query);
    let values: Vec<f32> = values.iter().map(|&l| scaled(l, query.sampling.temperature)).collect();
    let kept = filtered(&values, query.sampling);
    let Some(&best) = kept.first() else {
        return Weights::certain(lowest_allowed(query, logits.len()));
    };
    let max = values[best as usize];
    Weights::new(kept.into_iter().map(|v| (v, weight(values[v as usize] - max))).collect())
}

/// Penalties, bias and bans.
fn adjusted(logits: &[f32], query: &SampleQuery<'_>) -> Vec<f32> {
    let s = query.sampling;
    let mut values = logits.to_vec();
    for (v, l) in (0u32..).zip(&mut values) {
        let (prompt, output) = query.history.get(v);
        let output = output as usize + query.path.iter().filter(|&&t| t == v).count();
        if (prompt || output > 0) && s.repetition_penalty != 1.0 {
            *l = if *l > 0.0 { *l / s.repetition_penalty } else { *l * s.repetition_penalty };
        }
        if output > 0 {
            *l -= s.frequency_penalty * output as f32;
            *l -= s.presence_penalty;
        }
        for (_, bias) in s.logit_bias.iter().filter(|(t, _)| *t == v) {
            *l += bias;
        }
        let allowed = query.allowed.is_none_or(|allowed| allowed.contains(v));
        if l.is_nan() || query.banned.contains(&v) || !allowed {
            *l = f32::NEG_INFINITY;
        }
    }
    values
}

/// A logit divided by the temperature, kept from overflowing upwards.
#[inline(always)]
pub(super) fn scaled(logit: f32, temperature: f32) -> f32 {
    let z = logit / temperature;
    if z > f32::MAX { f32::MAX } else { z }
}

/// The tokens that are possible at all, most likely first, ties to the lowest id.
fn best_first(values: &[f32]) -> Vec<u32> {
    let mut order: Vec<u32> =
        (0..values.len() as u32).filter(|&v| values[v as usize] > f32::NEG_INFINITY).collect();
    // The sort is stable; both zeros are equal.
    order.sort_by(|&a, &b| (values[b as usize] + 0.0).total_cmp(&(values[a as usize] + 0.0)));
    order
}

/// The tokens that top-k, top-p and min-p keep.
fn filtered(values: &[f32], sampling: &Sampling) -> Vec<u32> {
    let mut kept = best_first(values);
    let Some(&best) = kept.first() else { return kept };
    let max = values[best as usize];
    if sampling.top_k > 0 {
        kept.truncate(sampling.top_k as usize);
    }
    if sampling.top_p < 1.0 {
        let weight_of = |v: u32| weight(values[v as usize] - max);
        let total: f64 = kept.iter().map(|&v| weight_of(v)).sum();
        let target = f64::from(sampling.top_p) * total;
        let (mut reached, mut count) = (0.0, 0);
        while count == 0 || (reached < target && count < kept.len()) {
            reached += weight_of(kept[count]);
            count += 1;
        }
        kept.truncate(count);
    }
    if sampling.min_p > 0.0 {
        let floor = min_p_floor(sampling.min_p);
        kept.retain(|&v| f64::from(values[v as usize]) - f64::from(max) >= floor);
    }
    kept
}

/// How far below the largest logit min-p keeps tokens: never so little that none is left.
pub(crate) fn min_p_floor(min_p: f32) -> f64 {
    if min_p < 1.0 { math::ln(f64::from(min_p)) } else { 0.0 }
}

/// The answer where no token is possible.
pub(super) fn lowest_allowed(query: &SampleQuery<'_>, tokens: usize) -> u32 {
    let grammar = |v: &u32| query.allowed.is_none_or(|allowed| allowed.contains(*v));
    let mut allowed = (0..tokens as u32).filter(grammar);
    let first = allowed.next().unwrap_or(0);
    [first].into_iter().chain(allowed).find(|v| !query.banned.contains(v)).unwrap_or(first)
}
