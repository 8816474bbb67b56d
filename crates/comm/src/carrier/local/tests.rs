//! The rings between threads (each with its own mapping, as processes have) and the life of their file.

use super::*;

const PATIENCE: Duration = Duration::from_secs(60);

const START: [&str; 2] = ["secret", "one start"];
const NEXT_START: [&str; 2] = ["secret", "the next start"];
const ALIVE: Alive<'static> = &|| Ok(());

fn until() -> Instant {
    Instant::now() + PATIENCE
}

/// Ranks `ranks` met in `folder`, with rings of `ring` bytes.
pub(in crate::carrier) fn meet(folder: &Path, ranks: &[usize], ring: usize) -> Vec<Local> {
    std::thread::scope(|scope| {
        let joins: Vec<_> = ranks
            .iter()
            .map(|&rank| {
                scope.spawn(move || {
                    Local::join(folder, START, rank, ranks, ranks, ring, until(), ALIVE).unwrap()
                })
            })
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    })
}

fn files(folder: &Path) -> usize {
    std::fs::read_dir(folder).unwrap().count()
}

/// `len` bytes that tell who sent them where, and in which order.
fn stream(from: usize, to: usize, len: usize) -> Vec<u8> {
    let mut state = (from * 31 + to) as u32;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(1664525).wrapping_add(1013904223);
            (state >> 24) as u8
        })
        .collect()
}

/// Every rank sends every other one a stream of its own, in pieces of odd sizes, all at once.
pub(in crate::carrier) fn everybody_to_everybody<C: Carrier>(carriers: Vec<C>, ranks: &[usize], len: usize) {
    std::thread::scope(|scope| {
        for (mut local, &rank) in carriers.into_iter().zip(ranks) {
            scope.spawn(move || {
                let peers: Vec<usize> = ranks.iter().copied().filter(|peer| *peer != rank).collect();
                let out: Vec<_> = peers.iter().map(|peer| stream(rank, *peer, len)).collect();
                let mut sent = vec![0; peers.len()];
                let mut got = vec![Vec::new(); peers.len()];
                let mut piece = vec![0; 8191];
                let end = until();
                loop {
                    let mut moved = 0;
                    for (i, peer) in peers.iter().enumerate() {
                        let stop = len.min(sent[i] + 7001);
                        let count = local.try_send(*peer, &out[i][sent[i]..stop]).unwrap();
                        sent[i] += count;
                        let most = piece.len().min(len - got[i].len());
                        let came = local.try_recv(*peer, &mut piece[..most]).unwrap();
                        got[i].extend_from_slice(&piece[..came]);
                        moved += count + came;
                    }
                    let send: Vec<_> =
                        (0..peers.len()).filter(|i| sent[*i] < len).map(|i| peers[i]).collect();
                    let recv: Vec<_> =
                        (0..peers.len()).filter(|i| got[*i].len() < len).map(|i| peers[i]).collect();
                    if send.is_empty() && recv.is_empty() {
                        break;
                    }
                    if moved == 0 {
                        local.wait(&send, &recv, PATIENCE).unwrap();
                    }
                    assert!(
                        Instant::now() < end,
                        "rank {rank} still waits to send to {send:?}, to receive from {recv:?}"
                    );
                }
                for (peer, got) in peers.iter().zip(got) {
                    assert!(got == stream(*peer, rank, len), "the stream from rank {peer} to rank {rank}");
                }
            });
        }
    });
}

#[test]
fn streams_of_all_pairs_arrive_whole_and_in_order() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    for ranks in [&[0, 1][..], &[3, 5, 6, 11]] {
        let locals = meet(folder.path(), ranks, 4096);
        assert_eq!(files(folder.path()), 0, "the file has lost its name");
        everybody_to_everybody(locals, ranks, 300_000);
    }
}

/// Each side sleeps until the other has answered: a lost wake-up would last [`PATIENCE`].
#[test]
fn a_sleeper_is_woken_every_time() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let started = Instant::now();
    std::thread::scope(|scope| {
        for mut local in meet(folder.path(), &[0, 1], 4096) {
            local.spin = false;
            scope.spawn(move || {
                let (rank, peer) = (local.rank, 1 - local.rank);
                let mut byte = [0];
                for turn in 0..20_000u32 {
                    if turn as usize % 2 == rank {
                        assert_eq!(local.try_send(peer, &[turn as u8]).unwrap(), 1);
                    } else {
                        while local.try_recv(peer, &mut byte).unwrap() == 0 {
                            local.wait(&[], &[peer], PATIENCE).unwrap();
                        }
                        assert_eq!(byte[0], turn as u8);
                    }
                }
            });
        }
    });
    assert!(started.elapsed() < PATIENCE, "woken by time, not by the peer");
}

#[test]
fn a_full_ring_takes_no_more_and_waiting_ends_in_time() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut locals = meet(folder.path(), &[0, 1], 4096);
    assert_eq!(locals[0].try_send(1, &[7; 5000]).unwrap(), 4096);
    assert_eq!(locals[0].try_send(1, &[7; 1]).unwrap(), 0);
    locals[0].wait(&[1], &[1], Duration::from_millis(20)).unwrap();
    let mut all = [0; 4096];
    assert_eq!(locals[1].try_recv(0, &mut all).unwrap(), 4096);
    assert_eq!(all, [7; 4096]);
    locals[0].wait(&[1], &[1], PATIENCE).unwrap();
    assert_eq!(locals[0].try_send(1, &[8; 1]).unwrap(), 1);
    assert!(matches!(locals[0].try_send(2, &[8; 1]), Err(CommError::Protocol(_))), "rank 2 is not here");
}

