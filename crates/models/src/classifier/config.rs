//! What a classifier's `config.json` says beside its encoder's: labels, kind of problem, head; and what it says of the labels of a
//! text, given its logits.

use std::collections::BTreeSet;

use serde_json::{Map, Value, json};
use tercio_engine::Activation;

use crate::bert::BertFamily;
use crate::encoder::EncoderConfig;
use crate::fields::{Fields, activation_name};
use crate::retriever::Pooling;

/// No classifier comes near this many labels.
pub const MOST_LABELS: usize = 1 << 20;
/// The key of what Hugging Face does not know.
const OWN: &str = "tercio_classifier";

/// What follows the vector of a text.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum HeadKind {
    /// That of Hugging Face's class of the encoder's family: a dense layer with an activation, then the logits.
    Family,
    /// One linear layer, as flair has it.
    Linear,
}

/// A classifier's shape, and what its logits stand for.
#[derive(Clone, Debug, PartialEq)]
pub struct ClassifierConfig {
    /// The encoder.
    pub encoder: EncoderConfig,
    /// The labels, in the order of the logits; at least one, no two the same.
    pub labels: Vec<String>,
    /// Whether a text may have any number of labels (a sigmoid each), or exactly one (softmax).
    pub multi_label: bool,
    /// Multi-label: a label whose probability is above this is the text's.
    pub threshold: f64,
    /// The head.
    pub head: HeadKind,
    /// How the states of a text become one vector.
    pub pooling: Pooling,
    /// The layers whose pooled states are averaged, by Hugging Face's list of hidden states: 0 is the embedding, -1 the last layer. Others than
    /// the last one with flair's head only.
    pub layers: Vec<i64>,
    /// Dropout of the head in training.
    pub dropout: f64,
    /// Whether the head's dense layer has a bias (ModernBERT's may not).
    pub head_bias: bool,
    /// Nonlinearity of the head's dense layer.
    pub head_activation: Activation,
    /// Tokens of a text at most, special ones counted, as it was trained; `None` where the folder does not say.
    pub max_length: Option<usize>,
}

impl ClassifierConfig {
    /// A classifier over an encoder, with the head of its family (as Hugging Face has it by default), single-label.
    pub fn new(encoder: EncoderConfig, labels: Vec<String>) -> ClassifierConfig {
        let (dropout, head_bias, head_activation) = match &encoder {
            EncoderConfig::ModernBert(_) => (0.0, false, Activation::GeluErf),
            EncoderConfig::Bert(c) if c.family == BertFamily::DistilBert => (0.2, true, Activation::Relu),
            EncoderConfig::Bert(c) => (c.hidden_dropout, true, Activation::Tanh),
        };
        ClassifierConfig {
            encoder,
            labels,
            multi_label: false,
            threshold: 0.5,
            head: HeadKind::Family,
            pooling: Pooling::First,
            layers: vec![-1],
            dropout,
            head_bias,
            head_activation,
            max_length: None,
        }
    }

    /// Reads a `config.json`; one of a plain encoder gives Hugging Face's defaults, two labels without names. Whether its labels are
    /// named at all is the second value.
    ///
    /// # Errors
    /// A sentence that names the field.
    pub fn from_json(json: &Map<String, Value>) -> Result<(ClassifierConfig, bool), String> {
        let (f, encoder) = (Fields(json), EncoderConfig::from_json(json)?);
        let named = labels(&f)?;
        let has_names = named.is_some();
        let unnamed = || Ok::<_, String>(unnamed(f.size("num_labels", Some(2))?));
        let mut config = ClassifierConfig::new(encoder, named.map_or_else(unnamed, Ok)?);
        if config.labels.len() > MOST_LABELS {
            return Err(format!(
                "`num_labels`: expected at most {MOST_LABELS}, found {}",
                config.labels.len()
            ));
        }
        config.multi_label = match f.text("problem_type", "single_label_classification")? {
            "single_label_classification" => false,
            "multi_label_classification" => true,
            other => {
                return Err(format!(
                    "`problem_type`: expected \"single_label_classification\" or \"multi_label_classification\", found {other:?}"
                ));
            }
        };
        if let EncoderConfig::ModernBert(_) = config.encoder {
            config.pooling = pooling(&f, "classifier_pooling", "cls")?;
            config.head_bias = f.boolean("classifier_bias", false)?;
            config.head_activation = f.activation("classifier_activation")?;
        }
        config.dropout = f.real(dropout_name(&config.encoder), config.dropout, 0.0..1.0)?;
        let empty = Map::new();
        let own = match f.get(OWN) {
            Some(Value::Object(own)) => own,
            None => &empty,
            Some(other) => return Err(format!("`{OWN}`: expected an object, found {other}")),
        };
        let own = Fields(own);
        let inside = |what: String| format!("`{OWN}`: {what}");
        config.threshold = own.real("threshold", 0.5, 0.0..1.0).map_err(inside)?;
        config.max_length =
            own.get("max_length").map(|_| own.size("max_length", None)).transpose().map_err(inside)?;
        match own.text("head", "family").map_err(inside)? {
            "family" => {}
            "linear" => {
                config.head = HeadKind::Linear;
                config.pooling = pooling(&own, "pooling", "cls").map_err(inside)?;
                config.dropout = own.real("dropout", 0.0, 0.0..1.0).map_err(inside)?;
                if let Some(layers) = own.get("layers") {
                    let numbers = layers.as_array().map(|l| l.iter().map(Value::as_i64).collect());
                    config.layers = numbers.flatten().ok_or_else(|| {
                        inside(format!("`layers`: expected a list of whole numbers, found {layers}"))
                    })?;
                }
            }
            other => {
                return Err(inside(format!("`head`: expected \"family\" or \"linear\", found {other:?}")));
            }
        }
        Ok((config, has_names))
    }

