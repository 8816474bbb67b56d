//! Indexes, and what they find: passages for the questions of a round, and for the held-out ones at its end.

use std::path::Path;

use serde_json::{Value, json};
use tercio_data::has_answer::{AnswerMatcher, AnswerMode};
use tercio_data::{Passages, Vectors};
use tercio_engine::{Cpu, Device};
use tercio_search::Hit;
use tercio_search::bm25::{Bm25Constants, Bm25Settings};
use tercio_search::flat::Metric;
use tercio_search::fusion::fuse_hits;
use tercio_search::output::{Format, Found, FoundPassage, ResultsFile, found_passages};

use super::{Figures, Outcome, Work, read::measured};
use crate::error::TrainError;
use crate::evaluate::EvaluationFiles;
use crate::find::queries::{Queries, Query};
use crate::find::{DenseSettings, FindSettings, Finder, build_bm25, build_flat, search_among};
use crate::rounds::stage::{Part, Stage, Step};
use crate::scratch::ScratchFolder;

/// Ranks at which hits are counted.
pub const HITS: [usize; 4] = [1, 5, 20, 100];
/// Stands before the names of figures of what vectors found alone, where words had their say too.
pub const ALONE: &str = "vectors_";
/// Memory for the words of a collection while they are sorted; more goes to disk.
const SORTING: u64 = 1 << 30;

