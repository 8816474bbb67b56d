//! A carrier that damages one byte, or loses a connection: what the ranks say of it.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use super::reduce;
use crate::carrier::Carrier;
use crate::error::CommError;
use crate::join::{Joined, join};
use crate::place::{Place, Starter};
use crate::reduction::Leave;
use crate::settings::{Backend, Settings};

/// Does something to the bytes that come.
struct Bad {
    inner: Box<dyn Carrier>,
    /// Bytes that came.
    count: usize,
    /// Which byte is damaged.
    at: usize,
    /// The connection ends there instead.
    cut: bool,
}

impl Carrier for Bad {
    fn name(&self) -> &'static str {
        "bad"
    }
    fn try_send(&mut self, peer: usize, bytes: &[u8]) -> Result<usize, CommError> {
        self.inner.try_send(peer, bytes)
    }
    fn try_recv(&mut self, peer: usize, bytes: &mut [u8]) -> Result<usize, CommError> {
        let n = self.inner.try_recv(peer, bytes)?;
        if (self.count..self.count + n).contains(&self.at) {
            if self.cut {
                let what = "its connection broke: reset".into();
                return Err(CommError::Lost { rank: peer, host: String::new(), when: String::new(), what });
            }
            bytes[self.at - self.count] ^= 0x10;
        }
        self.count += n;
        Ok(n)
    }
    fn wait(&mut self, send: &[usize], recv: &[usize], most: Duration) -> Result<(), CommError> {
        self.inner.wait(send, recv, most)
    }
}

/// Sums over two ranks, of which rank 1 has a bad carrier; what both say.
fn errors(at: usize, cut: bool) -> Vec<String> {
    // Below the ports of outgoing connections, of which tests at the same time make many.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let draw = std::process::id().wrapping_mul(2654435761) >> 8;
    let port = 10_001 + draw.wrapping_add(NEXT.fetch_add(1, Ordering::Relaxed)) % 10_000;
    let settings = Settings {
        backend: Backend::Tcp,
        join_timeout: Duration::from_secs(60),
        lost_after: Duration::from_secs(60),
        collective_timeout: Duration::from_secs(60),
        interface: None,
    };
    let run = |rank: usize| {
        let place = Place {
            rank,
            world_size: 2,
            local_rank: rank,
            local_size: 2,
            meeting: format!("127.0.0.1:{port}"),
            secret: "secret".into(),
            starter: Starter::Launch,
        };
        let Joined { control, mut link, .. } = join(&place, &settings, &|| false).unwrap();
        if rank == 1 {
            link.carrier = Box::new(Bad { inner: link.carrier, count: 0, at, cut });
        }
        let mut data = vec![1.0f32; 300_000];
        let result = reduce::reduce(&mut link, &mut data, &(0..300_000), 1, Leave::Everywhere, true);
        drop(link);
        drop(control);
        result.expect_err("the damage was not seen").to_string()
    };
    std::thread::scope(|scope| {
        [0, 1].map(|rank| scope.spawn(move || run(rank))).map(|thread| thread.join().unwrap()).to_vec()
    })
}

#[test]
fn damaged_bytes_are_named_by_all() {
    // In a header, at the start of a piece, at the end of the message.
    for (at, word) in [
        (9, "damaged header"),
        (0, "does not begin as a frame"),
        (40, "damaged on its way"),
        (600_000, "damaged on its way"),
    ] {
        for error in errors(at, false) {
            assert!(error.contains("rank 0 on host") && error.contains(word), "byte {at}: {error}");
        }
    }
}

#[test]
fn a_broken_connection_between_living_ranks_is_named_by_all() {
    for error in errors(100_000, true) {
        assert!(error.contains("rank 0 on host") && error.contains("its connection broke: reset"), "{error}");
    }
}
