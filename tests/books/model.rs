//! The books once more, as plainly as their rules can be said: nothing is kept that can be counted again.

use _native::error::{BooksError, NotParkable, Problem, Shortage};
use _native::ids::{SeqId, TokenId};
use _native::ledger::{Arrival, NewSequence, ParkBy, Settings, State};

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Queued,
    Slot(u32),
    Spilled,
    Dropped,
    Ended,
}

/// All that was ever known of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Life {
    pub(crate) new: NewSequence,
    pub(crate) generated: Vec<TokenId>,
    pub(crate) place: Place,
    pub(crate) committed: usize,
    /// Generated tokens at the last resume.
    pub(crate) resumed_at: Option<u64>,
    pub(crate) fronted: u64,
    pub(crate) came_in: u64,
}

/// One row of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) seq: usize,
    pub(crate) slot: u32,
    pub(crate) start: usize,
    pub(crate) num_new: usize,
    pub(crate) samples: bool,
}

/// How far the step of the moment is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Open,
    Picked(Vec<Share>),
    Reserved(Vec<Share>),
    Flying(Vec<Share>),
}

/// Every sequence by its number, ended ones too, and the step.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) settings: Settings,
    pub(crate) lives: Vec<Life>,
    pub(crate) step: Step,
    /// Counts everything that happens, so that "last" has a meaning.
    pub(crate) clock: u64,
}

pub(crate) const MISUSED: BooksError = BooksError::Misused("");

pub(crate) fn number(count: usize) -> u32 {
    u32::try_from(count).expect("a tiny universe")
}

fn seq_id(seq: usize) -> SeqId {
    SeqId(seq as u64)
}

impl Life {
    /// Prompt and generated tokens.
    pub(crate) fn tokens(&self) -> Vec<TokenId> {
        let prompt = self.new.prompt.iter().map(|&id| TokenId::try_from(id).expect("checked at submit"));
        prompt.chain(self.generated.iter().copied()).collect()
    }

    /// Positions that are fed before it decodes: all tokens but the pending one.
    pub(crate) fn history(&self) -> usize {
        self.new.prompt.len() + self.generated.len().saturating_sub(1)
    }

    pub(crate) fn resident(&self) -> bool {
        matches!(self.place, Place::Slot(_))
    }

    pub(crate) fn decoding(&self) -> bool {
        self.resident() && !self.generated.is_empty() && self.committed == self.history()
    }

    pub(crate) fn state(&self) -> Option<State> {
        match self.place {
            Place::Queued => Some(State::Queued),
            Place::Slot(_) if self.decoding() => Some(State::Decoding),
            Place::Slot(_) => Some(State::Prefilling),
            Place::Spilled => Some(State::ParkedSpill),
            Place::Dropped => Some(State::ParkedReplay),
            Place::Ended => None,
        }
    }

    pub(crate) fn can_replay(&self) -> bool {
        self.new.replayable || self.committed == 0
    }
}

impl Model {
    pub(crate) fn new(settings: Settings) -> Self {
        Self { settings, lives: Vec::new(), step: Step::Open, clock: 0 }
    }

    pub(crate) fn blocks(&self, positions: usize) -> usize {
        let size = self.settings.block_size as usize;
        positions / size + usize::from(!positions.is_multiple_of(size))
    }

    fn taken_rows(&self) -> &[Share] {
        match &self.step {
            Step::Reserved(rows) | Step::Flying(rows) => rows,
            Step::Open | Step::Picked(_) => &[],
        }
    }

    pub(crate) fn in_step(&self, seq: usize) -> bool {
        self.taken_rows().iter().any(|row| row.seq == seq)
    }

    /// Positions that are committed or that the step in flight fills.
    pub(crate) fn reserved(&self, seq: usize) -> usize {
        let row = self.taken_rows().iter().find(|row| row.seq == seq);
        row.map_or(self.lives[seq].committed, |row| row.start + row.num_new)
    }

    /// Blocks it holds: all of its prompt or history from the start, then one more for each edge it steps over.
    pub(crate) fn held(&self, seq: usize) -> usize {
        let life = &self.lives[seq];
        if !life.resident() {
            return 0;
        }
        self.blocks(if life.decoding() { self.reserved(seq) } else { life.history() })
    }

    /// Blocks by which its next decode row grows.
    pub(crate) fn growth(&self, seq: usize) -> usize {
        let life = &self.lives[seq];
        if life.decoding() {
            self.blocks(life.committed + 1) - self.held(seq).min(self.blocks(life.committed + 1))
        } else {
            0
        }
    }

    pub(crate) fn free_blocks(&self) -> usize {
        self.settings.num_blocks as usize - (0..self.lives.len()).map(|seq| self.held(seq)).sum::<usize>()
    }

