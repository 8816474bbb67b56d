//! Tables of a TOML file as flags: every key is a flag of the same name, with its checks and its default, so that a setting is said
//! once. What nobody knows is refused, with its line.

use std::path::{Path, PathBuf};

use clap::{Arg, ArgAction, Args, Command};
use toml::de::{DeTable, DeValue};

use crate::error::TrainError;

/// A TOML file of tables, one level deep.
#[derive(Clone, Debug)]
pub struct Tables {
    path: PathBuf,
    text: String,
    all: toml::Table,
}

impl Tables {
    /// Reads a file.
    ///
    /// # Errors
    /// It cannot be read, or is no TOML.
    pub fn read(path: &Path) -> Result<Tables, TrainError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| TrainError::Read { path: path.display().to_string(), source })?;
        Tables::parse(path, text)
    }

    /// As [`Tables::read`], of a text; `path` stands for it in messages.
    ///
    /// # Errors
    /// It is no TOML.
    pub fn parse(path: &Path, text: String) -> Result<Tables, TrainError> {
        let all = text.parse().map_err(|e: toml::de::Error| {
            let line = e.span().map_or(1, |span| line_at(&text, span.start));
            TrainError::Options(format!("{}, line {line}: {}", path.display(), e.message()))
        })?;
        Ok(Tables { path: path.to_owned(), text, all })
    }

    /// Refuses tables other than `known`.
    ///
    /// # Errors
    /// The first table that is not known, with its line.
    pub fn only(&self, known: &[&str]) -> Result<(), TrainError> {
        self.only_within("", known)
    }

    /// As [`Tables::only`], of the tables in a table.
    ///
    /// # Errors
    /// Likewise.
    pub fn only_within(&self, table: &str, known: &[&str]) -> Result<(), TrainError> {
        let unknown =
            |(key, value): &(&String, &toml::Value)| value.is_table() && !known.contains(&key.as_str());
        match self.table(table).and_then(|within| within.iter().find(unknown)) {
            Some((key, _)) => {
                let at = place(table, key);
                let (name, expected) = (at.join("."), known.join(", "));
                Err(self.error(&at, &format!("there is no table [{name}]: expected one of {expected}")))
            }
            None => Ok(()),
        }
    }

    /// Whether there is a table of this name (tables in tables are named with a dot between).
    pub fn has(&self, name: &str) -> bool {
        self.table(name).is_some_and(|table| !table.is_empty())
    }

    /// Whether a table has this key; the name `""` stands for the keys before all tables.
    pub fn has_key(&self, table: &str, key: &str) -> bool {
        self.table(table).is_some_and(|table| table.contains_key(key))
    }

    fn table(&self, name: &str) -> Option<&toml::Table> {
        name.split('.')
            .filter(|part| !part.is_empty())
            .try_fold(&self.all, |table, part| table.get(part).and_then(toml::Value::as_table))
    }

    /// The settings of a table (`""`: the keys before all tables), as flags would give them; environment variables have no say.
    /// `given` are flags that whoever asks sets itself, as `name=value`; the table may not have them, nor those of `withheld`, each with
    /// the reason. Tables in the table are passed over.
    ///
    /// # Errors
    /// An unknown, a withheld or a doubled key, or a value that the flag does not take, with its line.
    pub fn options<T: Args>(
        &self,
        name: &str,
        given: &[(&str, String)],
        withheld: &[(&str, &str)],
    ) -> Result<T, TrainError> {
        self.layered(&[name], given, withheld)
    }

    /// As [`Tables::options`], of several tables: what a later one says counts.
    ///
    /// # Errors
    /// Likewise.
    pub fn layered<T: Args>(
        &self,
        names: &[&str],
        given: &[(&str, String)],
        withheld: &[(&str, &str)],
    ) -> Result<T, TrainError> {
        let command = T::augment_args(Command::new("settings").no_binary_name(true))
            .mut_args(|arg| arg.env(clap::builder::Resettable::Reset))
            .args_override_self(true);
        let mut words = Vec::new();
        let tables = names.iter().filter_map(|name| Some((*name, self.table(name)?)));
        let settings =
            tables.flat_map(|(name, table)| table.iter().map(move |(key, value)| (name, key, value)));
        for (name, key, value) in settings.filter(|(_, _, value)| !value.is_table()) {
            let at = place(name, key);
            if let Some((_, reason)) = withheld.iter().find(|(flag, _)| flag == key) {
                return Err(self.error(&at, &format!("{key}: {reason}")));
            }
            if given.iter().any(|(flag, _)| flag == key) {
                return Err(self.error(&at, &format!("{key}: the loop sets this one itself; leave it out")));
            }
            let Some(arg) = flag(&command, key) else {
                return Err(self.error(&at, &format!("{key}: {}", unknown(&command, key, withheld, given))));
            };
            let word = word(arg, key, value).map_err(|what| self.error(&at, &format!("{key}: {what}")))?;
            words.extend(word.map(|word| (word, at)));
        }
        // One after the other, so that an error belongs to a line.
        for (word, at) in &words {
            let alone = command.clone().mut_args(|arg| arg.required(false)).try_get_matches_from([word]);
            if let Err(e) = alone {
                return Err(self.error(at, &said(&e)));
            }
        }
        let own = given.iter().map(|(flag, value)| match value.as_str() {
            "true" => format!("--{}", dashed(flag)),
            _ => format!("--{}={value}", dashed(flag)),
        });
        let words: Vec<String> = words.into_iter().map(|(word, _)| word).chain(own).collect();
        let parsed = command.try_get_matches_from(words).and_then(|matches| T::from_arg_matches(&matches));
        parsed.map_err(|e| {
            let name = names.last().copied().unwrap_or_default();
            let at = place(name, "");
            let table = if name.is_empty() { "before its tables".into() } else { format!("in [{name}]") };
            self.error(&at[..at.len() - 1], &format!("{table}: {}", said(&e)))
        })
    }

    /// An error of a key, with its line.
    pub fn error(&self, at: &[&str], what: &str) -> TrainError {
        let line = DeTable::parse(&self.text).ok().and_then(|table| {
            let span = span_of(table.get_ref(), at)?;
            Some(line_at(&self.text, span.start))
        });
        let place = line.map(|line| format!(", line {line}")).unwrap_or_default();
        TrainError::Options(format!("{}{place}: {what}", self.path.display()))
    }
}

