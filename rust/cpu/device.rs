//! The CPU device: a program, a KV pool, block tables, and the threads that compute the steps that were launched.

#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use super::barrier::lock;
use super::common::{Common, logits_range};
use super::execute::{OP_KINDS, StepRun};
use super::kv::{KvKind, KvPool, KvShape};
use super::lanes::InstructionSet;
use super::memory::OutOfMemory;
use super::program::Program;
use super::queue::{Failure, Outcome};
use super::rope::RopeTable;
use super::step::{Refusal, StepArrays, StepLimits};
use super::tables::BlockTables;
use super::threads::Threads;

/// What a device is made with.
#[derive(Clone, Copy, Debug)]
pub struct DeviceSettings {
    /// Blocks of the KV pool.
    pub num_blocks: usize,
    /// Positions in a block.
    pub block_size: usize,
    /// Sequences that may be on the device at once.
    pub num_slots: usize,
    /// Positions of a sequence at most.
    pub context_length: usize,
    /// Type of the pool's numbers.
    pub kv: KvKind,
    /// Threads that compute.
    pub threads: usize,
    /// Instructions that they use.
    pub set: InstructionSet,
}

/// A step was not launched.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaunchError {
    /// It cannot be computed.
    Refused(Refusal),
    /// There is no memory for what it computes.
    OutOfMemory(OutOfMemory),
    /// The system starts no threads, in its own words.
    NoThreads(String),
}

impl fmt::Display for LaunchError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(refusal) => refusal.fmt(formatter),
            Self::OutOfMemory(error) => error.fmt(formatter),
            Self::NoThreads(error) => write!(formatter, "no thread can be started: {error}"),
        }
    }
}

impl std::error::Error for LaunchError {}

/// A step that was launched, and what it comes to.
#[derive(Clone)]
pub struct LaunchedStep {
    run: Arc<StepRun>,
    outcome: Arc<Outcome>,
}

impl fmt::Debug for LaunchedStep {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "a step of {} rows, over: {}", self.num_rows(), self.is_over())
    }
}

impl LaunchedStep {
    /// Its rows.
    #[must_use]
    pub fn num_rows(&self) -> usize {
        self.run.num_rows()
    }

    /// Whether it was computed, or has failed: `wait` would not wait. Takes no lock.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.outcome.is_over()
    }

    /// Waits for the token of each row, or a negative number: see `reprieve.step`.
    ///
    /// # Errors
    /// If a thread panicked in it or in a step that it came behind, or the device was stopped.
    pub fn wait(&self) -> Result<Vec<i32>, Failure> {
        self.outcome.wait()?;
        Ok(self.run.tokens())
    }
}

/// Computes steps. Each token's logits depend on its own sequence alone, bit for bit: not on the other rows, the number
/// of threads or the instruction set.
///
/// Steps are computed in the order in which they are launched, by threads of the device, one right after another. The
/// caller's side is the tables and the checks; what the threads need of a step goes with it.
#[derive(Debug)]
pub struct CpuDevice {
    threads: Threads,
    common: Arc<Common>,
    tables: BlockTables,
    /// For each slot the newest step that writes its feed cell.
    fed_by: Vec<Option<Arc<Outcome>>>,
    limits: StepLimits,
    num_launched: u64,
    /// Steps that are not forgotten, by number.
    steps: BTreeMap<u64, LaunchedStep>,
    newest: Option<LaunchedStep>,
}

impl CpuDevice {
    /// A device with an empty pool.
    ///
    /// # Errors
    /// Where there is no memory.
    ///
    /// # Panics
    /// If a setting is 0, or `rope` has too few positions or is for heads of another size.
    pub fn new(program: Program, settings: DeviceSettings, rope: RopeTable) -> Result<Self, OutOfMemory> {
        let DeviceSettings { num_blocks, block_size, num_slots, context_length, kv, threads, set } = settings;
        let most = context_length.min(num_blocks.saturating_mul(block_size));
        let shape = program.shape;
        assert!(rope.positions() >= most, "{} positions of {most}", rope.positions());
        assert_eq!(2 * rope.half(), shape.head_size, "angles for heads of another size");
        assert!(num_slots > 0 && context_length > 0, "{num_slots} slots, {context_length} positions");
        let kv_shape = KvShape {
            num_blocks,
            layers: shape.num_layers,
            kv_heads: shape.num_kv_heads,
            head_size: shape.head_size,
            block_size,
        };
        let tables = BlockTables::new(num_slots)?;
        let pool = KvPool::new(kv_shape, kv)?;
        let common = Common::new(program, rope, set, pool, [threads, num_slots])?;
        let mut fed_by = Vec::new();
        let bytes = num_slots as u128 * size_of::<Option<Arc<Outcome>>>() as u128;
        fed_by.try_reserve_exact(num_slots).map_err(|_| OutOfMemory { bytes })?;
        fed_by.resize(num_slots, None);
        Ok(Self {
            threads: Threads::new(threads),
            common: Arc::new(common),
            tables,
            fed_by,
            limits: StepLimits { num_slots, num_blocks, block_size, context_length, vocab_size: shape.vocab_size },
            num_launched: 0,
            steps: BTreeMap::new(),
            newest: None,
        })
    }

