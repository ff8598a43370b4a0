//! The class `CpuDevice`: extract, lock, call, map.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

use pyo3::buffer::{Element, PyBuffer};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::{IntoPyDict, PyDict};

use super::arrays::{array, contents, writable, zeros};
use super::cpu_model::PyCpuModel;
use super::cpu_step::step_arrays;
use super::errors::InvalidArgument;
use super::whole::Whole;
use crate::cpu::{
    CpuDevice, DeviceSettings, Failure, InstructionSet, KvKind, LaunchError, LaunchedStep, OP_KINDS, Refusal, RopeTable,
};

pyo3::import_exception!(reprieve.errors, StepFailed);

/// Threads that a device may have.
const MOST_THREADS: u32 = 1024;

impl From<Refusal> for PyErr {
    fn from(refusal: Refusal) -> Self {
        InvalidArgument::new_err((refusal.field, refusal.problem))
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

impl From<Failure> for PyErr {
    fn from(failure: Failure) -> Self {
        StepFailed::new_err(failure.to_string())
    }
}

/// Names of the instruction sets that this machine has, the fastest first.
#[pyfunction]
pub(super) fn cpu_instructions() -> Vec<&'static str> {
    InstructionSet::all().into_iter().map(InstructionSet::name).collect()
}

/// Computes steps of a `CpuModel` over a KV pool of its own. See `reprieve.step.Device`.
///
/// `cos` and `sin` [positions, `head_size` / 2] are the rotary angles of all positions that a sequence may have.
#[pyclass(frozen, name = "CpuDevice", module = "reprieve._native")]
pub(super) struct PyCpuDevice {
    device: Mutex<CpuDevice>,
    /// The process that uses the device: the maker, or a child that has found it idle at the fork.
    process: AtomicU32,
    kv_shape: (usize, usize, usize, usize, usize),
    block_bytes: usize,
    num_blocks: usize,
    set: InstructionSet,
    threads: usize,
}

impl PyCpuDevice {
    /// A holder of this lock may wait for steps with the interpreter's lock given up, so it must not be waited for with
    /// that one in hand. Nothing may run Python while it is held.
    ///
    /// In a forked child the device's threads are not there, and a lock that was held at the fork is held for ever: its
    /// holder is in the parent. So the first to come there does not wait; as the interpreter's lock is in its hand, no
    /// other thread of the child holds it.
    fn lock(&self, py: Python<'_>) -> PyResult<MutexGuard<'_, CpuDevice>> {
        let process = process::id();
        if self.process.load(Ordering::Relaxed) == process {
            return Ok(self.device.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner));
        }
        let device = match self.device.try_lock() {
            Ok(device) => Some(device),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        };
        let Some(device) = device.filter(|device| device.survive_fork()) else {
            let problem = "the device was computing when this process was forked; make a new one";
            return Err(PyRuntimeError::new_err(problem));
        };
        self.process.store(process, Ordering::Relaxed);
        Ok(device)
    }

    /// Step `number`, which is launched and not forgotten.
    fn step(&self, py: Python<'_>, number: u64) -> PyResult<LaunchedStep> {
        let device = self.lock(py)?;
        device.step(number).ok_or_else(|| {
            let problem = format!("there is no step {number}: {} were launched, or it is forgotten", device.newest());
            PyRuntimeError::new_err(problem)
        })
    }

