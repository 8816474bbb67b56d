//! `tercio quickstart`: a tiny reader trained from scratch in minutes on real questions that are part of this binary,
//! measured on places that it never saw, beside two baselines. Everything is an ordinary run that can be repeated by hand.

mod rounds;

use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Instant;

use clap::{Args, Parser};
use serde_json::json;
use tercio_comm::World;
use tercio_data::{Question, Questions, baselines};
use tercio_train::objective::Objective;
use tercio_train::options::{DeviceChoice, DeviceOptions, Precision, PrecisionOptions, ReaderOptions};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::device::open_device;
use tercio_train::rounds::{LoopOutcome, Table};
use tercio_train::run::{
    EXIT_SAVED_NOT_REQUEUED, Signals, Verbosity, init_logging, log_to, loss_plot, metrics, write_atomic,
};
use tercio_train::trainer::{LoopOptions, RunOutcome};
use tercio_train::{TrainError, on_device, setup, trainer};

use self::rounds::{QuickLoop, Size};
use super::common;

/// The files of `data/quickstart`, part of the binary.
const FILES: [(&str, &[u8]); 6] = [
    ("train.jsonl.zst", include_bytes!("../../../../data/quickstart/train.jsonl.zst")),
    ("eval.jsonl.zst", include_bytes!("../../../../data/quickstart/eval.jsonl.zst")),
    ("tokenizer.json", include_bytes!("../../../../data/quickstart/tokenizer.json")),
    ("tokenizer_config.json", include_bytes!("../../../../data/quickstart/tokenizer_config.json")),
    ("config.json", include_bytes!("../../../../data/quickstart/config.json")),
    ("README.md", include_bytes!("../../../../data/quickstart/README.md")),
];

/// A stretch of training: contexts begin short and single, then grow.
struct Phase {
    name: &'static str,
    flags: &'static [&'static str],
}

/// Sixths of all updates that the first phase takes.
const FIRST_SIXTHS: u64 = 5;

const PHASES: [Phase; 2] = [
    Phase {
        name: "1-one-passage",
        flags: &["--n_context", "1", "--lr", "1e-3", "--warmup_steps", "100", "--fixed_lr"],
    },
    Phase { name: "2-three-passages", flags: &["--n_context", "3", "--lr", "1e-3", "--warmup_steps", "0"] },
];

/// Flags of both phases.
const COMMON: &[&str] = &[
    "--eval_n_context",
    "3",
    "--text_maxlength",
    "128",
    "--generation_max_length",
    "24",
    "--global_batch_size",
    "48",
    "--micro_batch_size",
    "48",
    "--optim",
    "adamw",
    "--weight_decay",
    "0.01",
    "--scheduler",
    "linear",
    "--eval_freq",
    "1000",
    "--save_freq",
    "500",
    "--log_freq",
    "50",
    "--keep_last",
    "1",
];

/// Updates where the flag says nothing else.
const UPDATES: u64 = 3000;

/// The loop of that many updates.
const LOOP: Size = Size { questions: 12_000, all_passages: true, reader: 600, retriever: 400 };

/// Flags of `tercio quickstart`.
#[derive(Args)]
pub struct Quickstart {
    /// Seed of initial values and order of examples; every seed is a run of its own
    #[arg(long, default_value_t = 1)]
    seed: u64,
    /// Updates of both phases together; every number is a run of its own
    #[arg(long, default_value_t = UPDATES)]
    updates: u64,
    /// Folder of data, runs and results
    #[arg(long, default_value = "quickstart")]
    dir: PathBuf,
    /// Threads; 0: all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    #[command(flatten)]
    compute: PrecisionOptions,
    #[command(flatten)]
    device: DeviceOptions,
    /// Held-out questions to evaluate on, from the start of the file; 0: all
    #[arg(long, default_value_t = 0)]
    eval_questions: usize,
    /// Then the loop, in two rounds: all passages become one collection, in which a retriever learns from the reader what to find; about
    /// seven minutes more
    #[arg(long = "loop")]
    rounds: bool,
    /// Print the figures as one line of JSON on stdout, and no talk
    #[arg(long)]
    json: bool,
}

/// So that a run's flags are read by the same code as those of `tercio train reader`.
#[derive(Parser)]
#[command(no_binary_name = true)]
struct Flags {
    #[command(flatten)]
    options: ReaderOptions,
}

/// Figures of the evaluation.
#[derive(Clone, Copy)]
struct Measured {
    exact_match: f64,
    f1: f64,
}

