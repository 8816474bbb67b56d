//! `tercio answer`: a question with passages, or many of them as JSON lines, in; answers out.

use std::io::BufReader;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{ArgGroup, Args};
use tercio_comm::World;
use tercio_comm::place::Flags;
use tercio_data::Question;
use tercio_engine::Device;
use tercio_train::TrainError;
use tercio_train::answer::{answer_lines, question_of};
use tercio_train::evaluate::{likelihood_json, one_line, scores_in_file_order};
use tercio_train::predict::Prediction;
use tercio_train::ranks::corpus::open_among;
use tercio_train::ranks::options::LinkOptions;
use tercio_train::ranks::start;

use super::common::{self, line};
use super::reader_flags::{ReaderFlags, load};

/// Flags of `tercio answer`.
#[derive(Args)]
#[command(group(ArgGroup::new("source").required(true).args(["question", "file"])))]
pub struct Answer {
    /// Questions with passages (`question`, `ctxs`): .json or .jsonl, also .gz or .zst, or `-` for JSON lines on stdin
    file: Option<PathBuf>,
    #[command(flatten)]
    reader: ReaderFlags,
    /// A question; without passages it is asked closed book
    #[arg(long, allow_hyphen_values = true)]
    question: Option<String>,
    /// A passage for --question, as `title|text` or a text alone; once for each passage
    #[arg(long, requires = "question", allow_hyphen_values = true)]
    passage: Vec<String>,
    /// Passages of each question that are read, best score first; default: all
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
        let alone = self.file.as_deref().is_none_or(|file| file == Path::new("-"));
        if alone && place.rank > 0 {
            return Ok(ExitCode::SUCCESS);
        }
        let world = if alone { World::alone() } else { common::join(&place, &self.link)? };
        let answered = self.answer(&world, threads);
        Ok(common::end(&world, answered)?.err().unwrap_or(ExitCode::SUCCESS))
    }

    fn answer(&self, world: &World, threads: usize) -> Result<(), TrainError> {
        let device = start::device_among(world, threads, self.reader.compute.get())?;
        let loaded = load(&self.reader, world, &device)?;
        let n_context = self.n_context.unwrap_or(usize::MAX);
        let mut predictor = loaded.predictor(&self.reader, &device, n_context);
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
        line(&text).map_err(|source| TrainError::Write { path: "stdout".into(), source })
    }
}
