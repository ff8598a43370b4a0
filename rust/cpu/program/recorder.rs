//! Takes down the operations of a forward pass, and checks that they fit together.

use std::sync::Arc;

use super::error::{Extent, Misfit, RecordError};
use super::op::{LinearPart, Op, Rows, ValueId, WeightId};
use super::plan::{Plan, plan};
use super::{ModelShape, Program, Weight};
use crate::cpu::matrix::Matrix;

/// Takes down the operations of an architecture, checking that widths fit.
#[derive(Debug)]
pub struct Recorder {
    shape: ModelShape,
    weights: Vec<(String, Weight)>,
    pub(super) values: Vec<Extent>,
    pub(super) ops: Vec<Op<ValueId>>,
}

type Recording<T> = Result<T, RecordError>;

fn refuse<T>(field: &'static str, misfit: Misfit) -> Recording<T> {
    Err(RecordError { field, misfit })
}

#[expect(clippy::missing_errors_doc, reason = "all name what does not fit, as `embed` says")]
impl Recorder {
    /// Nothing is recorded yet.
    ///
    /// # Errors
    /// Where a size is 0 or the heads do not fit together.
    pub fn new(shape: ModelShape) -> Recording<Self> {
        let ModelShape { num_layers, num_heads, num_kv_heads, head_size, vocab_size } = shape;
        for (field, value) in [
            ("num_layers", num_layers),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
            ("head_size", head_size),
            ("vocab_size", vocab_size),
        ] {
            if value == 0 {
                return refuse(field, Misfit::Zero);
            }
        }
        if !num_heads.is_multiple_of(num_kv_heads) {
            return refuse("num_heads", Misfit::NotAMultiple { num_heads, num_kv_heads });
        }
        if !head_size.is_multiple_of(2) {
            return refuse("head_size", Misfit::OddHeadSize { head_size });
        }
        if num_heads.checked_mul(head_size).is_none() {
            return refuse("num_heads", Misfit::TooWide { num_heads, head_size });
        }
        Ok(Self { shape, weights: Vec::new(), values: Vec::new(), ops: Vec::new() })
    }

    /// Adds a weight; `name` is for messages.
    pub fn add_weight(&mut self, name: String, weight: Weight) -> WeightId {
        self.weights.push((name, weight));
        WeightId(self.weights.len() - 1)
    }

    /// Records `Ops.embed`.
    ///
    /// # Errors
    /// What does not fit, by name, and nothing is recorded; so with all others.
    pub fn embed(&mut self, table: WeightId) -> Recording<ValueId> {
        let matrix = self.matrix("table", table)?;
        let (given, width, vocab_size) = (matrix.outputs(), matrix.inputs(), self.shape.vocab_size);
        if given < vocab_size {
            return refuse("table", Misfit::Tokens { given, vocab_size });
        }
        let out = self.value(Extent { width, rows: Rows::Tokens });
        self.ops.push(Op::Embed { table, out });
        Ok(out)
    }

    /// Records `Ops.rms_norm`.
    pub fn rms_norm(&mut self, x: ValueId, weight: WeightId, eps: f32) -> Recording<ValueId> {
        let extent = self.known("x", x)?;
        self.expect_vector("weight", weight, extent.width)?;
        let out = self.value(extent);
        self.ops.push(Op::RmsNorm { x, weight, eps, out });
        Ok(out)
    }

    /// Records `Ops.add_rms_norm`.
    pub fn add_rms_norm(
        &mut self,
        x: ValueId,
        residual: ValueId,
        weight: WeightId,
        eps: f32,
    ) -> Recording<(ValueId, ValueId)> {
        let extent = self.known("x", x)?;
        self.expect_value("residual", residual, extent)?;
        self.expect_vector("weight", weight, extent.width)?;
        let (out, total) = (self.value(extent), self.value(extent));
        self.ops.push(Op::AddRmsNorm { x, residual, weight, eps, out, total });
        Ok((out, total))
    }

    /// Records `Ops.linear`. Products of the same value, one after another, become one operation.
    pub fn linear(&mut self, x: ValueId, weight: WeightId, bias: Option<WeightId>) -> Recording<ValueId> {
        let Extent { width, rows } = self.known("x", x)?;
        let matrix = self.matrix("weight", weight)?;
        let (outputs, inputs) = (matrix.outputs(), matrix.inputs());
        if inputs != width {
            return refuse("weight", Misfit::Inputs { name: self.name(weight), given: inputs, needed: width });
        }
        if let Some(bias) = bias {
            self.expect_vector("bias", bias, outputs)?;
        }
        let out = self.value(Extent { width: outputs, rows });
        let part = LinearPart { weight, bias, out };
        match self.ops.last_mut() {
            Some(Op::Linear { x: same, parts }) if *same == x => parts.push(part),
            _ => self.ops.push(Op::Linear { x, parts: vec![part] }),
        }
        Ok(out)
    }

    /// Records `Ops.head_norm`.
    pub fn head_norm(&mut self, x: ValueId, weight: WeightId, eps: f32) -> Recording<ValueId> {
        let extent = self.known("x", x)?;
        let head_size = self.shape.head_size;
        if !extent.width.is_multiple_of(head_size) {
            return refuse("x", Misfit::PartOfAHead { width: extent.width, head_size });
        }
        self.expect_vector("weight", weight, head_size)?;
        let out = self.value(extent);
        self.ops.push(Op::HeadNorm { x, weight, eps, out });
        Ok(out)
    }