impl Measured {
    /// From the figures of an evaluation, where there was one.
    fn of(figures: &[(&'static str, f64)]) -> Option<Self> {
        let figure = |name| figures.iter().find(|(n, _)| *n == name).map(|(_, v)| *v);
        Some(Measured { exact_match: figure("exact_match")?, f1: figure("f1")? })
    }
}

impl Quickstart {
    /// Trains, measures, draws, answers.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.updates < 2 {
            return Err(
                TrainError::Options("--updates must be at least 2: there are two phases".into()).into()
            );
        }
        if self.rounds && self.device.device != DeviceChoice::Cpu {
            let what = "--loop computes on the processor so far: leave --device out, or --loop";
            return Err(TrainError::Options(what.into()).into());
        }
        let started = Instant::now();
        let dir = self.dir.join(self.run_name());
        let data = dir.join("data");
        self.unpack(&data)?;
        init_logging(None, if self.json { Verbosity::Quiet } else { Verbosity::Normal })?;
        let threads = common::threads(self.threads)?;
        let device = open_device(&World::alone(), threads, self.compute.get(), &self.device)?;
        on_device!(&device, |device| Ok(self.run_on(device, &dir, started)))?
    }

    fn run_on<D: RankDevice>(&self, device: &D, dir: &Path, started: Instant) -> anyhow::Result<ExitCode> {
        let data = dir.join("data");
        let signals = Signals::install()?;
        let (train, eval) = (Questions::open(&data.join(FILES[0].0), &data)?, self.open_eval(&data)?);
        self.say(&format!(
            "{} questions to train on, {} held out (places that training never sees), 3 passages each; see {}",
            train.len(),
            eval.len(),
            data.join("README.md").display()
        ));
        let base = baselines::measure(&train, &eval)?;
        let (mut before, mut after, mut outcome) = (None, None, None);
        let mut model: Option<PathBuf> = None;
        for (i, phase) in PHASES.iter().enumerate() {
            let words = self.flags(phase, i, dir, model.as_deref());
            self.say(&format!("tercio train reader {}", words.join(" ")));
            let options = parse(&words)?;
            options.check().map_err(TrainError::Options)?;
            if i == 0 {
                before = Some(self.untrained(&options, device)?);
            }
            let (done, measured) = self.train(&options, device, &signals)?;
            if let Some(reason) = done.stopped {
                eprintln!(
                    "tercio: {}: saved; the same command goes on from update {}",
                    reason.name(),
                    done.step
                );
                return Ok(reason.exit_code().into());
            }
            model = Some(setup::run_dir(&options).join("checkpoint/latest"));
            after = measured;
            outcome = Some((options, done));
        }
        let (options, _) = outcome.expect("there are phases");
        let (before, after) = (before.expect("measured first"), after.expect("measured last"));
        let picture = self.draw(dir)?;
        let answers = self.answers(&options, device, &eval)?;
        let mut figures = json!({
            "seed": self.seed, "updates": self.updates, "questions": eval.len(), "passages": 3,
            "exact_match_before": before.exact_match, "exact_match": after.exact_match, "f1": after.f1,
            "majority": base.majority, "overlap": base.overlap,
            "points_above_baselines": 100.0 * (after.exact_match - base.majority.max(base.overlap)),
            "seconds": (started.elapsed().as_secs_f64() * 10.0).round() / 10.0,
            "model": model, "picture": picture,
        });
        if !self.json {
            self.report(dir, &base, before, after, &answers)?;
        }
        if self.rounds {
            match self.run_rounds(dir, &train, &eval, &signals)? {
                Ok(table) => figures["loop"] = json!(table),
                Err(code) => return Ok(code),
            }
        }
        if self.json {
            common::line(&figures.to_string())?;
        }
        Ok(ExitCode::SUCCESS)
    }

    /// The loop; `Err` is the exit code where a signal ended it.
    fn run_rounds(
        &self,
        dir: &Path,
        train: &Questions,
        eval: &Questions,
        signals: &Signals,
    ) -> anyhow::Result<Result<Table, ExitCode>> {
        let reader = dir.join(PHASES[1].name).join("checkpoint/latest");
        let share = |n: u64| (n * self.updates / UPDATES).clamp(2, n);
        let quick = QuickLoop {
            dir: &dir.join("loop"),
            train,
            eval,
            tokenizer: &dir.join("data"),
            reader: &reader,
            seed: self.seed,
            threads: self.threads,
            precision: self.compute.get().name(),
            size: Size {
                questions: share(LOOP.questions as u64).max(100) as usize,
                all_passages: self.updates >= UPDATES,
                reader: share(LOOP.reader),
                retriever: share(LOOP.retriever),
            },
        };
        quick.prepare()?;
        let config = quick.config().display().to_string();
        self.say(&format!("tercio loop --config {config}"));
        let (outcome, table) = quick.run(signals, !self.json)?;
        if let LoopOutcome::Stopped(reason) = outcome {
            eprintln!("tercio: saved; the same command goes on");
            let code = reason.map_or(EXIT_SAVED_NOT_REQUEUED, |reason| reason.exit_code());
            return Ok(Err(code.into()));
        }
        if !self.json {
            let rounds = dir.join("loop/rounds/round-2");
            common::line(&format!(
                "\n{}\n\ngo on:\n  tercio answer --model_path {} --index {} \\\n      --retriever {} --n_context 1 --text_maxlength 128 --interactive\n  \
                 tercio loop --config {config} --rounds 3",
                table.markdown().trim_end(),
                rounds.join("reader").display(),
                rounds.join("index").display(),
                rounds.join("retriever").display(),
            ))?;
        }
        Ok(Ok(table))
    }

