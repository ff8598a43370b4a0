//! A forward pass as a fixed list of operations: recorded once, checked, and planned before the first step.

mod error;
mod op;
mod plan;
mod recorder;
#[cfg(test)]
mod tests;

use std::sync::Arc;

pub use error::RecordError;
pub(crate) use op::{LinearPart, Op, Order, Rows, Value};
pub use op::{ValueId, WeightId};
pub use recorder::Recorder;

use super::matrix::Matrix;

/// Sizes of the attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelShape {
    /// Transformer layers.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key and value heads, of which `num_heads` is a multiple.
    pub num_kv_heads: usize,
    /// Elements of a head, an even number.
    pub head_size: usize,
    /// Tokens that may be chosen: the first of the output's rows.
    pub vocab_size: usize,
}

impl ModelShape {
    pub(crate) fn q_width(self) -> usize {
        self.num_heads * self.head_size
    }

    pub(crate) fn kv_width(self) -> usize {
        self.num_kv_heads * self.head_size
    }
}

/// A weight: a matrix for products and embeddings, a vector for norms and biases.
#[derive(Debug)]
pub enum Weight {
    /// [outputs, inputs].
    Matrix(Matrix),
    /// [size].
    Vector(Vec<f32>),
}

/// A planned forward pass and its weights, shared by the devices that run it.
#[derive(Clone, Debug)]
pub struct Program {
    pub(crate) shape: ModelShape,
    weights: Arc<Vec<Weight>>,
    pub(crate) ops: Vec<Op<Value>>,
    pub(crate) values: Vec<Value>,
    pub(crate) num_buffers: usize,
}

impl Program {
    pub(crate) fn matrix(&self, weight: WeightId) -> &Matrix {
        match &self.weights[weight.0] {
            Weight::Matrix(matrix) => matrix,
            Weight::Vector(_) => unreachable!("checked when it was recorded"),
        }
    }

    pub(crate) fn vector(&self, weight: WeightId) -> &[f32] {
        match &self.weights[weight.0] {
            Weight::Vector(values) => values,
            Weight::Matrix(_) => unreachable!("checked when it was recorded"),
        }
    }

    /// Elements of a head.
    #[must_use]
    pub fn head_size(&self) -> usize {
        self.shape.head_size
    }

    /// Bytes of all weights.
    #[must_use]
    pub fn weight_bytes(&self) -> usize {
        let bytes = |weight: &Weight| match weight {
            Weight::Matrix(matrix) => matrix.bytes(),
            Weight::Vector(values) => size_of_val(values.as_slice()),
        };
        self.weights.iter().map(bytes).sum()
    }

    /// Logits per row: outputs of the last product.
    pub(crate) fn logits(&self) -> Value {
        match self.ops.last() {
            Some(Op::Argmax { logits }) => *logits,
            _ => unreachable!("a program ends with argmax"),
        }
    }
}
