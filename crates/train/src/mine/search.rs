//! Exact search: the greatest inner products of each question with all passages, block by block.

use rayon::prelude::*;
use tercio_data::Vectors;
use tercio_engine::{Device, Tensor};

use crate::error::TrainError;

/// Passages of a block.
const BLOCK: usize = 4096;
/// Questions of a block.
const QUESTIONS: usize = 512;

/// A passage that was found.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Found {
    /// Its row in the set of vectors, and in the collection that they are of.
    pub row: usize,
    /// Inner product with the question.
    pub score: f32,
}

/// The `depth` best passages of every question, best first; of equal ones the earlier. Memory: all questions' vectors and
/// finds, and a block of passages. `progress` is told the share that is done, in 0..=1. `stop` is asked before every block.
///
/// # Errors
/// Vectors of another dimension, or of another model where both say theirs; files that cannot be read; [`TrainError::Stopped`].
pub fn exact_search<D: Device>(
    device: &D,
    questions: &Vectors,
    passages: &Vectors,
    depth: usize,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(f64),
) -> Result<Vec<Vec<Found>>, TrainError> {
    let (q, p) = (questions.settings(), passages.settings());
    let other_model = match (&q.model_fingerprint, &p.model_fingerprint) {
        (Some(of_questions), Some(of_passages)) => of_questions != of_passages,
        _ => false,
    };
    if q.dimension != p.dimension || other_model {
        return Err(TrainError::Unusable(format!(
            "{}: its vectors ({} numbers, of {}) cannot be compared with those of {} ({} numbers, of {}); embed both with \
             the same model",
            questions.dir().display(),
            q.dimension,
            q.model,
            passages.dir().display(),
            p.dimension,
            p.model
        )));
    }
    if q.model_fingerprint.is_none() || p.model_fingerprint.is_none() {
        tracing::warn!(
            "vectors were imported, so nothing says that {} (of {}) and {} (of {}) are of one model: it is taken for granted",
            questions.dir().display(),
            q.model,
            passages.dir().display(),
            p.model
        );
    }
    let width = p.dimension;
    let asked = blocks(device, questions, width)?;
    let mut best: Vec<Vec<Found>> = vec![Vec::new(); questions.len() as usize];
    for number in 0..passages.shards() {
        let shard = passages.shard(number)?;
        for start in (0..shard.len()).step_by(BLOCK) {
            if stop() {
                return Err(TrainError::Stopped);
            }
            let count = BLOCK.min(shard.len() - start);
            let mut rows = vec![0.0; count * width];
            shard.rows(start, &mut rows)?;
            let block = Tensor::from_values(device, count, width, &rows);
            let first = shard.first() as usize + start;
            for (part, best) in asked.iter().zip(best.chunks_mut(QUESTIONS)) {
                let mut scores = Tensor::scratch(device, part.rows, count);
                device.product(part.matrix(), block.matrix().t(), scores.view_mut(), false);
                let scores = scores.to_vec(device);
                best.par_iter_mut().zip(scores.par_chunks(count)).for_each(|(best, scores)| {
                    keep(
                        best,
                        depth,
                        scores.iter().enumerate().map(|(i, &score)| Found { row: first + i, score }),
                    );
                });
            }
            progress((first + count) as f64 / passages.len().max(1) as f64);
        }
    }
    best.par_iter_mut().for_each(|best| sort(best, depth));
    Ok(best)
}

/// The questions' vectors on the device, [`QUESTIONS`] a block; on the host there is never more than a block.
fn blocks<D: Device>(device: &D, questions: &Vectors, width: usize) -> Result<Vec<Tensor<D>>, TrainError> {
    let mut blocks = Vec::new();
    let mut rows = Vec::new();
    let mut flush = |rows: &mut Vec<f32>| {
        if !rows.is_empty() {
            blocks.push(Tensor::from_values(device, rows.len() / width, width, rows));
            rows.clear();
        }
    };
    for number in 0..questions.shards() {
        let shard = questions.shard(number)?;
        let mut start = 0;
        while start < shard.len() {
            let filled = rows.len();
            let count = (QUESTIONS - filled / width).min(shard.len() - start);
            rows.resize(filled + count * width, 0.0);
            shard.rows(start, &mut rows[filled..])?;
            start += count;
            if rows.len() == QUESTIONS * width {
                flush(&mut rows);
            }
        }
    }
    flush(&mut rows);
    Ok(blocks)
}

/// Adds finds that come in the order of their rows.
fn keep(best: &mut Vec<Found>, depth: usize, found: impl Iterator<Item = Found>) {
    // What is not above the worst of `depth` finds cannot be among the best: the others come first, or come earlier.
    let mut least = if best.len() >= depth {
        best.last().map_or(f32::NEG_INFINITY, |f| f.score)
    } else {
        f32::NEG_INFINITY
    };
    for find in found {
        if best.len() >= depth && find.score <= least {
            continue;
        }
        best.push(find);
        if best.len() >= 2 * depth.max(1) {
            sort(best, depth);
            least = best.last().map_or(f32::NEG_INFINITY, |f| f.score);
        }
    }
    sort(best, depth);
}

fn sort(best: &mut Vec<Found>, depth: usize) {
    best.sort_by(|a, b| b.score.total_cmp(&a.score).then(a.row.cmp(&b.row)));
    best.truncate(depth);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_are_kept_whatever_the_blocks() {
        let scores: Vec<f32> = (0..200u64).map(|i| (tercio_data::draw::keyed(&[1, i]) % 17) as f32).collect();
        let mut want: Vec<Found> =
            scores.iter().enumerate().map(|(row, &score)| Found { row, score }).collect();
        sort(&mut want, 200);
        for depth in [1, 2, 7, 50, 300] {
            for block in [1, 3, 64, 200] {
                let mut best = Vec::new();
                for (b, part) in scores.chunks(block).enumerate() {
                    let found =
                        part.iter().enumerate().map(|(i, &score)| Found { row: b * block + i, score });
                    keep(&mut best, depth, found);
                }
                assert_eq!(best, want[..depth.min(200)], "{depth} in blocks of {block}");
            }
        }
    }
}
