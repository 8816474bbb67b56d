//! The metrics of every query: their means, and the file that holds them one by one.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};
use tercio_data::DataError;
use tercio_data::replace::ReplacedFile;

/// The metrics of every query, and their names.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    /// Names of the metrics.
    pub names: Vec<String>,
    /// A query's id, and a value for each name.
    pub queries: Vec<(String, Vec<f64>)>,
}

impl Figures {
    /// The mean of each metric over the queries, which are added in their order; 0 where there are none.
    pub fn means(&self) -> Vec<f64> {
        let mut sums = vec![0.0; self.names.len()];
        for (_, values) in &self.queries {
            sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += value);
        }
        let count = self.queries.len().max(1) as f64;
        sums.into_iter().map(|sum| sum / count).collect()
    }

    /// Writes `{"query": ..., METRIC: ...}`, a query a line.
    ///
    /// # Errors
    /// A file that cannot be written.
    pub fn write(&self, path: &Path) -> Result<PathBuf, DataError> {
        let mut file = ReplacedFile::create(path)?;
        for (query, values) in &self.queries {
            let mut line = Map::from_iter([("query".to_owned(), Value::from(query.as_str()))]);
            line.extend(self.names.iter().cloned().zip(values.iter().map(|&value| Value::from(value))));
            file.write((Value::Object(line).to_string() + "\n").as_bytes())?;
        }
        file.finish()
    }
}
