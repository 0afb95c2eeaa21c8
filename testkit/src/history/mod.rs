//! The history of a run, recorded while it happens and checked afterwards.
//!
//! Every process appends its actions to its own [`HistoryLog`]: events *sent*, events *handled*,
//! slices *committed*. A [`Checker`] reads all logs and verifies the guarantees: no event is lost,
//! first handlings are in order, one holder commits at a time, no event is handled again without a
//! reason. It judges the queues, so it does not depend on their implementation.
//!
//! The events of one bot are named by their **position**: 0, 1, 2 … in the order in which they were
//! sent for that bot. Positions may have gaps. The sender puts the position into the event, the
//! handler reads it back.
//!
//! Times are microseconds of the wall clock, so all processes must share the clock of one machine.

mod check;
mod report;

use std::borrow::Cow;
use std::fmt;
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;
use std::str::FromStr;
use std::sync::{Mutex, PoisonError};

pub use self::check::Checker;
pub use self::report::Report;

/// The result of one handling of one event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// The effect happened.
    Done,
    /// The handler failed. The event is due again, or becomes a dead letter.
    Failed,
}

/// A record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Record<'a> {
    /// The bus acknowledged an event.
    Sent {
        /// The bot.
        bot: &'a str,
        /// The event's position among those sent for this bot.
        event: u32,
    },
    /// A handler finished an event. The record must be written *before* the slice is completed. A
    /// handling that a kill interrupted leaves no record.
    Handled {
        /// The bot.
        bot: &'a str,
        /// The event's position.
        event: u32,
        /// The event's sequence.
        sequence: u64,
        /// The fence of the lease under which it was handled.
        fence: u64,
        /// When the handler started, in µs.
        started: u64,
        /// When the handler ended, in µs.
        ended: u64,
        /// The result.
        outcome: Outcome,
        /// The process.
        process: u32,
    },
    /// The queue confirmed that events were removed. Unknown results are not written.
    Committed {
        /// The bot.
        bot: &'a str,
        /// The positions of the removed events, dead letters included.
        events: Cow<'a, [u32]>,
        /// The fence in the call.
        fence: u64,
        /// When the (first) call was sent, in µs. A reply may be read long after the next holder
        /// started. A call sent after that must have been refused.
        asked: u64,
        /// When the confirmation was read, in µs.
        at: u64,
        /// The process.
        process: u32,
    },
}

/// One line, fields separated by tabs, the bot last. A bot id contains no control characters, so no
/// escaping is necessary.
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
    /// Parses one line without its end. `None` if it is not a record.
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

/// The unread fields of a line.
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

/// Why a log cannot be checked.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The log cannot be read.
    #[error("the history cannot be read")]
    Read(#[source] io::Error),
    /// A line is neither a record nor the incomplete end of the log.
    #[error("line {line} is not a record of the history: {text:?}")]
    Malformed {
        /// Its number, from 1.
        line: usize,
        /// Its start.
        text: String,
    },
}

/// The log of one process. Nothing is buffered in memory: after [`HistoryLog::write`] returns, the
/// record is in the file even if the process is killed immediately.
#[derive(Debug)]
pub struct HistoryLog {
    file: Mutex<File>,
}

impl HistoryLog {
    /// Opens a log to append to. Each process needs its own file, because only the last line may be
    /// incomplete after a kill.
    ///
    /// # Errors
    /// If the file cannot be opened.
    pub fn append(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        Ok(Self { file: Mutex::new(file) })
    }

    /// Appends records in one write.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn write<'a>(&self, records: impl IntoIterator<Item = Record<'a>>) -> io::Result<()> {
        use fmt::Write as _;
        let mut lines = String::new();
        for record in records {
            // Writing to a `String` cannot fail.
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
    fn text_that_is_not_a_record_is_refused() {
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
