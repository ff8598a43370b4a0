//! Newtypes for everything that is counted, so that a slot is never taken for a block.

use std::fmt;

/// A sequence; numbers are given out in the order of submission and never used again.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SeqId(pub u64);

/// A slot: a sequence's index in every per-sequence device array.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SlotId(pub u32);

/// A block of KV positions in the pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct BlockId(pub u32);

/// A token id of the model's vocabulary.
pub type TokenId = u32;

impl SlotId {
    /// The slot as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl BlockId {
    /// The block as an index.
    #[must_use]
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for SeqId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "sequence {}", self.0)
    }
}

/// Blocks of `block_size` positions that hold `positions`.
#[must_use]
pub fn blocks_for(positions: u32, block_size: u32) -> u32 {
    positions.div_ceil(block_size)
}
