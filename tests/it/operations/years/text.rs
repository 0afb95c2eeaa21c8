//! Data of Redis and MongoDB as text, and back.
//!
//! `redis.txt` has a command per field, member or entry, as `redis-cli` takes it. `mongodb.txt` has a
//! document per line, after the name of its collection. The times in both move with the day on which
//! they are read: each number of 13 digits near the time of the sample counts milliseconds since 1970.

use std::fmt::Write as _;

use futures_util::TryStreamExt as _;
use mongodb::bson::{Bson, DateTime, Document, doc};
use redis::Value;
use redis::aio::MultiplexedConnection;
use serde_json::{Map, Value as Json, json};

/// The start of the line with the time of a sample.
const TAKEN: &str = "# taken at ms ";
/// Times up to this far from that of the sample move: longer than any delay.
const NEAR_MS: u64 = 400 * 24 * 3_600 * 1_000;

/// The first line of a file.
pub(super) fn head(now_ms: u64) -> String {
    format!("{TAKEN}{now_ms}\n")
}

/// The text with all of its times moved, so that it seems to be from `then_ms`.
pub(super) fn moved(text: &str, then_ms: u64) -> String {
    let taken = text.lines().find_map(|line| line.strip_prefix(TAKEN)).expect("a time");
    let taken: u64 = taken.parse().expect("a number");
    let (mut moved, mut digits) = (String::with_capacity(text.len()), String::new());
    for letter in text.chars().chain(['\n']) {
        if letter.is_ascii_digit() {
            digits.push(letter);
            continue;
        }
        match digits.parse::<u64>() {
            Ok(time) if digits.len() == 13 && time.abs_diff(taken) < NEAR_MS => {
                write!(moved, "{}", time + then_ms - taken).unwrap();
            }
            _ => moved.push_str(&digits),
        }
        digits.clear();
        moved.push(letter);
    }
    moved.pop();
    moved
}

/// A word of a command. Bytes that are no visible ASCII are escaped.
fn quoted(word: &[u8]) -> String {
    let mut text = "\"".to_owned();
    for byte in word {
        match byte {
            b'"' | b'\\' => text.extend(['\\', char::from(*byte)]),
            b' '..=b'~' => text.push(char::from(*byte)),
            _ => write!(text, "\\x{byte:02x}").unwrap(),
        }
    }
    text + "\""
}

/// The words of a line.
pub(super) fn words(line: &str) -> Vec<Vec<u8>> {
    let (mut words, mut bytes) = (Vec::new(), line.bytes());
    while let Some(byte) = bytes.next() {
        match byte {
            b' ' => {}
            b'"' => {
                let mut word = Vec::new();
                loop {
                    match bytes.next().expect("the word ends") {
                        b'"' => break,
                        b'\\' => match bytes.next().expect("an escaped byte") {
                            b'x' => {
                                let digits = [bytes.next().unwrap(), bytes.next().unwrap()];
                                let digits = std::str::from_utf8(&digits).unwrap();
                                word.push(u8::from_str_radix(digits, 16).expect("a byte"));
                            }
                            other => word.push(other),
                        },
                        other => word.push(other),
                    }
                }
                words.push(word);
            }
            first => {
                let rest = bytes.by_ref().take_while(|byte| *byte != b' ');
                words.push([first].into_iter().chain(rest).collect());
            }
        }
    }
    words
}

fn bytes(value: Value) -> Vec<u8> {
    match value {
        Value::BulkString(bytes) => bytes,
        Value::SimpleString(text) => text.into_bytes(),
        Value::Int(number) => number.to_string().into_bytes(),
        other => panic!("no text: {other:?}"),
    }
}

fn list(value: Value) -> Vec<Value> {
    let Value::Array(values) = value else { panic!("no list: {value:?}") };
    values
}

fn texts(value: Value) -> Vec<Vec<u8>> {
    list(value).into_iter().map(bytes).collect()
}

