//! The sum of an update's gradients over the ranks, bucket by bucket while the backward pass works on others: along the fixed tree through
//! the host's memory, or by the devices themselves where they can ([`Device::sums`]).

use std::ops::Range;

use tercio_comm::{CommError, Reduction, World};
use tercio_engine::device::Shared;
use tercio_engine::{Arena, Device};

use super::RankDevice;
use super::parts::Parts;

/// A sum that is under way.
pub struct Exchange<'a, D: Device> {
    // Ended before the memory that it works on is freed.
    reduction: Option<Reduction>,
    shared: Option<Shared<D::Element>>,
    device: &'a D,
    buckets: &'a [Range<usize>],
    over: bool,
}

impl<D: Device> Drop for Exchange<'_, D> {
    /// Left in the middle: what uses the memory next comes after the sums that were begun.
    fn drop(&mut self) {
        if !self.over && self.reduction.is_none() {
            // A device that fails now is failing already.
            let _ = tercio_engine::fault::caught(|| self.device.end_sums());
        }
    }
}

impl<'a, D: RankDevice> Exchange<'a, D> {
    /// Begins the sum of `gradients`. `present`: whether this rank has anything to add; if not, what they hold does not matter.
    ///
    /// # Safety
    /// `gradients` live until [`Exchange::finish`] has returned, or this was dropped; nobody touches a bucket between
    /// [`Exchange::ready`] and then.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub unsafe fn begin(
        world: &World,
        device: &'a D,
        parts: &'a Parts,
        gradients: &mut Arena<D>,
        present: bool,
    ) -> Result<Exchange<'a, D>, CommError> {
        let buckets = &parts.buckets[..];
        if world.size() == 1 || device.sums() {
            // What no rank has anything to add to is 0.
            if !present {
                device.fill(gradients.all_mut(), 0.0);
            }
            return Ok(Exchange { reduction: None, shared: None, device, buckets, over: false });
        }
        let shared = device.shared(gradients.all_mut());
        let (data, len, leave) = (shared.pointer(), gradients.len(), parts.leave());
        // SAFETY: the caller's promise; shared memory is freed after the reduction.
        let reduction = unsafe { world.start_reduction(data, len, buckets, leave, D::BLOCK, present) }?;
        Ok(Exchange { reduction: Some(reduction), shared: Some(shared), device, buckets, over: false })
    }
    /// Bucket `i` of the gradients that the sum began with is final on this rank. Every rank says it of all buckets, in their order.
    pub fn ready(&self, i: usize, gradients: &mut Arena<D>) {
        let bucket = self.buckets[i].clone();
        match (&self.reduction, &self.shared) {
            (Some(reduction), Some(shared)) => {
                self.device.show(gradients.range(bucket.clone()), shared, bucket.start);
                reduction.ready(i);
            }
            _ if self.device.sums() => self.device.sum(gradients.range_mut(bucket)),
            // A rank alone has the sum already.
            _ => {}
        }
    }
    /// Waits for the sum, or makes what comes next wait for it.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn finish(mut self, gradients: &mut Arena<D>) -> Result<(), CommError> {
        self.over = true;
        match (self.reduction.take(), self.shared.take()) {
            (Some(reduction), Some(shared)) => {
                reduction.finish()?;
                self.device.take_back(shared, gradients.all_mut());
            }
            _ => self.device.end_sums(),
        }
        Ok(())
    }
}
