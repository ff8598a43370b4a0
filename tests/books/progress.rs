//! No schedule of arrivals, parks, priorities and pool sizes stalls with work to do.

use _native::ids::SeqId;
use _native::ledger::{NewSequence, ParkBy, Row, Sequence, Settings};
use _native::victim::Policy;
use proptest::prelude::*;

use crate::engine::{End, Engine};
use crate::setup::{cases, prompt, request};
use crate::universe::policy;

/// Who arrives in which step, who is parked by force in which, and where.
#[derive(Debug, Clone)]
struct Scenario {
    settings: Settings,
    host_blocks: u32,
    arrivals: Vec<(u32, NewSequence)>,
    forced: Vec<(u32, usize)>,
    /// The tokens that a row may have, a stop id among them.
    tokens: Vec<i32>,
}

fn settings() -> impl Strategy<Value = Settings> {
    let sizes = (1..=10_u32, 1..=4_u32, 1..=4_u32, 4..=32_u32);
    let head_room = prop_oneof![2 => Just(0_u32), 2 => Just(1), 1 => 2..=3_u32, 1 => Just(1_000)];
    let schedule = (prop_oneof![Just(1_u32), 1..=16_u32], 1..=8_u32, head_room);
    let immunity = prop_oneof![Just(0_u64), 1..=8_u64, Just(64), Just(u64::MAX)];
    (sizes, schedule, immunity, policy(), any::<bool>()).prop_map(
        |(sizes, (step_tokens, row_tile, head_room), immunity_tokens, policy, park_constrained)| Settings {
            num_blocks: sizes.0,
            block_size: sizes.1,
            num_slots: sizes.2,
            context_length: sizes.3,
            vocab_size: 5,
            step_tokens,
            row_tile,
            head_room,
            immunity_tokens,
            policy,
            park_constrained,
        },
    )
}

fn scenario() -> impl Strategy<Value = Scenario> {
    let flags = (prop::bool::weighted(0.7), prop::bool::weighted(0.3), prop::bool::weighted(0.2));
    let one = (0..30_u32, 1..=20_usize, 1..=24_u64, -1..=1_i32, flags);
    let arrivals = prop::collection::vec(one, 1..10);
    let forced = prop::collection::vec((0..60_u32, any::<usize>()), 0..8);
    let host_blocks = prop_oneof![2 => Just(0_u32), 1 => 1..=6_u32, 1 => Just(1_000)];
    (
        settings(),
        host_blocks,
        arrivals,
        forced,
        prop::collection::vec(prop_oneof![20 => 0..4_i32, 1 => -2..0_i32], 1..9),
    )
        .prop_map(|(settings, host_blocks, arrivals, forced, tokens)| Scenario {
            arrivals: arrivals.into_iter().map(|one| arrival(&settings, one)).collect(),
            settings,
            host_blocks,
            forced,
            tokens,
        })
}

/// A sequence that can be served: its prompt is cut to what the pool and the context hold.
fn arrival(
    settings: &Settings,
    (at, length, max_new_tokens, priority, (replayable, constrained, stops)): (
        u32,
        usize,
        u64,
        i32,
        (bool, bool, bool),
    ),
) -> (u32, NewSequence) {
    let most = settings.context_length.min(settings.num_blocks * settings.block_size);
    let stop_token_ids = if stops { vec![3] } else { Vec::new() };
    let new = prompt(length.min(most as usize));
    (at, NewSequence { max_new_tokens, priority, replayable, constrained, stop_token_ids, ..new })
}

impl Scenario {
    /// Tokens to generate at most, and positions to compute at most, each once.
    fn work(&self) -> (u64, u64) {
        let most = u64::from(self.settings.context_length.min(self.settings.num_blocks * self.settings.block_size));
        let one = |new: &NewSequence| {
            let tokens = new.max_new_tokens.min(most + 1 - new.prompt.len() as u64);
            (tokens, new.prompt.len() as u64 + tokens - 1)
        };
        let all = self.arrivals.iter().map(|(_, new)| one(new));
        all.fold((0, 0), |(tokens, positions), (t, p)| (tokens + t, positions + p))
    }

    /// Steps in which everybody must have ended. A launched step commits a token, or a part of a prompt or history.
    /// For each token, arrival and forced park, at most all positions are lost to replays, and what was in flight.
    fn bound(&self, depth: usize) -> u64 {
        let (tokens, positions) = self.work();
        let last_arrival = self.arrivals.iter().map(|&(at, _)| u64::from(at)).max().unwrap_or_default();
        last_arrival + 1 + (tokens + (self.arrivals.len() + self.forced.len()) as u64) * (positions + depth as u64)
    }

    /// The token of a row: it depends on the sequence and the position alone.
    fn token(&self, row: &Row) -> i32 {
        let end = usize::try_from(row.start + row.num_new).expect("small");
        self.tokens[(5 * usize::try_from(row.seq.0).expect("few") + end) % self.tokens.len()]
    }

