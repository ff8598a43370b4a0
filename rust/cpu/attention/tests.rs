//! Attention against float64, and that its bits depend on nothing but the query and what it sees.

#![expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, reason = "small numbers")]

use super::{Place, Queries, Scratch, attend, queries_at_once};
use crate::cpu::kv::{KvKind, KvPool, KvShape};
use crate::cpu::lanes::InstructionSet;

/// A small generator of numbers around 0: the same ones every time.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> f32 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        ((self.0 >> 40) as f32 / (1_u64 << 23) as f32 - 1.0) * 2.0
    }

    fn take(&mut self, count: usize) -> Vec<f32> {
        (0..count).map(|_| self.next()).collect()
    }
}

/// One sequence. By position: keys and values of all KV heads, and queries of all heads.
struct Sequence {
    kv_heads: usize,
    group: usize,
    head_size: usize,
    keys: Vec<Vec<f32>>,
    values: Vec<Vec<f32>>,
    queries: Vec<Vec<f32>>,
}

impl Sequence {
    fn new(positions: usize, [kv_heads, group, head_size]: [usize; 3]) -> Self {
        let mut numbers = Numbers(positions as u64);
        let mut all = |size| (0..positions).map(|_| numbers.take(size)).collect();
        let (keys, values) = (all(kv_heads * head_size), all(kv_heads * head_size));
        Self { kv_heads, group, head_size, keys, values, queries: all(kv_heads * group * head_size) }
    }

    /// Attention of the last of `positions`, head by head, in float64 over values as `kind` keeps them.
    fn expected(&self, kind: KvKind, position: usize, head: usize) -> Vec<f64> {
        let kept = |value: f32| match kind {
            KvKind::F32 => f64::from(value),
            KvKind::F16 => half::f16::from_f32(value).to_f64(),
            KvKind::Bf16 => half::bf16::from_f32(value).to_f64(),
        };
        let own = head / self.group * self.head_size..(head / self.group + 1) * self.head_size;
        let query = &self.queries[position][head * self.head_size..][..self.head_size];
        let scores: Vec<f64> = self.keys[..=position]
            .iter()
            .map(|key| query.iter().zip(&key[own.clone()]).map(|(&q, &k)| f64::from(q) * kept(k)).sum::<f64>())
            .map(|score| score / (self.head_size as f64).sqrt())
            .collect();
        let best = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let total: f64 = scores.iter().map(|score| (score - best).exp()).sum();
        let mut mixed = vec![0.0; self.head_size];
        for (score, value) in scores.iter().zip(&self.values) {
            for (mixed, &value) in mixed.iter_mut().zip(&value[own.clone()]) {
                *mixed += (score - best).exp() / total * kept(value);
            }
        }
        mixed
    }
}

/// A sequence in a pool whose other places hold `garbage`.
struct Stored {
    pool: KvPool,
    table: Vec<u32>,
}

impl Stored {
    /// Blocks in an order of `seed`.
    fn new(sequence: &Sequence, kind: KvKind, block_size: usize, (garbage, seed): (f32, usize)) -> Self {
        let needed = sequence.keys.len().div_ceil(block_size);
        let num_blocks = needed + 3;
        let Sequence { kv_heads, head_size, .. } = *sequence;
        let shape = KvShape { num_blocks, layers: 2, kv_heads, head_size, block_size };
        let pool = KvPool::new(shape, kind).expect("a small pool");
        // A step that shares no factor with the number of blocks meets each of them once.
        let shares = |step: usize| (2..=step).any(|d| step.is_multiple_of(d) && num_blocks.is_multiple_of(d));
        let step = (seed + 1..2 * num_blocks + 9).find(|&step| !shares(step)).expect("a prime is among them");
        let table: Vec<u32> = (0..needed).map(|index| ((index * step + seed) % num_blocks) as u32).collect();
        let garbage = vec![garbage; kv_heads * head_size];
        for (block, offset) in (0..num_blocks).flat_map(|block| (0..block_size).map(move |offset| (block, offset))) {
            // SAFETY: nobody else has the pool.
            unsafe { (0..2).for_each(|layer| pool.append(layer, block as u32, offset, &garbage, &garbage)) };
        }
        let stored = Self { pool, table };
        for position in 0..sequence.keys.len() {
            stored.append(sequence, position);
        }
        stored
    }

