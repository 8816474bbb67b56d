//! `tercio fuse`: one run of several.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use serde_json::json;
use tercio_data::replace::refuse_source;
use tercio_data::retrieval::RunFile;
use tercio_search::SearchError;
use tercio_search::fusion::{Method, Normalisation, RRF_K, check, fuse_runs, single};
use tercio_search::output::{Format, ResultsFile, write_ranking};
use tercio_train::TrainError;

use super::common::line;

/// Flags of `tercio fuse`.
#[derive(Args)]
pub struct Fuse {
    /// Runs in TREC's form, also .gz or .zst; documents of equal score are ranked as trec_eval ranks them
    #[arg(long, num_args = 1.., required = true)]
    runs: Vec<PathBuf>,
    /// How they become one
    #[arg(long, value_enum, default_value_t = By::Rrf)]
    method: By,
    /// The constant of reciprocal rank fusion
    #[arg(long, default_value_t = RRF_K, allow_negative_numbers = true)]
    k: f64,
    /// A weight for each run, 0 or more; default: all the same
    #[arg(long, num_args = 1.., value_delimiter = ',', allow_negative_numbers = true)]
    weights: Vec<f64>,
    /// What is done to the scores of a query before they are weighted
    #[arg(long, value_enum, default_value_t = Scale::MinMax, visible_alias = "normalize")]
    normalise: Scale,
    /// Documents of each query at most
    #[arg(long, default_value_t = 1000, visible_alias = "n-docs")]
    depth: usize,
    /// Last field of every line
    #[arg(long, default_value = "fused")]
    tag: String,
    /// Run to write
    #[arg(long)]
    output: PathBuf,
    /// Print the counts as one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum By {
    /// Reciprocal rank fusion: the sum of weight / (k + rank); a run that lacks a document gives it nothing
    Rrf,
    /// The sum of weight x score; a document that a run lacks counts as its last one for the query
    Weighted,
}

#[derive(Clone, Copy, PartialEq, ValueEnum)]
enum Scale {
    /// From the least (0) to the greatest (1)
    MinMax,
    /// Mean 0, standard deviation 1
    Z,
    /// Nothing
    None,
}

impl Fuse {
    /// Fuses.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        if self.depth == 0 {
            return Err(TrainError::Options("--depth 0: expected 1 or more".into()).into());
        }
        let weights = if self.weights.is_empty() { vec![1.0; self.runs.len()] } else { self.weights.clone() };
        let method = match self.method {
            By::Rrf => Method::ReciprocalRank { k: self.k },
            By::Weighted => Method::Weighted {
                normalisation: match self.normalise {
                    Scale::MinMax => Normalisation::MinMax,
                    Scale::Z => Normalisation::Z,
                    Scale::None => Normalisation::None,
                },
            },
        };
        check(self.runs.len(), &weights, &method).map_err(|e| TrainError::Options(e.to_string()))?;
        self.runs.iter().try_for_each(|run| refuse_source(&self.output, run))?;
        let runs: Vec<RunFile> =
            self.runs.iter().map(|run| RunFile::open(run, usize::MAX)).collect::<Result<_, _>>()?;
        let mut file = ResultsFile::create(&self.output, Format::Trec)?;
        let (mut queries, mut in_some) = (0u64, 0u64);
        for fused in fuse_runs(&runs, &weights, &method, self.depth)? {
            let (query, documents) = fused?;
            let documents = documents
                .into_iter()
                .map(|(id, score)| Ok((id, single(score)?)))
                .collect::<Result<Vec<_>, SearchError>>()?;
            let mut lines = Vec::new();
            write_ranking(query, documents, &self.tag, &mut lines)?;
            file.push(&lines)?;
            queries += 1;
            in_some += u64::from(runs.iter().any(|run| run.documents(query).is_empty()));
        }
        let output = file.finish()?.display().to_string();
        let text = match self.json {
            true => json!({"output": output, "queries": queries, "in_some_runs_only": in_some}).to_string(),
            false => format!(
                "{output}: {queries} queries of {} runs, {in_some} of them in some of the runs only",
                runs.len()
            ),
        };
        line(&text)?;
        Ok(ExitCode::SUCCESS)
    }
}