    /// Runs it to the end with so many steps in flight; returns the engine.
    fn run(&self, depth: usize) -> Engine {
        let mut engine = Engine::with_depth(self.settings.clone(), self.host_blocks, depth);
        let (mut now, mut submitted) = (0, 0);
        while submitted < self.arrivals.len() || engine.ledger.num_live() > 0 || engine.num_in_flight() > 0 {
            for (_, new) in self.arrivals.iter().filter(|&&(at, _)| u64::from(at) == now) {
                engine.submit(new);
                submitted += 1;
            }
            for &(_, which) in self.forced.iter().filter(|&&(at, _)| u64::from(at) == now) {
                let residents: Vec<SeqId> = engine.ledger.residents().map(Sequence::id).collect();
                if !residents.is_empty() {
                    engine.park(residents[which % residents.len()]); // skipped where neither way is open
                }
            }
            let busy = engine.ledger.num_live() > 0 || engine.num_in_flight() > 0;
            let ended = engine.ended.len();
            let rows = engine.step(|row| self.token(row));
            assert!(!busy || !rows.is_empty() || engine.ended.len() > ended, "a step with work did nothing");
            now += 1;
            assert!(now <= self.bound(depth), "stalled: {:?}", engine.ledger);
        }
        assert_eq!(engine.ended.len(), self.arrivals.len());
        engine.must_be_empty();
        engine
    }

    /// Runs it at each depth, which never shows; returns how often somebody was parked.
    fn run_at_each_depth(&self) -> usize {
        let engines = [1, 2, 3].map(|depth| self.run(depth));
        // Who may be parked ends with `capacity` only where it fills the pool alone.
        let new = || self.arrivals.iter().map(|(_, new)| new);
        let parkable = new().all(|new| new.replayable && (self.settings.park_constrained || !new.constrained));
        for deeper in &engines[1..] {
            for (seq, end) in &engines[0].ended {
                let capacity = [end, &deeper.ended[seq]].contains(&&End::Capacity);
                if parkable || !capacity {
                    assert_eq!(end, &deeper.ended[seq]);
                    assert_eq!(engines[0].delivered.get(seq), deeper.delivered.get(seq));
                }
            }
        }
        engines.iter().map(|engine| engine.parks.len()).sum()
    }
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_schedule_ends_within_the_stated_bound(scenario in scenario()) {
        scenario.run_at_each_depth();
    }
}

/// Two sequences that fill the pool, replayed side by side over and over, one tile a step.
fn tight(settings: Settings, lengths: [usize; 2]) -> Scenario {
    let arrivals = lengths.map(|length| (0, NewSequence { max_new_tokens: 16, ..prompt(length) }));
    let forced = (0..40).map(|at| (at, at as usize)).collect();
    Scenario { settings, host_blocks: 0, arrivals: arrivals.to_vec(), forced, tokens: vec![0] }
}

#[test]
fn the_tightest_settings_still_end() {
    let mut parks = 0;
    for policy in [Policy::FewestGenerated, Policy::Newest, Policy::Largest] {
        for (head_room, immunity_tokens) in [(0, 0), (0, u64::MAX), (1, 0), (1_000, 0), (1_000, u64::MAX)] {
            let settings = Settings {
                num_blocks: 8,
                block_size: 2,
                num_slots: 2,
                step_tokens: 1,
                row_tile: 1,
                head_room,
                immunity_tokens,
                policy,
                ..crate::setup::settings()
            };
            for lengths in [[8, 8], [1, 15], [15, 1], [16, 16], [2, 14]] {
                parks += tight(settings.clone(), lengths).run_at_each_depth();
            }
        }
    }
    assert!(parks > 1_000, "only {parks} parks in 225 runs");
}

/// What may not be parked is never waited for: without a host, only the row that cannot grow ends.
#[test]
fn sequences_that_cannot_be_parked_end_one_by_one() {
    let mut engine = Engine::new(Settings { num_blocks: 6, head_room: 0, ..crate::setup::settings() }, 0);
    for _ in 0..3 {
        engine.submit(&NewSequence { replayable: false, ..prompt(7) });
    }
    engine.run(40);
    assert_eq!(engine.parks, Vec::<(SeqId, ParkBy)>::new());
    assert_eq!(engine.ended.len(), 3);
}

/// A lower priority whose history ends at a block edge, beside a higher one that is still being prefilled.
#[test]
fn with_head_room_nobody_resumes_only_to_give_way_before_its_first_token() {
    let settings =
        Settings { num_blocks: 50, step_tokens: 1, row_tile: 1, context_length: 200, ..crate::setup::settings() };
    let mut engine = Engine::new(settings, 0);
    engine.submit(&request(100, 2));
    engine.submit(&NewSequence { priority: 1, ..request(100, 2) });
    engine.run(210);
    assert!(engine.parks.len() <= 1);
}
