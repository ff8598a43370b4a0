//! Random numbers and weights for tests.

use half::{bf16, f16};

use super::weight_kind::WeightKind;

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
