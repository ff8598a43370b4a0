//! A weight matrix, packed once into the order in which products read it.

use std::fmt;

use half::{bf16, f16};

use super::cells::{Bf16Cell, Cell, F16Cell, F32Cell, PANEL, Q8Cell, Q40Cell, Q41Cell, QUANT_BLOCK};
use super::memory::{OutOfMemory, Plain, Shared};

/// Types in which weights are stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum WeightKind {
    /// IEEE single precision.
    F32,
    /// IEEE half precision.
    F16,
    /// bfloat16.
    Bf16,
    /// 8-bit integers, a half-precision scale for 32 inputs.
    Q8_0,
    /// 4-bit integers less 8, a half-precision scale for 32 inputs.
    Q4_0,
    /// 4-bit integers, a half-precision scale and offset for 32 inputs.
    Q4_1,
}

impl WeightKind {
    /// All of them.
    pub const ALL: [Self; 6] = [Self::F32, Self::F16, Self::Bf16, Self::Q8_0, Self::Q4_0, Self::Q4_1];

    /// The name that files use.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "F32",
            Self::F16 => "F16",
            Self::Bf16 => "BF16",
            Self::Q8_0 => "Q8_0",
            Self::Q4_0 => "Q4_0",
            Self::Q4_1 => "Q4_1",
        }
    }

    /// The kind of that name.
    #[must_use]
    pub fn of_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.name() == name)
    }

    /// Inputs and bytes of the smallest run of weights in a file.
    #[must_use]
    pub fn block(self) -> (usize, usize) {
        match self {
            Self::F32 => (1, 4),
            Self::F16 | Self::Bf16 => (1, 2),
            Self::Q8_0 => (QUANT_BLOCK, 34),
            Self::Q4_0 => (QUANT_BLOCK, 18),
            Self::Q4_1 => (QUANT_BLOCK, 20),
        }
    }

    /// Bytes of a row of `inputs` weights in a file, or None where the row is no whole number of blocks.
    #[must_use]
    pub fn row_bytes(self, inputs: usize) -> Option<usize> {
        let (size, bytes) = self.block();
        inputs.is_multiple_of(size).then(|| inputs / size * bytes)
    }

    /// Writes the values of one row as a file has them, little-endian, to `to`.
    pub(crate) fn decode_row(self, row: &[u8], to: &mut [f32]) {
        match self {
            Self::F32 => each(row, to, f32::from_le_bytes),
            Self::F16 => each(row, to, |bytes| f16::from_le_bytes(bytes).to_f32()),
            Self::Bf16 => each(row, to, |bytes| bf16::from_le_bytes(bytes).to_f32()),
            Self::Q8_0 | Self::Q4_0 | Self::Q4_1 => {
                let (size, bytes) = self.block();
                for (block, to) in row.chunks_exact(bytes).zip(to.chunks_exact_mut(size)) {
                    for (input, to) in to.iter_mut().enumerate() {
                        *to = self.decode_block(block, input);
                    }
                }
            }
        }
    }

    fn decode_block(self, block: &[u8], input: usize) -> f32 {
        let scale = half_bits(block, 0);
        let scale = f16::from_bits(scale).to_f32();
        match self {
            Self::Q8_0 => scale * f32::from(block[2 + input].cast_signed()),
            Self::Q4_0 => scale * (f32::from(nibble(&block[2..], input)) - 8.0),
            Self::Q4_1 => scale * f32::from(nibble(&block[4..], input)) + f16::from_bits(half_bits(block, 1)).to_f32(),
            Self::F32 | Self::F16 | Self::Bf16 => unreachable!("has no blocks"),
        }
    }
}

fn each<const N: usize>(row: &[u8], to: &mut [f32], decode: impl Fn([u8; N]) -> f32) {
    for (bytes, to) in row.as_chunks().0.iter().zip(to) {
        *to = decode(*bytes);
    }
}

fn half_bits(block: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([block[2 * index], block[2 * index + 1]])
}

/// Input `input` of a block: the low nibbles are the first sixteen.
fn nibble(bytes: &[u8], input: usize) -> u8 {
    let byte = bytes[input % 16];
    if input < 16 { byte & 15 } else { byte >> 4 }
}

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
    /// If `rows` has another size, or `kind` is a quantised type and not `from`.
    pub fn pack(
        from: WeightKind,
        kind: WeightKind,
        rows: &[u8],
        outputs: usize,
        inputs: usize,
    ) -> Result<Self, OutOfMemory> {
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
    pub fn row(&self, output: usize, to: &mut [f32]) {
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
pub(crate) mod tests {
    use super::*;

    /// Knuth's linear congruential generator, for tests.
    pub(crate) struct Random(pub u64);

    impl Random {
        pub(crate) fn bits(&mut self) -> u32 {
            self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            u32::try_from(self.0 >> 32).expect("32 bits")
        }

        /// From -1 to 1.
        pub(crate) fn value(&mut self) -> f32 {
            #[expect(clippy::cast_precision_loss, reason = "24 bits")]
            let value = (self.bits() >> 8) as f32 / (1 << 23) as f32;
            value - 1.0
        }
    }

    /// Rows as a file has them, with scales and values near 1 and no NaN.
    pub(crate) fn random_rows(random: &mut Random, kind: WeightKind, outputs: usize, inputs: usize) -> Vec<u8> {
        let (size, bytes) = kind.block();
        let num_scales = match kind {
            WeightKind::Q8_0 | WeightKind::Q4_0 => 1,
            WeightKind::Q4_1 => 2,
            WeightKind::F32 | WeightKind::F16 | WeightKind::Bf16 => 0,
        };
        let mut rows = Vec::new();
        for _ in 0..outputs * inputs / size {
            match kind {
                WeightKind::F32 => rows.extend(random.value().to_le_bytes()),
                WeightKind::F16 => rows.extend(f16::from_f32(random.value()).to_le_bytes()),
                WeightKind::Bf16 => rows.extend(bf16::from_f32(random.value()).to_le_bytes()),
                WeightKind::Q8_0 | WeightKind::Q4_0 | WeightKind::Q4_1 => {
                    for _ in 0..num_scales {
                        rows.extend(f16::from_f32(random.value()).to_le_bytes());
                    }
                    rows.extend((2 * num_scales..bytes).map(|_| random.bits().to_le_bytes()[3]));
                }
            }
        }
        rows
    }

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
    fn blocks_decode_as_the_format_says() {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        let mut got = vec![0.0; 32];
        // Byte i has input i in its low nibble, input i + 16 in its high one.
        let nibbles: Vec<u8> = (0..16).map(|i| i | (15 - i) << 4).collect();
        let raw = |i: u8| f32::from(if i < 16 { i } else { 31 - i });
        let block = [&half(0.5)[..], &half(-3.0)[..], &nibbles[..]].concat();
        WeightKind::Q4_1.decode_row(&block, &mut got);
        assert_eq!(got, (0..32).map(|i| 0.5 * raw(i) - 3.0).collect::<Vec<f32>>());
        let block = [&half(0.5)[..], &nibbles[..]].concat();
        WeightKind::Q4_0.decode_row(&block, &mut got);
        assert_eq!(got, (0..32).map(|i| 0.5 * (raw(i) - 8.0)).collect::<Vec<f32>>());
        let block = [&half(0.25)[..], &(112..144).map(|value: u8| value).collect::<Vec<u8>>()[..]].concat();
        WeightKind::Q8_0.decode_row(&block, &mut got);
        assert_eq!(got, (112..144).map(|i: u8| 0.25 * f32::from(i.cast_signed())).collect::<Vec<f32>>());
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
}
