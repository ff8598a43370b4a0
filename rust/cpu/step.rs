//! A step as a device gets it: checked before anything of it is written.

use std::fmt;

use super::memory::OutOfMemory;

/// What a row reads back: its best token. 0 is nothing, and there is no other kind: see `reprieve.step`.
const READ_ARGMAX: u8 = 1;

/// An entry of a block table that was never written.
const NO_BLOCK: u32 = u32::MAX;

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
    /// [tokens] input token ids, row after row.
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
}

/// A step that can be computed.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct CheckedStep {
    pub token_ids: Vec<usize>,
    pub rows: Vec<StepRow>,
    /// For each token its row.
    pub row_of_token: Vec<usize>,
    /// The rows that are read back, in order.
    pub read_rows: Vec<usize>,
}

/// Tables as they were before a step.
#[derive(Debug)]
pub(crate) struct Saved(Vec<(usize, Vec<u32>)>);

/// The block tables of all slots.
#[derive(Debug)]
pub(crate) struct BlockTables {
    tables: Vec<Vec<u32>>,
}

impl BlockTables {
    pub(crate) fn new(num_slots: usize) -> Result<Self, OutOfMemory> {
        let mut tables = Vec::new();
        let bytes = num_slots as u128 * size_of::<Vec<u32>>() as u128;
        tables.try_reserve_exact(num_slots).map_err(|_| OutOfMemory { bytes })?;
        tables.resize(num_slots, Vec::new());
        Ok(Self { tables })
    }

    /// The blocks of the sequence in `slot`, in order.
    pub(crate) fn get(&self, slot: usize) -> &[u32] {
        &self.tables[slot]
    }

    /// Checks `step` and applies its changes; a refused step leaves no trace. Gives back what `restore` undoes them by.
    ///
    /// A change at index 0 begins the table of a slot's new sequence, so what the slot knew before is forgotten.
    pub(crate) fn admit(&mut self, step: &StepArrays, limits: StepLimits) -> Result<(CheckedStep, Saved), Refusal> {
        let rows = check_rows(step, limits)?;
        check_tokens(step, &rows, limits)?;
        let changes = check_changes(step, limits)?;
        let saved = self.apply(&changes);
        if let Err(refusal) = self.check_covered(&rows, limits).and_then(|()| self.check_places(&rows, limits)) {
            self.restore(saved);
            return Err(refusal);
        }
        let checked = CheckedStep {
            token_ids: step.token_ids.iter().map(|&id| checked(id)).collect(),
            row_of_token: rows.iter().enumerate().flat_map(|(row, it)| std::iter::repeat_n(row, it.num_new)).collect(),
            read_rows: (0..rows.len()).filter(|&row| rows[row].is_read).collect(),
            rows,
        };
        Ok((checked, saved))
    }

    /// Takes the changes of an admitted step back.
    pub(crate) fn restore(&mut self, saved: Saved) {
        for (slot, table) in saved.0 {
            self.tables[slot] = table;
        }
    }

    /// Applies changes and returns the tables that they touch as they were before.
    fn apply(&mut self, changes: &[(usize, usize, u32)]) -> Saved {
        let mut touched: Vec<usize> = changes.iter().map(|&(slot, ..)| slot).collect();
        touched.sort_unstable();
        touched.dedup();
        let saved = Saved(touched.into_iter().map(|slot| (slot, self.tables[slot].clone())).collect());
        for &(slot, index, _) in changes {
            if index == 0 {
                self.tables[slot].clear();
            }
        }
        for &(slot, index, block) in changes {
            let table = &mut self.tables[slot];
            if table.len() <= index {
                table.resize(index + 1, NO_BLOCK);
            }
            table[index] = block;
        }
        saved
    }

