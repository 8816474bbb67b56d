//! Candidates by exact search: the passages with the greatest inner products with each question's vector.

use tercio_data::Vectors;
use tercio_engine::Cpu;
use tercio_search::flat::{FlatIndex, Metric, read_all, same_model};
use tercio_search::{Hit, SearchError};

use crate::error::TrainError;

/// The `depth` best passages of every question, best first; of equal ones the earlier. Memory: all questions' vectors and
/// finds, and a block of passages. `progress` is told the share that is done, in 0..=1. `stop` is asked before every block.
///
/// # Errors
/// Vectors of another dimension, or of another model where both say theirs; files that cannot be read; [`TrainError::Stopped`].
pub fn exact_search(
    device: &Cpu,
    questions: &Vectors,
    passages: &Vectors,
    depth: usize,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(f64),
) -> Result<Vec<Vec<Hit>>, TrainError> {
    let wrong = |e: SearchError| match e {
        SearchError::Stopped => TrainError::Stopped,
        SearchError::Data(e) => e.into(),
        other => TrainError::Unusable(other.to_string()),
    };
    if let Some(warning) = same_model(questions, passages).map_err(wrong)? {
        tracing::warn!("{warning}");
    }
    let asked = read_all(questions).map_err(wrong)?;
    let index = FlatIndex::open(passages.dir(), Metric::Inner).map_err(wrong)?;
    index.search(device, &asked, depth, stop, progress).map_err(wrong)
}