#[test]
fn a_damaged_mark_is_an_error() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let mut locals = meet(folder.path(), &[0, 1], 4096);
    locals[1].segment.marks(1, 0).written.store(4097, Ordering::Release);
    locals[0].wait(&[], &[1], PATIENCE).unwrap();
    let error = locals[0].try_recv(1, &mut [0; 8]).unwrap_err().to_string();
    assert!(error.contains("damaged"), "{error}");
    locals[1].segment.marks(0, 1).read.store(1, Ordering::Release);
    assert!(locals[0].try_send(1, &[0; 8]).is_err());
}

#[test]
fn ranks_that_do_not_share_a_folder_do_not_meet() {
    let (one, two) = (tempfile::tempdir_in("/dev/shm").unwrap(), tempfile::tempdir().unwrap());
    let soon = || Instant::now() + Duration::from_millis(300);
    let join =
        |folder: &Path, rank| Local::join(folder, START, rank, &[0, 1], &[], 4096, soon(), ALIVE).map(|_| ());
    let (first, second) = std::thread::scope(|scope| {
        let first = scope.spawn(|| join(one.path(), 0));
        (first.join().unwrap(), join(two.path(), 1))
    });
    for error in [first, second] {
        let error = error.unwrap_err().to_string();
        assert!(error.contains("--backend tcp") && error.contains("in time"), "{error}");
    }
    assert_eq!(files(one.path()), 0, "the maker took its file away");
    let error = join(&one.path().join("missing"), 0).unwrap_err().to_string();
    assert!(error.contains("missing"), "{error}");
}

/// A rank that was killed while it joined leaves a file nobody locks: not met by the others, and removed by the next maker.
#[test]
fn what_a_dead_run_left_is_swept() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let open =
        |session, rank| Segment::open(folder.path(), session, rank, &[0, 1], 4096, Instant::now(), ALIVE);
    let dead = open(START, 0).unwrap();
    drop(open(NEXT_START, 0).unwrap());
    assert_eq!(files(folder.path()), 1, "a living maker's file stays");
    assert!(open(START, 1).is_ok());
    dead.die_counted();
    std::fs::write(folder.path().join("somebody-elses"), "x").unwrap();
    assert_eq!(files(folder.path()), 2);
    assert!(open(START, 1).is_err(), "a dead maker's file is not met");
    drop(open(NEXT_START, 0).unwrap());
    assert_eq!(files(folder.path()), 1, "ours is gone, the other's stays");
}

/// Whoever counted itself in a start that died before all were there counts in no other start, in whichever moment the ranks
/// of that one come, and whoever else holds the dead file's lock just then.
#[test]
fn a_start_counts_its_own_ranks_only() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let open =
        |session, rank, until| Segment::open(folder.path(), session, rank, &[0, 1], 4096, until, ALIVE);
    open(START, 0, Instant::now()).unwrap().die_counted();
    let left = std::fs::read_dir(folder.path()).unwrap().next().unwrap().unwrap().path();
    // As one holds it who is about to sweep the file away.
    let sweeper = std::fs::File::open(left).unwrap();
    rustix::fs::flock(&sweeper, rustix::fs::FlockOperation::NonBlockingLockExclusive).unwrap();
    assert!(open(NEXT_START, 1, Instant::now()).is_err(), "it met in a dead start's file");
    std::thread::scope(|scope| {
        let early = scope.spawn(|| {
            let mut segment = open(NEXT_START, 1, until())?;
            segment.meet(Ok(()), &[0, 1], until(), ALIVE)
        });
        let mut main = open(NEXT_START, 0, until()).unwrap();
        main.meet(Ok(()), &[0, 1], until(), ALIVE).unwrap();
        early.join().unwrap().unwrap();
    });
}

#[test]
fn waiting_ends_when_the_run_does() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let started = Instant::now();
    let over: Alive<'_> = &|| Err(CommError::Protocol("the run is over".into()));
    for rank in [0, 1] {
        let joined = Local::join(folder.path(), START, rank, &[0, 1], &[], 4096, until(), over).map(|_| ());
        assert_eq!(joined.unwrap_err().to_string(), "the run is over");
    }
    assert!(started.elapsed() < PATIENCE);
    assert_eq!(files(folder.path()), 0);
}

#[test]
fn all_are_told_when_one_cannot_go_on() {
    let folder = tempfile::tempdir_in("/dev/shm").unwrap();
    let started = Instant::now();
    let errors: Vec<String> = std::thread::scope(|scope| {
        let joins: Vec<_> = (0..2)
            .map(|rank| {
                let folder = folder.path();
                scope.spawn(move || {
                    let mut segment =
                        Segment::open(folder, START, rank, &[0, 1], 4096, until(), ALIVE).unwrap();
                    let ready = if rank == 1 { Err(CommError::Place("no room".into())) } else { Ok(()) };
                    segment.meet(ready, &[0, 1], until(), ALIVE).unwrap_err().to_string()
                })
            })
            .collect();
        joins.into_iter().map(|join| join.join().unwrap()).collect()
    });
    assert!(errors[0].contains("another one could not use it") && errors[1] == "no room", "{errors:?}");
    assert!(started.elapsed() < PATIENCE);
}
