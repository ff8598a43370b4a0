//! One tile of keys and values, merged into the running softmax of a few pairs of a query and a head.

use std::array;
use std::ops::Range;

use crate::cpu::element::Element;
use crate::cpu::exp::exp_of_nonpositive;
use crate::cpu::kv::Strip;
use crate::cpu::lanes::{Kernel, LANES, Lanes};

/// Positions in a tile. Constant: it must depend neither on the block size nor on the batch.
pub(super) const KV_TILE: usize = 64;
/// Strips in a tile.
pub(super) const STRIPS: usize = KV_TILE / LANES;
/// Bytes that are asked for at once.
const CACHE_LINE: usize = 64;
/// Pairs in a chunk, at most.
pub(super) const MAX_PAIRS: usize = 12;

/// Positions `start`, which is a multiple of `KV_TILE`, and following.
pub(super) struct Tile<'a, E: Element> {
    pub(super) start: usize,
    /// As many as the last query needs; in the last one, positions that nobody sees may follow.
    pub(super) strips: &'a [Strip<'a, E>],
    /// As many strips that are fetched meanwhile: those of the next tile, or the same ones.
    pub(super) next: &'a [Strip<'a, E>],
}

impl<E: Element> Clone for Tile<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Element> Copy for Tile<'_, E> {}

/// Pairs of a query and a head that are computed together, and how far they are.
#[derive(Debug)]
pub(super) struct Chunk {
    pairs: usize,
    head_size: usize,
    /// Positions that each pair sees, ascending.
    ends: [usize; MAX_PAIRS],
    /// [`head_size`, pairs], scaled
    queries: Vec<f32>,
    /// The largest score so far.
    best: [f32; LANES],
    /// The sums of the exponentials so far, the position modulo 16 apart.
    totals: [[f32; LANES]; MAX_PAIRS],
    /// [pairs, vectors]: the sums of the exponentials times the values so far
    mixed: Vec<[f32; LANES]>,
    /// The scores of one tile, and then their exponentials.
    scores: [[f32; KV_TILE]; MAX_PAIRS],
}

impl Chunk {
    pub(super) fn new(head_size: usize) -> Self {
        Self {
            pairs: 0,
            head_size,
            ends: [0; MAX_PAIRS],
            queries: vec![0.0; MAX_PAIRS * head_size],
            best: [0.0; LANES],
            totals: [[0.0; LANES]; MAX_PAIRS],
            mixed: vec![[0.0; LANES]; MAX_PAIRS * head_size.div_ceil(LANES)],
            scores: [[0.0; KV_TILE]; MAX_PAIRS],
        }
    }

    /// How many of `pairs` go into the next chunk.
    pub(super) fn size<L: Lanes>(pairs: usize) -> usize {
        let sizes = [12, 8, 6, 4, 3, 2, 1];
        sizes.into_iter().find(|&size| size <= pairs.min(L::MAX_ROWS)).expect("there is a pair")
    }

    /// Begins with other pairs: queries [pairs, `head_size`], and how many positions each sees.
    pub(super) fn begin(&mut self, queries: &[f32], ends: impl Iterator<Item = usize>) {
        self.pairs = queries.len() / self.head_size;
        #[expect(clippy::cast_precision_loss, reason = "a head has far fewer than 2^24 elements")]
        let scale = (self.head_size as f32).sqrt().recip();
        for (pair, query) in queries.chunks_exact(self.head_size).enumerate() {
            for (to, value) in self.queries.iter_mut().skip(pair).step_by(self.pairs).zip(query) {
                *to = value * scale;
            }
        }
        for (to, end) in self.ends.iter_mut().zip(ends) {
            *to = end;
        }
        self.best = [f32::NEG_INFINITY; LANES];
        self.totals[..self.pairs].fill([0.0; LANES]);
        let vectors = self.head_size.div_ceil(LANES);
        self.mixed[..self.pairs * vectors].fill([0.0; LANES]);
    }

