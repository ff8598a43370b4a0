//! What happens when the blocks run out, by example.

use _native::ids::SeqId;
use _native::ledger::{NewSequence, Outcome, ParkBy, Sequence, Settings, State};
use _native::schedule;
use _native::victim::Victim;

use crate::engine::{End, Engine};
use crate::setup::{decode, ledger, prompt, request, settings, submit};

/// Lets `lengths` in, and computes their prompts in one step.
fn prefilled(settings: Settings, host_blocks: u32, sequences: &[NewSequence]) -> (Engine, Vec<SeqId>) {
    let mut engine = Engine::new(settings, host_blocks);
    let seqs: Vec<SeqId> = sequences.iter().map(|new| engine.submit(new)).collect();
    assert_eq!(engine.bring_in(), seqs);
    assert_eq!(engine.step_residents(|_| 2).len(), seqs.len());
    (engine, seqs)
}

#[test]
fn a_shortage_is_counted_in_blocks_and_only_as_many_give_way_as_must() {
    let settings = Settings { num_blocks: 14, num_slots: 6, head_room: 0, ..settings() };
    for (host_blocks, by) in [(0, ParkBy::Replay), (100, ParkBy::Spill)] {
        let (mut engine, seqs) = prefilled(settings.clone(), host_blocks, &vec![request(8, 12); 6]);
        assert_eq!(engine.ledger.blocks().free(), 2);
        let rows = engine.step_residents(|_| 2);
        assert_eq!(engine.parks, [(seqs[0], by), (seqs[1], by)]);
        assert_eq!(
            rows.iter().map(|row| (row.seq, row.num_new)).collect::<Vec<_>>(),
            [2, 3, 4, 5].map(|seq| (SeqId(seq), 1))
        );
        engine.run(100);
        assert_eq!(engine.ended, seqs.iter().map(|&seq| (seq, End::Settled(Outcome::Length))).collect());
    }
}

#[test]
fn a_lone_sequence_decodes_until_the_pool_is_full_and_the_next_is_served() {
    let (mut engine, seqs) = prefilled(settings(), 0, &[request(20, 40)]);
    for generated in 2..=13 {
        assert_eq!(engine.step(|_| 2).len(), 1);
        assert_eq!(engine.ledger.get(seqs[0]).map(Sequence::generated), Ok(generated));
    }
    assert_eq!((engine.ledger.blocks().free(), engine.ledger.get(seqs[0]).map(Sequence::committed)), (0, Ok(32)));
    assert_eq!(engine.step(|_| 2), []);
    assert_eq!((engine.ended[&seqs[0]], engine.parks.len()), (End::Capacity, 0));
    engine.must_be_empty();
    let next = engine.submit(&request(32, 1));
    engine.run(2);
    assert_eq!(engine.ended[&next], End::Settled(Outcome::Length));
}

#[test]
fn a_stop_before_the_pool_is_full_is_no_matter_of_capacity() {
    let (mut engine, seqs) = prefilled(settings(), 0, &[NewSequence { stop_token_ids: vec![3], ..request(20, 40) }]);
    for _ in 2..=5 {
        engine.step(|_| 2);
    }
    engine.step(|_| 3);
    assert_eq!(engine.ended[&seqs[0]], End::Settled(Outcome::Stop));
    engine.must_be_empty();
}

#[test]
fn a_victim_is_found_where_all_are_immune_or_constrained() {
    for (constrained, parked_before) in [(false, true), (true, false), (true, true)] {
        let new = NewSequence { constrained, ..prompt(8) };
        let (mut engine, seqs) = prefilled(Settings { head_room: 0, ..settings() }, 0, &[new.clone(), new]);
        if parked_before {
            for &seq in &seqs {
                assert!(engine.park(seq));
            }
            engine.step(|_| 2);
            assert!(seqs.iter().all(|&seq| engine.ledger.get(seq).is_ok_and(Sequence::is_immune)));
        }
        assert_eq!(schedule::victim(&engine.ledger, 0), Victim::Gives(seqs[0]));
    }
}