    /// The second phase starts from what the first one ended with: with other updates it is another run from the start,
    /// not one to go on with.
    fn run_name(&self) -> String {
        let precision = match self.compute.get() {
            Precision::F32 => String::new(),
            other => format!("-{}", other.name()),
        };
        match self.updates {
            UPDATES => format!("seed-{}{precision}", self.seed),
            n => format!("seed-{}-updates-{n}{precision}", self.seed),
        }
    }

    fn say(&self, text: &str) {
        if !self.json {
            tracing::info!("{text}");
        }
    }

    fn unpack(&self, data: &Path) -> anyhow::Result<()> {
        std::fs::create_dir_all(data).map_err(|e| {
            anyhow::anyhow!("{}: cannot create the folder: {e}; choose another --dir", data.display())
        })?;
        for (name, content) in FILES {
            let path = data.join(name);
            if std::fs::read(&path).ok().as_deref() != Some(content) {
                write_atomic(&path, content)?;
            }
        }
        Ok(())
    }

    /// The held-out questions; a part of them in a file of its own.
    fn open_eval(&self, data: &Path) -> anyhow::Result<Questions> {
        let all = Questions::open(&data.join(FILES[1].0), data)?;
        if self.eval_questions == 0 || self.eval_questions >= all.len() {
            return Ok(all);
        }
        let lines: Vec<String> = (0..self.eval_questions)
            .map(|i| Ok(serde_json::to_string(&all.get_raw(i)?)? + "\n"))
            .collect::<anyhow::Result<_>>()?;
        let path = data.join(format!("eval-{}.jsonl", self.eval_questions));
        write_atomic(&path, lines.concat().as_bytes())?;
        Ok(Questions::open(&path, data)?)
    }

    fn flags(&self, phase: &Phase, index: usize, dir: &Path, model: Option<&Path>) -> Vec<String> {
        let data = dir.join("data");
        let first = (self.updates * FIRST_SIXTHS / 6).clamp(1, self.updates - 1);
        let steps = if index == 0 { first } else { self.updates - first };
        let eval = match self.eval_questions {
            0 => data.join(FILES[1].0),
            n => {
                let part = data.join(format!("eval-{n}.jsonl"));
                if part.exists() { part } else { data.join(FILES[1].0) }
            }
        };
        let mut words: Vec<String> = Vec::new();
        let mut add = |flag: &str, value: String| words.extend([flag.to_owned(), value]);
        add("--checkpoint_dir", dir.display().to_string());
        add("--name", phase.name.into());
        add("--seed", self.seed.to_string());
        add("--threads", self.threads.to_string());
        add("--precision", self.compute.get().name().into());
        add("--train_data", data.join(FILES[0].0).display().to_string());
        add("--eval_data", eval.display().to_string());
        add("--total_steps", steps.to_string());
        match model {
            Some(model) => add("--model_path", model.display().to_string()),
            None => {
                add("--init", "random".into());
                add("--model_config", data.join("config.json").display().to_string());
            }
        }
        words.extend(COMMON.iter().chain(phase.flags).map(|w| w.to_string()));
        words
    }

    /// The initial model on the held-out questions.
    fn untrained<D: RankDevice>(&self, options: &ReaderOptions, device: &D) -> anyhow::Result<Measured> {
        let scratch = tercio_train::scratch::ScratchFolder::new()?;
        let run = device.run(|| setup::open_run_from(options, None, scratch.path(), device))?;
        measure(&run.objective, device, &run.state.parameters)
    }

    fn train<D: RankDevice>(
        &self,
        options: &ReaderOptions,
        device: &D,
        signals: &Signals,
    ) -> anyhow::Result<(RunOutcome, Option<Measured>)> {
        let folder = setup::open_folder(options)?;
        log_to(&folder.dir)?;
        let mut run = device.run(|| setup::open_run(options, &folder, device))?;
        let settings = LoopOptions::new(&options.data, &options.optim, options.run.seed, !self.json)?;
        let counters = run.counters.take();
        let (objective, state) = (&run.objective, &mut run.state);
        let outcome = trainer::train(device, objective, &settings, &folder, state, counters, Some(signals))?;
        if outcome.stopped.is_some() {
            return Ok((outcome, None));
        }
        let measured = match Measured::of(&outcome.figures) {
            Some(measured) => measured,
            // The run was complete already.
            None => measure(objective, device, &state.parameters)?,
        };
        Ok((outcome, Some(measured)))
    }

