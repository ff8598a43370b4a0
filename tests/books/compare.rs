//! All that can be seen of the books, compared with the naive model.

use std::collections::BTreeSet;

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::{ALWAYS, FROM_FEED, Readback, Sequence};
use _native::schedule;

use crate::model::{Place, Step, number, seq_id as id};
use crate::world::World;

impl World {
    /// Compares what a step just filled is fed, and must not choose.
    pub(crate) fn compare_fed(&mut self) {
        let rows = self.model.flights.back().expect("just filled");
        let mut fed = Vec::new();
        for row in rows {
            let tokens = self.model.lives[row.seq].tokens();
            let known = tokens.into_iter().skip(row.start).take(row.num_new).map(u32::cast_signed);
            fed.extend(if row.unknown > 0 { vec![FROM_FEED] } else { known.collect() });
        }
        assert_eq!(self.arrays.token_ids, fed);
        let mut bans = self.arrays.bans.clone();
        assert!(bans.is_sorted_by_key(|ban| ban[0]), "bans stand in the order of the rows");
        bans.sort_unstable();
        assert_eq!(bans, self.model.bans());
        if fed.contains(&FROM_FEED) {
            self.saw("feed", true);
        }
        for (name, seen) in
            [("ban", bans.iter().any(|ban| ban[2] == ALWAYS)), ("ban after", bans.iter().any(|ban| ban[2] >= 0))]
        {
            if seen {
                self.saw(name, true);
            }
        }
    }

    /// Compares all that can be seen, and what would be chosen now.
    pub(crate) fn compare(&self) {
        self.ledger.check();
        self.device.check(&self.ledger);
        let (ledger, model) = (&self.ledger, &self.model);
        let numbers = |ids: Vec<usize>| ids.into_iter().map(id).collect::<Vec<_>>();
        assert_eq!(ledger.residents().map(Sequence::id).collect::<Vec<_>>(), numbers(model.residents()));
        assert_eq!(ledger.waiting().map(Sequence::id).collect::<Vec<_>>(), numbers(model.waiting()));
        assert_eq!(ledger.blocks().free() as usize, model.free_blocks());
        assert_eq!(ledger.fenced_blocks() as usize, model.fenced_blocks());
        assert_eq!(ledger.free_slots() as usize, model.free_slots());
        assert_eq!(ledger.fenced_slots() as usize, model.remains().len());
        assert_eq!(ledger.num_in_flight(), model.flights.len());
        assert_eq!(ledger.in_flight().ok(), model.flights.front().map(Vec::len));
        assert_eq!(ledger.num_residents() as usize, model.residents().len());
        assert_eq!(ledger.num_live(), model.lives.iter().filter(|life| life.place != Place::Ended).count());
        for seq in 0..=model.lives.len() {
            self.compare_sequence(seq);
        }
        if let Step::Picked(rows) | Step::Reserved(rows) = &model.step {
            let real: Vec<_> = ledger.rows().iter().map(|row| (row.seq, row.slot.0, row.start, row.num_new)).collect();
            let naive = rows.iter().map(|row| (id(row.seq), row.slot, number(row.start), number(row.num_new)));
            assert_eq!(real, naive.collect::<Vec<_>>());
            let sampled = ledger.rows().iter().map(|row| row.readback == Readback::Argmax).collect::<Vec<_>>();
            assert_eq!(sampled, rows.iter().map(|row| row.samples).collect::<Vec<_>>());
            let sat_out: BTreeSet<SeqId> = ledger.sat_out().iter().copied().collect();
            assert_eq!(sat_out, numbers(model.sat_out.clone()).into_iter().collect());
        }
        if matches!(model.step, Step::Picked(_)) {
            let growing = ledger.rows().iter().filter(|row| row.growth > 0).map(|row| row.seq);
            assert_eq!(growing.collect::<Vec<_>>(), numbers(model.growing()));
        }
        for spill_blocks in [0, 2, u32::MAX] {
            assert_eq!(schedule::victim(ledger, spill_blocks), model.victim(spill_blocks));
            assert_eq!(self.next_arrival(spill_blocks), model.next_arrival(spill_blocks));
        }
        assert_eq!(schedule::capacity_row(ledger), model.capacity_row());
    }

    fn compare_sequence(&self, seq: usize) {
        let Some(life) = self.model.lives.get(seq) else {
            assert_eq!(self.ledger.get(id(seq)), Err(BooksError::Unknown(id(seq))));
            return;
        };
        let Some(state) = life.state() else {
            assert_eq!(self.ledger.get(id(seq)), Err(BooksError::Finished(id(seq))));
            return;
        };
        let real = self.ledger.get(id(seq)).expect("live in the model");
        assert_eq!(real.state(), state);
        assert_eq!(real.tokens(), life.tokens());
        assert_eq!(real.generated(), life.generated.len() as u64);
        assert_eq!(real.pending(), life.generated.last().copied());
        assert_eq!(real.committed() as usize, life.committed);
        assert_eq!(real.reserved() as usize, self.model.reserved(seq));
        assert_eq!(real.ahead() as usize, self.model.ahead(seq));
        assert_eq!(real.in_flight() > 0, self.model.in_flight(seq));
        assert_eq!(real.target() as usize, life.history());
        assert_eq!(real.table().len(), self.model.held(seq));
        let slot = if let Place::Slot(slot) = life.place { Some(slot) } else { None };
        assert_eq!(real.slot().map(|slot| slot.0), slot);
        assert_eq!(real.is_immune(), self.model.immune(seq));
        assert_eq!(real.can_replay(), life.can_replay());
        let image = if life.resident() { self.model.blocks(life.committed) } else { 0 };
        assert_eq!(self.ledger.image_blocks(id(seq)).expect("live"), &real.table()[..image]);
    }
}
