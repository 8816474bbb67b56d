//! Where vectors go, shard by shard: a folder of one vector a text, or of one for every token.

use std::path::Path;

use tercio_data::DataError;
use tercio_data::multi_vectors::{MultiShardWriter, MultiVectorsFolder};
use tercio_data::vectors::{ShardWriter, VectorsFolder};

/// A folder that grows shard by shard.
pub trait VectorStore: Sync {
    /// The folder.
    fn dir(&self) -> &Path;
    /// The instructions that computed a shard, if it is finished.
    ///
    /// # Errors
    /// Files that are not those of the shard.
    fn finished_with(&self, number: u64) -> Result<Option<String>, DataError>;
    /// Begins a shard.
    ///
    /// # Errors
    /// Files that cannot be written.
    fn begin(&self, number: u64) -> Result<Box<dyn ShardSink + '_>, DataError>;
    /// Completes the set if all shards are finished; tells how many are.
    ///
    /// # Errors
    /// Files that cannot be read or written.
    fn complete(&self) -> Result<u64, DataError>;
}

/// A shard that is being written; dropped before its end it leaves nothing.
pub trait ShardSink {
    /// Adds the next text's vectors.
    ///
    /// # Errors
    /// Numbers that are none; a full disk.
    fn push(&mut self, id: &str, vectors: &[f32]) -> Result<(), DataError>;
    /// Makes the shard durable and marks it as finished.
    ///
    /// # Errors
    /// Another number of texts than the shard has; files that cannot be written.
    fn finish(self: Box<Self>, arithmetic: &str) -> Result<(), DataError>;
}

impl VectorStore for VectorsFolder {
    fn dir(&self) -> &Path {
        self.dir()
    }
    fn finished_with(&self, number: u64) -> Result<Option<String>, DataError> {
        Ok(self.finished(number)?.map(|entry| entry.arithmetic))
    }
    fn begin(&self, number: u64) -> Result<Box<dyn ShardSink + '_>, DataError> {
        Ok(Box::new(self.shard(number)?))
    }
    fn complete(&self) -> Result<u64, DataError> {
        self.complete()
    }
}

impl ShardSink for ShardWriter<'_> {
    fn push(&mut self, id: &str, vectors: &[f32]) -> Result<(), DataError> {
        self.push(id, vectors)
    }
    fn finish(self: Box<Self>, arithmetic: &str) -> Result<(), DataError> {
        ShardWriter::finish(*self, arithmetic).map(drop)
    }
}

impl VectorStore for MultiVectorsFolder {
    fn dir(&self) -> &Path {
        self.dir()
    }
    fn finished_with(&self, number: u64) -> Result<Option<String>, DataError> {
        Ok(self.finished(number)?.map(|entry| entry.arithmetic))
    }
    fn begin(&self, number: u64) -> Result<Box<dyn ShardSink + '_>, DataError> {
        Ok(Box::new(self.shard(number)?))
    }
    fn complete(&self) -> Result<u64, DataError> {
        self.complete()
    }
}

impl ShardSink for MultiShardWriter<'_> {
    fn push(&mut self, id: &str, vectors: &[f32]) -> Result<(), DataError> {
        self.push(id, vectors)
    }
    fn finish(self: Box<Self>, arithmetic: &str) -> Result<(), DataError> {
        MultiShardWriter::finish(*self, arithmetic).map(drop)
    }
}