/// The way to a key of a table.
fn place<'a>(table: &'a str, key: &'a str) -> Vec<&'a str> {
    table.split('.').filter(|part| !part.is_empty()).chain([key]).collect()
}

fn span_of(table: &DeTable<'_>, at: &[&str]) -> Option<std::ops::Range<usize>> {
    let (first, rest) = at.split_first()?;
    let (key, value) = table.iter().find(|(key, _)| key.get_ref() == first)?;
    match (rest.is_empty(), value.get_ref()) {
        (false, DeValue::Table(inner)) => span_of(inner, rest).or(Some(key.span())),
        _ => Some(key.span()),
    }
}

fn line_at(text: &str, byte: usize) -> usize {
    1 + text.as_bytes()[..byte.min(text.len())].iter().filter(|&&b| b == b'\n').count()
}

fn dashed(key: &str) -> String {
    key.replace('_', "-")
}

fn flag<'a>(command: &'a Command, key: &str) -> Option<&'a Arg> {
    let name = dashed(key);
    command.get_arguments().find(|arg| {
        let aliases = arg.get_all_aliases().unwrap_or_default();
        arg.get_long() == Some(&name) || aliases.contains(&name.as_str())
    })
}

/// A key and its value as a word of a command line; none for a switch that is off.
fn word(arg: &Arg, key: &str, value: &toml::Value) -> Result<Option<String>, String> {
    let is_switch = matches!(arg.get_action(), ArgAction::SetTrue);
    let text = match value {
        toml::Value::Boolean(on) if is_switch => return Ok(on.then(|| format!("--{}", dashed(key)))),
        _ if is_switch => return Err(format!("expected true or false, found {value}")),
        toml::Value::String(text) => text.clone(),
        toml::Value::Integer(_) | toml::Value::Float(_) => value.to_string(),
        _ => return Err(format!("expected a text or a number, found {value}")),
    };
    Ok(Some(format!("--{}={text}", dashed(key))))
}

