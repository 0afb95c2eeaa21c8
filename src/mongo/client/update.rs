//! One `update` command with many statements, acknowledged by a majority. The driver's own bulk API
//! needs a server of version 8, and its raw command API does not check the reply.
//!
//! Commands that continue after their callers have given up make a slow server slower. So each
//! command carries its deadline. It runs in its own task, which keeps the slots and turns of the
//! command until the server has answered, for at most 20 s.

use std::io;
use std::time::Duration;

use mongodb::bson::{
    Document, RawArrayBuf, RawDocumentBuf, cstr, deserialize_from_document, rawdoc,
};
use mongodb::error::{Error, ErrorKind, WriteFailure};
use tokio::task::JoinHandle;

use super::error::{DUPLICATE_KEY, WRITE_CONFLICT};
use super::{ABANDONED_MAX, ANSWER_GRACE, MAJORITY_TIMEOUT, Mongo, MongoError};

const COMMAND: &str = "update";

/// The result of an `update` command.
#[derive(Debug, Default)]
pub(crate) struct Updated {
    /// Number of changed documents.
    pub(crate) modified: usize,
    /// The indexes of the statements that created a document.
    pub(crate) upserted: Vec<usize>,
    /// The failed statements. An ordered command has at most one. The statements after it were not
    /// tried.
    pub(crate) refused: Vec<Refused>,
}

/// A failed statement.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Its index.
    pub(crate) index: usize,
    /// A write conflict: a retry may succeed.
    pub(crate) met_another: bool,
    /// The reason.
    pub(crate) error: MongoError,
}

/// A parsed reply, before errors get their context.
#[derive(Debug, Default)]
struct Reply {
    modified: usize,
    upserted: Vec<usize>,
    refused: Vec<(usize, Error)>,
}

/// Why a reply is not a success.
#[derive(Debug)]
enum Bad {
    /// The write did not reach a majority.
    Server(Error),
    /// The reply lacks this expected content.
    Shape(&'static str),
}

impl Mongo {
    /// Sends the statements as one command and returns once a majority has applied all changes. The
    /// URL cannot weaken this. With `journal=true` in the URL, the majority has them in its
    /// journals. The server works on the command for at most `within`. `keep` is dropped once the
    /// command has ended there.
    ///
    /// # Errors
    /// If there is no answer in time, or no majority. The statements may have run.
    ///
    /// # Cancel safety
    /// As after an error: the statements may have run.
    pub(crate) async fn update(
        &self,
        collection: &str,
        statements: RawArrayBuf,
        ordered: bool,
        within: Duration,
        keep: impl Send + 'static,
    ) -> Result<Updated, MongoError> {
        let command = rawdoc! {
            "update": collection,
            "updates": statements,
            "ordered": ordered,
            "writeConcern": self.majority(),
            "maxTimeMS": i64::try_from(within.as_millis()).unwrap_or(i64::MAX).max(1),
        };
        let sent = self.send(command, keep);
        let answer = async { sent.await.unwrap_or_else(|_| Err(unanswered())) };
        let reply = self.answer_after(COMMAND, within, ANSWER_GRACE, answer).await?;
        let Reply { modified, upserted, refused } = read(&reply).map_err(|bad| match bad {
            Bad::Server(source) => self.failed(COMMAND, source),
            Bad::Shape(expected) => self.not_understood(COMMAND, expected),
        })?;
        let refused = refused
            .into_iter()
            .map(|(index, source)| Refused {
                index,
                met_another: met_another(&source),
                error: self.failed(COMMAND, source),
            })
            .collect();
        Ok(Updated { modified, upserted, refused })
    }

    /// Sends a command in its own task, which drops `keep` once the server has answered.
    fn send(
        &self,
        command: RawDocumentBuf,
        keep: impl Send + 'static,
    ) -> JoinHandle<Result<Document, Error>> {
        let database = self.client.database(&self.database);
        let sent = async move {
            let reply = async { database.run_raw_command(command).await };
            let reply = tokio::time::timeout(ABANDONED_MAX, reply).await;
            drop(keep);
            reply.unwrap_or_else(|_| Err(unanswered()))
        };
        #[expect(
            clippy::disallowed_methods,
            reason = "a stop need not wait for a task without a waiting caller, and the task ends by itself"
        )]
        tokio::spawn(sent)
    }

    fn majority(&self) -> RawDocumentBuf {
        let within = i64::try_from(MAJORITY_TIMEOUT.as_millis()).unwrap_or(i64::MAX);
        let mut majority = rawdoc! { "w": "majority", "wtimeout": within };
        if self.client.write_concern().and_then(|concern| concern.journal) == Some(true) {
            majority.append(cstr!("j"), true);
        }
        majority
    }
}

fn unanswered() -> Error {
    Error::from(io::Error::from(io::ErrorKind::TimedOut))
}

