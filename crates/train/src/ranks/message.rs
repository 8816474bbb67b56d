//! The small messages of an update: what ranks tell one another before and after they compute, as words of 64 bits.

use tercio_comm::{CommError, World};

use crate::objective::{ShardSize, Shown};
use crate::run::StopReason;

/// What a rank knows before it computes.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Before {
    /// The signal that it has seen, or what else ends the run.
    pub signal: Option<StopReason>,
    /// Nanoseconds that the longest save took so far: rank 0 saves, and all have to know whether one fits.
    pub save: u64,
    /// Sizes of its shards.
    pub sizes: Vec<ShardSize>,
}

/// What a rank has found in a pass over its shards before any gradient.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct FirstPass {
    /// Whether it gave the update up.
    pub dropped: bool,
    /// What its shards show, those that it came to.
    pub shown: Vec<Shown>,
}

/// What a rank knows after it has computed.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct After {
    /// Whether it gave the update up.
    pub dropped: bool,
    /// Losses of its shards, those that it computed.
    pub losses: Vec<f64>,
}

/// The first one that a rank has seen counts.
const SIGNALS: [StopReason; 5] = [
    StopReason::Superseded,
    StopReason::Interrupt,
    StopReason::Terminate,
    StopReason::User1,
    StopReason::User2,
];

fn code(signal: Option<StopReason>) -> u64 {
    signal.and_then(|s| SIGNALS.iter().position(|r| *r == s)).map_or(0, |i| i as u64 + 1)
}

fn signal(code: u64) -> Option<StopReason> {
    SIGNALS.get(usize::try_from(code).ok()?.checked_sub(1)?).copied()
}

impl Before {
    fn words(&self) -> Vec<u64> {
        let sizes =
            self.sizes.iter().flat_map(|s| [s.tokens, s.padded_tokens, s.count, s.inputs, s.truncated]);
        [code(self.signal), self.save].into_iter().chain(sizes).collect()
    }
    fn of(words: &[u64]) -> Option<Before> {
        let (&[told, save], rest) = words.split_first_chunk::<2>()?;
        let (sizes, []) = rest.as_chunks::<5>() else { return None };
        let size = |&[tokens, padded_tokens, count, inputs, truncated]: &[u64; 5]| ShardSize {
            tokens,
            padded_tokens,
            count,
            inputs,
            truncated,
        };
        Some(Before { signal: signal(told), save, sizes: sizes.iter().map(size).collect() })
    }
    /// All ranks' messages, in the order of ranks.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn exchange(self, world: &World) -> Result<Vec<Before>, CommError> {
        exchange(world, self, Before::words, Before::of)
    }
}

impl FirstPass {
    fn words(&self) -> Vec<u64> {
        let mut words = vec![u64::from(self.dropped)];
        for shown in &self.shown {
            words.extend([shown.counts.len() as u64, shown.values.len() as u64]);
            words.extend(&shown.counts);
            words.extend(shown.values.iter().map(|v| v.to_bits()));
        }
        words
    }
    fn of(words: &[u64]) -> Option<FirstPass> {
        let (first, mut rest) = words.split_first()?;
        let mut shown = Vec::new();
        while !rest.is_empty() {
            let (&[counts, values], tail) = rest.split_first_chunk::<2>()?;
            let (counts, tail) = tail.split_at_checked(usize::try_from(counts).ok()?)?;
            let (values, tail) = tail.split_at_checked(usize::try_from(values).ok()?)?;
            let values = values.iter().map(|&v| f64::from_bits(v)).collect();
            shown.push(Shown { counts: counts.to_vec(), values });
            rest = tail;
        }
        Some(FirstPass { dropped: *first != 0, shown })
    }
    /// All ranks' messages, in the order of ranks.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn exchange(self, world: &World) -> Result<Vec<FirstPass>, CommError> {
        exchange(world, self, FirstPass::words, FirstPass::of)
    }
}

impl After {
    fn words(&self) -> Vec<u64> {
        [u64::from(self.dropped)].into_iter().chain(self.losses.iter().map(|l| l.to_bits())).collect()
    }
    fn of(words: &[u64]) -> Option<After> {
        let (first, losses) = words.split_first()?;
        Some(After { dropped: *first != 0, losses: losses.iter().map(|&l| f64::from_bits(l)).collect() })
    }
    /// All ranks' messages, in the order of ranks.
    ///
    /// # Errors
    /// A rank was lost or failed.
    pub fn exchange(self, world: &World) -> Result<Vec<After>, CommError> {
        exchange(world, self, After::words, After::of)
    }
}

/// The signal that any rank has seen, the same on all of them: with several, Ctrl-C before SIGTERM before the others.
///
/// # Errors
/// A rank was lost or failed.
pub fn agree_on_signal(world: &World, own: Option<StopReason>) -> Result<Option<StopReason>, CommError> {
    let all = Before { signal: own, ..Before::default() }.exchange(world)?;
    Ok(strongest(&all))
}

/// The signal of all messages that counts.
pub fn strongest(all: &[Before]) -> Option<StopReason> {
    signal(all.iter().map(|m| code(m.signal)).filter(|&c| c > 0).min()?)
}

fn exchange<M>(
    world: &World,
    own: M,
    words: fn(&M) -> Vec<u64>,
    of: fn(&[u64]) -> Option<M>,
) -> Result<Vec<M>, CommError> {
    if world.size() == 1 {
        return Ok(vec![own]);
    }
    let bytes = words(&own).iter().flat_map(|w| w.to_le_bytes()).collect();
    let all = world.all_gather_bytes(bytes)?;
    let read = |(rank, bytes): (usize, &Vec<u8>)| {
        let (words, rest) = bytes.as_chunks::<8>();
        let words: Vec<u64> = words.iter().map(|w| u64::from_le_bytes(*w)).collect();
        of(&words).filter(|_| rest.is_empty()).ok_or_else(|| {
            CommError::Protocol(format!(
                "rank {rank} sent {} bytes that are no message of an update",
                bytes.len()
            ))
        })
    };
    all.iter().enumerate().map(read).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_come_back_as_they_went() {
        let size =
            |n| ShardSize { tokens: n, padded_tokens: n + 1, count: 3, inputs: 4, truncated: u64::MAX };
        let before = Before { signal: Some(StopReason::User1), save: 9, sizes: vec![size(5), size(6)] };
        assert_eq!(Before::of(&before.words()), Some(before.clone()));
        let after = After { dropped: true, losses: vec![-0.0, 1.5, f64::INFINITY] };
        assert_eq!(After::of(&after.words()), Some(after));
        let shown = |n: u64| Shown { counts: vec![n, u64::MAX], values: vec![-0.0; n as usize] };
        let seen = FirstPass { dropped: false, shown: vec![shown(0), shown(3), Shown::default()] };
        assert_eq!(FirstPass::of(&seen.words()), Some(seen));
        assert_eq!((FirstPass::of(&[]), FirstPass::of(&[0, 1, u64::MAX, 2])), (None, None));
        assert_eq!((Before::of(&[]), Before::of(&[0, 1, 2, 3])), (None, None));
        let none = Before::default();
        let ctrl_c = Before { signal: Some(StopReason::Interrupt), ..none.clone() };
        assert_eq!(strongest(&[none.clone(), before, ctrl_c]), Some(StopReason::Interrupt));
        assert_eq!(strongest(&[none]), None);
        let own = Some(StopReason::Terminate);
        assert_eq!(agree_on_signal(&World::alone(), own).unwrap(), own);
    }
}
