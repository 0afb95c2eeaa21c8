//! The same promises on a Redis Cluster, and the faults that only a cluster has.

use std::collections::HashMap;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::event::Event;
use fairlane::id::{BotId, PipelineName, ShardCount};
use fairlane::presence::processes;
use fairlane::queue::PushOptions;
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::Pause;
use fairlane::redis::{Link, Server, Target};

use super::fairness::{undisturbed, weighed};
use super::faults::{FEW, durable, forgotten, interrupted, killed};
use super::order::in_order;
use crate::support::bus::{add, event};
use crate::support::cli::run_in;
use crate::support::cluster::Cluster;
use crate::support::config::{STREAM, config};
use crate::support::fleet::Fleet;
use crate::support::history::Record;
use crate::support::instance::Instance;
use crate::support::recorder::Log;
use crate::support::redis::{Options, RedisBackend as _, RedisServer};
use crate::support::wait::{eventually, tried};

const LONG: Duration = Duration::from_secs(60);
/// The primary of the bus stream. The primaries before and after it have shards too.
const BUS: usize = 1;

fn now() -> u64 {
    micros(SystemClock.now())
}

async fn three(options: Options) -> Cluster {
    Cluster::start(options, 3, false).await
}

#[tokio::test]
async fn on_a_cluster_events_are_handled_in_order_whatever_fails() {
    in_order(Fleet::on(three(Options::default()).await, 200, &[]), 150).await;
}

#[tokio::test]
async fn on_a_cluster_others_go_on_after_a_kill_in_mid_slice() {
    killed(Fleet::on(three(Options::default()).await, 40, FEW), 250).await;
}

#[tokio::test]
async fn a_primary_that_lost_its_scripts_disturbs_no_process() {
    tried(3, async |is_last| {
        let cluster = three(Options::default()).await;
        forgotten(Fleet::on(cluster, 40, &[]), |cluster| &cluster.nodes[2], is_last).await
    })
    .await;
}

#[tokio::test]
async fn on_a_cluster_service_follows_weight_and_the_quiet_do_not_wait() {
    weighed(three(Options::default()).await).await;
    undisturbed(three(Options::default()).await).await;
}

/// The shards of the unavailable primary wait. Those of the others are filled and handled as usual.
#[tokio::test]
async fn while_a_primary_is_unavailable_the_shards_of_the_others_continue() {
    let cluster = three(durable()).await;
    let fleet = Fleet::on(cluster, 40, FEW);
    let within = Duration::from_secs(4);
    let (fleet, gone, back) =
        interrupted(fleet, 500, |cluster| &mut cluster.nodes[0], within).await;
    let (mut before, mut first, mut meanwhile) = (0, gone, 0);
    fleet.records(|record| {
        if let Record::Committed { asked, at, ref events, .. } = *record {
            if at < gone {
                before += events.len() as u64;
                first = first.min(at);
            } else if asked > gone && at < back {
                meanwhile += events.len() as u64;
            }
        }
    });
    // Two thirds of the shards continue. The bound holds on a machine of any speed.
    let expected = before * (back - gone) / (gone - first).max(1);
    assert!(
        meanwhile > expected / 5,
        "{meanwhile} events were done, {expected} at the pace before"
    );
}

#[tokio::test]
async fn the_processes_are_seen_while_another_primary_than_theirs_is_unavailable() {
    let mut cluster = three(Options::default()).await;
    let target = Target::new(&cluster.url()).unwrap();
    let link = Link::new(target, Vec::new(), 10_000, Duration::from_secs(5));
    assert_eq!(processes(&link).await.unwrap(), []);
    let place = usize::from(cluster.slot_of("fl:processes").await) * 3 / 16_384;
    cluster.nodes[(place + 1) % 3].kill9();
    assert_eq!(processes(&link).await.unwrap(), []);
}

