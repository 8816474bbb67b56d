//! Tables of environments, as starters leave them, and the places that follow.

use std::collections::BTreeMap;

use super::*;

type Env<'a> = &'a [(&'a str, &'a str)];

fn place(parts: &[Env], flags: Flags) -> Result<Place, CommError> {
    // Later parts win, and an empty value takes a variable away.
    let env: BTreeMap<&str, &str> = parts.iter().flat_map(|p| p.iter().copied()).collect();
    find(&|name| env.get(name).map(|v| v.to_string()), flags)
}

fn found(parts: &[Env]) -> Place {
    place(parts, Flags::default()).unwrap()
}

/// (rank, world size, local rank, local size), starter, meeting.
fn short(p: &Place) -> ([usize; 4], Starter, &str) {
    ([p.rank, p.world_size, p.local_rank, p.local_size], p.starter, &p.meeting)
}

const OURS: Env = &[
    (RANK, "3"),
    (WORLD_SIZE, "4"),
    (LOCAL_RANK, "1"),
    (LOCAL_SIZE, "2"),
    (MEETING, "node1:4711"),
    (SECRET, "abc"),
];
const TORCHRUN: Env = &[
    ("RANK", "5"),
    ("WORLD_SIZE", "8"),
    ("LOCAL_RANK", "1"),
    ("LOCAL_WORLD_SIZE", "4"),
    ("MASTER_ADDR", "10.0.0.1"),
    ("MASTER_PORT", "29500"),
    ("TORCHELASTIC_RUN_ID", "none"),
    ("TORCHELASTIC_RESTART_COUNT", "0"),
    ("TORCHELASTIC_USE_AGENT_STORE", "False"),
];
/// torch.distributed.launch, as FiD wants it: the local rank is a flag.
const LAUNCH: Env = &[
    ("RANK", "3"),
    ("WORLD_SIZE", "4"),
    ("NGPU", "2"),
    ("MASTER_ADDR", "127.0.0.1"),
    ("MASTER_PORT", "29500"),
];
/// What every process below an allocation sees.
const JOB: Env = &[
    ("SLURM_JOB_ID", "1234"),
    ("SLURM_JOBID", "1234"),
    ("SLURM_JOB_NUM_NODES", "2"),
    ("SLURM_JOB_NODELIST", "node[3-4]"),
    ("SLURM_NODELIST", "node[3-4]"),
    ("SLURM_NTASKS", "4"),
    ("SLURM_NTASKS_PER_NODE", "2"),
    ("SLURM_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_JOB_UID", "1000"),
];
const BATCH: Env = &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NODEID", "0")];
const STEP: Env = &[
    ("SLURM_STEP_ID", "0"),
    ("SLURM_STEPID", "0"),
    ("SLURM_STEP_NODELIST", "node[3-4]"),
    ("SLURM_STEP_NUM_TASKS", "4"),
    ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
    ("SLURM_PROCID", "3"),
    ("SLURM_LOCALID", "1"),
    ("SLURM_NODEID", "1"),
];
const OPEN_MPI: Env = &[
    ("OMPI_COMM_WORLD_RANK", "1"),
    ("OMPI_COMM_WORLD_SIZE", "2"),
    ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
    ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
    ("PMIX_NAMESPACE", "12345"),
    ("PMIX_RANK", "1"),
];
const HYDRA: Env =
    &[("PMI_RANK", "1"), ("PMI_SIZE", "3"), ("MPI_LOCALRANKID", "1"), ("MPI_LOCALNRANKS", "3")];

