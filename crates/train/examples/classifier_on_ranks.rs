//! Trains a text classifier on several ranks from within a program, and says how it went.
//!
//! usage: classifier_on_ranks RANKS FLAGS...   (flags of `tercio train classifier`)

use std::process::ExitCode;

use tercio_train::launch::train_on_ranks;
use tercio_train::options::classifier_options;
use tercio_train::run::Signals;

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    let ranks = words.next().and_then(|n| n.parse().ok()).unwrap_or(1);
    // Every rank is this program and comes here too: what stands before the call is done by all.
    let trained = classifier_options(words).map_err(Into::into).and_then(|options| {
        let signals = Signals::install()?;
        Ok::<_, Box<dyn std::error::Error>>(train_on_ranks(&options, ranks, &signals)?)
    });
    match trained {
        Ok(trained) => {
            println!("{} updates on {ranks} ranks", trained.step);
            trained.figures.iter().for_each(|(name, value)| println!("{name} {value:.4}"));
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
