//! The block tables of all slots, as the newest launched step left them, and whether a slot's feed cell has a token.

use super::memory::OutOfMemory;
use super::step::{CheckedStep, Refusal, StepArrays, StepLimits, StepRow};
use super::step_check::checked_step;

/// An entry of a block table that was never written.
const NO_BLOCK: u32 = u32::MAX;

/// What is known of the sequence in a slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Slot {
    /// Its blocks in order.
    table: Vec<u32>,
    /// Something of it is read back, by a step that was launched.
    is_read: bool,
}

/// Slots as they were before a step.
#[derive(Debug)]
pub(crate) struct Saved(Vec<(usize, Slot)>);

/// The block tables of all slots.
#[derive(Debug)]
pub(crate) struct BlockTables {
    slots: Vec<Slot>,
}

impl BlockTables {
    pub(crate) fn new(num_slots: usize) -> Result<Self, OutOfMemory> {
        let mut slots = Vec::new();
        let bytes = num_slots as u128 * size_of::<Slot>() as u128;
        slots.try_reserve_exact(num_slots).map_err(|_| OutOfMemory { bytes })?;
        slots.resize(num_slots, Slot::default());
        Ok(Self { slots })
    }

    /// Checks `step` and applies its changes; a refused step leaves no trace. Gives back what `restore` undoes them by.
    ///
    /// A change at index 0 begins the table of a slot's new sequence, so what the slot knew before is forgotten.
    pub(crate) fn admit(&mut self, step: StepArrays, limits: StepLimits) -> Result<(CheckedStep, Saved), Refusal> {
        let mut checked = checked_step(step, limits)?;
        let saved = self.apply(&checked);
        if let Err(refusal) = self.check_slots(&checked, limits) {
            self.restore(saved);
            return Err(refusal);
        }
        for row in &checked.rows {
            let slot = &mut self.slots[row.slot];
            checked.blocks.extend_from_slice(&slot.table[..row.num_blocks]);
            slot.is_read |= row.is_read;
        }
        Ok((checked, saved))
    }

    /// Takes the changes of an admitted step back.
    pub(crate) fn restore(&mut self, saved: Saved) {
        for (slot, before) in saved.0 {
            self.slots[slot] = before;
        }
    }

    /// Applies changes and returns the slots that the step touches as they were before.
    fn apply(&mut self, step: &CheckedStep) -> Saved {
        let newly_read = step.rows.iter().filter(|row| row.is_read && !self.slots[row.slot].is_read);
        let mut touched: Vec<usize> =
            step.changes.iter().map(|&(slot, ..)| slot).chain(newly_read.map(|row| row.slot)).collect();
        touched.sort_unstable();
        touched.dedup();
        let saved = Saved(touched.into_iter().map(|slot| (slot, self.slots[slot].clone())).collect());
        for &(slot, index, _) in &step.changes {
            if index == 0 {
                self.slots[slot] = Slot::default();
            }
        }
        for &(slot, index, block) in &step.changes {
            let table = &mut self.slots[slot].table;
            if table.len() <= index {
                table.resize(index + 1, NO_BLOCK);
            }
            table[index] = block;
        }
        saved
    }

    /// Checks that the slots have what the step needs.
    fn check_slots(&self, step: &CheckedStep, limits: StepLimits) -> Result<(), Refusal> {
        self.check_covered(&step.rows)?;
        let unfed: Vec<usize> = step.fed_rows().map(|row| row.slot).filter(|&slot| !self.slots[slot].is_read).collect();
        if !unfed.is_empty() {
            let problem = format!(
                "must be known to the host in slots {unfed:?}: nothing was read back there since their tables began"
            );
            return Err(Refusal { field: "step.token_ids", problem });
        }
        self.check_places(&step.rows, limits)
    }

    fn check_covered(&self, rows: &[StepRow]) -> Result<(), Refusal> {
        for row in rows {
            let kv_length = row.start + row.num_new;
            let table = &self.slots[row.slot].table;
            let is_unknown = |index: &usize| table.get(*index).is_none_or(|&block| block == NO_BLOCK);
            let unknown: Vec<usize> = (0..row.num_blocks).filter(is_unknown).collect();
            if !unknown.is_empty() {
                let problem = format!(
                    "slot {} needs blocks for {kv_length} positions, its table lacks entries {unknown:?}",
                    row.slot
                );
                return Err(Refusal { field: "step.table_changes", problem });
            }
        }
        Ok(())
    }

