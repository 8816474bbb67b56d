//! `tercio bench plaid`: times the index of late interaction, as `bench/peer_plaid.py` times fast-plaid.

use std::path::PathBuf;
use std::process::ExitCode;

use clap::Args;
use tercio_engine::Cpu;
use tercio_search::plaid::PlaidOptions;
use tercio_train::bench::{PlaidBenchOptions, PlaidBenchReport, bench_plaid};

use super::common::{self, line, within};

/// Flags of `tercio bench plaid`.
#[derive(Args)]
pub struct BenchPlaid {
    /// Folder of documents.npy, queries.npy and exact_top10.npy, as bench/peer_plaid.py --write makes them
    #[arg(long)]
    vectors: PathBuf,
    /// Bits of a residual's number: 1, 2, 4 or 8
    #[arg(long, default_value_t = 4)]
    bits: usize,
    /// Centroids; 0: as an index has them
    #[arg(long, default_value_t = 0)]
    centroids: usize,
    /// Vectors that centroids are learnt from; 0: 32 for each
    #[arg(long, default_value_t = 0)]
    sample: usize,
    /// Lists that every token of a query looks into; 0: as a search has it
    #[arg(long, default_value_t = 0)]
    probes: usize,
    /// Documents that are scored; 0: as a search has it
    #[arg(long, default_value_t = 0)]
    candidates: usize,
    /// How often all queries are asked, after a round that is not timed; the best time counts
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Leave exact MaxSim out
    #[arg(long)]
    no_exact: bool,
    /// Threads; 0: all cores
    #[arg(long, default_value_t = 0)]
    threads: usize,
    /// Print one line of JSON on stdout
    #[arg(long)]
    json: bool,
}

impl BenchPlaid {
    /// Measures and prints.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        within(&[("rounds", self.rounds, 1_000_000)])?;
        let device = Cpu::new(common::threads(self.threads)?)?;
        let options = PlaidBenchOptions {
            vectors: self.vectors,
            build: PlaidOptions {
                bits: self.bits,
                centroids: self.centroids,
                sample: self.sample,
                ..PlaidOptions::default()
            },
            probes: self.probes,
            candidates: self.candidates,
            rounds: self.rounds,
            exact: !self.no_exact,
        };
        let report = bench_plaid(&device, &options)?;
        line(&if self.json { serde_json::to_string(&report)? } else { table(&report) })?;
        Ok(ExitCode::SUCCESS)
    }
}

fn table(r: &PlaidBenchReport) -> String {
    let mut lines = vec![
        format!(
            "{} documents of {} vectors, {} bits, {} centroids, {} threads",
            r.documents, r.tokens, r.nbits, r.centroids, r.threads
        ),
        format!("  build                {:.2} s, {:.2} GB", r.build_seconds, r.build_peak_rss_gb),
        format!("  index                {:.1} MB", r.index_bytes as f64 / 1e6),
        format!(
            "  search               {:.1} queries/s one by one, {:.1} together, {:.2} GB",
            r.queries_per_second_single, r.queries_per_second_batch, r.search_peak_rss_gb
        ),
        format!("  recall@10            {:.4}", r.recall_at_10),
    ];
    if let Some(e) = &r.exact {
        lines.push(format!(
            "  exact MaxSim         {:.1} queries/s one by one, {:.1} together, {:.2} GB",
            e.queries_per_second_single, e.queries_per_second_batch, e.peak_rss_gb
        ));
    }
    lines.join("\n")
}
