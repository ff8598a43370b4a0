//! The transitions of a sequence between its states; each happens wholly or not at all.

use std::collections::HashSet;

use crate::error::{BooksError, NotParkable, Problem, Shortage};
use crate::ids::{SeqId, TokenId, blocks_for};

use super::bans::{Bans, MOST_BANS, Think};
use super::sequence::{NewSequence, Sequence, State};
use super::{Holder, Key, Ledger, Remains};

/// How a sequence is taken off the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ParkBy {
    /// Its image has been copied to the host.
    Spill,
    /// Its KV is dropped and computed again later.
    Replay,
}

/// What a sequence that came in needs next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Arrival {
    /// Its prompt is to be computed.
    Start,
    /// Its history is to be computed again.
    Replay,
    /// Its image is to be written into its blocks before the next step.
    Restore,
}

/// Whether the blocks of a sequence that ends hold what its tokens say.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reuse {
    /// They do, and may be kept for others.
    Keep,
    /// They may not.
    Discard,
}

impl Ledger {
    /// Queues a new sequence.
    ///
    /// # Errors
    /// [`BooksError::Invalid`] that names what can never be served.
    pub fn submit(&mut self, new: &NewSequence) -> Result<SeqId, BooksError> {
        let tokens = self.tokens("prompt", &new.prompt)?;
        let stop_token_ids = distinct(self.tokens("stop_token_ids", &new.stop_token_ids)?);
        let given = tokens.len() as u64;
        if given == 0 {
            return Err(BooksError::invalid("prompt", Problem::Empty));
        }
        let context_length = self.settings.context_length;
        if given > u64::from(context_length) {
            return Err(BooksError::invalid("prompt", Problem::OverContext { given, context_length }));
        }
        let prompt_length = u32::try_from(given).expect("the context is a u32");
        let needed = blocks_for(prompt_length, self.settings.block_size);
        let total = self.settings.num_blocks;
        if needed > total {
            return Err(BooksError::invalid("prompt", Problem::NeverFits { needed, total }));
        }
        if new.max_new_tokens == 0 {
            return Err(BooksError::invalid("max_new_tokens", Problem::TooSmall { given: 0, least: 1 }));
        }
        let bans = self.bans(new, &stop_token_ids)?;
        // Everything that can fail is above this line.
        let id = SeqId(self.next_id);
        self.next_id += 1;
        let sequence = Sequence {
            id,
            state: State::Queued,
            tokens,
            prompt_length,
            max_new_tokens: new.max_new_tokens,
            stop_token_ids,
            priority: new.priority,
            replayable: new.replayable,
            constrained: new.constrained,
            mask_ready: false,
            bans,
            immune_until: 0,
            front: 0,
            came_in: 0,
            slot: None,
            table: Vec::new(),
            table_sent: 0,
            committed: 0,
            reserved: 0,
            ahead: 0,
            in_flight: 0,
        };
        self.waiting.insert(sequence.waiting_key());
        let key = self.vacant.pop().unwrap_or_else(|| {
            self.sequences.push(None);
            self.sequences.len() - 1
        });
        self.sequences[key] = Some(sequence);
        self.keys.insert(id, key);
        Ok(id)
    }

    /// Gives a waiting sequence its slot and all blocks of its prompt or history.
    ///
    /// # Errors
    /// [`BooksError::Exhausted`] if the blocks are not free; [`BooksError::Misused`] if no slot is, or if it is not
    /// waiting.
    pub fn admit(&mut self, seq: SeqId) -> Result<Arrival, BooksError> {
        let key = self.key(seq)?;
        let sequence = self.at(key);
        let arrival = match sequence.state {
            State::Queued => Arrival::Start,
            State::ParkedReplay => Arrival::Replay,
            State::ParkedSpill => Arrival::Restore,
            State::Prefilling | State::Decoding => return Err(BooksError::Misused("admit: it is resident already")),
        };
        self.step.must_be_open()?;
        let waiting_key = sequence.waiting_key();
        let needed = blocks_for(sequence.target(), self.settings.block_size);
        if self.slots.free() == 0 {
            return Err(BooksError::Misused("admit: no slot is free"));
        }
        let free = self.blocks.free();
        if needed > free {
            return Err(Shortage { needed, free }.into());
        }
        // Everything that can fail is above this line.
        self.step.forget_plan();
        self.waiting.remove(&waiting_key);
        let slot = self.slots.take(Holder::Sequence(key)).expect("a slot is free");
        self.arrivals += 1;
        let (came_in, immunity) = (self.arrivals, self.settings.immunity_tokens);
        let sequence = self.sequences[key].as_mut().expect("found above");
        self.blocks.take(needed, &mut sequence.table).expect("counted above");
        sequence.slot = Some(slot);
        sequence.came_in = came_in;
        sequence.front = 0;
        if sequence.state.is_parked() {
            sequence.immune_until = sequence.generated().saturating_add(immunity);
        }
        sequence.settle_in();
        Ok(arrival)
    }

