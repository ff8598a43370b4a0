//! Sixteen values in two 256-bit registers.

use std::arch::x86_64::{
    __m128i, __m256, _MM_HINT_T0, _mm_loadl_epi64, _mm_loadu_si128, _mm_prefetch, _mm256_add_epi32, _mm256_add_ps,
    _mm256_and_si256, _mm256_castsi256_ps, _mm256_cvtepi8_epi32, _mm256_cvtepi32_ps, _mm256_cvtepu8_epi32,
    _mm256_cvtepu16_epi32, _mm256_cvtph_ps, _mm256_cvtps_epi32, _mm256_div_ps, _mm256_fmadd_ps, _mm256_loadu_ps,
    _mm256_max_ps, _mm256_min_ps, _mm256_mul_ps, _mm256_set1_epi32, _mm256_set1_ps, _mm256_slli_epi32,
    _mm256_srli_epi32, _mm256_storeu_ps, _mm256_sub_ps,
};

use super::{Kernel, LANES, Lanes};

/// The proof that this machine has AVX2, FMA and F16C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let has_all =
            is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma") && is_x86_feature_detected!("f16c");
        has_all.then_some(Self(()))
    }
}

#[target_feature(enable = "avx2,fma,f16c")]
fn compiled_for<K: Kernel>(kernel: K, lanes: Avx2) -> K::Output {
    kernel.run(lanes)
}

type F = [__m256; 2];

/// Does the same for both halves. A closure that is not inlined would not be compiled for the instructions, and each
/// intrinsic in it would be a call.
macro_rules! both {
    ($half:ident => $value:expr) => {{
        [
            {
                let $half = 0;
                $value
            },
            {
                let $half = 1;
                $value
            },
        ]
    }};
}

// SAFETY (of every block below): `Avx2` exists only where `detect` found the instructions, and every load and store is
// of a half of an array behind a reference.

#[inline(always)]
fn half_of(bits: &[u16; LANES], half: usize) -> __m128i {
    unsafe { _mm_loadu_si128(bits[8 * half..][..8].as_ptr().cast()) }
}

impl Lanes for Avx2 {
    type F = F;
    const MAX_ROWS: usize = 6;
    const BOTH_HALVES: bool = false;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        unsafe { compiled_for(kernel, self) }
    }

    #[inline(always)]
    fn splat(self, value: f32) -> F {
        unsafe { [_mm256_set1_ps(value); 2] }
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> F {
        both!(half => unsafe { _mm256_loadu_ps(values[8 * half..][..8].as_ptr()) })
    }

    #[inline(always)]
    fn store(self, values: F, to: &mut [f32; LANES]) {
        for (half, values) in to.chunks_exact_mut(8).zip(values) {
            unsafe { _mm256_storeu_ps(half.as_mut_ptr(), values) }
        }
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> F {
        both!(half => unsafe { _mm256_cvtph_ps(half_of(bits, half)) })
    }

    #[inline(always)]
    fn load_bf16(self, bits: &[u16; LANES]) -> F {
        both!(half => unsafe {
            let wide = _mm256_cvtepu16_epi32(half_of(bits, half));
            _mm256_castsi256_ps(_mm256_slli_epi32::<16>(wide))
        })
    }

    #[inline(always)]
    fn load_i8(self, values: &[i8; LANES]) -> F {
        both!(half => unsafe {
            _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(values[8 * half..][..8].as_ptr().cast())))
        })
    }

    #[inline(always)]
    fn load_low_nibbles(self, bytes: &[u8; LANES]) -> F {
        both!(half => unsafe {
            let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes[8 * half..][..8].as_ptr().cast()));
            _mm256_cvtepi32_ps(_mm256_and_si256(wide, _mm256_set1_epi32(15)))
        })
    }

    #[inline(always)]
    fn load_high_nibbles(self, bytes: &[u8; LANES]) -> F {
        both!(half => unsafe {
            let wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64(bytes[8 * half..][..8].as_ptr().cast()));
            _mm256_cvtepi32_ps(_mm256_srli_epi32::<4>(wide))
        })
    }

    #[inline(always)]
    fn add(self, a: F, b: F) -> F {
        both!(half => unsafe { _mm256_add_ps(a[half], b[half]) })
    }

    #[inline(always)]
    fn sub(self, a: F, b: F) -> F {
        both!(half => unsafe { _mm256_sub_ps(a[half], b[half]) })
    }

    #[inline(always)]
    fn mul(self, a: F, b: F) -> F {
        both!(half => unsafe { _mm256_mul_ps(a[half], b[half]) })
    }

    #[inline(always)]
    fn div(self, a: F, b: F) -> F {
        both!(half => unsafe { _mm256_div_ps(a[half], b[half]) })
    }

    #[inline(always)]
    fn fma(self, a: F, b: F, c: F) -> F {
        both!(half => unsafe { _mm256_fmadd_ps(a[half], b[half], c[half]) })
    }

    #[inline(always)]
    fn max(self, a: F, b: F) -> F {
        both!(half => unsafe { _mm256_max_ps(a[half], b[half]) })
    }

    #[inline(always)]
    fn min(self, a: F, b: F) -> F {
        both!(half => unsafe { _mm256_min_ps(a[half], b[half]) })
    }

    #[inline(always)]
    fn power_of_two(self, exponents: F) -> F {
        both!(half => unsafe {
            let biased = _mm256_add_epi32(_mm256_cvtps_epi32(exponents[half]), _mm256_set1_epi32(127));
            _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
        })
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) }
    }
}
