//! Steps: picked, reserved, in flight one behind the other, and settled, the oldest first, or handed back, the newest first.

use std::collections::VecDeque;

use crate::error::{BooksError, Problem, Shortage};
use crate::ids::{SeqId, SlotId, TokenId};

use super::sequence::{Sequence, State};
use super::transitions::Reuse;
use super::{Key, Ledger};

/// An input token id that the host does not know yet: the newest one read back in the row's slot.
pub const FROM_FEED: i32 = -1;

/// What is read back of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Readback {
    /// Nothing: a chunk that samples no token.
    Nothing,
    /// The best token.
    Argmax,
}

/// One sequence's share of a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    pub(crate) key: Key,
    /// The residency of the sequence: when it came in.
    pub(crate) came_in: u64,
    /// The sequence.
    pub seq: SeqId,
    /// Its slot.
    pub slot: SlotId,
    /// Position of the row's first token.
    pub start: u32,
    /// Tokens in the row.
    pub num_new: u32,
    /// What is read back.
    pub readback: Readback,
    /// Blocks that the row takes when it is reserved.
    pub growth: u32,
}

impl Row {
    /// The next row of a resident sequence, of `num_new` tokens; nothing is read back and nothing grows.
    pub(crate) fn of(key: Key, sequence: &Sequence, num_new: u32) -> Self {
        Self {
            key,
            came_in: sequence.came_in,
            seq: sequence.id,
            slot: sequence.slot.expect("a resident has a slot"),
            start: sequence.reserved,
            num_new,
            readback: Readback::Nothing,
            growth: 0,
        }
    }

    /// Tokens that it gives: 0 or 1.
    fn gives(&self) -> u32 {
        u32::from(self.readback == Readback::Argmax)
    }
}

/// What a settled row came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Outcome {
    /// A chunk was committed, nothing was sampled.
    Chunk = 0,
    /// A token was committed; the sequence goes on.
    Token = 1,
    /// A stop id was committed; the sequence has ended.
    Stop = 2,
    /// A token was committed that uses up the budget or the context; the sequence has ended.
    Length = 3,
    /// No token was allowed; the sequence has ended.
    NothingAllowed = 4,
    /// All logits were NaN; the sequence has ended.
    Nan = 5,
    /// Its sequence had left before the step was settled: what was computed is discarded.
    OverRun = 6,
}

/// How much of the arrays a step uses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Counts {
    /// Rows.
    pub rows: usize,
    /// Tokens in all rows.
    pub tokens: usize,
    /// Newly written block-table entries.
    pub table_changes: usize,
    /// Banned ids of all rows.
    pub bans: usize,
}

/// The arrays that a step is written into, filled anew by each; `step.py` describes them. Their memory is kept.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct StepArrays {
    /// Input token ids, row after row; [`FROM_FEED`] where the host does not know it yet.
    pub token_ids: Vec<i32>,
    /// Position of each.
    pub positions: Vec<i32>,
    /// Sequence of each row.
    pub seqs: Vec<u64>,
    /// Slot of each row.
    pub slots: Vec<i32>,
    /// Position of each row's first token.
    pub starts: Vec<i32>,
    /// Tokens of each row.
    pub num_new: Vec<i32>,
    /// KV positions of each row's sequence once the step is done.
    pub kv_lengths: Vec<i32>,
    /// What is read back of each row.
    pub readback: Vec<u8>,
    /// Slot, index in its block table, block.
    pub table_changes: Vec<[i32; 3]>,
    /// Row, token id that it must not choose, and the input after which; [`super::ALWAYS`] whatever the input is.
    pub bans: Vec<[i32; 3]>,
}

/// What the next step is to be.
#[derive(Debug, Default)]
pub(crate) struct Plan {
    /// In ascending slot order.
    pub(crate) rows: Vec<Row>,
    /// Who is passed over as its next token needs the host.
    pub(crate) sat_out: Vec<SeqId>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Idle,
    Picked,
    Reserved,
}

/// A step that is reserved, or in flight.
#[derive(Debug, Default, PartialEq, Eq)]
struct Flight {
    rows: Vec<Row>,
    /// What `table_sent` of each row was before `fill`.
    sent_before: Vec<usize>,
}

/// The next step and how far it has come, and the steps in flight before it, oldest first.
#[derive(Debug, Default)]
pub(super) struct StepBook {
    phase: Phase,
    plan: Plan,
    sent_before: Vec<usize>,
    flights: VecDeque<Flight>,
    /// Empty: the memory of steps that are over, for those to come.
    spare: Vec<Flight>,
}