#[test]
fn the_constrained_are_never_parked_where_the_settings_say_so() {
    let settings = Settings { num_blocks: 4, head_room: 0, park_constrained: false, ..settings() };
    let new = NewSequence { constrained: true, ..request(7, 6) };
    let (mut engine, seqs) = prefilled(settings, 100, &[new.clone(), new]);
    assert_eq!(schedule::victim(&engine.ledger, 100), Victim::Nobody);
    engine.run(20);
    // Both need a third block at once; the first in victim order ends, the other takes what it held.
    assert_eq!(engine.parks, []);
    assert_eq!(engine.ended, [(seqs[0], End::Capacity), (seqs[1], End::Settled(Outcome::Length))].into());
}

#[test]
fn with_nobody_to_park_only_the_row_that_cannot_grow_ends() {
    let settings = Settings { num_blocks: 4, head_room: 0, ..settings() };
    let fixed = |length| NewSequence { replayable: false, ..request(length, 4) };
    let (mut engine, seqs) = prefilled(settings, 0, &[fixed(6), fixed(8)]);
    assert_eq!(schedule::victim(&engine.ledger, 0), Victim::Nobody);
    assert_eq!(schedule::capacity_row(&engine.ledger), Some(seqs[1]));
    let rows = engine.step(|_| 2);
    assert_eq!(rows.iter().map(|row| row.seq).collect::<Vec<_>>(), [seqs[0]]);
    assert_eq!(engine.ended, [(seqs[1], End::Capacity)].into());
    engine.run(10);
    assert_eq!(engine.ended[&seqs[0]], End::Settled(Outcome::Length));
}

#[test]
fn with_one_block_for_two_rows_that_cannot_be_parked_one_ends() {
    let settings = Settings { num_blocks: 5, head_room: 0, ..settings() };
    let fixed = NewSequence { replayable: false, ..request(8, 4) };
    let (mut engine, seqs) = prefilled(settings, 0, &[fixed.clone(), fixed]);
    engine.run(10);
    assert_eq!(engine.ended, [(seqs[0], End::Capacity), (seqs[1], End::Settled(Outcome::Length))].into());
}

#[test]
fn a_sequence_that_can_only_be_spilled_is_a_victim_while_its_image_fits() {
    let (engine, seqs) = prefilled(settings(), 0, &[NewSequence { replayable: false, ..prompt(9) }, prompt(3)]);
    assert_eq!(schedule::victim(&engine.ledger, 2), Victim::Gives(seqs[1]));
    assert_eq!(schedule::victim(&engine.ledger, 3), Victim::Gives(seqs[0]));
}

#[test]
fn an_image_over_the_host_budget_is_replayed_and_a_smaller_one_spilled() {
    let settings = Settings { num_blocks: 16, ..settings() };
    let (mut engine, seqs) = prefilled(settings, 2, &[request(20, 9), request(5, 9), request(5, 9), request(5, 9)]);
    for &seq in &seqs {
        assert!(engine.park(seq));
    }
    let ways = engine.parks.iter().map(|&(_, by)| by).collect::<Vec<_>>();
    assert_eq!(ways, [ParkBy::Replay, ParkBy::Spill, ParkBy::Replay, ParkBy::Replay]);
    engine.run(100);
}

#[test]
fn a_prompt_of_the_whole_pool_comes_in_alone() {
    let mut engine = Engine::new(settings(), 0);
    let small = engine.submit(&request(1, 2));
    assert_eq!(engine.bring_in(), [small]);
    let whole = engine.submit(&request(32, 1));
    assert_eq!(engine.step(|_| 2).len(), 1);
    assert_eq!(engine.step(|_| 2).len(), 1);
    assert_eq!(engine.bring_in(), [whole]);
    assert_eq!(engine.ledger.blocks().free(), 0);
    engine.run(1);
}

