//! BERT's relatives against values that Hugging Face computed (tools/make_encoder_cases.py), and what every encoder must keep: packed
//! texts are the texts one by one, threads change no bit, recomputation changes no bit, a saved folder is the same model.

use std::path::{Path, PathBuf};

use proptest::prelude::*;
use serde_json::Value;
use tercio_engine::cpu::Precision;
use tercio_engine::{Activation, Arena, Cpu, Device, Draw, Span, Tape, Tensor};
use tercio_models::bert::{BertConfig, BertFamily};
use tercio_models::encoder::{EncoderConfig, LoadedEncoder};
use tercio_models::folder::ModelFolder;
use tercio_models::weights::WeightsReader;

fn cases() -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/encoders");
    let mut cases: Vec<PathBuf> = std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()).collect();
    cases.sort();
    cases
}

fn open(folder: &Path, device: &Cpu) -> LoadedEncoder<Cpu> {
    LoadedEncoder::open(&ModelFolder::open(folder.to_str().unwrap()).unwrap(), device).unwrap()
}

fn lists<T>(value: &Value, number: impl Fn(&Value) -> T) -> Vec<Vec<T>> {
    let rows = value.as_array().unwrap().iter();
    rows.map(|row| row.as_array().unwrap().iter().map(&number).collect()).collect()
}

fn ids(value: &Value) -> Vec<Vec<u32>> {
    lists(value, |v| v.as_u64().unwrap() as u32)
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f - e).abs() <= 1e-4 * e.abs() + 1e-5, "{what}[{i}]: expected {e}, found {f}");
    }
}

fn spans(texts: &[Vec<u32>]) -> Vec<Span> {
    let mut offsets = vec![0];
    offsets.extend(texts.iter().scan(0, |at, text| {
        *at += text.len() as u32;
        Some(*at)
    }));
    Span::from_offsets(&offsets)
}

/// States of all texts, and the gradients of their sum weighted by sines that start anew with every text.
fn run(
    device: &Cpu,
    loaded: &LoadedEncoder<Cpu>,
    texts: &[Vec<u32>],
    types: Option<&[Vec<u32>]>,
    recompute: bool,
    draw: Option<Draw>,
) -> (Vec<f64>, Arena<Cpu>) {
    device.run(|| {
        let mut tape = Tape::recording(device, &loaded.parameters, draw);
        let types = types.map(|t| t.concat());
        let states =
            loaded.encoder.encode(&mut tape, &texts.concat(), types.as_deref(), &spans(texts), recompute);
        let (rows, width) = (states.tensor.rows, states.tensor.columns);
        let slopes: Vec<f32> =
            texts.iter().flat_map(|t| (0..t.len() * width).map(|i| libm::sin(i as f64) as f32)).collect();
        tape.inject(&states, Tensor::from_values(device, rows, width, &slopes));
        let found = device.read_f64(states.tensor.view());
        drop(states);
        let mut gradients = Arena::zeros(device, &loaded.layout);
        tape.backward(&mut gradients, &[]);
        (found, gradients)
    })
}

