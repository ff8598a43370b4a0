//! Checks that a step can be computed, before anything of it is written.

use super::step::{Ban, CheckedStep, Input, Refusal, StepArrays, StepLimits, StepRow};

/// What a row reads back: its best token. 0 is nothing, and there is no other kind: see `reprieve.step`.
const READ_ARGMAX: u8 = 1;

/// An input token that the host does not know yet: the newest one that was read back in the row's slot.
const FROM_FEED: i32 = -1;

/// Of a ban: it holds whatever the row's input is.
const ALWAYS: i32 = -1;

/// Checks all that a step says of itself. What has to do with what is known of its slots, and the blocks of its rows,
/// come later: see `BlockTables::admit`.
pub(super) fn checked_step(step: StepArrays, limits: StepLimits) -> Result<CheckedStep, Refusal> {
    let rows = check_rows(&step, limits)?;
    check_tokens(&step, &rows, limits)?;
    let bans = check_bans(&step, limits)?;
    let mask_rows = check_masks(&step, limits)?;
    let changes = check_changes(&step.table_changes, limits)?;
    let input = |&id: &i32| if id == FROM_FEED { Input::Fed } else { Input::Given(checked(id)) };
    Ok(CheckedStep {
        changes,
        inputs: step.token_ids.iter().map(input).collect(),
        row_of_token: rows.iter().enumerate().flat_map(|(row, it)| std::iter::repeat_n(row, it.num_new)).collect(),
        read_rows: (0..rows.len()).filter(|&row| rows[row].is_read).collect(),
        blocks: Vec::new(),
        rows,
        bans,
        mask_rows,
        masks: step.masks,
    })
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
    let (mut first_token, mut first_block) = (0, 0);
    let mut rows = Vec::with_capacity(num_rows);
    for row in 0..num_rows {
        let num_new = checked(step.num_new[row]);
        let num_blocks = checked(step.kv_lengths[row]).div_ceil(limits.block_size);
        rows.push(StepRow {
            slot: checked(step.slots[row]),
            first_token,
            start: checked(step.starts[row]),
            num_new,
            is_read: step.readback[row] == READ_ARGMAX,
            first_block,
            num_blocks,
        });
        first_token += num_new;
        first_block += num_blocks;
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
    for (index, row) in rows.iter().enumerate().filter(|(_, row)| row.num_new > 1) {
        if step.token_ids[row.first_token..row.first_token + row.num_new].contains(&FROM_FEED) {
            let problem =
                format!("may be {FROM_FEED}, from the feed cell, in a row of 1 token; row {index} has {}", row.num_new);
            return Err(Refusal { field: "step.token_ids", problem });
        }
    }
    let given: Vec<i32> = step.token_ids.iter().copied().filter(|&id| id != FROM_FEED).collect();
    check_range("step.token_ids", &given, 0, limits.vocab_size)?;
    let expected = rows.iter().flat_map(|row| row.start..row.start + row.num_new);
    for (token, (&position, expected)) in step.positions.iter().zip(expected).enumerate() {
        if usize::try_from(position) != Ok(expected) {
            let problem = format!("must count from each row's start: token {token} is at {expected}, not {position}");
            return Err(Refusal { field: "step.positions", problem });
        }
    }
    Ok(())
}

/// Checks what is said per ban.
fn check_bans(step: &StepArrays, limits: StepLimits) -> Result<Vec<Ban>, Refusal> {
    let column = |column: usize| step.bans.iter().map(|ban| ban[column]).collect::<Vec<i32>>();
    let rows = column(0);
    check_range("step.bans (row)", &rows, 0, step.slots.len())?;
    if !rows.is_sorted() {
        return Err(Refusal { field: "step.bans (row)", problem: format!("must ascend: {rows:?}") });
    }
    check_range("step.bans (token id)", &column(1), 0, limits.vocab_size)?;
    check_range("step.bans (after)", &column(2), ALWAYS, limits.vocab_size)?;
    let ban = |&[row, token, after]: &[i32; 3]| Ban {
        row: checked(row),
        token: checked(token),
        after: (after != ALWAYS).then(|| checked(after)),
    };
    Ok(step.bans.iter().map(ban).collect())
}

/// Checks what is said per mask.
fn check_masks(step: &StepArrays, limits: StepLimits) -> Result<Vec<usize>, Refusal> {
    check_range("step.mask_rows", &step.mask_rows, 0, step.slots.len())?;
    if !step.mask_rows.is_sorted_by(|a, b| a < b) {
        let problem = format!("must ascend, each row once: {:?}", step.mask_rows);
        return Err(Refusal { field: "step.mask_rows", problem });
    }
    let [masks, words] = step.masks_shape;
    if masks != step.mask_rows.len() || masks.checked_mul(words) != Some(step.masks.len()) {
        let problem = format!("has {masks} masks, step.mask_rows {}", step.mask_rows.len());
        return Err(Refusal { field: "step.masks", problem });
    }
    let needed = limits.vocab_size.div_ceil(32);
    if masks > 0 && words < needed {
        let problem = format!("must have at least {needed} words for {} token ids, not {words}", limits.vocab_size);
        return Err(Refusal { field: "step.masks", problem });
    }
    Ok(step.mask_rows.iter().map(|&row| checked(row)).collect())
}

/// Checks the changes of block tables: (slot, index, block).
fn check_changes(changes: &[[i32; 3]], limits: StepLimits) -> Result<Vec<(usize, usize, u32)>, Refusal> {
    for (column, field, end) in [
        (0, "step.table_changes (slot)", limits.num_slots),
        (1, "step.table_changes (index)", limits.num_blocks),
        (2, "step.table_changes (block)", limits.num_blocks),
    ] {
        let values: Vec<i32> = changes.iter().map(|change| change[column]).collect();
        check_range(field, &values, 0, end)?;
    }
    let change = |&[slot, index, block]: &[i32; 3]| (checked(slot), checked(index), block.unsigned_abs());
    Ok(changes.iter().map(change).collect())
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
