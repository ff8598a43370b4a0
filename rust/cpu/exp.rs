//! The exponential of sixteen values.

use super::lanes::Lanes;

/// 1.5 * 2^23: adding and taking it away rounds a small number to a whole one, ties to even.
const ROUNDING: f32 = 12_582_912.0;
/// The two together are ln 2. The first product below is exact: a whole multiple of the high part, close to x.
const LN_2_HIGH: f32 = std::f32::consts::LN_2;
const LN_2_LOW: f32 = -1.904_654_2e-9;
/// c2 to c6 of exp(r) = 1 + r + c2 r² + ... + c6 r⁶ for |r| <= ln(2) / 2, off by a factor of 1 + 3.2e-9 at most.
const COEFFICIENTS: [f32; 5] = [0.499_999_94, 0.166_665_2, 0.041_668_404, 0.008_368_899, 0.001_381_422_2];

/// The whole number n and the factor m, about 0.7 to 1.4, with exp(x) = m * 2^n.
#[inline(always)]
fn split<L: Lanes>(lanes: L, x: L::F) -> (L::F, L::F) {
    let rounding = lanes.splat(ROUNDING);
    let n = lanes.sub(lanes.fma(x, lanes.splat(std::f32::consts::LOG2_E), rounding), rounding);
    let r = lanes.fma(n, lanes.splat(-LN_2_HIGH), x);
    let r = lanes.fma(n, lanes.splat(-LN_2_LOW), r);
    let [c2, c3, c4, c5, c6] = COEFFICIENTS.map(|coefficient| lanes.splat(coefficient));
    let one = lanes.splat(1.0);
    let mut m = c6;
    for next in [c5, c4, c3, c2, one, one] {
        m = lanes.fma(m, r, next);
    }
    (n, m)
}

/// e to the power of each x: within 1 ulp (0.87 measured), exactly 1 for 0, subnormal results included.
///
/// Overflow gives infinity, exp(-inf) is 0, and a NaN stays one.
#[inline(always)]
pub(crate) fn exp<L: Lanes>(lanes: L, x: L::F) -> L::F {
    // The results beyond these are infinity and 0. The constant comes first, so that a NaN goes through.
    let x = lanes.max(lanes.splat(-104.0), lanes.min(lanes.splat(89.0), x));
    let (n, m) = split(lanes, x);
    // In two steps: n is -150 to 128. The first product is exact, so the second rounds once.
    let rounding = lanes.splat(ROUNDING);
    let half = lanes.sub(lanes.fma(n, lanes.splat(0.5), rounding), rounding);
    let rest = lanes.sub(n, half);
    lanes.mul(lanes.mul(m, lanes.power_of_two(half)), lanes.power_of_two(rest))
}

/// `exp` of each x, none of which is above 0, in fewer operations: where x is below -87.68 it is 0, exactly.
#[inline(always)]
pub(crate) fn exp_of_nonpositive<L: Lanes>(lanes: L, x: L::F) -> L::F {
    // At -88 n is -127, whose "power of two" has no bit set. The constant comes first, so that a NaN goes through.
    let (n, m) = split(lanes, lanes.max(lanes.splat(-88.0), x));
    lanes.mul(m, lanes.power_of_two(n))
}

#[cfg(test)]
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::float_cmp, reason = "exact on purpose")]
mod tests {
    use super::super::lanes::{InstructionSet, Kernel, LANES, Lanes};
    use super::{exp, exp_of_nonpositive};

