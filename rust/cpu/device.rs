//! The CPU device: a program, a KV pool, block tables, and the threads that run steps.

use std::fmt;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};

use super::argmax::TOKEN_NOT_READ;
use super::execute::{Context, OP_KINDS, Run, Workspace, buffer_len, logits_range};
use super::kv::{KvKind, KvPool, KvShape};
use super::lanes::InstructionSet;
use super::memory::{OutOfMemory, Shared};
use super::program::Program;
use super::rope::RopeTable;
use super::step::{BlockTables, Refusal, StepArrays, StepLimits};
use super::threads::{Threads, lock};

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

/// A step was not computed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LaunchError {
    /// It cannot be.
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

/// Computes steps. Each token's logits depend on its own sequence alone, bit for bit: not on the other rows, the number
/// of threads or the instruction set.
#[derive(Debug)]
pub struct CpuDevice {
    program: Program,
    pool: KvPool,
    tables: BlockTables,
    rope: RopeTable,
    limits: StepLimits,
    threads: Threads,
    set: InstructionSet,
    buffers: Vec<Shared<f32>>,
    workspaces: Vec<Mutex<Workspace>>,
    seconds: Mutex<[f64; OP_KINDS.len()]>,
    /// Rows whose logits lie in the buffer of the logits.
    num_read: usize,
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
        let buffers = (0..program.num_buffers).map(|_| Shared::zeroed(0)).collect::<Result<_, _>>()?;
        Ok(Self {
            pool: KvPool::new(kv_shape, kv)?,
            tables: BlockTables::new(num_slots)?,
            rope,
            limits: StepLimits { num_slots, num_blocks, block_size, context_length, vocab_size: shape.vocab_size },
            threads: Threads::new(threads),
            set,
            buffers,
            workspaces: (0..threads).map(|_| Mutex::new(Workspace::new(shape))).collect(),
            seconds: Mutex::default(),
            num_read: 0,
            program,
        })
    }

    /// Computes `step` and returns the token of each row, while the caller sleeps.
    ///
    /// # Errors
    /// With nothing changed.
    pub fn launch(&mut self, step: &StepArrays) -> Result<Vec<i32>, LaunchError> {
        self.threads.start().map_err(|error| LaunchError::NoThreads(error.to_string()))?;
        let (checked, saved) = self.tables.admit(step, self.limits).map_err(LaunchError::Refused)?;
        let num_read = checked.read_rows.len();
        if let Err(error) = self.grow_buffers(checked.token_ids.len(), num_read) {
            self.tables.restore(saved);
            return Err(LaunchError::OutOfMemory(error));
        }
        // Everything that can fail is above this line.
        self.num_read = num_read;
        let tokens: Vec<AtomicI32> = checked.rows.iter().map(|_| AtomicI32::new(TOKEN_NOT_READ)).collect();
        let run = Run::new(Context {
            program: &self.program,
            step: &checked,
            tables: &self.tables,
            pool: &mut self.pool,
            rope: &self.rope,
            set: self.set,
            buffers: &mut self.buffers,
            workspaces: &self.workspaces,
            tokens: &tokens,
            seconds: &self.seconds,
        });
        // SAFETY: `Threads::run` calls it once on each thread of its crew.
        self.threads.run(&|worker| unsafe { run.work(worker) });
        Ok(tokens.iter().map(|token| token.load(Ordering::Relaxed)).collect())
    }

    /// Logits of the last step: rows that were read back, and how many each has.
    #[must_use]
    pub fn logits_shape(&self) -> (usize, usize) {
        (self.num_read, self.program.logits().width)
    }

    /// The logits of row `index` of those that the last step read back.
    ///
    /// # Panics
    /// If there are fewer.
    pub fn logits(&mut self, index: usize) -> &[f32] {
        assert!(index < self.num_read, "row {index} of {}", self.num_read);
        let value = self.program.logits();
        &self.buffers[value.buffer.0].as_slice()[logits_range(value, index)]
    }

    /// The KV pool.
    #[must_use]
    pub fn pool(&self) -> &KvPool {
        &self.pool
    }

    /// The KV pool, to be written.
    pub fn pool_mut(&mut self) -> &mut KvPool {
        &mut self.pool
    }

    /// The instructions in use.
    #[must_use]
    pub fn set(&self) -> InstructionSet {
        self.set
    }

    /// Number of threads.
    #[must_use]
    pub fn num_threads(&self) -> usize {
        self.threads.count()
    }

    /// Seconds that steps have taken, by kind of operation: see [`OP_KINDS`].
    #[must_use]
    pub fn op_seconds(&self) -> [f64; OP_KINDS.len()] {
        *lock(&self.seconds)
    }

    /// Makes every buffer large enough for a step, or none; none shrinks. What was in those that grow is lost.
    fn grow_buffers(&mut self, num_tokens: usize, num_read: usize) -> Result<(), OutOfMemory> {
        let mut lens = vec![0; self.buffers.len()];
        for value in &self.program.values {
            let len = &mut lens[value.buffer.0];
            *len = buffer_len(*value, num_tokens, num_read).max(*len);
        }
        let mut larger = Vec::new();
        for (index, (buffer, len)) in self.buffers.iter().zip(lens).enumerate() {
            if buffer.len() < len {
                larger.push((index, Shared::zeroed(len)?));
            }
        }
        for (index, buffer) in larger {
            self.buffers[index] = buffer;
        }
        Ok(())
    }
}
