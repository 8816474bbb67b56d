//! `tercio predict`: texts in, labels with their probabilities out, as JSON lines in the order of the input.

use std::io::{BufRead, BufReader, Stdin};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::{Map, Value};
use tercio_comm::World;
use tercio_data::Document;
use tercio_data::corpus::Split;
use tercio_data::replace::{ReplacedFile, refuse_source};
use tercio_train::classify::{Faults, LineForm, TextClassifier, classify_among, classify_lines, predicted};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::device::open_device;
use tercio_train::run::Signals;
use tercio_train::{TrainError, on_device};

use super::classifier_flags::ClassifierFlags;
use super::common::{self, line};

/// Flags of `tercio predict`.
#[derive(Args)]
pub struct Predict {
    /// Texts: .txt (one a line), .jsonl, .json, .csv or .tsv, also .gz or .zst; .parquet in a build with that feature; a folder with a
    /// folder per label; or `-` for lines on stdin
    data: PathBuf,
    #[command(flatten)]
    flags: ClassifierFlags,
    /// Write the lines here instead of on stdout; the file appears when all are written
    #[arg(long)]
    output: Option<PathBuf>,
    /// Add the probability of every label
    #[arg(long)]
    all_probabilities: bool,
    /// Add the text
    #[arg(long)]
    text: bool,
    /// What the lines of stdin are
    #[arg(long, value_enum, default_value_t = StdinForm::Auto)]
    stdin_form: StdinForm,
}

/// What the lines of stdin are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum StdinForm {
    /// JSON if the first byte that is no white space is a brace, else texts
    Auto,
    /// A text a line
    Text,
    /// An object of JSON a line
    Jsonl,
}

impl Predict {
    /// Predicts.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        self.flags.check()?;
        let place = common::place(self.flags.place())?;
        let threads = common::threads_of_rank(self.flags.threads)?;
        common::start_log(&place, self.flags.quiet)?;
        // What comes through a pipe is one process's work.
        let piped = self.data == Path::new("-");
        if piped && place.rank > 0 {
            return Ok(ExitCode::SUCCESS);
        }
        let signals = Signals::install()?;
        let world = if piped { World::alone() } else { common::join(&place, &self.flags.link)? };
        let open = || open_device(&world, threads, self.flags.compute.get(), &self.flags.device);
        let done =
            open().and_then(|device| on_device!(&device, |d| self.predict(&world, d, &signals, piped)));
        Ok(common::end(&world, done)?.err().unwrap_or(ExitCode::SUCCESS))
    }

    fn predict<D: RankDevice>(
        &self,
        world: &World,
        device: &D,
        signals: &Signals,
        piped: bool,
    ) -> Result<(), TrainError> {
        let opened = self.flags.open(world, device)?;
        let classifier = self.flags.classifier(&opened, device)?;
        let mut output = match self.output.as_deref().filter(|_| world.is_main()) {
            Some(path) => {
                refuse_source(path, &self.data)?;
                Some(ReplacedFile::create(path)?)
            }
            None => None,
        };
        let stop = || signals.requested().is_some();
        let (mut faults, mut done) = (Faults::default(), 0u64);
        let mut take = |document: &Document, logits: &[f32]| {
            done += 1;
            let text = Value::from(self.line(document, &classifier, logits)).to_string();
            match &mut output {
                Some(file) => Ok(file.write((text + "\n").as_bytes())?),
                None => line(&text).map_err(|source| TrainError::Write { path: "stdout".into(), source }),
            }
        };
        let mut on_fault = |fault: &_| faults.say(fault);
        let skip_bad = self.flags.skip_bad;
        let predicted = if piped {
            let mut stdin = BufReader::with_capacity(1 << 18, std::io::stdin());
            let (form, name) = (self.form(&mut stdin)?, Path::new("<stdin>"));
            classify_lines(&classifier, &mut stdin, name, &form, skip_bad, &stop, &mut on_fault, &mut take)
        } else {
            let split = Split::all(self.flags.documents(world, &self.data)?);
            device
                .run(|| classify_among(world, &classifier, &split, skip_bad, &stop, &mut on_fault, &mut take))
        };
        match predicted {
            Err(TrainError::Interrupted) => return Err(TrainError::Stopped),
            other => other?,
        }
        if let Some(file) = output {
            let path = file.finish()?;
            tracing::info!("wrote {done} lines to {}", path.display());
        }
        faults.sum_up();
        // Nobody is done before rank 0 has written everything.
        world.barrier()?;
        Ok(())
    }

    /// A line of the results.
    fn line<D: RankDevice>(
        &self,
        document: &Document,
        classifier: &TextClassifier<'_, D>,
        logits: &[f32],
    ) -> Map<String, Value> {
        let config = &classifier.model.config;
        let mut fields = Map::new();
        fields.insert("id".into(), document.id.clone());
        fields.insert("line".into(), document.place.line.into());
        if self.text {
            fields.insert("text".into(), document.text.as_str().into());
        }
        fields.append(&mut predicted(config, logits).json(config, self.all_probabilities));
        if !document.labels.is_empty() {
            fields.insert("gold".into(), document.labels.clone().into());
        }
        fields
    }

    fn form(&self, stdin: &mut BufReader<Stdin>) -> Result<LineForm, TrainError> {
        let json = match self.stdin_form {
            StdinForm::Text => false,
            StdinForm::Jsonl => true,
            StdinForm::Auto => {
                let failed = |source| TrainError::Read { path: "<stdin>".into(), source };
                let bytes = stdin.fill_buf().map_err(failed)?;
                let bytes = bytes.strip_prefix(b"\xEF\xBB\xBF").unwrap_or(bytes);
                bytes.iter().find(|b| !b.is_ascii_whitespace()) == Some(&b'{')
            }
        };
        Ok(if json { LineForm::Json(self.flags.columns()) } else { LineForm::Text })
    }
}
