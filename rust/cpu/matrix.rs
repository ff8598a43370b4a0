//! A weight matrix, packed once into the order in which products read it.

use std::fmt;

use half::{bf16, f16};

use super::cells::{Bf16Cell, Cell, F16Cell, F32Cell, PANEL, Q8Cell, Q40Cell, Q41Cell, QUANT_BLOCK};
use super::memory::{OutOfMemory, Plain, Shared};
use super::weight_kind::WeightKind;
use super::weight_kind::{half_bits, nibble};

/// The cells of a matrix, panel after panel.
pub(crate) enum Cells {
    F32(Shared<F32Cell>),
    F16(Shared<F16Cell>),
    Bf16(Shared<Bf16Cell>),
    Q8(Shared<Q8Cell>),
    Q40(Shared<Q40Cell>),
    Q41(Shared<Q41Cell>),
}

/// Weights of `outputs` outputs by `inputs` inputs. Outputs past the last, up to a whole panel, are zeros.
pub struct Matrix {
    outputs: usize,
    inputs: usize,
    kind: WeightKind,
    cells: Cells,
}

impl fmt::Debug for Matrix {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} [{}, {}]", self.kind.name(), self.outputs, self.inputs)
    }
}

impl Matrix {
    /// Packs `rows`, `outputs` rows of a file's type `from`, as type `kind`: the same type, or F32, F16 or BF16, to
    /// which values are rounded to nearest even.
    ///
    /// # Errors
    /// Where there is no memory.
    ///
    /// # Panics
    /// If `rows` has another size, a size is 0, or `kind` is a quantised type and not `from`.
    pub fn pack(
        from: WeightKind,
        kind: WeightKind,
        rows: &[u8],
        outputs: usize,
        inputs: usize,
    ) -> Result<Self, OutOfMemory> {
        assert!(outputs > 0 && inputs > 0, "a matrix of [{outputs}, {inputs}]");
        let row_bytes = from.row_bytes(inputs).expect("whole blocks");
        assert_eq!(rows.len(), outputs * row_bytes, "{outputs} rows of {row_bytes} bytes");
        let source = Source { from, rows, row_bytes, inputs };
        let cells = match kind {
            WeightKind::F32 => {
                Cells::F32(source.pack_values(outputs, |cell: &mut F32Cell, output, value| cell.0[output] = value)?)
            }
            WeightKind::F16 => Cells::F16(source.pack_values(outputs, |cell: &mut F16Cell, output, value| {
                cell.0[output] = f16::from_f32(value).to_bits();
            })?),
            WeightKind::Bf16 => Cells::Bf16(source.pack_values(outputs, |cell: &mut Bf16Cell, output, value| {
                cell.0[output] = bf16::from_f32(value).to_bits();
            })?),
            WeightKind::Q8_0 => Cells::Q8(source.pack_blocks(kind, outputs, pack_q8)?),
            WeightKind::Q4_0 => Cells::Q40(source.pack_blocks(kind, outputs, pack_q40)?),
            WeightKind::Q4_1 => Cells::Q41(source.pack_blocks(kind, outputs, pack_q41)?),
        };
        Ok(Self { outputs, inputs, kind, cells })
    }

    /// Number of outputs.
    #[must_use]
    pub fn outputs(&self) -> usize {
        self.outputs
    }

    /// Number of inputs.
    #[must_use]
    pub fn inputs(&self) -> usize {
        self.inputs
    }

    /// Number of panels.
    pub(crate) fn panels(&self) -> usize {
        self.outputs.div_ceil(PANEL)
    }

    /// Bytes that a product reads.
    #[must_use]
    pub fn bytes(&self) -> usize {
        match &self.cells {
            Cells::F32(cells) => size_of_val_of(cells),
            Cells::F16(cells) => size_of_val_of(cells),
            Cells::Bf16(cells) => size_of_val_of(cells),
            Cells::Q8(cells) => size_of_val_of(cells),
            Cells::Q40(cells) => size_of_val_of(cells),
            Cells::Q41(cells) => size_of_val_of(cells),
        }
    }

    pub(crate) fn cells(&self) -> &Cells {
        &self.cells
    }

    /// Writes the weights of one output, [inputs], to `to`.
    ///
    /// # Panics
    /// If there is no such output, or `to` has another size.
    pub fn row(&self, output: usize, to: &mut [f32]) {
        assert!(output < self.outputs, "output {output} of {}", self.outputs);
        assert_eq!(to.len(), self.inputs, "a row of {} weights", self.inputs);
        match &self.cells {
            Cells::F32(cells) => row(cells, output, to),
            Cells::F16(cells) => row(cells, output, to),
            Cells::Bf16(cells) => row(cells, output, to),
            Cells::Q8(cells) => row(cells, output, to),
            Cells::Q40(cells) => row(cells, output, to),
            Cells::Q41(cells) => row(cells, output, to),
        }
    }
}

fn size_of_val_of<C: Plain>(cells: &Shared<C>) -> usize {
    cells.len() * size_of::<C>()
}

fn row<C: Cell>(cells: &Shared<C>, output: usize, to: &mut [f32]) {
    let per_panel = to.len() / C::INPUTS;
    let first = output / PANEL * per_panel;
    // SAFETY: packed weights are never written.
    let panel = unsafe { cells.read(first..first + per_panel) };
    for (cell, to) in panel.iter().zip(to.chunks_exact_mut(C::INPUTS)) {
        for (input, to) in to.iter_mut().enumerate() {
            *to = cell.value(input, output % PANEL);
        }
    }
}

