//! The best allowed token of one row.

use super::lanes::{Kernel, LANES, Lanes};

/// What a row answers that has no token: see `reprieve.step`.
pub(crate) const TOKEN_NONE_ALLOWED: i32 = -1;
/// Every allowed logit is NaN.
pub(crate) const TOKEN_ALL_NAN: i32 = -2;
/// The row reads nothing back.
pub(crate) const TOKEN_NOT_READ: i32 = -3;

/// Finds the id of the largest of `logits`, one for each token of the vocabulary.
///
/// Bit `v % 32` of word `v / 32` of `mask` says whether token `v` is allowed; without a mask all are, at no cost. Ties
/// go to the lowest id, +0 equals -0, a NaN never wins.
pub(crate) struct MaskedArgmax<'a> {
    pub logits: &'a [f32],
    pub mask: Option<&'a [u32]>,
}

impl Kernel for MaskedArgmax<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> i32 {
        let Some(mask) = self.mask else {
            return argmax(lanes, self.logits);
        };
        let mut best: Option<(f32, usize)> = None;
        let mut has_allowed = false;
        for (token, &logit) in self.logits.iter().enumerate() {
            if mask[token / 32] >> (token % 32) & 1 == 0 {
                continue;
            }
            has_allowed = true;
            if !logit.is_nan() && best.is_none_or(|(best, _)| logit > best) {
                best = Some((logit, token));
            }
        }
        match best {
            Some((_, token)) => id(token),
            None if has_allowed => TOKEN_ALL_NAN,
            None => TOKEN_NONE_ALLOWED,
        }
    }
}

#[inline(always)]
fn argmax<L: Lanes>(lanes: L, logits: &[f32]) -> i32 {
    let (whole, rest) = logits.as_chunks::<LANES>();
    // `max` keeps its second argument where the first is NaN.
    let mut bests = [lanes.splat(f32::NEG_INFINITY); 4];
    let (fours, last) = whole.as_chunks::<4>();
    for four in fours {
        for (best, logits) in bests.iter_mut().zip(four) {
            *best = lanes.max(lanes.load(logits), *best);
        }
    }
    for logits in last {
        bests[0] = lanes.max(lanes.load(logits), bests[0]);
    }
    bests[1] = lanes.max(lanes.load_first(rest, f32::NEG_INFINITY), bests[1]);
    let both = [lanes.max(bests[0], bests[1]), lanes.max(bests[2], bests[3])];
    let mut best = [0.0; LANES];
    lanes.store(lanes.max(both[0], both[1]), &mut best);
    let best = best.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a });
    #[expect(clippy::float_cmp, reason = "it is one of them, or all are NaN")]
    logits.iter().position(|&logit| logit == best).map_or(TOKEN_ALL_NAN, id)
}

fn id(token: usize) -> i32 {
    i32::try_from(token).expect("a vocabulary has less than 2^31 tokens")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::lanes::InstructionSet;
    use crate::cpu::testing::Random;

    fn naive(logits: &[f32], is_allowed: impl Fn(usize) -> bool) -> i32 {
        let allowed: Vec<usize> = (0..logits.len()).filter(|&token| is_allowed(token)).collect();
        let mut best = None;
        for &token in &allowed {
            if !logits[token].is_nan() && best.is_none_or(|best: usize| logits[token] > logits[best]) {
                best = Some(token);
            }
        }
        best.map_or(if allowed.is_empty() { TOKEN_NONE_ALLOWED } else { TOKEN_ALL_NAN }, id)
    }

    #[test]
    fn ties_nan_infinities_and_masks_follow_the_rule() {
        let mut random = Random(3);
        let choices = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0, 1.0, -1.0, 2.5];
        for round in 0..3000 {
            let len = 1 + random.bits() as usize % 150;
            let num_choices = 1 + random.bits() as usize % choices.len();
            let logits: Vec<f32> = (0..len).map(|_| choices[random.bits() as usize % num_choices]).collect();
            let mask: Vec<u32> =
                (0..len.div_ceil(32)).map(|_| if round % 5 == 0 { 0 } else { random.bits() & random.bits() }).collect();
            for set in InstructionSet::all() {
                assert_eq!(set.run(MaskedArgmax { logits: &logits, mask: None }), naive(&logits, |_| true));
                let masked = set.run(MaskedArgmax { logits: &logits, mask: Some(&mask) });
                assert_eq!(masked, naive(&logits, |token| mask[token / 32] >> (token % 32) & 1 == 1));
            }
        }
    }
}
