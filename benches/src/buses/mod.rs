//! `fairlane-bench pipeline --bus nats` or `kafka`: the throughput from another bus, beside that from
//! a Redis stream.
//!
//! Both buses get the same events, before anything is measured. In each round, an instance reads the
//! Redis stream, then another one the other bus. Each is measured twice: first an instance without
//! workers copies everything to the queues, then a whole one also handles it. The clock starts at the
//! first events that are copied or handled, so the time to connect does not count.

mod server;

use std::num::NonZero;
use std::sync::Arc;
use std::time::Duration;

use fairlane::app::{App, Roles};
use fairlane::bus::kafka::{KafkaSettings, KafkaSource};
use fairlane::bus::nats::{NatsSettings, NatsSource};
use fairlane::bus::record::{Mapping, Mode};
use fairlane::bus::source::Outgoing;
use fairlane::bus::{BusError, Source};
use fairlane::clock::SystemClock;
use fairlane::config::{
    KafkaSection, NatsLogin, NatsSection, PipelineConfig, PublishFormat, SourceConfig, SourceKind,
    SourceStart, Start, TlsFiles, TypeFrom, WorkersConfig,
};
use fairlane::sandbox::{Meter, Rig, Running, STREAM, pipeline_name};
use rdkafka::ClientConfig;
use rdkafka::admin::{AdminClient, AdminOptions, NewTopic, TopicReplication};
use rdkafka::client::DefaultClientContext;
use serde::Serialize;
use tokio::time::Instant;

use self::server::Server;
use crate::error::BenchError;
use crate::isolation::{Client, request};
use crate::pipeline::{Check, generate};
use crate::{cpu, probe};

/// The name of the source, of its stream and of its topic.
const NAME: &str = "fairlane-bench";
/// Number of events per call when publishing.
const PUBLISH_BATCH: usize = 1_000;
/// Time without progress after which a run fails.
const PATIENCE: Duration = Duration::from_secs(60);

/// A bus beside Redis.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Bus {
    Nats,
    Kafka,
}

impl Bus {
    fn as_str(self) -> &'static str {
        match self {
            Self::Nats => "nats",
            Self::Kafka => "kafka",
        }
    }
}

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    pub(crate) bus: Bus,
    /// The server, as `HOST:PORT`. `None`: a private one.
    pub(crate) server: Option<String>,
    /// Number of partitions of a Kafka topic.
    pub(crate) partitions: u16,
    /// Number of rounds. Figures are medians.
    pub(crate) rounds: usize,
    /// As for the Redis stream alone.
    pub(crate) load: crate::pipeline::Options,
}

/// The results. The figures of `redis_…` are those of the Redis stream.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) bus: &'static str,
    pub(crate) partitions: u16,
    pub(crate) bots: usize,
    pub(crate) events: usize,
    pub(crate) rounds: usize,
    pub(crate) copied_per_second: f64,
    pub(crate) redis_copied_per_second: f64,
    pub(crate) copied_ratio: f64,
    pub(crate) events_per_second: f64,
    pub(crate) redis_events_per_second: f64,
    pub(crate) ratio: f64,
    /// Processor time of this process for reading, decoding and copying.
    pub(crate) copy_own_cpu_us_per_event: f64,
    pub(crate) redis_copy_own_cpu_us_per_event: f64,
    /// Processor time of the main thread of Redis, which has the queues in both cases.
    pub(crate) copy_queues_cpu_us_per_event: f64,
    pub(crate) redis_copy_queues_cpu_us_per_event: f64,
    /// Processor time of the private server of the bus.
    pub(crate) copy_bus_cpu_us_per_event: Option<f64>,
    /// Over all rounds and both buses.
    pub(crate) lost: u64,
    pub(crate) reordered: u64,
    /// Each run of the bus, then of the Redis stream: what is copied and what is handled per second.
    pub(crate) runs: Vec<[[f64; 2]; 2]>,
}

/// What one instance did.
#[derive(Debug, Clone, Copy, Default)]
struct Run {
    copied_per_second: f64,
    own_us: f64,
    queues_us: f64,
    bus_us: f64,
    handled_per_second: f64,
    lost: u64,
    reordered: u64,
}

