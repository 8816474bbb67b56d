//! From logits to labels, and what they are worth beside the gold ones.

use serde_json::{Map, Value, json};
use tercio_comm::World;
use tercio_data::classification::{ClassificationReport, ClassificationTally};
use tercio_data::corpus::Split;
use tercio_data::{DataError, Document, Labels};
use tercio_engine::Device;
use tercio_models::classifier::ClassifierConfig;

use super::{TextClassifier, classify_among};
use crate::error::TrainError;
use crate::objectives::classifier::loss::ClassificationLoss;

/// What a classifier says of a text.
#[derive(Clone, Debug, PartialEq)]
pub struct Prediction {
    /// The numbers of its labels: one, or in the multi-label case any number, in the order of the model's labels.
    pub chosen: Vec<usize>,
    /// The probability of every label of the model.
    pub probabilities: Vec<f64>,
}

/// The labels that logits stand for.
pub fn predicted(config: &ClassifierConfig, logits: &[f32]) -> Prediction {
    let logits: Vec<f64> = logits.iter().map(|&v| v.into()).collect();
    let probabilities = config.probabilities(&logits);
    Prediction { chosen: config.chosen(&probabilities), probabilities }
}

/// Seven places: what f32 logits are good for.
fn rounded(p: f64) -> f64 {
    (p * 1e7).round() / 1e7
}

impl Prediction {
    /// The prediction as fields of JSON: `label` and `probability`; in the multi-label case `labels` and `probabilities`, as long as each
    /// other; with `all` also `scores`, the probability of every label by its name. Probabilities have seven places.
    pub fn json(&self, config: &ClassifierConfig, all: bool) -> Map<String, Value> {
        let mut fields = Map::new();
        let names: Vec<&str> = self.chosen.iter().map(|&i| config.labels[i].as_str()).collect();
        let values: Vec<f64> = self.chosen.iter().map(|&i| rounded(self.probabilities[i])).collect();
        match (config.multi_label, names.first(), values.first()) {
            (false, Some(name), Some(value)) => {
                fields.insert("label".into(), json!(name));
                fields.insert("probability".into(), json!(value));
            }
            _ => {
                fields.insert("labels".into(), json!(names));
                fields.insert("probabilities".into(), json!(values));
            }
        }
        if all {
            let scores = config.labels.iter().zip(&self.probabilities);
            let scores: Map<String, Value> = scores.map(|(l, &p)| (l.clone(), rounded(p).into())).collect();
            fields.insert("scores".into(), scores.into());
        }
        fields
    }
}

/// The loss of a document, without weights of classes: cross-entropy of its first label, or in the multi-label case the sum of the binary
/// cross-entropies of all labels. `None` where its first label (one of its labels) is not among the numbers `gold`, because
/// the classifier does not know it.
pub fn gold_loss(config: &ClassifierConfig, logits: &[f32], gold: &[Option<u32>]) -> Option<f64> {
    let gold: Vec<u32> = match config.multi_label {
        false => vec![(*gold.first()?)?],
        true => gold.iter().copied().collect::<Option<_>>()?,
    };
    let loss = ClassificationLoss { multi_label: config.multi_label, weights: None, smoothing: 0.0 };
    let logits: Vec<f64> = logits.iter().map(|&z| z.into()).collect();
    Some(loss.of(&logits, &gold, 0.0, &mut vec![0.0; logits.len()]))
}

/// What [`measure_among`] found.
#[derive(Clone, Debug)]
pub struct Measured {
    /// The counts.
    pub tally: ClassificationTally,
    /// Sum of the losses of the documents that have one.
    pub loss_sum: f64,
    /// How many have one.
    pub losses: u64,
}

impl Measured {
    /// The figures.
    pub fn report(&self) -> ClassificationReport {
        self.tally.report()
    }

    /// The mean loss; `None` where no document has one.
    pub fn loss(&self) -> Option<f64> {
        (self.losses > 0).then(|| self.loss_sum / self.losses as f64)
    }
}

