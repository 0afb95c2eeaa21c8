//! Order, completeness, and what is not an event.

use std::time::{Duration, Instant};

use async_nats::jetstream::consumer::pull;
use async_nats::jetstream::stream::{self, RetentionPolicy};
use fairlane::bus::source::Source as _;
use fairlane::fanout::NewStart;
use fairlane::id::Offset;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;

use super::{
    Copy, LONG, SECOND, STREAM, config, event, fetch, ids, log, make, open, progress, publish,
    settings, source,
};
use crate::support::nats::{NatsServer, Options};
use crate::support::wait::eventually;

#[tokio::test]
async fn a_stream_that_is_made_later_is_read_from_its_beginning() {
    let server = NatsServer::start(Options::default());
    let source = source(settings(&server));
    assert_eq!(source.logs().await.unwrap(), []);
    let refused = publish(&source, &ids(0..1)).await.unwrap_err();
    let text = refused.to_string();
    assert!(text.contains("\"EVENTS\" does not exist") && text.contains("\"main\""), "{text}");
    make(&server, config()).await;
    let log = log(&source).await;
    assert_eq!((&*log.name, log.first, log.last.seq), ("nats:main/EVENTS", None, 0));
    publish(&source, &ids(0..3)).await.unwrap();
    assert_eq!(Copy::behind(log.last).until(&source, 3).await, ids(0..3));
}

#[tokio::test]
async fn an_empty_stream_is_waited_for_and_an_event_comes_at_once() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    let opened = open(&source, Offset::default(), Offset::default()).await;
    assert_eq!((opened.at.seq, opened.entries, opened.lost), (0, 0, 0));
    let began = Instant::now();
    let batch = fetch(&source, 10, Duration::from_millis(300)).await.unwrap();
    assert!(batch.entries.is_empty() && began.elapsed() >= Duration::from_millis(300));
    assert!(fetch(&source, 10, Duration::ZERO).await.unwrap().entries.is_empty());
    let (batch, published) = tokio::join!(fetch(&source, 10, LONG), async {
        tokio::time::sleep(Duration::from_millis(100)).await;
        publish(&source, &ids(0..1)).await.unwrap()
    });
    let batch = batch.unwrap();
    assert_eq!(batch.entries.iter().map(|entry| entry.offset).collect::<Vec<_>>(), published);
    assert!(batch.added_ms > 1_700_000_000_000);
    let log = log(&source).await;
    let released = source.release(&progress(&log, batch.end, None)).await.unwrap();
    assert_eq!(released[0].lag, Some(0));
}

#[tokio::test]
async fn batches_have_at_most_the_entries_that_were_asked_for() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..10)).await.unwrap();
    open(&source, Offset::default(), Offset::default()).await;
    let mut lengths = Vec::new();
    for _ in 0..4 {
        lengths.push(fetch(&source, 4, Duration::ZERO).await.unwrap().entries.len());
    }
    assert_eq!(lengths, [4, 4, 2, 0]);
    let log = log(&source).await;
    let lag = async |read: Offset| {
        source.release(&progress(&log, read, None)).await.unwrap()[0].lag.unwrap()
    };
    assert_eq!(lag(Offset { seq: 4, ..log.last }).await, 6);
    assert_eq!(lag(log.last).await, 0);
}

#[tokio::test]
async fn only_the_subjects_of_the_source_are_read_and_deleted_messages_are_passed_over() {
    let server = NatsServer::start(Options::default());
    let stream = make(&server, config()).await;
    let context = server.jetstream().await;
    for number in 0..20 {
        let subject = format!("events.{}", ["a", "b", "c", "d"][number % 4]);
        let event = event(&format!("e{number}"), "b", "");
        context.publish(subject, event.into()).await.unwrap().await.unwrap();
    }
    for seq in [2, 3, 10, 20] {
        stream.delete_message(seq).await.unwrap();
    }
    for (subjects, expected) in [
        (vec![], vec![0, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17, 18]),
        (vec!["events.a"], vec![0, 4, 8, 12, 16]),
        (vec!["events.b", "events.d"], vec![3, 5, 7, 11, 13, 15, 17]),
    ] {
        let mut settings = settings(&server);
        settings.subjects = subjects.iter().map(|subject| (*subject).to_owned()).collect();
        let source = source(settings);
        let mut copy = Copy::default();
        let expected: Vec<_> = expected.iter().map(|number| format!("e{number}")).collect();
        assert_eq!(copy.until(&source, expected.len()).await, expected);
        assert_eq!(copy.lost, 0);
        // The end is reached, although its last message is deleted or has another subject.
        let log = log(&source).await;
        let lag = source.release(&progress(&log, copy.position, None)).await.unwrap()[0].lag;
        assert_eq!(lag, Some(0), "{subjects:?}");
        eventually(LONG, "the position is at the end", async || {
            source.release(&progress(&log, copy.position, None)).await.unwrap();
            copy.step(&source).await.unwrap();
            copy.position == log.last
        })
        .await;
    }
}