impl Work<'_> {
    pub(super) fn index(&self) -> Result<Outcome, TrainError> {
        let (dir, world) = (self.dir(), self.world);
        if world.is_main() {
            // What an earlier start left would make another version of the index, with other names.
            let renew = match std::fs::remove_dir_all(&dir) {
                // Killed between these two.
                Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(()),
                other => other,
            }
            .and_then(|()| std::fs::create_dir(&dir));
            renew.map_err(|source| TrainError::Write { path: dir.display().to_string(), source })?;
            let passages = Passages::open(&self.settings.all.passages, &self.cache())?;
            let stop = || self.stop();
            let made = match self.stage.part {
                Part::Bm25 => {
                    let o = &self.settings.search;
                    let constants = Bm25Constants { k1: o.k1, b: o.b };
                    let settings = Bm25Settings { constants, ..Bm25Settings::default() };
                    build_bm25(&dir, &passages, &settings, SORTING, &stop, &mut |_, _| {}).map(drop)
                }
                _ => {
                    let vectors = Vectors::open(&self.folder(self.stage.sibling(Step::Vectors)))?;
                    build_flat(&dir, &vectors, &passages, Metric::Inner, &stop).map(drop)
                }
            };
            match made {
                Err(TrainError::Stopped) => {}
                other => drop(other?),
            }
        }
        let stopped = world.broadcast_bytes(0, vec![u8::from(self.stop())])?;
        if stopped == [1] {
            return Ok(Outcome::Stopped);
        }
        let mut figures = Figures::new();
        let mut results = Vec::new();
        if world.is_main() {
            let read = |source| TrainError::Read { path: dir.display().to_string(), source };
            let mut bytes = 0;
            for entry in std::fs::read_dir(&dir).map_err(read)? {
                let entry = entry.map_err(read)?;
                // Locks are no part of it.
                if entry.file_name().to_string_lossy().starts_with('.') {
                    continue;
                }
                bytes += entry.metadata().map_err(read)?.len();
                results.push(entry.path());
            }
            results.sort();
            figures.insert("bytes".into(), bytes.into());
        }
        Ok(Outcome::Finished(results, figures))
    }

    /// Passages for the training questions (as many as are read) and for the held-out ones.
    pub(super) fn search(&self) -> Result<Outcome, TrainError> {
        let (all, search) = (&self.settings.all, &self.settings.search);
        let needed = self.settings.scored().max(self.settings.reader.model.n_context);
        let device = self.device(self.settings.retriever.compute.get())?;
        let sources = self.sources(&device)?;
        let limit = usize::try_from(all.maxload).unwrap_or(usize::MAX);
        let train = self.dir().join("train.jsonl");
        if self.find(&device, &sources, &all.train_data, limit, needed, &train)?.is_none() {
            return Ok(Outcome::Stopped);
        }
        let dev = self.dir().join("dev.jsonl");
        match self.find(&device, &sources, &all.eval_data, usize::MAX, search.n_docs, &dev)? {
            Some(figures) => Ok(Outcome::Finished(vec![dev, train], figures)),
            None => Ok(Outcome::Stopped),
        }
    }

    /// What the stage's own retriever finds for the held-out questions, and what the round's reader makes of it.
    pub(super) fn measure(&self) -> Result<Outcome, TrainError> {
        let (dev, dir) = (self.dir().join("dev.jsonl"), self.dir());
        let device = self.device(self.settings.retriever.compute.get())?;
        let sources = self.sources(&device)?;
        let n_docs = self.settings.search.n_docs;
        let Some(mut figures) =
            self.find(&device, &sources, &self.settings.all.eval_data, usize::MAX, n_docs, &dev)?
        else {
            return Ok(Outcome::Stopped);
        };
        drop(sources);
        let predictions = dir.join("predictions.jsonl");
        let files = EvaluationFiles { predictions: Some(predictions.clone()), ..EvaluationFiles::default() };
        let Some(report) = self.read(&dev, &files, self.settings.answered())? else {
            return Ok(Outcome::Stopped);
        };
        figures.extend(measured(&report));
        Ok(Outcome::Finished(vec![dev, predictions], figures))
    }

    /// The indexes that the stage asks.
    fn sources(&self, device: &Cpu) -> Result<Vec<Finder>, TrainError> {
        let open = |stage: Stage| self.open(device, stage);
        let before = Stage::of(self.stage.round().saturating_sub(1), Step::Index);
        let first = match (self.stage.step, self.stage.round()) {
            (Step::Measure, _) => open(self.stage.sibling(Step::Index))?,
            (_, 1) => return Ok(vec![open(Stage::BM25)?]),
            _ => open(before)?,
        };
        Ok(match self.settings.search.hybrid {
            true => vec![first, open(Stage::BM25)?],
            false => vec![first],
        })
    }

    /// The index of a stage, with the retriever of its part where it is one of vectors.
    fn open(&self, device: &Cpu, stage: Stage) -> Result<Finder, TrainError> {
        let retriever = self.folder(stage.sibling(Step::Retriever)).to_string_lossy().into_owned();
        let model = (stage != Stage::BM25).then_some(retriever);
        let settings = FindSettings {
            passages: Some(self.settings.all.passages.clone()),
            cache_dir: self.world.is_main().then(|| self.cache()),
            dense: DenseSettings { model, ..DenseSettings::default() },
            ..FindSettings::default()
        };
        Finder::open_on(device, &self.folder(stage), &settings)
    }

    /// Asks the questions of a file by all ranks, writes them with what was found, and counts hits: questions that have an answer in the
    /// text of one of the first passages, among those that have answers. `None` where a signal came.
    fn find(
        &self,
        device: &Cpu,
        sources: &[Finder],
        data: &Path,
        limit: usize,
        depth: usize,
        out: &Path,
    ) -> Result<Option<Figures>, TrainError> {
        let world = self.world;
        let scratch = ScratchFolder::new()?;
        let cache = self.cache();
        let cache: &Path = if world.is_main() { &cache } else { scratch.path() };
        let mut queries = Queries::open(data, cache)?;
        if queries.len() > limit {
            queries = Queries::List((0..limit).map(|i| queries.get(i)).collect::<Result<_, _>>()?);
        }
        // What is put together comes from lists of one length, however many passages are kept: those that a model learns on are found as
        // those that it is measured on.
        let asked = if sources.len() > 1 { self.settings.search.n_docs } else { depth };
        let (stop, mut lists) = (|| self.stop(), Vec::new());
        for source in sources {
            let mut list: Vec<Vec<Hit>> = Vec::new();
            let mut keep = |_: usize, hits: Vec<Hit>| -> Result<(), TrainError> {
                list.push(hits);
                Ok(())
            };
            match device.run(|| search_among(world, source, &queries, asked, &stop, &mut keep)) {
                Err(TrainError::Stopped) => return Ok(None),
                other => other?,
            }
            lists.push(list);
        }
        let mut figures = Figures::new();
        if world.is_main() {
            let collection = sources[0].passages();
            let o = &self.settings.search;
            // In the order of the sources: vectors, words.
            let (method, weights) = (o.hybrid_method.get(), [1.0, o.words_weight]);
            let (mut all, mut first) = (Tally::new(depth), Tally::new(depth));
            let mut file = ResultsFile::create(out, Format::Jsonl)?;
            for i in 0..queries.len() {
                let query = queries.get(i)?;
                let matcher = matcher(&query)?;
                let mut hits = lists[0][i].clone();
                if lists.len() > 1 {
                    hits.truncate(depth);
                    let found = found_passages(collection, &hits, matcher.as_ref())?;
                    first.add(matcher.is_some(), &found);
                    let each: Vec<&[Hit]> = lists.iter().map(|list| &list[i][..]).collect();
                    hits = fuse_hits(&each, &weights, &method, depth)?;
                }
                let passages = found_passages(collection, &hits, matcher.as_ref())?;
                all.add(matcher.is_some(), &passages);
                file.push(&Format::Jsonl.render(&Found { question: query.item, passages }, "")?)?;
            }
            file.finish()?;
            if all.fewer > 0 {
                let (n, of) = (all.fewer, queries.len());
                self.say(format_args!("{n} of {of} questions got fewer than {depth} passages"));
            }
            figures = all.figures("");
            if lists.len() > 1 {
                figures.extend(first.figures(ALONE));
            }
        }
        // Nobody reads it before it is there.
        world.barrier()?;
        Ok(Some(figures))
    }
}

