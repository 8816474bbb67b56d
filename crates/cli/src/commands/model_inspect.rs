//! `tercio model inspect`: what a model folder holds, without loading it.

use std::process::ExitCode;

use clap::Args;
use tercio_train::inspect::inspect;

use super::common::line;

/// Flags of `tercio model inspect`.
#[derive(Args)]
pub struct ModelInspect {
    /// A model folder, a hub name, or a run's folder, which stands for its best checkpoint
    model: String,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl ModelInspect {
    /// Prints the report.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let report = inspect(&self.model)?;
        if self.json {
            line(&serde_json::to_string(&report)?)?;
        } else {
            line(report.to_string().trim_end())?;
        }
        Ok(ExitCode::SUCCESS)
    }
}
