//! Evaluation of a reader on a file: exact match and F1, and the files that come of it, all in the order of the input.
//!
//! Nothing but the counts is kept in memory; files are written as answers come and get their names at the end.

use std::path::{Path, PathBuf};

use serde::Serialize;
use serde_json::{Map, Value, json};
use tercio_comm::World;
use tercio_data::answers::F1Rule;
use tercio_data::{AnswerTally, Question, Questions, exact_match, f1};
use tercio_engine::Device;

use crate::error::TrainError;
use crate::predict::{Likelihood, Prediction, Predictor};
use crate::replace::{JsonList, ReplacedFile, refuse_source};

/// Files to write.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EvaluationFiles {
    /// Predictions, one JSON object a line.
    pub predictions: Option<PathBuf>,
    /// FiD's `final_output.txt`: `id TAB answer` a line.
    pub final_output: Option<PathBuf>,
    /// FiD's `dataset_wscores.json`: the questions with the reader's passage scores; the predictor must score.
    pub wscores: Option<PathBuf>,
}

/// What an evaluation found.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct EvaluationReport {
    /// Questions answered.
    pub questions: u64,
    /// Questions with answers to compare with.
    pub counted: u64,
    /// Questions without.
    pub without_answers: u64,
    /// Share of exact matches in 0..=1, `None` where no question has answers.
    pub exact_match: Option<f64>,
    /// Mean token F1 in 0..=1, `None` where no question has answers.
    pub f1: Option<f64>,
    /// Files that were written.
    pub files: Vec<PathBuf>,
}

/// As [`evaluate_among`], by one rank.
///
/// # Errors
/// Likewise.
pub fn evaluate<D: Device>(
    predictor: &Predictor<'_, D>,
    questions: &Questions,
    limit: usize,
    files: &EvaluationFiles,
    stop: &dyn Fn() -> bool,
) -> Result<EvaluationReport, TrainError> {
    evaluate_among(&World::alone(), predictor, questions, limit, files, stop)
}

/// Answers the first `limit` questions by all ranks, and measures. `stop` is asked before every batch; once it is true on
/// any rank the evaluation ends with [`TrainError::Stopped`] and no file appears. Rank 0 writes the files; the report of
/// the others counts nothing.
///
/// # Errors
/// A bad item, files that cannot be written, that are the questions' own or one another, scores that are no numbers.
pub fn evaluate_among<D: Device>(
    world: &World,
    predictor: &Predictor<'_, D>,
    questions: &Questions,
    limit: usize,
    files: &EvaluationFiles,
    stop: &dyn Fn() -> bool,
) -> Result<EvaluationReport, TrainError> {
    let nothing = EvaluationFiles::default();
    let files = if world.is_main() { files } else { &nothing };
    let paths = [&files.predictions, &files.final_output, &files.wscores];
    for path in paths.into_iter().flatten() {
        refuse_source(path, questions.path())?;
    }
    let open = |path: &Option<PathBuf>| path.as_deref().map(ReplacedFile::create).transpose();
    let mut predictions = open(&files.predictions)?;
    let mut final_output = open(&files.final_output)?;
    let mut wscores = files.wscores.as_deref().map(JsonList::create).transpose()?;
    let places = [
        predictions.as_ref().map(ReplacedFile::target),
        final_output.as_ref().map(ReplacedFile::target),
        wscores.as_ref().map(|list| list.target()),
    ];
    let places: Vec<&Path> = places.into_iter().flatten().collect();
    if let Some(twice) = (1..places.len()).find(|&i| places[..i].contains(&places[i])) {
        return Err(TrainError::Unusable(format!(
            "{}: two kinds of results would be written to this file; give --output another name",
            places[twice].display()
        )));
    }
    let mut tally = AnswerTally::default();
    let answered = predictor.each_among(world, questions, limit, stop, |question, prediction| {
        tally.add(&prediction.answer, &question.answers);
        if let Some(file) = &mut predictions {
            let line = prediction_json(question, &prediction)?;
            file.write((line.to_string() + "\n").as_bytes())?;
        }
        if let Some(file) = &mut final_output {
            let line = [question.id_text(), prediction.answer.clone()].map(|t| one_line(&t));
            file.write((line.join("\t") + "\n").as_bytes())?;
        }
        if let Some(file) = &mut wscores {
            let raw = questions.get_raw(question.place.row)?;
            file.push(&with_scores(raw, question, &prediction)?)?;
        }
        Ok(())
    });
    match answered {
        Err(TrainError::Interrupted) => return Err(TrainError::Stopped),
        other => other?,
    }
    let done = [
        predictions.map(ReplacedFile::finish).transpose()?,
        final_output.map(ReplacedFile::finish).transpose()?,
        wscores.map(JsonList::finish).transpose()?,
    ];
    Ok(EvaluationReport {
        questions: tally.counted + tally.without_answers,
        counted: tally.counted,
        without_answers: tally.without_answers,
        exact_match: tally.exact_match(),
        f1: tally.f1(),
        files: done.into_iter().flatten().collect(),
    })
}

