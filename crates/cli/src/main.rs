//! The `tercio` command: flags only; everything it does a library user can call.

mod args;
mod commands;

use std::process::ExitCode;

fn main() -> ExitCode {
    commands::run()
}
