//! Executes statements on one collection in bounded commands. Sends the fast form first, and
//! repeats statements after a write conflict.

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use mongodb::bson::{RawArrayBuf, RawDocumentBuf};

use super::statement::Statement;
use crate::mongo::client::{Mongo, MongoError};
use crate::mongo::coalescer::Slot;
use crate::mongo::turns::Turn;

/// Maximum number of statements per command.
pub(super) const STATEMENTS_MAX: usize = 500;
/// Maximum number of bytes of the statements in a command, unless one statement is larger; the
/// server accepts 16 MiB.
const BYTES_MAX: usize = 4 << 20;
/// Number of attempts for a statement with write conflicts.
const TRIES: usize = 3;

/// Statements that were refused for good, by their index.
pub(super) type Refusals = Vec<(usize, MongoError)>;

/// A statement with its index.
type Encoded = (usize, RawDocumentBuf);

/// The results of commands.
#[derive(Default)]
struct Done {
    /// Number of changed or created documents.
    changed: usize,
    /// The indexes of statements that created a document.
    created: HashSet<usize>,
    refused: Refusals,
}

/// One collection of the counters.
#[derive(Debug, Clone)]
pub(super) struct Writer {
    pub(super) mongo: Mongo,
    pub(super) collection: &'static str,
    /// Time limit of a command in the server.
    pub(super) within: Duration,
}

/// A statement, and the turn of its bot.
#[derive(Debug, Clone)]
pub(super) struct Item {
    pub(super) statement: Statement,
    pub(super) turn: Turn,
}

/// Values that a command holds until it has ended in the server.
struct Keep {
    _place: Slot,
    _turns: Vec<Turn>,
}

impl Writer {
    /// Executes the statements. If they contain a replacement, they run in order and stop at the
    /// first refused one. Returns once a majority has all changes.
    ///
    /// # Errors
    /// If a command failed as a whole. Then it is unknown which statements ran.
    ///
    /// # Cancel safety
    /// The current command continues, and keeps its place and the turns of its bots; no other
    /// command is sent.
    pub(super) async fn write(self, items: Vec<Item>, place: Slot) -> Result<Refusals, MongoError> {
        let (statements, turns): (Vec<_>, Vec<_>) =
            items.into_iter().map(|Item { statement, turn }| (statement, turn)).unzip();
        let keep = Arc::new(Keep { _place: place, _turns: turns });
        if statements.iter().any(Statement::is_replacement) {
            self.in_order(&statements, &keep).await
        } else {
            self.in_any_order(&statements, &keep).await
        }
    }

    async fn in_order(
        &self,
        statements: &[Statement],
        keep: &Arc<Keep>,
    ) -> Result<Refusals, MongoError> {
        let right = |statement: &Statement| statement.long().unwrap_or_else(|| statement.fast());
        let encoded: Vec<Encoded> = statements.iter().map(right).enumerate().collect();
        for command in cut(&encoded) {
            let done = self.send(&encoded[command], true, keep).await?;
            if !done.refused.is_empty() {
                return Ok(done.refused);
            }
        }
        Ok(Refusals::new())
    }

    async fn in_any_order(
        &self,
        statements: &[Statement],
        keep: &Arc<Keep>,
    ) -> Result<Refusals, MongoError> {
        let fast: Vec<Encoded> = statements.iter().map(Statement::fast).enumerate().collect();
        let mut refused = Refusals::new();
        let mut long = Vec::new();
        for command in cut(&fast) {
            let done = self.send(&fast[command.clone()], false, keep).await?;
            if done.changed + done.refused.len() < command.len() {
                // Some of the documents contain some of these records. The reply does not say
                // which.
                let settled = |place: &usize| {
                    done.created.contains(place) || done.refused.iter().any(|(at, _)| at == place)
                };
                let open = command.filter(|place| !settled(place));
                long.extend(open.filter_map(|place| Some((place, statements[place].long()?))));
            }
            refused.extend(done.refused);
        }
        for command in cut(&long) {
            refused.extend(self.send(&long[command], false, keep).await?.refused);
        }
        Ok(refused)
    }

    /// Sends one command, and repeats statements with write conflicts.
    async fn send(
        &self,
        statements: &[Encoded],
        ordered: bool,
        keep: &Arc<Keep>,
    ) -> Result<Done, MongoError> {
        let mut done = Done::default();
        let mut waiting: Vec<&Encoded> = statements.iter().collect();
        for last in (1..=TRIES).map(|tried| tried == TRIES) {
            let updates: RawArrayBuf =
                waiting.iter().map(|(_, statement)| statement.clone()).collect();
            let sent =
                self.mongo.update(self.collection, updates, ordered, self.within, Arc::clone(keep));
            let reply = sent.await?;
            let place = |index: usize| {
                waiting.get(index).map(|(place, _)| *place).ok_or_else(|| {
                    self.mongo.not_understood("update", "places of statements that were sent")
                })
            };
            done.changed += reply.modified + reply.upserted.len();
            for index in reply.upserted {
                done.created.insert(place(index)?);
            }
            let mut again = Vec::new();
            for refused in reply.refused {
                let place = place(refused.index)?;
                if last || !refused.met_another {
                    done.refused.push((place, refused.error));
                } else if ordered {
                    again.extend_from_slice(&waiting[refused.index..]);
                } else {
                    again.push(waiting[refused.index]);
                }
            }
            if again.is_empty() {
                break;
            }
            waiting = again;
        }
        Ok(done)
    }
}

/// Divides statements into commands.
fn cut(statements: &[Encoded]) -> Vec<Range<usize>> {
    let mut commands = Vec::new();
    let (mut begin, mut bytes) = (0, 0);
    for (at, (_, statement)) in statements.iter().enumerate() {
        let size = statement.as_bytes().len();
        if at > begin && (at - begin == STATEMENTS_MAX || bytes + size > BYTES_MAX) {
            commands.push(begin..at);
            (begin, bytes) = (at, 0);
        }
        bytes += size;
    }
    if begin < statements.len() {
        commands.push(begin..statements.len());
    }
    commands
}

#[cfg(test)]
mod tests {
    use mongodb::bson::rawdoc;

    use super::*;

    fn encoded(sizes: &[usize]) -> Vec<Encoded> {
        let document = |size: &usize| rawdoc! { "x": "x".repeat(*size) };
        sizes.iter().map(document).enumerate().collect()
    }

    #[test]
    fn commands_are_bounded_in_statements_and_bytes() {
        assert!(cut(&[]).is_empty());
        let many = cut(&encoded(&[1; 2 * STATEMENTS_MAX + 1]));
        assert_eq!(many, [0..500, 500..1_000, 1_000..1_001]);
        let half = BYTES_MAX / 2 - 100;
        let large = cut(&encoded(&[half, half, 1_000, 2 * BYTES_MAX, 1]));
        assert_eq!(large, [0..2, 2..3, 3..4, 4..5]);
    }
}
