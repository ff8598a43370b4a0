//! Random operations in a tiny universe, sensible or not, with up to three steps in flight, against the naive model.

use std::collections::BTreeMap;

use _native::ledger::{NewSequence, ParkBy, Reuse, Settings};
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use crate::model::Place;
use crate::serving::MOST_IN_FLIGHT;
use crate::setup::cases;
use crate::universe::{sequence, universe, way};
use crate::world::World;

/// A whole number stands for "one of those there are".
#[derive(Debug, Clone)]
enum Op {
    Submit(NewSequence),
    /// Lets the head in, parking whom the plan names, with a host budget of so many blocks.
    Arrive(u32, Tokens),
    Admit(usize),
    Park(usize, ParkBy),
    Resume(usize),
    DropImage(usize),
    Release(usize, Reuse),
    MaskReady(usize),
    Pick,
    Reserve,
    Fill,
    Commit(Tokens),
    HandBack,
    /// Every mask that is asked for is there.
    Masks,
    /// Launches a step, with victims by a host budget of so many blocks; the tokens are those of a step settled first.
    Launch(u32, Tokens),
    /// Launches until so many steps are in flight, and settles the oldest.
    Step(usize, u32, Tokens),
    FailedLaunch(Tokens),
    /// The oldest step failed: all are handed back, the newest first, and whoever was in it ends.
    FailedSettle,
}

/// A token of each row.
type Tokens = Vec<i32>;

fn operation() -> impl Strategy<Value = Op> {
    let which = || any::<usize>();
    let token = || prop_oneof![30 => 0..2_i32, 1 => -2..0_i32];
    let tokens = || prop::collection::vec(token(), 4);
    let reuse = prop_oneof![Just(Reuse::Keep), Just(Reuse::Discard)];
    prop_oneof![
        6 => sequence().prop_map(Op::Submit),
        12 => (0..8_u32, tokens()).prop_map(|(spill, tokens)| Op::Arrive(spill, tokens)),
        1 => which().prop_map(Op::Admit),
        5 => (which(), way()).prop_map(|(one, by)| Op::Park(one, by)),
        1 => which().prop_map(Op::Resume),
        1 => which().prop_map(Op::DropImage),
        2 => (which(), reuse).prop_map(|(one, reuse)| Op::Release(one, reuse)),
        1 => which().prop_map(Op::MaskReady),
        1 => Just(Op::Pick),
        1 => Just(Op::Reserve),
        3 => Just(Op::Fill),
        1 => prop::collection::vec(prop_oneof![9 => token(), 1 => -4..9_i32], 0..5).prop_map(Op::Commit),
        3 => Just(Op::HandBack),
        8 => Just(Op::Masks),
        10 => (0..8_u32, tokens()).prop_map(|(spill, tokens)| Op::Launch(spill, tokens)),
        18 => (1..=MOST_IN_FLIGHT, 0..8_u32, tokens()).prop_map(|(depth, spill, tokens)| Op::Step(depth, spill, tokens)),
        1 => tokens().prop_map(Op::FailedLaunch),
        2 => Just(Op::FailedSettle),
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
            Op::Arrive(spill_blocks, tokens) => self.arrive(*spill_blocks, tokens),
            Op::Admit(which) => drop(self.admit(self.some(*which))),
            Op::Park(which, by) => drop(self.park(self.some(*which), *by)),
            Op::Resume(which) => self.resume(self.some(*which)),
            Op::DropImage(which) => self.drop_image(self.some(*which)),
            Op::Release(which, reuse) => self.release(self.some(*which), *reuse),
            Op::MaskReady(which) => self.mask_ready(self.some(*which)),
            Op::Pick => drop(self.pick()),
            Op::Reserve => drop(self.reserve()),
            Op::Fill if self.is_full() => {}
            Op::Fill => drop(self.fill()),
            Op::Commit(tokens) => drop(self.commit(tokens)),
            Op::HandBack => drop(self.hand_back()),
            Op::Masks => self.masks(),
            Op::Launch(spill_blocks, tokens) => drop(self.launch(*spill_blocks, tokens)),
            Op::Step(depth, spill_blocks, tokens) => self.whole_step(*depth, *spill_blocks, tokens),
            Op::FailedLaunch(tokens) => self.failed_launch(tokens),
            Op::FailedSettle => self.failed_settle(),
        }
        self.compare();
    }
}

fn operations() -> impl Strategy<Value = Vec<Op>> {
    prop::collection::vec(operation(), 1..120)
}

fn play(universe: Settings, operations: &[Op]) -> World {
    let mut world = World::new(universe);
    world.compare();
    for operation in operations {
        world.apply(operation);
    }
    world
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn books_agree_with_the_naive_model_after_every_operation(
        universe in universe(),
        operations in operations(),
    ) {
        play(universe, &operations);
    }
}

/// The test above would pass if it did nothing much; so this counts what such operations come to.
#[test]
fn random_operations_reach_every_transition_and_every_refusal() {
    let mut runner = TestRunner::deterministic();
    let mut seen = BTreeMap::new();
    for _ in 0..600 {
        let draw = (universe(), operations()).new_tree(&mut runner).expect("nothing is rejected").current();
        for (what, times) in play(draw.0, &draw.1).seen {
            *seen.entry(what).or_default() += times;
        }
    }
    let both_ways = [
        "submit",
        "admit",
        "drop_image",
        "spill",
        "replay",
        "release",
        "pick",
        "reserve",
        "fill",
        "commit",
        "resume",
        "mask_ready",
    ];
    let at_least_once = [
        "restore",
        "hand_back",
        "hand_back ahead",
        "preempt",
        "settle",
        "settle first",
        "admit ahead",
        "park ahead",
        "release ahead",
        "sit out",
        "feed",
        "ban",
        "ban after",
        "over-run",
    ];
    let wanted = both_ways.iter().flat_map(|&name| [(name, true), (name, false)]);
    for what in wanted.chain(at_least_once.map(|name| (name, true))) {
        let times: u32 = seen.get(&what).copied().unwrap_or_default();
        assert!(times >= 20, "{what:?} happened {times} times: {seen:?}");
    }
}
