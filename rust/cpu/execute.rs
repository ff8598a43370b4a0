//! One step of a program: each thread takes units of each operation, and all meet before the next one.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, AtomicUsize, Ordering};
use std::time::Instant;

use super::argmax::{Argmax, MaskedArgmax, TOKEN_NOT_READ};
use super::attention::{self, Place, Queries};
use super::barrier::{Worker, lock};
use super::cells::PANEL;
use super::common::{Common, Memory, Workspace};
use super::groups::Groups;
use super::linear::{PanelOutputs, Product};
use super::memory::Shared;
use super::norm::{HeadNorm, RmsNorm};
use super::program::{LinearPart, Op, Order, Rows, Value};
use super::rope::Rotate;
use super::step::{CheckedStep, Input};
use super::swiglu::Swiglu;
use super::units::{AttentionUnit, attention_units};

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
pub(super) const TURNS: usize = 8;

/// A step that the threads of a device compute together.
pub(crate) struct StepRun {
    common: Arc<Common>,
    step: CheckedStep,
    units: Vec<AttentionUnit>,
    /// One for each operation: how many units are taken.
    taken: Vec<AtomicUsize>,
    /// How all tokens, and the rows that are read back, are grouped.
    groups: [Groups; 2],
    /// Tokens of the step's rows.
    tokens: Vec<AtomicI32>,
}

impl StepRun {
    /// Prepares `step`, for whose values there is memory.
    pub(crate) fn new(common: Arc<Common>, step: CheckedStep) -> Self {
        let max_rows = common.set.max_rows();
        Self {
            units: attention_units(common.program.shape, &step, common.workspaces.len()),
            taken: common.program.ops.iter().map(|_| AtomicUsize::new(0)).collect(),
            groups: [step.inputs.len(), step.read_rows.len()].map(|rows| Groups::new(rows, max_rows)),
            tokens: step.rows.iter().map(|_| AtomicI32::new(TOKEN_NOT_READ)).collect(),
            common,
            step,
        }
    }

    /// The step's rows.
    pub(crate) fn num_rows(&self) -> usize {
        self.step.rows.len()
    }

    /// The rows that are read back.
    pub(crate) fn num_read(&self) -> usize {
        self.step.read_rows.len()
    }

    /// The token of each row, once the step is done.
    pub(crate) fn tokens(&self) -> Vec<i32> {
        self.tokens.iter().map(|token| token.load(Ordering::Relaxed)).collect()
    }

    /// One thread's part of the step.
    ///
    /// # Safety
    /// The threads of one crew call this, each once: those that share a unit's results meet at one barrier. They do so
    /// for one step after another, and for none before all have left the last meeting of the one before, or where that
    /// failed, all of it.
    pub(crate) unsafe fn work(&self, worker: Worker<'_>) {
        let memory = self.common.share_memory();
        let part = Part { common: &self.common, memory: &memory, run: self };
        let mut workspace = lock(&self.common.workspaces[worker.index]);
        let mut seconds = [0.0; OP_KINDS.len()];
        let mut begin = Instant::now();
        for (op, taken) in self.common.program.ops.iter().zip(&self.taken) {
            let units = part.num_units(op);
            let at_once = (units / (self.common.workspaces.len() * TURNS)).max(1);
            loop {
                let first = taken.fetch_add(at_once, Ordering::Relaxed);
                if first >= units {
                    break;
                }
                for unit in first..units.min(first + at_once) {
                    part.unit(op, unit, &mut workspace);
                }
            }
            worker.meet();
            let end = Instant::now();
            seconds[kind_of(op)] += (end - begin).as_secs_f64();
            begin = end;
        }
        if worker.index == 0 {
            let mut totals = lock(&self.common.seconds);
            totals.iter_mut().zip(seconds).for_each(|(total, seconds)| *total += seconds);
        }
    }
}

/// A step as one of its threads sees it.
#[derive(Clone, Copy)]
struct Part<'a> {
    common: &'a Common,
    memory: &'a Memory,
    run: &'a StepRun,
}

