//! A small engine around the books: who comes in, the retry loop, a host store that counts blocks. No device.

use std::collections::BTreeMap;

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::{Arrival, Ledger, NewSequence, Outcome, ParkBy, Reuse, Row, Settings, State, StepArrays};
use _native::schedule;

use crate::setup::{ledger, submit};

/// How a sequence ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum End {
    /// As a row's outcome says.
    Settled(Outcome),
    Capacity,
}

/// The books, the images on the host, and what has happened so far.
pub(crate) struct Engine {
    pub(crate) ledger: Ledger,
    /// Blocks of images that the host holds at most.
    host_blocks: u32,
    images: BTreeMap<SeqId, u32>,
    pub(crate) ended: BTreeMap<SeqId, End>,
    /// Every park, in order.
    pub(crate) parks: Vec<(SeqId, ParkBy)>,
    /// Positions computed in chunks.
    pub(crate) chunk_positions: u64,
    arrays: StepArrays,
    outcomes: Vec<Outcome>,
}

impl Engine {
    pub(crate) fn new(settings: Settings, host_blocks: u32) -> Self {
        Self {
            ledger: ledger(settings),
            host_blocks,
            images: BTreeMap::new(),
            ended: BTreeMap::new(),
            parks: Vec::new(),
            chunk_positions: 0,
            arrays: StepArrays::default(),
            outcomes: Vec::new(),
        }
    }

    pub(crate) fn submit(&mut self, new: &NewSequence) -> SeqId {
        submit(&mut self.ledger, new)
    }

    pub(crate) fn spill_blocks(&self) -> u32 {
        self.host_blocks - self.images.values().sum::<u32>()
    }

    pub(crate) fn state(&self, seq: SeqId) -> State {
        self.ledger.get(seq).expect("live").state()
    }

    /// Parks a resident, spilled if its image fits the budget, else for replay; false if neither way is open.
    pub(crate) fn park(&mut self, seq: SeqId) -> bool {
        let image = u32::try_from(self.ledger.image_blocks(seq).expect("live").len()).expect("few");
        if image > 0 && image <= self.spill_blocks() {
            self.ledger.park(seq, ParkBy::Spill).expect("it has an image");
            self.images.insert(seq, image);
            self.parks.push((seq, ParkBy::Spill));
        } else {
            match self.ledger.park(seq, ParkBy::Replay) {
                Ok(()) => self.parks.push((seq, ParkBy::Replay)),
                Err(BooksError::CannotPark(..)) => return false,
                Err(other) => panic!("{other}"),
            }
        }
        true
    }

    pub(crate) fn cancel(&mut self, seq: SeqId) {
        assert_eq!(self.ledger.release(seq, Reuse::Discard), Ok(true));
        self.images.remove(&seq);
    }

    /// Lets in whoever fits; returns them in order.
    pub(crate) fn bring_in(&mut self) -> Vec<SeqId> {
        let mut came = Vec::new();
        let mut gave_way = Vec::new();
        while let Some(plan) = schedule::next_arrival(&self.ledger, self.spill_blocks()) {
            if gave_way.contains(&plan.seq) {
                break; // at most once a step
            }
            for &(victim, _) in &plan.victims {
                assert!(self.park(victim), "a planned victim can be parked");
                gave_way.push(victim);
            }
            if self.ledger.admit(plan.seq) == Ok(Arrival::Restore) {
                self.images.remove(&plan.seq).expect("a spilled sequence has an image");
            }
            came.push(plan.seq);
        }
        came
    }

    /// One engine step, with a token for each row from `token`; returns the rows that were launched.
    pub(crate) fn step(&mut self, token: impl FnMut(&Row) -> i32) -> Vec<Row> {
        self.bring_in();
        self.step_residents(token)
    }

    /// The retry loop alone: nobody comes in.
    pub(crate) fn step_residents(&mut self, token: impl FnMut(&Row) -> i32) -> Vec<Row> {
        loop {
            if schedule::pick_rows(&mut self.ledger).expect("no step is in flight") == 0 {
                return Vec::new();
            }
            match self.ledger.reserve() {
                Ok(()) => break,
                Err(BooksError::Exhausted(_)) => self.make_room(),
                Err(other) => panic!("{other}"),
            }
        }
        self.ledger.fill(&mut self.arrays).expect("reserved above");
        let rows = self.ledger.rows().to_vec();
        let tokens: Vec<i32> = rows.iter().map(token).collect();
        self.ledger.commit(&tokens, &mut self.outcomes).expect("in flight");
        for (row, &outcome) in rows.iter().zip(&self.outcomes) {
            if row.num_new > 1 || outcome == Outcome::Chunk {
                self.chunk_positions += u64::from(row.num_new);
            }
            if !matches!(outcome, Outcome::Chunk | Outcome::Token) {
                self.ended.insert(row.seq, End::Settled(outcome));
            }
        }
        self.ledger.check();
        rows
    }

    fn make_room(&mut self) {
        if let Some(victim) = schedule::victim(&self.ledger, self.spill_blocks()) {
            assert!(self.park(victim), "a victim can be parked");
            return;
        }
        let seq = schedule::capacity_row(&self.ledger).expect("a shortage has a row that grows");
        assert_eq!(self.ledger.release(seq, Reuse::Keep), Ok(true));
        self.ended.insert(seq, End::Capacity);
    }

    /// Steps until nobody is left, at most `bound` times; returns how many steps it took.
    pub(crate) fn run(&mut self, bound: u32) -> u32 {
        let mut steps = 0;
        while self.ledger.num_live() > 0 {
            assert!(steps < bound, "still going after {bound} steps: {:?}", self.ledger);
            assert!(!self.step(|_| 2).is_empty() || self.ledger.num_live() == 0, "a step with work launches something");
            steps += 1;
        }
        self.must_be_empty();
        steps
    }

    /// Nothing is left over.
    pub(crate) fn must_be_empty(&self) {
        self.ledger.check();
        assert_eq!((self.ledger.num_live(), self.ledger.num_residents()), (0, 0));
        assert_eq!(self.ledger.blocks().free(), self.ledger.blocks().total());
        assert_eq!(self.images, BTreeMap::new(), "an image is left over");
    }
}
