//! The training of flair's text classifier against what flair itself computed: inputs, logits, the first batch's gradients, two epochs with
//! its schedule in one process and in two, and its evaluations, through the settings, data, objective and loop that a user's run takes.
//!
//! Texts, shapes and hyper-parameters come from the files of the folder that TERCIO_GOLDEN names.

mod golden_support;

use golden_support::{
    Case, DRAW, assert_all_close, assert_close, cases_with, checksum, integers, list, number, numbers,
};
use serde_json::Value;
use tempfile::TempDir;
use tercio_comm::World;
use tercio_data::Document;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{Arena, Cpu, Device, Reference, Tape};
use tercio_models::classifier::{ClassifierConfig, ClassifierHeaders, HeadKind, LoadedClassifier};
use tercio_models::folder::ModelFolder;
use tercio_models::retriever::Pooling;
use tercio_models::weights::WeightsReader;
use tercio_train::objective::{Evaluation, Objective};
use tercio_train::objectives::classifier::{ClassifierObjective, ClassifierShard};
use tercio_train::options::{ClassifierOptions, classifier_options};
use tercio_train::ranks::RankDevice;
use tercio_train::setup::{self, Run};
use tercio_train::step::Stepper;
use tercio_train::trainer::{self, LoopOptions, RunFolder};

fn cases() -> Vec<Case> {
    cases_with("mini_batch_chunk_size")
}

/// flair's parameters by our names.
fn flair_name(name: &str) -> String {
    match name.strip_prefix("linear_head.") {
        Some(part) => format!("decoder.{part}"),
        None => format!("embeddings.model.{name}"),
    }
}

/// A case as a run that is ready to train.
struct Opened<D: RankDevice> {
    device: D,
    folder: RunFolder,
    run: Run<D, ClassifierObjective>,
    options: ClassifierOptions,
    settings: LoopOptions,
    _files: TempDir,
}

/// The case's encoder under flair's head with the case's start values, in a folder.
fn start_model(case: &Case, files: &std::path::Path) {
    let device = Cpu::new(1).unwrap();
    let (input, source) = (&case.input, case.dir.join("model"));
    let headers = ClassifierHeaders::read(&ModelFolder::open(source.to_str().unwrap()).unwrap()).unwrap();
    let labels: Vec<String> =
        list(&input["labels_of_head_file"]).iter().map(|l| l.as_str().unwrap().to_owned()).collect();
    assert_eq!(input["layers"], "-1");
    let config = ClassifierConfig {
        head: HeadKind::Linear,
        pooling: if input["pooling"] == "mean" { Pooling::Mean } else { Pooling::First },
        labels,
        ..headers.config.clone()
    };
    let mut loaded = LoadedClassifier::with_config(headers, config, 0, &device).unwrap();
    let head = WeightsReader::open(&case.dir.join("classifier_head.safetensors")).unwrap();
    for spec in loaded.model.output_specs().to_vec() {
        let part = spec.name.rsplit('.').next().unwrap();
        let name = head.names().find(|n| n.ends_with(part)).unwrap().to_owned();
        device.write(loaded.parameters.view_mut(spec.place), &head.read(&name).unwrap());
    }
    loaded.save(files, &device).unwrap();
    for entry in std::fs::read_dir(source).unwrap() {
        let path = entry.unwrap().path();
        let target = files.join(path.file_name().unwrap());
        if !target.exists() {
            std::fs::copy(path, target).unwrap();
        }
    }
}

/// Opens a case as `tercio train classifier` would, with `more` flags.
fn open<D: RankDevice>(device: &D, case: &Case, more: &[&str]) -> Opened<D> {
    let (input, files) = (&case.input, tempfile::tempdir().unwrap());
    let model = files.path().join("model");
    std::fs::create_dir(&model).unwrap();
    start_model(case, &model);
    let mut flags: Vec<String> =
        ["--recipe=fine-tune", "--reduction=sum", "--missing-splits=none", "--log-freq=1"]
            .into_iter()
            .map(str::to_owned)
            .collect();
    let mut set = |flag: &str, value: &str| flags.push(format!("--{flag}={value}"));
    let corpus = |name: &str| case.dir.join("corpus").join(name).to_str().unwrap().to_owned();
    set("checkpoint-dir", files.path().to_str().unwrap());
    set("name", "run");
    set("train-data", &corpus("train.txt"));
    set("eval-data", &corpus("dev.txt"));
    set("test-data", &corpus("test.txt"));
    set("model-path", model.to_str().unwrap());
    set("text-maxlength", &input["max_length"].to_string());
    set("lr", &input["learning_rate"].to_string());
    set("mini-batch-size", &input["mini_batch_size"].to_string());
    set("mini-batch-chunk-size", &input["mini_batch_chunk_size"].to_string());
    set("max-epochs", &input["max_epochs"].to_string());
    set("warmup-fraction", &input["warmup_fraction"].to_string());
    set("clip", &input["max_grad_norm"].to_string());
    set("dropout", &input["dropout"].to_string());
    let optimizer = input["optimizer"].as_str().unwrap();
    assert!(optimizer.starts_with("AdamW, betas 0.9/0.999, eps 1e-8, weight decay 0.01"), "{optimizer}");
    if input["shuffle"] == false {
        flags.push("--no-shuffle".into());
    }
    // flair's schedule is not as long as its training.
    let schedule = &case.expected["training"]["schedule"];
    flags.push(format!("--scheduler-steps={}", schedule["total_steps"]));
    flags.extend(more.iter().map(|m| m.to_string()));
    let options = classifier_options(flags).unwrap();
    let folder = setup::open_folder(&options).unwrap();
    let run = setup::open_run(&options, &folder, device).unwrap();
    let mut settings = LoopOptions::of(&options, false).unwrap();
    tercio_train::options::TaskOptions::settle(
        &options.model,
        &mut settings,
        run.objective.corpus.train.len(),
    )
    .unwrap();
    Opened { device: device.clone(), folder, run, options, settings, _files: files }
}

