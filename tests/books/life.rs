//! One sequence of the naive model: all that was ever known of it, and what its next token may not be.

use _native::ids::TokenId;
use _native::ledger::{NewSequence, State};

/// Where a sequence is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Place {
    Queued,
    Slot(u32),
    Spilled,
    Dropped,
    Ended,
}

/// All that was ever known of one sequence.
#[derive(Debug, Clone)]
pub(crate) struct Life {
    pub(crate) new: NewSequence,
    pub(crate) generated: Vec<TokenId>,
    pub(crate) place: Place,
    pub(crate) committed: usize,
    /// Generated tokens at the last resume.
    pub(crate) resumed_at: Option<u64>,
    pub(crate) fronted: u64,
    /// When it last came in: the name of its stay.
    pub(crate) came_in: u64,
    /// Whether the mask of the token after those generated is there.
    pub(crate) mask_ready: bool,
}

impl Life {
    pub(crate) fn new(new: &NewSequence) -> Self {
        Self {
            new: new.clone(),
            generated: Vec::new(),
            place: Place::Queued,
            committed: 0,
            resumed_at: None,
            fronted: 0,
            came_in: 0,
            mask_ready: false,
        }
    }

    /// Prompt and generated tokens.
    pub(crate) fn tokens(&self) -> Vec<TokenId> {
        let prompt = self.new.prompt.iter().map(|&id| TokenId::try_from(id).expect("checked at submit"));
        prompt.chain(self.generated.iter().copied()).collect()
    }

    /// Positions that are fed before it decodes, once `unknown` more tokens are there: all tokens but the pending one.
    pub(crate) fn history_with(&self, unknown: usize) -> usize {
        self.new.prompt.len() + (self.generated.len() + unknown).saturating_sub(1)
    }

    pub(crate) fn history(&self) -> usize {
        self.history_with(0)
    }

    pub(crate) fn resident(&self) -> bool {
        matches!(self.place, Place::Slot(_))
    }

    pub(crate) fn decoding(&self) -> bool {
        self.resident() && !self.generated.is_empty() && self.committed == self.history()
    }

    pub(crate) fn state(&self) -> Option<State> {
        match self.place {
            Place::Queued => Some(State::Queued),
            Place::Slot(_) if self.decoding() => Some(State::Decoding),
            Place::Slot(_) => Some(State::Prefilling),
            Place::Spilled => Some(State::ParkedSpill),
            Place::Dropped => Some(State::ParkedReplay),
            Place::Ended => None,
        }
    }

    pub(crate) fn can_replay(&self) -> bool {
        self.new.replayable || self.committed == 0
    }

    /// Whether so many tokens are all that the budget or the context has room for: the last one is never fed.
    pub(crate) fn used_up_by(&self, tokens: usize, context: usize) -> bool {
        tokens as u64 >= self.new.max_new_tokens || self.new.prompt.len() + tokens > context
    }

    /// Whether it thinks, as far as is known: nobody has seen the end yet.
    pub(crate) fn may_be_thinking(&self) -> bool {
        self.new.think_tokens.is_some_and(|(_, end)| !self.generated.iter().any(|&id| i64::from(id) == end))
    }

    /// What the token after those generated and `unknown` more must not be: (id, after), no id twice.
    ///
    /// "No EOS or stop id before so many tokens"; some ids never; "once `end` was generated neither may come again",
    /// and where the last token is not known, that holds if it is `end`.
    pub(crate) fn bans(&self, unknown: usize) -> Vec<(i32, i32)> {
        let mut bans: Vec<(i64, i64)> = self.new.banned_token_ids.iter().map(|&id| (id, -1)).collect();
        if ((self.generated.len() + unknown) as u64) < self.new.min_tokens {
            bans.extend(self.new.stop_token_ids.iter().map(|&id| (id, -1)));
        }
        if let Some((start, end)) = self.new.think_tokens {
            if !self.may_be_thinking() {
                bans.extend([(start, -1), (end, -1)]);
            } else if unknown > 0 {
                bans.extend([(start, end), (end, end)]);
            }
        }
        let int = |id| i32::try_from(id).expect("checked at submit");
        let mut bans: Vec<(i32, i32)> = bans.into_iter().map(|(id, after)| (int(id), int(after))).collect();
        bans.sort_unstable(); // what is banned always comes before what is banned after some input
        bans.dedup_by_key(|&mut (id, _)| id);
        bans
    }
}
