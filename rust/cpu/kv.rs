//! The KV pool: blocks of keys and values, and copies of whole blocks.

use std::ops::Range;

use super::element::{Bf16, Element, F16, F32};
use super::lanes::LANES;
use super::memory::{OutOfMemory, Shared};

/// The type of the pool's numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvKind {
    /// 32 bits, as they are computed.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
}

/// How large the pool is; all are at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvShape {
    /// Blocks in the pool.
    pub num_blocks: usize,
    /// Layers of the model.
    pub layers: usize,
    /// Heads of keys and values in a layer.
    pub kv_heads: usize,
    /// Elements of a key or value.
    pub head_size: usize,
    /// Positions in a block.
    pub block_size: usize,
}

/// Blocks of one type of number.
///
/// ```text
///     [num_blocks, layers, kv_heads]   of   keys [strips, head_size, strip width],  values [block_size, head_size]
/// ```
///
/// A strip is 16 positions, or the whole block where 16 does not divide the block size. Keys lie across, so that the
/// scores of a strip are one chain of sums over a head's elements in each lane; values lie along, so that the elements
/// of a result are one chain over the positions in each lane.
#[derive(Debug)]
pub(crate) struct Blocks<E: Element> {
    shape: KvShape,
    numbers: Shared<E::Bits>,
}

/// Sixteen positions of a KV head, in the order in which they are read.
pub(crate) struct Strip<'a, E: Element> {
    /// [`head_size`] of one element of sixteen keys
    pub(crate) keys: &'a [[E::Bits; LANES]],
    /// [16, vectors] of sixteen elements of one value
    pub(crate) values: &'a [[E::Bits; LANES]],
}

impl<E: Element> Strip<'_, E> {
    pub(crate) const EMPTY: Self = Self { keys: &[], values: &[] };
}

impl<E: Element> Clone for Strip<'_, E> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<E: Element> Copy for Strip<'_, E> {}

/// One position of one KV head.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Position {
    pub(crate) layer: usize,
    pub(crate) kv_head: usize,
    pub(crate) block: u32,
    /// Positions of the block before it.
    pub(crate) offset: usize,
}

