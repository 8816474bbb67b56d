//! The commands, one a file; data goes to stdout, talk to stderr; exit code 2 for usage, 1 for failure.

mod bench_reader;
mod common;
mod train_reader;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use tercio_train::TrainError;

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
    /// Train a model
    #[command(subcommand)]
    Train(Train),
    /// Measure speed and memory
    #[command(subcommand)]
    Bench(Bench),
}

#[derive(Subcommand)]
enum Train {
    /// A Fusion-in-Decoder reader (T5)
    Reader(train_reader::TrainReader),
}

#[derive(Subcommand)]
enum Bench {
    /// A Fusion-in-Decoder reader of random weights: training steps, or answering
    Reader(bench_reader::BenchReader),
}

/// Runs the command of this process.
pub fn run() -> ExitCode {
    let words = match crate::args::words(std::env::args_os()) {
        Ok(words) => words,
        Err(e) => return usage(&format!("{e:#}")),
    };
    let result = match Cli::parse_from(words).command {
        Command::Train(Train::Reader(c)) => c.run(),
        Command::Bench(Bench::Reader(c)) => c.run(),
    };
    match result {
        Ok(code) => code,
        Err(e) => match e.downcast_ref::<TrainError>() {
            Some(TrainError::Options(what)) => usage(what),
            _ => {
                eprintln!("tercio: {e:#}");
                ExitCode::FAILURE
            }
        },
    }
}

fn usage(what: &str) -> ExitCode {
    eprintln!("tercio: {what}");
    ExitCode::from(2)
}
