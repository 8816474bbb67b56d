//! The reader at work: scores of the passages, examples for the retriever made of them, and the answers to held-out questions.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tercio_data::replace::ReplacedFile;
use tercio_data::{Questions, ReaderEncoding};
use tercio_engine::Device;
use tercio_models::t5::Decoding;

use super::{Figures, Outcome, Work};
use crate::error::TrainError;
use crate::evaluate::{EvaluationFiles, EvaluationReport, evaluate_among};
use crate::predict::Predictor;
use crate::ranks::corpus::open_among;
use crate::ranks::setup::open_model_among;
use crate::rounds::stage::{Stage, Step};
use crate::run::write_atomic;
use crate::setup::encoding;

impl Work<'_> {
    /// Scores the passages of the training questions and of the held-out ones. Where more or fewer passages are scored than the reader
    /// is to answer from, the held-out questions are read once more: a reader is measured as in its own evaluation.
    pub(super) fn scores(&self) -> Result<Outcome, TrainError> {
        let (search, dir) = (self.folder(self.stage.sibling(Step::Search)), self.dir());
        let mut figures = Figures::new();
        let mut results = Vec::new();
        for name in ["train", "dev"] {
            let (out, noted) = (dir.join(format!("{name}.jsonl")), dir.join(format!("{name}-figures.json")));
            // A start that was ended later on may have finished this one; the note comes last.
            let all = self.world.all_gather_bytes(vec![u8::from(noted.is_file())])?;
            if all[0] == [0] {
                let with_scores = dir.join(format!("{name}-scored.json"));
                let files =
                    EvaluationFiles { wscores: Some(with_scores.clone()), ..EvaluationFiles::default() };
                let (questions, scored) = (search.join(format!("{name}.jsonl")), self.settings.scored());
                let Some(mut report) = self.read(&questions, &files, scored)? else {
                    return Ok(Outcome::Stopped);
                };
                let answered = self.settings.answered();
                if name == "dev" && answered != scored {
                    let files = EvaluationFiles::default();
                    let Some(own) = self.read(&questions, &files, answered)? else {
                        return Ok(Outcome::Stopped);
                    };
                    report = own;
                }
                if self.world.is_main() {
                    let contrasts = self.settings.retriever.model.contrasts();
                    let kept = examples_of(&with_scores, &out, &self.cache(), contrasts)?;
                    let mut own = measured(&report);
                    own.insert("examples".into(), kept.into());
                    write_atomic(&noted, Value::Object(own).to_string().as_bytes())?;
                    let remove =
                        |source| TrainError::Write { path: with_scores.display().to_string(), source };
                    std::fs::remove_file(&with_scores).map_err(remove)?;
                }
                self.world.barrier()?;
            }
            if self.world.is_main() {
                let read = |source| TrainError::Read { path: noted.display().to_string(), source };
                let own: Map<String, Value> =
                    serde_json::from_slice(&std::fs::read(&noted).map_err(read)?).unwrap_or_default();
                figures.extend(own.into_iter().map(|(key, value)| (format!("{name}_{key}"), value)));
                results.push(out);
            }
        }
        Ok(Outcome::Finished(results, figures))
    }

    /// The reader of the stage's round on the questions of a file with `n_context` passages each; `None` where a signal came.
    pub(super) fn read(
        &self,
        questions: &Path,
        files: &EvaluationFiles,
        n_context: usize,
    ) -> Result<Option<EvaluationReport>, TrainError> {
        let options = &self.settings.reader;
        let device = self.device(options.compute.get())?;
        let model = self.folder(Stage::of(self.stage.round(), Step::Reader));
        let open = || open_model_among(self.world, &model.to_string_lossy(), None, &device);
        let (loaded, tokenizer) = device.run(open)?;
        let questions: Questions =
            open_among(self.world, questions, self.own_cache().as_deref(), self.link.broadcast_data)?;
        let predictor = Predictor {
            device: &device,
            model: &loaded.model,
            parameters: &loaded.parameters,
            tokenizer: &tokenizer,
            encoding: ReaderEncoding { n_context, ..encoding(&options.model) },
            decoding: Decoding::greedy(options.model.generation_max_length),
            batch: self.settings.scores.per_gpu_batch_size,
            scores: files.wscores.is_some(),
            print_freq: options.data.eval_print_freq,
        };
        let stop = || self.stop();
        let read =
            device.run(|| evaluate_among(self.world, &predictor, &questions, usize::MAX, files, &stop));
        let report = match read {
            Err(TrainError::Stopped) => None,
            other => Some(other?),
        };
        // Nobody is done before rank 0 has written everything.
        self.world.barrier()?;
        Ok(report)
    }

    /// Rank 0's folder for the indices of data files.
    fn own_cache(&self) -> Option<PathBuf> {
        self.world.is_main().then(|| self.cache())
    }
}

