//! Which label was taken for which: as text, and as a picture.

use std::fmt::Write;

use serde::Serialize;

use super::NONE;
use crate::labels::Labels;

/// Most labels of a matrix in text; of more the most frequent mistakes are listed.
const MOST_AS_TEXT: usize = 20;
/// Mistakes that are listed.
const LISTED: usize = 20;
/// Most labels of a picture.
const MOST_DRAWN: usize = 200;

/// How often which label was taken for which.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Confusion {
    /// The labels, most frequent first; last `(none)`, where a document had no label or got none.
    pub labels: Vec<String>,
    /// The pairs that occur, by gold and predicted label.
    pub pairs: Vec<Confused>,
}

/// Documents with the same gold and the same predicted label.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Confused {
    /// Number of the gold label in [`Confusion::labels`].
    pub gold: usize,
    /// Number of the predicted one.
    pub predicted: usize,
    /// How many documents.
    pub documents: u64,
}

impl Confusion {
    /// From pairs of label numbers, with the labels in this order.
    pub(super) fn of(
        labels: &Labels,
        order: &[usize],
        pairs: impl Iterator<Item = (u32, u32, u64)> + Clone,
    ) -> Confusion {
        let mut names: Vec<String> = order.iter().map(|&i| labels.names()[i].clone()).collect();
        if pairs.clone().any(|(gold, predicted, _)| gold == NONE || predicted == NONE) {
            names.push("(none)".into());
        }
        let mut place = vec![order.len(); labels.len()];
        order.iter().enumerate().for_each(|(at, &i)| place[i] = at);
        let at = |id: u32| place.get(id as usize).copied().unwrap_or(order.len());
        let mut pairs: Vec<Confused> = pairs
            .map(|(gold, predicted, documents)| Confused {
                gold: at(gold),
                predicted: at(predicted),
                documents,
            })
            .collect();
        pairs.sort_by_key(|pair| (pair.gold, pair.predicted));
        Confusion { labels: names, pairs }
    }

    /// Rows of counts, a row a gold label, a column a predicted one.
    fn matrix(&self) -> Vec<Vec<u64>> {
        let mut rows = vec![vec![0; self.labels.len()]; self.labels.len()];
        self.pairs.iter().for_each(|pair| rows[pair.gold][pair.predicted] += pair.documents);
        rows
    }

    /// The mistakes, most frequent first.
    pub fn mistakes(&self) -> Vec<Confused> {
        let mut mistakes: Vec<Confused> =
            self.pairs.iter().filter(|p| p.gold != p.predicted).copied().collect();
        mistakes.sort_by_key(|pair| std::cmp::Reverse(pair.documents)); // stable
        mistakes
    }

    /// The matrix as lines of text, a row a gold label; of more than 20 labels the most frequent mistakes.
    pub fn text(&self) -> String {
        let mut out = String::new();
        if self.labels.len() > MOST_AS_TEXT {
            let mistakes = self.mistakes();
            let _ = writeln!(out, "most frequent mistakes, of {} kinds:", mistakes.len());
            for pair in mistakes.iter().take(LISTED) {
                let (gold, predicted) = (&self.labels[pair.gold], &self.labels[pair.predicted]);
                let _ =
                    writeln!(out, "{:>8}  {} taken for {}", pair.documents, shown(gold), shown(predicted));
            }
            return out;
        }
        let matrix = self.matrix();
        let names: Vec<String> = self.labels.iter().map(|name| shown(name)).collect();
        let first = names.iter().map(|n| n.chars().count()).max().unwrap_or(0).max(4);
        let width = matrix.iter().flatten().map(|n| n.to_string().len()).max().unwrap_or(1);
        let widths: Vec<usize> =
            names.iter().map(|n| n.chars().count().clamp(width, 12.max(width))).collect();
        let _ = write!(out, "{:<first$}", "gold");
        for (name, width) in names.iter().zip(&widths) {
            let _ = write!(out, "  {:>width$}", name.chars().take(*width).collect::<String>());
        }
        let _ = writeln!(out);
        for (name, row) in names.iter().zip(&matrix) {
            let _ = write!(out, "{name:<first$}");
            for (n, width) in row.iter().zip(&widths) {
                let _ = write!(out, "  {n:>width$}");
            }
            let _ = writeln!(out);
        }
        out
    }

