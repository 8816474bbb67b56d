//! Training of ColBERT models against values of PyLate: tokens, losses, gradients and trajectories through the code that trains. PyLate's
//! cached contrastive gradient is as many times larger as the batch has queries, and that of two processes twice the true one: what is
//! computed here is the gradient of the mean, so theirs is divided by these numbers. Shapes and hyper-parameters come from the files of
//! the folder that TERCIO_GOLDEN names.

mod golden_support;

use clap::Parser;
use golden_support::{
    Case, DRAW, assert_all_close, assert_close, bits, cases_with, checksum, integers, list, number, numbers,
};
use serde_json::{Value, json};
use tempfile::TempDir;
use tercio_comm::World;
use tercio_data::shuffle::UpdateExamples;
use tercio_engine::{Arena, Cpu, Device, Reference};
use tercio_train::colbert::{EncodedText, TextTokens};
use tercio_train::objective::Objective;
use tercio_train::objectives::colbert::ColbertObjective;
use tercio_train::objectives::colbert::batch::ColbertShard;
use tercio_train::options::ColbertOptions;
use tercio_train::ranks::RankDevice;
use tercio_train::setup::{self, Run};
use tercio_train::step::{Stepper, TrainState};

fn cases() -> Vec<Case> {
    cases_with("contrastive_rows")
}

#[derive(Parser)]
struct Flags {
    #[command(flatten)]
    options: ColbertOptions,
}

/// A case as a run that is ready to train.
struct Opened<D: RankDevice> {
    device: D,
    run: Run<D, ColbertObjective<D>>,
    options: ColbertOptions,
    _folder: TempDir,
}

/// Examples of a case as lines of JSON: triples, or documents with scores.
fn examples(rows: &[Value]) -> Vec<Value> {
    let of = |row: &Value| match row.get("documents") {
        None => {
            let fields = row.as_object().unwrap();
            let negatives: Vec<&Value> =
                fields.iter().filter(|(k, _)| k.starts_with("negative")).map(|(_, v)| v).collect();
            json!({"query": row["query"], "positive": row["positive"], "negatives": negatives})
        }
        Some(documents) => {
            let scored = list(documents).iter().zip(list(row.get("label").unwrap_or(&row["scores"])));
            let ctxs: Vec<Value> =
                scored.map(|(text, score)| json!({"title": "", "text": text, "score": score})).collect();
            json!({"question": row["query"], "answers": [], "ctxs": ctxs})
        }
    };
    rows.iter().map(of).collect()
}

/// Opens rows of a case as `tercio train colbert` would.
fn open<D: RankDevice>(device: &D, case: &Case, rows: &[Value], more: &[&str]) -> Opened<D> {
    let input = &case.input;
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("train.jsonl");
    let lines: Vec<String> = examples(rows).iter().map(Value::to_string).collect();
    std::fs::write(&data, lines.join("\n") + "\n").unwrap();
    let (optimizer, scheduler) = (&input["optimizer"], &input["scheduler"]);
    assert_eq!((numbers(&optimizer["betas"]), number(&optimizer["eps"])), (vec![0.9, 0.999], 1e-8));
    let mut flags = vec!["test".to_owned(), "--name=run".into()];
    let mut set = |flag: &str, value: &str| flags.push(format!("--{flag}={value}"));
    set("checkpoint-dir", folder.path().to_str().unwrap());
    set("train-data", data.to_str().unwrap());
    set("model-path", case.dir.join("model").to_str().unwrap());
    set("dropout", &input["dropout"].to_string());
    for name in ["lr", "weight_decay", "clip"] {
        set(&name.replace('_', "-"), &optimizer[name].to_string());
    }
    set("optim", optimizer["name"].as_str().unwrap());
    set("scheduler", scheduler["name"].as_str().unwrap());
    set("warmup-steps", &scheduler["warmup_steps"].to_string());
    set("scheduler-steps", &scheduler["total_steps"].to_string());
    set("total-steps", &input["steps"].to_string());
    set("global-batch-size", &rows.len().to_string());
    set("micro-batch-size", &rows.len().to_string());
    set("hard-negatives", "100");
    flags.push("--zero-floor".into());
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
    fn shards(&self) -> Vec<ColbertShard> {
        let micro = self.options.data.batch_plan().unwrap().micro;
        Objective::<D>::shards(&self.run.objective, &self.rows(), micro).unwrap()
    }
    fn stepper(&self) -> Stepper<'_, D, ColbertObjective<D>> {
        let plan = self.options.data.batch_plan().unwrap();
        Stepper::new(&self.device, &self.run.objective, plan, &self.options.optim, self.options.run.seed)
    }
    /// Loss and gradient of all rows, in the shards of the settings.
    fn gradient(&self, parameters: &Arena<D>) -> (f64, Arena<D>) {
        let (objective, mut shards) = (&self.run.objective, self.shards());
        let mut gradients = Arena::zeros(&self.device, Objective::<D>::layout(objective));
        let count: u64 = shards.iter().map(|s| Objective::<D>::size(objective, s).count).sum();
        let loss = self.device.run(|| {
            if Objective::<D>::has_first_pass(objective) {
                let pass =
                    |s: &mut ColbertShard| objective.first_pass(&self.device, parameters, s, DRAW).unwrap();
                let shown: Vec<_> = shards.iter_mut().map(pass).collect();
                let all = 0..shards.len();
                Objective::<D>::settle(objective, &World::alone(), &shown, all, &mut shards).unwrap();
            }
            let weight = 1.0 / count as f64;
            let of = |s: &ColbertShard| {
                objective.gradient(&self.device, parameters, s, DRAW, weight, &mut gradients).loss
            };
            shards.iter().map(of).sum()
        });
        (loss, gradients)
    }
}

