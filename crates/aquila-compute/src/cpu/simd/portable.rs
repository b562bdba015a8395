//! Lanes as an array, with the target's baseline instructions.

use super::{Int8Lanes, LANES, Lanes, read, write};
use crate::{math, reference};

/// An array of 16 values, which every machine has.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Portable;

#[inline(always)]
fn map2(a: [f32; LANES], b: [f32; LANES], f: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|i| f(a[i], b[i]))
}

fn widen(bits: u32) -> f32 {
    f32::from_bits(bits << 16)
}

impl Lanes for Portable {
    type F = [f32; LANES];
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        [x; LANES]
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|i| math::fma(a[i], b[i], c[i]))
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        map2(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        a.map(f32::abs)
    }
    #[inline(always)]
    fn zero_below(self, x: Self::F, bound: Self::F, value: Self::F) -> Self::F {
        std::array::from_fn(|i| if x[i] < bound[i] { 0.0 } else { value[i] })
    }
    #[inline(always)]
    fn power_of_two(self, n: Self::F) -> Self::F {
        n.map(|n| f32::from_bits(((n as i32).wrapping_add(127) << 23) as u32))
    }
    #[inline(always)]
    fn fold(self, a: Self::F) -> f32 {
        reference::fold(a)
    }
    #[inline(always)]
    fn fold_max(self, a: Self::F) -> f32 {
        reference::fold_max(a)
    }
    #[inline(always)]
    fn fold_each(self, a: &[Self::F; LANES]) -> Self::F {
        a.map(reference::fold)
    }

    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> Self::F {
        // SAFETY: the caller says that 16 values are readable.
        std::array::from_fn(|i| unsafe { read(at.add(i)) })
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, a: Self::F) {
        for (i, x) in a.into_iter().enumerate() {
            // SAFETY: the caller says that 16 values are writable.
            unsafe { write(at.add(i), x) }
        }
    }
    #[inline(always)]
    unsafe fn load_first(self, at: *const f32, n: usize) -> Self::F {
        // SAFETY: the caller says that n values are readable.
        std::array::from_fn(|i| if i < n { unsafe { *at.add(i) } } else { 0.0 })
    }
    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, n: usize, a: Self::F) {
        for (i, x) in a.into_iter().take(n).enumerate() {
            // SAFETY: the caller says that n values are writable.
            unsafe { at.add(i).write(x) }
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u16) -> Self::F {
        // SAFETY: the caller says that 16 values are readable.
        std::array::from_fn(|i| widen(u32::from(unsafe { read::<u16>(at.add(i)) })))
    }
    #[inline(always)]
    unsafe fn load_low(self, at: *const u32) -> Self::F {
        // SAFETY: the caller says that 16 words are readable.
        std::array::from_fn(|i| widen(unsafe { read(at.add(i)) }))
    }
    #[inline(always)]
    unsafe fn load_high(self, at: *const u32) -> Self::F {
        // SAFETY: the caller says that 16 words are readable.
        std::array::from_fn(|i| f32::from_bits(unsafe { read::<u32>(at.add(i)) } & 0xffff_0000))
    }
}

impl Int8Lanes for Portable {
    type Lanes = Self;
    type I = [i32; LANES];
    type W = [u8; 64];
    type X = [i8; 4];
    const STEPS: usize = 1;

    #[inline(always)]
    fn lanes(self) -> Self {
        self
    }
    #[inline(always)]
    fn start(self, minus_128_sum: i32) -> Self::I {
        [minus_128_sum; LANES]
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> [f32; LANES] {
        a.map(|x| x as f32)
    }
    #[inline(always)]
    unsafe fn weights(self, at: *const u8, _step: usize) -> Self::W {
        // SAFETY: the caller says that 64 bytes are readable.
        unsafe { at.cast::<[u8; 64]>().read() }
    }
    #[inline(always)]
    unsafe fn inputs(self, x: *const i8, _step: usize) -> Self::X {
        // SAFETY: the caller says that four bytes are readable.
        unsafe { x.cast::<[i8; 4]>().read() }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, w: Self::W, x: Self::X) -> Self::I {
        std::array::from_fn(|i| {
            (0..4).fold(sum[i], |sum, j| sum + i32::from(w[4 * i + j]) * i32::from(x[j]))
        })
    }
    #[inline(always)]
    unsafe fn store_inputs(self, at: *mut i8, a: [f32; LANES]) -> i32 {
        let mut sum = 0;
        for (i, x) in a.into_iter().enumerate() {
            sum += i32::from(x as i8);
            // SAFETY: the caller says that 16 bytes are writable.
            unsafe { at.add(i).write(x as i8) }
        }
        sum
    }
}