impl<D: RankDevice> Opened<D> {
    /// The first batch as one shard.
    fn first(&self) -> ClassifierShard {
        let rows = (0..self.settings.batch.global).collect();
        let update = UpdateExamples { epoch: 0, rows };
        let objective = &self.run.objective;
        Objective::<D>::shards(objective, &update, self.settings.batch.global).unwrap().remove(0)
    }
    /// Logits of the case's texts, with the labels in flair's order.
    fn logits(&self, case: &Case) -> Vec<f64> {
        let objective = &self.run.objective;
        let mut found = Vec::new();
        for text in list(&case.input["texts"]) {
            let ids = objective.tokenizer.encode_framed(text.as_str().unwrap(), objective.maxlength).unwrap();
            let spans = tercio_engine::Span::from_offsets(&[0, ids.len() as u32]);
            let mut tape = Tape::inference(&self.device, &self.run.state.parameters);
            let logits = objective.model.logits(&mut tape, &ids, &spans, false);
            let logits = self.device.read_f64(logits.tensor.view());
            found.extend(self.label_order(case).map(|i| logits[i]));
        }
        found
    }
    /// Places of flair's labels among ours.
    fn label_order(&self, case: &Case) -> impl Iterator<Item = usize> {
        let id = |l: &Value| self.run.objective.labels.id(l.as_str().unwrap()).unwrap() as usize;
        list(&case.expected["labels"]).iter().map(id).collect::<Vec<_>>().into_iter()
    }
    /// Parameters after training; those whose true gradient is zero are left out.
    fn check_sums(&self, sums: &Value, what: &str) {
        let mut compared = 0;
        for spec in Objective::<D>::layout(&self.run.objective).specs() {
            if spec.name.ends_with("key.bias") {
                continue;
            }
            let name = flair_name(&spec.name);
            let expected = numbers(&sums[&name]);
            let (sum, squares) = checksum(&self.device, &self.run.state.parameters, spec.place);
            let near = (squares - expected[1]).abs() <= 1e-3 * expected[1];
            assert!(near, "{what}: {name}: {squares} {expected:?}");
            let most = 1e-3 * (spec.place.len() as f64 * expected[1]).sqrt();
            assert!((sum - expected[0]).abs() <= most, "{what}: {name}: {sum} {expected:?}");
            compared += 1;
        }
        assert!(compared > 10, "{what}: {compared} parameters compared");
    }
}

/// Losses and norms of a trajectory: relative 1e-3 down to about 0.05.
fn follows(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-3 * e.abs().max(0.05), "{what}[{i}]: expected {e}, found {f}");
    }
}

