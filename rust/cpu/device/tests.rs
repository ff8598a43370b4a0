//! Steps in flight: the bits of one at a time, in order with copies, and what becomes of them where one fails.

use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use super::*;
use crate::cpu::argmax::{TOKEN_NONE_ALLOWED, TOKEN_NOT_READ};
use crate::cpu::matrix::Matrix;
use crate::cpu::memory::Shared;
use crate::cpu::program::{ModelShape, Recorder, Weight};
use crate::cpu::testing::{Random, random_rows};
use crate::cpu::weight_kind::WeightKind;

const HIDDEN: usize = 24;
const POSITIONS: usize = 64;
const SHAPE: ModelShape = ModelShape { num_layers: 2, num_heads: 4, num_kv_heads: 2, head_size: 6, vocab_size: 50 };

/// Two layers of attention with a residual.
fn program() -> Program {
    let mut random = Random(1);
    let mut recorder = Recorder::new(SHAPE).expect("it fits");
    let mut matrix = |recorder: &mut Recorder, outputs: usize, inputs: usize| {
        let rows = random_rows(&mut random, WeightKind::F32, outputs, inputs);
        let packed = Matrix::pack(WeightKind::F32, WeightKind::F32, &rows, outputs, inputs).expect("little memory");
        recorder.add_weight("matrix".into(), Weight::Matrix(packed))
    };
    let table = matrix(&mut recorder, SHAPE.vocab_size, HIDDEN);
    let norm = recorder.add_weight("norm".into(), Weight::Vector(vec![1.0; HIDDEN]));
    let mut total = recorder.embed(table).expect("fits");
    let mut x = recorder.rms_norm(total, norm, 1e-5).expect("fits");
    for layer in 0..SHAPE.num_layers {
        let [q, k, v] = [SHAPE.q_width(), SHAPE.kv_width(), SHAPE.kv_width()].map(|width| {
            let weight = matrix(&mut recorder, width, HIDDEN);
            recorder.linear(x, weight, None).expect("fits")
        });
        let q = recorder.rope_append(layer, q, k, v).expect("fits");
        let attended = recorder.paged_attention(layer, q).expect("fits");
        let weight = matrix(&mut recorder, HIDDEN, SHAPE.q_width());
        let out = recorder.linear(attended, weight, None).expect("fits");
        (x, total) = recorder.add_rms_norm(out, total, norm, 1e-5).expect("fits");
    }
    let read = recorder.select_readback(x).expect("fits");
    let weight = matrix(&mut recorder, SHAPE.vocab_size, HIDDEN);
    let logits = recorder.linear(read, weight, None).expect("fits");
    recorder.argmax(logits).expect("fits");
    recorder.finish().expect("it ends with argmax")
}

fn device(threads: usize, set: InstructionSet) -> CpuDevice {
    let angles: Vec<f32> = (0..u16::try_from(POSITIONS * 3).expect("few")).map(|at| f32::from(at) * 0.37).collect();
    let rope =
        RopeTable::new(3, angles.iter().map(|angle| angle.cos()).collect(), angles.iter().map(|a| a.sin()).collect());
    let settings = DeviceSettings {
        num_blocks: 40,
        block_size: 4,
        num_slots: 3,
        context_length: POSITIONS,
        kv: KvKind::F16,
        threads,
        set,
    };
    CpuDevice::new(program(), settings, rope).expect("little memory")
}

/// A row of a step: slot, start, tokens.
type Row = (i32, i32, Vec<i32>);

