//! The training of FiD's retriever against what PyTorch computed: inputs, vectors, scores, loss, gradients and a trajectory of
//! updates, through the settings, data, objective and stepper that a user's run takes.
//!
//! Variants, shapes and hyper-parameters come from the files of the folder that TERCIO_GOLDEN names.

mod golden_support;

use clap::Parser;
use golden_support::{
    Case, DRAW, assert_all_close, assert_close, bits, cases_with, checksum, integers, list, number, numbers,
};
use serde_json::Value;
use tempfile::TempDir;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{Arena, Cpu, Reference, Tape};
use tercio_models::weights::WeightsReader;
use tercio_train::objective::Objective;
use tercio_train::objectives::retriever::RetrieverObjective;
use tercio_train::objectives::retriever::batch::RetrieverShard;
use tercio_train::options::RetrieverOptions;
use tercio_train::ranks::RankDevice;
use tercio_train::setup::{self, Run};
use tercio_train::step::{Stepper, TrainState};

fn cases() -> Vec<Case> {
    cases_with("passage_maxlength")
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    options: RetrieverOptions,
}

/// A case as a run that is ready to train.
struct Opened<D: RankDevice> {
    device: D,
    run: Run<D, RetrieverObjective<D>>,
    options: RetrieverOptions,
    _folder: TempDir,
}

/// Opens a variant of a case as `tercio train retriever` would.
fn open<D: RankDevice>(device: &D, case: &Case, variant: &str, more: &[&str]) -> Opened<D> {
    let (input, settings) = (&case.input, &case.input["variants"][variant]);
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("questions.json");
    std::fs::write(&data, input["questions"].to_string()).unwrap();
    let optimizer = &input["optimizer"];
    assert_eq!((numbers(&optimizer["betas"]), number(&optimizer["eps"])), (vec![0.9, 0.999], 1e-8));
    let all = list(&input["questions"]).len();
    let mut flags = vec!["test".to_owned(), "--name=run".into()];
    let mut set = |flag: &str, value: &str| flags.push(format!("--{flag}={value}"));
    set("checkpoint-dir", folder.path().to_str().unwrap());
    set("train-data", data.to_str().unwrap());
    set("model-path", case.dir.join("model").to_str().unwrap());
    for name in ["n_context", "question_maxlength", "passage_maxlength", "dropout"] {
        set(&name.replace('_', "-"), &input[name].to_string());
    }
    for name in ["lr", "weight_decay", "warmup_steps", "total_steps", "scheduler_steps", "clip"] {
        set(&name.replace('_', "-"), &optimizer[name].to_string());
    }
    set("optim", optimizer["name"].as_str().unwrap());
    set("scheduler", "linear");
    set("global-batch-size", &all.to_string());
    let on = |name: &str| settings[name].as_bool().unwrap();
    for (flag, given) in [
        ("--no-projection", !on("projection")),
        ("--no-question-mask", !on("qmask")),
        ("--no-passage-mask", !on("pmask")),
        ("--extract-cls", on("cls")),
    ] {
        flags.extend(given.then(|| flag.to_owned()));
    }
    flags.push(format!("--micro-batch-size={all}"));
    // Later flags win in the command, and here by name.
    flags.retain(|flag| !more.iter().any(|m| m.split('=').next() == flag.split('=').next()));
    flags.extend(more.iter().map(|m| m.to_string()));
    let options = Flags::parse_from(flags).options;
    options.check().unwrap();
    let run_folder = setup::open_folder(&options).unwrap();
    let run = setup::open_run(&options, &run_folder, device).unwrap();
    Opened { device: device.clone(), run, options, _folder: folder }
}

