//! The commands around ranks: launch, doctor, slurm submit.

use std::process::{Command, Output};

mod support;

use serde_json::Value;
use support::{free_port, stderr, tercio};

fn output(words: &[&str]) -> Output {
    let mut command: Command = tercio(words);
    command.env_remove("TERCIO_SECRET").output().unwrap()
}

fn stdout(output: &Output) -> String {
    String::from_utf8(output.stdout.clone()).unwrap()
}

#[test]
fn rank_0_alone_is_heard_through_the_launcher() {
    // Larger than a pipe's buffer.
    let alone = output(&["completions", "bash"]);
    assert!(alone.stdout.len() > 65536 / 2);
    let launched = output(&["launch", "--nproc-per-node", "3", "--", "completions", "bash"]);
    assert_eq!(launched.status.code(), Some(0), "{}", stderr(&launched));
    assert!(launched.stdout == alone.stdout);
}

#[test]
fn a_slip_is_told_once_and_a_failure_by_its_rank() {
    let slip = output(&["launch", "--nproc-per-node", "2", "--", "train", "readr"]);
    assert_eq!(slip.status.code(), Some(2));
    assert_eq!(stderr(&slip).matches("readr").count(), 1, "{}", stderr(&slip));
    for (words, want) in [
        (&["--nproc-per-node", "0"][..], "--nproc-per-node 0: expected 1"),
        (&["--nproc-per-node", "1", "--nnodes", "2"], "needs --rdzv-endpoint"),
        (&["--nproc-per-node", "1", "--rdzv-endpoint", "x"], "expected host:port"),
    ] {
        let wrong = output(&[&["launch"], words, &["--", "doctor"]].concat());
        assert_eq!(wrong.status.code(), Some(2));
        assert!(stderr(&wrong).contains(want), "{}", stderr(&wrong));
    }
    let failed = output(&["launch", "--nproc-per-node", "2", "--", "data", "check", "/no/such.json"]);
    assert_eq!(failed.status.code(), Some(1));
    let said = stderr(&failed);
    assert!(said.contains("[rank 1] tercio: /no/such.json"), "{said}");
    assert!(said.contains("rank 0 ended: exit code 1"), "{said}");
}

#[test]
fn the_doctor_examines_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().to_str().unwrap();
    let well = output(&["launch", "--nproc-per-node", "2", "--", "doctor", "--json", "--folder", path]);
    assert_eq!(well.status.code(), Some(0), "{}", stderr(&well));
    let report: Value = serde_json::from_str(&stdout(&well)).unwrap();
    assert_eq!(report["ok"], true);
    let finding = |topic: &str| {
        let all = report["findings"].as_array().unwrap();
        all.iter()
            .find(|f| f["topic"] == topic)
            .unwrap_or_else(|| panic!("nothing on {topic}: {report}"))
            .clone()
    };
    for topic in ["names", "ports", "interfaces", "threads", "memory", "open files", "shared memory"] {
        assert_eq!(
            finding(topic)["hosts"].as_array().unwrap().len(),
            1,
            "{topic}: one rank speaks for the host"
        );
    }
    assert!(
        finding("ranks")["what"].as_str().unwrap().starts_with("2 ranks on 1 host, started by tercio launch")
    );
    for topic in ["clocks", "latency", "bandwidth"] {
        assert_ne!(finding(topic)["grade"], "bad", "{report}");
    }
    assert_eq!(finding("folder")["grade"], "ok");
    assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "what it wrote is gone");
    // Alone, in words, and with something to complain about.
    let ill = output(&["doctor", "--interface", "no-such0"]);
    assert_eq!(ill.status.code(), Some(1));
    assert!(stdout(&ill).contains("bad   interfaces: --interface no-such0 is not there"), "{}", stdout(&ill));
    let missing = output(&["doctor", "--folder", "/no/such/folder"]);
    assert_eq!(missing.status.code(), Some(1));
    assert!(stdout(&missing).contains("rank 0 cannot write there"), "{}", stdout(&missing));
}

