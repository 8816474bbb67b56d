//! The loss curve: as a chart in the terminal (braille dots) and as a picture (SVG) with the exact match of evaluations beside it.

use std::fmt::Write as _;

/// Points (step, value) in the order of steps.
pub type Points = [(u64, f64)];

/// The least and greatest of some numbers, widened where they are one.
#[derive(Debug, Clone, Copy)]
struct Range {
    low: f64,
    high: f64,
}

impl Range {
    fn of(values: impl Iterator<Item = f64>) -> Option<Self> {
        let range = values.fold(None, |range: Option<Self>, value| {
            let range = range.unwrap_or(Self { low: value, high: value });
            Some(Self { low: range.low.min(value), high: range.high.max(value) })
        })?;
        let flat = range.high <= range.low;
        Some(if flat { Self { low: range.low - 0.5, high: range.high + 0.5 } } else { range })
    }

    /// Where `value` lies, 0 at the low end and 1 at the high one.
    fn share(self, value: f64) -> f64 {
        ((value - self.low) / (self.high - self.low)).clamp(0.0, 1.0)
    }

    /// About `count` round numbers within the range: 1, 2 or 5 times a power of ten apart.
    fn ticks(self, count: u32) -> Vec<f64> {
        let rough = (self.high - self.low) / f64::from(count.max(1));
        let mut power = 1.0;
        while power * 10.0 <= rough {
            power *= 10.0;
        }
        while power > rough {
            power /= 10.0;
        }
        let step = [1.0, 2.0, 5.0, 10.0].into_iter().map(|factor| factor * power).find(|&step| step >= rough);
        let step = step.unwrap_or(10.0 * power);
        let (mut ticks, mut index) = (Vec::new(), (self.low / step - 1e-9).ceil());
        while index * step <= self.high + step * 1e-9 && ticks.len() < 50 {
            ticks.push(index * step);
            index += 1.0;
        }
        ticks
    }
}

fn finite(points: &Points) -> Vec<(f64, f64)> {
    // Beyond f32 the differences of extremes would overflow, and no chart could show them.
    let shown = |value: f64| value.is_finite() && value.abs() < f64::from(f32::MAX);
    points.iter().filter(|(_, value)| shown(*value)).map(|&(step, value)| (step as f64, value)).collect()
}

/// A chart of `width` x `height` characters and its labels, ending with a line end; a notice where there is nothing to draw.
/// Points whose value is not finite are left out.
pub fn terminal_chart(title: &str, points: &Points, width: usize, height: usize) -> String {
    let points = finite(points);
    let xs = Range::of(points.iter().map(|point| point.0));
    let ys = Range::of(points.iter().map(|point| point.1));
    let (Some(xs), Some(ys)) = (xs, ys) else {
        return format!("{title}: no points to draw\n");
    };
    let (width, height) = (width.clamp(20, 400), height.clamp(3, 100));
    let label = 9;
    let columns = width - label - 1;
    let (dots_x, dots_y) = (columns * 2, height * 4);
    let mut cells = vec![0u8; columns * height];
    let place = |(x, y): (f64, f64)| {
        let column = (xs.share(x) * (dots_x - 1) as f64).round() as usize;
        let row = ((1.0 - ys.share(y)) * (dots_y - 1) as f64).round() as usize;
        (column.min(dots_x - 1), row.min(dots_y - 1))
    };
    let mut dot = |column: usize, row: usize| {
        // Unicode 2800-28FF: bit of a dot by row and column of the cell.
        const BITS: [[u8; 2]; 4] = [[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]];
        cells[row / 4 * columns + column / 2] |= BITS[row % 4][column % 2];
    };
    let placed: Vec<_> = points.iter().copied().map(place).collect();
    for pair in placed.windows(2) {
        let ((x0, y0), (x1, y1)) = (pair[0], pair[1]);
        let steps = x0.abs_diff(x1).max(y0.abs_diff(y1)).max(1);
        for at in 0..=steps {
            let between = |a: usize, b: usize| (a * (steps - at) + b * at + steps / 2) / steps;
            dot(between(x0, x1), between(y0, y1));
        }
    }
    if let [(x, y)] = placed[..] {
        dot(x, y);
    }
    let mut text = format!("{title}\n");
    for (row, line) in cells.chunks(columns).enumerate() {
        let value = match row {
            0 => number(ys.high),
            row if row == height - 1 => number(ys.low),
            row if row == height / 2 => {
                number(ys.high - (ys.high - ys.low) * row as f64 / (height - 1) as f64)
            }
            _ => String::new(),
        };
        let drawn: String =
            line.iter().filter_map(|&dots| char::from_u32(0x2800 + u32::from(dots))).collect();
        let _ = writeln!(text, "{value:>label$}│{drawn}");
    }
    let (first, last) = (number(xs.low), number(xs.high));
    let _ = writeln!(text, "{:>label$}└{}", "", "─".repeat(columns));
    let _ = writeln!(text, "{:>label$} {first}{last:>rest$}", "", rest = columns.saturating_sub(first.len()));
    text
}

