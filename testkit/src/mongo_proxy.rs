//! A faulty network in front of MongoDB.

use std::net::SocketAddr;
use std::time::Duration;

use mongodb::bson::{Document, RawBsonRef, RawDocument};

use super::interceptor::Matcher;
use super::proxy::{Protocol, Proxy};

/// The protocol of MongoDB: each reply names its command.
#[derive(Debug)]
pub struct OpMsg;

/// Runs until it is dropped.
pub type MongoProxy = Proxy<OpMsg>;

const HEADER: usize = 16;
const OP_MSG: u32 = 2013;

impl Protocol for OpMsg {
    fn frame(bytes: &[u8]) -> Option<usize> {
        let length = word(bytes, 0)? as usize;
        assert!(length >= HEADER, "a message of {length} bytes is shorter than its header");
        (length <= bytes.len()).then_some(length)
    }

    fn number(command: &[u8], _: u64) -> u64 {
        word(command, 4).unwrap().into()
    }

    fn answers(reply: &[u8], _: u64) -> Option<u64> {
        word(reply, 8).map(u64::from)
    }
}

impl MongoProxy {
    pub async fn start_before(upstream: SocketAddr) -> Self {
        Self::before(upstream).await
    }

    /// The server names itself to its clients, and they would connect to it without the proxy. A
    /// direct connection prevents that.
    pub fn mongo_url(&self) -> String {
        format!("mongodb://{}/?directConnection=true", self.address)
    }
}

/// A command in its wire format.
pub fn message(number: u32, command: &Document) -> Vec<u8> {
    let body = command.to_vec().unwrap();
    let length = u32::try_from(HEADER + 5 + body.len()).unwrap();
    let header = [length, number, 0, OP_MSG, 0].map(u32::to_le_bytes);
    [header.as_flattened(), &[0], &body].concat()
}

/// Matches a command on a collection.
pub fn on(command: &'static str, collection: &'static str) -> Matcher {
    Box::new(move |message| name(message).is_some_and(|found| found == (command, collection)))
}

/// Matches a write of new or existing documents of a collection.
pub fn writes_to(collection: &'static str) -> Matcher {
    let (new, existing) = (on("insert", collection), on("update", collection));
    Box::new(move |message| new(message) || existing(message))
}

/// Matches a command on any collection whose name starts with `beginning`.
pub fn on_any(command: &'static str, beginning: &'static str) -> Matcher {
    Box::new(move |message| {
        name(message).is_some_and(|found| found.0 == command && found.1.starts_with(beginning))
    })
}

/// Matches a search in a collection with a time limit of at most `most`.
pub fn finds_within(collection: &'static str, most: Duration) -> Matcher {
    let is_find = on("find", collection);
    Box::new(move |message| {
        let limit = is_find(message).then(|| body(message)?.get_i32("maxTimeMS").ok()).flatten();
        limit.is_some_and(|ms| (1..=most.as_millis()).contains(&u128::from(ms.unsigned_abs())))
    })
}

/// Matches a search in a collection on a server that may be at most `most` behind.
pub fn finds_at_most_behind(collection: &'static str, most: Duration) -> Matcher {
    let is_find = on("find", collection);
    Box::new(move |message| {
        let bound = || {
            let preference = body(message)?.get_document("$readPreference").ok()?;
            match preference.get("maxStalenessSeconds").ok()?? {
                RawBsonRef::Int32(seconds) => u64::try_from(seconds).ok(),
                RawBsonRef::Int64(seconds) => u64::try_from(seconds).ok(),
                _ => None,
            }
        };
        is_find(message) && bound().is_some_and(|seconds| (1..=most.as_secs()).contains(&seconds))
    })
}

/// The first key of the command and its value, which usually is the collection.
fn name(message: &[u8]) -> Option<(&str, &str)> {
    let (key, value) = body(message)?.iter().next()?.ok()?;
    match value {
        RawBsonRef::String(value) => Some((key.as_str(), value)),
        _ => Some((key.as_str(), "")),
    }
}

fn body(message: &[u8]) -> Option<&RawDocument> {
    // Only the greetings of old clients have another format.
    if word(message, 12)? != OP_MSG || message.get(HEADER + 4) != Some(&0) {
        return None;
    }
    let body = &message[HEADER + 5..];
    RawDocument::from_bytes(body.get(..word(body, 0)? as usize)?).ok()
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}

#[cfg(test)]
mod tests {
    use std::time::Instant;

    use mongodb::Client;
    use mongodb::bson::{Document, doc};

    use super::*;
    use crate::interceptor::Interception;
    use crate::mongo::{MongoServer, Options};
    use crate::proxy::ProxyMode;
    use crate::wait::eventually;