    /// Forgets the image of a spilled or restored sequence: it replays its history instead.
    ///
    /// # Errors
    /// [`BooksError::CannotPark`] if it is not replayable, [`BooksError::InFlight`] while a step needs it.
    pub fn drop_image(&mut self, seq: SeqId) -> Result<(), BooksError> {
        let key = self.key(seq)?;
        let sequence = self.at_mut(key);
        if sequence.in_flight > 0 {
            return Err(BooksError::InFlight(seq));
        }
        if !sequence.can_replay() {
            return Err(BooksError::CannotPark(seq, NotParkable::NotReplayable));
        }
        // Everything that can fail is above this line.
        sequence.committed = 0;
        sequence.reserved = 0;
        if sequence.state.is_resident() {
            sequence.settle_in();
            self.step.forget_plan();
        } else if sequence.state == State::ParkedSpill {
            sequence.state = State::ParkedReplay;
        }
        Ok(())
    }

    /// Takes a resident sequence off the device, as it is committed: what steps in flight compute of it is discarded.
    /// For a spill its image must have been copied before.
    ///
    /// # Errors
    /// [`BooksError::CannotPark`] if that way is not open; [`BooksError::Misused`] while a step is reserved and not filled.
    pub fn park(&mut self, seq: SeqId, by: ParkBy) -> Result<(), BooksError> {
        let key = self.key(seq)?;
        let sequence = self.at(key);
        let refusal = match by {
            _ if !sequence.state.is_resident() => Some(NotParkable::NotResident),
            ParkBy::Spill if sequence.committed == 0 => Some(NotParkable::NothingCommitted),
            ParkBy::Replay if !sequence.can_replay() => Some(NotParkable::NotReplayable),
            ParkBy::Spill | ParkBy::Replay => None,
        };
        if let Some(refusal) = refusal {
            return Err(BooksError::CannotPark(seq, refusal));
        }
        self.step.must_be_open()?;
        // Everything that can fail is above this line.
        self.vacate(key);
        let sequence = self.at_mut(key);
        match by {
            ParkBy::Spill => sequence.state = State::ParkedSpill,
            ParkBy::Replay => {
                sequence.state = State::ParkedReplay;
                sequence.committed = 0;
                sequence.reserved = 0;
            }
        }
        let waiting_key = sequence.waiting_key();
        self.waiting.insert(waiting_key);
        Ok(())
    }

    /// Moves a waiting sequence to the front of its priority; false, and no change, if it is resident.
    ///
    /// # Errors
    /// As [`Ledger::get`].
    pub fn resume(&mut self, seq: SeqId) -> Result<bool, BooksError> {
        let key = self.key(seq)?;
        let old = self.at(key).waiting_key();
        if !self.waiting.remove(&old) {
            return Ok(false);
        }
        self.fronts += 1;
        let front = self.fronts;
        let sequence = self.at_mut(key);
        sequence.front = front;
        let new = sequence.waiting_key();
        self.waiting.insert(new);
        Ok(true)
    }

