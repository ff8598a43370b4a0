//! Random operations in a tiny universe, sensible or not, against the naive model.

use std::collections::BTreeMap;

use _native::ids::SeqId;
use _native::ledger::{NewSequence, Outcome, ParkBy, Reuse, Settings};
use _native::schedule;
use _native::victim::Policy;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::model::{Place, Step};
use crate::setup::cases;
use crate::world::World;

/// A whole number stands for "one of those there are".
#[derive(Debug, Clone)]
enum Op {
    Submit(NewSequence),
    /// Lets the head in, parking whom the plan names, with a host budget of so many blocks.
    Arrive(u32),
    Admit(usize),
    Park(usize, ParkBy),
    Resume(usize),
    DropImage(usize),
    Release(usize, Reuse),
    Pick,
    Reserve,
    Fill,
    Commit(Vec<i32>),
    HandBack,
    /// A whole step, with victims by a host budget of so many blocks and a token for each row.
    Step(u32, Vec<i32>),
    FailedStep,
}

fn universe() -> impl Strategy<Value = Settings> {
    let sizes = (1..=10_u32, 1..=4_u32, 1..=4_u32, 1..=24_u32, 2..=5_u32);
    let schedule = (1..=12_u32, 1..=4_u32, prop_oneof![4 => 0..=2_u32, 1 => Just(99)]);
    let immunity = prop_oneof![3 => 0..=3_u64, 1 => Just(u64::MAX)];
    (sizes, schedule, immunity, policy(), prop::bool::weighted(0.8)).prop_map(
        |(sizes, (step_tokens, row_tile, head_room), immunity_tokens, policy, park_constrained)| Settings {
            num_blocks: sizes.0,
            block_size: sizes.1,
            num_slots: sizes.2,
            context_length: sizes.3,
            vocab_size: sizes.4,
            step_tokens,
            row_tile,
            head_room,
            immunity_tokens,
            policy,
            park_constrained,
        },
    )
}

pub(crate) fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![2 => Just(Policy::FewestGenerated), 1 => Just(Policy::Newest), 1 => Just(Policy::Largest)]
}

fn way() -> impl Strategy<Value = ParkBy> {
    prop_oneof![Just(ParkBy::Spill), Just(ParkBy::Replay)]
}

/// Mostly what can be served; ids up to one past the smallest vocabulary, empty prompts and budgets too.
fn sequence() -> impl Strategy<Value = NewSequence> {
    let ids = || prop_oneof![60 => 0..2_i64, 1 => -1..6_i64, 1 => Just(i64::MAX)];
    let prompt = prop::collection::vec(ids(), 0..=9);
    let stop_token_ids = prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(ids(), 1..=2)];
    let budget = prop_oneof![20 => 1..=16_u64, 1 => Just(0), 1 => Just(1 << 40), 1 => Just(u64::MAX)];
    let flags = (prop::bool::weighted(0.75), prop::bool::weighted(0.25));
    (prompt, budget, -1..=1_i32, stop_token_ids, flags).prop_map(
        |(prompt, max_new_tokens, priority, stop_token_ids, (replayable, constrained))| NewSequence {
            prompt,
            max_new_tokens,
            priority,
            stop_token_ids,
            replayable,
            constrained,
        },
    )
}

fn operation() -> impl Strategy<Value = Op> {
    let which = || any::<usize>();
    let token = || prop_oneof![30 => 0..2_i32, 1 => -2..0_i32];
    let reuse = prop_oneof![Just(Reuse::Keep), Just(Reuse::Discard)];
    prop_oneof![
        4 => sequence().prop_map(Op::Submit),
        12 => (0..8_u32).prop_map(Op::Arrive),
        1 => which().prop_map(Op::Admit),
        6 => (which(), way()).prop_map(|(one, by)| Op::Park(one, by)),
        1 => which().prop_map(Op::Resume),
        1 => which().prop_map(Op::DropImage),
        1 => (which(), reuse).prop_map(|(one, reuse)| Op::Release(one, reuse)),
        2 => Just(Op::Pick),
        2 => Just(Op::Reserve),
        2 => Just(Op::Fill),
        2 => prop::collection::vec(prop_oneof![9 => token(), 1 => -4..9_i32], 0..5).prop_map(Op::Commit),
        1 => Just(Op::HandBack),
        20 => (0..8_u32, prop::collection::vec(token(), 4)).prop_map(|(spill, tokens)| Op::Step(spill, tokens)),
        1 => Just(Op::FailedStep),
    ]
}

