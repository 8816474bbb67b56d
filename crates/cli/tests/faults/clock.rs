//! A wall clock that jumps by hours, forth and back, under every rank: nobody is given up, nothing is computed otherwise, and
//! what was saved is found again.

use std::path::PathBuf;
use std::process::Command;

use rustix::process::Signal;

use super::ranks::*;
use super::support::{self, Place};

/// Stands before the C library and shifts the time of day at every few calls; clocks that only go forward stay as they are.
const JUMPY: &str = r#"
#define _GNU_SOURCE
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static long shift(void) {
    static unsigned calls;
    static const long hours[] = {0, 5, -7, 30, -1};
    unsigned call = __atomic_fetch_add(&calls, 1, __ATOMIC_RELAXED);
    return 3600 * hours[call / 3 % 5];
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    int failed = (int)syscall(SYS_clock_gettime, clock, t);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE || clock == CLOCK_TAI)) t->tv_sec += shift();
    return failed;
}

int gettimeofday(struct timeval *t, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    t->tv_sec = now.tv_sec;
    t->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *to) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (to) *to = now.tv_sec;
    return now.tv_sec;
}
"#;

/// The library, made by the C compiler that a build of Tercio needs anyway.
fn jumpy(place: &Place) -> Option<PathBuf> {
    place.write("jumpy.c", JUMPY);
    let (source, library) = (place.path("jumpy.c"), place.path("jumpy.so"));
    let made = Command::new("cc").args(["-shared", "-fPIC", "-O1", "-o"]).args([&library, &source]).output();
    match made {
        Ok(output) => {
            assert!(output.status.success(), "{}", support::stderr(&output));
            Some(library)
        }
        Err(error) => {
            eprintln!("NOT TESTED HERE: a clock that jumps; no C compiler: {error}");
            None
        }
    }
}

fn start(place: &Place, library: &PathBuf, world: usize) -> Ranks {
    let meeting = Meeting::new();
    let mut ranks = Ranks::none();
    for rank in 0..world {
        let mut command = meeting.rank(rank, world, command(place, "a", &["--trace_ranks"]));
        command.env("LD_PRELOAD", library);
        ranks.add(place, "a", command);
    }
    ranks
}

#[test]
fn a_clock_that_jumps_changes_nothing() {
    let place = Place::new();
    let Some(library) = jumpy(&place) else { return };
    let run = place.run_dir("a");
    let mut ranks = start(&place, &library, 2);
    ranks.wait_update(&place, "a", 12);
    // Saved on a signal, and gone on under the same clock.
    ranks.send(1, Signal::TERM);
    assert_eq!(ranks.codes(PATIENCE), [Some(75), Some(75)], "{}", ranks.said(0));
    let saved = support::losses(&run).last().unwrap().0;
    let mut ranks = start(&place, &library, 4);
    assert_eq!(ranks.codes(PATIENCE), vec![Some(0); 4], "{}", ranks.said(0));
    assert_eq!(support::events(&run, "resume"), [saved]);
    assert_undisturbed(&place, "a");
    // The test of the test: the clock did jump under these processes.
    let times: Vec<f64> = support::metrics(&run).iter().filter_map(|line| line["time"].as_f64()).collect();
    let back = times.windows(2).filter(|pair| pair[1] < pair[0] - 1800.0).count();
    assert!(back >= 2, "the clock did not jump: {times:?}");
}