/// The commands that make the content of a key again.
async fn commands(connection: &mut MultiplexedConnection, key: &[u8]) -> Vec<String> {
    let kind: String = redis::cmd("TYPE").arg(key).query_async(connection).await.unwrap();
    let (asked, rest): (_, &[&str]) = match kind.as_str() {
        "string" => ("GET", &[]),
        "hash" => ("HGETALL", &[]),
        "set" => ("SMEMBERS", &[]),
        "list" => ("LRANGE", &["0", "-1"]),
        "zset" => ("ZRANGE", &["0", "-1", "WITHSCORES"]),
        "stream" => ("XRANGE", &["-", "+"]),
        other => panic!("{other}"),
    };
    let held: Value = redis::cmd(asked).arg(key).arg(rest).query_async(connection).await.unwrap();
    let line = |command: &str, words: &[&[u8]]| {
        let words: Vec<_> = [key].iter().chain(words).map(|word| quoted(word)).collect();
        format!("{command} {}", words.join(" "))
    };
    let pairs = |held| {
        let held = texts(held);
        held.chunks_exact(2).map(|pair| (pair[0].clone(), pair[1].clone())).collect::<Vec<_>>()
    };
    let mut lines: Vec<String> = match kind.as_str() {
        "string" => vec![line("SET", &[&bytes(held)])],
        "hash" => pairs(held).iter().map(|(name, value)| line("HSET", &[name, value])).collect(),
        "set" => texts(held).iter().map(|member| line("SADD", &[member])).collect(),
        "list" => texts(held).iter().map(|member| line("RPUSH", &[member])).collect(),
        "zset" => {
            pairs(held).iter().map(|(member, score)| line("ZADD", &[score, member])).collect()
        }
        _ => list(held)
            .into_iter()
            .map(|entry| {
                let [id, fields] = <[Value; 2]>::try_from(list(entry)).unwrap();
                let (id, fields) = (bytes(id), texts(fields));
                let words: Vec<&[u8]> =
                    [&id].into_iter().chain(&fields).map(Vec::as_slice).collect();
                line("XADD", &words)
            })
            .collect(),
    };
    // Redis gives fields and members in any order.
    if matches!(kind.as_str(), "hash" | "set") {
        lines.sort();
    }
    let ttl: i64 = redis::cmd("PTTL").arg(key).query_async(connection).await.unwrap();
    if ttl > 0 {
        lines.push(line("PEXPIRE", &[ttl.to_string().as_bytes()]));
    }
    lines
}

/// Everything in a Redis, as text.
pub(super) async fn of_redis(connection: &mut MultiplexedConnection) -> String {
    let keys: Value = redis::cmd("KEYS").arg("*").query_async(connection).await.unwrap();
    let mut keys = texts(keys);
    keys.sort();
    let mut text = String::new();
    for key in keys {
        for line in commands(connection, &key).await {
            text.push_str(&line);
            text.push('\n');
        }
    }
    text
}

/// Runs the commands of a text.
pub(super) async fn into_redis(connection: &mut MultiplexedConnection, text: &str) {
    let mut pipe = redis::pipe();
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        for word in words(line).into_iter().enumerate() {
            match word {
                (0, command) => drop(pipe.cmd(std::str::from_utf8(&command).unwrap())),
                (_, word) => drop(pipe.arg(word)),
            }
        }
    }
    let done: Vec<Value> = pipe.query_async(connection).await.unwrap();
    let refused = done.iter().find(|value| matches!(value, Value::ServerError(_)));
    assert_eq!(refused, None, "Redis refuses a part of the sample");
}

/// A value as extended JSON.
fn readable(value: &Bson) -> Json {
    match value {
        Bson::String(text) => json!(text),
        Bson::Boolean(is) => json!(is),
        Bson::Null => Json::Null,
        Bson::Int32(number) => json!({ "$numberInt": number.to_string() }),
        Bson::Int64(number) => json!({ "$numberLong": number.to_string() }),
        Bson::Double(number) => json!({ "$numberDouble": number.to_string() }),
        Bson::DateTime(time) => json!({ "$date": time.timestamp_millis() }),
        Bson::Array(all) => all.iter().map(readable).collect(),
        Bson::Document(document) => {
            let fields = document.iter().map(|(name, value)| (name.clone(), readable(value)));
            Json::Object(fields.collect())
        }
        other => panic!("a document has {other:?}, which a sample cannot hold yet"),
    }
}

