//! How the attention of a step is divided among threads.

use super::attention::queries_at_once;
use super::execute::TURNS;
use super::program::ModelShape;
use super::step::CheckedStep;

/// Consecutive queries of one row, with heads of one KV head.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct AttentionUnit {
    pub row: usize,
    /// Number of the first query among the row's tokens.
    pub first: usize,
    pub count: usize,
    pub kv_head: usize,
    /// The first query head.
    pub head: usize,
    pub heads: usize,
}

/// Divides the attention of a step: blocks of queries that are computed together, by KV heads, and where those are too
/// few for the threads, by query heads.
pub(crate) fn attention_units(shape: ModelShape, step: &CheckedStep, threads: usize) -> Vec<AttentionUnit> {
    let group = shape.num_heads / shape.num_kv_heads;
    let blocks = |heads: usize| {
        let at_once = queries_at_once(heads);
        step.rows.iter().enumerate().flat_map(move |(row, it)| {
            (0..it.num_new).step_by(at_once).map(move |first| (row, first, at_once.min(it.num_new - first)))
        })
    };
    let is_few = blocks(group).count() * shape.num_kv_heads < threads * TURNS;
    let heads = if is_few && step.inputs.len() == step.rows.len() { 1 } else { group };
    let heads_of = |(row, first, count)| {
        (0..shape.num_heads).step_by(heads).map(move |head| AttentionUnit {
            row,
            first,
            count,
            kv_head: head / group,
            head,
            heads,
        })
    };
    blocks(group).flat_map(heads_of).collect()
}
