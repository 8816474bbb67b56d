//! `tercio answer`: a question with passages, many of them as JSON lines, or a question about a whole collection, in; answers out.

use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgGroup, Args};
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::Question;
use tercio_engine::Cpu;
use tercio_train::answer::{Support, SupportedAnswer, answer_lines, ask, question_of};
use tercio_train::evaluate::{likelihood_json, one_line, scores_in_file_order};
use tercio_train::find::{DenseSettings, FindSettings, Finder};
use tercio_train::predict::{Prediction, Predictor};
use tercio_train::ranks::RankDevice;
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::device::open_device;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::{TrainError, on_device};

use super::common::{self, line, within};
use super::reader_flags::{ReaderFlags, load};

/// Passages that are read of a collection where nobody says how many.
const READ: usize = 20;
/// Passages that are shown beside an answer; --json has all.
const SHOWN: usize = 5;
/// Passages of a question that are believed to be meant.
const MOST_DOCS: usize = 10_000;
/// Bytes of a question that are believed to be meant.
const MOST_BYTES: u64 = 1 << 20;

/// Flags of `tercio answer`.
#[derive(Args)]
#[command(group(ArgGroup::new("source").required(true).args(["question", "file", "interactive"])))]
pub struct Answer {
    /// Questions with passages (`question`, `ctxs`): .json or .jsonl, also .gz or .zst, or `-` for JSON lines on stdin; with
    /// --index a question
    file: Option<PathBuf>,
    #[command(flatten)]
    reader: ReaderFlags,
    /// A question; without passages it is asked closed book
    #[arg(long, allow_hyphen_values = true)]
    question: Option<String>,
    /// A passage for --question, as `title|text` or a text alone; once for each passage
    #[arg(long, requires = "question", allow_hyphen_values = true)]
    passage: Vec<String>,
    /// Answer over a whole collection: search this index (a folder of `tercio index`) for passages first
    #[arg(long, env = "TERCIO_INDEX", conflicts_with = "passage")]
    index: Option<PathBuf>,
    /// The collection, where it is not where it was when it was indexed
    #[arg(long, env = "TERCIO_PASSAGES", requires = "index")]
    passages: Option<PathBuf>,
    /// Model that embeds questions, for an index of vectors: the retriever that made them
    #[arg(long, env = "TERCIO_RETRIEVER", requires = "index")]
    retriever: Option<String>,
    /// Passages that are searched for; default: as many as are read
    #[arg(long, visible_alias = "n-docs", requires = "index")]
    depth: Option<usize>,
    /// Ask on and on: questions on stdin, a line each, until it ends; all is loaded once
    #[arg(long, requires = "index")]
    interactive: bool,
    /// Passages of each question that are read, best score first; default: all, with --index 20
    #[arg(long, env = "TERCIO_N_CONTEXT")]
    n_context: Option<usize>,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    #[command(flatten)]
    link: LinkOptions,
    /// Print a JSON object for each question (id, question, answer; with --num-return-sequences, alternatives) instead of
    /// the best answer alone
    #[arg(long)]
    json: bool,
    /// Add to --json how likely the answer is (log_probability, mean_log_probability, of beam search beam_score), and the
    /// reader's score of every passage, in the order given
    #[arg(long, requires = "json")]
    scores: bool,
}

