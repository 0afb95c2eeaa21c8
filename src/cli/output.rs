//! Output of commands: tables and sentences for people, or one JSON document with `--json`. Colours
//! only on a terminal, and not with `NO_COLOR`.

use std::fmt::Display;
use std::io::{self, IsTerminal as _, Write as _};
use std::os::fd::AsFd as _;
use std::time::Duration;

use clap::builder::styling::{AnsiColor, Effects, Style};
use comfy_table::{CellAlignment, ContentArrangement, presets};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use serde::Serialize;

use super::error::CliError;
pub(super) use crate::problems::text::{argument, count, duration, number};
use crate::telemetry;

/// Maximum length of a cell, in characters. Longer texts are cut; `--json` shows them completely.
const CELL_MAX: usize = 80;
/// Interval of looking whether standard output still has a reader.
pub(super) const LOOK: Duration = Duration::from_millis(500);

/// The form of a command's answer on standard output.
#[derive(Debug, Clone, Copy)]
pub struct Output {
    json: bool,
    colour: bool,
}

/// The meaning of a text, which sets its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Tone {
    Strong,
    Good,
    Warning,
    Bad,
}

impl Output {
    /// For standard output, as text or as JSON.
    #[must_use]
    pub fn new(json: bool) -> Self {
        Self { json, colour: io::stdout().is_terminal() && !telemetry::no_colour() }
    }

    /// Writes `value`: as JSON, or as the text from `human`.
    ///
    /// # Errors
    /// If it cannot be serialised or written.
    pub fn show<T: Serialize>(
        self,
        value: &T,
        human: impl FnOnce(&T) -> String,
    ) -> Result<(), CliError> {
        let text = if self.json {
            let json = serde_json::to_string_pretty(value).map_err(CliError::Json)?;
            telemetry::harmless_json(&json).into_owned()
        } else {
            human(value)
        };
        print(&text)
    }

    pub(super) fn paint(self, tone: Tone, text: &str) -> String {
        let style = match tone {
            Tone::Strong => Style::new().effects(Effects::BOLD),
            Tone::Good => AnsiColor::Green.on_default(),
            Tone::Warning => AnsiColor::Yellow.on_default(),
            Tone::Bad => AnsiColor::Red.on_default().effects(Effects::BOLD),
        };
        if self.colour { format!("{style}{text}{style:#}") } else { text.to_owned() }
    }

    /// The table as lines, without a line break at the end.
    #[must_use]
    pub fn table(self, table: &Table) -> String {
        let tones = std::iter::once(Some(Tone::Strong)).chain(table.tones.iter().copied());
        let mut text = String::new();
        for (at, (line, tone)) in table.inner.lines().zip(tones).enumerate() {
            let line = line.trim_end();
            let first = if at == 0 { line } else { line.split(' ').next().unwrap_or_default() };
            if at > 0 {
                text.push('\n');
            }
            match tone {
                Some(tone) => {
                    text.push_str(&self.paint(tone, first));
                    text.push_str(&line[first.len()..]);
                }
                None => text.push_str(line),
            }
        }
        text
    }
}

/// Writes a line to standard output. A closed pipe (`| head`) is not an error.
pub(super) fn print(text: &str) -> Result<(), CliError> {
    let mut out = io::stdout().lock();
    let newline = if text.ends_with('\n') { "" } else { "\n" };
    match write!(out, "{text}{newline}").and_then(|()| out.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.map_err(CliError::Output),
    }
}

/// Writes a line to standard error. A line that cannot be written is lost: `eprintln!` would panic, and end
/// a command in the middle (`2>&1 | head`, a full disk).
pub(super) fn tell(line: impl Display) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Waits until standard output is a pipe that nothing reads any more (`| head`).
pub(super) async fn unread() {
    while !has_no_reader() {
        tokio::time::sleep(LOOK).await;
    }
}

/// Whether standard output is a pipe without a reader.
pub(super) fn has_no_reader() -> bool {
    let out = io::stdout();
    let mut fds = [PollFd::from_borrowed_fd(out.as_fd(), PollFlags::empty())];
    let immediately = Timespec { tv_sec: 0, tv_nsec: 0 };
    let looked = poll(&mut fds, Some(&immediately));
    looked.is_ok() && fds[0].revents().intersects(PollFlags::ERR | PollFlags::NVAL)
}

/// Rows under headers, one line each.
#[derive(Debug)]
pub struct Table {
    inner: comfy_table::Table,
    tones: Vec<Option<Tone>>,
}

