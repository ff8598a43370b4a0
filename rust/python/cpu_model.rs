//! The class `CpuModel`: extract, lock, call, map.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::buffer::Element;
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;

use super::arrays::{array, contents};
use super::errors::InvalidArgument;
use super::whole::Whole;
use crate::cpu::{
    Matrix, ModelShape, OutOfMemory, Program, RecordError, Recorder, ValueId, Weight, WeightId, WeightKind,
};

impl From<OutOfMemory> for PyErr {
    fn from(error: OutOfMemory) -> Self {
        PyMemoryError::new_err(error.to_string())
    }
}

impl From<RecordError> for PyErr {
    fn from(RecordError { field, misfit }: RecordError) -> Self {
        InvalidArgument::new_err((field, misfit.to_string()))
    }
}

/// A model that is being recorded, or is ready.
enum Model {
    Recording(Box<Recorder>),
    Ready(Program),
}

/// Weights packed for the CPU, and the program of a forward pass over them, recorded by calls like those of `Ops`.
///
/// Weights and values are numbers that its methods return. `InvalidArgument` names what does not fit.
#[pyclass(frozen, name = "CpuModel", module = "reprieve._native")]
pub(super) struct PyCpuModel(Mutex<Model>);

impl PyCpuModel {
    /// Nothing may run Python while this is held.
    fn lock(&self) -> MutexGuard<'_, Model> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn record<T>(&self, call: impl FnOnce(&mut Recorder) -> Result<T, RecordError>) -> PyResult<T> {
        match &mut *self.lock() {
            Model::Recording(recorder) => Ok(call(recorder)?),
            Model::Ready(_) => Err(PyRuntimeError::new_err("the program is finished")),
        }
    }

    /// The program, once it is finished.
    pub(super) fn program(&self) -> PyResult<Program> {
        match &*self.lock() {
            Model::Ready(program) => Ok(program.clone()),
            Model::Recording(_) => Err(PyRuntimeError::new_err("the program is not finished")),
        }
    }
}

#[pymethods]
impl PyCpuModel {
    #[new]
    #[pyo3(signature = (*, num_layers, num_heads, num_kv_heads, head_size, vocab_size))]
    fn new(
        num_layers: Whole<usize>,
        num_heads: Whole<usize>,
        num_kv_heads: Whole<usize>,
        head_size: Whole<usize>,
        vocab_size: Whole<usize>,
    ) -> PyResult<Self> {
        let shape = ModelShape {
            num_layers: num_layers.0,
            num_heads: num_heads.0,
            num_kv_heads: num_kv_heads.0,
            head_size: head_size.0,
            vocab_size: vocab_size.0,
        };
        Ok(Self(Mutex::new(Model::Recording(Box::new(Recorder::new(shape)?)))))
    }

    /// Pack a matrix [outputs, inputs]: `raw` holds its rows as type `dtype`, `store` is the type kept.
    ///
    /// Types are F32, F16, BF16, `Q8_0`, `Q4_0` and `Q4_1`; `store` is `dtype`, or one of the first three.
    #[expect(clippy::too_many_arguments, reason = "what a matrix is")]
    fn add_matrix(
        &self,
        py: Python<'_>,
        name: String,
        raw: &Bound<'_, PyAny>,
        dtype: &str,
        store: &str,
        outputs: Whole<usize>,
        inputs: Whole<usize>,
    ) -> PyResult<usize> {
        let (Whole(outputs), Whole(inputs)) = (outputs, inputs);
        for (field, size) in [("outputs", outputs), ("inputs", inputs)] {
            if size == 0 {
                return Err(InvalidArgument::new_err((field, format!("must be at least 1, not 0 ({name})"))));
            }
        }
        let from = kind(dtype, "dtype")?;
        let to = kind(store, "store")?;
        if to != from && !matches!(to, WeightKind::F32 | WeightKind::F16 | WeightKind::Bf16) {
            let problem = format!("weights of type {dtype} cannot be kept as {store}: nothing is quantised here");
            return Err(InvalidArgument::new_err(("store", problem)));
        }
        let bytes: Vec<u8> = flat(raw, "raw")?;
        let expected = from.row_bytes(inputs).and_then(|row| row.checked_mul(outputs));
        if expected != Some(bytes.len()) {
            let problem =
                format!("{} bytes are not {outputs} rows of {inputs} weights of type {dtype} ({name})", bytes.len());
            return Err(InvalidArgument::new_err(("raw", problem)));
        }
        let matrix = py.detach(|| Matrix::pack(from, to, &bytes, outputs, inputs))?;
        Ok(self.record(|recorder| Ok(recorder.add_weight(name, Weight::Matrix(matrix))))?.0)
    }

