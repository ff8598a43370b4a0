//! Who gives way: pure functions from candidates to a choice.

use std::cmp::Reverse;

use crate::ids::{SeqId, SlotId};

/// A resident sequence that could be parked now, as far as a policy sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Candidate {
    /// The sequence.
    pub seq: SeqId,
    /// Its slot; ties go to the lower one.
    pub slot: SlotId,
    /// Higher is more urgent.
    pub priority: i32,
    /// Tokens it has generated.
    pub generated: u64,
    /// Blocks that parking it would free.
    pub frees: u32,
    /// When it last came in; later is larger.
    pub came_in: u64,
    /// Passed over while others will do.
    pub immune: bool,
    /// Its next token is bound by a mask; parked only when the step would fail otherwise.
    pub constrained: bool,
    /// A step in flight names it.
    pub in_flight: bool,
}

/// What a policy comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Victim {
    /// This one gives way.
    Gives(SeqId),
    /// A step in flight must be settled first: it will free something, or it needs all who should give way.
    Settle,
    /// Nobody can.
    Nobody,
}

/// How the candidates of one tier are ordered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// Least is lost by pausing whoever has generated the fewest tokens.
    #[default]
    FewestGenerated,
    /// Last in, first out.
    Newest,
    /// Most blocks freed.
    Largest,
}

/// Neither immune nor constrained; immune; constrained; both. The first that is not empty is chosen from.
fn tier(candidate: &Candidate) -> (bool, bool) {
    (candidate.constrained, candidate.immune)
}

/// What a policy sorts by: the lowest is the first to give way. Every key ends in the slot, so there are no ties.
type Rank = (i32, (bool, bool), Reverse<u64>, u64, SlotId);

impl Policy {
    /// The candidate's place in the order of giving way: lowest priority, then tier, then the policy's own measure.
    fn rank(self, candidate: &Candidate) -> Rank {
        let (largest_first, smallest_first) = match self {
            Self::FewestGenerated => (0, candidate.generated),
            Self::Newest => (candidate.came_in, 0),
            Self::Largest => (u64::from(candidate.frees), 0),
        };
        (candidate.priority, tier(candidate), Reverse(largest_first), smallest_first, candidate.slot)
    }

    /// The candidate that gives way first.
    #[must_use]
    pub fn choose(self, candidates: &[Candidate]) -> Option<SeqId> {
        candidates.iter().min_by_key(|candidate| self.rank(candidate)).map(|candidate| candidate.seq)
    }

    /// The first, in the order of giving way, that no step in flight names, of the tier that gives way first; those in
    /// flight count in forming it, so that a step in flight never sends the choice to a later tier.
    #[must_use]
    pub fn choose_settled(self, candidates: &[Candidate]) -> Victim {
        let Some(first) = candidates.iter().min_by_key(|candidate| self.rank(candidate)) else {
            return Victim::Nobody;
        };
        let is_settled = |candidate: &&Candidate| {
            !candidate.in_flight && (candidate.priority, tier(candidate)) == (first.priority, tier(first))
        };
        let chosen = candidates.iter().filter(is_settled).min_by_key(|candidate| self.rank(candidate));
        chosen.map_or(Victim::Settle, |candidate| Victim::Gives(candidate.seq))
    }

    /// Sorts candidates into the order of giving way.
    pub fn sort(self, candidates: &mut [Candidate]) {
        candidates.sort_by_key(|candidate| self.rank(candidate));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(seq: u64) -> Candidate {
        Candidate {
            seq: SeqId(seq),
            slot: SlotId(u32::try_from(seq).expect("small")),
            priority: 0,
            generated: 10,
            frees: 2,
            came_in: seq,
            immune: false,
            constrained: false,
            in_flight: false,
        }
    }

    #[test]
    fn fewest_generated_first_and_ties_to_the_lower_slot() {
        let few = Candidate { generated: 3, ..candidate(2) };
        assert_eq!(Policy::FewestGenerated.choose(&[candidate(1), few]), Some(SeqId(2)));
        assert_eq!(Policy::FewestGenerated.choose(&[candidate(2), candidate(1)]), Some(SeqId(1)));
        assert_eq!(Policy::FewestGenerated.choose(&[]), None);
    }

    #[test]
    fn only_the_lowest_priority_present_gives_way() {
        let urgent = Candidate { priority: 1, generated: 0, ..candidate(1) };
        let immune_and_constrained = Candidate { immune: true, constrained: true, ..candidate(2) };
        for policy in [Policy::FewestGenerated, Policy::Newest, Policy::Largest] {
            assert_eq!(policy.choose(&[urgent, immune_and_constrained]), Some(SeqId(2)));
        }
    }

    #[test]
    fn tiers_go_free_then_immune_then_constrained_then_both() {
        let both = Candidate { immune: true, constrained: true, generated: 0, ..candidate(1) };
        let constrained = Candidate { constrained: true, generated: 1, ..candidate(2) };
        let immune = Candidate { immune: true, generated: 2, ..candidate(3) };
        let mut all = [both, constrained, immune, candidate(4)];
        Policy::FewestGenerated.sort(&mut all);
        assert_eq!(all.map(|candidate| candidate.seq.0), [4, 3, 2, 1]);
    }

    #[test]
    fn a_step_in_flight_sends_the_choice_to_another_of_the_tier_and_never_to_a_later_one() {
        let flying = Candidate { in_flight: true, generated: 0, ..candidate(1) };
        let immune = Candidate { immune: true, generated: 1, ..candidate(2) };
        let policy = Policy::FewestGenerated;
        assert_eq!(policy.choose_settled(&[flying, immune, candidate(3)]), Victim::Gives(SeqId(3)));
        assert_eq!(policy.choose_settled(&[flying, immune]), Victim::Settle);
        assert_eq!(policy.choose_settled(&[]), Victim::Nobody);
    }

    #[test]
    fn newest_is_the_last_that_came_in_and_largest_frees_the_most() {
        let large = Candidate { frees: 9, ..candidate(1) };
        assert_eq!(Policy::Newest.choose(&[large, candidate(2)]), Some(SeqId(2)));
        assert_eq!(Policy::Largest.choose(&[large, candidate(2)]), Some(SeqId(1)));
    }
}
