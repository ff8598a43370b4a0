//! Odd requests and settings: refused with their numbers before anything changed, or served.

use _native::error::{BooksError, Problem};
use _native::ids::SeqId;
use _native::ledger::{Ledger, NewSequence, Outcome, Settings};

use crate::engine::{End, Engine};
use crate::setup::{ledger, prompt, request, settings, submit};

fn refuses(books: &mut Ledger, new: &NewSequence, field: &'static str, problem: Problem) {
    let before = format!("{books:?}");
    assert_eq!(books.submit(new), Err(BooksError::invalid(field, problem)));
    assert_eq!(format!("{books:?}"), before);
}

#[test]
fn prompts_up_to_the_context_are_served_and_end_with_it() {
    let settings = Settings { num_blocks: 64, context_length: 64, ..settings() };
    for (length, tokens) in [(60, 4), (61, 4), (62, 3), (63, 2), (64, 1)] {
        let mut engine = Engine::new(settings.clone(), 0);
        let seq = engine.submit(&request(length, 4));
        assert_eq!(engine.run(9), tokens, "a prompt of {length}");
        assert_eq!(engine.ended[&seq], End::Settled(Outcome::Length));
    }
    let mut books = ledger(settings);
    for length in [65, 1_000_000] {
        let given = length as u64;
        refuses(&mut books, &request(length, 4), "prompt", Problem::OverContext { given, context_length: 64 });
    }
}

#[test]
fn what_never_fits_the_pool_is_refused_and_who_queues_behind_is_served() {
    let mut engine = Engine::new(Settings { num_blocks: 49, block_size: 16, context_length: 2_048, ..settings() }, 0);
    for _ in 0..5 {
        let problem = Problem::NeverFits { needed: 63, total: 49 };
        refuses(&mut engine.ledger, &prompt(1_002), "prompt", problem);
    }
    let short = engine.submit(&request(6, 3));
    assert_eq!(short, SeqId(0));
    assert_eq!(engine.run(9), 3);
}

#[test]
fn ids_that_the_model_does_not_have_are_refused_by_name_and_place() {
    let vocab_size = 128;
    let mut books = ledger(Settings { vocab_size, ..settings() });
    for token in [128, -1, 1 << 31, 5_279_552_648_203_111_001, i64::MIN] {
        let problem = Problem::NoSuchToken { token, index: 1, vocab_size };
        refuses(&mut books, &NewSequence { prompt: vec![127, token], ..prompt(1) }, "prompt", problem.clone());
        refuses(&mut books, &NewSequence { stop_token_ids: vec![0, token], ..prompt(1) }, "stop_token_ids", problem);
    }
    assert_eq!(
        books.submit(&NewSequence { prompt: vec![0, 127], stop_token_ids: vec![127], ..prompt(1) }),
        Ok(SeqId(0))
    );
}

#[test]
fn an_empty_prompt_and_an_empty_budget_are_refused() {
    let mut books = ledger(settings());
    refuses(&mut books, &prompt(0), "prompt", Problem::Empty);
    refuses(&mut books, &request(1, 0), "max_new_tokens", Problem::TooSmall { given: 0, least: 1 });
}

#[test]
fn a_budget_is_never_reserved_in_advance() {
    for budget in [1, 1 << 40, u64::MAX] {
        let mut books = ledger(settings());
        let seq = submit(&mut books, &request(5, budget));
        books.admit(seq).expect("it fits");
        assert_eq!(books.blocks().free(), 6);
    }
}

#[test]
fn settings_out_of_bounds_are_refused_by_name() {
    type Change = fn(&mut Settings, u32);
    let least_of: [(&str, u64, Change); 7] = [
        ("num_blocks", i32::MAX as u64, |settings, value| settings.num_blocks = value),
        ("block_size", i32::MAX as u64, |settings, value| settings.block_size = value),
        ("num_slots", 1 << 20, |settings, value| settings.num_slots = value),
        ("context_length", i32::MAX as u64, |settings, value| settings.context_length = value),
        ("vocab_size", i32::MAX as u64, |settings, value| settings.vocab_size = value),
        ("step_tokens", 1 << 24, |settings, value| settings.step_tokens = value),
        ("row_tile", 1 << 16, |settings, value| settings.row_tile = value),
    ];
    for (field, most, change) in least_of {
        let too_large = u32::try_from(most + 1).expect("i32 and one");
        let wrong = [
            (0, Problem::TooSmall { given: 0, least: 1 }),
            (too_large, Problem::TooLarge { given: u64::from(too_large), most }),
            (u32::MAX, Problem::TooLarge { given: u64::from(u32::MAX), most }),
        ];
        for (value, problem) in wrong {
            let mut settings = settings();
            change(&mut settings, value);
            assert_eq!(Ledger::new(settings), Err(BooksError::invalid(field, problem)));
        }
    }
    assert!(Ledger::new(Settings { head_room: 0, ..settings() }).is_ok());
}

#[test]
fn refusals_say_the_numbers() {
    let mut books = ledger(settings());
    let said = |new: &NewSequence, books: &mut Ledger| books.submit(new).map_err(|refusal| refusal.to_string());
    for (new, sentence) in [
        (prompt(0), "prompt: is empty; it needs at least one token"),
        (prompt(65), "prompt: has 65 tokens, the context holds 64"),
        (prompt(33), "prompt: needs 9 KV blocks, the pool has 8 in all"),
        (request(1, 0), "max_new_tokens: must be at least 1, not 0"),
        (
            NewSequence { prompt: vec![1, 5], ..prompt(1) },
            "prompt: token id 5 at index 1 is not one of the 5 ids 0 to 4",
        ),
    ] {
        assert_eq!(said(&new, &mut books), Err(sentence.to_owned()));
    }
}
