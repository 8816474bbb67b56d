//! `tercio config print`: the config.toml that the flags of `tercio train TASK` give.

use std::process::ExitCode;

use clap::Args;
use tercio_train::options::{TaskOptions, TrainOptions};
use tercio_train::setup;

use super::common::line;

/// Flags of `tercio config print`: those of `tercio train TASK`.
#[derive(Args)]
pub struct ConfigPrint<T: Args> {
    #[command(flatten)]
    options: TrainOptions<T>,
}

impl<T: TaskOptions> ConfigPrint<T> {
    /// Prints. What would stop a training with these flags is said on stderr.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let table = setup::config_table(&self.options)?;
        if let Err(what) = self.options.check() {
            eprintln!("tercio: note: tercio train {} would refuse this: {what}", T::NAME);
        }
        line(toml::to_string_pretty(&table)?.trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}
