//! A step as a device gets it, and as its threads do: checked, with all that it needs.

use std::fmt;
use std::ops::Range;

/// A step cannot be computed: the argument, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// Such as "step.slots".
    pub field: &'static str,
    /// With the numbers.
    pub problem: String,
}

impl fmt::Display for Refusal {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} {}", self.field, self.problem)
    }
}

impl std::error::Error for Refusal {}

/// The arrays of a step, as `reprieve.step.StepBuffers` describes them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepArrays {
    /// [tokens] input token ids, row after row; -1 in a row of one token is the slot's feed cell.
    pub token_ids: Vec<i32>,
    /// [tokens] position of each in its sequence.
    pub positions: Vec<i32>,
    /// [rows], ascending.
    pub slots: Vec<i32>,
    /// [rows] position of the row's first token.
    pub starts: Vec<i32>,
    /// [rows] tokens of the row.
    pub num_new: Vec<i32>,
    /// [rows] KV positions once the step is done.
    pub kv_lengths: Vec<i32>,
    /// [rows] what is read back: 0 is nothing, 1 the best token.
    pub readback: Vec<u8>,
    /// (slot, index in the slot's block table, block).
    pub table_changes: Vec<[i32; 3]>,
    /// (row, token id, the last input token after which it must not be chosen; -1 is always), rows ascending.
    pub bans: Vec<[i32; 3]>,
    /// The row of each mask, ascending.
    pub mask_rows: Vec<i32>,
    /// [masks, words] bit v % 32 of word v / 32 says whether token v is allowed.
    pub masks: Vec<u32>,
    /// [masks, words].
    pub masks_shape: [usize; 2],
}

/// What a device has: counts of slots and blocks, positions in a block and in a sequence at most, token ids.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepLimits {
    /// Slots.
    pub num_slots: usize,
    /// Blocks of the pool.
    pub num_blocks: usize,
    /// Positions in a block.
    pub block_size: usize,
    /// Positions of a sequence at most.
    pub context_length: usize,
    /// Token ids.
    pub vocab_size: usize,
}

/// One row of a step that was checked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepRow {
    pub slot: usize,
    /// Number of its first token in the step.
    pub first_token: usize,
    /// Position of its first token in the sequence.
    pub start: usize,
    pub num_new: usize,
    pub is_read: bool,
    /// Where its blocks begin among those of the step.
    pub first_block: usize,
    pub num_blocks: usize,
}

impl StepRow {
    /// Blocks that it writes, by their place in its table.
    pub(super) fn written(&self, block_size: usize) -> Range<usize> {
        self.start / block_size..(self.start + self.num_new).div_ceil(block_size)
    }
}

/// An input token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Input {
    /// The host knows it.
    Given(usize),
    /// It lies in the feed cell of the row's slot.
    Fed,
}

/// A token that a row must not choose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ban {
    pub row: usize,
    pub token: usize,
    /// Holds only if this is the row's last input token; always where there is none.
    pub after: Option<usize>,
}

/// A step that can be computed, with all that it needs: the tables may change for later steps meanwhile.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckedStep {
    /// (slot, index in the slot's block table, block).
    pub changes: Vec<(usize, usize, u32)>,
    pub inputs: Vec<Input>,
    pub rows: Vec<StepRow>,
    /// For each token its row.
    pub row_of_token: Vec<usize>,
    /// The rows that are read back, in order.
    pub read_rows: Vec<usize>,
    /// The blocks of each row's positions, row after row.
    pub blocks: Vec<u32>,
    /// Rows ascend.
    pub bans: Vec<Ban>,
    /// Rows that have a mask, ascending.
    pub mask_rows: Vec<usize>,
    /// One after another.
    pub masks: Vec<u32>,
}

impl CheckedStep {
    /// The blocks of the positions of row `row`, in order.
    pub(crate) fn table(&self, row: usize) -> &[u32] {
        let StepRow { first_block, num_blocks, .. } = self.rows[row];
        &self.blocks[first_block..first_block + num_blocks]
    }

    /// The last input of row `row`.
    pub(crate) fn last_input(&self, row: usize) -> Input {
        let StepRow { first_token, num_new, .. } = self.rows[row];
        self.inputs[first_token + num_new - 1]
    }

    /// The bans of row `row`.
    pub(crate) fn bans_of(&self, row: usize) -> &[Ban] {
        let first = self.bans.partition_point(|ban| ban.row < row);
        let count = self.bans[first..].partition_point(|ban| ban.row == row);
        &self.bans[first..first + count]
    }

    /// The mask of row `row`, if it has one.
    pub(crate) fn mask_of(&self, row: usize) -> Option<&[u32]> {
        let words = self.masks.len().checked_div(self.mask_rows.len())?;
        let index = self.mask_rows.binary_search(&row).ok()?;
        Some(&self.masks[index * words..(index + 1) * words])
    }

    /// The rows whose input comes from the feed cell.
    pub(crate) fn fed_rows(&self) -> impl Iterator<Item = &StepRow> {
        self.rows.iter().filter(|row| self.inputs[row.first_token] == Input::Fed)
    }
}
