//! MongoDB: is it available and suitable, may Fairlane write, and does a write survive a failover?

use std::path::Path;
use std::process::Stdio;

use tokio::process::Command;

use super::{ANSWER, Exit, Finding, clock, formats};
use crate::cli::output::count;
use crate::clock::{Clock as _, SystemClock};
use crate::config::{Config, PipelineConfig};
use crate::formats::look_mongo;
use crate::id::PipelineName;
use crate::mongo::client::{Acknowledged, Mongo, MongoError, MongoInfo, Topology};
use crate::mongo::private::data_of;

const CHECK: &str = "mongodb";

pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let Some(url) = &config.mongodb.url else {
        return vec![private(config).await];
    };
    let mongo = match Mongo::open(url, &config.mongodb.database).await {
        Ok(mongo) => mongo,
        Err(error) => return vec![refused(CHECK, &error)],
    };
    if let Some(error) = mongo.lookup_error() {
        return vec![refused(CHECK, &error)];
    }
    let findings = ask(&mongo, &config.mongodb.database).await;
    mongo.close().await;
    findings
}

/// The finding without `mongodb.url`.
async fn private(config: &Config) -> Finding {
    let keeps = |(name, p): (&PipelineName, &PipelineConfig)| {
        (name.is(crate::counters::PIPELINE) || name.is(crate::automations::PIPELINE)) && p.enabled
    };
    if config.redis.url.is_some() || !config.pipelines.iter().any(keeps) {
        return Finding::ok(CHECK, "not used (mongodb.url is empty)");
    }
    let program = config.mongodb.program.as_deref().unwrap_or(Path::new("mongod"));
    let mut asked = Command::new(program);
    asked.arg("--version").stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    let program = program.display();
    match asked.kill_on_drop(true).spawn() {
        Ok(mut child) => {
            // The program can be started. Its answer is irrelevant.
            let _ = tokio::time::timeout(ANSWER, child.wait()).await;
            Finding::ok(CHECK, format!("a private one beside the private Redis: {program}"))
        }
        Err(error) => without_program(&format!("{program} cannot be started ({error})"), config),
    }
}

/// The finding without a program that can be started.
fn without_program(why: &str, config: &Config) -> Finding {
    let Some(data) = data_of(&config.data_dir) else {
        return Finding::ok(CHECK, format!("not used: {why}"));
    };
    Finding::fail(
        CHECK,
        format!("{why}, but {} holds data", data.display()),
        "`fairlane serve` does not start without the counters and rules in it",
        "install MongoDB, name its program in FAIRLANE_MONGOD, set mongodb.url, or set enabled = false in [pipelines.counters] and [pipelines.automations]",
    )
    .exits(Exit::Unavailable)
}

async fn ask(mongo: &Mongo, database: &str) -> Vec<Finding> {
    if let Err(error) = mongo.ping().await {
        return vec![refused(CHECK, &error)];
    }
    let asked = SystemClock.now();
    let info = match mongo.info().await {
        Ok(info) => info,
        Err(error) => return vec![refused(CHECK, &error)],
    };
    let mut findings = vec![
        Finding::ok(CHECK, format!("answers at {mongo}")),
        match mongo.accept(&info) {
            Ok(()) => Finding::ok("mongodb version", info.version.clone()),
            Err(error) => refused("mongodb version", &error),
        },
        judge_topology(&info),
        judge_concern(&mongo.acknowledged()),
    ];
    if let Some(time) = info.time {
        // MongoDB read its clock between these two times, so the latency of the answer does not
        // count as a difference.
        let (before, after) = (asked, SystemClock.now());
        let off = before.saturating_sub(time).max(time.saturating_sub(after));
        findings.push(clock("mongodb clock", off, "MongoDB"));
    }
    findings.push(match mongo.try_write().await {
        Ok(()) => {
            let found = format!("database {database} may be written, read and deleted from");
            Finding::ok("mongodb rights", found)
        }
        Err(error) => refused("mongodb rights", &error),
    });
    findings.push(match look_mongo(mongo, ANSWER).await {
        Ok(marks) => formats::judge_documents(&marks, mongo),
        Err(error) => refused("mongodb format", &error),
    });
    findings
}

fn judge_topology(info: &MongoInfo) -> Finding {
    let check = "mongodb topology";
    match &info.topology {
        Topology::ReplicaSet { name, members } => {
            Finding::ok(check, format!("replica set {name}, {}", count(*members as u64, "member")))
        }
        Topology::Sharded => Finding::ok(check, "sharded, behind mongos"),
        Topology::Standalone => Finding::warn(
            check,
            "a standalone server",
            "a majority of one means little: nothing has a copy, and there is no failover",
            "make it a replica set (`--replSet`, then rs.initiate()), with three members",
        ),
    }
}

fn judge_concern(acknowledged: &Acknowledged) -> Finding {
    let check = "mongodb writes";
    match acknowledged {
        Acknowledged::ByMajority => Finding::ok(check, "count when a majority has them"),
        Acknowledged::Otherwise(concern) => Finding::warn(
            check,
            format!("mongodb.url asks for {concern}"),
            "a failover may undo what was acknowledged",
            "remove w and journal from the options of mongodb.url: a majority is asked for then",
        ),
    }
}

fn refused(check: &str, error: &MongoError) -> Finding {
    let (why, remedy, exit) = match error {
        MongoError::Options { .. } => {
            ("it cannot be used at all", "correct mongodb.url", Exit::Usage)
        }
        MongoError::Credentials { .. } => {
            ("it cannot be used at all", "correct user and password in mongodb.url", Exit::Failed)
        }
        MongoError::Forbidden { .. } => (
            "Fairlane writes, reads and deletes there",
            "give the user the role readWrite on that database",
            Exit::Failed,
        ),
        MongoError::Version { .. } => {
            ("it lacks what Fairlane needs", "install MongoDB 6.0 or newer", Exit::Failed)
        }
        MongoError::Majority { .. } => (
            "writes would never count as done",
            "bring back the members that are down: rs.status()",
            Exit::Unavailable,
        ),
        error if error.is_passing() => (
            "/readyz says degraded, and what needs MongoDB waits",
            "start it, or correct mongodb.url",
            Exit::Unavailable,
        ),
        _ => ("Fairlane needs this to work", "check the log of MongoDB", Exit::Failed),
    };
    Finding::fail(check, error.to_string(), why, remedy).exits(exit)
}

#[cfg(test)]
mod tests {
    use super::super::State;
    use super::*;

    #[test]
    fn writes_that_a_failover_may_undo_are_a_warning() {
        let topology = |topology| {
            judge_topology(&MongoInfo { version: "8.0.4".to_owned(), topology, time: None }).state
        };
        let set = |members| Topology::ReplicaSet { name: "rs0".to_owned(), members };
        assert_eq!(topology(set(3)), State::Ok);
        assert_eq!(topology(set(1)), State::Ok);
        assert_eq!(topology(Topology::Sharded), State::Ok);
        assert_eq!(topology(Topology::Standalone), State::Warn);
        assert_eq!(judge_concern(&Acknowledged::ByMajority).state, State::Ok);
        let less = judge_concern(&Acknowledged::Otherwise("w=1".to_owned()));
        assert_eq!((less.state, less.found.as_str()), (State::Warn, "mongodb.url asks for w=1"));
    }
}
