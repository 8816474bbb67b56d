//! Vectors of whole collections: passages (or questions) through an encoder, by all ranks, into a folder that grows shard
//! by shard.
//!
//! A shard is cut into windows of texts ([`TextEncoder::window`]); ranks take the windows in turn and rank 0 writes them in order. Within
//! a window texts go by length into batches. So batches are a function of the shard alone, and memory is a window's, whatever
//! the size of the collection.

use std::time::Instant;

use rayon::prelude::*;
use serde::Serialize;
use tercio_comm::World;
use tercio_data::Tokenizer;
use tercio_data::vectors::VectorSettings;
use tercio_engine::{Device, Span, Tape};
use tercio_models::embedding_model::EmbeddingModel;

use crate::error::TrainError;
use crate::ranks::setup::from_rank_0;

mod fingerprint;
mod import;
mod model;
mod store;
mod texts;

pub use fingerprint::model_fingerprint;
pub use import::import_pickles;
pub use model::{Embedder, stored_template};
pub use store::{ShardSink, VectorStore};
pub use texts::{TextSource, Texts};

/// Texts of a window where nobody says otherwise.
pub const WINDOW: usize = 1024;

/// A model with what it takes to give it texts.
pub struct TextEncoder<'a, D: Device> {
    /// The device.
    pub device: &'a D,
    /// The model.
    pub model: &'a EmbeddingModel<D>,
    /// The tokenizer.
    pub tokenizer: &'a Tokenizer,
    /// Most tokens of a text, special ones included.
    pub maxlength: usize,
    /// Fill every text up with this token to `maxlength`, for models that were trained without a mask.
    pub padding: Option<u32>,
    /// Most tokens of a batch; a longer text is a batch by itself.
    pub batch_tokens: usize,
    /// Most texts of a batch.
    pub batch_texts: usize,
    /// Texts that are encoded, sorted and cut into batches together, by one rank; at least 1. Part of what the bits of a vector may
    /// depend on.
    pub window: usize,
}

/// Vectors of some texts.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rows {
    /// Rows of numbers, in the order of the texts.
    pub values: Vec<f32>,
    /// How many rows each text has; empty: one each.
    pub lengths: Vec<u32>,
    /// Tokens that were computed.
    pub tokens: u64,
}

impl<D: Device> TextEncoder<'_, D> {
    /// Vectors of `texts`; `None` as soon as `stop` says so, which is asked before every batch. Call it within the device's
    /// pool ([`Device::run`]).
    ///
    /// # Errors
    /// A text that cannot be tokenized or gives no tokens, by its number.
    pub fn rows(&self, texts: &[String], stop: &dyn Fn() -> bool) -> Result<Option<Rows>, TrainError> {
        let mut ids: Vec<Vec<u32>> = texts
            .par_iter()
            .map(|text| match self.model.lower_case() {
                true => self.tokenizer.encode_framed(&text.to_lowercase(), self.maxlength),
                false => self.tokenizer.encode_framed(text, self.maxlength),
            })
            .collect::<Result<_, _>>()?;
        if let Some(pad) = self.padding {
            ids.iter_mut().for_each(|ids| ids.resize(self.maxlength, pad));
        }
        if let Some(empty) = ids.iter().position(Vec::is_empty) {
            return Err(TrainError::Unusable(format!(
                "the text {:?} gives no tokens; use a tokenizer that knows its words",
                texts[empty].chars().take(60).collect::<String>()
            )));
        }
        let dimension = self.model.dimension();
        let mut rows = Rows { values: vec![0.0; texts.len() * dimension], ..Rows::default() };
        for batch in batches(&ids, self.batch_tokens, self.batch_texts) {
            if stop() {
                return Ok(None);
            }
            let packed: Vec<u32> = batch.iter().flat_map(|&i| ids[i].iter().copied()).collect();
            let mut spans = Vec::with_capacity(batch.len());
            let mut end = 0;
            for &i in &batch {
                spans.push(Span { start: end, end: end + ids[i].len() as u32 });
                end += ids[i].len() as u32;
            }
            let mut tape = Tape::inference(self.device, self.model.parameters());
            let vectors = self.model.embed(&mut tape, &packed, &spans, false).tensor.to_vec(self.device);
            for (&i, row) in batch.iter().zip(vectors.chunks_exact(dimension)) {
                rows.values[i * dimension..(i + 1) * dimension].copy_from_slice(row);
            }
            rows.tokens += packed.len() as u64;
        }
        Ok(Some(rows))
    }
}