const WIDTH: f64 = 800.0;
const HEIGHT: f64 = 420.0;
const LEFT: f64 = 70.0;
const RIGHT: f64 = 730.0;
const TOP: f64 = 50.0;
const BOTTOM: f64 = 360.0;
const LOSS_COLOUR: &str = "#1f5fa8";
const MATCH_COLOUR: &str = "#c1501f";

/// An SVG picture: training loss on the left axis, exact match of evaluations (0 to 1) on the right one, updates below.
/// Points whose value is not finite are left out.
pub fn svg(title: &str, loss: &Points, exact_match: &Points) -> String {
    let (loss, exact_match) = (finite(loss), finite(exact_match));
    let steps = Range::of(loss.iter().chain(&exact_match).map(|point| point.0))
        .unwrap_or(Range { low: 0.0, high: 1.0 });
    let losses = Range::of(loss.iter().map(|point| point.1)).unwrap_or(Range { low: 0.0, high: 1.0 });
    let matches = Range { low: 0.0, high: 1.0 };
    let x = |step: f64| LEFT + (RIGHT - LEFT) * steps.share(step);
    let y = |range: Range, value: f64| BOTTOM - (BOTTOM - TOP) * range.share(value);

    let mut text = format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" width=\"{WIDTH}\" height=\"{HEIGHT}\" \
         font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n"
    );
    let mut label = |x: f64, y: f64, anchor: &str, colour: &str, words: &str| {
        let words = escape(words);
        let _ = writeln!(
            text,
            "<text x=\"{x:.1}\" y=\"{y:.1}\" text-anchor=\"{anchor}\" fill=\"{colour}\">{words}</text>"
        );
    };
    label(WIDTH / 2.0, 22.0, "middle", "black", title);
    label(LEFT, 42.0, "middle", LOSS_COLOUR, "training loss");
    label((LEFT + RIGHT) / 2.0, BOTTOM + 40.0, "middle", "black", "update");
    for tick in steps.ticks(8) {
        label(x(tick), BOTTOM + 18.0, "middle", "black", &number(tick));
    }
    for tick in losses.ticks(6) {
        label(LEFT - 6.0, y(losses, tick) + 4.0, "end", LOSS_COLOUR, &number(tick));
    }
    if !exact_match.is_empty() {
        label(RIGHT, 42.0, "middle", MATCH_COLOUR, "exact match");
        for tick in matches.ticks(5) {
            label(RIGHT + 6.0, y(matches, tick) + 4.0, "start", MATCH_COLOUR, &number(tick));
        }
    }
    for tick in losses.ticks(6) {
        let at = y(losses, tick);
        let _ = writeln!(text, "<path d=\"M{LEFT} {at:.1}H{RIGHT}\" stroke=\"#dddddd\"/>");
    }
    let _ =
        writeln!(text, "<path d=\"M{LEFT} {TOP}V{BOTTOM}H{RIGHT}V{TOP}\" fill=\"none\" stroke=\"black\"/>");
    let mut line = |points: &[(f64, f64)], range: Range, colour: &str| {
        let places: Vec<_> =
            points.iter().map(|&(step, value)| format!("{:.1},{:.1}", x(step), y(range, value))).collect();
        let places = places.join(" ");
        let _ = writeln!(
            text,
            "<polyline points=\"{places}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"1.5\"/>"
        );
    };
    line(&loss, losses, LOSS_COLOUR);
    line(&exact_match, matches, MATCH_COLOUR);
    for &(step, value) in &exact_match {
        let (x, y) = (x(step), y(matches, value));
        let _ = writeln!(text, "<circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3\" fill=\"{MATCH_COLOUR}\"/>");
    }
    text.push_str("</svg>\n");
    text
}

