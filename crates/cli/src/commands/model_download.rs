//! `tercio model download`: the models that Fusion-in-Decoder's authors released, as folders that Tercio opens.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tercio_data::download::sources::{MODELS, model};
use tercio_models::export::TokenizerFiles;
use tercio_models::import::import;
use tercio_train::TrainError;

use super::common::line;
use super::data_download::DownloadFlags;
use super::model_export::tokenizer_files;

/// Flags of `tercio model download`.
#[derive(Args)]
pub struct ModelDownload {
    /// nq_reader_base, nq_reader_large, nq_retriever, tqa_reader_base, tqa_reader_large or tqa_retriever
    name: String,
    /// Folder for the archive, and for the model's folder NAME beside it
    #[arg(long, default_value = "pretrained_models")]
    output: PathBuf,
    /// Folder of the tokenizer to put beside the weights: the released readers were trained with the one of t5-base
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    #[command(flatten)]
    flags: DownloadFlags,
    /// Only fetch the archive; `tercio model import` makes a folder of it
    #[arg(long)]
    no_import: bool,
}

impl ModelDownload {
    /// Fetches and imports.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let Some(source) = model(&self.name, self.flags.mirror()) else {
            let what = format!(
                "there is no released model {:?}; expected one of {}. Models of the Hugging Face hub are given by their \
                 names to any command, and fetched by a build with `--features hub`",
                self.name,
                MODELS.join(", ")
            );
            return Err(TrainError::Options(what).into());
        };
        let tokenizer = match &self.tokenizer {
            Some(folder) => tokenizer_files(folder)?,
            None => TokenizerFiles::default(),
        };
        let folder = self.output.join(&self.name);
        for file in self.flags.fetch(vec![source], &self.output)? {
            if self.no_import {
                line(&file.path.display().to_string())?;
            } else if folder.join("config.json").is_file() {
                eprintln!("{}: is there already", folder.display());
                line(&folder.display().to_string())?;
            } else {
                let report = import(&file.path, &tokenizer, &folder)?;
                if !report.tokenizer {
                    eprintln!("the archive has no tokenizer: give --tokenizer here, or to other commands");
                }
                line(&folder.display().to_string())?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