/// The figures of an evaluation.
pub(super) fn measured(report: &EvaluationReport) -> Figures {
    let figures = json!({"questions": report.questions, "exact_match": report.exact_match, "f1": report.f1});
    figures.as_object().cloned().unwrap_or_default()
}

/// Makes examples for a retriever of a reader's scores: each question with the passages that have one. Questions with fewer than two
/// teach nothing and are left out; where `contrasts`, also those of whose passages none holds an answer. Gives their number.
///
/// # Errors
/// Files that cannot be read or written; no example at all.
fn examples_of(scored: &Path, out: &Path, cache: &Path, contrasts: bool) -> Result<u64, TrainError> {
    let questions = Questions::open(scored, cache)?;
    let mut file = ReplacedFile::create(out)?;
    let mut kept = 0;
    for i in 0..questions.len() {
        let mut item = questions.get_raw(i)?;
        let Some(Value::Array(passages)) = item.get_mut("ctxs") else { continue };
        passages.retain(|passage| passage.get("score").is_some_and(Value::is_number));
        let holds = |passage: &Value| passage.get("hasanswer") == Some(&Value::Bool(true));
        if passages.len() < 2 || contrasts && !passages.iter().any(holds) {
            continue;
        }
        file.write((Value::Object(item).to_string() + "\n").as_bytes())?;
        kept += 1;
    }
    if kept == 0 {
        return Err(TrainError::Unusable(format!(
            "{}: none of {} questions has two passages with scores{}; give more n_docs, or other questions",
            scored.display(),
            questions.len(),
            if contrasts { " of which one holds an answer" } else { "" }
        )));
    }
    file.finish()?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn examples_are_what_teaches() {
        let dir = tempfile::tempdir().unwrap();
        let (scored, out) = (dir.path().join("s.json"), dir.path().join("o.jsonl"));
        let passage = |id: &str, score: Option<f64>, holds: bool| {
            let mut passage = json!({"id": id, "title": "t", "text": "x", "hasanswer": holds});
            if let Some(score) = score {
                passage["score"] = score.into();
            }
            passage
        };
        let question = |q: &str, ctxs: Vec<Value>| json!({"question": q, "answers": ["a"], "ctxs": ctxs});
        let all = json!([
            question(
                "both",
                vec![passage("1", Some(1.0), true), passage("2", None, true), passage("3", Some(0.5), false)]
            ),
            question("one", vec![passage("1", Some(1.0), true), passage("2", None, false)]),
            question("no answer", vec![passage("1", Some(1.0), false), passage("2", Some(2.0), false)]),
        ]);
        std::fs::write(&scored, all.to_string()).unwrap();
        let made = |contrasts| {
            let kept = examples_of(&scored, &out, dir.path(), contrasts).unwrap();
            let text = std::fs::read_to_string(&out).unwrap();
            let lines: Vec<Value> = text.lines().map(|l| serde_json::from_str(l).unwrap()).collect();
            assert_eq!(lines.len() as u64, kept);
            lines
                .iter()
                .map(|l| (l["question"].as_str().unwrap().to_owned(), l["ctxs"].as_array().unwrap().len()))
                .collect::<Vec<_>>()
        };
        assert_eq!(made(false), [("both".into(), 2), ("no answer".into(), 2)]);
        assert_eq!(made(true), [("both".into(), 2)]);
        std::fs::write(&scored, json!([question("x", vec![])]).to_string()).unwrap();
        let error = examples_of(&scored, &out, dir.path(), false).unwrap_err().to_string();
        assert!(
            error.contains("none of 1 questions has two passages with scores; give more n_docs"),
            "{error}"
        );
    }
}
