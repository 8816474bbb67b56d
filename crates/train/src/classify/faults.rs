//! Faulty documents that are left out: the first ones named, all counted.

use tercio_data::DataError;

/// Faulty documents that are named one by one.
const NAMED: u64 = 20;

/// Says the first faults that are left out, and how many there were.
#[derive(Default)]
pub struct Faults(u64);

impl Faults {
    /// Another one.
    pub fn say(&mut self, fault: &DataError) {
        self.0 += 1;
        if self.0 <= NAMED {
            tracing::warn!("left out: {fault}");
        }
    }

    /// How many there were, if any.
    pub fn sum_up(&self) {
        if self.0 > 0 {
            tracing::warn!("{} faulty documents are left out", self.0);
        }
    }
}
