//! Text classifiers: an encoder, one vector a text, a head, one logit a label.
//!
//! Two kinds of heads. [`HeadKind::Family`] is the one of Hugging Face's `*ForSequenceClassification` class of the encoder's family, so
//! that transformers opens the folder and computes the same logits. [`HeadKind::Linear`] is flair's: one linear layer on the vector; no
//! class of transformers computes that, so its tensors have names of their own and the encoder's part opens as a bare encoder.
//! Texts are packed; nothing is padded.

mod config;
mod folder;

use tercio_engine::random::{key_of_name, normal, uniform};
use tercio_engine::{Activation, Arena, Device, LayerNorm, Layout, Param, ParamSpec, Span, Tape, Var};

use crate::bert::BertFamily;
use crate::encoder::{Encoder, EncoderConfig};
use crate::retriever::Pooling;

pub use config::{ClassifierConfig, HeadKind, MOST_LABELS};
pub use folder::{ClassifierHeaders, LoadedClassifier, is_classifier, save};

/// Sites of the head's dropout, beyond those of every encoder.
const BEFORE: u64 = 1 << 20;
const BEHIND: u64 = BEFORE + 1;

/// What a family calls the layer between the vector and the logits, its norm, and the layer of the logits.
struct HeadNames {
    dense: Option<&'static str>,
    norm: Option<&'static str>,
    output: &'static str,
}

fn head_names(config: &ClassifierConfig) -> HeadNames {
    let (dense, norm, output) = match (config.head, &config.encoder) {
        (HeadKind::Linear, _) => (None, None, "linear_head"),
        (_, EncoderConfig::ModernBert(_)) => (Some("head.dense"), Some("head.norm"), "classifier"),
        (_, EncoderConfig::Bert(c)) => match c.family {
            BertFamily::Bert => (Some("pooler.dense"), None, "classifier"),
            BertFamily::DistilBert => (Some("pre_classifier"), None, "classifier"),
            BertFamily::Roberta | BertFamily::XlmRoberta => {
                (Some("classifier.dense"), None, "classifier.out_proj")
            }
        },
    };
    HeadNames { dense, norm, output }
}

/// A layer with an activation before the logits.
struct Dense {
    weight: Param,
    bias: Option<Param>,
    activation: Activation,
    norm: Option<LayerNorm>,
    /// Whether its input is dropped out too (RoBERTa).
    drops_input: bool,
}

/// A classifier: its shapes and where each parameter lies; the values are in an arena.
pub struct Classifier {
    /// The configuration.
    pub config: ClassifierConfig,
    /// The encoder.
    pub encoder: Encoder,
    layout: Layout,
    /// How many of the layout's first parameters are the encoder's.
    encoder_parameters: usize,
    dense: Option<Dense>,
    weight: Param,
    bias: Param,
}

impl Classifier {
    /// The model of a configuration. The encoder's parameters have the bare encoder's names, the head's those of Hugging Face.
    pub fn new(config: ClassifierConfig) -> Classifier {
        let mut layout = Layout::default();
        let encoder = Encoder::new(config.encoder.clone(), &mut layout);
        let encoder_parameters = layout.specs().len();
        let (width, names) = (config.encoder.width(), head_names(&config));
        let dense = names.dense.map(|name| {
            let weight = layout.add(format!("{name}.weight"), &[width, width]);
            let bias = config.head_bias.then(|| layout.add(format!("{name}.bias"), &[width]));
            let norm = names.norm.map(|name| {
                let (eps, has_bias) = match &config.encoder {
                    EncoderConfig::ModernBert(c) => (c.norm_eps, c.norm_bias),
                    EncoderConfig::Bert(c) => (c.layer_norm_eps, true),
                };
                let weight = layout.add(format!("{name}.weight"), &[width]);
                let bias = has_bias.then(|| layout.add(format!("{name}.bias"), &[width]));
                LayerNorm::new(weight, bias, eps)
            });
            let drops_input = name == "classifier.dense";
            Dense { weight, bias, activation: config.head_activation, norm, drops_input }
        });
        let labels = config.labels.len();
        let weight = layout.add(format!("{}.weight", names.output), &[labels, width]);
        let bias = layout.add(format!("{}.bias", names.output), &[labels]);
        Classifier { config, encoder, layout, encoder_parameters, dense, weight, bias }
    }

    /// Names, shapes and places of the parameters.
    pub fn layout(&self) -> &Layout {
        &self.layout
    }

