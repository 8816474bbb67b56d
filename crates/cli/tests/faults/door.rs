//! Finding each other: strangers, a port that is taken, two runs at one door, a main rank that comes late.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::time::Duration;

use super::ranks::*;
use super::support::{self, Place};

/// What strangers send: nothing, noise, another protocol, the beginnings of what we send ourselves.
fn noise() -> Vec<Vec<u8>> {
    let random: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 13) as u8).collect();
    vec![
        Vec::new(),
        b"GET / HTTP/1.1\r\nHost: tercio\r\n\r\n".to_vec(),
        vec![0xff; 64],
        vec![0; 4096],
        random,
        b"TERC".to_vec(),
        b"TERCIO".to_vec(),
    ]
}

/// Strangers that talk to the port until dropped; some hang up, some stay, silent.
struct Strangers {
    stop: std::sync::mpsc::Sender<()>,
    thread: Option<std::thread::JoinHandle<usize>>,
}

impl Strangers {
    fn at(port: u16) -> Strangers {
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let thread = std::thread::spawn(move || {
            let (mut kept, mut heard) = (Vec::new(), 0);
            for i in 0.. {
                let mut words = noise();
                let word = words.swap_remove(i % words.len());
                if let Ok(mut stream) = TcpStream::connect((Ipv4Addr::LOCALHOST, port)) {
                    let _ = stream.set_read_timeout(Some(Duration::from_millis(20)));
                    // Half a frame of ours: what the door itself says, cut short and sent back.
                    let mut said = [0; 64];
                    let n = stream.read(&mut said).unwrap_or(0);
                    let _ = stream.write_all(if i % 3 == 0 { &said[..n / 2] } else { &word });
                    heard += 1;
                    if i % 2 == 0 && kept.len() < 8 {
                        kept.push(stream);
                    }
                }
                if stopped.recv_timeout(Duration::from_millis(30))
                    != Err(std::sync::mpsc::RecvTimeoutError::Timeout)
                {
                    return heard;
                }
            }
            unreachable!()
        });
        Strangers { stop, thread: Some(thread) }
    }
    /// How many got through to the door.
    fn leave(mut self) -> usize {
        let _ = self.stop.send(());
        self.thread.take().unwrap().join().unwrap()
    }
}

#[test]
fn strangers_disturb_neither_the_meeting_nor_the_run() {
    let place = Place::new();
    let meeting = Meeting::new();
    let strangers = Strangers::at(meeting.port);
    let mut ranks = Ranks::none();
    ranks.add(&place, "a", meeting.rank(0, 2, command(&place, "a", &["--backend", "tcp"])));
    // The door stands open to strangers alone for a while.
    std::thread::sleep(Duration::from_millis(500));
    ranks.add(&place, "a", meeting.rank(1, 2, command(&place, "a", &["--backend", "tcp"])));
    assert_eq!(ranks.codes(PATIENCE), [Some(0), Some(0)], "{}", ranks.said(0));
    assert!(strangers.leave() >= 3, "hardly anybody came");
    assert_undisturbed(&place, "a");
}

#[test]
fn a_main_rank_that_comes_late_is_waited_for() {
    let place = Place::new();
    let meeting = Meeting::new();
    let mut ranks = Ranks::none();
    for rank in [1, 2, 3] {
        ranks.add(&place, "a", meeting.rank(rank, 4, command(&place, "a", &[])));
    }
    std::thread::sleep(Duration::from_secs(4));
    ranks.add(&place, "a", meeting.rank(0, 4, command(&place, "a", &[])));
    assert_eq!(ranks.codes(PATIENCE), vec![Some(0); 4], "{}", ranks.said(3));
    assert_undisturbed(&place, "a");
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let place = Place::new();
    let meeting = Meeting::new();
    let mut ranks = Ranks::none();
    for rank in [0, 2] {
        ranks.add(&place, "a", meeting.rank(rank, 3, command(&place, "a", &["--join_timeout", "3"])));
    }
    assert_eq!(ranks.end_of(0, PATIENCE).code(), Some(1), "{}", ranks.said(0));
    assert!(ranks.said(0).contains("rank 1") && ranks.said(0).contains("3 s"), "{}", ranks.said(0));
    assert!(matches!(ranks.end_of(1, PATIENCE).code(), Some(1 | PEER_LOST)), "{}", ranks.said(1));
}

#[test]
fn a_port_that_is_taken_is_named() {
    let place = Place::new();
    let other = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
    let meeting = Meeting { port: other.local_addr().unwrap().port(), secret: "mine".into() };
    let mut ranks = Ranks::none();
    for rank in 0..2 {
        ranks.add(&place, "a", meeting.rank(rank, 2, command(&place, "a", &["--join_timeout", "3"])));
    }
    // Rank 1 meets a listener that never answers, and does not wait for ever.
    assert_eq!(ranks.codes(PATIENCE), [Some(1), Some(1)], "{}", ranks.said(0));
    assert!(ranks.said(0).contains(&meeting.port.to_string()), "{}", ranks.said(0));
    assert!(ranks.said(0).contains("in use"), "{}", ranks.said(0));
    assert!(!ranks.said(0).contains("panicked") && !ranks.said(1).contains("panicked"));
}

#[test]
fn two_runs_at_one_door_keep_apart() {
    let place = Place::new();
    let first = Meeting::new();
    let second = Meeting { secret: "another".into(), ..first.clone() };
    let endless = ["--total_steps", "1000000", "--save_freq", "1000000"];
    let mut ranks = Ranks::none();
    for rank in 0..2 {
        ranks.add(&place, "a", first.rank(rank, 2, command(&place, "a", &endless)));
    }
    ranks.wait_update(&place, "a", 2);
    let mut late = Ranks::none();
    for rank in 0..2 {
        late.add(&place, "b", second.rank(rank, 2, command(&place, "b", &["--join_timeout", "3"])));
    }
    assert_eq!(late.codes(PATIENCE), [Some(1), Some(1)], "{}", late.said(0));
    assert!(late.said(0).contains("in use"), "{}", late.said(0));
    assert!(support::losses(&place.run_dir("b")).is_empty(), "nothing was trained");
    // The first has noticed nothing: it goes on, and ends in order.
    let before = support::losses(&place.run_dir("a")).len() as u64;
    ranks.wait_update(&place, "a", before + 2);
    ranks.send(1, rustix::process::Signal::TERM);
    assert_eq!(ranks.codes(PATIENCE), [Some(75), Some(75)], "{}", ranks.said(0));
}