    /// Both functions of every value of `x`.
    struct Both<'a> {
        x: &'a [[f32; LANES]],
    }

    impl Kernel for Both<'_> {
        type Output = Vec<[[f32; LANES]; 2]>;

        #[inline(always)]
        fn run<L: Lanes>(self, lanes: L) -> Self::Output {
            let both = |x| {
                let mut results = [[0.0; LANES]; 2];
                lanes.store(exp(lanes, lanes.load(x)), &mut results[0]);
                let nonpositive = x.map(|x| if x > 0.0 { 0.0 } else { x });
                lanes.store(exp_of_nonpositive(lanes, lanes.load(&nonpositive)), &mut results[1]);
                results
            };
            self.x.iter().map(both).collect()
        }
    }

    fn both(set: InstructionSet, x: f32) -> [f32; 2] {
        set.run(Both { x: &[[x; LANES]] })[0].map(|results| results[0])
    }

    /// Bits of f32 values spread over all exponents and signs.
    fn sample() -> Vec<[f32; LANES]> {
        let near = (0..1_u32 << 20).map(|step| -105.0 + 195.0 * (step as f32 / (1_u32 << 20) as f32));
        let everywhere =
            (0..1_u32 << 20).map(|step| f32::from_bits(step << 12 | step.wrapping_mul(2_654_435_769) >> 20));
        let values: Vec<f32> = near.chain(everywhere).collect();
        values.as_chunks::<LANES>().0.to_vec()
    }

    #[test]
    fn every_exponential_is_within_one_ulp() {
        let x = sample();
        for (index, set) in InstructionSet::all().into_iter().enumerate() {
            let x = if index == 0 { &x[..] } else { &x[..x.len() / 64] };
            let mut worst = (0.0_f64, 0.0);
            for (x, results) in x.iter().zip(set.run(Both { x })) {
                for ((&x, exp), of_nonpositive) in x.iter().zip(results[0]).zip(results[1]) {
                    let expected = f64::from(x).exp();
                    if expected.is_nan() || expected > f64::from(f32::MAX) {
                        assert!(exp == expected as f32 || (exp.is_nan() && expected.is_nan()), "exp({x}) = {exp}");
                    } else {
                        // Of the float32 numbers around the exact result.
                        let ulp = (expected.max(f64::from(f32::MIN_POSITIVE)).log2().floor() - 23.0).exp2();
                        let error = (f64::from(exp) - expected).abs() / ulp;
                        worst = if error > worst.0 { (error, x) } else { worst };
                    }
                    if x <= 0.0 {
                        let nonpositive = if x < -87.683 { 0.0 } else { exp };
                        assert!(x < -87.682 && of_nonpositive == 0.0 || of_nonpositive == nonpositive, "exp({x})");
                    }
                }
            }
            assert!(worst.0 < 0.9, "{} is {} ulp off at {} ({})", set.name(), worst.0, worst.1, x.len());
        }
    }

    #[test]
    fn the_ends_are_exact() {
        for set in InstructionSet::all() {
            let results = |x| both(set, x).map(f32::to_bits);
            assert_eq!(results(0.0), [1.0_f32.to_bits(); 2]);
            assert_eq!(results(-0.0), [1.0_f32.to_bits(); 2]);
            assert_eq!(results(f32::NEG_INFINITY), [0; 2]);
            assert_eq!(results(-1e30), [0; 2]);
            assert!(both(set, f32::NAN).iter().all(|result| result.is_nan()));
            assert_eq!(both(set, f32::INFINITY)[0], f32::INFINITY);
            assert_eq!(both(set, 88.73)[0], f32::INFINITY);
            assert!(both(set, 88.72)[0] < f32::INFINITY);
            assert_eq!(both(set, -103.98)[0], 0.0);
            assert_eq!(results(-103.0)[0], 1, "the smallest subnormal number");
        }
    }

    #[test]
    fn all_instruction_sets_give_the_same_bits() {
        let x: Vec<_> = sample().into_iter().step_by(64).collect();
        let bits = |set: InstructionSet| -> Vec<_> {
            let all = set.run(Both { x: &x }).into_iter().flatten().flatten();
            all.map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
        };
        let [first, others @ ..] = &InstructionSet::all()[..] else { panic!("there is at least one") };
        for other in others {
            assert!(bits(*first) == bits(*other), "{} and {}", first.name(), other.name());
        }
    }
}
