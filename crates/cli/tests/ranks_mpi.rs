//! Training under `mpirun` (or what `MPIEXEC` names) with bytes through MPI: the bits of one rank, and a clean end of MPI.
#![cfg(feature = "mpi")]

mod ranks_support;
mod support;

use std::process::Command;

use ranks_support::*;
use support::*;

/// The command of `place` under mpirun, as one child: what it starts ends with it.
fn mpirun(place: &Place, name: &str, ranks: usize, flags: &[&str]) -> Ranks {
    let mpirun = std::env::var("MPIEXEC").unwrap_or("mpirun".into());
    let version =
        Command::new(&mpirun).arg("--version").output().expect("mpirun is needed for this feature's tests");
    let open_mpi = version.stdout.windows(8).any(|word| word == b"Open MPI");
    start(&place.path(""), 1, |_| {
        let train = place.command(name, &[&SETTINGS, flags].concat());
        let mut command = Command::new(&mpirun);
        command.args(open_mpi.then_some("--oversubscribe")).args(["-n", &ranks.to_string()]);
        command.args(["env", "-u", "TERCIO_RANK", "-u", "TERCIO_WORLD_SIZE", "-u", "TERCIO_LOCAL_RANK"]);
        command.args(["-u", "TERCIO_LOCAL_SIZE"]).arg(train.get_program()).args(train.get_args());
        command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
        command
    })
}

#[test]
fn the_bits_of_one_rank_and_a_clean_end() {
    let place = Place::new();
    place.train("one", &SETTINGS);
    let one = place.run_dir("one");
    for (name, ranks, shard) in [("two", 2, "none"), ("four", 4, "optimizer")] {
        let ends = mpirun(&place, name, ranks, &["--backend", "mpi", "--shard", shard]).finish();
        // mpirun's own code: it complains of a rank that leaves without MPI_Finalize.
        assert_eq!(codes(&ends), [Some(0)], "{}", ends[0].stderr);
        let many = place.run_dir(name);
        assert_eq!(shards(&many), vec![vec![8 / ranks as u64; ranks]; 12]);
        assert!(
            bits(&many, "step-12") == bits(&one, "step-12"),
            "{ranks} ranks: parameters and moments differ"
        );
    }
}
