//! One step of a program: each thread takes units of each operation, and all meet before the next one.

use std::ops::Range;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Instant;

use super::argmax::{MaskedArgmax, TOKEN_NOT_READ};
use super::attention::{self, Place, Queries};
use super::cells::PANEL;
use super::groups::Groups;
use super::kv::KvPool;
use super::lanes::InstructionSet;
use super::linear::{PanelOutputs, Product};
use super::memory::Shared;
use super::norm::{HeadNorm, RmsNorm};
use super::program::{LinearPart, ModelShape, Op, Order, Program, Rows, Value};
use super::rope::{RopeTable, Rotate};
use super::step::{BlockTables, CheckedStep};
use super::swiglu::Swiglu;
use super::threads::{Worker, lock};

/// Kinds of operations whose time is told apart.
pub const OP_KINDS: [&str; 7] = ["linear", "attention", "norm", "rope", "swiglu", "embed", "argmax"];

fn kind_of<V>(op: &Op<V>) -> usize {
    match op {
        Op::Linear { .. } | Op::Regroup { .. } => 0,
        Op::Attention { .. } => 1,
        Op::RmsNorm { .. } | Op::AddRmsNorm { .. } | Op::HeadNorm { .. } => 2,
        Op::RopeAppend { .. } => 3,
        Op::Swiglu { .. } => 4,
        Op::Embed { .. } | Op::SelectReadback { .. } => 5,
        Op::Argmax { .. } => 6,
    }
}

/// Units that a thread takes at once are so many that each thread comes this often: few enough to read memory in long
/// runs, many enough that nobody waits long for a thread that was held up.
const TURNS: usize = 8;

/// Consecutive queries of one row, with heads of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct AttentionUnit {
    row: usize,
    /// Number of the first query among the row's tokens.
    first: usize,
    count: usize,
    kv_head: usize,
    /// The first query head.
    head: usize,
    heads: usize,
}

/// What a thread keeps for itself.
#[derive(Debug)]
pub(crate) struct Workspace {
    /// One row of whatever is the widest.
    row: Vec<f32>,
    second: Vec<f32>,
    queries: Vec<f32>,
    attended: Vec<f32>,
    attention: attention::Scratch,
}

impl Workspace {
    pub(crate) fn new(shape: ModelShape) -> Self {
        let group = shape.num_heads / shape.num_kv_heads;
        Self {
            row: Vec::new(),
            second: Vec::new(),
            queries: Vec::new(),
            attended: Vec::new(),
            attention: attention::Scratch::new(group, shape.head_size),
        }
    }
}

/// Everything that a step reads and writes. What its threads write is borrowed for it alone.
pub(crate) struct Context<'a> {
    pub program: &'a Program,
    pub step: &'a CheckedStep,
    pub tables: &'a BlockTables,
    pub pool: &'a mut KvPool,
    pub rope: &'a RopeTable,
    pub set: InstructionSet,
    /// Large enough for the values of this step.
    pub buffers: &'a mut [Shared<f32>],
    /// One for each thread.
    pub workspaces: &'a [Mutex<Workspace>],
    /// Tokens of the step's rows.
    pub tokens: &'a [AtomicI32],
    /// Seconds per kind of operation.
    pub seconds: &'a Mutex<[f64; OP_KINDS.len()]>,
}

/// A step under way.
pub(crate) struct Run<'a> {
    context: Context<'a>,
    units: Vec<AttentionUnit>,
    /// One for each operation: how many units are taken.
    taken: Vec<AtomicUsize>,
    /// How all tokens, and the rows that are read back, are grouped.
    groups: [Groups; 2],
}

