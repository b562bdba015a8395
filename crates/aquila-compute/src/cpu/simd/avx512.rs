//! Lanes as one AVX-512 register.

use std::arch::x86_64::*;

use super::{Avx2, Int8Lanes, LANES, Lanes, read, write};

/// Proof that the machine has AVX-512 F, BW, DQ and VL, AVX2 and FMA.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Avx512(Avx2);

/// Proof that the machine has AVX-512 VNNI beside them.
#[derive(Clone, Copy)]
pub(in crate::cpu) struct Vnni(Avx512);

impl Avx512 {
    /// The token, if the machine has the instructions.
    pub(in crate::cpu) fn detect() -> Option<Self> {
        let found = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl");
        let avx2 = Avx2::detect().filter(|_| found)?;
        // SAFETY: the instructions were just found.
        Some(unsafe { Self::new(avx2) })
    }

    /// # Safety
    /// The machine must have AVX-512 F, BW, DQ and VL.
    unsafe fn new(avx2: Avx2) -> Self {
        Self(avx2)
    }

    /// What it has of AVX2.
    pub(in crate::cpu) fn avx2(self) -> Avx2 {
        self.0
    }

    /// The token of VNNI, if the machine has it too.
    pub(in crate::cpu) fn vnni(self) -> Option<Vnni> {
        // SAFETY: the instructions were just found.
        is_x86_feature_detected!("avx512vnni").then(|| unsafe { Vnni::new(self) })
    }
}

impl Vnni {
    /// # Safety
    /// The machine must have AVX-512 VNNI.
    unsafe fn new(avx512: Avx512) -> Self {
        Self(avx512)
    }
}

