//! A launcher as a process of its own: signals reach its ranks, its death ends them, what they say comes through.

use std::io::Read;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use tercio_comm::launch::Launch;

/// Variable: this process is the launcher, of ranks with this shell script.
const SCRIPT: &str = "LAUNCH_TEST_SCRIPT";

/// Ends what it holds, whatever happens.
struct Launcher(Child);

impl Drop for Launcher {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

impl Launcher {
    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.0), signal).unwrap();
    }

    /// Exit code and stderr.
    fn end(&mut self) -> (Option<i32>, String) {
        let mut text = String::new();
        self.0.stderr.take().unwrap().read_to_string(&mut text).unwrap();
        (self.0.wait().unwrap().code(), text)
    }
}

/// Starts this test again as a launcher of two ranks; or is that launcher.
fn launch(test: &str, script: &str) -> Launcher {
    if let Ok(script) = std::env::var(SCRIPT) {
        let outcome = Launch::new("/bin/sh", vec!["-c".into(), script.into()], 2).run().unwrap();
        std::process::exit(outcome.code.into());
    }
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args([test, "--exact", "--nocapture"]).env(SCRIPT, script).env_remove("TERCIO_SECRET");
    Launcher(command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap())
}

fn wait_for(what: &str, seen: impl Fn() -> bool) {
    let start = Instant::now();
    while !seen() {
        assert!(start.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Both ranks have written a whole line into files of this name.
fn both_wrote(folder: &Path, name: &str) -> bool {
    (0..2).all(|rank| {
        std::fs::read_to_string(folder.join(format!("{name}{rank}"))).is_ok_and(|t| t.ends_with('\n'))
    })
}

#[test]
fn signals_reach_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().display();
    let script = format!(
        "trap 'echo USR1 > {dir}/got$TERCIO_RANK; echo bye $TERCIO_RANK >&2; exit 75' USR1; \
         echo > {dir}/up$TERCIO_RANK; while :; do sleep 0.05; done"
    );
    let mut launcher = launch("signals_reach_every_rank", &script);
    wait_for("both ranks", || both_wrote(folder.path(), "up"));
    launcher.signal(Signal::USR1);
    let (code, stderr) = launcher.end();
    assert_eq!(code, Some(75), "{stderr}");
    assert!(both_wrote(folder.path(), "got"));
    assert!(stderr.contains("\nbye 0\n") || stderr.starts_with("bye 0\n"), "{stderr}");
    assert!(stderr.contains("[rank 1] bye 1\n"), "{stderr}");
}

#[test]
fn ranks_die_with_a_killed_launcher() {
    let folder = tempfile::tempdir().unwrap();
    let script = format!("echo $$ > {}/pid$TERCIO_RANK; exec sleep 600", folder.path().display());
    let mut launcher = launch("ranks_die_with_a_killed_launcher", &script);
    wait_for("both ranks", || both_wrote(folder.path(), "pid"));
    launcher.signal(Signal::KILL);
    launcher.end();
    for rank in 0..2 {
        let pid = std::fs::read_to_string(folder.path().join(format!("pid{rank}"))).unwrap();
        let stat = format!("/proc/{}/stat", pid.trim());
        let runs =
            || std::fs::read_to_string(&stat).is_ok_and(|s| s.contains("(sleep)") && !s.contains(") Z "));
        wait_for("the end of a rank", || !runs());
    }
}