// Why the reads and writes of buffers below are sound (their SAFETY comments name these rules):
//
//   alone      nobody outside the run has the buffers or the pool: `Context` borrows them mutably
//   earlier    an operation reads values that earlier ones made, and threads meet between operations
//   elsewhere  what it makes lies in buffers that it does not read: see `program::plan::assign_buffers`
//   apart      its units, each taken by one thread, make different rows or different columns
impl<'a> Run<'a> {
    pub(crate) fn new(context: Context<'a>) -> Self {
        let step = context.step;
        let max_rows = context.set.max_rows();
        Self {
            units: attention_units(context.program.shape, step, context.workspaces.len()),
            taken: context.program.ops.iter().map(|_| AtomicUsize::new(0)).collect(),
            groups: [step.token_ids.len(), step.read_rows.len()].map(|rows| Groups::new(rows, max_rows)),
            context,
        }
    }

    /// One thread's part of the step.
    ///
    /// # Safety
    /// The threads of one crew call this, each once: those that share a unit's results meet at one barrier.
    pub(crate) unsafe fn work(&self, worker: Worker<'_>) {
        let mut workspace = lock(&self.context.workspaces[worker.index]);
        let mut seconds = [0.0; OP_KINDS.len()];
        let mut begin = Instant::now();
        for (op, taken) in self.context.program.ops.iter().zip(&self.taken) {
            let units = self.num_units(op);
            let at_once = (units / (self.context.workspaces.len() * TURNS)).max(1);
            loop {
                let first = taken.fetch_add(at_once, Ordering::Relaxed);
                if first >= units {
                    break;
                }
                for unit in first..units.min(first + at_once) {
                    self.unit(op, unit, &mut workspace);
                }
            }
            worker.meet();
            let end = Instant::now();
            seconds[kind_of(op)] += (end - begin).as_secs_f64();
            begin = end;
        }
        if worker.index == 0 {
            let mut totals = lock(self.context.seconds);
            totals.iter_mut().zip(seconds).for_each(|(total, seconds)| *total += seconds);
        }
    }

    /// How many units an operation has: rows, panels, or whatever is computed by one thread alone.
    fn num_units(&self, op: &Op<Value>) -> usize {
        match op {
            Op::Linear { x, .. } if self.num_rows(x.rows) == 0 => 0,
            Op::Linear { parts, .. } => {
                parts.iter().map(|part| self.context.program.matrix(part.weight).panels()).sum()
            }
            Op::Attention { .. } => self.units.len(),
            Op::Embed { out, .. }
            | Op::RmsNorm { out, .. }
            | Op::AddRmsNorm { out, .. }
            | Op::HeadNorm { out, .. }
            | Op::RopeAppend { out, .. }
            | Op::Swiglu { out, .. }
            | Op::SelectReadback { out, .. }
            | Op::Regroup { out, .. } => self.num_rows(out.rows),
            Op::Argmax { .. } => self.context.step.rows.len(),
        }
    }

