//! Counter-based noise: a function of seed, choice, position and token, and of nothing else.

use crate::math;

/// The key of one choice of one position; [`uniform`] takes it.
pub fn key(seed: u64, choice: u32, position: u32) -> u64 {
    let counter = (u64::from(choice) << 32) | u64::from(position);
    mix(mix(seed ^ 0x9e37_79b9_7f4a_7c15)
        .wrapping_add(mix(counter.wrapping_add(0x6a09_e667_f3bc_c909))))
}

/// 64 random bits.
#[inline(always)]
pub fn bits(key: u64, token: u32) -> u64 {
    mix(key.wrapping_add((u64::from(token) + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// A number in (0, 1), from the first 52 of [`bits`]: one more, and the half would be rounded away.
#[inline(always)]
pub fn uniform(key: u64, token: u32) -> f64 {
    ((bits(key, token) >> 12) as f64 + 0.5) * (1.0 / 4_503_599_627_370_496.0)
}

/// A draw of the exponential distribution: `-ln(1 - u)`, never less than `u`.
pub fn exponential(u: f64) -> f64 {
    // 1 - u is exact enough for u >= 2^-30; below, two terms of the series are.
    if u < 1e-9 { u + u * u * 0.5 } else { -math::ln(1.0 - u) }
}

/// A draw of the Gumbel distribution for the token of a [`key`].
pub fn gumbel_of(key: u64, token: u32) -> f64 {
    -math::ln(exponential(uniform(key, token)))
}

/// A draw of the Gumbel distribution.
pub fn gumbel(seed: u64, choice: u32, position: u32, token: u32) -> f64 {
    gumbel_of(key(seed, choice, position), token)
}

/// No draw of [`gumbel`] is above this: the smallest uniform is 2^-53.
pub const GUMBEL_HIGH: f32 = 36.8;

/// A bijection of 64-bit words in which every input bit moves about half of the output bits.
#[inline(always)]
pub(crate) fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}
