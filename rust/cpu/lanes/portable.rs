//! Sixteen values as an array: no intrinsics, every access checked. The twin of the others.

use super::{Kernel, LANES, Lanes};

/// What every machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Portable;

#[inline(always)]
fn each<A: Copy>(values: &[A; LANES], function: impl Fn(A) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| function(values[lane]))
}

#[inline(always)]
fn both(a: [f32; LANES], b: [f32; LANES], function: impl Fn(f32, f32) -> f32) -> [f32; LANES] {
    std::array::from_fn(|lane| function(a[lane], b[lane]))
}

/// The value of a half-precision number, in whole-number operations that compilers turn into vector code.
#[inline(always)]
fn widened(bits: u16) -> f32 {
    let magnitude = u32::from(bits & 0x7fff) << 13;
    let exponent = magnitude & (0x7c00 << 13);
    let value = if exponent == 0x7c00 << 13 {
        f32::from_bits(magnitude + (112 << 23) + (112 << 23)) // infinite or NaN
    } else if exponent == 0 {
        // Subnormal: 2^-14 with the digits behind it, less 2^-14.
        f32::from_bits(magnitude + (113 << 23)) - f32::from_bits(113 << 23)
    } else {
        f32::from_bits(magnitude + (112 << 23))
    };
    f32::from_bits(value.to_bits() | u32::from(bits & 0x8000) << 16)
}

impl Lanes for Portable {
    type F = [f32; LANES];
    const MAX_ROWS: usize = 6;
    const BOTH_HALVES: bool = false;

    #[inline(always)]
    fn run<K: Kernel>(self, kernel: K) -> K::Output {
        kernel.run(self)
    }

    #[inline(always)]
    fn splat(self, value: f32) -> Self::F {
        [value; LANES]
    }

    #[inline(always)]
    fn load(self, values: &[f32; LANES]) -> Self::F {
        *values
    }

    #[inline(always)]
    fn store(self, values: Self::F, to: &mut [f32; LANES]) {
        *to = values;
    }

    #[inline(always)]
    fn load_f16(self, bits: &[u16; LANES]) -> Self::F {
        each(bits, widened)
    }

    #[inline(always)]
    fn load_bf16(self, bits: &[u16; LANES]) -> Self::F {
        each(bits, |bits| f32::from_bits(u32::from(bits) << 16))
    }

    #[inline(always)]
    fn load_i8(self, values: &[i8; LANES]) -> Self::F {
        each(values, f32::from)
    }

    #[inline(always)]
    fn load_low_nibbles(self, bytes: &[u8; LANES]) -> Self::F {
        each(bytes, |byte| f32::from(byte & 15))
    }

    #[inline(always)]
    fn load_high_nibbles(self, bytes: &[u8; LANES]) -> Self::F {
        each(bytes, |byte| f32::from(byte >> 4))
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a + b)
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a - b)
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a * b)
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| a / b)
    }

    #[inline(always)]
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        std::array::from_fn(|lane| a[lane].mul_add(b[lane], c[lane]))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both(a, b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "-126 to 127, and 127 is added")]
    fn power_of_two(self, exponents: Self::F) -> Self::F {
        each(&exponents, |exponent| f32::from_bits(((exponent as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    fn prefetch<T>(self, _: *const T) {}
}
