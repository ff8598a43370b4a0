//! The gated activation.

use super::exp::exp;
use super::lanes::{Kernel, LANES, Lanes};

/// Writes gate / (1 + exp(-gate)) * up to `out`; all three of one length.
///
/// Shazeer, "GLU Variants Improve Transformer" (2020).
pub(crate) struct Swiglu<'a> {
    pub gate: &'a [f32],
    pub up: &'a [f32],
    pub out: &'a mut [f32],
}

impl Kernel for Swiglu<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let (gates, gate_rest) = self.gate.as_chunks::<LANES>();
        let (ups, up_rest) = self.up.as_chunks::<LANES>();
        let (outs, out_rest) = self.out.as_chunks_mut::<LANES>();
        for ((gate, up), out) in gates.iter().zip(ups).zip(outs) {
            lanes.store(swiglu(lanes, lanes.load(gate), lanes.load(up)), out);
        }
        if !gate_rest.is_empty() {
            let value = swiglu(lanes, lanes.load_first(gate_rest, 0.0), lanes.load_first(up_rest, 0.0));
            lanes.store_first(value, out_rest);
        }
    }
}

#[inline(always)]
fn swiglu<L: Lanes>(lanes: L, gate: L::F, up: L::F) -> L::F {
    let one = lanes.splat(1.0);
    let negative = lanes.sub(lanes.splat(0.0), gate);
    lanes.mul(lanes.div(gate, lanes.add(one, exp(lanes, negative))), up)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::InstructionSet;
    use crate::cpu::testing::Random;

    #[test]
    fn gates_are_near_their_meaning_and_the_same_with_all_instructions() {
        let mut random = Random(4);
        for width in [1, 16, 80, 1537] {
            let gate: Vec<f32> = (0..width).map(|_| 30.0 * random.value()).collect();
            let up: Vec<f32> = (0..width).map(|_| random.value()).collect();
            let mut results = Vec::new();
            for set in InstructionSet::all() {
                let mut out = vec![f32::NAN; width];
                set.run(Swiglu { gate: &gate, up: &up, out: &mut out });
                for ((&out, &gate), &up) in out.iter().zip(&gate).zip(&up) {
                    let gate = f64::from(gate);
                    let exact = gate / (1.0 + (-gate).exp()) * f64::from(up);
                    assert!((f64::from(out) - exact).abs() <= 1e-6 * exact.abs(), "{out} {exact}");
                }
                results.push(out);
            }
            assert!(results.iter().all(|result| *result == results[0]));
        }
    }

    #[test]
    fn gates_far_out_are_themselves_or_nothing() {
        for set in InstructionSet::all() {
            let mut out = [f32::NAN; 3];
            set.run(Swiglu { gate: &[1e30, -1e30, -200.0], up: &[1.0; 3], out: &mut out });
            assert_eq!(out.map(f32::to_bits), [1e30_f32, -0.0, -0.0].map(f32::to_bits));
        }
    }
}