    /// The `config.json` that Hugging Face reads; fields of `base` that Tercio does not know are kept.
    pub fn to_json(&self, base: &Map<String, Value>) -> Map<String, Value> {
        let mut json = self.encoder.to_json(base);
        json.shift_remove("num_labels");
        let by_id: Map<String, Value> =
            self.labels.iter().enumerate().map(|(i, l)| (i.to_string(), l.as_str().into())).collect();
        let by_label: Map<String, Value> =
            self.labels.iter().enumerate().map(|(i, l)| (l.clone(), i.into())).collect();
        json.insert("id2label".into(), by_id.into());
        json.insert("label2id".into(), by_label.into());
        let problem =
            if self.multi_label { "multi_label_classification" } else { "single_label_classification" };
        json.insert("problem_type".into(), problem.into());
        let mut own = json!({"threshold": self.threshold, "max_length": self.max_length});
        match self.head {
            HeadKind::Linear => {
                own["head"] = "linear".into();
                own["pooling"] = pooling_name(self.pooling).into();
                own["dropout"] = self.dropout.into();
                own["layers"] = self.layers.clone().into();
            }
            HeadKind::Family => {
                json.insert("architectures".into(), json!([self.architecture()]));
                own["head"] = "family".into();
                json.insert(dropout_name(&self.encoder).into(), self.dropout.into());
                if let EncoderConfig::ModernBert(_) = self.encoder {
                    json.insert("classifier_pooling".into(), pooling_name(self.pooling).into());
                    json.insert("classifier_bias".into(), self.head_bias.into());
                    let name = activation_name(self.head_activation);
                    json.insert("classifier_activation".into(), name.into());
                }
            }
        }
        json.insert(OWN.into(), own);
        json
    }