/// What finds the answers of a question, where it has any.
fn matcher(query: &Query) -> Result<Option<AnswerMatcher>, TrainError> {
    let list = query.item.get("answers").and_then(Value::as_array);
    let answers: Vec<&str> = list.into_iter().flatten().filter_map(Value::as_str).collect();
    match answers.is_empty() {
        true => Ok(None),
        false => Ok(Some(AnswerMatcher::new(&answers, AnswerMode::Words)?)),
    }
}

/// Hits, as they are counted.
struct Tally {
    depth: usize,
    with_answers: u64,
    hits: [u64; HITS.len()],
    fewer: u64,
}

impl Tally {
    fn new(depth: usize) -> Tally {
        Tally { depth, with_answers: 0, hits: [0; HITS.len()], fewer: 0 }
    }

    /// A question, which has answers or not, and its passages, best first.
    fn add(&mut self, has_answers: bool, passages: &[FoundPassage]) {
        self.fewer += u64::from(passages.len() < self.depth);
        if !has_answers {
            return;
        }
        self.with_answers += 1;
        let first = passages.iter().position(|p| p.has_answer == Some(true));
        for (k, hits) in HITS.iter().zip(&mut self.hits) {
            *hits += u64::from(first.is_some_and(|at| at < *k));
        }
    }

    /// Figures, with `before` before their names.
    fn figures(&self, before: &str) -> Figures {
        let mut figures = Figures::new();
        for (k, hits) in HITS.iter().zip(self.hits).filter(|(k, _)| **k <= self.depth) {
            let share = (self.with_answers > 0).then(|| hits as f64 / self.with_answers as f64);
            figures.insert(format!("{before}hits@{k}"), json!(share));
        }
        figures.insert(format!("{before}fewer_passages"), self.fewer.into());
        figures
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hits_are_counted_among_questions_with_answers() {
        let passages = |first: Option<usize>, count: usize| -> Vec<FoundPassage> {
            let of = |i| FoundPassage {
                id: format!("{i}"),
                title: String::new(),
                text: String::new(),
                score: 0.0,
                has_answer: Some(Some(i) == first),
            };
            (0..count).map(of).collect()
        };
        let mut tally = Tally::new(20);
        for first in [Some(0), Some(4), Some(5), None] {
            tally.add(true, &passages(first, 20));
        }
        tally.add(false, &passages(None, 20));
        tally.add(true, &passages(Some(0), 3));
        let figures = Value::Object(tally.figures("x_"));
        assert_eq!(
            figures,
            json!({"x_hits@1": 0.4, "x_hits@5": 0.6, "x_hits@20": 0.8, "x_fewer_passages": 1})
        );
        let none = Value::Object(Tally::new(1).figures(""));
        assert_eq!(none, json!({"hits@1": null, "fewer_passages": 0}));
    }
}
