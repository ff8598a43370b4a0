//! A device that stores, in each KV position, whose token it is: it shows at once if the books mix anything up.

use std::collections::BTreeMap;

use _native::ids::{BlockId, SeqId, TokenId};
use _native::ledger::{Ledger, StepArrays};

/// Sequence, position in it, token.
type Cell = Option<(u64, usize, TokenId)>;

/// Block tables per slot, the pool, and the spilled images.
#[derive(Debug)]
pub(crate) struct Device {
    block_size: usize,
    tables: Vec<Vec<i32>>,
    /// How many entries of the slot's table the present occupant was told of.
    told: Vec<usize>,
    told_before: Vec<usize>,
    pool: Vec<Cell>,
    launched: Vec<usize>,
    images: BTreeMap<SeqId, Vec<Cell>>,
}

fn index(number: i32) -> usize {
    usize::try_from(number).expect("not negative")
}

impl Device {
    pub(crate) fn new(ledger: &Ledger) -> Self {
        let settings = ledger.settings();
        let slots = settings.num_slots as usize;
        Self {
            block_size: settings.block_size as usize,
            tables: vec![Vec::new(); slots],
            told: vec![0; slots],
            told_before: vec![0; slots],
            pool: vec![None; settings.num_blocks as usize * settings.block_size as usize],
            launched: Vec::new(),
            images: BTreeMap::new(),
        }
    }

    /// Somebody new sits in the slot.
    pub(crate) fn seat(&mut self, slot: usize) {
        self.told[slot] = 0;
    }

    fn cells(&self, blocks: &[BlockId]) -> Vec<usize> {
        let cells_of = |block: &BlockId| {
            let first = block.index() * self.block_size;
            first..first + self.block_size
        };
        blocks.iter().flat_map(cells_of).collect()
    }

    pub(crate) fn gather(&mut self, seq: SeqId, blocks: &[BlockId]) {
        let image = self.cells(blocks).into_iter().map(|cell| self.pool[cell]).collect();
        self.images.insert(seq, image);
    }

    pub(crate) fn scatter(&mut self, seq: SeqId, blocks: &[BlockId]) {
        let image = self.images.remove(&seq).expect("a spilled sequence has an image");
        let cells = self.cells(blocks);
        assert_eq!(cells.len(), image.len(), "an image is written into as many blocks as it came from");
        for (cell, kept) in cells.into_iter().zip(image) {
            self.pool[cell] = kept;
        }
    }

    pub(crate) fn drop_image(&mut self, seq: SeqId) {
        self.images.remove(&seq);
    }

    /// Applies the table changes, each an append; writes every new position; reads every position back.
    pub(crate) fn launch(&mut self, arrays: &StepArrays, ledger: &Ledger) {
        self.told_before.clone_from(&self.told);
        for &[slot, entry, block] in &arrays.table_changes {
            let (slot, entry) = (index(slot), index(entry));
            assert_eq!(entry, self.told[slot], "an entry of slot {slot} is not appended");
            self.tables[slot].truncate(entry);
            self.tables[slot].push(block);
            self.told[slot] += 1;
        }
        self.launched.clear();
        let mut token = 0;
        for row in 0..arrays.slots.len() {
            let (slot, start, num_new) =
                (index(arrays.slots[row]), index(arrays.starts[row]), index(arrays.num_new[row]));
            assert_eq!(index(arrays.kv_lengths[row]), start + num_new);
            assert!(row == 0 || arrays.slots[row - 1] < arrays.slots[row], "rows stand in slot order");
            let sequence = ledger.get(SeqId(arrays.seqs[row])).expect("a row's sequence is live");
            for position in start..start + num_new {
                assert_eq!(index(arrays.positions[token]), position);
                let fed = TokenId::try_from(arrays.token_ids[token]).expect("an id");
                let cell = self.cell(slot, position);
                self.pool[cell] = Some((arrays.seqs[row], position, fed));
                self.launched.push(cell);
                token += 1;
            }
            for (position, &expected) in sequence.tokens()[..start + num_new].iter().enumerate() {
                let read = self.pool[self.cell(slot, position)];
                assert_eq!(read, Some((arrays.seqs[row], position, expected)), "what row {row} reads");
            }
            let told: Vec<i32> = sequence.table().iter().map(|block| block.0.cast_signed()).collect();
            // Entries past those are what a step that was handed back had appended.
            let read = &self.tables[slot][..self.told[slot]];
            assert_eq!(read, told, "the table of slot {slot} is the one in the books");
        }
        assert_eq!((token, token), (arrays.token_ids.len(), arrays.positions.len()));
    }

    fn cell(&self, slot: usize, position: usize) -> usize {
        index(self.tables[slot][position / self.block_size]) * self.block_size + position % self.block_size
    }

    /// The step failed: what it wrote is worth nothing.
    pub(crate) fn hand_back(&mut self) {
        self.told.clone_from(&self.told_before);
        for cell in self.launched.drain(..) {
            self.pool[cell] = None;
        }
    }

    pub(crate) fn settle(&mut self) {
        self.launched.clear();
    }

    /// Every committed position, resident or spilled, holds that sequence's token.
    pub(crate) fn check(&self, ledger: &Ledger) {
        let mut spilled = 0;
        for sequence in ledger.residents().chain(ledger.waiting()) {
            let kept: Vec<Cell> = if sequence.state().is_resident() {
                self.cells(sequence.table()).into_iter().map(|cell| self.pool[cell]).collect()
            } else if sequence.committed() > 0 {
                spilled += 1;
                self.images[&sequence.id()].clone()
            } else {
                continue;
            };
            for (position, &token) in sequence.tokens()[..sequence.committed() as usize].iter().enumerate() {
                assert_eq!(kept[position], Some((sequence.id().0, position, token)), "position of {}", sequence.id());
            }
        }
        assert_eq!(spilled, self.images.len(), "an image is left over");
    }
}
