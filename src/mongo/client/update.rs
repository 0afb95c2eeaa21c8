//! One `insert` or `update` command with many documents or statements, acknowledged by a majority. The
//! driver's own bulk API needs a server of version 8, and its raw command API does not check the reply.
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

const INSERT: &str = "insert";
const UPDATE: &str = "update";

/// The result of an `insert` command.
#[derive(Debug, Default)]
pub(crate) struct Inserted {
    /// Number of new documents.
    pub(crate) created: usize,
    /// The documents that were not inserted.
    pub(crate) refused: Vec<Refused>,
}

/// The result of an `update` command.
#[derive(Debug, Default)]
pub(crate) struct Updated {
    /// Number of changed documents.
    pub(crate) modified: usize,
    /// Number of found documents, also of those that had the content already.
    pub(crate) matched: usize,
    /// The indexes of the statements that created a document.
    pub(crate) upserted: Vec<usize>,
    /// The failed statements. An ordered command has at most one. The statements after it were not
    /// tried.
    pub(crate) refused: Vec<Refused>,
}

/// A failed statement or document.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Its index.
    pub(crate) index: usize,
    /// A write conflict, or a document with this id exists: a retry may succeed.
    pub(crate) met_another: bool,
    /// The reason.
    pub(crate) error: MongoError,
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
        let (reply, refused) = self.written(UPDATE, command, within, keep).await?;
        let bad = |bad| self.bad(UPDATE, bad);
        let modified = count(&reply, "nModified").ok_or(Bad::Shape("nModified")).map_err(bad)?;
        let found = count(&reply, "n").ok_or(Bad::Shape("n")).map_err(bad)?;
        let upserted = upserted(&reply).map_err(bad)?;
        let matched = found.saturating_sub(upserted.len());
        Ok(Updated { modified, matched, upserted, refused })
    }

    /// Inserts the documents by one command, in any order, and returns once a majority has all of
    /// them. The rest is as for [`Self::update`]. An insert costs the server much less than an
    /// update that creates the document, because nothing is looked up and all documents share a
    /// transaction.
    ///
    /// # Errors
    /// If there is no answer in time, or no majority. Documents may be inserted.
    ///
    /// # Cancel safety
    /// As after an error: documents may be inserted.
    pub(crate) async fn insert(
        &self,
        collection: &str,
        documents: RawArrayBuf,
        within: Duration,
        keep: impl Send + 'static,
    ) -> Result<Inserted, MongoError> {
        let command = rawdoc! {
            "insert": collection,
            "documents": documents,
            "ordered": false,
            "writeConcern": self.majority(),
            "maxTimeMS": i64::try_from(within.as_millis()).unwrap_or(i64::MAX).max(1),
        };
        let (reply, refused) = self.written(INSERT, command, within, keep).await?;
        let created = count(&reply, "n").ok_or(Bad::Shape("n"));
        Ok(Inserted { created: created.map_err(|bad| self.bad(INSERT, bad))?, refused })
    }

    /// Sends a command. Returns its reply once a majority has the changes.
    async fn written(
        &self,
        name: &'static str,
        command: RawDocumentBuf,
        within: Duration,
        keep: impl Send + 'static,
    ) -> Result<(Document, Vec<Refused>), MongoError> {
        let sent = self.send(command, keep)?;
        let answer = async { sent.await.unwrap_or_else(|_| Err(unanswered())) };
        let reply = self.answer_after(name, within, ANSWER_GRACE, answer).await?;
        let refused = read(&reply).map_err(|bad| self.bad(name, bad))?;
        let refused = refused
            .into_iter()
            .map(|(index, source)| Refused {
                index,
                met_another: met_another(&source),
                error: self.failed(name, source),
            })
            .collect();
        Ok((reply, refused))
    }

    fn bad(&self, command: &'static str, bad: Bad) -> MongoError {
        match bad {
            Bad::Server(source) => self.failed(command, source),
            Bad::Shape(expected) => self.not_understood(command, expected),
        }
    }

    /// Sends a command in its own task, which drops `keep` once the server has answered.
    ///
    /// # Errors
    /// If the servers are not known. Nothing was sent.
    fn send(
        &self,
        command: RawDocumentBuf,
        keep: impl Send + 'static,
    ) -> Result<JoinHandle<Result<Document, Error>>, MongoError> {
        let database = self.database()?;
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
        let sent = tokio::spawn(sent);
        Ok(sent)
    }

    fn majority(&self) -> RawDocumentBuf {
        let within = i64::try_from(MAJORITY_TIMEOUT.as_millis()).unwrap_or(i64::MAX);
        let mut majority = rawdoc! { "w": "majority", "wtimeout": within };
        if self.driver.concern.journal == Some(true) {
            majority.append(cstr!("j"), true);
        }
        majority
    }
}

fn unanswered() -> Error {
    Error::from(io::Error::from(io::ErrorKind::TimedOut))
}

/// The refused parts of a command, before errors get their context.
fn read(reply: &Document) -> Result<Vec<(usize, Error)>, Bad> {
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
    Ok(refused)
}

fn upserted(reply: &Document) -> Result<Vec<usize>, Bad> {
    list(reply, "upserted")?
        .map(|item| index(item).ok_or(Bad::Shape("upserts with their places")))
        .collect()
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
        assert_eq!((count(&reply, "nModified"), upserted(&reply).unwrap()), (Some(3), vec![4]));
        let read = read(&reply).unwrap();
        let refused: Vec<_> =
            read.iter().map(|(index, error)| (*index, met_another(error))).collect();
        assert_eq!(refused, [(1, true), (2, false)]);
        assert!(read[1].1.to_string().contains("failed validation"));
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
        for reply in [doc! { "ok": 1 }, doc! { "ok": 1, "nModified": "3", "n": "3" }] {
            assert_eq!((count(&reply, "nModified"), count(&reply, "n")), (None, None), "{reply}");
        }
        for reply in [
            doc! { "ok": 1, "nModified": 1, "writeErrors": [{ "code": 1 }] },
            doc! { "ok": 1, "nModified": 1, "writeErrors": [{ "index": 0 }] },
            doc! { "ok": 1, "nModified": 1, "writeErrors": "many" },
        ] {
            assert!(matches!(read(&reply), Err(Bad::Shape(_))), "{reply}");
        }
        let reply = doc! { "ok": 1, "nModified": 1, "upserted": [7] };
        assert!(matches!(upserted(&reply), Err(Bad::Shape(_))), "{reply}");
    }
}