    /// The loss curve of both phases, one after the other: shown, and written as a picture.
    fn draw(&self, dir: &Path) -> anyhow::Result<PathBuf> {
        let (mut loss, mut exact_match, mut offset) = (Vec::new(), Vec::new(), 0);
        for phase in &PHASES {
            let run = dir.join(phase.name);
            let shifted = |points: Vec<(u64, f64)>| points.into_iter().map(move |(s, v)| (s + offset, v));
            let losses = metrics::read_series(&run, None, "loss")?;
            let last = losses.last().map_or(0, |p| p.0);
            exact_match.extend(shifted(metrics::read_series(&run, Some("eval"), "exact_match")?));
            loss.extend(shifted(losses));
            offset += last;
        }
        let path = dir.join("loss.svg");
        write_atomic(&path, loss_plot::svg("tercio quickstart", &loss, &exact_match).as_bytes())?;
        if !self.json {
            common::line(&loss_plot::terminal_chart("training loss", &loss, 90, 12))?;
        }
        Ok(path)
    }

    /// Three held-out questions with the reader's answers.
    fn answers<D: RankDevice>(
        &self,
        options: &ReaderOptions,
        device: &D,
        eval: &Questions,
    ) -> anyhow::Result<Vec<(Question, String)>> {
        let folder = setup::open_folder(options)?;
        let run = device.run(|| setup::open_run(options, &folder, device))?;
        let picks = [0, eval.len() / 3, 2 * eval.len() / 3];
        let questions: Vec<Question> = picks.iter().map(|&i| eval.get(i)).collect::<Result<_, _>>()?;
        let predictor = run.objective.predictor(device, &run.state.parameters);
        let predictions = device.run(|| predictor.answer(&questions))?;
        Ok(questions.into_iter().zip(predictions.into_iter().map(|p| p.answer)).collect())
    }

    fn report(
        &self,
        dir: &Path,
        base: &baselines::Baselines,
        before: Measured,
        after: Measured,
        answers: &[(Question, String)],
    ) -> anyhow::Result<()> {
        let percent = |v: f64| format!("{:5.1} %", 100.0 * v);
        let mut out = String::from("exact match on held-out places, 3 passages a question\n");
        for (what, v) in [
            ("untrained", before.exact_match),
            ("majority answer of the field", base.majority),
            ("first words of the best passage by overlap", base.overlap),
            ("trained reader", after.exact_match),
        ] {
            out += &format!("  {what:44}{}\n", percent(v));
        }
        out += &format!("  {:44}{}\n\n", "trained reader, token F1", percent(after.f1));
        for (question, answer) in answers {
            out += &format!("{}\n", question.question);
            for passage in &question.ctxs {
                out += &format!("    {}: {}\n", passage.title, passage.text);
            }
            out += &format!("  answers: {answer}    (gold: {})\n", question.answers.join(" | "));
        }
        let model = dir.join(PHASES[1].name).join("checkpoint/latest");
        let (model, eval) = (model.display(), dir.join("data").join(FILES[1].0));
        out += &format!(
            "\nloss curve: {}\n\ngo on:\n  tercio answer --model_path {model} --question 'What is the capital of Atlantis?' \\\n      \
             --passage 'Atlantis|Government. Capital, name: Poseidonis. Time difference: UTC 0.'\n  tercio eval reader --model_path \
             {model} --eval_data {} --n_context 3 --text_maxlength 128 --per_gpu_batch_size 16\n  tercio quickstart --seed 2\n",
            dir.join("loss.svg").display(),
            eval.display()
        );
        common::line(out.trim_end())?;
        Ok(())
    }
}

fn measure<D: RankDevice>(
    objective: &tercio_train::objectives::reader::ReaderObjective,
    device: &D,
    parameters: &tercio_engine::Arena<D>,
) -> anyhow::Result<Measured> {
    let evaluation = device.run(|| Objective::<D>::evaluate(objective, device, parameters, &|| false))?;
    evaluation
        .and_then(|e| Measured::of(&e.figures))
        .ok_or_else(|| anyhow::anyhow!("the run has no questions to evaluate on"))
}

fn parse(words: &[String]) -> anyhow::Result<ReaderOptions> {
    let dashed = crate::args::words(words.iter().map(Into::into))?;
    Ok(Flags::try_parse_from(dashed)?.options)
}
