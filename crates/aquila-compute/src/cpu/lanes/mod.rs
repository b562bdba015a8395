//! Sixteen virtual lanes of f32: the one vocabulary in which every kernel is written.
//!
//! A kernel is written once, generic over [`Lanes`], and compiled once per instruction set by
//! [`kernel!`]. Every operation here is either exact or rounded as IEEE 754 says, so the
//! implementations cannot differ in their bits.
//!
//! The one invariant: methods of an implementation are reached only through [`kernel!`], which
//! enables the instructions that the implementation uses after [`super::Isa`] found them.

mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::Avx512;
pub(super) use portable::Portable;

use crate::math::{EXP_HIGH, EXP_LN2, EXP_LOW, EXP_POLY};

/// How many lanes there are.
pub(super) const LANES: usize = 16;

/// Operations on 16 lanes of f32.
///
/// Loads and stores need no alignment. They are unsafe because they take pointers.
pub(super) trait Lanes: Copy + 'static {
    /// Sixteen f32.
    type F: Copy;

    /// Which of the sets of tile shapes suits the number of registers.
    const MANY_REGISTERS: bool;

    fn splat(x: f32) -> Self::F;
    fn add(a: Self::F, b: Self::F) -> Self::F;
    fn sub(a: Self::F, b: Self::F) -> Self::F;
    fn mul(a: Self::F, b: Self::F) -> Self::F;
    fn div(a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`.
    fn max(a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`.
    fn min(a: Self::F, b: Self::F) -> Self::F;
    fn abs(a: Self::F) -> Self::F;
    /// `if x < bound { 0 } else { value }`.
    fn zero_below(x: Self::F, bound: Self::F, value: Self::F) -> Self::F;
    /// `2^n`, for integers n between -126 and 127.
    fn power_of_two(n: Self::F) -> Self::F;
    /// Adds up the lanes as [`crate::reference::fold`] does.
    fn fold(a: Self::F) -> f32;
    /// The largest lane, compared in the order of [`Lanes::fold`].
    fn fold_max(a: Self::F) -> f32;
    /// Lane i of the result is the fold of vector i.
    fn fold_each(a: &[Self::F; LANES]) -> Self::F;

    /// # Safety
    /// 16 values must be readable.
    unsafe fn load(at: *const f32) -> Self::F;
    /// # Safety
    /// 16 values must be writable.
    unsafe fn store(at: *mut f32, a: Self::F);
    /// The first `n` values, then zeros.
    ///
    /// # Safety
    /// `n` values must be readable.
    unsafe fn load_first(at: *const f32, n: usize) -> Self::F;
    /// Stores the first `n` lanes.
    ///
    /// # Safety
    /// `n` values must be writable.
    unsafe fn store_first(at: *mut f32, n: usize, a: Self::F);
    /// 16 bfloat16 values, widened.
    ///
    /// # Safety
    /// 16 values must be readable.
    unsafe fn load_bf16(at: *const u16) -> Self::F;
    /// The low halves of 16 words, as bfloat16, widened.
    ///
    /// # Safety
    /// 16 words must be readable.
    unsafe fn load_low(at: *const u32) -> Self::F;
    /// The high halves of 16 words, as bfloat16, widened.
    ///
    /// # Safety
    /// 16 words must be readable.
    unsafe fn load_high(at: *const u32) -> Self::F;

    /// Asks for the cache line at `at`, which may be any address, for later: not in the nearest
    /// cache.
    #[inline(always)]
    fn prefetch_later(at: *const u8) {
        let _ = at;
    }

    /// [`crate::math::exp`] of each lane.
    #[inline(always)]
    fn exp(x: Self::F) -> Self::F {
        let y = Self::min(Self::splat(EXP_HIGH), x);
        let n = Self::round(Self::mul(y, Self::splat(std::f32::consts::LOG2_E)));
        let r = Self::fma(n, Self::splat(-EXP_LN2[0]), y);
        let r = Self::fma(n, Self::splat(-EXP_LN2[1]), r);
        let mut p = Self::splat(EXP_POLY[0]);
        for c in &EXP_POLY[1..] {
            p = Self::fma(p, r, Self::splat(*c));
        }
        let p = Self::add(Self::fma(p, Self::mul(r, r), r), Self::splat(1.0));
        Self::zero_below(x, Self::splat(EXP_LOW), Self::mul(p, Self::power_of_two(n)))
    }

    /// [`crate::math::round_half_even`] of each lane.
    #[inline(always)]
    fn round(x: Self::F) -> Self::F {
        let shift = Self::splat(12_582_912.0);
        Self::sub(Self::add(x, shift), shift)
    }
}

