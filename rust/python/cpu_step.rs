//! The arrays of a `Step`, copied for the CPU device, which checks what they say.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use super::arrays::{array, contents};
use super::errors::InvalidArgument;
use crate::cpu::StepArrays;

/// An array of a step, which must have as many dimensions as `shape` and as many elements where `shape` says.
fn step_array<T: Element + Default>(
    step: &Bound<'_, PyAny>,
    name: &str,
    field: &'static str,
    columns: Option<usize>,
) -> PyResult<Vec<T>> {
    let object = step.getattr(name)?;
    let buffer: PyBuffer<T> = array(&object, field)?;
    let is_fitting = match (buffer.shape(), columns) {
        ([_], None) => true,
        ([_, given], Some(columns)) => *given == columns,
        _ => false,
    };
    if !is_fitting || !buffer.is_c_contiguous() {
        let shape = columns.map_or("[any]".to_owned(), |columns| format!("[any, {columns}]"));
        let layout = if buffer.is_c_contiguous() { "C-contiguous" } else { "not C-contiguous" };
        let problem =
            format!("must be C-contiguous {} {shape}, not {:?}, {layout}", std::any::type_name::<T>(), buffer.shape());
        return Err(InvalidArgument::new_err((field, problem)));
    }
    contents(step.py(), &buffer)
}

/// The arrays of `step`, a `reprieve.step.Step`.
pub(super) fn step_arrays(step: &Bound<'_, PyAny>) -> PyResult<StepArrays> {
    let changes: Vec<i32> = step_array(step, "table_changes", "step.table_changes", Some(3))?;
    Ok(StepArrays {
        token_ids: step_array(step, "token_ids", "step.token_ids", None)?,
        positions: step_array(step, "positions", "step.positions", None)?,
        slots: step_array(step, "slots", "step.slots", None)?,
        starts: step_array(step, "starts", "step.starts", None)?,
        num_new: step_array(step, "num_new", "step.num_new", None)?,
        kv_lengths: step_array(step, "kv_lengths", "step.kv_lengths", None)?,
        readback: step_array(step, "readback", "step.readback", None)?,
        table_changes: changes.as_chunks::<3>().0.to_vec(),
    })
}
