//! The batch script of a run: it starts the ranks by `srun`, and has the job requeued after a loss that nobody announced.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use crate::error::CommError;

/// What a job asks for, and the command it runs.
#[derive(Clone, Debug)]
pub struct Script {
    /// The program of every rank.
    pub program: PathBuf,
    /// Its arguments.
    pub args: Vec<OsString>,
    /// The run's folder, absolute: its checkpoints tell whether a restart came any further.
    pub run_dir: Option<PathBuf>,
    /// Options of `sbatch` without their dashes, in their order: `("nodes", Some("4"))`.
    pub options: Vec<(String, Option<String>)>,
    /// Options of `srun`, as words.
    pub srun: Vec<String>,
}

/// What the comment of a job of ours begins with; the batch script keeps its memory between restarts there.
pub(super) const COMMENT: &str = "tercio ";

/// The body: the state of the run is in the job's comment, since a requeued job may come up on any node.
const BODY: &str = r#"
# Every attempt has a secret of its own, so ranks of an older one that live on are strangers.
TERCIO_SECRET=$(od -An -v -N32 -tx1 /dev/urandom | tr -d ' \n')
export TERCIO_SECRET
echo "tercio: job $SLURM_JOB_ID, attempt $((${SLURM_RESTART_COUNT:-0} + 1)), $(date +%FT%T%z), nodes $SLURM_JOB_NODELIST" >&2

# Slurm announces the end to the tasks themselves; this shell only has to stay until they have saved.
srun --kill-on-bad-exit=1 @SRUN@ "${command[@]}" &
step=$!
trap ':' TERM
trap 'kill -USR1 "$step"' USR1
trap 'kill -USR2 "$step"' USR2
# A signal ends `wait` early.
while wait "$step"; [ -d "/proc/$step" ]; do :; done
wait "$step"
code=$?
[ "$code" = 0 ] && exit 0

# 76: a rank was lost or failed, the others ended in order. 137, 143: ended by a signal.
case $code in
76 | 137 | 143) ;;
*)
    echo "tercio: the ranks ended with exit code $code; the job is not requeued" >&2
    exit "$code"
    ;;
esac
# The plain number of an array's last job is the whole array's.
id=${SLURM_ARRAY_JOB_ID:+${SLURM_ARRAY_JOB_ID}_$SLURM_ARRAY_TASK_ID}
id=${id:-$SLURM_JOB_ID}
job=$(scontrol show job "$id")
# Somebody ended it, or its time was up: Slurm takes it out of the queue.
if grep -Eq 'JobState=(COMPLETING|CANCELLED|TIMEOUT)' <<<"$job"; then
    echo "tercio: exit code $code; the job itself ends, so it is not requeued" >&2
    exit "$code"
fi
newest() {
    [ -n "$run" ] || return 0
    for folder in "$run"/checkpoint/step-*/; do
        folder=${folder%/}
        [ -d "$folder" ] && echo "${folder##*/step-}"
    done | grep -x '[0-9]*' | sort -n | tail -n 1
}
now=$(newest)
before=$(sed -n 's/^ *Comment=tercio newest=\([0-9]*\) idle=\([0-9]*\) .*/\1 \2/p' <<<"$job")
read -r last idle <<<"$(echo "$before" | sed 's/^ /- /')"
if [ "${now:--}" = "${last:--}" ]; then idle=$((${idle:-0} + 1)); else idle=1; fi
if [ "$idle" -gt 2 ]; then
    echo "tercio: exit code $code, and no checkpoint was added since the last two restarts (newest: ${now:-none}); the job is not requeued" >&2
    exit "$code"
fi
scontrol update JobId="$id" Comment="tercio newest=$now idle=$idle run=$run" || exit "$code"
echo "tercio: exit code $code; the job is requeued and goes on from ${now:+step }${now:-the start}" >&2
scontrol requeue "$id" || exit "$code"
"#;

