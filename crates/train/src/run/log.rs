//! The log for people: on stderr and in `RUN/run.log`, through `tracing`.
//!
//! A library user keeps the choice of a subscriber: only [`init_logging`], which a program calls, sets one.

use std::fmt;
use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use tracing::field::{Field, Visit};
use tracing::{Event, Level, Metadata, Subscriber};
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::{FmtContext, FormatEvent, FormatFields, MakeWriter};
use tracing_subscriber::registry::LookupSpan;

use super::error::{Context, RunError};
use super::{files, progress};

/// Name of the file in the run folder.
pub(crate) const LOG_NAME: &str = "run.log";

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Verbosity {
    /// Warnings and errors.
    Quiet,
    /// What a person who watches a run wants to know.
    #[default]
    Normal,
    /// Details for those who look for a fault.
    Verbose,
}

impl Verbosity {
    fn level(self) -> Level {
        match self {
            Self::Quiet => Level::WARN,
            Self::Normal => Level::INFO,
            Self::Verbose => Level::DEBUG,
        }
    }
}

/// Lines said before the run folder is known are kept for its log, so many bytes of them.
const EARLY_LIMIT: usize = 64 << 10;

/// Where the lines of `run.log` go.
enum RunLog {
    /// The folder is not known yet; the lines so far.
    Early(Vec<u8>),
    Open(File),
}

static RUN_LOG: Mutex<RunLog> = Mutex::new(RunLog::Early(Vec::new()));

fn run_log() -> MutexGuard<'static, RunLog> {
    RUN_LOG.lock().unwrap_or_else(PoisonError::into_inner)
}

impl RunLog {
    fn line(&mut self, line: &[u8]) {
        match self {
            Self::Early(lines) if lines.len() + line.len() <= EARLY_LIMIT => lines.extend(line),
            Self::Early(_) => {}
            // A log that cannot be written must not end a run; the other sink has the line.
            Self::Open(file) => drop(file.write_all(line)),
        }
    }
}

/// Sends the events of this process to stderr and, where a run folder is given (rank 0), to the end of `run.log` there.
/// A folder that is known later only is named to [`log_to`].
///
/// A line reads `[MM/DD/YYYY HH:MM:SS] LEVEL message`, in UTC. `verbosity` rules stderr; the log of a quiet run tells as much
/// as that of a normal one.
///
/// # Errors
/// When `run.log` cannot be opened, or the process has set a subscriber already.
pub fn init_logging(run_dir: Option<&Path>, verbosity: Verbosity) -> Result<(), RunError> {
    if let Some(dir) = run_dir {
        log_to(dir)?;
    }
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(verbosity.level().max(Level::INFO))
        .with_writer(Sinks(verbosity.level()))
        .with_ansi(false)
        .event_format(Line)
        .finish();
    tracing::subscriber::set_global_default(subscriber)
        .map_err(|error| RunError::Setup { what: "logging".into(), problem: error.to_string() })
}

/// As [`init_logging`], on one of several ranks: those other than rank 0 say warnings and errors only, with `prefix` before
/// each line where it is not empty.
///
/// # Errors
/// As there.
pub fn init_logging_of_rank(rank: usize, prefix: &str, verbosity: Verbosity) -> Result<(), RunError> {
    if rank == 0 {
        return init_logging(None, verbosity);
    }
    let _ = PREFIX.set(prefix.to_owned());
    init_logging(None, Verbosity::Quiet)
}

/// What stands before every line of this process on stderr.
static PREFIX: OnceLock<String> = OnceLock::new();

/// Sends what was said so far, and all that follows, to the end of `run.log` in a run's folder as well.
///
/// # Errors
/// When `run.log` cannot be opened.
pub fn log_to(run_dir: &Path) -> Result<(), RunError> {
    std::fs::create_dir_all(run_dir).context("create the folder", run_dir)?;
    let path = run_dir.join(LOG_NAME);
    let mut file = File::options().create(true).append(true).open(&path).context("open", &path)?;
    let mut log = run_log();
    if let RunLog::Early(lines) = &*log {
        let _ = file.write_all(lines);
    }
    *log = RunLog::Open(file);
    Ok(())
}

/// Writes the error that ends a run into its `run.log`; stderr is left to the program.
pub fn note_failure(message: &str) {
    run_log().line(format!("{}ERROR {message}\n", time_stamp()).as_bytes());
}

fn time_stamp() -> String {
    let (year, month, day, hour, minute, second) = files::utc(files::unix_time() as u64);
    format!("[{month:02}/{day:02}/{year:04} {hour:02}:{minute:02}:{second:02}] ")
}

/// Writes each line to the run's log, and to stderr, above the progress bar, where its level is shown.
struct Sink {
    shown: bool,
}

/// Makes the sink of a line: the greatest level that stderr shows.
struct Sinks(Level);

impl<'a> MakeWriter<'a> for Sinks {
    type Writer = Sink;

    fn make_writer(&'a self) -> Sink {
        Sink { shown: true }
    }
    fn make_writer_for(&'a self, meta: &Metadata<'_>) -> Sink {
        Sink { shown: *meta.level() <= self.0 }
    }
}

impl Write for Sink {
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        if self.shown {
            match PREFIX.get() {
                Some(prefix) => progress::print_above(&[prefix.as_bytes(), line].concat()),
                None => progress::print_above(line),
            }
        }
        run_log().line(line);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

struct Line;

impl<S, N> FormatEvent<S, N> for Line
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        write!(writer, "{}{} ", time_stamp(), event.metadata().level())?;
        let mut fields = Fields::default();
        event.record(&mut fields);
        writeln!(writer, "{}{}", fields.message, fields.others)
    }
}

/// The message first, then other fields as ` name=value`.
#[derive(Default)]
struct Fields {
    message: String,
    others: String,
}

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        use fmt::Write as _;
        let _ = match field.name() {
            "message" => write!(self.message, "{value:?}"),
            name => write!(self.others, " {name}={value:?}"),
        };
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        use fmt::Write as _;
        let _ = match field.name() {
            "message" => write!(self.message, "{value}"),
            name => write!(self.others, " {name}={value}"),
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_has_date_level_message_and_fields_and_early_ones_are_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("run.log");
        std::fs::write(&path, "earlier\n").unwrap();
        let subscriber = tracing_subscriber::fmt()
            .with_max_level(Verbosity::Normal.level())
            .with_writer(Sinks(Verbosity::Quiet.level()))
            .with_ansi(false)
            .event_format(Line)
            .finish();
        tracing::subscriber::with_default(subscriber, || {
            tracing::info!(step = 3, name = "a", "saved {}", "step-3");
            log_to(dir.path()).unwrap();
            tracing::debug!("not said");
            tracing::warn!("careful");
        });
        note_failure("the end");
        let text = std::fs::read_to_string(&path).unwrap();
        let lines: Vec<_> = text.lines().collect();
        assert_eq!(lines.len(), 4, "{text}");
        assert_eq!(lines[0], "earlier");
        let date = |line: &str| {
            line[..22].chars().map(|c| if c.is_ascii_digit() { '0' } else { c }).collect::<String>()
        };
        assert_eq!(date(lines[1]), "[00/00/0000 00:00:00] ");
        assert_eq!(&lines[1][22..], "INFO saved step-3 step=3 name=a");
        assert_eq!(&lines[2][22..], "WARN careful");
        assert_eq!(&lines[3][22..], "ERROR the end");
    }
}