impl<E: Element> Blocks<E> {
    fn new(shape: KvShape) -> Result<Self, OutOfMemory> {
        let KvShape { num_blocks, layers, kv_heads, head_size, block_size } = shape;
        let sizes = [num_blocks, layers, kv_heads, head_size, block_size, 2];
        assert!(!sizes.contains(&0), "{shape:?} has no size");
        let bytes = sizes.iter().fold(size_of::<E::Bits>() as u128, |all, &size| all.saturating_mul(size as u128));
        let len = sizes.iter().try_fold(1_usize, |all, &size| all.checked_mul(size)).ok_or(OutOfMemory { bytes })?;
        Ok(Self { shape, numbers: Shared::zeroed(len)? })
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    /// Numbers in a block.
    fn block_len(&self) -> usize {
        self.numbers.len() / self.shape.num_blocks
    }

    fn block_bytes(&self) -> usize {
        self.block_len() * size_of::<E::Bits>()
    }

    fn block(&self, block: u32) -> Range<usize> {
        let start = block as usize * self.block_len();
        start..start + self.block_len()
    }

    /// Where the keys and the values of a KV head begin.
    #[inline(always)]
    fn head(&self, at: Position) -> [usize; 2] {
        let KvShape { layers, kv_heads, head_size, block_size, .. } = self.shape;
        let keys = ((at.block as usize * layers + at.layer) * kv_heads + at.kv_head) * 2 * head_size * block_size;
        [keys, keys + head_size * block_size]
    }

    /// Where a position's key begins, and how far apart its elements are.
    fn key(&self, at: Position) -> (usize, usize) {
        let KvShape { head_size, block_size, .. } = self.shape;
        let width = if block_size.is_multiple_of(LANES) { LANES } else { block_size };
        let [keys, _] = self.head(at);
        (keys + at.offset / width * width * head_size + at.offset % width, width)
    }

    fn value(&self, at: Position) -> Range<usize> {
        let [_, values] = self.head(at);
        let start = values + at.offset * self.shape.head_size;
        start..start + self.shape.head_size
    }

    fn gather(&self, blocks: &[u32], out: &mut [u8]) {
        let block_bytes = self.block_bytes();
        assert_eq!(out.len(), blocks.len() * block_bytes, "the image of {} blocks", blocks.len());
        for (&block, image) in blocks.iter().zip(out.chunks_exact_mut(block_bytes)) {
            // SAFETY: who appends answers for it that nobody reads at the same time.
            let numbers = unsafe { self.numbers.read(self.block(block)) };
            // SAFETY: these numbers, as the bytes that they are.
            image.copy_from_slice(unsafe { std::slice::from_raw_parts(numbers.as_ptr().cast(), block_bytes) });
        }
    }

    fn scatter(&mut self, blocks: &[u32], image: &[u8]) {
        let block_bytes = self.block_bytes();
        assert_eq!(image.len(), blocks.len() * block_bytes, "the image of {} blocks", blocks.len());
        for (&block, image) in blocks.iter().zip(image.chunks_exact(block_bytes)) {
            let range = self.block(block);
            let numbers = &mut self.numbers.as_slice()[range];
            // SAFETY: these numbers, as bytes; whatever is written is a plain number.
            let bytes = unsafe { std::slice::from_raw_parts_mut(numbers.as_mut_ptr().cast::<u8>(), block_bytes) };
            bytes.copy_from_slice(image);
        }
    }

    /// See [`KvPool::append`].
    unsafe fn append(&self, at: Position, k: &[f32], v: &[f32]) {
        /// Elements of a key that are rounded at once.
        const PART: usize = 64;
        let head_size = self.shape.head_size;
        let mut rounded = [E::Bits::default(); PART];
        for (kv_head, (k, v)) in k.chunks_exact(head_size).zip(v.chunks_exact(head_size)).enumerate() {
            let at = Position { kv_head, ..at };
            let (first, apart) = self.key(at);
            for (part, k) in k.chunks(PART).enumerate() {
                let rounded = &mut rounded[..k.len()];
                E::round(k, rounded);
                let first = first + part * PART * apart;
                for (element, &bits) in rounded.iter().enumerate() {
                    // SAFETY: an element of this token's key, which nobody else reads or writes meanwhile.
                    unsafe { self.numbers.set(first + element * apart, bits) };
                }
            }
            // SAFETY: this token's value, which nobody else reads or writes meanwhile.
            E::round(v, unsafe { self.numbers.write(self.value(at)) });
        }
    }

    /// The sixteen positions from `at` on, whose offset, like block and head size, is a multiple of 16.
    ///
    /// # Safety
    /// Nobody writes to them as long as the strip is used.
    #[inline(always)]
    pub(crate) unsafe fn strip(&self, at: Position) -> Strip<'_, E> {
        let head_size = self.shape.head_size;
        let (len, skip) = (LANES * head_size, at.offset * head_size);
        let [keys, values] = self.head(at);
        // SAFETY: the caller answers for it.
        let keys = unsafe { self.numbers.read(keys + skip..keys + skip + len) };
        // SAFETY: as above.
        let values = unsafe { self.numbers.read(values + skip..values + skip + len) };
        Strip { keys: keys.as_chunks().0, values: values.as_chunks().0 }
    }

    /// Widens the key of a position into one lane of `strip` [`head_size`], and its value into `value` [`head_size`].
    ///
    /// # Safety
    /// Nobody writes to the position meanwhile.
    pub(crate) unsafe fn widen(&self, at: Position, strip: &mut [[f32; LANES]], lane: usize, value: &mut [f32]) {
        let (first, apart) = self.key(at);
        for (element, to) in strip.iter_mut().enumerate() {
            let element = first + element * apart;
            // SAFETY: the caller answers for it.
            to[lane] = E::widen(unsafe { self.numbers.read(element..element + 1) }[0]);
        }
        // SAFETY: the caller answers for it.
        let bits = unsafe { self.numbers.read(self.value(at)) };
        for (to, &bits) in value.iter_mut().zip(bits) {
            *to = E::widen(bits);
        }
    }
}

/// The blocks, in one of the types.
#[derive(Debug)]
pub(crate) enum Numbers {
    F32(Blocks<F32>),
    F16(Blocks<F16>),
    Bf16(Blocks<Bf16>),
}

/// Blocks of keys and values in all layers. One block is one run of bytes, so an image of a sequence is its blocks one
/// after another.
#[derive(Debug)]
pub struct KvPool {
    kind: KvKind,
    shape: KvShape,
    numbers: Numbers,
}

