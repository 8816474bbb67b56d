//! The reader against what PyTorch computed: inputs, hidden states, logits, loss, scores, answers, gradients and a
//! trajectory of updates, on every device, through the settings, data, objective and stepper that a user's run takes.
//!
//! Variants, shapes and hyper-parameters come from the files of the folder that TERCIO_GOLDEN names.

mod golden_support;

use golden_support::{
    Case, DRAW, Opened, Opening, TargetParts, all_rows, assert_all_close, assert_close, bits, cases,
    checksum, integers, legacy_cases, list, number, numbers,
};
use serde_json::Value;
use tercio_data::PackedReaderBatch;
use tercio_engine::{Cpu, Reference, Span, Tape};
use tercio_models::folder::ModelFolder;
use tercio_models::t5::{self, LoadedT5};
use tercio_train::predict::Prediction;
use tercio_train::ranks::RankDevice;

/// Runs a check of every case on every device.
macro_rules! on_every_device {
    ($check:ident, $cases:expr) => {
        for case in $cases {
            $check(&Cpu::new(2).unwrap(), &case);
            $check(&Reference, &case);
            on_cuda!(|device| $check(device, &case));
        }
    };
}

/// Token ids and labels are the stored ones where those are not padding; lengths agree.
fn check_inputs(batch: &PackedReaderBatch, case: &Case, expected: &Value, start: u32, what: &str) {
    let (ids, mask) = (list(&expected["passage_ids"]), list(&expected["passage_mask"]));
    assert_eq!(batch.questions(), ids.len(), "{what}: questions");
    for (q, (ids, mask)) in ids.iter().zip(mask).enumerate() {
        let bounds = &batch.question_sequences[q..q + 2];
        assert_eq!((bounds[1] - bounds[0]) as usize, list(ids).len(), "{what}: passages of question {q}");
        for (p, (ids, mask)) in list(ids).iter().zip(list(mask)).enumerate() {
            let stored = integers(ids).into_iter().zip(integers(mask));
            let stored: Vec<i64> = stored.filter(|&(_, m)| m == 1).map(|(id, _)| id).collect();
            let sequence = bounds[0] as usize + p;
            let span = batch.offsets[sequence] as usize..batch.offsets[sequence + 1] as usize;
            let ours: Vec<i64> = batch.ids[span].iter().map(|&id| id.into()).collect();
            assert_eq!(ours, stored, "{what}: question {q}, passage {p}");
        }
    }
    let inputs = batch.decoder_inputs(start);
    let spans = Span::from_offsets(&batch.target_offsets);
    let longest = spans.iter().map(Span::len).max().unwrap();
    let width = match case.input["answer_maxlength"].as_i64().unwrap() {
        n if n > 0 => n as usize,
        _ => longest,
    };
    for (q, span) in spans.iter().enumerate() {
        let range = span.start as usize..span.end as usize;
        let mut labels: Vec<i64> = batch.targets[range.clone()].iter().map(|&id| id.into()).collect();
        let read: Vec<i64> = inputs[range].iter().map(|&id| id.into()).collect();
        assert_eq!(read, integers(&expected["decoder_input_ids"][q])[..read.len()], "{what}: question {q}");
        labels.resize(width, -100);
        assert_eq!(labels, integers(&expected["labels"][q]), "{what}: labels of question {q}");
    }
}

/// Rows of `packed` (`[tokens, width]`) put where a batch padded to `length` tokens a passage has them, zeros elsewhere.
fn scatter(packed: &[f64], batch: &PackedReaderBatch, length: usize, width: usize) -> Vec<f64> {
    let mut padded = vec![0.0; batch.sequences() * length * width];
    for (s, span) in Span::from_offsets(&batch.offsets).iter().enumerate() {
        let rows = &packed[span.start as usize * width..span.end as usize * width];
        padded[s * length * width..][..rows.len()].copy_from_slice(rows);
    }
    padded
}

