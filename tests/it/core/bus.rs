//! The bus: several streams, the start of a pipeline, unreadable entries, trimming, and the reader
//! of each stream.

use std::time::Duration;

use redis::AsyncCommands as _;
use tokio::time::Instant;

use crate::support::bus::{add, event};
use crate::support::config::{STREAM, config, configs};
use crate::support::fleet::Fleet;
use crate::support::http::{get, metric};
use crate::support::instance::Instance;
use crate::support::proxy::distance::Distance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisServer};
use crate::support::wait::{Stopwatch, eventually};

const LONG: Duration = Duration::from_secs(30);
/// The minimum retention. Trimming happens every five seconds.
const SHORT: (&str, &str) = ("bus.retention", "\"1s\"");

fn events(ids: std::ops::Range<u32>) -> Vec<String> {
    ids.map(|id| event("b", "test", id)).collect()
}

fn ids(ids: impl IntoIterator<Item = u32>) -> Vec<String> {
    ids.into_iter().map(|id| id.to_string()).collect()
}

fn sorted(mut ids: Vec<String>) -> Vec<String> {
    ids.sort_unstable_by_key(|id| id.parse::<u32>().unwrap());
    ids
}

#[tokio::test]
async fn all_streams_are_read_and_a_new_pipeline_starts_at_its_configured_position() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    add(&server, "one", &events(0..10)).await;
    add(&server, "two", &events(100..110)).await;
    let settings = [("bus.streams", "[\"one\", \"two\"]"), ("pipelines.bus-new.start", "\"new\"")];
    let config = configs(&server, &["bus-old", "bus-new"], &settings);
    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "what was there is done", async || log.len() == 20).await;
    assert_eq!(sorted(log.ids("bus-old")), ids((0..10).chain(100..110)));
    add(&server, "one", &events(10..20)).await;
    add(&server, "two", &events(110..120)).await;
    eventually(LONG, "what came is done twice", async || log.len() == 60).await;
    assert_eq!(sorted(log.ids("bus-old")), ids((0..20).chain(100..120)));
    assert_eq!(sorted(log.ids("bus-new")), ids((10..20).chain(110..120)));
    // Events of one stream stay in order.
    let of_one: Vec<_> =
        log.ids("bus-old").into_iter().filter(|id| id.parse::<u32>().unwrap() < 100).collect();
    assert_eq!(of_one, ids(0..20));
    instance.stop().await;

    // The pipeline got its start position once: after a restart it continues from its own position
    // and misses no event that was published meanwhile.
    add(&server, "one", &events(20..25)).await;
    let _instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "it goes on", async || log.len() == 70).await;
    assert_eq!(log.ids("bus-new")[20..], ids(20..25));
}

