//! The books of `reprieve`: who holds which slot and which KV blocks, and who gives way when the blocks run out. They
//! have no I/O, no clock and no randomness. Beside them, in `cpu`, the arithmetic of the CPU device.
//!
//! Without the feature `python` there is no Python in either.

pub mod blocks;
pub mod cpu;
pub mod error;
pub mod ids;
pub mod ledger;
pub mod schedule;
pub mod slots;
pub mod victim;

#[cfg(feature = "python")]
mod python;