impl Table {
    /// An empty table. Columns whose header starts with `>` are right-aligned, for numbers.
    #[must_use]
    pub fn new(headers: &[&str]) -> Self {
        let mut inner = comfy_table::Table::new();
        inner.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
        inner.set_header(headers.iter().map(|header| header.trim_start_matches('>')));
        for (at, header) in headers.iter().enumerate() {
            if let Some(column) = inner.column_mut(at) {
                column.set_padding((0, 2));
                if header.starts_with('>') {
                    column.set_cell_alignment(CellAlignment::Right);
                }
            }
        }
        Self { inner, tones: Vec::new() }
    }

    /// Adds a row.
    pub fn row<const N: usize>(&mut self, cells: &[String; N]) {
        self.inner.add_row(cells.iter().map(|cell| shorten(&plain(cell))));
        self.tones.push(None);
    }

    /// Adds a row with a coloured first cell. That cell must be one word.
    pub(super) fn toned_row<const N: usize>(&mut self, tone: Tone, cells: &[String; N]) {
        self.row(cells);
        if let Some(last) = self.tones.last_mut() {
            *last = Some(tone);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.tones.is_empty()
    }
}

/// Escapes control characters and those that change the order of a line, so that text from outside
/// cannot control the terminal.
pub(super) fn plain(text: &str) -> String {
    telemetry::harmless(text).into_owned()
}

fn shorten(text: &str) -> String {
    if text.chars().count() <= CELL_MAX {
        return text.to_owned();
    }
    text.chars().take(CELL_MAX - 1).chain(['…']).collect()
}

/// An age; `-` if there is none.
pub(super) fn age(ms: u64, any: bool) -> String {
    if any { duration(ms) } else { "-".to_owned() }
}

/// A rate as text; a whole number from 10 on, because fractions are then noise.
pub(super) fn rate(per_second: f64) -> String {
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a rate, rounded")]
    if per_second >= 10.0 { number(per_second.round() as u64) } else { format!("{per_second:.1}") }
}

/// A size in binary units.
pub(super) fn bytes(bytes: u64) -> String {
    indicatif::BinaryBytes(bytes).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Output = Output { json: false, colour: false };
    const COLOURED: Output = Output { json: false, colour: true };

    #[test]
    fn tables_align_and_numbers_stand_on_the_right() {
        let mut table = Table::new(&["BOT", ">DEPTH"]);
        table.row(&["a".to_owned(), number(1_234_567)]);
        table.row(&["longer".to_owned(), number(1)]);
        assert_eq!(PLAIN.table(&table), "BOT         DEPTH\na       1,234,567\nlonger          1");
    }

    #[test]
    fn colours_change_nothing_but_the_colour() {
        let mut table = Table::new(&["STATE", "WHAT"]);
        table.toned_row(Tone::Bad, &["fail".to_owned(), "x".to_owned()]);
        let coloured = COLOURED.table(&table);
        assert!(coloured.contains("\u{1b}[1m") && coloured.contains("\u{1b}[31m"), "{coloured:?}");
        let bare = ["\u{1b}[0m", "\u{1b}[1m", "\u{1b}[31m"]
            .iter()
            .fold(coloured, |text, code| text.replace(code, ""));
        assert_eq!(bare, PLAIN.table(&table));
    }

    #[test]
    fn control_characters_are_shown_instead_of_obeyed() {
        let mut table = Table::new(&["REASON"]);
        table.row(&["\u{1b}[2Jgone\nnext \u{9b}1m \u{202e}".to_owned()]);
        let shown = "REASON\n\\u{1b}[2Jgone\\nnext \\u{9b}1m \\u{202e}";
        assert_eq!(PLAIN.table(&table), shown);
        assert_eq!(shorten(&"é".repeat(81)), "é".repeat(79) + "…");
    }

    #[test]
    fn durations_and_counts_are_read_at_a_glance() {
        let cases = [
            (0, "0s"),
            (999, "999ms"),
            (12_345, "12s"),
            (60_000, "1m"),
            (185_000, "3m 5s"),
            (7_500_000, "2h 5m"),
            (90_061_000, "1d 1h"),
        ];
        for (ms, text) in cases {
            assert_eq!(duration(ms), text);
        }
        assert_eq!(count(1, "event"), "1 event");
        assert_eq!(count(1_000, "event"), "1,000 events");
    }
}
