//! Who comes in first, whose row comes first, and who is left alone, by example.

use std::collections::{BTreeMap, BTreeSet};

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::{NewSequence, Outcome, ParkBy, Reuse, Sequence, Settings, State};
use _native::schedule::{self, ArrivalPlan};

use crate::engine::{End, Engine};
use crate::setup::{decode, ledger, prompt, request, settings, submit};

/// A plan that may be carried out at once.
fn parking(seq: SeqId, victims: Vec<(SeqId, ParkBy)>) -> ArrivalPlan {
    ArrivalPlan { seq, victims, settle_first: false }
}

fn urgent(new: NewSequence) -> NewSequence {
    NewSequence { priority: 1, ..new }
}

#[test]
fn a_slot_is_taken_once_for_a_higher_priority_and_never_for_an_equal_one() {
    let mut engine = Engine::new(Settings { num_slots: 1, ..settings() }, 0);
    let low = engine.submit(&request(4, 9));
    engine.step(|_| 2);
    let equal = engine.submit(&request(4, 2));
    engine.step(|_| 2);
    assert_eq!(engine.state(equal), State::Queued);
    let high = engine.submit(&urgent(request(4, 6)));
    engine.step(|_| 2);
    assert_eq!((engine.state(high), engine.parks.clone()), (State::Decoding, vec![(low, ParkBy::Replay)]));
    let higher_too = engine.submit(&urgent(request(4, 2)));
    let mut order = Vec::new();
    while engine.ledger.num_live() > 0 {
        let rows = engine.step(|_| 2);
        assert_eq!(rows.len(), 1);
        if order.last() != Some(&rows[0].seq) {
            order.push(rows[0].seq);
        }
    }
    assert_eq!(order, [high, higher_too, low, equal]);
    assert_eq!(engine.parks.len(), 1);
}

#[test]
fn a_sequence_parked_once_is_not_overtaken_by_those_that_arrive_later() {
    let mut engine = Engine::new(Settings { num_slots: 1, ..settings() }, 0);
    let parked = engine.submit(&request(4, 10));
    engine.step(|_| 2);
    assert!(engine.park(parked));
    let mut ended_at = None;
    for step in 0..200 {
        engine.submit(&request(1, 1));
        engine.step(|_| 2);
        if engine.ended.contains_key(&parked) && ended_at.is_none() {
            ended_at = Some(step);
        }
    }
    // One step replays its four tokens, nine generate the rest.
    assert_eq!(ended_at, Some(9));
}

#[test]
fn nobody_is_parked_for_a_head_that_would_not_fit_all_the_same() {
    let mut ledger = ledger(settings());
    for (length, priority) in [(16, 1), (8, 0)] {
        let seq = submit(&mut ledger, &NewSequence { priority, ..prompt(length) });
        ledger.admit(seq).expect("it fits");
    }
    let head = submit(&mut ledger, &urgent(prompt(12)));
    // Without the other: 4 blocks are free, 3 + 2 of head-room are needed.
    assert_eq!(schedule::next_arrival(&ledger, 100), None);
    ledger.release(head, Reuse::Discard).expect("it waits");
    let head = submit(&mut ledger, &urgent(prompt(8)));
    let victims = vec![(SeqId(1), ParkBy::Replay)];
    assert_eq!(schedule::next_arrival(&ledger, 100), Some(parking(head, victims)));
}

#[test]
fn the_fewest_give_way_to_a_priority_immune_ones_and_the_only_one_too() {
    let mut ledger = ledger(Settings { num_blocks: 12, ..settings() });
    for (length, priority) in [(8, 0), (8, 0), (8, -1)] {
        let seq = submit(&mut ledger, &NewSequence { priority, ..prompt(length) });
        ledger.admit(seq).expect("it fits");
        decode(&mut ledger);
    }
    ledger.park(SeqId(2), ParkBy::Spill).expect("it is resident");
    ledger.admit(SeqId(2)).expect("it fits");
    assert!(ledger.get(SeqId(2)).is_ok_and(Sequence::is_immune));
    let head = submit(&mut ledger, &urgent(prompt(16)));
    // The lowest priority first, though immune; then whoever has generated the fewest: its image no longer fits.
    let victims = vec![(SeqId(2), ParkBy::Spill), (SeqId(1), ParkBy::Replay)];
    assert_eq!(schedule::next_arrival(&ledger, 2), Some(parking(head, victims)));
    for other in [0, 1] {
        ledger.release(SeqId(other), Reuse::Discard).expect("it is resident");
    }
    ledger.release(head, Reuse::Discard).expect("it waits");
    let whole = submit(&mut ledger, &urgent(prompt(48)));
    let victims = vec![(SeqId(2), ParkBy::Spill)];
    assert_eq!(schedule::next_arrival(&ledger, 2), Some(parking(whole, victims)));
}

