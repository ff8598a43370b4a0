//! One sequence: its tokens, its state and what it holds.

use std::cmp::Reverse;

use crate::ids::{BlockId, SeqId, SlotId, TokenId, blocks_for};

use super::bans::Bans;

/// Where a sequence is in its life. One that has ended is no longer in the ledger.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum State {
    /// Submitted, and never resident so far.
    Queued,
    /// Resident; its prompt, or after a park its history, is not committed up to the end.
    Prefilling,
    /// Resident; the next step feeds its pending token.
    Decoding,
    /// Off the device, with an image of its committed positions on the host.
    ParkedSpill,
    /// Off the device; its history will be computed again.
    ParkedReplay,
}

impl State {
    /// Holding a slot and blocks.
    #[must_use]
    pub fn is_resident(self) -> bool {
        matches!(self, Self::Prefilling | Self::Decoding)
    }

    /// Off the device after having been on it.
    #[must_use]
    pub fn is_parked(self) -> bool {
        matches!(self, Self::ParkedSpill | Self::ParkedReplay)
    }
}

/// The row that a sequence has next, once all that is in flight is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Next {
    /// So many positions of its prompt or history are to be computed.
    Chunk(u32),
    /// Its newest token is to be fed.
    Decode,
    /// None: the tokens in flight use up its budget or the context.
    Over,
}

/// What is submitted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NewSequence {
    /// Token ids; at least one.
    pub prompt: Vec<i64>,
    /// Most tokens to generate; never reserved in advance.
    pub max_new_tokens: u64,
    /// Higher is more urgent.
    pub priority: i32,
    /// Token ids that end it.
    pub stop_token_ids: Vec<i64>,
    /// Whether the token ids alone rebuild its KV.
    pub replayable: bool,
    /// Whether its next token is bound by a mask.
    pub constrained: bool,
    /// Tokens that it generates before a stop id may come.
    pub min_tokens: u64,
    /// Token ids that it never generates.
    pub banned_token_ids: Vec<i64>,
    /// The ids at which thinking begins and ends: once it has ended, neither comes again.
    pub think_tokens: Option<(i64, i64)>,
}

/// A live sequence.
#[derive(Debug, PartialEq, Eq)]
pub struct Sequence {
    pub(super) id: SeqId,
    pub(super) state: State,
    /// Prompt and generated tokens; the last generated one is pending.
    pub(super) tokens: Vec<TokenId>,
    pub(super) prompt_length: u32,
    pub(super) max_new_tokens: u64,
    pub(super) stop_token_ids: Vec<TokenId>,
    pub(super) priority: i32,
    pub(super) replayable: bool,
    pub(super) constrained: bool,
    /// Whether the host has the mask of its next token.
    pub(super) mask_ready: bool,
    pub(super) bans: Bans,
    /// Immune while it has generated fewer tokens than this.
    pub(super) immune_until: u64,
    /// Larger stands further to the front of its priority; 0 unless it was resumed by hand.
    pub(super) front: u64,
    /// When it last came in: the number of its residency.
    pub(super) came_in: u64,
    pub(super) slot: Option<SlotId>,
    /// Its blocks in order.
    pub(super) table: Vec<BlockId>,
    /// How many entries of `table` the device has been told.
    pub(super) table_sent: usize,
    /// Positions whose KV is there (in the pool, or in the image).
    pub(super) committed: u32,
    /// Positions that are committed or that steps in flight fill.
    pub(super) reserved: u32,
    /// Tokens that steps in flight will give.
    pub(super) ahead: u32,
    /// Steps in flight that name it in this residency.
    pub(super) in_flight: u32,
}

impl Sequence {
    /// Its number.
    #[must_use]
    pub fn id(&self) -> SeqId {
        self.id
    }

    /// Where it is in its life.
    #[must_use]
    pub fn state(&self) -> State {
        self.state
    }

    /// Prompt and generated tokens, the pending one included.
    #[must_use]
    pub fn tokens(&self) -> &[TokenId] {
        &self.tokens
    }

    /// Tokens it has generated.
    #[must_use]
    pub fn generated(&self) -> u64 {
        (self.tokens.len() - self.prompt_length as usize) as u64
    }

    /// The last token sampled: input of the next step, in no cache yet.
    #[must_use]
    pub fn pending(&self) -> Option<TokenId> {
        if self.generated() == 0 { None } else { self.tokens.last().copied() }
    }

