//! Where the golden tests of every crate find their cases; each includes this file with `#[path]`.

use std::path::{Path, PathBuf};

/// The folder that `TERCIO_GOLDEN` names, or `tests/golden` of the workspace. Cargo runs tests in their crate's folder, and
/// people name a folder as they see it from the workspace: a relative path that is not there is looked for from its root.
pub fn golden_folder() -> PathBuf {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    match std::env::var_os("TERCIO_GOLDEN").map(PathBuf::from) {
        Some(named) if named.exists() => named,
        Some(named) => workspace.join(named),
        None => workspace.join("tests/golden"),
    }
}
