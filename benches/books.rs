//! Cost of one decode step in the books: pick, reserve, fill, commit; with another step in flight meanwhile; and with a
//! park and a resume in each step.

use std::hint::black_box;
use std::time::{Duration, Instant};

use _native::ids::{SeqId, blocks_for};
use _native::ledger::{Ledger, NewSequence, Outcome, ParkBy, Settings, StepArrays};
use _native::schedule;
use _native::victim::{Policy, Victim};
use criterion::{BenchmarkId, Criterion, Throughput};

const BLOCK_SIZE: u32 = 16;
/// Steps before the books are built anew, so that positions stay what they are said to be.
const WINDOW: u32 = 512;
const RESIDENTS: [u32; 3] = [32, 256, 1_024];
const POSITIONS: [u32; 2] = [1_024, 32_768];

/// How many sequences decode, and from which position on.
#[derive(Clone, Copy)]
struct Load {
    residents: u32,
    positions: u32,
}

impl Load {
    fn all() -> impl Iterator<Item = Self> {
        RESIDENTS.into_iter().flat_map(|residents| POSITIONS.map(|positions| Self { residents, positions }))
    }

    fn id(self, name: &str) -> BenchmarkId {
        BenchmarkId::new(name, format!("{}x{}", self.residents, self.positions))
    }

    /// Blocks that one of them holds in the middle of a window.
    fn blocks(self) -> u32 {
        blocks_for(self.positions + WINDOW / 2, BLOCK_SIZE)
    }

    fn settings(self) -> Settings {
        let most = self.positions + WINDOW + 3;
        Settings {
            // One more for each to grow, and one of head-room.
            num_blocks: self.residents * (blocks_for(most, BLOCK_SIZE) + 2),
            block_size: BLOCK_SIZE,
            num_slots: self.residents,
            context_length: most,
            vocab_size: 50_000,
            // A whole history beside all decodes: what is replayed decodes again in the step after the next.
            step_tokens: self.residents + most,
            row_tile: 8,
            head_room: 1,
            immunity_tokens: 64,
            policy: Policy::FewestGenerated,
            park_constrained: true,
        }
    }
}

/// Books in which everybody decodes.
struct Books {
    ledger: Ledger,
    arrays: StepArrays,
    tokens: Vec<i32>,
    outcomes: Vec<Outcome>,
}

impl Books {
    fn new(load: Load) -> Self {
        let ledger = Ledger::new(load.settings()).expect("in bounds");
        let new = NewSequence {
            prompt: vec![1; load.positions as usize],
            max_new_tokens: u64::MAX,
            priority: 0,
            stop_token_ids: vec![2],
            replayable: true,
            ..NewSequence::default()
        };
        let tokens = vec![7; load.residents as usize];
        let mut books = Self { ledger, arrays: StepArrays::default(), tokens, outcomes: Vec::new() };
        // One at a time, spilled in between, so that nobody gets ahead of the others.
        let seqs: Vec<SeqId> = (0..load.residents).map(|_| books.ledger.submit(&new).expect("it fits")).collect();
        for &seq in &seqs {
            books.ledger.admit(seq).expect("it is alone");
            assert_eq!(books.step(), 1);
            books.ledger.park(seq, ParkBy::Spill).expect("its prompt is committed");
        }
        for &seq in &seqs {
            books.ledger.admit(seq).expect("the pool holds all");
        }
        books.step(); // tells the device all block tables anew
        books
    }

    /// The next step is in flight from here on.
    fn launch(&mut self) {
        schedule::pick_rows(&mut self.ledger).expect("nothing is reserved");
        self.ledger.reserve().expect("the pool has room for a window");
        self.ledger.fill(&mut self.arrays).expect("reserved");
        black_box(&self.arrays);
    }

    /// Launches one step and settles the oldest, which is another one if one was in flight; returns how many rows it had.
    fn step(&mut self) -> usize {
        self.launch();
        let rows = self.ledger.in_flight().expect("one was launched");
        self.ledger.commit(&self.tokens[..rows], &mut self.outcomes).expect("in flight");
        black_box(&self.outcomes);
        rows
    }

