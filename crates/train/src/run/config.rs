//! `RUN/config.toml`: what a run was started with, and what a resume may not change.

use std::fmt::Write as _;
use std::path::Path;

use toml::{Table, Value};

use super::error::RunError;
use super::files;

/// Name of the file in the run folder.
pub(crate) const CONFIG_NAME: &str = "config.toml";

/// A configuration is written by us or by hand: more than this is another file.
const CONFIG_LIMIT: u64 = 1 << 20;

/// A setting that differs between the stored run and the wanted one.
#[derive(Debug, Clone, PartialEq)]
pub struct Difference {
    /// The setting, with dots between the names of nested tables.
    pub key: String,
    /// Its value in the run folder; `None` where it is not set.
    pub stored: Option<Value>,
    /// The value asked for now; `None` where it is not set.
    pub wanted: Option<Value>,
}

/// Writes `run_dir/config.toml` wholly or not at all.
///
/// # Errors
/// When the file cannot be written, or a value has no form in TOML.
pub fn write_config(run_dir: &Path, config: &Table) -> Result<(), RunError> {
    let path = run_dir.join(CONFIG_NAME);
    let text = toml::to_string_pretty(config)
        .map_err(|error| RunError::malformed(&path, format!("cannot write the configuration: {error}")))?;
    files::write_atomic(&path, text.as_bytes())
}

/// Reads `run_dir/config.toml`; `None` where the run has none yet.
///
/// # Errors
/// When the file cannot be read or is not TOML; the message has the line.
pub fn read_config(run_dir: &Path) -> Result<Option<Table>, RunError> {
    let path = run_dir.join(CONFIG_NAME);
    if !path.exists() {
        return Ok(None);
    }
    let text = files::read_small(&path, CONFIG_LIMIT)?;
    match text.parse::<Table>() {
        Ok(table) => Ok(Some(table)),
        Err(error) => {
            Err(RunError::malformed(&path, format!("expected TOML: {}", error.to_string().trim_end())))
        }
    }
}

/// Every setting that differs and is not in `may_change`, in the order of its name.
///
/// An entry of `may_change` is a setting's full dotted name, or the name of a table for all that is in it.
pub fn compare(stored: &Table, wanted: &Table, may_change: &[&str]) -> Vec<Difference> {
    let (mut left, mut right) = (Vec::new(), Vec::new());
    flatten(stored, "", &mut left);
    flatten(wanted, "", &mut right);
    let find =
        |list: &[(String, Value)], key: &str| list.iter().find(|(k, _)| k == key).map(|(_, v)| v.clone());
    let mut keys: Vec<&String> = left.iter().chain(&right).map(|(key, _)| key).collect();
    keys.sort();
    keys.dedup();
    keys.into_iter()
        .filter(|key| !may_change.iter().any(|free| covers(free, key)))
        .map(|key| Difference { key: key.clone(), stored: find(&left, key), wanted: find(&right, key) })
        .filter(|difference| !same(difference.stored.as_ref(), difference.wanted.as_ref()))
        .collect()
}

/// As [`compare`], with an error that shows the differences as a table.
///
/// # Errors
/// [`RunError::ConfigDiffers`] when there is a difference.
pub fn check(run_dir: &Path, stored: &Table, wanted: &Table, may_change: &[&str]) -> Result<(), RunError> {
    let differences = compare(stored, wanted, may_change);
    if differences.is_empty() {
        return Ok(());
    }
    Err(RunError::ConfigDiffers { dir: run_dir.to_path_buf(), differences })
}

fn flatten(table: &Table, prefix: &str, into: &mut Vec<(String, Value)>) {
    for (key, value) in table {
        let key = format!("{prefix}{key}");
        match value {
            Value::Table(inner) => flatten(inner, &format!("{key}."), into),
            other => into.push((key, other.clone())),
        }
    }
}

