//! A peer that is stopped, slow, cut off or out of disk while the run is at work.

use std::io::{Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::process::Signal;

use super::ranks::*;
use super::support::{self, Place};

#[test]
fn a_stopped_rank_is_lost_and_ends_when_it_wakes() {
    let place = Place::new();
    for backend in ["local", "tcp"] {
        let mut ranks = Ranks::start(&place, backend, 2, &["--backend", backend]);
        ranks.wait_update(&place, backend, 7);
        ranks.send(1, Signal::STOP);
        let code = ranks.end_of(0, GONE_AFTER).code();
        assert_eq!(code, Some(PEER_LOST), "{}", ranks.said(0));
        let line = lost_line(&place, backend, 1);
        assert!(line.contains("no sign of life"), "{line}");
        // It neither goes on alone nor stays.
        ranks.send(1, Signal::CONT);
        assert_eq!(ranks.end_of(1, GONE_AFTER).code(), Some(PEER_LOST), "{}", ranks.said(1));
        go_on(&place, backend, 2);
        let resumed = support::events(&place.run_dir(backend), "resume");
        assert!(matches!(resumed[..], [step] if step >= 5 && step % 5 == 0), "{resumed:?}");
        assert_undisturbed(&place, backend);
    }
}

#[test]
fn a_stopped_main_rank_is_lost_to_the_others() {
    let place = Place::new();
    let mut ranks = Ranks::start(&place, "a", 4, &[]);
    ranks.wait_update(&place, "a", 7);
    ranks.send(0, Signal::STOP);
    for rank in 1..4 {
        assert_eq!(ranks.end_of(rank, GONE_AFTER).code(), Some(PEER_LOST), "{}", ranks.said(rank));
        assert!(ranks.said(rank).contains("rank 0 on host"), "{}", ranks.said(rank));
    }
    ranks.send(0, Signal::CONT);
    assert_eq!(ranks.end_of(0, GONE_AFTER).code(), Some(PEER_LOST), "{}", ranks.said(0));
    go_on(&place, "a", 4);
    assert_undisturbed(&place, "a");
}

#[test]
fn a_slow_rank_is_waited_for() {
    let place = Place::new();
    let mut ranks = Ranks::start(&place, "a", 2, &[]);
    for step in [3, 6, 9] {
        ranks.wait_update(&place, "a", step);
        ranks.send(1, Signal::STOP);
        std::thread::sleep(Duration::from_secs(LOST_AFTER) / 4);
        ranks.send(1, Signal::CONT);
    }
    assert_eq!(ranks.codes(PATIENCE), [Some(0), Some(0)], "{}", ranks.said(0));
    assert_undisturbed(&place, "a");
}

#[test]
fn a_killed_rank_ends_the_others_and_the_run_goes_on_with_another_number() {
    let place = Place::new();
    let mut ranks = Ranks::start(&place, "a", 4, &[]);
    ranks.wait_update(&place, "a", 7);
    ranks.send(2, Signal::KILL);
    assert_eq!(ranks.codes(GONE_AFTER), [Some(PEER_LOST), Some(PEER_LOST), None, Some(PEER_LOST)]);
    lost_line(&place, "a", 2);
    go_on(&place, "a", 2);
    assert_undisturbed(&place, "a");
}

/// A way from one port to another that can be cut as a router would: with a reset on both sides.
struct Cable {
    port: u16,
    ends: Arc<Mutex<Vec<TcpStream>>>,
    done: Arc<AtomicBool>,
}

impl Cable {
    fn to(target: u16) -> Cable {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        let (ends, done) = (Arc::new(Mutex::new(Vec::new())), Arc::new(AtomicBool::new(false)));
        let (all, stop) = (Arc::clone(&ends), Arc::clone(&done));
        std::thread::spawn(move || {
            while let Ok((near, _)) = listener.accept() {
                if stop.load(Ordering::Relaxed) {
                    return;
                }
                // Not there yet: the one who came sees its connection end, and comes again.
                let Ok(far) = TcpStream::connect((Ipv4Addr::LOCALHOST, target)) else { continue };
                for (from, to) in [(&near, &far), (&far, &near)] {
                    let (mut from, mut to) = (from.try_clone().unwrap(), to.try_clone().unwrap());
                    std::thread::spawn(move || {
                        let mut bytes = [0; 1 << 14];
                        while let Ok(n @ 1..) = from.read(&mut bytes) {
                            if to.write_all(&bytes[..n]).is_err() {
                                break;
                            }
                        }
                        let _ = to.shutdown(std::net::Shutdown::Both);
                    });
                }
                all.lock().unwrap().extend([near, far]);
            }
        });
        Cable { port, ends, done }
    }
    fn cut(&self) {
        for end in self.ends.lock().unwrap().drain(..) {
            // To connect to nothing is how a socket is made to say "reset" at once.
            rustix::net::connect_unspec(&end).unwrap();
        }
    }
}

impl Drop for Cable {
    fn drop(&mut self) {
        self.done.store(true, Ordering::Relaxed);
        let _ = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port)); // Wakes the listener.
        self.cut();
    }
}

