//! Every operation once more, plain and slow. This module defines the bits.
//!
//! The order of operations is part of the definition: projections add one product after the
//! other, in the order of their inputs, with fused multiply-adds; sums over a vector use 16 lanes
//! (element i goes to lane i mod 16) and [`fold`]; attention works in blocks of [`BLOCK`]
//! positions, aligned to absolute position, each with a softmax of its own, merged in order.
//! Vectors are padded with zeros to a multiple of 16 lanes.

use std::ops::Range;

use half::bf16;

use crate::math::{exp, fma, gelu_tanh, round_half_even, silu, tanh};
use crate::shape::INT8_GROUP;
use crate::{
    Accumulate, Activation, AttentionParams, BlockTables, ForwardPlan, KvDtype, RopeTable,
};

/// Positions of one attention block.
pub const BLOCK: usize = 64;

/// Adds up 16 lanes: the upper half onto the lower, until one is left.
pub fn fold(mut lanes: [f32; 16]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
    }
    lanes[0]
}

/// The largest of 16 lanes, compared in the order of [`fold`].
pub fn fold_max(mut lanes: [f32; 16]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = if lanes[i] > lanes[i + width] { lanes[i] } else { lanes[i + width] };
        }
    }
    lanes[0]
}

/// The largest element of a vector, in 16 lanes.
pub fn largest(a: &[f32]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; 16];
    for (i, &x) in a.iter().enumerate() {
        lanes[i % 16] = if x > lanes[i % 16] { x } else { lanes[i % 16] };
    }
    fold_max(lanes)
}

/// The inner product of two vectors, in 16 lanes.
pub fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    for i in 0..a.len().next_multiple_of(16) {
        let (x, y) = if i < a.len() { (a[i], b[i]) } else { (0.0, 0.0) };
        lanes[i % 16] = fma(x, y, lanes[i % 16]);
    }
    fold(lanes)
}

/// The sum of a vector, in 16 lanes.
pub fn sum(a: &[f32]) -> f32 {
    let mut lanes = [0.0; 16];
    for i in 0..a.len().next_multiple_of(16) {
        lanes[i % 16] += if i < a.len() { a[i] } else { 0.0 };
    }
    fold(lanes)
}

/// Root-mean-square norm of one row: `(x / rms) * weight`.
pub fn rms_norm(input: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
    let scale = 1.0 / (dot(input, input) / input.len() as f32 + epsilon).sqrt();
    for ((o, x), w) in out.iter_mut().zip(input).zip(weight) {
        *o = (x * scale) * w;
    }
}

/// One output of a projection of f32 or bf16 weights (widened).
pub fn project(input: &[f32], weight: &[f32]) -> f32 {
    input.iter().zip(weight).fold(0.0, |sum, (&x, &w)| fma(x, w, sum))
}

/// Puts a projection's result, with its bias, where it belongs.
pub fn accumulate(value: f32, bias: Option<f32>, accumulate: Accumulate, out: &mut f32) {
    let value = bias.map_or(value, |b| value + b);
    *out = match accumulate {
        Accumulate::Set => value,
        Accumulate::Add => *out + value,
    };
}

/// A group of weights as 8-bit integers with a bfloat16 scale, rounded up so that none exceeds 127.
pub fn quantize_weights(group: &[f32]) -> (Vec<i8>, f32) {
    let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    let mut scale = bf16::from_f32(largest / 127.0).to_f32();
    if scale * 127.0 < largest {
        scale = f32::from_bits(scale.to_bits() + 0x1_0000);
    }
    if scale == 0.0 {
        return (vec![0; group.len()], 0.0);
    }
    (group.iter().map(|x| round_half_even(x / scale) as i8).collect(), scale)
}

/// A group of activations as 8-bit integers with an f32 scale.
fn quantize_row_group(group: &[f32]) -> (Vec<i8>, f32) {
    let largest = group.iter().fold(0.0f32, |m, x| m.max(x.abs()));
    if largest < 1e-30 {
        return (vec![0; group.len()], 0.0);
    }
    let inverse = 127.0 / largest;
    (group.iter().map(|x| round_half_even(x * inverse) as i8).collect(), largest / 127.0)
}

/// One output of an int8 projection: `weight` holds one (values, scale) per group of inputs.
pub fn project_int8(input: &[f32], weight: &[(Vec<i8>, f32)]) -> f32 {
    let mut sum = 0.0;
    for (x, (w, w_scale)) in input.chunks(INT8_GROUP).zip(weight) {
        let (x, x_scale) = quantize_row_group(x);
        let dot: i32 = x.iter().zip(w).map(|(&x, &w)| i32::from(x) * i32::from(w)).sum();
        sum = fma(dot as f32, x_scale * w_scale, sum);
    }
    sum
}

/// Rotates one head by its position.
pub fn apply_rope(head: &mut [f32], rope: &RopeTable, position: usize) {
    let half = rope.half;
    for i in 0..half {
        let (cos, sin) = (rope.cos[position * half + i], rope.sin[position * half + i]);
        let (a, b) = (head[i], head[i + half]);
        head[i] = fma(a, cos, -(b * sin));
        head[i + half] = fma(b, cos, a * sin);
    }
}

/// What a stored key or value reads as.
pub fn stored(value: f32, dtype: KvDtype) -> f32 {
    match dtype {
        KvDtype::F32 => value,
        KvDtype::Bf16 => bf16::from_f32(value).to_f32(),
    }
}