#[test]
fn states_and_gradients_are_those_of_hugging_face() {
    let device = Cpu::new(2).unwrap();
    let cases = cases();
    assert_eq!(cases.len(), 6, "{cases:?}");
    for case in cases {
        let name = case.file_name().unwrap().to_str().unwrap().to_owned();
        let expected: Value =
            serde_json::from_slice(&std::fs::read(case.join("expected.json")).unwrap()).unwrap();
        let loaded = open(&case, &device);
        let types = (!expected["token_types"].is_null()).then(|| ids(&expected["token_types"]));
        let texts = ids(&expected["ids"]);
        let (states, gradients) = run(&device, &loaded, &texts, types.as_deref(), false, None);
        let want = lists(&expected["states"], |v| v.as_f64().unwrap()).concat();
        assert_close(&states, &want, &format!("{name}: states"));
        let norms = expected["gradient_norms"].as_object().unwrap();
        let theirs = WeightsReader::open(&case.join("gradients.safetensors")).unwrap();
        for spec in loaded.layout.specs() {
            let gradient = device.read_f64(gradients.view(spec.place));
            let norm = gradient.iter().map(|v| v * v).sum::<f64>().sqrt();
            let what = format!("{name}: gradient of {}", spec.name);
            assert_close(&[norm], &[norms[&spec.name].as_f64().unwrap()], &what);
            let want = theirs.read(&spec.name).unwrap();
            assert_eq!(gradient.len(), want.len(), "{what}");
            // Sums of f32: an element may be small beside what was added up for it.
            let slack = 1e-5 * want.iter().fold(1f64, |most, v| most.max(f64::from(v.abs())));
            for (i, (found, want)) in gradient.iter().zip(want).enumerate() {
                let want = f64::from(want);
                let close = (found - want).abs() <= 1e-4 * want.abs() + slack;
                assert!(close, "{what}[{i}]: expected {want}, found {found}");
            }
        }
        assert_eq!(loaded.layout.specs().len(), norms.len(), "{name}");
    }
}

#[test]
fn a_saved_encoder_is_the_same_model_again() {
    let device = Cpu::new(1).unwrap();
    for case in cases() {
        let loaded = open(&case, &device);
        let folder = tempfile::tempdir().unwrap();
        loaded.save(folder.path(), &device).unwrap();
        let again = open(folder.path(), &device);
        assert_eq!(loaded.encoder.config(), again.encoder.config());
        assert_eq!(device.host(loaded.parameters.all()), device.host(again.parameters.all()));
        assert_eq!(loaded.kept, again.kept);
        let pooler = case.ends_with("bert") || case.ends_with("roberta");
        assert_eq!(again.kept.len(), if pooler { 2 } else { 0 }, "{case:?}");
        let name = case.file_name().unwrap().to_str().unwrap();
        let headed = name.contains("masked_lm") || name.contains("classifier");
        assert_eq!((loaded.note.is_some(), again.note.is_some()), (headed, false), "{case:?}");
        assert_eq!(again.json["tie_word_embeddings"], loaded.json["tie_word_embeddings"]);
    }
}

fn config(family: BertFamily) -> EncoderConfig {
    EncoderConfig::Bert(BertConfig {
        family,
        vocab_size: 50,
        hidden_size: 20,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        intermediate_size: 30,
        max_position_embeddings: 200,
        type_vocab_size: if family == BertFamily::DistilBert { 0 } else { 2 },
        activation: Activation::GeluErf,
        hidden_dropout: 0.2,
        attention_dropout: 0.1,
        pad_token_id: Some(1),
        initializer_range: 0.3,
        ..BertConfig::base()
    })
}

const DRAW: Option<Draw> = Some(Draw { seed: 3, update: 2, shard: 1 });

fn bits(values: &[f64]) -> Vec<u64> {
    values.iter().map(|v| v.to_bits()).collect()
}

#[test]
fn threads_and_recomputation_change_no_bit() {
    let texts: Vec<Vec<u32>> =
        [190, 1, 60, 17].map(|n: u32| (0..n).map(|i| 2 + (i * i + n) % 48).collect()).to_vec();
    for precision in [Precision::F32, Precision::Bf16] {
        let devices = [1, 2, 3].map(|n| Cpu::new(n).unwrap().with_precision(precision));
        let loaded = LoadedEncoder::random(config(BertFamily::Bert), 7, &devices[0]);
        let of = |device: &Cpu, recompute| {
            let (states, gradients) = run(device, &loaded, &texts, None, recompute, DRAW);
            (bits(&states), bits(&device.read_f64(gradients.all())))
        };
        let one = of(&devices[0], false);
        assert!(of(&devices[1], false) == one && of(&devices[2], false) == one, "threads, {precision:?}");
        assert!(of(&devices[1], true) == one, "recomputed, {precision:?}");
    }
}