impl<D: RankDevice> Opened<D> {
    fn rows(&self) -> UpdateExamples {
        UpdateExamples { epoch: 0, rows: (0..self.run.objective.train.len()).collect() }
    }
    fn shard(&self) -> RetrieverShard {
        let rows = self.rows();
        let mut shards = Objective::<D>::shards(&self.run.objective, &rows, rows.rows.len()).unwrap();
        assert_eq!(shards.len(), 1);
        shards.remove(0)
    }
    /// For each passage of the shard its place among the question's as the file has them.
    fn file_positions(&self, question: usize) -> Vec<usize> {
        let example = self.run.objective.train.get(question).unwrap();
        example.passages.iter().map(|p| p.passage.file_position).collect()
    }
    fn stepper(&self) -> Stepper<'_, D, RetrieverObjective<D>> {
        let plan = self.options.data.batch_plan().unwrap();
        Stepper::new(&self.device, &self.run.objective, plan, &self.options.optim, self.options.run.seed)
    }
    /// Loss and gradient of all questions in one shard.
    fn gradient(&self, parameters: &Arena<D>) -> (f64, Arena<D>) {
        let (objective, mut shard) = (&self.run.objective, self.shard());
        let mut gradients = Arena::zeros(&self.device, Objective::<D>::layout(objective));
        let weight = 1.0 / Objective::<D>::size(objective, &shard).count as f64;
        let outcome = self.device.run(|| {
            if Objective::<D>::has_first_pass(objective) {
                let shown = objective.first_pass(&self.device, parameters, &mut shard, DRAW).unwrap();
                let world = tercio_comm::World::alone();
                let shards = std::slice::from_mut(&mut shard);
                Objective::<D>::settle(objective, &world, &[shown], 0..1, shards).unwrap();
            }
            objective.gradient(&self.device, parameters, &shard, DRAW, weight, &mut gradients)
        });
        (outcome.loss, gradients)
    }
}

/// The name of a parameter in FiD's files, which put the encoder below `model`.
fn stored_name(name: &str) -> String {
    let head = ["proj.", "norm."].iter().any(|part| name.starts_with(part));
    if head { name.to_owned() } else { format!("model.{name}") }
}

/// Token ids of a sequence against a stored one, padding left out where it is masked.
fn check_ids(shard: &RetrieverShard, sequence: usize, ids: &Value, mask: &Value, masked: bool, what: &str) {
    let stored = integers(ids).into_iter().zip(integers(mask));
    let stored: Vec<i64> = stored.filter(|&(_, m)| m == 1 || !masked).map(|(id, _)| id).collect();
    let span = shard.spans[sequence];
    let ours = &shard.ids[span.start as usize..span.end as usize];
    assert_eq!(ours.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(), stored, "{what}");
}

