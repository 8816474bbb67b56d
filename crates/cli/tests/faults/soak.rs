//! Random ranks meet random ends at random moments, and the run goes on with a random number of ranks, to the same bits.
//!
//! TERCIO_SOAK_KILLS says how many ends (8 unless set; `tools/soak` asks for 200), TERCIO_SOAK_SEED which.

use std::time::Duration;

use rustix::process::Signal;

use super::ranks::*;
use super::support::{self, Place};

/// Draws that are the same for a seed on any machine.
struct Draws(u64);

impl Draws {
    /// One of `0..n`.
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % n
    }
    fn of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name)
        .map_or(default, |text| text.parse().unwrap_or_else(|_| panic!("{name}: {text:?} is no number")))
}

#[test]
fn random_ends_never_change_a_bit() {
    let (kills, seed) = (setting("TERCIO_SOAK_KILLS", 8), setting("TERCIO_SOAK_SEED", 1));
    let mut draws = Draws(seed);
    let place = Place::new();
    let (mut done, mut runs, mut starts) = (0, 0, 0);
    while done < kills {
        runs += 1;
        let name = format!("run-{runs}");
        // Each start trains a few updates at most before its end, so that a run sees several.
        while done < kills
            && support::losses(&place.run_dir(&name)).last().is_none_or(|l| l.0 < support::TOTAL)
        {
            starts += 1;
            match disturbed(&place, &name, &mut draws) {
                Some(what) => {
                    done += 1;
                    println!("end {done} of {kills}: {name}, {what}");
                }
                None => println!("{name} came to its end before it was disturbed"),
            }
        }
        // From here on nobody disturbs it.
        let world = draws.of(&[1, 2, 4]);
        go_on(&place, &name, world);
        assert_undisturbed(&place, &name);
        let hidden = std::fs::read_dir(place.run_dir(&name).join("checkpoint")).unwrap();
        let hidden: Vec<_> =
            hidden.map(|e| e.unwrap().file_name()).filter(|n| n.as_encoded_bytes()[0] == b'.').collect();
        assert!(hidden.is_empty(), "{hidden:?} are left");
        std::fs::remove_dir_all(place.run_dir(&name)).unwrap();
        println!("{name} ended with the bits of an undisturbed run, the last start on {world} ranks");
    }
    println!("soak: seed {seed}, {done} ends in {starts} starts of {runs} runs, all with the same bits");
}

/// Starts the run and ends one of its ranks; says what happened, or that the run was done before.
fn disturbed(place: &Place, name: &str, draws: &mut Draws) -> Option<String> {
    let world = draws.of(&[1usize, 2, 2, 4]);
    let backend = draws.of(&["local", "tcp"]);
    let shard = draws.of(&["none", "optimizer"]);
    let victim = draws.below(world as u64) as usize;
    let signal = draws.of(&[Signal::KILL, Signal::KILL, Signal::TERM, Signal::STOP]);
    // Some die before the ranks have met; most within the next updates; a moment later anywhere in one.
    let updates = draws.below(9);
    let pause = Duration::from_micros(draws.below(80_000));
    let logged = |place: &Place| support::losses(&place.run_dir(name)).last().map_or(0, |last| last.0);
    let from = logged(place);
    // Who dies before the ranks have met is waited for as long as the setting says.
    let flags = ["--lost_after", "2", "--join_timeout", "10", "--backend", backend, "--shard", shard];
    let mut ranks = Ranks::start(place, name, world, &flags[..if world == 1 { 4 } else { 8 }]);
    let begun = support::begins(&place.run_dir(name));
    let end = std::time::Instant::now() + PATIENCE;
    // What was logged after the checkpoint is taken back at the start: count from there.
    while updates > 0
        && (support::begins(&place.run_dir(name)) == begun
            || support::updates_of(&place.run_dir(name), begun + 1) < updates as usize)
    {
        assert!(std::time::Instant::now() < end, "nothing happens: {}", ranks.said(0));
        if ranks.children.iter_mut().all(|child| child.try_wait().unwrap().is_some()) {
            break;
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    std::thread::sleep(pause);
    if ranks.children[victim].try_wait().unwrap().is_some() {
        assert_eq!(ranks.codes(PATIENCE), vec![Some(0); world], "{}", ranks.said(0));
        return None;
    }
    ranks.send(victim, signal);
    if signal == Signal::STOP && world == 1 {
        ranks.send(victim, Signal::KILL);
    }
    for rank in (0..world).filter(|&rank| rank != victim) {
        let code = ranks.end_of(rank, GONE_AFTER).code();
        // 0: the last update was done when it came. 1: the other was gone before they met.
        assert!(matches!(code, Some(0 | 1 | 75 | PEER_LOST)), "rank {rank}: {code:?}: {}", ranks.said(rank));
        assert!(!ranks.said(rank).contains("panicked"), "{}", ranks.said(rank));
    }
    match signal {
        Signal::STOP => {
            // Half of the time it wakes up among those who have given it up.
            ranks.send(victim, draws.of(&[Signal::CONT, Signal::KILL]));
            ranks.end_of(victim, GONE_AFTER);
        }
        _ => drop(ranks.end_of(victim, GONE_AFTER)),
    }
    Some(format!(
        "{world} ranks, {backend}, shard {shard}: {signal:?} to rank {victim}, {from} updates logged before"
    ))
}