#[test]
fn every_starter_is_found() {
    let at = |host: &str, seed: u64| meeting(host, port(Flags::default(), seed).unwrap());
    let job = at("node3", 1234);
    let mpi = at("127.0.0.1", vars::seed("12345"));
    let hydra = at("127.0.0.1", vars::seed(""));
    let cases: &[(&str, &[Env], [usize; 4], Starter, &str)] = &[
        ("nothing", &[], [0, 1, 0, 1], Starter::Alone, ""),
        ("ours", &[OURS], [3, 4, 1, 2], Starter::Launch, "node1:4711"),
        ("torchrun", &[TORCHRUN], [5, 8, 1, 4], Starter::Torchrun, "10.0.0.1:29500"),
        ("srun", &[JOB, STEP], [3, 4, 1, 2], Starter::Slurm, &job),
        ("mpirun", &[OPEN_MPI], [1, 2, 1, 2], Starter::Mpi, &mpi),
        ("mpiexec of MPICH", &[HYDRA], [1, 3, 1, 3], Starter::Mpi, &hydra),
        (
            "srun --mpi=pmi2",
            &[JOB, STEP, &[("PMI_RANK", "3"), ("PMI_SIZE", "4")]],
            [3, 4, 1, 2],
            Starter::Slurm,
            &job,
        ),
        ("PMI without Slurm", &[&[("PMI_RANK", "1"), ("PMI_SIZE", "2")]], [1, 2, 1, 2], Starter::Mpi, &hydra),
        // An allocation says nothing about what is not a task of a srun.
        ("the batch script", &[JOB, BATCH], [0, 1, 0, 1], Starter::Alone, ""),
        (
            "the batch step",
            &[JOB, BATCH, &[("SLURM_STEP_ID", "4294967291")]],
            [0, 1, 0, 1],
            Starter::Alone,
            "",
        ),
        (
            "a named batch step",
            &[JOB, BATCH, &[("SLURM_STEP_ID", "batch")]],
            [0, 1, 0, 1],
            Starter::Alone,
            "",
        ),
        ("salloc's shell", &[JOB], [0, 1, 0, 1], Starter::Alone, ""),
        (
            "the interactive step",
            &[JOB, BATCH, &[("SLURM_STEP_ID", "4294967290")]],
            [0, 1, 0, 1],
            Starter::Alone,
            "",
        ),
        ("srun --pty", &[JOB, STEP, &[("SLURM_PTY_PORT", "40000")]], [0, 1, 0, 1], Starter::Alone, ""),
        (
            "srun of one task",
            &[JOB, STEP, &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_PROCID", "0")]],
            [0, 1, 0, 1],
            Starter::Alone,
            "",
        ),
        (
            "one task, PMIx",
            &[JOB, STEP, &[("SLURM_STEP_NUM_TASKS", "1"), ("SLURM_NTASKS", "1"), ("PMIX_RANK", "0")]],
            [0, 1, 0, 1],
            Starter::Alone,
            "",
        ),
        (
            "torchrun in a batch script",
            &[JOB, BATCH, TORCHRUN],
            [5, 8, 1, 4],
            Starter::Torchrun,
            "10.0.0.1:29500",
        ),
        (
            "torchrun started by srun",
            &[JOB, STEP, TORCHRUN],
            [5, 8, 1, 4],
            Starter::Torchrun,
            "10.0.0.1:29500",
        ),
        ("ours started by srun", &[JOB, STEP, OURS], [3, 4, 1, 2], Starter::Launch, "node1:4711"),
        ("ours below torchrun", &[TORCHRUN, OURS], [3, 4, 1, 2], Starter::Launch, "node1:4711"),
        ("mpirun's daemons started by srun", &[JOB, STEP, OPEN_MPI], [1, 2, 1, 2], Starter::Mpi, &mpi),
        // A script that exports where to meet, and then calls srun.
        (
            "srun with MASTER_ADDR",
            &[JOB, STEP, &[("MASTER_ADDR", "x"), ("MASTER_PORT", "1"), ("WORLD_SIZE", "4")]],
            [3, 4, 1, 2],
            Starter::Slurm,
            &job,
        ),
        (
            "a step on fewer nodes",
            &[
                JOB,
                STEP,
                &[
                    ("SLURM_STEP_NODELIST", "node4"),
                    ("SLURM_STEP_NUM_TASKS", "2"),
                    ("SLURM_STEP_TASKS_PER_NODE", "2"),
                    ("SLURM_NODEID", "0"),
                    ("SLURM_PROCID", "1"),
                ],
            ],
            [1, 2, 1, 2],
            Starter::Slurm,
            &at("node4", 1234),
        ),
        (
            "a chosen meeting",
            &[JOB, STEP, &[(MEETING, "[fe80::1]:99")]],
            [3, 4, 1, 2],
            Starter::Slurm,
            "[fe80::1]:99",
        ),
        (
            "a world of one",
            &[OURS, &[(RANK, "0"), (WORLD_SIZE, "1"), (LOCAL_RANK, "0"), (LOCAL_SIZE, "1")]],
            [0, 1, 0, 1],
            Starter::Launch,
            "",
        ),
        (
            "IPv6",
            &[TORCHRUN, &[("MASTER_ADDR", "fe80::1")]],
            [5, 8, 1, 4],
            Starter::Torchrun,
            "[fe80::1]:29500",
        ),
        (
            "several hosts of mpirun",
            &[OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "4"), ("MASTER_ADDR", "h"), ("MASTER_PORT", "77")]],
            [1, 4, 1, 2],
            Starter::Mpi,
            "h:77",
        ),
    ];
    for (name, env, numbers, starter, meeting) in cases {
        assert_eq!(short(&found(env)), (*numbers, *starter, *meeting), "{name}");
    }
    let flags = Flags { local_rank: 1, main_port: -1 };
    let by_flag = place(&[JOB, LAUNCH], flags).unwrap();
    assert_eq!(short(&by_flag), ([3, 4, 1, 2], Starter::Torchrun, "127.0.0.1:29500"));
}

