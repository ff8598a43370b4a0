//! The arrays of a `Step`, copied for the CPU device, which checks what they say.

use pyo3::buffer::{Element, PyBuffer};
use pyo3::prelude::*;

use super::arrays::{array, contents};
use super::errors::InvalidArgument;
use crate::cpu::StepArrays;

/// The memory of an array of a step; `shape` has a number of elements where only one will do.
fn step_array<T: Element + Default>(
    step: &Bound<'_, PyAny>,
    name: &str,
    field: &'static str,
    shape: &[Option<usize>],
) -> PyResult<PyBuffer<T>> {
    let buffer: PyBuffer<T> = array(&step.getattr(name)?, field)?;
    let is_fitting = buffer.shape().len() == shape.len()
        && buffer.shape().iter().zip(shape).all(|(&given, wanted)| wanted.is_none_or(|wanted| given == wanted));
    if !is_fitting || !buffer.is_c_contiguous() {
        let size = |wanted: &Option<usize>| wanted.map_or("any".to_owned(), |wanted| wanted.to_string());
        let shape = shape.iter().map(size).collect::<Vec<_>>().join(", ");
        let layout = if buffer.is_c_contiguous() { "C-contiguous" } else { "not C-contiguous" };
        let kind = std::any::type_name::<T>();
        let problem = format!("must be C-contiguous {kind} [{shape}], not {:?}, {layout}", buffer.shape());
        return Err(InvalidArgument::new_err((field, problem)));
    }
    Ok(buffer)
}

/// One number for each row or token.
fn flat<T: Element + Default>(step: &Bound<'_, PyAny>, name: &str, field: &'static str) -> PyResult<Vec<T>> {
    contents(step.py(), &step_array(step, name, field, &[None])?)
}

/// Three numbers each.
fn triples(step: &Bound<'_, PyAny>, name: &str, field: &'static str) -> PyResult<Vec<[i32; 3]>> {
    let numbers = contents(step.py(), &step_array::<i32>(step, name, field, &[None, Some(3)])?)?;
    Ok(numbers.as_chunks::<3>().0.to_vec())
}

/// The arrays of `step`, a `reprieve.step.Step`.
pub(super) fn step_arrays(step: &Bound<'_, PyAny>) -> PyResult<StepArrays> {
    let masks = step_array::<u32>(step, "masks", "step.masks", &[None, None])?;
    Ok(StepArrays {
        token_ids: flat(step, "token_ids", "step.token_ids")?,
        positions: flat(step, "positions", "step.positions")?,
        slots: flat(step, "slots", "step.slots")?,
        starts: flat(step, "starts", "step.starts")?,
        num_new: flat(step, "num_new", "step.num_new")?,
        kv_lengths: flat(step, "kv_lengths", "step.kv_lengths")?,
        readback: flat(step, "readback", "step.readback")?,
        table_changes: triples(step, "table_changes", "step.table_changes")?,
        bans: triples(step, "bans", "step.bans")?,
        mask_rows: flat(step, "mask_rows", "step.mask_rows")?,
        masks_shape: [masks.shape()[0], masks.shape()[1]],
        masks: contents(step.py(), &masks)?,
    })
}
