//! How well a classifier's confidence fits how often it is right.

use serde::{Deserialize, Serialize};

use crate::error::DataError;

/// Equal bins of confidence: as in Guo et al. 2017, "On Calibration of Modern Neural Networks".
pub(super) const BINS: usize = 15;
/// Confidences are summed in this unit, as whole numbers, so that sums of parts are the same in any order.
const UNIT: f64 = 1.0 / (1u64 << 32) as f64;

/// Predictions by their confidence, the probability that the classifier gives to what it predicts, in 15 equal bins (a bound belongs to
/// the bin below it). Of a classifier of several labels every decision is one: a label and its probability, right where the document has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Calibration {
    bins: [Bin; BINS],
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Bin {
    predictions: u64,
    right: u64,
    /// Sum of confidences, in [`UNIT`].
    confidence: u64,
}

/// Predictions of about the same confidence.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct ReliabilityBin {
    /// Confidences above this,
    pub above: f64,
    /// up to this.
    pub up_to: f64,
    /// How many there are.
    pub predictions: u64,
    /// Their mean confidence; 0 where there are none.
    pub confidence: f64,
    /// Share of them that are right; 0 where there are none.
    pub accuracy: f64,
}

/// How well confidences fit.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CalibrationReport {
    /// Expected calibration error: the mean over predictions of |accuracy - confidence| of their bins; 0 is best.
    pub ece: f64,
    /// Greatest difference of a bin with predictions.
    pub mce: f64,
    /// The bins, lowest first.
    pub bins: Vec<ReliabilityBin>,
}

impl Calibration {
    /// Counts a prediction.
    pub(super) fn add(&mut self, confidence: f32, right: bool) -> Result<(), DataError> {
        // Sums of exponentials may be above 1 by a rounding.
        if !(0.0..=1.0001).contains(&confidence) {
            return Err(DataError::Setting(format!(
                "expected a probability from 0 to 1, found {confidence}; the model's weights are damaged or its values overflow"
            )));
        }
        let confidence = f64::from(confidence).min(1.0);
        let at = ((confidence * BINS as f64).ceil() as usize).clamp(1, BINS) - 1;
        let bin = &mut self.bins[at];
        bin.predictions += 1;
        bin.right += u64::from(right);
        bin.confidence += (confidence / UNIT).round() as u64;
        Ok(())
    }

    pub(super) fn merge(&mut self, other: &Calibration) {
        for (bin, more) in self.bins.iter_mut().zip(other.bins) {
            bin.predictions += more.predictions;
            bin.right += more.right;
            bin.confidence += more.confidence;
        }
    }

    /// What follows; `None` without predictions.
    pub(super) fn report(&self) -> Option<CalibrationReport> {
        let total: u64 = self.bins.iter().map(|b| b.predictions).sum();
        let bins: Vec<ReliabilityBin> = self
            .bins
            .iter()
            .enumerate()
            .map(|(i, b)| {
                let of = |sum: f64| if b.predictions == 0 { 0.0 } else { sum / b.predictions as f64 };
                ReliabilityBin {
                    above: i as f64 / BINS as f64,
                    up_to: (i + 1) as f64 / BINS as f64,
                    predictions: b.predictions,
                    confidence: of(b.confidence as f64 * UNIT),
                    accuracy: of(b.right as f64),
                }
            })
            .collect();
        let gap = |b: &ReliabilityBin| (b.accuracy - b.confidence).abs();
        (total > 0).then(|| CalibrationReport {
            ece: bins.iter().map(|b| b.predictions as f64 / total as f64 * gap(b)).sum(),
            mce: bins.iter().map(gap).fold(0.0, f64::max),
            bins,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_error_is_that_of_its_formula() {
        let mut calibration = Calibration::default();
        assert_eq!(calibration.report(), None);
        // Two bins: 0.9 four times, three right; 0.5 twice, one right.
        for (confidence, right) in
            [(0.9, true), (0.9, true), (0.9, false), (0.9, true), (0.5, true), (0.5, false)]
        {
            calibration.add(confidence, right).unwrap();
        }
        let report = calibration.report().unwrap();
        assert!((report.ece - 4.0 / 6.0 * 0.15).abs() < 1e-7, "{}", report.ece);
        assert!((report.mce - 0.15).abs() < 1e-7, "{}", report.mce);
        assert_eq!(
            report.bins.iter().map(|b| b.predictions).collect::<Vec<_>>()[7..],
            [2, 0, 0, 0, 0, 0, 4, 0]
        );
    }

    #[test]
    fn bounds_belong_below_and_what_is_no_probability_is_refused() {
        let mut calibration = Calibration::default();
        for confidence in [0.0, 1.0, 1.00001, f32::MIN_POSITIVE] {
            calibration.add(confidence, true).unwrap();
        }
        let bins = calibration.report().unwrap().bins;
        assert_eq!((bins[0].predictions, bins[14].predictions, bins[14].confidence), (2, 2, 1.0));
        for wrong in [f32::NAN, -0.1, 1.5, f32::INFINITY] {
            assert!(calibration.add(wrong, true).is_err(), "{wrong}");
        }
    }
}