    /// The head's parameters.
    pub fn head_specs(&self) -> &[ParamSpec] {
        &self.layout.specs()[self.encoder_parameters..]
    }

    /// The parameters of the layer that gives the logits: weight and bias.
    pub fn output_specs(&self) -> &[ParamSpec] {
        let specs = self.layout.specs();
        &specs[specs.len() - 2..]
    }

    /// The logits of every text, `[spans, labels]`. `spans` are the texts of the flat `ids`, none empty, none longer than
    /// [`EncoderConfig::max_tokens`]; `recompute` keeps only the input of each layer for the backward.
    pub fn logits<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let mut x = match self.config.pooling {
            _ if self.config.layers != [-1] => self.mean_of_layers(tape, ids, spans, recompute),
            Pooling::Mean => {
                let states = self.encoder.encode(tape, ids, None, spans, recompute);
                tape.span_means(&states, spans)
            }
            Pooling::First => self.encoder.encode_first(tape, ids, spans, recompute),
        };
        let p = self.config.dropout;
        if let Some(dense) = &self.dense {
            if dense.drops_input {
                let dropout = tape.dropout(BEFORE, p);
                x = tape.dropped(x, dropout);
            }
            let u = tape.linear_bias(&(&x).into(), dense.weight, dense.bias);
            x = tape.activation(&u, dense.activation, false, None);
            if let Some(norm) = dense.norm {
                x = tape.layer_norm(&x, norm, None);
            }
        }
        let dropout = tape.dropout(BEHIND, p);
        let x = tape.dropped(x, dropout);
        tape.linear_bias(&(&x).into(), self.weight, Some(self.bias))
    }

    /// The mean over the chosen layers of the pooled states.
    fn mean_of_layers<'p, D: Device>(
        &'p self,
        tape: &mut Tape<'p, D>,
        ids: &[u32],
        spans: &[Span],
        recompute: bool,
    ) -> Var<D> {
        let Encoder::Bert(encoder) = &self.encoder else { panic!("the configuration was not checked") };
        let counts = self.config.layer_counts();
        let first: Vec<u32> = spans.iter().map(|s| s.start).collect();
        let mut sum: Option<Var<D>> = None;
        for states in encoder.encode_states(tape, ids, spans, &counts, recompute) {
            let vectors = match self.config.pooling {
                Pooling::Mean => tape.span_means(&states, spans),
                Pooling::First => tape.rows(&states, &first),
            };
            sum = Some(match sum {
                Some(sum) => tape.sum(&sum, &vectors),
                None => vectors,
            });
        }
        tape.scaled(&sum.expect("a layer at least"), 1.0 / counts.len() as f64)
    }

    /// Random initial values of one of the head's parameters, from its name and the seed. Family heads: normal with the encoder's
    /// standard deviation, norms one, biases zero, as Hugging Face draws them. flair's: Xavier's uniform weight (Glorot and Bengio,
    /// 2010), and PyTorch's bias, uniform within one over the root of the inputs.
    pub fn initial_of_head(&self, spec: &ParamSpec, seed: u64) -> Vec<f32> {
        let (key, len) = (key_of_name(seed, &spec.name), spec.place.len() as u64);
        let inputs = self.config.encoder.width() as f64;
        let within = |bound: f64| (0..len).map(|i| (bound * (2.0 * uniform(key, i) - 1.0)) as f32).collect();
        let is_matrix = spec.shape.len() == 2;
        match self.config.head {
            HeadKind::Linear if is_matrix => within(libm::sqrt(6.0 / (inputs + spec.shape[0] as f64))),
            HeadKind::Linear => within(1.0 / libm::sqrt(inputs)),
            HeadKind::Family if is_matrix => {
                let deviation = self.config.encoder.initializer_range();
                (0..len).map(|i| (deviation * normal(key, i)) as f32).collect()
            }
            HeadKind::Family => vec![if spec.name.ends_with(".bias") { 0.0 } else { 1.0 }; len as usize],
        }
    }

    /// Writes random initial values of the head's parameters `specs`.
    pub fn fill_head<D: Device>(
        &self,
        specs: &[ParamSpec],
        seed: u64,
        device: &D,
        parameters: &mut Arena<D>,
    ) {
        for spec in specs {
            device.write(parameters.view_mut(spec.place), &self.initial_of_head(spec, seed));
        }
    }
}