/// A plan is no state: two books are equal if only their plans differ, so that handing back compares equal.
impl PartialEq for StepBook {
    fn eq(&self, other: &Self) -> bool {
        let reserved = |book: &Self| book.phase == Phase::Reserved;
        let same_plan = self.plan.rows == other.plan.rows && self.sent_before == other.sent_before;
        self.flights == other.flights && reserved(self) == reserved(other) && (!reserved(self) || same_plan)
    }
}

impl Eq for StepBook {}

impl StepBook {
    pub(super) fn forget_plan(&mut self) {
        if self.phase == Phase::Picked {
            self.phase = Phase::Idle;
        }
    }

    /// Takes the reserved step out, and gives the next one memory to be planned in.
    fn take_reserved(&mut self) -> Flight {
        let Flight { rows, sent_before } = self.spare.pop().unwrap_or_default();
        self.phase = Phase::Idle;
        Flight {
            rows: std::mem::replace(&mut self.plan.rows, rows),
            sent_before: std::mem::replace(&mut self.sent_before, sent_before),
        }
    }

    /// Keeps the memory of a step that is over.
    fn recycle(&mut self, mut flight: Flight) {
        flight.rows.clear();
        flight.sent_before.clear();
        self.spare.push(flight);
    }

    pub(super) fn must_be_open(&self) -> Result<(), BooksError> {
        match self.phase {
            Phase::Idle | Phase::Picked => Ok(()),
            Phase::Reserved => Err(BooksError::Misused("a step is reserved: fill it or hand it back first")),
        }
    }
}

/// What a device answers for a row whose mask leaves nothing.
const NONE_ALLOWED: i32 = -1;

/// What a device answers for a row whose logits are all NaN.
const ALL_NAN: i32 = -2;

fn int(number: u32) -> i32 {
    i32::try_from(number).expect("the settings bound it by i32::MAX")
}

impl Ledger {
    /// Sets the rows of the next step, which `choose` writes; returns how many there are. Reserves nothing.
    ///
    /// # Errors
    /// [`BooksError::Misused`] while a step is reserved.
    pub(crate) fn plan(&mut self, choose: impl FnOnce(&Self, &mut Plan)) -> Result<usize, BooksError> {
        self.step.must_be_open()?;
        let mut plan = std::mem::take(&mut self.step.plan);
        plan.rows.clear();
        plan.sat_out.clear();
        choose(self, &mut plan);
        self.step.plan = plan;
        self.step.phase = Phase::Picked;
        Ok(self.step.plan.rows.len())
    }

