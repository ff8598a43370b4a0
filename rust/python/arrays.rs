//! `NumPy` arrays of the caller: checked before a step is written, then copied into.
//!
//! Getting them may run Python, so it is done while the books are not locked.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PySlice;

use super::errors::InvalidArgument;
use crate::ledger::{Counts, StepArrays};

/// The memory of an array of `T`, in the machine's byte order.
pub(super) fn array<T: Element>(object: &Bound<'_, PyAny>, field: &'static str) -> PyResult<PyBuffer<T>> {
    let refuse = |problem: String| InvalidArgument::new_err((field, problem));
    let buffer = PyBuffer::<T>::get(object)
        .map_err(|error| refuse(format!("must be an array of {}: {error}", std::any::type_name::<T>())))?;
    let foreign: &[u8] = if cfg!(target_endian = "little") { b">!" } else { b"<" };
    if buffer.format().to_bytes().first().is_some_and(|order| foreign.contains(order)) {
        return Err(refuse("must be in the machine's byte order".into()));
    }
    Ok(buffer)
}

/// The first rows of `object`, as memory of the shape `shape` that can be written.
pub(super) fn writable<T: Element>(
    object: &Bound<'_, PyAny>,
    field: &'static str,
    shape: &[usize],
) -> PyResult<PyBuffer<T>> {
    let refuse = |problem: String| InvalidArgument::new_err((field, problem));
    let stop = isize::try_from(shape[0]).expect("as many as a step has");
    let used = object
        .get_item(PySlice::new(object.py(), 0, stop, 1))
        .map_err(|error| refuse(format!("must be an array of {}: {error}", std::any::type_name::<T>())))?;
    let buffer = array::<T>(&used, field)?;
    let given = buffer.shape().first().copied().unwrap_or_default();
    if given < shape[0] {
        return Err(refuse(format!("has {given} elements, this step needs {}", shape[0])));
    }
    if buffer.shape() != shape {
        return Err(refuse(format!("must have the shape {shape:?}, not {:?}", buffer.shape())));
    }
    if buffer.readonly() || !buffer.is_c_contiguous() {
        return Err(refuse("must be a C-contiguous array that can be written".into()));
    }
    Ok(buffer)
}

/// `len` zeros, or `MemoryError`: where memory is short, one call fails and not the process.
pub(super) fn zeros<T: Element + Default>(len: usize) -> PyResult<Vec<T>> {
    let mut zeros = Vec::new();
    zeros.try_reserve_exact(len).map_err(|_| {
        let bytes = len as u128 * size_of::<T>() as u128;
        PyMemoryError::new_err(format!("there is no memory of {bytes} bytes"))
    })?;
    zeros.resize(len, T::default());
    Ok(zeros)
}

/// A copy of the elements of `buffer`, or `MemoryError`.
pub(super) fn contents<T: Element + Default>(py: Python<'_>, buffer: &PyBuffer<T>) -> PyResult<Vec<T>> {
    let mut elements = zeros(buffer.item_count())?;
    buffer.copy_to_slice(py, &mut elements)?;
    Ok(elements)
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
    bans: PyBuffer<i32>,
}

impl Buffers {
    pub(super) fn of(object: &Bound<'_, PyAny>, counts: Counts) -> PyResult<Self> {
        fn of<T: Element>(object: &Bound<'_, PyAny>, field: &'static str, shape: &[usize]) -> PyResult<PyBuffer<T>> {
            writable(&object.getattr(field)?, field, shape)
        }
        Ok(Self {
            token_ids: of(object, "token_ids", &[counts.tokens])?,
            positions: of(object, "positions", &[counts.tokens])?,
            seqs: of(object, "seqs", &[counts.rows])?,
            slots: of(object, "slots", &[counts.rows])?,
            starts: of(object, "starts", &[counts.rows])?,
            num_new: of(object, "num_new", &[counts.rows])?,
            kv_lengths: of(object, "kv_lengths", &[counts.rows])?,
            readback: of(object, "readback", &[counts.rows])?,
            table_changes: of(object, "table_changes", &[counts.table_changes, 3])?,
            bans: of(object, "bans", &[counts.bans, 3])?,
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
        self.table_changes.copy_from_slice(py, arrays.table_changes.as_flattened())?;
        self.bans.copy_from_slice(py, arrays.bans.as_flattened())
    }
}