// Why the reads and writes of buffers below are sound (their SAFETY comments name these rules):
//
//   alone      nobody outside the step has the buffers or the pool: its threads share `Memory`, and who wants it alone
//              does not get it meanwhile; of the step before, no thread is in the middle any more (see `StepRun::work`)
//   earlier    an operation reads values that earlier ones made, and threads meet between operations
//   elsewhere  what it makes lies in buffers that it does not read: see `program::plan::assign_buffers`
//   apart      its units, each taken by one thread, make different rows or different columns
impl Part<'_> {
    /// How many units an operation has: rows, panels, or whatever is computed by one thread alone.
    fn num_units(&self, op: &Op<Value>) -> usize {
        match op {
            Op::Linear { x, .. } if self.num_rows(x.rows) == 0 => 0,
            Op::Linear { parts, .. } => parts.iter().map(|part| self.common.program.matrix(part.weight).panels()).sum(),
            Op::Attention { .. } => self.run.units.len(),
            Op::Embed { out, .. }
            | Op::RmsNorm { out, .. }
            | Op::AddRmsNorm { out, .. }
            | Op::HeadNorm { out, .. }
            | Op::RopeAppend { out, .. }
            | Op::Swiglu { out, .. }
            | Op::SelectReadback { out, .. }
            | Op::Regroup { out, .. } => self.num_rows(out.rows),
            Op::Argmax { .. } => self.run.step.rows.len(),
        }
    }

    fn num_rows(&self, rows: Rows) -> usize {
        match rows {
            Rows::Tokens => self.run.step.inputs.len(),
            Rows::ReadBack => self.run.step.read_rows.len(),
        }
    }

    fn unit(&self, op: &Op<Value>, unit: usize, workspace: &mut Workspace) {
        match *op {
            Op::Embed { table, out } => {
                self.make_row(out, unit, &mut workspace.row, |row| {
                    let slot = self.run.step.rows[self.run.step.row_of_token[unit]].slot;
                    self.common.program.matrix(table).row(self.token(self.run.step.inputs[unit], slot), row);
                });
            }
            Op::RmsNorm { x, weight, eps, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                let weight = self.common.program.vector(weight);
                self.common.set.run(RmsNorm { x: self.row(x, unit), weight, eps, out: row });
            }),
            Op::AddRmsNorm { x, residual, weight, eps, out, total } => {
                self.make_row(total, unit, &mut workspace.second, |row| {
                    for ((sum, x), residual) in row.iter_mut().zip(self.row(x, unit)).zip(self.row(residual, unit)) {
                        *sum = x + residual;
                    }
                });
                self.make_row(out, unit, &mut workspace.row, |row| {
                    self.common.set.run(RmsNorm {
                        x: &workspace.second,
                        weight: self.common.program.vector(weight),
                        eps,
                        out: row,
                    });
                });
            }
            Op::Linear { x, ref parts } => self.panel(x, parts, unit),
            Op::HeadNorm { x, weight, eps, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                let weight = self.common.program.vector(weight);
                self.common.set.run(HeadNorm { x: self.row(x, unit), weight, eps, out: row });
            }),
            Op::RopeAppend { layer, q, k, v, out } => self.rope_append(layer, [q, k, v], out, unit, workspace),
            Op::Attention { layer, q, out } => self.attend(layer, q, out, self.run.units[unit], workspace),
            Op::Swiglu { gate, up, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                self.common.set.run(Swiglu { gate: self.row(gate, unit), up: self.row(up, unit), out: row });
            }),
            Op::SelectReadback { x, out } => self.make_row(out, unit, &mut workspace.row, |row| {
                let from = self.run.step.rows[self.run.step.read_rows[unit]];
                row.copy_from_slice(self.row(x, from.first_token + from.num_new - 1));
            }),
            Op::Regroup { x, out } => {
                self.make_row(out, unit, &mut workspace.row, |row| row.copy_from_slice(self.row(x, unit)));
            }
            Op::Argmax { logits } => self.choose(logits, unit, workspace),
        }
    }

    /// One panel of one of the products.
    fn panel(&self, x: Value, parts: &[LinearPart<Value>], mut unit: usize) {
        for part in parts {
            let matrix = self.common.program.matrix(part.weight);
            if unit < matrix.panels() {
                let groups = self.groups_of(x.rows);
                // SAFETY: alone, earlier, elsewhere.
                let rows = unsafe { self.buffer(x).read(0..self.num_rows(x.rows) * x.width) };
                self.common.set.run(Product {
                    matrix,
                    bias: part.bias.map(|bias| self.common.program.vector(bias)),
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
        let row_number = self.run.step.row_of_token[token];
        let row = self.run.step.rows[row_number];
        let position = row.start + token - row.first_token;
        let (cos, sin) = self.common.rope.at(position);
        self.make_row(out, token, &mut workspace.row, |row| {
            row.copy_from_slice(self.row(q, token));
            self.common.set.run(Rotate { x: row, cos, sin });
        });
        workspace.second.clear();
        workspace.second.extend_from_slice(self.row(k, token));
        self.common.set.run(Rotate { x: &mut workspace.second, cos, sin });
        let block_size = self.memory.pool.shape().block_size;
        let block = self.run.step.table(row_number)[position / block_size];
        // SAFETY: each token has a place of its own (`BlockTables::admit`), this operation reads none of them,
        // and threads meet before the attention does.
        unsafe { self.memory.pool.append(layer, block, position % block_size, &workspace.second, self.row(v, token)) };
    }

    fn attend(&self, layer: usize, q: Value, out: Value, unit: AttentionUnit, workspace: &mut Workspace) {
        let row = self.run.step.rows[unit.row];
        let head_size = self.common.program.shape.head_size;
        let columns = unit.head * head_size..(unit.head + unit.heads) * head_size;
        let tokens = row.first_token + unit.first..row.first_token + unit.first + unit.count;
        workspace.queries.clear();
        for token in tokens.clone() {
            workspace.queries.extend_from_slice(&self.row(q, token)[columns.clone()]);
        }
        workspace.attended.resize(workspace.queries.len(), 0.0);
        let place = Place { layer, kv_head: unit.kv_head, table: self.run.step.table(unit.row) };
        let first_position = row.start + unit.first;
        let queries = Queries { values: &workspace.queries, heads: unit.heads, first_position };
        let (out_of_unit, scratch) = (&mut workspace.attended, &mut workspace.attention);
        // SAFETY: the pool is written by `rope_append` alone, and threads meet between the two.
        unsafe { attention::attend(self.common.set, &self.memory.pool, place, queries, out_of_unit, scratch) };
        for (token, values) in tokens.zip(workspace.attended.chunks_exact(columns.len())) {
            self.put(out, token, columns.start, values);
        }
    }

    /// Chooses the token of a row, and keeps it in the slot's feed cell.
    fn choose(&self, logits: Value, row: usize, workspace: &mut Workspace) {
        let step = &self.run.step;
        let Ok(index) = step.read_rows.binary_search(&row) else { return };
        let logits = &self.row(logits, index)[..self.common.program.shape.vocab_size];
        let slot = step.rows[row].slot;
        let Workspace { banned, mask: scratch, .. } = workspace;
        banned.clear();
        let bans = step.bans_of(row);
        if !bans.is_empty() {
            let input = self.token(step.last_input(row), slot);
            banned.extend(bans.iter().filter(|ban| ban.after.is_none_or(|id| id == input)).map(|ban| ban.token));
        }
        let mask = match step.mask_of(row) {
            Some(mask) if !banned.is_empty() => {
                scratch.clear();
                scratch.extend_from_slice(mask);
                for &token in banned.iter() {
                    scratch[token / 32] &= !(1 << (token % 32));
                }
                Some(scratch.as_slice())
            }
            mask => mask,
        };
        let token = match mask {
            Some(mask) => self.common.set.run(MaskedArgmax { logits, mask }),
            None => self.common.set.run(Argmax { logits, banned }),
        };
        self.run.tokens[row].store(token, Ordering::Relaxed);
        // Its one reader in this step was just above; those of the next begin after all have met.
        self.common.feed[slot].store(token, Ordering::Relaxed);
    }

    /// The id of an input of the row in `slot`. A cell that holds no token counts as 0: what comes of it is discarded.
    fn token(&self, input: Input, slot: usize) -> usize {
        match input {
            Input::Given(token) => token,
            Input::Fed => usize::try_from(self.common.feed[slot].load(Ordering::Relaxed)).unwrap_or(0),
        }
    }

    fn groups_of(&self, rows: Rows) -> Groups {
        self.run.groups[usize::from(rows == Rows::ReadBack)]
    }

    fn buffer(&self, value: Value) -> &Shared<f32> {
        &self.memory.buffers[value.buffer.0]
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
