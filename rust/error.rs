//! Refusals, as data with numbers. `Display` writes the sentence.

use std::fmt;

use crate::ids::SeqId;

/// More was asked for than is free.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// How many were needed.
    pub needed: u32,
    /// How many are free.
    pub free: u32,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} KV blocks are needed, {} are free", self.needed, self.free)
    }
}

/// What is wrong with an argument.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Problem {
    /// It has no element.
    Empty,
    /// A number that is too small.
    TooSmall {
        /// What was given.
        given: u64,
        /// The least that is allowed.
        least: u64,
    },
    /// A number that is too large.
    TooLarge {
        /// What was given.
        given: u64,
        /// The most that is allowed.
        most: u64,
    },
    /// A token id that the model does not have.
    NoSuchToken {
        /// What was given.
        token: i64,
        /// Where in the list it stands.
        index: usize,
        /// How many ids there are.
        vocab_size: u32,
    },
    /// A prompt longer than the context.
    OverContext {
        /// Tokens of the prompt.
        given: u64,
        /// Most positions of a sequence.
        context_length: u32,
    },
    /// More prompt blocks than the whole pool has.
    NeverFits {
        /// Blocks of the prompt.
        needed: u32,
        /// Blocks in the pool.
        total: u32,
    },
    /// More ids than can be banned of one sequence at once.
    TooManyBans {
        /// Banned ids, think tokens, and the stop ids where there is a least number of tokens.
        given: u64,
        /// Most that is allowed.
        most: u32,
    },
    /// More than there is memory for.
    NoMemory {
        /// What was given.
        given: u32,
    },
    /// A buffer that is too short for what must be written or read.
    TooShort {
        /// Elements it has.
        given: usize,
        /// Elements it must have.
        needed: usize,
    },
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => write!(f, "is empty; it needs at least one token"),
            Self::TooSmall { given, least } => write!(f, "must be at least {least}, not {given}"),
            Self::TooLarge { given, most } => write!(f, "must be at most {most}, not {given}"),
            Self::NoSuchToken { token, index, vocab_size } => {
                write!(
                    f,
                    "token id {token} at index {index} is not one of the {vocab_size} ids 0 to {}",
                    vocab_size - 1
                )
            }
            Self::OverContext { given, context_length } => {
                write!(f, "has {given} tokens, the context holds {context_length}")
            }
            Self::NeverFits { needed, total } => write!(f, "needs {needed} KV blocks, the pool has {total} in all"),
            Self::TooManyBans { given, most } => write!(
                f,
                "with think_tokens, and with the stop ids where there is min_tokens, {given} ids are banned at once; \
                 at most {most} can be"
            ),
            Self::NoMemory { given } => write!(f, "is {given}, and there is no memory for so many"),
            Self::TooShort { given, needed } => write!(f, "has {given} elements, this step needs {needed}"),
        }
    }
}

/// Why a sequence cannot be parked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NotParkable {
    /// Its token ids alone do not rebuild its KV.
    NotReplayable,
    /// No position is committed, so there is no image to spill.
    NothingCommitted,
    /// It is not resident.
    NotResident,
}

impl fmt::Display for NotParkable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotReplayable => "its token ids alone do not rebuild its KV",
            Self::NothingCommitted => "no position is committed, so there is no image to spill",
            Self::NotResident => "it is not resident",
        })
    }
}

/// Every refusal of the books. A refused call changed nothing.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BooksError {
    /// Not enough free blocks.
    Exhausted(Shortage),
    /// An argument that cannot be served.
    Invalid {
        /// The argument's name.
        field: &'static str,
        /// What is wrong with it.
        problem: Problem,
    },
    /// No such sequence was ever submitted.
    Unknown(SeqId),
    /// The sequence has ended.
    Finished(SeqId),
    /// A step that is not settled needs the sequence.
    InFlight(SeqId),
    /// The sequence cannot be parked.
    CannotPark(SeqId, NotParkable),
    /// A call that is not allowed in the present state.
    Misused(&'static str),
}

impl BooksError {
    /// An argument named `field` with `problem`.
    #[must_use]
    pub fn invalid(field: &'static str, problem: Problem) -> Self {
        Self::Invalid { field, problem }
    }
}

impl From<Shortage> for BooksError {
    fn from(shortage: Shortage) -> Self {
        Self::Exhausted(shortage)
    }
}

impl fmt::Display for BooksError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Exhausted(shortage) => shortage.fmt(f),
            Self::Invalid { field, problem } => write!(f, "{field}: {problem}"),
            Self::Unknown(seq) => write!(f, "{seq} was never submitted"),
            Self::Finished(seq) => write!(f, "{seq} has ended"),
            Self::InFlight(seq) => write!(f, "{seq} is part of a step that is not settled yet"),
            Self::CannotPark(seq, why) => write!(f, "{seq} cannot be parked: {why}"),
            Self::Misused(what) => f.write_str(what),
        }
    }
}

impl std::error::Error for BooksError {}
