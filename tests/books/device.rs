//! A device that computes a step only when it is settled, and stores, in each KV position, whose token it is: it shows
//! at once if the books mix anything up, or give anything away that a step in flight needs.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use _native::ids::{BlockId, SeqId, TokenId};
use _native::ledger::{Ledger, StepArrays};

/// Sequence, position in it, token.
type Cell = Option<(u64, usize, TokenId)>;

/// A row that was launched: its pool cells from position 0 on, as the block table was then.
#[derive(Debug)]
struct Row {
    seq: u64,
    slot: usize,
    start: usize,
    cells: Vec<usize>,
    /// A token of each new position; None for the one in the feed cell.
    inputs: Vec<Option<TokenId>>,
    reads: bool,
}

#[derive(Debug)]
struct Flight {
    rows: Vec<Row>,
    told_before: Vec<usize>,
}

/// Block tables and feed cells per slot, the pool, the steps in flight, and the spilled images.
#[derive(Debug)]
pub(crate) struct Device {
    block_size: usize,
    tables: Vec<Vec<i32>>,
    /// How many entries of the slot's table the present occupant was told of.
    told: Vec<usize>,
    /// The token that was read back last in each slot; None where there was none.
    feeds: Vec<Option<TokenId>>,
    pool: Vec<Cell>,
    flights: VecDeque<Flight>,
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
            feeds: vec![None; slots],
            pool: vec![None; settings.num_blocks as usize * settings.block_size as usize],
            flights: VecDeque::new(),
            images: BTreeMap::new(),
        }
    }

    /// Somebody new sits in the slot, on these blocks. No step in flight may need any of them.
    pub(crate) fn seat(&mut self, slot: usize, blocks: &[BlockId]) {
        let cells: BTreeSet<usize> = self.cells(blocks).into_iter().collect();
        for row in self.flights.iter().flat_map(|flight| &flight.rows) {
            assert_ne!(row.slot, slot, "slot {slot} is given away while a step in flight needs it");
            let given_away = row.cells.iter().any(|cell| cells.contains(cell));
            assert!(!given_away, "blocks are given away while a step in flight needs them");
        }
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

    /// Takes a step: its table changes, each an append, and which cells it will read and write. A block that another
    /// sequence's step in flight needs is none of them.
    pub(crate) fn launch(&mut self, arrays: &StepArrays, ledger: &Ledger) {
        let told_before = self.told.clone();
        for &[slot, entry, block] in &arrays.table_changes {
            let (slot, entry) = (index(slot), index(entry));
            assert_eq!(entry, self.told[slot], "an entry of slot {slot} is not appended");
            self.tables[slot].truncate(entry);
            self.tables[slot].push(block);
            self.told[slot] += 1;
        }
        let (mut rows, mut token) = (Vec::new(), 0);
        for row in 0..arrays.slots.len() {
            let (slot, start, num_new) =
                (index(arrays.slots[row]), index(arrays.starts[row]), index(arrays.num_new[row]));
            assert_eq!(index(arrays.kv_lengths[row]), start + num_new);
            assert!(row == 0 || arrays.slots[row - 1] < arrays.slots[row], "rows stand in slot order");
            let positions: Vec<usize> =
                arrays.positions[token..token + num_new].iter().map(|&position| index(position)).collect();
            assert_eq!(positions, (start..start + num_new).collect::<Vec<_>>());
            let fed = &arrays.token_ids[token..token + num_new];
            assert!(num_new == 1 || fed.iter().all(|&id| id >= 0), "only a row of one token is fed");
            let inputs =
                fed.iter().map(|&id| if id == -1 { None } else { Some(TokenId::try_from(id).expect("an id")) });
            let sequence = ledger.get(SeqId(arrays.seqs[row])).expect("a row's sequence is live");
            let table: Vec<i32> = sequence.table().iter().map(|block| block.0.cast_signed()).collect();
            // Entries past those are what a step that was handed back had appended.
            assert_eq!(self.tables[slot][..self.told[slot]], table, "the table of slot {slot} is the one in the books");
            rows.push(Row {
                seq: arrays.seqs[row],
                slot,
                start,
                cells: (0..start + num_new).map(|position| self.cell(slot, position)).collect(),
                inputs: inputs.collect(),
                reads: arrays.readback[row] == 1,
            });
            token += num_new;
        }
        assert_eq!((token, token), (arrays.token_ids.len(), arrays.positions.len()));
        for other in self.flights.iter().flat_map(|flight| &flight.rows) {
            let shares = |row: &Row| row.cells.iter().any(|cell| other.cells.contains(cell));
            assert!(rows.iter().all(|row| row.seq == other.seq || !shares(row)), "a step needs blocks of another's");
        }
        self.flights.push_back(Flight { rows, told_before });
    }

    fn cell(&self, slot: usize, position: usize) -> usize {
        index(self.tables[slot][position / self.block_size]) * self.block_size + position % self.block_size
    }

    /// The newest step was not launched, or failed: what it may have written is worth nothing.
    pub(crate) fn hand_back(&mut self) {
        let flight = self.flights.pop_back().expect("a step is in flight");
        for row in flight.rows {
            self.told[row.slot] = flight.told_before[row.slot];
            for cell in &row.cells[row.start..] {
                self.pool[*cell] = None;
            }
        }
    }

    /// Computes the oldest step, whose rows come to `tokens`: writes every new position, reads every position back.
    pub(crate) fn settle(&mut self, tokens: &[i32]) {
        let flight = self.flights.pop_front().expect("a step is in flight");
        for (row, &token) in flight.rows.iter().zip(tokens) {
            for (offset, input) in row.inputs.iter().enumerate() {
                // A feed cell without a token is fed to an over-run only; it is computed with any.
                let fed = input.or(self.feeds[row.slot]).unwrap_or_default();
                self.pool[row.cells[row.start + offset]] = Some((row.seq, row.start + offset, fed));
            }
            for (position, &cell) in row.cells.iter().enumerate() {
                let whose = self.pool[cell].map(|(seq, position, _)| (seq, position));
                assert_eq!(whose, Some((row.seq, position)), "what a row reads");
            }
            if row.reads {
                self.feeds[row.slot] = TokenId::try_from(token).ok();
            }
        }
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