    /// The rows that were picked last, in ascending slot order.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.step.plan.rows
    }

    /// Who was passed over when rows were picked last, as its next token needs the host.
    #[must_use]
    pub fn sat_out(&self) -> &[SeqId] {
        &self.step.plan.sat_out
    }

    /// Steps in flight.
    #[must_use]
    pub fn num_in_flight(&self) -> usize {
        self.step.flights.len()
    }

    /// All rows that are reserved or in flight.
    pub(super) fn rows_in_flight(&self) -> impl Iterator<Item = &Row> {
        let reserved = if self.step.phase == Phase::Reserved { self.rows() } else { &[] };
        self.step.flights.iter().flat_map(|flight| &flight.rows).chain(reserved)
    }

    /// Takes the blocks by which the picked rows grow, for all rows or for none.
    ///
    /// # Errors
    /// [`BooksError::Exhausted`]; [`BooksError::Misused`] without picked rows.
    pub fn reserve(&mut self) -> Result<(), BooksError> {
        if self.step.phase != Phase::Picked {
            return Err(BooksError::Misused("reserve: pick the rows first, and again after each change"));
        }
        let needed = self.step.plan.rows.iter().map(|row| row.growth).sum();
        let free = self.blocks.free();
        if needed > free {
            return Err(Shortage { needed, free }.into());
        }
        // Everything that can fail is above this line.
        self.step.phase = Phase::Reserved;
        self.step.sent_before.clear();
        for row in &self.step.plan.rows {
            let sequence = self.sequences[row.key].as_mut().expect("a picked row is live");
            self.blocks.take(row.growth, &mut sequence.table).expect("counted above");
            sequence.reserved += row.num_new;
            sequence.ahead += row.gives();
            sequence.in_flight += 1;
            self.step.sent_before.push(sequence.table_sent);
        }
        Ok(())
    }

    /// How much of the arrays the reserved step will use.
    ///
    /// # Errors
    /// [`BooksError::Misused`] if nothing is reserved.
    pub fn counts(&self) -> Result<Counts, BooksError> {
        if self.step.phase != Phase::Reserved {
            return Err(BooksError::Misused("fill: reserve the step first"));
        }
        let mut counts = Counts { rows: self.step.plan.rows.len(), tokens: 0, table_changes: 0, bans: 0 };
        for row in &self.step.plan.rows {
            let sequence = self.at(row.key);
            counts.tokens += row.num_new as usize;
            counts.table_changes += sequence.table.len() - sequence.table_sent;
            each_ban(row, sequence, |_, _| counts.bans += 1);
        }
        Ok(counts)
    }

    /// Writes the reserved step into `arrays`. It is in flight from here on, behind those that are already.
    ///
    /// # Errors
    /// [`BooksError::Misused`] if nothing is reserved.
    pub fn fill(&mut self, arrays: &mut StepArrays) -> Result<(), BooksError> {
        if self.step.phase != Phase::Reserved {
            return Err(BooksError::Misused("fill: reserve the step first"));
        }
        // Everything that can fail is above this line.
        arrays.clear();
        for (index, row) in self.step.plan.rows.iter().enumerate() {
            let sequence = self.sequences[row.key].as_mut().expect("a reserved row is live");
            let (slot, end) = (int(row.slot.0), row.start + row.num_new);
            arrays.seqs.push(row.seq.0);
            arrays.slots.push(slot);
            arrays.starts.push(int(row.start));
            arrays.num_new.push(int(row.num_new));
            arrays.kv_lengths.push(int(end));
            arrays.readback.push(u8::from(row.readback == Readback::Argmax));
            arrays.positions.extend(int(row.start)..int(end));
            match sequence.tokens.get(row.start as usize..end as usize) {
                Some(known) => arrays.token_ids.extend(known.iter().map(|&id| int(id))),
                None => arrays.token_ids.push(FROM_FEED), // only a row of one token feeds on what is in flight
            }
            for (entry, block) in sequence.table.iter().enumerate().skip(sequence.table_sent) {
                let entry = i32::try_from(entry).expect("within the pool");
                arrays.table_changes.push([slot, entry, int(block.0)]);
            }
            sequence.table_sent = sequence.table.len();
            let row_index = i32::try_from(index).expect("at most one row a slot");
            each_ban(row, sequence, |id, after| arrays.bans.push([row_index, int(id), after]));
        }
        let flight = self.step.take_reserved();
        self.step.flights.push_back(flight);
        Ok(())
    }

    /// Undoes `reserve` and `fill` of the newest step exactly; returns the sequences of its rows, over-runs left out.
    /// Nothing if there is nothing to undo.
    pub fn hand_back(&mut self) -> Vec<SeqId> {
        let step = &mut self.step;
        let flight = if step.phase == Phase::Reserved { Some(step.take_reserved()) } else { step.flights.pop_back() };
        let Some(flight) = flight else { return Vec::new() };
        self.step.forget_plan();
        let mut seqs = Vec::new();
        // Last taken, first given back: the free list is as it was.
        for (row, &sent_before) in flight.rows.iter().zip(&flight.sent_before).rev() {
            if self.is_current(row) {
                self.undo_row(row, sent_before);
                seqs.push(row.seq);
            } else {
                self.unfence(row.came_in);
            }
        }
        seqs.reverse();
        self.step.recycle(flight);
        seqs
    }

    /// How many rows the oldest step in flight has.
    ///
    /// # Errors
    /// [`BooksError::Misused`] with no step in flight.
    pub fn in_flight(&self) -> Result<usize, BooksError> {
        let oldest = self.step.flights.front().ok_or(BooksError::Misused("commit: no step is in flight"))?;
        Ok(oldest.rows.len())
    }

    /// Settles the oldest step in flight with the token of each row; writes what each came to. Whoever that ends is
    /// released.
    ///
    /// # Errors
    /// [`BooksError::Invalid`] for a token that is neither an id nor one of the two "no token" values, or for too few;
    /// [`BooksError::Misused`] with no step in flight, or while another is reserved.
    pub fn commit(&mut self, tokens: &[i32], outcomes: &mut Vec<Outcome>) -> Result<(), BooksError> {
        let (given, needed) = (tokens.len(), self.in_flight()?);
        self.step.must_be_open()?;
        if given < needed {
            return Err(BooksError::invalid("tokens", Problem::TooShort { given, needed }));
        }
        let vocab_size = self.settings.vocab_size;
        for (index, (row, &token)) in self.step.flights[0].rows.iter().zip(tokens).enumerate() {
            if row.readback == Readback::Argmax && !(ALL_NAN..int(vocab_size)).contains(&token) {
                let problem = Problem::NoSuchToken { token: i64::from(token), index, vocab_size };
                return Err(BooksError::invalid("tokens", problem));
            }
        }
        // Everything that can fail is above this line.
        self.step.forget_plan();
        let flight = self.step.flights.pop_front().expect("it has rows");
        outcomes.clear();
        outcomes.extend(flight.rows.iter().zip(tokens).map(|(row, &token)| self.commit_row(row, token)));
        self.step.recycle(flight);
        Ok(())
    }

    fn commit_row(&mut self, row: &Row, token: i32) -> Outcome {
        if !self.is_current(row) {
            self.unfence(row.came_in);
            return Outcome::OverRun;
        }
        let sequence = self.at_mut(row.key);
        // Steps are settled in order, and whatever else changes a sequence's history makes it leave.
        assert_eq!(row.start, sequence.committed, "{} has another position than its row", row.seq);
        sequence.in_flight -= 1;
        sequence.ahead -= row.gives();
        match (row.readback, token) {
            (Readback::Nothing, _) => {
                sequence.committed += row.num_new;
                sequence.settle_in();
                Outcome::Chunk
            }
            (Readback::Argmax, NONE_ALLOWED) => self.commit_nothing(row, Outcome::NothingAllowed),
            (Readback::Argmax, ALL_NAN) => self.commit_nothing(row, Outcome::Nan),
            (Readback::Argmax, id) => self.commit_token(row, TokenId::try_from(id).expect("checked before")),
        }
    }

    fn commit_token(&mut self, row: &Row, id: TokenId) -> Outcome {
        let context_length = self.settings.context_length as usize;
        let sequence = self.at_mut(row.key);
        sequence.committed += row.num_new;
        sequence.tokens.push(id);
        sequence.bans.saw(id);
        sequence.mask_ready = false;
        sequence.state = State::Decoding;
        let outcome = if sequence.stop_token_ids.contains(&id) {
            Outcome::Stop
        } else if sequence.generated() >= sequence.max_new_tokens || sequence.tokens.len() > context_length {
            Outcome::Length
        } else {
            return Outcome::Token;
        };
        self.release(row.seq, Reuse::Keep).expect("it is live");
        outcome
    }

    fn commit_nothing(&mut self, row: &Row, outcome: Outcome) -> Outcome {
        self.release(row.seq, Reuse::Discard).expect("it is live");
        outcome
    }

    /// Whether the sequence of `row` is where it was when the row was picked.
    fn is_current(&self, row: &Row) -> bool {
        // Its place may be another's by now.
        let is_same = |sequence: &Sequence| sequence.id == row.seq && sequence.came_in == row.came_in;
        self.sequences[row.key].as_ref().is_some_and(|sequence| is_same(sequence) && sequence.slot.is_some())
    }

    fn undo_row(&mut self, row: &Row, sent_before: usize) {
        let sequence = self.sequences[row.key].as_mut().expect("a current row is live");
        let kept = sequence.table.len() - row.growth as usize;
        self.blocks.give_back(&sequence.table[kept..]);
        sequence.table.truncate(kept);
        sequence.table_sent = sent_before;
        sequence.reserved -= row.num_new;
        sequence.ahead -= row.gives();
        sequence.in_flight -= 1;
    }
}

/// Calls `ban` with what a reserved row must not choose.
fn each_ban(row: &Row, sequence: &Sequence, ban: impl FnMut(TokenId, i32)) {
    if row.gives() == 1 {
        let number = sequence.generated_ahead() - 1;
        let is_fed = (row.start + row.num_new) as usize > sequence.tokens.len();
        sequence.bans.each(&sequence.stop_token_ids, number, is_fed, ban);
    }
}

impl StepArrays {
    fn clear(&mut self) {
        self.token_ids.clear();
        self.positions.clear();
        self.seqs.clear();
        self.slots.clear();
        self.starts.clear();
        self.num_new.clear();
        self.kv_lengths.clear();
        self.readback.clear();
        self.table_changes.clear();
        self.bans.clear();
    }
}
