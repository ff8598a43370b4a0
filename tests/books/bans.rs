//! What a row must not choose, by example.

use _native::error::{BooksError, Problem};
use _native::ledger::{ALWAYS, FROM_FEED, Ledger, MOST_BANS, NewSequence, StepArrays};
use _native::schedule;

use crate::setup::{ledger, prompt, settings, submit};

/// Launches the next step; returns its token ids, and the banned ids of its only row.
fn launch(ledger: &mut Ledger) -> (Vec<i32>, Vec<(i32, i32)>) {
    let mut arrays = StepArrays::default();
    schedule::pick_rows(ledger).expect("nothing is reserved");
    ledger.reserve().expect("there is room");
    ledger.fill(&mut arrays).expect("reserved");
    assert!(arrays.bans.iter().all(|ban| ban[0] == 0), "there is one row");
    (arrays.token_ids, arrays.bans.iter().map(|&[_, id, after]| (id, after)).collect())
}

fn settle(ledger: &mut Ledger, token: i32) {
    ledger.commit(&[token], &mut Vec::new()).expect("in flight");
    ledger.check();
}

/// One sequence alone, admitted.
fn admitted(new: &NewSequence) -> Ledger {
    let mut ledger = ledger(settings());
    let seq = submit(&mut ledger, new);
    ledger.admit(seq).expect("it fits");
    ledger
}

#[test]
fn no_stop_id_comes_before_so_many_tokens_whether_they_are_known_or_in_flight() {
    let new = NewSequence { stop_token_ids: vec![3, 4], min_tokens: 2, ..prompt(3) };
    let (stops, none) = (vec![(3, ALWAYS), (4, ALWAYS)], Vec::new());
    for depth in 1..=4 {
        let mut ledger = admitted(&new);
        let mut banned = Vec::new();
        while banned.len() < 4 {
            while ledger.num_in_flight() < depth && banned.len() < 4 {
                banned.push(launch(&mut ledger).1);
            }
            settle(&mut ledger, 1);
        }
        assert_eq!(banned, [&stops, &stops, &none, &none].map(Clone::clone), "depth {depth}");
    }
}

#[test]
fn a_banned_id_never_comes_and_a_row_that_reads_nothing_has_no_bans() {
    let new = NewSequence { banned_token_ids: vec![0, 2], ..prompt(9) };
    let mut ledger = ledger(_native::ledger::Settings { step_tokens: 5, row_tile: 5, ..settings() });
    let seq = submit(&mut ledger, &new);
    ledger.admit(seq).expect("it fits");
    assert_eq!(launch(&mut ledger).1, []);
    for _ in 0..3 {
        assert_eq!(launch(&mut ledger).1, [(0, ALWAYS), (2, ALWAYS)]);
    }
}

#[test]
fn once_thinking_has_ended_neither_id_comes_again_even_where_the_end_is_in_flight() {
    let mut ledger = admitted(&NewSequence { think_tokens: Some((3, 4)), ..prompt(3) });
    assert_eq!(launch(&mut ledger), (vec![1; 3], vec![]));
    let after_end = vec![(3, 4), (4, 4)];
    assert_eq!(launch(&mut ledger), (vec![FROM_FEED], after_end.clone()));
    // Of two unknown tokens the first may be the end: it waits for one of them.
    assert_eq!(schedule::pick_rows(&mut ledger), Ok(0));
    assert_eq!(ledger.sat_out().len(), 1);
    settle(&mut ledger, 3);
    assert_eq!(launch(&mut ledger), (vec![FROM_FEED], after_end));
    settle(&mut ledger, 4);
    // The end is known, so that nothing has to be asked again.
    let never = vec![(3, ALWAYS), (4, ALWAYS)];
    for _ in 0..3 {
        assert_eq!(launch(&mut ledger), (vec![FROM_FEED], never.clone()));
    }
    while ledger.num_in_flight() > 0 {
        settle(&mut ledger, 1);
    }
    assert_eq!(launch(&mut ledger), (vec![1], never));
}

#[test]
fn a_known_input_that_is_no_end_bans_nothing() {
    let mut ledger = admitted(&NewSequence { think_tokens: Some((3, 4)), ..prompt(3) });
    launch(&mut ledger);
    settle(&mut ledger, 3);
    assert_eq!(launch(&mut ledger), (vec![3], vec![]));
}

#[test]
fn more_bans_than_a_few_are_refused_with_their_number() {
    let mut ledger = ledger(_native::ledger::Settings { vocab_size: 200, ..settings() });
    let most = i64::from(MOST_BANS);
    let new = |banned: i64, stops: i64, think_tokens, min_tokens| NewSequence {
        // Each twice: an id is counted once.
        banned_token_ids: (10..10 + banned).flat_map(|id| [id, id]).collect(),
        stop_token_ids: (100..100 + stops).flat_map(|id| [id, id]).collect(),
        think_tokens,
        min_tokens,
        ..prompt(1)
    };
    let think = Some((3, 4));
    for served in [new(most, 40, None, 0), new(most - 2, 40, think, 0), new(most - 5, 3, think, 1)] {
        assert!(ledger.submit(&served).is_ok());
    }
    for refused in [new(most + 1, 0, None, 0), new(most - 1, 0, think, 0), new(most - 5, 4, think, 1)] {
        let problem = Problem::TooManyBans { given: u64::from(MOST_BANS) + 1, most: MOST_BANS };
        assert_eq!(ledger.submit(&refused), Err(BooksError::invalid("banned_token_ids", problem)));
    }
}

#[test]
fn bans_that_cannot_be_are_refused_by_name() {
    let mut ledger = ledger(settings());
    let no_such = |token, index| Problem::NoSuchToken { token, index, vocab_size: 5 };
    for (new, field, problem) in [
        (NewSequence { banned_token_ids: vec![0, 5], ..prompt(1) }, "banned_token_ids", no_such(5, 1)),
        (NewSequence { think_tokens: Some((-1, 0)), ..prompt(1) }, "think_tokens", no_such(-1, 0)),
        (NewSequence { think_tokens: Some((0, 5)), ..prompt(1) }, "think_tokens", no_such(5, 1)),
        (
            NewSequence { min_tokens: 3, max_new_tokens: 2, ..prompt(1) },
            "min_tokens",
            Problem::TooLarge { given: 3, most: 2 },
        ),
    ] {
        assert_eq!(ledger.submit(&new), Err(BooksError::invalid(field, problem)));
    }
    assert!(ledger.submit(&NewSequence { min_tokens: 2, max_new_tokens: 2, ..prompt(1) }).is_ok());
}
