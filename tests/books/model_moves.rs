//! A sequence's moves from state to state in the naive model.

use _native::error::{BooksError, NotParkable, Problem, Shortage};
use _native::ids::SeqId;
use _native::ledger::{Arrival, NewSequence, ParkBy};

use crate::model::{Left, Life, MISUSED, Model, Place, Step, number, seq_id};

impl Model {
    pub(crate) fn live(&self, seq: usize) -> Result<&Life, BooksError> {
        match self.lives.get(seq) {
            None => Err(BooksError::Unknown(seq_id(seq))),
            Some(life) if life.place == Place::Ended => Err(BooksError::Finished(seq_id(seq))),
            Some(life) => Ok(life),
        }
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// A plan made before a change of the residents is none.
    pub(crate) fn forget_plan(&mut self) {
        if matches!(self.step, Step::Picked(_)) {
            self.step = Step::Open;
        }
    }

    /// Nobody resident leaves between `reserve` and `fill`: the arrays of the step would name who is not there.
    fn must_be_open_for(&self, seq: usize) -> Result<(), BooksError> {
        let reserved = matches!(self.step, Step::Reserved(_));
        if reserved && self.lives[seq].resident() { Err(MISUSED) } else { Ok(()) }
    }

    /// Moves it; if it is resident, it leaves its slot and blocks behind.
    pub(crate) fn leave(&mut self, seq: usize, place: Place) {
        if let Place::Slot(slot) = self.lives[seq].place {
            self.forget_plan();
            self.left.push(Left { stay: self.lives[seq].came_in, slot, blocks: self.held(seq) });
        }
        self.lives[seq].place = place;
    }

    pub(crate) fn submit(&mut self, new: &NewSequence) -> Result<SeqId, BooksError> {
        self.ids_are_known("prompt", &new.prompt)?;
        self.ids_are_known("stop_token_ids", &new.stop_token_ids)?;
        let (length, context_length) = (new.prompt.len(), self.settings.context_length);
        let (needed, total) = (number(self.blocks(length)), self.settings.num_blocks);
        let refusal = match () {
            () if length == 0 => Some(("prompt", Problem::Empty)),
            () if length > context_length as usize => {
                Some(("prompt", Problem::OverContext { given: length as u64, context_length }))
            }
            () if needed > total => Some(("prompt", Problem::NeverFits { needed, total })),
            () if new.max_new_tokens == 0 => Some(("max_new_tokens", Problem::TooSmall { given: 0, least: 1 })),
            () if new.min_tokens > new.max_new_tokens => {
                Some(("min_tokens", Problem::TooLarge { given: new.min_tokens, most: new.max_new_tokens }))
            }
            () => None,
        };
        if let Some((field, problem)) = refusal {
            return Err(BooksError::Invalid { field, problem });
        }
        self.ids_are_known("banned_token_ids", &new.banned_token_ids)?;
        let think: Vec<i64> = new.think_tokens.map_or(Vec::new(), |(start, end)| vec![start, end]);
        self.ids_are_known("think_tokens", &think)?;
        let life = Life::new(new);
        let given = life.bans(1).len().max(life.bans(0).len()) as u64;
        if given > 16 {
            return Err(BooksError::invalid("banned_token_ids", Problem::TooManyBans { given, most: 16 }));
        }
        self.lives.push(life);
        Ok(seq_id(self.lives.len() - 1))
    }

    fn ids_are_known(&self, field: &'static str, ids: &[i64]) -> Result<(), BooksError> {
        let vocab_size = self.settings.vocab_size;
        let Some(index) = ids.iter().position(|id| !(0..i64::from(vocab_size)).contains(id)) else { return Ok(()) };
        Err(BooksError::invalid(field, Problem::NoSuchToken { token: ids[index], index, vocab_size }))
    }

    pub(crate) fn admit(&mut self, seq: usize) -> Result<Arrival, BooksError> {
        let life = self.live(seq)?;
        let arrival = match life.place {
            Place::Queued => Arrival::Start,
            Place::Dropped => Arrival::Replay,
            Place::Spilled => Arrival::Restore,
            Place::Slot(_) | Place::Ended => return Err(MISUSED),
        };
        let (needed, free) = (self.blocks(life.history()), self.free_blocks());
        if matches!(self.step, Step::Reserved(_)) || self.free_slots() == 0 {
            return Err(MISUSED);
        }
        if needed > free {
            return Err(BooksError::Exhausted(Shortage { needed: number(needed), free: number(free) }));
        }
        self.forget_plan();
        let mut taken: Vec<u32> = self.remains().iter().map(|left| left.slot).collect();
        taken.extend(
            self.lives.iter().filter_map(|life| if let Place::Slot(slot) = life.place { Some(slot) } else { None }),
        );
        let slot = (0..self.settings.num_slots).find(|slot| !taken.contains(slot)).expect("one is free");
        let now = self.tick();
        let life = &mut self.lives[seq];
        if life.place != Place::Queued {
            life.resumed_at = Some(life.generated.len() as u64);
        }
        (life.place, life.came_in, life.fronted) = (Place::Slot(slot), now, 0);
        Ok(arrival)
    }

    pub(crate) fn drop_image(&mut self, seq: usize) -> Result<(), BooksError> {
        let life = self.live(seq)?;
        if self.in_flight(seq) {
            return Err(BooksError::InFlight(seq_id(seq)));
        }
        if !life.can_replay() {
            return Err(BooksError::CannotPark(seq_id(seq), NotParkable::NotReplayable));
        }
        if life.resident() {
            self.forget_plan();
        }
        let life = &mut self.lives[seq];
        life.committed = 0;
        if life.place == Place::Spilled {
            life.place = Place::Dropped;
        }
        Ok(())
    }

    /// At once, whatever is in flight: its rows there are over-runs from now on.
    pub(crate) fn park(&mut self, seq: usize, by: ParkBy) -> Result<(), BooksError> {
        let life = self.live(seq)?;
        let closed = match by {
            _ if !life.resident() => Some(NotParkable::NotResident),
            ParkBy::Spill if life.committed == 0 => Some(NotParkable::NothingCommitted),
            ParkBy::Replay if !life.can_replay() => Some(NotParkable::NotReplayable),
            _ => None,
        };
        if let Some(why) = closed {
            return Err(BooksError::CannotPark(seq_id(seq), why));
        }
        self.must_be_open_for(seq)?;
        match by {
            ParkBy::Spill => self.leave(seq, Place::Spilled),
            ParkBy::Replay => {
                self.leave(seq, Place::Dropped);
                self.lives[seq].committed = 0;
            }
        }
        Ok(())
    }

    pub(crate) fn resume(&mut self, seq: usize) -> Result<bool, BooksError> {
        if self.live(seq)?.resident() {
            return Ok(false);
        }
        self.lives[seq].fronted = self.tick();
        Ok(true)
    }

    pub(crate) fn release(&mut self, seq: usize) -> Result<bool, BooksError> {
        match self.live(seq) {
            Err(BooksError::Finished(_)) => Ok(false),
            Err(unknown) => Err(unknown),
            Ok(_) => {
                self.must_be_open_for(seq)?;
                self.leave(seq, Place::Ended);
                Ok(true)
            }
        }
    }

    /// "Say that the mask for the next token of a constrained sequence is there; forgotten with each token."
    pub(crate) fn mask_ready(&mut self, seq: usize) -> Result<(), BooksError> {
        self.live(seq)?;
        self.forget_plan();
        self.lives[seq].mask_ready = true;
        Ok(())
    }
}