#[test]
fn two_prompts_never_count_the_same_free_blocks() {
    for (head_room, lengths, come_in) in [
        (0, [16, 16], 2),
        (0, [16, 17], 1),
        (0, [20, 20], 1),
        (1, [12, 12], 2), // 3 blocks, then 3 + 2 of the 5 that are left
        (1, [12, 13], 1),
        (2, [8, 8], 2),
        (2, [8, 9], 1),
        (1_000, [1, 1], 1),
    ] {
        let mut ledger = ledger(Settings { head_room, ..settings() });
        for length in lengths {
            submit(&mut ledger, &prompt(length));
        }
        let mut count = 0;
        while let Some(plan) = schedule::next_arrival(&ledger, 0) {
            ledger.admit(plan.seq).expect("a planned arrival fits");
            count += 1;
        }
        assert_eq!(count, come_in, "head-room {head_room}, prompts {lengths:?}");
    }
}

#[test]
fn nobody_comes_in_on_the_blocks_that_this_step_s_decodes_need() {
    let (mut engine, _) = prefilled(Settings { head_room: 0, ..settings() }, 0, &[prompt(4), prompt(8)]);
    // Five blocks are free; both decodes step over an edge.
    let four = engine.submit(&prompt(13));
    assert_eq!(schedule::next_arrival(&engine.ledger, 0), None);
    engine.cancel(four);
    let three = engine.submit(&prompt(12));
    assert_eq!(engine.bring_in(), [three]);
}

#[test]
fn a_history_waits_until_all_of_its_replay_fits_and_is_not_parked_again() {
    let settings = Settings { num_blocks: 16, step_tokens: 8, ..settings() };
    let mut engine = Engine::new(settings, 0);
    let parked = engine.submit(&request(40, 20));
    while engine.ledger.get(parked).expect("live").generated() == 0 {
        engine.step(|_| 2);
    }
    assert!(engine.park(parked));
    let other = engine.submit(&request(44, 9));
    engine.ledger.admit(other).expect("the pool is free");
    engine.chunk_positions = 0;
    while !engine.ended.contains_key(&other) {
        engine.step(|_| 2);
        assert!(engine.state(parked).is_parked() || engine.ended.contains_key(&other));
    }
    assert_eq!(engine.chunk_positions, 44);
    engine.run(40);
    assert_eq!((engine.parks.len(), engine.chunk_positions), (1, 44 + 40));
}

#[test]
fn a_sequence_uses_exactly_the_blocks_of_its_budget() {
    let mut engine = Engine::new(Settings { num_blocks: 4, ..settings() }, 0);
    let seq = engine.submit(&request(13, 4));
    for generated in 1..=3 {
        engine.step(|_| 2);
        assert_eq!(engine.ledger.get(seq).map(|one| (one.generated(), one.table().len())), Ok((generated, 4)));
    }
    assert_eq!(engine.step(|_| 2).len(), 1);
    assert_eq!((engine.ended[&seq], engine.parks.len()), (End::Settled(Outcome::Length), 0));
    engine.must_be_empty();
}

#[test]
fn the_first_token_may_stop_and_a_stop_on_the_last_is_a_stop() {
    for (budget, end) in [(1, Outcome::Stop), (4, Outcome::Stop)] {
        let mut engine = Engine::new(settings(), 0);
        let seq = engine.submit(&NewSequence { stop_token_ids: vec![0, 3], ..request(13, budget) });
        engine.step(|_| 3);
        assert_eq!(engine.ended[&seq], End::Settled(end));
        engine.must_be_empty();
    }
}

#[test]
fn a_row_without_a_token_ends_alone() {
    for (answer, end) in [(-1, Outcome::NothingAllowed), (-2, Outcome::Nan)] {
        let (mut engine, seqs) = prefilled(settings(), 0, &[request(8, 4), request(4, 4)]);
        engine.step(|row| if row.seq == seqs[0] { answer } else { 2 });
        assert_eq!(engine.ended, [(seqs[0], End::Settled(end))].into());
        assert_eq!(engine.state(seqs[1]), State::Decoding);
        assert_eq!(engine.ledger.blocks().free(), 8 - 2);
        assert_eq!(decode(&mut engine.ledger), 1);
    }
}