/// A line of the predictions: id, question, prediction, what [`likelihood_json`] gives; answers, exact_match and f1 where
/// the question has answers; scores of the passages in the order of the file, null where a passage was not read.
fn prediction_json(question: &Question, prediction: &Prediction) -> Result<Value, TrainError> {
    let mut line = Map::new();
    line.insert("id".into(), question.id.clone());
    line.insert("question".into(), json!(question.question));
    line.insert("prediction".into(), json!(prediction.answer));
    line.append(&mut likelihood_json(question, prediction, "prediction")?);
    let answers = &question.answers;
    if let Some(em) = exact_match(&prediction.answer, answers) {
        line.insert("answers".into(), json!(answers));
        line.insert("exact_match".into(), em.into());
        line.insert("f1".into(), f1(&prediction.answer, answers, F1Rule::Squad1).into());
    }
    if let Some(scores) = scores_in_file_order(question, prediction)? {
        line.insert("scores".into(), json!(scores));
    }
    Ok(line.into())
}

/// How likely an answer is, as fields of JSON: `log_probability`, `mean_log_probability`, of beam search `beam_score`; where
/// several answers were asked for, `alternatives` has the others with the same fields, their text under `name`.
///
/// # Errors
/// A likelihood that is no number.
pub fn likelihood_json(
    question: &Question,
    prediction: &Prediction,
    name: &str,
) -> Result<Map<String, Value>, TrainError> {
    let fields = |l: &Likelihood| {
        if !l.is_finite() {
            return Err(TrainError::Unusable(format!(
                "{}, line {}: the log probability of the answer is {}; the model's weights are damaged or its values overflow",
                question.place.path.display(),
                question.place.line,
                l.log_probability
            )));
        }
        let mut fields = Map::new();
        fields.insert("log_probability".into(), l.log_probability.into());
        fields.insert("mean_log_probability".into(), l.mean_log_probability.into());
        if let Some(score) = l.beam_score {
            fields.insert("beam_score".into(), score.into());
        }
        Ok(fields)
    };
    let mut out = fields(&prediction.likelihood)?;
    let mut alternatives: Vec<Value> = Vec::new();
    for a in &prediction.alternatives {
        let mut alternative = Map::from_iter([(name.to_owned(), json!(a.answer))]);
        alternative.append(&mut fields(&a.likelihood)?);
        alternatives.push(alternative.into());
    }
    if !alternatives.is_empty() {
        out.insert("alternatives".into(), alternatives.into());
    }
    Ok(out)
}

/// The reader's score of every passage of a question, in the order in which the file has them; `None` for those that
/// were not read. `None` altogether where passages were not scored.
///
/// # Errors
/// A score that is no number.
pub fn scores_in_file_order(
    question: &Question,
    prediction: &Prediction,
) -> Result<Option<Vec<Option<f32>>>, TrainError> {
    let Some(scores) = &prediction.scores else {
        return Ok(None);
    };
    let mut placed = vec![None; question.ctxs.len()];
    for (passage, &score) in question.ctxs.iter().zip(scores) {
        if !score.is_finite() {
            return Err(TrainError::Unusable(format!(
                "{}, line {}: the score of passage {} is {score}; the model's weights are damaged or its values overflow",
                question.place.path.display(),
                question.place.line,
                passage.file_position
            )));
        }
        placed[passage.file_position] = Some(score);
    }
    Ok(Some(placed))
}

/// The item with its passages in the order of their old scores and the reader's `score` on those that it read. An old
/// score becomes `retrieval_score` on every passage: two scales under one name would be sorted together. A
/// `retrieval_score` that is there already stays.
fn with_scores(
    mut raw: Map<String, Value>,
    question: &Question,
    prediction: &Prediction,
) -> Result<Map<String, Value>, TrainError> {
    let scores = scores_in_file_order(question, prediction)?.unwrap_or_default();
    if raw.get("id").is_none_or(Value::is_null) {
        raw.insert("id".into(), question.id.clone());
    }
    let Some(Value::Array(stored)) = raw.get_mut("ctxs") else {
        return Ok(raw);
    };
    let mut stored: Vec<Value> = std::mem::take(stored);
    let ctxs = question
        .ctxs
        .iter()
        .map(|passage| {
            let fields = match stored.get_mut(passage.file_position).map(Value::take) {
                Some(Value::Object(fields)) => fields,
                _ => Map::new(), // not reached: the question was read from this very item
            };
            let score = scores.get(passage.file_position).copied().flatten();
            scored_passage(fields, score).into()
        })
        .collect();
    raw.insert("ctxs".into(), Value::Array(ctxs));
    Ok(raw)
}

