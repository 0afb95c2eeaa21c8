//! Tests of the judgements about a Redis server.

use super::super::State;
use super::*;
use crate::presence::Pace;
use crate::redis::Replication;

fn info() -> ServerInfo {
    ServerInfo {
        version: "7.0.15".to_owned(),
        role: "master".to_owned(),
        uptime_seconds: 1,
        memory_used: 1,
        memory_max: 0,
        eviction: "noeviction".to_owned(),
        append_only: true,
        append_ok: true,
        snapshot_ok: true,
        clients: 2,
        clients_max: 10_000,
        replication: Replication::default(),
    }
}

#[test]
fn a_server_that_may_lose_or_refuse_events_is_found_out() {
    let fsync = |text: &str| Ok(Some(text.to_owned()));
    let check = || "x".to_owned();
    let eviction = |info| check_eviction(check(), &info);
    let durability = |info, fsync| check_durability(check(), &info, fsync);
    let memory = |used, max| {
        check_memory(check(), &ServerInfo { memory_used: used, memory_max: max, ..info() })
    };
    let clients = |clients, max| {
        check_clients(check(), &ServerInfo { clients, clients_max: max, ..info() }, 5)
    };
    let lru = || ServerInfo { eviction: "allkeys-lru".to_owned(), ..info() };
    let shards = |number| ShardCount::new(number).unwrap();
    let version =
        |text: &str| check_version(check(), &ServerInfo { version: text.to_owned(), ..info() });
    let cases = [
        (eviction(info()), State::Ok),
        (eviction(lru()), State::Warn),
        (eviction(ServerInfo { memory_max: 1, ..lru() }), State::Fail),
        (durability(info(), fsync("everysec")), State::Ok),
        (durability(info(), fsync("always")), State::Ok),
        (durability(info(), fsync("no")), State::Warn),
        (durability(info(), Ok(None)), State::Ok),
        (durability(ServerInfo { append_only: false, ..info() }, fsync("always")), State::Warn),
        (durability(ServerInfo { append_ok: false, ..info() }, fsync("always")), State::Fail),
        (durability(ServerInfo { snapshot_ok: false, ..info() }, fsync("always")), State::Warn),
        (version("6.2.9"), State::Fail),
        (version("10.0.1"), State::Ok),
        (check_role(check(), &info()), State::Ok),
        (check_role(check(), &ServerInfo { role: "slave".to_owned(), ..info() }), State::Fail),
        (memory(1 << 30, 0), State::Ok),
        (memory(79, 100), State::Ok),
        (memory(80, 100), State::Warn),
        (clients(2, 0), State::Ok),
        (clients(84, 100), State::Ok),
        (clients(85, 100), State::Warn),
        (clients(95, 100), State::Warn),
        (clients(96, 100), State::Fail),
        (check_shards(shards(16), None), State::Ok),
        (check_shards(shards(16), Some(shards(16))), State::Ok),
        (check_shards(shards(16), Some(shards(4))), State::Fail),
    ];
    for (finding, state) in cases {
        assert_eq!(finding.state, state, "{finding:?}");
        let explained = (finding.why.is_some(), finding.remedy.is_some());
        assert_eq!(explained, (state != State::Ok, state != State::Ok), "{finding:?}");
    }
}

#[test]
fn a_pipeline_that_is_no_longer_configured_is_named() {
    let config = Config::from_toml("[pipelines.log]\nhandler = \"log\"\nevents = [\"*\"]", "test");
    let config = config.unwrap();
    let names = |names: &[&str]| -> Vec<_> {
        names.iter().map(|name| PipelineName::parse(name).unwrap()).collect()
    };
    let check = |known: &[&str], running: &[&str]| {
        let paces = names(running).into_iter().map(|name| (name, Pace::default())).collect();
        check_known(&config, &names(known), &[Process::running(paces)])
    };
    assert_eq!(check(&[], &[]).found, "no pipeline ever ran here");
    assert_eq!(check(&["log"], &["log"]).found, "of log");
    let finding = check(&["log", "new", "old", "older"], &["log", "new"]);
    assert_eq!(finding.state, State::Warn);
    assert_eq!(finding.found, "not in the configuration: old, older");
    assert!(finding.remedy.unwrap().ends_with("fairlane pipelines drop old"));
    let finding = check(&["log", "new", "newer"], &["log", "new", "newer"]);
    assert_eq!((finding.state, finding.remedy), (State::Ok, None));
    let found = "not in this configuration: new (here:1), newer (here:1); use the configuration of the process that runs it";
    assert_eq!(finding.found, found);
}
