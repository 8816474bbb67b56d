//! Which shards of an update a rank computes.

use std::ops::Range;

use crate::accumulate::group_of;
use crate::options::BatchPlan;

/// Whether so many ranks give the bits of one: whole groups to each, along the tree of their sums.
pub fn same_bits(ranks: usize, groups: usize) -> bool {
    ranks.is_power_of_two() && groups.is_multiple_of(ranks)
}

/// The shards that `rank` of `ranks` computes, of an update that has `shards` of them (a short one has fewer than the
/// plan says): those of its groups where that gives the bits of one rank, else an even run of them.
pub fn own_shards(rank: usize, ranks: usize, plan: &BatchPlan, shards: usize) -> Range<usize> {
    if !same_bits(ranks, plan.groups) {
        let cut = |r: usize| r * shards / ranks;
        return cut(rank)..cut(rank + 1);
    }
    let own = plan.groups / ranks;
    // The first shard of a group or of a later one.
    let first = |group: usize| {
        (0..shards).position(|s| group_of(s, plan.shards, plan.groups) >= group).unwrap_or(shards)
    };
    first(rank * own)..first((rank + 1) * own)
}

/// What a person should know of this number of ranks, as sentences.
pub fn notes(ranks: usize, plan: &BatchPlan) -> Vec<String> {
    let mut notes = Vec::new();
    if !same_bits(ranks, plan.groups) {
        notes.push(format!(
            "{ranks} ranks: the same mathematics as on one, but the same bits are not promised; a power of two that divides \
             the {} groups of an update (--bit_groups) gives them",
            plan.groups
        ));
    }
    if ranks > plan.shards {
        notes.push(format!(
            "{ranks} ranks and {} shards an update: {} ranks have nothing to compute; a smaller --micro_batch_size gives \
             more shards",
            plan.shards,
            ranks - plan.shards
        ));
    }
    notes
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_shard_is_computed_once_and_groups_stay_whole() {
        for (shards, groups) in [(8, 8), (8, 4), (12, 8), (5, 4), (1, 1), (24, 8)] {
            let plan = BatchPlan { global: shards, micro: 1, shards, groups };
            for ranks in 1..=9usize {
                for present in 1..=shards {
                    let own: Vec<_> = (0..ranks).map(|r| own_shards(r, ranks, &plan, present)).collect();
                    let all: Vec<usize> = own.iter().cloned().flatten().collect();
                    assert_eq!(all, (0..present).collect::<Vec<_>>(), "{ranks} ranks: {own:?}");
                    if same_bits(ranks, groups) {
                        let of = |s: usize| group_of(s, shards, groups) / (groups / ranks);
                        assert!(own.iter().enumerate().all(|(r, own)| own.clone().all(|s| of(s) == r)));
                    }
                }
            }
        }
        assert!(same_bits(1, 1) && same_bits(4, 8) && !same_bits(3, 8) && !same_bits(16, 8));
    }
}
