//! The `tercio` command.
fn main() {}