    /// Writes the first results to `out` and gives the rest of it back.
    #[inline(always)]
    pub(super) fn finish<'a, L: Lanes>(&self, lanes: L, out: &'a mut [f32]) -> &'a mut [f32] {
        let (results, rest) = out.split_at_mut(self.pairs * self.head_size);
        let mixed = self.mixed.chunks_exact(self.head_size.div_ceil(LANES));
        for ((result, mixed), totals) in results.chunks_exact_mut(self.head_size).zip(mixed).zip(&self.totals) {
            let total = lanes.splat(lanes.sum(lanes.load(totals)));
            for (to, mixed) in result.chunks_mut(LANES).zip(mixed) {
                let values = lanes.div(lanes.load(mixed), total);
                match to.first_chunk_mut() {
                    Some(to) => lanes.store(values, to),
                    None => lanes.store_first(values, to),
                }
            }
        }
        rest
    }

    /// Adds a tile of which the first pair sees a position at least.
    #[inline(always)]
    pub(super) fn merge<L: Lanes, E: Element>(&mut self, lanes: L, tile: Tile<'_, E>) {
        match self.pairs {
            12 if L::MAX_ROWS >= 12 => lanes.run(Merge::<E, 12> { chunk: self, tile }),
            8 if L::MAX_ROWS >= 8 => lanes.run(Merge::<E, 8> { chunk: self, tile }),
            6 => lanes.run(Merge::<E, 6> { chunk: self, tile }),
            4 => lanes.run(Merge::<E, 4> { chunk: self, tile }),
            3 => lanes.run(Merge::<E, 3> { chunk: self, tile }),
            2 => lanes.run(Merge::<E, 2> { chunk: self, tile }),
            1 => lanes.run(Merge::<E, 1> { chunk: self, tile }),
            _ => unreachable!("a chunk of {} pairs", self.pairs),
        }
    }
}

/// [`Chunk::merge`] with `P` pairs.
struct Merge<'a, E: Element, const P: usize> {
    chunk: &'a mut Chunk,
    tile: Tile<'a, E>,
}

impl<E: Element, const P: usize> Kernel for Merge<'_, E, P> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { chunk, tile } = self;
        let visible: [usize; P] = array::from_fn(|pair| (chunk.ends[pair] - tile.start).min(KV_TILE));
        let queries = &chunk.queries[..P * chunk.head_size];
        all_scores::<L, E, P>(lanes, queries.as_chunks().0, tile, &mut chunk.scores);
        for (scores, visible) in chunk.scores.iter_mut().zip(visible) {
            scores[visible..].fill(f32::NEG_INFINITY); // the exponentials of these are 0
        }
        let fades = exponentials::<L, P>(lanes, chunk, tile.strips.len());
        // The rows that all of them see, and then each alone.
        let vectors = chunk.head_size.div_ceil(LANES);
        let (scores, _) = chunk.scores.split_first_chunk::<P>().expect("no more pairs than that");
        let shared = Weights { rows: 0..visible[0], scores, fades };
        shared.mix(lanes, tile, &mut chunk.mixed[..P * vectors]);
        for (pair, mixed) in chunk.mixed.chunks_exact_mut(vectors).take(P).enumerate() {
            let rows = visible[0]..visible[pair];
            if !rows.is_empty() {
                Weights { rows, scores: array::from_ref(&scores[pair]), fades: [1.0] }.mix(lanes, tile, mixed);
            }
        }
    }
}

/// Vectors whose sums for each of `pairs` are in registers at once, together with what is added; 1 at least.
#[inline(always)]
fn width<L: Lanes>(pairs: usize) -> usize {
    let sums = if L::BOTH_HALVES { 2 * L::MAX_ROWS } else { L::MAX_ROWS - 1 };
    (sums / pairs).max(1)
}