    fn check_covered(&self, rows: &[StepRow], limits: StepLimits) -> Result<(), Refusal> {
        for row in rows {
            let kv_length = row.start + row.num_new;
            let table = &self.tables[row.slot];
            let is_unknown = |index: &usize| table.get(*index).is_none_or(|&block| block == NO_BLOCK);
            let unknown: Vec<usize> = (0..kv_length.div_ceil(limits.block_size)).filter(is_unknown).collect();
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
        let written = |row: &StepRow| {
            let blocks = row.start / limits.block_size..(row.start + row.num_new).div_ceil(limits.block_size);
            self.tables[row.slot][blocks].iter().copied()
        };
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

/// Checks what is said per row.
fn check_rows(step: &StepArrays, limits: StepLimits) -> Result<Vec<StepRow>, Refusal> {
    let num_rows = step.slots.len();
    if num_rows == 0 {
        return Err(Refusal { field: "step", problem: "has no rows".into() });
    }
    for (field, len) in [
        ("step.starts", step.starts.len()),
        ("step.num_new", step.num_new.len()),
        ("step.kv_lengths", step.kv_lengths.len()),
        ("step.readback", step.readback.len()),
    ] {
        if len != num_rows {
            return Err(Refusal { field, problem: format!("has {len} rows, step.slots {num_rows}") });
        }
    }
    check_range("step.slots", &step.slots, 0, limits.num_slots)?;
    if !step.slots.is_sorted_by(|a, b| a < b) {
        let problem = format!("must ascend, each slot once: {:?}", step.slots);
        return Err(Refusal { field: "step.slots", problem });
    }
    let max_positions = limits.context_length.min(limits.num_blocks.saturating_mul(limits.block_size));
    check_range("step.starts", &step.starts, 0, max_positions)?;
    check_range("step.num_new", &step.num_new, 1, max_positions.saturating_add(1))?;
    check_range("step.kv_lengths", &step.kv_lengths, 1, max_positions.saturating_add(1))?;
    let lengths = step.starts.iter().zip(&step.num_new).map(|(&start, &new)| i64::from(start) + i64::from(new));
    if !lengths.eq(step.kv_lengths.iter().map(|&length| i64::from(length))) {
        let problem =
            format!("must be starts + num_new, {:?} + {:?}: {:?}", step.starts, step.num_new, step.kv_lengths);
        return Err(Refusal { field: "step.kv_lengths", problem });
    }
    let unknown: Vec<u8> = step.readback.iter().copied().filter(|&kind| kind > READ_ARGMAX).collect();
    if !unknown.is_empty() {
        return Err(Refusal { field: "step.readback", problem: format!("unknown kinds {unknown:?}") });
    }
    let mut first_token = 0;
    let mut rows = Vec::with_capacity(num_rows);
    for row in 0..num_rows {
        let num_new = checked(step.num_new[row]);
        rows.push(StepRow {
            slot: checked(step.slots[row]),
            first_token,
            start: checked(step.starts[row]),
            num_new,
            is_read: step.readback[row] == READ_ARGMAX,
        });
        first_token += num_new;
    }
    Ok(rows)
}

/// Checks what is said per token.
fn check_tokens(step: &StepArrays, rows: &[StepRow], limits: StepLimits) -> Result<(), Refusal> {
    let total: usize = rows.iter().map(|row| row.num_new).sum();
    let num_tokens = step.token_ids.len();
    if total != num_tokens {
        let problem = format!("adds up to {total} tokens, token_ids has {num_tokens}");
        return Err(Refusal { field: "step.num_new", problem });
    }
    if step.positions.len() != num_tokens {
        let problem = format!("has {} tokens, token_ids {num_tokens}", step.positions.len());
        return Err(Refusal { field: "step.positions", problem });
    }
    check_range("step.token_ids", &step.token_ids, 0, limits.vocab_size)?;
    let expected = rows.iter().flat_map(|row| row.start..row.start + row.num_new);
    for (token, (&position, expected)) in step.positions.iter().zip(expected).enumerate() {
        if usize::try_from(position) != Ok(expected) {
            let problem = format!("must count from each row's start: token {token} is at {expected}, not {position}");
            return Err(Refusal { field: "step.positions", problem });
        }
    }
    Ok(())
}

fn check_changes(step: &StepArrays, limits: StepLimits) -> Result<Vec<(usize, usize, u32)>, Refusal> {
    for (column, field, end) in [
        (0, "step.table_changes (slot)", limits.num_slots),
        (1, "step.table_changes (index)", limits.num_blocks),
        (2, "step.table_changes (block)", limits.num_blocks),
    ] {
        let values: Vec<i32> = step.table_changes.iter().map(|change| change[column]).collect();
        check_range(field, &values, 0, end)?;
    }
    let change = |&[slot, index, block]: &[i32; 3]| (checked(slot), checked(index), block.unsigned_abs());
    Ok(step.table_changes.iter().map(change).collect())
}

fn check_range(field: &'static str, values: &[i32], lowest: i32, end: usize) -> Result<(), Refusal> {
    let is_bad = |value: &i32| *value < lowest || usize::try_from(*value).is_ok_and(|value| value >= end);
    let bad: Vec<i32> = values.iter().copied().filter(is_bad).take(8).collect();
    if bad.is_empty() {
        return Ok(());
    }
    let problem = format!("must be from {lowest} to {}, not {bad:?}", i128::try_from(end).unwrap_or(i128::MAX) - 1);
    Err(Refusal { field, problem })
}

/// A number that was checked not to be negative.
fn checked(value: i32) -> usize {
    usize::try_from(value).expect("it is checked first that it is not negative")
}

#[cfg(test)]
mod tests {
    use super::*;

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
            readback: vec![READ_ARGMAX; rows.len()],
            table_changes: table_changes.to_vec(),
        }
    }

    fn tables() -> BlockTables {
        BlockTables::new(LIMITS.num_slots).expect("little memory")
    }

    #[test]
    fn a_step_knows_its_rows_and_its_tables() {
        let mut tables = tables();
        let mut first = step(&[(1, 0, 5), (3, 0, 1)], &[[1, 0, 7], [1, 1, 2], [3, 0, 0]]);
        first.readback[0] = 0;
        let (checked, _) = tables.admit(&first, LIMITS).expect("it is sound");
        assert_eq!(tables.get(1), [7, 2]);
        assert_eq!(checked.row_of_token, [0, 0, 0, 0, 0, 1]);
        assert_eq!(checked.read_rows, [1]);
        assert_eq!(checked.rows[1], StepRow { slot: 3, first_token: 5, start: 0, num_new: 1, is_read: true });
        // A change at index 0 is another sequence's beginning.
        let refused = tables.admit(&step(&[(1, 4, 1)], &[[1, 0, 5]]), LIMITS).expect_err("one block of two is gone");
        assert_eq!(refused.problem, "slot 1 needs blocks for 5 positions, its table lacks entries [1]");
    }

    #[test]
    fn a_refused_step_and_one_taken_back_leave_the_tables_as_they_were() {
        let mut tables = tables();
        tables.admit(&step(&[(0, 0, 4), (2, 0, 8)], &[[0, 0, 1], [2, 0, 3], [2, 1, 4]]), LIMITS).expect("sound");
        let before = tables.tables.clone();
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
        ];
        for (refused, field) in refusals {
            assert_eq!(tables.admit(&refused, LIMITS).expect_err("it is not sound").field, field, "{refused:?}");
            assert_eq!(tables.tables, before);
        }
        let (_, saved) = tables.admit(&step(&[(0, 0, 1)], &[[0, 0, 5]]), LIMITS).expect("another sequence");
        assert_ne!(tables.tables, before);
        tables.restore(saved);
        assert_eq!(tables.tables, before);
    }

    #[test]
    fn blocks_that_are_only_read_may_be_shared() {
        let mut tables = tables();
        let changes = [[0, 0, 1], [0, 1, 2], [1, 0, 1], [1, 1, 3]];
        tables.admit(&step(&[(0, 4, 1), (1, 4, 1)], &changes), LIMITS).expect("block 1 is written by nobody");
    }
}
