//! What all steps of a device share: its program, its memory, and what each thread keeps for itself.

use std::ops::Range;
use std::sync::atomic::AtomicI32;
use std::sync::{Mutex, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::argmax::TOKEN_NOT_READ;
use super::attention;
use super::execute::OP_KINDS;
use super::kv::KvPool;
use super::lanes::InstructionSet;
use super::memory::{OutOfMemory, Shared};
use super::program::{ModelShape, Program, Rows, Value};
use super::rope::RopeTable;

/// What a thread keeps for itself.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// One row of whatever is the widest.
    pub row: Vec<f32>,
    pub second: Vec<f32>,
    pub queries: Vec<f32>,
    pub attended: Vec<f32>,
    /// Ids that a row must not choose.
    pub banned: Vec<usize>,
    /// A row's mask without them.
    pub mask: Vec<u32>,
    pub attention: attention::Scratch,
}

impl Workspace {
    pub(crate) fn new(shape: ModelShape) -> Self {
        let group = shape.num_heads / shape.num_kv_heads;
        Self {
            row: Vec::new(),
            second: Vec::new(),
            queries: Vec::new(),
            attended: Vec::new(),
            banned: Vec::new(),
            mask: Vec::new(),
            attention: attention::Scratch::new(group, shape.head_size),
        }
    }
}

/// The memory that steps write.
#[derive(Debug)]
pub(crate) struct Memory {
    pub pool: KvPool,
    /// Where the values of a step lie.
    pub buffers: Vec<Shared<f32>>,
    /// Tokens, and rows that are read back, for which the buffers are large enough.
    room: [usize; 2],
}

impl Memory {
    /// Whether the buffers are large enough for a step.
    pub(crate) fn has_room(&self, num_tokens: usize, num_read: usize) -> bool {
        num_tokens <= self.room[0] && num_read <= self.room[1]
    }

    /// Makes every buffer large enough for a step, or none; none shrinks. What was in those that grow is lost.
    pub(crate) fn grow(&mut self, program: &Program, num_tokens: usize, num_read: usize) -> Result<(), OutOfMemory> {
        let mut lens = vec![0; self.buffers.len()];
        for value in &program.values {
            let rows = match value.rows {
                Rows::Tokens => num_tokens,
                Rows::ReadBack => num_read,
            };
            let len = &mut lens[value.buffer.0];
            *len = (rows * value.width).max(*len);
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
        self.room = [self.room[0].max(num_tokens), self.room[1].max(num_read)];
        Ok(())
    }
}

/// What all steps of a device share.
#[derive(Debug)]
pub(crate) struct Common {
    pub program: Program,
    pub rope: RopeTable,
    pub set: InstructionSet,
    /// Every thread shares it while it computes a step. Who wants it for himself waits for all steps first.
    memory: RwLock<Memory>,
    /// One for each thread.
    pub workspaces: Vec<Mutex<Workspace>>,
    /// The feed cells, one for each slot: the newest token that was read back there, or what stood for it.
    pub feed: Vec<AtomicI32>,
    /// Seconds per kind of operation.
    pub seconds: Mutex<[f64; OP_KINDS.len()]>,
}

impl Common {
    pub(crate) fn new(
        program: Program,
        rope: RopeTable,
        set: InstructionSet,
        pool: KvPool,
        [num_threads, num_slots]: [usize; 2],
    ) -> Result<Self, OutOfMemory> {
        let buffers = (0..program.num_buffers).map(|_| Shared::zeroed(0)).collect::<Result<_, _>>()?;
        let mut feed = Vec::new();
        let bytes = num_slots as u128 * size_of::<AtomicI32>() as u128;
        feed.try_reserve_exact(num_slots).map_err(|_| OutOfMemory { bytes })?;
        feed.extend((0..num_slots).map(|_| AtomicI32::new(TOKEN_NOT_READ)));
        let shape = program.shape;
        Ok(Self {
            program,
            rope,
            set,
            memory: RwLock::new(Memory { pool, buffers, room: [0; 2] }),
            workspaces: (0..num_threads).map(|_| Mutex::new(Workspace::new(shape))).collect(),
            feed,
            seconds: Mutex::default(),
        })
    }

    /// The memory, for a thread that computes a step, or to look at what no step writes.
    pub(crate) fn share_memory(&self) -> RwLockReadGuard<'_, Memory> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory alone, when no step is left: a step's threads would wait for each other and for this.
    pub(crate) fn own_memory(&self) -> RwLockWriteGuard<'_, Memory> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Where the logits of row `index` of those that are read back lie.
pub(crate) fn logits_range(value: Value, index: usize) -> Range<usize> {
    index * value.width..(index + 1) * value.width
}
