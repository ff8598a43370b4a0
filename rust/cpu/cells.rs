//! How weights lie in memory: cells of 32 outputs by one or more inputs, in the order in which a product reads them.
//!
//! A *panel* is 32 outputs of a matrix, its cells one after another along the inputs. Every cell decodes to the exact
//! values that the file's type stands for, so a product does not depend on how its weights are stored.

use half::f16;

use super::element::{Bf16, Element, F16, F32};
use super::lanes::{LANES, Lanes};
use super::memory::Plain;
use super::weight_kind::nibble;

/// Outputs in a panel.
pub(crate) const PANEL: usize = 2 * LANES;
/// Inputs that share a scale in the quantised types.
pub(crate) const QUANT_BLOCK: usize = 32;

/// Sixteen of a panel's outputs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Half {
    Lower,
    Upper,
}

/// The weights of 32 outputs for `INPUTS` inputs.
pub(crate) trait Cell: Plain {
    /// Inputs in a cell.
    const INPUTS: usize;
    /// What all inputs of a cell share, decoded.
    type Scales<L: Lanes>: Copy;

    fn scales<L: Lanes>(&self, lanes: L, half: Half) -> Self::Scales<L>;
    /// The weights of input `input` of this cell, for half of its outputs.
    fn weights<L: Lanes>(&self, lanes: L, scales: Self::Scales<L>, input: usize, half: Half) -> L::F;
    /// Where the weights of input `input` begin.
    fn address(&self, input: usize) -> *const u8;
    /// One weight.
    fn value(&self, input: usize, output: usize) -> f32;
}

/// The half of an array of 32.
#[inline(always)]
fn half_of<T>(values: &[T; PANEL], half: Half) -> &[T; LANES] {
    let (lower, upper) = values.split_at(LANES);
    let side = if half == Half::Lower { lower } else { upper };
    side.try_into().expect("half of 32 is 16")
}

/// Weights of one input as plain numbers.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct PlainCell<E: Element>(pub [E::Bits; PANEL]);

/// f32 weights.
pub(crate) type F32Cell = PlainCell<F32>;
/// Half-precision weights, as bits.
pub(crate) type F16Cell = PlainCell<F16>;
/// bfloat16 weights, as bits.
pub(crate) type Bf16Cell = PlainCell<Bf16>;

/// 32 inputs of type `Q8_0`: scale * value.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Q8Cell {
    pub scales: [u16; PANEL],
    pub values: [[i8; PANEL]; QUANT_BLOCK],
}

/// 32 inputs of type `Q4_0`: scale * (nibble - 8). The low nibbles are outputs 0 to 15, the high ones 16 to 31.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Q40Cell {
    pub scales: [u16; PANEL],
    pub nibbles: [[u8; LANES]; QUANT_BLOCK],
}

/// 32 inputs of type `Q4_1`: scale * nibble + offset. Nibbles as in [`Q40Cell`].
#[derive(Clone, Copy)]
#[repr(C, align(64))]
pub(crate) struct Q41Cell {
    pub scales: [u16; PANEL],
    pub offsets: [u16; PANEL],
    pub nibbles: [[u8; LANES]; QUANT_BLOCK],
}

// Cells have the bytes of their numbers and no padding.
const _: () = assert!(size_of::<F32Cell>() == 4 * PANEL);
const _: () = assert!(size_of::<F16Cell>() == 2 * PANEL);
const _: () = assert!(size_of::<Bf16Cell>() == 2 * PANEL);
const _: () = assert!(size_of::<Q8Cell>() == 2 * PANEL + QUANT_BLOCK * PANEL);
const _: () = assert!(size_of::<Q40Cell>() == 2 * PANEL + QUANT_BLOCK * LANES);
const _: () = assert!(size_of::<Q41Cell>() == 4 * PANEL + QUANT_BLOCK * LANES);

// SAFETY: numbers of which any bits are valid, with no padding, as asserted above.
unsafe impl<E: Element + Copy> Plain for PlainCell<E> {}
// SAFETY: numbers of which any bits are valid, with no padding, as asserted above.
unsafe impl Plain for Q8Cell {}
// SAFETY: numbers of which any bits are valid, with no padding, as asserted above.
unsafe impl Plain for Q40Cell {}
// SAFETY: numbers of which any bits are valid, with no padding, as asserted above.
unsafe impl Plain for Q41Cell {}

