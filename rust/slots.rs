//! Slots, lowest free first.

use std::collections::BTreeSet;

use crate::ids::SlotId;

/// Owns every slot; `T` is whoever sits in one.
#[derive(Debug, PartialEq, Eq)]
pub struct SlotPool<T> {
    free: BTreeSet<SlotId>,
    holders: Vec<Option<T>>,
}

impl<T: Copy + PartialEq> SlotPool<T> {
    /// A pool of `total` free slots.
    #[must_use]
    pub fn new(total: u32) -> Self {
        Self { free: (0..total).map(SlotId).collect(), holders: vec![None; total as usize] }
    }

    /// Gives the lowest free slot to `holder`; None, and no change, if there is none.
    pub fn take(&mut self, holder: T) -> Option<SlotId> {
        let slot = self.free.pop_first()?;
        self.holders[slot.index()] = Some(holder);
        Some(slot)
    }

    /// Frees `slot`.
    ///
    /// # Panics
    /// If it is free already.
    pub fn give_back(&mut self, slot: SlotId) {
        assert!(self.holders[slot.index()].take().is_some(), "gave back {slot:?}, which is free");
        self.free.insert(slot);
    }

    /// Lets `holder` have a taken `slot`.
    ///
    /// # Panics
    /// If it is free.
    pub fn hand_over(&mut self, slot: SlotId, holder: T) {
        let seat = &mut self.holders[slot.index()];
        assert!(seat.replace(holder).is_some(), "handed over {slot:?}, which is free");
    }

    /// Free slots.
    #[must_use]
    pub fn free(&self) -> u32 {
        u32::try_from(self.free.len()).expect("no more than there are slots")
    }

    /// Slots in all.
    #[must_use]
    pub fn total(&self) -> u32 {
        u32::try_from(self.holders.len()).expect("made from a u32")
    }

    /// Taken slots.
    #[must_use]
    pub fn taken(&self) -> u32 {
        self.total() - self.free()
    }

    /// Who has `slot`, if anybody.
    #[must_use]
    pub fn holder(&self, slot: SlotId) -> Option<T> {
        self.holders[slot.index()]
    }

    /// The holders in ascending slot order.
    pub fn holders(&self) -> impl Iterator<Item = T> + '_ {
        self.holders.iter().filter_map(|holder| *holder)
    }

    /// Verifies that every slot is either free or held by one holder, and no holder sits in two.
    ///
    /// # Panics
    /// If it does not hold.
    pub fn check(&self) {
        for (index, holder) in self.holders.iter().enumerate() {
            let slot = SlotId(u32::try_from(index).expect("made from a u32"));
            assert_eq!(holder.is_none(), self.free.contains(&slot), "{slot:?} is free and held, or neither");
            let seats = self.holders.iter().filter(|other| other.is_some() && *other == holder).count();
            assert!(seats <= 1, "the holder of {slot:?} sits in {seats} slots");
        }
        let vacant = self.holders.iter().filter(|holder| holder.is_none()).count();
        assert_eq!(self.free.len(), vacant, "a free slot is none of the pool's");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_free_slot_is_taken_first() {
        let mut slots = SlotPool::new(3);
        assert_eq!([slots.take('a'), slots.take('b'), slots.take('c')], [0, 1, 2].map(|slot| Some(SlotId(slot))));
        assert_eq!(slots.take('d'), None);
        slots.give_back(SlotId(2));
        slots.give_back(SlotId(0));
        assert_eq!(slots.take('e'), Some(SlotId(0)));
        assert_eq!(slots.holders().collect::<Vec<_>>(), ['e', 'b']);
        slots.check();
    }

    #[test]
    #[should_panic(expected = "which is free")]
    fn giving_back_a_free_slot_stops_the_program() {
        SlotPool::<u8>::new(1).give_back(SlotId(0));
    }
}