impl World {
    /// A live sequence, an ended one, or one that never was.
    fn some(&self, which: usize) -> usize {
        let ended = |&seq: &usize| self.model.lives[seq].place == Place::Ended;
        let mut choice: Vec<usize> = (0..self.model.lives.len()).filter(|seq| !ended(seq)).collect();
        choice.extend((0..self.model.lives.len()).find(ended));
        choice.push(self.model.lives.len());
        choice[which % choice.len()]
    }

    fn apply(&mut self, op: &Op) {
        match op {
            Op::Submit(new) => drop(self.submit(new)),
            Op::Arrive(spill_blocks) => self.arrive(*spill_blocks),
            Op::Admit(which) => drop(self.admit(self.some(*which))),
            Op::Park(which, by) => drop(self.park(self.some(*which), *by)),
            Op::Resume(which) => self.resume(self.some(*which)),
            Op::DropImage(which) => self.drop_image(self.some(*which)),
            Op::Release(which, reuse) => self.release(self.some(*which), *reuse),
            Op::Pick => drop(self.pick()),
            Op::Reserve => drop(self.reserve()),
            Op::Fill => drop(self.fill()),
            Op::Commit(tokens) => drop(self.commit(tokens)),
            Op::HandBack => self.hand_back(),
            Op::Step(spill_blocks, tokens) => self.whole_step(*spill_blocks, tokens),
            Op::FailedStep => self.failed_step(),
        }
        self.compare();
    }

    fn arrive(&mut self, spill_blocks: u32) {
        let Some(plan) = self.next_arrival(spill_blocks) else { return };
        for (victim, by) in plan.victims {
            assert!(self.park(index(victim), by), "a planned victim can be parked as planned");
            *self.seen.entry(("preempt", true)).or_default() += 1;
            self.compare();
        }
        let flying = matches!(self.model.step, Step::Reserved(_) | Step::Flying(_));
        assert_eq!(self.admit(index(plan.seq)).is_some(), !flying, "a planned arrival fits");
    }

    /// Picks and reserves; on a shortage somebody leaves, until the others fit.
    fn make_fit(&mut self, spill_blocks: u32) -> bool {
        while self.pick().is_some_and(|rows| rows > 0) {
            self.compare();
            if self.reserve() {
                return true;
            }
            self.make_room(spill_blocks);
            self.compare();
        }
        false
    }

    fn make_room(&mut self, spill_blocks: u32) {
        let Some(victim) = schedule::victim(&self.ledger, spill_blocks).map(index) else {
            let row = schedule::capacity_row(&self.ledger).expect("a shortage has a row that grows");
            self.release(index(row), Reuse::Keep);
            return;
        };
        let real = self.ledger.get(SeqId(victim as u64)).expect("a victim is live");
        let spills = real.can_spill(self.ledger.settings().block_size, spill_blocks);
        assert!(self.park(victim, if spills { ParkBy::Spill } else { ParkBy::Replay }), "a victim can be parked");
    }

    fn whole_step(&mut self, spill_blocks: u32, tokens: &[i32]) {
        if !self.make_fit(spill_blocks) {
            return;
        }
        assert!(self.fill(), "reserved above");
        self.compare();
        let outcomes = self.commit(tokens).expect("as many tokens as slots");
        assert!(outcomes.iter().all(|outcome| *outcome as u8 <= Outcome::Nan as u8));
    }

    fn failed_step(&mut self) {
        if self.make_fit(0) {
            assert!(self.fill(), "reserved above");
            self.compare();
            self.hand_back();
        }
    }
}

fn index(seq: SeqId) -> usize {
    usize::try_from(seq.0).expect("a tiny universe")
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(operation(), 1..120)
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn books_agree_with_the_naive_model_after_every_operation(
        universe in universe(),
        operations in operations(),
    ) {
        let mut world = World::new(universe);
        world.compare();
        for operation in &operations {
            world.apply(operation);
        }
    }
}

/// The test above would pass if it did nothing much; so this counts what such operations come to.
#[test]
fn random_operations_reach_every_transition_and_every_refusal() {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeMap::new();
    for _ in 0..300 {
        let draw = (universe(), operations()).new_tree(&mut runner).expect("nothing is rejected").current();
        let mut world = World::new(draw.0);
        draw.1.iter().for_each(|operation| world.apply(operation));
        for (what, times) in world.seen {
            *seen.entry(what).or_default() += times;
        }
    }
    let both_ways =
        ["submit", "admit", "drop_image", "spill", "replay", "release", "pick", "reserve", "fill", "commit", "resume"];
    let wanted = both_ways.iter().flat_map(|&name| [(name, true), (name, false)]);
    for what in wanted.chain([("restore", true), ("hand_back", true), ("preempt", true)]) {
        let times: u32 = seen.get(&what).copied().unwrap_or_default();
        assert!(times >= 20, "{what:?} happened {times} times: {seen:?}");
    }
}
