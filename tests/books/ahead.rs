//! Steps in flight behind one another, by example: at depth 1, 2 and 3.

use _native::ids::SeqId;
use _native::ledger::{NewSequence, Outcome, ParkBy, Row, Sequence, Settings, State};
use _native::schedule;
use _native::victim::{Policy, Victim};

use crate::engine::{End, Engine};
use crate::setup::{prompt, request, settings};

/// The token of a row: it depends on the sequence and the position alone, as that of a device does.
pub(crate) fn sampled(row: &Row) -> i32 {
    i32::try_from((row.seq.0 + u64::from(row.start + row.num_new)) % 3).expect("small")
}

/// The tokens that a sequence with such a prompt generates.
fn solo(seq: SeqId, length: u32, count: u32) -> Vec<i32> {
    (0..count).map(|index| i32::try_from((seq.0 + u64::from(length + index)) % 3).expect("small")).collect()
}

/// Lets everybody in, computes the prompts, and leaves nothing in flight.
fn prefilled(settings: Settings, depth: usize, sequences: &[NewSequence]) -> (Engine, Vec<SeqId>) {
    let mut engine = Engine::with_depth(settings, 0, depth);
    let seqs: Vec<SeqId> = sequences.iter().map(|new| engine.submit(new)).collect();
    assert_eq!(engine.bring_in(), seqs);
    assert!(engine.launch(&mut sampled));
    engine.settle(&mut sampled);
    (engine, seqs)
}

#[test]
fn a_budget_of_exactly_the_pool_asks_for_no_block_and_no_row_too_many() {
    for depth in 1..=3 {
        let mut engine = Engine::with_depth(Settings { num_blocks: 4, ..settings() }, 0, depth);
        let seq = engine.submit(&request(13, 4));
        let mut rows = 0;
        while engine.ledger.num_live() > 0 {
            rows += engine.step(sampled).len();
        }
        assert_eq!((rows, engine.over_runs.len(), engine.parks.len()), (4, 0, 0), "depth {depth}");
        assert_eq!((engine.ended[&seq], &engine.delivered[&seq]), (End::Settled(Outcome::Length), &solo(seq, 13, 4)));
        engine.must_be_empty();
    }
}

#[test]
fn what_ran_behind_a_stop_is_discarded_and_what_it_held_is_free_after_it() {
    for depth in 1..=3 {
        let mut engine = Engine::with_depth(settings(), 0, depth);
        let seq = engine.submit(&NewSequence { stop_token_ids: vec![3], ..request(13, 4) });
        engine.step(|_| 3);
        assert_eq!((engine.ended[&seq], &engine.delivered[&seq]), (End::Settled(Outcome::Stop), &vec![3]));
        assert_eq!(engine.ledger.fenced_blocks(), if depth == 1 { 0 } else { 4 });
        for left in (0..depth - 1).rev() {
            assert_eq!(engine.ledger.fenced_slots(), 1);
            engine.step(|_| -1); // its feed cell holds a stop, so this may come to anything
            assert_eq!(engine.over_runs.len(), depth - 1 - left);
        }
        engine.must_be_empty();
    }
}

#[test]
fn nothing_runs_behind_a_last_token_that_is_sure_to_come() {
    for (depth, budget) in (1..=3).flat_map(|depth| [1, 4].map(|budget| (depth, budget))) {
        let mut engine = Engine::with_depth(settings(), 0, depth);
        let seq = engine.submit(&NewSequence { stop_token_ids: vec![3], ..request(5, budget) });
        let last = 5 + u32::try_from(budget).expect("small") - 1;
        while engine.ledger.num_live() > 0 {
            engine.step(|row| if row.start + row.num_new == last { 3 } else { 2 });
        }
        // A stop on the last token of the budget is a stop.
        assert_eq!((engine.ended[&seq], engine.over_runs.len()), (End::Settled(Outcome::Stop), 0));
        // And the context ends it as surely as the budget.
        let settings = Settings { context_length: 7, ..settings() };
        let mut engine = Engine::with_depth(settings, 0, depth);
        let seq = engine.submit(&prompt(5));
        while engine.ledger.num_live() > 0 {
            engine.step(sampled);
        }
        assert_eq!((engine.delivered[&seq].len(), engine.over_runs.len()), (3, 0));
    }
}

