//! Where ranked candidates come from: the question's own `ctxs`, a run, or a search over vectors.

use std::collections::HashMap;
use std::path::Path;

use tercio_data::retrieval::{RetrievalExample, RunFile};
use tercio_data::{Passage, Passages, Vectors};
use tercio_search::Hit;

use crate::error::TrainError;

/// Rows between two looks at whether to stop.
const OFTEN: usize = 1024;

/// The id of a question as text: a string as it is, a number in digits.
pub fn id_text(example: &RetrievalExample) -> String {
    match &example.id {
        serde_json::Value::String(id) => id.clone(),
        other => other.to_string(),
    }
}

/// Refuses vectors whose ids are others than those of the rows of `file`, which `id_of` reads. For vectors that were imported: nothing else says
/// what they are of.
///
/// # Errors
/// The first id that differs; a row that cannot be read; [`TrainError::Stopped`].
pub fn same_ids(
    vectors: &Vectors,
    file: &Path,
    id_of: impl Fn(usize) -> Result<String, TrainError>,
    stop: &dyn Fn() -> bool,
) -> Result<(), TrainError> {
    for number in 0..vectors.shards() {
        let shard = vectors.shard(number)?;
        for (row, id) in (shard.first() as usize..).zip(shard.ids()?) {
            if row % OFTEN == 0 && stop() {
                return Err(TrainError::Stopped);
            }
            let expected = id_of(row)?;
            if id != expected {
                return Err(TrainError::Unusable(format!(
                    "{}: vector {} has the id {id:?}, item {} of {} the id {expected:?}; give the file that the vectors are of, \
                     in their order",
                    vectors.dir().display(),
                    row + 1,
                    row + 1,
                    file.display()
                )));
            }
        }
    }
    Ok(())
}

/// A collection whose passages are found by id.
pub struct Collection {
    passages: Passages,
    rows: HashMap<String, usize>,
}

impl Collection {
    /// Reads the collection once and notes the rows of the ids that `wanted` has; memory grows with those. `stop` is asked again and
    /// again.
    ///
    /// # Errors
    /// A bad passage; an id that two passages have; one that none has; [`TrainError::Stopped`].
    pub fn of<'a>(
        passages: Passages,
        wanted: impl Iterator<Item = &'a str>,
        stop: &dyn Fn() -> bool,
    ) -> Result<Collection, TrainError> {
        const NOT_FOUND: usize = usize::MAX;
        let mut rows: HashMap<String, usize> = wanted.map(|id| (id.to_owned(), NOT_FOUND)).collect();
        for row in 0..passages.len() {
            if row % OFTEN == 0 && stop() {
                return Err(TrainError::Stopped);
            }
            let (passage, line) = passages.get_placed(row)?;
            let Some(place) = rows.get_mut(&passage.id) else { continue };
            if *place != NOT_FOUND {
                return Err(TrainError::Unusable(format!(
                    "{}, line {line}: the id {:?} was there before; ids of a collection are different",
                    passages.path().display(),
                    passage.id
                )));
            }
            *place = row;
        }
        // The least one, so that the message is the same every time.
        if let Some(id) = rows.iter().filter(|(_, row)| **row == NOT_FOUND).map(|(id, _)| id).min() {
            return Err(TrainError::Unusable(format!(
                "{}: has no passage with the id {id:?} that was retrieved; give the collection that was searched",
                passages.path().display()
            )));
        }
        Ok(Collection { passages, rows })
    }

    fn get(&self, id: &str) -> Result<Passage, TrainError> {
        let row = self.rows.get(id).ok_or_else(|| {
            TrainError::Unusable(format!(
                "{}: the id {id:?} was not looked for",
                self.passages.path().display()
            ))
        })?;
        Ok(self.passages.get(*row)?)
    }
}

/// Ranked candidates of every question.
pub enum Candidates {
    /// The question's own passages: by score if all have one, else in their order.
    Own,
    /// Those of a run, by the question's id.
    Run(RunFile, Collection),
    /// Those that a search found, by the question's row; rows of the collection.
    Search(Vec<Vec<Hit>>, Passages),
}

impl Candidates {
    /// The first `depth` candidates of a question, best first; `file_position` is the rank, from 0.
    ///
    /// # Errors
    /// A passage that cannot be read.
    pub fn of(
        &self,
        example: &RetrievalExample,
        row: usize,
        depth: usize,
    ) -> Result<Vec<Passage>, TrainError> {
        let mut list = match self {
            Candidates::Own => example.passages.iter().take(depth).map(|p| p.passage.clone()).collect(),
            Candidates::Run(run, collection) => {
                let id = id_text(example);
                let of =
                    |(id, score): &(String, f64)| Ok(Passage { score: Some(*score), ..collection.get(id)? });
                run.documents(&id).iter().take(depth).map(of).collect::<Result<Vec<_>, TrainError>>()?
            }
            Candidates::Search(found, passages) => {
                let of = |found: &Hit| {
                    let row = found.row as usize;
                    Ok(Passage { score: Some(found.score.into()), ..passages.get(row)? })
                };
                found[row].iter().take(depth).map(of).collect::<Result<Vec<_>, TrainError>>()?
            }
        };
        for (rank, passage) in list.iter_mut().enumerate() {
            passage.file_position = rank;
        }
        Ok(list)
    }
}
