//! The two recipes of classifiers: settings that belong together, put before the flags.

use std::ffi::OsString;

use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

use super::ClassifierOptions;

/// Settings that belong together; each can be overridden.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Recipe {
    /// flair's `fine_tune`: AdamW 5e-5, linear with a warm-up of 0.1, 10 epochs, batch 4, clip 5, the last epoch's model.
    FineTune,
    /// flair's `train`: SGD 0.1 that anneals on a plateau, 100 epochs, batch 32, clip 5, the best model.
    Train,
}

impl Recipe {
    /// The flags that the recipe stands for.
    pub fn flags(self) -> Vec<(&'static str, &'static str)> {
        let common = [
            ("total-steps", "0"),
            ("eval-freq", "0"),
            ("save-freq", "0"),
            ("per-gpu-batch-size", "0"),
            ("last-batch", "keep"),
            ("clip", "5"),
            ("warmup-steps", "0"),
        ];
        let own: &[(&str, &str)] = match self {
            Recipe::FineTune => &[
                ("optim", "adamw"),
                ("lr", "5e-5"),
                ("weight-decay", "0.01"),
                ("scheduler", "linear"),
                ("warmup-fraction", "0.1"),
                ("epochs", "10"),
                ("global-batch-size", "4"),
                ("use-model", "last"),
            ],
            Recipe::Train => &[
                ("optim", "sgd"),
                ("lr", "0.1"),
                ("weight-decay", "0"),
                ("scheduler", "fixed"),
                ("anneal", "plateau"),
                ("epochs", "100"),
                ("global-batch-size", "32"),
                ("use-model", "best"),
            ],
        };
        common.into_iter().chain(own.iter().copied()).collect()
    }
}

/// The words of a command line with the flags of its recipe before all flags, so that these win; a flag whose environment variable
/// is set is left to that.
pub fn with_recipe(words: Vec<OsString>) -> Vec<OsString> {
    let mut name = std::env::var("TERCIO_RECIPE").unwrap_or_default();
    let mut texts = words.iter().map(|w| w.to_string_lossy());
    while let Some(word) = texts.next() {
        let (flag, value) = match word.split_once('=') {
            Some((flag, value)) => (flag.to_owned(), Some(value.to_owned())),
            None => (word.into_owned(), None),
        };
        // What clap takes for the flag: no other one begins so.
        if flag.len() > "--rec".len() && "--recipe".starts_with(&flag) {
            name = value.or_else(|| texts.next().map(|w| w.into_owned())).unwrap_or_default();
        }
    }
    // A name that is none is refused when it is parsed.
    let recipe = Recipe::from_str(&name, false).unwrap_or(Recipe::FineTune);
    let is_set =
        |flag: &str| std::env::var_os(format!("TERCIO_{}", flag.replace('-', "_").to_uppercase())).is_some();
    let flags = recipe.flags().into_iter().filter(|(flag, _)| !is_set(flag));
    let flags = flags.map(|(flag, value)| format!("--{flag}={value}").into());
    let is_flag = |w: &OsString| w.to_string_lossy().starts_with('-');
    let at = words.iter().position(is_flag).unwrap_or(words.len());
    let mut all = words;
    all.splice(at..at, flags);
    all
}

/// A long flag with dashes for its underscores: both forms mean the same.
pub fn dashed(word: OsString) -> OsString {
    let Some(text) = word.to_str().filter(|t| t.starts_with("--")) else {
        return word;
    };
    let (name, value) = text.split_once('=').map_or((text, None), |(n, v)| (n, Some(v)));
    // A text that begins with dashes is no flag.
    if !name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_') {
        return word;
    }
    let name = name.replace('_', "-");
    value.map_or(name.clone(), |v| format!("{name}={v}")).into()
}

#[derive(Parser)]
#[command(infer_long_args = true, args_override_self = true)]
struct Flags {
    #[command(flatten)]
    options: ClassifierOptions,
}

/// The settings of these flags of `tercio train classifier`, for a program that trains by itself.
///
/// # Errors
/// What is wrong with them.
pub fn classifier_options<I: Into<OsString>>(
    flags: impl IntoIterator<Item = I>,
) -> Result<ClassifierOptions, String> {
    let words = [OsString::from("classifier")]
        .into_iter()
        .chain(flags.into_iter().map(|w| dashed(w.into())))
        .collect();
    let options = Flags::try_parse_from(with_recipe(words)).map_err(|e| e.to_string())?.options;
    options.check()?;
    Ok(options)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::options::classifier::Anneal;
    use crate::options::{Optim, Scheduler};

    fn options(flags: &str) -> Result<ClassifierOptions, String> {
        classifier_options(["--train-data", "x.txt"].into_iter().chain(flags.split_whitespace()))
    }

    #[test]
    fn recipes_are_flairs_and_flags_win() {
        let o = options("").unwrap();
        assert_eq!((o.optim.optim, o.optim.lr, o.optim.clip), (Optim::Adamw, 5e-5, 5.0));
        assert_eq!((o.optim.scheduler, o.optim.weight_decay), (Scheduler::Linear, 0.01));
        let plan = o.data.batch_plan().unwrap();
        assert_eq!((plan.global, plan.micro, o.model.epochs), (4, 4, 10));
        let o = options("--recipe train --lr 0.3 --mini_batch_size 12 --mini_batch_chunk_size=3").unwrap();
        assert_eq!((o.optim.optim, o.optim.lr, o.model.anneal), (Optim::Sgd, 0.3, Anneal::Plateau));
        let plan = o.data.batch_plan().unwrap();
        assert_eq!((plan.global, plan.micro, plan.shards, o.model.epochs), (12, 3, 4, 100));
        // As `infer_long_args` takes it.
        assert_eq!(options("--recip=train").unwrap().optim.optim, Optim::Sgd);
        assert!(options("--recipe thorough").unwrap_err().contains("thorough"));
    }
}
