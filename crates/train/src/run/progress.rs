//! The progress bar: one line at the foot of a terminal, nothing elsewhere.

use std::io::{IsTerminal, Write};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::memory;

/// Terminals are not drawn to more often than people can read.
const REDRAW: Duration = Duration::from_millis(100);

/// The rate is averaged over about this time, so that it neither jumps nor sticks to the start.
const RATE_WINDOW_SECONDS: f64 = 20.0;

/// The line that stands on the terminal now: log lines are printed above it.
static ON_SCREEN: Mutex<String> = Mutex::new(String::new());

const CLEAR_LINE: &str = "\r\x1b[2K";

fn on_screen() -> MutexGuard<'static, String> {
    ON_SCREEN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Prints whole lines to stderr, above the progress bar if there is one.
pub fn print_above(text: &[u8]) {
    let bar = on_screen();
    let mut stderr = std::io::stderr().lock();
    // Nobody is left to tell when stderr is closed.
    let _ = match bar.is_empty() {
        true => stderr.write_all(text),
        false => stderr.write_all(&[CLEAR_LINE.as_bytes(), text, bar.as_bytes()].concat()),
    };
    let _ = stderr.flush();
}

/// Progress through the updates of a run. Drawn only where stderr is a terminal.
#[derive(Debug)]
pub struct Progress {
    total: u64,
    step: u64,
    is_drawn: bool,
    width: usize,
    last_update: Instant,
    last_drawn: Option<Instant>,
    seconds_per_update: Option<f64>,
    tokens_per_second: Option<f64>,
}

impl Progress {
    /// Starts at `step` of `total` updates; `wanted` is false for `--quiet`, `--json` and ranks other than 0.
    pub fn start(step: u64, total: u64, wanted: bool) -> Self {
        let is_drawn = wanted
            && std::io::stderr().is_terminal()
            && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let width = std::env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()).unwrap_or(100);
        Self {
            total,
            step,
            is_drawn,
            width,
            last_update: Instant::now(),
            last_drawn: None,
            seconds_per_update: None,
            tokens_per_second: None,
        }
    }

    /// One update is done: `step` updates in all, `tokens` in this one, `padding_saved` the share of tokens (0 to 1) that a
    /// padded batch would have spent on padding.
    pub fn update(&mut self, step: u64, loss: f64, tokens: u64, padding_saved: f64) {
        let now = Instant::now();
        let seconds = now.duration_since(self.last_update).as_secs_f64().max(1e-9);
        self.last_update = now;
        self.step = step;
        // A smoothed time per update: the weight of the newest is the share of the window that it took.
        let weight = (seconds / RATE_WINDOW_SECONDS).clamp(0.05, 1.0);
        let blend = |old: Option<f64>, new: f64| Some(old.map_or(new, |old| old + weight * (new - old)));
        self.seconds_per_update = blend(self.seconds_per_update, seconds);
        self.tokens_per_second = blend(self.tokens_per_second, tokens as f64 / seconds);
        let is_recent = self.last_drawn.is_some_and(|drawn| now.duration_since(drawn) < REDRAW);
        if !self.is_drawn || (is_recent && step < self.total) {
            return;
        }
        self.last_drawn = Some(now);
        self.draw(self.line(loss, padding_saved, memory::resident()));
    }

    /// As [`Progress::update`], of work that is no training: `step` of the total are done, in `unit`s such as `passages`.
    pub fn advance(&mut self, step: u64, unit: &str) {
        let Some(done) = step.checked_sub(self.step).filter(|&done| done > 0) else { return };
        let now = Instant::now();
        let seconds = now.duration_since(self.last_update).as_secs_f64().max(1e-9);
        self.last_update = now;
        self.step = step;
        let weight = (seconds / RATE_WINDOW_SECONDS).clamp(0.05, 1.0);
        let new = seconds / done as f64;
        self.seconds_per_update = Some(self.seconds_per_update.map_or(new, |old| old + weight * (new - old)));
        let is_recent = self.last_drawn.is_some_and(|drawn| now.duration_since(drawn) < REDRAW);
        if !self.is_drawn || (is_recent && step < self.total) {
            return;
        }
        self.last_drawn = Some(now);
        let mut line = self.bar();
        line.push_str(&format!(" {unit}"));
        if let Some(rate) = self.steps_per_second() {
            line.push_str(&format!("  {rate:.0} {unit}/s"));
        }
        self.draw(self.with_rest(line, memory::resident(), ""));
    }

    /// Updates (or whatever the total counts) per second, smoothed over some twenty seconds; `None` before the first.
    pub fn steps_per_second(&self) -> Option<f64> {
        self.seconds_per_update.map(|seconds| 1.0 / seconds.max(1e-9))
    }

    /// Tells that time passed without updates (evaluation, saving), which must not count as a slow update.
    pub fn pause_over(&mut self) {
        self.last_update = Instant::now();
    }

    /// Updates' tokens per second, smoothed over some twenty seconds; `None` before the first update.
    pub fn tokens_per_second(&self) -> Option<f64> {
        self.tokens_per_second
    }

    /// Seconds until the last update at the smoothed rate; `None` before the first update.
    pub fn seconds_left(&self) -> Option<f64> {
        self.seconds_per_update.map(|seconds| seconds * self.total.saturating_sub(self.step) as f64)
    }

    fn bar(&self) -> String {
        const CELLS: u64 = 20;
        let part =
            self.step.min(self.total).saturating_mul(CELLS).checked_div(self.total).unwrap_or(CELLS) as usize;
        let bar = format!("{}{}", "█".repeat(part), "░".repeat(CELLS as usize - part));
        format!("{bar} {}/{}", self.step, self.total)
    }

    fn line(&self, loss: f64, padding_saved: f64, resident: Option<u64>) -> String {
        let mut line = format!("{}  loss {loss:.4}", self.bar());
        if let Some(rate) = self.tokens_per_second {
            line.push_str(&format!("  {rate:.0} tokens/s"));
        }
        self.with_rest(line, resident, &format!("  padding saved {:.0}%", padding_saved * 100.0))
    }

    /// A line with what every line has, cut to the terminal.
    fn with_rest(&self, mut line: String, resident: Option<u64>, end: &str) -> String {
        if let Some(left) = self.seconds_left() {
            line.push_str(&format!("  ETA {}", duration(left)));
        }
        if let Some(resident) = resident {
            line.push_str(&format!("  {}", memory::human(resident)));
        }
        line.push_str(end);
        // A wrapped line could not be taken back.
        line.chars().take(self.width.saturating_sub(1)).collect()
    }

    fn draw(&self, line: String) {
        let mut bar = on_screen();
        let mut stderr = std::io::stderr().lock();
        let _ = write!(stderr, "{CLEAR_LINE}{line}");
        let _ = stderr.flush();
        *bar = line;
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let mut bar = on_screen();
        if self.is_drawn && !bar.is_empty() {
            bar.clear();
            let _ = writeln!(std::io::stderr().lock());
        }
    }
}