#[test]
fn one_whose_image_no_longer_fits_is_passed_over_for_a_priority() {
    let mut ledger = ledger(settings());
    for replayable in [false, false, true] {
        let seq = submit(&mut ledger, &NewSequence { replayable, ..prompt(5) });
        ledger.admit(seq).expect("it fits");
    }
    decode(&mut ledger);
    let head = submit(&mut ledger, &urgent(prompt(12)));
    let victims = vec![(SeqId(0), ParkBy::Spill), (SeqId(2), ParkBy::Replay)];
    assert_eq!(schedule::next_arrival(&ledger, 3), Some(parking(head, victims)));
    assert_eq!(schedule::next_arrival(&ledger, 1), None);
}

#[test]
fn a_blocked_head_holds_back_all_behind_it() {
    let mut ledger = ledger(settings());
    let running = submit(&mut ledger, &urgent(prompt(16)));
    ledger.admit(running).expect("it fits");
    let head = submit(&mut ledger, &urgent(prompt(20)));
    submit(&mut ledger, &prompt(1));
    submit(&mut ledger, &urgent(prompt(1)));
    assert_eq!(schedule::next_arrival(&ledger, 100), None);
    ledger.release(running, Reuse::Keep).expect("it is resident");
    assert_eq!(schedule::next_arrival(&ledger, 100).map(|plan| plan.seq), Some(head));
}

#[test]
fn waiting_goes_by_priority_then_the_parked_then_the_number() {
    let mut ledger = ledger(settings());
    let seqs = [0, 0, 0, 1, 0].map(|priority| submit(&mut ledger, &NewSequence { priority, ..prompt(4) }));
    for &seq in &seqs[1..3] {
        ledger.admit(seq).expect("it fits");
        ledger.park(seq, ParkBy::Replay).expect("it is resident");
    }
    let order = |ledger: &_native::ledger::Ledger| ledger.waiting().map(|one| one.id().0).collect::<Vec<_>>();
    assert_eq!(order(&ledger), [3, 1, 2, 0, 4]);
    assert_eq!(ledger.resume(seqs[4]), Ok(true));
    assert_eq!(order(&ledger), [3, 4, 1, 2, 0]);
    // Resumed last stands first, in its priority; twice is no more than once.
    assert_eq!((ledger.resume(seqs[2]), ledger.resume(seqs[2])), (Ok(true), Ok(true)));
    assert_eq!(order(&ledger), [3, 2, 4, 1, 0]);
    ledger.admit(seqs[2]).expect("it fits");
    assert_eq!(ledger.resume(seqs[2]), Ok(false));
    ledger.park(seqs[2], ParkBy::Replay).expect("it is resident");
    assert_eq!(order(&ledger), [3, 4, 1, 2, 0]);
    ledger.check();
}

#[test]
fn decodes_come_first_then_one_tile_for_the_oldest_then_more_chunks() {
    let settings = |step_tokens| Settings { num_blocks: 40, step_tokens, row_tile: 8, ..settings() };
    for (step_tokens, expected) in [
        (1, [1, 1, 8, 0]), // over the budget: two decodes and a tile
        (2, [1, 1, 8, 0]),
        (10, [1, 1, 8, 0]),
        (12, [1, 1, 10, 0]),
        (23, [1, 1, 20, 1]),
        (64, [1, 1, 20, 30]),
    ] {
        let mut ledger = ledger(settings(step_tokens));
        let seqs = [4, 4, 20, 30].map(|length| submit(&mut ledger, &prompt(length)));
        // The younger of the unfinished sits in the lower slot.
        for &seq in [&seqs[0], &seqs[3], &seqs[1]] {
            ledger.admit(seq).expect("it fits");
        }
        ledger.park(seqs[3], ParkBy::Replay).expect("it is resident");
        while ledger.get(seqs[1]).is_ok_and(|one| one.generated() == 0) {
            decode(&mut ledger);
        }
        for &seq in [&seqs[3], &seqs[2]] {
            ledger.admit(seq).expect("it fits");
        }
        schedule::pick_rows(&mut ledger).expect("no step is in flight");
        let rows = ledger.rows();
        assert!(rows.is_sorted_by_key(|row| row.slot));
        let share = |seq| rows.iter().find(|row| row.seq == seq).map_or(0, |row| row.num_new);
        assert_eq!(seqs.map(share), expected, "a budget of {step_tokens}");
        let tokens: u32 = rows.iter().map(|row| row.num_new).sum();
        assert!(tokens <= ledger.settings().most_step_tokens());
    }
}

