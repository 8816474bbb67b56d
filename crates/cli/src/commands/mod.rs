//! The commands, one a file; data goes to stdout, talk to stderr; exit code 2 for usage, 1 for failure.

mod answer;
mod bench;
mod bench_classifier;
mod bench_colbert;
mod bench_encoder;
mod bench_plaid;
mod bench_reader;
mod bench_retriever;
mod classifier_flags;
mod common;
mod completions;
mod config_print;
mod data_check;
mod data_convert;
mod data_download;
mod doctor;
mod embed;
mod embed_tokens;
mod eval_classifier;
mod eval_colbert;
mod eval_reader;
mod eval_retrieval;
mod eval_retriever;
mod fuse;
mod index;
mod launch;
mod mine;
mod model_download;
mod model_export;
mod model_import;
mod model_inspect;
mod predict;
mod quickstart;
mod reader_flags;
mod rerank;
mod rounds;
mod rounds_slurm;
mod search;
mod slurm_logs;
mod slurm_status;
mod slurm_submit;
mod train;

use std::ffi::OsString;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use tercio_engine::memory::caught;
use tercio_train::TrainError;
use tercio_train::options::{
    ClassifierModelOptions, ColbertModelOptions, ReaderModelOptions, RetrieverModelOptions,
};
use tercio_train::run::signals::EXIT_INTERRUPTED;
use tercio_train::shortage::guarded;

/// Trains and runs models of question answering: one binary, the same bits on any machine of a kind, exact resume.
#[derive(Parser)]
#[command(
    name = "tercio",
    version,
    infer_long_args = true,
    args_override_self = true,
    propagate_version = true
)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a tiny reader from scratch in minutes, on real questions that are part of this binary, and see it measured
    Quickstart(quickstart::Quickstart),
    /// Train a model
    #[command(subcommand)]
    Train(Train),
    /// Measure a model on held-out data
    #[command(subcommand)]
    Eval(Eval),
    /// Give texts their labels with a trained classifier
    Predict(Box<predict::Predict>),
    /// Answer questions with a trained reader
    Answer(answer::Answer),
    /// Turn passages or questions into vectors, by all ranks, shard by shard
    Embed(Box<embed::Embed>),
    /// Make an index of passages, or add to one
    Index(Box<index::Index>),
    /// Find passages for questions with an index
    Search(Box<search::Search>),
    /// Put the passages that a search has found into the order of a ColBERT model's exact scores
    Rerank(Box<rerank::Rerank>),
    /// Find hard negatives for the training of retrievers
    Mine(Box<mine::Mine>),
    /// Make one run of several: reciprocal rank fusion, or weighted scores
    Fuse(fuse::Fuse),
    /// From a collection and questions to answers: search, train reader and retriever, embed, measure, and round again
    Loop(Box<rounds::Loop>),
    /// Run a command on several ranks
    Launch(launch::Launch),
    /// Check whether ranks can work here, and say what to change
    Doctor(doctor::Doctor),
    /// Run on a Slurm cluster
    #[command(subcommand)]
    Slurm(Slurm),
    /// Look at data files, and make them of those of others
    #[command(subcommand)]
    Data(Data),
    /// Look at models, and bring them from and to other programs
    #[command(subcommand)]
    Model(Model),
    /// Look at settings
    #[command(subcommand)]
    Config(Config),
    /// Measure speed and memory
    #[command(subcommand)]
    Bench(Bench),
    /// Print a script that completes commands and flags in a shell
    Completions(completions::Completions),
}

#[derive(Subcommand)]
enum Train {
    /// A Fusion-in-Decoder reader (T5)
    Reader(train::Train<ReaderModelOptions>),
    /// A retriever (BERT): distilled from a reader's scores, or contrastive, or both
    Retriever(train::Train<RetrieverModelOptions>),
    /// A late-interaction retriever (ColBERT): contrastive, or distilled from a teacher's scores
    Colbert(train::Train<ColbertModelOptions>),
    /// A text classifier: an encoder of any supported family with labels of its own, by flair's recipes
    Classifier(train::Train<ClassifierModelOptions>),
}

