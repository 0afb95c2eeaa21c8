//! The buses beside Redis: can they be reached and used, and would they lose or repeat events?

#[cfg(feature = "kafka")]
use std::time::Duration;

use futures_util::future::join_all;

use super::Finding;
#[cfg(any(feature = "nats", feature = "kafka"))]
use crate::bus::BusError;
#[cfg(feature = "kafka")]
use crate::bus::kafka::{KafkaSample, KafkaSurvey, KafkaTopic};
#[cfg(any(feature = "nats", feature = "kafka"))]
use crate::cli::exit::Exit;
#[cfg(feature = "kafka")]
use crate::clock::millis;
use crate::config::{Config, SourceConfig, SourceKind};

/// Checks all sources at once.
pub(super) async fn check(config: &Config) -> Vec<Finding> {
    let all = config.bus.sources.iter().map(|source| async {
        let check = format!("bus {}", source.log_prefix().trim_end_matches('/'));
        match &source.kind {
            SourceKind::Nats(_) => nats(config, source, check).await,
            SourceKind::Kafka(_) => kafka(config, source, check).await,
        }
    });
    join_all(all).await.into_iter().flatten().collect()
}

#[cfg(any(feature = "nats", feature = "kafka"))]
fn failed(check: &str, error: &BusError) -> Finding {
    let (why, remedy) = (
        "its events are not copied, and nothing can be published to it",
        "start that server, or correct the source in bus.sources",
    );
    Finding::fail(check, error.to_string(), why, remedy).exits(Exit::Unavailable)
}

#[cfg(not(feature = "nats"))]
#[expect(clippy::unused_async, reason = "as with the client")]
async fn nats(_: &Config, _: &SourceConfig, check: String) -> Vec<Finding> {
    vec![lacks(check, "nats")]
}

#[cfg(not(feature = "kafka"))]
#[expect(clippy::unused_async, reason = "as with the client")]
async fn kafka(_: &Config, _: &SourceConfig, check: String) -> Vec<Finding> {
    vec![lacks(check, "kafka")]
}

#[cfg(not(all(feature = "nats", feature = "kafka")))]
fn lacks(check: String, kind: &str) -> Finding {
    let (why, remedy) = (
        "the source cannot be used",
        format!("use a package or the image, or build with --features {kind}"),
    );
    Finding::fail(check, format!("this build has no client for {kind}"), why, remedy)
}

#[cfg(feature = "nats")]
async fn nats(config: &Config, source: &SourceConfig, check: String) -> Vec<Finding> {
    use async_nats::jetstream::stream::StorageType;

    let Some(opened) = crate::app::buses::nats(source, &config.bus) else { return Vec::new() };
    let survey = match opened.survey().await {
        Ok(survey) => survey,
        Err(error) => return vec![failed(&check, &error)],
    };
    let Some(stream) = &survey.stream else {
        let found = format!("NATS {} answers, but the stream does not exist", survey.server);
        let remedy = "make the stream, or correct `stream` of the source";
        return vec![Finding::fail(check, found, "Fairlane never makes a stream", remedy)];
    };
    let mut findings = vec![Finding::ok(
        check.clone(),
        format!("NATS {} answers; {} messages", survey.server, stream.messages),
    )];
    let mut add = |name: &str, found: String, why: &str, remedy: &str| {
        findings.push(Finding::warn(format!("{check} {name}"), found, why, remedy));
    };
    if let Some(problem) = &stream.problem {
        findings.push(Finding::fail(
            format!("{check} retention"),
            problem.clone(),
            "the stream cannot be read",
            "use a stream with the retention limits",
        ));
        return findings;
    }
    if stream.config.storage == StorageType::Memory {
        add(
            "storage",
            "in memory".to_owned(),
            "a restart of NATS loses the stream",
            "use the storage file",
        );
    }
    if stream.config.num_replicas == 1 {
        add(
            "replicas",
            "1".to_owned(),
            "the stream cannot be read or written while its server is away",
            "use 3 replicas in a cluster",
        );
    }
    let age = stream.config.max_age;
    if !age.is_zero() && age < config.bus.retention {
        add(
            "retention",
            format!("messages are deleted after {}", humantime::format_duration(age)),
            "after a longer outage, events are missing (bus.retention says how long they should stay)",
            "raise max_age of the stream, or lower bus.retention",
        );
    }
    match survey.sync_interval.as_deref() {
        Some("always") | None => {}
        Some(interval) => add(
            "durability",
            format!("written to the disk every {interval}"),
            "a power cut loses messages that NATS has acknowledged",
            "set jetstream { sync_interval: always }, or use 3 replicas on separate machines",
        ),
    }
    if survey.can_read == Some(false) {
        findings.push(Finding::fail(
            format!("{check} rights"),
            "the user may not read the stream",
            "its events are not copied",
            "permit $JS.API.STREAM.INFO, CONSUMER.CREATE, CONSUMER.INFO, CONSUMER.DELETE and CONSUMER.MSG.NEXT of the stream",
        ));
    }
    let publishes = config.bus.published() == source.name;
    if publishes && survey.can_publish == Some(false) {
        findings.push(Finding::fail(
            format!("{check} rights"),
            "the user may not publish",
            "HTTP and rules publish to this source (bus.publish)",
            "permit the subject of `publish_subject`",
        ));
    }
    findings
}

