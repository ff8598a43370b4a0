//! The classes `CpuModel` and `CpuDevice`: extract, lock, call, map.

use std::sync::{Mutex, MutexGuard, PoisonError};

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{IntoPyDict, PyDict};

use super::arrays::{array, writable};
use super::errors::InvalidArgument;
use super::whole::Whole;
use crate::cpu::{
    CpuDevice, DeviceSettings, InstructionSet, KvKind, LaunchError, Matrix, ModelShape, OP_KINDS, OutOfMemory, Program,
    RecordError, Recorder, Refusal, RopeTable, StepArrays, ValueId, Weight, WeightId, WeightKind,
};

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> Self {
        InvalidArgument::new_err((refusal.field, refusal.problem))
    }
}

impl From<OutOfMemory> for PyErr {
    fn from(error: OutOfMemory) -> Self {
        PyMemoryError::new_err(error.to_string())
    }
}

impl From<RecordError> for PyErr {
    fn from(error: RecordError) -> Self {
        InvalidArgument::new_err(("weights", error.0))
    }
}

impl From<LaunchError> for PyErr {
    fn from(error: LaunchError) -> Self {
        match error {
            LaunchError::Refused(refusal) => refusal.into(),
            LaunchError::OutOfMemory(error) => error.into(),
            LaunchError::NoThreads(_) => PyRuntimeError::new_err(error.to_string()),
        }
    }
}

/// Names of the instruction sets that this machine has, the fastest first.
#[pyfunction]
pub(super) fn cpu_instructions() -> Vec<&'static str> {
    InstructionSet::all().into_iter().map(InstructionSet::name).collect()
}

