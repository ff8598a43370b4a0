//! Who comes in, who gives way, and which rows the next step has. Reads the ledger; changes nothing but its plan.

use crate::error::BooksError;
use crate::ids::{SeqId, blocks_for};
use crate::ledger::{Ledger, Next, ParkBy, Plan, Readback, Row, Sequence};
use crate::victim::{Candidate, Victim};

/// Who comes in next, and who is parked first so that it fits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArrivalPlan {
    /// The head of the waiting order.
    pub seq: SeqId,
    /// Sequences of lower priority to park, in this order and in these ways. Usually none.
    pub victims: Vec<(SeqId, ParkBy)>,
    /// A step in flight may make the parks needless, or needs who would be parked: settle it and ask again.
    pub settle_first: bool,
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
    context_length: u32,
}

impl Room {
    fn of(ledger: &Ledger) -> Self {
        let (block_size, context_length) = (ledger.settings().block_size, ledger.settings().context_length);
        Self {
            slots: ledger.free_slots(),
            blocks: ledger.blocks().free(),
            residents: ledger.num_residents(),
            growth: ledger.residents().map(|sequence| sequence.coming_growth(block_size, context_length)).sum(),
            spare: ledger.settings().head_room,
            block_size,
            context_length,
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
        let growth = u64::from(self.growth + newcomer.coming_growth(self.block_size, self.context_length));
        let head_room = u64::from(self.spare) * (u64::from(self.residents) + 1);
        own + growth + head_room <= free
    }

    fn without(&mut self, victim: &Sequence, frees: u32) {
        self.slots += 1;
        self.blocks += frees;
        self.residents -= 1;
        self.growth -= victim.coming_growth(self.block_size, self.context_length);
    }

    /// Counts what is fenced as free: it will be, and nobody needs to be parked for it.
    fn with_fenced(&mut self, ledger: &Ledger) {
        self.slots += ledger.fenced_slots();
        self.blocks += ledger.fenced_blocks();
    }
}

/// The head of the waiting order, if it fits now or after parking the fewest of lower priority.
#[must_use]
pub fn next_arrival(ledger: &Ledger, spill_blocks: u32) -> Option<ArrivalPlan> {
    let head = ledger.waiting().next()?;
    let mut room = Room::of(ledger);
    let mut plan = ArrivalPlan { seq: head.id(), victims: Vec::new(), settle_first: false };
    if room.fits(head) {
        return Some(plan);
    }
    room.with_fenced(ledger);
    if room.fits(head) {
        return None; // in a moment
    }
    let below = |candidate: &Candidate| candidate.priority < head.priority();
    let mut candidates: Vec<Candidate> = ledger.candidates(spill_blocks).filter(below).collect();
    ledger.settings().policy.sort(&mut candidates);
    plan.settle_first = ledger.settling_frees();
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
        plan.settle_first |= candidate.in_flight;
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
/// [`BooksError::Misused`] while a step is reserved.
pub fn pick_rows(ledger: &mut Ledger) -> Result<usize, BooksError> {
    ledger.plan(choose_rows)
}

/// Decodes first, then at least one row tile for the oldest prefill or replay, then more chunks, oldest first. Whoever's
/// next token needs the host sits out.
fn choose_rows(ledger: &Ledger, plan: &mut Plan) {
    let (block_size, context_length) = (ledger.settings().block_size, ledger.settings().context_length);
    let mut unfinished = Vec::new();
    for (key, sequence) in ledger.resident_keys() {
        match sequence.next(context_length) {
            Next::Chunk(remaining) => unfinished.push((sequence.id(), key, remaining)),
            Next::Over => {}
            Next::Decode if sequence.waits_for_host() => plan.sat_out.push(sequence.id()),
            Next::Decode => {
                let growth = sequence.growth(block_size, context_length);
                plan.rows.push(Row { readback: Readback::Argmax, growth, ..Row::of(key, sequence, 1) });
            }
        }
    }
    if unfinished.is_empty() {
        return; // already in slot order
    }
    unfinished.sort_unstable();
    let decodes = u32::try_from(plan.rows.len()).expect("at most one row a slot");
    let mut left = ledger.settings().step_tokens.saturating_sub(decodes);
    let mut least = ledger.settings().row_tile;
    for (seq, key, remaining) in unfinished {
        let sequence = ledger.get(seq).expect("a resident is live");
        let num_new = remaining.min(left.max(least));
        if num_new == 0 {
            break;
        }
        let samples = num_new == remaining && sequence.generated() == 0;
        if samples && sequence.waits_for_host() {
            plan.sat_out.push(seq);
            continue;
        }
        least = 0;
        left = left.saturating_sub(num_new);
        let readback = if samples { Readback::Argmax } else { Readback::Nothing };
        // A chunk's blocks were taken when it came in.
        plan.rows.push(Row { readback, growth: 0, ..Row::of(key, sequence, num_new) });
    }
    plan.rows.sort_unstable_by_key(|row| row.slot);
}

/// The sequence that gives way so that the next step fits. The only resident never does.
#[must_use]
pub fn victim(ledger: &Ledger, spill_blocks: u32) -> Victim {
    let nobody = if ledger.num_in_flight() > 0 { Victim::Settle } else { Victim::Nobody };
    if ledger.settling_frees() {
        return Victim::Settle;
    }
    if ledger.num_residents() < 2 {
        return nobody;
    }
    let candidates: Vec<Candidate> = ledger.candidates(spill_blocks).collect();
    match ledger.settings().policy.choose_settled(&candidates) {
        Victim::Nobody => nobody,
        choice => choice,
    }
}

/// Of the sequences whose next row needs a block, the first in the order of giving way.
#[must_use]
pub fn capacity_row(ledger: &Ledger) -> Option<SeqId> {
    let (block_size, context_length) = (ledger.settings().block_size, ledger.settings().context_length);
    let grows = |candidate: &Candidate| {
        ledger
            .get(candidate.seq)
            .is_ok_and(|sequence| sequence.growth(block_size, context_length) > 0 && !sequence.waits_for_host())
    };
    let candidates: Vec<Candidate> = ledger.resident_candidates().filter(grows).collect();
    ledger.settings().policy.choose(&candidates)
}
