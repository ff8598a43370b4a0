//! Sixteen f32 values at a time, on whatever instruction set the machine has, with the same bits on each.
//!
//! Every operation here is exactly rounded or moves bits, and none is contracted or reordered by the compiler, so code
//! written over [`Lanes`] gives the same result on all of them. (Which NaN a NaN is may differ.) On `aarch64` NEON is
//! part of what the compiler may always use, so there [`Portable`] is the NEON version.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

#[cfg(target_arch = "x86_64")]
pub(crate) use avx2::Avx2;
#[cfg(target_arch = "x86_64")]
pub(crate) use avx512::Avx512;
pub(crate) use portable::Portable;

/// Values in one vector.
pub(crate) const LANES: usize = 16;

/// Operations on sixteen values. A value of this type is the proof that the machine has the instructions.
pub(crate) trait Lanes: Copy + Send + Sync + 'static {
    /// Sixteen f32 values.
    type F: Copy;
    /// Rows of a product that are computed at once, at most: as many as there are registers for their sums.
    const MAX_ROWS: usize;
    /// Whether registers hold the sums of 32 outputs for that many rows; else 16 are computed at a time.
    const BOTH_HALVES: bool;

    /// Runs `kernel`, compiled with the instructions.
    fn run<K: Kernel>(self, kernel: K) -> K::Output;

    fn splat(self, value: f32) -> Self::F;
    fn load(self, values: &[f32; LANES]) -> Self::F;
    fn store(self, values: Self::F, to: &mut [f32; LANES]);
    /// Widens IEEE half precision, given as its bits.
    fn load_f16(self, bits: &[u16; LANES]) -> Self::F;
    /// Widens bfloat16, given as its bits.
    fn load_bf16(self, bits: &[u16; LANES]) -> Self::F;
    fn load_i8(self, values: &[i8; LANES]) -> Self::F;
    /// The values of the low four bits, 0 to 15.
    fn load_low_nibbles(self, bytes: &[u8; LANES]) -> Self::F;
    /// The values of the high four bits, 0 to 15.
    fn load_high_nibbles(self, bytes: &[u8; LANES]) -> Self::F;

    fn add(self, a: Self::F, b: Self::F) -> Self::F;
    fn sub(self, a: Self::F, b: Self::F) -> Self::F;
    fn mul(self, a: Self::F, b: Self::F) -> Self::F;
    fn div(self, a: Self::F, b: Self::F) -> Self::F;
    /// a * b + c, rounded once.
    fn fma(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F;
    /// a where a > b, else b: so b where one of them is NaN.
    fn max(self, a: Self::F, b: Self::F) -> Self::F;
    /// a where a < b, else b: so b where one of them is NaN.
    fn min(self, a: Self::F, b: Self::F) -> Self::F;
    /// 2 to the power of `exponents`, whole numbers from -126 to 127; 0 for -127.
    fn power_of_two(self, exponents: Self::F) -> Self::F;
    /// Asks for the cache line at `address`, which need not exist.
    fn prefetch<T>(self, address: *const T);

    /// The sum in a fixed order: lane i + lane i + 8, of these i + 4, and so on.
    #[inline(always)]
    fn sum(self, values: Self::F) -> f32 {
        let mut lanes = [0.0; LANES];
        self.store(values, &mut lanes);
        for half in [8, 4, 2, 1] {
            for lane in 0..half {
                lanes[lane] += lanes[lane + half];
            }
        }
        lanes[0]
    }

    /// The first values of a vector whose others are `rest`; `values` has at most 16.
    #[inline(always)]
    fn load_first(self, values: &[f32], rest: f32) -> Self::F {
        let mut lanes = [rest; LANES];
        lanes[..values.len()].copy_from_slice(values);
        self.load(&lanes)
    }

    /// Keeps the first values of a vector; `to` has at most 16.
    #[inline(always)]
    fn store_first(self, values: Self::F, to: &mut [f32]) {
        let mut lanes = [0.0; LANES];
        self.store(values, &mut lanes);
        to.copy_from_slice(&lanes[..to.len()]);
    }
}

/// Code over [`Lanes`], compiled once for each instruction set. Its `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<L: Lanes>(self, lanes: L) -> Self::Output;
}

/// An instruction set that this machine has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InstructionSet {
    /// 512-bit vectors: AVX-512 F, BW and VL.
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512),
    /// 256-bit vectors: AVX2, FMA and F16C.
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    /// Whatever the compiler may always use; NEON on `aarch64`.
    Portable(Portable),
}

impl InstructionSet {
    /// Those that this machine has, the fastest first.
    #[must_use]
    pub fn all() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(Avx512::detect().map(Self::Avx512));
            sets.extend(Avx2::detect().map(Self::Avx2));
        }
        sets.push(Self::Portable(Portable));
        sets
    }

    /// Its name: "avx512", "avx2", "neon" or "portable".
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => "avx512",
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => "avx2",
            Self::Portable(_) if cfg!(target_arch = "aarch64") => "neon",
            Self::Portable(_) => "portable",
        }
    }

    /// See [`Lanes::MAX_ROWS`].
    pub(crate) fn max_rows(self) -> usize {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(_) => Avx512::MAX_ROWS,
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(_) => Avx2::MAX_ROWS,
            Self::Portable(_) => Portable::MAX_ROWS,
        }
    }

    /// Runs `kernel` with these instructions.
    pub(crate) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self {
            #[cfg(target_arch = "x86_64")]
            Self::Avx512(lanes) => lanes.run(kernel),
            #[cfg(target_arch = "x86_64")]
            Self::Avx2(lanes) => lanes.run(kernel),
            Self::Portable(lanes) => lanes.run(kernel),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_say_which_instruction_sets_they_ran_on() {
        let names: Vec<&str> = InstructionSet::all().into_iter().map(InstructionSet::name).collect();
        println!("instruction sets of this machine, those that the tests compare: {}", names.join(", "));
        assert!(matches!(names.last(), Some(&("portable" | "neon"))));
        assert!(names.len() <= 3);
    }
}