#[tokio::test]
async fn large_messages_are_read_in_batches_that_fit() {
    let server = NatsServer::start(Options {
        more: "max_payload: 48MB\nmax_pending: 96MB".to_owned(),
        ..Options::default()
    });
    make(&server, config()).await;
    let context = server.jetstream().await;
    let large = |number: usize, bytes: usize| event(&format!("e{number}"), "b", &"x".repeat(bytes));
    for number in 0..45 {
        context.publish("events.b", large(number, 1_000_000).into()).await.unwrap().await.unwrap();
    }
    // Larger than a whole batch may be, and than an event.
    context.publish("events.b", large(45, 24 << 20).into()).await.unwrap().await.unwrap();
    context.publish("events.b", large(46, 10).into()).await.unwrap().await.unwrap();
    let source = source(settings(&server));
    let mut copy = Copy::default();
    let read = copy.until(&source, 47).await;
    let (whole, rest) = read.split_at(45);
    assert_eq!(whole, ids(0..45));
    assert!(rest[0].contains("at most 1048576"), "{rest:?}");
    assert_eq!(rest[1], "e46");
    assert_eq!(copy.errors, 0);
}

/// Publishes with headers that no client would send.
async fn publish_raw(server: &NatsServer, header: &[u8], payload: &[u8]) {
    let mut connection = TcpStream::connect(server.address()).await.unwrap();
    let mut wire = b"CONNECT {\"verbose\":false,\"headers\":true}\r\n".to_vec();
    wire.extend(
        format!("HPUB events.b {} {}\r\n", header.len(), header.len() + payload.len()).bytes(),
    );
    wire.extend([header, payload, b"\r\nPING\r\n"].concat());
    connection.write_all(&wire).await.unwrap();
    let mut answer = Vec::new();
    let mut chunk = [0; 1_024];
    while !answer.windows(4).any(|bytes| bytes == b"PONG") {
        let read = connection.read(&mut chunk).await.unwrap();
        assert!(read > 0, "{}", String::from_utf8_lossy(&answer));
        answer.extend(&chunk[..read]);
    }
}

#[tokio::test]
async fn headers_that_the_client_cannot_parse_stop_nothing() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    publish(&source, &ids(0..2)).await.unwrap();
    let good = event("odd", "b", "");
    let headers: [&[u8]; 5] = [
        b"NATS/1.0\r\nname: \xff\xfe\r\n\r\n",
        b"NATS/1.0\r\nno colon\r\n\r\n",
        b"NATS/1.0 503\r\n\r\n",
        b"NATS/1.0 404 No Messages\r\n\r\n",
        b"NATS/1.0 x\r\na: b\r\n\r\n",
    ];
    for header in headers {
        for _ in 0..20 {
            publish_raw(&server, header, good.as_bytes()).await;
            publish_raw(&server, header, b"no event").await;
        }
    }
    publish(&source, &ids(2..102)).await.unwrap();
    let stored = source.logs().await.unwrap()[0].last.seq;
    assert_eq!(stored, 302, "the server stores all of them");
    let mut copy = Copy::default();
    let read = copy.until(&source, 302).await;
    assert_eq!((&read[..2], &read[202..]), (&ids(0..2)[..], &ids(2..102)[..]));
    assert_eq!(read.iter().filter(|id| *id == "odd").count(), 100, "{read:?}");
    assert_eq!(read.iter().filter(|id| id.starts_with('?')).count(), 100, "{read:?}");
    // Otherwise each of them would cost two connections.
    assert!(copy.errors <= 4, "{}", copy.errors);
}

#[tokio::test]
async fn a_stream_that_needs_acknowledgements_is_refused_with_the_remedy() {
    for (retention, name) in
        [(RetentionPolicy::Interest, "interest"), (RetentionPolicy::WorkQueue, "workqueue")]
    {
        let server = NatsServer::start(Options::default());
        make(&server, stream::Config { retention, ..config() }).await;
        let source = source(settings(&server));
        let standing = fairlane::bus::source::Standing {
            log: log(&source).await,
            lowest: Offset::default(),
            highest: Offset::default(),
        };
        let text = source.open(&[standing]).await.unwrap_err().to_string();
        assert!(text.contains(name) && text.contains("\"limits\""), "{text}");
        let problem = source.survey().await.unwrap().stream.unwrap().problem.unwrap();
        assert_eq!(problem, text);
    }
}

#[tokio::test]
async fn new_pipelines_begin_behind_what_a_consumer_has_handled() {
    let server = NatsServer::start(Options::default());
    let stream = make(&server, config()).await;
    let mut settings = settings(&server);
    settings.group = Some("old".to_owned());
    let source = source(settings);
    let NewStart::Unknown(cause) = log(&source).await.start else { panic!("there is a start") };
    assert!(cause.contains("no consumer \"old\""), "{cause}");
    let config = pull::Config { durable_name: Some("old".to_owned()), ..pull::Config::default() };
    let consumer = stream.create_consumer(config).await.unwrap();
    publish(&source, &ids(0..5)).await.unwrap();
    let mut messages = consumer.fetch().max_messages(3).messages().await.unwrap();
    while let Some(message) = futures_util::StreamExt::next(&mut messages).await {
        message.unwrap().double_ack().await.unwrap();
    }
    let log = log(&source).await;
    assert_eq!(log.start, NewStart::At(Offset { seq: 3, ..log.last }));
}

#[tokio::test]
async fn consumers_are_removed_when_the_log_is_opened_again_or_closed() {
    let server = NatsServer::start(Options::default());
    make(&server, config()).await;
    let source = source(settings(&server));
    let count = async || {
        let mut stream = server.jetstream().await.get_stream(STREAM).await.unwrap();
        stream.info().await.unwrap().state.consumer_count
    };
    for _ in 0..3 {
        open(&source, Offset::default(), Offset::default()).await;
    }
    eventually(SECOND * 10, "one consumer", async || count().await == 1).await;
    source.open(&[]).await.unwrap();
    eventually(SECOND * 10, "no consumer", async || count().await == 0).await;
    assert!(fetch(&source, 1, Duration::ZERO).await.is_err());
}
