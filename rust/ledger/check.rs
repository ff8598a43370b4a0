//! The invariants of the books, for tests to call after every step.

use crate::ids::blocks_for;

use super::sequence::{Sequence, State};
use super::{Holder, Ledger, Readback};

impl Ledger {
    /// Verifies every invariant of the books and of what they own.
    ///
    /// # Panics
    /// If one does not hold.
    pub fn check(&self) {
        self.blocks.check();
        self.slots.check();
        let live: Vec<&Sequence> = self.sequences.iter().flatten().collect();
        assert_eq!(live.len(), self.keys.len(), "the store and its index differ");
        assert_eq!(live.len() + self.vacant.len(), self.sequences.len(), "a place is neither taken nor vacant");
        let mut holders = vec![0; self.blocks.total() as usize];
        for sequence in &live {
            self.check_sequence(sequence);
        }
        let tables = || live.iter().map(|one| &one.table).chain(self.remains.iter().map(|one| &one.table)).flatten();
        for block in tables() {
            holders[block.index()] += 1;
        }
        for block in tables() {
            assert_eq!(holders[block.index()], self.blocks.holders(*block), "{block:?} is held by others");
        }
        let held = holders.iter().filter(|&&count| count > 0).count();
        assert_eq!(held + self.blocks.free() as usize, holders.len(), "a block is held by nobody and not free");
        self.check_remains();
        let waiting = live.iter().filter(|sequence| !sequence.state.is_resident()).count();
        assert_eq!(waiting, self.waiting.len(), "someone waits twice, or not at all");
        let resident = live.len() - waiting;
        assert_eq!(resident + self.remains.len(), self.slots.taken() as usize, "a slot is held by nobody");
    }

    /// What is fenced is needed by as many steps in flight as it says, and seated.
    fn check_remains(&self) {
        for one in &self.remains {
            let named = self.rows_in_flight().filter(|row| row.came_in == one.came_in).count();
            assert!(one.in_flight > 0, "{:?} is fenced for nothing", one.slot);
            assert_eq!(named, one.in_flight as usize, "{:?} is fenced for other steps", one.slot);
            assert_eq!(self.slots.holder(one.slot), Some(Holder::Remains(one.came_in)), "the fenced have no slot");
        }
        let seated = self.slots.holders().filter(|holder| matches!(holder, Holder::Remains(_))).count();
        assert_eq!(seated, self.remains.len(), "a slot is fenced for nobody");
    }

    fn check_sequence(&self, sequence: &Sequence) {
        let (id, block_size) = (sequence.id, self.settings.block_size);
        assert_eq!(self.keys.get(&id).map(|&key| self.at(key).id), Some(id), "{id} is indexed elsewhere");
        assert!(!sequence.tokens.is_empty() && sequence.prompt_length > 0, "{id} has no prompt");
        assert!(sequence.tokens.len() <= self.settings.context_length as usize, "{id} is over the context");
        assert!(sequence.committed <= sequence.target(), "{id} has committed what it does not have");
        assert!(sequence.committed <= sequence.reserved, "{id} has committed what it did not reserve");
        let rows: Vec<_> =
            self.rows_in_flight().filter(|row| row.seq == id && row.came_in == sequence.came_in).collect();
        let named = if sequence.slot.is_some() { rows.len() } else { 0 };
        assert_eq!(named, sequence.in_flight as usize, "{id} is in other steps");
        assert!(sequence.in_flight > 0 || sequence.committed == sequence.reserved, "{id} kept a reservation");
        if named > 0 {
            let new: u32 = rows.iter().map(|row| row.num_new).sum();
            assert_eq!(sequence.committed + new, sequence.reserved, "{id} has reserved other rows");
            let given = rows.iter().filter(|row| row.readback == Readback::Argmax).count();
            assert_eq!(given, sequence.ahead as usize, "{id} waits for other tokens");
        }
        assert!(sequence.table_sent <= sequence.table.len(), "{id} sent entries that it does not have");
        let waits = self.waiting.contains(&sequence.waiting_key());
        if sequence.state.is_resident() {
            let slot = sequence.slot.expect("a resident has a slot");
            let seated = self.slots.holder(slot) == Some(Holder::Sequence(self.keys[&id]));
            assert_eq!((seated, waits), (true, false), "{id} is not in its slot, or waits too");
            let held = sequence.target().max(sequence.reserved);
            assert_eq!(sequence.table.len(), blocks_for(held, block_size) as usize, "{id} holds the wrong blocks");
            let whole = sequence.committed == sequence.target() && sequence.generated() > 0;
            assert_eq!(sequence.state == State::Decoding, whole, "{id} is in the wrong state");
        } else {
            assert_eq!((sequence.slot, sequence.table.len()), (None, 0), "{id} waits and holds something");
            assert!(waits && sequence.in_flight == 0 && sequence.ahead == 0, "{id} does not wait");
            assert_eq!(
                sequence.committed > 0,
                sequence.state == State::ParkedSpill,
                "{id} has no image, or a lost one"
            );
        }
    }
}