    /// Positions whose KV is committed.
    #[must_use]
    pub fn committed(&self) -> u32 {
        self.committed
    }

    /// Positions that are committed or that steps in flight fill.
    #[must_use]
    pub fn reserved(&self) -> u32 {
        self.reserved
    }

    /// Its slot while resident.
    #[must_use]
    pub fn slot(&self) -> Option<SlotId> {
        self.slot
    }

    /// Its blocks in order.
    #[must_use]
    pub fn table(&self) -> &[BlockId] {
        &self.table
    }

    /// Higher is more urgent.
    #[must_use]
    pub fn priority(&self) -> i32 {
        self.priority
    }

    /// Passed over as a victim while others will do.
    #[must_use]
    pub fn is_immune(&self) -> bool {
        self.generated() < self.immune_until
    }

    /// Positions that must be committed before it decodes: the prompt, or the history without the pending token.
    #[must_use]
    pub fn target(&self) -> u32 {
        let pending = usize::from(self.generated() > 0);
        u32::try_from(self.tokens.len() - pending).expect("submit and commit bound it by the context")
    }

    /// Steps in flight that name it where it is now.
    #[must_use]
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Tokens that steps in flight will give.
    #[must_use]
    pub fn ahead(&self) -> u32 {
        self.ahead
    }

    /// Tokens it will have generated when all that is in flight is done.
    pub(super) fn generated_ahead(&self) -> u64 {
        self.generated() + u64::from(self.ahead)
    }

    /// Whether a step in flight gives its last token for certain: its budget, or the context, is used up then.
    #[must_use]
    pub fn ends_in_flight(&self, context_length: u32) -> bool {
        let length = self.tokens.len() as u64 + u64::from(self.ahead);
        self.ahead > 0 && (self.generated_ahead() >= self.max_new_tokens || length > u64::from(context_length))
    }

    /// Which row it has next, once all that is in flight is done.
    pub(crate) fn next(&self, context_length: u32) -> Next {
        if self.reserved < self.target() {
            Next::Chunk(self.target() - self.reserved)
        } else if self.ends_in_flight(context_length) {
            Next::Over
        } else {
            Next::Decode
        }
    }

    /// Whether a row that samples its next token has to wait until the host knows more.
    #[must_use]
    pub fn waits_for_host(&self) -> bool {
        let for_mask = self.constrained && (self.ahead > 0 || !self.mask_ready);
        // A ban can look at one token that the host does not know, the row's own input; not at the one before it.
        for_mask || (self.ahead > 1 && self.bans.may_change())
    }

    /// Blocks by which its next decode row grows: 0 or 1.
    #[must_use]
    pub fn growth(&self, block_size: u32, context_length: u32) -> u32 {
        let full = u64::from(self.reserved) == self.table.len() as u64 * u64::from(block_size);
        u32::from(self.slot.is_some() && full && self.next(context_length) == Next::Decode)
    }

    /// Blocks by which its first row after the prefill or replay grows, known once there is a pending token; 0 before.
    #[must_use]
    pub fn coming_growth(&self, block_size: u32, context_length: u32) -> u32 {
        if self.slot.is_some() && self.reserved >= self.target() {
            return self.growth(block_size, context_length);
        }
        u32::from(self.generated() > 0 && self.target().is_multiple_of(block_size))
    }

    /// Blocks of an image of its committed positions.
    #[must_use]
    pub fn image_blocks(&self, block_size: u32) -> u32 {
        blocks_for(self.committed, block_size)
    }

    /// Whether dropping its KV loses nothing that its tokens cannot rebuild.
    #[must_use]
    pub fn can_replay(&self) -> bool {
        self.replayable || self.committed == 0
    }

    /// Whether an image of it exists and takes at most `spill_blocks`.
    #[must_use]
    pub fn can_spill(&self, block_size: u32, spill_blocks: u32) -> bool {
        self.committed > 0 && self.image_blocks(block_size) <= spill_blocks
    }

    pub(super) fn waiting_key(&self) -> WaitingKey {
        WaitingKey {
            priority: Reverse(self.priority),
            front: Reverse(self.front),
            new: !self.state.is_parked(),
            id: self.id,
        }
    }
}

/// The one waiting order: priority, moved to the front by hand, parked before new, submission number.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct WaitingKey {
    priority: Reverse<i32>,
    front: Reverse<u64>,
    new: bool,
    pub(super) id: SeqId,
}
