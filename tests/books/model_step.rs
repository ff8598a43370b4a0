//! The steps of the naive model: which rows the next one has, and what each row comes to.

use _native::error::{BooksError, Problem, Shortage};
use _native::ids::{SeqId, TokenId};
use _native::ledger::Outcome;

use crate::model::{MISUSED, Model, Place, Share, Step, number, seq_id};

/// What a resident has to do next, once all that is in flight is done.
enum Next {
    /// So many tokens that the host knows.
    Chunk(usize),
    Decode,
    /// What is in flight finishes it.
    Nothing,
    /// It needs to hear from the host first.
    SitOut,
}

impl Model {
    fn next(&self, seq: usize) -> Next {
        let (life, ahead, reserved) = (&self.lives[seq], self.ahead(seq), self.reserved(seq));
        if reserved < life.history() {
            return Next::Chunk(life.history() - reserved);
        }
        // "At most one sampling row in flight, and only once its mask is there."
        let mask_lacks = life.new.constrained && (ahead > 0 || !life.mask_ready);
        // "One whose thinking has not ended has at most one unknown token ahead."
        let end_unseen = life.may_be_thinking() && ahead > 1;
        match () {
            () if self.surely_finishes(seq) => Next::Nothing,
            () if mask_lacks || end_unseen => Next::SitOut,
            () => Next::Decode,
        }
    }

    /// Decodes first, then at least one tile for the oldest unfinished, even over the budget, then more chunks. And
    /// who sat out.
    fn shares(&self) -> (Vec<Share>, Vec<usize>) {
        let (mut shares, mut sat_out, mut chunks) = (Vec::new(), Vec::new(), Vec::new());
        let mut oldest_first = self.residents();
        oldest_first.sort_unstable();
        for seq in oldest_first {
            match self.next(seq) {
                Next::Chunk(left) => chunks.push((seq, left)),
                Next::Decode => shares.push(self.share(seq, 1)),
                Next::Nothing => {}
                Next::SitOut => sat_out.push(seq),
            }
        }
        let mut budget = (self.settings.step_tokens as usize).saturating_sub(shares.len());
        let mut tile = self.settings.row_tile as usize;
        for (seq, left) in chunks {
            let num_new = left.min(budget.max(tile));
            if num_new == 0 {
                continue;
            }
            let share = self.share(seq, num_new);
            if share.samples && self.lives[seq].new.constrained && !self.lives[seq].mask_ready {
                sat_out.push(seq);
                continue;
            }
            (budget, tile) = (budget.saturating_sub(num_new), 0);
            shares.push(share);
        }
        shares.sort_by_key(|share| share.slot);
        sat_out.sort_by_key(|&seq| self.residents().iter().position(|&other| other == seq));
        (shares, sat_out)
    }

    fn share(&self, seq: usize, num_new: usize) -> Share {
        let (life, start, unknown) = (&self.lives[seq], self.reserved(seq), self.ahead(seq));
        let Place::Slot(slot) = life.place else { unreachable!("only residents have rows") };
        let decodes = start >= life.history();
        let first_token = life.generated.is_empty() && start + num_new == life.history();
        Share { seq, stay: life.came_in, slot, start, num_new, samples: decodes || first_token, unknown }
    }

    pub(crate) fn pick(&mut self) -> Result<usize, BooksError> {
        if matches!(self.step, Step::Reserved(_)) {
            return Err(MISUSED);
        }
        let (shares, sat_out) = self.shares();
        let count = shares.len();
        (self.step, self.sat_out) = (Step::Picked(shares), sat_out);
        Ok(count)
    }

    /// Blocks by which a picked row grows.
    pub(crate) fn growth(&self, row: &Share) -> usize {
        self.blocks(row.start + row.num_new).saturating_sub(self.held(row.seq))
    }