fn first_batch_agrees<D: RankDevice>(device: &D, case: &Case) {
    let what = format!("{} on {}", case.name(), device.name());
    let opened = open(device, case, &[]);
    let objective = &opened.run.objective;
    let sizes: Vec<i64> =
        [Some(&objective.corpus.train), objective.corpus.dev.as_ref(), objective.corpus.test.as_ref()]
            .map(|split| split.map_or(0, |s| s.len() as i64))
            .to_vec();
    assert_eq!(sizes, integers(&case.expected["sizes"]));
    for (text, ids) in list(&case.input["texts"]).iter().zip(list(&case.expected["token_ids"])) {
        let found = objective.tokenizer.encode_framed(text.as_str().unwrap(), objective.maxlength).unwrap();
        assert_eq!(
            found.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(),
            integers(ids),
            "{what}: {text}"
        );
    }
    assert_all_close(&opened.logits(case), &case.tensor("logits_before"), &format!("{what}: logits"));

    let stored = &case.expected["first_batch"];
    let shard = opened.first();
    assert_eq!(shard.spans.len() as i64, stored["count"].as_i64().unwrap());
    let mut gradients = Arena::zeros(device, Objective::<D>::layout(objective));
    let parameters = &opened.run.state.parameters;
    let outcome = device.run(|| objective.gradient(device, parameters, &shard, DRAW, 1.0, &mut gradients));
    assert_close(outcome.loss, number(&stored["loss_sum"]), || format!("{what}: loss"));
    let order: Vec<usize> = opened.label_order(case).collect();
    for spec in Objective::<D>::layout(objective).specs() {
        let name = flair_name(&spec.name);
        let values = device.read_f64(gradients.view(spec.place));
        let norm = values.iter().map(|g| g * g).sum::<f64>().sqrt();
        assert_close(norm, number(&stored["gradient_norms"][&name]), || format!("{what}: {name}"));
        let full = format!("first_batch_grad/{name}");
        if case.tensors.contains(&full) {
            let mut expected = case.tensor(&full);
            if spec.name.starts_with("linear_head.") {
                // Its rows are flair's labels.
                let width = values.len() / order.len();
                let rows = expected.clone();
                for (row, &ours) in rows.chunks(width).zip(&order) {
                    expected[ours * width..(ours + 1) * width].copy_from_slice(row);
                }
            }
            assert_all_close(&values, &expected, &format!("{what}: {name}"));
        }
    }
}

#[test]
fn golden_flair_first_batch() {
    for case in cases() {
        first_batch_agrees(&Cpu::new(2).unwrap(), &case);
        first_batch_agrees(&Reference, &case);
        on_cuda!(|device| first_batch_agrees(device, &case));
    }
}

/// A figure of every evaluation, from the run's metrics.
fn series(opened: &Opened<Cpu>, event: Option<&str>, key: &str) -> Vec<f64> {
    let all = tercio_train::run::metrics::read_series(&opened.folder.dir, event, key).unwrap();
    all.into_iter().map(|(_, value)| value).collect()
}

#[test]
fn golden_flair_two_epochs() {
    let device = Cpu::new(2).unwrap();
    for case in cases() {
        let mut opened = open(&device, &case, &[]);
        let training = &case.expected["training"];
        assert_eq!(opened.settings.optim.total_steps, training["schedule"]["real_steps"].as_u64().unwrap());
        assert_eq!(
            opened.settings.optim.warmup_steps,
            training["schedule"]["warmup_steps"].as_u64().unwrap()
        );
        let Opened { folder, run, settings, .. } = &mut opened;
        let outcome =
            trainer::train(&device, &run.objective, settings, folder, &mut run.state, None, None).unwrap();
        assert_eq!(outcome.step, settings.optim.total_steps);
        let metrics = &training["metrics"];
        let counts: Vec<f64> = list(&training["steps"]).iter().map(|s| number(&s["n"])).collect();
        let losses: Vec<f64> =
            series(&opened, None, "loss").iter().zip(&counts).map(|(l, n)| l / n).collect();
        follows(&losses, &numbers(&metrics["train/batch_loss"]), "batch losses");
        let norms = series(&opened, None, "gradient_norm");
        follows(&norms, &numbers(&metrics["train/gradient_norm"]), "gradient norms");
        let rates: Vec<f64> = list(&training["steps"]).iter().map(|s| number(&s["lr_used"])).collect();
        assert_all_close(&series(&opened, None, "lr"), &rates, "rates");
        for (ours, theirs) in [
            ("f1", "dev/micro avg/f1-score"),
            ("precision", "dev/micro avg/precision"),
            ("recall", "dev/micro avg/recall"),
            ("macro_f1", "dev/macro avg/f1-score"),
            ("accuracy", "dev/accuracy"),
        ] {
            assert_all_close(&series(&opened, Some("eval"), ours), &numbers(&metrics[theirs]), theirs);
        }
        follows(&series(&opened, Some("eval"), "loss"), &numbers(&metrics["dev/loss"]), "dev/loss");
        // The same in flair's table.
        let table = std::fs::read_to_string(opened.folder.dir.join("loss.tsv")).unwrap();
        let column = |name: &str| -> Vec<f64> {
            let mut lines = table.lines().map(|l| l.split('\t').collect::<Vec<_>>());
            let at = lines.next().unwrap().iter().position(|n| *n == name).unwrap();
            lines.map(|l| l[at].parse().unwrap()).collect()
        };
        follows(&column("TRAIN_LOSS"), &numbers(&metrics["train/loss"]), "TRAIN_LOSS");
        assert_all_close(&column("DEV_F1"), &numbers(&metrics["dev/micro avg/f1-score"]), "DEV_F1");
        let epochs = case.input["max_epochs"].as_u64().unwrap();
        assert_eq!(column("EPOCH"), (1..=epochs).map(|e| e as f64).collect::<Vec<_>>());

        follows(&opened.logits(&case), &case.tensor("logits_after"), "logits after");
        opened.check_sums(&case.expected["parameters_after"], &case.name());
        for (part, stored) in [(0, "evaluation_dev"), (1, "evaluation_test")] {
            evaluation_agrees(&opened, part, &case.expected[stored]);
        }
        // The run's model is what was just measured.
        let name = opened.folder.dir.to_str().unwrap();
        let loaded = LoadedClassifier::open(&setup::model_folder(name).unwrap(), &device).unwrap();
        assert_eq!(device.host(loaded.parameters.all()), device.host(opened.run.state.parameters.all()));
        assert!(opened.folder.dir.join("final-model/config.json").is_file());
    }
}

