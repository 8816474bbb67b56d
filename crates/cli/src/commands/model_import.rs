//! `tercio model import`: Fusion-in-Decoder's checkpoints and released archives become folders of Hugging Face's layout.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use serde_json::json;
use tercio_models::export::TokenizerFiles;
use tercio_models::import::{ImportedKind, import};

use super::common::line;
use super::model_export::tokenizer_files;

/// Flags of `tercio model import`.
#[derive(Args)]
pub struct ModelImport {
    /// A released archive (.tar.gz), or the folder of a checkpoint with its config.json and pytorch_model.bin
    source: PathBuf,
    /// Folder to make; it must not be there yet, or be empty
    #[arg(long)]
    output: PathBuf,
    /// Folder of the tokenizer that goes with the model: Fusion-in-Decoder's readers come without, and were trained with the
    /// one of t5-base
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl ModelImport {
    /// Writes the folder.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let tokenizer = match &self.tokenizer {
            Some(folder) => tokenizer_files(folder)?,
            None => TokenizerFiles::default(),
        };
        let report = import(&self.source, &tokenizer, &self.output)?;
        for file in &report.left_out {
            eprintln!("left out: {file}");
        }
        let output = self.output.display().to_string();
        let kind = match report.kind {
            ImportedKind::Reader => "reader",
            ImportedKind::Retriever => "retriever",
        };
        if !report.tokenizer && report.kind == ImportedKind::Reader {
            eprintln!(
                "the source has no tokenizer: give --tokenizer (the one of t5-base) here, or to other commands"
            );
        }
        line(&if self.json {
            json!({"output": output, "kind": kind, "parameters": report.parameters,
                   "cross_attention_bias": report.cross_attention_bias, "tokenizer": report.tokenizer,
                   "left_out": report.left_out})
            .to_string()
        } else {
            format!("{output}: a {kind} of {} parameters", report.parameters)
        })?;
        Ok(ExitCode::SUCCESS)
    }
}
