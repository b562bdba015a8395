//! Our own elementary functions, so that a text is the same on every machine.
//!
//! The system's libm differs between platforms and versions. These use additions,
//! multiplications and divisions alone (and [`fma`] where said), each rounded as IEEE 754 says.
//! The f64 functions serve tables and noise; the f32 functions have vector twins in the kernels
//! with the same operations in the same order.

use std::f64::consts::{FRAC_PI_2, LN_2, LOG2_E};

/// `a * b + c`, rounded once.
///
/// Without a fused instruction at compile time, the sum is formed in f64 and rounded to odd, which
/// makes the second rounding, to f32, the only one that counts.
#[inline(always)]
pub fn fma(a: f32, b: f32, c: f32) -> f32 {
    #[cfg(any(target_feature = "fma", target_arch = "aarch64"))]
    {
        a.mul_add(b, c)
    }
    #[cfg(not(any(target_feature = "fma", target_arch = "aarch64")))]
    {
        fma_by_round_to_odd(a, b, c)
    }
}

/// [`fma`] without a fused instruction.
#[inline(always)]
pub fn fma_by_round_to_odd(a: f32, b: f32, c: f32) -> f32 {
    // The product is exact: 24 + 24 bits fit in 53.
    let p = f64::from(a) * f64::from(b);
    let c = f64::from(c);
    let s = p + c;
    // What the sum lost (Knuth's two-sum).
    let back = s - p;
    let lost = (p - (s - back)) + (c - back);
    let bits = s.to_bits();
    // Inexact, finite and even: step to the odd neighbour on the side of the true sum.
    let inexact = lost != 0.0 && s.is_finite();
    let toward_zero = (lost < 0.0) != (s < 0.0);
    let odd = if bits & 1 == 1 {
        bits
    } else if toward_zero {
        bits.wrapping_sub(1)
    } else {
        bits + 1
    };
    f64::from_bits(if inexact { odd } else { bits }) as f32
}

const ROUND_F32: f32 = 12_582_912.0; // 1.5 * 2^23: adding it rounds to an integer, half to even.
const ROUND_F64: f64 = 6_755_399_441_055_744.0; // 1.5 * 2^52.

/// Rounds to the nearest integer, half to even; for `|x| < 2^22`.
#[inline(always)]
pub fn round_half_even(x: f32) -> f32 {
    (x + ROUND_F32) - ROUND_F32
}

/// Arguments below this give zero.
pub const EXP_LOW: f32 = -87.0;
/// Arguments above this are taken for it.
pub const EXP_HIGH: f32 = 88.0;
/// ln 2 in two parts, the first with few bits.
pub const EXP_LN2: [f32; 2] = [0.693_359_4, -2.121_944_4e-4];
/// The polynomial of `(e^r - 1 - r) / r^2` on `|r| <= ln 2 / 2`, highest power first.
pub const EXP_POLY: [f32; 6] =
    [1.984_127e-4, 1.388_888_9e-3, 8.333_334e-3, 4.166_666_8e-2, 1.666_666_7e-1, 0.5];

/// `e^r - 1` and `2^n`, with `n` an integer and `r` at most half of ln 2 from zero, such that
/// `x = n ln 2 + r`.
#[inline(always)]
fn exp_parts(x: f32) -> (f32, f32) {
    let n = round_half_even(x * std::f32::consts::LOG2_E);
    let r = fma(n, -EXP_LN2[0], x);
    let r = fma(n, -EXP_LN2[1], r);
    let mut p = EXP_POLY[0];
    for c in &EXP_POLY[1..] {
        p = fma(p, r, *c);
    }
    (fma(p, r * r, r), f32::from_bits((((n as i32) + 127) << 23) as u32))
}

/// `e^x` in f32: zero below [`EXP_LOW`], constant above [`EXP_HIGH`].
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let (p, power) = exp_parts(if x > EXP_HIGH { EXP_HIGH } else { x });
    if x < EXP_LOW { 0.0 } else { (p + 1.0) * power }
}

