//! `NumPy` arrays of the caller: checked before a step is written, then copied into.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;
use pyo3::types::PySlice;

use super::errors::InvalidRequest;
use crate::ledger::{Counts, StepArrays};

/// The first `length` elements of `object`, as memory that can be written.
pub(super) fn writable<T: Element>(
    object: &Bound<'_, PyAny>,
    field: &'static str,
    length: usize,
) -> PyResult<PyBuffer<T>> {
    let refuse = |problem: String| InvalidRequest::new_err((field, problem));
    let stop = isize::try_from(length).expect("as many as a step has");
    let used = object.get_item(PySlice::new(object.py(), 0, stop, 1))?;
    let buffer = PyBuffer::<T>::get(&used)
        .map_err(|error| refuse(format!("must be an array of {}: {error}", std::any::type_name::<T>())))?;
    let given = buffer.shape().first().copied().unwrap_or_default();
    if given < length {
        return Err(refuse(format!("has {given} elements, this step needs {length}")));
    }
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(refuse("must be a C-contiguous array that can be written".into()));
    }
    Ok(buffer)
}

/// The arrays of a `StepBuffers`, as far as one step uses them.
pub(super) struct Buffers {
    token_ids: PyBuffer<i32>,
    positions: PyBuffer<i32>,
    seqs: PyBuffer<u64>,
    slots: PyBuffer<i32>,
    starts: PyBuffer<i32>,
    num_new: PyBuffer<i32>,
    kv_lengths: PyBuffer<i32>,
    readback: PyBuffer<u8>,
    table_changes: PyBuffer<i32>,
}

impl Buffers {
    pub(super) fn of(object: &Bound<'_, PyAny>, counts: Counts) -> PyResult<Self> {
        fn array<T: Element>(object: &Bound<'_, PyAny>, field: &'static str, length: usize) -> PyResult<PyBuffer<T>> {
            writable(&object.getattr(field)?, field, length)
        }
        let table_changes: PyBuffer<i32> = array(object, "table_changes", counts.table_changes)?;
        if table_changes.shape() != [counts.table_changes, 3] {
            let problem = format!("must have 3 columns, has shape {:?}", table_changes.shape());
            return Err(InvalidRequest::new_err(("table_changes", problem)));
        }
        Ok(Self {
            token_ids: array(object, "token_ids", counts.tokens)?,
            positions: array(object, "positions", counts.tokens)?,
            seqs: array(object, "seqs", counts.rows)?,
            slots: array(object, "slots", counts.rows)?,
            starts: array(object, "starts", counts.rows)?,
            num_new: array(object, "num_new", counts.rows)?,
            kv_lengths: array(object, "kv_lengths", counts.rows)?,
            readback: array(object, "readback", counts.rows)?,
            table_changes,
        })
    }

    pub(super) fn write(&self, py: Python<'_>, arrays: &StepArrays) -> PyResult<()> {
        self.token_ids.copy_from_slice(py, &arrays.token_ids)?;
        self.positions.copy_from_slice(py, &arrays.positions)?;
        self.seqs.copy_from_slice(py, &arrays.seqs)?;
        self.slots.copy_from_slice(py, &arrays.slots)?;
        self.starts.copy_from_slice(py, &arrays.starts)?;
        self.num_new.copy_from_slice(py, &arrays.num_new)?;
        self.kv_lengths.copy_from_slice(py, &arrays.kv_lengths)?;
        self.readback.copy_from_slice(py, &arrays.readback)?;
        self.table_changes.copy_from_slice(py, arrays.table_changes.as_flattened())
    }
}