    fn append(&self, sequence: &Sequence, position: usize) {
        let block_size = self.pool.shape().block_size;
        let (block, offset) = (self.table[position / block_size], position % block_size);
        // SAFETY: nobody else has the pool.
        unsafe { self.pool.append(1, block, offset, &sequence.keys[position], &sequence.values[position]) };
    }
}

/// Attention of `count` queries from `first` on, `heads` of the group at a time: for each query, each head's.
fn attended(
    set: InstructionSet,
    (sequence, stored): (&Sequence, &Stored),
    first: usize,
    count: usize,
    heads: usize,
) -> Vec<Vec<Vec<f32>>> {
    let Sequence { kv_heads, group, head_size, .. } = *sequence;
    let mut results = vec![vec![Vec::new(); kv_heads * group]; count];
    let mut scratch = Scratch::new(heads, head_size);
    for kv_head in 0..kv_heads {
        for from in (0..group).step_by(heads) {
            let these = kv_head * group + from..kv_head * group + group.min(from + heads);
            let of_query = |query: &Vec<f32>| query[these.start * head_size..these.end * head_size].to_vec();
            let values: Vec<f32> = sequence.queries[first..first + count].iter().flat_map(of_query).collect();
            let queries = Queries { values: &values, heads: these.len(), first_position: first };
            let place = Place { layer: 1, kv_head, table: &stored.table };
            let mut out = vec![0.0; values.len()];
            // SAFETY: nobody writes to the pool.
            unsafe { attend(set, &stored.pool, place, queries, &mut out, &mut scratch) };
            for (result, out) in results.iter_mut().zip(out.chunks(these.len() * head_size)) {
                for (head, out) in these.clone().zip(out.chunks(head_size)) {
                    result[head] = out.to_vec();
                }
            }
        }
    }
    results
}

fn bits(results: &[Vec<Vec<f32>>]) -> Vec<u32> {
    results.iter().flatten().flatten().map(|value| if value.is_nan() { u32::MAX } else { value.to_bits() }).collect()
}

fn fastest() -> InstructionSet {
    InstructionSet::all()[0]
}

const KINDS: [KvKind; 3] = [KvKind::F32, KvKind::F16, KvKind::Bf16];

#[test]
fn results_are_close_to_float64() {
    let mut worst = 0.0_f64;
    for (shape, kind) in [[1, 3, 64], [2, 1, 8], [1, 7, 80], [1, 2, 96], [1, 1, 128], [1, 4, 256], [1, 12, 24]]
        .into_iter()
        .zip(KINDS.into_iter().cycle())
    {
        let sequence = Sequence::new(150, shape);
        for block_size in [16, 5] {
            let stored = Stored::new(&sequence, kind, block_size, (f32::NAN, 4));
            let results = attended(fastest(), (&sequence, &stored), 0, 150, shape[1]);
            for (position, result) in results.iter().enumerate() {
                for (head, result) in result.iter().enumerate() {
                    for (&value, expected) in result.iter().zip(sequence.expected(kind, position, head)) {
                        let error = (f64::from(value) - expected).abs();
                        worst = worst.max(error);
                        assert!(error < 3e-6, "{shape:?} {kind:?} position {position} head {head}: {value} {expected}");
                    }
                }
            }
        }
    }
    assert!(worst > 1e-9, "float32 is not float64");
}

#[test]
fn bits_do_not_depend_on_what_is_computed_together() {
    for shape in [[1, 3, 64], [2, 1, 16], [1, 5, 32], [1, 7, 8], [1, 8, 16], [1, 15, 16]] {
        let sequence = Sequence::new(140, shape);
        let stored = Stored::new(&sequence, KvKind::F16, 16, (1e4, 1));
        let all: Vec<u32> = bits(&attended(fastest(), (&sequence, &stored), 0, 140, shape[1]));
        let cases = [(1, shape[1]), (1, 1), (2, 2), (3, shape[1]), (7, 1), (64, 3), (139, shape[1])];
        for (set, (count, heads)) in InstructionSet::all().into_iter().flat_map(|set| cases.map(|case| (set, case))) {
            let parts = (0..140).step_by(count).flat_map(|first| {
                attended(set, (&sequence, &stored), first, count.min(140 - first), heads.min(shape[1]))
            });
            let is_same = bits(&parts.collect::<Vec<_>>()) == all;
            assert!(is_same, "{} {shape:?}: {count} queries, {heads} heads", set.name());
        }
    }
}

