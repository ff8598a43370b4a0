//! Why something cannot be recorded.

use std::fmt;

use super::op::Rows;

/// What was recorded does not fit: the argument, and what is wrong with it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordError {
    /// Name of the argument, such as "weight" or "`num_heads`".
    pub field: &'static str,
    /// What is wrong with it.
    pub misfit: Misfit,
}

/// Width of a value and which rows it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Elements of a row.
    pub width: usize,
    /// Which rows there are.
    pub rows: Rows,
}

/// What is wrong with an argument. A `name` is that of a weight, as it was added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Misfit {
    /// A size of nothing.
    Zero,
    /// Query heads that KV heads cannot share.
    NotAMultiple { num_heads: usize, num_kv_heads: usize },
    /// Rotary angles turn pairs.
    OddHeadSize { head_size: usize },
    /// More elements than memory can have.
    TooWide { num_heads: usize, head_size: usize },
    /// No value has this number.
    NoValue { value: usize },
    /// No weight has this number.
    NoWeight { weight: usize },
    /// The model has fewer layers.
    NoLayer { layer: usize, num_layers: usize },
    /// A value of another width, or with other rows.
    Value { given: Extent, needed: Extent },
    /// A value that is cut into heads.
    PartOfAHead { width: usize, head_size: usize },
    /// A vector where a matrix is needed.
    Vector { name: String },
    /// A matrix where a vector is needed.
    Matrix { name: String },
    /// A vector of another size.
    Elements { name: String, given: usize, needed: usize },
    /// A matrix for values of another width.
    Inputs { name: String, given: usize, needed: usize },
    /// An embedding without some of the tokens.
    Tokens { given: usize, vocab_size: usize },
    /// Logits without some of the tokens.
    Logits { given: usize, vocab_size: usize },
    /// Not one choice of tokens, at the end.
    Choices { count: usize },
}

impl fmt::Display for Extent {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let rows = match self.rows {
            Rows::Tokens => "tokens",
            Rows::ReadBack => "rows read back",
        };
        write!(formatter, "[{rows}, {}]", self.width)
    }
}

impl fmt::Display for Misfit {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Zero => write!(formatter, "must be at least 1, not 0"),
            Self::NotAMultiple { num_heads, num_kv_heads } => {
                write!(formatter, "must be a multiple of num_kv_heads {num_kv_heads}, not {num_heads}")
            }
            Self::OddHeadSize { head_size } => write!(formatter, "must be even, not {head_size}"),
            Self::TooWide { num_heads, head_size } => {
                write!(formatter, "{num_heads} heads of {head_size} elements are more than there can be")
            }
            Self::NoValue { value } => write!(formatter, "there is no value {value}"),
            Self::NoWeight { weight } => write!(formatter, "there is no weight {weight}"),
            Self::NoLayer { layer, num_layers } => write!(formatter, "there is no layer {layer} among {num_layers}"),
            Self::Value { given, needed } => write!(formatter, "must be {needed}, not {given}"),
            Self::PartOfAHead { width, head_size } => {
                write!(formatter, "a width of {width} is no whole number of heads of {head_size}")
            }
            Self::Vector { name } => write!(formatter, "{name} is a vector, not a matrix"),
            Self::Matrix { name } => write!(formatter, "{name} is a matrix, not a vector"),
            Self::Elements { name, given, needed } => write!(formatter, "{name} has {given} elements, not {needed}"),
            Self::Inputs { name, given, needed } => write!(formatter, "{name} has {given} inputs, the value {needed}"),
            Self::Tokens { given, vocab_size } => {
                write!(formatter, "an embedding of {given} tokens for a vocabulary of {vocab_size}")
            }
            Self::Logits { given, vocab_size } => {
                write!(formatter, "{given} logits for a vocabulary of {vocab_size}")
            }
            Self::Choices { count } => {
                write!(formatter, "a program ends with argmax, and has one: this one has {count}")
            }
        }
    }
}

impl fmt::Display for RecordError {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}: {}", self.field, self.misfit)
    }
}

impl std::error::Error for RecordError {}