fn escape(words: &str) -> String {
    words.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

/// A number with about four digits and without trailing zeros.
fn number(value: f64) -> String {
    let value = value + 0.0; // makes -0 a 0
    let size = value.abs();
    if size != 0.0 && !(1e-3..1e7).contains(&size) {
        return format!("{value:.1e}");
    }
    let text = format!(
        "{value:.*}",
        if size >= 1e3 {
            0
        } else if size >= 10.0 {
            1
        } else {
            3
        }
    );
    if !text.contains('.') {
        return text;
    }
    text.trim_end_matches('0').trim_end_matches('.').to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_falling_loss_falls() {
        let points: Vec<_> = (0..100).map(|step| (step, 5.0 - 0.04 * step as f64)).collect();
        let chart = terminal_chart("loss", &points, 40, 6);
        let lines: Vec<_> = chart.lines().collect();
        assert_eq!(lines.len(), 1 + 6 + 2, "{chart}");
        assert!(
            lines[1].trim_start().starts_with("5│") && lines[6].trim_start().starts_with("1.04│"),
            "{chart}"
        );
        let drawn = |line: &str| {
            let cells: Vec<_> = line.chars().skip(10).collect();
            assert_eq!(cells.len(), 30, "{chart}");
            let dark = |cell: &char| *cell != '\u{2800}';
            (cells.iter().position(dark).unwrap(), cells.iter().rposition(dark).unwrap())
        };
        let spans: Vec<_> = lines[1..7].iter().map(|line| drawn(line)).collect();
        assert_eq!((spans[0].0, spans[5].1), (0, 29), "{chart}");
        assert!(spans.windows(2).all(|pair| pair[0].1 <= pair[1].0 + 1 && pair[0].0 < pair[1].0), "{chart}");
        assert!(lines[8].contains(" 0 ") && lines[8].ends_with("99"), "{chart}");
    }

    #[test]
    fn odd_series_are_drawn_or_named() {
        assert_eq!(terminal_chart("loss", &[], 40, 6), "loss: no points to draw\n");
        assert_eq!(terminal_chart("loss", &[(1, f64::NAN)], 40, 6), "loss: no points to draw\n");
        for points in [
            &[(1, 2.0)][..],
            &[(1, 2.0), (2, 2.0)],
            &[(1, 1e300), (2, 1.0)],
            &[(u64::MAX, 1e-30), (0, -1e30)],
        ] {
            let chart = terminal_chart("loss", points, 0, 0);
            assert!(chart.chars().any(|c| ('\u{2801}'..='\u{28ff}').contains(&c)), "{chart}");
            assert!(svg("loss", points, points).ends_with("</svg>\n"));
        }
    }

    #[test]
    fn the_picture_has_both_series_and_round_ticks() {
        let picture = svg("reader <tiny>", &[(0, 4.0), (1000, 1.0)], &[(500, 0.25), (1000, 0.5)]);
        assert!(picture.contains("reader &lt;tiny&gt;"));
        assert!(picture.contains("points=\"70.0,50.0 730.0,360.0\""), "{picture}");
        assert!(picture.contains("points=\"400.0,282.5 730.0,205.0\""), "{picture}");
        for tick in [">200<", ">1000<", ">1.5<", ">0.8<", ">exact match<"] {
            assert!(picture.contains(tick), "{tick}: {picture}");
        }
        assert!(!svg("loss", &[(0, 1.0)], &[]).contains("exact match"));
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<_> = [-0.0, 0.25, 12.34, 1234.5, 1e9, 1e-5, 100.0].into_iter().map(number).collect();
        assert_eq!(shown, ["0", "0.25", "12.3", "1234", "1.0e9", "1.0e-5", "100"]);
    }
}
