//! A small engine around the books: who comes in, the retry loop, steps in flight, a host store that counts blocks. No
//! device.

use std::collections::{BTreeMap, VecDeque};

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::{
    Arrival, Ledger, NewSequence, Outcome, ParkBy, Reuse, Row, Sequence, Settings, State, StepArrays,
};
use _native::schedule;
use _native::victim::Victim;

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
    /// Steps in flight at most.
    pub(crate) depth: usize,
    flights: VecDeque<Vec<Row>>,
    /// Blocks of images that the host holds at most.
    host_blocks: u32,
    images: BTreeMap<SeqId, u32>,
    pub(crate) ended: BTreeMap<SeqId, End>,
    /// Every park, in order.
    pub(crate) parks: Vec<(SeqId, ParkBy)>,
    /// Positions computed in chunks.
    pub(crate) chunk_positions: u64,
    /// The tokens of each sequence, in the order in which they were settled.
    pub(crate) delivered: BTreeMap<SeqId, Vec<i32>>,
    /// Whose rows were discarded, in order.
    pub(crate) over_runs: Vec<SeqId>,
    /// The rows that were settled in this engine step.
    settled: Vec<Row>,
    arrays: StepArrays,
    outcomes: Vec<Outcome>,
}

impl Engine {
    /// One that runs ahead: with up to `depth` steps in flight.
    pub(crate) fn with_depth(settings: Settings, host_blocks: u32, depth: usize) -> Self {
        Self { depth, ..Self::new(settings, host_blocks) }
    }

    pub(crate) fn new(settings: Settings, host_blocks: u32) -> Self {
        Self {
            ledger: ledger(settings),
            depth: 1,
            flights: VecDeque::new(),
            host_blocks,
            images: BTreeMap::new(),
            ended: BTreeMap::new(),
            parks: Vec::new(),
            chunk_positions: 0,
            delivered: BTreeMap::new(),
            over_runs: Vec::new(),
            settled: Vec::new(),
            arrays: StepArrays::default(),
            outcomes: Vec::new(),
        }
    }

    pub(crate) fn num_in_flight(&self) -> usize {
        self.flights.len()
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

    /// Lets in whoever fits; returns them in order. With nothing in flight.
    pub(crate) fn bring_in(&mut self) -> Vec<SeqId> {
        self.bring_in_with(&mut |_| unreachable!("nothing is in flight"))
    }

    fn bring_in_with(&mut self, token: &mut impl FnMut(&Row) -> i32) -> Vec<SeqId> {
        let mut came = Vec::new();
        let mut gave_way = Vec::new();
        while let Some(plan) = schedule::next_arrival(&self.ledger, self.spill_blocks()) {
            if gave_way.contains(&plan.seq) {
                break; // at most once a step
            }
            if plan.settle_first {
                self.settle(token);
                continue;
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

    /// One engine step, with a token for each row from `token`; returns the rows that were settled in it.
    pub(crate) fn step(&mut self, mut token: impl FnMut(&Row) -> i32) -> Vec<Row> {
        self.settled.clear();
        self.bring_in_with(&mut token);
        self.step_residents_with(&mut token)
    }

    /// The retry loop alone: nobody comes in.
    pub(crate) fn step_residents(&mut self, mut token: impl FnMut(&Row) -> i32) -> Vec<Row> {
        self.settled.clear();
        self.step_residents_with(&mut token)
    }

    fn step_residents_with(&mut self, token: &mut impl FnMut(&Row) -> i32) -> Vec<Row> {
        self.masks();
        while self.flights.len() < self.depth && self.launch(token) {}
        if !self.flights.is_empty() {
            self.settle(token);
        }
        self.settled.clone()
    }

    /// Every mask is there as soon as the tokens before it are.
    pub(crate) fn masks(&mut self) {
        for seq in self.ledger.residents().map(Sequence::id).collect::<Vec<_>>() {
            self.ledger.mask_ready(seq).expect("it is live");
        }
    }

    /// Launches one step; false if there is no row for one.
    pub(crate) fn launch(&mut self, token: &mut impl FnMut(&Row) -> i32) -> bool {
        loop {
            if schedule::pick_rows(&mut self.ledger).expect("nothing is reserved") == 0 {
                return false;
            }
            match self.ledger.reserve() {
                Ok(()) => break,
                Err(BooksError::Exhausted(_)) => self.make_room(token),
                Err(other) => panic!("{other}"),
            }
        }
        let rows = self.ledger.rows().to_vec();
        self.ledger.fill(&mut self.arrays).expect("reserved above");
        self.flights.push_back(rows);
        true
    }

    /// Settles the oldest step, with a token for each row from `token`.
    pub(crate) fn settle(&mut self, token: &mut impl FnMut(&Row) -> i32) {
        let rows = self.flights.pop_front().expect("nothing is settled with nothing in flight");
        let tokens: Vec<i32> = rows.iter().map(token).collect();
        self.ledger.commit(&tokens, &mut self.outcomes).expect("in flight");
        for ((row, &outcome), token) in rows.iter().zip(&self.outcomes).zip(tokens) {
            if outcome == Outcome::OverRun {
                self.over_runs.push(row.seq);
                continue;
            }
            if row.num_new > 1 || outcome == Outcome::Chunk {
                self.chunk_positions += u64::from(row.num_new);
            }
            if matches!(outcome, Outcome::Token | Outcome::Stop | Outcome::Length) {
                self.delivered.entry(row.seq).or_default().push(token);
            }
            if !matches!(outcome, Outcome::Chunk | Outcome::Token) {
                assert_eq!(self.ended.insert(row.seq, End::Settled(outcome)), None, "{} ended twice", row.seq);
            }
        }
        self.settled.extend(rows);
        self.ledger.check();
    }

    fn make_room(&mut self, token: &mut impl FnMut(&Row) -> i32) {
        match schedule::victim(&self.ledger, self.spill_blocks()) {
            Victim::Settle => self.settle(token),
            Victim::Gives(victim) => assert!(self.park(victim), "a victim can be parked"),
            Victim::Nobody => {
                let seq = schedule::capacity_row(&self.ledger).expect("a shortage has a row that grows");
                assert_eq!(self.ledger.release(seq, Reuse::Keep), Ok(true));
                self.ended.insert(seq, End::Capacity);
            }
        }
    }

    /// Steps until nobody is left, at most `bound` times; returns how many steps it took.
    pub(crate) fn run(&mut self, bound: u32) -> u32 {
        self.run_with(bound, |_| 2)
    }

    /// Likewise, with a token for each row from `token`; in the end nothing is in flight either.
    pub(crate) fn run_with(&mut self, bound: u32, mut token: impl FnMut(&Row) -> i32) -> u32 {
        let mut steps = 0;
        while self.ledger.num_live() > 0 || self.num_in_flight() > 0 {
            assert!(steps < bound, "still going after {bound} steps: {:?}", self.ledger);
            assert!(!self.step(&mut token).is_empty() || self.ledger.num_live() == 0, "a step with work settles one");
            steps += 1;
        }
        self.must_be_empty();
        steps
    }

    /// Nothing is left over.
    pub(crate) fn must_be_empty(&self) {
        self.ledger.check();
        assert_eq!((self.ledger.num_live(), self.ledger.num_residents(), self.ledger.fenced_slots()), (0, 0, 0));
        assert_eq!(self.ledger.blocks().free(), self.ledger.blocks().total());
        assert_eq!(self.images, BTreeMap::new(), "an image is left over");
    }
}
