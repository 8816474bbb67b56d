//! From the words of the command line to what clap reads: `--train_data` is `--train-data`, and `--config FILE` puts a
//! file's settings before the flags, so that flags win. A classifier's recipe goes before both.

use std::ffi::OsString;
use std::path::Path;

use anyhow::{Context, bail};
use tercio_train::options::{dashed, with_recipe};

/// The words of the command line with underscores of long flags turned into dashes, and the content of `--config` files in front
/// of the other flags of the command. What follows a `--` is no flag and stays as it is.
pub fn words(mut raw: impl Iterator<Item = OsString>) -> anyhow::Result<Vec<OsString>> {
    let mut words: Vec<OsString> = Vec::new();
    let mut settings: Vec<OsString> = Vec::new();
    let mut literal = false;
    while let Some(word) = raw.next() {
        literal |= word == "--";
        let word = if literal { word } else { dashed(word) };
        let text = word.to_string_lossy().into_owned();
        // The file of a loop is none of flags: it has a table for each kind of stage, which the command reads itself.
        let own = words.get(1).is_some_and(|command| command == "loop");
        if literal || own || !(text == "--config" || text.starts_with("--config=")) {
            words.push(word);
            continue;
        }
        let path = match text.split_once('=') {
            Some((_, path)) => path.to_owned().into(),
            None => raw.next().context("--config needs a file: TOML as in a run's config.toml")?,
        };
        settings.extend(flags_of(Path::new(&path))?);
    }
    // Behind the names of program and command, before their flags.
    let at = words
        .iter()
        .skip(1)
        .position(|w| w.to_string_lossy().starts_with('-'))
        .map_or(words.len(), |i| i + 1);
    words.splice(at..at, settings);
    // A classifier's recipe stands below everything that is said of single settings.
    let command = |i: usize| words.get(i).map(|word| word.to_string_lossy());
    match (command(1).as_deref(), command(2).as_deref()) {
        (Some("train"), Some("classifier")) | (Some("config"), Some("print-classifier")) => {
            Ok(with_recipe(words))
        }
        _ => Ok(words),
    }
}

fn flags_of(path: &Path) -> anyhow::Result<Vec<OsString>> {
    let text =
        std::fs::read_to_string(path).with_context(|| format!("{}: cannot read it", path.display()))?;
    let table: toml::Table = text
        .parse()
        .with_context(|| format!("{}: expected TOML as in a run's config.toml", path.display()))?;
    let mut words = Vec::new();
    for (key, value) in table {
        // An environment variable stands above a file, a flag above both.
        if std::env::var_os(format!("TERCIO_{}", key.to_uppercase())).is_some() {
            continue;
        }
        let flag = format!("--{}", key.replace('_', "-"));
        match value {
            toml::Value::Boolean(true) => words.push(flag.into()),
            toml::Value::Boolean(false) => {}
            toml::Value::String(s) => words.push(format!("{flag}={s}").into()),
            toml::Value::Integer(n) => words.push(format!("{flag}={n}").into()),
            toml::Value::Float(x) => words.push(format!("{flag}={x}").into()),
            other => bail!(
                "{}: `{key}`: expected a text, a number or true or false, found {other}",
                path.display()
            ),
        }
    }
    Ok(words)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn underscores_and_files() {
        let file = std::env::temp_dir().join(format!("tercio-args-{}.toml", std::process::id()));
        std::fs::write(&file, "lr = 0.001\nno_title = true\nfixed_lr = false\nname = \"a_b\"\n").unwrap();
        let command = ["tercio", "train", "reader"];
        let unchanged = ["--lr", "1_0", "--what is a_b?", "--", "--a_b", "--config"];
        let raw = [&command[..], &["--config", file.to_str().unwrap(), "--train_data=a_b.json"], &unchanged];
        let got = words(raw.concat().into_iter().map(OsString::from)).unwrap();
        let settings = ["--lr=0.001", "--no-title", "--name=a_b", "--train-data=a_b.json"];
        let want = [&command[..], &settings, &unchanged].concat();
        let want: Vec<OsString> = want.into_iter().map(OsString::from).collect();
        assert_eq!(got, want);
        std::fs::remove_file(file).unwrap();
    }
}