    /// Hugging Face's class of the encoder's family.
    pub fn architecture(&self) -> &'static str {
        match &self.encoder {
            EncoderConfig::ModernBert(_) => "ModernBertForSequenceClassification",
            EncoderConfig::Bert(c) => match c.family {
                BertFamily::Bert => "BertForSequenceClassification",
                BertFamily::DistilBert => "DistilBertForSequenceClassification",
                BertFamily::Roberta => "RobertaForSequenceClassification",
                BertFamily::XlmRoberta => "XLMRobertaForSequenceClassification",
            },
        }
    }

    /// What is wrong with it, if anything.
    ///
    /// # Errors
    /// A pooling that the family's class does not have; no label, or the same one twice.
    pub fn check(&self) -> Result<(), String> {
        let is_modern = matches!(self.encoder, EncoderConfig::ModernBert(_));
        if self.head == HeadKind::Family && self.pooling == Pooling::Mean && !is_modern {
            return Err(format!(
                "pooling mean: {} of Hugging Face takes the first token; take it too, or flair's linear head",
                self.architecture()
            ));
        }
        self.check_layers()?;
        check_labels(&self.labels)
    }

    fn check_layers(&self) -> Result<(), String> {
        let last = self.encoder.layers() as i64;
        if self.layers == [-1] {
            return Ok(());
        }
        let found = &self.layers;
        if self.head == HeadKind::Family || matches!(self.encoder, EncoderConfig::ModernBert(_)) {
            return Err(format!(
                "layers {found:?}: others than the last, -1, are for flair's linear head on encoders of BERT's kind"
            ));
        }
        if let Some(beyond) = found.iter().find(|n| !(-last - 1..=last).contains(n)) {
            return Err(format!("layers: expected numbers from {} to {last}, found {beyond}", -last - 1));
        }
        match self.layer_counts().len() {
            0 => Err("layers: expected one at least, found none".into()),
            n if n < found.len() => Err(format!("layers {found:?}: expected each once")),
            _ => Ok(()),
        }
    }

    /// The layers that are averaged, as how many layers are behind each; rising, each once.
    pub(super) fn layer_counts(&self) -> Vec<usize> {
        let all = self.encoder.layers() as i64 + 1;
        let counts: BTreeSet<usize> = self.layers.iter().map(|&n| n.rem_euclid(all) as usize).collect();
        counts.into_iter().collect()
    }

    /// The probability of every label, given a text's logits: softmax, or a sigmoid each.
    pub fn probabilities(&self, logits: &[f64]) -> Vec<f64> {
        if self.multi_label {
            return logits.iter().map(|&z| 1.0 / (1.0 + libm::exp(-z))).collect();
        }
        let most = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let powers: Vec<f64> = logits.iter().map(|&z| libm::exp(z - most)).collect();
        let total: f64 = powers.iter().sum();
        powers.iter().map(|p| p / total).collect()
    }

    /// The labels of a text, by their places, given the probabilities of all: the most probable one (of equals the first), or in the
    /// multi-label case all above the threshold.
    pub fn chosen(&self, probabilities: &[f64]) -> Vec<usize> {
        if self.multi_label {
            return (0..probabilities.len()).filter(|&i| probabilities[i] > self.threshold).collect();
        }
        let best =
            (0..probabilities.len()).reduce(|a, b| if probabilities[b] > probabilities[a] { b } else { a });
        best.into_iter().collect()
    }
}

fn dropout_name(encoder: &EncoderConfig) -> &'static str {
    match encoder {
        EncoderConfig::Bert(c) if c.family == BertFamily::DistilBert => "seq_classif_dropout",
        _ => "classifier_dropout",
    }
}

fn pooling_name(pooling: Pooling) -> &'static str {
    match pooling {
        Pooling::Mean => "mean",
        Pooling::First => "cls",
    }
}

fn pooling(f: &Fields<'_>, field: &str, default: &str) -> Result<Pooling, String> {
    match f.text(field, default)? {
        "cls" => Ok(Pooling::First),
        "mean" => Ok(Pooling::Mean),
        other => Err(format!("`{field}`: expected \"cls\" or \"mean\", found {other:?}")),
    }
}

/// Names that Hugging Face gives to labels that have none.
pub(super) fn unnamed(count: usize) -> Vec<String> {
    (0..count.min(MOST_LABELS + 1)).map(|i| format!("LABEL_{i}")).collect()
}

/// The labels of `id2label`, where there is one: an object from "0", "1", ... to names.
fn labels(f: &Fields<'_>) -> Result<Option<Vec<String>>, String> {
    let Some(found) = f.get("id2label") else { return Ok(None) };
    let wrong = |what: String| format!("`id2label`: expected names of the ids from 0 on, {what}");
    let map = found.as_object().ok_or_else(|| wrong(format!("found {found}")))?;
    let mut labels = Vec::with_capacity(map.len());
    for id in 0..map.len() {
        let name = map.get(&id.to_string()).ok_or_else(|| wrong(format!("found none of {id}")))?;
        labels.push(name.as_str().ok_or_else(|| wrong(format!("found {name} of {id}")))?.to_owned());
    }
    check_labels(&labels).map_err(wrong)?;
    Ok(Some(labels))
}

fn check_labels(labels: &[String]) -> Result<(), String> {
    let mut sorted: Vec<&str> = labels.iter().map(String::as_str).collect();
    sorted.sort_unstable();
    match sorted.windows(2).find(|pair| pair[0] == pair[1]) {
        _ if labels.is_empty() => Err("found no label".into()),
        Some(pair) => Err(format!("found {:?} twice", pair[0])),
        None => Ok(()),
    }
}
