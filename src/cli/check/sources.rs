//! The buses beside Redis: can they be reached and used, and would they lose or repeat events?

use futures_util::future::join_all;

use super::Finding;
#[cfg(any(feature = "nats", feature = "kafka"))]
use crate::bus::BusError;
#[cfg(any(feature = "nats", feature = "kafka"))]
use crate::cli::error::Exit;
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
    use crate::clock::millis;

    let Some(opened) = crate::app::buses::kafka(source) else { return Vec::new() };
    let opened = match opened {
        Ok(opened) => opened,
        Err(error) => return vec![failed(&check, &error)],
    };
    let survey = match opened.survey().await {
        Ok(survey) => survey,
        Err(error) => return vec![failed(&check, &error)],
    };
    let cluster = survey.cluster.as_deref().unwrap_or("without an id");
    let mut findings =
        vec![Finding::ok(check.clone(), format!("{} brokers; cluster {cluster}", survey.brokers))];
    let mut add = |name: String, found: String, why: &str, remedy: &str| {
        findings.push(Finding::warn(format!("{check} {name}"), found, why, remedy));
    };
    if let Some(error) = survey.group_error {
        add(
            "group".to_owned(),
            error,
            "tools do not see how far Fairlane has copied",
            "permit Read and Describe on the group of the source",
        );
    }
    for topic in survey.topics {
        let of = |what: &str| format!("{} {what}", topic.name);
        if topic.partitions == 0 {
            let why = "Fairlane never makes a topic";
            add(of("topic"), "does not exist".to_owned(), why, "make it, or correct `topics`");
            continue;
        }
        if let Some(error) = topic.config_error {
            let why = "its retention and durability are not known";
            add(of("settings"), error, why, "permit DescribeConfigs on the topic");
        }
        if let Some(error) = topic.read_error {
            add(of("records"), error, "its events are not copied", "permit Read on the topic");
        }
        if let Some(error) = topic.start_error {
            let why = "a pipeline that is new to the topic does not start, and the source is not read then";
            add(of("start"), error, why, "correct `start` of the source, or remove it");
        }
        let retained = topic.retention_ms.and_then(|ms| u64::try_from(ms).ok());
        if retained.is_some_and(|ms| ms < millis(config.bus.retention)) {
            add(
                of("retention"),
                format!("{} ms", retained.unwrap_or_default()),
                "after a longer outage, events are missing (bus.retention says how long they should stay)",
                "raise retention.ms of the topic, or lower bus.retention",
            );
        }
        if topic.cleanup.as_deref().is_some_and(|policy| policy.contains("compact")) {
            add(
                of("cleanup"),
                "compact".to_owned(),
                "Kafka deletes all but the last record of a key, so events of a bot may be missing",
                "use cleanup.policy=delete",
            );
        }
        if topic.replicas < 2 || topic.min_in_sync.is_some_and(|min| min < 2) {
            add(
                of("copies"),
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
                of("elections"),
                "unclean".to_owned(),
                "a broker that lags may become leader: acknowledged events are lost, and others may be read again",
                "set unclean.leader.election.enable=false, and bus.dedup",
            );
        }
        of_sample(topic.sample, |what, found, why, remedy| add(of(what), found, why, remedy));
    }
    findings
}

/// What the last records of a topic show.
#[cfg(feature = "kafka")]
fn of_sample(
    sample: crate::bus::kafka::KafkaSample,
    mut add: impl FnMut(&str, String, &str, &str),
) {
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
