//! `tercio data convert`: the files that others publish become questions that Tercio and Fusion-in-Decoder read.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_data::convert::{Dump, convert_dump, distillation_lists, dpr_json, dpr_passages, dpr_questions};
use tercio_train::TrainError;
use tercio_train::scratch::ScratchFolder;

use super::common::line;

/// Flags of `tercio data convert`.
#[derive(Args)]
pub struct DataConvert {
    /// What INPUT is
    #[arg(value_enum)]
    format: Format,
    /// The file; for nq and triviaqa the folder of the downloads
    input: PathBuf,
    /// File to write (.json or .jsonl); for nq and triviaqa a folder, which gets train.json, dev.json and test.json
    #[arg(long)]
    output: PathBuf,
    /// For nq and triviaqa: the collection of passages, psgs_w100.tsv (default: the one in the folder of the downloads); for
    /// distillation the documents, .jsonl or .tsv by id
    #[arg(long)]
    passages: Option<PathBuf>,
    /// For distillation: the queries, .jsonl or .tsv by id
    #[arg(long)]
    questions: Option<PathBuf>,
    /// For dpr-json and distillation: passages of each question at most, the first ones (of dpr-json positive ones first)
    #[arg(long)]
    most_passages: Option<usize>,
    /// For dpr-json and distillation: folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Print what was written as lines of JSON on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Format {
    /// The original NQ-open files, with Fusion-in-Decoder's index and passages
    Nq,
    /// The original TriviaQA files (unfiltered), with Fusion-in-Decoder's index and passages
    Triviaqa,
    /// DPR's training data: positive_ctxs, negative_ctxs, hard_negative_ctxs
    DprJson,
    /// DPR's questions: question, tab, ['answer', ...]
    DprQuestions,
    /// DPR's passages: id, tab, text, tab, title
    DprPassages,
    /// Lists of documents with a teacher's scores: PyLate's query_id, document_ids, scores, or ColBERT's [query, [document, score], ...]
    Distillation,
}

impl DataConvert {
    /// Converts.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let dump = match self.format {
            Format::Nq => Some(Dump::Nq),
            Format::Triviaqa => Some(Dump::TriviaQa),
            _ => None,
        };
        let lists = self.format == Format::Distillation;
        let misplaced = [
            ("--passages", self.passages.is_some() && dump.is_none() && !lists),
            ("--questions", self.questions.is_some() && !lists),
            ("--most-passages", self.most_passages.is_some() && self.format != Format::DprJson && !lists),
        ];
        if let Some((flag, _)) = misplaced.iter().find(|(_, misplaced)| *misplaced) {
            return Err(TrainError::Options(format!("{flag} does not belong to this format")).into());
        }
        let written = match (dump, self.format) {
            (Some(dump), _) => {
                let passages = self.passages.unwrap_or_else(|| self.input.join("psgs_w100.tsv"));
                convert_dump(dump, &self.input, &passages, &self.output, &mut |said| eprintln!("{said}"))?
            }
            (None, Format::DprQuestions) => vec![dpr_questions(&self.input, &self.output)?],
            (None, Format::DprPassages) => vec![dpr_passages(&self.input, &self.output)?],
            (None, Format::Distillation) => {
                let (Some(questions), Some(passages)) = (&self.questions, &self.passages) else {
                    let what = "distillation: expected --questions and --passages, the texts of the ids";
                    return Err(TrainError::Options(what.into()).into());
                };
                let scratch = ScratchFolder::new()?;
                let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
                let most = self.most_passages.unwrap_or(usize::MAX);
                vec![distillation_lists(&self.input, (questions, passages), cache, most, &self.output)?]
            }
            (None, _) => {
                let scratch = ScratchFolder::new()?;
                let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
                vec![dpr_json(&self.input, cache, self.most_passages.unwrap_or(usize::MAX), &self.output)?]
            }
        };
        for done in written {
            line(&match self.json {
                true => serde_json::to_string(&done)?,
                false if self.format == Format::DprPassages => {
                    format!("{}: {} passages", done.path, done.items)
                }
                false => format!("{}: {} questions, {} passages", done.path, done.items, done.passages),
            })?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
