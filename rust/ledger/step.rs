//! The step of the moment: picked, reserved, in flight, and settled or handed back.

use crate::error::{BooksError, Problem, Shortage};
use crate::ids::{SeqId, SlotId, TokenId};

use super::sequence::State;
use super::transitions::Reuse;
use super::{Key, Ledger};

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
}

/// The arrays that a step is written into, filled anew by each; `step.py` describes them. Their memory is kept.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct StepArrays {
    /// Input token ids, row after row.
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
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum Phase {
    #[default]
    Idle,
    Picked,
    Reserved,
    InFlight,
}

/// The rows of the next step, and how far it has come.
#[derive(Debug, Default)]
pub(super) struct StepBook {
    phase: Phase,
    rows: Vec<Row>,
    /// What `table_sent` of each row was before `fill`.
    sent_before: Vec<usize>,
}

/// A plan is no state: two books are equal if only their plans differ, so that handing back compares equal.
impl PartialEq for StepBook {
    fn eq(&self, other: &Self) -> bool {
        let taken = |phase| matches!(phase, Phase::Reserved | Phase::InFlight);
        match (taken(self.phase), taken(other.phase)) {
            (false, false) => true,
            _ => self.phase == other.phase && self.rows == other.rows && self.sent_before == other.sent_before,
        }
    }
}

impl Eq for StepBook {}

impl StepBook {
    pub(super) fn forget_plan(&mut self) {
        if self.phase == Phase::Picked {
            self.phase = Phase::Idle;
        }
    }