impl Script {
    /// The script's text.
    ///
    /// # Errors
    /// [`CommError::Place`] for an option that cannot stand in a `#SBATCH` line.
    pub fn text(&self) -> Result<Vec<u8>, CommError> {
        let mut text = b"#!/bin/bash\n# Written by `tercio slurm submit`.\n".to_vec();
        let run = self.run_dir.as_deref().unwrap_or(Path::new(""));
        let comment = format!("{COMMENT}newest= idle=0 run={}", run.display());
        for (name, value) in &self.options {
            text.extend_from_slice(option(name, value.as_deref())?.as_bytes());
        }
        // A folder that cannot be told there is only told to this script.
        if let Ok(line) = option("comment", Some(&comment)) {
            text.extend_from_slice(line.as_bytes());
        }
        text.extend_from_slice(b"\nrun=");
        text.extend_from_slice(&quoted(run.as_os_str()));
        text.extend_from_slice(b"\ncommand=(\n");
        for word in std::iter::once(self.program.as_os_str()).chain(self.args.iter().map(|a| &**a)) {
            text.extend_from_slice(b"    ");
            text.extend_from_slice(&quoted(word));
            text.push(b'\n');
        }
        text.extend_from_slice(b")\n");
        let words: Vec<String> = self
            .srun
            .iter()
            .map(|word| String::from_utf8_lossy(&quoted(OsStr::new(word))).into_owned())
            .collect();
        let body = match words.is_empty() {
            true => BODY.replace("@SRUN@ ", ""),
            false => BODY.replace("@SRUN@", &words.join(" ")),
        };
        text.extend_from_slice(body.as_bytes());
        Ok(text)
    }
}

/// A `#SBATCH` line.
fn option(name: &str, value: Option<&str>) -> Result<String, CommError> {
    let wrong = |what: String| Err(CommError::Place(what));
    let known = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    if !name.starts_with(|c: char| c.is_ascii_lowercase()) || !name.bytes().all(known) {
        return wrong(format!(
            "option {name:?} for sbatch: expected its long name without dashes, as in --sbatch qos=high"
        ));
    }
    let Some(value) = value else { return Ok(format!("#SBATCH --{name}\n")) };
    if value.chars().any(|c| c.is_control() || matches!(c, '"' | '\'' | '\\' | '#')) {
        return wrong(format!(
            "option --{name} for sbatch: {value:?} has a quote, a backslash, a # or a control character, which a #SBATCH \
             line cannot hold; choose another text"
        ));
    }
    Ok(match value.contains(char::is_whitespace) {
        true => format!("#SBATCH --{name}=\"{value}\"\n"),
        false => format!("#SBATCH --{name}={value}\n"),
    })
}

