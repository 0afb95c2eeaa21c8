//! Facts about a cluster and its topics, for `fairlane check`.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rdkafka::admin::{AdminClient, AdminOptions, ConfigResource, ResourceSpecifier};
use rdkafka::consumer::Consumer as _;
use rdkafka::error::KafkaError;

use super::asker::{ANSWER_WITHIN, is_missing};
use super::context::Context;
use super::handled::missing;
use super::position::Start;
use super::raw::Raw;
use super::reading::Reading;
use super::{KafkaSource, Partition, blocking};
use crate::bus::BusError;
use crate::bus::source::Fetched as _;

/// Number of records in the sample of a topic.
const SAMPLE: i64 = 200;
/// Maximum duration of reading a sample.
const SAMPLE_WITHIN: Duration = Duration::from_secs(5);

/// Facts about a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KafkaSurvey {
    /// Number of brokers.
    pub brokers: usize,
    /// The id of the cluster, if its brokers tell it.
    pub cluster: Option<String>,
    /// Why offsets cannot be committed and read for the group: usually a missing right. Lag tools then
    /// show nothing, and a topic that lost its tail is taken as made anew.
    pub group_error: Option<String>,
    /// The topics, in the order of the settings.
    pub topics: Vec<KafkaTopic>,
}

/// Facts about a topic. `None`: the broker does not tell, or this client has no right to ask.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KafkaTopic {
    /// Its name.
    pub name: String,
    /// Number of partitions; 0: it does not exist, or [`Self::read_error`] says why they are not known.
    pub partitions: usize,
    /// Number of copies of its partition with the fewest.
    pub replicas: usize,
    /// Number of copies in sync of its partition with the fewest.
    pub in_sync: usize,
    /// `min.insync.replicas`: a write needs this number of copies.
    pub min_in_sync: Option<i64>,
    /// `retention.ms`; -1: unlimited.
    pub retention_ms: Option<i64>,
    /// `retention.bytes` of a partition; -1: unlimited.
    pub retention_bytes: Option<i64>,
    /// `cleanup.policy`, such as `delete` or `compact`.
    pub cleanup: Option<String>,
    /// `unclean.leader.election.enable`: whether the topic may lose confirmed records.
    pub unclean_election: Option<bool>,
    /// `max.message.bytes`.
    pub max_message_bytes: Option<i64>,
    /// Why its settings cannot be read, if so.
    pub config_error: Option<String>,
    /// What its last records are.
    pub sample: KafkaSample,
    /// Why they cannot be read, if so.
    pub read_error: Option<String>,
    /// Why new pipelines cannot start where a consumer group is (`start = "group:NAME"`), if so.
    pub start_error: Option<String>,
}

/// What some records are.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct KafkaSample {
    /// Number of records.
    pub records: usize,
    /// Number of records without a key: their order per bot is not kept.
    pub without_key: usize,
    /// Number of records that are no events.
    pub invalid: usize,
    /// Number of records without a value.
    pub tombstones: usize,
}

impl KafkaSource {
    /// Asks the cluster. Takes some seconds for each topic at most.
    ///
    /// # Errors
    /// If the cluster does not answer. What cannot be found out about a topic is no error.
    pub async fn survey(&self) -> Result<KafkaSurvey, BusError> {
        let asker = self.asker().await?;
        let topics = self.settings.topics.clone();
        let (brokers, cluster, mut found) = asker
            .ask(move |consumer, deadline| {
                let mut brokers = 0;
                let mut found = Vec::with_capacity(topics.len());
                for name in topics {
                    let metadata = consumer.fetch_metadata(Some(&name), deadline.left())?;
                    brokers = brokers.max(metadata.brokers().len());
                    let of_it = metadata.topics().iter().find(|topic| topic.name() == name);
                    let error = of_it.and_then(rdkafka::metadata::MetadataTopic::error);
                    let error = error.map(|error| KafkaError::MetadataFetch(error.into()));
                    let partitions = of_it.map_or(&[][..], |topic| topic.partitions());
                    let least = |count: fn(&rdkafka::metadata::MetadataPartition) -> usize| {
                        partitions.iter().map(count).min().unwrap_or(0)
                    };
                    found.push(KafkaTopic {
                        partitions: partitions.len(),
                        replicas: least(|partition| partition.replicas().len()),
                        in_sync: least(|partition| partition.isr().len()),
                        name,
                        read_error: error
                            .filter(|error| !is_missing(error))
                            .map(|error| super::error::words(&error)),
                        ..KafkaTopic::default()
                    });
                }
                let cluster = consumer.client().fetch_cluster_id(Duration::ZERO);
                Ok((brokers, cluster, found))
            })
            .await?;
        self.read_configs(&mut found).await?;
        let mut group_error = None;
        for topic in found.iter_mut().filter(|topic| topic.partitions > 0) {
            let partitions = partitions_of(topic);
            if let Err(error) = asker.committed(&partitions).await {
                group_error = Some(error.to_string());
            }
            if let Some(group) = &self.settings.start_group {
                topic.start_error = match self.handled(group, &partitions).await {
                    Ok(handled) if handled.reads(&topic.name) => None,
                    Ok(_) => Some(missing(group, &topic.name)),
                    Err(error) => Some(error.to_string()),
                };
            }
            match self.sample(&partitions).await {
                Ok(sample) => topic.sample = sample,
                Err(error) => topic.read_error = Some(error.to_string()),
            }
        }
        Ok(KafkaSurvey { brokers, cluster, group_error, topics: found })
    }

