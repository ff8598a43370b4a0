//! Who comes in, who gives way, and which rows the next step has. Reads the ledger; changes nothing but its plan.

use crate::error::BooksError;
use crate::ids::{SeqId, blocks_for};
use crate::ledger::{Ledger, ParkBy, Readback, Row, Sequence, State};
use crate::victim::Candidate;

/// Who comes in next, and who is parked first so that it fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrivalPlan {
    /// The head of the waiting order.
    pub seq: SeqId,
    /// Sequences of lower priority to park, in this order and in these ways. Usually none.
    pub victims: Vec<(SeqId, ParkBy)>,
}

/// What is free, or would be after some parks.
#[derive(Debug, Clone, Copy)]
struct Room {
    slots: u32,
    blocks: u32,
    residents: u32,
    /// Blocks by which the decode rows of this step grow, and the first decode rows of those that replay.
    growth: u32,
    /// Blocks that stay free for each resident.
    spare: u32,
    block_size: u32,
}

impl Room {
    fn of(ledger: &Ledger) -> Self {
        let block_size = ledger.settings().block_size;
        Self {
            slots: ledger.free_slots(),
            blocks: ledger.blocks().free(),
            residents: ledger.num_residents(),
            growth: ledger.residents().map(|sequence| sequence.coming_growth(block_size)).sum(),
            spare: ledger.settings().head_room,
            block_size,
        }
    }

    /// The one rule of what fits: all blocks of the prompt or history, the growth of this step's decode rows, and
    /// head-room for every resident. Alone, the blocks are enough.
    ///
    /// Who comes back has to have room for its next token too, and keeps it while it replays: with no head-room it
    /// would otherwise replay its whole history, need one block, and give way again, over and over.
    fn fits(&self, newcomer: &Sequence) -> bool {
        let own = u64::from(blocks_for(newcomer.target(), self.block_size));
        let free = u64::from(self.blocks);
        if self.slots == 0 {
            return false;
        }
        if self.residents == 0 {
            return own <= free;
        }
        let growth = u64::from(self.growth + newcomer.coming_growth(self.block_size));
        let head_room = u64::from(self.spare) * (u64::from(self.residents) + 1);
        own + growth + head_room <= free
    }

    fn without(&mut self, victim: &Sequence, frees: u32) {
        self.slots += 1;
        self.blocks += frees;
        self.residents -= 1;
        self.growth -= victim.coming_growth(self.block_size);
    }
}

/// The head of the waiting order, if it fits now or after parking the fewest of lower priority.
#[must_use]
pub fn next_arrival(ledger: &Ledger, spill_blocks: u32) -> Option<ArrivalPlan> {
    let head = ledger.waiting().next()?;
    let mut room = Room::of(ledger);
    let mut plan = ArrivalPlan { seq: head.id(), victims: Vec::new() };
    if room.fits(head) {
        return Some(plan);
    }
    let below = |candidate: &Candidate| candidate.priority < head.priority();
    let mut candidates: Vec<Candidate> = ledger.candidates(spill_blocks).filter(below).collect();
    ledger.settings().policy.sort(&mut candidates);
    let mut spill_left = spill_blocks;
    for candidate in candidates {
        let victim = ledger.get(candidate.seq).expect("a candidate is live");
        let by = if victim.can_spill(room.block_size, spill_left) {
            spill_left -= victim.image_blocks(room.block_size);
            ParkBy::Spill
        } else if victim.can_replay() {
            ParkBy::Replay
        } else {
            continue; // those before it used up the budget that its image needs
        };
        room.without(victim, candidate.frees);
        plan.victims.push((candidate.seq, by));
        if room.fits(head) {
            return Some(plan);
        }
    }
    None
}

/// Picks the rows of the next step into the ledger's plan; returns how many there are.
///
/// # Errors
/// [`BooksError::Misused`] while a step is reserved or in flight.
pub fn pick_rows(ledger: &mut Ledger) -> Result<usize, BooksError> {
    ledger.plan(choose_rows)
}

/// Decodes first, then at least one row tile for the oldest prefill or replay, then more chunks, oldest first.
fn choose_rows(ledger: &Ledger, rows: &mut Vec<Row>) {
    let block_size = ledger.settings().block_size;
    let mut unfinished = Vec::new();
    for (key, sequence) in ledger.resident_keys() {
        if sequence.state() == State::Decoding {
            rows.push(Row {
                key,
                seq: sequence.id(),
                slot: sequence.slot().expect("a resident has a slot"),
                start: sequence.committed(),
                num_new: 1,
                readback: Readback::Argmax,
                growth: sequence.growth(block_size),
            });
        } else {
            unfinished.push((sequence.id(), key));
        }
    }
    if unfinished.is_empty() {
        return; // already in slot order
    }
    unfinished.sort_unstable();
    let decodes = u32::try_from(rows.len()).expect("at most one row a slot");
    let mut left = ledger.settings().step_tokens.saturating_sub(decodes);
    let mut least = ledger.settings().row_tile;
    for (seq, key) in unfinished {
        let sequence = ledger.get(seq).expect("a resident is live");
        let remaining = sequence.target() - sequence.committed();
        let num_new = remaining.min(left.max(std::mem::take(&mut least)));
        if num_new == 0 {
            break;
        }
        left = left.saturating_sub(num_new);
        let samples = num_new == remaining && sequence.generated() == 0;
        rows.push(Row {
            key,
            seq,
            slot: sequence.slot().expect("a resident has a slot"),
            start: sequence.committed(),
            num_new,
            readback: if samples { Readback::Argmax } else { Readback::Nothing },
            growth: 0, // a chunk's blocks were taken when it came in
        });
    }
    rows.sort_unstable_by_key(|row| row.slot);
}

/// The sequence that gives way so that the next step fits; None if nobody can. The only resident never does.
#[must_use]
pub fn victim(ledger: &Ledger, spill_blocks: u32) -> Option<SeqId> {
    if ledger.num_residents() < 2 {
        return None;
    }
    let candidates: Vec<Candidate> = ledger.candidates(spill_blocks).collect();
    ledger.settings().policy.choose(&candidates)
}

/// Of the sequences whose next row needs a block, the first in the order of giving way.
#[must_use]
pub fn capacity_row(ledger: &Ledger) -> Option<SeqId> {
    let block_size = ledger.settings().block_size;
    let grows = |seq: SeqId| ledger.get(seq).is_ok_and(|sequence| sequence.growth(block_size) > 0);
    let candidates: Vec<Candidate> = ledger.resident_candidates().filter(|candidate| grows(candidate.seq)).collect();
    ledger.settings().policy.choose(&candidates)
}
