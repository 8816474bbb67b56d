//! How rank 0 finds who was lost: by silence, by the word of others, by who does not come to a collective.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::board::Verdict;
use super::hub::{Hub, peer_host};
use super::pulse::beat_every;

impl Hub {
    pub(super) fn look_for_lost(&mut self) {
        if self.verdict.is_some() {
            return;
        }
        let signs = beat_every(&self.settings) + Duration::from_millis(500);
        if let Some((_, sequence, peer, what)) = self.late.take_if(|(since, ..)| since.elapsed() > signs) {
            return self.late(sequence, peer, what);
        }
        let limit = self.settings.lost_after;
        let silent = (1..self.size).find(|rank| {
            self.peers[*rank].as_ref().is_some_and(|p| !p.left && p.conn.heard.elapsed() > limit)
        });
        if let Some(rank) = silent {
            let verdict = self.lost(rank, format!("no sign of life for {} s", limit.as_secs_f64()));
            self.declare(verdict);
        } else if self.missing().next().is_some() && Instant::now() > self.deadline {
            self.declare(Verdict::Rendezvous(format!(
                "{} did not come to {} within {} s: look whether they were started, reach that address, and have the same secret",
                self.name_missing(),
                self.meeting,
                self.settings.join_timeout.as_secs_f64()
            )));
        } else if Instant::now() > self.deadline + Duration::from_secs(2) && !self.puts.is_empty() {
            // All came, but one does not get through the rest of joining.
            let late: Vec<String> = self
                .puts
                .values()
                .flat_map(|all| {
                    all.iter()
                        .enumerate()
                        .filter(|(_, bytes)| bytes.is_none())
                        .map(|(rank, _)| rank.to_string())
                })
                .collect();
            self.declare(Verdict::Rendezvous(format!(
                "the ranks met at {}, but did not connect to each other within {} s: rank {} did not get through",
                self.meeting,
                self.settings.join_timeout.as_secs_f64(),
                late.join(", ")
            )));
        }
    }

    pub(super) fn hear_late(&mut self, sequence: u64, peer: usize, what: String) {
        self.late.get_or_insert((Instant::now(), sequence, peer, what));
    }

    /// Someone waited too long in collective `sequence`, for `peer`, who may itself wait for another: the ranks to name are
    /// those that did not come to it.
    fn late(&mut self, sequence: u64, peer: usize, what: String) {
        let own = (0, self.board.sequence.load(Ordering::Relaxed), false);
        let others = self
            .peers
            .iter()
            .enumerate()
            .filter_map(|(rank, peer)| peer.as_ref().map(|peer| (rank, peer.sequence, peer.left)));
        let behind: Vec<usize> = std::iter::once(own)
            .chain(others)
            .filter(|(_, came_to, left)| *came_to < sequence && !left)
            .map(|(rank, ..)| rank)
            .collect();
        let verdict = match behind[..] {
            [] => self.lost(peer, format!("it gives signs of life, but nothing comes from it: {what}")),
            [rank] => self.lost(
                rank,
                format!("it gives signs of life, but does not come to what the others wait in: {what}"),
            ),
            [rank, ..] => {
                let names: Vec<String> = behind.iter().map(usize::to_string).collect();
                let names = names.join(", ");
                self.lost(
                    rank,
                    format!(
                        "ranks {names} give signs of life, but do not come to what the others wait in: {what}"
                    ),
                )
            }
        };
        self.declare(verdict);
    }

    /// The verdict that `rank` was lost; that this process was, if it is the one that stood still.
    pub(super) fn lost(&self, rank: usize, what: String) -> Verdict {
        let own = self.board.update.load(Ordering::Relaxed);
        if let Some((at, still)) = self.stood
            && still > self.settings.lost_after
            && at.elapsed() < Duration::from_secs(5)
        {
            let what = format!(
                "this process stood still for {} s (stopped, or its host slept), and the others gave it up",
                still.as_secs()
            );
            return Verdict::Lost { rank: 0, host: self.host.clone(), update: own, what };
        }
        let update = match self.peers.get(rank) {
            Some(Some(peer)) => peer.update.max(own),
            _ => own,
        };
        Verdict::Lost { rank, host: peer_host(&self.peers, &self.host, rank), update, what }
    }
}
