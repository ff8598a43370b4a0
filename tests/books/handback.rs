//! A step that is handed back never was, and a refused call changes nothing, by example.

use _native::error::{BooksError, NotParkable, Problem};
use _native::ids::SeqId;
use _native::ledger::{Ledger, NewSequence, Outcome, ParkBy, Reuse, Settings, State, StepArrays};
use _native::schedule;

use crate::setup::{decode, ledger, prompt, settings, submit};

/// Decodes at an edge and inside a block, a chunk, and a last chunk, all in the next step.
fn mixed() -> Ledger {
    let mut ledger = ledger(Settings { num_blocks: 20, step_tokens: 18, ..settings() });
    for length in [8, 5] {
        let seq = submit(&mut ledger, &prompt(length));
        ledger.admit(seq).expect("it fits");
    }
    decode(&mut ledger);
    for length in [9, 30] {
        let seq = submit(&mut ledger, &prompt(length));
        ledger.admit(seq).expect("it fits");
    }
    ledger
}

fn reserve(ledger: &mut Ledger) {
    assert_eq!(schedule::pick_rows(ledger), Ok(4));
    ledger.reserve().expect("there is room");
}

#[test]
fn books_are_equal_after_a_step_was_handed_back() {
    for filled in [false, true] {
        let (untouched, mut books) = (mixed(), mixed());
        assert_eq!(books, untouched);
        reserve(&mut books);
        assert_ne!(books, untouched);
        let mut arrays = StepArrays::default();
        if filled {
            books.fill(&mut arrays).expect("reserved");
        }
        books.hand_back();
        books.check();
        assert_eq!(books, untouched);
        books.hand_back();
        assert_eq!(books, untouched);
        // And the step that follows is the one that would have been.
        let mut expected = mixed();
        let mut other = StepArrays::default();
        for (one, arrays) in [(&mut books, &mut arrays), (&mut expected, &mut other)] {
            reserve(one);
            one.fill(arrays).expect("reserved");
            one.commit(&[2, 3, 4, 0], &mut Vec::new()).expect("in flight");
        }
        assert_eq!((&books, &arrays), (&expected, &other));
    }
}

#[test]
fn a_refused_commit_leaves_the_step_to_be_committed_or_handed_back() {
    let mut books = mixed();
    reserve(&mut books);
    books.fill(&mut StepArrays::default()).expect("reserved");
    let in_flight = format!("{books:?}");
    let refused = |problem| Err(BooksError::invalid("tokens", problem));
    let no_such = |token, index| Problem::NoSuchToken { token, index, vocab_size: 5 };
    for (tokens, problem) in [
        (&[2, 2, 2][..], Problem::TooShort { given: 3, needed: 4 }),
        (&[2, 5, 2, 2], no_such(5, 1)),
        (&[2, 2, -3, 2], no_such(-3, 2)),
        (&[i32::MIN, 2, 2, 2], no_such(i64::from(i32::MIN), 0)),
    ] {
        assert_eq!(books.commit(tokens, &mut Vec::new()), refused(problem));
        assert_eq!(format!("{books:?}"), in_flight);
    }
    // The last row is a chunk that reads nothing back, so its token does not matter.
    books.commit(&[2, 2, 2, i32::MAX], &mut Vec::new()).expect("in flight");
    assert_eq!(books.get(SeqId(3)).map(|one| (one.committed(), one.generated())), Ok((7, 0)));
    books.check();
}