/// The name of a parameter in PyLate's memory.
fn stored_name(name: &str) -> String {
    match name.split_once("_Dense.") {
        Some((module, rest)) => format!("{module}.{rest}"),
        None => format!("0.auto_model.{name}"),
    }
}

/// Rows and flags of a stored loss; `None` for one that is not trained here.
fn of_loss<'c>(case: &'c Case, name: &str) -> (&'c [Value], Vec<String>, f64) {
    let stored = &case.expected["losses"][name];
    let arguments = &stored["arguments"];
    let mut flags = Vec::new();
    if let Some(temperature) = arguments.get("temperature") {
        flags.push(format!("--temperature={temperature}"));
    }
    match name {
        _ if name.starts_with("distillation") => {
            flags.push("--loss=kl".into());
            if arguments["normalize_scores"] == false {
                flags.push("--raw-scores".into());
            }
            (list(&case.input["distillation_rows"]), flags, 1.0)
        }
        _ => {
            let rows = list(&case.input["contrastive_rows"]);
            let cached = name.starts_with("cached");
            if cached {
                let size = &case.input["cached_mini_batch_size"];
                flags.push(format!("--micro-batch-size={size}"));
            }
            (rows, flags, if cached { rows.len() as f64 } else { 1.0 })
        }
    }
}

fn losses_agree<D: RankDevice>(device: &D, case: &Case, more: &[&str]) {
    for name in case.expected["losses"].as_object().unwrap().keys() {
        let what = format!("{name} on {}, {more:?}", device.name());
        let (rows, flags, times) = of_loss(case, name);
        let name_of = |flag: &str| flag.split('=').next().map(str::to_owned);
        let own = flags.iter().map(String::as_str);
        let own = own.filter(|flag| more.iter().all(|m| name_of(m) != name_of(flag)));
        let flags: Vec<&str> = own.chain(more.iter().copied()).collect();
        let opened = open(device, case, rows, &flags);
        let stored = &case.expected["losses"][name];
        let (loss, gradients) = opened.gradient(&opened.run.state.parameters);
        let close = |found: f64, expected: f64, what: &dyn Fn() -> String| {
            // At a low temperature losses are of the order of the scores over it.
            let allowed = 1e-4 * expected.abs() + 1e-4;
            assert!((found - expected).abs() <= allowed, "{}: expected {expected}, found {found}", what());
        };
        close(loss, number(&stored["loss"]), &|| format!("{what}: loss"));
        let norms = stored["gradient_norms"].as_object().unwrap();
        let (mut squares, mut whole, mut seen) = (0.0, 0, 0);
        for spec in Objective::<D>::layout(&opened.run.objective).specs() {
            let found: Vec<f64> =
                device.read_f64(gradients.view(spec.place)).iter().map(|v| v * times).collect();
            let square = found.iter().map(|v| v * v).sum::<f64>();
            squares += square;
            let stored = stored_name(&spec.name);
            let norm = number(&norms[&stored]);
            let greatest = number(&case.expected["losses"][name]["gradient_norm_global"]);
            let allowed = 2e-4 * norm + 2e-6 * greatest;
            assert!((square.sqrt() - norm).abs() <= allowed, "{what}: {stored}: {} {norm}", square.sqrt());
            seen += 1;
            let full = format!("grad/{name}/{stored}");
            if case.tensors.contains(&full) {
                let expected = case.tensor(&full);
                let error: f64 = found.iter().zip(&expected).map(|(f, e)| (f - e) * (f - e)).sum();
                assert!(error.sqrt() <= 2e-4 * norm, "{what}: {full}: error {} of {norm}", error.sqrt());
                whole += 1;
            }
        }
        assert_eq!((seen, whole > 0), (norms.len(), true), "{what}");
        let global = number(&stored["gradient_norm_global"]);
        assert!((squares.sqrt() - global).abs() <= 2e-4 * global, "{what}: {} {global}", squares.sqrt());
    }
}