#[cfg(feature = "kafka")]
async fn kafka(config: &Config, source: &SourceConfig, check: String) -> Vec<Finding> {
    let Some(opened) = crate::app::buses::kafka(source) else { return Vec::new() };
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) => return vec![failed(&check, &error)],
    };
    match opened.survey().await {
        Ok(survey) => judge_kafka(&check, survey, config.bus.retention),
        Err(error) => vec![failed(&check, &error)],
    }
}

/// Judges a cluster. `wanted`: how long events should stay (`bus.retention`).
#[cfg(feature = "kafka")]
fn judge_kafka(check: &str, survey: KafkaSurvey, wanted: Duration) -> Vec<Finding> {
    let cluster = survey.cluster.as_deref().unwrap_or("without an id");
    let mut findings =
        vec![Finding::ok(check, format!("{} brokers; cluster {cluster}", survey.brokers))];
    if let Some(error) = survey.group_error {
        findings.push(Finding::warn(
            format!("{check} group"),
            error,
            "tools do not see how far Fairlane has copied",
            "permit Read and Describe on the group of the source",
        ));
    }
    for topic in survey.topics {
        findings.extend(judge_topic(check, topic, wanted));
    }
    findings
}

#[cfg(feature = "kafka")]
fn judge_topic(check: &str, topic: KafkaTopic, wanted: Duration) -> Vec<Finding> {
    let of = |what: &str| format!("{check} {} {what}", topic.name);
    let mut findings = Vec::new();
    if let Some(error) = topic.read_error {
        let (why, remedy) = ("its events are not copied", "permit Read on the topic");
        findings.push(Finding::fail(of("records"), error, why, remedy));
    } else if topic.partitions == 0 {
        let (why, remedy) = ("Fairlane never makes a topic", "make it, or correct `topics`");
        findings.push(Finding::warn(of("topic"), "does not exist", why, remedy));
    }
    if topic.partitions == 0 {
        return findings;
    }
    let mut add = |what: &str, found: String, why: &str, remedy: &str| {
        findings.push(Finding::warn(of(what), found, why, remedy));
    };
    if let Some(error) = topic.config_error {
        let why = "its retention and durability are not known";
        add("settings", error, why, "permit DescribeConfigs on the topic");
    }
    if let Some(error) = topic.start_error {
        let why = "a pipeline that is new to the topic waits, and gets no events of this source; the other pipelines do";
        add("start", error, why, "correct `start` of the source, or remove it");
    }
    let retained = topic.retention_ms.and_then(|ms| u64::try_from(ms).ok());
    if let Some(ms) = retained.filter(|ms| *ms < millis(wanted)) {
        add(
            "retention",
            format!("{ms} ms"),
            "after a longer outage, events are missing (bus.retention says how long they should stay)",
            "raise retention.ms of the topic, or lower bus.retention",
        );
    }
    if topic.cleanup.as_deref().is_some_and(|policy| policy.contains("compact")) {
        add(
            "cleanup",
            "compact".to_owned(),
            "Kafka deletes all but the last record of a key, so events of a bot may be missing",
            "use cleanup.policy=delete",
        );
    }
    if topic.replicas < 2 || topic.min_in_sync.is_some_and(|min| min < 2) {
        add(
            "copies",
            format!(
                "{} replicas, min.insync.replicas {}",
                topic.replicas,
                topic.min_in_sync.map_or_else(|| "not known".to_owned(), |min| min.to_string())
            ),
            "the loss of one broker loses events that Kafka has acknowledged",
            "use 3 replicas and min.insync.replicas=2",
        );
    }
    if topic.unclean_election == Some(true) {
        add(
            "elections",
            "unclean".to_owned(),
            "a broker that lags may become leader: acknowledged events are lost, and others may be read again",
            "set unclean.leader.election.enable=false, and bus.dedup",
        );
    }
    of_sample(topic.sample, add);
    findings
}

