//! Free list and reference counts of KV blocks.

use std::collections::TryReserveError;

use crate::error::Shortage;
use crate::ids::BlockId;

/// Owns every block that no sequence holds, and counts the holders of the others.
#[derive(Debug, PartialEq, Eq)]
pub struct BlockPool {
    free: Vec<BlockId>,
    holders: Vec<u32>,
}

impl BlockPool {
    /// A pool of `total` free blocks; the lowest are given out first.
    ///
    /// # Errors
    /// If there is no memory for its lists, 8 bytes a block.
    pub fn try_new(total: u32) -> Result<Self, TryReserveError> {
        let (mut free, mut holders) = (Vec::new(), Vec::new());
        free.try_reserve_exact(total as usize)?;
        holders.try_reserve_exact(total as usize)?;
        free.extend((0..total).rev().map(BlockId));
        holders.resize(total as usize, 0);
        Ok(Self { free, holders })
    }

    /// Appends `count` free blocks to `table`, or changes nothing.
    ///
    /// # Errors
    /// [`Shortage`] if fewer are free.
    pub fn take(&mut self, count: u32, table: &mut Vec<BlockId>) -> Result<(), Shortage> {
        let free = self.free();
        if count > free {
            return Err(Shortage { needed: count, free });
        }
        // Everything that can fail is above this line.
        for _ in 0..count {
            let block = self.free.pop().expect("as many as `free` were counted");
            self.holders[block.index()] = 1;
            table.push(block);
        }
        Ok(())
    }

    /// Adds a holder to each of `blocks`, which must be held already.
    ///
    /// # Panics
    /// If one of them is free.
    pub fn share(&mut self, blocks: &[BlockId]) {
        for &block in blocks {
            assert!(self.holders[block.index()] > 0, "shared {block:?}, which is free");
            self.holders[block.index()] += 1;
        }
    }

    /// Takes one holder off each of `blocks`; those without any are free again. Last taken, first given back, so that
    /// giving back what was just taken leaves the pool exactly as it was.
    ///
    /// # Panics
    /// If one of them is free already.
    pub fn give_back(&mut self, blocks: &[BlockId]) {
        for &block in blocks.iter().rev() {
            let holders = &mut self.holders[block.index()];
            assert!(*holders > 0, "gave back {block:?}, which is free");
            *holders -= 1;
            if *holders == 0 {
                self.free.push(block);
            }
        }
    }

    /// Blocks that nobody holds.
    #[must_use]
    pub fn free(&self) -> u32 {
        u32::try_from(self.free.len()).expect("no more blocks than the pool has")
    }

    /// Blocks in all.
    #[must_use]
    pub fn total(&self) -> u32 {
        u32::try_from(self.holders.len()).expect("made from a u32")
    }

    /// Holders of `block`.
    #[must_use]
    pub fn holders(&self, block: BlockId) -> u32 {
        self.holders[block.index()]
    }

    /// Verifies that every block is either free, once, or held.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check(&self) {
        let mut seen = vec![false; self.holders.len()];
        for &block in &self.free {
            assert!(!std::mem::replace(&mut seen[block.index()], true), "{block:?} is free twice");
            assert_eq!(self.holders[block.index()], 0, "{block:?} is free and held");
        }
        let held = self.holders.iter().filter(|&&holders| holders > 0).count();
        assert_eq!(self.free.len() + held, self.holders.len(), "free + held is not the pool");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pool_of(total: u32) -> BlockPool {
        BlockPool::try_new(total).expect("small")
    }

    #[test]
    fn a_refused_take_changes_nothing() {
        let mut pool = pool_of(3);
        let mut table = Vec::new();
        pool.take(2, &mut table).expect("three are free");
        let before = (pool.free.clone(), table.clone());
        assert_eq!(pool.take(2, &mut table), Err(Shortage { needed: 2, free: 1 }));
        assert_eq!((pool.free.clone(), table), before);
        pool.check();
    }

    #[test]
    fn giving_back_what_was_taken_restores_the_pool_exactly() {
        let mut pool = pool_of(8);
        let mut table = Vec::new();
        pool.take(5, &mut table).expect("eight are free");
        let before = format!("{pool:?}");
        let mut more = Vec::new();
        pool.take(3, &mut more).expect("three are free");
        pool.give_back(&more);
        assert_eq!(format!("{pool:?}"), before);
    }

    #[test]
    fn a_shared_block_is_free_after_its_last_holder() {
        let mut pool = pool_of(2);
        let mut table = Vec::new();
        pool.take(2, &mut table).expect("two are free");
        pool.share(&table[..1]);
        pool.give_back(&table);
        assert_eq!(pool.free(), 1);
        pool.give_back(&table[..1]);
        assert_eq!(pool.free(), 2);
        pool.check();
    }

    #[test]
    #[should_panic(expected = "which is free")]
    fn giving_back_a_free_block_stops_the_program() {
        pool_of(2).give_back(&[BlockId(1)]);
    }
}
