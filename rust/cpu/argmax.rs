//! The best allowed token of one row.

use std::array;
use std::iter::once;

use super::lanes::{Kernel, LANES, Lanes};

/// What a row answers that has no token: see `reprieve.step`.
pub(crate) const TOKEN_NONE_ALLOWED: i32 = -1;
/// Every allowed logit is NaN.
pub(crate) const TOKEN_ALL_NAN: i32 = -2;
/// The row reads nothing back.
pub(crate) const TOKEN_NOT_READ: i32 = -3;

/// Tokens in a word of a mask.
const WORD: usize = 32;

/// Tokens of which the best is found before the next ones are looked at: few, as the first of those that are as good is
/// looked for among them alone.
const BLOCK: usize = 32 * WORD;

/// Finds the id of the largest of `logits`, one for each token of the vocabulary, that is not among `banned`.
///
/// Ties go to the lowest id, +0 equals -0, a NaN never wins. Banned ids cost nothing until one of them would win. They
/// may stand in any order, and more than once; they are sorted then.
pub(crate) struct Argmax<'a> {
    pub logits: &'a [f32],
    pub banned: &'a mut [usize],
}

impl Kernel for Argmax<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> i32 {
        let Self { logits, banned } = self;
        match best_of(lanes, logits) {
            Some(token) if !banned.contains(&token) => id(token),
            None if banned.is_empty() => TOKEN_ALL_NAN,
            _ => {
                banned.sort_unstable();
                best_but(lanes, logits, banned)
            }
        }
    }
}

/// The token of the best logit between those of `banned`, which are sorted.
#[inline(always)]
fn best_but<L: Lanes>(lanes: L, logits: &[f32], banned: &[usize]) -> i32 {
    let mut best: Option<usize> = None;
    let mut has_allowed = false;
    let mut first = 0;
    for end in banned.iter().copied().chain(once(logits.len())) {
        if first < end {
            has_allowed = true;
            let found = best_of(lanes, &logits[first..end]).map(|token| first + token);
            best = match (best, found) {
                (Some(best), Some(token)) if logits[token] > logits[best] => Some(token),
                (best, token) => best.or(token),
            };
        }
        first = first.max(end + 1);
    }
    answer(best, has_allowed)
}

/// The lowest index of the largest of `logits`; None where all are NaN.
#[inline(always)]
fn best_of<L: Lanes>(lanes: L, logits: &[f32]) -> Option<usize> {
    let mut best = (f32::NEG_INFINITY, 0);
    for (block, logits) in logits.chunks(BLOCK).enumerate() {
        let largest = largest(lanes, logits);
        if largest > best.0 {
            best = (largest, block);
        }
    }
    // The first block that has it; or the first of all, where nothing is more than -infinity.
    let first = best.1 * BLOCK;
    #[expect(clippy::float_cmp, reason = "it is one of them, or all are NaN")]
    logits[first..].iter().position(|&logit| logit == best.0).map(|index| first + index)
}

/// The largest of a block, -infinity where all are NaN.
#[inline(always)]
fn largest<L: Lanes>(lanes: L, logits: &[f32]) -> f32 {
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
    largest_lane(lanes, lanes.max(both[0], both[1]))
}

/// Finds the id of the largest of `logits` that `mask` allows: bit `v % 32` of word `v / 32` says whether token `v` is.
/// Rules as for [`Argmax`]; bits past the vocabulary say nothing.
pub(crate) struct MaskedArgmax<'a> {
    pub logits: &'a [f32],
    pub mask: &'a [u32],
}

impl Kernel for MaskedArgmax<'_> {
    type Output = i32;

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) -> i32 {
        let Self { logits, mask } = self;
        let mut best = (f32::NEG_INFINITY, 0);
        let mut has_allowed = false;
        for (block, (logits, mask)) in logits.chunks(BLOCK).zip(mask.chunks(BLOCK / WORD)).enumerate() {
            let mut largest = lanes.splat(f32::NEG_INFINITY);
            for (logits, &bits) in logits.chunks(WORD).zip(mask) {
                let bits = bits & (u32::MAX >> (WORD - logits.len()));
                if bits == 0 {
                    continue;
                }
                has_allowed = true;
                for (half, logits) in logits.chunks(LANES).enumerate() {
                    largest = lanes.max(kept(lanes, logits, bits >> (half * LANES)), largest);
                }
            }
            let largest = largest_lane(lanes, largest);
            if largest > best.0 {
                best = (largest, block);
            }
        }
        let first = best.1 * BLOCK;
        #[expect(clippy::float_cmp, reason = "it is one of them, or all that are allowed are NaN")]
        let is_best = |token: &usize| logits[*token] == best.0 && mask[token / WORD] >> (token % WORD) & 1 == 1;
        answer((first..logits.len()).find(is_best), has_allowed)
    }
}