/// The scores of all keys of the strips, those that nobody sees too.
#[inline(always)]
fn all_scores<L: Lanes, E: Element, const P: usize>(
    lanes: L,
    queries: &[[f32; P]],
    tile: Tile<'_, E>,
    scores: &mut [[f32; KV_TILE]; MAX_PAIRS],
) {
    let mut first = 0;
    while first < tile.strips.len() {
        first += match tile.strips.len() - first {
            4.. if width::<L>(P) >= 4 => some_scores::<L, E, P, 4>(lanes, queries, tile, first, scores),
            2.. if width::<L>(P) >= 2 => some_scores::<L, E, P, 2>(lanes, queries, tile, first, scores),
            _ => some_scores::<L, E, P, 1>(lanes, queries, tile, first, scores),
        };
    }
}

// The loops below stand where closures would be shorter: a closure that is not compiled in place is compiled without
// the vector instructions.

/// The scores of `S` strips, from the strip `first` on. Returns S.
#[inline(always)]
fn some_scores<L: Lanes, E: Element, const P: usize, const S: usize>(
    lanes: L,
    queries: &[[f32; P]],
    tile: Tile<'_, E>,
    first: usize,
    scores: &mut [[f32; KV_TILE]; MAX_PAIRS],
) -> usize {
    let head_size = queries.len();
    let keys: [&[_]; S] = array::from_fn(|strip| &tile.strips[first + strip].keys[..head_size]);
    let next: [*const _; S] = array::from_fn(|strip| tile.next[first + strip].keys.as_ptr());
    let mut sums = [[lanes.splat(0.0); S]; P];
    for element in 0..head_size {
        let mut wide = [lanes.splat(0.0); S];
        for ((wide, keys), next) in wide.iter_mut().zip(keys).zip(next) {
            lanes.prefetch(next.wrapping_add(element));
            *wide = E::load(lanes, &keys[element]);
        }
        for (sums, &query) in sums.iter_mut().zip(&queries[element]) {
            let query = lanes.splat(query);
            for (sum, &key) in sums.iter_mut().zip(&wide) {
                *sum = lanes.fma(key, query, *sum);
            }
        }
    }
    for (scores, sums) in scores.iter_mut().zip(&sums) {
        for (scores, sum) in scores.as_chunks_mut().0[first..].iter_mut().zip(sums) {
            lanes.store(*sum, scores);
        }
    }
    S
}

/// Turns the scores of each pair into exponentials, less the largest score so far. Returns the factors by which that
/// makes what was summed before smaller.
#[inline(always)]
fn exponentials<L: Lanes, const P: usize>(lanes: L, chunk: &mut Chunk, strips: usize) -> [f32; P] {
    let mut best = chunk.best;
    for (best, scores) in best[..P].iter_mut().zip(&chunk.scores) {
        let mut largest = lanes.splat(*best);
        for scores in &scores.as_chunks().0[..strips] {
            largest = lanes.max(lanes.load(scores), largest); // a NaN is passed over here, and shows in the total
        }
        *best = max_of(lanes, largest);
    }
    let mut fades = [0.0; LANES];
    let change = lanes.sub(lanes.load(&chunk.best), lanes.load(&best));
    lanes.store(exp_of_nonpositive(lanes, change), &mut fades);
    chunk.best = best;
    for (pair, scores) in chunk.scores[..P].iter_mut().enumerate() {
        let best = lanes.splat(best[pair]);
        let mut sum = lanes.splat(0.0);
        for scores in &mut scores.as_chunks_mut().0[..strips] {
            let exponentials = exp_of_nonpositive(lanes, lanes.sub(lanes.load(scores), best));
            lanes.store(exponentials, scores);
            sum = lanes.add(sum, exponentials);
        }
        let total = &mut chunk.totals[pair];
        lanes.store(lanes.fma(lanes.load(total), lanes.splat(fades[pair]), sum), total);
    }
    array::from_fn(|pair| fades[pair])
}

