//! `tercio index`: an index of a collection of passages, or what the collection has gained since.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;
use tercio_comm::place::Flags;
use tercio_data::{MultiVectors, Passages, Vectors};
use tercio_engine::{Cpu, Device, memory};
use tercio_search::bm25::{Analyzer, Bm25Constants, Bm25Settings, Fields, LEAST_MEMORY};
use tercio_search::compressed::{CompressedIndex, CompressedOptions};
use tercio_search::flat::{Metric, read_all, same_model};
use tercio_search::manifest::Manifest;
use tercio_search::plaid::{PlaidOptions, PlaidReport};
use tercio_train::TrainError;
use tercio_train::find::{
    append_bm25, append_compressed, append_late, build_bm25, build_flat, build_late, collection_of,
    delete_late, read_ids,
};
use tercio_train::run::{Progress, Signals, Verbosity, init_logging_of_rank};
use tercio_train::scratch::ScratchFolder;

use super::common::{line, not_quoted, place, threads};

/// Megabytes that are believed to be meant.
const MOST_MEMORY: u64 = 1 << 24;
/// Megabytes where nothing is said.
const USUAL_MEMORY: u64 = 1024;

/// Flags of `tercio index`.
#[derive(Args)]
pub struct Index {
    /// What the index knows passages by
    #[arg(long, value_enum, default_value_t = Kind::Bm25)]
    kind: Kind,
    /// Passages: .tsv (id, text, title), .jsonl or .json, also .gz or .zst
    #[arg(long, env = "TERCIO_PASSAGES", required_unless_present = "delete")]
    passages: Option<PathBuf>,
    /// Folder of the index; one that stands there is replaced once the new one is whole
    #[arg(long, visible_aliases = ["index", "output-path"])]
    output: PathBuf,
    /// Vectors of the passages, for an index of vectors: a folder of `tercio embed`, for late interaction with --multi-vector
    #[arg(long, visible_alias = "passages-embeddings", required_if_eq_any = [("kind", "flat"), ("kind", "compressed")])]
    vectors: Option<PathBuf>,
    /// How vectors are compared; default: inner
    #[arg(long, value_enum)]
    metric: Option<By>,
    /// Lists of a compressed index; 0: twice the root of the number of passages
    #[arg(long, default_value_t = 0)]
    lists: usize,
    /// Bytes of a passage's code in a compressed index, an even number; 0: an eighth of the vector's numbers
    #[arg(long, default_value_t = 0)]
    code_bytes: usize,
    /// Bits of a number of an index of late interaction: 1, 2, 4 or 8; default: 4
    #[arg(long)]
    bits: Option<usize>,
    /// Centroids of an index of late interaction; default: the power of two below 16 times the root of the number of vectors
    #[arg(long)]
    centroids: Option<usize>,
    /// Remove the passages of these ids, a file of one a line, from the index of late interaction that stands there
    #[arg(long, conflicts_with_all = ["append", "vectors", "bits", "centroids", "sample"])]
    delete: Option<PathBuf>,
    /// Vectors that a compressed index, or one of late interaction, learns from; 0: 64 for every list, or 32 for every centroid
    #[arg(long, default_value_t = 0)]
    sample: usize,
    /// Which vectors these are
    #[arg(long, env = "TERCIO_SEED", default_value_t = 0)]
    seed: u64,
    /// Vectors of questions to measure a compressed index's recall with; default: passages that it did not learn from
    #[arg(long)]
    recall_vectors: Option<PathBuf>,
    /// Add the passages that the file has gained at its end to the index that stands there, made as it was made. For a compressed
    /// index, or one of late interaction, --vectors are those of the new passages alone
    #[arg(long, conflicts_with_all = [
        "analyzer", "fields", "k1", "b", "metric", "lists", "code_bytes", "sample", "recall_vectors", "bits", "centroids",
    ])]
    append: bool,
    /// How text becomes words; default: stopped
    #[arg(long, value_enum)]
    analyzer: Option<Words>,
    /// What of a passage is indexed; default: title-and-text
    #[arg(long, value_enum)]
    fields: Option<Parts>,
    /// BM25's k1 of searches that say none: how slowly a word's weight saturates as it is repeated; default: 0.9
    #[arg(long)]
    k1: Option<f64>,
    /// BM25's b of searches that say none: how much long passages are held back, from 0 to 1; default: 0.4
    #[arg(long)]
    b: Option<f64>,
    /// Megabytes for the words of passages in memory; what is more goes to disk and is merged. The index is the same; default: 1024
    #[arg(long)]
    memory: Option<u64>,
    /// Threads; 0: all cores
    #[arg(long, env = "TERCIO_THREADS", default_value_t = 0)]
    threads: usize,
    /// Folder for the index of the file itself, and its decompressed copy; default: a temporary one
    #[arg(long, env = "TERCIO_CACHE_DIR")]
    cache_dir: Option<PathBuf>,
    /// Print what was made as one line of JSON on stdout
    #[arg(long)]
    json: bool,
    /// Warnings and errors only
    #[arg(long, short)]
    quiet: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Kind {
    /// The words in them (BM25)
    Bm25,
    /// Their vectors, all of which are compared with a question's: exact
    Flat,
    /// Their vectors in inverted lists of short codes, of which the best are scored again: fast, and not always the same as exact
    Compressed,
    /// The vectors of their tokens, in a few bits each, around centroids: late interaction, as PLAID has it
    #[value(alias = "colbert")]
    Plaid,
}

