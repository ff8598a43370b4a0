//! The class `Ledger`: extract, lock, call, map.

use std::sync::{Mutex, MutexGuard};

use pyo3::buffer::PyBuffer;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyList, PyTuple, PyType};

use super::arrays::{Buffers, writable};
use super::errors::InvalidRequest;
use crate::error::BooksError;
use crate::ids::SeqId;
use crate::ledger::{Arrival, Ledger, NewSequence, ParkBy, Reuse, Sequence, Settings, State, StepArrays};
use crate::schedule;
use crate::victim::Policy;

/// Book of every sequence's state, slot and KV blocks. See `reprieve.step.Books` for what each method promises.
#[pyclass(frozen, name = "Ledger", module = "reprieve._native")]
pub(super) struct PyLedger {
    ledger: Mutex<Ledger>,
    arrays: Mutex<StepArrays>,
}

impl PyLedger {
    fn lock(&self) -> MutexGuard<'_, Ledger> {
        self.ledger.lock().expect("the books stopped at a broken invariant before")
    }

    fn look<T>(&self, seq: u64, read: impl FnOnce(&Sequence) -> T) -> PyResult<T> {
        Ok(read(self.lock().get(SeqId(seq))?))
    }
}

#[pymethods]
impl PyLedger {
    #[new]
    #[pyo3(signature = (*, num_blocks, block_size, num_slots, context_length, vocab_size, step_tokens, row_tile,
        head_room = 1, immunity_tokens = 64, victim = "fewest_generated", park_constrained = true))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        num_blocks: u32,
        block_size: u32,
        num_slots: u32,
        context_length: u32,
        vocab_size: u32,
        step_tokens: u32,
        row_tile: u32,
        head_room: u32,
        immunity_tokens: u64,
        victim: &str,
        park_constrained: bool,
    ) -> PyResult<Self> {
        let policy = policy(victim)?;
        let ledger = Ledger::new(Settings {
            num_blocks,
            block_size,
            num_slots,
            context_length,
            vocab_size,
            step_tokens,
            row_tile,
            head_room,
            immunity_tokens,
            policy,
            park_constrained,
        })?;
        Ok(Self { ledger: Mutex::new(ledger), arrays: Mutex::default() })
    }

    #[pyo3(signature = (prompt, *, max_new_tokens = u64::MAX, priority = 0, stop_ids = None, replayable = true,
        constrained = false))]
    fn submit(
        &self,
        prompt: &Bound<'_, PyAny>,
        max_new_tokens: u64,
        priority: i32,
        stop_ids: Option<&Bound<'_, PyAny>>,
        replayable: bool,
        constrained: bool,
    ) -> PyResult<u64> {
        let prompt = token_ids(prompt, "prompt")?;
        let stop_ids = stop_ids.map_or_else(|| Ok(Vec::new()), |ids| token_ids(ids, "stop_ids"))?;
        let new = NewSequence { prompt, max_new_tokens, priority, stop_ids, replayable, constrained };
        Ok(self.lock().submit(&new)?.0)
    }

    fn next_arrival<'py>(&self, py: Python<'py>, spill_blocks: u32) -> PyResult<Option<Bound<'py, PyAny>>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let Some(plan) = schedule::next_arrival(&self.lock(), spill_blocks) else {
            return Ok(None);
        };
        let victims: Vec<(u64, &str)> = plan.victims.iter().map(|&(seq, by)| (seq.0, way_name(by))).collect();
        CLASS.import(py, "reprieve.step", "ArrivalPlan")?.call1((plan.seq.0, victims)).map(Some)
    }

    fn admit(&self, seq: u64) -> PyResult<&'static str> {
        Ok(match self.lock().admit(SeqId(seq))? {
            Arrival::Start => "start",
            Arrival::Replay => "replay",
            Arrival::Restore => "restore",
        })
    }

    fn drop_image(&self, seq: u64) -> PyResult<()> {
        Ok(self.lock().drop_image(SeqId(seq))?)
    }

    fn rows(&self) -> PyResult<usize> {
        Ok(schedule::pick_rows(&mut self.lock())?)
    }

    fn reserve(&self) -> PyResult<()> {
        Ok(self.lock().reserve()?)
    }

    fn victim(&self, spill_blocks: u32) -> Option<u64> {
        schedule::victim(&self.lock(), spill_blocks).map(|seq| seq.0)
    }

    fn capacity_row(&self) -> PyResult<u64> {
        let row = schedule::capacity_row(&self.lock());
        Ok(row.ok_or(BooksError::Misused("capacity_row: no row needs a block"))?.0)
    }

    fn fill<'py>(&self, py: Python<'py>, buffers: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        static CLASS: PyOnceLock<Py<PyType>> = PyOnceLock::new();
        let mut ledger = self.lock();
        let mut arrays = self.arrays.lock().expect("held for the length of a copy");
        let counts = ledger.counts()?;
        let buffers = Buffers::of(buffers, counts)?;
        ledger.fill(&mut arrays)?;
        buffers.write(py, &arrays)?;
        CLASS.import(py, "reprieve.step", "StepCounts")?.call1((counts.rows, counts.tokens, counts.table_changes))
    }

    fn hand_back(&self) {
        self.lock().hand_back();
    }

    fn commit(&self, py: Python<'_>, tokens: &Bound<'_, PyAny>, outcomes: &Bound<'_, PyAny>) -> PyResult<()> {
        let tokens = PyBuffer::<i32>::get(tokens)
            .and_then(|buffer| buffer.to_vec(py))
            .map_err(|error| InvalidRequest::new_err(("tokens", format!("must be an array of i32: {error}"))))?;
        let mut ledger = self.lock();
        let outcomes = writable::<u8>(outcomes, "outcomes", ledger.rows().len())?;
        let mut settled = Vec::new();
        ledger.commit(&tokens, &mut settled)?;
        let settled: Vec<u8> = settled.into_iter().map(|outcome| outcome as u8).collect();
        outcomes.copy_from_slice(py, &settled)
    }

    fn park(&self, seq: u64, by: &str) -> PyResult<()> {
        let by = way(by)?;
        Ok(self.lock().park(SeqId(seq), by)?)
    }

    fn resume(&self, seq: u64) -> PyResult<bool> {
        Ok(self.lock().resume(SeqId(seq))?)
    }

    #[pyo3(signature = (seq, *, reuse))]
    fn release(&self, seq: u64, reuse: bool) -> PyResult<bool> {
        let reuse = if reuse { Reuse::Keep } else { Reuse::Discard };
        Ok(self.lock().release(SeqId(seq), reuse)?)
    }

    fn state(&self, seq: u64) -> PyResult<&'static str> {
        match self.lock().get(SeqId(seq)) {
            Ok(sequence) => Ok(state_name(sequence.state())),
            Err(BooksError::Finished(_)) => Ok("finished"),
            Err(error) => Err(error.into()),
        }
    }

    fn image_blocks<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyList>> {
        let ledger = self.lock();
        PyList::new(py, ledger.image_blocks(SeqId(seq))?.iter().map(|block| block.0))
    }

    fn block_table<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyList>> {
        let ledger = self.lock();
        PyList::new(py, ledger.get(SeqId(seq))?.table().iter().map(|block| block.0))
    }

    fn tokens<'py>(&self, py: Python<'py>, seq: u64) -> PyResult<Bound<'py, PyList>> {
        let ledger = self.lock();
        PyList::new(py, ledger.get(SeqId(seq))?.tokens())
    }

    fn committed(&self, seq: u64) -> PyResult<u32> {
        self.look(seq, Sequence::committed)
    }

    fn generated(&self, seq: u64) -> PyResult<u64> {
        self.look(seq, Sequence::generated)
    }

    fn slot(&self, seq: u64) -> PyResult<Option<u32>> {
        self.look(seq, |sequence| sequence.slot().map(|slot| slot.0))
    }

    fn is_replayable(&self, seq: u64) -> PyResult<bool> {
        self.look(seq, Sequence::can_replay)
    }

    fn is_immune(&self, seq: u64) -> PyResult<bool> {
        self.look(seq, Sequence::is_immune)
    }

    fn residents(&self) -> Vec<u64> {
        self.lock().residents().map(|sequence| sequence.id().0).collect()
    }

    fn waiting(&self) -> Vec<u64> {
        self.lock().waiting().map(|sequence| sequence.id().0).collect()
    }

    #[getter]
    fn num_blocks(&self) -> u32 {
        self.lock().blocks().total()
    }

    #[getter]
    fn free_blocks(&self) -> u32 {
        self.lock().blocks().free()
    }

    #[getter]
    fn free_slots(&self) -> u32 {
        self.lock().free_slots()
    }

    #[getter]
    fn num_live(&self) -> usize {
        self.lock().num_live()
    }

    /// The most that one step can hold: (tokens, rows, table changes), as `StepShape`.
    fn step_shape<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let ledger = self.lock();
        let settings = ledger.settings();
        (settings.most_step_tokens(), settings.num_slots, settings.num_blocks).into_pyobject(py)
    }

    fn check(&self) {
        self.lock().check();
    }
}