/// A model that is being recorded, or is ready.
enum Model {
    Recording(Box<Recorder>),
    Ready(Program),
    /// `finish` failed.
    Spoilt,
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
            Model::Ready(_) | Model::Spoilt => Err(PyRuntimeError::new_err("the program is finished")),
        }
    }

    fn program(&self) -> PyResult<Program> {
        match &*self.lock() {
            Model::Ready(program) => Ok(program.clone()),
            Model::Recording(_) | Model::Spoilt => Err(PyRuntimeError::new_err("the program is not finished")),
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

    /// Plan the program: nothing more is recorded.
    fn finish(&self) -> PyResult<()> {
        let mut model = self.lock();
        match std::mem::replace(&mut *model, Model::Spoilt) {
            Model::Recording(recorder) => *model = Model::Ready(recorder.finish()?),
            other => {
                *model = other;
                drop(model);
                return Err(PyRuntimeError::new_err("the program is finished"));
            }
        }
        Ok(())
    }

    /// Bytes of all weights, packed.
    #[getter]
    fn weight_bytes(&self) -> PyResult<usize> {
        Ok(self.program()?.weight_bytes())
    }
}

/// Computes steps of a `CpuModel` over a KV pool of its own. See `reprieve.step.Device`.
///
/// `cos` and `sin` [positions, `head_size` / 2] are the rotary angles of all positions that a sequence may have.
#[pyclass(frozen, name = "CpuDevice", module = "reprieve._native")]
pub(super) struct PyCpuDevice {
    device: Mutex<CpuDevice>,
    kv_shape: (usize, usize, usize, usize, usize),
    block_bytes: usize,
    num_blocks: usize,
    set: InstructionSet,
    threads: usize,
}

impl PyCpuDevice {
    /// A holder of this lock computes with the interpreter's lock given up, so it must not be waited for with that one
    /// in hand.
    fn lock(&self, py: Python<'_>) -> MutexGuard<'_, CpuDevice> {
        self.device.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner)
    }

    /// The numbers of `blocks`, all of which are in the pool.
    fn checked(&self, blocks: &[i64]) -> PyResult<Vec<u32>> {
        let is_there = |block: &i64| usize::try_from(*block).is_ok_and(|block| block < self.num_blocks);
        let bad: Vec<i64> = blocks.iter().copied().filter(|block| !is_there(block)).collect();
        if bad.is_empty() {
            return Ok(blocks.iter().map(|&block| u32::try_from(block).expect("checked above")).collect());
        }
        let problem = format!("{bad:?} are not among the pool's {} blocks", self.num_blocks);
        Err(InvalidArgument::new_err(("blocks", problem)))
    }

    fn check_image(&self, blocks: usize, given: usize) -> PyResult<()> {
        let expected = blocks * self.block_bytes;
        if given == expected {
            return Ok(());
        }
        let problem = format!("must be {expected} bytes ({blocks} blocks of {}), not {given}", self.block_bytes);
        Err(InvalidArgument::new_err(("image", problem)))
    }
}

#[pymethods]
impl PyCpuDevice {
    #[new]
    #[pyo3(signature = (model, *, num_blocks, block_size, num_slots, context_length, kv, cos, sin, threads,
        instructions = None))]
    #[expect(clippy::too_many_arguments, reason = "keywords in Python")]
    fn new(
        py: Python<'_>,
        model: &PyCpuModel,
        num_blocks: Whole<u32>,
        block_size: Whole<u32>,
        num_slots: Whole<u32>,
        context_length: Whole<u32>,
        kv: &str,
        cos: &Bound<'_, PyAny>,
        sin: &Bound<'_, PyAny>,
        threads: Whole<u32>,
        instructions: Option<&str>,
    ) -> PyResult<Self> {
        for (field, Whole(value)) in [
            ("num_blocks", num_blocks),
            ("block_size", block_size),
            ("num_slots", num_slots),
            ("context_length", context_length),
            ("threads", threads),
        ] {
            if value == 0 {
                return Err(InvalidArgument::new_err((field, "must be at least 1, not 0")));
            }
        }
        let program = model.program()?;
        let settings = DeviceSettings {
            num_blocks: num_blocks.0 as usize,
            block_size: block_size.0 as usize,
            num_slots: num_slots.0 as usize,
            context_length: context_length.0 as usize,
            kv: kv_kind(kv)?,
            threads: threads.0 as usize,
            set: instruction_set(instructions)?,
        };
        let positions = settings.context_length.min(settings.num_blocks.saturating_mul(settings.block_size));
        let half = program.head_size() / 2;
        let rope = RopeTable::new(half, angles(cos, "cos", positions, half)?, angles(sin, "sin", positions, half)?);
        let device = py.detach(|| CpuDevice::new(program, settings, rope))?;
        let shape = device.pool().shape();
        Ok(Self {
            kv_shape: (shape.layers, shape.kv_heads, 2, shape.head_size, shape.block_size),
            block_bytes: device.pool().block_bytes(),
            num_blocks: shape.num_blocks,
            set: device.set(),
            threads: device.num_threads(),
            device: Mutex::new(device),
        })
    }

    /// Compute `step` and write the token of each row, or a negative TOKEN_ value, to `tokens` [rows].
    ///
    /// The interpreter's lock is given up meanwhile. Raises `InvalidArgument` that names the array and the numbers, and
    /// `MemoryError`, with nothing changed.
    fn launch(&self, py: Python<'_>, step: &Bound<'_, PyAny>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let arrays = step_arrays(step)?;
        let tokens = writable::<i32>(tokens, "tokens", &[arrays.slots.len()])?;
        let mut guard = self.lock(py);
        let device = &mut *guard;
        let chosen = py.detach(|| device.launch(&arrays))?;
        drop(guard);
        tokens.copy_from_slice(py, &chosen)
    }

    /// Write the logits of the last step to `out` [rows read back, logits of a row].
    fn logits(&self, py: Python<'_>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let (rows, width) = self.logits_shape(py);
        let out = writable::<f32>(out, "out", &[rows, width])?;
        let mut device = self.lock(py);
        let logits: Vec<f32> = (0..rows).flat_map(|row| device.logits(row).to_vec()).collect();
        drop(device);
        out.copy_from_slice(py, &logits)
    }

    /// Rows that the last step read back, and how many logits each has.
    #[getter]
    fn logits_shape(&self, py: Python<'_>) -> (usize, usize) {
        self.lock(py).logits_shape()
    }

    /// Copy the bytes of `blocks`, in this order, to `out`.
    #[expect(clippy::needless_pass_by_value, reason = "how a sequence is taken")]
    fn gather(&self, py: Python<'_>, blocks: Vec<i64>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = self.checked(&blocks)?;
        let out = array::<u8>(out, "image")?;
        self.check_image(blocks.len(), out.item_count())?;
        let mut bytes = vec![0; out.item_count()];
        self.lock(py).pool().gather(&blocks, &mut bytes);
        out.copy_from_slice(py, &bytes)
    }

    /// Write the bytes of `image`, as `gather` gave them, to `blocks`; each may be named once.
    #[expect(clippy::needless_pass_by_value, reason = "how a sequence is taken")]
    fn scatter(&self, py: Python<'_>, blocks: Vec<i64>, image: &Bound<'_, PyAny>) -> PyResult<()> {
        let checked = self.checked(&blocks)?;
        let image: Vec<u8> = flat(image, "image")?;
        self.check_image(blocks.len(), image.len())?;
        let mut sorted = checked.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != blocks.len() {
            return Err(InvalidArgument::new_err(("blocks", format!("names a block twice: {blocks:?}"))));
        }
        self.lock(py).pool_mut().scatter(&checked, &image);
        Ok(())
    }

    /// Bytes of one block in all layers.
    #[getter]
    fn block_bytes(&self) -> usize {
        self.block_bytes
    }

    /// (layers, KV heads, keys and values, head size, block size): in each block the keys lie across.
    #[getter]
    fn kv_shape(&self) -> (usize, usize, usize, usize, usize) {
        self.kv_shape
    }

    /// The instruction set in use.
    #[getter]
    fn instructions(&self) -> &'static str {
        self.set.name()
    }

    /// Threads that compute.
    #[getter]
    fn threads(&self) -> usize {
        self.threads
    }

    /// Seconds that steps have taken, by kind of operation.
    fn op_seconds<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let seconds = self.lock(py).op_seconds();
        OP_KINDS.into_iter().zip(seconds).into_py_dict(py)
    }
}