#[test]
fn a_batch_script_is_printed_anywhere() {
    let words = "slurm submit --print --nodes 4 --gpus-per-node 8 --time 12:00:00 --array 0-3 --sbatch qos=high \
                 --sbatch exclusive --cpus-per-task 4 -- train reader --train_data t.jsonl --checkpoint_dir /runs --name";
    let words: Vec<&str> = words.split_whitespace().chain(["my run"]).collect();
    let printed = output(&words);
    assert_eq!(printed.status.code(), Some(0), "{}", stderr(&printed));
    let script = stdout(&printed);
    for line in [
        "#SBATCH --nodes=4",
        "#SBATCH --gpus-per-node=8",
        "#SBATCH --ntasks-per-node=8",
        "#SBATCH --time=12:00:00",
        "#SBATCH --signal=USR1@120",
        "#SBATCH --requeue",
        "#SBATCH --open-mode=append",
        "#SBATCH --output=tercio-%A_%a.out",
        "#SBATCH --qos=high",
        "#SBATCH --exclusive",
        "#SBATCH --comment=\"tercio newest= idle=0 run=/runs/my run\"",
        "    'my run'",
        "srun --kill-on-bad-exit=1 --cpus-per-task=4 \"${command[@]}\" &",
    ] {
        assert!(script.lines().any(|l| l == line), "{line} is not in:\n{script}");
    }
    let wrong = output(&["slurm", "submit", "--print", "--job-name", "a\nb", "--", "doctor"]);
    assert_eq!(wrong.status.code(), Some(2));
    let nowhere = tercio(&["slurm", "submit", "--", "doctor"]).env("PATH", "/no/such").output().unwrap();
    assert_eq!(nowhere.status.code(), Some(1));
    assert!(stderr(&nowhere).contains("`sbatch`: it is not in PATH"), "{}", stderr(&nowhere));
}

/// Ends its processes, whatever happens.
struct Crowd(Vec<std::process::Child>);

impl Drop for Crowd {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

#[test]
fn torchruns_variables_make_ranks_and_an_allocations_do_not() {
    let port = free_port().to_string();
    let doctor = |env: &[(&str, &str)]| {
        let mut command = tercio(&["doctor", "--json", "--backend", "tcp"]);
        // What every process of a batch job sees.
        command.env("SLURM_JOB_ID", "7").env("SLURM_NTASKS", "4").env("SLURM_PROCID", "0");
        command.env_remove("TERCIO_SECRET").envs(env.iter().copied());
        command.stdout(std::process::Stdio::piped()).spawn().unwrap()
    };
    let mut crowd = Crowd(
        ["0", "1"]
            .map(|rank| {
                doctor(&[
                    ("RANK", rank),
                    ("LOCAL_RANK", rank),
                    ("WORLD_SIZE", "2"),
                    ("LOCAL_WORLD_SIZE", "2"),
                    ("MASTER_ADDR", "127.0.0.1"),
                    ("MASTER_PORT", &port),
                    ("TORCHELASTIC_RUN_ID", "test"),
                    ("TORCHELASTIC_USE_AGENT_STORE", "True"),
                ])
            })
            .into(),
    );
    let report = |crowd: &mut Crowd, child: usize| {
        let mut text = String::new();
        let stdout = crowd.0[child].stdout.as_mut().unwrap();
        std::io::Read::read_to_string(stdout, &mut text).unwrap();
        text
    };
    let (first, second) = (report(&mut crowd, 0), report(&mut crowd, 1));
    assert!(
        first.contains("2 ranks on 1 host, started by torchrun") && first.contains("backend tcp"),
        "{first}"
    );
    assert_eq!(second, "", "only rank 0 speaks");
    crowd.0.push(doctor(&[]));
    let alone = report(&mut crowd, 2);
    assert!(alone.contains("this process is alone"), "{alone}");
}
