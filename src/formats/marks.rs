//! Reads and writes marks. A mark is never changed or removed, so concurrent starts of several versions
//! cannot undo each other's marks.
//!
//! | place | a mark |
//! |---|---|
//! | Redis, hash `fl:formats` | field `<kind>:<format>`: the earliest format that reads it, the version that wrote it first, ms since 1970. Field `last`: the version of the process that started last |
//! | `MongoDB`, collection `fairlane_formats` | `{_id: "<kind>:<format>", mark: <the same text>}`, and `{_id: "last", mark}` |

use std::collections::BTreeMap;
use std::time::Duration;

use mongodb::bson::{doc, rawdoc};
use mongodb::options::FindOptions;
use redis::{Pipeline, Value};

use super::{FORMATS, Format, LAST, Marks, VERSION};
use crate::clock::{SharedClock, millis};
use crate::mongo::client::{Mongo, MongoError};
use crate::redis::{Link, RedisError, keys};

/// The marks in Redis.
pub(crate) async fn look(link: &Link) -> Result<Marks, RedisError> {
    let asked = redis::Cmd::hgetall(keys::formats(link.prefix()));
    let answer = link.command("HGETALL", asked).await?;
    let fields: BTreeMap<String, String> = link.read("HGETALL", answer)?;
    Ok(Marks::parse(&fields))
}

/// Adds the missing marks of `formats`, and notes this version as that of the last start.
pub(crate) async fn mark(
    link: &Link,
    marks: &Marks,
    formats: &[&Format],
    clock: &SharedClock,
) -> Result<(), RedisError> {
    let mut pipe = missing(link, marks, formats, clock);
    if marks.last.as_deref() != Some(VERSION) {
        pipe.cmd("HSET").arg(keys::formats(link.prefix())).arg(LAST).arg(VERSION);
    }
    write(link, &pipe).await
}

/// Adds the missing marks after Redis lost them. Returns those that it has now.
pub(crate) async fn keep(
    link: &Link,
    formats: &[&Format],
    clock: &SharedClock,
) -> Result<Marks, RedisError> {
    let marks = look(link).await?;
    let mut pipe = missing(link, &marks, formats, clock);
    if marks.last.is_none() {
        pipe.cmd("HSETNX").arg(keys::formats(link.prefix())).arg(LAST).arg(VERSION);
    }
    write(link, &pipe).await?;
    Ok(marks)
}

fn missing(link: &Link, marks: &Marks, formats: &[&Format], clock: &SharedClock) -> Pipeline {
    let key = keys::formats(link.prefix());
    let mut pipe = Pipeline::new();
    for format in formats.iter().filter(|format| !marks.has(format)) {
        pipe.cmd("HSETNX").arg(&key).arg(format.name()).arg(text(format, clock));
    }
    pipe
}

async fn write(link: &Link, pipe: &Pipeline) -> Result<(), RedisError> {
    // Existing values are not written again: a full Redis would refuse that.
    if pipe.is_empty() {
        return Ok(());
    }
    link.run_checked("HSETNX", pipe).await.map(|_: Vec<Value>| ())
}

fn text(format: &Format, clock: &SharedClock) -> String {
    format!("{} {VERSION} {}", format.oldest_reader, millis(clock.now()))
}

/// The marks in `MongoDB`. Takes at most `within`.
pub(crate) async fn look_mongo(mongo: &Mongo, within: Duration) -> Result<Marks, MongoError> {
    let found = mongo.find(FORMATS, doc! {}, FindOptions::default(), within).await?;
    let fields: BTreeMap<String, String> = found
        .iter()
        .filter_map(|mark| {
            let (name, value) =
                (mark.get_str("_id").ok()?, mark.get_str("mark").unwrap_or_default());
            Some((name.to_owned(), value.to_owned()))
        })
        .collect();
    Ok(Marks::parse(&fields))
}

/// Adds the missing marks of the documents among `formats`, and notes this version as that of the
/// last start. Takes at most `within`.
pub(crate) async fn mark_mongo(
    mongo: &Mongo,
    marks: &Marks,
    formats: &[&Format],
    clock: &SharedClock,
    within: Duration,
) -> Result<(), MongoError> {
    let new = formats.iter().filter(|format| format.documents && !marks.has(format));
    let mut statements: Vec<_> = new
        .map(|format| {
            let value = rawdoc! { "$setOnInsert": { "mark": text(format, clock) } };
            rawdoc! { "q": { "_id": format.name() }, "u": value, "upsert": true }
        })
        .collect();
    if marks.last.as_deref() != Some(VERSION) {
        let value = rawdoc! { "$set": { "mark": VERSION } };
        statements.push(rawdoc! { "q": { "_id": LAST }, "u": value, "upsert": true });
    }
    if statements.is_empty() {
        return Ok(());
    }
    let statements = statements.into_iter().collect();
    let mut done = mongo.update(FORMATS, statements, false, within, ()).await?;
    // Another process may have inserted the same mark meanwhile.
    done.refused.retain(|refused| !refused.met_another);
    done.refused.pop().map_or(Ok(()), |refused| Err(refused.error))
}
