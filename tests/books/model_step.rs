//! The step of the moment in the naive model: which rows, and what each comes to.

use _native::error::{BooksError, Problem, Shortage};
use _native::ids::TokenId;
use _native::ledger::Outcome;

use crate::model::{MISUSED, Model, Place, Share, Step, number};

impl Model {
    /// Decodes first, then at least one tile for the oldest unfinished, even over the budget, then more chunks.
    pub(crate) fn shares(&self) -> Vec<Share> {
        let mut oldest_first = self.residents();
        oldest_first.sort_unstable();
        let (decodes, chunks): (Vec<usize>, Vec<usize>) =
            oldest_first.into_iter().partition(|&seq| self.lives[seq].decoding());
        let mut budget = (self.settings.step_tokens as usize).saturating_sub(decodes.len());
        let mut shares: Vec<Share> = decodes.iter().map(|&seq| self.share(seq, 1)).collect();
        for (place, &seq) in chunks.iter().enumerate() {
            let most = if place == 0 { budget.max(self.settings.row_tile as usize) } else { budget };
            let num_new = most.min(self.lives[seq].history() - self.lives[seq].committed);
            budget = budget.saturating_sub(num_new);
            if num_new > 0 {
                shares.push(self.share(seq, num_new));
            }
        }
        shares.sort_by_key(|share| share.slot);
        shares
    }

    fn share(&self, seq: usize, num_new: usize) -> Share {
        let life = &self.lives[seq];
        let Place::Slot(slot) = life.place else { unreachable!("only residents have rows") };
        let first_token = life.generated.is_empty() && life.committed + num_new == life.history();
        Share { seq, slot, start: life.committed, num_new, samples: life.decoding() || first_token }
    }

    pub(crate) fn pick(&mut self) -> Result<usize, BooksError> {
        if matches!(self.step, Step::Reserved(_) | Step::Flying(_)) {
            return Err(MISUSED);
        }
        let shares = self.shares();
        let count = shares.len();
        self.step = Step::Picked(shares);
        Ok(count)
    }

    pub(crate) fn reserve(&mut self) -> Result<(), BooksError> {
        let Step::Picked(rows) = &self.step else { return Err(MISUSED) };
        let (needed, free) = (rows.iter().map(|row| self.growth(row.seq)).sum::<usize>(), self.free_blocks());
        if needed > free {
            return Err(BooksError::Exhausted(Shortage { needed: number(needed), free: number(free) }));
        }
        self.step = Step::Reserved(rows.clone());
        Ok(())
    }

    pub(crate) fn fill(&mut self) -> Result<(), BooksError> {
        let Step::Reserved(rows) = &self.step else { return Err(MISUSED) };
        self.step = Step::Flying(rows.clone());
        Ok(())
    }

    pub(crate) fn hand_back(&mut self) {
        if matches!(self.step, Step::Reserved(_) | Step::Flying(_)) {
            self.step = Step::Open;
        }
    }

    pub(crate) fn commit(&mut self, tokens: &[i32]) -> Result<Vec<Outcome>, BooksError> {
        let Step::Flying(rows) = &self.step else { return Err(MISUSED) };
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
        self.step = Step::Open;
        Ok(rows.iter().zip(tokens).map(|(row, &token)| self.settle(row, token)).collect())
    }

    fn settle(&mut self, row: &Share, token: i32) -> Outcome {
        let context = self.settings.context_length as usize;
        let life = &mut self.lives[row.seq];
        if row.samples && token < 0 {
            life.place = Place::Ended;
            return if token == -1 { Outcome::NothingAllowed } else { Outcome::Nan };
        }
        life.committed += row.num_new;
        if !row.samples {
            return Outcome::Chunk;
        }
        life.generated.push(TokenId::try_from(token).expect("not negative"));
        let used_up = life.generated.len() as u64 == life.new.max_new_tokens || life.history() == context;
        let outcome = match () {
            () if life.new.stop_token_ids.contains(&i64::from(token)) => Outcome::Stop,
            // No position is left for the pending token.
            () if used_up => Outcome::Length,
            () => return Outcome::Token,
        };
        life.place = Place::Ended;
        outcome
    }
}
