//! The books, the naive model and a device side by side: each operation is done by all, and compared.

use std::collections::BTreeMap;

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::{Arrival, Ledger, NewSequence, Outcome, ParkBy, Readback, Reuse, Sequence, Settings, StepArrays};
use _native::schedule::{self, ArrivalPlan};

use crate::device::Device;
use crate::model::{MISUSED, Model, Place, Step, number};

/// All three.
pub(crate) struct World {
    pub(crate) ledger: Ledger,
    pub(crate) model: Model,
    device: Device,
    arrays: StepArrays,
    /// The books just before `reserve`, unless they have changed otherwise since.
    before_reserve: Option<String>,
    /// How often each operation was done, and refused.
    pub(crate) seen: BTreeMap<(&'static str, bool), u32>,
}

/// Everything in the books but the step of the moment, whose plan is no state.
fn without_step(ledger: &Ledger) -> String {
    let whole = format!("{ledger:?}");
    let (books, _) = whole.split_once(", step: StepBook").expect("the step is the last field");
    books.to_owned()
}

fn id(seq: usize) -> SeqId {
    SeqId(seq as u64)
}

impl World {
    pub(crate) fn new(settings: Settings) -> Self {
        let ledger = Ledger::new(settings.clone()).expect("the universe is in bounds");
        let device = Device::new(&ledger);
        Self {
            ledger,
            model: Model::new(settings),
            device,
            arrays: StepArrays::default(),
            before_reserve: None,
            seen: BTreeMap::new(),
        }
    }

    /// Does one operation in the books and in the model. Both refuse or neither, for the same reason and with the same
    /// numbers; a refusal changes nothing.
    fn both<T: PartialEq + std::fmt::Debug>(
        &mut self,
        name: &'static str,
        real: impl FnOnce(&mut Ledger) -> Result<T, BooksError>,
        naive: impl FnOnce(&mut Model) -> Result<T, BooksError>,
    ) -> Option<T> {
        let before = format!("{:?}", self.ledger);
        let done = real(&mut self.ledger).map_err(|refusal| match refusal {
            BooksError::Misused(why) => {
                assert!(!why.is_empty());
                MISUSED
            }
            other => other,
        });
        assert_eq!(done, naive(&mut self.model));
        if done.is_err() {
            assert_eq!(format!("{:?}", self.ledger), before, "a refused call changed something");
        } else if !matches!(self.model.step, Step::Reserved(_) | Step::Flying(_)) {
            self.before_reserve = None;
        }
        self.saw(name, done.is_ok());
        done.ok()
    }

    fn saw(&mut self, name: &'static str, done: bool) {
        *self.seen.entry((name, done)).or_default() += 1;
    }

    pub(crate) fn submit(&mut self, new: &NewSequence) -> Option<SeqId> {
        self.before_reserve = None;
        self.both("submit", |ledger| ledger.submit(new), |model| model.submit(new))
    }

    pub(crate) fn admit(&mut self, seq: usize) -> Option<Arrival> {
        let arrival = self.both("admit", |ledger| ledger.admit(id(seq)), |model| model.admit(seq))?;
        let slot = self.ledger.get(id(seq)).expect("live").slot().expect("a resident has a slot");
        self.device.seat(slot.index());
        if arrival == Arrival::Restore {
            self.saw("restore", true);
            self.device.scatter(id(seq), self.ledger.image_blocks(id(seq)).expect("live"));
        }
        Some(arrival)
    }

    pub(crate) fn drop_image(&mut self, seq: usize) {
        self.before_reserve = None;
        if self.both("drop_image", |ledger| ledger.drop_image(id(seq)), |model| model.drop_image(seq)).is_some() {
            self.device.drop_image(id(seq));
        }
    }

    pub(crate) fn park(&mut self, seq: usize, by: ParkBy) -> bool {
        self.before_reserve = None;
        let blocks = self.ledger.image_blocks(id(seq)).map(<[_]>::to_vec);
        let name = if by == ParkBy::Spill { "spill" } else { "replay" };
        let parked = self.both(name, |ledger| ledger.park(id(seq), by), |model| model.park(seq, by)).is_some();
        if parked && by == ParkBy::Spill {
            // The books do not touch the pool, so the copy may come after.
            self.device.gather(id(seq), &blocks.expect("it was resident"));
        }
        parked
    }