/// Loss, and hidden states and teacher-forced logits where they are stored under `part`.
fn check_forward<D: RankDevice>(opened: &Opened<D>, case: &Case, part: &str, what: &str) {
    let (device, batch, model) = (&opened.device, opened.batch(), &opened.run.objective.model);
    let parts = TargetParts::new(opened, &batch);
    let (hidden, losses, logits) = device.run(|| {
        let mut tape = Tape::inference(device, &opened.run.state.parameters);
        let states = model.encode(&mut tape, &batch.ids, &Span::from_offsets(&batch.offsets), false);
        let losses = model.loss(&mut tape, &states, &parts.targets(&batch));
        let logits = model.logits(&mut tape, &states, &parts.targets(&batch));
        (device.read_f64(states.tensor.view()), losses, device.read_f64(logits.view()))
    });
    let loss = losses.iter().sum::<f64>() / losses.len() as f64;
    assert_close(loss, number(&case.expected[part]["loss"]), || format!("{what}: loss"));
    let (trained, _) = opened.gradient(DRAW);
    assert_close(trained, loss, || format!("{what}: loss of the objective"));

    let name = format!("{part}/encoder_hidden");
    if case.tensors.contains(&name) {
        let length = opened.run.objective.encoding.text_maxlength;
        let padded = scatter(&hidden, &batch, length, model.config.d_model);
        assert_all_close(&padded, &case.tensor(&name), &format!("{what}: encoder_hidden"));
    }
    let name = format!("{part}/logits");
    let shape = case.tensors.shape(&name).unwrap().to_vec();
    let (stored, vocabulary) = (case.tensor(&name), model.config.vocab_size);
    assert_eq!((shape[0], shape[2]), (batch.questions(), vocabulary), "{what}: logits");
    for (q, span) in Span::from_offsets(&batch.target_offsets).iter().enumerate() {
        let ours = &logits[span.start as usize * vocabulary..span.end as usize * vocabulary];
        let theirs = &stored[q * shape[1] * vocabulary..][..ours.len()];
        assert_all_close(ours, theirs, &format!("{what}: logits of question {q}"));
    }
}

/// Generated ids with start token and padding, text where it is stored, and passage scores.
fn check_answers<D: RankDevice>(opened: &Opened<D>, case: &Case, part: &str, what: &str) {
    let (device, objective) = (&opened.device, &opened.run.objective);
    let expected = &case.expected[part];
    let mut predictor = objective.predictor(device, &opened.run.state.parameters);
    predictor.scores = true;
    let questions = opened.questions();
    let together = device.run(|| predictor.answer(&questions)).unwrap();
    let longest = together.iter().map(|p| p.tokens.len()).max().unwrap();
    let stored_scores = case.tensor(&format!("{part}/crossattention_scores"));
    let mut scores = Vec::new();
    for (q, prediction) in together.iter().enumerate() {
        let mut ids = vec![i64::from(objective.model.config.decoder_start_token_id)];
        ids.extend(prediction.tokens.iter().map(|&id| i64::from(id)));
        ids.resize(longest + 1, objective.tokenizer.pad_id().into());
        assert_eq!(ids, integers(&expected["generated_ids"][q]), "{what}: question {q}");
        if let Some(text) = expected["generated_text"].get(q) {
            assert_eq!(prediction.answer, text.as_str().unwrap(), "{what}: question {q}");
        }
        let of_question: Vec<f64> = prediction.scores.as_ref().unwrap().iter().map(|&s| s.into()).collect();
        let in_json = numbers(&expected["crossattention_scores"][q]);
        assert_all_close(&of_question, &in_json, &format!("{what}: scores of question {q}"));
        scores.extend(of_question);
    }
    assert_all_close(&scores, &stored_scores, &format!("{what}: scores"));

    // A file read a question at a time gives the same answers.
    predictor.batch = 1;
    let mut one_by_one: Vec<Prediction> = Vec::new();
    let read = predictor.each(&objective.train, |_, prediction| {
        one_by_one.push(prediction);
        Ok(())
    });
    read.unwrap();
    let said = |all: &[Prediction]| -> Vec<(String, Vec<u32>)> {
        all.iter().map(|p| (p.answer.clone(), p.tokens.clone())).collect()
    };
    assert_eq!(said(&one_by_one), said(&together), "{what}: one question at a time");
}