/// Rows of a file.
struct Source<'a> {
    from: WeightKind,
    rows: &'a [u8],
    row_bytes: usize,
    inputs: usize,
}

impl Source<'_> {
    /// Packs decoded values, one input to a cell.
    fn pack_values<C: Cell>(&self, outputs: usize, put: impl Fn(&mut C, usize, f32)) -> Result<Shared<C>, OutOfMemory> {
        let mut cells = Shared::zeroed(outputs.div_ceil(PANEL) * self.inputs)?;
        let mut values = vec![0.0; self.inputs];
        for (output, row) in self.rows.chunks_exact(self.row_bytes).enumerate() {
            self.from.decode_row(row, &mut values);
            let panel = &mut cells.as_slice()[output / PANEL * self.inputs..][..self.inputs];
            for (cell, &value) in panel.iter_mut().zip(&values) {
                put(cell, output % PANEL, value);
            }
        }
        Ok(cells)
    }

    /// Moves the bits of whole blocks.
    fn pack_blocks<C: Cell>(
        &self,
        kind: WeightKind,
        outputs: usize,
        put: impl Fn(&mut C, usize, &[u8]),
    ) -> Result<Shared<C>, OutOfMemory> {
        assert_eq!(self.from, kind, "weights are not quantised here");
        let per_panel = self.inputs / QUANT_BLOCK;
        let mut cells = Shared::zeroed(outputs.div_ceil(PANEL) * per_panel)?;
        for (output, row) in self.rows.chunks_exact(self.row_bytes).enumerate() {
            let panel = &mut cells.as_slice()[output / PANEL * per_panel..][..per_panel];
            for (cell, block) in panel.iter_mut().zip(row.chunks_exact(kind.block().1)) {
                put(cell, output % PANEL, block);
            }
        }
        Ok(cells)
    }
}

fn pack_q8(cell: &mut Q8Cell, output: usize, block: &[u8]) {
    cell.scales[output] = half_bits(block, 0);
    for (values, &byte) in cell.values.iter_mut().zip(&block[2..]) {
        values[output] = byte.cast_signed();
    }
}

fn pack_q40(cell: &mut Q40Cell, output: usize, block: &[u8]) {
    cell.scales[output] = half_bits(block, 0);
    pack_nibbles(&mut cell.nibbles, output, &block[2..]);
}

fn pack_q41(cell: &mut Q41Cell, output: usize, block: &[u8]) {
    cell.scales[output] = half_bits(block, 0);
    cell.offsets[output] = half_bits(block, 1);
    pack_nibbles(&mut cell.nibbles, output, &block[4..]);
}

fn pack_nibbles(nibbles: &mut [[u8; 16]; QUANT_BLOCK], output: usize, bytes: &[u8]) {
    let shift = if output < 16 { 0 } else { 4 };
    for (input, pairs) in nibbles.iter_mut().enumerate() {
        pairs[output % 16] |= nibble(bytes, input) << shift;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::testing::{Random, random_rows};

    #[test]
    fn packed_weights_are_those_of_the_file_bit_for_bit() {
        let mut random = Random(5);
        for kind in WeightKind::ALL {
            for (outputs, inputs) in [(1, 32), (31, 64), (32, 96), (65, 32)] {
                let rows = random_rows(&mut random, kind, outputs, inputs);
                let row_bytes = kind.row_bytes(inputs).expect("whole blocks");
                let same = Matrix::pack(kind, kind, &rows, outputs, inputs).expect("little memory");
                let wide = Matrix::pack(kind, WeightKind::F32, &rows, outputs, inputs).expect("little memory");
                let (mut expected, mut got) = (vec![0.0; inputs], vec![0.0; inputs]);
                for output in 0..outputs {
                    kind.decode_row(&rows[output * row_bytes..][..row_bytes], &mut expected);
                    for matrix in [&same, &wide] {
                        matrix.row(output, &mut got);
                        assert_eq!(got, expected, "{matrix:?} output {output}");
                    }
                }
            }
        }
    }

    #[test]
    fn rounding_to_sixteen_bits_is_to_nearest_even() {
        let values = [1.0, 1.0 + 2.0_f32.powi(-11), 1.0 + 3.0 * 2.0_f32.powi(-11), -7.0e4, f32::NAN];
        let rows: Vec<u8> = values.into_iter().flat_map(f32::to_le_bytes).collect();
        let mut got = vec![0.0; values.len()];
        Matrix::pack(WeightKind::F32, WeightKind::F16, &rows, 1, values.len()).expect("little").row(0, &mut got);
        assert_eq!(got[..4], [1.0, 1.0, 1.0 + 2.0_f32.powi(-9), f32::NEG_INFINITY]);
        assert!(got[4].is_nan());
    }

    fn three_by_two() -> Matrix {
        Matrix::pack(WeightKind::F32, WeightKind::F32, &[0; 24], 3, 2).expect("little memory")
    }

    #[test]
    #[should_panic(expected = "output 3 of 3")]
    fn the_zeros_behind_the_last_output_are_no_row() {
        three_by_two().row(3, &mut [0.0; 2]);
    }

    #[test]
    #[should_panic(expected = "a row of 2 weights")]
    fn a_row_is_read_whole() {
        three_by_two().row(0, &mut [0.0; 1]);
    }
}