impl Answer {
    /// Answers.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let place = common::place(Flags::default())?;
        let threads = common::threads_of_rank(self.reader.threads)?;
        // One question, or those of a pipe, are one process's work.
        let alone = self.index.is_some() || self.file.as_deref().is_none_or(|file| file == Path::new("-"));
        if alone && place.rank > 0 {
            return Ok(ExitCode::SUCCESS);
        }
        let world = if alone { World::alone() } else { common::join(&place, &self.link)? };
        let open = || open_device(&world, threads, self.reader.compute.get(), &self.reader.device);
        let answered = open().and_then(|device| on_device!(&device, |d| self.answer(&world, d)));
        Ok(common::end(&world, answered)?.err().unwrap_or(ExitCode::SUCCESS))
    }

    fn answer<D: RankDevice>(&self, world: &World, device: &D) -> Result<(), TrainError> {
        let loaded = load(&self.reader, world, device)?;
        if let Some(index) = &self.index {
            let n_context = self.n_context.unwrap_or(READ);
            let mut predictor = loaded.predictor(&self.reader, device, n_context);
            predictor.scores = true;
            return self.over(index, &predictor);
        }
        let n_context = self.n_context.unwrap_or(usize::MAX);
        let mut predictor = loaded.predictor(&self.reader, device, n_context);
        predictor.scores = self.scores;
        let print = |question: &Question, prediction: Prediction| self.print(question, prediction);
        if let Some(question) = &self.question {
            let question = question_of(question, &self.passage);
            let prediction = device.run(|| predictor.answer(std::slice::from_ref(&question)))?;
            for prediction in prediction {
                print(&question, prediction)?;
            }
            return Ok(());
        }
        match self.file.as_deref() {
            Some(file) if file != Path::new("-") => {
                let (cache, broadcast) = (self.cache_dir.as_deref(), self.link.broadcast_data);
                let questions = open_among(world, file, cache, broadcast)?;
                device.run(|| predictor.each_among(world, &questions, usize::MAX, &|| false, print))?;
            }
            _ => {
                let stdin = BufReader::new(std::io::stdin());
                answer_lines(&predictor, stdin, Path::new("<stdin>"), print)?;
            }
        }
        Ok(())
    }

    /// Answers over a collection.
    fn over<D: RankDevice>(&self, index: &Path, predictor: &Predictor<'_, D>) -> Result<(), TrainError> {
        let n_context = predictor.encoding.n_context;
        within(&[("n_context", n_context, MOST_DOCS)])?;
        let depth = self.depth.unwrap_or(n_context);
        within(&[("depth", depth, MOST_DOCS)])?;
        let finder = self.finder(index)?;
        let ask = |text: &str| self.print_supported(&ask(predictor, &finder, text, depth)?);
        if !self.interactive {
            let file = self.file.as_deref().map(Path::to_string_lossy);
            let text = self.question.as_deref().or(file.as_deref()).unwrap_or_default();
            return ask(text);
        }
        let mut lines = std::io::stdin().lock();
        let prompt = std::io::stdin().is_terminal() && std::io::stderr().is_terminal();
        loop {
            if prompt {
                eprint!("question: ");
                let _ = std::io::stderr().flush();
            }
            let mut bytes = Vec::new();
            let failed = |source| TrainError::Read { path: "<stdin>".into(), source };
            let read = (&mut lines).take(MOST_BYTES + 1).read_until(b'\n', &mut bytes).map_err(failed)?;
            if read == 0 {
                return Ok(());
            }
            if read as u64 > MOST_BYTES {
                let what =
                    format!("<stdin>: expected a question of at most {MOST_BYTES} bytes a line, found more");
                return Err(TrainError::Unusable(what));
            }
            // Bytes that are no text are none that a passage could have.
            let text = String::from_utf8_lossy(&bytes);
            if !text.trim().is_empty() {
                ask(text.trim())?;
            }
        }
    }

    /// Searches on the processor, wherever is read.
    fn finder(&self, index: &Path) -> Result<Finder, TrainError> {
        let device =
            Cpu::new(common::threads(self.reader.threads)?)?.with_precision(self.reader.compute.get().into());
        let settings = FindSettings {
            passages: self.passages.clone(),
            cache_dir: self.cache_dir.clone(),
            dense: DenseSettings {
                model: self.retriever.clone(),
                resident: self.interactive,
                ..DenseSettings::default()
            },
            ..FindSettings::default()
        };
        Finder::open_on(&device, index, &settings)
    }

    fn print_supported(&self, answered: &SupportedAnswer) -> Result<(), TrainError> {
        let SupportedAnswer { question, prediction, support } = answered;
        if self.json {
            let passage = |s: &Support| {
                let p = &s.passage;
                serde_json::json!({
                    "id": p.id, "title": p.title, "text": p.text, "score": s.score, "retrieval_score": p.score,
                })
            };
            let mut json = serde_json::json!({"question": question.question, "answer": prediction.answer});
            if self.scores || !prediction.alternatives.is_empty() {
                for (name, value) in likelihood_json(question, prediction, "answer")? {
                    json[name] = value;
                }
            }
            json["passages"] = support.iter().map(passage).collect();
            return say(&json.to_string());
        }
        let mut out = one_line(&prediction.answer);
        if support.is_empty() {
            eprintln!("tercio: no passage was found; the reader answers by heart");
        }
        for (i, Support { passage, score }) in support.iter().take(SHOWN).enumerate() {
            let found = passage.score.unwrap_or_default();
            out += &format!(
                "\n  {}. [{}] {}: {}\n     reader {score:.3}, search {found:.3}",
                i + 1,
                one_line(&passage.id),
                one_line(&passage.title),
                one_line(&passage.text)
            );
        }
        say(&out)
    }

    fn print(&self, question: &Question, prediction: Prediction) -> Result<(), TrainError> {
        let text = if self.json {
            let mut json = serde_json::json!({
                "id": question.id,
                "question": question.question,
                "answer": prediction.answer,
            });
            if self.scores || !prediction.alternatives.is_empty() {
                for (name, value) in likelihood_json(question, &prediction, "answer")? {
                    json[name] = value;
                }
            }
            if let Some(scores) = scores_in_file_order(question, &prediction)? {
                json["scores"] = serde_json::json!(scores);
            }
            json.to_string()
        } else {
            one_line(&prediction.answer)
        };
        say(&text)
    }
}

fn say(text: &str) -> Result<(), TrainError> {
    line(text).map_err(|source| TrainError::Write { path: "stdout".into(), source })
}