    const LONG: Duration = Duration::from_secs(20);

    struct Bench {
        server: MongoServer,
        proxy: MongoProxy,
        client: Client,
    }

    impl Bench {
        async fn start() -> Self {
            let server = MongoServer::start(Options::default());
            let proxy = MongoProxy::start_before(server.address()).await;
            let client = Client::with_uri_str(proxy.mongo_url()).await.unwrap();
            Self { server, proxy, client }
        }

        async fn insert(&self, collection: &str) -> bool {
            insert(&self.client, collection).await
        }

        /// Counts without the proxy.
        async fn count(&self, collection: &str) -> u64 {
            let client = Client::with_uri_str(self.server.url()).await.unwrap();
            let collection = client.database("test").collection::<Document>(collection);
            collection.count_documents(doc! {}).await.unwrap()
        }
    }

    /// A raw command, because the driver repeats other commands on its own.
    async fn insert(client: &Client, collection: &str) -> bool {
        let command = doc! { "insert": collection, "documents": [{ "x": 1 }] };
        client.database("test").run_command(command).await.is_ok()
    }

    #[tokio::test]
    async fn commands_are_told_apart_by_their_name_and_collection() {
        let bench = Bench::start().await;
        let interceptor = bench.proxy.intercept(on("insert", "b"), 2, Interception::LoseReply);
        for (collection, answered) in
            [("b", true), ("a", true), ("a", true), ("b", false), ("b", true)]
        {
            assert_eq!(bench.insert(collection).await, answered, "{collection}");
        }
        assert!(interceptor.catches(LONG).await);
        assert_eq!((bench.count("b").await, bench.proxy.swallowed()), (3, 1), "it was executed");
    }

    #[tokio::test]
    async fn a_held_command_is_executed_once_it_is_released_though_its_client_is_gone() {
        let bench = Bench::start().await;
        let interceptor =
            bench.proxy.intercept(on_any("insert", "h"), 1, Interception::HoldCommand);
        let client = Client::with_uri_str(bench.proxy.mongo_url()).await.unwrap();
        tokio::select! {
            _ = insert(&client, "held") => panic!("it is held"),
            is_caught = interceptor.catches(LONG) => assert!(is_caught),
        }
        drop(client);
        assert_eq!(bench.count("held").await, 0);
        assert!(interceptor.completes(LONG).await);
        assert_eq!(bench.count("held").await, 1);
    }

    #[tokio::test]
    async fn a_dropped_interceptor_takes_the_held_command_with_it() {
        let bench = Bench::start().await;
        let interceptor = bench.proxy.intercept(on("insert", "held"), 1, Interception::HoldCommand);
        let inserted = async { bench.insert("held").await };
        let dropped = async {
            assert!(interceptor.catches(LONG).await);
            drop(interceptor);
        };
        let (inserted, ()) = tokio::join!(inserted, dropped);
        assert!(!inserted);
        assert_eq!(bench.count("held").await, 0);
    }

    #[tokio::test]
    async fn a_held_reply_arrives_after_the_command_was_executed() {
        let bench = Bench::start().await;
        let interceptor = bench.proxy.intercept(on("insert", "held"), 1, Interception::HoldReply);
        let watch = bench.proxy.intercept(on("insert", "seen"), 1, Interception::Watch);
        let inserted = async { bench.insert("held").await };
        let released = async {
            assert!(interceptor.catches(LONG).await);
            assert_eq!(bench.count("held").await, 1);
            assert!(!watch.has_caught());
            assert!(bench.insert("seen").await && watch.catches(LONG).await);
            interceptor.release();
        };
        let (inserted, ()) = tokio::join!(inserted, released);
        assert!(inserted);
    }

    #[tokio::test]
    async fn a_server_behind_it_can_be_cut_off_slowed_down_and_refused() {
        let bench = Bench::start().await;
        assert!(bench.insert("a").await);
        let delay = Duration::from_millis(50);
        bench.proxy.set(ProxyMode::Delay(delay));
        let started = Instant::now();
        assert!(bench.insert("a").await && started.elapsed() >= 2 * delay);
        bench.proxy.set(ProxyMode::Refuse);
        bench.proxy.cut();
        let options = format!("{}&serverSelectionTimeoutMS=300", bench.proxy.mongo_url());
        let other = Client::with_uri_str(options).await.unwrap();
        assert!(!insert(&other, "a").await);
        bench.proxy.set(ProxyMode::Pass);
        eventually(LONG, "it answers again", async || insert(&other, "a").await).await;
    }
}