/// Those of at most sixteen logits whose bits are set, NaN in the other lanes.
#[inline(always)]
fn kept<L: Lanes>(lanes: L, logits: &[f32], bits: u32) -> L::F {
    let mut values = [f32::NAN; LANES];
    if let Ok(logits) = <&[f32; LANES]>::try_from(logits) {
        values = array::from_fn(|lane| if bits >> lane & 1 == 1 { logits[lane] } else { f32::NAN });
    } else {
        for (lane, &logit) in logits.iter().enumerate().filter(|(lane, _)| bits >> lane & 1 == 1) {
            values[lane] = logit;
        }
    }
    lanes.load(&values)
}

#[inline(always)]
fn largest_lane<L: Lanes>(lanes: L, values: L::F) -> f32 {
    let mut all = [0.0; LANES];
    lanes.store(values, &mut all);
    all.into_iter().fold(f32::NEG_INFINITY, |a, b| if b > a { b } else { a })
}

fn answer(best: Option<usize>, has_allowed: bool) -> i32 {
    match best {
        Some(token) => id(token),
        None if has_allowed => TOKEN_ALL_NAN,
        None => TOKEN_NONE_ALLOWED,
    }
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
        answer(best, !allowed.is_empty())
    }

    /// What each instruction set answers, with banned ids, and with a mask.
    fn check(logits: &[f32], banned: &[usize], mask: &[u32]) {
        for set in InstructionSet::all() {
            let chosen = set.run(Argmax { logits, banned: &mut banned.to_vec() });
            assert_eq!(chosen, naive(logits, |token| !banned.contains(&token)), "{logits:?} without {banned:?}");
            let chosen = set.run(MaskedArgmax { logits, mask });
            let is_allowed = |token: usize| mask[token / 32] >> (token % 32) & 1 == 1;
            assert_eq!(chosen, naive(logits, is_allowed), "{logits:?} with {mask:x?}");
        }
    }

    #[test]
    fn ties_nan_infinities_bans_and_masks_follow_the_rule() {
        let mut random = Random(3);
        let choices = [f32::NAN, f32::NEG_INFINITY, f32::INFINITY, -0.0, 0.0, 1.0, -1.0, 2.5];
        for round in 0..3000 {
            let most = if round % 100 == 0 { 3000 } else { 150 };
            let len = 1 + random.bits() as usize % most;
            let num_choices = 1 + random.bits() as usize % choices.len();
            let logits: Vec<f32> = (0..len).map(|_| choices[random.bits() as usize % num_choices]).collect();
            let mask: Vec<u32> =
                (0..len.div_ceil(32)).map(|_| if round % 5 == 0 { 0 } else { random.bits() & random.bits() }).collect();
            let num_banned = [0, 1, 3, 2 * len][random.bits() as usize % 4];
            let mut banned: Vec<usize> = (0..num_banned).map(|_| random.bits() as usize % len).collect();
            if round % 7 == 0 {
                banned = (0..len).rev().collect();
            }
            check(&logits, &banned, &mask);
        }
    }

    #[test]
    fn each_edge_of_the_vocabulary_can_be_the_only_one_allowed_or_the_best_one_banned() {
        for len in [1, 31, 32, 33, 95, 96, 97, 513, 1024, 1025, 5000] {
            for token in [0, 31, 32, 63, 64, 1023, 1024, len - 1].into_iter().filter(|&token| token < len) {
                let mut logits = vec![1.0; len];
                logits[token] = 2.0;
                // Bits past the vocabulary are set.
                let mut only = vec![0; len.div_ceil(32) + 1];
                only[token / 32] = 1 << (token % 32);
                *only.last_mut().expect("one at least") = u32::MAX;
                if len % 32 > 0 {
                    only[len / 32] |= u32::MAX << (len % 32);
                }
                check(&logits, &[token], &only);
                logits[token] = f32::NAN;
                check(&logits, &[], &only);
                let everyone: Vec<usize> = (0..len).collect();
                check(&logits, &everyone, &only);
                only[token / 32] &= !(1 << (token % 32));
                check(&logits, &everyone[1..], &only);
            }
        }
    }
}