    fn num_rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.context.step.token_ids.len(),
            Rows::ReadBack => self.context.step.read_rows.len(),
        }
    }

    fn unit(&self, op: &Op<Value>, unit: usize, workspace: &mut Workspace) {
        match *op {
            Op::Embed { table, out } => {
                self.make_row(out, unit, &mut workspace.row, |row| {
                    self.context.program.matrix(table).row(self.context.step.token_ids[unit], row);
                });
            }
            Op::RmsNorm { x, weight, eps, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                let weight = self.context.program.vector(weight);
                self.context.set.run(RmsNorm { x: self.row(x, unit), weight, eps, out: row });
            }),
            Op::AddRmsNorm { x, residual, weight, eps, out, total } => {
                self.make_row(total, unit, &mut workspace.second, |row| {
                    for ((sum, x), residual) in row.iter_mut().zip(self.row(x, unit)).zip(self.row(residual, unit)) {
                        *sum = x + residual;
                    }
                });
                self.make_row(out, unit, &mut workspace.row, |row| {
                    self.context.set.run(RmsNorm {
                        x: &workspace.second,
                        weight: self.context.program.vector(weight),
                        eps,
                        out: row,
                    });
                });
            }
            Op::Linear { x, ref parts } => self.panel(x, parts, unit),
            Op::HeadNorm { x, weight, eps, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                let weight = self.context.program.vector(weight);
                self.context.set.run(HeadNorm { x: self.row(x, unit), weight, eps, out: row });
            }),
            Op::RopeAppend { layer, q, k, v, out } => self.rope_append(layer, [q, k, v], out, unit, workspace),
            Op::Attention { layer, q, out } => self.attend(layer, q, out, self.units[unit], workspace),
            Op::Swiglu { gate, up, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                self.context.set.run(Swiglu { gate: self.row(gate, unit), up: self.row(up, unit), out: row });
            }),
            Op::SelectReadback { x, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                let from = self.context.step.rows[self.context.step.read_rows[unit]];
                row.copy_from_slice(self.row(x, from.first_token + from.num_new - 1));
            }),
            Op::Regroup { x, out } => {
                self.make_row(out, unit, &mut workspace.row, |row| row.copy_from_slice(self.row(x, unit)));
            }
            Op::Argmax { logits } => self.choose(logits, unit),
        }
    }

    /// One panel of one of the products.
    fn panel(&self, x: Value, parts: &[LinearPart<Value>], mut unit: usize) {
        for part in parts {
            let matrix = self.context.program.matrix(part.weight);
            if unit < matrix.panels() {
                let groups = self.groups_of(x.rows);
                // SAFETY: alone, earlier, elsewhere.
                let rows = unsafe { self.buffer(x).read(0..self.num_rows(x.rows) * x.width) };
                self.context.set.run(Product {
                    matrix,
                    bias: part.bias.map(|bias| self.context.program.vector(bias)),
                    groups,
                    rows,
                    // SAFETY: alone, elsewhere, apart.
                    out: unsafe { PanelOutputs::new(unit, self.buffer(part.out)) },
                });
                return;
            }
            unit -= matrix.panels();
        }
        unreachable!("there are as many units as panels of {PANEL} outputs");
    }

    /// Rotates one token's q and k, and writes k and v to the pool.
    fn rope_append(&self, layer: usize, [q, k, v]: [Value; 3], out: Value, token: usize, workspace: &mut Workspace) {
        let row = self.context.step.rows[self.context.step.row_of_token[token]];
        let position = row.start + token - row.first_token;
        let (cos, sin) = self.context.rope.at(position);
        self.make_row(out, token, &mut workspace.row, |row| {
            row.copy_from_slice(self.row(q, token));
            self.context.set.run(Rotate { x: row, cos, sin });
        });
        workspace.second.clear();
        workspace.second.extend_from_slice(self.row(k, token));
        self.context.set.run(Rotate { x: &mut workspace.second, cos, sin });
        let block_size = self.context.pool.shape().block_size;
        let block = self.context.tables.get(row.slot)[position / block_size];
        // SAFETY: each token has a place of its own (`BlockTables::check_places`), this operation reads none of them,
        // and threads meet before the attention does.
        unsafe { self.context.pool.append(layer, block, position % block_size, &workspace.second, self.row(v, token)) };
    }

    fn attend(&self, layer: usize, q: Value, out: Value, unit: AttentionUnit, workspace: &mut Workspace) {
        let row = self.context.step.rows[unit.row];
        let head_size = self.context.program.shape.head_size;
        let columns = unit.head * head_size..(unit.head + unit.heads) * head_size;
        let tokens = row.first_token + unit.first..row.first_token + unit.first + unit.count;
        workspace.queries.clear();
        for token in tokens.clone() {
            workspace.queries.extend_from_slice(&self.row(q, token)[columns.clone()]);
        }
        workspace.attended.resize(workspace.queries.len(), 0.0);
        let place = Place { layer, kv_head: unit.kv_head, table: self.context.tables.get(row.slot) };
        let first_position = row.start + unit.first;
        let queries = Queries { values: &workspace.queries, heads: unit.heads, first_position };
        let (out_of_unit, scratch) = (&mut workspace.attended, &mut workspace.attention);
        // SAFETY: the pool is written by `rope_append` alone, and threads meet between the two.
        unsafe { attention::attend(self.context.set, self.context.pool, place, queries, out_of_unit, scratch) };
        for (token, values) in tokens.zip(workspace.attended.chunks_exact(columns.len())) {
            self.put(out, token, columns.start, values);
        }
    }

    fn choose(&self, logits: Value, row: usize) {
        let token = match self.context.step.read_rows.binary_search(&row) {
            Ok(index) => {
                let logits = &self.row(logits, index)[..self.context.program.shape.vocab_size];
                self.context.set.run(MaskedArgmax { logits, mask: None })
            }
            Err(_) => TOKEN_NOT_READ,
        };
        self.context.tokens[row].store(token, Ordering::Relaxed);
    }

    fn groups_of(&self, rows: Rows) -> Groups {
        self.groups[usize::from(rows == Rows::ReadBack)]
    }

    fn buffer(&self, value: Value) -> &Shared<f32> {
        &self.context.buffers[value.buffer.0]
    }

    /// One row of a value in plain order.
    fn row(&self, value: Value, row: usize) -> &[f32] {
        assert_eq!(value.order, Order::Plain, "only products read groups");
        // SAFETY: alone, earlier, elsewhere.
        unsafe { self.buffer(value).read(row * value.width..(row + 1) * value.width) }
    }

    /// Makes one row of a value in `space`, and puts it where it belongs.
    fn make_row(&self, value: Value, row: usize, space: &mut Vec<f32>, make: impl FnOnce(&mut [f32])) {
        space.resize(value.width, 0.0);
        make(space);
        self.put(value, row, 0, space);
    }

    /// Writes `values` to the columns of one row from `first` on.
    fn put(&self, value: Value, row: usize, first: usize, values: &[f32]) {
        let buffer = self.buffer(value);
        match value.order {
            Order::Plain => {
                let begin = row * value.width + first;
                // SAFETY: alone, elsewhere, apart.
                unsafe { buffer.write(begin..begin + values.len()) }.copy_from_slice(values);
            }
            Order::Grouped => {
                let (begin, stride) = self.groups_of(value.rows).place(row, value.width);
                let begin = begin + first * stride;
                // SAFETY: alone, elsewhere, apart.
                unsafe { buffer.write_every(begin, stride, values) };
            }
        }
    }
}