/// What gives texts their vectors: one each, or one for every token.
pub trait EncodeTexts: Sync {
    /// Vectors of `texts`; `None` as soon as `stop` says so.
    ///
    /// # Errors
    /// A text that cannot be encoded.
    fn encode(&self, texts: &[String], stop: &dyn Fn() -> bool) -> Result<Option<Rows>, TrainError>;
    /// Numbers of a vector.
    fn dimension(&self) -> usize;
    /// Texts that are encoded together, by one rank; at least 1.
    fn window(&self) -> usize;
    /// The arithmetic of the device.
    fn arithmetic(&self) -> String;
    /// Gives back memory that the device keeps for reuse.
    fn trim(&self);
}

impl<D: Device> EncodeTexts for TextEncoder<'_, D> {
    fn encode(&self, texts: &[String], stop: &dyn Fn() -> bool) -> Result<Option<Rows>, TrainError> {
        self.rows(texts, stop)
    }
    fn dimension(&self) -> usize {
        self.model.dimension()
    }
    fn window(&self) -> usize {
        self.window.max(1)
    }
    fn arithmetic(&self) -> String {
        self.device.arithmetic()
    }
    fn trim(&self) {
        self.device.trim();
    }
}

/// Texts by length, longest first, cut into batches: a function of the lengths alone.
pub(crate) fn batches<T: AsRef<[u32]>>(ids: &[T], most_tokens: usize, most_texts: usize) -> Vec<Vec<usize>> {
    let len = |i: usize| ids[i].as_ref().len();
    let mut order: Vec<usize> = (0..ids.len()).collect();
    order.sort_by_key(|&i| std::cmp::Reverse(len(i))); // stable: equal lengths stay in order
    let mut batches: Vec<Vec<usize>> = Vec::new();
    let mut tokens = 0;
    for i in order {
        match batches.last_mut() {
            Some(batch) if tokens + len(i) <= most_tokens && batch.len() < most_texts => batch.push(i),
            _ => {
                batches.push(vec![i]);
                tokens = 0;
            }
        }
        tokens += len(i);
    }
    batches
}

/// How far the work is.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct EmbedProgress {
    /// Texts that this call has embedded so far.
    pub done: u64,
    /// Texts that this call has to embed.
    pub total: u64,
    /// Shards of this part of the work that are finished now, those of earlier calls included.
    pub shards: u64,
    /// Whether a shard was finished just now.
    pub shard_finished: bool,
}

/// What a call of [`embed_among`] did.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EmbedReport {
    /// The folder.
    pub output: String,
    /// Numbers of a vector.
    pub dimension: usize,
    /// Shards of the whole set.
    pub shards: u64,
    /// Shards of the whole set that are finished.
    pub finished: u64,
    /// Shards that were finished before.
    pub found: u64,
    /// Texts of the shards that were finished now.
    pub texts: u64,
    /// Their tokens.
    pub tokens: u64,
    /// Those of them that each rank computed; empty for imported vectors.
    pub rank_tokens: Vec<u64>,
    /// Seconds that this took.
    pub seconds: f64,
    /// Texts a second.
    pub texts_per_second: f64,
    /// Tokens a second.
    pub tokens_per_second: f64,
    /// Whether the set is complete: there is a manifest.
    pub complete: bool,
    /// Whether a signal ended the work; another call goes on.
    pub stopped: bool,
}

