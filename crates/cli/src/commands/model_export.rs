//! `tercio model export`: a model in Hugging Face's layout, or in the one that Fusion-in-Decoder's own code loads.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;
use tercio_data::Tokenizer;
use tercio_data::tokenizer::VOCABULARIES;
use tercio_models::export::{FidOptions, ModelLayout, TokenizerFiles, export};
use tercio_train::TrainError;
use tercio_train::setup::model_folder;

use super::common::line;

/// Flags of `tercio model export`.
#[derive(Args)]
pub struct ModelExport {
    /// A model folder, a hub name, or a run's folder, which stands for its best checkpoint
    model: String,
    /// Layout of the new folder
    #[arg(long, value_enum)]
    layout: Layout,
    /// Folder to make; it must not be there yet, or be empty
    #[arg(long)]
    output: PathBuf,
    /// Folder of the tokenizer that goes with the model; default: the model's own
    #[arg(long, env = "TERCIO_TOKENIZER")]
    tokenizer: Option<PathBuf>,
    /// With --layout fid: leave the bias table of cross-attention out where the model has none (default: zeros, because the
    /// library that Fusion-in-Decoder pins would fill a missing table with random numbers)
    #[arg(long)]
    no_cross_attention_bias: bool,
    /// With --layout fid: write models, too, that the pinned library (Transformers 3.0.2) does not know, for ports of
    /// Fusion-in-Decoder to newer libraries
    #[arg(long)]
    newer_library: bool,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Layout {
    /// config.json and pytorch_model.bin with the names of Fusion-in-Decoder's wrapped encoder
    Fid,
    /// config.json, generation_config.json and model.safetensors, as Hugging Face tools write them
    Hf,
}

impl ModelExport {
    /// Writes the folder.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let layout = match self.layout {
            Layout::Hf if self.no_cross_attention_bias || self.newer_library => {
                let what = "--no_cross_attention_bias and --newer_library belong to --layout fid";
                return Err(TrainError::Options(what.into()).into());
            }
            Layout::Hf => ModelLayout::HuggingFace,
            Layout::Fid => ModelLayout::Fid(FidOptions {
                no_cross_attention_bias: self.no_cross_attention_bias,
                newer_library: self.newer_library,
            }),
        };
        let folder = model_folder(&self.model)?;
        let tokenizer = match &self.tokenizer {
            Some(folder) => tokenizer_files(folder)?,
            // A folder of weights alone may be exported; a tokenizer that is there must be whole.
            None => match Tokenizer::load(folder.path()) {
                Ok(tokenizer) => files_of(&tokenizer),
                Err(e) if VOCABULARIES.iter().any(|f| folder.file(f).is_some()) => {
                    return Err(e.into());
                }
                Err(_) => TokenizerFiles::default(),
            },
        };
        let report = export(&folder, layout, &tokenizer, &self.output)?;
        let has_tokenizer = !tokenizer.files.is_empty();
        if !has_tokenizer {
            eprintln!("no tokenizer was found with the model: give --tokenizer to put one into the folder");
        }
        let output = self.output.display().to_string();
        line(&if self.json {
            json!({"output": output, "tensors": report.tensors, "parameters": report.parameters,
                   "cross_attention_bias": report.cross_attention_bias, "tokenizer": has_tokenizer})
            .to_string()
        } else {
            format!("{output}: {} parameters in {} tensors", report.parameters, report.tensors)
        })?;
        Ok(ExitCode::SUCCESS)
    }
}

/// The files of the tokenizer in a folder.
///
/// # Errors
/// There is none, or it is damaged.
pub fn tokenizer_files(folder: &Path) -> anyhow::Result<TokenizerFiles> {
    Ok(files_of(&Tokenizer::load(folder)?))
}

fn files_of(tokenizer: &Tokenizer) -> TokenizerFiles {
    let files = tokenizer.files().map(|(name, bytes)| (name.to_owned(), bytes.to_vec())).collect();
    TokenizerFiles { size: tokenizer.vocab_size(), files }
}
