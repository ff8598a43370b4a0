//! The class `Ledger`: extract, lock, call, map.

use std::sync::{Mutex, MutexGuard};

use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::PyType;

use super::arrays::{Buffers, array, writable};
use super::errors::InvalidArgument;
use super::whole::Whole;
use crate::error::BooksError;
use crate::ids::SeqId;
use crate::ledger::{Arrival, Ledger, MOST_BANS, NewSequence, ParkBy, Reuse, Sequence, Settings, State, StepArrays};
use crate::schedule;
use crate::victim::{Policy, Victim};

/// Who gives way, or what must be done first.
#[derive(IntoPyObject)]
pub(super) enum Choice {
    Gives(u64),
    Settle(&'static str),
}

/// Book of every sequence's state, slot and KV blocks. See `reprieve.step.Books` for what each method promises.
#[pyclass(frozen, name = "Ledger", module = "reprieve._native")]
pub(super) struct PyLedger {
    ledger: Mutex<Ledger>,
    arrays: Mutex<StepArrays>,
}

impl PyLedger {
    /// Nothing may run Python while this is held, not even make an object: another thread would wait for the books,
    /// with the interpreter's lock in hand, and neither would go on.
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("the books stopped at a broken invariant before")
    }

    fn look<T>(&self, seq: Whole<u64>, read: impl FnOnce(&Sequence) -> T) -> PyResult<T> {
        Ok(read(self.lock().get(SeqId(seq.0))?))
    }
}