    /// Checks that every token is written to a place of its own.
    fn check_places(&self, rows: &[StepRow], limits: StepLimits) -> Result<(), Refusal> {
        let written = |row: &StepRow| self.slots[row.slot].table[row.written(limits.block_size)].iter().copied();
        let mut blocks: Vec<u32> = rows.iter().flat_map(written).collect();
        blocks.sort_unstable();
        // A step has rows, and a row a token, so there is a block.
        if let Some((block, _)) = blocks.iter().zip(&blocks[1..]).find(|(one, other)| one == other) {
            let problem = format!("block {block} would be written for two places");
            return Err(Refusal { field: "step.table_changes", problem });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::step::{Ban, Input};

    const LIMITS: StepLimits =
        StepLimits { num_slots: 4, num_blocks: 8, block_size: 4, context_length: 24, vocab_size: 10 };

    /// Rows of (slot, start, tokens), with changes.
    fn step(rows: &[(i32, i32, i32)], table_changes: &[[i32; 3]]) -> StepArrays {
        let positions: Vec<i32> = rows.iter().flat_map(|&(_, start, new)| start..start + new).collect();
        StepArrays {
            token_ids: vec![1; positions.len()],
            positions,
            slots: rows.iter().map(|row| row.0).collect(),
            starts: rows.iter().map(|row| row.1).collect(),
            num_new: rows.iter().map(|row| row.2).collect(),
            kv_lengths: rows.iter().map(|row| row.1 + row.2).collect(),
            readback: vec![1; rows.len()],
            table_changes: table_changes.to_vec(),
            ..StepArrays::default()
        }
    }

    /// One token of each slot from its feed cell.
    fn fed(slots: &[i32], start: i32) -> StepArrays {
        let rows: Vec<(i32, i32, i32)> = slots.iter().map(|&slot| (slot, start, 1)).collect();
        StepArrays { token_ids: vec![-1; slots.len()], ..step(&rows, &[]) }
    }

    fn masked(rows: &[i32], masks_shape: [usize; 2], words: usize) -> StepArrays {
        StepArrays { mask_rows: rows.to_vec(), masks: vec![0; words], masks_shape, ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }
    }

    fn tables() -> BlockTables {
        BlockTables::new(LIMITS.num_slots).expect("little memory")
    }

    #[test]
    fn a_step_knows_its_rows_and_its_tables() {
        let mut tables = tables();
        let mut first = step(&[(1, 0, 5), (3, 0, 1)], &[[1, 0, 7], [1, 1, 2], [3, 0, 0]]);
        first.readback[0] = 0;
        let (checked, _) = tables.admit(first, LIMITS).expect("it is sound");
        assert_eq!(tables.slots[1].table, [7, 2]);
        assert_eq!([checked.table(0), checked.table(1)], [&[7, 2][..], &[0]]);
        assert_eq!(checked.row_of_token, [0, 0, 0, 0, 0, 1]);
        assert_eq!(checked.read_rows, [1]);
        assert_eq!(
            checked.rows[1],
            StepRow { slot: 3, first_token: 5, start: 0, num_new: 1, is_read: true, first_block: 2, num_blocks: 1 }
        );
        // A change at index 0 is another sequence's beginning.
        let refused = tables.admit(step(&[(1, 4, 1)], &[[1, 0, 5]]), LIMITS).expect_err("one block of two is gone");
        assert_eq!(refused.problem, "slot 1 needs blocks for 5 positions, its table lacks entries [1]");
    }

    #[test]
    fn a_refused_step_and_one_taken_back_leave_the_tables_as_they_were() {
        let mut tables = tables();
        tables.admit(step(&[(0, 0, 4), (2, 0, 8)], &[[0, 0, 1], [2, 0, 3], [2, 1, 4]]), LIMITS).expect("sound");
        let before = tables.slots.clone();
        let refusals = [
            (step(&[], &[]), "step"),
            (step(&[(0, 4, 1), (0, 5, 1)], &[[0, 1, 6]]), "step.slots"),
            (step(&[(4, 0, 1)], &[]), "step.slots"),
            (step(&[(0, 24, 1)], &[]), "step.starts"),
            (step(&[(0, 4, 0)], &[]), "step.num_new"),
            (step(&[(0, 4, 21)], &[]), "step.kv_lengths"),
            (step(&[(0, 4, 1)], &[[0, 1, 8]]), "step.table_changes (block)"),
            (step(&[(0, 4, 1)], &[[0, 8, 6]]), "step.table_changes (index)"),
            (step(&[(0, 4, 1)], &[[-1, 1, 6]]), "step.table_changes (slot)"),
            (step(&[(0, 4, 1)], &[[0, 2, 6]]), "step.table_changes"),
            (step(&[(0, 4, 1), (2, 8, 1)], &[[0, 1, 6], [2, 2, 6]]), "step.table_changes"),
            (step(&[(1, 0, 8)], &[[1, 0, 6], [1, 1, 6]]), "step.table_changes"),
            (StepArrays { token_ids: vec![10], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.token_ids"),
            (StepArrays { token_ids: vec![1; 2], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.num_new"),
            (StepArrays { positions: vec![5], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.positions"),
            (StepArrays { positions: vec![], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.positions"),
            (StepArrays { kv_lengths: vec![6], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.kv_lengths"),
            (StepArrays { readback: vec![2], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.readback"),
            (StepArrays { readback: vec![], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.readback"),
            (StepArrays { token_ids: vec![-1, 1], ..step(&[(0, 4, 2)], &[[0, 1, 6]]) }, "step.token_ids"),
            (StepArrays { token_ids: vec![-2], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.token_ids"),
            (StepArrays { token_ids: vec![-1], ..step(&[(0, 0, 1)], &[[0, 0, 6]]) }, "step.token_ids"),
            (StepArrays { bans: vec![[1, 0, -1]], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.bans (row)"),
            (
                StepArrays { bans: vec![[1, 0, -1], [0, 0, -1]], ..step(&[(0, 3, 1), (2, 7, 1)], &[]) },
                "step.bans (row)",
            ),
            (StepArrays { bans: vec![[0, 10, -1]], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.bans (token id)"),
            (StepArrays { bans: vec![[0, 9, -2]], ..step(&[(0, 4, 1)], &[[0, 1, 6]]) }, "step.bans (after)"),
            (masked(&[1], [1, 1], 1), "step.mask_rows"),
            (masked(&[0, 0], [2, 1], 2), "step.mask_rows"),
            (masked(&[0], [2, 1], 2), "step.masks"),
            (masked(&[0], [1, 0], 0), "step.masks"),
        ];
        for (refused, field) in refusals {
            assert_eq!(tables.admit(refused.clone(), LIMITS).expect_err("it is not sound").field, field, "{refused:?}");
            assert_eq!(tables.slots, before);
        }
        let (_, saved) = tables.admit(step(&[(0, 0, 1)], &[[0, 0, 5]]), LIMITS).expect("another sequence");
        assert_ne!(tables.slots, before);
        tables.restore(saved);
        assert_eq!(tables.slots, before);
    }

    #[test]
    fn blocks_that_are_only_read_may_be_shared() {
        let mut tables = tables();
        let changes = [[0, 0, 1], [0, 1, 2], [1, 0, 1], [1, 1, 3]];
        tables.admit(step(&[(0, 4, 1), (1, 4, 1)], &changes), LIMITS).expect("block 1 is written by nobody");
    }
    #[test]
    fn a_row_takes_its_input_from_the_feed_cell_once_its_sequence_was_read_back_there() {
        let mut tables = tables();
        let mut chunk = step(&[(0, 0, 4), (1, 0, 4)], &[[0, 0, 1], [0, 1, 2], [1, 0, 3], [1, 1, 4]]);
        chunk.readback[1] = 0;
        tables.admit(chunk, LIMITS).expect("sound");
        let refused = tables.admit(fed(&[0, 1], 4), LIMITS).expect_err("nothing was read back in slot 1");
        assert_eq!(
            refused.to_string(),
            "step.token_ids must be known to the host in slots [1]: nothing was read back there since their tables began"
        );
        let (checked, saved) = tables.admit(fed(&[0], 4), LIMITS).expect("slot 0 has a token");
        assert_eq!(checked.inputs, [Input::Fed]);
        tables.restore(saved);
        let (_, saved) = tables.admit(step(&[(1, 4, 1)], &[]), LIMITS).expect("sound");
        tables.restore(saved);
        tables.admit(fed(&[1], 5), LIMITS).expect_err("the step that would have read it was taken back");
        tables.admit(step(&[(0, 0, 1)], &[[0, 0, 5]]), LIMITS).expect("another sequence, which is read back at once");
        let mut begun = step(&[(0, 0, 1)], &[[0, 0, 5]]);
        begun.readback[0] = 0;
        tables.admit(begun, LIMITS).expect("and another");
        tables.admit(fed(&[0], 1), LIMITS).expect_err("what was read back was not of this sequence");
    }

    #[test]
    fn a_row_finds_its_bans_and_its_mask() {
        let mut tables = tables();
        let arrays = StepArrays {
            bans: vec![[0, 3, -1], [2, 4, 1], [2, 4, -1]],
            mask_rows: vec![1, 2],
            masks: vec![1, 2, 3, 4],
            masks_shape: [2, 2],
            ..step(&[(0, 0, 1), (1, 0, 1), (3, 0, 1)], &[[0, 0, 1], [1, 0, 2], [3, 0, 3]])
        };
        let (checked, _) = tables.admit(arrays, LIMITS).expect("sound");
        let counts: Vec<usize> = (0..3).map(|row| checked.bans_of(row).len()).collect();
        assert_eq!(counts, [1, 0, 2]);
        assert_eq!(checked.bans_of(2)[0], Ban { row: 2, token: 4, after: Some(1) });
        assert_eq!([0, 1, 2].map(|row| checked.mask_of(row)), [None, Some(&[1, 2][..]), Some(&[3, 4])]);
    }
}
