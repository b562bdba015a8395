//! The arithmetic of the tensor cores, plain and slow. This module defines the bits of a
//! [`CudaBackend`](super::CudaBackend) that computes with [`Arithmetic::Tensor`].
//!
//! Weights and inputs are bfloat16, sums are f32. What is part of the definition: which 16 products
//! form a step, the order of the steps, the slices of a sum and the order in which they are added,
//! and what is done with a finished sum. What is not: how many rows there are, which kernel runs,
//! and how it divides the work.
//!
//! - **A step** ([`step`]) adds 16 products to a sum, those of 16 neighbouring inputs.
//! - **A projection** ([`project`]) cuts its blocks of 32 inputs into groups of at most 128 blocks,
//!   and each group into 8 slices. A slice is one chain of steps. Slices are added in order, then
//!   groups. What is not bfloat16 is rounded to it, half to even.
//! - **A norm** ([`rms_norm`]) adds squares in 256 lanes, a norm of a head in 32, and folds them.
//! - **Attention** ([`attend`]) works in blocks of 128 positions aligned to absolute position. A
//!   block's weights are rounded to bfloat16; its sums of values, and the total of its weights as a
//!   column of ones, are one chain of steps over the positions. Blocks are merged in order. The first
//!   block may begin within a block of absolute positions, where a window does: in any block, the
//!   first position that is seen takes the first place of the first step.
//! - **Experts** are chosen, weighted and added as [`mod@reference`] has it. What one makes of a row
//!   ([`expert`]) is two projections, with the gated values between them in f32 and rounded to
//!   bfloat16 for the second.
//!
//! The model of a step is Hopper's. On another GPU rows still depend on themselves alone, but other
//! bits may come out.
//!
//! [`Arithmetic::Tensor`]: super::Arithmetic::Tensor

use std::ops::Range;

use half::bf16;

use crate::math::{exp, fma};
use crate::{Activation, reference};

/// Products of one step.
pub const STEP: usize = 16;
/// Inputs of a block: two steps.
pub const PAIR: usize = 2 * STEP;
/// Blocks of [`PAIR`] inputs in a group at most.
pub const GROUP: usize = 128;
/// Slices of a group.
pub const SLICES: usize = 8;
/// Positions of one attention block.
pub const BLOCK: usize = 128;
/// Lanes in which a row's squares are added.
pub const NORM_LANES: usize = 256;
/// Lanes in which a head's squares are added.
pub const HEAD_NORM_LANES: usize = 32;

/// Sign, significand and exponent of a finite number: the value is the significand times
/// 2^(exponent - bits of the fraction).
fn split(sign: bool, field: i32, fraction: u64, bits: u32) -> (bool, u64, i32) {
    let hidden = if field > 0 { 1 << bits } else { 0 };
    (sign, hidden | fraction, field.max(1) - 127)
}

fn split_bf16(x: bf16) -> (bool, u64, i32) {
    let bits = x.to_bits();
    split(bits >> 15 == 1, i32::from(bits >> 7 & 0xff), u64::from(bits & 0x7f), 7)
}

/// Adds 16 products to `sum` as a tensor core does: every term is cut toward zero 25 bits below the
/// largest exponent, the cut terms are added exactly, and their sum is cut toward zero to f32.
pub fn step(sum: f32, x: &[bf16; STEP], w: &[bf16; STEP]) -> f32 {
    const BELOW: i32 = 25;
    let pairs = || x.iter().zip(w);
    if !sum.is_finite() || pairs().any(|(x, w)| !x.is_finite() || !w.is_finite()) {
        return pairs().fold(sum, |sum, (x, w)| sum + x.to_f32() * w.to_f32());
    }
    // Of each term: its sign, its significand, the exponent that it counts for, and the exponent
    // of its lowest bit.
    let mut terms = [(false, 0u64, 0i32, 0i32); STEP + 1];
    for (term, (&x, &w)) in terms.iter_mut().zip(pairs()) {
        let ((x_sign, x, x_exponent), (w_sign, w, w_exponent)) = (split_bf16(x), split_bf16(w));
        let exponent = x_exponent + w_exponent;
        *term = (x_sign != w_sign, x * w, exponent, exponent - 14);
    }
    let bits = sum.to_bits();
    let (sign, significand, exponent) =
        split(bits >> 31 == 1, (bits >> 23 & 0xff) as i32, u64::from(bits & 0x7f_ffff), 23);
    terms[STEP] = (sign, significand, exponent, exponent - 23);

    let largest = terms.iter().filter(|term| term.1 != 0).map(|term| term.2).max();
    let Some(largest) = largest else { return 0.0 };
    let unit = largest - BELOW;
    let mut total = 0i64;
    for (sign, significand, _, lowest) in terms {
        let shift = lowest - unit;
        let magnitude = match shift {
            0.. => significand << shift,
            -63..0 => significand >> -shift,
            _ => 0,
        } as i64;
        total += if sign { -magnitude } else { magnitude };
    }
    if total == 0 {
        return 0.0;
    }
    // Down to 24 bits, or fewer where the result is subnormal.
    let magnitude = total.unsigned_abs();
    let highest = 63 - magnitude.leading_zeros() as i32 + unit;
    let lowest = (highest - 23).max(-149);
    let significand = match lowest - unit {
        cut @ 1.. => magnitude >> cut.min(63),
        grow => magnitude << -grow,
    };
    let value = significand as f32 * power_of_two(lowest);
    if total < 0 { -value } else { value }
}