fn variant_agrees<D: RankDevice>(device: &D, case: &Case, variant: &str) {
    let what = format!("{} on {}: {variant}", case.name(), device.name());
    let opened = open(device, case, variant, &[]);
    let (objective, shard) = (&opened.run.objective, opened.shard());
    let settings = &case.input["variants"][variant];
    let (qmask, pmask) = (settings["qmask"].as_bool().unwrap(), settings["pmask"].as_bool().unwrap());
    let (expected, scores) = (&case.expected, list(&case.expected[variant]["scores"]));
    assert_eq!(shard.questions, scores.len(), "{what}: questions");

    let vectors = device.run(|| {
        let mut tape = Tape::inference(device, &opened.run.state.parameters);
        let vectors = objective.model.embed(&mut tape, &shard.ids, &shard.spans, false);
        device.read_f64(vectors.tensor.view())
    });
    let width = objective.model.config.dimension();
    let stored = |name: &str| case.tensor(&format!("{variant}/{name}"));
    let (questions, passages) = (stored("question_embeddings"), stored("passage_embeddings"));
    assert_eq!(questions.len(), shard.questions * width, "{what}: width");
    for (q, scores) in scores.iter().enumerate() {
        let (ids, mask) = (&expected["question_ids"][q], &expected["question_mask"][q]);
        check_ids(&shard, q, ids, mask, qmask, &format!("{what}: question {q}"));
        let row = |rows: &[f64], at: usize| rows[at * width..(at + 1) * width].to_vec();
        let question = row(&vectors, q);
        assert_all_close(&question, &row(&questions, q), &format!("{what}: vector of question {q}"));
        let scores = numbers(scores);
        for (k, &place) in opened.file_positions(q).iter().enumerate() {
            let sequence = shard.questions + shard.passage_offsets[q] + k;
            let (ids, mask) = (&expected["passage_ids"][q][place], &expected["passage_mask"][q][place]);
            let what = format!("{what}: question {q}, passage {place}");
            check_ids(&shard, sequence, ids, mask, pmask, &what);
            let passage = row(&vectors, sequence);
            assert_all_close(&passage, &row(&passages, q * scores.len() + place), &what);
            let score: f64 = question.iter().zip(&passage).map(|(a, b)| a * b).sum();
            assert_close(score / (width as f64).sqrt(), scores[place], || format!("{what}: score"));
        }
    }

    let (loss, gradients) = opened.gradient(&opened.run.state.parameters);
    let expected = &expected[variant];
    assert_close(loss, number(&expected["loss"]), || format!("{what}: loss"));
    let norms = expected["gradient_norms"].as_object().unwrap();
    let specs = Objective::<D>::layout(objective).specs();
    let mut ours: Vec<String> = specs.iter().map(|s| stored_name(&s.name)).collect();
    let mut theirs: Vec<String> = norms.keys().cloned().collect();
    ours.sort_unstable();
    theirs.sort_unstable();
    assert_eq!(ours, theirs, "{what}: parameters with a gradient");
    let (mut squares, mut whole) = (0.0, 0);
    for spec in specs {
        let found = device.read_f64(gradients.view(spec.place));
        let square = found.iter().map(|v| v * v).sum::<f64>();
        squares += square;
        let name = stored_name(&spec.name);
        assert_close(square.sqrt(), number(&norms[&name]), || format!("{what}: norm of {name}"));
        let name = format!("grad/{name}");
        if variant == "default" && case.tensors.contains(&name) {
            assert_all_close(&found, &case.tensor(&name), &format!("{what}: {name}"));
            whole += 1;
        }
    }
    assert!(whole > 0 || variant != "default", "{what}: no full gradient compared");
    let global = number(&expected["gradient_norm_global"]);
    assert_close(squares.sqrt(), global, || format!("{what}: global norm"));
}

#[test]
fn golden_retriever_variants() {
    for case in cases() {
        for variant in case.input["variants"].as_object().unwrap().keys() {
            variant_agrees(&Cpu::new(2).unwrap(), &case, variant);
            variant_agrees(&Reference, &case, variant);
            on_cuda!(|device| variant_agrees(device, &case, variant));
        }
    }
}

/// Relative 1e-3 on values down to 0.05, absolute 1e-3 below: the tolerance of trajectories.
fn assert_on_course(found: f64, expected: f64, what: impl Fn() -> String) {
    let most = if expected.abs() < 0.05 { 1e-3 } else { 1e-3 * expected.abs() };
    assert!((found - expected).abs() <= most, "{}: expected {expected}, found {found}", what());
}