#[test]
fn a_token_that_comes_late_is_delivered_once() {
    for (depth, host_blocks) in (1..=3).flat_map(|depth| [0, 100].map(|host| (depth, host))) {
        let mut engine = Engine::with_depth(settings(), host_blocks, depth);
        let seq = engine.submit(&request(6, 9));
        engine.step(sampled);
        // Parked while a step of it is in flight, back in another slot, and parked again before that step is settled.
        for round in 0..2 {
            assert!(engine.launch(&mut sampled));
            assert!(engine.park(seq));
            assert_eq!(engine.ledger.fenced_slots(), 1 + round);
            assert_eq!(engine.bring_in(), [seq]);
        }
        engine.run_with(40, sampled);
        assert_eq!(engine.delivered[&seq], solo(seq, 6, 9), "depth {depth}, host {host_blocks}");
        assert_eq!(engine.parks.len(), 2);
    }
}

#[test]
fn one_that_is_cancelled_with_its_stop_in_flight_ends_once_and_its_slot_is_no_one_s_before() {
    for depth in 2..=3 {
        let mut engine = Engine::with_depth(Settings { num_slots: 2, ..settings() }, 0, depth);
        let cancelled = engine.submit(&NewSequence { stop_token_ids: vec![3], ..request(4, 9) });
        engine.step(sampled);
        while engine.num_in_flight() < depth && engine.launch(&mut sampled) {}
        engine.cancel(cancelled);
        let others = [4, 4].map(|length| engine.submit(&request(length, 3)));
        assert_eq!(engine.bring_in(), others[..1]);
        let rows = engine.step_residents(|row| if row.seq == cancelled { 3 } else { sampled(row) });
        assert_eq!((rows.len(), engine.over_runs.len()), (1, 1));
        engine.run_with(20, sampled);
        assert_eq!(engine.ledger.release(cancelled, _native::ledger::Reuse::Keep), Ok(false));
        assert_eq!(engine.ended.keys().copied().collect::<Vec<_>>(), others, "its end was the cancel");
        assert_eq!(engine.over_runs, vec![cancelled; depth]);
    }
}

#[test]
fn a_slot_is_given_on_after_the_last_step_that_names_it() {
    for depth in 1..=3 {
        let mut engine = Engine::with_depth(Settings { num_slots: 2, ..settings() }, 0, depth);
        let stops = NewSequence { stop_token_ids: vec![3], ..request(4, 9) };
        let seqs = [stops.clone(), stops, request(4, 2)].map(|new| engine.submit(&new));
        let ends = |row: &Row| if row.seq == seqs[0] && row.start == 5 { 3 } else { 2 };
        let mut steps_after = 0;
        while !engine.ledger.residents().any(|one| one.id() == seqs[2]) {
            steps_after += usize::from(engine.ended.contains_key(&seqs[0]));
            engine.step(ends);
        }
        // It came in as soon as the steps behind the stop were settled.
        assert_eq!(steps_after, depth);
        assert_eq!(engine.ledger.get(seqs[2]).map(|one| one.slot().map(|slot| slot.0)), Ok(Some(0)));
        engine.run_with(20, |_| 2);
    }
}

#[test]
fn a_victim_is_one_that_no_step_in_flight_needs_and_otherwise_a_step_is_settled_first() {
    let settings = Settings { num_blocks: 7, head_room: 0, policy: Policy::Largest, ..settings() };
    let (mut engine, seqs) = prefilled(settings.clone(), 2, &[prompt(7), prompt(5), prompt(5)]);
    // All of the tier are in flight: the step is settled, and then one gives way.
    assert!(engine.launch(&mut sampled));
    assert_eq!(schedule::victim(&engine.ledger, 0), Victim::Settle);
    // One more that is not: it gives way, though the policy prefers the others.
    let late = engine.submit(&prompt(4));
    engine.ledger.admit(late).expect("a block is free");
    assert_eq!(schedule::victim(&engine.ledger, 0), Victim::Gives(late));
    assert!(engine.launch(&mut sampled));
    assert_eq!((engine.parks.clone(), engine.num_in_flight()), (vec![(late, ParkBy::Replay)], 2));
    let settings = Settings { num_blocks: 8, ..settings };
    let (mut engine, _) = prefilled(settings, 2, &[prompt(7), prompt(5), prompt(5), prompt(5)]);
    assert!(engine.launch(&mut sampled));
    assert!(engine.launch(&mut sampled));
    assert_eq!((engine.parks.clone(), engine.num_in_flight()), (vec![(seqs[0], ParkBy::Replay)], 1));
}

