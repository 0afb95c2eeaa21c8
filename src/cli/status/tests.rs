//! Tests of the problems and their remedies.

use std::collections::BTreeMap;

use super::problems::{fails, find_problems};
use super::*;
use crate::id::BotId;
use crate::redis::StreamKind;

fn healthy() -> Status {
    Status {
        redis: RedisStatus {
            target: "redis.sock".to_owned(),
            info: ServerInfo {
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
            },
        },
        streams: vec![StreamView {
            stream: "fairlane:events".to_owned(),
            kind: StreamKind::Stream,
            length: 10,
            unread: Some(0),
            reader: false,
            groups: Vec::new(),
        }],
        invalid: 0,
        invalid_stream: "fairlane:invalid".to_owned(),
        processes: vec![Process {
            id: "a".to_owned(),
            host: "here".to_owned(),
            pid: 1,
            version: "1".to_owned(),
            roles: vec!["work".to_owned()],
            started_ms: 0,
            pipelines: BTreeMap::new(),
            breakers: Vec::new(),
        }],
        pipelines: vec![PipelineStatus {
            name: PipelineName::parse("log").unwrap(),
            state: PipelineState::Enabled,
            view: PipelineView::default(),
            failing: None,
            throttled: None,
            pace: Pace::default(),
        }],
        problems: Vec::new(),
    }
}

#[test]
fn nothing_is_wrong_with_a_healthy_installation() {
    assert_eq!(find_problems(&healthy(), 0), []);
    let text = screen(Output::new(false), &healthy());
    assert!(text.ends_with("nothing is wrong"), "{text}");
}

#[test]
fn each_problem_names_the_remedy() {
    type Harm = fn(&mut Status);
    let cases: [(Harm, &str); 17] = [
        (|s| s.redis.info.eviction = "allkeys-lru".to_owned(), "maxmemory-policy noeviction"),
        (|s| s.redis.info.append_only = false, "CONFIG SET appendonly yes"),
        (|s| s.redis.info.append_ok = false, "its disk"),
        (|s| s.redis.info.role = "slave".to_owned(), "primary"),
        (|s| s.redis.info.memory_used = 1 << 30, "raise maxmemory"),
        (|s| s.processes.clear(), "fairlane serve"),
        (|s| s.streams[0].kind = StreamKind::Other, "bus.streams"),
        (|s| s.streams[0].unread = Some(1), "role ingest"),
        (|s| s.invalid = 1, "XREVRANGE fairlane:invalid"),
        (|s| s.pipelines[0].view.dead = 1, "fairlane dead list --pipeline log"),
        (|s| s.pipelines[0].view.stopped = true, "fairlane pipelines resume log"),
        (|s| s.pipelines[0].view.paused = 1, "fairlane bots list --pipeline log"),
        (|s| s.pipelines[0].view.oldest_age_ms = 60_001, "start more `fairlane serve"),
        (
            |s| {
                let view = &mut s.pipelines[0].view;
                (view.oldest_age_ms, view.ready, view.parked) = (60_001, 0, 1);
            },
            "its bots are parked, after failures or because the handler asked to wait; list its bots by age: fairlane bots list",
        ),
        (
            |s| {
                s.pipelines[0].failing = Some(Failing {
                    bots: vec![BotId::parse("it's").unwrap()],
                    reason: "no".to_owned(),
                    time_ms: 90_000,
                    since_ms: 40_000,
                });
            },
            r"fairlane bots show --pipeline log 'it'\''s' shows",
        ),
        (
            |s| {
                let bot = BotId::parse("a b").unwrap();
                s.pipelines[0].throttled = Some(Throttled { bots: 2, bot, since_ms: 39_999 });
            },
            "fairlane bots set --pipeline log 'a b' --rate RATE",
        ),
        (|s| s.pipelines[0].state = PipelineState::Unconfigured, "fairlane pipelines drop log"),
    ];
    for (harm, remedy) in cases {
        let mut status = healthy();
        harm(&mut status);
        let problems = find_problems(&status, 100_000);
        assert_eq!(problems.len(), 1, "{problems:?}");
        assert!(problems[0].remedy.contains(remedy), "{problems:?}");
    }
}

#[test]
fn a_bot_that_its_rate_holds_back_for_a_moment_is_no_problem() {
    let mut status = healthy();
    let bot = BotId::parse("a").unwrap();
    status.pipelines[0].throttled = Some(Throttled { bots: 1, bot, since_ms: 40_000 });
    assert_eq!(find_problems(&status, 100_000), []);
}

#[test]
fn a_pipeline_that_fails_is_told_with_its_bots_the_time_and_the_reason() {
    let bots = ["a", "b", "c", "d", "e"].map(|bot| BotId::parse(bot).unwrap()).to_vec();
    let (reason, now_ms) = ("HTTP 500".to_owned(), 100_000);
    let mut failing = Failing { bots, reason, time_ms: 90_000, since_ms: 35_000 };
    let name = PipelineName::parse("log").unwrap();
    assert_eq!(
        fails(&name, &failing, now_ms),
        "pipeline log fails for a, b, c, at least 2 more bots, since 1m 5s ago; the last time 10s ago: HTTP 500"
    );
    failing.bots.truncate(1);
    assert!(fails(&name, &failing, now_ms).starts_with("pipeline log fails for a, since"));
}
