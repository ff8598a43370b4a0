//! Settings and sequences of a tiny universe, for the examples.

use _native::ids::SeqId;
use _native::ledger::{Ledger, NewSequence, Settings};
use _native::schedule;
use _native::victim::Policy;
use proptest::prelude::ProptestConfig;

/// B=4, N=8, S=4: small enough to count by hand.
pub(crate) fn settings() -> Settings {
    Settings {
        num_blocks: 8,
        block_size: 4,
        num_slots: 4,
        context_length: 64,
        vocab_size: 5,
        step_tokens: 64,
        row_tile: 8,
        head_room: 1,
        immunity_tokens: 64,
        policy: Policy::FewestGenerated,
        park_constrained: true,
    }
}

/// An empty ledger.
pub(crate) fn ledger(settings: Settings) -> Ledger {
    Ledger::new(settings).expect("the settings of a test are in bounds")
}

/// A prompt of `length` tokens with a budget that a test does not reach.
pub(crate) fn prompt(length: usize) -> NewSequence {
    NewSequence {
        prompt: vec![1; length],
        max_new_tokens: 1_000,
        priority: 0,
        replayable: true,
        ..NewSequence::default()
    }
}

/// A prompt of `length` tokens that generates `budget` tokens.
pub(crate) fn request(length: usize, budget: u64) -> NewSequence {
    NewSequence { max_new_tokens: budget, ..prompt(length) }
}

/// Submits a sequence that can be served.
pub(crate) fn submit(ledger: &mut Ledger, new: &NewSequence) -> SeqId {
    ledger.submit(new).expect("it fits the context and the pool")
}

/// Picks, reserves, fills and commits a step that has room, with token 2 for each row; returns how many rows it had.
pub(crate) fn decode(ledger: &mut Ledger) -> usize {
    let rows = schedule::pick_rows(ledger).expect("no step is in flight");
    ledger.reserve().expect("the blocks are there");
    ledger.fill(&mut _native::ledger::StepArrays::default()).expect("reserved above");
    ledger.commit(&vec![2; rows], &mut Vec::new()).expect("as many tokens as rows");
    ledger.check();
    rows
}

/// Eight times as many cases as `PROPTEST_CASES` says, as they are small; a failing one is printed, and written
/// nowhere.
pub(crate) fn cases() -> ProptestConfig {
    let default = ProptestConfig::default();
    ProptestConfig { cases: 8 * default.cases, failure_persistence: None, ..default }
}