/// Does the same with the blocks of each type.
macro_rules! with_blocks {
    ($numbers:expr, $blocks:ident => $result:expr) => {
        match $numbers {
            Numbers::F32($blocks) => $result,
            Numbers::F16($blocks) => $result,
            Numbers::Bf16($blocks) => $result,
        }
    };
}

impl KvPool {
    /// A pool of zeros. Blocks that are never written take no memory.
    ///
    /// # Errors
    /// If the machine has no such memory.
    ///
    /// # Panics
    /// If a size is 0.
    pub fn new(shape: KvShape, kind: KvKind) -> Result<Self, OutOfMemory> {
        let numbers = match kind {
            KvKind::F32 => Numbers::F32(Blocks::new(shape)?),
            KvKind::F16 => Numbers::F16(Blocks::new(shape)?),
            KvKind::Bf16 => Numbers::Bf16(Blocks::new(shape)?),
        };
        Ok(Self { kind, shape, numbers })
    }

    /// The type of its numbers.
    #[must_use]
    pub fn kind(&self) -> KvKind {
        self.kind
    }

    /// How large it is.
    #[must_use]
    pub fn shape(&self) -> KvShape {
        self.shape
    }

    /// Bytes of one block in all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        with_blocks!(&self.numbers, blocks => blocks.block_bytes())
    }

    /// Copies the bytes of `blocks`, one after another, to `out` [`blocks.len() * block_bytes`].
    ///
    /// # Panics
    /// If a block is not there or `out` has another length.
    pub fn gather(&self, blocks: &[u32], out: &mut [u8]) {
        with_blocks!(&self.numbers, numbers => numbers.gather(blocks, out));
    }

    /// Writes the bytes of `image`, as `gather` gave them, to `blocks`.
    ///
    /// # Panics
    /// If a block is not there or `image` has another length.
    pub fn scatter(&mut self, blocks: &[u32], image: &[u8]) {
        with_blocks!(&mut self.numbers, numbers => numbers.scatter(blocks, image));
    }

    /// Writes k and v [`kv_heads * head_size`] of one token in one layer, rounded to the pool's type.
    ///
    /// # Safety
    /// Nobody else reads or writes this token's place meanwhile, `gather` included. Other tokens may be appended.
    ///
    /// # Panics
    /// If the place is not in the pool or a length is another one.
    pub(crate) unsafe fn append(&self, layer: usize, block: u32, offset: usize, k: &[f32], v: &[f32]) {
        let KvShape { num_blocks, layers, kv_heads, head_size, block_size } = self.shape;
        assert!(layer < layers && (block as usize) < num_blocks && offset < block_size, "{layer} {block} {offset}");
        assert_eq!([k.len(), v.len()], [kv_heads * head_size; 2], "a token's keys and values");
        let at = Position { layer, kv_head: 0, block, offset };
        // SAFETY: the caller answers for it.
        with_blocks!(&self.numbers, blocks => unsafe { blocks.append(at, k, v) });
    }

    pub(crate) fn numbers(&self) -> &Numbers {
        &self.numbers
    }
}

#[cfg(test)]
#[expect(clippy::cast_precision_loss, reason = "small numbers")]
mod tests {
    use half::{bf16, f16};

    use super::*;

    const KINDS: [KvKind; 3] = [KvKind::F32, KvKind::F16, KvKind::Bf16];

    fn shape(block_size: usize) -> KvShape {
        KvShape { num_blocks: 5, layers: 2, kv_heads: 2, head_size: 72, block_size }
    }

    /// Keys and values of one token, the same for the same number.
    fn token(number: usize) -> [Vec<f32>; 2] {
        [1, 2].map(|seed| (0..144).map(|index| ((number * 977 + index * 31 + seed) % 1013) as f32 / 97.0).collect())
    }

    fn append(pool: &KvPool, number: usize, layer: usize, block: u32, offset: usize) {
        let [k, v] = token(number);
        // SAFETY: nobody else has the pool.
        unsafe { pool.append(layer, block, offset, &k, &v) };
    }

    /// The key and the value of one KV head of a token, and what is in the other lanes.
    fn widened(pool: &KvPool, at: Position) -> [Vec<f32>; 2] {
        let mut strip = vec![[0.0; LANES]; 72];
        let mut value = vec![0.0; 72];
        // SAFETY: nobody else has the pool.
        with_blocks!(pool.numbers(), blocks => unsafe { blocks.widen(at, &mut strip, 3, &mut value) });
        assert!(strip.iter().all(|lanes| lanes.iter().enumerate().all(|(lane, &value)| lane == 3 || value == 0.0)));
        [strip.iter().map(|lanes| lanes[3]).collect(), value]
    }