#[test]
fn golden_colbert_losses_and_gradients() {
    for case in cases() {
        let cpu = Cpu::new(2).unwrap();
        losses_agree(&cpu, &case, &[]);
        losses_agree(&cpu, &case, &["--recompute", "--micro-batch-size=1"]);
        losses_agree(&Reference, &case, &[]);
        on_cuda!(|device| losses_agree(device, &case, &[]));
    }
}

/// Relative 1e-3 on values down to 0.05, absolute 1e-3 below: the tolerance of trajectories.
fn assert_on_course(found: f64, expected: f64, what: impl Fn() -> String) {
    let most = if expected.abs() < 0.05 { 1e-3 } else { 1e-3 * expected.abs() };
    assert!((found - expected).abs() <= most, "{}: expected {expected}, found {found}", what());
}

#[test]
fn golden_colbert_trajectories() {
    for case in cases() {
        let device = Cpu::new(2).unwrap();
        let mut compared = 0;
        for name in case.expected["losses"].as_object().unwrap().keys() {
            let stored = &case.expected["losses"][name];
            let Some(trajectory) = stored.get("trajectory") else { continue };
            let (rows, flags, times) = of_loss(&case, name);
            // A gradient of another length is clipped to another step.
            if times != 1.0 {
                continue;
            }
            for micro in [rows.len(), 1] {
                let what = format!("{name}, shards of {micro}");
                let micro = format!("--micro-batch-size={micro}");
                let flags: Vec<&str> = flags.iter().map(String::as_str).chain([micro.as_str()]).collect();
                let opened = open(&device, &case, rows, &flags);
                let mut state: TrainState<Cpu> = open(&device, &case, rows, &flags).run.state;
                let (losses, norms, rates) = (
                    numbers(&trajectory["loss"]),
                    numbers(&trajectory["grad_norm"]),
                    numbers(&trajectory["lr"]),
                );
                let mut stepper = opened.stepper();
                for (u, &loss) in losses.iter().enumerate() {
                    let outcome = stepper.update(&mut state, &opened.rows()).unwrap();
                    assert_on_course(outcome.loss, loss, || format!("{what}: loss of update {u}"));
                    assert_on_course(outcome.gradient_norm, norms[u], || format!("{what}: norm of {u}"));
                    assert!((outcome.lr - rates[u]).abs() <= 1e-9 * rates[u], "{what}: lr");
                }
                let (after, _) = opened.gradient(&state.parameters);
                assert_on_course(after, number(&trajectory["loss_after"]), || format!("{what}: after"));
                let sums = trajectory["parameters_after"].as_object().unwrap();
                let norms = stored["gradient_norms"].as_object().unwrap();
                for spec in Objective::<Cpu>::layout(&opened.run.objective).specs() {
                    let name = stored_name(&spec.name);
                    // Without a gradient in truth, steps are of noise.
                    if number(&norms[&name]) < 1e-5 {
                        continue;
                    }
                    let expected = numbers(&sums[&name]);
                    let (sum, squares) = checksum(&device, &state.parameters, spec.place);
                    let most = 1e-3 * (spec.place.len() as f64 * expected[1]).sqrt();
                    assert!((squares - expected[1]).abs() <= 1e-3 * expected[1], "{what}: {name}");
                    assert!((sum - expected[0]).abs() <= most, "{what}: {name}: {sum} {expected:?}");
                    compared += 1;
                }
            }
        }
        assert!(compared > 50, "{compared} parameters compared");
    }
}

