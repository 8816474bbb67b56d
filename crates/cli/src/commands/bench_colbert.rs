//! `tercio bench colbert`: times contrastive steps and the encoding of documents, as `bench/peer_colbert.py` times PyLate.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_train::bench::{ColbertBenchMode, ColbertBenchOptions, ColbertBenchReport, bench_colbert};
use tercio_train::on_device;
use tercio_train::scratch::ScratchFolder;

use super::bench::BenchFlags;
use super::common::{MOST_QUESTIONS, line, within};

/// What to time.
#[derive(Clone, Copy, ValueEnum)]
enum Mode {
    /// Contrastive steps: forward, backward, AdamW
    Train,
    /// Vectors of the tokens of documents
    Encode,
}

/// Flags of `tercio bench colbert`.
#[derive(Args)]
pub struct BenchColbert {
    /// What to time
    #[arg(value_enum)]
    mode: Mode,
    /// JSON with `triples` (query, positive, negative) and `documents`
    #[arg(long)]
    input: PathBuf,
    /// Folder of the model; an encoder gets a projection to 128
    #[arg(long)]
    model: String,
    /// Triples of a step
    #[arg(long, default_value_t = 16)]
    batch: usize,
    /// Triples of a shard; 0: all of a step. Fewer: the loss of the whole step in the memory of a shard (cached contrastive)
    #[arg(long, default_value_t = 0)]
    micro: usize,
    /// Documents to encode
    #[arg(long, default_value_t = 512)]
    documents: usize,
    #[command(flatten)]
    bench: BenchFlags,
}

impl BenchColbert {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[
            ("batch", self.batch, MOST_QUESTIONS),
            ("micro", self.micro.max(1), self.batch),
            ("documents", self.documents, 1 << 24),
        ])?;
        let (device, settings) = self.bench.open()?;
        let options = ColbertBenchOptions {
            mode: match self.mode {
                Mode::Train => ColbertBenchMode::Train,
                Mode::Encode => ColbertBenchMode::Encode,
            },
            input: self.input,
            model: self.model,
            batch: self.batch,
            micro: self.micro,
            documents: self.documents,
            settings,
        };
        let cache = ScratchFolder::new()?;
        let found = on_device!(&device, |d| bench_colbert(d, &options, cache.path()))?;
        match &found {
            _ if self.bench.json() => line(&serde_json::to_string(&found)?)?,
            ColbertBenchReport::Train { report, micro, examples_per_second } => {
                let size = format!(
                    "{}, {} triples in shards of {micro}, {examples_per_second} a second",
                    report.size, report.questions
                );
                self.bench.print(report, &size)?;
            }
            ColbertBenchReport::Encode {
                documents, documents_per_second, tokens_kept, peak_rss_gb, ..
            } => {
                line(&format!(
                    "{documents} documents, {tokens_kept} vectors: {documents_per_second} documents/s, {peak_rss_gb:.2} GB at most"
                ))?;
            }
        }
        Ok(ExitCode::SUCCESS)
    }
}