/// Token ids from an array of i32 or i64, or from any sequence of integers, however large.
fn token_ids(ids: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Vec<i64>> {
    let mut extracted = Vec::with_capacity(ids.len().unwrap_or_default());
    for (index, id) in ids.try_iter()?.enumerate() {
        let id = id?;
        extracted.push(id.extract().map_err(|_| {
            let shown = id.repr().map(|repr| repr.to_string()).unwrap_or_default();
            InvalidRequest::new_err((field, format!("{shown} at index {index} is not a token id")))
        })?);
    }
    Ok(extracted)
}

fn policy(name: &str) -> PyResult<Policy> {
    match name {
        "fewest_generated" => Ok(Policy::FewestGenerated),
        "newest" => Ok(Policy::Newest),
        "largest" => Ok(Policy::Largest),
        other => Err(InvalidRequest::new_err((
            "victim",
            format!("must be \"fewest_generated\", \"newest\" or \"largest\", not {other:?}"),
        ))),
    }
}

fn way(name: &str) -> PyResult<ParkBy> {
    match name {
        "spill" => Ok(ParkBy::Spill),
        "replay" => Ok(ParkBy::Replay),
        other => Err(InvalidRequest::new_err(("by", format!("must be \"spill\" or \"replay\", not {other:?}")))),
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
