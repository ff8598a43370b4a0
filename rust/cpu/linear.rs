//! Products of rows with packed weights. Each output of each row is one chain of fused multiply-adds, in the order of
//! the inputs: so neither the other rows, nor the division among threads, nor the instruction set changes a bit.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::cells::{Cell, Half, PANEL};
use super::groups::Groups;
use super::lanes::{InstructionSet, Kernel, LANES, Lanes};
use super::matrix::{Cells, Matrix};
use super::memory::{OutOfMemory, Shared};
use super::threads::Threads;

/// Bytes by which weights are asked for ahead of use. One row times F16 weights, two Zen 4 cores: 29 GB/s are read with
/// none or 2,048, 32 with 4,096 to 16,384, 27 with 32,768; quantised types are best at 4,096, more rows do not care.
const PREFETCH_AHEAD: usize = 4096;

/// Where the results of one panel belong. Whoever has it is the only one to read or write these outputs.
pub(crate) struct PanelOutputs<'a> {
    panel: usize,
    /// The results of all panels, [rows, outputs].
    all: &'a Shared<f32>,
}

impl<'a> PanelOutputs<'a> {
    /// # Safety
    /// Nobody else reads or writes the panel's outputs of any row in `all` as long as this is used.
    pub(crate) unsafe fn new(panel: usize, all: &'a Shared<f32>) -> Self {
        Self { panel, all }
    }
}

/// One panel of a product.
pub(crate) struct Product<'a> {
    pub matrix: &'a Matrix,
    /// Added to each output; [outputs] or nothing.
    pub bias: Option<&'a [f32]>,
    pub groups: Groups,
    /// The rows, [rows, inputs], in group order.
    pub rows: &'a [f32],
    pub out: PanelOutputs<'a>,
}

impl Kernel for Product<'_> {
    type Output = ();

    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        match self.matrix.cells() {
            Cells::F32(cells) => self.of(lanes, cells),
            Cells::F16(cells) => self.of(lanes, cells),
            Cells::Bf16(cells) => self.of(lanes, cells),
            Cells::Q8(cells) => self.of(lanes, cells),
            Cells::Q40(cells) => self.of(lanes, cells),
            Cells::Q41(cells) => self.of(lanes, cells),
        }
    }
}

impl Product<'_> {
    #[inline(always)]
    fn of<L: Lanes, C: Cell>(&self, lanes: L, cells: &Shared<C>) {
        let per_panel = self.matrix.inputs() / C::INPUTS;
        // SAFETY: packed weights are never written.
        let cells = unsafe { cells.read(self.out.panel * per_panel..(self.out.panel + 1) * per_panel) };
        for index in 0..self.groups.count() {
            let group = self.groups.get(index);
            let rows = &self.rows[group.first * self.matrix.inputs()..][..group.height * self.matrix.inputs()];
            match group.height {
                1 => self.group::<L, C, 1>(lanes, cells, rows, group.first),
                2 => self.group::<L, C, 2>(lanes, cells, rows, group.first),
                3 => self.group::<L, C, 3>(lanes, cells, rows, group.first),
                4 => self.group::<L, C, 4>(lanes, cells, rows, group.first),
                5 => self.group::<L, C, 5>(lanes, cells, rows, group.first),
                6 => self.group::<L, C, 6>(lanes, cells, rows, group.first),
                height if L::MAX_ROWS > 6 => match height {
                    7 => self.group::<L, C, 7>(lanes, cells, rows, group.first),
                    8 => self.group::<L, C, 8>(lanes, cells, rows, group.first),
                    9 => self.group::<L, C, 9>(lanes, cells, rows, group.first),
                    10 => self.group::<L, C, 10>(lanes, cells, rows, group.first),
                    11 => self.group::<L, C, 11>(lanes, cells, rows, group.first),
                    12 => self.group::<L, C, 12>(lanes, cells, rows, group.first),
                    _ => unreachable!("a group has at most 12 rows"),
                },
                _ => unreachable!("a group has at most MAX_ROWS rows"),
            }
        }
    }

    #[inline(always)]
    fn group<L: Lanes, C: Cell, const M: usize>(&self, lanes: L, cells: &[C], rows: &[f32], first_row: usize) {
        let (rows, _) = rows.as_chunks::<M>();
        if L::BOTH_HALVES {
            let sums = chains_of_both(lanes, cells, rows);
            self.finish(lanes, sums[0], first_row, Half::Lower);
            self.finish(lanes, sums[1], first_row, Half::Upper);
        } else {
            for half in [Half::Lower, Half::Upper] {
                self.finish(lanes, chains(lanes, cells, rows, half), first_row, half);
            }
        }
    }

    /// Adds the bias and writes what there are of sixteen outputs.
    #[inline(always)]
    fn finish<L: Lanes, const M: usize>(&self, lanes: L, sums: [L::F; M], first_row: usize, half: Half) {
        let outputs = self.matrix.outputs();
        let first = self.out.panel * PANEL + if half == Half::Lower { 0 } else { LANES };
        let present = outputs.saturating_sub(first).min(LANES);
        if present == 0 {
            return;
        }
        for (row, mut sum) in (first_row..).zip(sums) {
            if let Some(bias) = self.bias {
                sum = lanes.add(sum, lanes.load_first(&bias[first..first + present], 0.0));
            }
            // SAFETY: these outputs are of this panel, and `PanelOutputs` is the only one that has them.
            let to = unsafe { self.out.all.write(row * outputs + first..row * outputs + first + present) };
            match to.try_into() {
                Ok(whole) => lanes.store(sum, whole),
                Err(_) => lanes.store_first(sum, to),
            }
        }
    }
}