#[test]
fn calls_out_of_order_are_refused_and_change_nothing() {
    type Call = fn(&mut Ledger) -> Result<(), BooksError>;
    let pick: Call = |books| schedule::pick_rows(books).map(|_| ());
    let admit: Call = |books| books.admit(SeqId(4)).map(|_| ());
    let fill: Call = |books| books.fill(&mut StepArrays::default());
    let counts: Call = |books| books.counts().map(|_| ());
    let commit: Call = |books| books.commit(&[2; 4], &mut Vec::new());
    let open: [Call; 4] = [Ledger::reserve, fill, counts, commit];
    let park: Call = |books| books.park(SeqId(0), ParkBy::Spill);
    let release: Call = |books| books.release(SeqId(0), Reuse::Keep).map(|_| ());
    let picked: [Call; 3] = [fill, counts, commit];
    let reserved: [Call; 6] = [pick, admit, Ledger::reserve, commit, park, release];
    let flying: [Call; 3] = [Ledger::reserve, fill, counts];
    let mut books = mixed();
    submit(&mut books, &prompt(1));
    let refuses = |books: &mut Ledger, calls: &[Call]| {
        let before = format!("{books:?}");
        for (index, call) in calls.iter().enumerate() {
            assert!(matches!(call(books), Err(BooksError::Misused(_))), "call {index}");
            assert_eq!(format!("{books:?}"), before, "call {index}");
        }
    };
    refuses(&mut books, &open);
    pick(&mut books).expect("no step is in flight");
    refuses(&mut books, &picked);
    books.reserve().expect("there is room");
    refuses(&mut books, &reserved);
    fill(&mut books).expect("reserved");
    refuses(&mut books, &flying);
    commit(&mut books).expect("in flight");
    refuses(&mut books, &open);
}

#[test]
fn a_plan_made_before_the_residents_changed_is_refused() {
    type Change = fn(&mut Ledger);
    let changes: [Change; 4] = [
        |books| books.park(SeqId(0), ParkBy::Replay).expect("it is resident"),
        |books| assert_eq!(books.release(SeqId(3), Reuse::Keep), Ok(true)),
        |books| books.drop_image(SeqId(1)).expect("it is replayable"),
        |books| assert_eq!(books.hand_back(), []),
    ];
    for (index, change) in changes.iter().enumerate() {
        let mut books = mixed();
        schedule::pick_rows(&mut books).expect("no step is in flight");
        change(&mut books);
        let fresh = index == 3; // nothing was reserved, so the plan still holds
        assert_eq!(books.reserve().is_ok(), fresh, "change {index}");
    }
}

#[test]
fn what_is_reserved_stays_until_it_is_filled_or_handed_back() {
    let mut books = mixed();
    let queued = submit(&mut books, &prompt(1));
    reserve(&mut books);
    let before = format!("{books:?}");
    for seq in (0..4).map(SeqId) {
        assert!(matches!(books.release(seq, Reuse::Discard), Err(BooksError::Misused(_))));
        assert_eq!(books.drop_image(seq), Err(BooksError::InFlight(seq)));
        for by in [ParkBy::Spill, ParkBy::Replay] {
            assert!(books.park(seq, by).is_err());
        }
    }
    assert_eq!(format!("{books:?}"), before);
    assert_eq!(books.release(queued, Reuse::Discard), Ok(true));
    assert_eq!(books.hand_back(), [0, 1, 2, 3].map(SeqId));
    books.check();
}

#[test]
fn who_is_in_flight_may_leave_at_once_and_what_it_held_stays_until_the_step_is_settled() {
    for handed_back in [false, true] {
        let mut books = mixed();
        reserve(&mut books);
        books.fill(&mut StepArrays::default()).expect("reserved");
        let free = (books.blocks().free(), books.free_slots());
        books.park(SeqId(0), ParkBy::Spill).expect("it has an image");
        assert_eq!(books.release(SeqId(3), Reuse::Discard), Ok(true));
        assert_eq!(books.drop_image(SeqId(1)), Err(BooksError::InFlight(SeqId(1))));
        // Three blocks of the decode over an edge, eight of the long prompt.
        assert_eq!((books.fenced_blocks(), books.fenced_slots()), (3 + 8, 2));
        assert_eq!((books.blocks().free(), books.free_slots()), free);
        assert_eq!(books.get(SeqId(0)).map(|one| (one.state(), one.committed())), Ok((State::ParkedSpill, 8)));
        books.check();
        if handed_back {
            assert_eq!(books.hand_back(), [SeqId(1), SeqId(2)]);
        } else {
            let mut outcomes = Vec::new();
            books.commit(&[2; 4], &mut outcomes).expect("in flight");
            assert_eq!(outcomes, [Outcome::OverRun, Outcome::Token, Outcome::Token, Outcome::OverRun]);
        }
        assert_eq!((books.fenced_blocks(), books.fenced_slots()), (0, 0));
        assert_eq!((books.blocks().free(), books.free_slots()), (free.0 + 11, free.1 + 2));
        books.check();
    }
}

