//! The books once more, as plainly as their rules can be said: nothing is kept that can be counted again.

use std::collections::VecDeque;

use _native::error::BooksError;
use _native::ids::SeqId;
use _native::ledger::Settings;

pub(crate) use crate::life::{Life, Place};

/// One row of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    pub(crate) seq: usize,
    /// When its sequence came in: a row belongs to that stay, and to no later one.
    pub(crate) stay: u64,
    pub(crate) slot: u32,
    pub(crate) start: usize,
    pub(crate) num_new: usize,
    pub(crate) samples: bool,
    /// Tokens of its sequence that nobody knows yet, the row's input the last of them: 0 for a row of known tokens.
    pub(crate) unknown: usize,
}

/// How far the next step is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Step {
    Open,
    Picked(Vec<Share>),
    Reserved(Vec<Share>),
}

/// What a sequence held when it left.
#[derive(Debug, Clone)]
pub(crate) struct Left {
    pub(crate) stay: u64,
    pub(crate) slot: u32,
    pub(crate) blocks: usize,
}

/// Every sequence by its number, ended ones too, and the steps.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) settings: Settings,
    pub(crate) lives: Vec<Life>,
    pub(crate) step: Step,
    /// Steps in flight, the oldest first.
    pub(crate) flights: VecDeque<Vec<Share>>,
    /// Everybody who ever left.
    pub(crate) left: Vec<Left>,
    /// Who was passed over by the last pick.
    pub(crate) sat_out: Vec<usize>,
    /// Counts everything that happens, so that "last" has a meaning.
    pub(crate) clock: u64,
}

pub(crate) const MISUSED: BooksError = BooksError::Misused("");

pub(crate) fn number(count: usize) -> u32 {
    u32::try_from(count).expect("a tiny universe")
}

pub(crate) fn seq_id(seq: usize) -> SeqId {
    SeqId(seq as u64)
}

impl Model {
    pub(crate) fn new(settings: Settings) -> Self {
        Self {
            settings,
            lives: Vec::new(),
            step: Step::Open,
            flights: VecDeque::new(),
            left: Vec::new(),
            sat_out: Vec::new(),
            clock: 0,
        }
    }

    pub(crate) fn blocks(&self, positions: usize) -> usize {
        let size = self.settings.block_size as usize;
        positions / size + usize::from(!positions.is_multiple_of(size))
    }

    /// Rows that are reserved or in flight, oldest first.
    fn taken_rows(&self) -> impl Iterator<Item = &Share> {
        let reserved: &[Share] = if let Step::Reserved(rows) = &self.step { rows } else { &[] };
        self.flights.iter().flatten().chain(reserved)
    }

    /// Whether the row's sequence is still on the stay in which the row was picked; otherwise it is an over-run.
    pub(crate) fn is_live(&self, row: &Share) -> bool {
        self.lives[row.seq].resident() && self.lives[row.seq].came_in == row.stay
    }

    fn rows_of(&self, seq: usize) -> impl Iterator<Item = &Share> {
        self.taken_rows().filter(move |row| row.seq == seq && self.is_live(row))
    }

    pub(crate) fn in_flight(&self, seq: usize) -> bool {
        self.rows_of(seq).next().is_some()
    }

    /// Positions that are committed or that steps in flight fill.
    pub(crate) fn reserved(&self, seq: usize) -> usize {
        self.rows_of(seq).last().map_or(self.lives[seq].committed, |row| row.start + row.num_new)
    }

    /// Tokens that steps in flight will sample.
    pub(crate) fn ahead(&self, seq: usize) -> usize {
        self.rows_of(seq).filter(|row| row.samples).count()
    }

    /// "A row in flight surely finishes its sequence": what is in flight uses up its budget or context.
    pub(crate) fn surely_finishes(&self, seq: usize) -> bool {
        let (life, ahead) = (&self.lives[seq], self.ahead(seq));
        ahead > 0 && life.used_up_by(life.generated.len() + ahead, self.settings.context_length as usize)
    }

    /// Blocks it holds: all of its prompt or history from the start, then one more for each edge it steps over.
    pub(crate) fn held(&self, seq: usize) -> usize {
        let life = &self.lives[seq];
        if life.resident() { self.blocks(self.reserved(seq).max(life.history())) } else { 0 }
    }

    /// "Its slot and blocks become fenced remains, given back when the last step that names them is committed or
    /// handed back."
    pub(crate) fn remains(&self) -> Vec<&Left> {
        let named = |left: &&Left| self.taken_rows().any(|row| row.stay == left.stay);
        self.left.iter().filter(named).collect()
    }

    pub(crate) fn fenced_blocks(&self) -> usize {
        self.remains().iter().map(|left| left.blocks).sum()
    }

    pub(crate) fn free_blocks(&self) -> usize {
        let held: usize = (0..self.lives.len()).map(|seq| self.held(seq)).sum();
        self.settings.num_blocks as usize - held - self.fenced_blocks()
    }

    /// In slot order.
    pub(crate) fn residents(&self) -> Vec<usize> {
        let mut seated: Vec<(u32, usize)> = Vec::new();
        for (seq, life) in self.lives.iter().enumerate() {
            if let Place::Slot(slot) = life.place {
                seated.push((slot, seq));
            }
        }
        seated.sort_unstable();
        seated.into_iter().map(|(_, seq)| seq).collect()
    }

    pub(crate) fn free_slots(&self) -> usize {
        self.settings.num_slots as usize - self.residents().len() - self.remains().len()
    }

    /// Priority, moved to the front by hand, parked before new, submission number.
    pub(crate) fn waiting(&self) -> Vec<usize> {
        let waits = |&seq: &usize| !matches!(self.lives[seq].place, Place::Slot(_) | Place::Ended);
        let mut waiting: Vec<usize> = (0..self.lives.len()).filter(waits).collect();
        waiting.sort_by(|&a, &b| {
            let (left, right) = (&self.lives[a], &self.lives[b]);
            let new = |life: &Life| life.place == Place::Queued;
            (right.new.priority.cmp(&left.new.priority))
                .then(right.fronted.cmp(&left.fronted))
                .then(new(left).cmp(&new(right)))
                .then(a.cmp(&b))
        });
        waiting
    }

    pub(crate) fn immune(&self, seq: usize) -> bool {
        let life = &self.lives[seq];
        let since = |at: u64| life.generated.len() as u64 - at;
        life.resumed_at.is_some_and(|at| since(at) < self.settings.immunity_tokens)
    }
}
