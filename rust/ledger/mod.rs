//! Who holds what, and each sequence's state: the only mutable state of the books, changed wholly or not at all.

mod bans;
mod check;
mod sequence;
mod settings;
mod step;
mod transitions;

use std::collections::{BTreeSet, HashMap};

use crate::blocks::BlockPool;
use crate::error::{BooksError, Problem};
use crate::ids::{BlockId, SeqId, SlotId};
use crate::slots::SlotPool;
use crate::victim::Candidate;

pub use self::bans::{ALWAYS, MOST_BANS};
pub(crate) use self::sequence::Next;
use self::sequence::WaitingKey;
pub use self::sequence::{NewSequence, Sequence, State};
pub use self::settings::Settings;
pub(crate) use self::step::Plan;
use self::step::StepBook;
pub use self::step::{Counts, FROM_FEED, Outcome, Readback, Row, StepArrays};
pub use self::transitions::{Arrival, ParkBy, Reuse};

/// Place of a sequence in the ledger's store; stable while it lives.
pub(crate) type Key = usize;

/// Who has a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Holder {
    Sequence(Key),
    /// The residency of this number, which is over.
    Remains(u64),
}

/// Slot and blocks of a residency that ended while steps in flight named them: fenced, free for others after the last.
#[derive(Debug, PartialEq, Eq)]
struct Remains {
    came_in: u64,
    slot: SlotId,
    table: Vec<BlockId>,
    in_flight: u32,
}

/// Book of every sequence's state, slot and KV blocks.
#[derive(Debug, PartialEq, Eq)]
pub struct Ledger {
    settings: Settings,
    blocks: BlockPool,
    slots: SlotPool<Holder>,
    remains: Vec<Remains>,
    sequences: Vec<Option<Sequence>>,
    vacant: Vec<Key>,
    keys: HashMap<SeqId, Key>,
    waiting: BTreeSet<WaitingKey>,
    next_id: u64,
    /// Counts arrivals, so that a policy knows who came in last.
    arrivals: u64,
    /// Counts resumes by hand, so that the last one stands in front.
    fronts: u64,
    step: StepBook,
}

impl Ledger {
    /// Empty books.
    ///
    /// # Errors
    /// [`BooksError::Invalid`] that names a setting out of its bounds.
    pub fn new(settings: Settings) -> Result<Self, BooksError> {
        settings.validate()?;
        let no_memory = |_| BooksError::invalid("num_blocks", Problem::NoMemory { given: settings.num_blocks });
        Ok(Self {
            blocks: BlockPool::try_new(settings.num_blocks).map_err(no_memory)?,
            slots: SlotPool::new(settings.num_slots),
            remains: Vec::new(),
            sequences: Vec::new(),
            vacant: Vec::new(),
            keys: HashMap::new(),
            waiting: BTreeSet::new(),
            next_id: 0,
            arrivals: 0,
            fronts: 0,
            step: StepBook::default(),
            settings,
        })
    }

    /// What it was told once.
    #[must_use]
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The block pool.
    #[must_use]
    pub fn blocks(&self) -> &BlockPool {
        &self.blocks
    }

    /// Free slots.
    #[must_use]
    pub fn free_slots(&self) -> u32 {
        self.slots.free()
    }

    /// Resident sequences.
    #[must_use]
    pub fn num_residents(&self) -> u32 {
        self.slots.taken() - u32::try_from(self.remains.len()).expect("at most one a slot")
    }

    /// Blocks of sequences that have left, which steps in flight still need.
    #[must_use]
    pub fn fenced_blocks(&self) -> u32 {
        u32::try_from(self.remains.iter().map(|one| one.table.len()).sum::<usize>()).expect("within the pool")
    }

    /// Slots of sequences that have left, which steps in flight still need.
    #[must_use]
    pub fn fenced_slots(&self) -> u32 {
        u32::try_from(self.remains.len()).expect("at most one a slot")
    }

    /// Whether a settled step is sure to give something back: a sequence's last token is in flight, or it has left.
    #[must_use]
    pub fn settling_frees(&self) -> bool {
        let context_length = self.settings.context_length;
        !self.remains.is_empty() || self.residents().any(|sequence| sequence.ends_in_flight(context_length))
    }

    /// The resident sequences in ascending slot order.
    pub fn residents(&self) -> impl Iterator<Item = &Sequence> {
        self.resident_keys().map(|(_, sequence)| sequence)
    }

    pub(crate) fn resident_keys(&self) -> impl Iterator<Item = (Key, &Sequence)> {
        self.slots.holders().filter_map(|holder| match holder {
            Holder::Sequence(key) => Some((key, self.at(key))),
            Holder::Remains(_) => None,
        })
    }

    /// The queued and parked sequences in waiting order.
    pub fn waiting(&self) -> impl Iterator<Item = &Sequence> {
        self.waiting.iter().map(|key| self.get(key.id).expect("who waits is live"))
    }

    /// Live sequences.
    #[must_use]
    pub fn num_live(&self) -> usize {
        self.keys.len()
    }

    /// A live sequence.
    ///
    /// # Errors
    /// [`BooksError::Finished`] if it has ended, [`BooksError::Unknown`] if there never was one.
    pub fn get(&self, seq: SeqId) -> Result<&Sequence, BooksError> {
        self.key(seq).map(|key| self.at(key))
    }

    /// The blocks that hold the sequence's committed positions, in order: what a spill copies.
    ///
    /// # Errors
    /// As [`Ledger::get`].
    pub fn image_blocks(&self, seq: SeqId) -> Result<&[BlockId], BooksError> {
        let sequence = self.get(seq)?;
        let count = sequence.image_blocks(self.settings.block_size) as usize;
        Ok(sequence.table.get(..count).unwrap_or_default())
    }

    /// Who of the residents could give way now, in slot order: with an image of at most `spill_blocks`, or by replay.
    pub fn candidates(&self, spill_blocks: u32) -> impl Iterator<Item = Candidate> {
        let block_size = self.settings.block_size;
        self.residents()
            .filter(move |sequence| sequence.can_replay() || sequence.can_spill(block_size, spill_blocks))
            .filter(|sequence| !sequence.constrained || self.settings.park_constrained)
            .map(Self::candidate)
            .filter(|candidate| candidate.frees > 0)
    }

    /// All residents as a policy sees them, whether or not they can be parked.
    pub fn resident_candidates(&self) -> impl Iterator<Item = Candidate> {
        self.residents().map(Self::candidate)
    }

    fn candidate(sequence: &Sequence) -> Candidate {
        Candidate {
            seq: sequence.id,
            slot: sequence.slot.expect("a resident has a slot"),
            priority: sequence.priority,
            generated: sequence.generated(),
            // No block is shared yet; with prefix reuse this becomes a count kept beside the table.
            frees: u32::try_from(sequence.table.len()).expect("no more blocks than the pool has"),
            came_in: sequence.came_in,
            immune: sequence.is_immune(),
            constrained: sequence.constrained,
            in_flight: sequence.in_flight > 0,
        }
    }

    fn key(&self, seq: SeqId) -> Result<Key, BooksError> {
        match self.keys.get(&seq) {
            Some(&key) => Ok(key),
            None if seq.0 < self.next_id => Err(BooksError::Finished(seq)),
            None => Err(BooksError::Unknown(seq)),
        }
    }

    fn at(&self, key: Key) -> &Sequence {
        self.sequences[key].as_ref().expect("a key is given out for a live sequence only")
    }

    fn at_mut(&mut self, key: Key) -> &mut Sequence {
        self.sequences[key].as_mut().expect("a key is given out for a live sequence only")
    }
}
