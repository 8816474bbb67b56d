//! A report as text: flair's lines and scikit-learn's table.

use std::fmt;

use super::confusion::shown;
use super::{ClassificationReport, Scores};

impl fmt::Display for ClassificationReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "Results:")?;
        writeln!(f, "- F-score (micro) {:.4}", self.micro.f1)?;
        writeln!(f, "- F-score (macro) {:.4}", self.macro_.f1)?;
        writeln!(f, "- Accuracy {:.4}", self.accuracy)?;
        writeln!(f, "\nBy class:")?;
        let names: Vec<String> = self.labels.iter().map(|l| shown(&l.label)).collect();
        let first = names.iter().map(|n| n.chars().count()).max().unwrap_or(0).max("weighted avg".len());
        writeln!(
            f,
            "{:>first$} {:>10} {:>9} {:>9} {:>9}\n",
            "", "precision", "recall", "f1-score", "support"
        )?;
        for (name, label) in names.iter().zip(&self.labels) {
            row(f, first, name, &label.scores)?;
        }
        writeln!(f)?;
        row(f, first, "micro avg", &self.micro)?;
        row(f, first, "macro avg", &self.macro_)?;
        row(f, first, "weighted avg", &self.weighted)?;
        if let Some(samples) = &self.samples {
            row(f, first, "samples avg", samples)?;
        }
        if let Some(confusion) = &self.confusion {
            write!(f, "\nConfusion (rows are gold, columns predicted):\n{}", confusion.text())?;
        }
        if let Some(calibration) = &self.calibration {
            writeln!(
                f,
                "\nCalibration (expected error {:.4}, greatest {:.4}):",
                calibration.ece, calibration.mce
            )?;
            writeln!(f, "     confidence  predictions  mean confidence  right")?;
            for bin in calibration.bins.iter().filter(|bin| bin.predictions > 0) {
                writeln!(
                    f,
                    "{:>6.3} to {:.3} {:>12} {:>16.4} {:>6.4}",
                    bin.above, bin.up_to, bin.predictions, bin.confidence, bin.accuracy
                )?;
            }
        }
        if self.unknown > 0 {
            let named: Vec<String> =
                self.labels.iter().filter(|l| !l.known).take(10).map(|l| shown(&l.label)).collect();
            let (n, names) = (self.unknown, named.join(", "));
            writeln!(
                f,
                "\n{n} documents have a label that the classifier does not know ({names}): they count as missed"
            )?;
        }
        if self.micro.support == 0 {
            writeln!(f, "\nno document has a label: nothing to measure")?;
        }
        Ok(())
    }
}

fn row(f: &mut fmt::Formatter<'_>, first: usize, name: &str, scores: &Scores) -> fmt::Result {
    let Scores { precision, recall, f1, support } = scores;
    writeln!(f, "{name:>first$} {precision:>10.4} {recall:>9.4} {f1:>9.4} {support:>9}")
}