#[test]
fn bf16_rounds_products_and_nothing_else() {
    let plain = Cpu::new(2).unwrap();
    let bf16 = plain.clone().with_precision(Precision::Bf16);
    let texts = vec![(2..40).collect::<Vec<u32>>(), vec![3, 4]];
    for family in BertFamily::ALL {
        let loaded = LoadedEncoder::random(config(family), 7, &plain);
        let of = |device| {
            let (states, gradients) = run(device, &loaded, &texts, None, false, None);
            [states, device.read_f64(gradients.all())]
        };
        for (rounded, exact) in of(&bf16).iter().zip(&of(&plain)) {
            let norm = |v: &mut dyn Iterator<Item = f64>| v.map(|v| v * v).sum::<f64>().sqrt();
            let error = norm(&mut rounded.iter().zip(exact).map(|(r, e)| r - e));
            let relative = error / norm(&mut exact.iter().copied());
            // Eight bits of significand, some products deep; and rounded it must be.
            assert!((1e-4..0.04).contains(&relative), "{family:?}: {relative}");
        }
    }
}

#[test]
fn dropout_is_drawn_anew_with_every_update() {
    let device = Cpu::new(1).unwrap();
    let loaded = LoadedEncoder::random(config(BertFamily::DistilBert), 7, &device);
    let texts = vec![vec![5, 6, 7, 8]];
    let of = |draw| run(&device, &loaded, &texts, None, false, draw).0;
    let other = Some(Draw { update: 3, ..DRAW.unwrap() });
    assert!(of(DRAW) != of(other) && of(DRAW) != of(None) && of(DRAW) == of(DRAW));
}

#[test]
fn padding_that_is_packed_gets_no_gradient_and_no_position() {
    let device = Cpu::new(1).unwrap();
    for family in BertFamily::ALL {
        let loaded = LoadedEncoder::random(config(family), 7, &device);
        let texts = vec![vec![4, 9, 1, 1], vec![5, 1], vec![7]];
        let (_, gradients) = run(&device, &loaded, &texts, None, false, None);
        // The rows that got a gradient.
        let rows = |table: &str| {
            let spec = loaded.layout.specs().iter().find(|s| s.name.contains(table)).unwrap();
            let gradient = device.read_f64(gradients.view(spec.place));
            let sums = gradient.chunks(20).map(|row| row.iter().map(|v| v.abs()).sum::<f64>());
            let rows: Vec<usize> = sums.enumerate().filter(|(_, sum)| *sum > 0.0).map(|(i, _)| i).collect();
            rows
        };
        assert_eq!(rows("word_embeddings"), [4, 5, 7, 9], "{family:?}");
        // Where positions count from padding on, padding has the row of its id, 1, and that is frozen.
        let positions: &[usize] = if family.counts_from_padding() { &[2, 3] } else { &[0, 1, 2, 3] };
        assert_eq!(rows("position_embeddings"), positions, "{family:?}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]
    /// A ragged batch is its texts one by one.
    #[test]
    fn packed_texts_are_the_texts_one_by_one(
        texts in prop::collection::vec(prop::collection::vec(2u32..50, 1..=40), 1..=6),
        family in prop::sample::select(BertFamily::ALL.to_vec()),
    ) {
        let device = Cpu::new(1).unwrap();
        let loaded = LoadedEncoder::random(config(family), 11, &device);
        let (states, gradients) = run(&device, &loaded, &texts, None, false, None);
        let (mut alone, mut sum) = (Vec::new(), vec![0.0; loaded.layout.len()]);
        for text in &texts {
            let (states, gradients) = run(&device, &loaded, std::slice::from_ref(text), None, false, None);
            alone.extend(states);
            sum.iter_mut().zip(device.read_f64(gradients.all())).for_each(|(s, g)| *s += g);
        }
        assert_close(&states, &alone, "states");
        let found = device.read_f64(gradients.all());
        let norm = |v: &[f64]| v.iter().map(|v| v * v).sum::<f64>().sqrt();
        let difference: Vec<f64> = found.iter().zip(&sum).map(|(f, s)| f - s).collect();
        prop_assert!(norm(&difference) <= 1e-4 * norm(&sum), "gradients differ by {}", norm(&difference));
    }
}