#[test]
fn bits_do_not_depend_on_blocks() {
    for (kind, shape) in KINDS.into_iter().zip([[2, 3, 16], [1, 3, 64], [1, 4, 8]]) {
        let sequence = Sequence::new(131, shape);
        let of = |block_size, seed| {
            let stored = Stored::new(&sequence, kind, block_size, (0.5, seed));
            bits(&attended(fastest(), (&sequence, &stored), 0, 131, shape[1]))
        };
        let expected = of(16, 0);
        for block_size in [1, 2, 3, 5, 15, 16, 17, 32, 48, 64, 100, 128, 131] {
            assert!(of(block_size, block_size % 7) == expected, "{kind:?} blocks of {block_size}");
        }
    }
}

#[test]
fn what_lies_behind_a_query_never_shows() {
    for (kind, block_size) in KINDS.into_iter().flat_map(|kind| [3, 16, 128].map(|size| (kind, size))) {
        let sequence = Sequence::new(70, [1, 3, 32]);
        let of = |garbage| {
            let stored = Stored::new(&sequence, kind, block_size, (garbage, 2));
            let mut seen = Vec::new();
            for (first, count) in [(0, 5), (13, 7), (58, 6), (64, 1), (67, 3)] {
                for position in first + count..70 {
                    let mut later = Sequence::new(70, [1, 3, 32]);
                    later.keys[position].fill(garbage);
                    later.values[position].fill(-garbage);
                    stored.append(&later, position);
                }
                let results = attended(fastest(), (&sequence, &stored), first, count, 3);
                seen.extend(bits(&results));
                (0..70).for_each(|position| stored.append(&sequence, position));
            }
            seen
        };
        let expected = of(0.0);
        for garbage in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e30, -1e30] {
            assert!(of(garbage) == expected, "{kind:?} {block_size} {garbage}");
        }
    }
}

#[test]
fn all_instruction_sets_give_the_same_bits() {
    for (kind, shape) in KINDS.into_iter().zip([[1, 5, 48], [1, 3, 64], [2, 7, 8]]) {
        let sequence = Sequence::new(100, shape);
        let stored = Stored::new(&sequence, kind, 16, (1.0, 0));
        let [first, others @ ..] = &InstructionSet::all()[..] else { panic!("there is at least one") };
        let of = |set| bits(&attended(set, (&sequence, &stored), 0, 100, shape[1]));
        let expected = of(*first);
        for &other in others {
            assert!(of(other) == expected, "{} and {}, {kind:?}", first.name(), other.name());
        }
    }
}

#[test]
fn numbers_that_are_not_finite_end_as_nan_and_harm_nobody_else() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for where_to in 0..3 {
            let mut sequence = Sequence::new(90, [1, 3, 16]);
            let part = [&mut sequence.keys, &mut sequence.values, &mut sequence.queries].into_iter().nth(where_to);
            part.expect("one of three")[70][5] = bad;
            let stored = Stored::new(&sequence, KvKind::F32, 16, (0.0, 0));
            let results = attended(fastest(), (&sequence, &stored), 60, 30, 3);
            assert!(results[..10].iter().flatten().flatten().all(|value| value.is_finite()));
            // A score of minus infinity weighs nothing; all else that is not finite shows in the row's own element.
            let shows = results[10][0][5].is_nan() || results[10][0][5].is_infinite();
            assert!(shows || (where_to == 0 && bad.is_infinite()), "{bad} in {where_to}");
            let harmed = results.iter().skip(11).flatten().flatten().any(|value| !value.is_finite());
            assert!(!harmed || where_to != 2, "a query harms no other");
        }
        let mut sequence = Sequence::new(70, [1, 2, 16]);
        sequence.keys.iter_mut().for_each(|key| key.fill(bad));
        let stored = Stored::new(&sequence, KvKind::Bf16, 16, (0.0, 0));
        let results = attended(fastest(), (&sequence, &stored), 0, 70, 2);
        assert!(results.iter().flatten().flatten().all(|value| value.is_nan()), "{bad} everywhere");
    }
}

#[test]
fn queries_are_given_in_groups_that_share_keys() {
    assert_eq!([1, 2, 3, 4, 5, 7, 8, 12, 16].map(queries_at_once), [12, 6, 4, 3, 2, 1, 1, 1, 1]);
}