    pub(super) fn must_be_open(&self) -> Result<(), BooksError> {
        match self.phase {
            Phase::Idle | Phase::Picked => Ok(()),
            Phase::Reserved | Phase::InFlight => {
                Err(BooksError::Misused("a step is reserved or in flight: commit it or hand it back first"))
            }
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
    /// [`BooksError::Misused`] while a step is reserved or in flight.
    pub(crate) fn plan(&mut self, choose: impl FnOnce(&Self, &mut Vec<Row>)) -> Result<usize, BooksError> {
        self.step.must_be_open()?;
        let mut rows = std::mem::take(&mut self.step.rows);
        rows.clear();
        choose(self, &mut rows);
        self.step.rows = rows;
        self.step.phase = Phase::Picked;
        Ok(self.step.rows.len())
    }

    /// The rows that were picked last, in ascending slot order.
    #[must_use]
    pub fn rows(&self) -> &[Row] {
        &self.step.rows
    }

    /// Takes the blocks by which the picked rows grow, for all rows or for none.
    ///
    /// # Errors
    /// [`BooksError::Exhausted`]; [`BooksError::Misused`] without picked rows.
    pub fn reserve(&mut self) -> Result<(), BooksError> {
        if self.step.phase != Phase::Picked {
            return Err(BooksError::Misused("reserve: pick the rows first, and again after each change"));
        }
        let needed = self.step.rows.iter().map(|row| row.growth).sum();
        let free = self.blocks.free();
        if needed > free {
            return Err(Shortage { needed, free }.into());
        }
        // Everything that can fail is above this line.
        self.step.phase = Phase::Reserved;
        self.step.sent_before.clear();
        for row in &self.step.rows {
            let sequence = self.sequences[row.key].as_mut().expect("a picked row is live");
            self.blocks.take(row.growth, &mut sequence.table).expect("counted above");
            sequence.reserved = row.start + row.num_new;
            sequence.in_flight = true;
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
        let mut counts = Counts { rows: self.step.rows.len(), tokens: 0, table_changes: 0 };
        for row in &self.step.rows {
            let sequence = self.at(row.key);
            counts.tokens += row.num_new as usize;
            counts.table_changes += sequence.table.len() - sequence.table_sent;
        }
        Ok(counts)
    }

    /// Writes the reserved step into `arrays`. It is in flight from here on.
    ///
    /// # Errors
    /// [`BooksError::Misused`] if nothing is reserved.
    pub fn fill(&mut self, arrays: &mut StepArrays) -> Result<(), BooksError> {
        if self.step.phase != Phase::Reserved {
            return Err(BooksError::Misused("fill: reserve the step first"));
        }
        // Everything that can fail is above this line.
        arrays.clear();
        for row in &self.step.rows {
            let sequence = self.sequences[row.key].as_mut().expect("a reserved row is live");
            let (slot, end) = (int(row.slot.0), row.start + row.num_new);
            arrays.seqs.push(row.seq.0);
            arrays.slots.push(slot);
            arrays.starts.push(int(row.start));
            arrays.num_new.push(int(row.num_new));
            arrays.kv_lengths.push(int(end));
            arrays.readback.push(u8::from(row.readback == Readback::Argmax));
            arrays.positions.extend(int(row.start)..int(end));
            let fed = &sequence.tokens[row.start as usize..end as usize];
            arrays.token_ids.extend(fed.iter().map(|&id| int(id)));
            for (entry, block) in sequence.table.iter().enumerate().skip(sequence.table_sent) {
                let entry = i32::try_from(entry).expect("within the pool");
                arrays.table_changes.push([slot, entry, int(block.0)]);
            }
            sequence.table_sent = sequence.table.len();
        }
        self.step.phase = Phase::InFlight;
        Ok(())
    }

    /// Undoes `reserve` and `fill` exactly; nothing if there is nothing to undo.
    pub fn hand_back(&mut self) {
        if !matches!(self.step.phase, Phase::Reserved | Phase::InFlight) {
            return;
        }
        // Last taken, first given back: the free list is as it was.
        for index in (0..self.step.rows.len()).rev() {
            self.undo_row(index);
        }
        self.step.phase = Phase::Idle;
    }

    /// How many rows the step in flight has.
    ///
    /// # Errors
    /// [`BooksError::Misused`] with no step in flight.
    pub fn in_flight(&self) -> Result<usize, BooksError> {
        if self.step.phase != Phase::InFlight {
            return Err(BooksError::Misused("commit: no step is in flight"));
        }
        Ok(self.step.rows.len())
    }

    /// Settles the step in flight with the token of each row; writes what each came to. Whoever that ends is released.
    ///
    /// # Errors
    /// [`BooksError::Invalid`] for a token that is neither an id nor one of the two "no token" values, or for too few;
    /// [`BooksError::Misused`] with no step in flight.
    pub fn commit(&mut self, tokens: &[i32], outcomes: &mut Vec<Outcome>) -> Result<(), BooksError> {
        let (given, needed) = (tokens.len(), self.in_flight()?);
        if given < needed {
            return Err(BooksError::invalid("tokens", Problem::TooShort { given, needed }));
        }
        let vocab_size = self.settings.vocab_size;
        for (index, (row, &token)) in self.step.rows.iter().zip(tokens).enumerate() {
            if row.readback == Readback::Argmax && !(ALL_NAN..int(vocab_size)).contains(&token) {
                let problem = Problem::NoSuchToken { token: i64::from(token), index, vocab_size };
                return Err(BooksError::invalid("tokens", problem));
            }
        }
        // Everything that can fail is above this line.
        self.step.phase = Phase::Idle;
        outcomes.clear();
        for (index, &token) in tokens[..needed].iter().enumerate() {
            let row = self.step.rows[index];
            outcomes.push(match row.readback {
                Readback::Nothing => self.commit_chunk(row),
                Readback::Argmax => match token {
                    NONE_ALLOWED => self.commit_nothing(index, Outcome::NothingAllowed),
                    ALL_NAN => self.commit_nothing(index, Outcome::Nan),
                    id => self.commit_token(row, TokenId::try_from(id).expect("checked above")),
                },
            });
        }
        Ok(())
    }

    fn commit_chunk(&mut self, row: Row) -> Outcome {
        let sequence = self.at_mut(row.key);
        sequence.in_flight = false;
        sequence.committed = sequence.reserved;
        sequence.settle_in();
        Outcome::Chunk
    }

    fn commit_token(&mut self, row: Row, id: TokenId) -> Outcome {
        let context_length = self.settings.context_length as usize;
        let sequence = self.at_mut(row.key);
        sequence.in_flight = false;
        sequence.committed = sequence.reserved;
        sequence.tokens.push(id);
        sequence.state = State::Decoding;
        let outcome = if sequence.stop_token_ids.contains(&id) {
            Outcome::Stop
        } else if sequence.generated() >= sequence.max_new_tokens || sequence.tokens.len() > context_length {
            Outcome::Length
        } else {
            return Outcome::Token;
        };
        self.release(row.seq, Reuse::Keep).expect("live, and no longer in flight");
        outcome
    }

    fn commit_nothing(&mut self, index: usize, outcome: Outcome) -> Outcome {
        self.undo_row(index);
        let seq = self.step.rows[index].seq;
        self.release(seq, Reuse::Discard).expect("live, and no longer in flight");
        outcome
    }

    fn undo_row(&mut self, index: usize) {
        let row = self.step.rows[index];
        let sequence = self.sequences[row.key].as_mut().expect("a row in flight is live");
        let kept = sequence.table.len() - row.growth as usize;
        self.blocks.give_back(&sequence.table[kept..]);
        sequence.table.truncate(kept);
        sequence.table_sent = self.step.sent_before[index];
        sequence.reserved = sequence.committed;
        sequence.in_flight = false;
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
    }
}