/// A step of rows that are all read back. Each slot has the blocks of its own ten in order.
fn step(rows: &[Row]) -> StepArrays {
    let blocks = |(slot, start, tokens): &Row| {
        let (slot, first) = (*slot, (start + 3) / 4);
        let end = (start + i32::try_from(tokens.len()).expect("few") + 3) / 4;
        (first..end).map(move |index| [slot, index, 10 * slot + index])
    };
    let lengths: Vec<i32> = rows.iter().map(|row| i32::try_from(row.2.len()).expect("few")).collect();
    StepArrays {
        token_ids: rows.iter().flat_map(|row| row.2.clone()).collect(),
        positions: rows.iter().zip(&lengths).flat_map(|(row, &length)| row.1..row.1 + length).collect(),
        slots: rows.iter().map(|row| row.0).collect(),
        starts: rows.iter().map(|row| row.1).collect(),
        kv_lengths: rows.iter().zip(&lengths).map(|(row, length)| row.1 + length).collect(),
        readback: vec![1; rows.len()],
        table_changes: rows.iter().flat_map(blocks).collect(),
        num_new: lengths,
        ..StepArrays::default()
    }
}

/// Chunks and decodes of three slots; the second sequence of slot 1 comes when the first has left.
fn schedule() -> Vec<Vec<Row>> {
    let mut steps = vec![vec![(0, 0, vec![3, 1, 4, 1, 5])], vec![(0, 5, vec![-1]), (1, 0, vec![9, 2])]];
    steps.push(vec![(0, 6, vec![-1]), (1, 2, vec![-1]), (2, 0, vec![7; 9])]);
    for at in 0..8 {
        steps.push(vec![(0, 7 + at, vec![-1]), (1, 3 + at, vec![-1]), (2, 9 + at, vec![-1])]);
    }
    steps.push(vec![(0, 15, vec![-1]), (1, 0, vec![8, 8, 8]), (2, 17, vec![2, 6, 5])]);
    steps.push(vec![(1, 3, vec![-1]), (2, 20, vec![-1])]);
    steps
}

/// Everything that a device holds: the newest logits and all blocks.
type Contents = (Vec<f32>, Vec<u8>);

fn contents(device: &CpuDevice) -> Contents {
    let (rows, width) = device.logits_shape();
    let mut logits = vec![0.0; rows * width];
    device.logits(&mut logits).expect("it passes");
    let mut bytes = vec![0; 40 * device.block_bytes()];
    device.gather(&(0..40).collect::<Vec<u32>>(), &mut bytes);
    (logits, bytes)
}

/// The tokens of each step where the host waits for each and gives them to the next, and what the device holds.
fn one_at_a_time() -> (Vec<Vec<i32>>, Contents) {
    let mut device = device(1, InstructionSet::all()[0]);
    let mut newest = [0; 3];
    let mut tokens = Vec::new();
    for mut rows in schedule() {
        for (slot, _, ids) in &mut rows {
            for id in ids.iter_mut().filter(|id| **id == -1) {
                *id = newest[usize::try_from(*slot).expect("a slot")];
            }
        }
        let number = device.launch(step(&rows)).expect("sound");
        let chosen = device.step(number).expect("launched").wait().expect("it passes");
        for ((slot, ..), token) in rows.iter().zip(&chosen) {
            newest[usize::try_from(*slot).expect("a slot")] = *token;
        }
        tokens.push(chosen);
    }
    (tokens, contents(&device))
}

/// Work that holds the threads up until the flag is set, so that steps pile up behind it.
fn hold_up(device: &CpuDevice) -> Arc<AtomicBool> {
    let flag = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&flag);
    let wait = move |_: crate::cpu::barrier::Worker<'_>| {
        while !seen.load(Ordering::SeqCst) {
            thread::yield_now();
        }
    };
    device.threads.post(Arc::new(wait), &[]);
    flag
}

