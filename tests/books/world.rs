//! The books, the naive model and a device side by side: each operation is done by all, and compared.

use std::collections::BTreeMap;

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::{Arrival, Ledger, NewSequence, Outcome, ParkBy, Reuse, Settings, StepArrays};
use _native::schedule::{self, ArrivalPlan};

use crate::device::Device;
use crate::model::{MISUSED, Model, Step, seq_id as id};

/// All three.
pub(crate) struct World {
    pub(crate) ledger: Ledger,
    pub(crate) model: Model,
    pub(crate) device: Device,
    pub(crate) arrays: StepArrays,
    /// The books just before `reserve` of each step that is reserved or in flight, the oldest first. None are left once
    /// the books have changed otherwise.
    before_reserve: Vec<String>,
    /// How often each operation was done, and refused.
    pub(crate) seen: BTreeMap<(&'static str, bool), u32>,
}

/// Everything in the books but the step of the moment, whose plan is no state.
fn without_step(ledger: &Ledger) -> String {
    let whole = format!("{ledger:?}");
    let (books, _) = whole.split_once(", step: StepBook").expect("the step is the last field");
    books.to_owned()
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
            before_reserve: Vec::new(),
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
        } else if !matches!(name, "pick" | "reserve" | "fill") {
            self.before_reserve.clear();
        }
        self.saw(name, done.is_ok());
        done.ok()
    }

    pub(crate) fn saw(&mut self, name: &'static str, done: bool) {
        *self.seen.entry((name, done)).or_default() += 1;
    }

    pub(crate) fn submit(&mut self, new: &NewSequence) -> Option<SeqId> {
        self.both("submit", |ledger| ledger.submit(new), |model| model.submit(new))
    }

    pub(crate) fn admit(&mut self, seq: usize) -> Option<Arrival> {
        let arrival = self.both("admit", |ledger| ledger.admit(id(seq)), |model| model.admit(seq))?;
        let real = self.ledger.get(id(seq)).expect("live");
        self.device.seat(real.slot().expect("a resident has a slot").index(), real.table());
        if !self.model.flights.is_empty() {
            self.saw("admit ahead", true);
        }
        if arrival == Arrival::Restore {
            self.saw("restore", true);
            self.device.scatter(id(seq), self.ledger.image_blocks(id(seq)).expect("live"));
        }
        Some(arrival)
    }

    pub(crate) fn drop_image(&mut self, seq: usize) {
        if self.both("drop_image", |ledger| ledger.drop_image(id(seq)), |model| model.drop_image(seq)).is_some() {
            self.device.drop_image(id(seq));
        }
    }

    pub(crate) fn park(&mut self, seq: usize, by: ParkBy) -> bool {
        let fenced = self.model.lives.get(seq).is_some() && self.model.in_flight(seq);
        let blocks = self.ledger.image_blocks(id(seq)).map(<[_]>::to_vec);
        let name = if by == ParkBy::Spill { "spill" } else { "replay" };
        let parked = self.both(name, |ledger| ledger.park(id(seq), by), |model| model.park(seq, by)).is_some();
        if parked && fenced {
            self.saw("park ahead", true);
        }
        if parked && by == ParkBy::Spill {
            // The books do not touch the pool, so the copy may come after.
            self.device.gather(id(seq), &blocks.expect("it was resident"));
        }
        parked
    }

    pub(crate) fn resume(&mut self, seq: usize) {
        self.both("resume", |ledger| ledger.resume(id(seq)), |model| model.resume(seq));
    }

    pub(crate) fn release(&mut self, seq: usize, reuse: Reuse) {
        if self.model.lives.get(seq).is_some() && self.model.in_flight(seq) {
            self.saw("release ahead", true);
        }
        let released = self.both("release", |ledger| ledger.release(id(seq), reuse), |model| model.release(seq));
        if released == Some(true) {
            self.device.drop_image(id(seq));
        }
    }

    pub(crate) fn mask_ready(&mut self, seq: usize) {
        self.both("mask_ready", |ledger| ledger.mask_ready(id(seq)), |model| model.mask_ready(seq));
    }

    pub(crate) fn pick(&mut self) -> Option<usize> {
        let picked = self.both("pick", schedule::pick_rows, Model::pick);
        if picked.is_some() && !self.model.sat_out.is_empty() {
            self.saw("sit out", true);
        }
        picked
    }

    pub(crate) fn reserve(&mut self) -> bool {
        let before = without_step(&self.ledger);
        let done = self.both("reserve", Ledger::reserve, Model::reserve).is_some();
        if done {
            self.before_reserve.push(before);
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
                (counts.rows, counts.tokens, counts.table_changes, counts.bans),
                (
                    self.arrays.seqs.len(),
                    self.arrays.token_ids.len(),
                    self.arrays.table_changes.len(),
                    self.arrays.bans.len()
                )
            );
            assert!(counts.tokens <= self.ledger.settings().most_step_tokens() as usize);
            self.compare_fed();
            self.device.launch(&self.arrays, &self.ledger);
        }
        done
    }

    pub(crate) fn hand_back(&mut self) -> Vec<SeqId> {
        let reserved = matches!(self.model.step, Step::Reserved(_));
        let flying = !reserved && !self.model.flights.is_empty();
        let live = self.ledger.hand_back();
        assert_eq!(live, self.model.hand_back());
        if flying {
            self.device.hand_back();
        }
        if let Some(before) = self.before_reserve.pop() {
            assert_eq!(without_step(&self.ledger), before, "handed back, but not exactly");
            self.saw("hand_back", true);
            if !self.before_reserve.is_empty() {
                self.saw("hand_back ahead", true);
            }
        }
        live
    }

    pub(crate) fn commit(&mut self, tokens: &[i32]) -> Option<Vec<Outcome>> {
        let real = |ledger: &mut Ledger| {
            let mut outcomes = Vec::new();
            ledger.commit(tokens, &mut outcomes).map(|()| outcomes)
        };
        let outcomes = self.both("commit", real, |model| model.commit(tokens))?;
        self.device.settle(tokens);
        if outcomes.contains(&Outcome::OverRun) {
            self.saw("over-run", true);
        }
        Some(outcomes)
    }

    pub(crate) fn next_arrival(&self, spill_blocks: u32) -> Option<ArrivalPlan> {
        schedule::next_arrival(&self.ledger, spill_blocks)
    }
}