fn variants_agree<D: RankDevice>(device: &D, case: &Case) {
    for (variant, eos) in case.variants() {
        let what = format!("{} on {}: {variant}", case.name(), device.name());
        let opened = case.open(device, Opening { eos, ..Opening::default() });
        let start = opened.run.objective.model.config.decoder_start_token_id;
        check_inputs(&opened.batch(), case, &case.expected[&variant], start, &what);
        check_forward(&opened, case, &variant, &what);
        check_answers(&opened, case, &variant, &what);
    }
}

#[test]
fn golden_reader_variants() {
    on_every_device!(variants_agree, cases());
}

fn legacy_agrees<D: RankDevice>(device: &D, case: &Case) {
    let what = format!("{} on {}: legacy", case.name(), device.name());
    let opened = case.open(device, Opening { legacy: true, ..case.plain() });
    assert!(opened.run.objective.model.needs_key_positions(), "{what}: no bias table");
    check_forward(&opened, case, "legacy", &what);
    check_answers(&opened, case, "legacy", &what);
}

#[test]
fn golden_reader_legacy_checkpoint() {
    on_every_device!(legacy_agrees, legacy_cases());
}

fn gradients_agree<D: RankDevice>(device: &D, case: &Case) {
    let what = format!("{} on {}", case.name(), device.name());
    let opened = case.open(device, case.plain());
    let (loss, gradients) = opened.gradient(DRAW);
    assert_close(loss, number(&case.expected["plain"]["loss"]), || format!("{what}: loss"));
    let norms = case.expected["gradient_norms"].as_object().unwrap();
    let specs = opened.run.objective.model.layout().specs();
    let mut ours: Vec<&str> = specs.iter().map(|s| s.name.as_str()).collect();
    let mut theirs: Vec<&str> = norms.keys().map(String::as_str).collect();
    ours.sort_unstable();
    theirs.sort_unstable();
    assert_eq!(ours, theirs, "{what}: names");
    let (mut squares, mut whole) = (0.0, 0);
    for spec in specs {
        let found = device.read_f64(gradients.view(spec.place));
        let square = found.iter().map(|v| v * v).sum::<f64>();
        squares += square;
        assert_close(square.sqrt(), number(&norms[&spec.name]), || format!("{what}: norm of {}", spec.name));
        let name = format!("grad/{}", spec.name);
        if case.tensors.contains(&name) {
            assert_eq!(case.tensors.shape(&name).unwrap(), spec.shape, "{what}: {name}");
            assert_all_close(&found, &case.tensor(&name), &format!("{what}: {name}"));
            whole += 1;
        }
    }
    let stored = case.tensors.names().filter(|n| n.starts_with("grad/")).count();
    assert!(whole > 0 && whole == stored, "{what}: {whole} of {stored} full gradients compared");
    let global = number(&case.expected["gradient_norm_global"]);
    assert_close(squares.sqrt(), global, || format!("{what}: global norm"));
}

#[test]
fn golden_reader_gradients() {
    on_every_device!(gradients_agree, cases());
}