#[test]
fn parking_twice_the_queued_the_ended_or_the_unknown_is_a_named_error() {
    let mut books = mixed();
    let queued = submit(&mut books, &prompt(1));
    let ended = submit(&mut books, &prompt(1));
    assert_eq!(books.release(ended, Reuse::Keep), Ok(true));
    books.park(SeqId(0), ParkBy::Spill).expect("it has an image");
    let before = format!("{books:?}");
    for by in [ParkBy::Spill, ParkBy::Replay] {
        for seq in [SeqId(0), queued] {
            assert_eq!(books.park(seq, by), Err(BooksError::CannotPark(seq, NotParkable::NotResident)));
        }
        assert_eq!(books.park(ended, by), Err(BooksError::Finished(ended)));
        assert_eq!(books.park(SeqId(99), by), Err(BooksError::Unknown(SeqId(99))));
    }
    for call in [Ledger::resume, |books: &mut Ledger, seq| books.admit(seq).map(|_| true)] {
        assert_eq!(call(&mut books, ended), Err(BooksError::Finished(ended)));
        assert_eq!(call(&mut books, SeqId(99)), Err(BooksError::Unknown(SeqId(99))));
    }
    assert_eq!(books.resume(SeqId(1)), Ok(false));
    assert_eq!(format!("{books:?}"), before);
}

#[test]
fn a_way_that_is_not_open_is_refused_with_its_reason() {
    let mut books = ledger(settings());
    let seq = submit(&mut books, &NewSequence { replayable: false, ..prompt(5) });
    books.admit(seq).expect("it fits");
    let nothing = Err(BooksError::CannotPark(seq, NotParkable::NothingCommitted));
    assert_eq!(books.park(seq, ParkBy::Spill), nothing);
    decode(&mut books);
    let before = format!("{books:?}");
    let not_replayable = Err(BooksError::CannotPark(seq, NotParkable::NotReplayable));
    assert_eq!(books.park(seq, ParkBy::Replay), not_replayable);
    assert_eq!(books.drop_image(seq), not_replayable);
    assert_eq!(format!("{books:?}"), before);
}

#[test]
fn steps_in_flight_are_handed_back_newest_first_and_each_exactly() {
    let (untouched, mut books) = (mixed(), mixed());
    let mut before = Vec::new();
    for rows in [4, 3, 3] {
        // The long prompt ends with the second step; who decodes, or has just got a token, feeds on what is in flight.
        before.push(format!("{books:?}"));
        assert!(schedule::pick_rows(&mut books).is_ok_and(|picked| picked >= rows));
        books.reserve().expect("there is room");
        books.fill(&mut StepArrays::default()).expect("reserved");
        books.check();
    }
    for untaken in before.iter().rev() {
        let seqs = books.hand_back();
        assert!(seqs.len() >= 3);
        books.check();
        let state = |books: &str| books.split_once(", step: StepBook").map(|(state, _)| state.to_owned());
        assert_eq!(state(&format!("{books:?}")), state(untaken));
    }
    assert_eq!(books, untouched);
    assert_eq!((books.hand_back(), books.num_in_flight()), (Vec::new(), 0));
}
