//! Greedy decoding and beam search against what Hugging Face's `generate` gave (tools/make_beam_cases.py): the same sequences in
//! the same order with the same scores, for questions with different numbers of passages, together and one by one.

use std::path::{Path, PathBuf};

use serde_json::Value;
use tercio_engine::{Cpu, Device, Reference, Span, Tape};
use tercio_models::folder::ModelFolder;
use tercio_models::t5::{Decoded, Decoding, GenerationRequest, LoadedT5};

fn cases() -> Vec<(PathBuf, Value)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/beams");
    let mut folders: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    folders.sort();
    assert!(!folders.is_empty());
    let expected =
        |f: &PathBuf| serde_json::from_slice(&std::fs::read(f.join("expected.json")).unwrap()).unwrap();
    folders.into_iter().map(|f| (f.clone(), expected(&f))).collect()
}

fn list<T>(value: &Value, of: impl Fn(&Value) -> T) -> Vec<T> {
    value.as_array().unwrap().iter().map(of).collect()
}

fn ids(value: &Value) -> Vec<u32> {
    list(value, |v| v.as_u64().unwrap() as u32)
}

fn decoding(case: &Value) -> Decoding {
    let number = |name: &str| case[name].as_u64().unwrap() as usize;
    let decoding = Decoding {
        max_length: number("max_length"),
        min_length: number("min_length"),
        num_beams: number("num_beams"),
        num_return_sequences: number("num_beams"),
        length_penalty: case["length_penalty"].as_f64().unwrap(),
        early_stopping: case["early_stopping"].as_str().unwrap().parse().unwrap(),
    };
    decoding.check().unwrap();
    decoding
}

fn answers<D: Device>(
    device: &D,
    loaded: &LoadedT5<D>,
    questions: &[Vec<Vec<u32>>],
    decoding: &Decoding,
) -> Vec<Vec<Decoded>> {
    let (mut flat, mut passages, mut keys) = (Vec::new(), vec![0], vec![0]);
    for question in questions {
        for passage in question {
            flat.extend(passage);
            passages.push(flat.len() as u32);
        }
        keys.push(flat.len() as u32);
    }
    let keys = Span::from_offsets(&keys);
    let request =
        GenerationRequest { keys: &keys, key_positions: None, decoding: decoding.clone(), scores: false };
    let mut tape = Tape::inference(device, &loaded.parameters);
    let states = loaded.model.encode(&mut tape, &flat, &Span::from_offsets(&passages), false);
    loaded.model.generate(&mut tape, &loaded.parameters, &states, &request).answers
}

/// Every case of every model on a device, the questions together and one by one.
fn compare<D: Device>(device: &D) {
    for (folder, expected) in cases() {
        let name = folder.file_name().unwrap().to_str().unwrap().to_owned();
        let loaded = LoadedT5::open(&ModelFolder::open(folder.to_str().unwrap()).unwrap(), device).unwrap();
        let questions = list(&expected["questions"], |q| list(q, ids));
        for case in expected["cases"].as_array().unwrap() {
            let decoding = decoding(case);
            let together = answers(device, &loaded, &questions, &decoding);
            let alone: Vec<_> = questions
                .iter()
                .map(|q| answers(device, &loaded, std::slice::from_ref(q), &decoding).remove(0))
                .collect();
            for (how, got) in [("together", together), ("alone", alone)] {
                let wants = case["answers"].as_array().unwrap();
                assert_eq!(got.len(), wants.len());
                for (q, (got, want)) in got.iter().zip(wants).enumerate() {
                    let what = format!("{name}, question {q} {how}, {decoding:?}");
                    let tokens: Vec<_> = got.iter().map(|a| a.tokens.clone()).collect();
                    assert_eq!(tokens, list(want, |a| ids(&a["tokens"])), "{what}");
                    for (a, want) in got.iter().zip(want.as_array().unwrap()) {
                        let close = |got: f64, name: &str| {
                            let want = want[name].as_f64().unwrap();
                            assert!(
                                (got - want).abs() <= 1e-4 * want.abs(),
                                "{what}: {name} {got}, not {want}"
                            );
                        };
                        close(a.log_probability, "log_probability");
                        close(a.score, "score");
                    }
                }
            }
        }
    }
}

#[test]
fn sequences_and_scores_are_those_of_transformers() {
    compare(&Cpu::new(2).unwrap());
}

#[test]
fn the_reference_device_agrees() {
    compare(&Reference);
}
