//! The books of `reprieve`: who holds which slot and which KV blocks, and who gives way when the blocks run out.
//!
//! No I/O, no clock, no randomness and, without the feature `python`, no Python.

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
