//! A loop as jobs of Slurm: one for each stage, waiting for those that it needs.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::io::Write;
use std::path::Path;
use std::process::ExitCode;

use tercio_comm::CommError;
use tercio_comm::slurm::{self, Script};
use tercio_train::TrainError;
use tercio_train::rounds::settings::LoopSettings;
use tercio_train::rounds::stage::{Stage, Step, stages};
use tercio_train::rounds::{self};

use super::common::line;
use super::slurm_submit::JobOptions;

/// Options of the jobs, by the kind of stage.
pub type Jobs = BTreeMap<&'static str, JobOptions>;

/// Steps that have a table of their own below `[slurm]`.
const STEPS: [Step; 7] =
    [Step::Search, Step::Reader, Step::Scores, Step::Retriever, Step::Vectors, Step::Index, Step::Measure];

/// Reads the tables `[slurm]` and `[slurm.STAGE]`.
///
/// # Errors
/// What is unknown or out of range, with its line.
pub fn options(settings: &LoopSettings) -> Result<Jobs, TrainError> {
    let names: Vec<&str> = STEPS.iter().map(|step| step.name()).collect();
    settings.tables.only_within("slurm", &names)?;
    let read = |step: &Step| {
        let name = step.name();
        let own = format!("slurm.{name}");
        let array = "the parts of vectors: expected `array = NUMBER` in [slurm.vectors] only";
        let withheld: &[(&str, &str)] = if *step == Step::Vectors { &[] } else { &[("array", array)] };
        let options: JobOptions = settings.tables.layered(&["slurm", &own], &[], withheld)?;
        if let Some(array) = &options.array {
            parts(array).ok_or_else(|| {
                settings.tables.error(&["slurm", "vectors", "array"], &format!("array = {array:?}: {ARRAY}"))
            })?;
        }
        Ok((name, options))
    };
    STEPS.iter().map(read).collect()
}

const ARRAY: &str = "expected the number of parts, from 1 to 10000";

fn parts(array: &str) -> Option<u64> {
    array.parse().ok().filter(|parts| (1..=10_000).contains(parts))
}

/// Sends the stages in that are not up to date, or prints their scripts. The numbers of the jobs go to stdout.
///
/// # Errors
/// Slurm refuses a job, or there is none.
pub fn submit(
    settings: &LoopSettings,
    jobs: &Jobs,
    config: &Path,
    count: Option<u32>,
    print: bool,
) -> anyhow::Result<ExitCode> {
    let plan = rounds::plan(settings)?;
    let mut sent: BTreeMap<Stage, String> = BTreeMap::new();
    for (stage, planned) in stages(settings.shape()).into_iter().zip(&plan) {
        // A stage rests on what stands after those before it: one that is up to date now may not be then.
        let needs: Vec<String> =
            stage.needs(settings.shape()).iter().filter_map(|need| sent.get(need).cloned()).collect();
        if planned.standing == "up to date" && needs.is_empty() {
            continue;
        }
        let script = script(settings, jobs, config, count, stage, &needs)?;
        let text = script.text().map_err(|e| match e {
            CommError::Place(what) => TrainError::Options(what).into(),
            other => anyhow::Error::from(other),
        })?;
        if print {
            std::io::stdout().write_all(&text)?;
            sent.insert(
                stage,
                format!("JOB_OF_{}", stage.to_string().replace(['/', '-'], "_").to_uppercase()),
            );
            continue;
        }
        let job = slurm::submit(&text)?;
        line(&format!("{job} {stage}"))?;
        sent.insert(stage, job);
    }
    if sent.is_empty() {
        eprintln!("all stages are up to date: nothing is sent in");
    }
    Ok(ExitCode::SUCCESS)
}

fn script(
    settings: &LoopSettings,
    jobs: &Jobs,
    config: &Path,
    count: Option<u32>,
    stage: Stage,
    needs: &[String],
) -> anyhow::Result<Script> {
    let job = &jobs[stage.step.name()];
    let mut args: Vec<OsString> =
        vec!["loop".into(), "--config".into(), config.into(), "--stage".into(), stage.to_string().into()];
    if let Some(count) = count {
        args.extend(["--rounds".into(), count.to_string().into()]);
    }
    let array = job.array.as_deref().and_then(parts);
    if let Some(parts) = array {
        args.extend(["--parts".into(), parts.to_string().into()]);
    }
    let mut options = job.options(&format!("tercio-{}", stage.to_string().replace('/', "-")));
    if let Some(parts) = array {
        options.retain(|(name, _)| name != "array");
        options.push(("array".into(), Some(format!("0-{}", parts - 1))));
    }
    if !needs.is_empty() {
        options.push(("dependency".into(), Some(format!("afterok:{}", needs.join(":")))));
        // One that can never start would wait for ever.
        options.push(("kill-on-invalid-dep".into(), Some("yes".into())));
    }
    let trains = matches!(stage.step, Step::Reader | Step::Retriever);
    let run_dir =
        trains.then(|| std::path::absolute(settings.all.output.join(stage.to_string()))).transpose()?;
    Ok(Script { program: std::env::current_exe()?, options, srun: job.srun(), run_dir, args })
}
