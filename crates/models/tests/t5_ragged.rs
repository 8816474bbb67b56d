//! A packed batch of questions of any lengths is the same as its questions one by one: losses, gradients and generated
//! tokens agree within rounding, on small random models of every kind.

use proptest::prelude::*;
use tercio_engine::{Activation, Arena, Cpu, Device, Span, Tape};
use tercio_models::t5::{Decoding, GenerationRequest, Initialization, LoadedT5, T5Config, Targets};

const VOCABULARY: usize = 53;
const MAX_LENGTH: usize = 8;

/// Passages and target of one question.
type Question = (Vec<Vec<u32>>, Vec<u32>);

fn questions() -> impl Strategy<Value = Vec<Question>> {
    let token = || 2..VOCABULARY as u32;
    let passages = prop::collection::vec(prop::collection::vec(token(), 1..=40), 1..=5);
    let target = prop::collection::vec(token(), 1..=6);
    prop::collection::vec((passages, target), 1..=5)
}

fn config(gated: bool, tied: bool, cross_attention_bias: bool) -> T5Config {
    T5Config {
        vocab_size: VOCABULARY,
        d_model: 24,
        d_kv: 5,
        d_ff: 40,
        num_layers: 2,
        num_decoder_layers: 2,
        num_heads: 3,
        relative_attention_num_buckets: 8,
        relative_attention_max_distance: 20,
        activation: if gated { Activation::GeluTanh } else { Activation::Relu },
        dropout_rate: 0.0,
        gated,
        tied,
        cross_attention_bias,
        ..T5Config::of_size("small").unwrap()
    }
}

/// Flat ids and spans of questions.
struct Packed {
    ids: Vec<u32>,
    passages: Vec<Span>,
    keys: Vec<Span>,
    positions: Vec<u32>,
    inputs: Vec<u32>,
    labels: Vec<u32>,
    targets: Vec<Span>,
}

fn pack(questions: &[Question], start: u32) -> Packed {
    let (mut passages, mut keys, mut targets) = (vec![0], vec![0], vec![0]);
    let (mut ids, mut positions, mut inputs, mut labels) = (vec![], vec![], vec![], vec![]);
    for (texts, target) in questions {
        for (n, text) in texts.iter().enumerate() {
            ids.extend(text);
            positions.extend((0..text.len()).map(|t| (n * 40 + t) as u32));
            passages.push(ids.len() as u32);
        }
        keys.push(ids.len() as u32);
        inputs.push(start);
        inputs.extend(&target[..target.len() - 1]);
        labels.extend(target);
        targets.push(labels.len() as u32);
    }
    let spans = |offsets: &[u32]| Span::from_offsets(offsets);
    let (passages, keys, targets) = (spans(&passages), spans(&keys), spans(&targets));
    Packed { ids, passages, keys, positions, inputs, labels, targets }
}

/// Loss of every target token, the gradient of their sum, and generated tokens.
fn compute(
    device: &Cpu,
    loaded: &LoadedT5<Cpu>,
    questions: &[Question],
) -> (Vec<f64>, Arena<Cpu>, Vec<Vec<u32>>) {
    let (model, parameters) = (&loaded.model, &loaded.parameters);
    let packed = pack(questions, model.config.decoder_start_token_id);
    let positions = model.needs_key_positions().then(|| packed.positions.clone());
    let targets = Targets {
        inputs: &packed.inputs,
        labels: &packed.labels,
        spans: &packed.targets,
        keys: &packed.keys,
        key_positions: positions.clone(),
        weight: 1.0,
        smoothing: 0.0,
    };
    let mut tape = Tape::recording(device, parameters, None);
    let states = model.encode(&mut tape, &packed.ids, &packed.passages, false);
    let losses = model.loss(&mut tape, &states, &targets);
    let mut gradients = Arena::zeros(device, model.layout());
    tape.backward(&mut gradients, &[]);

    let request = GenerationRequest {
        keys: &packed.keys,
        key_positions: positions,
        decoding: Decoding::greedy(MAX_LENGTH),
        scores: false,
    };
    let mut tape = Tape::inference(device, parameters);
    let states = model.encode(&mut tape, &packed.ids, &packed.passages, false);
    let answers = model.generate(&mut tape, parameters, &states, &request).answers;
    let tokens = answers.into_iter().map(|mut a| a.remove(0).tokens).collect();
    (losses, gradients, tokens)
}

/// Two greedy answers may part only where both next tokens have the same logit within rounding.
fn same_or_a_tie(loaded: &LoadedT5<Cpu>, device: &Cpu, question: &Question, a: &[u32], b: &[u32]) -> bool {
    let Some(at) = (0..a.len().max(b.len())).find(|&i| a.get(i) != b.get(i)) else {
        return true;
    };
    let (Some(&x), Some(&y)) = (a.get(at), b.get(at)) else {
        return false;
    };
    let loss = |next: u32| {
        let target: Vec<u32> = a[..at].iter().copied().chain([next]).collect();
        let (losses, ..) = compute(device, loaded, &[(question.0.clone(), target)]);
        losses[at]
    };
    (loss(x) - loss(y)).abs() < 1e-4
}

fn norm(values: impl Iterator<Item = f64>) -> f64 {
    values.map(|v| v * v).sum::<f64>().sqrt()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 128, ..ProptestConfig::default() })]
    #[test]
    fn a_ragged_batch_is_its_questions_one_by_one(
        questions in questions(), seed: u64, gated: bool, tied: bool, bias: bool,
    ) {
        let device = Cpu::new(1).unwrap();
        let loaded = LoadedT5::random(config(gated, tied, bias), Initialization { seed }, &device);
        let (losses, gradients, tokens) = compute(&device, &loaded, &questions);
        let mut sum = Arena::zeros(&device, loaded.model.layout());
        let mut each = Vec::new();
        for (question, together) in questions.iter().zip(&tokens) {
            let (losses, gradients, alone) = compute(&device, &loaded, std::slice::from_ref(question));
            each.extend(losses);
            device.add(sum.all_mut(), gradients.all());
            prop_assert!(
                same_or_a_tie(&loaded, &device, question, together, &alone[0]),
                "generated {together:?} in the batch, {:?} alone", alone[0]
            );
        }
        prop_assert_eq!(losses.len(), each.len());
        for (i, (a, b)) in losses.iter().zip(&each).enumerate() {
            prop_assert!((a - b).abs() <= 1e-4 * b.abs() + 1e-5, "loss {i}: {a} in the batch, {b} alone");
        }
        for spec in loaded.model.layout().specs() {
            let a = device.read_f64(gradients.view(spec.place));
            let b = device.read_f64(sum.view(spec.place));
            let difference = norm(a.iter().zip(&b).map(|(a, b)| a - b));
            let size = norm(b.into_iter());
            prop_assert!(difference <= 1e-4 * size + 1e-5, "gradient of {}: {difference} of {size}", spec.name);
        }
    }
}
