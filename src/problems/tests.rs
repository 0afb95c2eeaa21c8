//! Tests of the findings and their remedies.

use std::collections::BTreeMap;
use std::time::Duration;

use super::find::fails;
use super::*;
use crate::outbound::breakers::Breaker;
use crate::presence::{BusFailure, BusState, BusView, Failures, Pace, Process};
use crate::queue::{Failing, LastFailure, PipelineView, Throttled};
use crate::redis::{Replication, ServerInfo, StreamKind, StreamView};

fn process() -> Process {
    Process {
        id: "a".to_owned(),
        host: "here".to_owned(),
        pid: 1,
        version: "1".to_owned(),
        roles: vec!["ingest".to_owned(), "work".to_owned()],
        started_ms: 0,
        pipelines: BTreeMap::from([(name(), Pace::default())]),
        calls: BTreeMap::new(),
        breakers: Vec::new(),
        streams: vec!["fairlane:events".to_owned()],
        buses: Vec::new(),
        mongodb: Some(true),
        failing: BTreeMap::new(),
        long: Vec::new(),
    }
}

fn name() -> PipelineName {
    PipelineName::parse("log").unwrap()
}

fn healthy() -> Facts {
    let info = ServerInfo {
        version: "7.0.15".to_owned(),
        role: "master".to_owned(),
        uptime_seconds: 3_600,
        memory_used: 1 << 20,
        memory_max: 1 << 30,
        eviction: "noeviction".to_owned(),
        clients: 1,
        clients_max: 10_000,
        append_only: true,
        append_ok: true,
        snapshot_ok: true,
        replication: Replication { replicas: 1, lag_seconds: 1, lag_bytes: 100 },
    };
    let mut facts =
        Facts::unavailable("redis.sock".to_owned(), String::new(), Duration::from_secs(100));
    (facts.redis.info, facts.redis.error) = (Some(info), None);
    facts.streams = vec![StreamView {
        stream: "fairlane:events".to_owned(),
        kind: StreamKind::Stream,
        length: 10,
        unread: Some(0),
        unread_since_ms: None,
        reader: false,
        groups: Vec::new(),
    }];
    facts.invalid_stream = "fairlane:invalid".to_owned();
    facts.processes = vec![process()];
    facts.pipelines = vec![PipelineFacts {
        name: name(),
        state: PipelineState::Enabled,
        view: PipelineView::default(),
        failing: None,
        throttled: None,
        letters: Vec::new(),
        pace: Pace::default(),
        takes_of_bus: true,
        linger: Duration::ZERO,
    }];
    facts
}

fn bot(name: &str) -> BotId {
    BotId::parse(name).unwrap()
}

fn failing(bots: &[&str], since_ms: u64, time_ms: u64) -> Option<Failing> {
    let failure = |bot: &&str| LastFailure { reason: format!("no {bot}"), time_ms, since_ms };
    Failing::new(bots.iter().map(|name| (bot(name), failure(name))).collect())
}

fn throttled(name: &str, since_ms: u64) -> Throttled {
    let bot = bot(name);
    Throttled { bots: 2, bot: bot.clone(), since_ms, longest: vec![(since_ms, bot)] }
}

#[test]
fn nothing_is_wrong_with_a_healthy_installation() {
    assert_eq!(find(&healthy(), Viewer::All), []);
}

#[test]
fn events_that_wait_for_further_ones_are_not_late() {
    let mut facts = healthy();
    facts.pipelines[0].linger = Duration::from_secs(120);
    facts.pipelines[0].view.oldest_age_ms = 180_000;
    assert_eq!(find(&facts, Viewer::All), []);
    facts.pipelines[0].view.oldest_age_ms += 1;
    assert_eq!(find(&facts, Viewer::All)[0].code, Code::PipelineLate);
}