    pub(crate) fn resume(&mut self, seq: usize) {
        self.before_reserve = None;
        self.both("resume", |ledger| ledger.resume(id(seq)), |model| model.resume(seq));
    }

    pub(crate) fn release(&mut self, seq: usize, reuse: Reuse) {
        self.before_reserve = None;
        let released = self.both("release", |ledger| ledger.release(id(seq), reuse), |model| model.release(seq));
        if released == Some(true) {
            self.device.drop_image(id(seq));
        }
    }

    pub(crate) fn pick(&mut self) -> Option<usize> {
        self.both("pick", schedule::pick_rows, Model::pick)
    }

    pub(crate) fn reserve(&mut self) -> bool {
        let before = without_step(&self.ledger);
        let done = self.both("reserve", Ledger::reserve, Model::reserve).is_some();
        if done {
            self.before_reserve = Some(before);
        }
        done
    }

    pub(crate) fn fill(&mut self) -> bool {
        let counts = self.ledger.counts();
        let mut arrays = std::mem::take(&mut self.arrays);
        let done = self.both("fill", |ledger| ledger.fill(&mut arrays), Model::fill).is_some();
        self.arrays = arrays;
        if done {
            let counts = counts.expect("reserved");
            assert_eq!(
                (counts.rows, counts.tokens, counts.table_changes),
                (self.arrays.seqs.len(), self.arrays.token_ids.len(), self.arrays.table_changes.len())
            );
            assert!(counts.tokens <= self.ledger.settings().most_step_tokens() as usize);
            self.device.launch(&self.arrays, &self.ledger);
        }
        done
    }

    pub(crate) fn hand_back(&mut self) {
        let flying = matches!(self.model.step, Step::Flying(_));
        let reserved = matches!(self.model.step, Step::Reserved(_));
        self.ledger.hand_back();
        self.model.hand_back();
        if flying {
            self.device.hand_back();
        }
        if (flying || reserved)
            && let Some(before) = self.before_reserve.take()
        {
            assert_eq!(without_step(&self.ledger), before, "handed back, but not exactly");
            self.saw("hand_back", true);
        }
    }

    pub(crate) fn commit(&mut self, tokens: &[i32]) -> Option<Vec<Outcome>> {
        let real = |ledger: &mut Ledger| {
            let mut outcomes = Vec::new();
            ledger.commit(tokens, &mut outcomes).map(|()| outcomes)
        };
        let outcomes = self.both("commit", real, |model| model.commit(tokens))?;
        self.device.settle();
        Some(outcomes)
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
        assert_eq!(ledger.free_slots() as usize, model.free_slots());
        assert_eq!(ledger.num_residents() as usize, model.residents().len());
        assert_eq!(ledger.num_live(), model.lives.iter().filter(|life| life.place != Place::Ended).count());
        for seq in 0..=model.lives.len() {
            self.compare_sequence(seq);
        }
        if let Step::Picked(rows) | Step::Reserved(rows) | Step::Flying(rows) = &model.step {
            let real: Vec<_> = ledger.rows().iter().map(|row| (row.seq, row.slot.0, row.start, row.num_new)).collect();
            let naive = rows.iter().map(|row| (id(row.seq), row.slot, number(row.start), number(row.num_new)));
            assert_eq!(real, naive.collect::<Vec<_>>());
            let sampled = ledger.rows().iter().map(|row| row.readback == Readback::Argmax).collect::<Vec<_>>();
            assert_eq!(sampled, rows.iter().map(|row| row.samples).collect::<Vec<_>>());
        }
        for spill_blocks in [0, 2, u32::MAX] {
            assert_eq!(schedule::victim(ledger, spill_blocks), model.victim(spill_blocks));
            assert_eq!(self.next_arrival(spill_blocks), model.next_arrival(spill_blocks));
        }
        assert_eq!(schedule::capacity_row(ledger), model.capacity_row());
    }

    pub(crate) fn next_arrival(&self, spill_blocks: u32) -> Option<ArrivalPlan> {
        schedule::next_arrival(&self.ledger, spill_blocks)
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
