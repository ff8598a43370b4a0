//! Rotary position embedding.

use super::lanes::{Kernel, LANES, Lanes};

/// The angles of every position: cos, sin [positions, `head_size / 2`].
#[derive(Debug)]
pub struct RopeTable {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeTable {
    /// # Panics
    /// If `half` is 0, or the tables are not equally long and of whole positions.
    #[must_use]
    pub fn new(half: usize, cos: Vec<f32>, sin: Vec<f32>) -> Self {
        assert!(half > 0, "a head has two halves");
        assert!(cos.len() == sin.len() && cos.len().is_multiple_of(half), "{} and {} of {half}", cos.len(), sin.len());
        Self { half, cos, sin }
    }

    /// Elements of half a head.
    pub(crate) fn half(&self) -> usize {
        self.half
    }

    /// Number of positions.
    #[must_use]
    pub fn positions(&self) -> usize {
        self.cos.len() / self.half
    }

    /// cos and sin [`head_size / 2`] of one position.
    ///
    /// # Panics
    /// If the table ends before it.
    pub(crate) fn at(&self, position: usize) -> (&[f32], &[f32]) {
        let range = position * self.half..(position + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

/// Rotates every head of one token's x [heads, `head_size`] by cos, sin [`head_size / 2`]; element i of a head's first half
/// goes with element i of its second half.
///
/// In float32: the second product rounded, then the first with the sum by one fused multiply-add.
pub(crate) struct Rotate<'a> {
    pub x: &'a mut [f32],
    pub cos: &'a [f32],
    pub sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { x, cos, sin } = self;
        let half = cos.len();
        let ((wide_cos, last_cos), (wide_sin, last_sin)) = (cos.as_chunks::<LANES>(), sin.as_chunks::<LANES>());
        for head in x.chunks_exact_mut(2 * half) {
            let (first, second) = head.split_at_mut(half);
            let ((first, last_first), (second, last_second)) = (first.as_chunks_mut(), second.as_chunks_mut());
            for (((first, second), cos), sin) in first.iter_mut().zip(second).zip(wide_cos).zip(wide_sin) {
                let rotated = rotated(lanes, [lanes.load(first), lanes.load(second)], lanes.load(cos), lanes.load(sin));
                lanes.store(rotated[0], first);
                lanes.store(rotated[1], second);
            }
            if !last_cos.is_empty() {
                let values = [&*last_first, &*last_second, last_cos, last_sin].map(|last| lanes.load_first(last, 0.0));
                let rotated = rotated(lanes, [values[0], values[1]], values[2], values[3]);
                lanes.store_first(rotated[0], last_first);
                lanes.store_first(rotated[1], last_second);
            }
        }
    }
}

/// first * cos - second * sin, and second * cos + first * sin.
#[inline(always)]
fn rotated<L: Lanes>(lanes: L, [first, second]: [L::F; 2], cos: L::F, sin: L::F) -> [L::F; 2] {
    let turned = lanes.mul(lanes.mul(second, lanes.splat(-1.0)), sin);
    [lanes.fma(first, cos, turned), lanes.fma(second, cos, lanes.mul(first, sin))]
}

#[cfg(test)]
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
mod tests {
    use super::super::lanes::InstructionSet;
    use super::{RopeTable, Rotate};

    fn table(half: usize) -> RopeTable {
        let angles = || (0..5 * half).map(|index| (index / half) as f32 * 1.3 / (index % half + 1) as f32);
        RopeTable::new(half, angles().map(f32::cos).collect(), angles().map(f32::sin).collect())
    }

    #[test]
    fn heads_of_any_even_size_are_rotated_alike_on_all_instruction_sets() {
        for half in [1, 4, 15, 16, 17, 32, 40, 48, 64, 128] {
            let table = table(half);
            assert_eq!(table.positions(), 5);
            let x: Vec<f32> = (0..3 * 2 * half).map(|index| ((index * 37 % 101) as f32 - 50.0) / 7.0).collect();
            let (cos, sin) = table.at(3);
            let mut first_bits: Option<Vec<u32>> = None;
            for set in InstructionSet::all() {
                let mut rotated = x.clone();
                set.run(Rotate { x: &mut rotated, cos, sin });
                for (head, (rotated, x)) in rotated.chunks(2 * half).zip(x.chunks(2 * half)).enumerate() {
                    for i in 0..half {
                        let [first, second] = [x[i], x[half + i]].map(f64::from);
                        let [cos, sin] = [cos[i], sin[i]].map(f64::from);
                        let expected = [first * cos - second * sin, second * cos + first * sin];
                        for (rotated, expected) in [rotated[i], rotated[half + i]].into_iter().zip(expected) {
                            assert!((f64::from(rotated) - expected).abs() < 2e-6, "head {head} of {half}, {i}");
                        }
                    }
                }
                let bits: Vec<u32> = rotated.iter().map(|value| value.to_bits()).collect();
                assert!(*first_bits.get_or_insert(bits.clone()) == bits, "{} {half}", set.name());
            }
        }
    }

    #[test]
    #[should_panic(expected = "of 2")]
    fn tables_of_different_lengths_are_refused() {
        let _ = RopeTable::new(2, vec![1.0; 4], vec![0.0; 6]);
    }
}