/// The stream of unreadable entries has one primary, the bus another one.
#[tokio::test]
async fn an_entry_that_cannot_be_put_aside_now_does_not_stop_the_others() {
    let mut cluster = three(durable()).await;
    let log = Log::default();
    let instance = Instance::start(&config(&cluster, "test", &[]), log.content()).await;
    let queue = instance.queue("test");
    let mut bots = (0..).map(|id| BotId::parse(&format!("bot-{id}")).unwrap());
    let is_on_the_first =
        |bot: &BotId| usize::from(queue.keys(queue.shard_of(bot)).slot()) * 3 / 16_384 == 0;
    let bot = bots.find(is_on_the_first).unwrap();
    cluster.nodes[2].kill9();
    add(&cluster, STREAM, &["no event".to_owned(), event(bot.as_str(), "test", 1)]).await;
    eventually(LONG, "the event behind it is handled", async || log.len() == 1).await;
    cluster.nodes[2].restart();
    eventually(LONG, "the entry is put aside", async || {
        let mut connection = cluster.nodes[2].connection().await;
        let mut command = redis::cmd("XLEN");
        let kept: Result<u64, _> =
            command.arg("fairlane:invalid").query_async(&mut connection).await;
        // After a lost answer it is stored twice.
        kept.is_ok_and(|kept| kept >= 1)
    })
    .await;
    instance.stop().await;
}

/// A frozen primary neither answers nor refuses, so every call to it waits for its timeout.
#[tokio::test]
async fn a_frozen_primary_holds_up_its_own_shards_only() {
    let mut fleet = Fleet::on(three(Options::default()).await, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(400).await;
    fleet.start(3).await;
    fleet.settles(2_000, LONG).await;
    fleet.server.nodes[0].sigstop();
    let frozen = now();
    let until = frozen + micros(Duration::from_secs(4));
    eventually(LONG, "it was frozen for long", async || now() > until).await;
    fleet.server.nodes[0].sigcont();
    fleet.drains(LONG).await;
    let (mut before, mut first, mut meanwhile) = (0, frozen, 0);
    fleet.records(|record| {
        if let Record::Committed { asked, at, ref events, .. } = *record {
            if at < frozen {
                before += events.len() as u64;
                first = first.min(at);
            } else if asked > frozen && at < until {
                meanwhile += events.len() as u64;
            }
        }
    });
    // Two thirds of the shards continue, until they are empty. The bound holds on a machine of any speed.
    let at_the_pace = before * (until - frozen) / (frozen - first).max(1);
    let expected = at_the_pace.min((16_000 - before) * 2 / 3);
    assert!(
        meanwhile > expected / 5,
        "{meanwhile} events were done, {at_the_pace} at the pace before"
    );
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (16_000, 0, 0), "{report}");
}

/// One call moves a hundred due events, so many follow each other while a call to the frozen primary waits.
#[tokio::test]
async fn a_frozen_primary_delays_no_due_events_in_shards_of_the_others() {
    const DUE: usize = 1_000;
    let cluster = three(Options::default()).await;
    let log = Log::default();
    let instance = Instance::start(&config(&cluster, "test", &[]), log.content()).await;
    let queue = instance.queue("test");
    let bot_of = |node: usize| {
        let node_of =
            |bot: &BotId| usize::from(queue.keys(queue.shard_of(bot)).slot()) * 3 / 16_384;
        let mut bots = (0..).map(|id| BotId::parse(&format!("bot-{id}")).unwrap());
        bots.find(|bot| node_of(bot) == node).unwrap()
    };
    let (frozen, other) = (bot_of(0), bot_of(2));
    let due = SystemClock.now() + Duration::from_secs(5);
    let push = async |bot: &BotId| {
        let later = Event::builder("test", bot).build().unwrap();
        let options = PushOptions { due: Some(due), ..PushOptions::default() };
        queue.push(bot, &[later], options).await.unwrap();
    };
    push(&frozen).await;
    for _ in 0..DUE {
        push(&other).await;
    }
    cluster.nodes[0].sigstop();
    let handled = |bot: &BotId| {
        let seen = log.all().into_iter().filter(|seen| seen.bot == bot.as_str());
        seen.map(|seen| seen.at).collect::<Vec<_>>()
    };
    eventually(LONG, "those of the other are handled", async || handled(&other).len() >= DUE).await;
    let late = handled(&other).into_iter().max().unwrap().saturating_sub(due);
    println!("{late:?} late");
    // With a wait for a timeout between two calls, it would be more than 45 s.
    assert!(late < Duration::from_secs(20), "{late:?}");
    cluster.nodes[0].sigcont();
    eventually(LONG, "that of the frozen one follows", async || !handled(&frozen).is_empty()).await;
    instance.stop().await;
}