/// Embeds those of `shards` that are not finished, by all ranks. `folder` is rank 0's; the others have none and write
/// nothing. On rank 0 `progress` is told at the start and after every round of windows. `stop` is asked before every batch; once it is true on
/// any rank all end, and the shard at work is left out.
///
/// # Errors
/// A text that cannot be read or embedded; a vector that is no number, by its id; files that cannot be written; a rank was lost.
pub fn embed_among(
    world: &World,
    encoder: &dyn EncodeTexts,
    source: &dyn TextSource,
    settings: &VectorSettings,
    folder: Option<&dyn VectorStore>,
    shards: std::ops::Range<u64>,
    stop: &dyn Fn() -> bool,
    progress: &mut dyn FnMut(EmbedProgress),
) -> Result<EmbedReport, TrainError> {
    let since = Instant::now();
    let arithmetic = encoder.arithmetic();
    let mut pending = Vec::new();
    if let Some(folder) = folder {
        let mut others = None;
        for number in shards.clone() {
            match folder.finished_with(number)? {
                None => pending.push(number),
                Some(other) if other != arithmetic => others = others.or(Some((number, other))),
                Some(_) => {}
            }
        }
        if let Some((number, other)) = others.filter(|_| !pending.is_empty()) {
            tracing::warn!(
                "{}: shard {number} was computed with {other}, those to come will be with {arithmetic}: last digits may differ \
                 between them; for the same bits everywhere go on on such a machine, or embed into another folder",
                folder.dir().display(),
            );
        }
    }
    let pending = world.broadcast_bytes(0, serde_json::to_vec(&pending).expect("plain JSON"))?;
    let pending: Vec<u64> = from_rank_0(&pending)?;
    let found = (shards.end - shards.start).saturating_sub(pending.len() as u64);
    let total = pending.iter().map(|&n| settings.rows_of(n)).map(|rows| rows.end - rows.start).sum();
    let mut at = EmbedProgress { done: 0, total, shards: found, shard_finished: false };
    let mut work = Work { world, encoder, source, tokens: vec![0; world.size()] };
    let (mut stopped, mut texts, mut tokens) = (false, 0, work.tokens.clone());
    let window = encoder.window();
    // So that whoever measures knows when the work began.
    if world.is_main() {
        progress(at);
    }
    for number in pending {
        let rows = settings.rows_of(number);
        let mut shard = folder.map(|f| f.begin(number)).transpose()?;
        let windows: Vec<_> = (rows.start..rows.end)
            .step_by(window)
            .map(|start| start as usize..(start + window as u64).min(rows.end) as usize)
            .collect();
        for round in windows.chunks(world.size()) {
            let Some((ids, rows)) = work.round(round, stop)? else {
                stopped = true;
                break;
            };
            if let Some(shard) = &mut shard {
                let (mut rest, dimension) = (rows.values.as_slice(), encoder.dimension());
                for (i, id) in ids.iter().enumerate() {
                    let length = rows.lengths.get(i).map_or(1, |&n| n as usize);
                    let (own, tail) = rest.split_at(length * dimension);
                    shard.push(id, own)?;
                    rest = tail;
                }
            }
            at.done += round.iter().map(|w| w.len() as u64).sum::<u64>();
            if world.is_main() {
                progress(at);
            }
        }
        if stopped {
            break;
        }
        if let Some(shard) = shard {
            shard.finish(&arithmetic)?;
        }
        at.shards += 1;
        // Of a shard that is not finished nothing stays.
        (texts, tokens) = (at.done, work.tokens.clone());
        if world.is_main() {
            progress(EmbedProgress { shard_finished: true, ..at });
        }
    }
    let finished = folder.map(|f| f.complete()).transpose()?.unwrap_or(0);
    // Nobody is done before rank 0 has written everything.
    world.barrier()?;
    let seconds = since.elapsed().as_secs_f64();
    Ok(EmbedReport {
        output: folder.map(|f| f.dir().display().to_string()).unwrap_or_default(),
        dimension: settings.dimension,
        shards: settings.shards(),
        finished,
        found,
        texts,
        tokens: tokens.iter().sum(),
        seconds,
        texts_per_second: texts as f64 / seconds.max(1e-9),
        tokens_per_second: tokens.iter().sum::<u64>() as f64 / seconds.max(1e-9),
        rank_tokens: tokens,
        complete: finished == settings.shards(),
        stopped,
    })
}

/// The ranks at work.
struct Work<'a> {
    world: &'a World,
    encoder: &'a dyn EncodeTexts,
    source: &'a dyn TextSource,
    /// Tokens of each rank, on rank 0.
    tokens: Vec<u64>,
}

