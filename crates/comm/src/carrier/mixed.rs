//! Shared memory to the ranks of this host, another carrier (TCP) to all others.

use std::time::{Duration, Instant};

use super::local::Local;
use super::{Alive, Carrier, Opening};
use crate::error::CommError;

/// How long one of the two is waited for while the other may have something too.
const TURN: Duration = Duration::from_micros(200);

struct Mixed {
    near: Local,
    far: Box<dyn Carrier>,
}

/// The carrier of ranks on several hosts; `far` reaches the partners on other hosts ([`far_partners`]).
///
/// # Errors
/// As [`super::local::open`].
pub fn open(
    opening: &Opening,
    alive: Alive<'_>,
    far: Box<dyn Carrier>,
) -> Result<Box<dyn Carrier>, CommError> {
    Ok(Box::new(Mixed { near: Local::of_host(opening, alive)?, far }))
}

/// The partners on other hosts.
pub fn far_partners(opening: &Opening) -> Vec<usize> {
    let host = &opening.hosts[opening.rank];
    opening.partners.iter().copied().filter(|peer| opening.hosts[*peer] != *host).collect()
}

impl Carrier for Mixed {
    fn name(&self) -> &'static str {
        "local+tcp"
    }

    fn try_send(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, CommError> {
        if self.near.reaches(peer) { self.near.try_send(peer, bytes) } else { self.far.try_send(peer, bytes) }
    }

    fn try_recv(&mut self, peer: usize, bytes: &mut [u8]) -> Result<usize, CommError> {
        if self.near.reaches(peer) { self.near.try_recv(peer, bytes) } else { self.far.try_recv(peer, bytes) }
    }

    fn wait(&mut self, send: &[usize], recv: &[usize], most: Duration) -> Result<(), CommError> {
        let split =
            |peers: &[usize]| peers.iter().partition::<Vec<usize>, _>(|peer| self.near.reaches(**peer));
        let ((near_send, far_send), (near_recv, far_recv)) = (split(send), split(recv));
        let near = !(near_send.is_empty() && near_recv.is_empty());
        let far = !(far_send.is_empty() && far_recv.is_empty());
        if !far {
            return self.near.wait(&near_send, &near_recv, most);
        }
        if !near {
            return self.far.wait(&far_send, &far_recv, most);
        }
        // A word in memory and a socket cannot be waited for in one call. Waiting may end early, so neither is asked what it saw:
        // one turn each, and the caller looks.
        let until = Instant::now() + most;
        self.near.wait(&near_send, &near_recv, most.min(TURN))?;
        let left = until.saturating_duration_since(Instant::now());
        self.far.wait(&far_send, &far_recv, left.min(TURN))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::carrier::local::tests::{everybody_to_everybody, meet};

    /// Two hosts of two ranks; the far carrier is a stand-in, shared memory of all four.
    #[test]
    fn streams_go_both_ways_at_once() {
        let folder = tempfile::tempdir_in("/dev/shm").unwrap();
        let far = meet(folder.path(), &[0, 1, 2, 3], 4096);
        let near = [[0, 1], [2, 3]].iter().flat_map(|ranks| meet(folder.path(), ranks, 4096));
        let all: Vec<_> = near.zip(far).map(|(near, far)| Mixed { near, far: Box::new(far) }).collect();
        everybody_to_everybody(all, &[0, 1, 2, 3], 100_000);
    }

    #[test]
    fn far_partners_are_on_other_hosts() {
        let opening = Opening {
            rank: 1,
            size: 4,
            local_size: 2,
            partners: vec![0, 3],
            hosts: ["a", "a", "b", "b"].map(String::from).to_vec(),
            secret: "secret".into(),
            start: "a start".into(),
            deadline: Instant::now(),
        };
        assert_eq!(far_partners(&opening), [3]);
    }
}
