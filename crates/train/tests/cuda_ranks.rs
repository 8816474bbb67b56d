//! Ranks that train on the CUDA device, its kernels on the host: what they move between their devices gives the bits of one rank.
//! One test, for a program can start ranks once; the ranks are this test, started again.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;
#[allow(dead_code, unused_macros)]
#[path = "golden_support/on_host.rs"]
mod on_host;

use std::path::{Path, PathBuf};

use golden_folder::golden_folder;
use on_host::cuda_on_host;
use tercio_comm::World;
use tercio_comm::launch::Launch;
use tercio_train::TrainError;
use tercio_train::launch::launch;
use tercio_train::options::{ClassifierOptions, classifier_options};
use tercio_train::run::Signals;
use tercio_train::session::train_run_on;

/// Where all ranks find the runs' folders.
const FOLDER: &str = "CUDA_RANKS_TEST_FOLDER";

fn options(folder: &Path, name: &str, more: &str) -> ClassifierOptions {
    let case = golden_folder().join("flair_classifier");
    let path = |name: &str| case.join(name).to_str().unwrap().to_owned();
    let flags = [
        format!("--checkpoint-dir={}", folder.display()),
        format!("--name={name}"),
        format!("--train-data={}", path("corpus/train.txt")),
        format!("--eval-data={}", path("corpus/dev.txt")),
        format!("--model-path={}", path("model")),
    ];
    let all = "--missing-splits=none --epochs=1 --mini-batch-size=8 --mini-batch-chunk-size=2 --lr=1e-3 --threads=1";
    let words = all.split(' ').chain(more.split_whitespace()).map(str::to_owned);
    classifier_options(flags.into_iter().chain(words)).unwrap()
}

/// Trains, and gives the model's file.
fn model(options: &ClassifierOptions, world: &World, signals: &Signals) -> Result<PathBuf, TrainError> {
    let outcome = train_run_on(options, world, &cuda_on_host(), false, signals)?;
    Ok(outcome.checkpoint.unwrap_or_default().join("model.safetensors"))
}

#[test]
fn ranks_on_the_cuda_device_have_the_bits_of_one() {
    let own = tempfile::tempdir().unwrap();
    let folder = match std::env::var_os(FOLDER) {
        Some(folder) => folder.into(),
        None => {
            // SAFETY: no other thread of this test reads the environment.
            unsafe { std::env::set_var(FOLDER, own.path()) };
            own.path().to_owned()
        }
    };
    let args = ["ranks_on_the_cuda_device_have_the_bits_of_one", "--exact", "--nocapture"];
    let mut start = Launch::new(std::env::current_exe().unwrap(), args.map(Into::into).to_vec(), 4);
    start.secret = None;
    let signals = Signals::install().unwrap();
    let whole = options(&folder, "whole", "");
    let split = options(&folder, "split", "--shard=optimizer");
    let files = launch(start, &whole.run.ranks.link, |world| {
        assert_eq!(world.size(), 4);
        let files = [model(&whole, world, &signals)?, model(&split, world, &signals)?];
        Ok(files.map(|f| f.to_string_lossy().into_owned()).join("\n").into_bytes())
    });
    let files = String::from_utf8(files.unwrap()).unwrap();
    let alone = model(&options(&folder, "alone", ""), &World::alone(), &signals).unwrap();
    let read = |path: &Path| std::fs::read(path).unwrap();
    let files: Vec<&Path> = files.lines().map(Path::new).collect();
    assert_eq!(files.len(), 2);
    for file in files {
        assert!(read(file) == read(&alone), "{}: other bits than one rank's", file.display());
    }
    let start = golden_folder().join("flair_classifier/model/model.safetensors");
    assert!(read(&start) != read(&alone), "nothing was trained");
}