#[pymethods]
impl PyLedger {
    #[new]
    #[pyo3(signature = (*, num_blocks, block_size, num_slots, context_length, vocab_size, step_tokens, row_tile,
        head_room = Whole(1), immunity_tokens = Whole(64), victim = "fewest_generated", park_constrained = true),
        text_signature = "(*, num_blocks, block_size, num_slots, context_length, vocab_size, step_tokens, row_tile, \
        head_room=1, immunity_tokens=64, victim='fewest_generated', park_constrained=True)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        num_blocks: Whole<u32>,
        block_size: Whole<u32>,
        num_slots: Whole<u32>,
        context_length: Whole<u32>,
        vocab_size: Whole<u32>,
        step_tokens: Whole<u32>,
        row_tile: Whole<u32>,
        head_room: Whole<u32>,
        immunity_tokens: Whole<u64>,
        victim: &str,
        park_constrained: bool,
    ) -> PyResult<Self> {
        let policy = policy(victim)?;
        let ledger = Ledger::new(Settings {
            num_blocks: num_blocks.0,
            block_size: block_size.0,
            num_slots: num_slots.0,
            context_length: context_length.0,
            vocab_size: vocab_size.0,
            step_tokens: step_tokens.0,
            row_tile: row_tile.0,
            head_room: head_room.0,
            immunity_tokens: immunity_tokens.0,
            policy,
            park_constrained,
        })?;
        Ok(Self { ledger: Mutex::new(ledger), arrays: Mutex::default() })
    }

    #[pyo3(signature = (prompt, *, max_new_tokens = None, priority = Whole(0), stop_token_ids = None,
        replayable = true, constrained = false, min_tokens = Whole(0), banned_token_ids = None, think_tokens = None),
        text_signature = "($self, prompt, *, max_new_tokens=None, priority=0, stop_token_ids=None, replayable=True, \
        constrained=False, min_tokens=0, banned_token_ids=None, think_tokens=None)")]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    /// Queue a sequence and return its number.
    ///
    /// `prompt` and `stop_token_ids` are token ids, `max_new_tokens` the budget (None: up to the context); a higher
    /// `priority` is more urgent.
    /// `replayable` says that the token ids alone rebuild its KV, `constrained` that its next token is bound by a mask.
    /// No stop id comes before `min_tokens`, none of `banned_token_ids` ever; once the second of `think_tokens` was
    /// generated, neither of them comes again.
    /// Raises `InvalidArgument` that names the argument, and `NeverFits`.
    fn submit(
        &self,
        prompt: &Bound<'_, PyAny>,
        max_new_tokens: Option<Whole<u64>>,
        priority: Whole<i32>,
        stop_token_ids: Option<&Bound<'_, PyAny>>,
        replayable: bool,
        constrained: bool,
        min_tokens: Whole<u64>,
        banned_token_ids: Option<&Bound<'_, PyAny>>,
        think_tokens: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<u64> {
        let some_ids =
            |ids: Option<&Bound<'_, PyAny>>, field| ids.map_or_else(|| Ok(Vec::new()), |ids| token_ids(ids, field));
        let think_tokens = match some_ids(think_tokens, "think_tokens")?[..] {
            [] => None,
            [start, end] => Some((start, end)),
            ref other => {
                let problem = format!("must be the ids at which thinking begins and ends, not {} ids", other.len());
                return Err(InvalidArgument::new_err(("think_tokens", problem)));
            }
        };
        let new = NewSequence {
            prompt: token_ids(prompt, "prompt")?,
            max_new_tokens: max_new_tokens.map_or(u64::MAX, |budget| budget.0),
            priority: priority.0,
            stop_token_ids: some_ids(stop_token_ids, "stop_token_ids")?,
            replayable,
            constrained,
            min_tokens: min_tokens.0,
            banned_token_ids: some_ids(banned_token_ids, "banned_token_ids")?,
            think_tokens,
        };
        Ok(self.lock().submit(&new)?.0)
    }

    /// Return the head of the waiting order if it fits now, or would after the named parks; else None.
    fn next_arrival<'py>(&self, py: Python<'py>, spill_blocks: Whole<u64>) -> PyResult<Option<Bound<'py, PyAny>>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let Some(plan) = schedule::next_arrival(&self.lock(), at_most_all(spill_blocks.0)) else {
            return Ok(None);
        };
        let victims: Vec<(u64, &str)> = plan.victims.iter().map(|&(seq, by)| (seq.0, way_name(by))).collect();
        CLASS.import(py, "reprieve.step", "ArrivalPlan")?.call1((plan.seq.0, victims, plan.settle_first)).map(Some)
    }

    /// Give a waiting sequence its slot and all its blocks; return "start", "replay" or "restore".
    ///
    /// Raises `KvExhausted`, or `BooksMisused` if it does not wait or no slot is free.
    fn admit(&self, seq: Whole<u64>) -> PyResult<&'static str> {
        Ok(match self.lock().admit(SeqId(seq.0))? {
            Arrival::Start => "start",
            Arrival::Replay => "replay",
            Arrival::Restore => "restore",
        })
    }

    /// Forget a restored or spilled image: the sequence replays its history instead. Raises `CannotPark`.
    fn drop_image(&self, seq: Whole<u64>) -> PyResult<()> {
        Ok(self.lock().drop_image(SeqId(seq.0))?)
    }

    /// Pick the rows of the next step, in ascending slot order; return how many there are.
    fn rows(&self) -> PyResult<usize> {
        Ok(schedule::pick_rows(&mut self.lock())?)
    }

    /// Return the residents that were passed over when rows were picked last, as their next token needs the host.
    fn sat_out(&self) -> Vec<u64> {
        self.lock().sat_out().iter().map(|seq| seq.0).collect()
    }

    /// Say that the mask for the next token of a constrained sequence is there; forgotten with each token.
    fn mask_ready(&self, seq: Whole<u64>) -> PyResult<()> {
        Ok(self.lock().mask_ready(SeqId(seq.0))?)
    }

    /// Take the blocks by which the picked rows grow, for all or for none: `KvExhausted`.
    fn reserve(&self) -> PyResult<()> {
        Ok(self.lock().reserve()?)
    }

    /// Return the sequence that gives way, "settle" if a step in flight must be settled first, None if nobody can.
    fn victim(&self, spill_blocks: Whole<u64>) -> Option<Choice> {
        match schedule::victim(&self.lock(), at_most_all(spill_blocks.0)) {
            Victim::Gives(seq) => Some(Choice::Gives(seq.0)),
            Victim::Settle => Some(Choice::Settle("settle")),
            Victim::Nobody => None,
        }
    }

    /// Return the sequences of the picked rows that need a block, in slot order.
    fn growing(&self) -> Vec<u64> {
        self.lock().rows().iter().filter(|row| row.growth > 0).map(|row| row.seq.0).collect()
    }

    /// Return the first victim of those that need a block; raises `BooksMisused` if none does.
    fn capacity_row(&self) -> PyResult<u64> {
        let row = schedule::capacity_row(&self.lock());
        Ok(row.ok_or(BooksError::Misused("capacity_row: no row needs a block"))?.0)
    }

    /// Write the reserved step into `buffers`, a `StepBuffers`; return its `StepCounts`. It is in flight from here on,
    /// behind those that are already.
    ///
    /// Raises `InvalidArgument` that names an array of the wrong type, shape or size; then it is not in flight.
    fn fill<'py>(&self, py: Python<'py>, buffers: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let counts = self.lock().counts()?;
        let buffers = Buffers::of(buffers, counts)?;
        {
            let mut ledger = self.lock();
            if ledger.counts()? != counts {
                return Err(BooksError::Misused("fill: another thread changed the step meanwhile").into());
            }
            let mut arrays = self.arrays.lock().expect("held for the length of a copy");
            ledger.fill(&mut arrays)?;
            buffers.write(py, &arrays)?;
        }
        let counts = (counts.rows, counts.tokens, counts.table_changes, counts.bans);
        CLASS.import(py, "reprieve.step", "StepCounts")?.call1(counts)
    }

    /// Undo `reserve` and `fill` of the newest step exactly; return the sequences of its rows, over-runs left out.
    fn hand_back(&self) -> Vec<u64> {
        self.lock().hand_back().into_iter().map(|seq| seq.0).collect()
    }

    /// Settle the oldest step in flight with `tokens` [rows] i32; write an outcome per row into `outcomes` [>= rows] u8.
    ///
    /// Whoever ends is released. Raises `InvalidArgument`, or `BooksMisused` with no step in flight.
    fn commit(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, outcomes: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = array::<i32>(tokens, "tokens")?;
        if tokens.dimensions() != 1 {
            let problem = format!("must have 1 dimension, has shape {:?}", tokens.shape());
            return Err(InvalidArgument::new_err(("tokens", problem)));
        }
        let tokens = tokens.to_vec(py)?;
        let rows = self.lock().in_flight()?;
        let outcomes = writable::<u8>(outcomes, "outcomes", &[rows])?;
        let mut settled = Vec::new();
        let mut ledger = self.lock();
        if ledger.in_flight()? != rows {
            return Err(BooksError::Misused("commit: another thread changed the step meanwhile").into());
        }
        ledger.commit(&tokens, &mut settled)?;
        let settled: Vec<u8> = settled.into_iter().map(|outcome| outcome as u8).collect();
        outcomes.copy_from_slice(py, &settled)
    }

    /// Take a resident sequence off the device, by "spill" or "replay"; what it has in flight is discarded. Raises
    /// `CannotPark`.
    fn park(&self, seq: Whole<u64>, by: &str) -> PyResult<()> {
        let by = way(by)?;
        Ok(self.lock().park(SeqId(seq.0), by)?)
    }

    /// Move a waiting sequence to the front of its priority; False if it is resident.
    fn resume(&self, seq: Whole<u64>) -> PyResult<bool> {
        Ok(self.lock().resume(SeqId(seq.0))?)
    }

    /// End a sequence in any state; False if it had ended before.
    #[pyo3(signature = (seq, *, reuse))]
    fn release(&self, seq: Whole<u64>, reuse: bool) -> PyResult<bool> {
        let reuse = if reuse { Reuse::Keep } else { Reuse::Discard };
        Ok(self.lock().release(SeqId(seq.0), reuse)?)
    }

    /// Return the sequence's state in a word.
    fn state(&self, seq: Whole<u64>) -> PyResult<&'static str> {
        match self.lock().get(SeqId(seq.0)) {
            Ok(sequence) => Ok(state_name(sequence.state())),
            Err(BooksError::Finished(_)) => Ok("finished"),
            Err(error) => Err(error.into()),
        }
    }

    /// Return the blocks that hold the sequence's committed positions, in order.
    fn image_blocks(&self, seq: Whole<u64>) -> PyResult<Vec<u32>> {
        Ok(self.lock().image_blocks(SeqId(seq.0))?.iter().map(|block| block.0).collect())
    }

    /// Return all blocks that the sequence holds, in order.
    fn block_table(&self, seq: Whole<u64>) -> PyResult<Vec<u32>> {
        self.look(seq, |sequence| sequence.table().iter().map(|block| block.0).collect())
    }

    /// Return how many blocks the sequence holds.
    fn held_blocks(&self, seq: Whole<u64>) -> PyResult<usize> {
        self.look(seq, |sequence| sequence.table().len())
    }

    /// Return the sequence's prompt and generated tokens, the pending one included.
    fn tokens(&self, seq: Whole<u64>) -> PyResult<Vec<u32>> {
        self.look(seq, |sequence| sequence.tokens().to_vec())
    }

    /// Return how many positions of KV are committed.
    fn committed(&self, seq: Whole<u64>) -> PyResult<u32> {
        self.look(seq, Sequence::committed)
    }

    /// Return how many tokens the sequence has generated.
    fn generated(&self, seq: Whole<u64>) -> PyResult<u64> {
        self.look(seq, Sequence::generated)
    }

    /// Return the sequence's slot, or None if it is not resident.
    fn slot(&self, seq: Whole<u64>) -> PyResult<Option<u32>> {
        self.look(seq, |sequence| sequence.slot().map(|slot| slot.0))
    }

    /// Return whether dropping its KV loses nothing: its tokens rebuild it, or none of it is committed.
    fn can_replay(&self, seq: Whole<u64>) -> PyResult<bool> {
        self.look(seq, Sequence::can_replay)
    }

    /// Return whether the sequence is passed over as a victim while others will do.
    fn is_immune(&self, seq: Whole<u64>) -> PyResult<bool> {
        self.look(seq, Sequence::is_immune)
    }

    /// Return the resident sequences in slot order.
    fn residents(&self) -> Vec<u64> {
        self.lock().residents().map(|sequence| sequence.id().0).collect()
    }

    /// Return the queued and parked sequences in the order in which they will come in.
    fn waiting(&self) -> Vec<u64> {
        self.lock().waiting().map(|sequence| sequence.id().0).collect()
    }

    /// Blocks in the pool.
    #[getter]
    fn num_blocks(&self) -> u32 {
        self.lock().blocks().total()
    }

    /// Blocks that nobody holds and that are not fenced.
    #[getter]
    fn free_blocks(&self) -> u32 {
        self.lock().blocks().free()
    }

    /// Blocks of sequences that have left, which a step in flight still needs.
    #[getter]
    fn fenced_blocks(&self) -> u32 {
        self.lock().fenced_blocks()
    }

    /// Steps in flight.
    #[getter]
    fn num_in_flight(&self) -> usize {
        self.lock().num_in_flight()
    }

    /// Slots that nobody holds.
    #[getter]
    fn free_slots(&self) -> u32 {
        self.lock().free_slots()
    }

    /// Sequences that have not ended.
    #[getter]
    fn num_live(&self) -> usize {
        self.lock().num_live()
    }

    /// Return the most that one step can hold, a `StepShape`: what its buffers are made with.
    fn step_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let shape = {
            let ledger = self.lock();
            let settings = ledger.settings();
            let bans = u64::from(settings.num_slots) * u64::from(MOST_BANS);
            let mask_words = settings.vocab_size.div_ceil(32);
            (settings.most_step_tokens(), settings.num_slots, settings.num_blocks, bans, mask_words)
        };
        CLASS.import(py, "reprieve.step", "StepShape")?.call1(shape)
    }

    /// Panic if an invariant is broken: for tests.
    fn check(&self) {
        self.lock().check();
    }
}