/// Divides the attention of a step: blocks of queries that are computed together, by KV heads, and where those are too
/// few for the threads, by query heads.
fn attention_units(shape: ModelShape, step: &CheckedStep, threads: usize) -> Vec<AttentionUnit> {
    let group = shape.num_heads / shape.num_kv_heads;
    let blocks = |heads: usize| {
        let at_once = attention::queries_at_once(heads);
        step.rows.iter().enumerate().flat_map(move |(row, it)| {
            (0..it.num_new).step_by(at_once).map(move |first| (row, first, at_once.min(it.num_new - first)))
        })
    };
    let is_few = blocks(group).count() * shape.num_kv_heads < threads * TURNS;
    let heads = if is_few && step.token_ids.len() == step.rows.len() { 1 } else { group };
    let heads_of = |(row, first, count)| {
        (0..shape.num_heads).step_by(heads).map(move |head| AttentionUnit {
            row,
            first,
            count,
            kv_head: head / group,
            head,
            heads,
        })
    };
    blocks(group).flat_map(heads_of).collect()
}

/// Rows of a buffer that a value needs.
pub(crate) fn buffer_len(value: Value, num_tokens: usize, num_read: usize) -> usize {
    let rows = match value.rows {
        Rows::Tokens => num_tokens,
        Rows::ReadBack => num_read,
    };
    rows * value.width
}

/// Where the logits of row `index` of those that are read back lie.
pub(crate) fn logits_range(value: Value, index: usize) -> Range<usize> {
    index * value.width..(index + 1) * value.width
}