/// Two processes of PyLate give twice the mean over both ranks' rows, loss and gradient.
#[test]
fn golden_colbert_two_processes() {
    for case in cases() {
        let device = Cpu::new(2).unwrap();
        let ranks = list(&case.input["two_process_rows"]);
        let rows: Vec<Value> = ranks.iter().flat_map(|rows| list(rows).clone()).collect();
        let times = ranks.len() as f64;
        for (name, stored) in case.expected["two_processes"].as_object().unwrap() {
            let Some(temperature) = stored.get("temperature") else { continue };
            let temperature = format!("--temperature={temperature}");
            let micro = format!("--micro-batch-size={}", list(&ranks[0]).len());
            let opened = open(&device, &case, &rows, &[&temperature, &micro]);
            let (loss, gradients) = opened.gradient(&opened.run.state.parameters);
            let close = |found: f64, expected: f64, what: &str| {
                let allowed = 2e-4 * expected.abs() + 1e-5;
                assert!((found - expected).abs() <= allowed, "{name}: {what}: {found}, not {expected}");
            };
            close(loss, number(&stored["global_mean_loss"]), "loss");
            let of_ranks = numbers(&stored["rank_losses"]);
            close(times * loss, of_ranks.iter().sum::<f64>() / of_ranks.len() as f64, "rank losses");
            let norms = stored["gradient_norms_after_ddp"].as_object().unwrap();
            let mut whole = 0;
            for spec in Objective::<Cpu>::layout(&opened.run.objective).specs() {
                let found: Vec<f64> =
                    device.read_f64(gradients.view(spec.place)).iter().map(|v| v * times).collect();
                let parameter = stored_name(&spec.name);
                let norm = found.iter().map(|v| v * v).sum::<f64>().sqrt();
                close(norm, number(&norms[&parameter]), &parameter);
                let full = format!("two_processes/{name}/{parameter}");
                if case.tensors.contains(&full) {
                    let expected = case.tensor(&full);
                    let error: f64 = found.iter().zip(&expected).map(|(f, e)| (f - e) * (f - e)).sum();
                    assert!(error.sqrt() <= 2e-4 * norm, "{full}: error {} of {norm}", error.sqrt());
                    whole += 1;
                }
            }
            assert!(whole > 0, "{name}: no full gradient compared");
        }
    }
}

fn check_ids(text: &EncodedText, ids: &Value, mask: &Value, whole: bool, what: &str) {
    let (ids, mask) = (integers(ids), integers(mask));
    let real = mask.iter().filter(|&&m| m == 1).count();
    let stored = &ids[..if whole { ids.len() } else { real }];
    assert_eq!(text.ids.iter().map(|&id| i64::from(id)).collect::<Vec<_>>(), stored, "{what}");
    assert_eq!(text.real, real, "{what}: attended tokens");
}

#[test]
fn golden_colbert_tokens() {
    for case in cases() {
        let device = Cpu::new(1).unwrap();
        let rows = list(&case.input["contrastive_rows"]);
        let tokens = &case.expected["tokens"];
        let with = open(&device, &case, rows, &[]);
        let without = open(&device, &case, rows, &["--no-expansion"]);
        for (name, opened) in [("queries_expansion", &with), ("queries_no_expansion", &without)] {
            let objective = &opened.run.objective;
            for (i, text) in list(&case.input["queries"]).iter().enumerate() {
                let query =
                    objective.encoding.tokens.query(text.as_str().unwrap(), &objective.tokenizer).unwrap();
                let (ids, mask) = (&tokens[name]["input_ids"][i], &tokens[name]["attention_mask"][i]);
                check_ids(&query, ids, mask, name == "queries_expansion", &format!("{name} {i}"));
                assert_eq!(query.kept.len(), query.ids.len());
            }
        }
        let skipped = integers(&tokens["skiplist_ids"]);
        let objective = &with.run.objective;
        for (i, text) in list(&case.input["documents"]).iter().enumerate() {
            let document =
                objective.encoding.tokens.document(text.as_str().unwrap(), &objective.tokenizer).unwrap();
            let (ids, mask) =
                (&tokens["documents"]["input_ids"][i], &tokens["documents"]["attention_mask"][i]);
            check_ids(&document, ids, mask, false, &format!("document {i}"));
            let shown = (0..document.ids.len() as u32)
                .filter(|&t| !skipped.contains(&i64::from(document.ids[t as usize])));
            assert_eq!(document.kept, shown.collect::<Vec<_>>(), "document {i}");
            let shape = integers(&case.expected["documents_shapes"][i]);
            assert_eq!(document.kept.len() as i64, shape[0], "document {i}");
        }
    }
}

