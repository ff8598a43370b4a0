//! Who gives way and who comes in, as sentences say it (quoted at each function), for the model to compare with.

use _native::ids::SeqId;
use _native::ledger::ParkBy;
use _native::schedule::ArrivalPlan;
use _native::victim::{Candidate, Policy, Victim};
use proptest::prelude::*;

use crate::model::{Left, Life, Model, Place, number};
use crate::setup::cases;

/// "Only candidates of the lowest priority present; of these the first tier that is not empty: neither immune nor
/// constrained; immune; constrained; both; in it" what the policy says, "ties to the lower slot".
pub(crate) fn gives_way(policy: Policy, candidates: &[Candidate]) -> Option<SeqId> {
    let lowest = candidates.iter().map(|candidate| candidate.priority).min()?;
    for (immune, constrained) in [(false, false), (true, false), (false, true), (true, true)] {
        let mut tier: Vec<&Candidate> = candidates.iter().collect();
        tier.retain(|candidate| candidate.priority == lowest);
        tier.retain(|candidate| (candidate.immune, candidate.constrained) == (immune, constrained));
        tier.sort_by_key(|candidate| candidate.slot);
        let mut chosen = None;
        for candidate in tier {
            let before = |best: &Candidate| match policy {
                Policy::FewestGenerated => candidate.generated < best.generated,
                Policy::Newest => candidate.came_in > best.came_in,
                Policy::Largest => candidate.frees > best.frees,
            };
            if chosen.is_none_or(before) {
                chosen = Some(candidate);
            }
        }
        if let Some(candidate) = chosen {
            return Some(candidate.seq);
        }
    }
    None
}

/// "Tiers are formed with the fenced included: within its tier an unfenced one is taken; if all of it are fenced, settle
/// and choose again; a fence never sends the choice to a later tier."
pub(crate) fn gives_way_unfenced(policy: Policy, candidates: &[Candidate]) -> Victim {
    let Some(first) = gives_way(policy, candidates) else { return Victim::Nobody };
    let tier = |one: &Candidate| (one.priority, one.immune, one.constrained);
    let first = candidates.iter().find(|candidate| candidate.seq == first).expect("one of them");
    let mut unfenced = candidates.to_vec();
    unfenced.retain(|candidate| tier(candidate) == tier(first) && !candidate.in_flight);
    gives_way(policy, &unfenced).map_or(Victim::Settle, Victim::Gives)
}

/// Everybody in the order of giving way: the choice, then the choice of the others, and so on.
pub(crate) fn order(policy: Policy, mut candidates: Vec<Candidate>) -> Vec<Candidate> {
    let mut sorted = Vec::new();
    while let Some(seq) = gives_way(policy, &candidates) {
        let place = candidates.iter().position(|candidate| candidate.seq == seq).expect("one of them");
        sorted.push(candidates.remove(place));
    }
    sorted
}

impl Model {
    fn candidate(&self, seq: usize) -> Candidate {
        let life = &self.lives[seq];
        let Place::Slot(slot) = life.place else { unreachable!("only residents give way") };
        Candidate {
            seq: SeqId(seq as u64),
            slot: _native::ids::SlotId(slot),
            priority: life.new.priority,
            generated: life.generated.len() as u64,
            frees: number(self.held(seq)),
            came_in: life.came_in,
            immune: self.immune(seq),
            constrained: life.new.constrained,
            in_flight: self.in_flight(seq),
        }
    }

    fn candidates(&self, seqs: &[usize]) -> Vec<Candidate> {
        seqs.iter().map(|&seq| self.candidate(seq)).collect()
    }

    /// Blocks of its image if there is one to make.
    fn image(&self, life: &Life) -> Option<u32> {
        (life.committed > 0).then(|| number(self.blocks(life.committed)))
    }

    fn way(&self, seq: usize, spill_blocks: u32) -> Option<ParkBy> {
        let life = &self.lives[seq];
        match self.image(life) {
            Some(image) if image <= spill_blocks => Some(ParkBy::Spill),
            _ => life.can_replay().then_some(ParkBy::Replay),
        }
    }

    /// "Never a candidate: one that is neither replayable nor spillable now; one that would free no block." And "with
    /// `park_constrained=False` the constrained are never parked".
    fn parkable(&self, spill_blocks: u32) -> Vec<usize> {
        let mut parkable = self.residents();
        parkable.retain(|&seq| self.way(seq, spill_blocks).is_some() && self.held(seq) > 0);
        parkable.retain(|&seq| self.settings.park_constrained || !self.lives[seq].new.constrained);
        parkable
    }

    /// Whether a step in flight gives blocks back in any case: "a row in flight surely finishes its sequence, or fenced
    /// remains exist".
    fn blocks_are_coming(&self) -> bool {
        !self.remains().is_empty() || self.residents().iter().any(|&seq| self.surely_finishes(seq))
    }

    /// The victim; "never the only resident one". Where nobody can, whatever is in flight is settled first.
    pub(crate) fn victim(&self, spill_blocks: u32) -> Victim {
        if self.blocks_are_coming() {
            return Victim::Settle;
        }
        let mut candidates = self.candidates(&self.parkable(spill_blocks));
        if self.residents().len() == 1 {
            candidates.clear();
        }
        match gives_way_unfenced(self.settings.policy, &candidates) {
            Victim::Nobody if !self.flights.is_empty() => Victim::Settle,
            choice => choice,
        }
    }

