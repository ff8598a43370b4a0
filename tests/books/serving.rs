//! What an engine does with the books, over the books, the model and the device at once: comparing all after each part.

use _native::ids::SeqId;
use _native::ledger::{Outcome, ParkBy, Reuse};
use _native::schedule;
use _native::victim::Victim;

use crate::model::Step;
use crate::world::World;

pub(crate) const MOST_IN_FLIGHT: usize = 3;

fn index(seq: SeqId) -> usize {
    usize::try_from(seq.0).expect("a tiny universe")
}

impl World {
    pub(crate) fn is_full(&self) -> bool {
        self.model.flights.len() == MOST_IN_FLIGHT
    }

    fn is_reserved(&self) -> bool {
        matches!(self.model.step, Step::Reserved(_))
    }

    pub(crate) fn arrive(&mut self, spill_blocks: u32, tokens: &[i32]) {
        let Some(plan) = self.next_arrival(spill_blocks) else { return };
        if self.is_reserved() {
            assert_eq!(self.admit(index(plan.seq)), None);
            return;
        }
        if plan.settle_first {
            assert!(!plan.victims.is_empty(), "nothing is waited for where nobody is to be parked");
            self.settle(tokens);
            *self.seen.entry(("settle first", true)).or_default() += 1;
            return;
        }
        for (victim, by) in plan.victims {
            assert!(self.park(index(victim), by), "a planned victim can be parked as planned");
            *self.seen.entry(("preempt", true)).or_default() += 1;
            self.compare();
        }
        assert!(self.admit(index(plan.seq)).is_some(), "a planned arrival fits");
    }

    pub(crate) fn masks(&mut self) {
        let asked = |&seq: &usize| self.model.lives[seq].new.constrained && !self.model.lives[seq].mask_ready;
        for seq in self.model.residents().into_iter().filter(asked).collect::<Vec<_>>() {
            self.mask_ready(seq);
        }
    }

    /// Picks and reserves; on a shortage a step is settled or somebody leaves, until the others fit.
    fn make_fit(&mut self, spill_blocks: u32, tokens: &[i32]) -> bool {
        while self.pick().is_some_and(|rows| rows > 0) {
            self.compare();
            if self.reserve() {
                return true;
            }
            self.make_room(spill_blocks, tokens);
            self.compare();
        }
        false
    }

    fn make_room(&mut self, spill_blocks: u32, tokens: &[i32]) {
        match schedule::victim(&self.ledger, spill_blocks) {
            Victim::Settle => {
                self.settle(tokens);
                *self.seen.entry(("settle", true)).or_default() += 1;
            }
            Victim::Nobody => {
                let row = schedule::capacity_row(&self.ledger).expect("a shortage has a row that grows");
                self.release(index(row), Reuse::Keep);
            }
            Victim::Gives(victim) => {
                let real = self.ledger.get(victim).expect("a victim is live");
                assert_eq!(real.in_flight(), 0, "a victim is in no step");
                let spills = real.can_spill(self.ledger.settings().block_size, spill_blocks);
                let by = if spills { ParkBy::Spill } else { ParkBy::Replay };
                assert!(self.park(index(victim), by), "a victim can be parked");
            }
        }
    }

    /// Settles the oldest step, which there is.
    fn settle(&mut self, tokens: &[i32]) {
        let outcomes = self.commit(tokens).expect("a step is in flight, with at most as many rows as tokens");
        assert!(outcomes.iter().all(|outcome| *outcome as u8 <= Outcome::OverRun as u8));
        self.compare();
    }

    pub(crate) fn launch(&mut self, spill_blocks: u32, tokens: &[i32]) -> bool {
        if self.is_full() || !self.make_fit(spill_blocks, tokens) {
            return false;
        }
        assert!(self.fill(), "reserved above");
        self.compare();
        true
    }

    pub(crate) fn whole_step(&mut self, depth: usize, spill_blocks: u32, tokens: &[i32]) {
        while self.model.flights.len() < depth && self.launch(spill_blocks, tokens) {}
        if !self.model.flights.is_empty() && !self.is_reserved() {
            self.settle(tokens);
        }
    }

    pub(crate) fn failed_launch(&mut self, tokens: &[i32]) {
        if self.launch(0, tokens) {
            self.hand_back();
        }
    }

    pub(crate) fn failed_settle(&mut self) {
        let mut live = Vec::new();
        while !self.model.flights.is_empty() || self.is_reserved() {
            live = self.hand_back();
            self.compare();
        }
        for seq in live {
            self.release(index(seq), Reuse::Discard);
        }
    }
}