#[test]
fn each_finding_has_its_code_and_names_the_remedy() {
    type Harm = fn(&mut Facts);
    let cases: [(Harm, Code, &str); 31] = [
        (|f| f.redis.error = Some("gone".to_owned()), Code::RedisUnavailable, "fairlane check"),
        (|f| f.redis.ping_ms = Some(250), Code::RedisSlow, "redis-cli SLOWLOG GET"),
        (|f| info(f).eviction = "allkeys-lru".to_owned(), Code::RedisEvicts, "noeviction"),
        (|f| info(f).append_only = false, Code::RedisForgets, "CONFIG SET appendonly yes"),
        (|f| info(f).append_ok = false, Code::RedisDiskFull, "its disk"),
        (|f| f.redis.refuses_writes = true, Code::RedisDiskFull, "its disk"),
        (|f| info(f).role = "slave".to_owned(), Code::RedisReadOnly, "primary"),
        (|f| info(f).memory_used = (1 << 30) / 100 * 81, Code::RedisMemory, "raise maxmemory"),
        (|f| info(f).memory_used = 1 << 30, Code::RedisFull, "raise maxmemory"),
        (|f| f.redis.wait_replicas = 2, Code::ReplicasMissing, "lower redis.wait_replicas"),
        (|f| info(f).replication.lag_seconds = 10, Code::ReplicaLags, "INFO replication"),
        (|f| f.processes.clear(), Code::NoProcess, "fairlane serve"),
        (|f| f.processes[0].mongodb = Some(false), Code::MongodbUnavailable, "fairlane check"),
        (|f| f.mongodb = Some(false), Code::MongodbUnavailable, "fairlane check"),
        (
            |f| {
                let host = "hooks.example:443".to_owned();
                f.processes[0].breakers = vec![Breaker { host, failures: 5, seconds: 3 }];
            },
            Code::HostUnavailable,
            "repair that server",
        ),
        (
            |f| f.processes.push(Process { pipelines: BTreeMap::new(), ..process() }),
            Code::PipelinesDiffer,
            "the same pipelines",
        ),
        (|f| f.streams[0].kind = StreamKind::Other, Code::NotAStream, "bus.streams"),
        (|f| f.streams[0].unread = Some(1), Code::NoReader, "role ingest"),
        (
            |f| {
                let view = &mut f.streams[0];
                (view.reader, view.unread, view.unread_since_ms) = (true, Some(9), Some(80_000));
            },
            Code::BusLag,
            "fairlane serve",
        ),
        (|f| other_bus(f, |bus| bus.processes = 0), Code::NoReader, "role ingest"),
        (
            |f| other_bus(f, |bus| bus.unread_since_ms = Some(89_999)),
            Code::BusLag,
            "fairlane serve",
        ),
        (
            |f| {
                let failing = BusFailure { since_ms: 98_000, reason: "no answer".to_owned() };
                other_bus(f, |bus| bus.failing = Some(failing));
            },
            Code::BusUnavailable,
            "fairlane check",
        ),
        (|f| f.invalid = 1, Code::InvalidEntries, "XREVRANGE fairlane:invalid"),
        (|f| f.pipelines[0].view.dead = 1, Code::DeadLetters, "fairlane dead list --pipeline log"),
        (|f| f.pipelines[0].view.stopped = true, Code::PipelinePaused, "pipelines resume log"),
        (|f| f.pipelines[0].view.paused = 1, Code::BotsPaused, "bots list --pipeline log"),
        (
            |f| f.pipelines[0].view.oldest_age_ms = 60_001,
            Code::PipelineLate,
            "start more `fairlane serve",
        ),
        (
            |f| f.pipelines[0].failing = failing(&["it's"], 40_000, 90_000),
            Code::BotsFail,
            r"fairlane bots show --pipeline log 'it'\''s' shows",
        ),
        (
            |f| f.pipelines[0].throttled = Some(throttled("a b", 39_999)),
            Code::BotsThrottled,
            "fairlane bots set --pipeline log 'a b' --rate RATE",
        ),
        (
            |f| {
                f.pipelines[0].state = PipelineState::Unconfigured;
                f.processes[0].pipelines.clear();
            },
            Code::NotConfigured,
            "fairlane pipelines drop log",
        ),
        (
            |f| {
                let (part, reason) = ("pipeline log".to_owned(), "no answer".to_owned());
                f.not_seen.push(facts::NotSeen { part, reason });
            },
            Code::NotSeen,
            "fairlane check",
        ),
    ];
    for (harm, code, remedy) in cases {
        let mut facts = healthy();
        harm(&mut facts);
        let found = find(&facts, Viewer::All);
        assert_eq!(found.len(), 1, "{code:?}: {found:?}");
        assert_eq!(found[0].code, code);
        assert!(found[0].remedy.contains(remedy), "{found:?}");
    }
}

#[test]
fn a_command_for_a_redis_that_speaks_tls_asks_for_tls() {
    let mut facts = healthy();
    info(&mut facts).append_only = false;
    (facts.redis.target, facts.redis.tls) = ("db:6379".to_owned(), true);
    let found = find(&facts, Viewer::All);
    assert_eq!(found[0].remedy, "redis-cli --tls -h db -p 6379 CONFIG SET appendonly yes");
}

/// Adds a bus that is read and has 5 unread entries.
fn other_bus(facts: &mut Facts, change: impl FnOnce(&mut BusView)) {
    let mut view = BusView {
        bus: "kafka:orders".to_owned(),
        processes: 1,
        logs: 16,
        unread: 5,
        unread_since_ms: Some(95_000),
        failing: None,
    };
    change(&mut view);
    facts.buses.push(view);
}