#[test]
fn half_set_and_contradicting_variables_are_named() {
    let none = Flags::default();
    let local = |local_rank| Flags { local_rank, ..none };
    let port = |main_port| Flags { main_port, ..none };
    let cases: &[(&[Env], Flags, &[&str])] = &[
        (&[OURS, &[(RANK, "")]], none, &["TERCIO_RANK is not set", "tercio launch"]),
        (&[OURS, &[(RANK, "two")]], none, &["TERCIO_RANK is \"two\"", "whole number"]),
        (&[OURS, &[(RANK, "-1")]], none, &["TERCIO_RANK is \"-1\""]),
        (&[OURS, &[(RANK, "4")]], none, &["rank 4 of 4", "0 to 3"]),
        (&[OURS, &[(WORLD_SIZE, "0")]], none, &["0 ranks", "1 to 65536"]),
        (&[OURS, &[(LOCAL_RANK, "2")]], none, &["local rank 2 of 2"]),
        (&[OURS, &[(LOCAL_SIZE, "5")]], none, &["of 5 ranks on this host, 4 in all"]),
        (&[OURS, &[(MEETING, "")]], none, &["TERCIO_MEETING is not set"]),
        (&[OURS, &[(MEETING, "node1")]], none, &["TERCIO_MEETING is \"node1\"", "host:port"]),
        (&[OURS, &[(MEETING, "fe80::1:80")]], none, &["[fe80::1]:15001"]),
        (&[OURS, &[(MEETING, "node1:0")]], none, &["host:port"]),
        (&[OURS], local(1), &["--local_rank 1: must stay -1 under tercio launch"]),
        (&[OURS], port(15000), &["--main_port 15000: must stay -1"]),
        (&[TORCHRUN, &[("WORLD_SIZE", "")]], none, &["WORLD_SIZE is not set", "torchrun"]),
        (&[TORCHRUN, &[("RANK", "")]], none, &["RANK is not set"]),
        (&[TORCHRUN, &[("MASTER_PORT", "")]], none, &["MASTER_PORT is not set"]),
        (&[TORCHRUN, &[("MASTER_PORT", "99999")]], none, &["MASTER_PORT is \"99999\"", "1 to 65535"]),
        (&[TORCHRUN, &[("LOCAL_WORLD_SIZE", "")]], none, &["LOCAL_WORLD_SIZE"]),
        (&[TORCHRUN], local(2), &["LOCAL_RANK is 1, but --local_rank is 2"]),
        (&[TORCHRUN], port(15000), &["--main_port 15000: must stay -1 under torchrun", "MASTER_PORT"]),
        (&[LAUNCH], none, &["neither LOCAL_RANK nor --local_rank"]),
        (&[LAUNCH, &[("NGPU", "3")]], local(1), &["NGPU is 3", "nproc_per_node"]),
        (&[LAUNCH, &[("NGPU", "0")]], local(1), &["NGPU is 0"]),
        (&[], local(0), &["--local_rank 0", "RANK is not set"]),
        (&[], local(-2), &["--local_rank -2"]),
        (&[&[("WORLD_SIZE", "2")]], none, &["WORLD_SIZE is 2", "RANK is not set"]),
        (&[JOB, STEP], local(1), &["--local_rank 1: must stay -1 under Slurm"]),
        (&[JOB, STEP], port(29500), &["--main_port 29500: expected 10001 to 20000"]),
        (&[JOB, STEP], port(-7), &["--main_port -7"]),
        (&[JOB, STEP, &[("SLURM_LOCALID", "")]], none, &["SLURM_LOCALID is not set", "srun"]),
        (&[JOB, STEP, &[("SLURM_LOCALID", "2")]], none, &["local rank 2 of 2"]),
        (&[JOB, STEP, &[("SLURM_NODEID", "2")]], none, &["SLURM_STEP_TASKS_PER_NODE", "SLURM_NODEID is 2"]),
        (&[JOB, STEP, &[("SLURM_STEP_NODELIST", "n[1-")]], none, &["list of hosts \"n[1-\""]),
        (&[JOB, STEP, &[("SLURM_STEP_NUM_TASKS", "x")]], none, &["SLURM_STEP_NUM_TASKS is \"x\""]),
        (&[OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "")]], none, &["OMPI_COMM_WORLD_SIZE is not set"]),
        (&[OPEN_MPI, &[("OMPI_COMM_WORLD_SIZE", "4")]], none, &["several hosts", "TERCIO_MEETING"]),
        (&[OPEN_MPI], local(1), &["--local_rank 1: must stay -1 under Open MPI"]),
        (&[&[("PMIX_RANK", "1")]], none, &["PMIx gives rank 1", "how many"]),
    ];
    for (env, flags, words) in cases {
        let error = place(env, *flags).expect_err(words[0]).to_string();
        for word in *words {
            assert!(error.contains(word), "expected {word:?} in: {error}");
        }
    }
}

