//! Operations of a program, and the values between them.

/// Number of a weight of a [`Recorder`](super::Recorder).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WeightId(pub usize);

/// Number of a value: what an operation gives, one line per row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValueId(pub usize);

/// Number of a buffer; several values use one, one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct BufferId(pub usize);

/// Which rows a value has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
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
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
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
    pub(super) fn inputs(&self) -> Vec<V> {
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

    pub(super) fn outputs(&self) -> Vec<V> {
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
    pub(super) fn renamed<W>(&self, name: impl Fn(V) -> W) -> Op<W> {
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