/// `1:02:03`, `2:03`; days where there are some.
pub fn duration(seconds: f64) -> String {
    let seconds = seconds.max(0.0).round() as u64;
    let (days, hours, minutes, rest) =
        (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60, seconds % 60);
    match (days, hours) {
        (0, 0) => format!("{minutes}:{rest:02}"),
        (0, _) => format!("{hours}:{minutes:02}:{rest:02}"),
        _ => format!("{days}d {hours}:{minutes:02}:{rest:02}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_for_people() {
        assert_eq!(duration(5.4), "0:05");
        assert_eq!(duration(3_723.0), "1:02:03");
        assert_eq!(duration(2.0 * 86_400.0 + 61.0), "2d 0:01:01");
        assert_eq!(duration(f64::NAN), "0:00");
    }

    #[test]
    fn the_line_has_what_a_watcher_wants() {
        let mut progress = Progress::start(0, 8, false);
        progress.width = 200;
        progress.step = 2;
        (progress.seconds_per_update, progress.tokens_per_second) = (Some(2.0), Some(1234.4));
        let line = progress.line(0.5, 0.25, Some(3 << 30));
        assert_eq!(
            line,
            "█████░░░░░░░░░░░░░░░ 2/8  loss 0.5000  1234 tokens/s  ETA 0:12  3.0 GiB  padding saved 25%"
        );
        progress.width = 10;
        assert_eq!(progress.line(0.5, 0.25, None).chars().count(), 9);
        progress.total = 0;
        assert!(progress.line(f64::NAN, 0.0, None).starts_with("████"));
    }

    #[test]
    fn other_work_has_a_rate_and_an_end() {
        let mut progress = Progress::start(0, 100, false);
        progress.last_update = Instant::now() - Duration::from_secs(40);
        progress.advance(20, "passages");
        let rate = progress.steps_per_second().unwrap();
        assert!((0.4..0.51).contains(&rate), "20 in 40 seconds, and what the test took: {rate}");
        assert!(progress.seconds_left().unwrap() >= 160.0);
        progress.advance(20, "passages");
        assert_eq!(progress.steps_per_second(), Some(rate), "nothing was done");
        assert!(progress.bar().ends_with("░ 20/100"));
    }

    #[test]
    fn rates_settle_and_pauses_do_not_count() {
        let mut progress = Progress::start(0, 10, false);
        progress.last_update = Instant::now() - Duration::from_secs(10);
        progress.pause_over();
        progress.update(1, 1.0, 100, 0.0);
        assert!(
            progress.seconds_left().unwrap() < 9.0 * 5.0,
            "the ten seconds before the pause are left out"
        );
        assert!(progress.tokens_per_second().unwrap() > 0.0);
    }
}