/// Products of 8-bit integers, four to a lane.
pub(super) trait Int8Lanes: Lanes {
    /// Sixteen i32.
    type I: Copy;
    /// Weights of each lane, as [`Int8Lanes::dot`] takes them.
    type W: Copy;
    /// Activations, as [`Int8Lanes::dot`] takes them.
    type X: Copy;
    /// Steps that four inputs take; also the bytes of a quantized activation.
    const STEPS: usize;

    /// Where the sum of a group begins, given -128 times the sum of its activations.
    fn start(minus_128_sum: i32) -> Self::I;
    fn to_f32(a: Self::I) -> Self::F;
    /// The weights of one step, out of 64 that are stored as their values plus 128.
    ///
    /// # Safety
    /// 64 bytes must be readable.
    unsafe fn weights(at: *const u8, step: usize) -> Self::W;
    /// The activations of one step, out of four, the same for each lane.
    ///
    /// # Safety
    /// Four activations must be readable.
    unsafe fn inputs(x: *const i8, step: usize) -> Self::X;
    /// Adds to each lane the products of its weights with the activations.
    fn dot(sum: Self::I, w: Self::W, x: Self::X) -> Self::I;
    /// Stores integers between -128 and 127 as activations, what is no number as zero, and
    /// answers their sum.
    ///
    /// # Safety
    /// 16 activations must be writable.
    unsafe fn store_inputs(at: *mut i8, a: Self::F) -> i32;
}

/// Compiles a generic kernel for every instruction set, behind one function that picks by
/// [`super::Isa`].
macro_rules! kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::cpu::Isa, $($arg: $ty),*) {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
                unsafe fn avx512($($arg: $ty),*) {
                    // SAFETY: the caller of the kernel vouches for its arguments.
                    unsafe { $generic::<$crate::cpu::lanes::Avx512>($($arg),*) }
                }
                #[target_feature(enable = "avx2,fma")]
                unsafe fn avx2($($arg: $ty),*) {
                    // SAFETY: the caller of the kernel vouches for its arguments.
                    unsafe { $generic::<$crate::cpu::lanes::Avx2>($($arg),*) }
                }
                match isa {
                    // SAFETY: a backend's `Isa` is one that the machine has.
                    $crate::cpu::Isa::Avx512 => return unsafe { avx512($($arg),*) },
                    // SAFETY: as above.
                    $crate::cpu::Isa::Avx2 => return unsafe { avx2($($arg),*) },
                    $crate::cpu::Isa::Portable => {}
                }
            }
            let _ = isa;
            // SAFETY: the caller of the kernel vouches for its arguments.
            unsafe { $generic::<$crate::cpu::lanes::Portable>($($arg),*) }
        }
    };
}
pub(super) use kernel;

/// Writes a loop out, with a constant index: an array of registers that a loop indexes is kept in
/// memory whenever the compiler declines to unroll the loop.
macro_rules! unroll {
    ($i:ident < $n:ident $body:block) => {
        $crate::cpu::lanes::unroll!(@ $i $n $body 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $i:ident $n:ident $body:block $($at:literal)*) => {
        $(if $at < $n {
            let $i: usize = $at;
            $body
        })*
    };
}
pub(super) use unroll;