#[test]
fn a_huge_budget_keeps_no_short_ones_waiting() {
    let mut engine = Engine::new(Settings { num_blocks: 40, num_slots: 11, ..settings() }, 0);
    engine.submit(&request(4, 1 << 40));
    for _ in 0..10 {
        engine.submit(&request(4, 3));
    }
    for _ in 0..3 {
        engine.step(|_| 2);
    }
    assert_eq!((engine.ended.len(), engine.parks.len(), engine.ledger.num_live()), (10, 0, 1));
}

#[test]
fn cancelling_the_queued_or_the_unknown_leaves_the_running_one_untouched() {
    let mut engine = Engine::new(Settings { num_slots: 1, ..settings() }, 0);
    let running = engine.submit(&request(4, 9));
    engine.step(|_| 2);
    let queued = engine.submit(&prompt(4));
    let before = format!("{:?}", engine.ledger.get(running));
    engine.cancel(queued);
    assert_eq!(engine.ledger.release(queued, Reuse::Keep), Ok(false));
    assert_eq!(engine.ledger.release(SeqId(9), Reuse::Keep), Err(BooksError::Unknown(SeqId(9))));
    assert_eq!(format!("{:?}", engine.ledger.get(running)), before);
    engine.run(10);
}

#[test]
fn cancelling_at_random_leaks_nothing_and_the_others_end_as_they_would() {
    let settings = Settings { num_blocks: 40, num_slots: 16, step_tokens: 16, ..settings() };
    let mut engine = Engine::new(settings, 12);
    let (mut seed, mut cancelled, mut submitted) = (1_u64, BTreeMap::new(), Vec::new());
    let mut random = |below: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(seed >> 33).expect("31 bits") % below.max(1)
    };
    while submitted.len() < 120 || engine.ledger.num_live() > 0 {
        for _ in 0..random(4).min(120 - submitted.len()) {
            submitted.push(engine.submit(&request(1 + random(20), 1 + random(20) as u64)));
        }
        engine.step(|_| 2);
        let residents: Vec<SeqId> = engine.ledger.residents().map(Sequence::id).collect();
        if random(3) == 0 && !residents.is_empty() {
            engine.park(residents[random(residents.len())]);
        }
        if random(3) > 0 && cancelled.len() < 48 {
            let live = engine.ledger.residents().chain(engine.ledger.waiting()).map(|one| (one.id(), one.state()));
            let mut live: Vec<(SeqId, State)> = live.collect();
            // The states take turns, as far as they occur.
            let times = |state| cancelled.values().filter(|&&other| other == state).count();
            let fewest = live.iter().map(|&(_, state)| times(state)).min();
            live.retain(|&(_, state)| Some(times(state)) == fewest);
            if let Some(&(seq, state)) = live.get(random(live.len())) {
                engine.cancel(seq);
                cancelled.insert(seq, state);
            }
        }
    }
    engine.must_be_empty();
    let mut ended: Vec<SeqId> = engine.ended.keys().chain(cancelled.keys()).copied().collect();
    ended.sort_unstable();
    assert_eq!(ended, submitted);
    assert!(engine.ended.values().all(|&end| end == End::Settled(Outcome::Length)));
    assert_eq!(cancelled.len(), 48);
    for state in [State::Queued, State::Prefilling, State::Decoding, State::ParkedSpill, State::ParkedReplay] {
        assert!(cancelled.values().any(|&other| other == state), "nobody was cancelled while {state:?}");
    }
}

#[test]
fn five_hundred_short_lives_leave_the_books_as_they_were() {
    let mut engine = Engine::new(settings(), 0);
    engine.submit(&request(4, 1 << 40));
    engine.step(|_| 2);
    let mut sizes = BTreeSet::new();
    for round in 0..500 {
        engine.ledger.release(SeqId(round), Reuse::Keep).expect("it is live");
        assert_eq!((engine.ledger.blocks().free(), engine.ledger.free_slots()), (8, 4));
        engine.submit(&request(6, 1 << 40));
        for _ in 0..3 {
            engine.step(|_| 2);
        }
        assert_eq!((engine.ledger.blocks().free(), engine.ledger.free_slots()), (6, 3));
        if round >= 100 {
            // Numbers have three digits now: if anything piled up, the books would be longer to print.
            sizes.insert(format!("{:?}", engine.ledger).len());
        }
    }
    assert!(sizes.len() <= 2, "{sizes:?}");
}