#[test]
fn a_port_may_be_chosen_under_srun_and_mpi() {
    let flags = Flags { main_port: 12345, ..Flags::default() };
    assert_eq!(place(&[JOB, STEP], flags).unwrap().meeting, "node3:12345");
    assert_eq!(place(&[OPEN_MPI], flags).unwrap().meeting, "127.0.0.1:12345");
    // As in FiD, a process on its own does not mind.
    assert_eq!(place(&[], flags).unwrap(), Place::alone());
}

#[test]
fn ranks_of_a_run_agree_and_other_runs_differ() {
    let same = |a: &[Env], b: &[Env]| {
        let (a, b) = (found(a), found(b));
        (a.secret == b.secret, a.meeting == b.meeting)
    };
    let first = &[("SLURM_PROCID", "0"), ("SLURM_LOCALID", "0"), ("SLURM_NODEID", "0")];
    assert_eq!(same(&[JOB, STEP], &[JOB, STEP, first]), (true, true));
    assert_eq!(same(&[TORCHRUN], &[TORCHRUN, &[("RANK", "4"), ("LOCAL_RANK", "0")]]), (true, true));
    // Another job, the job after a requeue, another step.
    for other in [("SLURM_JOB_ID", "1235"), ("SLURM_RESTART_COUNT", "1"), ("SLURM_STEP_ID", "1")] {
        assert_eq!(same(&[JOB, STEP], &[JOB, STEP, &[other]]), (false, false), "{other:?}");
    }
    // torchrun listens at MASTER_PORT itself, and hosts may count restarts differently.
    let agent: Env = &[("TORCHELASTIC_USE_AGENT_STORE", "True")];
    let place = found(&[TORCHRUN, agent]);
    assert!(
        place.meeting.starts_with("10.0.0.1:") && !place.meeting.ends_with(":29500"),
        "{}",
        place.meeting
    );
    let restarted: Env = &[("TORCHELASTIC_RESTART_COUNT", "1")];
    assert_eq!(same(&[TORCHRUN, agent], &[TORCHRUN, agent, restarted]), (true, true));
    assert_eq!(same(&[TORCHRUN], &[TORCHRUN, &[("TORCHELASTIC_RUN_ID", "other")]]), (false, true));
    for env in [JOB, TORCHRUN, OPEN_MPI] {
        let secret = found(&[env, if env == JOB { STEP } else { &[] }, &[(SECRET, "mine")]]).secret;
        assert_eq!(secret, "mine");
    }
}

#[test]
fn restarts_of_launcher_and_job_count() {
    let count = |env: Env| restarts(&|name| env.iter().find(|e| e.0 == name).map(|e| e.1.to_owned()));
    assert_eq!(count(&[]), 0);
    assert_eq!(count(&[(RESTART_COUNT, "2"), ("SLURM_RESTART_COUNT", "1")]), 3);
    assert_eq!(count(&[("SLURM_RESTART_COUNT", "x")]), 0);
}
