//! A forward pass as a fixed list of operations: recorded once, checked, and planned before the first step.

use std::fmt;
use std::sync::Arc;

use super::matrix::Matrix;

/// Number of a weight of a [`Recorder`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightId(pub usize);

/// Number of a value: what an operation gives, one line per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueId(pub usize);

/// Number of a buffer; several values use one, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferId(pub usize);

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

/// What was recorded does not fit together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordError(pub String);

impl fmt::Display for RecordError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for RecordError {}

/// Which rows a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Rows {
    /// Every token of the step.
    Tokens,
    /// The last token of each row that is read back.
    ReadBack,
}

/// How a value lies in its buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Order {
    /// Row after row.
    Plain,
    /// In group order, as products read it: see `Groups`.
    Grouped,
}

/// A value of a planned program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Value {
    pub buffer: BufferId,
    pub width: usize,
    pub rows: Rows,
    pub order: Order,
}

/// One product of an [`Op::Linear`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LinearPart<V> {
    pub weight: WeightId,
    pub bias: Option<WeightId>,
    pub out: V,
}

/// One operation; see `reprieve.device.base.Ops` for what each means. `V` is what it calls a value.
#[derive(Clone, Debug)]
pub(crate) enum Op<V> {
    Embed {
        table: WeightId,
        out: V,
    },
    RmsNorm {
        x: V,
        weight: WeightId,
        eps: f32,
        out: V,
    },
    AddRmsNorm {
        x: V,
        residual: V,
        weight: WeightId,
        eps: f32,
        out: V,
        total: V,
    },
    /// Products of the same rows: one pass over all their panels.
    Linear {
        x: V,
        parts: Vec<LinearPart<V>>,
    },
    HeadNorm {
        x: V,
        weight: WeightId,
        eps: f32,
        out: V,
    },
    RopeAppend {
        layer: usize,
        q: V,
        k: V,
        v: V,
        out: V,
    },
    Attention {
        layer: usize,
        q: V,
        out: V,
    },
    Swiglu {
        gate: V,
        up: V,
        out: V,
    },
    SelectReadback {
        x: V,
        out: V,
    },
    /// Brings a value into group order.
    Regroup {
        x: V,
        out: V,
    },
    Argmax {
        logits: V,
    },
}

impl<V: Copy> Op<V> {
    fn inputs(&self) -> Vec<V> {
        match self {
            Self::Embed { .. } => vec![],
            Self::RmsNorm { x, .. }
            | Self::HeadNorm { x, .. }
            | Self::Linear { x, .. }
            | Self::SelectReadback { x, .. }
            | Self::Regroup { x, .. } => vec![*x],
            Self::AddRmsNorm { x, residual, .. } => vec![*x, *residual],
            Self::RopeAppend { q, k, v, .. } => vec![*q, *k, *v],
            Self::Attention { q, .. } => vec![*q],
            Self::Swiglu { gate, up, .. } => vec![*gate, *up],
            Self::Argmax { logits } => vec![*logits],
        }
    }

    fn outputs(&self) -> Vec<V> {
        match self {
            Self::Embed { out, .. }
            | Self::RmsNorm { out, .. }
            | Self::HeadNorm { out, .. }
            | Self::RopeAppend { out, .. }
            | Self::Attention { out, .. }
            | Self::Swiglu { out, .. }
            | Self::SelectReadback { out, .. }
            | Self::Regroup { out, .. } => vec![*out],
            Self::AddRmsNorm { out, total, .. } => vec![*out, *total],
            Self::Linear { parts, .. } => parts.iter().map(|part| part.out).collect(),
            Self::Argmax { .. } => vec![],
        }
    }

    /// The same operation with other names for its values.
    fn renamed<W>(&self, name: impl Fn(V) -> W) -> Op<W> {
        match *self {
            Self::Embed { table, out } => Op::Embed { table, out: name(out) },
            Self::RmsNorm { x, weight, eps, out } => Op::RmsNorm { x: name(x), weight, eps, out: name(out) },
            Self::AddRmsNorm { x, residual, weight, eps, out, total } => {
                Op::AddRmsNorm { x: name(x), residual: name(residual), weight, eps, out: name(out), total: name(total) }
            }
            Self::Linear { x, ref parts } => Op::Linear {
                x: name(x),
                parts: parts
                    .iter()
                    .map(|part| LinearPart { weight: part.weight, bias: part.bias, out: name(part.out) })
                    .collect(),
            },
            Self::HeadNorm { x, weight, eps, out } => Op::HeadNorm { x: name(x), weight, eps, out: name(out) },
            Self::RopeAppend { layer, q, k, v, out } => {
                Op::RopeAppend { layer, q: name(q), k: name(k), v: name(v), out: name(out) }
            }
            Self::Attention { layer, q, out } => Op::Attention { layer, q: name(q), out: name(out) },
            Self::Swiglu { gate, up, out } => Op::Swiglu { gate: name(gate), up: name(up), out: name(out) },
            Self::SelectReadback { x, out } => Op::SelectReadback { x: name(x), out: name(out) },
            Self::Regroup { x, out } => Op::Regroup { x: name(x), out: name(out) },
            Self::Argmax { logits } => Op::Argmax { logits: name(logits) },
        }
    }
}

