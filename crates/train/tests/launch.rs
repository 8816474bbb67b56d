//! Ranks that a program starts of itself: a training by them, and a result larger than any pipe. One test, for a program can make one
//! such call; the ranks are this test, started again.

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use golden_folder::golden_folder;
use tercio_comm::World;
use tercio_comm::launch::Launch;
use tercio_train::launch::{Trained, launch, outcome, trained};
use tercio_train::options::{ClassifierOptions, classifier_options};
use tercio_train::run::Signals;

/// Where all ranks find the run's folder.
const FOLDER: &str = "LAUNCH_TEST_FOLDER";

fn options(folder: &std::path::Path, name: &str) -> ClassifierOptions {
    let case = golden_folder().join("flair_classifier");
    let path = |name: &str| case.join(name).to_str().unwrap().to_owned();
    let flags = [
        format!("--checkpoint-dir={}", folder.display()),
        format!("--name={name}"),
        format!("--train-data={}", path("corpus/train.txt")),
        format!("--eval-data={}", path("corpus/dev.txt")),
        format!("--model-path={}", path("model")),
    ];
    let more = "--missing-splits=none --epochs=1 --mini-batch-size=8 --mini-batch-chunk-size=2 --lr=1e-3 --threads=1";
    classifier_options(flags.into_iter().chain(more.split(' ').map(str::to_owned))).unwrap()
}

#[test]
fn a_program_trains_on_ranks_of_itself() {
    let own = tempfile::tempdir().unwrap();
    let folder = match std::env::var_os(FOLDER) {
        Some(folder) => folder.into(),
        None => {
            // SAFETY: no other thread of this test reads the environment.
            unsafe { std::env::set_var(FOLDER, own.path()) };
            own.path().to_owned()
        }
    };
    let name = "a_program_trains_on_ranks_of_itself";
    let args = [name, "--exact", "--nocapture"].map(Into::into).to_vec();
    let mut start = Launch::new(std::env::current_exe().unwrap(), args, 2);
    start.secret = None;
    let on_two = options(&folder, "two");
    let signals = Signals::install().unwrap();
    let bytes = launch(start, &on_two.run.ranks.link, |world| {
        assert_eq!(world.size(), 2);
        let mut bytes = trained(&on_two, world, &signals)?;
        // More than a pipe holds.
        bytes.extend(std::iter::repeat_n(b' ', 3_000_000));
        Ok(bytes)
    });
    let two = bytes.unwrap();
    assert!(two.len() > 3_000_000);
    let two: Trained = outcome(&two).unwrap();
    let one = outcome(&trained(&options(&folder, "one"), &World::alone(), &signals).unwrap()).unwrap();
    assert_eq!((two.step, &two.stopped), (5, &None));
    assert_eq!((&two.figures, two.best), (&one.figures, one.best));
    let model =
        |t: &Trained| std::fs::read(t.checkpoint.as_ref().unwrap().join("model.safetensors")).unwrap();
    assert!(model(&two) == model(&one), "other bits");
    assert!(outcome(b"something else").unwrap_err().to_string().contains("no outcome"));
    // Asked for another number of ranks than it is one of: in words, at once.
    let command = || {
        let mut command = std::process::Command::new(std::env::current_exe().unwrap());
        command.args([name, "--exact", "--nocapture"]).env(FOLDER, &folder);
        command
    };
    let output = command()
        .envs([
            ("TERCIO_RANK", "0"),
            ("TERCIO_WORLD_SIZE", "3"),
            ("TERCIO_LOCAL_RANK", "0"),
            ("TERCIO_LOCAL_SIZE", "3"),
        ])
        .envs([("TERCIO_MEETING", "127.0.0.1:1"), ("TERCIO_SECRET", "x")])
        .output()
        .unwrap();
    let said =
        String::from_utf8_lossy(&output.stderr).into_owned() + &String::from_utf8_lossy(&output.stdout);
    assert!(
        !output.status.success() && said.contains("asks for 2 ranks, and was started as one of 3"),
        "{said}"
    );
}