/// `e^x - 1` in f32: constant below [`EXP_LOW`] and above [`EXP_HIGH`].
#[inline(always)]
fn exp_m1(x: f32) -> f32 {
    let x = if x > EXP_HIGH { EXP_HIGH } else { x };
    let (p, power) = exp_parts(if x < EXP_LOW { EXP_LOW } else { x });
    fma(p, power, power - 1.0)
}

/// The hyperbolic tangent in f32.
#[inline(always)]
pub fn tanh(x: f32) -> f32 {
    let e = exp_m1(2.0 * x);
    e / (e + 2.0)
}

/// `x / (1 + e^-x)`.
#[inline(always)]
pub fn silu(x: f32) -> f32 {
    x / (1.0 + exp(-x))
}

/// Factors of x and of its cube in the exponent of [`gelu_tanh`]: twice the root of 2 / pi, and
/// 0.044715 times that, both negative.
pub const GELU: [f32; 2] = [-1.595_769, -0.071_354_814];

/// `x / 2 * (1 + tanh z)` with `z = sqrt(2 / pi) * (x + 0.044715 x^3)`, as `x / (1 + e^(-2 z))`.
#[inline(always)]
pub fn gelu_tanh(x: f32) -> f32 {
    x / (1.0 + exp(x * fma(x * x, GELU[1], GELU[0])))
}

/// `e^x` in f64, for `|x| < 700`.
fn exp_f64(x: f64) -> f64 {
    let n = (x * LOG2_E + ROUND_F64) - ROUND_F64;
    let r = (x - n * 0.693_147_180_369_123_8) - n * 1.908_214_929_270_587_7e-10;
    let mut sum = 1.0;
    for i in (1..=14).rev() {
        sum = 1.0 + r / f64::from(i) * sum;
    }
    sum * f64::from_bits(((n as i64 + 1023) as u64) << 52)
}

/// The natural logarithm in f64, for positive normal `x`.
pub fn ln(x: f64) -> f64 {
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) as i64) - 1023;
    let mut mantissa = f64::from_bits((bits & 0x000f_ffff_ffff_ffff) | 0x3ff0_0000_0000_0000);
    if mantissa > std::f64::consts::SQRT_2 {
        mantissa *= 0.5;
        exponent += 1;
    }
    // ln m = 2 artanh((m - 1) / (m + 1)).
    let s = (mantissa - 1.0) / (mantissa + 1.0);
    let square = s * s;
    let mut sum = 0.0;
    for i in (0..12).rev() {
        sum = sum * square + 1.0 / f64::from(2 * i + 1);
    }
    exponent as f64 * LN_2 + 2.0 * s * sum
}

/// `base^exponent` in f64, for positive `base`.
pub fn powf(base: f64, exponent: f64) -> f64 {
    exp_f64(exponent * ln(base))
}