    /// Keep a vector of f32.
    fn add_vector(&self, name: String, values: &Bound<'_, PyAny>) -> PyResult<usize> {
        let values: Vec<f32> = flat(values, "values")?;
        Ok(self.record(|recorder| Ok(recorder.add_weight(name, Weight::Vector(values))))?.0)
    }

    fn embed(&self, table: Whole<usize>) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.embed(WeightId(table.0)))?.0)
    }

    fn rms_norm(&self, x: Whole<usize>, weight: Whole<usize>, eps: f32) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.rms_norm(ValueId(x.0), WeightId(weight.0), eps))?.0)
    }

    fn add_rms_norm(
        &self,
        x: Whole<usize>,
        residual: Whole<usize>,
        weight: Whole<usize>,
        eps: f32,
    ) -> PyResult<(usize, usize)> {
        let (out, total) =
            self.record(|recorder| recorder.add_rms_norm(ValueId(x.0), ValueId(residual.0), WeightId(weight.0), eps))?;
        Ok((out.0, total.0))
    }

    #[pyo3(signature = (x, weight, bias = None))]
    fn linear(&self, x: Whole<usize>, weight: Whole<usize>, bias: Option<Whole<usize>>) -> PyResult<usize> {
        let bias = bias.map(|bias| WeightId(bias.0));
        Ok(self.record(|recorder| recorder.linear(ValueId(x.0), WeightId(weight.0), bias))?.0)
    }

    fn head_norm(&self, x: Whole<usize>, weight: Whole<usize>, eps: f32) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.head_norm(ValueId(x.0), WeightId(weight.0), eps))?.0)
    }

    fn rope_append(&self, layer: Whole<usize>, q: Whole<usize>, k: Whole<usize>, v: Whole<usize>) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.rope_append(layer.0, ValueId(q.0), ValueId(k.0), ValueId(v.0)))?.0)
    }

    fn paged_attention(&self, layer: Whole<usize>, q: Whole<usize>) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.paged_attention(layer.0, ValueId(q.0)))?.0)
    }

    fn swiglu(&self, gate: Whole<usize>, up: Whole<usize>) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.swiglu(ValueId(gate.0), ValueId(up.0)))?.0)
    }

    fn select_readback(&self, x: Whole<usize>) -> PyResult<usize> {
        Ok(self.record(|recorder| recorder.select_readback(ValueId(x.0)))?.0)
    }

    fn argmax(&self, logits: Whole<usize>) -> PyResult<()> {
        self.record(|recorder| recorder.argmax(ValueId(logits.0)))
    }

    /// Plan the program: nothing more is recorded. Where it is refused, recording goes on.
    fn finish(&self) -> PyResult<()> {
        let mut model = self.lock();
        let Model::Recording(recorder) = &mut *model else {
            return Err(PyRuntimeError::new_err("the program is finished"));
        };
        let program = recorder.finish()?;
        *model = Model::Ready(program);
        Ok(())
    }

    /// Bytes of all weights, packed.
    #[getter]
    fn weight_bytes(&self) -> PyResult<usize> {
        Ok(self.program()?.weight_bytes())
    }
}

/// The elements of a C-contiguous array of any shape.
fn flat<T: Element + Default>(object: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Vec<T>> {
    let buffer = array::<T>(object, field)?;
    if !buffer.is_c_contiguous() {
        return Err(InvalidArgument::new_err((field, "must be a C-contiguous array")));
    }
    contents(object.py(), &buffer)
}

fn kind(name: &str, field: &'static str) -> PyResult<WeightKind> {
    WeightKind::of_name(name).ok_or_else(|| {
        let known = WeightKind::ALL.map(WeightKind::name).join(", ");
        InvalidArgument::new_err((field, format!("must be one of {known}, not {name:?}")))
    })
}
