//! Lanes as two AVX2 registers, lanes 0 to 7 and 8 to 15.

use std::arch::x86_64::*;

use super::{Int8Lanes, LANES, Lanes, read, write};

/// Proof that the machine has AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx2(());

impl Avx2 {
    /// The token, if the machine has the instructions.
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma");
        // SAFETY: the instructions were just found.
        found.then(|| unsafe { Self::new() })
    }

    /// # Safety
    /// The machine must have AVX2 and FMA.
    pub(super) unsafe fn new() -> Self {
        Self(())
    }
}

/// The folding of the lower 8 lanes, once the upper 8 were added to them.
#[inline(always)]
pub(super) unsafe fn fold8(a: __m256) -> f32 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let a = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_add_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_add_ss(a, _mm_shuffle_ps::<1>(a, a)))
    }
}

/// The largest of 8 lanes, in the order of [`fold8`].
#[inline(always)]
pub(super) unsafe fn fold8_max(a: __m256) -> f32 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let a = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps::<1>(a));
        let a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        _mm_cvtss_f32(_mm_max_ss(a, _mm_shuffle_ps::<1>(a, a)))
    }
}

/// The sum of 16 signed bytes.
#[inline(always)]
pub(super) unsafe fn sum_i8(bytes: __m128i) -> i32 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let above = _mm_xor_si128(bytes, _mm_set1_epi8(-128));
        let sums = _mm_sad_epu8(above, _mm_setzero_si128());
        _mm_cvtsi128_si32(_mm_add_epi32(sums, _mm_srli_si128::<8>(sums))) - 16 * 128
    }
}

/// Two registers.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Two(__m256, __m256);

/// Two registers of integers.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct TwoI(__m256i, __m256i);

/// Eight folds at a time: lane i of the result is the fold of `v[i]`.
#[inline(always)]
unsafe fn fold_eight(v: &[Two]) -> __m256 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        #[inline(always)]
        unsafe fn halves(a: Two, b: Two) -> __m256 {
            // SAFETY: the caller vouches for the instructions.
            unsafe {
                let (a, b) = (_mm256_add_ps(a.0, a.1), _mm256_add_ps(b.0, b.1));
                _mm256_add_ps(
                    _mm256_permute2f128_ps::<0x20>(a, b),
                    _mm256_permute2f128_ps::<0x31>(a, b),
                )
            }
        }
        #[inline(always)]
        unsafe fn pairs(a: __m256, b: __m256) -> __m256 {
            // SAFETY: the caller vouches for the instructions.
            unsafe {
                let (a, b) = (_mm256_castps_pd(a), _mm256_castps_pd(b));
                _mm256_add_ps(
                    _mm256_castpd_ps(_mm256_unpacklo_pd(a, b)),
                    _mm256_castpd_ps(_mm256_unpackhi_pd(a, b)),
                )
            }
        }
        let a = pairs(halves(v[0], v[4]), halves(v[1], v[5]));
        let b = pairs(halves(v[2], v[6]), halves(v[3], v[7]));
        _mm256_add_ps(_mm256_shuffle_ps::<0x88>(a, b), _mm256_shuffle_ps::<0xdd>(a, b))
    }
}

macro_rules! each {
    ($op:ident, $($v:ident),*) => {
        // SAFETY: the token proves the instructions.
        unsafe { Two($op($($v.0),*), $op($($v.1),*)) }
    };
}