    /// Records `Ops.rope_append`.
    pub fn rope_append(&mut self, layer: usize, q: ValueId, k: ValueId, v: ValueId) -> Recording<ValueId> {
        self.expect_layer(layer)?;
        let queries = Extent { width: self.shape.q_width(), rows: Rows::Tokens };
        let keys = Extent { width: self.shape.kv_width(), rows: Rows::Tokens };
        self.expect_value("q", q, queries)?;
        self.expect_value("k", k, keys)?;
        self.expect_value("v", v, keys)?;
        let out = self.value(queries);
        self.ops.push(Op::RopeAppend { layer, q, k, v, out });
        Ok(out)
    }

    /// Records `Ops.paged_attention`.
    pub fn paged_attention(&mut self, layer: usize, q: ValueId) -> Recording<ValueId> {
        self.expect_layer(layer)?;
        let queries = Extent { width: self.shape.q_width(), rows: Rows::Tokens };
        self.expect_value("q", q, queries)?;
        let out = self.value(queries);
        self.ops.push(Op::Attention { layer, q, out });
        Ok(out)
    }

    /// Records `Ops.swiglu`.
    pub fn swiglu(&mut self, gate: ValueId, up: ValueId) -> Recording<ValueId> {
        let extent = self.known("gate", gate)?;
        self.expect_value("up", up, extent)?;
        let out = self.value(extent);
        self.ops.push(Op::Swiglu { gate, up, out });
        Ok(out)
    }

    /// Records `Ops.select_readback`.
    pub fn select_readback(&mut self, x: ValueId) -> Recording<ValueId> {
        let Extent { width, .. } = self.known("x", x)?;
        self.expect_value("x", x, Extent { width, rows: Rows::Tokens })?;
        let out = self.value(Extent { width, rows: Rows::ReadBack });
        self.ops.push(Op::SelectReadback { x, out });
        Ok(out)
    }

    /// Records `Ops.argmax`.
    pub fn argmax(&mut self, logits: ValueId) -> Recording<()> {
        let Extent { width, .. } = self.known("logits", logits)?;
        self.expect_value("logits", logits, Extent { width, rows: Rows::ReadBack })?;
        if width < self.shape.vocab_size {
            return refuse("logits", Misfit::Logits { given: width, vocab_size: self.shape.vocab_size });
        }
        self.ops.push(Op::Argmax { logits });
        Ok(())
    }

    /// Plans the program: orders and buffers of its values. The recorder is as new afterwards.
    ///
    /// # Errors
    /// Unless its last operation, and no other, chooses the tokens; the recorder is as it was.
    pub fn finish(&mut self) -> Recording<Program> {
        let count = self.ops.iter().filter(|op| matches!(op, Op::Argmax { .. })).count();
        if count != 1 || !matches!(self.ops.last(), Some(Op::Argmax { .. })) {
            return refuse("argmax", Misfit::Choices { count });
        }
        // Everything that can fail is above this line.
        let weights = std::mem::take(&mut self.weights).into_iter().map(|(_, weight)| weight).collect();
        let Plan { ops, values, num_buffers } = plan(std::mem::take(&mut self.values), std::mem::take(&mut self.ops));
        Ok(Program { shape: self.shape, weights: Arc::new(weights), ops, values, num_buffers })
    }

    fn value(&mut self, extent: Extent) -> ValueId {
        self.values.push(extent);
        ValueId(self.values.len() - 1)
    }

    fn known(&self, field: &'static str, value: ValueId) -> Recording<Extent> {
        let known = self.values.get(value.0).copied();
        known.ok_or(RecordError { field, misfit: Misfit::NoValue { value: value.0 } })
    }

    fn expect_value(&self, field: &'static str, value: ValueId, needed: Extent) -> Recording<()> {
        let given = self.known(field, value)?;
        if given == needed { Ok(()) } else { refuse(field, Misfit::Value { given, needed }) }
    }

    fn expect_layer(&self, layer: usize) -> Recording<()> {
        let num_layers = self.shape.num_layers;
        if layer < num_layers { Ok(()) } else { refuse("layer", Misfit::NoLayer { layer, num_layers }) }
    }

    fn name(&self, weight: WeightId) -> String {
        self.weights[weight.0].0.clone()
    }

    fn weight(&self, field: &'static str, weight: WeightId) -> Recording<&Weight> {
        let known = self.weights.get(weight.0).map(|(_, weight)| weight);
        known.ok_or(RecordError { field, misfit: Misfit::NoWeight { weight: weight.0 } })
    }

    fn matrix(&self, field: &'static str, weight: WeightId) -> Recording<&Matrix> {
        match self.weight(field, weight)? {
            Weight::Matrix(matrix) => Ok(matrix),
            Weight::Vector(_) => refuse(field, Misfit::Vector { name: self.name(weight) }),
        }
    }

    fn expect_vector(&self, field: &'static str, weight: WeightId, needed: usize) -> Recording<()> {
        match self.weight(field, weight)? {
            Weight::Vector(values) if values.len() == needed => Ok(()),
            Weight::Vector(values) => {
                refuse(field, Misfit::Elements { name: self.name(weight), given: values.len(), needed })
            }
            Weight::Matrix(_) => refuse(field, Misfit::Matrix { name: self.name(weight) }),
        }
    }
}
