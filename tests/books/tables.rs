//! Blocks at every length and edge, and parks in the middle of everything, by example.

use _native::ids::SeqId;
use _native::ledger::{Arrival, Ledger, Outcome, ParkBy, Readback, Row, Settings, State, StepArrays};
use _native::schedule;

use crate::setup::{decode, ledger, prompt, settings, submit};

const WAYS: [ParkBy; 2] = [ParkBy::Spill, ParkBy::Replay];

/// One sequence alone, with `length` positions committed and a pending token.
fn decoding(settings: Settings, length: usize) -> (Ledger, SeqId) {
    let mut ledger = ledger(settings);
    let seq = submit(&mut ledger, &prompt(length));
    ledger.admit(seq).expect("the pool is free");
    while ledger.get(seq).is_ok_and(|one| one.generated() == 0) {
        decode(&mut ledger);
    }
    (ledger, seq)
}

/// Launches a step with `token` for each row; returns its rows and arrays.
fn step(ledger: &mut Ledger, token: i32) -> (Vec<Row>, StepArrays) {
    let mut arrays = StepArrays::default();
    schedule::pick_rows(ledger).expect("no step is in flight");
    ledger.reserve().expect("the blocks are there");
    let rows = ledger.rows().to_vec();
    ledger.fill(&mut arrays).expect("reserved");
    ledger.commit(&vec![token; rows.len()], &mut Vec::new()).expect("in flight");
    ledger.check();
    (rows, arrays)
}

#[test]
fn the_blocks_are_those_of_the_length_at_every_length() {
    for block_size in 1..=5_u32 {
        let (mut ledger, seq) = decoding(Settings { num_blocks: 40, block_size, ..settings() }, 1);
        for length in 1..40_u32 {
            let one = ledger.get(seq).expect("live");
            assert_eq!(one.committed(), length);
            assert_eq!(one.table().len(), length.div_ceil(block_size) as usize, "{length} positions of {block_size}");
            decode(&mut ledger);
        }
    }
}

#[test]
fn a_park_at_a_block_edge_uses_the_pending_token_once() {
    for (length, by) in [4, 5, 7, 8, 9].into_iter().flat_map(|length| WAYS.map(|by| (length, by))) {
        let (mut ledger, seq) = decoding(settings(), length);
        for _ in 0..2 {
            ledger.park(seq, by).expect("it is resident");
            assert_eq!(ledger.blocks().free(), 8);
            ledger.admit(seq).expect("the pool is free");
            let one = ledger.get(seq).expect("live");
            assert_eq!((one.table().len(), one.generated()), (length.div_ceil(4), 1));
        }
        if by == ParkBy::Replay {
            let (rows, arrays) = step(&mut ledger, 4);
            assert_eq!(
                (rows[0].start, rows[0].num_new, rows[0].readback),
                (0, u32::try_from(length).expect("small"), Readback::Nothing)
            );
            assert_eq!(arrays.token_ids, vec![1; length]);
        }
        let (rows, arrays) = step(&mut ledger, 4);
        assert_eq!((rows[0].start as usize, rows[0].num_new), (length, 1));
        assert_eq!(arrays.token_ids, [2]); // the token of the prefill
        let one = ledger.get(seq).expect("live");
        assert_eq!((one.committed() as usize, one.pending(), one.generated()), (length + 1, Some(4), 2));
        assert_eq!(one.table().len(), (length + 1).div_ceil(4));
    }
}

#[test]
fn a_park_after_any_chunk_of_a_prefill_goes_on_from_what_is_kept_and_samples_once() {
    for (chunks, by) in (0..=4).flat_map(|chunks| WAYS.map(|by| (chunks, by))) {
        let mut ledger = ledger(Settings { step_tokens: 3, row_tile: 3, ..settings() });
        let seq = submit(&mut ledger, &prompt(14));
        ledger.admit(seq).expect("the pool is free");
        for _ in 0..chunks {
            decode(&mut ledger);
        }
        let committed = ledger.get(seq).expect("live").committed();
        assert_eq!(committed, 3 * chunks);
        if by == ParkBy::Spill && committed == 0 {
            continue; // there is no image
        }
        assert_eq!(ledger.image_blocks(seq).map(<[_]>::len), Ok(committed.div_ceil(4) as usize));
        ledger.park(seq, by).expect("it is resident");
        let arrival = if by == ParkBy::Spill { Arrival::Restore } else { Arrival::Replay };
        assert_eq!(ledger.admit(seq), Ok(arrival));
        let one = ledger.get(seq).expect("live");
        let kept = if by == ParkBy::Spill { committed } else { 0 };
        assert_eq!((one.state(), one.committed(), one.table().len()), (State::Prefilling, kept, 4));
        let (mut position, mut sampled) = (kept, 0);
        while ledger.get(seq).is_ok_and(|one| one.state() == State::Prefilling) {
            let (rows, _) = step(&mut ledger, 2);
            assert_eq!(rows[0].start, position);
            position += rows[0].num_new;
            sampled += u32::from(rows[0].readback == Readback::Argmax);
        }
        assert_eq!((position, sampled), (14, 1));
    }
}