    /// The matrix as a picture (SVG): a cell is the darker, the greater its share of the documents with its gold label. `None` for more than
    /// 200 labels, of which nobody could read one.
    pub fn svg(&self) -> Option<String> {
        let n = self.labels.len();
        if n == 0 || n > MOST_DRAWN {
            return None;
        }
        let names: Vec<String> = self.labels.iter().map(|name| escaped(&clipped(name, 28))).collect();
        let longest = self.labels.iter().map(|name| name.chars().count().min(28)).max().unwrap_or(0);
        let cell = if n <= 12 { 56 } else { (680 / n).max(8) };
        let font = (cell / 4).clamp(6, 14);
        let margin = 40 + longest * font * 2 / 3;
        let side = margin + n * cell + 20;
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{side}\" height=\"{side}\" viewBox=\"0 0 {side} {side}\" \
             font-family=\"sans-serif\" font-size=\"{font}\">\n<title>Confusion matrix: rows are gold labels, columns are predicted ones</title>\n\
             <rect width=\"{side}\" height=\"{side}\" fill=\"#ffffff\"/>\n"
        );
        for (row, counts) in self.matrix().iter().enumerate() {
            let total: u64 = counts.iter().sum();
            for (column, &count) in counts.iter().enumerate() {
                let (x, y) = (margin + column * cell, margin + row * cell);
                // In thousandths, as whole numbers: the same file on every machine.
                let share = (count * 1000).checked_div(total).unwrap_or(0);
                let shade = |light: u64, dark: u64| (light * (1000 - share) + dark * share) / 1000;
                let fill = format!("#{:02x}{:02x}{:02x}", shade(247, 8), shade(251, 48), shade(255, 107));
                let (gold, predicted) = (&names[row], &names[column]);
                let _ = writeln!(
                    out,
                    "<rect x=\"{x}\" y=\"{y}\" width=\"{cell}\" height=\"{cell}\" fill=\"{fill}\" stroke=\"#d0d0d0\">\
                     <title>{gold} taken for {predicted}: {count} of {total}</title></rect>"
                );
                if cell >= 20 && count > 0 {
                    let ink = if share > 500 { "#ffffff" } else { "#202020" };
                    let (x, y) = (x + cell / 2, y + cell / 2 + font / 3);
                    let _ = writeln!(
                        out,
                        "<text x=\"{x}\" y=\"{y}\" text-anchor=\"middle\" fill=\"{ink}\">{count}</text>"
                    );
                }
            }
        }
        for (at, name) in names.iter().enumerate() {
            let middle = margin + at * cell + cell / 2;
            let (edge, base) = (margin - 6, middle + font / 3);
            let _ = writeln!(out, "<text x=\"{edge}\" y=\"{base}\" text-anchor=\"end\">{name}</text>");
            let _ = writeln!(
                out,
                "<text x=\"{base}\" y=\"{edge}\" transform=\"rotate(-90 {base} {edge})\">{name}</text>"
            );
        }
        let middle = margin + n * cell / 2;
        let _ = writeln!(
            out,
            "<text x=\"{middle}\" y=\"16\" text-anchor=\"middle\" font-weight=\"bold\">predicted</text>"
        );
        let _ = writeln!(
            out,
            "<text x=\"16\" y=\"{middle}\" text-anchor=\"middle\" font-weight=\"bold\" transform=\"rotate(-90 16 {middle})\">gold</text>\n</svg>"
        );
        Some(out)
    }
}

/// A name on one line.
pub(super) fn shown(name: &str) -> String {
    clipped(&name.replace(|c: char| c.is_control(), " "), 40)
}

fn clipped(name: &str, most: usize) -> String {
    if name.chars().count() <= most {
        return name.to_owned();
    }
    name.chars().take(most - 1).chain(['…']).collect()
}

/// Text that means nothing to XML, without the characters that it cannot hold.
fn escaped(text: &str) -> String {
    let mut out = String::new();
    for c in text.chars() {
        match c {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            c if c.is_control() || matches!(c, '\u{fffe}' | '\u{ffff}') => out.push('\u{fffd}'),
            c => out.push(c),
        }
    }
    out
}