    async fn read_configs(&self, topics: &mut [KafkaTopic]) -> Result<(), BusError> {
        let settings = Arc::clone(&self.settings);
        let admin = blocking(&self.settings, move || {
            let context = Context::new(&settings);
            let created = settings.asking(&settings.group).create_with_context(context.clone());
            created.map_err(|error| super::error::of_call(&context, &error))
        });
        let admin: AdminClient<Context> = admin.await?;
        let options = AdminOptions::new().request_timeout(Some(ANSWER_WITHIN));
        for topic in topics.iter_mut().filter(|topic| topic.partitions > 0) {
            let asked = ResourceSpecifier::Topic(&topic.name);
            let answer = admin.describe_configs([&asked], &options).await;
            match answer.map(|mut found| found.pop()) {
                Ok(Some(Ok(found))) => {
                    topic.min_in_sync = number(&found, "min.insync.replicas");
                    topic.retention_ms = number(&found, "retention.ms");
                    topic.retention_bytes = number(&found, "retention.bytes");
                    topic.cleanup = text(&found, "cleanup.policy");
                    topic.unclean_election = text(&found, "unclean.leader.election.enable")
                        .and_then(|text| text.parse().ok());
                    topic.max_message_bytes = number(&found, "max.message.bytes");
                }
                Ok(Some(Err(code))) => topic.config_error = Some(code.to_string()),
                Ok(None) => topic.config_error = Some("the broker gave no answer".to_owned()),
                Err(error) => topic.config_error = Some(super::error::words(&error)),
            }
        }
        super::asker::dropped_aside(admin);
        Ok(())
    }

    /// Reads the last records of these partitions.
    async fn sample(&self, partitions: &[Partition]) -> Result<KafkaSample, BusError> {
        let ends = self.ends(&self.asker().await?, partitions).await?;
        let share = SAMPLE / i64::try_from(partitions.len()).unwrap_or(1).max(1);
        let mut from = Vec::new();
        let mut wanted = 0;
        for (partition, ends) in partitions.iter().zip(ends) {
            let Ok(ends) = ends else { continue };
            let next = ends.first.max(ends.next - share.max(1));
            if next < ends.next {
                wanted += ends.next - next;
                let start = Start { incarnation: 1, next, lost: 0 };
                from.push((partition.clone(), self.log_name(partition), start));
            }
        }
        let mut sample = KafkaSample::default();
        if from.is_empty() {
            return Ok(sample);
        }
        let settings = Arc::clone(&self.settings);
        let reading = blocking(&self.settings, move || Reading::new(&settings, &from));
        let mut reading = reading.await?;
        let until = Instant::now() + SAMPLE_WITHIN;
        let wanted = usize::try_from(wanted).unwrap_or(0);
        while sample.records < wanted {
            // Markers of transactions are no records: fewer than wanted may exist.
            let left = until.saturating_duration_since(Instant::now());
            let batches = reading.fetch(wanted, left.min(Duration::from_secs(1))).await?;
            if batches.is_empty() && (sample.records > 0 || left.is_zero()) {
                break;
            }
            for batch in &batches {
                sample.without_key += batch.without_key();
                sample.tombstones += batch.tombstones();
            }
            let raw = Raw { batches, settings: Arc::clone(&self.settings) };
            sample.records += raw.len();
            for batch in Box::new(raw).decode()? {
                sample.invalid += batch.entries.iter().filter(|entry| entry.event.is_err()).count();
            }
        }
        Ok(sample)
    }
}

fn partitions_of(topic: &KafkaTopic) -> Vec<Partition> {
    let name: Arc<str> = Arc::from(topic.name.as_str());
    let numbers = 0..i32::try_from(topic.partitions).unwrap_or(i32::MAX);
    numbers.map(|number| Partition { topic: Arc::clone(&name), number }).collect()
}

fn text(found: &ConfigResource, name: &str) -> Option<String> {
    found.get(name).and_then(|entry| entry.value.clone())
}

fn number(found: &ConfigResource, name: &str) -> Option<i64> {
    text(found, name).and_then(|text| text.parse().ok())
}