/// Attention of one head of one row over `positions`, whose last is the row's own; `keys` and
/// `values` answer the row of a position.
///
/// The first block may begin within a block of absolute positions. In any block, the first
/// position that is seen takes lane 0.
pub fn attend<'a>(
    query: &[f32],
    scale: f32,
    positions: Range<usize>,
    keys: impl Fn(usize) -> &'a [f32],
    values: impl Fn(usize) -> &'a [f32],
    out: &mut [f32],
) {
    let (mut max, mut total) = (0.0f32, 0.0f32);
    let mut part = vec![0.0; out.len()];
    let mut start = positions.start;
    while start < positions.end {
        let block = start..positions.end.min((start / BLOCK + 1) * BLOCK);
        let (first, next) = (start == positions.start, block.end);
        let scores: Vec<f32> = block.clone().map(|p| dot(query, keys(p)) * scale).collect();
        let block_max = largest(&scores);
        let weights: Vec<f32> = scores.iter().map(|s| exp(s - block_max)).collect();
        let block_total = sum(&weights);
        part.fill(0.0);
        for (p, &w) in block.zip(&weights) {
            for (o, &v) in part.iter_mut().zip(values(p)) {
                *o = fma(w, v, *o);
            }
        }
        start = next;
        if first {
            (max, total) = (block_max, block_total);
            out.copy_from_slice(&part);
            continue;
        }
        let new_max = if block_max > max { block_max } else { max };
        let (old, new) = (exp(max - new_max), exp(block_max - new_max));
        total = fma(total, old, block_total * new);
        for (o, &x) in out.iter_mut().zip(&part) {
            *o = fma(*o, old, x * new);
        }
        max = new_max;
    }
    let inverse = 1.0 / total;
    for o in out.iter_mut() {
        *o *= inverse;
    }
}

/// Attention of all heads of one row of queries, keys and values over what the row sees.
/// `key` and `value` answer the stored row of (slot, kv head).
#[allow(clippy::too_many_arguments)]
pub fn attend_row<'a>(
    plan: &ForwardPlan,
    tables: &BlockTables,
    row: usize,
    queries: &[f32],
    params: AttentionParams,
    key: impl Fn(u32, usize) -> &'a [f32],
    value: impl Fn(u32, usize) -> &'a [f32],
    out: &mut [f32],
) {
    let AttentionParams { heads, scale, .. } = params;
    let seen: Vec<u32> = tables.seen(plan, row).collect();
    for head in 0..heads.heads {
        let columns = head * heads.head_dim..(head + 1) * heads.head_dim;
        let kv_head = head / heads.group();
        attend(
            &queries[columns.clone()],
            scale,
            params.first_seen(seen.len())..seen.len(),
            |p| key(seen[p], kv_head),
            |p| value(seen[p], kv_head),
            &mut out[columns],
        );
    }
}

/// What a gated unit makes of a gate.
pub fn activate(activation: Activation, gate: f32) -> f32 {
    match activation {
        Activation::Silu => silu(gate),
        Activation::GeluTanh => gelu_tanh(gate),
    }
}

/// `activation(gate) * up` of one row that holds gates, then ups.
pub fn gate(activation: Activation, gate_up: &[f32], out: &mut [f32]) {
    let (gate, up) = gate_up.split_at(gate_up.len() / 2);
    for ((o, &g), &u) in out.iter_mut().zip(gate).zip(up) {
        *o = activate(activation, g) * u;
    }
}

/// `cap * tanh(x / cap)`.
pub fn soft_cap(x: f32, cap: f32) -> f32 {
    cap * tanh(x / cap)
}

/// The softmax of one row.
pub fn softmax(logits: &[f32], out: &mut [f32]) {
    let max = largest(logits);
    for (o, x) in out.iter_mut().zip(logits) {
        *o = exp(x - max);
    }
    let total = sum(out);
    for o in out.iter_mut() {
        *o /= total;
    }
}

/// The experts of one row with their weights, as many as there is room for: the likeliest first, of
/// equal ones that of the lowest id first. If `probabilities` are no numbers, the lowest ids.
pub fn choose_experts(probabilities: &[f32], normalize: bool, chosen: &mut [(u32, f32)]) {
    for place in 0..chosen.len() {
        let mut best = None;
        for (id, &p) in probabilities.iter().enumerate() {
            let better = best.is_none_or(|(_, most)| p > most);
            if better && !chosen[..place].iter().any(|&(taken, _)| taken == id as u32) {
                best = Some((id as u32, p));
            }
        }
        chosen[place] = best.expect("there are at least as many experts as are chosen");
    }
    if normalize {
        let total = chosen.iter().fold(0.0, |total, (_, weight)| total + weight);
        chosen.iter_mut().for_each(|(_, weight)| *weight /= total);
    }
}

/// The weighted sum of what a row's experts make of it, one after the other in ascending order of
/// their ids; `expert` answers what one makes of it.
pub fn mix_experts(chosen: &[(u32, f32)], expert: impl Fn(u32) -> Vec<f32>, out: &mut [f32]) {
    let mut chosen = chosen.to_vec();
    chosen.sort_by_key(|&(id, _)| id);
    out.fill(0.0);
    for (id, weight) in chosen {
        for (o, x) in out.iter_mut().zip(expert(id)) {
            *o = fma(weight, x, *o);
        }
    }
}
