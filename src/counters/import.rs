//! History in bulk: lines that replace what was counted of an ad, taken in their order and once each,
//! however often they are sent.
//!
//! Redis keeps the last line that was taken of each import, beside the queue that it was put into: it
//! and the queue are never of different times. An import waits where it would take room from others:
//! while many records of its bot wait to be written, and while Redis is nearly full.

use crate::counters::scripts::Taken;
use crate::counters::view::Line;
use crate::id::BotId;
use crate::keyspace::StoreError;
use crate::queue::Queue;

/// Lines of one write.
const LINES: usize = 250;
/// While so many records of the bot wait, no line is taken.
const WAITING_MAX: u64 = 2_000;
/// While Redis has used so much of its memory, in percent, no line is taken.
const FULL_PERCENT: u64 = 80;

/// How far an import came.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Lines taken now.
    pub(crate) imported: u64,
    /// Lines that were taken before.
    pub(crate) skipped: u64,
    /// All lines up to this one are taken.
    pub(crate) last: u64,
}

/// Why no line, or no further one, is taken.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    /// Redis failed.
    #[error(transparent)]
    Redis(#[from] StoreError),
    /// Lines before were not taken.
    #[error("line {line} cannot be imported: of this import, line {last} was the last; go on with line {}", last + 1)]
    Gap {
        /// The line.
        line: u64,
        /// The last line that was taken.
        last: u64,
    },
    /// Others come first.
    #[error("{waiting} records of the bot wait to be written; at most {WAITING_MAX} may")]
    Waiting {
        /// How many.
        waiting: u64,
    },
    /// Redis has little room left.
    #[error("Redis has used {percent} % of its memory; imports wait above {FULL_PERCENT} %")]
    Full {
        /// How much it has used.
        percent: u64,
    },
}

impl ImportError {
    /// Whether it passes by itself.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Redis(error) => error.is_passing(),
            Self::Gap { .. } => false,
            Self::Waiting { .. } | Self::Full { .. } => true,
        }
    }
}

/// Takes lines that follow each other: all of them, or as many as there is room for.
///
/// # Errors
/// When none was taken or, with [`ImportError::Redis`], it is unknown how many: they can be sent
/// again.
pub(crate) async fn import(
    queue: &Queue,
    bot: &BotId,
    key: &str,
    lines: &[Line],
) -> Result<Progress, ImportError> {
    let mut progress = Progress::default();
    for lines in lines.chunks(LINES) {
        let (waiting, percent) = queue.room(bot).await?;
        let refused = if waiting >= WAITING_MAX {
            Some(ImportError::Waiting { waiting })
        } else if percent >= FULL_PERCENT {
            Some(ImportError::Full { percent })
        } else {
            None
        };
        if let Some(refused) = refused {
            return if progress.last > 0 { Ok(progress) } else { Err(refused) };
        }
        for (line, taken) in lines.iter().zip(queue.import_lines(bot, key, lines).await?) {
            match taken? {
                Taken::Now => progress.imported += 1,
                Taken::Before => progress.skipped += 1,
                Taken::Gap(last) => return Err(ImportError::Gap { line: line.number, last }),
            }
            progress.last = line.upto;
        }
    }
    Ok(progress)
}
