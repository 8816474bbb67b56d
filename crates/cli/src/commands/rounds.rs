//! `tercio loop`: from a collection and questions to a reader and a retriever that teach one another, round after round.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tercio_comm::place::Flags;
use tercio_train::TrainError;
use tercio_train::ranks::options::{LinkOptions, Requeue};
use tercio_train::ranks::requeue::requeue_among;
use tercio_train::ranks::start::same_among;
use tercio_train::rounds::settings::LoopSettings;
use tercio_train::rounds::stage::{self, Step};
use tercio_train::rounds::{self, LoopOutcome, Which};
use tercio_train::run::progress::duration;
use tercio_train::run::{EXIT_SAVED_NOT_REQUEUED, Signals, StopReason};

use super::common::{self, line};
use super::rounds_slurm;

/// Flags of `tercio loop`.
#[derive(Args)]
#[command(after_help = "Example of a loop.toml:\n\n  \
    passages = \"passages.tsv\"\n  train_data = \"train.jsonl\"\n  eval_data = \"dev.jsonl\"\n  output = \"loop\"\n  \
    rounds = 2\n\n  \
    [search]\n  n_docs = 100\n\n  \
    [reader]            # flags of `tercio train reader`\n  model_size = \"base\"\n  n_context = 50\n  total_steps = 10000\n\n  \
    [retriever]         # flags of `tercio train retriever`\n  n_context = 50\n  total_steps = 10000\n\n\
    Every stage has a folder below `output`. What is up to date is not computed again; what a signal or a crash ended goes on \
    where it was.")]
pub struct Loop {
    /// Settings: the collection, the questions, and a table for each kind of stage
    #[arg(long)]
    config: PathBuf,
    /// Rounds, instead of the number in the file
    #[arg(long)]
    rounds: Option<u32>,
    /// Do this stage only, as round-1/reader; the stages that it needs must be up to date
    #[arg(long)]
    stage: Option<String>,
    /// With --stage .../vectors: do one of this many parts, the one that SLURM_ARRAY_TASK_ID numbers from 0
    #[arg(long, requires = "stage")]
    parts: Option<u64>,
    /// Print the stages and which are up to date, and change nothing
    #[arg(long)]
    dry_run: bool,
    /// Send every stage that is not up to date in as a job of Slurm that waits for the stages it needs; options of sbatch are in
    /// the tables `slurm` and, of one kind of stage, `slurm.reader` and so on (`array` of `slurm.vectors`: its parts)
    #[arg(long, conflicts_with = "stage")]
    slurm: bool,
    #[command(flatten)]
    link: LinkOptions,
    /// Under Slurm, after a signal: whether the job is queued again, to go on where it was
    #[arg(long, value_enum, env = "TERCIO_REQUEUE", default_value_t = Requeue::Auto)]
    requeue: Requeue,
    /// Print the table (with --dry-run the stages) as JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

impl Loop {
    /// Runs the loop.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.link.check().map_err(TrainError::Options)?;
        let settings = LoopSettings::read(&self.config)?.with_rounds(self.rounds)?;
        let which = self.which(&settings)?;
        let place = common::place(Flags::default())?;
        common::start_log(&place, self.quiet)?;
        // Wrong options of jobs are better known now than after the first stages.
        let jobs = rounds_slurm::options(&settings)?;
        if self.slurm {
            return rounds_slurm::submit(&settings, &jobs, &self.config, self.rounds, self.dry_run);
        }
        if self.dry_run {
            return if place.rank == 0 { self.plan(&settings) } else { Ok(ExitCode::SUCCESS) };
        }
        let signals = Signals::install()?;
        let world = match common::join_with_signals(&place, &self.link, self.requeue, &signals)? {
            Ok(world) => world,
            Err(code) => return Ok(code),
        };
        let done =
            same_among(&world, "the file of --config", &format!("{:?}", settings.tables)).and_then(|()| {
                rounds::run_among(&world, &settings, which, &self.link, &signals, !self.quiet && !self.json)
            });
        let reason = match common::end(&world, done)? {
            Ok(LoopOutcome::Done) => {
                if world.is_main() && which.only.is_none() {
                    self.show(&settings)?;
                }
                return Ok(ExitCode::SUCCESS);
            }
            Ok(LoopOutcome::Stopped(reason)) => reason,
            Err(code) => return Ok(code),
        };
        if world.is_main() {
            let name = reason.map_or("a signal to another rank", StopReason::name);
            tracing::warn!("{name}: saved; the same command goes on from there");
        }
        // Ctrl-C is somebody's wish, whichever rank it reached.
        let interrupted = u8::from(reason == Some(StopReason::Interrupt));
        let again = world.all_gather_bytes(vec![interrupted]).is_ok_and(|all| !all.concat().contains(&1));
        let requeued = again && self.requeue == Requeue::Auto && requeue_among(&world);
        let code = reason.map_or(EXIT_SAVED_NOT_REQUEUED, StopReason::exit_code);
        Ok(if requeued { ExitCode::SUCCESS } else { code.into() })
    }

    fn which(&self, settings: &LoopSettings) -> Result<Which, TrainError> {
        let only = self.stage.as_deref().map(|name| stage::named(name, settings.shape()));
        let only = only.transpose().map_err(|what| TrainError::Options(format!("--stage {what}")))?;
        let Some(parts) = self.parts else { return Ok(Which { only, part: None }) };
        if only.is_none_or(|only| only.step != Step::Vectors) || parts == 0 {
            let what = format!(
                "--parts {parts}: expected at least 1, and a --stage of vectors: others have no parts"
            );
            return Err(TrainError::Options(what));
        }
        let number = std::env::var("SLURM_ARRAY_TASK_ID").ok().and_then(|number| number.parse().ok());
        match number.filter(|number| *number < parts) {
            Some(number) => Ok(Which { only, part: Some((number, parts)) }),
            None => Err(TrainError::Options(format!(
                "--parts {parts}: expected the number of a part, from 0 to one less, in SLURM_ARRAY_TASK_ID, as a job array has it"
            ))),
        }
    }

    fn plan(&self, settings: &LoopSettings) -> anyhow::Result<ExitCode> {
        let plan = rounds::plan(settings)?;
        if self.json {
            line(&serde_json::to_string(&plan)?)?;
            return Ok(ExitCode::SUCCESS);
        }
        let width = plan.iter().map(|planned| planned.stage.len()).max().unwrap_or(0);
        for planned in &plan {
            let time = planned.seconds.map(|s| format!(" ({})", duration(s))).unwrap_or_default();
            let reason = if planned.reason.is_empty() { "" } else { ": " };
            line(&format!("{:width$}  {}{time}{reason}{}", planned.stage, planned.standing, planned.reason))?;
        }
        Ok(ExitCode::SUCCESS)
    }

    fn show(&self, settings: &LoopSettings) -> anyhow::Result<()> {
        let table = rounds::table(settings)?;
        match self.json {
            true => line(&serde_json::to_string(&table)?)?,
            false => line(table.markdown().trim_end())?,
        }
        Ok(())
    }
}