impl Lanes for Avx2 {
    type F = Two;
    const MANY_REGISTERS: bool = false;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: the token proves the instructions.
        let x = unsafe { _mm256_set1_ps(x) };
        Two(x, x)
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        each!(_mm256_add_ps, a, b)
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        each!(_mm256_sub_ps, a, b)
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        each!(_mm256_mul_ps, a, b)
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        each!(_mm256_div_ps, a, b)
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        each!(_mm256_fmadd_ps, a, b, c)
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        each!(_mm256_max_ps, a, b)
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        each!(_mm256_min_ps, a, b)
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        let sign = unsafe { _mm256_set1_ps(-0.0) };
        let sign = Two(sign, sign);
        each!(_mm256_andnot_ps, sign, a)
    }
    #[inline(always)]
    fn zero_below(self, x: Self::F, bound: Self::F, value: Self::F) -> Self::F {
        let keep = each!(not_less, x, bound);
        each!(_mm256_and_ps, keep, value)
    }
    #[inline(always)]
    fn power_of_two(self, n: Self::F) -> Self::F {
        each!(power_of_two, n)
    }
    #[inline(always)]
    fn fold(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the instructions.
        unsafe { fold8(_mm256_add_ps(a.0, a.1)) }
    }
    #[inline(always)]
    fn fold_max(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the instructions.
        unsafe { fold8_max(_mm256_max_ps(a.0, a.1)) }
    }
    #[inline(always)]
    fn fold_each(self, a: &[Self::F; LANES]) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { Two(fold_eight(&a[..8]), fold_eight(&a[8..])) }
    }

    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe { Two(read::<__m256>(at), read::<__m256>(at.add(8))) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, a: Self::F) {
        // SAFETY: vouched for by the caller.
        unsafe {
            write::<__m256>(at, a.0);
            write::<__m256>(at.add(8), a.1);
        }
    }
    #[inline(always)]
    unsafe fn load_first(self, at: *const f32, n: usize) -> Self::F {
        let mut values = [0.0f32; LANES];
        // SAFETY: the caller says that n values are readable, and n is at most 16.
        unsafe {
            std::ptr::copy_nonoverlapping(at, values.as_mut_ptr(), n);
            self.load(values.as_ptr())
        }
    }
    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, n: usize, a: Self::F) {
        let mut values = [0.0f32; LANES];
        // SAFETY: the caller says that n values are writable, and n is at most 16.
        unsafe {
            self.store(values.as_mut_ptr(), a);
            std::ptr::copy_nonoverlapping(values.as_ptr(), at, n);
        }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u16) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe { Two(widen8(at), widen8(at.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_low(self, at: *const u32) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe { Two(low8(at), low8(at.add(8))) }
    }
    #[inline(always)]
    unsafe fn load_high(self, at: *const u32) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe { Two(high8(at), high8(at.add(8))) }
    }
    #[inline(always)]
    fn prefetch_later(self, at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

#[inline(always)]
unsafe fn not_less(a: __m256, b: __m256) -> __m256 {
    // SAFETY: the caller vouches for the instructions.
    unsafe { _mm256_cmp_ps::<_CMP_NLT_UQ>(a, b) }
}

#[inline(always)]
unsafe fn power_of_two(n: __m256) -> __m256 {
    // SAFETY: the caller vouches for the instructions.
    unsafe {
        let exponent = _mm256_add_epi32(_mm256_cvttps_epi32(n), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(exponent))
    }
}

#[inline(always)]
unsafe fn widen8(at: *const u16) -> __m256 {
    // SAFETY: vouched for by the caller.
    unsafe {
        let words = _mm256_cvtepu16_epi32(read::<__m128i>(at));
        _mm256_castsi256_ps(_mm256_slli_epi32::<16>(words))
    }
}

#[inline(always)]
unsafe fn low8(at: *const u32) -> __m256 {
    // SAFETY: vouched for by the caller.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(read::<__m256i>(at))) }
}

#[inline(always)]
unsafe fn high8(at: *const u32) -> __m256 {
    // SAFETY: vouched for by the caller.
    unsafe {
        let high = _mm256_set1_epi32(0xffff_0000u32 as i32);
        _mm256_castsi256_ps(_mm256_and_si256(read::<__m256i>(at), high))
    }
}

impl Int8Lanes for Avx2 {
    type Lanes = Self;
    type I = TwoI;
    /// Two of the four weights of each lane, widened: the first and the third, then the others.
    type W = TwoI;
    type X = __m256i;
    const STEPS: usize = 2;

    #[inline(always)]
    fn lanes(self) -> Self {
        self
    }
    #[inline(always)]
    fn start(self, minus_128_sum: i32) -> Self::I {
        // SAFETY: the token proves the instructions.
        unsafe { TwoI(_mm256_set1_epi32(minus_128_sum), _mm256_set1_epi32(minus_128_sum)) }
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> Two {
        // SAFETY: the token proves the instructions.
        unsafe { Two(_mm256_cvtepi32_ps(a.0), _mm256_cvtepi32_ps(a.1)) }
    }
    #[inline(always)]
    unsafe fn weights(self, at: *const u8, step: usize) -> Self::W {
        // SAFETY: vouched for by the caller.
        unsafe {
            let (a, b) = (read::<__m256i>(at), read::<__m256i>(at.add(32)));
            if step == 0 {
                let low = _mm256_set1_epi16(0xff);
                TwoI(_mm256_and_si256(a, low), _mm256_and_si256(b, low))
            } else {
                TwoI(_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b))
            }
        }
    }
    #[inline(always)]
    unsafe fn inputs(self, x: *const i8, step: usize) -> Self::X {
        // SAFETY: vouched for by the caller.
        unsafe { _mm256_set1_epi32(read::<i32>(x.add(4 * step))) }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, w: Self::W, x: Self::X) -> Self::I {
        // Words rather than bytes: products of bytes would need the weights' signs moved to the
        // activations for every row, which measured slower.
        // SAFETY: the token proves the instructions.
        unsafe {
            TwoI(
                _mm256_add_epi32(sum.0, _mm256_madd_epi16(w.0, x)),
                _mm256_add_epi32(sum.1, _mm256_madd_epi16(w.1, x)),
            )
        }
    }
    #[inline(always)]
    unsafe fn store_inputs(self, at: *mut i8, a: Two) -> i32 {
        // SAFETY: vouched for by the caller.
        unsafe {
            // Low bytes alone, so that what is no number stores zero, as a cast would.
            let low = _mm256_set1_epi32(0xff);
            let words = _mm256_packus_epi32(
                _mm256_and_si256(_mm256_cvttps_epi32(a.0), low),
                _mm256_and_si256(_mm256_cvttps_epi32(a.1), low),
            );
            let words = _mm256_permute4x64_epi64::<0xd8>(words);
            let bytes = _mm256_permute4x64_epi64::<0x08>(_mm256_packus_epi16(words, words));
            let bytes = _mm256_castsi256_si128(bytes);
            // Of every four the first and the third, then the others, as the weights come.
            let order = _mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15);
            let words = _mm256_cvtepi8_epi16(_mm_shuffle_epi8(bytes, order));
            write::<__m256i>(at, words);
            sum_i8(bytes)
        }
    }
}