#[test]
fn steps_in_flight_give_the_bits_of_one_at_a_time() {
    let (tokens, held) = one_at_a_time();
    assert!(tokens.iter().flatten().all(|&token| token >= 0));
    for set in InstructionSet::all() {
        for threads in 1..=3 {
            let mut device = device(threads, set);
            // Once there is room for the largest, no launch waits.
            device.common.own_memory().grow(&device.common.program, 20, 3).expect("little memory");
            let is_free = hold_up(&device);
            let numbers: Vec<u64> = schedule().iter().map(|rows| device.launch(step(rows)).expect("sound")).collect();
            let steps: Vec<LaunchedStep> =
                numbers.iter().map(|&number| device.step(number).expect("launched")).collect();
            assert!(steps.iter().all(|step| !step.is_over()), "none waited");
            is_free.store(true, Ordering::SeqCst);
            // In any order.
            let mut chosen: Vec<_> = steps.iter().rev().map(|step| step.wait().expect("it passes")).collect();
            chosen.reverse();
            assert_eq!(chosen, tokens, "{threads} threads, {}", set.name());
            assert!(steps.iter().all(LaunchedStep::is_over));
            let (logits, bytes) = contents(&device);
            assert!(logits.iter().zip(&held.0).all(|(one, other)| one.to_bits() == other.to_bits()));
            assert!(bytes == held.1);
        }
    }
}

#[test]
fn a_larger_step_waits_for_memory_until_nobody_computes() {
    let (tokens, _) = one_at_a_time();
    for threads in 1..=3 {
        let mut device = device(threads, InstructionSet::all()[0]);
        let numbers: Vec<u64> = schedule().iter().map(|rows| device.launch(step(rows)).expect("sound")).collect();
        for (number, tokens) in numbers.into_iter().zip(&tokens) {
            assert_eq!(&device.step(number).expect("launched").wait().expect("it passes"), tokens);
            device.forget(number);
            assert!(device.step(number).is_none());
        }
    }
}

#[test]
fn copies_happen_in_the_order_of_the_calls() {
    let mut device = device(2, InstructionSet::all()[0]);
    device.launch(step(&[(0, 0, vec![1; 12])])).expect("sound");
    let mut first = vec![0; 2 * device.block_bytes()];
    device.gather(&[0, 1], &mut first);
    assert!(first.iter().any(|&byte| byte != 0), "the step before was waited for");
    // Another sequence in the same blocks; then the first one's image, and steps that read it.
    device.launch(step(&[(0, 0, vec![2; 12])])).expect("sound");
    device.scatter(&[0, 1], &first);
    let mut second = vec![0; first.len()];
    device.gather(&[0, 1], &mut second);
    assert!(second == first);
    let behind = device.launch(step(&[(0, 12, vec![5])])).expect("sound");
    device.scatter(&[0, 1], &vec![0; first.len()]);
    assert!(device.step(behind).expect("launched").is_over(), "it read what was there when it was launched");
}

#[test]
fn a_panic_fails_its_step_and_those_behind_it_and_the_device_goes_on() {
    let (tokens, held) = one_at_a_time();
    for threads in 1..=3 {
        let mut device = device(threads, InstructionSet::all()[0]);
        device.common.own_memory().grow(&device.common.program, 20, 3).expect("little memory");
        let before = device.launch(step(&schedule()[0])).expect("sound");
        device.wait_until_idle();
        // Without its memory the step breaks.
        let logits = device.common.program.logits().buffer.0;
        let memory =
            std::mem::replace(&mut device.common.own_memory().buffers[logits], Shared::zeroed(0).expect("nothing"));
        let is_free = hold_up(&device);
        let failed: Vec<u64> = (1..4).map(|at| device.launch(step(&schedule()[at])).expect("sound")).collect();
        is_free.store(true, Ordering::SeqCst);
        assert_eq!(device.step(before).expect("launched").wait().expect("it was over"), tokens[0]);
        for (at, number) in failed.iter().enumerate() {
            let said = device.step(*number).expect("launched").wait().expect_err("it failed").to_string();
            assert_eq!(said.starts_with("a step before this one failed: a thread of the device panicked: "), at > 0);
        }
        device.wait_until_idle();
        assert!(device.logits(&mut vec![0.0; 3 * SHAPE.vocab_size]).is_err());
        device.common.own_memory().buffers[logits] = memory;
        // What would feed on a token that was lost with its step fails too.
        let fed = device.launch(step(&[(2, 9, vec![-1])])).expect("sound");
        assert!(device.step(fed).expect("launched").wait().is_err());
        // From tokens that the host has, everything runs again.
        let mut again = schedule();
        again[1][0].2 = vec![tokens[0][0]];
        for (rows, tokens) in again[1..].iter().zip(&tokens[1..]) {
            let number = device.launch(step(rows)).expect("sound");
            assert_eq!(&device.step(number).expect("launched").wait().expect("it passes"), tokens);
        }
        assert!(contents(&device) == held);
    }
}