fn trajectory_agrees<D: RankDevice>(device: &D, case: &Case, more: &[&str]) {
    let what = format!("{} on {}, {more:?}", case.name(), device.name());
    let variant = case.input["trajectory_variant"].as_str().unwrap();
    let opened = open(device, case, variant, more);
    let mut state: TrainState<D> = open(device, case, variant, more).run.state;
    let stored = &case.expected["trajectory"];
    let (losses, norms, rates) =
        (numbers(&stored["loss"]), numbers(&stored["grad_norm"]), numbers(&stored["lr"]));
    let mut stepper = opened.stepper();
    for (u, &loss) in losses.iter().enumerate() {
        let outcome = stepper.update(&mut state, &opened.rows()).unwrap();
        assert_on_course(outcome.loss, loss, || format!("{what}: loss of update {u}"));
        assert_on_course(outcome.gradient_norm, norms[u], || format!("{what}: norm of update {u}"));
        assert!((outcome.lr - rates[u]).abs() <= 1e-9 * rates[u], "{what}: lr {} {}", outcome.lr, rates[u]);
    }
    let (after, _) = opened.gradient(&state.parameters);
    assert_on_course(after, number(&stored["loss_after"]), || format!("{what}: loss after"));

    let sums = stored["parameters_after"].as_object().unwrap();
    let norms = case.expected[variant]["gradient_norms"].as_object().unwrap();
    let objective = &opened.run.objective;
    let mut compared = 0;
    for spec in Objective::<D>::layout(objective).specs() {
        let name = stored_name(&spec.name);
        // Without a gradient in truth, steps are of noise.
        if number(&norms[&name]) < 1e-6 {
            continue;
        }
        let expected = numbers(&sums[&name]);
        let (sum, squares) = checksum(device, &state.parameters, spec.place);
        assert!(
            (squares - expected[1]).abs() <= 1e-3 * expected[1],
            "{what}: {name}: {squares} {expected:?}"
        );
        let most = 1e-3 * (spec.place.len() as f64 * expected[1]).sqrt();
        assert!((sum - expected[0]).abs() <= most, "{what}: {name}: {sum} {expected:?}");
        compared += 1;
    }
    assert!(compared > 10, "{what}: {compared} parameters compared");

    // What has no gradient at all is saved as it came.
    let folder = tempfile::tempdir().unwrap();
    objective.save(device, &state.parameters, folder.path()).unwrap();
    let saved = WeightsReader::open(&folder.path().join("model.safetensors")).unwrap();
    let mut kept = 0;
    for (name, expected) in sums.iter().filter(|(name, _)| !norms.contains_key(*name)) {
        let sum: f64 = saved.read(name).unwrap().iter().map(|&v| f64::from(v)).sum();
        let expected = numbers(expected)[0];
        assert!((sum - expected).abs() <= 1e-4 * (1.0 + expected.abs()), "{what}: {name}: {sum} {expected}");
        kept += 1;
    }
    assert!(kept > 0, "{what}: nothing without a gradient");
}

#[test]
fn golden_retriever_trajectory() {
    for case in cases() {
        for more in [&[][..], &["--micro-batch-size=1"], &["--recompute"]] {
            trajectory_agrees(&Cpu::new(2).unwrap(), &case, more);
        }
        trajectory_agrees(&Reference, &case, &[]);
        on_cuda!(|device| trajectory_agrees(device, &case, &[]));
    }
}

/// Written as the true mean over questions the loss is as many times larger as there are passages.
#[test]
fn golden_retriever_batch_mean() {
    for case in cases() {
        let device = Cpu::new(1).unwrap();
        let of = |more: &[&str]| {
            let opened = open(&device, &case, "default", more);
            opened.gradient(&opened.run.state.parameters).0
        };
        let (element, batch) = (of(&[]), of(&["--kl-mean=batch"]));
        let passages = number(&case.input["n_context"]);
        assert_close(batch, passages * element, || case.name());
        assert_ne!(of(&["--temperature=2"]), element);
        assert_ne!(of(&["--teacher-temperature=2"]), element);
    }
}

#[test]
fn recompute_and_threads_change_no_bit() {
    for case in cases() {
        let of = |threads: usize, flags: &[&str]| {
            let device = Cpu::new(threads).unwrap();
            let opened = open(&device, &case, "default", flags);
            let (loss, gradients) = opened.gradient(&opened.run.state.parameters);
            (loss.to_bits(), bits(&device, &gradients))
        };
        let plain = of(1, &["--dropout=0.1"]);
        assert!(plain == of(2, &["--dropout=0.1", "--recompute"]), "{}", case.name());
        assert!(plain != of(1, &["--dropout=0.2"]), "{}: dropout has no effect", case.name());
    }
}
