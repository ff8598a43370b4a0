//! Paged attention of one row's queries over one KV head.

mod tile;

#[cfg(test)]
mod tests;

use std::array;
use std::ops::Range;

use super::element::{Element, F32};
use super::kv::{Blocks, KvPool, KvShape, Numbers, Position, Strip};
use super::lanes::{InstructionSet, Kernel, LANES, Lanes};
use tile::{Chunk, KV_TILE, MAX_PAIRS, STRIPS, Tile};

/// The keys and values to look at.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Place<'a> {
    pub(crate) layer: usize,
    pub(crate) kv_head: usize,
    /// The row's blocks in order, up to its last query's own position at least.
    pub(crate) table: &'a [u32],
}

impl Place<'_> {
    fn position(self, position: usize, block_size: usize) -> Position {
        let Self { layer, kv_head, table } = self;
        Position { layer, kv_head, block: table[position / block_size], offset: position % block_size }
    }
}

/// Consecutive queries of one row.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Queries<'a> {
    /// [queries, heads, `head_size`], not scaled
    pub(crate) values: &'a [f32],
    /// Query heads, all of them of one KV head.
    pub(crate) heads: usize,
    /// Position of the first query.
    pub(crate) first_position: usize,
}

/// How many queries a call of [`attend`] should get at least, where `group` query heads share a KV head: as many as are
/// computed together. Fewer, or others than whole multiples, are slower and give the same bits.
pub(crate) fn queries_at_once(group: usize) -> usize {
    (MAX_PAIRS / group).max(1)
}

/// What one thread needs to attend: bounded by the number of heads and their size, whatever the context.
#[derive(Debug)]
pub(crate) struct Scratch {
    chunks: Vec<Chunk>,
    gathered: Gathered,
}

impl Scratch {
    /// For calls with `heads` query heads at most, of `head_size`.
    pub(crate) fn new(heads: usize, head_size: usize) -> Self {
        // Six pairs in a chunk where registers are few, and two chunks for what remains.
        let chunks = (0..MAX_PAIRS.max(heads) / 6 + 2).map(|_| Chunk::new(head_size)).collect();
        Self { chunks, gathered: Gathered::new(head_size) }
    }
}

/// A tile of keys and values copied out of blocks that are not made of whole strips, or whose heads are not made of
/// whole vectors.
#[derive(Debug)]
struct Gathered {
    /// [strips, `head_size`] of sixteen keys
    keys: Vec<[f32; LANES]>,
    /// [`KV_TILE`, vectors]; zeros behind the head's elements
    values: Vec<[f32; LANES]>,
}

impl Gathered {
    fn new(head_size: usize) -> Self {
        let vectors = head_size.div_ceil(LANES);
        Self { keys: vec![[0.0; LANES]; STRIPS * head_size], values: vec![[0.0; LANES]; KV_TILE * vectors] }
    }

    /// Copies `positions`, which are in one tile, and returns its strips. Lanes behind them hold anything.
    ///
    /// # Safety
    /// Nobody writes to the row's blocks meanwhile.
    unsafe fn gather<E: Element>(
        &mut self,
        blocks: &Blocks<E>,
        place: Place<'_>,
        positions: Range<usize>,
    ) -> [Strip<'_, F32>; STRIPS] {
        let KvShape { head_size, block_size, .. } = blocks.shape();
        let vectors = head_size.div_ceil(LANES);
        for (index, position) in positions.enumerate() {
            let keys = &mut self.keys[index / LANES * head_size..][..head_size];
            let value = &mut self.values[index * vectors..][..vectors].as_flattened_mut()[..head_size];
            // SAFETY: the caller answers for it.
            unsafe { blocks.widen(place.position(position, block_size), keys, index % LANES, value) };
        }
        array::from_fn(|strip| Strip {
            keys: &self.keys[strip * head_size..][..head_size],
            values: &self.values[strip * LANES * vectors..][..LANES * vectors],
        })
    }
}