    /// The rows of the next step that need a block, in slot order.
    pub(crate) fn growing(&self) -> Vec<usize> {
        let (rows, _) = self.shares();
        rows.iter().filter(|row| self.growth(row) > 0).map(|row| row.seq).collect()
    }

    pub(crate) fn reserve(&mut self) -> Result<(), BooksError> {
        let Step::Picked(rows) = &self.step else { return Err(MISUSED) };
        let (needed, free) = (rows.iter().map(|row| self.growth(row)).sum::<usize>(), self.free_blocks());
        if needed > free {
            return Err(BooksError::Exhausted(Shortage { needed: number(needed), free: number(free) }));
        }
        self.step = Step::Reserved(rows.clone());
        Ok(())
    }

    pub(crate) fn fill(&mut self) -> Result<(), BooksError> {
        let Step::Reserved(rows) = &self.step else { return Err(MISUSED) };
        self.flights.push_back(rows.clone());
        self.step = Step::Open;
        Ok(())
    }

    /// What each row of the newest step must not choose: (row, id, after).
    pub(crate) fn bans(&self) -> Vec<[i32; 3]> {
        let mut bans = Vec::new();
        for (index, row) in self.flights.back().into_iter().flatten().enumerate() {
            let index = i32::try_from(index).expect("few");
            if row.samples {
                let of_row = self.lives[row.seq].bans(row.unknown);
                bans.extend(of_row.into_iter().map(|(id, after)| [index, id, after]));
            }
        }
        bans
    }

    /// The sequences of the rows of the newest step that are no over-runs.
    pub(crate) fn hand_back(&mut self) -> Vec<SeqId> {
        let rows =
            if let Step::Reserved(rows) = &self.step { Some(rows.clone()) } else { self.flights.back().cloned() };
        let Some(rows) = rows else { return Vec::new() };
        let live = rows.iter().filter(|row| self.is_live(row)).map(|row| seq_id(row.seq)).collect();
        if !matches!(self.step, Step::Reserved(_)) {
            self.flights.pop_back();
        }
        self.step = Step::Open;
        live
    }

    pub(crate) fn commit(&mut self, tokens: &[i32]) -> Result<Vec<Outcome>, BooksError> {
        if matches!(self.step, Step::Reserved(_)) {
            return Err(MISUSED);
        }
        let Some(rows) = self.flights.front() else { return Err(MISUSED) };
        let (given, needed, vocab_size) = (tokens.len(), rows.len(), self.settings.vocab_size);
        if given < needed {
            return Err(BooksError::invalid("tokens", Problem::TooShort { given, needed }));
        }
        for (index, row) in rows.iter().enumerate() {
            let token = i64::from(tokens[index]);
            if row.samples && !(-2..i64::from(vocab_size)).contains(&token) {
                return Err(BooksError::invalid("tokens", Problem::NoSuchToken { token, index, vocab_size }));
            }
        }
        let rows = rows.clone();
        self.forget_plan();
        let outcomes = rows.iter().zip(tokens).map(|(row, &token)| self.settle(row, token)).collect();
        self.flights.pop_front();
        Ok(outcomes)
    }

    fn settle(&mut self, row: &Share, token: i32) -> Outcome {
        if !self.is_live(row) {
            return Outcome::OverRun;
        }
        let context = self.settings.context_length as usize;
        if row.samples && token < 0 {
            self.leave(row.seq, Place::Ended);
            return if token == -1 { Outcome::NothingAllowed } else { Outcome::Nan };
        }
        let life = &mut self.lives[row.seq];
        life.committed += row.num_new;
        if !row.samples {
            return Outcome::Chunk;
        }
        life.generated.push(TokenId::try_from(token).expect("not negative"));
        life.mask_ready = false;
        let outcome = match () {
            () if life.new.stop_token_ids.contains(&i64::from(token)) => Outcome::Stop,
            () if life.used_up_by(life.generated.len(), context) => Outcome::Length,
            () => return Outcome::Token,
        };
        self.leave(row.seq, Place::Ended);
        outcome
    }
}