/// Sine and cosine in f64, for `|x| < 2^30`.
pub fn sin_cos(x: f64) -> (f64, f64) {
    let n = (x / FRAC_PI_2 + ROUND_F64) - ROUND_F64;
    // pi/2 in three parts whose products with n are exact.
    let r = ((x - n * 1.570_796_251_296_997) - n * 7.549_789_415_861_596e-8)
        - n * 5.390_302_858_158_391e-15;
    let square = r * r;
    let (mut sin, mut cos) = (1.0, 1.0);
    for i in (1..=9).rev() {
        let k = f64::from(2 * i);
        sin = 1.0 - square / (k * (k + 1.0)) * sin;
        cos = 1.0 - square / (k * (k - 1.0)) * cos;
    }
    sin *= r;
    match (n as i64).rem_euclid(4) {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn f32_exp_is_within_two_ulp_of_libm() {
        let mut x = -86.9f32;
        while x < 87.9 {
            let want = f64::from(x).exp();
            let got = f64::from(exp(x));
            let near = want as f32;
            let ulp = f64::from(near.next_up()) - f64::from(near);
            assert!((got - want).abs() <= 2.0 * ulp, "exp({x}) = {got}, want {want}");
            x += 0.00137;
        }
        assert_eq!(exp(-88.0), 0.0);
        assert_eq!(exp(0.0), 1.0);
        assert!(exp(1000.0).is_finite());
    }

    /// How far apart two neighbours are around `x`, in f32.
    fn ulp(x: f64) -> f64 {
        let near = x.abs() as f32;
        f64::from(near.next_up()) - f64::from(near)
    }

    #[test]
    fn tanh_is_within_four_ulp_of_libm() {
        let magnitudes = (-160..40).map(|i| 1.13f32.powi(i));
        for x in magnitudes.flat_map(|x| [x, -x]) {
            let (got, want) = (f64::from(tanh(x)), f64::from(x).tanh());
            assert!((got - want).abs() <= 4.0 * ulp(want), "tanh({x}) = {got}, want {want}");
        }
        assert_eq!(tanh(0.0), 0.0);
        assert_eq!((tanh(f32::INFINITY), tanh(f32::NEG_INFINITY)), (1.0, -1.0));
        assert!(tanh(f32::NAN).is_nan());
    }

    #[test]
    fn gelu_is_what_its_formula_says_in_f64() {
        for x in (-2000..2000).map(|i| i as f32 * 0.0137) {
            let y = f64::from(x);
            let z = (2.0 / std::f64::consts::PI).sqrt() * (y + 0.044715 * y * y * y);
            // By exp, since 1 + tanh(z) loses its digits in f64 too where z is far below zero.
            let (got, want) = (f64::from(gelu_tanh(x)), y / (1.0 + (-2.0 * z).exp()));
            // An exponent t is off by a few of its last digits, so the result by t times as many; one
            // above EXP_HIGH leaves what is next to nothing.
            let bound = 4.0 * (1.0 + (-2.0 * z).max(0.0)) * ulp(want) + 1e-36;
            assert!((got - want).abs() <= bound, "gelu({x}) = {got}, want {want}");
        }
        assert_eq!(
            (gelu_tanh(0.0), gelu_tanh(1e30), gelu_tanh(-1e3)),
            (0.0, 1e30, -1e3 / exp(88.0))
        );
    }

    proptest! {
        #[test]
        fn fma_without_the_instruction_equals_libm(a: f32, b: f32, c: f32) {
            let want = a.mul_add(b, c);
            let got = fma_by_round_to_odd(a, b, c);
            prop_assert!(want.to_bits() == got.to_bits() || (want.is_nan() && got.is_nan()), "{a} {b} {c}: {got} {want}");
        }

        #[test]
        fn fma_near_ties_equals_libm(a in 0x3f80_0000u32..0x4000_0000, b in 0x3f80_0000u32..0x4000_0000, shift in 0u32..60, neg: bool) {
            let (a, b) = (f32::from_bits(a), f32::from_bits(b));
            let c = (2f32).powi(shift as i32 - 30) * if neg { -1.0 } else { 1.0 };
            prop_assert_eq!(a.mul_add(b, c).to_bits(), fma_by_round_to_odd(a, b, c).to_bits());
        }

        #[test]
        fn f64_functions_agree_with_libm(x in -300.0f64..300.0, y in 1e-12f64..1e12) {
            prop_assert!((exp_f64(x) / x.exp() - 1.0).abs() < 1e-13);
            prop_assert!((ln(y) - y.ln()).abs() < 1e-13 * (1.0 + y.ln().abs()));
            prop_assert!((powf(y, 0.37) / y.powf(0.37) - 1.0).abs() < 1e-12);
        }

        #[test]
        fn sine_and_cosine_agree_with_libm(x in -2.0e6f64..2.0e6) {
            let (s, c) = sin_cos(x);
            prop_assert!((s - x.sin()).abs() < 1e-9 && (c - x.cos()).abs() < 1e-9, "{x}: {s} {c}");
        }
    }
}