#[test]
fn a_park_after_any_chunk_of_a_replay_samples_nothing_again() {
    for (chunks, by) in (1..=4).flat_map(|chunks| WAYS.map(|by| (chunks, by))) {
        let (mut ledger, seq) = decoding(Settings { step_tokens: 3, row_tile: 3, ..settings() }, 13);
        decode(&mut ledger);
        ledger.park(seq, ParkBy::Replay).expect("it is resident");
        ledger.admit(seq).expect("the pool is free");
        for _ in 0..chunks {
            decode(&mut ledger);
        }
        ledger.park(seq, by).expect("it is resident");
        ledger.admit(seq).expect("the pool is free");
        let mut sampled = 0;
        while ledger.get(seq).is_ok_and(|one| one.state() == State::Prefilling) {
            let (rows, _) = step(&mut ledger, 2);
            sampled += u32::from(rows[0].readback == Readback::Argmax);
        }
        let one = ledger.get(seq).expect("live");
        assert_eq!((sampled, one.generated(), one.committed(), one.pending()), (0, 2, 14, Some(2)));
    }
}

#[test]
fn an_image_that_cannot_be_restored_is_replayed_in_place() {
    let (mut ledger, seq) = decoding(settings(), 9);
    ledger.park(seq, ParkBy::Spill).expect("it has an image");
    assert_eq!(ledger.admit(seq), Ok(Arrival::Restore));
    ledger.drop_image(seq).expect("it is replayable");
    let one = ledger.get(seq).expect("live");
    assert_eq!((one.state(), one.committed(), one.table().len(), one.is_immune()), (State::Prefilling, 0, 3, true));
    let (rows, arrays) = step(&mut ledger, 4);
    assert_eq!((rows[0].num_new, rows[0].readback, arrays.table_changes.len()), (9, Readback::Nothing, 3));
}

#[test]
fn table_entries_are_told_once_and_all_anew_to_the_next_in_the_slot() {
    let mut ledger = ledger(Settings { num_slots: 1, ..settings() });
    let seq = submit(&mut ledger, &prompt(7));
    ledger.admit(seq).expect("the pool is free");
    let changes = |ledger: &mut Ledger| step(ledger, 2).1.table_changes;
    assert_eq!(changes(&mut ledger), [[0, 0, 0], [0, 1, 1]]);
    assert_eq!(changes(&mut ledger), Vec::<[i32; 3]>::new());
    assert_eq!(changes(&mut ledger), [[0, 2, 2]]);
    ledger.park(seq, ParkBy::Spill).expect("it has an image");
    let other = submit(&mut ledger, &prompt(1));
    ledger.admit(other).expect("it fits");
    assert_eq!(changes(&mut ledger), [[0, 0, 0]]);
    ledger.release(other, _native::ledger::Reuse::Keep).expect("it is resident");
    ledger.admit(seq).expect("it fits");
    assert_eq!(changes(&mut ledger).len(), 3);
}

#[test]
fn immunity_lasts_for_so_many_tokens_after_a_resume() {
    let (mut ledger, seq) = decoding(Settings { immunity_tokens: 3, ..settings() }, 4);
    assert!(!ledger.get(seq).expect("live").is_immune());
    ledger.park(seq, ParkBy::Spill).expect("it has an image");
    ledger.admit(seq).expect("it fits");
    let immune: Vec<bool> = (0..5)
        .map(|_| {
            let immune = ledger.get(seq).expect("live").is_immune();
            decode(&mut ledger);
            immune
        })
        .collect();
    assert_eq!(immune, [true, true, true, false, false]);
}

#[test]
fn outcomes_say_what_each_row_came_to() {
    let mut ledger = ledger(Settings { step_tokens: 20, ..settings() });
    let new = [
        prompt(12),
        crate::setup::request(3, 1),
        _native::ledger::NewSequence { stop_token_ids: vec![2], ..prompt(1) },
        prompt(2),
    ];
    for one in &new {
        let seq = submit(&mut ledger, one);
        ledger.admit(seq).expect("it fits");
    }
    schedule::pick_rows(&mut ledger).expect("no step is in flight");
    ledger.reserve().expect("no row decodes");
    ledger.fill(&mut StepArrays::default()).expect("reserved");
    let mut outcomes = Vec::new();
    ledger.commit(&[2, 2, 2, 2], &mut outcomes).expect("in flight");
    assert_eq!(outcomes, [Outcome::Token, Outcome::Length, Outcome::Stop, Outcome::Token]);
    ledger.check();
}