#[test]
fn a_bus_beside_redis_is_no_finding_during_a_short_break() {
    let found = |change: fn(&mut BusView)| {
        let mut facts = healthy();
        other_bus(&mut facts, change);
        find(&facts, Viewer::All)
    };
    assert_eq!(found(|_| {}), []);
    assert_eq!(found(|bus| (bus.logs, bus.unread_since_ms) = (0, None)), [], "no topic yet");
    let failing = |since_ms| Some(BusFailure { since_ms, reason: "no answer".to_owned() });
    let mut facts = healthy();
    other_bus(&mut facts, |bus| bus.failing = failing(98_001));
    assert_eq!(find(&facts, Viewer::All), [], "a leader changes");
    let state =
        |failing| BusState { bus: "kafka:orders".to_owned(), failing, ..BusState::default() };
    facts.buses[0].failing = failing(90_000);
    facts.processes[0].buses = vec![state(failing(90_000))];
    let found = find(&facts, Viewer::All);
    assert_eq!(found[0].problem, "kafka:orders cannot be read: no answer");
    assert_eq!(
        (found[0].since_ms, &*found[0].processes),
        (Some(90_000), &["here:1".to_owned()][..])
    );
}

#[test]
fn a_cluster_without_some_primaries_is_unavailable_for_their_bots_only() {
    let mut facts = healthy();
    facts.redis.error = Some("a:1, b:2".to_owned());
    let told = |facts: &Facts| find(facts, Viewer::All)[0].problem.clone();
    let all = "Redis does not answer, so nothing is accepted or handled; nothing is lost: a:1, b:2";
    assert_eq!(told(&facts), all);
    facts.redis.others_answer = true;
    let some = "Primaries of Redis do not answer, so nothing is accepted or handled for their bots; nothing is lost: a:1, b:2";
    assert_eq!(told(&facts), some);
}

#[test]
fn while_some_primaries_do_not_answer_all_else_is_found_too() {
    let mut facts = healthy();
    (facts.redis.error, facts.redis.others_answer) = (Some("a:1".to_owned()), true);
    info(&mut facts).append_only = false;
    let codes = |facts: &Facts| -> Vec<Code> {
        find(facts, Viewer::All).iter().map(|finding| finding.code).collect()
    };
    assert_eq!(codes(&facts), [Code::RedisUnavailable], "nothing else was looked at");
    facts.others_seen = true;
    assert_eq!(codes(&facts), [Code::RedisUnavailable, Code::RedisForgets]);

    // The primary of the processes is the one that does not answer: they may run.
    facts.processes.clear();
    (facts.streams[0].unread, facts.pipelines[0].view.depth) = (Some(1), 1);
    let state = PipelineState::Unconfigured;
    let other = PipelineFacts { state, ..facts.pipelines[0].clone() };
    facts.pipelines.push(other);
    let (part, reason) = (facts::PROCESSES.to_owned(), "no answer".to_owned());
    facts.not_seen.push(facts::NotSeen { part, reason });
    let expected = [Code::RedisUnavailable, Code::RedisForgets, Code::NotSeen];
    assert_eq!(codes(&facts), expected);
}

#[test]
fn pipelines_that_could_not_be_looked_at_are_not_compared() {
    let mut facts = healthy();
    facts.processes.push(Process { pipelines: BTreeMap::new(), ..process() });
    assert_eq!(find(&facts, Viewer::All)[0].code, Code::PipelinesDiffer);
    facts.pipelines.clear();
    assert_eq!(find(&facts, Viewer::All), []);
}

fn info(facts: &mut Facts) -> &mut ServerInfo {
    facts.redis.info.as_mut().unwrap()
}

#[test]
fn a_redis_that_refuses_writes_is_told_with_what_it_cannot_write() {
    let told = |append_ok, snapshot_ok, refuses_writes| {
        let mut facts = healthy();
        (info(&mut facts).append_ok, info(&mut facts).snapshot_ok) = (append_ok, snapshot_ok);
        facts.redis.refuses_writes = refuses_writes;
        // No process can register then.
        facts.processes.clear();
        (facts.streams[0].unread, facts.pipelines[0].view.depth) = (Some(1), 1);
        let found = find(&facts, Viewer::All).into_iter();
        found.map(|finding| (finding.code, finding.problem)).collect::<Vec<_>>()
    };
    for (append_ok, snapshot_ok, what) in [
        (false, true, "its append-only file"),
        (true, false, "its snapshot"),
        (true, true, "to its disk"),
    ] {
        let problem = format!("Redis cannot write {what}, and refuses events");
        assert_eq!(told(append_ok, snapshot_ok, true), [(Code::RedisDiskFull, problem)]);
    }
    // A snapshot that an operator asked for.
    assert_eq!(told(true, false, false)[0].0, Code::NoProcess);
}

