//! Sixteen virtual lanes of f32: the one vocabulary in which every kernel is written.
//!
//! A kernel is written once, generic over [`Lanes`], and compiled once per instruction set by
//! [`kernel!`]. Every operation here is either exact or rounded as IEEE 754 says, so the
//! implementations cannot differ in their bits.
//!
//! The one invariant: an implementation is a token without contents that exists only where its
//! instructions were detected. Operations take the token, so that safe code without it cannot
//! reach an instruction that the machine does not have.

mod portable;

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;

#[cfg(target_arch = "x86_64")]
pub(super) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(super) use avx512::{Avx512, Vnni};
pub(super) use portable::Portable;

use crate::math::{EXP_HIGH, EXP_LN2, EXP_LOW, EXP_POLY, GELU};

/// How many lanes there are.
pub(super) const LANES: usize = 16;

/// A value at any address.
#[derive(Clone, Copy)]
#[repr(C, packed)]
struct Unaligned<T>(T);

/// Reads a value at any address, by the instruction that `read_unaligned` becomes, but without the checks
/// of pointers that this has with debug assertions: they would take a fifth of the time of tests.
///
/// # Safety
/// The value must be readable.
#[inline(always)]
unsafe fn read<T: Copy>(at: *const impl Sized) -> T {
    // SAFETY: vouched for by the caller; a packed value has no alignment.
    unsafe { (*at.cast::<Unaligned<T>>()).0 }
}

/// Writes a value at any address, likewise.
///
/// # Safety
/// The place must be writable.
#[inline(always)]
unsafe fn write<T: Copy>(at: *mut impl Sized, value: T) {
    // SAFETY: vouched for by the caller; a packed value has no alignment.
    unsafe { *at.cast::<Unaligned<T>>() = Unaligned(value) }
}

/// Operations on 16 lanes of f32.
///
/// A value of an implementing type proves that the machine has the instructions. Loads and stores
/// need no alignment. They are unsafe because they take pointers.
pub(super) trait Lanes: Copy + 'static {
    /// Sixteen f32.
    type F: Copy;

    /// Which of the sets of tile shapes suits the number of registers.
    const MANY_REGISTERS: bool;

    fn splat(self, x: f32) -> Self::F;
    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// `a * b + c`, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// `if a > b { a } else { b }`.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// `if a < b { a } else { b }`.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    fn abs(self, a: Self::F) -> Self::F;
    /// `if x < bound { 0 } else { value }`.
    fn zero_below(self, x: Self::F, bound: Self::F, value: Self::F) -> Self::F;
    /// `2^n`, for integers n between -126 and 127.
    fn power_of_two(self, n: Self::F) -> Self::F;
    /// Adds up the lanes as [`crate::reference::fold`] does.
    fn fold(self, a: Self::F) -> f32;
    /// The largest lane, compared in the order of [`Lanes::fold`].
    fn fold_max(self, a: Self::F) -> f32;
    /// Lane i of the result is the fold of vector i.
    fn fold_each(self, a: &[Self::F; LANES]) -> Self::F;

    /// # Safety
    /// 16 values must be readable.
    unsafe fn load(self, at: *const f32) -> Self::F;
    /// # Safety
    /// 16 values must be writable.
    unsafe fn store(self, at: *mut f32, a: Self::F);
    /// The first `n` values, then zeros.
    ///
    /// # Safety
    /// `n` values must be readable.
    unsafe fn load_first(self, at: *const f32, n: usize) -> Self::F;
    /// Stores the first `n` lanes.
    ///
    /// # Safety
    /// `n` values must be writable.
    unsafe fn store_first(self, at: *mut f32, n: usize, a: Self::F);
    /// 16 bfloat16 values, widened.
    ///
    /// # Safety
    /// 16 values must be readable.
    unsafe fn load_bf16(self, at: *const u16) -> Self::F;
    /// The low halves of 16 words, as bfloat16, widened.
    ///
    /// # Safety
    /// 16 words must be readable.
    unsafe fn load_low(self, at: *const u32) -> Self::F;
    /// The high halves of 16 words, as bfloat16, widened.
    ///
    /// # Safety
    /// 16 words must be readable.
    unsafe fn load_high(self, at: *const u32) -> Self::F;

    /// Asks for the cache line at `at`, which may be any address, for later: not in the nearest
    /// cache.
    #[inline(always)]
    fn prefetch_later(self, at: *const u8) {
        let _ = at;
    }

    /// `e^r - 1` and `2^n` of each lane, as [`crate::math::exp`] divides it.
    #[inline(always)]
    fn exp_parts(self, x: Self::F) -> (Self::F, Self::F) {
        let n = self.round(self.mul(x, self.splat(std::f32::consts::LOG2_E)));
        let r = self.fma(n, self.splat(-EXP_LN2[0]), x);
        let r = self.fma(n, self.splat(-EXP_LN2[1]), r);
        let mut p = self.splat(EXP_POLY[0]);
        for c in &EXP_POLY[1..] {
            p = self.fma(p, r, self.splat(*c));
        }
        (self.fma(p, self.mul(r, r), r), self.power_of_two(n))
    }

    /// [`crate::math::exp`] of each lane.
    #[inline(always)]
    fn exp(self, x: Self::F) -> Self::F {
        let (p, power) = self.exp_parts(self.min(self.splat(EXP_HIGH), x));
        let p = self.add(p, self.splat(1.0));
        self.zero_below(x, self.splat(EXP_LOW), self.mul(p, power))
    }

    /// [`crate::math::tanh`] of each lane.
    #[inline(always)]
    fn tanh(self, x: Self::F) -> Self::F {
        let x = self.min(self.splat(EXP_HIGH), self.mul(self.splat(2.0), x));
        let (p, power) = self.exp_parts(self.max(self.splat(EXP_LOW), x));
        let e = self.fma(p, power, self.sub(power, self.splat(1.0)));
        self.div(e, self.add(e, self.splat(2.0)))
    }

    /// [`crate::math::silu`] of each lane.
    #[inline(always)]
    fn silu(self, x: Self::F) -> Self::F {
        self.div(x, self.add(self.splat(1.0), self.exp(self.mul(x, self.splat(-1.0)))))
    }

    /// [`crate::math::gelu_tanh`] of each lane.
    #[inline(always)]
    fn gelu_tanh(self, x: Self::F) -> Self::F {
        let z = self.fma(self.mul(x, x), self.splat(GELU[1]), self.splat(GELU[0]));
        self.div(x, self.add(self.splat(1.0), self.exp(self.mul(x, z))))
    }

    /// [`crate::math::round_half_even`] of each lane.
    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        let shift = self.splat(12_582_912.0);
        self.sub(self.add(x, shift), shift)
    }
}