#[test]
fn a_cell_without_a_token_counts_as_token_0() {
    let mut device = device(1, InstructionSet::all()[0]);
    let nothing = StepArrays { mask_rows: vec![0], masks: vec![0; 2], masks_shape: [1, 2], ..step(&[(0, 0, vec![4])]) };
    let number = device.launch(nothing).expect("sound");
    assert_eq!(device.step(number).expect("launched").wait(), Ok(vec![TOKEN_NONE_ALLOWED]));
    let tokens: Vec<_> = [-1, 0]
        .map(|input| {
            let number = device.launch(step(&[(0, 1, vec![input])])).expect("sound");
            device.step(number).expect("launched").wait()
        })
        .to_vec();
    assert_eq!(tokens[0], tokens[1]);
}

#[test]
fn bans_hold_by_row_and_by_the_last_input_given_or_fed() {
    let mut device = device(2, InstructionSet::all()[0]);
    let mut run = |arrays: StepArrays| {
        let number = device.launch(arrays).expect("sound");
        device.step(number).expect("launched").wait().expect("it passes")
    };
    let prompt = || step(&[(0, 0, vec![4, 7])]);
    let free = run(prompt());
    let decode = |input: i32, bans: Vec<[i32; 3]>| StepArrays { bans, ..step(&[(0, 2, vec![input])]) };
    let best = run(decode(-1, vec![]))[0];
    let masked = |bans: Vec<[i32; 3]>| StepArrays {
        mask_rows: vec![0],
        masks: vec![u32::MAX; 2],
        masks_shape: [1, 2],
        bans,
        ..prompt()
    };
    for (bans, is_free) in [
        (vec![[0, free[0], -1]], false),
        (vec![[0, free[0], 7]], false),
        (vec![[0, free[0], 4]], true),
        (vec![[0, free[0], 4], [0, free[0], 7]], false),
        (vec![[0, (free[0] + 1) % 50, -1]], true),
    ] {
        assert_eq!(run(StepArrays { bans: bans.clone(), ..prompt() }) == free, is_free);
        assert_eq!(run(masked(bans)) == free, is_free);
    }
    for input in [-1, free[0]] {
        run(prompt());
        assert_ne!(run(decode(input, vec![[0, best, free[0]]]))[0], best);
        run(prompt());
        assert_eq!(run(decode(input, vec![[0, best, (free[0] + 1) % 50]]))[0], best);
    }
    // Rows of others, and rows that read nothing back, do not notice.
    let mut both = step(&[(0, 0, vec![4, 7]), (1, 0, vec![4, 7]), (2, 0, vec![4, 7])]);
    both.bans = vec![[0, free[0], -1], [1, free[0], 4], [2, free[0], -1]];
    both.readback[2] = 0;
    let tokens = run(both);
    assert!(tokens[0] != free[0] && tokens[1] == free[0] && tokens[2] == TOKEN_NOT_READ);
}

#[test]
fn a_device_that_is_dropped_or_stopped_leaves_nobody_waiting() {
    for threads in 1..=3 {
        let mut device = device(threads, InstructionSet::all()[0]);
        let mut steps = Vec::new();
        for rows in schedule() {
            let number = device.launch(step(&rows)).expect("sound");
            steps.push(device.step(number).expect("launched"));
        }
        if threads == 2 {
            device.stop();
            device.stop();
        }
        let waiting = thread::spawn(move || steps.into_iter().map(|step| step.wait().is_ok()).collect::<Vec<_>>());
        drop(device);
        let passed = waiting.join().expect("nothing panics");
        assert!(passed.is_sorted_by(|one, other| one >= other), "in order: {passed:?}");
    }
}