/// 2^exponent; infinite where f32 has none so large.
fn power_of_two(exponent: i32) -> f32 {
    match exponent {
        128.. => f32::INFINITY,
        -126.. => f32::from_bits(((exponent + 127) as u32) << 23),
        _ => f32::from_bits(1 << (exponent + 149)),
    }
}

/// One chain of steps over two vectors; what is missing of the last step is zero.
pub fn chain(x: &[bf16], w: &[bf16]) -> f32 {
    x.chunks(STEP).zip(w.chunks(STEP)).fold(0.0, |sum, (x, w)| {
        let mut factors = [[bf16::ZERO; STEP]; 2];
        factors[0][..x.len()].copy_from_slice(x);
        factors[1][..w.len()].copy_from_slice(w);
        step(sum, &factors[0], &factors[1])
    })
}

/// One output of a projection.
pub fn project(x: &[bf16], w: &[bf16]) -> f32 {
    let blocks = x.len().div_ceil(PAIR);
    let groups = blocks.div_ceil(GROUP).max(1);
    let inputs = |from: usize, to: usize| from * PAIR..x.len().min(to * PAIR);
    let group = |g: usize| {
        let (first, end) = (g * blocks / groups, (g + 1) * blocks / groups);
        let at = |s: usize| first + s * (end - first) / SLICES;
        let slices = (0..SLICES).map(|s| inputs(at(s), at(s + 1)));
        slices.map(|k| chain(&x[k.clone()], &w[k])).reduce(|sum, slice| sum + slice)
    };
    (0..groups).filter_map(group).reduce(|sum, group| sum + group).unwrap_or(0.0)
}

/// What an expert makes of a row: `gate_up` has the weights of its gates, then those of its ups, output
/// by output, and `down` those of the projection back.
pub fn expert(x: &[bf16], activation: Activation, gate_up: &[bf16], down: &[bf16]) -> Vec<f32> {
    let both: Vec<f32> = gate_up.chunks(x.len()).map(|w| project(x, w)).collect();
    let mut gated = vec![0.0; both.len() / 2];
    reference::gate(activation, &both, &mut gated);
    let gated: Vec<bf16> = gated.into_iter().map(bf16::from_f32).collect();
    down.chunks(gated.len()).map(|w| project(&gated, w)).collect()
}

/// The sum of squares in `lanes` lanes, the upper half added onto the lower until one is left.
fn squares(x: &[f32], lanes: usize) -> f32 {
    let mut sums = vec![0.0f32; lanes];
    for (i, &x) in x.iter().enumerate() {
        sums[i % lanes] = fma(x, x, sums[i % lanes]);
    }
    while sums.len() > 1 {
        let upper = sums.split_off(sums.len() / 2);
        sums.iter_mut().zip(upper).for_each(|(lower, upper)| *lower += upper);
    }
    sums[0]
}

/// Root-mean-square norm of a row ([`NORM_LANES`]) or of a head ([`HEAD_NORM_LANES`]).
pub fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32, lanes: usize, out: &mut [f32]) {
    let scale = 1.0 / (squares(input, lanes) / input.len() as f32 + epsilon).sqrt();
    for ((out, x), w) in out.iter_mut().zip(input).zip(weight) {
        *out = (x * scale) * w;
    }
}

/// Attention of one head of one row over `positions`, whose last is the row's own; `keys` and
/// `values` answer the row of a position.
pub fn attend<'a>(
    query: &[bf16],
    scale: f32,
    positions: Range<usize>,
    keys: impl Fn(usize) -> &'a [bf16],
    values: impl Fn(usize) -> &'a [bf16],
    out: &mut [f32],
) {
    let (mut largest, mut total) = (0.0f32, 0.0f32);
    let mut start = positions.start;
    while start < positions.end {
        let seen = start..positions.end.min((start / BLOCK + 1) * BLOCK);
        let first = start == positions.start;
        let scores: Vec<f32> = seen.clone().map(|p| chain(query, keys(p)) * scale).collect();
        let block_largest = scores.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
        let weights: Vec<bf16> =
            scores.iter().map(|score| bf16::from_f32(exp(score - block_largest))).collect();
        let block_total = over_positions(&weights, |_| bf16::ONE);
        let both = if first || block_largest > largest { block_largest } else { largest };
        let (old, new) = (exp(largest - both), exp(block_largest - both));
        total = if first { block_total } else { fma(total, old, block_total * new) };
        for (column, out) in out.iter_mut().enumerate() {
            let part = over_positions(&weights, |i| values(start + i)[column]);
            *out = if first { part } else { fma(*out, old, part * new) };
        }
        largest = both;
        start = seen.end;
    }
    let inverse = 1.0 / total;
    out.iter_mut().for_each(|out| *out *= inverse);
}