    /// The numbers of `blocks`, all of which are in the pool.
    fn checked(&self, blocks: &[Bound<'_, PyAny>]) -> PyResult<Vec<u32>> {
        let mut checked = Vec::with_capacity(blocks.len());
        let mut bad = Vec::new();
        for block in blocks {
            match block.extract::<i64>() {
                Ok(number) => match u32::try_from(number) {
                    Ok(number) if (number as usize) < self.num_blocks => checked.push(number),
                    _ => bad.push(number.to_string()),
                },
                // Too large for any number here, or no whole number.
                Err(_) => bad.push(block.repr().map(|repr| repr.to_string()).unwrap_or_default()),
            }
        }
        if bad.is_empty() {
            return Ok(checked);
        }
        let problem = format!("[{}] are not among the pool's {} blocks", bad.join(", "), self.num_blocks);
        Err(InvalidArgument::new_err(("blocks", problem)))
    }

    /// Refuses an image of another size than that of `blocks` blocks.
    fn check_image(&self, blocks: usize, given: &PyBuffer<u8>, field: &'static str) -> PyResult<()> {
        let expected = blocks.saturating_mul(self.block_bytes);
        if given.shape() == [expected] {
            return Ok(());
        }
        let problem = format!(
            "must be {expected} bytes in one dimension ({blocks} blocks of {}), not uint8 {:?}",
            self.block_bytes,
            given.shape()
        );
        Err(InvalidArgument::new_err((field, problem)))
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
        if threads.0 > MOST_THREADS {
            let problem = format!("must be at most {MOST_THREADS}, not {}", threads.0);
            return Err(InvalidArgument::new_err(("threads", problem)));
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
        let shape = device.kv_shape();
        Ok(Self {
            kv_shape: (shape.layers, shape.kv_heads, 2, shape.head_size, shape.block_size),
            block_bytes: device.block_bytes(),
            num_blocks: shape.num_blocks,
            set: device.set(),
            threads: device.num_threads(),
            device: Mutex::new(device),
            process: AtomicU32::new(process::id()),
        })
    }

    /// Let `step` be computed after those before it, and return its number: the first is 1. Its arrays are copied.
    ///
    /// Nothing is waited for, but for the steps before where memory must be made for this one. Raises `InvalidArgument`
    /// that names the array and the numbers, `MemoryError`, and `RuntimeError` where no thread can be started, with
    /// nothing changed.
    fn launch(&self, py: Python<'_>, step: &Bound<'_, PyAny>) -> PyResult<u64> {
        let arrays = step_arrays(step)?;
        let mut guard = self.lock(py)?;
        let device = &mut *guard;
        let num_read = arrays.readback.iter().filter(|&&kind| kind != 0).count();
        if !device.has_room(arrays.token_ids.len(), num_read) {
            py.detach(|| device.wait_until_idle());
        }
        Ok(device.launch(arrays)?)
    }

    /// Whether step `number` was computed, or has failed. Never waits.
    fn ready(&self, py: Python<'_>, number: Whole<u64>) -> PyResult<bool> {
        Ok(self.step(py, number.0)?.is_over())
    }

    /// Wait for step `number` and write the token of each row, or a negative TOKEN_ value, to `tokens` [rows].
    ///
    /// The interpreter's lock is given up meanwhile. It may be called again until the step is forgotten. Raises
    /// `StepFailed` where a thread panicked in the step, or in one that it came behind.
    fn settle(&self, py: Python<'_>, number: Whole<u64>, tokens: &Bound<'_, PyAny>) -> PyResult<()> {
        let step = self.step(py, number.0)?;
        let tokens = writable::<i32>(tokens, "tokens", &[step.num_rows()])?;
        let chosen = if step.is_over() { step.wait() } else { py.detach(|| step.wait()) };
        tokens.copy_from_slice(py, &chosen?)
    }

    /// Let go of what step `number` came to; a step that is not computed yet still will be. Idempotent.
    fn forget(&self, py: Python<'_>, number: Whole<u64>) -> PyResult<()> {
        self.lock(py)?.forget(number.0);
        Ok(())
    }

    /// Wait for step `number` and write its logits to `out` [rows read back, logits of a row].
    ///
    /// Raises `RuntimeError` once another step was launched, `StepFailed` if it has failed.
    fn logits(&self, py: Python<'_>, number: Whole<u64>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let out = array::<f32>(out, "out")?;
        check_writable(&out)?;
        let guard = self.lock(py)?;
        let device = &*guard;
        if number.0 == 0 || number.0 != device.newest() {
            return Err(PyRuntimeError::new_err("the logits are gone: another step was launched since"));
        }
        let (rows, width) = device.logits_shape();
        if out.shape() != [rows, width] {
            let problem = format!("must have the shape [{rows}, {width}], not {:?}", out.shape());
            return Err(InvalidArgument::new_err(("out", problem)));
        }
        let mut logits = zeros(rows * width)?;
        py.detach(|| device.logits(&mut logits))?;
        drop(guard);
        out.copy_from_slice(py, &logits)
    }

    /// Rows that the newest step reads back, and how many logits each has.
    #[getter]
    fn logits_shape(&self, py: Python<'_>) -> PyResult<(usize, usize)> {
        Ok(self.lock(py)?.logits_shape())
    }

    /// Wait for the step that is being computed, let those behind it fail, and end the threads. Idempotent.
    fn stop(&self, py: Python<'_>) {
        // In a child that was forked during a step there are no threads.
        if let Ok(mut guard) = self.lock(py) {
            let device = &mut *guard;
            py.detach(|| device.stop());
        }
    }

    /// Wait for all launched steps and copy the bytes of `blocks`, in this order, to `out` [blocks * `block_bytes`].
    #[expect(clippy::needless_pass_by_value, reason = "how a sequence is taken")]
    fn gather(&self, py: Python<'_>, blocks: Vec<Bound<'_, PyAny>>, out: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = self.checked(&blocks)?;
        let out = array::<u8>(out, "out")?;
        self.check_image(blocks.len(), &out, "out")?;
        check_writable(&out)?;
        let mut bytes = zeros(out.item_count())?;
        let guard = self.lock(py)?;
        let device = &*guard;
        py.detach(|| device.gather(&blocks, &mut bytes));
        drop(guard);
        out.copy_from_slice(py, &bytes)
    }

    /// Wait for all launched steps and write the bytes of `image` [blocks * `block_bytes`], as `gather` gave them, to
    /// `blocks`; each may be named once.
    #[expect(clippy::needless_pass_by_value, reason = "how a sequence is taken")]
    fn scatter(&self, py: Python<'_>, blocks: Vec<Bound<'_, PyAny>>, image: &Bound<'_, PyAny>) -> PyResult<()> {
        let blocks = self.checked(&blocks)?;
        let image = array::<u8>(image, "image")?;
        self.check_image(blocks.len(), &image, "image")?;
        let mut sorted = blocks.clone();
        sorted.sort_unstable();
        sorted.dedup();
        if sorted.len() != blocks.len() {
            return Err(InvalidArgument::new_err(("blocks", format!("names a block twice: {blocks:?}"))));
        }
        let image = contents(py, &image)?;
        let mut guard = self.lock(py)?;
        let device = &mut *guard;
        py.detach(|| device.scatter(&blocks, &image));
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
        let seconds = self.lock(py)?.op_seconds();
        OP_KINDS.into_iter().zip(seconds).into_py_dict(py)
    }
}

/// Refuses an array that cannot be written whole.
fn check_writable<T: Element>(out: &PyBuffer<T>) -> PyResult<()> {
    if out.readonly() || !out.is_c_contiguous() {
        return Err(InvalidArgument::new_err(("out", "must be a C-contiguous array that can be written")));
    }
    Ok(())
}

/// cos or sin of at least `positions` positions.
fn angles(object: &Bound<'_, PyAny>, field: &'static str, positions: usize, half: usize) -> PyResult<Vec<f32>> {
    let buffer = array::<f32>(object, field)?;
    match buffer.shape() {
        &[rows, width] if rows >= positions && width == half && buffer.is_c_contiguous() => {
            let mut values = contents(object.py(), &buffer)?;
            values.truncate(positions * half);
            Ok(values)
        }
        shape => {
            let problem = format!("must be C-contiguous [at least {positions}, {half}], not {shape:?}");
            Err(InvalidArgument::new_err((field, problem)))
        }
    }
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
