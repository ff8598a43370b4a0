//! Types in which files store weights, and what their bytes mean.

use half::{bf16, f16};

use super::cells::QUANT_BLOCK;

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

    /// Bytes of a row of `inputs` weights in a file, or None where the row is no whole number of blocks or they are
    /// more than can be counted.
    #[must_use]
    pub fn row_bytes(self, inputs: usize) -> Option<usize> {
        let (size, bytes) = self.block();
        inputs.is_multiple_of(size).then_some(inputs / size)?.checked_mul(bytes)
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

/// Half-precision number `index` at the head of a block, as bits.
pub(crate) fn half_bits(block: &[u8], index: usize) -> u16 {
    u16::from_le_bytes([block[2 * index], block[2 * index + 1]])
}

/// Input `input` of a block: the low nibbles are the first sixteen.
pub(crate) fn nibble(bytes: &[u8], input: usize) -> u8 {
    let byte = bytes[input % 16];
    if input < 16 { byte & 15 } else { byte >> 4 }
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn a_row_that_cannot_be_counted_has_no_bytes() {
        assert_eq!(WeightKind::Q4_1.row_bytes(64), Some(40));
        assert_eq!(WeightKind::Q4_1.row_bytes(33), None, "no whole block");
        assert_eq!(WeightKind::F32.row_bytes(usize::MAX), None);
        assert_eq!(WeightKind::F16.row_bytes(usize::MAX / 2), Some(usize::MAX - 1));
        assert_eq!(WeightKind::F16.row_bytes(usize::MAX / 2 + 1), None);
    }
}