#[derive(Subcommand)]
enum Eval {
    /// A Fusion-in-Decoder reader: exact match and F1, predictions, passage scores
    Reader(eval_reader::EvalReader),
    /// A retriever: its order of passages against a reader's scores, and where it puts positive ones
    Retriever(eval_retriever::EvalRetriever),
    /// A ColBERT model: where exact scores put positive documents, and how near their order is to a teacher's
    Colbert(eval_colbert::EvalColbert),
    /// A text classifier: precision, recall, F1, accuracy, confusion, calibration
    Classifier(Box<eval_classifier::EvalClassifier>),
    /// What was retrieved: hits by answer, or a run against judgements (nDCG, MAP, MRR, recall); two runs against one another
    Retrieval(Box<eval_retrieval::EvalRetrieval>),
}

#[derive(Subcommand)]
enum Slurm {
    /// Send a command in as a job that goes on after time limits, preemption and lost nodes
    Submit(Box<slurm_submit::SlurmSubmit>),
    /// Tell what becomes of jobs
    Status(slurm_status::SlurmStatus),
    /// Print what a job printed
    Logs(slurm_logs::SlurmLogs),
}

#[derive(Subcommand)]
enum Data {
    /// Count questions, passages and tokens of a file, and name every bad line
    Check(data_check::DataCheck),
    /// Make questions of the files that others publish: the NQ and TriviaQA dumps, DPR's JSON and TSV
    Convert(data_convert::DataConvert),
    /// Fetch the NQ and TriviaQA dumps or the passages of Wikipedia, going on where a connection broke
    Download(data_download::DataDownload),
}

#[derive(Subcommand)]
enum Model {
    /// Tell a model's shape, layout, tokenizer and memory without loading it
    Inspect(model_inspect::ModelInspect),
    /// Write a model in Hugging Face's layout, or in the one that Fusion-in-Decoder's own code loads
    Export(model_export::ModelExport),
    /// Make a model folder of a Fusion-in-Decoder checkpoint or released archive
    Import(model_import::ModelImport),
    /// Fetch a model that Fusion-in-Decoder's authors released
    Download(model_download::ModelDownload),
}

#[derive(Subcommand)]
enum Config {
    /// Print the config.toml that the flags of `tercio train reader` give
    Print(config_print::ConfigPrint<ReaderModelOptions>),
    /// Print the config.toml that the flags of `tercio train retriever` give
    PrintRetriever(config_print::ConfigPrint<RetrieverModelOptions>),
    /// Print the config.toml that the flags of `tercio train colbert` give
    PrintColbert(config_print::ConfigPrint<ColbertModelOptions>),
    /// Print the config.toml that the flags of `tercio train classifier` give
    PrintClassifier(config_print::ConfigPrint<ClassifierModelOptions>),
}

#[derive(Subcommand)]
enum Bench {
    /// A Fusion-in-Decoder reader of random weights: training steps, or answering
    Reader(bench_reader::BenchReader),
    /// The layers of BERT-base of random weights: training steps
    Encoder(bench_encoder::BenchEncoder),
    /// The index of late interaction: build, search, exact MaxSim
    Plaid(bench_plaid::BenchPlaid),
    /// A retriever of random weights: steps of distillation
    Retriever(bench_retriever::BenchRetriever),
    /// A text classifier: training steps, or the labels of texts
    Classifier(bench_classifier::BenchClassifier),
    /// A ColBERT model: contrastive steps, or the encoding of documents
    Colbert(bench_colbert::BenchColbert),
}