impl Lanes for Avx512 {
    type F = __m512;
    const MANY_REGISTERS: bool = true;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_set1_ps(x) }
    }
    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_add_ps(a, b) }
    }
    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_sub_ps(a, b) }
    }
    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_mul_ps(a, b) }
    }
    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_div_ps(a, b) }
    }
    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }
    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_max_ps(a, b) }
    }
    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_min_ps(a, b) }
    }
    #[inline(always)]
    fn abs(self, a: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_abs_ps(a) }
    }
    #[inline(always)]
    fn zero_below(self, x: Self::F, bound: Self::F, value: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_maskz_mov_ps(_mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x, bound), value) }
    }
    #[inline(always)]
    fn power_of_two(self, n: Self::F) -> Self::F {
        // SAFETY: the token proves the instructions.
        unsafe {
            let exponent = _mm512_add_epi32(_mm512_cvttps_epi32(n), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(exponent))
        }
    }
    #[inline(always)]
    fn fold(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the instructions.
        unsafe {
            let a = _mm256_add_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            super::avx2::fold8(a)
        }
    }
    #[inline(always)]
    fn fold_max(self, a: Self::F) -> f32 {
        // SAFETY: the token proves the instructions.
        unsafe {
            let a = _mm256_max_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps::<1>(a));
            super::avx2::fold8_max(a)
        }
    }
    #[inline(always)]
    fn fold_each(self, v: &[Self::F; LANES]) -> Self::F {
        // The additions of `fold`, of two vectors at a time; the order of the inputs is such that
        // the last step leaves vector i in lane i.
        // SAFETY: the token proves the instructions.
        unsafe {
            #[inline(always)]
            unsafe fn halves(a: __m512, b: __m512) -> __m512 {
                // SAFETY: the caller vouches for the instructions.
                unsafe {
                    _mm512_add_ps(
                        _mm512_shuffle_f32x4::<0x44>(a, b),
                        _mm512_shuffle_f32x4::<0xee>(a, b),
                    )
                }
            }
            #[inline(always)]
            unsafe fn quarters(a: __m512, b: __m512) -> __m512 {
                // SAFETY: the caller vouches for the instructions.
                unsafe {
                    _mm512_add_ps(
                        _mm512_shuffle_f32x4::<0x88>(a, b),
                        _mm512_shuffle_f32x4::<0xdd>(a, b),
                    )
                }
            }
            #[inline(always)]
            unsafe fn pairs(a: __m512, b: __m512) -> __m512 {
                // SAFETY: the caller vouches for the instructions.
                unsafe {
                    let (a, b) = (_mm512_castps_pd(a), _mm512_castps_pd(b));
                    _mm512_add_ps(
                        _mm512_castpd_ps(_mm512_unpacklo_pd(a, b)),
                        _mm512_castpd_ps(_mm512_unpackhi_pd(a, b)),
                    )
                }
            }
            #[inline(always)]
            unsafe fn singles(a: __m512, b: __m512) -> __m512 {
                // SAFETY: the caller vouches for the instructions.
                unsafe {
                    _mm512_add_ps(_mm512_shuffle_ps::<0x88>(a, b), _mm512_shuffle_ps::<0xdd>(a, b))
                }
            }
            let four = [
                quarters(halves(v[0], v[4]), halves(v[8], v[12])),
                quarters(halves(v[1], v[5]), halves(v[9], v[13])),
                quarters(halves(v[2], v[6]), halves(v[10], v[14])),
                quarters(halves(v[3], v[7]), halves(v[11], v[15])),
            ];
            singles(pairs(four[0], four[1]), pairs(four[2], four[3]))
        }
    }

    #[inline(always)]
    unsafe fn load(self, at: *const f32) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe { read::<__m512>(at) }
    }
    #[inline(always)]
    unsafe fn store(self, at: *mut f32, a: Self::F) {
        // SAFETY: vouched for by the caller.
        unsafe { write::<__m512>(at, a) }
    }
    #[inline(always)]
    unsafe fn load_first(self, at: *const f32, n: usize) -> Self::F {
        // SAFETY: vouched for by the caller; masked lanes are not touched.
        unsafe { _mm512_maskz_loadu_ps(((1u32 << n) - 1) as __mmask16, at) }
    }
    #[inline(always)]
    unsafe fn store_first(self, at: *mut f32, n: usize, a: Self::F) {
        // SAFETY: vouched for by the caller; masked lanes are not touched.
        unsafe { _mm512_mask_storeu_ps(at, ((1u32 << n) - 1) as __mmask16, a) }
    }
    #[inline(always)]
    unsafe fn load_bf16(self, at: *const u16) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe {
            let words = _mm512_cvtepu16_epi32(read::<__m256i>(at));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(words))
        }
    }
    #[inline(always)]
    unsafe fn load_low(self, at: *const u32) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(read::<__m512i>(at))) }
    }
    #[inline(always)]
    unsafe fn load_high(self, at: *const u32) -> Self::F {
        // SAFETY: vouched for by the caller.
        unsafe {
            let high = _mm512_set1_epi32(0xffff_0000u32 as i32);
            _mm512_castsi512_ps(_mm512_and_si512(read::<__m512i>(at), high))
        }
    }
    #[inline(always)]
    fn prefetch_later(self, at: *const u8) {
        // SAFETY: a prefetch of any address is harmless.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(at.cast()) }
    }
}

impl Int8Lanes for Vnni {
    type Lanes = Avx512;
    type I = __m512i;
    type W = __m512i;
    type X = __m512i;
    const STEPS: usize = 1;

    #[inline(always)]
    fn lanes(self) -> Avx512 {
        self.0
    }
    #[inline(always)]
    fn start(self, minus_128_sum: i32) -> Self::I {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_set1_epi32(minus_128_sum) }
    }
    #[inline(always)]
    fn to_f32(self, a: Self::I) -> __m512 {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_cvtepi32_ps(a) }
    }
    #[inline(always)]
    unsafe fn weights(self, at: *const u8, _step: usize) -> Self::W {
        // SAFETY: vouched for by the caller.
        unsafe { read::<__m512i>(at) }
    }
    #[inline(always)]
    unsafe fn inputs(self, x: *const i8, _step: usize) -> Self::X {
        // SAFETY: vouched for by the caller.
        unsafe { _mm512_set1_epi32(read::<i32>(x)) }
    }
    #[inline(always)]
    fn dot(self, sum: Self::I, w: Self::W, x: Self::X) -> Self::I {
        // SAFETY: the token proves the instructions.
        unsafe { _mm512_dpbusd_epi32(sum, w, x) }
    }
    #[inline(always)]
    unsafe fn store_inputs(self, at: *mut i8, a: __m512) -> i32 {
        // SAFETY: vouched for by the caller.
        unsafe {
            let bytes = _mm512_cvtepi32_epi8(_mm512_cvttps_epi32(a));
            write::<__m128i>(at, bytes);
            super::avx2::sum_i8(bytes)
        }
    }
}