/// For each unreadable entry: field, value, the label of the metric and a part of the reason.
fn unreadable() -> Vec<(&'static str, Vec<u8>, &'static str, &'static str)> {
    let long = "x".repeat(257);
    let json = |text: &str| text.as_bytes().to_vec();
    let attributes = |botid: &str| {
        format!(r#"{{"specversion":"1.0","id":"1","source":"s","type":"t","botid":"{botid}"}}"#)
            .into_bytes()
    };
    vec![
        ("payload", json("{}"), "field", "no field"),
        ("event", json(""), "json", "JSON"),
        ("event", json("{\"specversion\":"), "json", "JSON"),
        ("event", json("[1,2]"), "json", "JSON"),
        ("event", vec![0xff, 0xfe, 0x00], "json", "JSON"),
        ("event", json(&"[".repeat(100_000)), "json", "JSON"),
        (
            "event",
            json(r#"{"specversion":"1.0","id":"1","source":"s","type":"t"}"#),
            "attribute",
            "\"botid\" is missing",
        ),
        (
            "event",
            json(r#"{"specversion":"1.0","source":"s","type":"t","botid":"b"}"#),
            "attribute",
            "\"id\" is missing",
        ),
        (
            "event",
            json(r#"{"specversion":"9","id":"1","source":"s","type":"t","botid":"b"}"#),
            "attribute",
            "specversion",
        ),
        (
            "event",
            json(r#"{"specversion":"1.0","id":7,"source":"s","type":"t","botid":"b"}"#),
            "json",
            "JSON",
        ),
        ("event", attributes(""), "botid", "empty"),
        ("event", attributes(&long), "botid", "257 bytes"),
        ("event", attributes("a\\u0000b"), "botid", "'\\0'"),
        ("event", attributes("a\\nb"), "botid", "'\\n'"),
        ("event", vec![b' '; (1 << 20) + 1], "size", "1048577 bytes"),
        ("msgpack", vec![0xc1], "msgpack", "MessagePack"),
        ("msgpack", json("{}"), "msgpack", "MessagePack"),
        ("msgpack", vec![0xdf, 0xff, 0xff, 0xff, 0xff], "msgpack", "MessagePack"),
    ]
}

#[tokio::test]
async fn an_unreadable_entry_is_put_aside_with_the_reason_and_the_rest_continues() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.start(1).await;
    let mut connection = fleet.server.connection().await;
    let cases = unreadable();
    for (field, value, ..) in &cases {
        let () = redis::cmd("XADD")
            .arg(STREAM)
            .arg("*")
            .arg(field)
            .arg(value)
            .query_async(&mut connection)
            .await
            .unwrap();
        fleet.publish(1).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == cases.len(), "{report}");
    let aside: redis::streams::StreamRangeReply =
        connection.xrange_all("fairlane:invalid").await.unwrap();
    assert_eq!(aside.ids.len(), cases.len());
    let metrics = fleet.metrics(0).await;
    for ((field, value, label, part), found) in cases.iter().zip(&aside.ids) {
        let reason: String = found.get("reason").unwrap();
        assert!(reason.contains(part), "{field} {label}: {reason}");
        assert_eq!(found.get::<String>("stream").unwrap(), STREAM);
        let kept: Vec<u8> = found.get("entry").unwrap();
        assert!(kept.len() <= 4 * 1_024, "{field} {label}: {} bytes", kept.len());
        assert!(*label == "field" || value.starts_with(&kept), "{field} {label}");
        #[expect(clippy::cast_precision_loss, reason = "a handful")]
        let count = cases.iter().filter(|case| case.2 == *label).count() as f64;
        let counted = metric(&metrics, "fairlane_bus_invalid_total", &[("reason", label)]);
        assert_eq!(counted, Some(count), "{label}");
    }
}

#[tokio::test]
async fn both_wire_forms_are_read() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let _instance = Instance::start(&config(&server, "bus-forms", &[]), log.content()).await;
    let text = event("b", "test", 1);
    let value: serde_json::Value = serde_json::from_str(&event("b", "test", 2)).unwrap();
    let mut connection = server.connection().await;
    let packed = rmp_serde::to_vec_named(&value).unwrap();
    let () = redis::pipe()
        .cmd("XADD")
        .arg(STREAM)
        .arg("*")
        .arg("event")
        .arg(text)
        .cmd("XADD")
        .arg(STREAM)
        .arg("*")
        .arg("msgpack")
        .arg(packed)
        .ignore()
        .query_async(&mut connection)
        .await
        .unwrap_or_default();
    eventually(LONG, "both are done", async || log.len() == 2).await;
    assert_eq!(log.ids("bus-forms"), ["1", "2"]);
}

#[tokio::test]
async fn entries_that_every_group_has_are_trimmed_and_needed_ones_are_kept() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let settings = [SHORT, ("bus.streams", "[\"plain\", \"grouped\"]")];
    let config = config(&server, "bus-trim", &settings);
    let mut connection = server.connection().await;
    for stream in ["plain", "grouped"] {
        add(&server, stream, &events(0..20)).await;
    }
    let () = connection.xgroup_create("grouped", "others", "0").await.unwrap();
    let reading = redis::streams::StreamReadOptions::default().group("others", "c").count(5);
    let taken: redis::streams::StreamReadReply =
        connection.xread_options(&["grouped"], &[">"], &reading).await.unwrap();
    let entries: Vec<&str> = taken.keys[0].ids.iter().map(|entry| &*entry.id).collect();
    assert_eq!(connection.xack::<_, _, _, u32>("grouped", "others", &entries[..3]).await, Ok(3));

    let _instance = Instance::start(&config, log.content()).await;
    let length = async |stream| server.connection().await.xlen::<_, u32>(stream).await.unwrap();
    // The entry at the position of the slowest shard stays.
    eventually(LONG, "one is trimmed", async || length("plain").await <= 1).await;
    eventually(LONG, "what is acknowledged is trimmed", async || length("grouped").await <= 17)
        .await;
    assert_eq!(length("grouped").await, 17, "the group has not acknowledged the rest");
    assert_eq!(log.len(), 40);

    // When the group has acknowledged everything, the stream is trimmed too.
    let rest: redis::streams::StreamReadReply =
        connection.xread_options(&["grouped"], &[">"], &reading.count(100)).await.unwrap();
    let ids: Vec<&str> = entries[3..]
        .iter()
        .copied()
        .chain(rest.keys[0].ids.iter().map(|entry| &*entry.id))
        .collect();
    assert_eq!(connection.xack::<_, _, _, u32>("grouped", "others", &ids).await, Ok(17));
    eventually(LONG, "the rest is trimmed", async || length("grouped").await <= 1).await;
}

/// Nothing is removed in more time than is between two looks at what may be, also after the ten seconds in
/// which a pipeline without a process counts as one that is run.
async fn keeps(server: &RedisServer, entries: u32) {
    let mut connection = server.connection().await;
    let until = Instant::now() + Duration::from_secs(17);
    while Instant::now() < until {
        let there: u32 = connection.xlen(STREAM).await.unwrap();
        assert_eq!(there, entries, "the other process has not read them yet");
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test]
async fn events_needed_by_a_pipeline_of_another_process_stay_on_the_bus() {
    let server = RedisServer::start(Options::default());
    let (mine, others) = (Log::default(), Log::default());
    let reader = Instance::start(&config(&server, "bus-mine", &[SHORT]), mine.content()).await;
    add(&server, STREAM, &events(0..5)).await;
    eventually(LONG, "it reads", async || mine.len() == 5).await;
    // This process does not read while the other one does.
    let waits = Instance::start(&config(&server, "bus-others", &[SHORT]), others.content()).await;
    add(&server, STREAM, &events(5..20)).await;
    keeps(&server, 20).await;
    assert_eq!((mine.ids("bus-mine"), others.len()), (ids(0..20), 0));
    reader.stop().await;
    eventually(LONG, "the other process has it all", async || others.len() == 20).await;
    assert_eq!(others.ids("bus-others"), ids(0..20));
    waits.stop().await;
}

#[tokio::test]
async fn events_since_the_start_of_a_pipeline_stay_on_the_bus_until_its_shards_are_placed() {
    let server = RedisServer::start(Options::default());
    let (mine, others) = (Log::default(), Log::default());
    let reader = Instance::start(&config(&server, "bus-mine", &[SHORT]), mine.content()).await;
    add(&server, STREAM, &events(0..5)).await;
    eventually(LONG, "it reads", async || mine.len() == 5).await;
    let waits = Instance::start(&config(&server, "bus-late", &[SHORT]), others.content()).await;
    // The state after a start at which the server of every shard was unavailable.
    let mut connection = server.connection().await;
    for shard in 0..8 {
        let key = format!("fl:{{bus-late:{shard}}}:hwm");
        assert_eq!(connection.hdel::<_, _, u32>(key, STREAM).await, Ok(1), "shard {shard}");
    }
    add(&server, STREAM, &events(5..20)).await;
    keeps(&server, 20).await;
    reader.stop().await;
    eventually(LONG, "the other process has it all", async || others.len() == 20).await;
    waits.stop().await;
}

#[tokio::test]
async fn a_disabled_pipeline_holds_nothing_back() {
    let server = RedisServer::start(Options::default());
    let log = Log::default();
    let pipelines = ["bus-on", "bus-off"];
    let both = configs(&server, &pipelines, &[SHORT]);
    add(&server, STREAM, &events(0..5)).await;
    let instance = Instance::start(&both, log.content()).await;
    eventually(LONG, "both are at work", async || log.len() == 10).await;
    instance.stop().await;
    let settings = [SHORT, ("pipelines.bus-off.enabled", "false")];
    let one = configs(&server, &pipelines, &settings);
    let instance = Instance::start(&one, log.content()).await;
    add(&server, STREAM, &events(5..10)).await;
    eventually(LONG, "it is done and trimmed", async || {
        log.len() == 15 && server.connection().await.xlen::<_, u32>(STREAM).await.unwrap() <= 1
    })
    .await;
    assert_eq!(log.ids("bus-off"), ids(0..5));
    instance.stop().await;

    // Enabled again, the pipeline continues with the remaining entries, and the log reports the
    // trimmed ones.
    let instance = Instance::start(&both, log.content()).await;
    add(&server, STREAM, &events(10..12)).await;
    let has = |pipeline, id: &str| log.ids(pipeline).iter().any(|handled| handled == id);
    eventually(LONG, "both go on", async || has("bus-off", "11") && has("bus-on", "11")).await;
    assert_eq!(log.ids("bus-on"), ids(0..12));
    instance.stop().await;
}

#[tokio::test]
async fn a_stream_trimmed_beyond_the_read_position_is_an_error_and_reading_continues() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.start(1).await;
    fleet.publish(5).await;
    fleet.drains(LONG).await;
    let mut connection = fleet.server.connection().await;
    let noted = format!("fl:{{{STREAM}}}:read");
    eventually(LONG, "the position is noted", async || {
        connection.clone().hget::<_, _, Option<u32>>(&noted, "entries").await.unwrap() == Some(5)
    })
    .await;
    fleet.workers[0].sigterm();
    assert!(fleet.workers[0].wait_exit(LONG).unwrap().success());
    add(&fleet.server, STREAM, &(0..7).map(|_| event("gone", "x", 0)).collect::<Vec<_>>()).await;
    fleet.publish(3).await;
    let options = redis::streams::StreamMaxlen::Equals(3);
    assert_eq!(connection.xtrim::<_, u32>(STREAM, options).await, Ok(12));
    fleet.restart(0).await;
    fleet.drains(LONG).await;
    fleet.misses_seven(STREAM).await;
}

#[tokio::test]
async fn entries_that_are_trimmed_while_the_reader_is_behind_are_an_error_too() {
    let mut fleet = Fleet::new(Options::default(), 1, &[]);
    fleet.start(1).await;
    fleet.publish(5).await;
    fleet.drains(LONG).await;
    fleet.workers[0].sigstop();
    // A blocked read of the stopped process ends meanwhile, and its next one is late.
    tokio::time::sleep(Duration::from_millis(2_200)).await;
    add(&fleet.server, STREAM, &(0..7).map(|_| event("gone", "x", 0)).collect::<Vec<_>>()).await;
    fleet.publish(3).await;
    let mut connection = fleet.server.connection().await;
    let options = redis::streams::StreamMaxlen::Equals(3);
    assert_eq!(connection.xtrim::<_, u32>(STREAM, options).await, Ok(12));
    fleet.workers[0].sigcont();
    fleet.drains(LONG).await;
    fleet.misses_seven(STREAM).await;
}

#[tokio::test]
async fn another_process_reads_on_when_the_reader_is_killed_or_stopped() {
    let mut fleet = Fleet::new(Options::default(), 3, &[]);
    fleet.start(3).await;
    let reading = |fleet: &Fleet, place: usize| {
        fleet.workers[place].lines().iter().any(|line| line.contains("reading the bus"))
    };
    let mut left = vec![0, 1, 2];
    // A share lasts 1.5 s, and each process asks for one every 250 ms. A share that its reader gave up
    // is free immediately.
    for (kill, within) in [(true, Duration::from_secs(2)), (false, Duration::from_millis(900))] {
        let begun = Instant::now();
        fleet.publish(10).await;
        fleet.drains(LONG).await;
        let usual = begun.elapsed();
        let at = left.iter().position(|&place| reading(&fleet, place)).expect("somebody reads");
        let reader = left.swap_remove(at);
        if kill {
            fleet.workers[reader].kill9();
        } else {
            fleet.workers[reader].sigterm();
            assert!(fleet.workers[reader].wait_exit(LONG).unwrap().success());
        }
        let ended = Stopwatch::start();
        fleet.publish(10).await;
        fleet.drains(LONG).await;
        ended.within(within + usual, &format!("kill {kill}: another process reads on"));
    }
    let report = fleet.report();
    assert!(report.is_clean() && report.sent == 120, "{report}");
}

/// How many events a pipeline has in its queues.
async fn queued(server: &RedisServer, pipeline: &str) -> u64 {
    let mut connection = server.connection().await;
    let keys: Vec<String> = connection.keys(format!("*{{{pipeline}:*}}:meta")).await.unwrap();
    let mut sum = 0;
    for key in keys {
        sum += connection.hget::<_, _, Option<u64>>(key, "depth").await.unwrap().unwrap_or(0);
    }
    sum
}

#[tokio::test]
async fn a_pipeline_that_starts_with_old_events_does_not_keep_the_others_waiting() {
    const OLD: u32 = 100_000;
    const TURNS: &str = "turns";
    let server = RedisServer::start(Options { tcp: true, ..Options::default() });
    // A server far away is read for seconds.
    let distance = Distance::start(server.tcp_addr()).await;
    let log = Log::default();
    for part in (0..OLD).step_by(10_000) {
        let old: Vec<_> =
            (part..part + 10_000).map(|id| event(&format!("b-{}", id % 50), "test", id)).collect();
        add(&server, TURNS, &old).await;
    }
    distance.set(Duration::from_millis(150));
    let url = format!("{:?}", distance.url());
    let settings = [
        ("redis.url", &*url),
        ("bus.streams", "[\"turns\"]"),
        ("pipelines.turns-new.start", "\"new\""),
        SHORT,
    ];
    let config = configs(&server, &["turns-old", "turns-new"], &settings);
    let instance = Instance::start(&config, log.content()).await;
    for id in OLD..OLD + 3 {
        add(&server, TURNS, &events(id..id + 1)).await;
        eventually(LONG, "the new event is handled", async || {
            log.count("turns-new") == (id - OLD + 1) as usize
        })
        .await;
        if id > OLD {
            continue; // All old ones may be copied by then.
        }
        // Otherwise it could have been behind the old ones. Some are handled meanwhile.
        let handled = log.count("turns-old") as u64;
        let copied = handled + queued(&server, "turns-old").await;
        assert!(copied < u64::from(OLD) * 3 / 4, "{copied} old events are copied before {id}");
    }
    // It is read for both.
    let unreadable = [("event", "no event")];
    let () = server.connection().await.xadd(TURNS, "*", &unreadable).await.unwrap();
    let invalid = async || server.connection().await.xlen::<_, u64>("fairlane:invalid").await;
    eventually(LONG, "it is put aside", async || invalid().await == Ok(1)).await;
    assert!(queued(&server, "turns-old").await < u64::from(OLD), "not everything is read");
    distance.set(Duration::ZERO);
    let all = (OLD + 3) as usize;
    eventually(4 * LONG, "all are handled", async || log.count("turns-old") >= all).await;
    let mut of_bot: Vec<_> = log.ids("turns-old");
    of_bot.retain(|id| id.parse::<u32>().is_ok_and(|id| id < OLD && id % 50 == 7));
    assert_eq!(of_bot, ids((7..OLD).step_by(50)), "in order, and each once");
    assert_eq!(log.ids("turns-new"), ids(OLD..OLD + 3));
    eventually(LONG, "each entry is counted once", async || {
        let (_, metrics) = get(&instance.address.to_string(), "/metrics").await;
        let read = metric(&metrics, "fairlane_bus_events_total", &[("stream", TURNS)]);
        read == Some(f64::from(OLD + 4))
    })
    .await;
    assert_eq!(invalid().await, Ok(1));
    // It is read as one again: entries are deleted up to where both are.
    eventually(LONG, "the old events are trimmed", async || {
        let left: u64 = server.connection().await.xlen(TURNS).await.unwrap();
        left < 1_000
    })
    .await;
    instance.stop().await;
}