fn scored_passage(fields: Map<String, Value>, score: Option<f32>) -> Map<String, Value> {
    let mut out = Map::new();
    let kept = fields.get("retrieval_score").is_some_and(|v| !v.is_null());
    for (key, value) in fields {
        if key != "score" {
            out.insert(key, value);
            continue;
        }
        if let Some(score) = score {
            out.insert(key, f64::from(score).into());
        }
        if !value.is_null() && !kept {
            out.insert("retrieval_score".into(), value);
        }
    }
    if let Some(score) = score {
        out.insert("score".into(), f64::from(score).into());
    }
    out
}

/// Text on one line, without the tab that ends a field.
pub fn one_line(text: &str) -> String {
    text.replace(['\n', '\r', '\t'], " ")
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_data::Place;

    fn object(value: Value) -> Map<String, Value> {
        value.as_object().unwrap().clone()
    }

    #[test]
    fn reader_scores_never_mix_with_those_of_retrieval() {
        let raw = object(json!({
            "question": "q", "split": "dev",
            "ctxs": [
                {"id": "low", "text": "a", "score": "1.5", "hasanswer": true},
                {"id": "high", "score": 9, "text": "b"},
                {"id": "middle", "text": "c", "score": 3.0, "retrieval_score": 7.0},
            ],
        }));
        let place = Place::new(Path::new("x.jsonl"), 4, 5);
        let question = Question::from_map(raw.clone(), &place).unwrap();
        let prediction = Prediction {
            answer: "b".into(),
            tokens: vec![],
            likelihood: Likelihood { log_probability: -0.5, mean_log_probability: -0.25, beam_score: None },
            alternatives: vec![],
            scores: Some(vec![0.5, -2.0]),
        };
        let scored = with_scores(raw, &question, &prediction).unwrap();
        assert_eq!(
            Value::from(scored).to_string(),
            json!({
                "question": "q", "split": "dev",
                "ctxs": [
                    {"id": "high", "score": 0.5, "retrieval_score": 9, "text": "b"},
                    {"id": "middle", "text": "c", "score": -2.0, "retrieval_score": 7.0},
                    {"id": "low", "text": "a", "retrieval_score": "1.5", "hasanswer": true},
                ],
                "id": 4,
            })
            .to_string()
        );
        let placed = scores_in_file_order(&question, &prediction).unwrap().unwrap();
        assert_eq!(placed, [None, Some(0.5), Some(-2.0)]);
        let line = prediction_json(&question, &prediction).unwrap();
        assert_eq!((&line["log_probability"], &line["mean_log_probability"]), (&json!(-0.5), &json!(-0.25)));
        assert!(line.get("beam_score").is_none() && line.get("alternatives").is_none(), "{line}");
        let broken = Prediction { scores: Some(vec![f32::NAN]), ..prediction.clone() };
        let error = scores_in_file_order(&question, &broken).unwrap_err().to_string();
        assert!(error.contains("x.jsonl, line 5: the score of passage 1 is NaN"), "{error}");
        let likelihood = Likelihood { log_probability: f64::NAN, ..prediction.likelihood };
        let error = prediction_json(&question, &Prediction { likelihood, ..prediction }).unwrap_err();
        let error = error.to_string();
        assert!(error.contains("x.jsonl, line 5: the log probability of the answer is NaN"), "{error}");
    }

    #[test]
    fn lists_are_written_as_fid_writes_them() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("list.json");
        let mut list = JsonList::create(&path).unwrap();
        list.push(&object(json!({"a": "x\ny", "b": [1]}))).unwrap();
        list.push(&object(json!({}))).unwrap();
        list.finish().unwrap();
        let text = std::fs::read_to_string(&path).unwrap();
        let want = "[\n    {\n        \"a\": \"x\\ny\",\n        \"b\": [\n            1\n        ]\n    },\n    {}\n]\n";
        assert_eq!(text, want);
        JsonList::create(&path).unwrap().finish().unwrap();
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "[]\n");
    }
}