    fn rounded(kind: KvKind, value: f32) -> f32 {
        match kind {
            KvKind::F32 => value,
            KvKind::F16 => f16::from_f32(value).to_f32(),
            KvKind::Bf16 => bf16::from_f32(value).to_f32(),
        }
    }

    #[test]
    fn every_token_is_kept_rounded_and_disturbs_no_other() {
        for (kind, block_size) in KINDS.into_iter().flat_map(|kind| [1, 5, 16, 17, 48].map(|size| (kind, size))) {
            let pool = KvPool::new(shape(block_size), kind).expect("a small pool");
            let places = || {
                (0..2).flat_map(|layer| {
                    (0..5).flat_map(move |block| (0..block_size).map(move |offset| (layer, block, offset)))
                })
            };
            for (number, (layer, block, offset)) in places().enumerate() {
                append(&pool, number, layer, block, offset);
            }
            for (number, (layer, block, offset)) in places().enumerate() {
                for kv_head in 0..2 {
                    let kept = widened(&pool, Position { layer, kv_head, block, offset });
                    for (kept, given) in kept.iter().zip(token(number)) {
                        let given = given[kv_head * 72..][..72].iter().map(|&value| rounded(kind, value));
                        assert!(kept.iter().copied().eq(given), "{kind:?} {block_size} {layer} {block} {offset}");
                    }
                }
            }
        }
    }

    #[test]
    fn an_image_brings_back_the_same_bytes_in_other_blocks() {
        for kind in KINDS {
            let mut pool = KvPool::new(shape(5), kind).expect("a small pool");
            let bytes = pool.block_bytes();
            assert_eq!(bytes, 2 * 2 * 2 * 72 * 5 * if kind == KvKind::F32 { 4 } else { 2 });
            for (number, block) in [3, 0, 4].into_iter().enumerate() {
                append(&pool, number, 1, block, number);
            }
            let mut image = vec![0; 3 * bytes];
            pool.gather(&[3, 0, 4], &mut image);
            pool.scatter(&[1, 4, 2], &image);
            for (number, block) in [1, 4, 2].into_iter().enumerate() {
                let at = Position { layer: 1, kv_head: 1, block, offset: number };
                let expected = token(number)
                    .map(|values| values[72..].iter().map(|&value| rounded(kind, value)).collect::<Vec<_>>());
                assert_eq!(widened(&pool, at), expected);
            }
            let mut again = vec![0; 3 * bytes];
            pool.gather(&[1, 4, 2], &mut again);
            assert!(again == image);
        }
    }

    #[test]
    fn rounding_is_to_nearest_even_and_keeps_nan() {
        let values =
            [1.0 + 1.0 / 2048.0, 1.0 + 3.0 / 2048.0, 65_519.0, 65_520.0, 3e-8, f32::NAN, f32::from_bits(0x7f80_0001)];
        let mut bits = [0; 7];
        F16::round(&values, &mut bits);
        assert_eq!(bits[..5], [0x3c00, 0x3c02, 0x7bff, 0x7c00, 0x0001]);
        assert!(bits[5..].iter().all(|&bits| F16::widen(bits).is_nan()));
        let values = [1.0 + 1.0 / 256.0, 1.0 + 3.0 / 256.0, f32::MAX, f32::NAN, f32::from_bits(0x7f80_0001)];
        Bf16::round(&values, &mut bits[..5]);
        assert_eq!(bits[..3], [0x3f80, 0x3f82, 0x7f80]);
        assert!(bits[3..5].iter().all(|&bits| Bf16::widen(bits).is_nan()));
    }

    #[test]
    fn a_pool_beyond_all_memory_is_an_error_with_its_size() {
        let shape = KvShape { num_blocks: usize::MAX / 2, ..shape(16) };
        let bytes = (usize::MAX / 2) as u128 * 2 * 2 * 2 * 72 * 16 * 2;
        assert_eq!(KvPool::new(shape, KvKind::F16).map(|_| ()), Err(OutOfMemory { bytes }));
    }

    #[test]
    #[should_panic(expected = "7 5 0")]
    fn a_block_that_is_not_there_is_refused() {
        append(&KvPool::new(shape(16), KvKind::F16).expect("a small pool"), 0, 7, 5, 0);
    }
}
