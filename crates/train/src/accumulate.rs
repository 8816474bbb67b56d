//! The sum of an update's gradients in one fixed order, whatever the number of ranks.
//!
//! Shards of a group are added one after the other; groups are added along a binary tree, nearest first, by a binary
//! counter of partial sums: at most `log2(groups) + 1` arenas exist. A group that a short update lacks passes its
//! sibling through.

use std::ops::Range;

use tercio_engine::{Arena, Device, Layout};

/// Group of a shard: groups are runs of as equal length as can be.
pub fn group_of(shard: usize, shards: usize, groups: usize) -> usize {
    // The last group g with g * shards / groups <= shard.
    ((shard + 1) * groups - 1) / shards
}

/// Adds group sums in their order along the tree.
pub struct GroupSum<D: Device> {
    device: D,
    /// `levels[l]` holds the sum of 2^l groups that waits for its right sibling.
    levels: Vec<Option<Arena<D>>>,
    free: Vec<Arena<D>>,
    made: usize,
}

impl<D: Device> GroupSum<D> {
    /// An empty sum.
    pub fn new(device: &D) -> Self {
        GroupSum { device: device.clone(), levels: Vec::new(), free: Vec::new(), made: 0 }
    }
    /// An arena of zeros to compute the next group into.
    pub fn arena(&mut self, layout: &Layout) -> Arena<D> {
        match self.free.pop() {
            Some(mut arena) => {
                self.device.fill(arena.all_mut(), 0.0);
                arena
            }
            None => {
                let arena = Arena::zeros(&self.device, layout);
                self.made += 1;
                arena
            }
        }
    }
    /// Arenas that exist, in use or for reuse.
    pub fn arenas(&self) -> usize {
        self.made
    }
    /// Adds the next group's sum.
    pub fn push(&mut self, mut group: Arena<D>) {
        for level in &mut self.levels {
            match level.take() {
                Some(mut left) => {
                    self.device.add(left.all_mut(), group.all());
                    self.free.push(std::mem::replace(&mut group, left));
                }
                None => {
                    *level = Some(group);
                    return;
                }
            }
        }
        self.levels.push(Some(group));
    }
    /// What the last group is to be added to, on its way to the sum of all.
    pub fn waiting(&mut self) -> Waiting<D> {
        Waiting { device: self.device.clone(), sums: self.levels.drain(..).flatten().collect() }
    }
    /// The sum of all groups; `None` if there was none.
    pub fn finish(&mut self) -> Option<Arena<D>> {
        let mut waiting = self.waiting();
        if waiting.sums.is_empty() {
            return None;
        }
        let last = waiting.sums.remove(0);
        waiting.add(&last, 0..last.len());
        Some(self.settle(last, waiting))
    }
    /// The sum of all, of a last group that was added whole; the other arenas are kept for reuse.
    pub fn settle(&mut self, last: Arena<D>, waiting: Waiting<D>) -> Arena<D> {
        self.free.push(last);
        self.free.extend(waiting.sums);
        self.free.pop().expect("the last group is there")
    }
    /// Forgets all that was added.
    pub fn clear(&mut self) {
        self.free.extend(self.levels.drain(..).flatten());
    }
    /// Gives an arena back for reuse.
    pub fn recycle(&mut self, arena: Arena<D>) {
        self.free.push(arena);
    }
}

/// Partial sums that wait for an update's last group, nearest first.
pub struct Waiting<D: Device> {
    device: D,
    sums: Vec<Arena<D>>,
}

impl<D: Device> Waiting<D> {
    /// Adds a stretch of the last group: then [`Waiting::sum`] (or the group itself, where nothing waits) holds the sum of
    /// all groups there.
    pub fn add(&mut self, last: &Arena<D>, range: Range<usize>) {
        for i in 0..self.sums.len() {
            let (before, here) = self.sums.split_at_mut(i);
            let right = before.last().unwrap_or(last);
            self.device.add(here[0].range_mut(range.clone()), right.range(range.clone()));
        }
    }
    /// Where the sum of all comes to be; `None`: in the last group itself.
    pub fn sum(&mut self) -> Option<&mut Arena<D>> {
        self.sums.last_mut()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_engine::Reference;

    fn tree(values: &[f64]) -> f64 {
        // The sum by its definition: halves of the next power of two, absent ones left out.
        fn half(v: &[f64], width: usize) -> Option<f64> {
            if v.is_empty() {
                return None;
            }
            if width == 1 {
                return Some(v[0]);
            }
            let cut = (width / 2).min(v.len());
            match (half(&v[..cut], width / 2), half(&v[cut..], width / 2)) {
                (Some(a), Some(b)) => Some(a + b),
                (a, b) => a.or(b),
            }
        }
        half(values, values.len().next_power_of_two()).unwrap()
    }

    #[test]
    fn the_counter_adds_along_the_tree() {
        let mut layout = Layout::default();
        let p = layout.add("x", &[1]);
        for n in 1..=17usize {
            let values: Vec<f64> = (0..n).map(|i| [1e16, 1.0, -1e16, 3.5, 1e-3][i % 5]).collect();
            let mut sum = GroupSum::new(&Reference);
            for &v in &values {
                let mut a = sum.arena(&layout);
                Reference.fill(a.view_mut(p), v);
                sum.push(a);
            }
            let got = Reference.read_f64(sum.finish().unwrap().view(p))[0];
            assert_eq!(got.to_bits(), tree(&values).to_bits(), "{n} groups");
            assert!(sum.finish().is_none());
        }
    }

    #[test]
    fn groups_are_even_runs() {
        for shards in 1..40usize {
            for groups in [1usize, 2, 4, 8].into_iter().filter(|&g| g <= shards) {
                let of: Vec<usize> = (0..shards).map(|s| group_of(s, shards, groups)).collect();
                assert!(of.windows(2).all(|w| w[0] == w[1] || w[0] + 1 == w[1]), "{of:?}");
                assert_eq!((of[0], of[shards - 1]), (0, groups - 1));
            }
        }
    }
}