    /// Ends a sequence in any state: the one release. False, and no change, if it had ended before.
    ///
    /// Nothing is cached yet, so `_reuse` has no effect so far: its blocks are free for others either way.
    ///
    /// # Errors
    /// [`BooksError::Unknown`]; [`BooksError::Misused`] for a resident while a step is reserved and not filled.
    pub fn release(&mut self, seq: SeqId, _reuse: Reuse) -> Result<bool, BooksError> {
        let key = match self.key(seq) {
            Ok(key) => key,
            Err(BooksError::Finished(_)) => return Ok(false),
            Err(unknown) => return Err(unknown),
        };
        let sequence = self.at(key);
        let (resident, waiting_key) = (sequence.state.is_resident(), sequence.waiting_key());
        if resident {
            self.step.must_be_open()?;
        }
        // Everything that can fail is above this line.
        if resident {
            self.vacate(key);
        } else {
            self.waiting.remove(&waiting_key);
        }
        self.keys.remove(&seq);
        self.sequences[key] = None;
        self.vacant.push(key);
        Ok(true)
    }

    /// Says that the host has the mask of a constrained sequence's next token; forgotten with each token.
    ///
    /// # Errors
    /// As [`Ledger::get`].
    pub fn mask_ready(&mut self, seq: SeqId) -> Result<(), BooksError> {
        let key = self.key(seq)?;
        self.step.forget_plan();
        self.at_mut(key).mask_ready = true;
        Ok(())
    }

    /// Gives the slot and the blocks of a resident back, or fences them while steps in flight name them.
    fn vacate(&mut self, key: Key) {
        self.step.forget_plan();
        let sequence = self.sequences[key].as_mut().expect("vacated by its key");
        let slot = sequence.slot.take().expect("a resident has a slot");
        // The allocation goes too: the waiting may be many, and their tables large.
        let table = std::mem::take(&mut sequence.table);
        let in_flight = std::mem::take(&mut sequence.in_flight);
        sequence.table_sent = 0;
        sequence.reserved = sequence.committed;
        sequence.ahead = 0;
        if in_flight == 0 {
            self.blocks.give_back(&table);
            self.slots.give_back(slot);
        } else {
            let came_in = sequence.came_in;
            self.slots.hand_over(slot, Holder::Remains(came_in));
            self.remains.push(Remains { came_in, slot, table, in_flight });
        }
    }

    /// Notes that one step less needs what is left of a residency; the last one frees it.
    pub(super) fn unfence(&mut self, came_in: u64) {
        let place = self.remains.iter().position(|one| one.came_in == came_in).expect("fenced until its last step");
        self.remains[place].in_flight -= 1;
        if self.remains[place].in_flight == 0 {
            let Remains { slot, table, .. } = self.remains.swap_remove(place);
            self.blocks.give_back(&table);
            self.slots.give_back(slot);
        }
    }

    fn bans(&self, new: &NewSequence, stops: &[TokenId]) -> Result<Bans, BooksError> {
        if new.min_tokens > new.max_new_tokens {
            let problem = Problem::TooLarge { given: new.min_tokens, most: new.max_new_tokens };
            return Err(BooksError::invalid("min_tokens", problem));
        }
        let always = distinct(self.tokens("banned_token_ids", &new.banned_token_ids)?);
        let think = match new.think_tokens {
            Some((start, end)) => {
                let ids = self.tokens("think_tokens", &[start, end])?;
                Some(Think { start: ids[0], end: ids[1], is_over: false })
            }
            None => None,
        };
        let bans = Bans { min_tokens: new.min_tokens, always, think };
        let (given, most) = (bans.most(stops), MOST_BANS);
        if given > u64::from(most) {
            return Err(BooksError::invalid("banned_token_ids", Problem::TooManyBans { given, most }));
        }
        Ok(bans)
    }

    fn tokens(&self, field: &'static str, ids: &[i64]) -> Result<Vec<TokenId>, BooksError> {
        let vocab_size = self.settings.vocab_size;
        let known = |(index, &token): (usize, &i64)| match TokenId::try_from(token) {
            Ok(id) if id < vocab_size => Ok(id),
            _ => Err(BooksError::invalid(field, Problem::NoSuchToken { token, index, vocab_size })),
        };
        ids.iter().enumerate().map(known).collect()
    }
}

/// The ids without those that came before, in their order.
fn distinct(mut ids: Vec<TokenId>) -> Vec<TokenId> {
    let mut seen = HashSet::new();
    ids.retain(|&id| seen.insert(id));
    ids
}

impl Sequence {
    /// Sets the state of a resident by what is committed.
    pub(super) fn settle_in(&mut self) {
        let whole = self.committed == self.target() && self.generated() > 0;
        self.state = if whole { State::Decoding } else { State::Prefilling };
    }
}