/// The largest of sixteen values, none of which is NaN.
#[inline(always)]
fn max_of<L: Lanes>(lanes: L, values: L::F) -> f32 {
    let greater = |a: f32, b: f32| if a > b { a } else { b };
    let mut sixteen = [0.0; LANES];
    lanes.store(values, &mut sixteen);
    let eight: [f32; 8] = array::from_fn(|lane| greater(sixteen[lane], sixteen[lane + 8]));
    let four: [f32; 4] = array::from_fn(|lane| greater(eight[lane], eight[lane + 4]));
    greater(greater(four[0], four[2]), greater(four[1], four[3]))
}

/// What the values of some rows of a tile are multiplied by, for each pair.
struct Weights<'a, const P: usize> {
    rows: Range<usize>,
    /// The exponentials of all rows.
    scores: &'a [[f32; KV_TILE]; P],
    /// Factors of what was summed before.
    fades: [f32; P],
}

impl<const P: usize> Weights<'_, P> {
    /// Multiplies `mixed` [P, vectors] by the fades and adds the values of the rows times their weights.
    #[inline(always)]
    fn mix<L: Lanes, E: Element>(&self, lanes: L, tile: Tile<'_, E>, mixed: &mut [[f32; LANES]]) {
        let vectors = mixed.len() / P;
        let mut first = 0;
        while first < vectors {
            first += match vectors - first {
                4.. if width::<L>(P) >= 4 => self.mix_some::<L, E, 4>(lanes, tile, mixed, first),
                2.. if width::<L>(P) >= 2 => self.mix_some::<L, E, 2>(lanes, tile, mixed, first),
                _ => self.mix_some::<L, E, 1>(lanes, tile, mixed, first),
            };
        }
    }

    /// [`Self::mix`] for `V` vectors of each pair, from the vector `first` on. Returns V.
    #[inline(always)]
    fn mix_some<L: Lanes, E: Element, const V: usize>(
        &self,
        lanes: L,
        tile: Tile<'_, E>,
        mixed: &mut [[f32; LANES]],
        first: usize,
    ) -> usize {
        let vectors = mixed.len() / P;
        let mut sums = [[lanes.splat(0.0); V]; P];
        for (pair, sums) in sums.iter_mut().enumerate() {
            let fade = lanes.splat(self.fades[pair]);
            for (sum, mixed) in sums.iter_mut().zip(&mixed[pair * vectors + first..]) {
                *sum = lanes.mul(lanes.load(mixed), fade);
            }
        }
        for (index, (strip, next)) in tile.strips.iter().zip(tile.next).enumerate() {
            let begin = index * LANES;
            let rows = self.rows.start.clamp(begin, begin + LANES)..self.rows.end.clamp(begin, begin + LANES);
            let start = (rows.start - begin) * vectors;
            let mut next = next.values.as_ptr().wrapping_add(start + first);
            for (row, values) in rows.zip(strip.values[start..].chunks_exact(vectors)) {
                for line in (0..V).step_by(CACHE_LINE / size_of::<[E::Bits; LANES]>()) {
                    lanes.prefetch(next.wrapping_add(line));
                }
                next = next.wrapping_add(vectors);
                let values = values[first..].first_chunk::<V>().expect("there are as many vectors");
                let mut wide = [lanes.splat(0.0); V];
                for (wide, value) in wide.iter_mut().zip(values) {
                    *wide = E::load(lanes, value);
                }
                for (sums, scores) in sums.iter_mut().zip(self.scores) {
                    let weight = lanes.splat(scores[row % KV_TILE]);
                    for (sum, &value) in sums.iter_mut().zip(&wide) {
                        *sum = lanes.fma(value, weight, *sum);
                    }
                }
            }
        }
        for (pair, sums) in sums.iter().enumerate() {
            for (sum, mixed) in sums.iter().zip(&mut mixed[pair * vectors + first..]) {
                lanes.store(*sum, mixed);
            }
        }
        V
    }
}