/// Runs the bench. Calls `watch` with the number of events that are published, copied or handled.
///
/// # Errors
/// If a private server cannot be started, the bus refuses the events, or nothing moves for a minute.
pub(crate) async fn run(
    options: Options,
    watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    Rig::with(async |rig| {
        let directory = rig.directory().join("buses");
        let server = Server::open(options.bus, options.server.clone(), &directory).await?;
        let measured = measure(rig, &server, &options, watch).await;
        server.close().await?;
        measured
    })
    .await
}

async fn measure(
    rig: &Rig,
    server: &Server,
    options: &Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let source = source(options, &server.address);
    publish(rig, server, options, &mut watch).await?;
    let mut runs = Vec::new();
    // The counter of copies is one of the process, over all instances.
    let mut copied = 0;
    for _ in 0..options.rounds {
        let mut round = [Run::default(); 2];
        for (run, bus) in round.iter_mut().zip([Some(&source), None]) {
            let sight = Sight { rig, bus, options, server };
            sight.copy(run, copied, &mut watch).await?;
            sight.handle(run, &mut watch).await?;
            copied += 2 * options.load.events as u64;
        }
        runs.push(round);
    }
    Ok(report(options, server, &runs))
}

fn report(options: &Options, server: &Server, runs: &[[Run; 2]]) -> Report {
    let at = |of: usize, figure: fn(&Run) -> f64| {
        median(runs.iter().map(|round| figure(&round[of])).collect())
    };
    let [copied, redis_copied] = [0, 1].map(|of| at(of, |run| run.copied_per_second));
    let [handled, redis_handled] = [0, 1].map(|of| at(of, |run| run.handled_per_second));
    let [own, redis_own] = [0, 1].map(|of| at(of, |run| run.own_us));
    let [queues, redis_queues] = [0, 1].map(|of| at(of, |run| run.queues_us));
    let sum = |figure: fn(&Run) -> u64| runs.iter().flatten().map(figure).sum();
    let rates = |run: &Run| [run.copied_per_second, run.handled_per_second];
    Report {
        bus: options.bus.as_str(),
        partitions: options.partitions,
        bots: options.load.bots,
        events: options.load.events,
        rounds: options.rounds,
        copied_per_second: copied,
        redis_copied_per_second: redis_copied,
        copied_ratio: copied / redis_copied,
        events_per_second: handled,
        redis_events_per_second: redis_handled,
        ratio: handled / redis_handled,
        copy_own_cpu_us_per_event: own,
        redis_copy_own_cpu_us_per_event: redis_own,
        copy_queues_cpu_us_per_event: queues,
        redis_copy_queues_cpu_us_per_event: redis_queues,
        copy_bus_cpu_us_per_event: server.pid().map(|_| at(0, |run| run.bus_us)),
        lost: sum(|run| run.lost),
        reordered: sum(|run| run.reordered),
        runs: runs.iter().map(|round| round.each_ref().map(rates)).collect(),
    }
}

fn median(mut figures: Vec<f64>) -> f64 {
    figures.sort_by(f64::total_cmp);
    figures.get(figures.len() / 2).copied().unwrap_or_default()
}

/// One bus of a round.
struct Sight<'a> {
    rig: &'a Rig,
    /// `None`: the Redis stream.
    bus: Option<&'a SourceConfig>,
    options: &'a Options,
    server: &'a Server,
}

