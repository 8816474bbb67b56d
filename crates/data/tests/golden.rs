//! Comparison with what other libraries computed: tokenizers, reader inputs, answer metrics.
//!
//! Everything comes from the files of the folder that TERCIO_GOLDEN names (default: tests/golden of the workspace).

#[path = "../../../tests/golden_folder.rs"]
mod golden_folder;

use std::fs;
use std::path::{Path, PathBuf};

use golden_folder::golden_folder;
use serde_json::Value;
use tercio_data::answers::{self, F1Rule};
use tercio_data::{AnswerTally, PackedReaderBatch, Place, Question, ReaderEncoding, Tokenizer};

fn json(path: &Path) -> Value {
    serde_json::from_slice(&fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()))).unwrap()
}

fn strings(value: &Value) -> Vec<String> {
    value.as_array().unwrap().iter().map(|v| v.as_str().unwrap().to_string()).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

#[test]
fn golden_exact_match_and_f1() {
    let file = json(&golden_folder().join("eval/em_f1.json"));
    let cases = file["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    let mut tally = AnswerTally::default();
    for case in cases {
        let prediction = case["prediction"].as_str().unwrap();
        let accepted = strings(&case["answers"]);
        assert_eq!(answers::normalize(prediction), case["normalized_prediction"].as_str().unwrap());
        let normalized: Vec<String> = accepted.iter().map(|a| answers::normalize(a)).collect();
        assert_eq!(normalized, strings(&case["normalized_answers"]), "{accepted:?}");
        let pair = format!("{prediction:?} {accepted:?}");
        assert_eq!(answers::exact_match(prediction, &accepted), case["em"].as_bool(), "{pair}");
        assert_eq!(answers::f1(prediction, &accepted, F1Rule::Squad1), case["f1"].as_f64(), "{pair}");
        assert_eq!(answers::f1(prediction, &accepted, F1Rule::Squad2), case["f1_squad2"].as_f64(), "{pair}");
        tally.add(prediction, &accepted);
    }
    assert_eq!(tally.exact_match(), file["mean_em"].as_f64());
    let mean = file["mean_f1"].as_f64().unwrap();
    assert!((tally.f1().unwrap() - mean).abs() < 1e-12, "{:?} {mean}", tally.f1());
}

/// A folder with the spiece.model of another one, and nothing that would be preferred to it.
fn spiece_only(from: &Path) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for name in ["spiece.model", "tokenizer_config.json"] {
        if from.join(name).exists() {
            // written anew: the golden folder may be read-only
            fs::write(dir.path().join(name), fs::read(from.join(name)).unwrap()).unwrap();
        }
    }
    dir
}

/// Summed piece scores of a segmentation, from the tokenizer.json of the same vocabulary.
fn score(vocab: &Value, ids: &[u32]) -> f64 {
    ids.iter().map(|&id| vocab[id as usize][1].as_f64().unwrap()).sum()
}

#[test]
fn golden_t5_tokenizer() {
    let dir = golden_folder().join("tokenizers/t5");
    let fast = Tokenizer::load(&dir).unwrap();
    let only = spiece_only(&dir);
    let slow = Tokenizer::load(only.path()).unwrap();
    assert_eq!(slow.vocab_size(), fast.vocab_size());
    assert_eq!((slow.pad_id(), slow.eos_id(), slow.unk_id()), (fast.pad_id(), fast.eos_id(), fast.unk_id()));
    let vocab = &json(&dir.join("tokenizer.json"))["model"]["vocab"];
    let cases = json(&golden_folder().join("tokenizers/expected.json"));
    let cases = cases["cases"].as_array().unwrap();
    assert!(!cases.is_empty());
    for case in cases {
        let text = case["text"].as_str().unwrap();
        let without_eos = |key: &str| {
            let mut ids = ids(&case[key]);
            assert_eq!(ids.pop(), Some(fast.eos_id()), "the library ends every text with the end token");
            ids
        };
        let got = fast.encode(text).unwrap();
        assert_eq!(got, without_eos("t5_ids"), "{text:?}");
        assert_eq!(fast.decode(&got).unwrap(), case["t5_decoded"].as_str().unwrap(), "{text:?}");

        let expected = without_eos("t5_ids_slow_tokenizer");
        let got = slow.encode(text).unwrap();
        if got != expected {
            // only another segmentation that is exactly as good may stand in for sentencepiece's own
            assert_eq!(got, without_eos("t5_ids"), "{text:?}");
            assert_eq!(slow.decode(&got).unwrap(), slow.decode(&expected).unwrap(), "{text:?}");
            assert!((score(vocab, &got) - score(vocab, &expected)).abs() < 1e-3, "{text:?}");
        }
    }
}

fn reader_cases() -> Vec<PathBuf> {
    let mut cases: Vec<PathBuf> = fs::read_dir(golden_folder()).unwrap().map(|e| e.unwrap().path()).collect();
    cases.retain(|p| p.file_name().unwrap().to_str().unwrap().starts_with("fid_reader"));
    cases.sort();
    assert!(!cases.is_empty(), "no reader cases in {}", golden_folder().display());
    cases
}

#[test]
fn golden_reader_inputs() {
    for case in reader_cases() {
        let only = spiece_only(&case.join("model"));
        let saved = tempfile::tempdir().unwrap();
        Tokenizer::load(only.path()).unwrap().copy_to(saved.path()).unwrap();
        // the folder as it is, from its spiece.model, and from what we save after that
        for dir in [case.join("model"), only.path().to_path_buf(), saved.path().to_path_buf()] {
            let tokenizer = Tokenizer::load(&dir).unwrap();
            check_reader_case(&case, &tokenizer);
        }
    }
}

fn check_reader_case(case: &Path, tokenizer: &Tokenizer) {
    let (input, expected) = (json(&case.join("input.json")), json(&case.join("expected.json")));
    let questions: Vec<Question> = input["questions"]
        .as_array()
        .unwrap()
        .iter()
        .enumerate()
        .map(|(row, q)| {
            let place = Place::new(&case.join("input.json"), row, 1);
            Question::from_map(q.as_object().unwrap().clone(), &place).unwrap()
        })
        .collect();
    let variants = input["encoder_eos"].as_object().unwrap();
    assert!(!variants.is_empty());
    for (variant, passage_eos) in variants {
        let encoding = ReaderEncoding {
            text_maxlength: input["text_maxlength"].as_u64().unwrap() as usize,
            answer_maxlength: input["answer_maxlength"].as_i64().and_then(|n| usize::try_from(n).ok()),
            n_context: input["n_context"].as_u64().unwrap() as usize,
            no_title: false,
            passage_eos: passage_eos.as_bool().unwrap(),
        };
        let expected = &expected[variant];
        let examples: Vec<_> =
            questions.iter().map(|q| encoding.encode_for_training(q, tokenizer, 0, 0).unwrap()).collect();
        for (b, example) in examples.iter().enumerate() {
            let at = format!("{} {variant} question {b}", case.display());
            let rows = expected["passage_ids"][b].as_array().unwrap();
            let masks = expected["passage_mask"][b].as_array().unwrap();
            let passages: Vec<Vec<u32>> = rows
                .iter()
                .zip(masks)
                .map(|(row, mask)| {
                    ids(row).into_iter().zip(ids(mask)).filter(|(_, m)| *m == 1).map(|(id, _)| id).collect()
                })
                .filter(|row: &Vec<u32>| !row.is_empty())
                .collect();
            assert_eq!(example.passages, passages, "{at}");
            let labels = expected["labels"][b].as_array().unwrap();
            let labels: Vec<u32> =
                labels.iter().filter_map(|v| u32::try_from(v.as_i64().unwrap()).ok()).collect();
            assert_eq!(example.target, labels, "{at}");
            let generated = tokenizer.decode(&ids(&expected["generated_ids"][b])).unwrap();
            assert_eq!(generated, expected["generated_text"][b].as_str().unwrap(), "{at}");
        }
        let batch = PackedReaderBatch::new(&examples).unwrap();
        let inputs = batch.decoder_inputs(tokenizer.pad_id());
        for (b, bounds) in batch.target_offsets.windows(2).enumerate() {
            let row = ids(&expected["decoder_input_ids"][b]);
            let got = &inputs[bounds[0] as usize..bounds[1] as usize];
            assert_eq!(got, &row[..got.len()], "{} {variant} question {b}", case.display());
        }
    }
}
