//! `tercio data download`: the data that Fusion-in-Decoder's users start from, resumed where a connection broke.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

use clap::{Args, ValueEnum};
use tercio_data::download::sources::{DataSet, data_set};
use tercio_data::download::{
    DownloadEvent, Downloaded, Patience, Source, download, gunzip, read_checksums, unpack,
};

use super::common::line;

/// Where files come from, and what they must be: flags of all downloads.
#[derive(Args)]
pub struct DownloadFlags {
    /// Address of a server that holds the files in one folder, instead of the places where they were published
    #[arg(long, env = "TERCIO_MIRROR")]
    mirror: Option<String>,
    /// File of known checksums, as sha256sum writes them; what a file turned out to be is stored beside it in any case
    #[arg(long)]
    checksums: Option<PathBuf>,
    /// Attempts without a new byte before a download gives up
    #[arg(long, default_value_t = 8, value_parser = clap::value_parser!(u32).range(1..=1000))]
    attempts: u32,
}

/// Flags of `tercio data download`.
#[derive(Args)]
pub struct DataDownload {
    /// What to fetch
    #[arg(value_enum)]
    set: Set,
    /// Folder for the files
    #[arg(long, default_value = "open_domain_data")]
    output: PathBuf,
    #[command(flatten)]
    flags: DownloadFlags,
    /// Leave archives as they are
    #[arg(long)]
    no_unpack: bool,
}

#[derive(Clone, Copy, ValueEnum)]
enum Set {
    /// NQ-open, and the rows and passages of Fusion-in-Decoder
    Nq,
    /// TriviaQA, unfiltered, and the rows and passages of Fusion-in-Decoder
    Triviaqa,
    /// The 21 million passages of Wikipedia that both are answered from (psgs_w100.tsv)
    WikipediaPassages,
}

impl DownloadFlags {
    /// The mirror, where one was named.
    pub fn mirror(&self) -> Option<&str> {
        self.mirror.as_deref().filter(|mirror| !mirror.is_empty())
    }

    /// Fetches files, one after the other.
    ///
    /// # Errors
    /// As [`download`].
    pub fn fetch(&self, mut sources: Vec<Source>, folder: &Path) -> anyhow::Result<Vec<Downloaded>> {
        let sums = self.checksums.as_deref().map(read_checksums).transpose()?.unwrap_or_else(BTreeMap::new);
        let patience = Patience { attempts: self.attempts, ..Patience::default() };
        let mut done = Vec::new();
        for source in &mut sources {
            source.sha256 = sums.get(&source.name).cloned();
            let mut shown = Shown::default();
            let result = download(source, folder, &patience, &mut |event| shown.tell(event));
            shown.end();
            let file = result?;
            let how = if file.was_there { "is there" } else { "fetched" };
            let checked = if source.sha256.is_some() { "as announced" } else { "not known before" };
            eprintln!(
                "{}: {how}, {} bytes, SHA-256 {} ({checked})",
                file.path.display(),
                file.bytes,
                file.sha256
            );
            done.push(file);
        }
        Ok(done)
    }
}

/// Progress on stderr: a line that changes on a terminal, else a line every tenth.
#[derive(Default)]
struct Shown {
    tenth: u64,
    open: bool,
}

impl Shown {
    fn tell(&mut self, event: DownloadEvent<'_>) {
        match event {
            DownloadEvent::Note(note) => {
                self.end();
                eprintln!("{note}");
            }
            DownloadEvent::Progress { name, done, total } => {
                let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
                let share = total.filter(|total| *total > 0).map(|total| done as f64 / total as f64);
                let text = match (total, share) {
                    (Some(total), Some(share)) => {
                        format!("{name}: {:.1} of {:.1} MiB, {:.0} %", mib(done), mib(total), 100.0 * share)
                    }
                    _ => format!("{name}: {:.1} MiB", mib(done)),
                };
                let tenth = share.map_or(done >> 27, |share| (10.0 * share) as u64);
                if std::io::stderr().is_terminal() {
                    eprint!("\r{text}\x1b[K");
                    let _ = std::io::stderr().flush();
                    self.open = true;
                } else if tenth > self.tenth {
                    self.tenth = tenth;
                    eprintln!("{text}");
                }
            }
        }
    }
    fn end(&mut self) {
        if std::mem::take(&mut self.open) {
            eprintln!();
        }
    }
}

impl DataDownload {
    /// Fetches and unpacks.
    pub fn run(self) -> anyhow::Result<ExitCode> {
        let (set, convert) = match self.set {
            Set::Nq => (DataSet::Nq, Some(("nq", "NQ"))),
            Set::Triviaqa => (DataSet::TriviaQa, Some(("triviaqa", "TQA"))),
            Set::WikipediaPassages => (DataSet::WikipediaPassages, None),
        };
        let files = self.flags.fetch(data_set(set, self.flags.mirror()), &self.output)?;
        let folder = self.output.display();
        for file in files {
            let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            line(&file.path.display().to_string())?;
            if self.no_unpack {
                continue;
            }
            if name.ends_with(".tar.gz") {
                for unpacked in unpack(&file.path, &self.output)? {
                    line(&unpacked.display().to_string())?;
                }
            } else if let Some(plain) = name.strip_suffix(".gz") {
                let target = self.output.join(plain);
                if !target.exists() {
                    eprintln!("{}: decompressing", file.path.display());
                    gunzip(&file.path, &target)?;
                }
                line(&target.display().to_string())?;
            }
        }
        if let Some((format, name)) = convert.filter(|_| !self.no_unpack) {
            eprintln!("next: tercio data download wikipedia-passages --output {folder} (once), then");
            eprintln!("      tercio data convert {format} {folder} --output {folder}/{name}");
        }
        Ok(ExitCode::SUCCESS)
    }
}