/// Products of 8-bit integers, four to a lane.
///
/// Like [`Lanes`], a token that proves that the instructions were detected.
pub(super) trait Int8Lanes: Copy + 'static {
    /// The lanes of f32 that go with them.
    type Lanes: Lanes;
    /// Sixteen i32.
    type I: Copy;
    /// Weights of each lane, as [`Int8Lanes::dot`] takes them.
    type W: Copy;
    /// Activations, as [`Int8Lanes::dot`] takes them.
    type X: Copy;
    /// Steps that four inputs take; also the bytes of a quantized activation.
    const STEPS: usize;

    /// The token of the lanes of f32.
    fn lanes(self) -> Self::Lanes;
    /// Where the sum of a group begins, given -128 times the sum of its activations.
    fn start(self, minus_128_sum: i32) -> Self::I;
    fn to_f32(self, a: Self::I) -> Floats<Self>;
    /// The weights of one step, out of 64 that are stored as their values plus 128.
    ///
    /// # Safety
    /// 64 bytes must be readable.
    unsafe fn weights(self, at: *const u8, step: usize) -> Self::W;
    /// The activations of one step, out of four, the same for each lane.
    ///
    /// # Safety
    /// Four activations must be readable.
    unsafe fn inputs(self, x: *const i8, step: usize) -> Self::X;
    /// Adds to each lane the products of its weights with the activations.
    fn dot(self, sum: Self::I, w: Self::W, x: Self::X) -> Self::I;
    /// Stores integers between -128 and 127 as activations, what is no number as zero, and
    /// answers their sum.
    ///
    /// # Safety
    /// 16 activations must be writable.
    unsafe fn store_inputs(self, at: *mut i8, a: Floats<Self>) -> i32;
}

/// Sixteen f32 beside integer lanes.
pub(super) type Floats<L> = <<L as Int8Lanes>::Lanes as Lanes>::F;

