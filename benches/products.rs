//! Measures products with packed weights: each type and instruction set, few rows (bound by memory) and many.

use std::hint::black_box;

use _native::cpu::{InstructionSet, Matrix, Threads, WeightKind, multiply};
use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};

/// 16,384 outputs of 2,304 inputs: 75 MB as F16, more than the caches hold.
const OUTPUTS: usize = 16_384;
const INPUTS: usize = 2_304;

fn products(criterion: &mut Criterion) {
    let rows_f32: Vec<u8> = (0..OUTPUTS * INPUTS)
        .flat_map(|index| f32::from(u16::try_from(index % 251).expect("less than 251")).to_le_bytes())
        .collect();
    let threads = Threads::new(std::thread::available_parallelism().map_or(1, usize::from));
    let mut group = criterion.benchmark_group("product");
    group.sample_size(10);
    for kind in [WeightKind::F32, WeightKind::F16, WeightKind::Bf16] {
        let matrix = Matrix::pack(WeightKind::F32, kind, &rows_f32, OUTPUTS, INPUTS).expect("there is memory");
        measure(&mut group, &threads, &matrix, kind);
    }
    for kind in [WeightKind::Q8_0, WeightKind::Q4_0, WeightKind::Q4_1] {
        let row_bytes = kind.row_bytes(INPUTS).expect("whole blocks");
        // Any bytes are weights: scales of 0x1111 are small numbers.
        let rows = vec![0x11; OUTPUTS * row_bytes];
        let matrix = Matrix::pack(kind, kind, &rows, OUTPUTS, INPUTS).expect("there is memory");
        measure(&mut group, &threads, &matrix, kind);
    }
}

fn measure(
    group: &mut criterion::BenchmarkGroup<'_, criterion::measurement::WallTime>,
    threads: &Threads,
    matrix: &Matrix,
    kind: WeightKind,
) {
    for set in InstructionSet::all() {
        for num_rows in [1, 8, 32] {
            let rows: Vec<f32> = vec![0.5; num_rows * INPUTS];
            let mut out = vec![0.0; num_rows * OUTPUTS];
            group.throughput(Throughput::Bytes(matrix.bytes() as u64));
            let name = BenchmarkId::new(format!("{}/{}", kind.name(), set.name()), num_rows);
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    multiply(set, threads, matrix, None, &rows, &mut out).expect("there is memory");
                    black_box(&mut out);
                });
            });
        }
    }
}

criterion_group!(benches, products);
criterion_main!(benches);
