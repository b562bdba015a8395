//! Sums of weights over a row, and where the large logits are.
//!
//! Weights are multiples of 2^-34, so their sums are exact in any order.

use super::definition::{WEIGHTLESS, scaled, weight};
use super::top_k_top_p;
use super::widest_vectors::{Work, widest};

/// Tokens of one block, the unit in which rows are skipped.
pub const BLOCK: usize = 64;

const LANES: usize = 16;

/// Writes the largest value of each block and answers the largest of all; what is not a number
/// counts as minus infinity.
pub fn maxima(values: &[f32], out: &mut Vec<f32>) -> f32 {
    out.clear();
    widest(Maxima { values, out })
}

/// The sum of the weights of a row at a temperature; `max` is the largest quotient.
pub fn total(values: &[f32], maxima: &[f32], temperature: f32, max: f32) -> f64 {
    widest(RowTotal { values, maxima, temperature, max })
}

/// The sum of the weights of candidates; `max` is the largest logit of all.
pub fn total_of(keys: &[u64], max: f32) -> f64 {
    widest(KeyTotal { keys, max })
}

/// Buckets of logits by their distance from the largest one, eight to a unit.
pub const BUCKETS: usize = 8 * 25;

/// The bucket of a distance; larger logits are in lower buckets, and the last one holds all that
/// has no weight.
#[inline(always)]
fn bucket(d: f32) -> usize {
    let steps = d * -8.0;
    // What is not a number goes last, as minus infinity does.
    let last = BUCKETS as f32 - 1.0;
    (if steps < last { steps } else { last }) as i32 as usize
}

/// Whether a distance is in a bucket other than the last.
#[inline(always)]
pub fn is_in_bucket(d: f32, bucket: usize) -> bool {
    let steps = d * -8.0;
    (steps >= bucket as f32) & (steps < bucket as f32 + 1.0)
}

/// The weights of a row by bucket.
pub fn by_bucket(values: &[f32], maxima: &[f32], temperature: f32, max: f32) -> [f64; BUCKETS] {
    widest(Buckets { values, maxima, temperature, max })
}

#[cfg_attr(test, derive(Clone))]
struct RowTotal<'a> {
    values: &'a [f32],
    maxima: &'a [f32],
    temperature: f32,
    max: f32,
}

impl Work for RowTotal<'_> {
    type Out = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let Self { values, maxima, temperature, max } = self;
        let mut lanes = [0.0f64; LANES];
        let (blocks, rest) = values.as_chunks::<BLOCK>();
        for (block, &largest) in blocks.iter().zip(maxima) {
            if scaled(largest, temperature) - max < WEIGHTLESS {
                continue;
            }
            for part in block.as_chunks::<LANES>().0 {
                for (lane, &l) in lanes.iter_mut().zip(part) {
                    *lane += weight(scaled(l, temperature) - max);
                }
            }
        }
        for (i, &l) in rest.iter().enumerate() {
            lanes[i % LANES] += weight(scaled(l, temperature) - max);
        }
        lanes.iter().sum()
    }
}

struct Buckets<'a> {
    values: &'a [f32],
    maxima: &'a [f32],
    temperature: f32,
    max: f32,
}

impl Work for Buckets<'_> {
    type Out = [f64; BUCKETS];

    #[inline(always)]
    fn run(self) -> [f64; BUCKETS] {
        let Self { values, maxima, temperature, max } = self;
        // Four tables, since additions to one bucket after the other would wait for each other.
        let mut tables = [[0.0f64; BUCKETS]; 4];
        for (block, &largest) in values.chunks(BLOCK).zip(maxima) {
            if scaled(largest, temperature) - max < WEIGHTLESS {
                continue;
            }
            let mut distances = [f32::NEG_INFINITY; BLOCK];
            for (d, &l) in distances.iter_mut().zip(block) {
                *d = scaled(l, temperature) - max;
            }
            let (mut weights, mut places) = ([0.0f64; BLOCK], [0u32; BLOCK]);
            for i in 0..BLOCK {
                weights[i] = weight(distances[i]);
                places[i] = bucket(distances[i]) as u32;
            }
            for i in 0..BLOCK {
                tables[i % 4][places[i] as usize] += weights[i];
            }
        }
        std::array::from_fn(|b| tables.iter().map(|table| table[b]).sum())
    }
}