#[test]
fn golden_colbert_scores_of_a_batch() {
    for case in cases() {
        let device = Cpu::new(1).unwrap();
        for (rows, flags, stored) in [
            ("contrastive_rows", &[][..], "contrastive_scores"),
            ("distillation_rows", &["--loss=kl"], "distillation_scores"),
        ] {
            let opened = open(&device, &case, list(&case.input[rows]), flags);
            let objective = &opened.run.objective;
            let train = &objective.train;
            let examples: Vec<_> = (0..train.len()).map(|i| train.get(i).unwrap()).collect();
            let ranker = objective.ranker(&device, &opened.run.state.parameters);
            let scores = device.run(|| ranker.scores(&examples)).unwrap();
            let stored = case.tensor(stored);
            let columns = stored.len() / scores.len();
            for (q, scores) in scores.iter().map(|s| &s.scores).enumerate() {
                let own = if flags.is_empty() { q * columns / train.len() } else { 0 };
                // Scored documents come best first, stored ones in the order of the file.
                let place = |k: usize| examples[q].passages[k].passage.file_position;
                for (k, &score) in scores.iter().enumerate() {
                    let column = if flags.is_empty() { own + k } else { place(k) };
                    assert_close(score, stored[q * columns + column], || format!("{rows}: {q} {k}"));
                }
            }
        }
    }
}

#[test]
fn recompute_threads_and_shards() {
    for case in cases() {
        let rows = list(&case.input["contrastive_rows"]);
        let of = |threads: usize, flags: &[&str]| {
            let device = Cpu::new(threads).unwrap();
            let opened = open(&device, &case, rows, flags);
            let (loss, gradients) = opened.gradient(&opened.run.state.parameters);
            (loss, bits(&device, &gradients), device.read_f64(gradients.all()))
        };
        let plain = of(1, &["--dropout=0.1"]);
        let again = of(2, &["--dropout=0.1", "--recompute"]);
        assert!(plain.1 == again.1 && plain.0.to_bits() == again.0.to_bits(), "{}", case.name());
        assert!(plain.1 != of(1, &["--dropout=0.2"]).1, "{}: dropout has no effect", case.name());
        // Any cut of the batch has the loss and the gradient of the whole: the cached gradient is the plain one.
        let (loss, _, gradient) = of(1, &[]);
        for micro in ["--micro-batch-size=1", "--micro-batch-size=2"] {
            let cut = of(2, &[micro]);
            assert!((cut.0 - loss).abs() < 1e-5, "{micro}: {} {loss}", cut.0);
            let scale = gradient.iter().map(|v| v * v).sum::<f64>().sqrt();
            let error = cut.2.iter().zip(&gradient).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
            assert!(error < 1e-5 * scale, "{micro}: error {error} of {scale}");
        }
        assert_all_close(&[of(1, &["--micro-batch-size=1"]).0], &[loss], "loss");
    }
}

/// A document of which the skip list leaves nothing scores -1 for every token of a query, the least that two unit vectors can have, and 0
/// with PyLate's floor; a word that the vocabulary lacks hides nothing.
#[test]
fn golden_colbert_documents_of_which_nothing_is_left() {
    for case in cases() {
        let device = Cpu::new(1).unwrap();
        let rows = json!([
            {"query": "who repaired the church bell?", "positive": "! , ;", "negative": "the old miller"},
            {"query": "the harbour wall", "positive": "a wooden boat", "negative": "?"},
        ]);
        for (floor, least) in [(true, 0.0), (false, -1.0)] {
            let mut opened = open(&device, &case, list(&rows), &[]);
            let objective = &mut opened.run.objective;
            objective.zero_floor = floor;
            let mut config = objective.model.config.clone();
            config.skiplist.extend(["[CLS]", "[SEP]", "[D] ", "no such word"].map(String::from));
            let most = objective.model.encoder.config().max_tokens();
            objective.encoding.tokens = TextTokens::new(&config, &objective.tokenizer, most).unwrap();
            let unknown = objective.encoding.tokens.document("\u{1F980} x", &objective.tokenizer).unwrap();
            let unk = objective.tokenizer.unk_id().unwrap();
            assert!(unknown.kept.iter().any(|&t| unknown.ids[t as usize] == unk), "{unknown:?}");
            let train = &objective.train;
            let examples: Vec<_> = (0..train.len()).map(|i| train.get(i).unwrap()).collect();
            let parameters = &opened.run.state.parameters;
            let scores = device.run(|| objective.ranker(&device, parameters).scores(&examples)).unwrap();
            let (query, _) = objective.encoding.tokens.lengths();
            assert_eq!(scores[0].scores[0], least * query as f64);
            assert_eq!(scores[1].scores[1], least * query as f64);
            assert!(scores[0].scores[1] > 0.0 && scores[1].scores[0] > 0.0);
            let (loss, gradients) = opened.gradient(parameters);
            let gradients = device.read_f64(gradients.all());
            assert!(loss.is_finite() && gradients.iter().all(|g| g.is_finite()));
            assert!(gradients.iter().any(|&g| g != 0.0), "the others still teach");
        }
    }
}