    /// "The rows that cannot grow end with `capacity`, in victim order."
    pub(crate) fn capacity_row(&self) -> Option<SeqId> {
        gives_way(self.settings.policy, &self.candidates(&self.growing()))
    }

    /// Blocks by which it grows next, once what is in flight is done: who has a pending token needs room for it as soon
    /// as its history is there.
    fn coming_growth(&self, seq: usize) -> usize {
        let (life, ahead) = (&self.lives[seq], self.ahead(seq));
        if life.generated.len() + ahead == 0 || self.surely_finishes(seq) {
            return 0;
        }
        let held = if life.resident() { self.held(seq) } else { self.blocks(life.history()) };
        self.blocks(life.history_with(ahead) + 1).saturating_sub(held)
    }

    /// "Own blocks (whole prompt or whole history) + the blocks by which this step's decode rows grow + `head_room` x
    /// residents, the newcomer included, <= free; own blocks <= free when nothing is resident." The
    /// growth of those that come back, or replay, counts as well: nobody resumes without room to grow.
    ///
    /// Counted without those `parked`, and with the slots and blocks of so many `remains`.
    fn fits(&self, head: usize, parked: &[usize], remains: &[&Left]) -> bool {
        let mut stay = self.residents();
        stay.retain(|seq| !parked.contains(seq));
        if stay.len() + remains.len() >= self.settings.num_slots as usize {
            return false;
        }
        let taken = stay.iter().map(|&seq| self.held(seq)).chain(remains.iter().map(|left| left.blocks));
        let free = self.settings.num_blocks as usize - taken.sum::<usize>();
        let own = self.blocks(self.lives[head].history());
        if stay.is_empty() {
            return own <= free;
        }
        let growth = stay.iter().chain([&head]).map(|&seq| self.coming_growth(seq)).sum::<usize>();
        own + growth + self.settings.head_room as usize * (stay.len() + 1) <= free
    }

    /// "For a head that lacks a slot or blocks, the candidates are the parkable residents of strictly lower priority,
    /// immune ones and the only resident included: lowest priority first, then the policy's order. Count first: if the
    /// head would not fit after parking all of them, nobody is parked; else the fewest of that order."
    ///
    /// Fenced remains count as if they were free already; if that is enough, nobody is parked and the head waits. Who
    /// would be parked stays for now if a step in flight needs it, or gives blocks back.
    pub(crate) fn next_arrival(&self, spill_blocks: u32) -> Option<ArrivalPlan> {
        let head = *self.waiting().first()?;
        let seq = SeqId(head as u64);
        if self.fits(head, &[], &self.remains()) {
            return Some(ArrivalPlan { seq, victims: Vec::new(), settle_first: false });
        }
        if self.fits(head, &[], &[]) {
            return None;
        }
        let mut lower = self.parkable(spill_blocks);
        lower.retain(|&seq| self.lives[seq].new.priority < self.lives[head].new.priority);
        let (mut victims, mut left) = (Vec::new(), spill_blocks);
        for candidate in order(self.settings.policy, self.candidates(&lower)) {
            let seq = usize::try_from(candidate.seq.0).expect("a tiny universe");
            let Some(by) = self.way(seq, left) else { continue };
            if by == ParkBy::Spill {
                left -= self.image(&self.lives[seq]).expect("it can be spilled");
            }
            victims.push((seq, by));
        }
        let parked: Vec<usize> = victims.iter().map(|&(seq, _)| seq).collect();
        let fewest = (1..=parked.len()).find(|&count| self.fits(head, &parked[..count], &[]))?;
        let settle_first = self.blocks_are_coming() || parked[..fewest].iter().any(|&seq| self.in_flight(seq));
        let victims = victims[..fewest].iter().map(|&(seq, by)| (SeqId(seq as u64), by)).collect();
        Some(ArrivalPlan { seq, victims, settle_first })
    }
}

fn candidates() -> impl Strategy<Value = Vec<Candidate>> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>());
    let one = (-1..2_i32, 0..4_u64, 1..4_u32, flags);
    let shuffled = Just((0..8_u32).collect::<Vec<_>>()).prop_shuffle();
    (prop::collection::vec(one, 0..8), shuffled.clone(), shuffled).prop_map(|(measures, slots, arrivals)| {
        let candidate = |(index, (priority, generated, frees, (immune, constrained, in_flight)))| Candidate {
            seq: SeqId(index as u64),
            slot: _native::ids::SlotId(slots[index]),
            priority,
            generated,
            frees,
            came_in: u64::from(arrivals[index]),
            immune,
            constrained,
            in_flight,
        };
        measures.into_iter().enumerate().map(candidate).collect()
    })
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn each_policy_orders_candidates_as_the_sentences_say(mut candidates in candidates()) {
        for policy in [Policy::FewestGenerated, Policy::Newest, Policy::Largest] {
            prop_assert_eq!(policy.choose(&candidates), gives_way(policy, &candidates));
            prop_assert_eq!(policy.choose_settled(&candidates), gives_way_unfenced(policy, &candidates));
            let expected = order(policy, candidates.clone());
            policy.sort(&mut candidates);
            prop_assert_eq!(&candidates, &expected);
        }
    }
}