    /// In slot order.
    pub(crate) fn residents(&self) -> Vec<usize> {
        let mut seated: Vec<(u32, usize)> = Vec::new();
        for (seq, life) in self.lives.iter().enumerate() {
            if let Place::Slot(slot) = life.place {
                seated.push((slot, seq));
            }
        }
        seated.sort_unstable();
        seated.into_iter().map(|(_, seq)| seq).collect()
    }

    pub(crate) fn free_slots(&self) -> usize {
        self.settings.num_slots as usize - self.residents().len()
    }

    /// Priority, moved to the front by hand, parked before new, submission number.
    pub(crate) fn waiting(&self) -> Vec<usize> {
        let waits = |&seq: &usize| !matches!(self.lives[seq].place, Place::Slot(_) | Place::Ended);
        let mut waiting: Vec<usize> = (0..self.lives.len()).filter(waits).collect();
        waiting.sort_by(|&a, &b| {
            let (left, right) = (&self.lives[a], &self.lives[b]);
            let new = |life: &Life| life.place == Place::Queued;
            (right.new.priority.cmp(&left.new.priority))
                .then(right.fronted.cmp(&left.fronted))
                .then(new(left).cmp(&new(right)))
                .then(a.cmp(&b))
        });
        waiting
    }

    pub(crate) fn immune(&self, seq: usize) -> bool {
        let life = &self.lives[seq];
        let since = |at: u64| life.generated.len() as u64 - at;
        life.resumed_at.is_some_and(|at| since(at) < self.settings.immunity_tokens)
    }

    fn live(&self, seq: usize) -> Result<&Life, BooksError> {
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
    fn forget_plan(&mut self) {
        if matches!(self.step, Step::Picked(_)) {
            self.step = Step::Open;
        }
    }

    pub(crate) fn submit(&mut self, new: &NewSequence) -> Result<SeqId, BooksError> {
        let vocab_size = self.settings.vocab_size;
        for (field, ids) in [("prompt", &new.prompt), ("stop_token_ids", &new.stop_token_ids)] {
            if let Some(index) = ids.iter().position(|id| !(0..i64::from(vocab_size)).contains(id)) {
                let problem = Problem::NoSuchToken { token: ids[index], index, vocab_size };
                return Err(BooksError::Invalid { field, problem });
            }
        }
        let (length, context_length) = (new.prompt.len(), self.settings.context_length);
        let (needed, total) = (number(self.blocks(length)), self.settings.num_blocks);
        let refusal = match () {
            () if length == 0 => Some(("prompt", Problem::Empty)),
            () if length > context_length as usize => {
                Some(("prompt", Problem::OverContext { given: length as u64, context_length }))
            }
            () if needed > total => Some(("prompt", Problem::NeverFits { needed, total })),
            () if new.max_new_tokens == 0 => Some(("max_new_tokens", Problem::TooSmall { given: 0, least: 1 })),
            () => None,
        };
        if let Some((field, problem)) = refusal {
            return Err(BooksError::Invalid { field, problem });
        }
        self.lives.push(Life {
            new: new.clone(),
            generated: Vec::new(),
            place: Place::Queued,
            committed: 0,
            resumed_at: None,
            fronted: 0,
            came_in: 0,
        });
        Ok(seq_id(self.lives.len() - 1))
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
        if matches!(self.step, Step::Reserved(_) | Step::Flying(_)) || self.free_slots() == 0 {
            return Err(MISUSED);
        }
        if needed > free {
            return Err(BooksError::Exhausted(Shortage { needed: number(needed), free: number(free) }));
        }
        self.forget_plan();
        let residents = self.residents();
        let taken = |slot: u32| residents.iter().any(|&other| self.lives[other].place == Place::Slot(slot));
        let slot = (0..self.settings.num_slots).find(|&slot| !taken(slot)).expect("one is free");
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
        if self.in_step(seq) {
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
        if self.in_step(seq) {
            return Err(BooksError::InFlight(seq_id(seq)));
        }
        self.forget_plan();
        let life = &mut self.lives[seq];
        match by {
            ParkBy::Spill => life.place = Place::Spilled,
            ParkBy::Replay => (life.place, life.committed) = (Place::Dropped, 0),
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
            Err(BooksError::Finished(_)) => return Ok(false),
            Err(unknown) => return Err(unknown),
            Ok(_) if self.in_step(seq) => return Err(BooksError::InFlight(seq_id(seq))),
            Ok(life) if life.resident() => self.forget_plan(),
            Ok(_) => {}
        }
        self.lives[seq].place = Place::Ended;
        Ok(true)
    }
}
