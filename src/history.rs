//! The history of a run, written down while it happens and judged afterwards.
//!
//! Every process appends what it did to a [`HistoryLog`] of its own: events *sent*, events
//! *handled*, slices *committed*. A [`Checker`] reads all logs and says whether the promises held:
//! nothing lost, first handlings in order, one holder committing at a time, nothing handled again
//! without a reason. It is the judge of `fairlane bench --verify`, `fairlane demo` and the fault
//! tests, so it knows nothing of how the queues work.
//!
//! The events of one bot are named by their **position**: 0, 1, 2 … in the order in which they
//! were sent for that bot. Positions may have gaps. The sender puts the position into the event,
//! the handler reads it back.
//!
//! Times are microseconds of the wall clock; several processes must share one machine's clock.

mod check;

use std::borrow::Cow;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

pub use check::{Checker, Report};

/// How one handling of one event ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The effect happened.
    Done,
    /// The handler failed; the event is due again, or becomes a dead letter.
    Failed,
}

/// One thing that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record<'a> {
    /// The bus acknowledged an event.
    Sent {
        /// The tenant.
        bot: &'a str,
        /// The event's position among those sent for this bot.
        event: u32,
    },
    /// A handler had an event and is through with it. To be written *before* the slice is
    /// completed; a handling that a kill cut off leaves no record.
    Handled {
        /// The tenant.
        bot: &'a str,
        /// The event's position.
        event: u32,
        /// The event's sequence.
        sequence: u64,
        /// The fence of the lease under which it was handled.
        fence: u64,
        /// When the handler got it, in µs.
        started: u64,
        /// When the handler was through, in µs.
        ended: u64,
        /// What came of it.
        outcome: Outcome,
        /// The process that did it.
        process: u32,
    },
    /// The queue confirmed that events were taken off it. Unknown answers are not written.
    Committed {
        /// The tenant.
        bot: &'a str,
        /// The positions of the events taken off, dead letters included.
        events: Cow<'a, [u32]>,
        /// The fence that was shown.
        fence: u64,
        /// When the (first) call was sent, in µs. A reply may be read long after the next holder
        /// began; a call sent after that must have been refused.
        asked: u64,
        /// When the confirmation was read, in µs.
        at: u64,
        /// The process that did it.
        process: u32,
    },
}

/// One line, fields separated by tabs, the bot last. A bot id holds no control characters, so
/// nothing needs escaping.
impl fmt::Display for Record<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Sent { bot, event } => write!(f, "S\t{event}\t{bot}"),
            Self::Handled { bot, event, sequence, fence, started, ended, outcome, process } => {
                let sign = match outcome {
                    Outcome::Done => '+',
                    Outcome::Failed => '-',
                };
                write!(
                    f,
                    "H\t{event}\t{sequence}\t{fence}\t{started}\t{ended}\t{sign}\t{process}\t{bot}"
                )
            }
            Self::Committed { bot, events, fence, asked, at, process } => {
                write!(f, "C\t{fence}\t{asked}\t{at}\t{process}\t")?;
                for (index, event) in events.iter().enumerate() {
                    let comma = if index == 0 { "" } else { "," };
                    write!(f, "{comma}{event}")?;
                }
                write!(f, "\t{bot}")
            }
        }
    }
}

impl<'a> Record<'a> {
    /// Reads one line without its end. `None` if it is not a record.
    #[must_use]
    pub fn parse(line: &'a str) -> Option<Self> {
        let (kind, rest) = line.split_once('\t')?;
        let mut rest = Fields(rest);
        match kind {
            "S" => Some(Self::Sent { event: rest.number()?, bot: rest.0 }),
            "H" => Some(Self::Handled {
                event: rest.number()?,
                sequence: rest.number()?,
                fence: rest.number()?,
                started: rest.number()?,
                ended: rest.number()?,
                outcome: match rest.text()? {
                    "+" => Outcome::Done,
                    "-" => Outcome::Failed,
                    _ => return None,
                },
                process: rest.number()?,
                bot: rest.0,
            }),
            "C" => Some(Self::Committed {
                fence: rest.number()?,
                asked: rest.number()?,
                at: rest.number()?,
                process: rest.number()?,
                events: match rest.text()? {
                    "" => Cow::Borrowed(&[]),
                    list => list.split(',').map(|n| n.parse().ok()).collect::<Option<_>>()?,
                },
                bot: rest.0,
            }),
            _ => None,
        }
    }
}

/// The fields of a line that are still unread.
struct Fields<'a>(&'a str);

impl<'a> Fields<'a> {
    fn text(&mut self) -> Option<&'a str> {
        let (field, rest) = self.0.split_once('\t')?;
        self.0 = rest;
        Some(field)
    }

    fn number<N: FromStr>(&mut self) -> Option<N> {
        self.text()?.parse().ok()
    }
}

/// Why a log cannot be judged.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The log cannot be read.
    #[error("the history cannot be read")]
    Read(#[source] io::Error),
    /// A line that is not a record, and is not the torn end of the log either.
    #[error("line {line} is not a record of the history: {text:?}")]
    Malformed {
        /// Its number, from 1.
        line: usize,
        /// Its beginning.
        text: String,
    },
}

/// The log of one process. Nothing is held back in memory: what [`HistoryLog::write`] returned
/// from is in the file even when the process is killed in the next instruction.
#[derive(Debug)]
pub struct HistoryLog {
    file: Mutex<File>,
}

impl HistoryLog {
    /// Opens a log to append to. One process, one file: a line torn by a kill must be the last.
    ///
    /// # Errors
    /// When the file cannot be opened.
    pub fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file: Mutex::new(file) })
    }

    /// Appends records in one write.
    ///
    /// # Errors
    /// When the file cannot be written.
    pub fn write<'a>(&self, records: impl IntoIterator<Item = Record<'a>>) -> io::Result<()> {
        use fmt::Write as _;
        let mut lines = String::new();
        for record in records {
            // Writing to a String cannot fail.
            let _ = writeln!(lines, "{record}");
        }
        self.file.lock().unwrap_or_else(PoisonError::into_inner).write_all(lines.as_bytes())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_survives_its_line_whatever_the_bot_is_called() {
        for bot in ["b", "a b", "|||", "H", "日本", "\\t", ","] {
            let records = [
                Record::Sent { bot, event: 7 },
                Record::Handled {
                    bot,
                    event: u32::MAX,
                    sequence: u64::MAX,
                    fence: 1,
                    started: 2,
                    ended: 3,
                    outcome: Outcome::Failed,
                    process: 4,
                },
                Record::Committed {
                    bot,
                    events: Cow::Borrowed(&[1, 2, 9]),
                    fence: 1,
                    asked: 2,
                    at: 3,
                    process: 4,
                },
                Record::Committed {
                    bot,
                    events: Cow::Borrowed(&[]),
                    fence: 1,
                    asked: 2,
                    at: 3,
                    process: 4,
                },
            ];
            for record in records {
                let line = record.to_string();
                assert_eq!(Record::parse(&line), Some(record), "{line}");
            }
        }
    }

    #[test]
    fn what_is_not_a_record_is_refused() {
        for line in [
            "",
            "S",
            "S\t",
            "S\tx\tb",
            "S\t-1\tb",
            "X\t1\tb",
            "H\t1\t2\tb",
            "C\t1\t2\t3\t4\t1,,2\tb",
        ] {
            assert_eq!(Record::parse(line), None, "{line:?}");
        }
    }
}