/// A failover of the stream's primary to a replica whose clock is behind leaves this state: the
/// entries of the stream are older than the events that the shards copied from it.
#[tokio::test]
async fn a_stream_that_lost_its_tail_continues_after_the_copied_events() {
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[]);
    let mut connection = server.connection().await;
    let mut put = async |id: String, name: &str| {
        let mut command = redis::cmd("XADD");
        command.arg(STREAM).arg(id).arg("event").arg(event("bot", "test", name));
        command.exec_async(&mut connection).await.unwrap();
    };
    let log = Log::default();
    let ahead = now() / 1_000 + 3_600_000;
    put(format!("{ahead}-0"), "copied").await;
    let instance = Instance::start(&config, log.content()).await;
    eventually(LONG, "it is handled", async || log.len() == 1).await;
    instance.stop().await;

    let mut admin = server.connection().await;
    redis::cmd("DEL").arg(STREAM).exec_async(&mut admin).await.unwrap();
    put("*".to_owned(), "older").await;
    let instance = Instance::start(&config, log.content()).await;
    let last = async || {
        let mut info = redis::cmd("XINFO");
        info.arg("STREAM").arg(STREAM);
        let facts: HashMap<String, redis::Value> =
            info.query_async(&mut server.connection().await).await.unwrap();
        redis::from_redis_value_ref::<String>(&facts["last-generated-id"]).unwrap()
    };
    eventually(LONG, "its end is raised", async || last().await == format!("{ahead}-0")).await;
    put("*".to_owned(), "new").await;
    eventually(LONG, "the new one is handled", async || log.len() == 2).await;
    assert_eq!(log.ids("test"), ["copied", "new"]);
    instance.stop().await;
}

#[tokio::test]
async fn an_operator_sees_every_primary_and_drops_a_pipeline_on_all_of_them() {
    let cluster = three(Options::default()).await;
    let log = Log::default();
    let instance = Instance::start(&config(&cluster, "test", &[]), log.content()).await;
    let queue = instance.queue("test").clone();
    queue.pause(None).await.unwrap();
    let events: Vec<String> = (0..80).map(|id| event(&format!("bot-{id}"), "test", id)).collect();
    add(&cluster, STREAM, &events).await;
    eventually(LONG, "all are queued", async || {
        queue.view(Duration::ZERO).await.unwrap().depth == 80
    })
    .await;
    instance.stop().await;
    let disabled = config(&cluster, "test", &[("pipelines.test.enabled", "false")]);
    let run = |arguments: &[&str]| {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("fairlane.toml"), &disabled).unwrap();
        let ran = run_in(directory.path(), arguments, "");
        assert_eq!(ran.code, 0, "{arguments:?}: {ran:?}");
        ran.out
    };
    run(&["check"]);
    assert!(run(&["status"]).contains("redis-cli -c -h 127.0.0.1 -p"));
    let dropped = run(&["pipelines", "drop", "test", "--yes"]);
    assert!(dropped.contains("80 events"), "{dropped}");
    for node in 0..3 {
        let left = cluster.ask(node, &["KEYS", "fl:{test:*"]).await;
        assert_eq!(left, "", "{node}");
    }
    let target = Target::new(&cluster.url()).unwrap();
    let server = Server::new(target, LONG);
    let mut names = Vec::new();
    for primary in server.primaries().await.unwrap() {
        assert_eq!(primary.info().await.unwrap().role, "master");
        primary.try_scripts().await.unwrap();
        primary.try_keys().await.unwrap();
        names.push(primary.target().to_string());
    }
    names.sort();
    let mut expected: Vec<_> =
        cluster.nodes.iter().map(|node| node.tcp_addr().to_string()).collect();
    expected.sort();
    assert_eq!(names, expected);
}

