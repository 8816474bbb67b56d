//! `tercio data check`: what a file of questions holds, how it fits a reader's settings, and every bad line; or what a file of
//! training data for retrievers, or for text classifiers, holds.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tercio_data::corpus::check_corpus;
use tercio_data::retrieval::check_retrieval;
use tercio_data::{Documents, ReaderEncoding, Tokenizer, check};
use tercio_train::TrainError;
use tercio_train::options::MOST_TEXT_TOKENS;
use tercio_train::scratch::ScratchFolder;

use super::classifier_flags::ColumnFlags;
use super::common::{line, within};

/// Flags of `tercio data check`.
#[derive(Args)]
pub struct DataCheck {
    /// Questions: .json or .jsonl, also .gz or .zst; with --retrieval .tsv too; with --classifier all forms of documents
    file: PathBuf,
    /// Count positives, negatives and scores: training data of retrievers (FiD's JSON, DPR's JSON, triples)
    #[arg(long, conflicts_with = "tokenizer")]
    retrieval: bool,
    /// Count labels: documents of text classifiers (FastText's lines, .csv, .tsv, .jsonl, a folder with a folder per label)
    #[arg(long, conflicts_with_all = ["tokenizer", "retrieval"])]
    classifier: bool,
    #[command(flatten)]
    columns: ColumnFlags,
    /// Folder of a tokenizer (tokenizer.json or spiece.model), to count tokens
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    /// Tokens of "question + title + passage" at most
    #[arg(long, env = "TERCIO_TEXT_MAXLENGTH", default_value_t = 200)]
    text_maxlength: usize,
    /// Tokens of a target at most, its end token counted; -1: no limit
    #[arg(long, env = "TERCIO_ANSWER_MAXLENGTH", default_value_t = -1, allow_negative_numbers = true)]
    answer_maxlength: i64,
    /// Passages of each question that are read
    #[arg(long, env = "TERCIO_N_CONTEXT", default_value_t = 1)]
    n_context: usize,
    /// Leave the titles out of the inputs
    #[arg(long, env = "TERCIO_NO_TITLE")]
    no_title: bool,
    /// End every passage with `</s>`
    #[arg(long, env = "TERCIO_PASSAGE_EOS")]
    passage_eos: bool,
    /// Folder for the index of the data, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Print the report as one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl DataCheck {
    /// Checks; every fault is a line on stderr.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[("text_maxlength", self.text_maxlength, MOST_TEXT_TOKENS)])?;
        if self.answer_maxlength < -1 {
            return Err(TrainError::Options("--answer_maxlength must be -1 or more".into()).into());
        }
        let encoding = ReaderEncoding {
            text_maxlength: self.text_maxlength,
            answer_maxlength: usize::try_from(self.answer_maxlength).ok().filter(|&n| n > 0),
            n_context: self.n_context,
            no_title: self.no_title,
            passage_eos: self.passage_eos,
        };
        let tokenizer = self.tokenizer.as_deref().map(Tokenizer::load).transpose()?;
        let scratch = ScratchFolder::new()?;
        let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
        let mut show = |fault: &tercio_data::DataError| eprintln!("{fault}");
        if self.retrieval {
            let report = check_retrieval(&self.file, cache, &mut show)?;
            return self.end(&serde_json::to_string(&report)?, &report.to_string(), report.bad);
        }
        if self.classifier {
            let documents = Documents::open(&self.file, cache)?;
            let report = check_corpus(documents, self.columns.columns(), &mut show)?;
            return self.end(&serde_json::to_string(&report)?, &report.to_string(), report.bad);
        }
        let report = check(&self.file, cache, tokenizer.as_ref(), &encoding, &mut show)?;
        self.end(&serde_json::to_string(&report)?, &report.to_string(), report.bad)
    }

    fn end(&self, json: &str, text: &str, bad: u64) -> anyhow::Result<ExitCode> {
        line(if self.json { json } else { text.trim_end() })?;
        Ok(if bad > 0 { ExitCode::FAILURE } else { ExitCode::SUCCESS })
    }
}