impl<E: Element + Copy> Cell for PlainCell<E> {
    const INPUTS: usize = 1;
    type Scales<L: Lanes> = ();

    #[inline(always)]
    fn scales<L: Lanes>(&self, _: L, _: Half) {}

    #[inline(always)]
    fn weights<L: Lanes>(&self, lanes: L, (): (), _: usize, half: Half) -> L::F {
        E::load(lanes, half_of(&self.0, half))
    }

    #[inline(always)]
    fn address(&self, _: usize) -> *const u8 {
        self.0.as_ptr().cast()
    }

    fn value(&self, _: usize, output: usize) -> f32 {
        E::widen(self.0[output])
    }
}

impl Cell for Q8Cell {
    const INPUTS: usize = QUANT_BLOCK;
    type Scales<L: Lanes> = L::F;

    #[inline(always)]
    fn scales<L: Lanes>(&self, lanes: L, half: Half) -> L::F {
        lanes.load_f16(half_of(&self.scales, half))
    }

    #[inline(always)]
    fn weights<L: Lanes>(&self, lanes: L, scales: L::F, input: usize, half: Half) -> L::F {
        // Exact: 11 and 8 digits.
        lanes.mul(scales, lanes.load_i8(half_of(&self.values[input], half)))
    }

    #[inline(always)]
    fn address(&self, input: usize) -> *const u8 {
        self.values[input].as_ptr().cast()
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        f16::from_bits(self.scales[output]).to_f32() * f32::from(self.values[input][output])
    }
}

/// The nibbles of half of the outputs.
#[inline(always)]
fn nibbles_of<L: Lanes>(lanes: L, bytes: &[u8; LANES], half: Half) -> L::F {
    if half == Half::Lower { lanes.load_low_nibbles(bytes) } else { lanes.load_high_nibbles(bytes) }
}

impl Cell for Q40Cell {
    const INPUTS: usize = QUANT_BLOCK;
    type Scales<L: Lanes> = L::F;

    #[inline(always)]
    fn scales<L: Lanes>(&self, lanes: L, half: Half) -> L::F {
        lanes.load_f16(half_of(&self.scales, half))
    }

    #[inline(always)]
    fn weights<L: Lanes>(&self, lanes: L, scales: L::F, input: usize, half: Half) -> L::F {
        let nibbles = nibbles_of(lanes, &self.nibbles[input], half);
        lanes.mul(scales, lanes.sub(nibbles, lanes.splat(8.0)))
    }

    #[inline(always)]
    fn address(&self, input: usize) -> *const u8 {
        self.nibbles[input].as_ptr()
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        f16::from_bits(self.scales[output]).to_f32() * (f32::from(nibble(&self.nibbles[input], output)) - 8.0)
    }
}

impl Cell for Q41Cell {
    const INPUTS: usize = QUANT_BLOCK;
    type Scales<L: Lanes> = (L::F, L::F);

    #[inline(always)]
    fn scales<L: Lanes>(&self, lanes: L, half: Half) -> (L::F, L::F) {
        (lanes.load_f16(half_of(&self.scales, half)), lanes.load_f16(half_of(&self.offsets, half)))
    }

    #[inline(always)]
    fn weights<L: Lanes>(&self, lanes: L, (scales, offsets): (L::F, L::F), input: usize, half: Half) -> L::F {
        // The product is exact (11 and 4 digits), so rounding once or twice is the same.
        lanes.fma(scales, nibbles_of(lanes, &self.nibbles[input], half), offsets)
    }

    #[inline(always)]
    fn address(&self, input: usize) -> *const u8 {
        self.nibbles[input].as_ptr()
    }

    fn value(&self, input: usize, output: usize) -> f32 {
        let (scale, offset) = (f16::from_bits(self.scales[output]), f16::from_bits(self.offsets[output]));
        scale.to_f32() * f32::from(nibble(&self.nibbles[input], output)) + offset.to_f32()
    }
}