    /// Checks `step`, lets it be computed after those that were launched before, and returns its number: the first is 1.
    ///
    /// It does not wait, but where memory must be made for it: see `has_room`.
    ///
    /// # Errors
    /// With nothing changed.
    pub fn launch(&mut self, step: StepArrays) -> Result<u64, LaunchError> {
        self.threads.start().map_err(|error| LaunchError::NoThreads(error.to_string()))?;
        let (checked, saved) = self.tables.admit(step, self.limits).map_err(LaunchError::Refused)?;
        let (num_tokens, num_read) = (checked.inputs.len(), checked.read_rows.len());
        if !self.has_room(num_tokens, num_read) {
            self.wait_until_idle();
            let grown = self.common.own_memory().grow(&self.common.program, num_tokens, num_read);
            if let Err(error) = grown {
                self.tables.restore(saved);
                return Err(LaunchError::OutOfMemory(error));
            }
        }
        // Everything that can fail is above this line.
        let needed: Vec<_> = checked.fed_rows().filter_map(|row| self.fed_by[row.slot].clone()).collect();
        let read_slots: Vec<usize> = checked.read_rows.iter().map(|&row| checked.rows[row].slot).collect();
        let run = Arc::new(StepRun::new(Arc::clone(&self.common), checked));
        let work = Arc::clone(&run);
        // SAFETY: a crew's threads each do their part of work once, in the order in which it was posted, and begin none
        // before all have left what was posted before, or its last meeting.
        let outcome = self.threads.post(Arc::new(move |worker| unsafe { work.work(worker) }), &needed);
        for slot in read_slots {
            self.fed_by[slot] = Some(Arc::clone(&outcome));
        }
        self.num_launched += 1;
        let step = LaunchedStep { run, outcome };
        self.newest = Some(step.clone());
        self.steps.insert(self.num_launched, step);
        Ok(self.num_launched)
    }

    /// Whether there is memory for the values of a step; if not, `launch` waits for the steps before.
    #[must_use]
    pub fn has_room(&self, num_tokens: usize, num_read: usize) -> bool {
        self.common.share_memory().has_room(num_tokens, num_read)
    }

    /// Step `number`, until it is forgotten.
    #[must_use]
    pub fn step(&self, number: u64) -> Option<LaunchedStep> {
        self.steps.get(&number).cloned()
    }

    /// Lets go of what step `number` came to. If it is still to be computed, it will be.
    pub fn forget(&mut self, number: u64) {
        self.steps.remove(&number);
    }

    /// Waits until every launched step is computed, or has failed.
    pub fn wait_until_idle(&self) {
        if let Some(newest) = &self.newest {
            // Steps are over in their order; who asks for it learns what became of it.
            let _ = newest.outcome.wait();
        }
    }

    /// Ends the threads. The step that they are in is computed before; those behind it fail.
    pub fn stop(&mut self) {
        self.threads.stop();
    }

    /// In a forked child: goes on without the parent's threads. False if they were computing at the fork: the device
    /// is of no use then.
    #[must_use]
    pub fn survive_fork(&self) -> bool {
        self.threads.survive_fork()
    }

    /// Number of the newest step; 0 if there is none.
    #[must_use]
    pub fn newest(&self) -> u64 {
        self.num_launched
    }

    /// Logits of the newest step: rows that are read back, and how many each has.
    #[must_use]
    pub fn logits_shape(&self) -> (usize, usize) {
        (self.newest.as_ref().map_or(0, |step| step.run.num_read()), self.common.program.logits().width)
    }

    /// Waits for the newest step and copies its logits, one row after another, to `out`.
    ///
    /// # Errors
    /// If it has failed.
    ///
    /// # Panics
    /// If `out` has another length, or there is no step.
    pub fn logits(&self, out: &mut [f32]) -> Result<(), Failure> {
        let (rows, width) = self.logits_shape();
        assert_eq!(out.len(), rows * width, "{rows} rows of {width} logits");
        self.newest.as_ref().expect("there is a step").outcome.wait()?;
        let value = self.common.program.logits();
        let mut memory = self.common.own_memory();
        let buffer = memory.buffers[value.buffer.0].as_slice();
        for (row, out) in out.chunks_exact_mut(width).enumerate() {
            out.copy_from_slice(&buffer[logits_range(value, row)]);
        }
        Ok(())
    }

    /// Waits for the launched steps and copies the bytes of `blocks`: see [`KvPool::gather`].
    ///
    /// # Panics
    /// If a block is not there or `out` has another length.
    pub fn gather(&self, blocks: &[u32], out: &mut [u8]) {
        self.wait_until_idle();
        self.common.own_memory().pool.gather(blocks, out);
    }

    /// Waits for the launched steps and writes `image` to `blocks`: see [`KvPool::scatter`].
    ///
    /// # Panics
    /// If a block is not there or `image` has another length.
    pub fn scatter(&mut self, blocks: &[u32], image: &[u8]) {
        self.wait_until_idle();
        self.common.own_memory().pool.scatter(blocks, image);
    }

    /// How large the KV pool is.
    #[must_use]
    pub fn kv_shape(&self) -> KvShape {
        self.common.share_memory().pool.shape()
    }

    /// Bytes of a block in all layers.
    #[must_use]
    pub fn block_bytes(&self) -> usize {
        self.common.share_memory().pool.block_bytes()
    }

    /// The instructions in use.
    #[must_use]
    pub fn set(&self) -> InstructionSet {
        self.common.set
    }

    /// Number of threads.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.threads.count()
    }

    /// Seconds that steps have taken, by kind of operation: see [`OP_KINDS`].
    #[must_use]
    pub fn op_seconds(&self) -> [f64; OP_KINDS.len()] {
        *lock(&self.common.seconds)
    }
}