/// Events that the replica had not received are copied again from the bus, whose primary survived.
#[tokio::test]
async fn a_primary_is_killed_under_load_and_its_replica_takes_over() {
    let cluster = Cluster::start(Options::default(), 3, true).await;
    let mut fleet = Fleet::on(cluster, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(400).await;
    fleet.start(3).await;
    fleet.settles(4_000, LONG).await;
    fleet.server.nodes[2].kill9();
    fleet.publish(50).await;
    fleet.server.promotes(5).await;
    fleet.publish(50).await;
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (20_000, 0, 0), "{report}");
}

/// Slots of the queues and the slot of the bus move to other primaries and back.
#[tokio::test]
async fn slots_move_under_load_and_nothing_is_lost_or_reordered() {
    let mut fleet = Fleet::on(three(Options::default()).await, 40, FEW);
    fleet.behaviour.delay = Duration::from_millis(2);
    fleet.publish(400).await;
    fleet.start(3).await;
    let first = fleet.server.slot_of("{test:3}").await;
    let last = fleet.server.slot_of("{test:0}").await;
    let bus = fleet.server.slot_of(STREAM).await;
    let moves =
        [(first, 0, 2), (last, 2, 0), (bus, BUS, 0), (first, 2, 0), (last, 0, BUS), (bus, 0, 2)];
    for (round, (slot, from, to)) in moves.into_iter().enumerate() {
        fleet.settles((round + 1) * 2_000, LONG).await;
        fleet.server.move_slot(slot, from, to).await;
    }
    fleet.drains(LONG).await;
    let report = fleet.report();
    assert_eq!((report.lost, report.reordered, report.unhandled), (0, 0, 0), "{report}");
    assert_eq!((report.sent, report.stale_commits, report.given_up), (16_000, 0, 0), "{report}");
    // After a move, leases from the shard's former primary are invalid.
    for (shard, place) in [("fl:{test:3}:meta", 0), ("fl:{test:0}:meta", BUS)] {
        let known = fleet.server.ask(place, &["HGET", shard, "run"]).await;
        let server = fleet.server.ask(place, &["INFO", "server"]).await;
        assert!(server.contains(&format!("run_id:{known}\r")), "{shard} was not recovered");
    }
}

/// A connection that was made while a slot was being migrated recovers the shard of the slot later.
/// The server may have lost its scripts in between.
#[tokio::test]
async fn scripts_that_a_primary_forgot_while_a_slot_was_migrated_are_loaded_again() {
    let cluster = three(Options::default()).await;
    let target = Target::new(&cluster.url()).unwrap();
    let (name, shards) = (PipelineName::parse("test").unwrap(), ShardCount::new(4).unwrap());
    let keys: Vec<_> =
        shards.shards().map(|shard| ShardKeys::new(target.prefix(), &name, shard)).collect();
    let (moving, bot) = (keys[3].clone(), BotId::parse("b").unwrap());
    let pause = Pause { keys: &moving, bot: Some(&bot), note: "", replaces: false };
    let slot = cluster.slot_of("{test:3}").await.to_string();
    let other = cluster.ask(2, &["CLUSTER", "MYID"]).await;
    for link in [Link::new, Link::pooled] {
        let link = link(target.clone(), keys.clone(), 1_000, LONG);
        cluster.tell(0, &["CLUSTER", "SETSLOT", &slot, "MIGRATING", &other]).await;
        let error = link.call(&pause).await.unwrap_err();
        assert!(error.to_string().contains("TRYAGAIN"), "{error}");
        cluster.tell(0, &["SCRIPT", "FLUSH"]).await;
        cluster.tell(0, &["CLUSTER", "SETSLOT", &slot, "STABLE"]).await;
        eventually(LONG, "the shard is recovered", async || {
            let paused = link.call(&pause).await;
            paused
                .inspect_err(|error| assert!(error.to_string().contains("TRYAGAIN"), "{error}"))
                .is_ok()
        })
        .await;
    }
}
