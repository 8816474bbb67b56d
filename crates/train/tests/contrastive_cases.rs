//! Contrastive training, alone and with distillation, against losses and gradients of vectors that PyTorch computed in 64 bits
//! (`tools/make_contrastive_cases.py`): through the flags, the data and the shards that a user's run has, however an update is cut.

use std::path::Path;

use clap::Parser;
use serde_json::Value;
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{Draw, Reference};
use tercio_train::objective::{Objective, Shown};
use tercio_train::objectives::retriever::RetrieverObjective;
use tercio_train::options::RetrieverOptions;
use tercio_train::setup;

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    options: RetrieverOptions,
}

fn rows(value: &Value) -> Vec<Vec<f64>> {
    let numbers = |row: &Value| row.as_array().unwrap().iter().map(|v| v.as_f64().unwrap()).collect();
    value.as_array().unwrap().iter().map(numbers).collect()
}

fn flags(folder: &Path, stored: &Value, settings: &Value) -> RetrieverOptions {
    let data = folder.join("questions.jsonl");
    let lines: Vec<String> = stored["questions"].as_array().unwrap().iter().map(Value::to_string).collect();
    std::fs::write(&data, lines.join("\n")).unwrap();
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/tests/data/sentence/cls");
    let mut flags: Vec<String> =
        ["test", "--name=run", "--no-projection", "--total-steps=1"].map(String::from).into();
    flags.push(format!("--train-data={}", data.display()));
    flags.push(format!("--checkpoint-dir={}", folder.display()));
    flags.push(format!("--model-path={}", model.display()));
    flags.push(format!("--global-batch-size={}", lines.len()));
    for (name, value) in settings.as_object().unwrap() {
        flags.push(format!(
            "--{}={}",
            name.replace('_', "-"),
            value.as_str().map_or(value.to_string(), Into::into)
        ));
    }
    let options = Flags::parse_from(flags).options;
    options.check().unwrap();
    options
}

/// The update in shards of `micro` questions: its loss, and the gradients of questions and of passages.
fn settled(
    device: &Reference,
    objective: &RetrieverObjective<Reference>,
    parameters: &tercio_engine::Arena<Reference>,
    case: &Value,
    micro: usize,
) -> (f64, Vec<Vec<f64>>, Vec<Vec<f64>>) {
    let update = UpdateExamples { epoch: 0, rows: (0..objective.train.len()).collect() };
    let mut shards = Objective::<Reference>::shards(objective, &update, micro).unwrap();
    let width = objective.model.config.dimension();
    let (mut questions, mut passages) =
        (rows(&case["questions"]).into_iter(), rows(&case["vectors"]).into_iter());
    let mut shown = Vec::new();
    for (i, shard) in shards.iter_mut().enumerate() {
        let draw = Draw { seed: 1, update: 1, shard: i as u64 };
        let Shown { counts, values } = objective.first_pass(device, parameters, shard, draw).unwrap();
        let stored: Vec<f64> = questions
            .by_ref()
            .take(shard.questions)
            .chain(passages.by_ref().take(shard.passages()))
            .flatten()
            .collect();
        assert_eq!(stored.len(), values.len(), "the stored update has other passages");
        shown.push(Shown { counts, values: stored });
    }
    assert_eq!((questions.next(), passages.next()), (None, None), "the stored update has more of them");
    let all = 0..shards.len();
    Objective::<Reference>::settle(objective, &World::alone(), &shown, all, &mut shards).unwrap();
    let (mut loss, mut of_questions, mut of_passages) = (0.0, Vec::new(), Vec::new());
    for shard in shards {
        let settled = shard.settled.as_ref().unwrap();
        loss += settled.loss;
        let mut vectors = settled.gradients.chunks_exact(width).map(<[f64]>::to_vec);
        of_questions.extend(vectors.by_ref().take(shard.questions));
        of_passages.extend(vectors);
    }
    (loss, of_questions, of_passages)
}

#[test]
fn losses_and_gradients_are_those_of_pytorch() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/contrastive.json");
    let stored: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    let device = Reference;
    for case in stored["cases"].as_array().unwrap() {
        let folder = tempfile::tempdir().unwrap();
        let options = flags(folder.path(), &stored, &case["settings"]);
        let run_folder = setup::open_folder(&options).unwrap();
        let run = setup::open_run(&options, &run_folder, &device).unwrap();
        let objective: &RetrieverObjective<Reference> = &run.objective;
        assert_eq!(Some(objective.model.config.dimension() as u64), stored["width"].as_u64());
        for (row, ids) in case["passages"].as_array().unwrap().iter().enumerate() {
            let chosen = objective.train.get(row).unwrap();
            let chosen = objective
                .choice
                .of(&chosen, 1, 0)
                .unwrap()
                .passages
                .iter()
                .map(|p| p.id.clone())
                .collect::<Vec<_>>();
            assert_eq!(&serde_json::json!(chosen), ids);
        }
        for micro in [1, 2, 5] {
            let what = format!("{} in shards of {micro}", case["settings"]);
            let found = settled(&device, objective, &run.state.parameters, case, micro);
            let near = |found: f64, wanted: f64| {
                assert!(
                    (found - wanted).abs() <= 1e-12 * (1.0 + wanted.abs()),
                    "{what}: {found}, not {wanted}"
                );
            };
            near(found.0, case["loss"].as_f64().unwrap());
            for (found, name) in [(found.1, "question_gradients"), (found.2, "passage_gradients")] {
                let wanted = rows(&case[name]);
                assert_eq!(found.len(), wanted.len(), "{what}: {name}");
                found.iter().flatten().zip(wanted.iter().flatten()).for_each(|(&f, &w)| near(f, w));
            }
        }
    }
}