/// Token ids from an array of i32 or i64, or from any sequence of integers, however large.
fn token_ids(ids: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Vec<i64>> {
    let mut extracted = Vec::with_capacity(ids.len().unwrap_or_default());
    let ids = ids.try_iter().map_err(|_| InvalidArgument::new_err((field, "must be a sequence of token ids")))?;
    for (index, id) in ids.enumerate() {
        let id = id?;
        extracted.push(id.extract().map_err(|_| {
            let shown = id.repr().map(|repr| repr.to_string()).unwrap_or_default();
            InvalidArgument::new_err((field, format!("{shown} at index {index} is not a token id")))
        })?);
    }
    Ok(extracted)
}

/// A host budget beyond what can be counted is as good as one for every block.
fn at_most_all(spill_blocks: u64) -> u32 {
    u32::try_from(spill_blocks).unwrap_or(u32::MAX)
}

fn policy(name: &str) -> PyResult<Policy> {
    match name {
        "fewest_generated" => Ok(Policy::FewestGenerated),
        "newest" => Ok(Policy::Newest),
        "largest" => Ok(Policy::Largest),
        other => Err(InvalidArgument::new_err((
            "victim",
            format!("must be \"fewest_generated\", \"newest\" or \"largest\", not {other:?}"),
        ))),
    }
}

fn way(name: &str) -> PyResult<ParkBy> {
    match name {
        "spill" => Ok(ParkBy::Spill),
        "replay" => Ok(ParkBy::Replay),
        other => Err(InvalidArgument::new_err(("by", format!("must be \"spill\" or \"replay\", not {other:?}")))),
    }
}

fn way_name(by: ParkBy) -> &'static str {
    match by {
        ParkBy::Spill => "spill",
        ParkBy::Replay => "replay",
    }
}

fn state_name(state: State) -> &'static str {
    match state {
        State::Queued => "queued",
        State::Prefilling => "prefilling",
        State::Decoding => "decoding",
        State::ParkedSpill => "parked_spill",
        State::ParkedReplay => "parked_replay",
    }
}