fn evaluation_agrees(opened: &Opened<Cpu>, part: usize, stored: &Value) {
    let objective = &opened.run.objective;
    let split = [&objective.corpus.dev, &objective.corpus.test][part].as_ref().unwrap();
    let texts: Vec<Document> = (0..split.len()).map(|i| split.get(i).unwrap()).collect();
    let words = |of: &Value| list(of).iter().map(|l| l.as_str().unwrap().to_owned()).collect::<Vec<_>>();
    let gold: Vec<String> = texts.iter().map(|d| d.labels[0].clone()).collect();
    assert_eq!(gold, words(&stored["gold"]));
    let measure = || {
        let (device, parameters) = (&opened.device, &opened.run.state.parameters);
        objective.measure(&World::alone(), device, parameters, split, &|| false)
    };
    let found: Evaluation = opened.device.run(measure).unwrap().unwrap();
    for (ours, theirs) in
        [("f1", "micro avg/f1-score"), ("macro_f1", "macro avg/f1-score"), ("accuracy", "accuracy")]
    {
        let value = found.figure(ours).unwrap();
        assert_close(value, number(&stored["scores"][theirs]), || theirs.to_owned());
    }
    follows(&[found.figure("loss").unwrap()], &[number(&stored["loss"])], "loss");
}

#[test]
fn golden_flair_two_processes() {
    let device = Cpu::new(2).unwrap();
    for case in cases() {
        let stored = &case.expected["two_processes_by_hand"];
        let size = case.input["mini_batch_size"].as_u64().unwrap() as usize;
        let schedule = format!("--scheduler-steps={}", stored["total_steps_of_schedule"]);
        let [both, warmup] =
            [format!("--mini-batch-size={}", 2 * size), format!("--warmup-steps={}", stored["warmup_steps"])];
        let mut opened = open(&device, &case, &[&schedule, &both, &warmup, "--warmup-fraction=0"]);
        let (settings, len) = (opened.settings.clone(), opened.run.objective.corpus.train.len());
        // Rank r has rows r, r + 2, ...; the first row makes up for one that is missing.
        let of_rank = |r: usize| (r..len + len % 2).step_by(2).map(|i| i % len).collect::<Vec<_>>();
        let ranks = [of_rank(0), of_rank(1)];
        let epochs = case.input["max_epochs"].as_u64().unwrap();
        let objective = &opened.run.objective;
        let mut stepper = Stepper::new(&device, objective, settings.batch, &settings.optim, 0);
        let (mut losses, mut norms, mut rates) = (Vec::new(), Vec::new(), Vec::new());
        for epoch in 0..epochs {
            for (a, b) in ranks[0].chunks(size).zip(ranks[1].chunks(size)) {
                let update = UpdateExamples { epoch, rows: [a, b].concat() };
                let outcome = stepper.update(&mut opened.run.state, &update).unwrap();
                losses.push(outcome.loss / (a.len() + b.len()) as f64);
                norms.push(outcome.gradient_norm);
                rates.push(outcome.lr);
            }
        }
        // The mean of both ranks' means, which have as many texts each.
        let [first, second] = [0, 1].map(|r| numbers(&stored["loss"][r]));
        let expected: Vec<f64> = first.iter().zip(&second).map(|(a, b)| (a + b) / 2.0).collect();
        follows(&losses, &expected, "losses");
        follows(&norms, &numbers(&stored["grad_norm"]), "gradient norms");
        assert_all_close(&rates, &numbers(&stored["lr"]), "rates");
        opened.check_sums(&stored["parameters_after"], &case.name());
        // flair's own two processes end with the same.
        let theirs = &case.expected["two_processes"]["rank0"];
        opened.check_sums(&theirs["sums"], &case.name());
        assert_eq!(opened.options.model.epochs, epochs);
    }
}
