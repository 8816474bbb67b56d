//! A collection that is embedded by a job: after the warning before its limit it is queued again, and goes on with the shards
//! that are left.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use tercio_data::Vectors;

use super::cluster::*;
use super::support::{golden, stderr, tercio};

const PASSAGES: usize = 8000;

/// The words of a shell that embed the collection in `folder`, in shards of 200.
fn words(folder: &Path, output: &str) -> Vec<String> {
    let text = |path: PathBuf| path.to_str().unwrap().to_owned();
    let mut words =
        vec!["embed".to_owned(), "--model_path".into(), text(golden().join("fid_retriever/model"))];
    words.extend([
        "--passages".into(),
        text(folder.join("passages.tsv")),
        "--output".into(),
        text(folder.join(output)),
    ]);
    words.extend("--threads 1 --passages_per_shard 200 --window 32".split(' ').map(String::from));
    words
}

/// When each finished shard was written.
fn finished(vectors: &Path) -> Vec<(PathBuf, SystemTime)> {
    let Ok(entries) = std::fs::read_dir(vectors) else { return Vec::new() };
    let mut found: Vec<_> = entries
        .map(|entry| entry.unwrap().path())
        .filter(|path| {
            path.extension().is_some_and(|e| e == "json")
                && path.file_name().unwrap().to_string_lossy().starts_with("shard-")
        })
        .map(|path| (path.clone(), path.metadata().unwrap().modified().unwrap()))
        .collect();
    found.sort();
    found
}

#[test]
fn embedding_goes_on_after_the_warning_before_the_limit() {
    let cluster = Cluster::start(1, &[]);
    let place = tempfile::tempdir().unwrap();
    let dir = place.path();
    let sentence = "a sentence of some words that takes the small model a while, once and again, ";
    let rows: String =
        (0..PASSAGES).map(|i| format!("p{i}\t{}{i}\tPage {i}\n", sentence.repeat(4))).collect();
    std::fs::write(dir.join("passages.tsv"), rows).unwrap();
    let output = dir.join("output");
    let command = tercio(&[]);
    let quoted: Vec<String> = words(dir, "vectors").iter().map(|word| format!("'{word}'")).collect();
    let script = format!(
        "#!/bin/bash\n\
         #SBATCH --job-name=embed --nodes=1 --ntasks-per-node=2 --time=20\n\
         #SBATCH --requeue --open-mode=append --signal=USR1@60 --output={}\n\
         srun --kill-on-bad-exit=1 '{}' {}\n",
        output.display(),
        command.get_program().to_str().unwrap(),
        quoted.join(" ")
    );
    std::fs::write(dir.join("job.sh"), script).unwrap();
    let said = || std::fs::read_to_string(&output).unwrap_or_default();
    let job = cluster.submit(&dir.join("job.sh"), &[]);
    wait_until("two shards are finished", || {
        assert!(matches!(job.state().as_str(), "PENDING" | "RUNNING"), "{}", said());
        finished(&dir.join("vectors")).len() >= 2
    });
    job.cancel(&["--signal=USR1"]);
    wait_until("the job is requeued", || job.restarts() == 1);
    let first = finished(&dir.join("vectors"));
    assert!(first.len() < PASSAGES / 200, "it ended too late to be a test");
    assert_eq!(job.ended(), "COMPLETED", "{}", said());
    assert_eq!(job.restarts(), 1);
    let log = said();
    assert!(log.contains("stopped by a signal") && log.contains("is queued again"), "{log}");
    for word in ["panicked", "was lost", "ERROR"] {
        assert!(!log.contains(word), "{word}: {log}");
    }
    // Shards that were finished before are as they were; all of them are those of one process.
    let all = finished(&dir.join("vectors"));
    assert_eq!(all.len(), PASSAGES / 200);
    assert!(first.iter().all(|shard| all.contains(shard)), "a finished shard was written again");
    let whole = words(dir, "whole");
    let alone = tercio(&whole.iter().map(String::as_str).collect::<Vec<_>>()).output().unwrap();
    assert!(alone.status.success(), "{}", stderr(&alone));
    for (path, _) in all {
        let vectors = path.with_extension("vectors");
        let other = dir.join("whole").join(vectors.file_name().unwrap());
        assert!(std::fs::read(&vectors).unwrap() == std::fs::read(other).unwrap(), "{}", vectors.display());
    }
    assert_eq!(Vectors::open(&dir.join("vectors")).unwrap().len(), PASSAGES as u64);
}
