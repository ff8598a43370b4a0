//! The few token ids that a sequence may not generate, always or for a while.

use crate::ids::TokenId;

/// Most ids that may be banned of one sequence at once: they are a few, more are a mask.
pub const MOST_BANS: u32 = 16;

/// What is banned whatever the row's input is.
pub const ALWAYS: i32 = -1;

/// The token ids at which thinking begins and ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Think {
    pub(super) start: TokenId,
    pub(super) end: TokenId,
    /// Whether `end` was generated.
    pub(super) is_over: bool,
}

/// What a sequence may not generate.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Bans {
    /// No stop id comes before so many tokens.
    pub(super) min_tokens: u64,
    pub(super) always: Vec<TokenId>,
    pub(super) think: Option<Think>,
}

impl Bans {
    /// Whether the next token may change what is banned after it.
    pub(super) fn may_change(&self) -> bool {
        self.think.is_some_and(|think| !think.is_over)
    }

    /// Takes note of a generated token.
    pub(super) fn saw(&mut self, id: TokenId) {
        if let Some(think) = &mut self.think {
            think.is_over |= id == think.end;
        }
    }

    /// Most ids that are banned at once, of a sequence with these stop ids.
    pub(super) fn most(&self, stops: &[TokenId]) -> u64 {
        let mut count = 0;
        self.each(stops, 0, true, |_, _| count += 1);
        count
    }

    /// Calls `ban` with each id that must not be the token of this `number` (counted from 0), once, and with the input
    /// after which it is banned, or [`ALWAYS`]. `is_fed` says that the host does not know the row's input. None of the
    /// lists has an id twice.
    pub(super) fn each(&self, stops: &[TokenId], number: u64, is_fed: bool, mut ban: impl FnMut(TokenId, i32)) {
        let early = if number < self.min_tokens { stops } else { &[] };
        self.always.iter().for_each(|&id| ban(id, ALWAYS));
        early.iter().filter(|id| !self.always.contains(id)).for_each(|&id| ban(id, ALWAYS));
        if let Some(think) = self.think
            && (think.is_over || is_fed)
        {
            let end = i32::try_from(think.end).expect("the vocabulary is bounded by i32::MAX");
            let after = if think.is_over { ALWAYS } else { end };
            let is_new = |id: &TokenId| !self.always.contains(id) && !early.contains(id);
            let both = [think.start, think.end];
            let distinct = if think.start == think.end { &both[..1] } else { &both };
            distinct.iter().copied().filter(is_new).for_each(|id| ban(id, after));
        }
    }
}