/// What is known of a value while it is recorded.
#[derive(Clone, Copy, Debug)]
struct Recorded {
    width: usize,
    rows: Rows,
}

/// Takes down the operations of an architecture, checking that widths fit.
#[derive(Debug)]
pub struct Recorder {
    shape: ModelShape,
    weights: Vec<(String, Weight)>,
    values: Vec<Recorded>,
    ops: Vec<Op<ValueId>>,
}

type Recording<T> = Result<T, RecordError>;

#[expect(clippy::missing_errors_doc, reason = "all name what does not fit, as `embed` says")]
impl Recorder {
    /// Nothing is recorded yet.
    ///
    /// # Errors
    /// Where the heads do not fit together.
    pub fn new(shape: ModelShape) -> Recording<Self> {
        let ModelShape { num_layers, num_heads, num_kv_heads, head_size, vocab_size } = shape;
        for (name, value) in [
            ("num_layers", num_layers),
            ("num_heads", num_heads),
            ("num_kv_heads", num_kv_heads),
            ("head_size", head_size),
            ("vocab_size", vocab_size),
        ] {
            if value == 0 {
                return Err(RecordError(format!("{name} must be at least 1, not 0")));
            }
        }
        if !num_heads.is_multiple_of(num_kv_heads) || !head_size.is_multiple_of(2) {
            let problem = format!(
                "num_heads {num_heads} must be a multiple of num_kv_heads {num_kv_heads}, head_size {head_size} even"
            );
            return Err(RecordError(problem));
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
    /// What does not fit, by name; so with all others.
    pub fn embed(&mut self, table: WeightId) -> Recording<ValueId> {
        let matrix = self.matrix(table)?;
        let (tokens, width) = (matrix.outputs(), matrix.inputs());
        if tokens < self.shape.vocab_size {
            let problem = format!("an embedding of {tokens} tokens for a vocabulary of {}", self.shape.vocab_size);
            return Err(RecordError(problem));
        }
        let out = self.value(width, Rows::Tokens);
        self.ops.push(Op::Embed { table, out });
        Ok(out)
    }

    /// Records `Ops.rms_norm`.
    pub fn rms_norm(&mut self, x: ValueId, weight: WeightId, eps: f32) -> Recording<ValueId> {
        let Recorded { width, rows } = self.known(x)?;
        self.expect_vector(weight, width)?;
        let out = self.value(width, rows);
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
        let Recorded { width, rows } = self.known(x)?;
        self.expect_value(residual, width, rows)?;
        self.expect_vector(weight, width)?;
        let (out, total) = (self.value(width, rows), self.value(width, rows));
        self.ops.push(Op::AddRmsNorm { x, residual, weight, eps, out, total });
        Ok((out, total))
    }

    /// Records `Ops.linear`. Products of the same value, one after another, become one operation.
    pub fn linear(&mut self, x: ValueId, weight: WeightId, bias: Option<WeightId>) -> Recording<ValueId> {
        let Recorded { width, rows } = self.known(x)?;
        let matrix = self.matrix(weight)?;
        let (outputs, inputs) = (matrix.outputs(), matrix.inputs());
        if inputs != width {
            let problem = format!("{} has {inputs} inputs, the value {width}", self.name(weight));
            return Err(RecordError(problem));
        }
        if let Some(bias) = bias {
            self.expect_vector(bias, outputs)?;
        }
        let out = self.value(outputs, rows);
        let part = LinearPart { weight, bias, out };
        match self.ops.last_mut() {
            Some(Op::Linear { x: same, parts }) if *same == x => parts.push(part),
            _ => self.ops.push(Op::Linear { x, parts: vec![part] }),
        }
        Ok(out)
    }

    /// Records `Ops.head_norm`.
    pub fn head_norm(&mut self, x: ValueId, weight: WeightId, eps: f32) -> Recording<ValueId> {
        let Recorded { width, rows } = self.known(x)?;
        self.expect_vector(weight, self.shape.head_size)?;
        if !width.is_multiple_of(self.shape.head_size) {
            let problem = format!("a width of {width} is no whole number of heads of {}", self.shape.head_size);
            return Err(RecordError(problem));
        }
        let out = self.value(width, rows);
        self.ops.push(Op::HeadNorm { x, weight, eps, out });
        Ok(out)
    }

    /// Records `Ops.rope_append`.
    pub fn rope_append(&mut self, layer: usize, q: ValueId, k: ValueId, v: ValueId) -> Recording<ValueId> {
        self.expect_layer(layer)?;
        self.expect_value(q, self.shape.q_width(), Rows::Tokens)?;
        self.expect_value(k, self.shape.kv_width(), Rows::Tokens)?;
        self.expect_value(v, self.shape.kv_width(), Rows::Tokens)?;
        let out = self.value(self.shape.q_width(), Rows::Tokens);
        self.ops.push(Op::RopeAppend { layer, q, k, v, out });
        Ok(out)
    }

    /// Records `Ops.paged_attention`.
    pub fn paged_attention(&mut self, layer: usize, q: ValueId) -> Recording<ValueId> {
        self.expect_layer(layer)?;
        self.expect_value(q, self.shape.q_width(), Rows::Tokens)?;
        let out = self.value(self.shape.q_width(), Rows::Tokens);
        self.ops.push(Op::Attention { layer, q, out });
        Ok(out)
    }

    /// Records `Ops.swiglu`.
    pub fn swiglu(&mut self, gate: ValueId, up: ValueId) -> Recording<ValueId> {
        let Recorded { width, rows } = self.known(gate)?;
        self.expect_value(up, width, rows)?;
        let out = self.value(width, rows);
        self.ops.push(Op::Swiglu { gate, up, out });
        Ok(out)
    }

    /// Records `Ops.select_readback`.
    pub fn select_readback(&mut self, x: ValueId) -> Recording<ValueId> {
        let Recorded { width, .. } = self.known(x)?;
        self.expect_value(x, width, Rows::Tokens)?;
        let out = self.value(width, Rows::ReadBack);
        self.ops.push(Op::SelectReadback { x, out });
        Ok(out)
    }

    /// Records `Ops.argmax`.
    pub fn argmax(&mut self, logits: ValueId) -> Recording<()> {
        let Recorded { width, .. } = self.known(logits)?;
        self.expect_value(logits, width, Rows::ReadBack)?;
        if width < self.shape.vocab_size {
            let problem = format!("{width} logits for a vocabulary of {}", self.shape.vocab_size);
            return Err(RecordError(problem));
        }
        self.ops.push(Op::Argmax { logits });
        Ok(())
    }

    /// Plans the program: orders and buffers of its values.
    ///
    /// # Errors
    /// Unless its last operation, and no other, chooses the tokens.
    pub fn finish(mut self) -> Recording<Program> {
        let choosers = self.ops.iter().filter(|op| matches!(op, Op::Argmax { .. })).count();
        if choosers != 1 || !matches!(self.ops.last(), Some(Op::Argmax { .. })) {
            return Err(RecordError("a program ends with argmax, and has one".into()));
        }
        let orders = self.order_values();
        let (buffers, num_buffers) = self.assign_buffers();
        let value = |ValueId(index): ValueId| {
            let Recorded { width, rows } = self.values[index];
            Value { buffer: buffers[index], width, rows, order: orders[index] }
        };
        let ops: Vec<Op<Value>> = self.ops.iter().map(|op| op.renamed(value)).collect();
        let values = (0..self.values.len()).map(|index| value(ValueId(index))).collect();
        let weights = self.weights.into_iter().map(|(_, weight)| weight).collect();
        Ok(Program { shape: self.shape, weights: Arc::new(weights), ops, values, num_buffers })
    }

    /// Decides which values lie in group order: those that only products read. Others that a product reads are brought
    /// into group order by an operation of their own, inserted here.
    fn order_values(&mut self) -> Vec<Order> {
        // Products write plain rows, and a residual is read and written as plain rows.
        let mut is_plain = vec![false; self.values.len()];
        let mut is_read_by_product = vec![false; self.values.len()];
        for op in &self.ops {
            let is_product = matches!(op, Op::Linear { .. });
            let plain = match op {
                Op::Linear { .. } => op.outputs(),
                Op::AddRmsNorm { total, .. } => [op.inputs(), vec![*total]].concat(),
                _ => op.inputs(),
            };
            for value in plain {
                is_plain[value.0] = true;
            }
            for value in op.inputs().into_iter().filter(|_| is_product) {
                is_read_by_product[value.0] = true;
            }
        }
        let order =
            |(is_plain, is_read): (bool, bool)| if is_read && !is_plain { Order::Grouped } else { Order::Plain };
        let mut orders: Vec<Order> = is_plain.into_iter().zip(is_read_by_product).map(order).collect();
        let mut ops = Vec::with_capacity(self.ops.len());
        for mut op in std::mem::take(&mut self.ops) {
            if let Op::Linear { x, .. } = &mut op
                && orders[x.0] == Order::Plain
            {
                let Recorded { width, rows } = self.values[x.0];
                let out = self.value(width, rows);
                orders.push(Order::Grouped);
                ops.push(Op::Regroup { x: *x, out });
                *x = out;
            }
            ops.push(op);
        }
        self.ops = ops;
        orders
    }

    /// Gives each value a buffer that no other value uses from its making to its last reading. What an operation makes
    /// never lies where something that it reads does.
    fn assign_buffers(&self) -> (Vec<BufferId>, usize) {
        let mut last_use = vec![0; self.values.len()];
        for (at, op) in self.ops.iter().enumerate() {
            for value in op.inputs().into_iter().chain(op.outputs()) {
                last_use[value.0] = at;
            }
        }
        let mut buffers = vec![BufferId(usize::MAX); self.values.len()];
        let mut free: Vec<BufferId> = Vec::new();
        let mut count = 0;
        for (at, op) in self.ops.iter().enumerate() {
            for value in op.outputs() {
                buffers[value.0] = free.pop().unwrap_or_else(|| {
                    count += 1;
                    BufferId(count - 1)
                });
            }
            let mut done: Vec<ValueId> = op.inputs().into_iter().chain(op.outputs()).collect();
            done.retain(|value| last_use[value.0] == at);
            done.sort_unstable_by_key(|value| value.0);
            done.dedup();
            free.extend(done.into_iter().map(|value| buffers[value.0]));
        }
        (buffers, count)
    }

    fn value(&mut self, width: usize, rows: Rows) -> ValueId {
        self.values.push(Recorded { width, rows });
        ValueId(self.values.len() - 1)
    }

    fn known(&self, value: ValueId) -> Recording<Recorded> {
        self.values.get(value.0).copied().ok_or_else(|| RecordError(format!("there is no value {}", value.0)))
    }

    fn expect_value(&self, value: ValueId, width: usize, rows: Rows) -> Recording<()> {
        let known = self.known(value)?;
        if (known.width, known.rows) != (width, rows) {
            let problem = format!("a value of {width} by {rows:?} is needed, not {} by {:?}", known.width, known.rows);
            return Err(RecordError(problem));
        }
        Ok(())
    }

    fn expect_layer(&self, layer: usize) -> Recording<()> {
        if layer >= self.shape.num_layers {
            return Err(RecordError(format!("there is no layer {layer} among {}", self.shape.num_layers)));
        }
        Ok(())
    }

    fn name(&self, weight: WeightId) -> &str {
        &self.weights[weight.0].0
    }

    fn weight(&self, weight: WeightId) -> Recording<&Weight> {
        let (_, weight) =
            self.weights.get(weight.0).ok_or_else(|| RecordError(format!("there is no weight {}", weight.0)))?;
        Ok(weight)
    }

    fn matrix(&self, weight: WeightId) -> Recording<&Matrix> {
        match self.weight(weight)? {
            Weight::Matrix(matrix) => Ok(matrix),
            Weight::Vector(_) => Err(RecordError(format!("{} is a vector, not a matrix", self.name(weight)))),
        }
    }

    fn expect_vector(&self, weight: WeightId, size: usize) -> Recording<()> {
        match self.weight(weight)? {
            Weight::Vector(values) if values.len() == size => Ok(()),
            Weight::Vector(values) => {
                Err(RecordError(format!("{} has {} elements, not {size}", self.name(weight), values.len())))
            }
            Weight::Matrix(_) => Err(RecordError(format!("{} is a matrix, not a vector", self.name(weight)))),
        }
    }
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
