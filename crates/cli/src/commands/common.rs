//! What several commands share: checks of flags, and stdout whose reader may have gone.

use std::io::Write;
use std::path::Path;

use tercio_data::Questions;
use tercio_train::TrainError;
use tercio_train::scratch::ScratchFolder;

/// Most questions at a time that are believed to be meant.
pub const MOST_QUESTIONS: usize = 1 << 12;
/// Threads that are believed to be meant.
const MOST_THREADS: usize = 1024;

/// The number of threads to use for a flag's value: 0 is all cores.
///
/// # Errors
/// A number beyond any machine.
pub fn threads(flag: usize) -> Result<usize, TrainError> {
    match flag {
        0 => Ok(std::thread::available_parallelism().map_or(1, |n| n.get())),
        n if n <= MOST_THREADS => Ok(n),
        n => Err(TrainError::Options(format!("--threads {n}: expected 0 (all cores) to {MOST_THREADS}"))),
    }
}

/// Refuses a flag below 1 or above its limit: what is beyond any use is a slip of the hand, and memory grows with it.
pub fn within(flags: &[(&str, usize, usize)]) -> Result<(), TrainError> {
    match flags.iter().find(|(_, value, most)| !(1..=*most).contains(value)) {
        Some((flag, value, most)) => {
            Err(TrainError::Options(format!("--{flag} {value}: expected 1 to {most}")))
        }
        None => Ok(()),
    }
}

/// Opens a file of questions with its index in `cache`, or where nothing of it outlives the process.
///
/// # Errors
/// As [`Questions::open`].
pub fn open_questions(file: &Path, cache: Option<&Path>) -> Result<Questions, TrainError> {
    if let Some(cache) = cache {
        return Ok(Questions::open(file, cache)?);
    }
    // What is open can be read after its name is gone, and a killed process leaves no decompressed copy behind.
    let scratch = ScratchFolder::new()?;
    Ok(Questions::open(file, scratch.path())?)
}

/// Writes a line to stdout at once.
///
/// # Errors
/// When stdout cannot take it, as after `| head`.
pub fn line(text: &str) -> std::io::Result<()> {
    let mut out = std::io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.write_all(b"\n")?;
    out.flush()
}

/// Whether an error is only that nobody reads stdout any more.
pub fn reader_has_gone(error: &anyhow::Error) -> bool {
    error.chain().any(|cause| {
        cause.downcast_ref::<std::io::Error>().is_some_and(|e| e.kind() == std::io::ErrorKind::BrokenPipe)
    })
}