/// What the last records of a topic show.
#[cfg(feature = "kafka")]
fn of_sample(sample: KafkaSample, mut add: impl FnMut(&str, String, &str, &str)) {
    if sample.without_key > 0 {
        add(
            "keys",
            format!("{} of the last {} records have no key", sample.without_key, sample.records),
            "the events of a bot are in several partitions, so they have no order",
            "key the records by bot",
        );
    }
    if sample.invalid > 0 {
        add(
            "records",
            format!("{} of the last {} are no events", sample.invalid, sample.records),
            "they go to fairlane:invalid",
            "set `bot` of the source for plain records, or correct the producers",
        );
    }
}

#[cfg(all(test, feature = "kafka"))]
mod tests {
    use super::super::State;
    use super::*;

    const WANTED: Duration = Duration::from_secs(60);

    fn topic() -> KafkaTopic {
        KafkaTopic {
            name: "orders".to_owned(),
            partitions: 4,
            replicas: 3,
            in_sync: 3,
            min_in_sync: Some(2),
            retention_ms: Some(60_000),
            cleanup: Some("delete".to_owned()),
            unclean_election: Some(false),
            ..KafkaTopic::default()
        }
    }

    /// The findings of a topic, and what they are about.
    fn found(change: impl FnOnce(&mut KafkaTopic)) -> Vec<(State, String)> {
        let mut topic = topic();
        change(&mut topic);
        let found = judge_topic("bus kafka", topic, WANTED).into_iter();
        found.map(|finding| (finding.state, finding.check)).collect()
    }

    #[test]
    fn a_topic_that_cannot_be_read_fails_and_one_that_may_lose_events_is_a_warning() {
        type Change = fn(&mut KafkaTopic);

        assert_eq!(found(|_| {}), []);
        assert_eq!(found(|of| of.retention_ms = Some(-1)), [], "unlimited");
        let cases: [(Change, State, &str); 12] = [
            (|of| of.read_error = Some("denied".to_owned()), State::Fail, "records"),
            (|of| of.partitions = 0, State::Warn, "topic"),
            (|of| of.config_error = Some("denied".to_owned()), State::Warn, "settings"),
            (|of| of.start_error = Some("no offset".to_owned()), State::Warn, "start"),
            (|of| of.retention_ms = Some(59_999), State::Warn, "retention"),
            (|of| of.cleanup = Some("compact,delete".to_owned()), State::Warn, "cleanup"),
            (|of| of.replicas = 1, State::Warn, "copies"),
            (|of| of.min_in_sync = Some(1), State::Warn, "copies"),
            (|of| of.unclean_election = Some(true), State::Warn, "elections"),
            (|of| of.sample.without_key = 1, State::Warn, "keys"),
            (|of| of.sample.invalid = 1, State::Warn, "records"),
            (
                |of| (of.partitions, of.read_error) = (0, Some("denied".to_owned())),
                State::Fail,
                "records",
            ),
        ];
        for (change, state, what) in cases {
            assert_eq!(found(change), [(state, format!("bus kafka orders {what}"))]);
        }
    }

    #[test]
    fn a_group_that_cannot_be_used_is_a_warning() {
        let survey = |group_error: Option<&str>| {
            let group_error = group_error.map(str::to_owned);
            let survey =
                KafkaSurvey { group_error, topics: vec![topic()], ..KafkaSurvey::default() };
            let found = judge_kafka("bus kafka", survey, WANTED).into_iter();
            found.map(|finding| (finding.state, finding.check)).collect::<Vec<_>>()
        };
        let answers = (State::Ok, "bus kafka".to_owned());
        let group = (State::Warn, "bus kafka group".to_owned());
        assert_eq!(survey(None), std::slice::from_ref(&answers));
        assert_eq!(survey(Some("denied")), [answers, group]);
    }
}
