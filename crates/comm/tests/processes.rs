//! Ranks as processes that are killed or stopped in mid-collective: the others end, and name the one that was lost.

mod common;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use common::{free_port, place, settings};
use rustix::process::{Pid, Signal, kill_process};
use tercio_comm::{Backend, Settings, World};

/// Far longer than anything here takes: it only keeps a hang from lasting.
const PATIENCE: Duration = Duration::from_secs(120);
/// Exit code of a rank that ended because of another.
const OTHER: i32 = 76;

/// A rank as a process of its own, which ends with the test.
struct Rank {
    child: Child,
    lines: Receiver<String>,
    seen: Vec<String>,
}

impl Drop for Rank {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Rank {
    fn start(rank: usize, size: usize, meeting: &str, backend: Backend, lost_after: Duration) -> Rank {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "a_rank_of_the_others", "--ignored", "--nocapture"])
            .env("TEST_RANK", rank.to_string())
            .env("TEST_SIZE", size.to_string())
            .env("TEST_MEETING", meeting)
            .env("TEST_BACKEND", backend.name())
            .env("TEST_LOST_AFTER", lost_after.as_millis().to_string())
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = child.stdout.take().unwrap();
        let (sender, lines) = channel();
        std::thread::spawn(move || {
            for line in BufReader::new(out).lines().map_while(Result::ok) {
                if sender.send(line).is_err() {
                    return;
                }
            }
        });
        Rank { child, lines, seen: Vec::new() }
    }
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }
    /// Waits for a line with `word`.
    fn line(&mut self, word: &str) -> String {
        let end = Instant::now() + PATIENCE;
        loop {
            let left = end.saturating_duration_since(Instant::now());
            let line =
                self.lines.recv_timeout(left).unwrap_or_else(|_| panic!("no {word:?} in {:?}", self.seen));
            self.seen.push(line.clone());
            if line.contains(word) {
                return line;
            }
        }
    }
    /// Waits for its end; its error and exit code.
    fn end(&mut self) -> (String, Option<i32>) {
        let error = self.line("ENDED");
        let end = Instant::now() + PATIENCE;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return (error, status.code());
            }
            assert!(Instant::now() < end, "it does not end after {error}");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

fn start(size: usize, meeting: &str, backend: Backend, lost_after: Duration) -> Vec<Rank> {
    (0..size).map(|rank| Rank::start(rank, size, meeting, backend, lost_after)).collect()
}

fn world(size: usize, backend: Backend, lost_after: Duration) -> Vec<Rank> {
    let meeting = format!("127.0.0.1:{}", free_port("127.0.0.1"));
    let mut ranks = start(size, &meeting, backend, lost_after);
    ranks.iter_mut().for_each(|rank| drop(rank.line("update 3")));
    ranks
}

#[test]
#[ignore = "a rank of the other tests"]
fn a_rank_of_the_others() {
    let text = |name: &str| std::env::var(name).expect("started by this file");
    let number = |name: &str| text(name).parse::<usize>().unwrap();
    let place = place(number("TEST_RANK"), number("TEST_SIZE"), &text("TEST_MEETING"));
    let lost_after = Duration::from_millis(number("TEST_LOST_AFTER") as u64);
    let settings = Settings { lost_after, ..settings(text("TEST_BACKEND").parse().unwrap()) };
    let world = World::join(&place, &settings).unwrap();
    let mut data = vec![1.0f32; 300_000];
    for update in 1.. {
        world.at_update(update);
        if let Err(e) = world.all_reduce(&mut data) {
            println!("ENDED {e}");
            std::io::stdout().flush().unwrap();
            std::process::exit(OTHER);
        }
        println!("update {update}");
        // Not the whole machine.
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Everyone but `lost` ends, naming it.
fn others_end(ranks: &mut [Rank], lost: usize, words: &[&str]) {
    for (rank, process) in ranks.iter_mut().enumerate().filter(|(rank, _)| *rank != lost) {
        let (error, code) = process.end();
        assert_eq!(code, Some(OTHER));
        let named = error.contains(&format!("rank {lost} on host")) && error.contains("at update");
        assert!(named && words.iter().all(|word| error.contains(word)), "rank {rank}: {error}");
    }
}

#[test]
fn a_killed_rank_is_named_by_all_others() {
    for backend in [Backend::Tcp, Backend::Local] {
        for lost in [0, 3] {
            let mut ranks = world(4, backend, Duration::from_secs(60));
            ranks[lost].signal(Signal::KILL);
            others_end(&mut ranks, lost, &["was lost", "its connection"]);
        }
    }
}

#[test]
fn a_stopped_rank_is_given_up_and_ends_when_it_wakes() {
    for (backend, lost) in [(Backend::Tcp, 1), (Backend::Local, 0)] {
        let mut ranks = world(3, backend, Duration::from_millis(2500));
        ranks[lost].signal(Signal::STOP);
        others_end(&mut ranks, lost, &["was lost", "no sign of life for 2.5 s"]);
        ranks[lost].signal(Signal::CONT);
        let (error, code) = ranks[lost].end();
        assert_eq!(code, Some(OTHER));
        assert!(error.contains(&format!("rank {lost} on host")) && error.contains("stopped"), "{error}");
    }
}

#[test]
fn a_rank_that_stops_for_a_while_is_waited_for() {
    let mut ranks = world(2, Backend::Tcp, Duration::from_secs(60));
    ranks[1].signal(Signal::STOP);
    std::thread::sleep(Duration::from_millis(1500));
    ranks[1].signal(Signal::CONT);
    for rank in &mut ranks {
        let reached = rank.seen.len() + 20;
        while rank.seen.len() < reached {
            rank.line("update");
        }
    }
}

/// Starts of one secret and one meeting place, killed in every moment of their meeting: the next one has nothing of theirs.
#[test]
fn what_died_while_it_met_is_not_met() {
    let meeting = format!("127.0.0.1:{}", free_port("127.0.0.1"));
    for backend in [Backend::Local, Backend::Tcp] {
        for moment in 0..15 {
            let ranks = start(3, &meeting, backend, Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(4 * moment));
            drop(ranks);
        }
        let mut ranks = start(3, &meeting, backend, Duration::from_secs(60));
        ranks.iter_mut().for_each(|rank| drop(rank.line("update 3")));
    }
}
