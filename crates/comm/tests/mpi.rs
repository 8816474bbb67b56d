//! The MPI carrier under `mpirun` (or what `MPIEXEC` names): this program starts itself as ranks. Needs the feature and an MPI
//! library that runs.
#![cfg(feature = "mpi")]

mod common;

use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use common::{free_port, place, settings, suite::SUITE};
use tercio_comm::carrier::{Opening, mpi, partners};
use tercio_comm::{Backend, World};

/// Far longer than anything here takes: it only keeps a hang from lasting.
const PATIENCE: Duration = Duration::from_secs(120);

/// A process that does not outlive the test.
struct Guard(Child);
impl Drop for Guard {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Starts `part` of this file as `ranks` ranks; its exit code and all it wrote.
fn mpirun(part: &str, ranks: usize, told: usize) -> (Option<i32>, String) {
    let log = tempfile::NamedTempFile::new().unwrap();
    let out = log.reopen().unwrap();
    // MPICH's has another name where both are installed.
    let mpirun = std::env::var("MPIEXEC").unwrap_or("mpirun".into());
    let mut command = Command::new(&mpirun);
    let version =
        Command::new(&mpirun).arg("--version").output().expect("mpirun is needed for this feature's tests");
    if version.stdout.windows(8).any(|word| word == b"Open MPI") {
        command.arg("--oversubscribe");
    }
    let child = command
        .args(["-n", &ranks.to_string()])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", part, "--ignored", "--nocapture"])
        .env("TERCIO_TEST_RANKS", told.to_string())
        .env("TERCIO_TEST_MEETING", format!("127.0.0.1:{}", free_port("127.0.0.1")))
        .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
        .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
        .stdin(Stdio::null())
        .stdout(out.try_clone().unwrap())
        .stderr(out) // one offset for both
        .spawn()
        .unwrap();
    let mut child = Guard(child);
    let end = Instant::now() + PATIENCE;
    loop {
        if let Some(status) = child.0.try_wait().unwrap() {
            return (status.code(), std::fs::read_to_string(log.path()).unwrap());
        }
        assert!(Instant::now() < end, "{part} hangs: {}", std::fs::read_to_string(log.path()).unwrap());
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn own_opening() -> Opening {
    let number = |name: &str| std::env::var(name).ok().and_then(|text| text.parse::<usize>().ok());
    let size = number("TERCIO_TEST_RANKS").expect("started by this file");
    let rank = number("OMPI_COMM_WORLD_RANK").or(number("PMI_RANK")).expect("started by mpirun");
    Opening {
        rank,
        size,
        local_size: size,
        partners: partners(rank, size),
        hosts: vec!["here".into(); size],
        secret: "secret".into(),
        start: "a start".into(),
        deadline: Instant::now() + PATIENCE,
    }
}

fn stream(from: usize, to: usize, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i.wrapping_mul(2654435761) >> 13) as u8 ^ (from * 31 + to) as u8).collect()
}

#[test]
#[ignore = "a rank of streams_arrive_whole_and_in_order"]
fn rank_of_streams() {
    let own = own_opening();
    let mut carrier = mpi::open(&own).unwrap();
    let len = 3_000_001;
    let peers = own.partners.clone();
    let mut sent = vec![0; peers.len()];
    let mut got = vec![Vec::new(); peers.len()];
    let mut piece = vec![0; 100_003];
    let end = Instant::now() + PATIENCE;
    // Called from another thread than MPI was started on, as the ranks' communication thread does.
    std::thread::scope(|scope| {
        scope.spawn(|| {
            let out: Vec<_> = peers.iter().map(|peer| stream(own.rank, *peer, len)).collect();
            loop {
                let mut moved = 0;
                for (i, peer) in peers.iter().enumerate() {
                    let stop = len.min(sent[i] + 77_777);
                    let count = carrier.try_send(*peer, &out[i][sent[i]..stop]).unwrap();
                    sent[i] += count;
                    let most = piece.len().min(len - got[i].len());
                    let came = carrier.try_recv(*peer, &mut piece[..most]).unwrap();
                    got[i].extend_from_slice(&piece[..came]);
                    moved += count + came;
                }
                let send: Vec<_> = (0..peers.len()).filter(|i| sent[*i] < len).map(|i| peers[i]).collect();
                let recv: Vec<_> =
                    (0..peers.len()).filter(|i| got[*i].len() < len).map(|i| peers[i]).collect();
                if send.is_empty() && recv.is_empty() {
                    break;
                }
                if moved == 0 {
                    carrier.wait(&send, &recv, Duration::from_secs(1)).unwrap();
                }
                assert!(Instant::now() < end, "rank {} waits for {send:?} and {recv:?}", own.rank);
            }
        });
    });
    for (peer, got) in peers.iter().zip(got) {
        assert!(got == stream(*peer, own.rank, len), "the stream from rank {peer} to rank {}", own.rank);
    }
    println!("rank {} has it all", own.rank);
}

#[test]
fn streams_arrive_whole_and_in_order() {
    for ranks in [2, 3, 4] {
        let (code, text) = mpirun("rank_of_streams", ranks, ranks);
        assert_eq!(code, Some(0), "{text}");
        for rank in 0..ranks {
            assert!(text.contains(&format!("rank {rank} has it all")), "{text}");
        }
    }
}

#[test]
#[ignore = "a rank of the_suite_passes"]
fn rank_of_the_suite() {
    let own = own_opening();
    let place = place(own.rank, own.size, &std::env::var("TERCIO_TEST_MEETING").unwrap());
    let world = World::join(&place, &settings(Backend::Mpi)).unwrap();
    assert_eq!(world.backend(), "mpi");
    for (name, part) in SUITE {
        part(&world);
        println!("rank {} passed {name}", own.rank);
    }
}

#[test]
fn the_suite_passes() {
    for ranks in [2, 3, 4] {
        let (code, text) = mpirun("rank_of_the_suite", ranks, ranks);
        assert_eq!(code, Some(0), "{text}");
        for rank in 0..ranks {
            for (name, _) in SUITE {
                assert!(text.contains(&format!("rank {rank} passed {name}")), "rank {rank}, {name}: {text}");
            }
        }
    }
}

#[test]
fn another_number_of_ranks_is_an_error_that_helps() {
    let (code, text) = mpirun("rank_of_streams", 1, 2);
    assert_ne!(code, Some(0), "{text}");
    assert!(text.contains("counts rank 0 of 1") && text.contains("--mpi=pmix"), "{text}");
}