#[derive(Clone, Copy, ValueEnum)]
enum By {
    /// The inner product
    Inner,
    /// The cosine
    Cosine,
}

#[derive(Clone, Copy, ValueEnum)]
enum Words {
    /// As they stand, in lower case
    Plain,
    /// The same words, but questions do not ask for the most frequent ones of English ("what", "the"), unless they have no others
    Stopped,
    /// Without the most frequent words of English, and without endings
    English,
}

#[derive(Clone, Copy, ValueEnum)]
enum Parts {
    TitleAndText,
    Text,
    Title,
}

impl Index {
    /// Indexes.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let place = place(Flags::default())?;
        if place.world_size > 1 {
            // Each would write into the same folder.
            return Err(TrainError::Options(format!(
                "tercio index is one process, found rank {} of {}: start it without a launcher, with as many --threads as \
                 there are cores",
                place.rank, place.world_size
            ))
            .into());
        }
        self.goes_with_kind()?;
        let usual = Bm25Constants::default();
        let constants = Bm25Constants { k1: self.k1.unwrap_or(usual.k1), b: self.b.unwrap_or(usual.b) };
        constants.check().map_err(|e| TrainError::Options(e.to_string()))?;
        let least = LEAST_MEMORY >> 20;
        let memory = self.memory.unwrap_or(USUAL_MEMORY);
        if !(least..=MOST_MEMORY).contains(&memory) {
            let what = format!("--memory {memory}: expected {least} to {MOST_MEMORY} megabytes");
            return Err(TrainError::Options(what).into());
        }
        let threads = threads(self.threads)?;
        init_logging_of_rank(0, "", if self.quiet { Verbosity::Quiet } else { Verbosity::Normal })?;
        let signals = Signals::install()?;
        let stop = || signals.requested().is_some();
        if let Some(ids) = &self.delete {
            let since = std::time::Instant::now();
            let found = read_ids(ids)?;
            if found.is_empty() {
                let what = format!("{}: expected ids of passages, one a line, found none", ids.display());
                return Err(TrainError::Unusable(what).into());
            }
            let report = delete_late(&self.output, &found).map_err(TrainError::from)?;
            let deleted = report.settings.deleted;
            tracing::info!("{deleted} of {} passages are deleted", report.manifest.collection.count);
            self.tell(&report.manifest, deleted, true, since.elapsed().as_secs_f64())?;
            return Ok(ExitCode::SUCCESS);
        }
        let scratch = ScratchFolder::new()?;
        let cache = self.cache_dir.as_deref().unwrap_or(scratch.path());
        let path = self.passages.as_ref();
        let path = path.ok_or_else(|| TrainError::Options("--passages: expected a file".into()))?;
        let passages = Passages::open(path, cache)?;
        if !passages.is_quoted() {
            tracing::warn!("{}", not_quoted(&passages));
        }
        let since = std::time::Instant::now();
        let mut bar = Progress::start(0, passages.len() as u64, !self.quiet && !self.json);
        let device = Cpu::new(threads)?;
        let mut deleted = 0;
        let made = device.run(|| match self.kind {
            Kind::Bm25 => {
                let mut progress = |done, _| bar.advance(done, "passages");
                let memory = memory << 20;
                match self.append {
                    true => append_bm25(&self.output, &passages, memory, &stop, &mut progress),
                    false => {
                        let settings = self.words(constants);
                        build_bm25(&self.output, &passages, &settings, memory, &stop, &mut progress).map(Some)
                    }
                }
            }
            Kind::Flat => self.flat(&passages, &stop).map(Some),
            Kind::Compressed => {
                let mut progress =
                    |share: f64| bar.advance((share * passages.len() as f64) as u64, "passages");
                self.compressed(&device, &passages, &stop, &mut progress).map(Some)
            }
            Kind::Plaid => {
                let mut progress =
                    |share: f64| bar.advance((share * passages.len() as f64) as u64, "passages");
                let report = self.late(&device, &passages, &stop, &mut progress)?;
                deleted = report.settings.deleted;
                Ok(Some(report.manifest))
            }
        })?;
        let changed = made.is_some();
        let manifest = made.map_or_else(|| Manifest::read(&self.output), Ok).map_err(TrainError::from)?;
        self.tell(&manifest, deleted, changed, since.elapsed().as_secs_f64())?;
        Ok(ExitCode::SUCCESS)
    }

    /// Refuses flags that the kind of index has no use for. The seed may come from the environment, which is for all.
    fn goes_with_kind(&self) -> Result<(), TrainError> {
        let words = [
            ("--analyzer", self.analyzer.is_some()),
            ("--fields", self.fields.is_some()),
            ("--k1", self.k1.is_some()),
            ("--b", self.b.is_some()),
            ("--memory", self.memory.is_some()),
        ];
        let lists = [
            ("--lists", self.lists > 0),
            ("--code-bytes", self.code_bytes > 0),
            ("--recall-vectors", self.recall_vectors.is_some()),
        ];
        let sample = [("--sample", self.sample > 0)];
        let metric = [("--metric", self.metric.is_some())];
        let late = [
            ("--bits", self.bits.is_some()),
            ("--centroids", self.centroids.is_some()),
            ("--delete", self.delete.is_some()),
        ];
        let vectors = [("--vectors", self.vectors.is_some())];
        let (kind, unused): (_, Vec<&[(&str, bool)]>) = match self.kind {
            Kind::Bm25 => ("bm25", vec![&vectors, &metric, &lists, &sample, &late]),
            Kind::Flat => ("flat", vec![&words, &lists, &sample, &late]),
            Kind::Compressed => ("compressed", vec![&words, &late]),
            Kind::Plaid => ("plaid", vec![&words, &metric, &lists]),
        };
        match unused.into_iter().flatten().find(|(_, given)| *given) {
            None => Ok(()),
            Some((flag, _)) => Err(TrainError::Options(format!(
                "{flag} has no bearing on an index of --kind {kind}: leave it out, or name another --kind"
            ))),
        }
    }

    fn words(&self, constants: Bm25Constants) -> Bm25Settings {
        Bm25Settings {
            analyzer: match self.analyzer.unwrap_or(Words::Stopped) {
                Words::Plain => Analyzer::Plain,
                Words::Stopped => Analyzer::Stopped,
                Words::English => Analyzer::English,
            },
            fields: match self.fields.unwrap_or(Parts::TitleAndText) {
                Parts::TitleAndText => Fields::TitleAndText,
                Parts::Text => Fields::Text,
                Parts::Title => Fields::Title,
            },
            constants,
        }
    }

    fn metric(&self) -> Metric {
        match self.metric.unwrap_or(By::Inner) {
            By::Inner => Metric::Inner,
            By::Cosine => Metric::Cosine,
        }
    }

    fn vectors(&self) -> Result<Vectors, TrainError> {
        let path = self
            .vectors
            .as_ref()
            .ok_or_else(|| TrainError::Options("--vectors: expected a folder".into()))?;
        Ok(Vectors::open(path)?)
    }

    fn flat(&self, passages: &Passages, stop: &dyn Fn() -> bool) -> Result<Manifest, TrainError> {
        if self.append {
            let what = "--append: a flat index is its folder of vectors; embed the passages that were added, and index again";
            return Err(TrainError::Options(what.into()));
        }
        build_flat(&self.output, &self.vectors()?, passages, self.metric(), stop)
    }

    fn compressed(
        &self,
        device: &Cpu,
        passages: &Passages,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<Manifest, TrainError> {
        let vectors = self.vectors()?;
        let report = match self.append {
            true => append_compressed(device, &self.output, &vectors, passages, stop, progress)?,
            false => {
                let queries = match &self.recall_vectors {
                    None => None,
                    Some(path) => {
                        let queries = Vectors::open(path)?;
                        if let Some(warning) = same_model(&queries, &vectors)? {
                            tracing::warn!("{warning}");
                        }
                        Some(read_all(&queries)?)
                    }
                };
                let options = CompressedOptions {
                    metric: self.metric(),
                    lists: self.lists,
                    code_bytes: self.code_bytes,
                    sample: self.sample,
                    seed: self.seed,
                    queries,
                    ..CompressedOptions::default()
                };
                let collection = collection_of(&vectors, passages, stop)?;
                CompressedIndex::build(device, &vectors, collection, &self.output, &options, stop, progress)?
            }
        };
        report.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        for r in &report.settings.recall {
            tracing::info!(
                "recall of the best {}: {:.3}, of {} lists, {} scored again ({})",
                r.depth,
                r.recall,
                r.probes,
                r.rescore,
                report.settings.recall_queries
            );
        }
        Ok(report.manifest)
    }

    fn late(
        &self,
        device: &Cpu,
        passages: &Passages,
        stop: &dyn Fn() -> bool,
        progress: &mut dyn FnMut(f64),
    ) -> Result<PlaidReport, TrainError> {
        let path = self.vectors.as_ref();
        let path = path.ok_or_else(|| TrainError::Options("--vectors: expected a folder".into()))?;
        let vectors = MultiVectors::open(path)?;
        let report = match self.append {
            true => append_late(device, &self.output, &vectors, passages, stop, progress)?,
            false => {
                let options = PlaidOptions {
                    bits: self.bits.unwrap_or(4),
                    centroids: self.centroids.unwrap_or(0),
                    sample: self.sample,
                    seed: self.seed,
                    ..PlaidOptions::default()
                };
                build_late(device, &self.output, &vectors, passages, &options, stop, progress)?
            }
        };
        report.warnings.iter().for_each(|warning| tracing::warn!("{warning}"));
        Ok(report)
    }

    /// Says what stands now, of which `deleted` passages are found no more.
    fn tell(&self, m: &Manifest, deleted: u64, changed: bool, seconds: f64) -> anyhow::Result<()> {
        let passages = m.collection.count.saturating_sub(deleted);
        let peak = memory::peak_resident();
        let text = if self.json {
            let sum = json!({
                "output": self.output, "kind": m.kind, "version": m.version, "passages": passages,
                "deleted": deleted, "bytes": m.bytes(), "changed": changed, "seconds": seconds, "peak_memory": peak,
            });
            sum.to_string()
        } else if changed {
            format!(
                "{passages} passages in {}: {} index of {}, version {}, in {seconds:.1} s",
                self.output.display(),
                m.kind,
                memory::human(m.bytes()),
                m.version
            )
        } else {
            format!(
                "{}: nothing to add, the index has all {} passages",
                self.output.display(),
                m.collection.count
            )
        };
        Ok(line(&text)?)
    }
}