/// The elements of a C-contiguous array of any shape.
fn flat<T: Element>(object: &Bound<'_, PyAny>, field: &'static str) -> PyResult<Vec<T>> {
    let buffer = array::<T>(object, field)?;
    if !buffer.is_c_contiguous() {
        return Err(InvalidArgument::new_err((field, "must be a C-contiguous array")));
    }
    buffer.to_vec(object.py())
}

/// An array of a step, which must have as many dimensions as `shape` and as many elements where `shape` says.
fn step_array<T: Element>(
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
    buffer.to_vec(step.py())
}

fn step_arrays(step: &Bound<'_, PyAny>) -> PyResult<StepArrays> {
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

/// cos or sin of at least `positions` positions.
fn angles(object: &Bound<'_, PyAny>, field: &'static str, positions: usize, half: usize) -> PyResult<Vec<f32>> {
    let buffer = array::<f32>(object, field)?;
    match buffer.shape() {
        &[rows, width] if rows >= positions && width == half && buffer.is_c_contiguous() => {
            let mut values = buffer.to_vec(object.py())?;
            values.truncate(positions * half);
            Ok(values)
        }
        shape => {
            let problem = format!("must be C-contiguous [at least {positions}, {half}], not {shape:?}");
            Err(InvalidArgument::new_err((field, problem)))
        }
    }
}

fn kind(name: &str, field: &'static str) -> PyResult<WeightKind> {
    WeightKind::of_name(name).ok_or_else(|| {
        let known = WeightKind::ALL.map(WeightKind::name).join(", ");
        InvalidArgument::new_err((field, format!("must be one of {known}, not {name:?}")))
    })
}

fn kv_kind(name: &str) -> PyResult<KvKind> {
    match name {
        "f32" => Ok(KvKind::F32),
        "f16" => Ok(KvKind::F16),
        "bf16" => Ok(KvKind::Bf16),
        other => Err(InvalidArgument::new_err(("kv", format!("must be \"f32\", \"f16\" or \"bf16\", not {other:?}")))),
    }
}

fn instruction_set(name: Option<&str>) -> PyResult<InstructionSet> {
    let known = InstructionSet::all();
    match name {
        None => Ok(known[0]),
        Some(name) => known.iter().copied().find(|set| set.name() == name).ok_or_else(|| {
            let names: Vec<&str> = known.iter().map(|set| set.name()).collect();
            let problem = format!("must be one of this machine's, {}, not {name:?}", names.join(", "));
            InvalidArgument::new_err(("instructions", problem))
        }),
    }
}