    /// Parks the victim that a shortage would choose, lets it in again, and does a step.
    fn step_with_pause(&mut self, by: ParkBy) -> usize {
        let spill_blocks = if by == ParkBy::Spill { u32::MAX } else { 0 };
        let Victim::Gives(victim) = schedule::victim(&self.ledger, spill_blocks) else {
            unreachable!("all can give way")
        };
        black_box(self.ledger.image_blocks(victim).expect("it is resident"));
        self.ledger.park(victim, by).expect("it can be parked");
        let plan = schedule::next_arrival(&self.ledger, spill_blocks).expect("it fits");
        black_box(self.ledger.admit(plan.seq).expect("it fits"));
        self.step()
    }
}

/// Steps that are in flight while others are launched.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Ahead {
    None,
    One,
}

/// Time of `steps` steps; building the books is not part of it.
fn time(load: Load, steps: u64, ahead: Ahead, step: &dyn Fn(&mut Books) -> usize) -> Duration {
    let (mut taken, mut left) = (Duration::ZERO, steps);
    while left > 0 {
        let mut books = Books::new(load);
        if ahead == Ahead::One {
            books.launch();
        }
        let run = left.min(u64::from(WINDOW));
        let start = Instant::now();
        for _ in 0..run {
            assert_eq!(step(&mut books), load.residents as usize, "everybody has a row");
        }
        taken += start.elapsed();
        left -= run;
    }
    taken
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("books");
    group.sample_size(10).warm_up_time(Duration::from_millis(100)).measurement_time(Duration::from_secs(2));
    for load in Load::all() {
        group.throughput(Throughput::Elements(u64::from(load.residents)));
        for (name, ahead) in [("step", Ahead::None), ("step_ahead", Ahead::One)] {
            group.bench_function(load.id(name), |bencher| {
                bencher.iter_custom(|steps| time(load, steps, ahead, &Books::step));
            });
        }
        for (name, by) in [("step_with_spill", ParkBy::Spill), ("step_with_replay", ParkBy::Replay)] {
            group.bench_function(load.id(name), |bencher| {
                bencher.iter_custom(|steps| time(load, steps, Ahead::None, &|books| books.step_with_pause(by)));
            });
        }
    }
    group.finish();
}

/// Prints what a step costs alone and behind another in flight, and what a park and a resume add to one: a part for
/// everybody who is looked at, and one per victim block, told apart by victims of two sizes.
fn report() {
    // The quickest of three, as anything else on the machine only adds.
    let microseconds = |load: Load, ahead: Ahead, step: &dyn Fn(&mut Books) -> usize| {
        let taken = (0..3).map(|_| time(load, u64::from(WINDOW), ahead, step)).min().expect("three");
        taken.as_secs_f64() * 1e6 / f64::from(WINDOW)
    };
    println!("\nsequences  step us at 1k, 32k  behind another");
    for residents in RESIDENTS {
        let [alone, behind] = [Ahead::None, Ahead::One]
            .map(|ahead| POSITIONS.map(|positions| microseconds(Load { residents, positions }, ahead, &Books::step)));
        println!("{residents:9}  {:9.2} {:8.2}  {:6.2} {:7.2}", alone[0], alone[1], behind[0], behind[1]);
    }
    println!("\nsequences  by      a pause adds us  and ns per victim block");
    for residents in RESIDENTS {
        let [short, long] = POSITIONS.map(|positions| Load { residents, positions });
        let steady = [short, long].map(|load| microseconds(load, Ahead::None, &Books::step));
        for (name, by) in [("spill", ParkBy::Spill), ("replay", ParkBy::Replay)] {
            let paused = [short, long].map(|load| microseconds(load, Ahead::None, &|books| books.step_with_pause(by)));
            let extra = [paused[0] - steady[0], paused[1] - steady[1]];
            let per_block = (extra[1] - extra[0]) / f64::from(long.blocks() - short.blocks());
            let fixed = extra[0] - per_block * f64::from(short.blocks());
            let per_block = per_block * 1e3;
            println!("{residents:9}  {name:6}  {fixed:15.2}  {per_block:23.2}");
        }
    }
}

fn main() {
    let mut criterion = Criterion::default().configure_from_args();
    bench(&mut criterion);
    criterion.final_summary();
    if std::env::args().any(|argument| argument == "--bench") && !std::env::args().any(|argument| argument == "--test")
    {
        report();
    }
}