impl Work<'_> {
    /// One window for each rank. On rank 0 all ids and rows, in order; empty elsewhere; `None` when a rank was told to stop.
    fn round(
        &mut self,
        windows: &[std::ops::Range<usize>],
        stop: &dyn Fn() -> bool,
    ) -> Result<Option<(Vec<String>, Rows)>, TrainError> {
        let world = self.world;
        let rows = match windows.get(world.rank()) {
            None => Some(Rows::default()),
            Some(window) => {
                let texts: Vec<String> = window
                    .clone()
                    .into_par_iter()
                    .map(|i| self.source.text(i).map(|(_, text)| text))
                    .collect::<Result<_, _>>()?;
                let rows = self.encoder.encode(&texts, stop)?;
                self.encoder.trim();
                rows
            }
        };
        if world.all_gather_bytes(vec![u8::from(rows.is_none())])?.concat().contains(&1) {
            return Ok(None);
        }
        let rows = rows.expect("no rank was told to stop");
        if world.size() == 1 {
            self.tokens[0] += rows.tokens;
            return Ok(Some((self.ids(windows)?, rows)));
        }
        let mut bytes = rows.tokens.to_le_bytes().to_vec();
        bytes.extend((rows.lengths.len() as u64).to_le_bytes());
        bytes.extend(rows.lengths.iter().flat_map(|n| n.to_le_bytes()));
        bytes.extend(rows.values.iter().flat_map(|v| v.to_le_bytes()));
        let all = world.gather_bytes(bytes)?;
        if !world.is_main() {
            return Ok(Some((Vec::new(), Rows::default())));
        }
        let mut joined = Rows::default();
        for (rank, bytes) in all.iter().enumerate() {
            let texts = windows.get(rank).map_or(0, std::ops::Range::len);
            let own = received(bytes, texts, self.encoder.dimension()).ok_or_else(|| {
                TrainError::Unusable(format!(
                    "rank {rank} sent {} bytes that are no vectors of {texts} texts: give all ranks the same texts and model",
                    bytes.len()
                ))
            })?;
            self.tokens[rank] += own.tokens;
            joined.lengths.extend(own.lengths);
            joined.values.extend(own.values);
        }
        Ok(Some((self.ids(windows)?, joined)))
    }

    fn ids(&self, windows: &[std::ops::Range<usize>]) -> Result<Vec<String>, TrainError> {
        let ids: Result<Vec<_>, _> = windows
            .iter()
            .flat_map(Clone::clone)
            .collect::<Vec<_>>()
            .into_par_iter()
            .map(|i| self.source.text(i).map(|(id, _)| id))
            .collect();
        Ok(ids?)
    }
}

/// What a rank has sent of `texts` texts; `None` where it is something else.
fn received(bytes: &[u8], texts: usize, dimension: usize) -> Option<Rows> {
    let (tokens, rest) = bytes.split_first_chunk::<8>()?;
    let (count, rest) = rest.split_first_chunk::<8>()?;
    let count = usize::try_from(u64::from_le_bytes(*count)).ok().filter(|&n| n == 0 || n == texts)?;
    let (lengths, rest) = rest.split_at_checked(count.checked_mul(4)?)?;
    let lengths: Vec<u32> = lengths.as_chunks::<4>().0.iter().map(|b| u32::from_le_bytes(*b)).collect();
    let rows = if count == 0 { texts } else { lengths.iter().map(|&n| n as usize).sum() };
    let (values, []) = rest.as_chunks::<4>() else { return None };
    (values.len() == rows.checked_mul(dimension)?).then(|| Rows {
        values: values.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        lengths,
        tokens: u64::from_le_bytes(*tokens),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn batches_are_full_and_hold_every_text_once() {
        let ids: Vec<Vec<u32>> = [3, 9, 1, 3, 20, 2, 3].iter().map(|&n| vec![7; n]).collect();
        let cut = batches(&ids, 9, 3);
        assert_eq!(cut, [vec![4], vec![1], vec![0, 3, 6], vec![5, 2]]);
        assert_eq!(batches(&ids, 1000, 2), [vec![4, 1], vec![0, 3], vec![6, 5], vec![2]]);
        assert!(batches::<Vec<u32>>(&[], 1, 1).is_empty());
    }
}