/// A word as a shell reads it back.
fn quoted(word: &OsStr) -> Vec<u8> {
    let plain = |b: &u8| b.is_ascii_alphanumeric() || b"_-+=.,:/@%".contains(b);
    let bytes = word.as_bytes();
    if !bytes.is_empty() && bytes.iter().all(plain) {
        return bytes.to_vec();
    }
    let mut out = vec![b'\''];
    for &byte in bytes {
        match byte {
            b'\'' => out.extend_from_slice(b"'\\''"),
            byte => out.push(byte),
        }
    }
    out.push(b'\'');
    out
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn script(args: Vec<OsString>) -> Script {
        Script {
            program: "/usr/bin/printf".into(),
            args,
            run_dir: Some("/runs/it's here".into()),
            options: vec![("nodes".into(), Some("4".into())), ("requeue".into(), None)],
            srun: vec!["--cpus-per-task=3".into()],
        }
    }

    /// Runs a script with stand-ins for Slurm's commands, which are kept in `folder`.
    fn run(script: &Script, folder: &Path, srun: &str, env: &[(&str, &str)]) -> (i32, String) {
        use std::os::unix::fs::PermissionsExt;
        std::fs::write(folder.join("job.sh"), script.text().unwrap()).unwrap();
        let scontrol = r#"case $1 in
            show) echo "   JobState=${STATE:-RUNNING} Reason=None"; [ -f "$D/comment" ] && echo "   Comment=$(cat "$D/comment") " ;;
            update) echo "${3#Comment=}" > "$D/comment" ;;
            requeue) echo "requeued $2" ;;
        esac"#;
        for (name, text) in [("srun", srun), ("scontrol", scontrol)] {
            let path = folder.join(name);
            std::fs::write(&path, format!("#!/bin/bash\n{text}\n")).unwrap();
            std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o755)).unwrap();
        }
        let path = format!("{}:{}", folder.display(), std::env::var("PATH").unwrap());
        let mut command = Command::new("/bin/bash");
        command.arg(folder.join("job.sh")).env("PATH", path).env("D", folder).env("SLURM_JOB_ID", "7");
        let output = command.envs(env.iter().copied()).output().unwrap();
        (output.status.code().unwrap(), String::from_utf8(output.stdout).unwrap())
    }

    #[test]
    fn every_argument_arrives_as_it_was() {
        let folder = tempfile::tempdir().unwrap();
        let hostile =
            ["", "two words", "it's", "$HOME `id` \\ \"x\"", "line\nbreak", "*", "-n", "é", "#x;y|z&(q)"];
        let mut args: Vec<OsString> = vec!["<%s>\\n".into()];
        args.extend(hostile.map(OsString::from));
        args.push(OsStr::from_bytes(b"\xff\xfe").into());
        let srun =
            r#"[ "$1 $2" = "--kill-on-bad-exit=1 --cpus-per-task=3" ] || exit 9; shift 2; "$@" > "$D/out""#;
        let (code, _) = run(&script(args), folder.path(), srun, &[]);
        assert_eq!(code, 0);
        let mut want = hostile.map(|word| format!("<{word}>\n")).concat().into_bytes();
        want.extend_from_slice(b"<\xff\xfe>\n");
        assert_eq!(std::fs::read(folder.path().join("out")).unwrap(), want);
    }

    #[test]
    fn options_stand_before_the_first_command() {
        let text = String::from_utf8(script(Vec::new()).text().unwrap()).unwrap();
        let head: Vec<&str> = text.lines().take_while(|l| l.starts_with('#')).collect();
        assert_eq!(head[2..4], ["#SBATCH --nodes=4", "#SBATCH --requeue"]);
        let mut plain = script(Vec::new());
        plain.run_dir = Some("/runs/a b".into());
        let text = String::from_utf8(plain.text().unwrap()).unwrap();
        assert!(text.contains("\n#SBATCH --comment=\"tercio newest= idle=0 run=/runs/a b\"\n"), "{text}");
        for (name, value) in [("job name", "x"), ("--nodes", "4"), ("comment", "a\nb"), ("comment", "\"")] {
            let mut bad = script(Vec::new());
            bad.options.push((name.into(), Some(value.into())));
            assert!(bad.text().is_err(), "{name}={value}");
        }
    }

    #[test]
    fn a_loss_is_requeued_while_checkpoints_are_added() {
        let folder = tempfile::tempdir().unwrap();
        let runs = folder.path().join("run's folder");
        let mut job = script(Vec::new());
        job.run_dir = Some(runs.clone());
        let step = |n: u32| std::fs::create_dir_all(runs.join(format!("checkpoint/step-{n}"))).unwrap();
        let attempt = |code: &str| {
            let env = [("CODE", code)];
            let (code, out) = run(&job, folder.path(), "exit $CODE", &env);
            (code, out.contains("requeued 7"))
        };
        assert_eq!(attempt("0"), (0, false));
        assert_eq!(attempt("75"), (75, false));
        assert_eq!(attempt("2"), (2, false));
        assert_eq!(attempt("1"), (1, false));
        let (code, out) = run(&job, folder.path(), "exit 143", &[("STATE", "COMPLETING")]);
        assert_eq!((code, out.contains("requeued")), (143, false));
        // Nothing was ever saved: two more tries.
        assert_eq!(attempt("76"), (0, true));
        assert_eq!(attempt("137"), (0, true));
        assert_eq!(attempt("76"), (76, false));
        step(9);
        assert_eq!(attempt("76"), (0, true));
        step(10);
        assert_eq!(attempt("143"), (0, true));
        assert_eq!(attempt("76"), (0, true));
        assert_eq!(attempt("76"), (76, false));
    }

    #[test]
    fn signals_of_the_batch_shell_do_not_end_it_before_its_ranks() {
        let folder = tempfile::tempdir().unwrap();
        // The stand-in for srun signals the shell that waits for it, and ends later with a code of its own.
        let srun = r#"trap 'echo got > "$D/got"' USR1; kill -TERM $PPID; sleep 0.2; kill -USR1 $PPID
            for i in $(seq 1000); do [ -f "$D/got" ] && break; sleep 0.05; done; exit 3"#;
        let (code, _) = run(&script(Vec::new()), folder.path(), srun, &[]);
        assert_eq!(code, 3);
        assert!(folder.path().join("got").exists());
    }
}