#[test]
fn a_pipeline_whose_calls_all_fail_is_critical_also_without_queued_events() {
    let mut facts = healthy();
    let reason = "HTTP 500".to_owned();
    let failures = Failures { calls: 7, since_ms: 90_000, time_ms: 99_000, reason };
    facts.processes[0].failing.insert(name(), failures);
    let found = find(&facts, Viewer::All);
    assert_eq!((found[0].code, found[0].since_ms), (Code::PipelineFails, Some(90_000)));
    assert_eq!(
        found[0].problem,
        "pipeline log fails: 7 calls without a success (first 10s ago, last 1s ago): HTTP 500"
    );
    facts.processes[0].failing.get_mut(&name()).unwrap().time_ms = 30_000;
    assert_eq!(find(&facts, Viewer::All), [], "the last failure is old");
}

#[test]
fn a_pipeline_that_a_process_runs_is_not_to_be_dropped() {
    let mut facts = healthy();
    facts.pipelines[0].state = PipelineState::Unconfigured;
    let found = find(&facts, Viewer::All);
    assert_eq!((found.len(), found[0].code), (1, Code::NotConfigured));
    assert_eq!(
        found[0].problem,
        "pipeline log is in Redis but not in the configuration; it runs on here:1"
    );
    assert!(!found[0].remedy.contains("drop"), "{found:?}");
    assert_eq!(found[0].processes, ["here:1"]);
}

#[test]
fn events_without_a_reader_are_no_finding_where_none_is_missing() {
    let behind = |change: fn(&mut Facts)| {
        let mut facts = healthy();
        facts.streams[0].unread = Some(42);
        change(&mut facts);
        find(&facts, Viewer::All)
    };
    assert_eq!(behind(|f| f.processes[0].started_ms = 96_000), [], "it has just started");
    assert_eq!(behind(|f| f.pipelines[0].takes_of_bus = false), [], "no pipeline takes events");
    // A new pipeline starts at the end, so nothing is behind.
    let at_the_end = |f: &mut Facts| (f.streams[0].unread, f.streams[0].reader) = (None, true);
    assert_eq!(behind(at_the_end), []);
    // Nothing was ever copied, and the process that should read is stuck.
    assert_eq!(behind(|f| f.streams[0].unread = None)[0].code, Code::NoReader);
    let starts = |f: &mut Facts| (f.streams[0].unread, f.processes[0].started_ms) = (None, 96_000);
    assert_eq!(behind(starts), [], "it has just started");
    assert_eq!(behind(|_| {})[0].code, Code::NoReader);
}

#[test]
fn a_token_of_certain_bots_sees_only_what_concerns_them() {
    let mut facts = healthy();
    facts.redis.ping_ms = Some(9_000);
    let pipeline = &mut facts.pipelines[0];
    pipeline.failing = failing(&["ours", "theirs"], 10_000, 90_000);
    pipeline.throttled = Some(throttled("theirs", 1));
    (pipeline.view.dead, pipeline.view.stopped) = (3, true);
    let ours = |bot: &BotId| bot.as_str() == "ours";
    let found = find(&facts, Viewer::Bots(&ours));
    let codes: Vec<_> = found.iter().map(|finding| finding.code).collect();
    assert_eq!(codes, [Code::BotsFail, Code::PipelinePaused]);
    let text = serde_json::to_string(&found).unwrap();
    assert!(text.contains("no ours") && !text.contains("theirs"), "{text}");
}

#[test]
fn a_bot_that_its_rate_holds_back_for_a_moment_is_no_finding() {
    let mut facts = healthy();
    facts.pipelines[0].throttled = Some(throttled("a", 98_000));
    assert_eq!(find(&facts, Viewer::All), []);
    for (since_ms, severity) in [(97_999, Severity::Notice), (39_999, Severity::Warning)] {
        facts.pipelines[0].throttled = Some(throttled("a", since_ms));
        let found = find(&facts, Viewer::All);
        assert_eq!((found[0].code, found[0].severity), (Code::BotsThrottled, severity));
    }
}

#[test]
fn a_pipeline_that_fails_is_told_with_its_bots_the_time_and_the_reason() {
    let told = |bots: &[&str]| fails(&name(), &failing(bots, 35_000, 90_000).unwrap(), 100_000);
    let text = told(&["a", "b", "c", "d", "e"]);
    assert!(text.starts_with("pipeline log fails for a, b, c, at least 2 more bots (first 1m 5s ago, last 10s ago): no "), "{text}");
    assert!(told(&["a"]).starts_with("pipeline log fails for a (first"));
}