fn read(reply: &Document) -> Result<Reply, Bad> {
    if let Some(concern) = reply.get("writeConcernError") {
        let parsed = concern.as_document().cloned().map(deserialize_from_document);
        let Some(Ok(error)) = parsed else { return Err(Bad::Shape("a write concern error")) };
        let failure = WriteFailure::WriteConcernError(error);
        return Err(Bad::Server(Error::from(ErrorKind::Write(failure))));
    }
    let mut refused = Vec::new();
    for item in list(reply, "writeErrors")? {
        let parsed = index(item).zip(deserialize_from_document(item.clone()).ok());
        let (index, error) = parsed.ok_or(Bad::Shape("write errors with their places"))?;
        refused.push((index, Error::from(ErrorKind::Write(WriteFailure::WriteError(error)))));
    }
    let upserted = list(reply, "upserted")?
        .map(|item| index(item).ok_or(Bad::Shape("upserts with their places")))
        .collect::<Result<_, _>>()?;
    let modified = count(reply, "nModified").ok_or(Bad::Shape("nModified"))?;
    Ok(Reply { modified, upserted, refused })
}

/// The documents of a list, which may be absent.
fn list<'a>(
    reply: &'a Document,
    key: &'static str,
) -> Result<impl Iterator<Item = &'a Document>, Bad> {
    let items: &[_] = match reply.get(key) {
        None => &[],
        Some(list) => list.as_array().ok_or(Bad::Shape("a list of writes"))?,
    };
    let documents: Option<Vec<_>> = items.iter().map(|item| item.as_document()).collect();
    documents.map(Vec::into_iter).ok_or(Bad::Shape("a list of writes"))
}

fn index(item: &Document) -> Option<usize> {
    count(item, "index")
}

/// Reads a count. Servers and proxies use different number types.
fn count(document: &Document, key: &str) -> Option<usize> {
    let value = document.get(key)?;
    let number = value.as_i64().or_else(|| value.as_i32().map(i64::from));
    #[expect(clippy::cast_possible_truncation, reason = "a count of statements or documents")]
    let number = number.or_else(|| value.as_f64().map(|number| number as i64));
    number.and_then(|number| usize::try_from(number).ok())
}

fn met_another(error: &Error) -> bool {
    matches!(&*error.kind, ErrorKind::Write(WriteFailure::WriteError(error))
        if [DUPLICATE_KEY, WRITE_CONFLICT].contains(&error.code))
}

#[cfg(test)]
mod tests {
    use mongodb::bson::doc;

    use super::*;

    #[test]
    fn a_reply_tells_modified_created_and_refused_documents() {
        let reply = doc! {
            "ok": 1.0, "n": 5, "nModified": 3_i64,
            "upserted": [{ "index": 4, "_id": "x" }],
            "writeErrors": [
                { "index": 1, "code": 11000, "errmsg": "E11000 duplicate key" },
                { "index": 2, "code": 121, "errmsg": "Document failed validation" },
            ],
        };
        let read = read(&reply).unwrap();
        assert_eq!((read.modified, read.upserted), (3, vec![4]));
        let refused: Vec<_> =
            read.refused.iter().map(|(index, error)| (*index, met_another(error))).collect();
        assert_eq!(refused, [(1, true), (2, false)]);
        assert!(read.refused[1].1.to_string().contains("failed validation"));
    }

    #[test]
    fn a_write_without_a_majority_is_an_error_whatever_else_the_reply_says() {
        let reply = doc! {
            "ok": 1, "n": 1, "nModified": 1,
            "writeConcernError": { "code": 64, "codeName": "WriteConcernFailed",
                "errmsg": "waiting for replication timed out", "errInfo": { "wtimeout": true } },
        };
        let Err(Bad::Server(error)) = read(&reply) else { panic!("no error") };
        assert!(
            matches!(&*error.kind, ErrorKind::Write(WriteFailure::WriteConcernError(error))
                if error.message == "waiting for replication timed out"),
            "{error:?}"
        );
        // A write concern error that this version cannot read is an error too.
        for unknown in [doc! {}.into(), mongodb::bson::Bson::from("no majority")] {
            let reply = doc! { "ok": 1, "nModified": 1, "writeConcernError": unknown };
            assert!(matches!(read(&reply), Err(Bad::Shape(_))), "{reply}");
        }
    }

    #[test]
    fn a_reply_of_another_shape_is_not_taken_for_success() {
        for reply in [
            doc! { "ok": 1 },
            doc! { "ok": 1, "nModified": "3" },
            doc! { "ok": 1, "nModified": 1, "writeErrors": [{ "code": 1 }] },
            doc! { "ok": 1, "nModified": 1, "writeErrors": [{ "index": 0 }] },
            doc! { "ok": 1, "nModified": 1, "writeErrors": "many" },
            doc! { "ok": 1, "nModified": 1, "upserted": [7] },
        ] {
            assert!(matches!(read(&reply), Err(Bad::Shape(_))), "{reply}");
        }
    }
}
