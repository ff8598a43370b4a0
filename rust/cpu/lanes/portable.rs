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

/// The value of a half-precision number, in operations that compilers turn into vector code: its digits under the
/// exponent of f32 are the value over 2^112, subnormal or not, and the product is exact.
#[inline(always)]
fn widened(bits: u16) -> f32 {
    let magnitude = bits & 0x7fff;
    let value = f32::from_bits(u32::from(magnitude) << 13) * f32::from_bits((127 + 112) << 23);
    let infinite_or_nan = if magnitude >= 0x7c00 { 0x7f80_0000 } else { 0 };
    f32::from_bits(value.to_bits() | infinite_or_nan | u32::from(bits & 0x8000) << 16)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::InstructionSet;
    use half::f16;

    struct Widen<'a>(&'a [u16; LANES]);

    impl Kernel for Widen<'_> {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> [f32; LANES] {
            let mut values = [0.0; LANES];
            lanes.store(lanes.load_f16(self.0), &mut values);
            values
        }
    }

    #[test]
    fn every_half_is_widened_to_its_value_on_all_instruction_sets() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        for halves in all.as_chunks().0 {
            for set in InstructionSet::all() {
                for (value, &bits) in set.run(Widen(halves)).into_iter().zip(halves) {
                    let expected = f16::from_bits(bits).to_f32();
                    assert!(value.to_bits() == expected.to_bits() || value.is_nan() && expected.is_nan(), "{bits:#x}");
                }
            }
        }
    }
}
