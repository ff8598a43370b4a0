//! The CPU device's arithmetic: packed weights, fixed orders of summation, threads. The only `unsafe` of the crate.
//!
//! A program of operations is recorded once over [`program::Recorder`]; [`device::CpuDevice`] runs it for each step.

#![expect(unsafe_code, reason = "threads that share memory, and vector instructions: each use says why it holds")]
#![expect(clippy::inline_always, reason = "what is not inlined is not compiled for the instruction set of its caller")]

mod argmax;
mod attention;
mod barrier;
mod cells;
mod common;
mod device;
mod element;
mod execute;
mod exp;
mod groups;
mod kv;
mod lanes;
mod linear;
mod matrix;
mod memory;
mod norm;
mod program;
mod queue;
mod rope;
mod step;
mod step_check;
mod swiglu;
mod tables;
#[cfg(test)]
mod testing;
mod threads;
mod units;
mod weight_kind;

pub use device::{CpuDevice, DeviceSettings, LaunchError, LaunchedStep};
pub use execute::OP_KINDS;
pub use kv::{KvKind, KvPool, KvShape};
pub use lanes::InstructionSet;
pub use linear::multiply;
pub use matrix::Matrix;
pub use memory::OutOfMemory;
pub use program::{ModelShape, Program, RecordError, Recorder, ValueId, Weight, WeightId};
pub use queue::Failure;
pub use rope::RopeTable;
pub use step::{Refusal, StepArrays, StepLimits};
pub use threads::Threads;
pub use weight_kind::WeightKind;