/// Attention of each query alone: query i sees the positions 0 to `first_position + i`. Writes to `out`, which is as
/// `queries.values` is.
///
/// In float32, by an online softmax over tiles of `KV_TILE` positions from 0 on, merged in order, the last one ending at
/// the query's own position. A score is a chain over the head's elements, an element of the result a chain over the
/// positions; the bits depend on the query and the positions that it sees alone.
///
/// # Safety
/// Nobody writes to the row's blocks during the call.
///
/// # Panics
/// If the lengths do not fit each other, the table is too short or names a block that is not there, or the scratch is
/// for fewer heads or another head size.
pub(crate) unsafe fn attend(
    set: InstructionSet,
    pool: &KvPool,
    place: Place<'_>,
    queries: Queries<'_>,
    out: &mut [f32],
    scratch: &mut Scratch,
) {
    match pool.numbers() {
        Numbers::F32(blocks) => set.run(Attend { blocks, place, queries, out, scratch }),
        Numbers::F16(blocks) => set.run(Attend { blocks, place, queries, out, scratch }),
        Numbers::Bf16(blocks) => set.run(Attend { blocks, place, queries, out, scratch }),
    }
}

/// [`attend`] over blocks of one type, made there alone: nobody writes to the row's blocks while there is one.
struct Attend<'a, E: Element> {
    blocks: &'a Blocks<E>,
    place: Place<'a>,
    queries: Queries<'a>,
    out: &'a mut [f32],
    scratch: &'a mut Scratch,
}

impl<E: Element> Kernel for Attend<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { blocks, place, queries, out, scratch } = self;
        let head_size = blocks.shape().head_size;
        let query_len = queries.heads * head_size;
        assert!(out.len() == queries.values.len() && out.len().is_multiple_of(query_len), "{} {query_len}", out.len());
        let num_queries = out.len() / query_len;
        let most = (L::MAX_ROWS / queries.heads).max(1);
        let mut query = 0;
        while query < num_queries {
            let first_position = queries.first_position + query;
            // Those that are computed together end in the same tile.
            let count = most.min(num_queries - query).min(KV_TILE - first_position % KV_TILE);
            let range = query * query_len..(query + count) * query_len;
            let together = Queries { values: &queries.values[range.clone()], first_position, ..queries };
            // SAFETY: as `attend` was promised.
            unsafe { attend_together(lanes, blocks, place, together, &mut out[range], scratch) };
            query += count;
        }
    }
}

/// Attends with queries that end in the same tile, so that every tile but the last is seen by all of them.
///
/// # Safety
/// As for [`attend`].
#[inline(always)]
unsafe fn attend_together<L: Lanes, E: Element>(
    lanes: L,
    blocks: &Blocks<E>,
    place: Place<'_>,
    queries: Queries<'_>,
    mut out: &mut [f32],
    scratch: &mut Scratch,
) {
    let KvShape { head_size, block_size, .. } = blocks.shape();
    let pairs = queries.values.len() / head_size;
    let (mut first, mut used) = (0, 0);
    while first < pairs {
        let range = first..first + Chunk::size::<L>(pairs - first);
        let ends = range.clone().map(|pair| queries.first_position + pair / queries.heads + 1);
        scratch.chunks[used].begin(&queries.values[range.start * head_size..range.end * head_size], ends);
        (first, used) = (range.end, used + 1);
    }
    let chunks = &mut scratch.chunks[..used];
    let end = queries.first_position + pairs / queries.heads;
    for start in (0..end).step_by(KV_TILE) {
        let num_strips = (end - start).min(KV_TILE).div_ceil(LANES);
        if block_size.is_multiple_of(LANES) && head_size.is_multiple_of(LANES) {
            // SAFETY: as the caller promises.
            let strip_at = |position| unsafe { blocks.strip(place.position(position, block_size)) };
            let (mut strips, mut next) = ([Strip::EMPTY; STRIPS], [Strip::EMPTY; STRIPS]);
            for (index, (strip, next)) in strips[..num_strips].iter_mut().zip(&mut next).enumerate() {
                let position = start + index * LANES;
                *strip = strip_at(position);
                *next = if position + KV_TILE < end { strip_at(position + KV_TILE) } else { *strip };
            }
            let tile = Tile { start, strips: &strips[..num_strips], next: &next[..num_strips] };
            for chunk in &mut *chunks {
                chunk.merge(lanes, tile);
            }
        } else {
            // SAFETY: as the caller promises.
            let strips = unsafe { scratch.gathered.gather(blocks, place, start..end.min(start + KV_TILE)) };
            let tile = Tile { start, strips: &strips[..num_strips], next: &strips[..num_strips] };
            for chunk in &mut *chunks {
                chunk.merge(lanes, tile);
            }
        }
    }
    for chunk in chunks {
        out = chunk.finish(lanes, out);
    }
}
