//! Imports of counters: lines that replace the counters of an ad. Each line is applied once and in
//! order, regardless of repeated requests.
//!
//! Redis stores the last applied line of each import beside the queue that the lines go to, so both
//! always roll back together. To protect other work, no line is accepted while many replacements of
//! its bot wait to be written, or while Redis is nearly full. Views do not count: they are merged,
//! and a busy bot always has many.

use tracing::warn;

use crate::counters::scripts::Taken;
use crate::counters::view::Line;
use crate::id::BotId;
use crate::queue::Queue;
use crate::redis::RedisError;
use crate::telemetry::OncePerMinute;

/// Maximum number of lines per write.
const LINES: usize = 250;
/// Number of waiting replacements of the bot at which no line is accepted.
const WAITING_MAX: u64 = 2_000;
/// Percent of its memory in use at which Redis accepts no line.
const FULL_PERCENT: u64 = 80;

/// The progress of an import.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Progress {
    /// Number of lines applied by this call.
    pub(crate) imported: u64,
    /// Number of lines that an earlier call had applied.
    pub(crate) skipped: u64,
    /// All lines up to this number are applied.
    pub(crate) last: u64,
}

/// Why no line, or no further line, is accepted.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ImportError {
    /// Redis failed.
    #[error(transparent)]
    Redis(#[from] RedisError),
    /// Lines before this one are missing.
    #[error("line {line} cannot be imported: the last imported line is {last}; continue with line {}", last + 1)]
    Gap {
        /// The line.
        line: u64,
        /// The last applied line.
        last: u64,
    },
    /// Too many replacements of the bot wait.
    #[error("{waiting} replacements of the bot wait for MongoDB; the maximum is {WAITING_MAX}")]
    Waiting {
        /// The number of waiting replacements.
        waiting: u64,
    },
    /// Redis is nearly full.
    #[error("Redis has used {percent} % of its memory; imports wait above {FULL_PERCENT} %")]
    Full {
        /// Percent of its memory in use.
        percent: u64,
    },
}

impl ImportError {
    /// Whether the error is temporary.
    pub(crate) fn is_passing(&self) -> bool {
        match self {
            Self::Redis(RedisError::Quota(_)) | Self::Waiting { .. } | Self::Full { .. } => true,
            Self::Redis(error) => error.is_passing(),
            Self::Gap { .. } => false,
        }
    }
}

/// Applies consecutive lines: all of them, or the first ones if there is no room for more or Redis fails.
///
/// # Errors
/// If no line is known to be applied. The lines can be sent again.
pub(crate) async fn import(
    queue: &Queue,
    bot: &BotId,
    key: &str,
    lines: &[Line],
) -> Result<Progress, ImportError> {
    let mut progress = Progress::default();
    match apply(queue, bot, key, lines, &mut progress).await {
        // If the reason lasts, the call for the other lines meets it.
        Err(error) if progress.last > 0 => {
            note(&error);
            Ok(progress)
        }
        applied => applied.map(|()| progress),
    }
}

/// Logs why Redis interrupted an import: its answer does not tell.
fn note(error: &ImportError) {
    static INTERRUPTED: OncePerMinute = OncePerMinute::new();
    let ImportError::Redis(error) = error else { return };
    if matches!(error, RedisError::Quota(_)) {
        return;
    }
    if let Some(suppressed) = INTERRUPTED.take() {
        warn!(%error, suppressed, "Redis interrupted an import after a part of its lines");
    }
}

/// The same. After an error, `progress` has what was applied before.
async fn apply(
    queue: &Queue,
    bot: &BotId,
    key: &str,
    lines: &[Line],
    progress: &mut Progress,
) -> Result<(), ImportError> {
    for lines in lines.chunks(LINES) {
        let (waiting, percent) = queue.room(bot).await?;
        if waiting >= WAITING_MAX {
            return Err(ImportError::Waiting { waiting });
        }
        if percent >= FULL_PERCENT {
            return Err(ImportError::Full { percent });
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
    Ok(())
}
