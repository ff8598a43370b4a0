//! Strategies for tiny universes: settings, and sequences that can mostly be served.

use _native::ledger::{NewSequence, ParkBy, Settings};
use _native::victim::Policy;
use proptest::prelude::*;

pub(crate) fn universe() -> impl Strategy<Value = Settings> {
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

pub(crate) fn way() -> impl Strategy<Value = ParkBy> {
    prop_oneof![Just(ParkBy::Spill), Just(ParkBy::Replay)]
}

/// Mostly what can be served; ids up to one past the smallest vocabulary, empty prompts, budgets and bans too.
pub(crate) fn sequence() -> impl Strategy<Value = NewSequence> {
    let ids = || prop_oneof![60 => 0..2_i64, 1 => -1..6_i64, 1 => Just(i64::MAX)];
    let prompt = prop::collection::vec(ids(), 0..=9);
    let stop_token_ids = prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(ids(), 1..=2)];
    let budget = prop_oneof![20 => 1..=16_u64, 1 => Just(0), 1 => Just(1 << 40), 1 => Just(u64::MAX)];
    let flags = (prop::bool::weighted(0.75), prop::bool::weighted(0.25));
    (prompt, budget, -1..=1_i32, stop_token_ids, flags, bans()).prop_map(
        |(prompt, max_new_tokens, priority, stop_token_ids, (replayable, constrained), bans)| NewSequence {
            prompt,
            max_new_tokens,
            priority,
            stop_token_ids,
            replayable,
            constrained,
            min_tokens: bans.0,
            banned_token_ids: bans.1,
            think_tokens: bans.2,
        },
    )
}

/// Least number of tokens, banned ids, ids of thinking. Mostly none.
fn bans() -> impl Strategy<Value = (u64, Vec<i64>, Option<(i64, i64)>)> {
    let id = || prop_oneof![60 => 0..2_i64, 1 => -1..6_i64];
    let min_tokens = prop_oneof![24 => Just(0), 8 => 1..=3_u64, 1 => Just(17)];
    let banned = prop_oneof![3 => Just(Vec::new()), 1 => prop::collection::vec(id(), 1..=3)];
    let think = prop_oneof![3 => Just(None), 1 => (id(), 0..2_i64).prop_map(|(start, end)| Some((start, end)))];
    (min_tokens, banned, think)
}