/// Classifies the good documents of a split by all ranks, and counts how right that is; `each` gets every document with its prediction, in
/// order. On rank 0; on the others nothing is counted. Losses are summed in the order of the documents, so the sums are the same for any
/// number of ranks.
///
/// # Errors
/// As [`classify_among`]; what `each` returns.
pub fn measure_among<D: Device>(
    world: &World,
    classifier: &TextClassifier<'_, D>,
    split: &Split,
    stop: &dyn Fn() -> bool,
    each: &mut dyn FnMut(&Document, &Prediction) -> Result<(), TrainError>,
) -> Result<Measured, TrainError> {
    let config = &classifier.model.config;
    let labels = Labels::from_names(config.labels.clone())?;
    let mut found = Measured { tally: ClassificationTally::new(&labels), loss_sum: 0.0, losses: 0 };
    let no_fault = &mut |_: &DataError| {};
    classify_among(world, classifier, split, false, stop, no_fault, &mut |document, logits| {
        let prediction = predicted(config, logits);
        let gold: Vec<Option<u32>> = document.labels.iter().map(|l| labels.id(l)).collect();
        count(&mut found.tally, config, document, &prediction, &gold)?;
        if let Some(loss) = gold_loss(config, logits, &gold) {
            found.loss_sum += loss;
            found.losses += 1;
        }
        each(document, &prediction)
    })?;
    Ok(found)
}

fn count(
    tally: &mut ClassificationTally,
    config: &ClassifierConfig,
    document: &Document,
    prediction: &Prediction,
    gold: &[Option<u32>],
) -> Result<(), DataError> {
    let chosen: Vec<u32> = prediction.chosen.iter().map(|&i| i as u32).collect();
    let is_gold = |i: usize| gold.contains(&Some(i as u32));
    tally.add(&document.labels, &chosen)?;
    if config.multi_label {
        let mut all = prediction.probabilities.iter().enumerate();
        return all.try_for_each(|(i, &p)| tally.add_confidence(p as f32, is_gold(i)));
    }
    prediction
        .chosen
        .iter()
        .try_for_each(|&i| tally.add_confidence(prediction.probabilities[i] as f32, is_gold(i)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use tercio_models::encoder::EncoderConfig;

    fn config(multi_label: bool) -> ClassifierConfig {
        let bert = json!({"model_type": "bert", "vocab_size": 9, "hidden_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1,
                          "intermediate_size": 4, "max_position_embeddings": 8, "type_vocab_size": 1});
        let encoder = EncoderConfig::from_json(bert.as_object().unwrap()).unwrap();
        let labels = ["a", "b", "c"].map(String::from).to_vec();
        ClassifierConfig { multi_label, ..ClassifierConfig::new(encoder, labels) }
    }

    #[test]
    fn losses_are_those_of_their_formulas() {
        let logits = [1.0f32, -2.0, 0.5];
        let exp: Vec<f64> = logits.iter().map(|&z| f64::from(z).exp()).collect();
        let single = gold_loss(&config(false), &logits, &[Some(2)]).unwrap();
        assert!((single + (exp[2] / exp.iter().sum::<f64>()).ln()).abs() < 1e-12, "{single}");
        let sigmoid = |i: usize| exp[i] / (1.0 + exp[i]);
        let want = -(sigmoid(0).ln() + (1.0 - sigmoid(1)).ln() + sigmoid(2).ln());
        let multi = gold_loss(&config(true), &logits, &[Some(0), Some(2)]).unwrap();
        assert!((multi - want).abs() < 1e-12, "{multi} {want}");
        assert_eq!(gold_loss(&config(false), &logits, &[None]), None);
        assert_eq!(gold_loss(&config(true), &logits, &[Some(0), None]), None);
        let far = gold_loss(&config(false), &[1000.0, -1000.0, 0.0], &[Some(1)]).unwrap();
        assert!((far - 2000.0).abs() < 1e-9, "{far}");
    }

    #[test]
    fn predictions_as_json() {
        let single = predicted(&config(false), &[0.0, 2.0, 0.0]);
        let json = Value::from(single.json(&config(false), true));
        assert_eq!((json["label"].as_str(), json["probability"].as_f64()), (Some("b"), Some(0.7869860)));
        assert_eq!(json["scores"].as_object().unwrap().len(), 3);
        let multi = predicted(&config(true), &[3.0, -3.0, 0.1]).json(&config(true), false);
        let want = json!({"labels": ["a", "c"], "probabilities": [0.9525741, 0.5249792]});
        assert_eq!(Value::from(multi), want);
        let none = predicted(&config(true), &[-3.0, -3.0, -3.0]).json(&config(true), false);
        assert_eq!(Value::from(none), json!({"labels": [], "probabilities": []}));
    }
}