/// One chain over the positions of a block, 16 neighbours a step.
fn over_positions(weights: &[bf16], value: impl Fn(usize) -> bf16) -> f32 {
    let mut sum = 0.0;
    for start in (0..weights.len()).step_by(STEP) {
        let (mut w, mut v) = ([bf16::ZERO; STEP], [bf16::ZERO; STEP]);
        for i in start..weights.len().min(start + STEP) {
            (w[i - start], v[i - start]) = (weights[i], value(i));
        }
        sum = step(sum, &w, &v);
    }
    sum
}

#[cfg(test)]
mod tests {
    use super::*;

    fn halves(values: &[f32]) -> Vec<bf16> {
        values.iter().map(|&x| bf16::from_f32(x)).collect()
    }

    /// Numbers between -1 and 1.
    fn random() -> impl FnMut() -> f32 {
        let mut state = 1u64;
        move || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 40) as f32 / (1u64 << 23) as f32 - 1.0
        }
    }

    fn one_step(sum: f32, x: &[f32], w: &[f32]) -> f32 {
        let (mut xs, mut ws) = ([bf16::ZERO; STEP], [bf16::ZERO; STEP]);
        xs[..x.len()].copy_from_slice(&halves(x));
        ws[..w.len()].copy_from_slice(&halves(w));
        step(sum, &xs, &ws)
    }

    #[test]
    fn small_integers_are_added_exactly() {
        let x: Vec<f32> = (1..=16).map(|i| i as f32).collect();
        let w: Vec<f32> = (1..=16).map(|i| if i % 3 == 0 { -1.0 } else { 2.0 }).collect();
        let want: f32 = x.iter().zip(&w).map(|(x, w)| x * w).sum();
        assert_eq!(one_step(100.0, &x, &w), 100.0 + want);
    }

    #[test]
    fn terms_are_cut_toward_zero_at_25_bits() {
        // 2^-25 of the largest term is the last bit kept; half of it is lost, of either sign.
        let (kept, lost) = (2f32.powi(-25), 2f32.powi(-26));
        assert_eq!(one_step(0.0, &[1.0, -1.0, kept], &[1.0, 1.0, 1.0]), kept);
        assert_eq!(one_step(0.0, &[1.0, -1.0, lost], &[1.0, 1.0, 1.0]), 0.0);
        assert_eq!(one_step(0.0, &[1.0, -1.0, -lost], &[1.0, 1.0, 1.0]), 0.0);
        // Two lost halves do not make a whole one.
        assert_eq!(one_step(0.0, &[1.0, -1.0, lost, lost], &[1.0; 4]), 0.0);
    }

    #[test]
    fn sums_are_cut_toward_zero_to_24_bits() {
        // 1 + 2^-24 + 2^-25 would round up to 1 + 2^-23.
        let x = [1.0, 2f32.powi(-24), 2f32.powi(-25)];
        assert_eq!(one_step(0.0, &x, &[1.0; 3]), 1.0);
        assert_eq!(one_step(0.0, &x, &[-1.0; 3]), -1.0);
        assert_eq!(one_step(1.0, &[2f32.powi(-23)], &[1.0]), 1.0 + 2f32.powi(-23));
    }

    #[test]
    fn a_product_counts_for_the_exponents_of_its_factors() {
        // 1.5 * 1.5 = 2.25 counts for exponent 0, so that 2^-25 is kept beside it.
        let x = [1.5, -1.5, 2f32.powi(-25)];
        assert_eq!(one_step(0.0, &x, &[1.5, 1.5, 1.0]), 2f32.powi(-25));
    }

    #[test]
    fn subnormal_sums_and_overflow_are_kept() {
        let tiny = 2f32.powi(-126);
        assert_eq!(one_step(0.0, &[tiny], &[0.5]), tiny / 2.0);
        assert_eq!(one_step(0.0, &[-tiny], &[2f32.powi(-10)]), -tiny / 1024.0);
        assert_eq!(one_step(0.0, &[2f32.powi(100)], &[2f32.powi(100)]), f32::INFINITY);
        assert_eq!(one_step(f32::MAX, &[2f32.powi(127)], &[1.0]), f32::INFINITY);
        assert!(one_step(f32::INFINITY, &[f32::NEG_INFINITY], &[1.0]).is_nan());
        let zero = one_step(-0.0, &[-0.0], &[1.0]);
        assert_eq!(zero.to_bits(), 0);
    }

    /// Against sums in f64: a step cuts at most 17 terms and its result, each by less than 2^-23 of
    /// the largest.
    #[test]
    fn projections_agree_with_f64() {
        let mut random = random();
        for inputs in [1, 8, 31, 32, 100, 256, 4096, 5000] {
            let x: Vec<bf16> = (0..inputs).map(|_| bf16::from_f32(random())).collect();
            let w: Vec<bf16> = (0..inputs).map(|_| bf16::from_f32(random())).collect();
            let product = |(x, w): (&bf16, &bf16)| f64::from(x.to_f32()) * f64::from(w.to_f32());
            let want: f64 = x.iter().zip(&w).map(product).sum();
            let scale: f64 = x.iter().zip(&w).map(|pair| product(pair).abs()).sum();
            let got = f64::from(project(&x, &w));
            assert!(
                (got - want).abs() <= scale * 18.0 / (1 << 22) as f64,
                "{inputs}: {got} {want}"
            );
        }
    }

    #[test]
    fn an_expert_agrees_with_f64() {
        let (inputs, gates, outputs) = (50, 24, 19);
        let mut random = random();
        let mut values =
            |count: usize| -> Vec<bf16> { (0..count).map(|_| bf16::from_f32(random())).collect() };
        let (x, both, down) = (values(inputs), values(2 * gates * inputs), values(outputs * gates));
        let got = expert(&x, Activation::Silu, &both, &down);
        let dot = |w: &[bf16], x: &[f64]| -> f64 {
            w.iter().zip(x).map(|(w, x)| f64::from(w.to_f32()) * x).sum()
        };
        let x: Vec<f64> = x.iter().map(|x| f64::from(x.to_f32())).collect();
        let both: Vec<f64> = both.chunks(inputs).map(|w| dot(w, &x)).collect();
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gated: Vec<f64> = (0..gates).map(|n| silu(both[n]) * both[gates + n]).collect();
        let most: f64 = gated.iter().map(|x| x.abs()).sum();
        assert_eq!(got.len(), outputs);
        for (got, w) in got.iter().zip(down.chunks(gates)) {
            // Gated values are rounded to 8 bits.
            assert!((f64::from(*got) - dot(w, &gated)).abs() < most / 256.0);
        }
    }

    /// A query, and as many keys and values.
    fn random_rows(width: usize, positions: usize) -> (Vec<bf16>, Vec<Vec<bf16>>, Vec<Vec<bf16>>) {
        let mut random = random();
        let mut rows = |count: usize| -> Vec<Vec<bf16>> {
            let mut row = || (0..width).map(|_| bf16::from_f32(random())).collect();
            (0..count).map(|_| row()).collect()
        };
        (rows(1).remove(0), rows(positions), rows(positions))
    }

    #[test]
    fn attention_over_any_window_agrees_with_f64() {
        let (width, positions) = (40, 300);
        let (query, keys, values) = random_rows(width, positions);
        let dot = |a: &[bf16], b: &[bf16]| -> f64 {
            a.iter().zip(b).map(|(a, b)| f64::from(a.to_f32()) * f64::from(b.to_f32())).sum()
        };
        for first in [0, 1, 37, 127, 128, 200, 299] {
            let mut out = vec![0.0; width];
            attend(&query, 0.3, first..positions, |p| &keys[p], |p| &values[p], &mut out);
            let weights: Vec<f64> =
                keys[first..].iter().map(|k| (0.3 * dot(&query, k)).exp()).collect();
            let total: f64 = weights.iter().sum();
            for (column, &out) in out.iter().enumerate() {
                let values = values[first..].iter().map(|v| f64::from(v[column].to_f32()));
                let want: f64 = weights.iter().zip(values).map(|(w, v)| w * v).sum::<f64>() / total;
                // Weights are rounded to 8 bits.
                assert!((f64::from(out) - want).abs() < 1e-3, "{first}: {out} {want}");
            }
        }
    }

    #[test]
    fn whole_blocks_before_a_window_change_no_bit() {
        let (width, positions) = (40, 200);
        let (query, keys, values) = random_rows(width, positions);
        let attended = |before: usize| {
            let mut out = vec![0.0; width];
            let seen = 10 + before..positions + before;
            attend(&query, 0.3, seen, |p| &keys[p - before], |p| &values[p - before], &mut out);
            out
        };
        assert_eq!(attended(0), attended(BLOCK));
        assert_eq!(attended(0), attended(5 * BLOCK));
        assert_ne!(attended(0), attended(1));
    }
}
