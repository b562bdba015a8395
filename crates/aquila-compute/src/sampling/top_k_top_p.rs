//! Which tokens top-k and top-p keep, without sorting a vocabulary.
//!
//! Candidates are 64-bit keys whose ascending order is the order of preference: larger logits
//! first, then lower ids.

use super::definition::scaled;
use super::weight::{self, BLOCK, total_of};
use super::widest_vectors::{Work, widest};

/// More candidates than this are not worth comparing one by one.
const MANY: usize = 2048;

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
    /// The keys of all possible tokens whose quotient is at least `floor` and that `wanted`
    /// accepts by that quotient, ids ascending; stops where there are more than `most`.
    fn gather(&self, floor: f32, most: usize, wanted: impl Fn(f32) -> bool, out: &mut Vec<u64>) {
        out.clear();
        widest(Gather { row: *self, floor, most, wanted, out });
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
        self.gather(floor, usize::MAX, |_| true, out);
        if k == 0 {
            out.clear();
        } else if k < out.len() {
            out.select_nth_unstable(k - 1);
            out.truncate(k);
        }
    }

    /// The fewest most likely tokens of the row whose weights reach `target`.
    pub fn nucleus(&self, target: f64, out: &mut Vec<u64>) -> Nucleus {
        // Mostly it is small and near the top.
        for depth in [-4.0, -8.0] {
            self.gather(self.max + depth, MANY, |_| true, out);
            if out.len() > MANY {
                break;
            }
            if total_of(out, self.max) >= target {
                nucleus_of(out, self.max, target, 0.0);
                return Nucleus::Keys;
            }
        }
        // Otherwise whole buckets are in it, and one is cut.
        let buckets = weight::by_bucket(self.values, self.maxima, self.temperature, self.max);
        let (mut cut, mut before) = (0, 0.0);
        while before + buckets[cut] < target && cut + 1 < buckets.len() {
            before += buckets[cut];
            cut += 1;
        }
        let in_cut = |z: f32| weight::is_in_bucket(z - self.max, cut);
        // A little lower than the bucket reaches, for the rounding of the sum.
        let floor = self.max - (cut as f32 + 2.0) / 8.0;
        self.gather(floor, usize::MAX, in_cut, out);
        nucleus_of(out, self.max, target, before);
        Nucleus::UpTo(out.iter().copied().max().unwrap_or(u64::MAX))
    }
}

struct Gather<'a, W> {
    row: Row<'a>,
    floor: f32,
    most: usize,
    wanted: W,
    out: &'a mut Vec<u64>,
}

impl<W: Fn(f32) -> bool> Work for Gather<'_, W> {
    type Out = ();

    #[inline(always)]
    fn run(self) {
        let Self { row: Row { values, maxima, temperature, .. }, floor, most, wanted, out } = self;
        for (b, &largest) in maxima.iter().enumerate() {
            if scaled(largest, temperature) < floor {
                continue;
            }
            // Which tokens are wanted is as good as random: a branch per token would be slow.
            let block = &values[b * BLOCK..values.len().min((b + 1) * BLOCK)];
            let mut quotients = [f32::NEG_INFINITY; BLOCK];
            for (z, &l) in quotients.iter_mut().zip(block) {
                *z = scaled(l, temperature);
            }
            let mut hits = [0u8; BLOCK];
            for (hit, &z) in hits.iter_mut().zip(&quotients) {
                *hit = u8::from((z >= floor) & (z > f32::NEG_INFINITY) & wanted(z));
            }
            for (part, hits) in hits.as_chunks::<8>().0.iter().enumerate() {
                let mut left = u64::from_le_bytes(*hits);
                while left != 0 {
                    let i = part * 8 + left.trailing_zeros() as usize / 8;
                    out.push(key(quotients[i], (b * BLOCK + i) as u32));
                    left &= left - 1;
                }
            }
            if out.len() > most {
                break;
            }
        }
    }
}

/// A nucleus of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Nucleus {
    /// The keys gathered, in no order.
    Keys,
    /// All tokens whose keys are not above this one.
    UpTo(u64),
}

/// Cuts `keys` down to the fewest most likely ones, at least one, whose weights reach `target`
/// together with what comes `before` them.
pub fn nucleus_of(keys: &mut Vec<u64>, max: f32, target: f64, mut before: f64) {
    // The last key needed is in `low..high`.
    let (mut low, mut high) = (0, keys.len());
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