impl Sight<'_> {
    /// Copies all events, without workers. `before` are copied already.
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    async fn copy(
        &self,
        run: &mut Run,
        before: u64,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(), BenchError> {
        let total = self.options.load.events as u64;
        probe::forget_positions(self.rig).await?;
        let roles = Roles { ingest: true, work: false, http: false, schedule: false };
        let app = self.app(roles, Meter::new(1)).await?;
        let metrics = app.metrics_address()?;
        let (client, ask) = (Client::new(metrics), request("GET", "/metrics", metrics, None));
        let cpu = self.cpu().await?;
        let running = Rig::spawn(app);
        let copied = async || {
            let (_, answer) = client.ask(&ask).await.map_err(BenchError::Http)?;
            Ok(copies(&String::from_utf8_lossy(&answer)).saturating_sub(before))
        };
        let (rate, copied) = self.pace(total, copied, |copied| watch("copying", copied)).await?;
        let after = self.cpu().await?;
        running.stop().await?;
        let each = |at: usize| (after[at] - cpu[at]) * 1e6 / total as f64;
        run.copied_per_second = rate;
        [run.own_us, run.queues_us, run.bus_us] = [0, 1, 2].map(each);
        run.lost += total.saturating_sub(copied);
        Ok(())
    }

    /// Copies and handles all events.
    async fn handle(
        &self,
        run: &mut Run,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(), BenchError> {
        let total = self.options.load.events as u64;
        probe::forget_positions(self.rig).await?;
        let meter = Meter::new(self.options.load.bots);
        let running: Running =
            Rig::spawn(self.app(Roles { http: false, ..Roles::ALL }, Arc::clone(&meter)).await?);
        let done = async || Ok(meter.done());
        let (rate, _) = self.pace(total, done, |done| watch("handling", done)).await?;
        running.stop().await?;
        run.handled_per_second = rate;
        run.lost += total.saturating_sub(meter.reached());
        run.reordered += meter.reordered();
        Ok(())
    }

    /// Waits until `total` events are through, and returns the rate from the first ones on, and how
    /// many there were.
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    async fn pace(
        &self,
        total: u64,
        count: impl AsyncFn() -> Result<u64, BenchError>,
        mut watch: impl FnMut(u64),
    ) -> Result<(f64, u64), BenchError> {
        let mut first = None;
        let mut last = (0, Instant::now());
        loop {
            let (now, at) = (count().await?, Instant::now());
            watch(now);
            if now > last.0 {
                last = (now, at);
            } else if last.1.elapsed() > PATIENCE {
                return Err(BenchError::stuck(PATIENCE, format!("{now} of {total} events")));
            }
            let (from, began) = *first.get_or_insert((now, at));
            if now >= total {
                return Ok(((now - from) as f64 / (at - began).as_secs_f64(), now));
            }
            if now == 0 {
                first = None;
            }
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Processor time so far, in seconds: of this process, of Redis, of the bus.
    async fn cpu(&self) -> Result<[f64; 3], BenchError> {
        let of = |pid| cpu::of_process(pid).unwrap_or_default().as_secs_f64();
        let redis = probe::cpu(self.rig).await?;
        Ok([of(std::process::id()), redis, self.server.pid().map_or(0.0, of)])
    }

    async fn app(&self, roles: Roles, meter: Arc<Meter>) -> Result<App, BenchError> {
        let mut pipeline = PipelineConfig::new(pipeline_name().as_str(), ["*"]);
        pipeline.start = Start::Earliest;
        let max = NonZero::new(self.options.load.workers).unwrap_or(NonZero::<usize>::MIN);
        pipeline.workers = WorkersConfig { min: max, max };
        crate::pipeline::history(&mut pipeline, self.options.load.has_history);
        let mut config = self.rig.config();
        config.bus.streams = Vec::new();
        match self.bus {
            Some(source) => config.bus.sources = vec![source.clone()],
            None => config.bus.streams = vec![STREAM.to_owned()],
        }
        config.pipelines.insert(pipeline_name(), pipeline);
        let app = App::builder(config).handler(pipeline_name().as_str(), Check(meter)).roles(roles);
        Ok(Box::pin(app.build()).await?)
    }
}

/// The total of `fairlane_fanout_copies_total`.
#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a counter")]
pub(crate) fn copies(metrics: &str) -> u64 {
    let lines = metrics.lines().filter(|line| line.starts_with("fairlane_fanout_copies_total"));
    let values = lines.filter_map(|line| line.rsplit_once(' ')?.1.trim().parse::<f64>().ok());
    values.sum::<f64>() as u64
}

/// The source in the configuration.
fn source(options: &Options, address: &str) -> SourceConfig {
    let kind = match options.bus {
        Bus::Nats => SourceKind::Nats(NatsSection {
            servers: vec![format!("nats://{address}")],
            stream: NAME.to_owned(),
            subjects: Vec::new(),
            publish_subject: Some(subject()),
            trim: false,
            login: NatsLogin::None,
            tls: TlsFiles { ca_file: None, cert_file: None, key_file: None },
        }),
        Bus::Kafka => SourceKind::Kafka(KafkaSection {
            brokers: vec![address.to_owned()],
            topics: vec![NAME.to_owned()],
            publish_topic: NAME.to_owned(),
            group: NAME.to_owned(),
            encrypted: false,
            sasl: None,
            tls: TlsFiles { ca_file: None, cert_file: None, key_file: None },
            check_crcs: false,
            partition_wait: Duration::ZERO,
        }),
    };
    SourceConfig {
        name: NAME.to_owned(),
        kind,
        start: SourceStart::Pipeline,
        bot: None,
        event_type: TypeFrom::Topic,
        format: PublishFormat::Structured,
    }
}

fn subject() -> String {
    format!("{NAME}.{}", NatsSection::BOT)
}

/// Publishes the events to both buses, in the same order.
async fn publish(
    rig: &Rig,
    server: &Server,
    options: &Options,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<(), BenchError> {
    let address = &server.address;
    let target: Box<dyn Source> = match options.bus {
        Bus::Nats => {
            create_stream(address).await?;
            let settings = NatsSettings {
                name: NAME.to_owned(),
                servers: vec![format!("nats://{address}")],
                login: fairlane::bus::nats::NatsLogin::None,
                ca_file: None,
                cert_file: None,
                key_file: None,
                stream: NAME.to_owned(),
                subjects: Vec::new(),
                publish_subject: Some(subject()),
                mode: Mode::Structured,
                trim: None,
                group: None,
                mapping: Mapping::events_only(NAME),
                reserved: Vec::new(),
            };
            Box::new(NatsSource::new(settings, Arc::new(SystemClock)))
        }
        Bus::Kafka => {
            create_topic(address, options.partitions).await?;
            let topics = vec![NAME.to_owned()];
            Box::new(KafkaSource::new(KafkaSettings::new(NAME, vec![address.clone()], topics))?)
        }
    };
    let events = generate(options.load)?;
    let mut published = 0;
    for chunk in events.chunks(PUBLISH_BATCH) {
        rig.publish(chunk.iter().map(|(_, json)| json)).await?;
        let outgoing: Vec<Outgoing<'_>> =
            chunk.iter().map(|(bot, json)| Outgoing { json, bot: bot.as_str() }).collect();
        target.publish(&outgoing).await?;
        published += chunk.len() as u64;
        watch("publishing", published);
    }
    Ok(())
}

/// Makes the stream anew.
async fn create_stream(address: &str) -> Result<(), BenchError> {
    let refused = |error: &dyn std::fmt::Display| {
        BenchError::Bus(BusError::Refused {
            bus: format!("NATS at {address}"),
            cause: error.to_string(),
        })
    };
    let client = async_nats::connect(format!("nats://{address}")).await;
    let context = async_nats::jetstream::new(client.map_err(|error| refused(&error))?);
    // It may not exist.
    let _ = context.delete_stream(NAME).await;
    let config = async_nats::jetstream::stream::Config {
        name: NAME.to_owned(),
        subjects: vec![format!("{NAME}.>")],
        allow_atomic_publish: true,
        ..Default::default()
    };
    context.create_stream(config).await.map(drop).map_err(|error| refused(&error))
}

/// Makes the topic anew.
async fn create_topic(address: &str, partitions: u16) -> Result<(), BenchError> {
    let refused = |cause: String| {
        BenchError::Bus(BusError::Refused { bus: format!("Kafka at {address}"), cause })
    };
    let admin: AdminClient<DefaultClientContext> = ClientConfig::new()
        .set("bootstrap.servers", address)
        .create()
        .map_err(|error| refused(error.to_string()))?;
    let options = AdminOptions::new().operation_timeout(Some(PATIENCE));
    // It may not exist.
    let _ = admin.delete_topics(&[NAME], &options).await;
    let topic = NewTopic::new(NAME, partitions.into(), TopicReplication::Fixed(1));
    let created = admin.create_topics([&topic], &options).await;
    match created.map_err(|error| refused(error.to_string()))?.pop() {
        Some(Err((_, error))) => Err(refused(error.to_string())),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_of_all_pipelines_are_counted() {
        let metrics = "# HELP fairlane_fanout_copies_total Copies\n\
                       fairlane_fanout_copies_total{pipeline=\"a\"} 5\n\
                       fairlane_fanout_copies_total{pipeline=\"b\"} 7\n\
                       fairlane_fanout_seconds_count 9\n";
        assert_eq!(copies(metrics), 12);
        assert_eq!(copies(""), 0);
    }

    #[test]
    fn a_median_is_the_middle_of_the_figures() {
        assert!((median(vec![3.0, 1.0, 2.0]) - 2.0).abs() < f64::EPSILON);
    }
}
