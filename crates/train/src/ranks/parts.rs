//! Which stretches of the arenas a rank's optimizer works on: all, or its own parts of every bucket (`--shard optimizer`,
//! ZeRO-1 of Rajbhandari et al., 2020), and the moments that belong to them.

use std::ops::Range;

use tercio_comm::{CommError, Leave, World};
use tercio_engine::{Arena, Device, Layout};

use super::RankDevice;
use crate::error::TrainError;

/// Elements of a bucket at least, where layers are small.
const LEAST: usize = 1 << 20;
/// Elements of a bucket at most.
const MOST: usize = 6 << 20;

/// Buckets of an arena, and this rank's part of each.
#[derive(Clone, Debug)]
pub struct Parts {
    /// The buckets, in the order in which a backward pass is done with them.
    pub buckets: Vec<Range<usize>>,
    /// By bucket and rank: what that rank owns. Empty where every rank owns everything.
    owned: Vec<Vec<Range<usize>>>,
    /// This rank's stretches, in the order of `buckets`, and where the moments of each begin.
    own: Vec<(Range<usize>, usize)>,
    moments: usize,
}

impl Parts {
    /// The buckets of a layout; `split`: each rank owns a part of every one.
    pub fn new<D: Device>(world: &World, layout: &Layout, split: bool) -> Parts {
        let buckets = layout.buckets(D::BLOCK, LEAST, MOST);
        if !split || world.size() == 1 {
            let own = vec![(0..layout.len(), 0)];
            return Parts { buckets, owned: Vec::new(), own, moments: layout.len() };
        }
        let owned: Vec<Vec<Range<usize>>> =
            buckets.iter().map(|b| world.own_parts(b.clone(), D::BLOCK)).collect();
        let (mut own, mut moments) = (Vec::new(), 0);
        for parts in &owned {
            let part = parts[world.rank()].clone();
            own.push((part.clone(), moments));
            moments += part.len();
        }
        Parts { buckets, owned, own, moments }
    }
    /// Whether the ranks own different parts.
    pub fn is_split(&self) -> bool {
        !self.owned.is_empty()
    }
    /// What a reduction of gradients leaves.
    pub fn leave(&self) -> Leave {
        if self.is_split() { Leave::Owned } else { Leave::Everywhere }
    }
    /// This rank's stretches of the arena, each with the place of its moments.
    pub fn own(&self) -> &[(Range<usize>, usize)] {
        &self.own
    }
    /// Elements of this rank's moments.
    pub fn moments(&self) -> usize {
        self.moments
    }
    /// Sum of the squares of `gradients`, the same bits whoever owns what: block sums, added in the order of blocks.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn square_sum<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        gradients: &Arena<D>,
    ) -> Result<f64, CommError> {
        if !self.is_split() {
            return Ok(device.dot(gradients.all(), gradients.all()));
        }
        let own = |(part, _): &(Range<usize>, usize)| {
            let values = gradients.range(part.clone());
            device.dot_blocks(values, values)
        };
        let own: Vec<f64> = self.own.iter().flat_map(own).collect();
        let all = world.all_gather(&own)?;
        let wrong = || CommError::Protocol("the ranks do not own the same parts of the gradients".into());
        let mut pieces: Vec<(usize, &[f64])> = Vec::new();
        let mut next = vec![0; all.len()];
        for parts in &self.owned {
            for (rank, part) in parts.iter().enumerate() {
                let blocks = part.len().div_ceil(D::BLOCK);
                let sums =
                    all.get(rank).and_then(|s| s.get(next[rank]..next[rank] + blocks)).ok_or_else(wrong)?;
                next[rank] += blocks;
                pieces.push((part.start, sums));
            }
        }
        pieces.sort_by_key(|(start, _)| *start);
        Ok(pieces.iter().flat_map(|(_, sums)| *sums).sum())
    }
    /// Moments of the whole arena, in its order, from everybody's parts: handed to `take` on rank 0, a piece at a time, so
    /// that nobody ever holds more than a bucket beside its own.
    ///
    /// # Errors
    /// What `take` returns; a rank was lost or failed.
    pub fn gather<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        moments: &Arena<D>,
        take: &mut dyn FnMut(&[f32]) -> Result<(), TrainError>,
    ) -> Result<(), TrainError> {
        if !self.is_split() {
            return if world.is_main() { take(&device.host(moments.all())) } else { Ok(()) };
        }
        // Buckets go from the arena's end to its start.
        for ((own, at), parts) in self.own.iter().zip(&self.owned).rev() {
            let values = device.host(moments.range(*at..at + own.len()));
            let all = world.gather_bytes(values.iter().flat_map(|v| v.to_le_bytes()).collect())?;
            let mut pieces: Vec<_> = all.iter().zip(parts).collect();
            pieces.sort_by_key(|(_, part)| part.start);
            for (bytes, part) in pieces {
                let (values, rest) = bytes.as_chunks::<4>();
                if values.len() != part.len() || !rest.is_empty() {
                    let what = format!("{} bytes came for {} moments", bytes.len(), part.len());
                    return Err(CommError::Protocol(what).into());
                }
                let values: Vec<f32> = values.iter().map(|v| f32::from_le_bytes(*v)).collect();
                take(&values)?;
            }
        }
        Ok(())
    }
    /// This rank's moments, from the `whole` ones of rank 0 (`None` elsewhere), which have `len` elements.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn scatter<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        len: usize,
        whole: Option<Arena<D>>,
    ) -> Result<Arena<D>, CommError> {
        if !self.is_split() {
            let mut moments = whole.unwrap_or_else(|| Arena::of_len(device, len));
            self.broadcast(world, device, &mut moments)?;
            return Ok(moments);
        }
        let mut moments = Arena::of_len(device, self.moments);
        let mut buffer: Vec<D::Element> = Vec::new();
        for (bucket, (part, at)) in self.buckets.iter().zip(&self.own) {
            buffer.clear();
            match &whole {
                Some(whole) => buffer.extend_from_slice(&device.elements(whole.range(bucket.clone()))),
                None => buffer.resize(bucket.len(), D::Element::default()),
            }
            world.broadcast(0, &mut buffer)?;
            let own = &buffer[part.start - bucket.start..part.end - bucket.start];
            device.change(moments.range_mut(*at..at + part.len()), |m| m.copy_from_slice(own));
        }
        Ok(moments)
    }
    /// Rank 0's whole arena on every rank.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn broadcast<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        arena: &mut Arena<D>,
    ) -> Result<(), CommError> {
        let len = if world.size() == 1 { 0 } else { arena.len() };
        for start in (0..len).step_by(MOST) {
            let piece = arena.range_mut(start..len.min(start + MOST));
            device.change(piece, |values| world.broadcast(0, values))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_engine::Reference;

    #[test]
    fn alone_everything_is_ones_own() {
        let mut layout = Layout::default();
        layout.add("a", &[40_000]);
        layout.add("b", &[3, 5]);
        let (world, device) = (World::alone(), Reference);
        let parts = Parts::new::<Reference>(&world, &layout, true);
        assert_eq!((parts.is_split(), parts.moments(), parts.own().len()), (false, 40_015, 1));
        let mut g = Arena::zeros(&device, &layout);
        device.fill(g.all_mut(), 0.5);
        assert_eq!(parts.square_sum(&world, &device, &g).unwrap(), 40_015.0 / 4.0);
        let same = parts.scatter(&world, &device, layout.len(), Some(g)).unwrap();
        assert_eq!(same.len(), layout.len());
        let mut taken = 0;
        let take = &mut |values: &[f32]| {
            taken += values.iter().filter(|v| **v == 0.5).count();
            Ok(())
        };
        parts.gather(&world, &device, &same, take).unwrap();
        assert_eq!(taken, layout.len());
    }
}
