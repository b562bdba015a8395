//! Which tokens top-k and top-p keep, without sorting a vocabulary.
//!
//! Candidates are 64-bit keys whose ascending order is the order of preference: larger logits
//! first, then lower ids.

use super::definition::scaled;
use super::weight::{BLOCK, WEIGHTLESS, total_of};

/// The key of a token; `logit` is a number.
#[inline(always)]
pub fn key(logit: f32, token: u32) -> u64 {
    // Adding zero makes both zeros equal.
    (u64::from(reverse((logit + 0.0).to_bits())) << 32) | u64::from(token)
}

/// The logit of a key.
#[inline(always)]
pub fn logit(key: u64) -> f32 {
    f32::from_bits(reverse((key >> 32) as u32))
}

/// The token of a key.
#[inline(always)]
pub fn token(key: u64) -> u32 {
    key as u32
}

/// Between the bits of a float and an integer that is lower for larger floats; its own inverse.
#[inline(always)]
fn reverse(bits: u32) -> u32 {
    bits ^ (((bits as i32 >> 31) as u32 ^ 0xffff_ffff) >> 1)
}

/// A row at a temperature, with the largest value of each of its blocks before division.
#[derive(Clone, Copy)]
pub struct Row<'a> {
    /// The logits.
    pub values: &'a [f32],
    /// The largest of each block.
    pub maxima: &'a [f32],
    /// What logits are divided by.
    pub temperature: f32,
    /// The largest quotient.
    pub max: f32,
}

impl Row<'_> {
    /// The keys of all possible tokens whose quotient is at least `floor`, ids ascending.
    fn at_least(&self, floor: f32, out: &mut Vec<u64>) {
        out.clear();
        for (b, &largest) in self.maxima.iter().enumerate() {
            if scaled(largest, self.temperature) < floor {
                continue;
            }
            let block = &self.values[b * BLOCK..self.values.len().min((b + 1) * BLOCK)];
            for (i, &l) in block.iter().enumerate() {
                let z = scaled(l, self.temperature);
                if z >= floor && z > f32::NEG_INFINITY {
                    out.push(key(z, (b * BLOCK + i) as u32));
                }
            }
        }
    }

    /// The `k` most likely tokens, in no order; fewer where fewer are possible.
    pub fn most_likely(&self, k: usize, spare: &mut Vec<f32>, out: &mut Vec<u64>) {
        let mut floor = f32::NEG_INFINITY;
        if (1..=self.maxima.len()).contains(&k) {
            // That many blocks, each with a token of at least this: so many tokens are above it.
            spare.clear();
            spare.extend_from_slice(self.maxima);
            let (_, &mut kth, _) = spare.select_nth_unstable_by(k - 1, |a, b| b.total_cmp(a));
            floor = scaled(kth, self.temperature);
        }
        self.at_least(floor, out);
        if k == 0 {
            out.clear();
        } else if k < out.len() {
            out.select_nth_unstable(k - 1);
            out.truncate(k);
        }
    }

    /// The fewest most likely tokens of the row whose weights reach `target`, in no order.
    pub fn nucleus(&self, target: f64, out: &mut Vec<u64>) {
        // A nucleus is mostly near the top: gather deeper only where its weight is not yet there.
        for depth in [-4.0, -8.0, -16.0, WEIGHTLESS - 0.1] {
            self.at_least(self.max + depth, out);
            if depth < WEIGHTLESS || total_of(out, self.max) >= target {
                break;
            }
        }
        nucleus_of(out, self.max, target);
    }
}

/// Cuts `keys` down to the fewest most likely ones whose weights reach `target`, at least one.
pub fn nucleus_of(keys: &mut Vec<u64>, max: f32, target: f64) {
    // The last key needed is in `low..high`; those before `low` weigh `before`.
    let (mut low, mut high, mut before) = (0, keys.len(), 0.0);
    while high - low > 16 {
        // Weights fall quickly, so the middle of the weight is well before that of the keys.
        let middle = low + (high - low) / 4;
        keys[low..high].select_nth_unstable(middle - low);
        let upper = before + total_of(&keys[low..middle], max);
        if upper >= target {
            high = middle;
        } else {
            (low, before) = (middle, upper);
        }
    }
    keys[low..high].sort_unstable();
    while low < high && (low == 0 || before < target) {
        before += total_of(&keys[low..=low], max);
        low += 1;
    }
    keys.truncate(low);
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn keys_order_by_larger_logit_then_lower_id(a: f32, b: f32, v: u32, w: u32) {
            prop_assume!(!a.is_nan() && !b.is_nan());
            let want = b.partial_cmp(&a).unwrap().then(v.cmp(&w));
            prop_assert_eq!(key(a, v).cmp(&key(b, w)), want);
            prop_assert_eq!((logit(key(a, v)), token(key(a, v))), (a, v));
        }
    }
}