#[test]
fn a_reset_connection_is_a_lost_rank_on_both_sides() {
    let place = Place::new();
    let meeting = Meeting::new();
    let cable = Cable::to(meeting.port);
    let through = Meeting { port: cable.port, ..meeting.clone() };
    let mut ranks = Ranks::none();
    ranks.add(&place, "a", meeting.rank(0, 2, command(&place, "a", &[])));
    ranks.add(&place, "a", through.rank(1, 2, command(&place, "a", &[])));
    ranks.wait_update(&place, "a", 7);
    cable.cut();
    assert_eq!(ranks.codes(GONE_AFTER), [Some(PEER_LOST), Some(PEER_LOST)], "{}", ranks.said(0));
    lost_line(&place, "a", 1);
    assert!(ranks.said(1).contains("rank 0 on host"), "{}", ranks.said(1));
    go_on(&place, "a", 1);
    assert_undisturbed(&place, "a");
}

#[test]
fn a_full_disk_of_the_main_rank_ends_all_and_costs_nothing_that_was_saved() {
    let place = Place::new();
    let run = place.run_dir("a");
    let disk = SmallDisk::mount(&run, "12m");
    let mut ranks = Ranks::start(&place, "a", 2, &[]);
    assert_eq!(ranks.codes(PATIENCE), [Some(1), Some(PEER_LOST)], "{}", ranks.said(0));
    assert!(ranks.said(0).contains("disk is full at"), "{}", ranks.said(0));
    assert!(
        ranks.said(1).contains("rank 0 on host") && ranks.said(1).contains("disk is full at"),
        "{}",
        ranks.said(1)
    );
    let saved = support::checkpoints(&run).len() as u64;
    assert!(saved > 0 && saved < 6);
    assert_eq!(support::link(&run, "latest"), format!("step-{}", 5 * saved));
    disk.resize("64m");
    go_on(&place, "a", 2);
    assert_eq!(support::events(&run, "resume"), [5 * saved]);
    assert_undisturbed(&place, "a");
}

/// A small file system of its own, unmounted at the end.
struct SmallDisk(String);

impl SmallDisk {
    fn mount(at: &std::path::Path, size: &str) -> SmallDisk {
        std::fs::create_dir_all(at).unwrap();
        let at = at.to_str().unwrap().to_owned();
        Self::command("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", &at]);
        SmallDisk(at)
    }
    fn resize(&self, size: &str) {
        Self::command("mount", &["-o", &format!("remount,size={size}"), &self.0]);
    }
    fn command(program: &str, words: &[&str]) {
        let output = std::process::Command::new(program).args(words).output().unwrap();
        assert!(output.status.success(), "{program} (needs root): {}", support::stderr(&output));
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").args(["-l", &self.0]).status();
    }
}
