//! `tercio completions`: a script that completes commands and flags in a shell.

use std::process::ExitCode;

use clap::{Args, Command};
use clap_complete::Shell;

use super::common::line;

/// Flags of `tercio completions`.
#[derive(Args)]
pub struct Completions {
    /// The shell
    #[arg(value_enum)]
    shell: Shell,
}

impl Completions {
    /// Prints the script for `command`.
    pub fn run(self, mut command: Command) -> anyhow::Result<ExitCode> {
        let mut script = Vec::new();
        let name = command.get_name().to_owned();
        clap_complete::generate(self.shell, &mut command, name, &mut script);
        line(String::from_utf8_lossy(&script).trim_end())?;
        Ok(ExitCode::SUCCESS)
    }
}
