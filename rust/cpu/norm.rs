//! Root mean square norms of one token's values.

use super::lanes::{Kernel, LANES, Lanes};

/// Writes x / sqrt(mean(x²) + eps) * weight to `out`; all three of one length.
///
/// Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). In f32: sixteen sums of squares, added in a fixed
/// order; in f64 where their sum is beyond f32, which values over 1.8e19 are enough for.
pub(crate) struct RmsNorm<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    #[expect(clippy::cast_precision_loss, reason = "a width is far under 2^24, from where it would be rounded")]
    fn run<L: Lanes>(self, lanes: L) {
        let (whole, rest) = self.x.as_chunks::<LANES>();
        let mut squares = lanes.splat(0.0);
        for x in whole {
            let x = lanes.load(x);
            squares = lanes.fma(x, x, squares);
        }
        let x = lanes.load_first(rest, 0.0);
        squares = lanes.fma(x, x, squares);
        let sum = lanes.sum(squares);
        if !sum.is_finite() {
            self.in_f64();
            return;
        }
        let mean = sum / self.x.len() as f32;
        let scale = lanes.splat(1.0 / (mean + self.eps).sqrt());
        let (weights, weights_rest) = self.weight.as_chunks::<LANES>();
        let (outs, out_rest) = self.out.as_chunks_mut::<LANES>();
        for ((x, weight), out) in whole.iter().zip(weights).zip(outs) {
            lanes.store(lanes.mul(lanes.mul(lanes.load(x), scale), lanes.load(weight)), out);
        }
        if !rest.is_empty() {
            lanes.store_first(lanes.mul(lanes.mul(x, scale), lanes.load_first(weights_rest, 0.0)), out_rest);
        }
    }
}

impl RmsNorm<'_> {
    /// The same where a square, or their sum, is not finite: rarely.
    #[cold]
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "what f32 keeps of the result")]
    fn in_f64(self) {
        let squares: f64 = self.x.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let scale = 1.0 / (squares / self.x.len() as f64 + f64::from(self.eps)).sqrt();
        for ((out, &x), &weight) in self.out.iter_mut().zip(self.x).zip(self.weight) {
            *out = (f64::from(x) * scale * f64::from(weight)) as f32;
        }
    }
}

/// [`RmsNorm`] of each head of one token's x [heads, `head_size`]; `weight` is [`head_size`], `out` as x.
pub(crate) struct HeadNorm<'a> {
    pub x: &'a [f32],
    pub weight: &'a [f32],
    pub eps: f32,
    pub out: &'a mut [f32],
}

impl Kernel for HeadNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { x, weight, eps, out } = self;
        for (x, out) in x.chunks_exact(weight.len()).zip(out.chunks_exact_mut(weight.len())) {
            RmsNorm { x, weight, eps, out }.run(lanes);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::InstructionSet;
    use crate::cpu::testing::Random;

    #[test]
    #[expect(clippy::cast_precision_loss, reason = "widths are small")]
    fn norms_are_near_their_meaning_and_the_same_with_all_instructions() {
        let mut random = Random(2);
        for width in [1, 2, 15, 16, 17, 48, 576, 1000] {
            let x: Vec<f32> = (0..width).map(|_| 100.0 * random.value()).collect();
            let weight: Vec<f32> = (0..width).map(|_| random.value()).collect();
            let mean = x.iter().map(|&x| f64::from(x).powi(2)).sum::<f64>() / x.len() as f64;
            let scale = 1.0 / (mean + 1e-5).sqrt();
            let mut results = Vec::new();
            for set in InstructionSet::all() {
                let mut out = vec![f32::NAN; width];
                set.run(RmsNorm { x: &x, weight: &weight, eps: 1e-5, out: &mut out });
                for ((&out, &x), &weight) in out.iter().zip(&x).zip(&weight) {
                    let exact = f64::from(x) * scale * f64::from(weight);
                    assert!((f64::from(out) - exact).abs() <= 1e-6 * exact.abs(), "{out} {exact}");
                }
                let mut heads = vec![f32::NAN; 2 * width];
                set.run(HeadNorm { x: &[x.clone(), x.clone()].concat(), weight: &weight, eps: 1e-5, out: &mut heads });
                assert_eq!(heads, [out.clone(), out.clone()].concat());
                results.push(out);
            }
            assert!(results.iter().all(|result| *result == results[0]));
        }
    }

    #[test]
    fn values_whose_squares_are_beyond_f32_are_normed_and_infinities_give_nan() {
        for set in InstructionSet::all() {
            let x: Vec<f32> = (0..20).map(|index| if index % 2 == 0 { 1e30 } else { -2e38 }).collect();
            let mut out = vec![f32::NAN; 20];
            set.run(RmsNorm { x: &x, weight: &[2.0; 20], eps: 1e-5, out: &mut out });
            let scale = 2.0 / f64::midpoint(1e60, 4e76).sqrt();
            for (&out, &x) in out.iter().zip(&x) {
                assert!((f64::from(out) - f64::from(x) * scale).abs() <= 1e-6 * (f64::from(x) * scale).abs());
            }
            set.run(RmsNorm { x: &[f32::INFINITY, 1.0], weight: &[1.0; 2], eps: 1e-5, out: &mut out[..2] });
            assert!(out[0].is_nan() && out[1] == 0.0, "as in the reference: {:?}", &out[..2]);
        }
    }
}