#[inline(always)]
fn chains_of_both<L: Lanes, C: Cell, const M: usize>(lanes: L, cells: &[C], rows: &[[f32; M]]) -> [[L::F; M]; 2] {
    let mut lower = [lanes.splat(0.0); M];
    let mut upper = [lanes.splat(0.0); M];
    for (cell, rows) in cells.iter().zip(rows.chunks_exact(C::INPUTS)) {
        let scales = [cell.scales(lanes, Half::Lower), cell.scales(lanes, Half::Upper)];
        for (input, row) in (0..C::INPUTS).zip(rows) {
            lanes.prefetch(cell.address(input).wrapping_add(PREFETCH_AHEAD));
            let low = cell.weights(lanes, scales[0], input, Half::Lower);
            let high = cell.weights(lanes, scales[1], input, Half::Upper);
            for m in 0..M {
                let value = lanes.splat(row[m]);
                lower[m] = lanes.fma(low, value, lower[m]);
                upper[m] = lanes.fma(high, value, upper[m]);
            }
        }
    }
    [lower, upper]
}

#[inline(always)]
fn chains<L: Lanes, C: Cell, const M: usize>(lanes: L, cells: &[C], rows: &[[f32; M]], half: Half) -> [L::F; M] {
    let mut sums = [lanes.splat(0.0); M];
    for (cell, rows) in cells.iter().zip(rows.chunks_exact(C::INPUTS)) {
        let scales = cell.scales(lanes, half);
        for (input, row) in (0..C::INPUTS).zip(rows) {
            lanes.prefetch(cell.address(input).wrapping_add(PREFETCH_AHEAD));
            let weights = cell.weights(lanes, scales, input, half);
            for m in 0..M {
                sums[m] = lanes.fma(weights, lanes.splat(row[m]), sums[m]);
            }
        }
    }
    sums
}