fn covers(free: &str, key: &str) -> bool {
    key.strip_prefix(free).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A whole number equals the same number with a point: people write `lr = 1` and mean `1.0`.
fn same(stored: Option<&Value>, wanted: Option<&Value>) -> bool {
    match (stored, wanted) {
        (Some(Value::Float(a)), Some(Value::Float(b))) => a.to_bits() == b.to_bits() || a == b,
        (Some(Value::Float(float)), Some(Value::Integer(integer)))
        | (Some(Value::Integer(integer)), Some(Value::Float(float))) => *float == *integer as f64,
        (Some(Value::Array(a)), Some(Value::Array(b))) => {
            a.len() == b.len() && a.iter().zip(b).all(|(a, b)| same(Some(a), Some(b)))
        }
        (a, b) => a == b,
    }
}

/// The message of a refused resume: a table of setting, stored value and wanted value.
pub(crate) fn refusal(dir: &Path, differences: &[Difference]) -> String {
    let show = |value: &Option<Value>| value.as_ref().map_or("(not set)".to_string(), Value::to_string);
    let rows: Vec<[String; 3]> =
        differences.iter().map(|row| [row.key.clone(), show(&row.stored), show(&row.wanted)]).collect();
    let head = ["setting", "stored", "wanted"];
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].len()]).max().unwrap_or(0)
    };
    let (first, second) = (width(0), width(1));
    let mut text =
        format!("run folder {} was started with other settings than the ones asked for:\n", dir.display());
    let _ = writeln!(text, "  {:first$}  {:second$}  {}", head[0], head[1], head[2]);
    for [key, stored, wanted] in &rows {
        let _ = writeln!(text, "  {key:first$}  {stored:second$}  {wanted}");
    }
    text.push_str("give the stored values to resume, or start another run with --new-run or another --name");
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(text: &str) -> Table {
        text.parse().unwrap()
    }

    #[test]
    fn differences_are_named_with_both_values() {
        let stored = table("lr = 1e-4\nseed = 0\ntotal_steps = 10\n[model]\nsize = 'base'\nlayers = 2\n");
        let wanted = table("lr = 1e-3\nseed = 0\ntotal_steps = 20\nclip = 1\n[model]\nsize = 'base'\n");
        let found = compare(&stored, &wanted, &["total_steps"]);
        let keys: Vec<_> = found.iter().map(|difference| difference.key.as_str()).collect();
        assert_eq!(keys, ["clip", "lr", "model.layers"]);
        assert_eq!((found[0].stored.clone(), found[2].wanted.clone()), (None, None));
        let message = check(Path::new("runs/a"), &stored, &wanted, &["total_steps"]).unwrap_err().to_string();
        assert!(message.contains("\n  setting       stored     wanted\n"), "{message}");
        assert!(message.contains("\n  lr            0.0001     0.001\n"), "{message}");
        assert!(message.contains("--new-run"), "{message}");
    }

    #[test]
    fn what_may_change_covers_whole_names_and_tables() {
        let (stored, wanted) = (table("[log]\nfreq = 1\n"), table("log_level = 1\n[log]\nfreq = 2\n"));
        let keys: Vec<_> = compare(&stored, &wanted, &["log"]).into_iter().map(|found| found.key).collect();
        assert_eq!(keys, ["log_level"]);
        assert!(compare(&stored, &wanted, &["log.freq", "log_level"]).is_empty());
    }

    #[test]
    fn numbers_are_compared_by_value() {
        assert!(compare(&table("a = 1\nb = [1, 2.5]"), &table("a = 1.0\nb = [1.0, 2.5]"), &[]).is_empty());
        assert!(compare(&table("a = nan"), &table("a = nan"), &[]).is_empty());
        assert_eq!(compare(&table("a = 1"), &table("a = '1'"), &[]).len(), 1);
    }

    #[test]
    fn config_is_read_back_and_faults_have_a_line() {
        let dir = tempfile::tempdir().unwrap();
        assert!(read_config(dir.path()).unwrap().is_none());
        let config = table("name = 'a'\nlr = 0.1\n[model]\nsize = 'base'\n");
        write_config(dir.path(), &config).unwrap();
        assert_eq!(read_config(dir.path()).unwrap(), Some(config));
        std::fs::write(dir.path().join("config.toml"), "a = 1\nb = =\n").unwrap();
        let message = read_config(dir.path()).unwrap_err().to_string();
        assert!(message.contains("line 2"), "{message}");
    }
}
