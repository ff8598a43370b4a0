//! The plain types of numbers in memory: f32, half precision and bfloat16.

use std::fmt;

use half::slice::{HalfBitsSliceExt, HalfFloatSliceExt};
use half::{bf16, f16};

use super::lanes::{LANES, Lanes};
use super::memory::Plain;

/// A type of number in which weights, keys and values are kept.
pub(crate) trait Element: Send + Sync + 'static {
    type Bits: Plain + Default + fmt::Debug;

    fn load<L: Lanes>(lanes: L, bits: &[Self::Bits; LANES]) -> L::F;
    fn widen(bits: Self::Bits) -> f32;
    /// Rounds to nearest, ties to even; a NaN stays one. Both slices are equally long.
    fn round(values: &[f32], to: &mut [Self::Bits]);
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct F32;
#[derive(Clone, Copy, Debug)]
pub(crate) struct F16;
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bf16;

impl Element for F32 {
    type Bits = f32;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, bits: &[f32; LANES]) -> L::F {
        lanes.load(bits)
    }

    fn widen(bits: f32) -> f32 {
        bits
    }

    fn round(values: &[f32], to: &mut [f32]) {
        to.copy_from_slice(values);
    }
}

impl Element for F16 {
    type Bits = u16;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, bits: &[u16; LANES]) -> L::F {
        lanes.load_f16(bits)
    }

    fn widen(bits: u16) -> f32 {
        f16::from_bits(bits).to_f32()
    }

    fn round(values: &[f32], to: &mut [u16]) {
        to.reinterpret_cast_mut::<f16>().convert_from_f32_slice(values);
    }
}

impl Element for Bf16 {
    type Bits = u16;

    #[inline(always)]
    fn load<L: Lanes>(lanes: L, bits: &[u16; LANES]) -> L::F {
        lanes.load_bf16(bits)
    }

    fn widen(bits: u16) -> f32 {
        bf16::from_bits(bits).to_f32()
    }

    fn round(values: &[f32], to: &mut [u16]) {
        to.reinterpret_cast_mut::<bf16>().convert_from_f32_slice(values);
    }
}
