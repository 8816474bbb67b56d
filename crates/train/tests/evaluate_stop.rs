//! An evaluation that is told to stop leaves no file of results behind.

use std::cell::Cell;
use std::path::Path;

use tercio_data::{Questions, ReaderEncoding};
use tercio_engine::{Cpu, Device};
use tercio_models::t5::Decoding;
use tercio_train::evaluate::{EvaluationFiles, evaluate};
use tercio_train::predict::Predictor;
use tercio_train::{TrainError, setup};

#[test]
fn a_stopped_evaluation_leaves_nothing() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/golden/fid_reader_t5v10");
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("q.jsonl");
    std::fs::write(&file, "{\"question\": \"a\"}\n".repeat(5)).unwrap();
    let questions = Questions::open(&file, &dir.path().join("cache")).unwrap();
    let device = Cpu::new(1).unwrap();
    let (loaded, tokenizer) =
        setup::open_model(golden.join("model").to_str().unwrap(), None, &device).unwrap();
    let predictor = Predictor {
        device: &device,
        model: &loaded.model,
        parameters: &loaded.parameters,
        tokenizer: &tokenizer,
        encoding: ReaderEncoding {
            text_maxlength: 16,
            answer_maxlength: None,
            n_context: 1,
            no_title: false,
            passage_eos: false,
        },
        decoding: Decoding::greedy(4),
        batch: 1,
        scores: true,
        print_freq: 100,
    };
    let out = dir.path().join("out");
    let files = EvaluationFiles {
        predictions: Some(out.join("p.jsonl")),
        final_output: Some(out.join("f.txt")),
        wscores: Some(out.join("w.json")),
    };
    for (stop_after, names) in [(3, 0), (100, 3)] {
        let asked = Cell::new(0);
        let stop = || {
            asked.set(asked.get() + 1);
            asked.get() > stop_after
        };
        let outcome = evaluate(&predictor, &questions, usize::MAX, &files, &stop);
        match outcome {
            Err(TrainError::Stopped) => assert_eq!(asked.get(), 4),
            other => assert_eq!(other.unwrap().questions, 5),
        }
        assert_eq!(std::fs::read_dir(&out).unwrap().count(), names);
    }
    device.trim();
}