/// Computes `rows` [rows, inputs] times the transposed `matrix`, plus `bias` [outputs], into `out` [rows, outputs]: one
/// product on its own, for tests and measurements.
///
/// # Errors
/// Where there is no memory.
///
/// # Panics
/// If a length does not fit.
pub fn multiply(
    set: InstructionSet,
    threads: &Threads,
    matrix: &Matrix,
    bias: Option<&[f32]>,
    rows: &[f32],
    out: &mut [f32],
) -> Result<(), OutOfMemory> {
    let num_rows = rows.len() / matrix.inputs();
    assert_eq!([rows.len(), out.len()], [matrix.inputs(), matrix.outputs()].map(|width| num_rows * width));
    assert!(bias.is_none_or(|bias| bias.len() == matrix.outputs()), "a bias for each of {}", matrix.outputs());
    let groups = Groups::new(num_rows, set.max_rows());
    let mut grouped = vec![0.0; rows.len()];
    for (row, values) in rows.chunks_exact(matrix.inputs()).enumerate() {
        let (first, stride) = groups.place(row, matrix.inputs());
        for (input, &value) in values.iter().enumerate() {
            grouped[first + input * stride] = value;
        }
    }
    let mut result = Shared::zeroed(out.len())?;
    let taken = AtomicUsize::new(0);
    threads.run(&|_| {
        loop {
            let panel = taken.fetch_add(1, Ordering::Relaxed);
            if panel >= matrix.panels() {
                break;
            }
            // SAFETY: each panel is taken by one thread, and read when all are done.
            let out = unsafe { PanelOutputs::new(panel, &result) };
            set.run(Product { matrix, bias, groups, rows: &grouped, out });
        }
    });
    out.copy_from_slice(result.as_slice());
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::random_rows;
    use crate::cpu::weight_kind::WeightKind;
    use proptest::prelude::*;

    /// What a product is: for each output one chain, in the order of the inputs.
    fn naive(matrix: &Matrix, bias: Option<&[f32]>, rows: &[f32]) -> Vec<u32> {
        let mut weights = vec![0.0; matrix.inputs()];
        let mut results = vec![0; rows.len() / matrix.inputs() * matrix.outputs()];
        for output in 0..matrix.outputs() {
            matrix.row(output, &mut weights);
            for (row, values) in rows.chunks_exact(matrix.inputs()).enumerate() {
                let sum = weights.iter().zip(values).fold(0.0, |sum, (&weight, &x)| weight.mul_add(x, sum));
                let sum: f32 = bias.map_or(sum, |bias| sum + bias[output]);
                results[row * matrix.outputs() + output] = sum.to_bits();
            }
        }
        results
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]

        #[test]
        fn every_output_is_one_chain_whatever_the_rows_threads_and_instructions(
            kind in prop::sample::select(WeightKind::ALL.to_vec()),
            outputs in 1_usize..100,
            blocks in 1_usize..4,
            odd_inputs in 0_usize..9,
            num_rows in 1_usize..30,
            num_threads in 1_usize..4,
            has_bias: bool,
            seed: u64,
        ) {
            let inputs = if kind.block().0 == 1 { 7 * blocks + odd_inputs } else { 32 * blocks };
            let mut random = crate::cpu::testing::Random(seed);
            let matrix = Matrix::pack(kind, kind, &random_rows(&mut random, kind, outputs, inputs), outputs, inputs)
                .expect("little memory");
            let bias: Option<Vec<f32>> = has_bias.then(|| (0..outputs).map(|_| random.value()).collect());
            let rows: Vec<f32> = (0..num_rows * inputs).map(|_| random.value()).collect();
            let expected = naive(&matrix, bias.as_deref(), &rows);
            let threads = Threads::new(num_threads);
            for set in InstructionSet::all() {
                let mut out = vec![0.0; num_rows * outputs];
                multiply(set, &threads, &matrix, bias.as_deref(), &rows, &mut out).expect("little memory");
                let bits: Vec<u32> = out.into_iter().map(f32::to_bits).collect();
                prop_assert_eq!(&bits, &expected, "{}", set.name());
            }
        }
    }

    #[test]
    fn a_row_of_nan_spoils_no_other_row() {
        let (outputs, inputs) = (40, 64);
        let mut random = crate::cpu::testing::Random(1);
        let kind = WeightKind::Q8_0;
        let matrix = Matrix::pack(kind, kind, &random_rows(&mut random, kind, outputs, inputs), outputs, inputs)
            .expect("little memory");
        let mut rows: Vec<f32> = (0..9 * inputs).map(|_| random.value()).collect();
        let expected = naive(&matrix, None, &rows);
        rows[4 * inputs..5 * inputs].fill(f32::NAN);
        for set in InstructionSet::all() {
            let mut out = vec![0.0; 9 * outputs];
            multiply(set, &Threads::new(1), &matrix, None, &rows, &mut out).expect("little memory");
            for (at, (value, expected)) in out.into_iter().zip(&expected).enumerate() {
                if at / outputs == 4 { assert!(value.is_nan()) } else { assert_eq!(value.to_bits(), *expected) }
            }
        }
    }
}