fn unknown(command: &Command, key: &str, withheld: &[(&str, &str)], given: &[(&str, String)]) -> String {
    let mut known: Vec<String> = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set())
        .filter_map(|arg| arg.get_long().map(|long| long.replace('-', "_")))
        .filter(|name| !withheld.iter().any(|(n, _)| n == name) && !given.iter().any(|(n, _)| n == name))
        .collect();
    known.sort_by_key(|name| (distance(name, key), name.clone()));
    match known.first().filter(|name| distance(name, key) <= 1 + key.len() / 4) {
        Some(near) => format!("there is no such setting; did you mean {near}?"),
        None => {
            known.sort();
            format!("there is no such setting; expected one of {}", known.join(", "))
        }
    }
}

/// Changes of letters that make one word of another (Levenshtein).
fn distance(a: &str, b: &str) -> usize {
    let b: Vec<char> = b.chars().collect();
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut before = row[0];
        row[0] = i + 1;
        for (j, y) in b.iter().enumerate() {
            let change = before + usize::from(x != *y);
            before = row[j + 1];
            row[j + 1] = change.min(row[j] + 1).min(before + 1);
        }
    }
    row[b.len()]
}

/// The first sentence of what clap says.
fn said(error: &clap::Error) -> String {
    let text = error.to_string();
    let first = text.split("\n\n").next().unwrap_or_default();
    first.trim_start_matches("error: ").replace('\n', " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::{Optim, ReaderOptions};

    fn reader(text: &str) -> Result<ReaderOptions, TrainError> {
        let tables = Tables::parse(Path::new("loop.toml"), text.into())?;
        let given = [("name", "reader".to_owned()), ("train_data", "t.jsonl".to_owned())];
        tables.options("reader", &given, &[("new_run", "a loop knows by itself what is out of date")])
    }

    #[test]
    fn keys_are_flags() {
        let o = reader(
            "rounds = 2\n[reader]\nn_context = 5\nlr = 3e-4\noptim = \"adamw\"\nfixed_lr = true\nanswer_maxlength = -1\n",
        );
        let o = o.unwrap();
        assert_eq!((o.model.n_context, o.optim.lr, o.optim.optim), (5, 3e-4, Optim::Adamw));
        assert!(o.optim.fixed_lr && o.run.name == "reader");
        assert_eq!(o.data.train_data.unwrap(), Path::new("t.jsonl"));
        assert_eq!(o.optim.total_steps, 1000, "the flag's default");
        assert!(!reader("[reader]\nfixed_lr = false\n").unwrap().optim.fixed_lr);
    }

    #[test]
    fn what_is_wrong_is_said_with_its_line() {
        let refused = |text: &str, with: &str| {
            let error = reader(text).unwrap_err().to_string();
            assert!(error.starts_with("loop.toml, line ") && error.contains(with), "{error}");
        };
        refused(
            "a = 1\n\n[reader]\nn_contxt = 5\n",
            "line 4: n_contxt: there is no such setting; did you mean n_context?",
        );
        refused(
            "[reader]\nzzzzzzzzzzzzzz = 5\n",
            "line 2: zzzzzzzzzzzzzz: there is no such setting; expected one of ",
        );
        refused("[reader]\n\nname = \"x\"\n", "line 3: name: the loop sets this one itself");
        refused("[reader]\nnew_run = true\n", "line 2: new_run: a loop knows");
        refused("[reader]\nlr = \"fast\"\n", "line 2: invalid value 'fast' for '--lr");
        refused(
            "[reader]\nlr = 1.0\nn_context = [1]\n",
            "line 3: n_context: expected a text or a number, found [1]",
        );
        refused("[reader]\nfixed_lr = 1\n", "line 2: fixed_lr: expected true or false, found 1");
        refused("[reader]\nlr = 1\nlr = 2\n", "line 3: ");
        refused("[reader\nlr = 1\n", "line 1: ");
        let tables = Tables::parse(Path::new("l"), "x = 1\n[a]\n[b]\n".into()).unwrap();
        let error = tables.only(&["a"]).unwrap_err().to_string();
        assert_eq!(error, "l, line 3: there is no table [b]: expected one of a");
    }
}