/// Compiles a generic kernel for every instruction set, behind one function that picks by
/// [`super::isa::Detected`], or by [`super::isa::DetectedInt8`] where the kernel is `over int8`.
macro_rules! kernel {
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident) => {
        $crate::cpu::simd::kernel! {
            @ Detected, Avx512, "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma",
            $(#[$doc])* $vis fn $name($($arg: $ty),*) = $generic
        }
    };
    ($(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),* $(,)?) = $generic:ident
     over int8) => {
        $crate::cpu::simd::kernel! {
            @ DetectedInt8, Vnni, "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma",
            $(#[$doc])* $vis fn $name($($arg: $ty),*) = $generic
        }
    };
    (@ $detected:ident, $widest:ident, $features:literal,
     $(#[$doc:meta])* $vis:vis fn $name:ident($($arg:ident: $ty:ty),*) = $generic:ident) => {
        $(#[$doc])*
        #[allow(clippy::too_many_arguments)]
        $vis unsafe fn $name(isa: $crate::cpu::isa::$detected, $($arg: $ty),*) {
            use $crate::cpu::isa::$detected;
            use $crate::cpu::simd;
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = $features)]
            unsafe fn widest(l: simd::$widest, $($arg: $ty),*) {
                // SAFETY: the caller of the kernel vouches for its arguments.
                unsafe { $generic(l, $($arg),*) }
            }
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma")]
            unsafe fn avx2(l: simd::Avx2, $($arg: $ty),*) {
                // SAFETY: the caller of the kernel vouches for its arguments.
                unsafe { $generic(l, $($arg),*) }
            }
            match isa {
                // SAFETY: the token proves that the machine has the instructions.
                #[cfg(target_arch = "x86_64")]
                $detected::$widest(l) => unsafe { widest(l, $($arg),*) },
                // SAFETY: as above.
                #[cfg(target_arch = "x86_64")]
                $detected::Avx2(l) => unsafe { avx2(l, $($arg),*) },
                // SAFETY: the caller of the kernel vouches for its arguments.
                $detected::Portable => unsafe { $generic(simd::Portable, $($arg),*) },
            }
        }
    };
}
pub(super) use kernel;

/// A tile of a product: some rows by some panels, summed up on lanes of `L`.
pub(super) trait Tile<L> {
    /// Sums up `R` rows by `P` panels.
    ///
    /// # Safety
    /// The tile must lie within a product whose pointers are valid.
    unsafe fn sum<const R: usize, const P: usize>(&self, l: L);
}

/// Tiles of one instruction set, as a module: the panels of a tile of so many rows, and `sum`, which
/// sums up a tile of one of the shapes. Each shape is a function of its own: inlined side by side,
/// some would lose their registers.
macro_rules! tiles {
    ($name:ident, $token:ident, [$feature:literal], of 32 registers) => {
        $crate::cpu::simd::tiles!(
            $name, $token, [$feature],
            [4, 4, 4, 4, 4, 4, 3, 3, 2, 2, 2, 2],
            1 x 4, 2 x 4, 3 x 4, 4 x 4, 5 x 4, 6 x 4, 6 x 3, 7 x 3, 8 x 3,
            8 x 2, 9 x 2, 10 x 2, 11 x 2, 12 x 2,
            1 x 1, 2 x 1, 3 x 1, 4 x 1, 5 x 1, 6 x 1, 7 x 1, 8 x 1, 9 x 1, 10 x 1, 11 x 1, 12 x 1
        );
    };
    ($name:ident, $token:ident, [$($feature:literal)?], $panels:expr,
     $($r:literal x $p:literal),*) => {
        mod $name {
            use $crate::cpu::simd::{$token, Tile};

            pub(super) const PANELS: &[usize] = &$panels;

            $(#[target_feature(enable = $feature)])?
            #[inline(never)]
            unsafe fn one<T: Tile<$token>, const R: usize, const P: usize>(l: $token, t: &T) {
                // SAFETY: the caller vouches for the tile.
                unsafe { t.sum::<R, P>(l) }
            }

            /// # Safety
            /// The tile must lie within a product whose pointers are valid.
            pub(super) unsafe fn sum<T: Tile<$token>>(
                l: $token,
                (rows, panels): (usize, usize),
                t: &T,
            ) {
                match (rows, panels) {
                    // SAFETY: the token proves that the machine has the instructions, and the
                    // caller vouches for the tile.
                    $(($r, $p) => unsafe { one::<T, $r, $p>(l, t) },)*
                    _ => unreachable!("no tile of {rows} rows by {panels} panels"),
                }
            }
        }
    };
}
pub(super) use tiles;

/// Writes a loop out, with a constant index: an array of registers that a loop indexes is kept in
/// memory whenever the compiler declines to unroll the loop.
macro_rules! unroll {
    ($i:ident < $n:ident $body:block) => {
        $crate::cpu::simd::unroll!(@ $i $n $body 0 1 2 3 4 5 6 7 8 9 10 11)
    };
    (@ $i:ident $n:ident $body:block $($at:literal)*) => {
        $(if $at < $n {
            let $i: usize = $at;
            $body
        })*
    };
}
pub(super) use unroll;