#[cfg_attr(test, derive(Clone))]
struct KeyTotal<'a> {
    keys: &'a [u64],
    max: f32,
}

impl Work for KeyTotal<'_> {
    type Out = f64;

    #[inline(always)]
    fn run(self) -> f64 {
        let mut lanes = [0.0f64; LANES];
        let (chunks, rest) = self.keys.as_chunks::<LANES>();
        for chunk in chunks {
            for (lane, &key) in lanes.iter_mut().zip(chunk) {
                *lane += weight(top_k_top_p::logit(key) - self.max);
            }
        }
        for (lane, &key) in lanes.iter_mut().zip(rest) {
            *lane += weight(top_k_top_p::logit(key) - self.max);
        }
        lanes.iter().sum()
    }
}

struct Maxima<'a> {
    values: &'a [f32],
    out: &'a mut Vec<f32>,
}

impl Work for Maxima<'_> {
    type Out = f32;

    #[inline(always)]
    fn run(self) -> f32 {
        let Self { values, out } = self;
        let (blocks, rest) = values.as_chunks::<BLOCK>();
        out.resize(values.len().div_ceil(BLOCK), f32::NEG_INFINITY);
        for (out, block) in out.iter_mut().zip(blocks) {
            *out = largest(block);
        }
        if let Some(out) = out.get_mut(blocks.len()) {
            let mut block = [f32::NEG_INFINITY; BLOCK];
            block[..rest.len()].copy_from_slice(rest);
            *out = largest(&block);
        }
        let mut lanes = [f32::NEG_INFINITY; LANES];
        for part in out.chunks(LANES) {
            for (lane, &x) in lanes.iter_mut().zip(part) {
                *lane = larger(*lane, x);
            }
        }
        fold(lanes)
    }
}

/// The larger number; what is not a number loses every comparison.
#[inline(always)]
fn larger(m: f32, x: f32) -> f32 {
    if x > m { x } else { m }
}

#[inline(always)]
fn largest(block: &[f32; BLOCK]) -> f32 {
    let mut lanes = [f32::NEG_INFINITY; LANES];
    for part in block.as_chunks::<LANES>().0 {
        for (lane, &x) in lanes.iter_mut().zip(part) {
            *lane = larger(*lane, x);
        }
    }
    fold(lanes)
}

#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            lanes[i] = larger(lanes[i], lanes[i + width]);
        }
    }
    lanes[0]
}

#[cfg(test)]
mod tests {
    use super::super::widest_vectors::every_way;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn weights_are_those_of_libm_in_every_way() {
        let mut d = 0.0f32;
        while d > -30.0 {
            let want = f64::from(d).exp();
            let key = [top_k_top_p::key(d, 7)];
            for got in every_way(&KeyTotal { keys: &key, max: 0.0 }) {
                assert!((got - want).abs() <= want * 3e-7 + 3e-11, "weight of {d}: {got} {want}");
                assert_eq!(got.to_bits(), weight(d).to_bits(), "weight of {d}");
            }
            d -= 0.000_173;
        }
        assert_eq!((weight(0.0), weight(f32::NEG_INFINITY), weight(f32::NAN)), (1.0, 0.0, 0.0));
    }

    proptest! {
        #[test]
        fn totals_are_exact_in_every_way_of_adding(
            values in proptest::collection::vec(-40.0f32..10.0, 1..700),
            temperature in 0.1f32..3.0,
        ) {
            let mut largest = Vec::new();
            let max = scaled(maxima(&values, &mut largest), temperature);
            let plain: f64 =
                values.iter().rev().map(|&l| weight(scaled(l, temperature) - max)).sum();
            let work = RowTotal { values: &values, maxima: &largest, temperature, max };
            for got in every_way(&work) {
                prop_assert_eq!(got.to_bits(), plain.to_bits());
            }
        }
    }
}