/// Runs the command of this process.
pub fn run() -> ExitCode {
    let words = match crate::args::words(std::env::args_os()) {
        Ok(words) => words,
        Err(e) => return usage(&format!("{e:#}")),
    };
    let command = Cli::parse_from(words).command;
    // Training and answering say more of a lack of memory themselves.
    let result = caught(|| match command {
        Command::Quickstart(c) => c.run(),
        Command::Train(Train::Reader(c)) => c.run(),
        Command::Train(Train::Retriever(c)) => c.run(),
        Command::Train(Train::Colbert(c)) => c.run(),
        Command::Train(Train::Classifier(c)) => c.run(),
        Command::Eval(Eval::Reader(c)) => c.run(),
        Command::Eval(Eval::Retriever(c)) => c.run(),
        Command::Eval(Eval::Colbert(c)) => c.run(),
        Command::Eval(Eval::Classifier(c)) => c.run(),
        Command::Eval(Eval::Retrieval(c)) => c.run(),
        Command::Predict(c) => c.run(),
        Command::Answer(c) => c.run(),
        Command::Embed(c) => c.run(),
        Command::Index(c) => c.run(),
        Command::Search(c) => c.run(),
        Command::Rerank(c) => c.run(),
        Command::Mine(c) => c.run(),
        Command::Fuse(c) => c.run(),
        Command::Loop(c) => c.run(),
        Command::Launch(c) => c.run(|words| check(words).map(|_| ())),
        Command::Doctor(c) => c.run(),
        Command::Slurm(Slurm::Submit(c)) => c.run(check),
        Command::Slurm(Slurm::Status(c)) => c.run(),
        Command::Slurm(Slurm::Logs(c)) => c.run(),
        Command::Data(Data::Check(c)) => c.run(),
        Command::Data(Data::Convert(c)) => c.run(),
        Command::Data(Data::Download(c)) => c.run(),
        Command::Model(Model::Inspect(c)) => c.run(),
        Command::Model(Model::Export(c)) => c.run(),
        Command::Model(Model::Import(c)) => c.run(),
        Command::Model(Model::Download(c)) => c.run(),
        Command::Config(Config::Print(c)) => c.run(),
        Command::Config(Config::PrintRetriever(c)) => c.run(),
        Command::Config(Config::PrintColbert(c)) => c.run(),
        Command::Config(Config::PrintClassifier(c)) => c.run(),
        Command::Bench(Bench::Reader(c)) => c.run(),
        Command::Bench(Bench::Encoder(c)) => c.run(),
        Command::Bench(Bench::Plaid(c)) => c.run(),
        Command::Bench(Bench::Retriever(c)) => c.run(),
        Command::Bench(Bench::Classifier(c)) => c.run(),
        Command::Bench(Bench::Colbert(c)) => c.run(),
        Command::Completions(c) => c.run(Cli::command()),
    });
    let result = result.unwrap_or_else(|out| Ok(guarded("at work", &[], || out.raise())?));
    match result {
        Ok(code) => code,
        Err(e) => match e.downcast_ref::<TrainError>() {
            Some(TrainError::Options(what)) => usage(what),
            Some(e @ TrainError::Stopped) => {
                eprintln!("tercio: {e}");
                ExitCode::from(EXIT_INTERRUPTED)
            }
            _ if common::reader_has_gone(&e) => ExitCode::FAILURE,
            // Every error says its cause itself.
            _ => {
                eprintln!("tercio: {e}");
                ExitCode::FAILURE
            }
        },
    }
}

/// Reads the words of a command that ranks will run; gives the folder of the run that it trains.
fn check(words: Vec<OsString>) -> anyhow::Result<Option<PathBuf>> {
    // Help, or what clap says of a slip, ends this process with the exit code that belongs to it.
    let matches = Cli::command()
        .try_get_matches_from(crate::args::words(words.into_iter())?)
        .and_then(|matches| Cli::from_arg_matches(&matches).map(|_| matches))
        .unwrap_or_else(|e| e.exit());
    let train = matches.subcommand_matches("train").and_then(|m| m.subcommand());
    Ok(train.and_then(|(_, task)| {
        let name = task.try_get_one::<String>("name").ok().flatten()?;
        Some(task.try_get_one::<PathBuf>("checkpoint_dir").ok().flatten()?.join(name))
    }))
}

fn usage(what: &str) -> ExitCode {
    eprintln!("tercio: {what}");
    ExitCode::from(2)
}
