//! The settings of the books.

use crate::error::{BooksError, Problem};
use crate::victim::Policy;

/// What the books are told once.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Blocks in the pool.
    pub num_blocks: u32,
    /// Positions in a block.
    pub block_size: u32,
    /// Most sequences resident at once.
    pub num_slots: u32,
    /// Most positions of a sequence.
    pub context_length: u32,
    /// Token ids are below it.
    pub vocab_size: u32,
    /// Tokens a step aims at.
    pub step_tokens: u32,
    /// Rows that a device computes at once; the least that a chunk is given.
    pub row_tile: u32,
    /// Blocks that must stay free per resident sequence when one comes in.
    pub head_room: u32,
    /// Tokens a resumed sequence generates before it can be a victim again.
    pub immunity_tokens: u64,
    /// Who gives way.
    pub policy: Policy,
    /// Whether constrained sequences may be victims.
    pub park_constrained: bool,
}

impl Settings {
    /// Most tokens in one step: every slot decodes but one, whose chunk is a whole tile even over the budget.
    #[must_use]
    pub fn most_step_tokens(&self) -> u32 {
        self.step_tokens.max(self.num_slots - 1 + self.row_tile)
    }

    /// Refuses what no ledger can be made from.
    ///
    /// # Errors
    /// [`BooksError::Invalid`] that names the setting.
    pub fn validate(&self) -> Result<(), BooksError> {
        // Device arrays are of i32; slots and tiles are added up.
        const MOST: u64 = i32::MAX as u64;
        let bounds = [
            ("num_blocks", self.num_blocks, 1, MOST),
            ("block_size", self.block_size, 1, MOST),
            ("num_slots", self.num_slots, 1, 1 << 20),
            ("context_length", self.context_length, 1, MOST),
            ("vocab_size", self.vocab_size, 1, MOST),
            ("step_tokens", self.step_tokens, 1, 1 << 24),
            ("row_tile", self.row_tile, 1, 1 << 16),
            ("head_room", self.head_room, 0, MOST),
        ];
        for (field, value, least, most) in bounds {
            let given = u64::from(value);
            if given < least {
                return Err(BooksError::invalid(field, Problem::TooSmall { given, least }));
            }
            if given > most {
                return Err(BooksError::invalid(field, Problem::TooLarge { given, most }));
            }
        }
        Ok(())
    }
}