fn trajectory_agrees<D: RankDevice>(device: &D, case: &Case, micro: usize) {
    let what = format!("{} on {}, micro-batch {micro}", case.name(), device.name());
    let opening = Opening { micro, ..case.plain() };
    let opened = case.open(device, opening);
    let mut state = case.open(device, opening).run.state;
    let rows = all_rows(&opened);
    if micro > 0 {
        assert_eq!(opened.plan.shards, rows.rows.len().div_ceil(micro), "{what}: shards");
    }
    let stored = &case.expected["trajectory"];
    let (losses, norms, rates) =
        (numbers(&stored["loss"]), numbers(&stored["grad_norm"]), numbers(&stored["lr"]));
    assert_eq!(losses.len() as u64, opened.options.optim.total_steps, "{what}: updates");
    let mut stepper = opened.stepper();
    for (u, &loss) in losses.iter().enumerate() {
        let outcome = stepper.update(&mut state, &rows).unwrap();
        assert_close(outcome.loss, loss, || format!("{what}: loss of update {u}"));
        assert_close(outcome.gradient_norm, norms[u], || format!("{what}: norm of update {u}"));
        let difference = (outcome.lr - rates[u]).abs();
        assert!(difference <= 1e-9 * rates[u], "{what}: lr of update {u}: {} {}", outcome.lr, rates[u]);
    }
    let (after, _) = opened.gradient_at(&state.parameters, DRAW);
    assert_close(after, number(&stored["loss_after"]), || format!("{what}: loss after"));
    let sums = stored["parameters_after"].as_object().unwrap();
    let specs = opened.run.objective.model.layout().specs();
    assert_eq!(specs.len(), sums.len(), "{what}: parameters");
    for spec in specs {
        let (name, expected) = (&spec.name, numbers(&sums[&spec.name]));
        let (sum, squares) = checksum(device, &state.parameters, spec.place);
        let off = (squares - expected[1]).abs();
        assert!(
            off <= 1e-3 * expected[1],
            "{what}: {name}: sum of squares {squares}, expected {}",
            expected[1]
        );
        let tolerance = 1e-3 * (spec.place.len() as f64 * expected[1]).sqrt();
        assert!(
            (sum - expected[0]).abs() <= tolerance,
            "{what}: {name}: sum {sum}, expected {}",
            expected[0]
        );
    }
}

fn whole_trajectory<D: RankDevice>(device: &D, case: &Case) {
    trajectory_agrees(device, case, 0);
}

fn cut_trajectory<D: RankDevice>(device: &D, case: &Case) {
    trajectory_agrees(device, case, 1);
}

#[test]
fn golden_reader_trajectory() {
    on_every_device!(whole_trajectory, cases());
}

#[test]
fn golden_reader_trajectory_in_micro_batches() {
    on_every_device!(cut_trajectory, cases());
}

fn recompute_changes_no_bit<D: RankDevice>(device: &D, case: &Case) {
    for dropout in [None, Some(0.1)] {
        let run = |recompute| {
            let opened = case.open(device, Opening { recompute, dropout, ..case.plain() });
            let (loss, gradients) = opened.gradient(DRAW);
            (loss.to_bits(), bits(device, &gradients))
        };
        let (plain, again) = (run(false), run(true));
        let what = format!("{} on {}, dropout {dropout:?}", case.name(), device.name());
        assert_eq!(plain.0, again.0, "{what}: loss");
        assert!(plain.1 == again.1, "{what}: gradients");
        if dropout.is_some() {
            let without = case.open(device, case.plain()).gradient(DRAW);
            assert_ne!(plain.0, without.0.to_bits(), "{what}: dropout has no effect");
        }
    }
}

#[test]
fn golden_reader_recompute_gives_the_same_bits() {
    on_every_device!(recompute_changes_no_bit, cases());
}

fn saved_model_reopens<D: RankDevice>(device: &D, case: &Case) {
    let fid = case.dir.join("model_fid_layout").is_dir();
    for legacy in [Some(false), fid.then_some(true)].into_iter().flatten() {
        let opened = case.open(device, Opening { legacy, ..case.plain() });
        let folder = tempfile::tempdir().unwrap();
        let (objective, parameters) = (&opened.run.objective, &opened.run.state.parameters);
        t5::save(&objective.model, parameters, &objective.json, folder.path(), device).unwrap();
        let saved = ModelFolder::open(folder.path().to_str().unwrap()).unwrap();
        let reopened = LoadedT5::open(&saved, device).unwrap();
        let what = format!("{} on {}, legacy {legacy}", case.name(), device.name());
        assert_eq!(reopened.model.config, objective.model.config, "{what}");
        assert_eq!(reopened.model.layout().specs(), objective.model.layout().specs(), "{what}");
        assert!(bits(device, &reopened.parameters) == bits(device, parameters), "{what}: values");
        // Hugging Face derives these two.
        let derived = ["dense_act_fn", "is_gated_act"];
        for key in objective.json.keys().filter(|k| !derived.contains(&k.as_str())) {
            assert!(reopened.json.contains_key(key), "{what}: {key} is lost");
        }
    }
}

#[test]
fn golden_reader_saved_model_reopens() {
    on_every_device!(saved_model_reopens, cases());
}
