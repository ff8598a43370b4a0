//! Sixteen values in one 512-bit register.

use std::arch::x86_64::{
    __m512, _MM_HINT_T0, _mm_loadu_si128, _mm_prefetch, _mm256_loadu_si256, _mm512_add_epi32, _mm512_add_ps,
    _mm512_castsi512_ps, _mm512_cvtepi8_epi32, _mm512_cvtepi32_ps, _mm512_cvtepu8_epi32, _mm512_cvtepu16_epi32,
    _mm512_cvtph_ps, _mm512_cvtps_epi32, _mm512_div_ps, _mm512_fmadd_ps, _mm512_loadu_ps, _mm512_max_ps, _mm512_min_ps,
    _mm512_mul_ps, _mm512_permutexvar_ps, _mm512_set1_epi32, _mm512_set1_ps, _mm512_slli_epi32, _mm512_srli_epi32,
    _mm512_storeu_ps, _mm512_sub_ps,
};

use super::{Kernel, LANES, Lanes};

/// The proof that this machine has AVX-512 F, BW and VL, and F16C, FMA and AVX2 with them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has_all = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }
}

/// The values 0 to 15: `vpermps` looks up the low four bits of each index and does not see the others.
const NIBBLES: [f32; LANES] = [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0, 14.0, 15.0];

#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx2,fma,f16c")]
fn compiled_for<K: Kernel>(kernel: K, lanes: Avx512) -> K::Output {
    kernel.run(lanes)
}

// SAFETY (of every block below): `Avx512` exists only where `detect` found the instructions, and every load and store
// is of a whole array behind a reference.
impl Lanes for Avx512 {
    type F = __m512;
    const MAX_ROWS: usize = 12;
    const BOTH_HALVES: bool = true;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        unsafe { compiled_for(kernel, self) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> __m512 {
        unsafe { _mm512_set1_ps(value) }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> __m512 {
        unsafe { _mm512_loadu_ps(values.as_ptr()) }
    }

    #[inline(always)]
    fn store(self, values: __m512, to: &mut [f32; LANES]) {
        unsafe { _mm512_storeu_ps(to.as_mut_ptr(), values) }
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> __m512 {
        unsafe { _mm512_cvtph_ps(_mm256_loadu_si256(bits.as_ptr().cast())) }
    }

    #[inline(always)]
    fn load_bf16(self, bits: &[u16; LANES]) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256(bits.as_ptr().cast()));
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(wide))
        }
    }

    #[inline(always)]
    fn load_i8(self, values: &[i8; LANES]) -> __m512 {
        unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(values.as_ptr().cast()))) }
    }

    #[inline(always)]
    fn load_low_nibbles(self, bytes: &[u8; LANES]) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()));
            _mm512_permutexvar_ps(wide, _mm512_loadu_ps(NIBBLES.as_ptr()))
        }
    }

    #[inline(always)]
    fn load_high_nibbles(self, bytes: &[u8; LANES]) -> __m512 {
        unsafe {
            let wide = _mm512_cvtepu8_epi32(_mm_loadu_si128(bytes.as_ptr().cast()));
            _mm512_permutexvar_ps(_mm512_srli_epi32::<4>(wide), _mm512_loadu_ps(NIBBLES.as_ptr()))
        }
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_add_ps(a, b) }
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_sub_ps(a, b) }
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_mul_ps(a, b) }
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_div_ps(a, b) }
    }

    #[inline(always)]
    fn fma(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        unsafe { _mm512_fmadd_ps(a, b, c) }
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_max_ps(a, b) }
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        unsafe { _mm512_min_ps(a, b) }
    }

    #[inline(always)]
    fn power_of_two(self, exponents: __m512) -> __m512 {
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvtps_epi32(exponents), _mm512_set1_epi32(127));
            _mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased))
        }
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