#[test]
fn where_a_last_token_is_in_flight_waiting_a_step_beats_parking() {
    let settings = Settings { num_blocks: 5, head_room: 0, ..settings() };
    for depth in 2..=3 {
        let (mut engine, seqs) = prefilled(settings.clone(), depth, &[request(7, 5), request(5, 2)]);
        assert!(engine.launch(&mut sampled));
        // One that could give way at once, as no step in flight needs it.
        let late = engine.submit(&request(4, 1));
        engine.ledger.admit(late).expect("a block is free");
        assert_eq!(schedule::victim(&engine.ledger, 0), Victim::Settle);
        engine.run_with(20, sampled);
        assert_eq!((engine.parks.len(), engine.delivered[&seqs[0]].len()), (0, 5));
    }
}

#[test]
fn a_priority_waits_for_what_is_fenced_before_anybody_is_parked_for_it() {
    let settings = Settings { num_slots: 2, ..settings() };
    let (mut engine, seqs) = prefilled(settings, 2, &[request(4, 9), request(4, 9)]);
    assert!(engine.launch(&mut sampled));
    let high = engine.submit(&NewSequence { priority: 1, ..request(4, 3) });
    // Whoever would be parked is in flight.
    let plan = schedule::next_arrival(&engine.ledger, 0).expect("it would fit after a park");
    assert_eq!((plan.seq, plan.victims, plan.settle_first), (high, vec![(seqs[0], ParkBy::Replay)], true));
    // Somebody has left: in a moment it fits.
    engine.cancel(seqs[1]);
    assert_eq!(schedule::next_arrival(&engine.ledger, 0), None);
    engine.settle(&mut sampled);
    assert_eq!(engine.bring_in(), [high]);
    assert_eq!(engine.parks, []);
}

#[test]
fn a_constrained_one_has_one_token_in_flight_and_the_others_do_not_wait_for_it() {
    for depth in 1..=3 {
        let new = [NewSequence { constrained: true, ..request(4, 5) }, request(4, 5)];
        let mut engine = Engine::with_depth(settings(), 0, depth);
        let seqs = new.map(|new| engine.submit(&new));
        engine.bring_in();
        assert!(engine.launch(&mut sampled));
        // No mask is there yet: its prompt waits, as it ends in a token.
        assert_eq!(engine.ledger.sat_out(), [seqs[0]]);
        engine.masks();
        let mut masked = 0;
        while engine.num_in_flight() < 3 && engine.launch(&mut sampled) {
            masked += usize::from(engine.ledger.sat_out().is_empty());
        }
        assert_eq!((masked, engine.num_in_flight()), (1, 3));
        engine.run_with(40, sampled);
        for seq in seqs {
            assert_eq!(engine.delivered[&seq], solo(seq, 4, 5));
        }
        assert_eq!(engine.over_runs, []);
    }
}

#[test]
fn a_mask_holds_for_one_token_and_through_a_park() {
    let mut engine = Engine::with_depth(settings(), 100, 2);
    let seq = engine.submit(&NewSequence { constrained: true, ..request(4, 5) });
    engine.bring_in();
    let rows = |engine: &mut Engine| schedule::pick_rows(&mut engine.ledger).expect("nothing is reserved");
    assert_eq!(rows(&mut engine), 0);
    engine.masks();
    assert!(engine.launch(&mut sampled));
    assert_eq!((rows(&mut engine), engine.ledger.sat_out()), (0, &[seq][..]));
    // Its row is discarded, so the mask is still that of its next token.
    assert!(engine.park(seq));
    assert_eq!(engine.bring_in(), [seq]);
    assert_eq!(rows(&mut engine), 1);
    engine.settle(&mut sampled);
    assert_eq!((engine.over_runs.len(), rows(&mut engine)), (1, 1));
    assert!(engine.launch(&mut sampled));
    engine.settle(&mut sampled);
    assert_eq!(engine.ledger.get(seq).map(Sequence::state), Ok(State::Decoding));
    assert_eq!((rows(&mut engine), engine.ledger.sat_out()), (0, &[seq][..]));
}