/// A value of extended JSON.
fn stored(value: &Json) -> Bson {
    let special = |fields: &Map<String, Json>| {
        let (name, value) = fields.iter().next()?;
        let text = value.as_str();
        match name.as_str() {
            "$numberInt" => Some(Bson::Int32(text?.parse().ok()?)),
            "$numberLong" => Some(Bson::Int64(text?.parse().ok()?)),
            "$numberDouble" => Some(Bson::Double(text?.parse().ok()?)),
            "$date" => Some(Bson::DateTime(DateTime::from_millis(value.as_i64()?))),
            _ => None,
        }
    };
    match value {
        Json::String(text) => Bson::String(text.clone()),
        Json::Bool(is) => Bson::Boolean(*is),
        Json::Null => Bson::Null,
        Json::Number(number) => panic!("{number} has no type"),
        Json::Array(all) => Bson::Array(all.iter().map(stored).collect()),
        Json::Object(fields) => special(fields).unwrap_or_else(|| {
            let fields = fields.iter().map(|(name, value)| (name.clone(), stored(value)));
            Bson::Document(fields.collect())
        }),
    }
}

/// Everything in the database, as text.
pub(super) async fn of_mongo(url: &str) -> String {
    let client = mongodb::Client::with_uri_str(url).await.unwrap();
    let database = client.database("fairlane");
    let mut names = database.list_collection_names().await.unwrap();
    names.sort();
    let mut text = String::new();
    for name in names.iter().filter(|name| !name.starts_with("system.")) {
        let collection = database.collection::<Document>(name);
        let found = collection.find(doc! {}).sort(doc! { "_id": 1 }).await;
        let found: Vec<Document> = found.unwrap().try_collect().await.unwrap();
        for document in found {
            writeln!(text, "{name} {}", readable(&Bson::Document(document))).unwrap();
        }
    }
    client.shutdown().await;
    text
}

/// Inserts the documents of a text.
pub(super) async fn into_mongo(url: &str, text: &str) {
    let client = mongodb::Client::with_uri_str(url).await.unwrap();
    let database = client.database("fairlane");
    for line in text.lines().filter(|line| !line.starts_with('#')) {
        let (name, document) = line.split_once(' ').expect("a collection and a document");
        let document: Json = serde_json::from_str(document).expect("JSON");
        let Bson::Document(document) = stored(&document) else { panic!("{line}") };
        database.collection::<Document>(name).insert_one(document).await.unwrap();
    }
    client.shutdown().await;
}

#[test]
fn a_word_comes_back_from_its_text() {
    let word = b"a \"\\b\x00\xff\n";
    assert_eq!(
        words(&format!("SET {} 1", quoted(word))),
        [b"SET".to_vec(), word.to_vec(), b"1".to_vec()]
    );
}

#[test]
fn only_times_move() {
    let text = format!(
        "{}due 1700000003600 seq 1700000000000123 far 9000000000000 n 17",
        head(1_700_000_000_000)
    );
    let expected = format!(
        "{}due 1700000013600 seq 1700000000000123 far 9000000000000 n 17",
        head(1_700_000_010_000)
    );
    assert_eq!(moved(&text, 1_700_000_010_000), expected);
}

#[test]
fn a_document_comes_back_from_its_text() {
    let document = doc! { "i": 1, "l": 2_i64, "f": 0.5, "t": "x", "a": [true, Bson::Null],
    "d": { "at": DateTime::from_millis(1_700_000_000_000) } };
    let bson = Bson::Document(document);
    assert_eq!(stored(&readable(&bson)), bson);
}
