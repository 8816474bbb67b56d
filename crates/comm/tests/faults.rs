//! Ranks in trouble: strangers, wrong starts, ranks that fail, hang or are out of step. Everyone gets an error that says why.

#![allow(clippy::single_range_in_vec_init)] // one bucket is a case of several

mod common;

use std::io::Write;
use std::net::{TcpListener, TcpStream};
use std::ops::Range;
use std::time::{Duration, Instant};

use common::{free_port, place, settings, try_ranks, values};
use tercio_comm::{Backend, CommError, Leave, Place, Settings, World};

fn quick() -> Settings {
    Settings { join_timeout: Duration::from_millis(700), ..settings(Backend::Tcp) }
}

/// Joins several places at once; what each gets.
fn join_all(places: &[Place], settings: &Settings) -> Vec<Result<World, CommError>> {
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            places.iter().map(|place| scope.spawn(|| World::join(place, settings))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn meeting() -> String {
    format!("127.0.0.1:{}", free_port("127.0.0.1"))
}

fn error<T>(result: &Result<T, CommError>) -> String {
    match result {
        Ok(_) => panic!("an error was expected"),
        Err(e) => e.to_string(),
    }
}

/// Everyone has these words in the error.
fn all_say<T>(results: &[Result<T, CommError>], words: &[&str]) {
    for (rank, result) in results.iter().enumerate() {
        let text = error(result);
        assert!(words.iter().all(|word| text.contains(word)), "rank {rank}: {text}, expected {words:?}");
    }
}

/// Strangers at a port: garbage, something like a message, half a message, silence, and one that goes at once.
fn strangers(address: &str) -> Vec<TcpStream> {
    let mut half = vec![40, 0, 0, 0, 1, 2, 3, 4, 1];
    half.extend_from_slice(b"tercio ranks");
    let texts: [&[u8]; 5] =
        [b"GET / HTTP/1.1\r\n\r\n", &[0xff; 100_000], &[4, 0, 0, 0, 9, 9, 9, 9, 6, 0, 0, 0], &half, b""];
    let mut open = Vec::new();
    for text in texts {
        let mut stream = TcpStream::connect(address).unwrap();
        // The other side may hang up in the midst of it.
        let _ = stream.write_all(text);
        open.push(stream);
    }
    drop(TcpStream::connect(address).unwrap());
    open
}

#[test]
fn strangers_disturb_nobody() {
    let meeting = meeting();
    let settings = settings(Backend::Tcp);
    std::thread::scope(|scope| {
        let main = scope.spawn(|| World::join(&place(0, 2, &meeting), &settings).unwrap());
        // Before the other rank is there.
        let since = Instant::now();
        while TcpStream::connect(&meeting).is_err() {
            assert!(since.elapsed() < Duration::from_secs(60));
            std::thread::sleep(Duration::from_millis(5));
        }
        let before = strangers(&meeting);
        let other = World::join(&place(1, 2, &meeting), &settings).unwrap();
        let main = main.join().unwrap();
        // And after.
        let after = strangers(&meeting);
        let work = |world: World| {
            for _ in 0..20 {
                world.barrier().unwrap();
                std::thread::sleep(Duration::from_millis(5));
            }
            world.all_gather(&[world.rank() as f32]).unwrap()
        };
        let threads = [main, other].map(|world| scope.spawn(move || work(world)));
        for thread in threads {
            assert_eq!(thread.join().unwrap(), vec![vec![0.0], vec![1.0]]);
        }
        drop((before, after));
    });
}

#[test]
fn a_wrong_secret_is_refused() {
    let meeting = meeting();
    let stranger = Place { secret: "another".into(), ..place(1, 2, &meeting) };
    let settings = Settings { join_timeout: Duration::from_secs(5), ..quick() };
    let results = join_all(&[place(0, 2, &meeting), stranger], &settings);
    assert!(error(&results[0]).contains("rank 1 (1 of 2) did not come"), "{}", error(&results[0]));
    assert!(error(&results[1]).contains("another secret"), "{}", error(&results[1]));
    assert!(!error(&results[1]).contains("the secret of"));
    let none = Place { secret: String::new(), ..place(1, 2, &meeting) };
    assert!(error(&World::join(&none, &quick())).contains("TERCIO_SECRET"));
}

#[test]
fn a_rank_twice_is_named_on_all_sides() {
    let meeting = meeting();
    let places = [place(0, 3, &meeting), place(1, 3, &meeting), place(1, 3, &meeting)];
    all_say(&join_all(&places, &settings(Backend::Tcp)), &["rank 1 is here twice", "process"]);
}

#[test]
fn another_number_of_ranks_is_named_on_all_sides() {
    let meeting = meeting();
    let places = [place(0, 2, &meeting), place(1, 3, &meeting)];
    all_say(
        &join_all(&places, &settings(Backend::Tcp)),
        &["3 ranks", "in 2", "start all with the same number"],
    );
    let second = [place(0, 2, &meeting), place(0, 2, &meeting)];
    let results = join_all(&second, &quick());
    assert!(results.iter().any(|r| error(r).contains("is in use")), "two mains on one port");
}

#[test]
fn another_backend_is_named_on_all_sides() {
    let meeting = meeting();
    let results: Vec<_> = std::thread::scope(|scope| {
        [Backend::Tcp, Backend::Auto]
            .into_iter()
            .enumerate()
            .map(|(rank, backend)| {
                let place = place(rank, 2, &meeting);
                scope.spawn(move || World::join(&place, &settings(backend)))
            })
            .collect::<Vec<_>>()
            .into_iter()
            .map(|thread| thread.join().unwrap())
            .collect()
    });
    all_say(&results, &["the backend is tcp on rank 0", "auto on rank 1"]);
}

#[test]
fn a_port_in_use_is_named() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port();
    let text = error(&World::join(&place(0, 2, &format!("127.0.0.1:{port}")), &quick()));
    assert!(text.contains(&format!("port {port}")) && text.contains("choose another port"), "{text}");
    // A rank that meets something else there says so.
    let text = error(&World::join(&place(1, 2, &format!("127.0.0.1:{port}")), &quick()));
    assert!(text.contains("did not find rank 0") && text.contains("does not answer"), "{text}");
}

#[test]
fn odd_meeting_places_are_named() {
    for meeting in ["", "nowhere", "127.0.0.1:", ":29500", "127.0.0.1:0", "a:99999"] {
        let text = error(&World::join(&place(1, 2, meeting), &quick()));
        assert!(text.contains("expected host:port"), "{meeting:?}: {text}");
    }
    let text = error(&World::join(&place(1, 2, "no.such.host.invalid:29500"), &quick()));
    assert!(text.contains("no.such.host.invalid"), "{text}");
    let odd = Settings { interface: Some("eth77".into()), ..quick() };
    let text = error(&World::join(&place(0, 2, &meeting()), &odd));
    assert!(text.contains("eth77") && text.contains("lo"), "{text}");
}

#[test]
fn rank_0_may_come_late_and_ipv6_works() {
    for host in ["[::1]", "127.0.0.1", "localhost"] {
        let meeting = format!("{host}:{}", free_port(host.trim_matches(['[', ']'])));
        let settings = settings(Backend::Tcp);
        std::thread::scope(|scope| {
            let early: Vec<_> = (1..3)
                .map(|rank| {
                    let place = place(rank, 3, &meeting);
                    let settings = &settings;
                    scope.spawn(move || World::join(&place, settings).unwrap())
                })
                .collect();
            std::thread::sleep(Duration::from_millis(700));
            let main = World::join(&place(0, 3, &meeting), &settings).unwrap();
            let mut all: Vec<World> = early.into_iter().map(|thread| thread.join().unwrap()).collect();
            all.push(main);
            let threads: Vec<_> = all
                .into_iter()
                .map(|world| {
                    scope.spawn(move || {
                        let mut sum = [1.0f32];
                        world.all_reduce(&mut sum).unwrap();
                        sum[0]
                    })
                })
                .collect();
            assert!(threads.into_iter().all(|thread| thread.join().unwrap() == 3.0));
        });
    }
}

#[test]
fn an_interface_can_be_chosen() {
    let by_name = Settings { interface: Some("lo".into()), ..settings(Backend::Tcp) };
    let by_address = Settings { interface: Some("127.0.0.1".into()), ..settings(Backend::Tcp) };
    for settings in [by_name, by_address] {
        let results = try_ranks(2, &settings, |world| world.barrier());
        assert!(results.iter().all(Result::is_ok));
    }
}

#[test]
fn a_failure_is_told_to_all() {
    for backend in [Backend::Tcp, Backend::Local] {
        for failing in [0, 2] {
            let results = try_ranks(4, &settings(backend), |world| {
                world.at_update(17);
                world.barrier()?;
                if world.rank() == failing {
                    world.fail("the disk is full");
                    // Its own later calls say it too.
                    return world.barrier();
                }
                world.all_reduce(&mut [0.0f32; 100_000])
            });
            all_say(&results, &[&format!("rank {failing} on host"), "failed at update 17: the disk is full"]);
            assert!(
                results.iter().all(|r| matches!(r, Err(CommError::Failed { rank, .. }) if *rank == failing))
            );
        }
    }
}

#[test]
fn a_panic_is_told_to_all() {
    let results = std::panic::catch_unwind(|| {
        try_ranks(2, &settings(Backend::Tcp), |world| -> Result<(), CommError> {
            let text = if world.rank() == 1 { panic!("on purpose") } else { error(&world.barrier()) };
            assert!(text.contains("rank 1 on host") && text.contains("panicked"), "{text}");
            panic!("rank 0 saw it");
        })
    });
    assert!(results.is_err());
}

#[test]
fn a_rank_that_hangs_is_named() {
    let settings = Settings { collective_timeout: Duration::from_millis(500), ..settings(Backend::Tcp) };
    let results = try_ranks(4, &settings, |world| {
        world.at_update(9);
        world.barrier()?;
        if world.rank() == 2 {
            // Alive, but elsewhere: until the others gave up.
            let since = Instant::now();
            while world.check().is_ok() && since.elapsed() < Duration::from_secs(60) {
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        world.all_gather_bytes(vec![1]).map(|_| ())
    });
    assert!(matches!(results[0], Err(CommError::Lost { rank: 2, .. })), "{}", error(&results[0]));
    // Rank 0 waits for rank 1, which waits for rank 3 or was told; rank 2 alone is named by all.
    all_say(
        &results,
        &["rank 2 on host", "at update 9", "gives signs of life", "waited 0.5 s for rank", "all-gather 2"],
    );
}

#[test]
fn ranks_out_of_step_are_named() {
    let results = try_ranks(2, &settings(Backend::Tcp), |world| {
        world.barrier()?;
        if world.rank() == 0 {
            world.all_reduce(&mut [1.0f32])
        } else {
            world.all_gather_bytes(vec![]).map(|_| ())
        }
    });
    all_say(&results, &["is not in step", "all-gather 2", "all-reduce 2"]);
    let results =
        try_ranks(2, &settings(Backend::Tcp), |world| world.all_reduce(&mut values(0, 1000 + world.rank())));
    all_say(&results, &["bytes where this rank expects"]);
}

#[test]
fn a_reduction_that_is_dropped_ends_the_run() {
    let results = try_ranks(2, &settings(Backend::Tcp), |world| {
        let mut data = values(0, 100_000);
        // SAFETY: `data` is not touched before the reduction is gone.
        let reduction = unsafe {
            world.start_reduction(
                data.as_mut_ptr(),
                data.len(),
                &[0..50_000, 50_000..100_000],
                Leave::Owned,
                1,
                true,
            )?
        };
        reduction.ready(0);
        if world.rank() == 1 {
            drop(reduction);
            return world.barrier();
        }
        reduction.ready(1);
        reduction.finish().map(|_| ())
    });
    all_say(&results, &["rank 1 on host", "dropped a reduction before it was finished"]);
}

#[test]
fn the_reason_for_a_dropped_reduction_can_be_told_after_it() {
    let results = try_ranks(2, &settings(Backend::Tcp), |world| {
        let mut data = values(0, 1000);
        let start = |data: &mut Vec<f32>| {
            // SAFETY: `data` is not touched before the reductions are gone.
            unsafe { world.start_reduction(data.as_mut_ptr(), 1000, &[0..1000], Leave::Owned, 1, true) }
        };
        let first = start(&mut data)?;
        let second = start(&mut data)?;
        if world.rank() == 0 {
            // The second one waits for its turn; the first one for its bucket.
            drop(second);
            drop(first);
            world.fail("not a number");
            return world.barrier();
        }
        first.finish().map(|_| ())
    });
    all_say(&results, &["rank 0 on host", "failed", "not a number"]);
}

#[test]
fn buckets_that_do_not_fit_are_refused() {
    let world = World::alone();
    let mut data = [0.0f32; 10];
    for buckets in [vec![5..11], vec![0..6, 5..10], vec![Range { start: 3, end: 2 }]] {
        // SAFETY: it does not start.
        let result = unsafe { world.start_reduction(data.as_mut_ptr(), 10, &buckets, Leave::Owned, 1, true) };
        assert!(result.is_err_and(|e| e.to_string().contains("does not lie within the 10 elements")));
    }
}

#[test]
fn a_rank_that_ended_early_is_named() {
    for (early, backend) in [(1, Backend::Tcp), (0, Backend::Tcp), (1, Backend::Local)] {
        let results = try_ranks(2, &settings(backend), |world| {
            world.barrier()?;
            if world.rank() == early {
                return Ok(());
            }
            world.barrier()
        });
        let text = error(&results[1 - early]);
        assert!(text.contains(&format!("rank {early} on host")) && text.contains("was lost"), "{text}");
        assert!(results[early].is_ok());
    }
}

#[test]
fn a_latecomer_is_refused_and_the_run_goes_on() {
    let meeting = meeting();
    let worlds = join_all(&[place(0, 2, &meeting), place(1, 2, &meeting)], &settings(Backend::Tcp));
    let text = error(&World::join(&place(1, 2, &meeting), &settings(Backend::Tcp)));
    assert!(text.contains("rank 1 is here twice"), "{text}");
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || world.unwrap().barrier().unwrap())).collect();
        threads.into_iter().for_each(|thread| thread.join().unwrap());
    });
}
