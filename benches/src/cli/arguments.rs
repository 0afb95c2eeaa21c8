//! Arguments that several scenarios share, and those of the scenarios with many.

use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Args, ValueEnum as _};
use fairlane::config::MongoUrl;
use fairlane::sandbox;
use url::Url;

use crate::error::CommandError;
use crate::faults::{self, Fault, soak};
use crate::overload::deployment::{self, Route};
use crate::peers::{self, Measure, System};
use crate::{counters, mongo};

/// The handler of the events of `fairlane-bench pipeline`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Handled {
    /// A handler that only checks the order.
    Check,
    /// The rules of the bots, in MongoDB.
    Automation,
    /// A receiver that answers at once, over HTTP.
    Push,
}

/// The bus of the events of `fairlane-bench pipeline`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum BusArg {
    /// A Redis stream, alone.
    Redis,
    /// A stream of NATS `JetStream`, beside a Redis stream.
    Nats,
    /// A topic of Kafka, beside a Redis stream.
    Kafka,
}

/// Arguments of `fairlane-bench faults`.
#[derive(Debug, Args)]
pub(crate) struct FaultsArgs {
    /// Draws the faults. Equal seeds draw equal faults.
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// Duration of the faults. The start and the end take some seconds more.
    #[arg(long, value_name = "S", default_value = "60", value_parser = clap::value_parser!(u32).range(5..=86_400))]
    seconds: u32,
    /// Events per second of all pipelines together, without those of rules.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "400", value_parser = clap::value_parser!(u32).range(20..=20_000))]
    rate: u32,
    /// Number of processes. The first one is never killed, so that its memory can be watched.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u8).range(2..=16))]
    processes: u8,
    /// Use a Redis Cluster of three primaries with a replica each, instead of one server with a replica.
    /// Writes wait for a replica. Replicas take over, slots move, and a fault of the network hits what all
    /// processes and one primary send to each other.
    #[arg(long)]
    cluster: bool,
    /// Only faults of this kind. Can be repeated. Default: all.
    #[arg(long, value_enum, value_name = "KIND")]
    only: Vec<Fault>,
    /// If a promise does not hold, repeat the campaign with fewer and fewer faults, and print the
    /// smallest number of faults with which it still does not. Up to 40 campaigns.
    #[arg(long)]
    shrink: bool,
}

impl FaultsArgs {
    pub(super) fn options(self) -> faults::Options {
        faults::Options {
            seed: self.seed,
            seconds: self.seconds.into(),
            rate: self.rate,
            processes: self.processes.into(),
            cluster: self.cluster,
            only: self.only,
            shrinks: self.shrink,
        }
    }
}

/// Arguments of `fairlane-bench soak`.
#[derive(Debug, Args)]
pub(crate) struct SoakArgs {
    /// Draws the load.
    #[arg(long, value_name = "N", default_value = "1")]
    seed: u64,
    /// Duration without the nights, in which everything is judged.
    #[arg(long, value_name = "S", default_value = "14400", value_parser = clap::value_parser!(u32).range(20..=604_800))]
    seconds: u32,
    /// Events per second at the peaks, of all pipelines together, without those of rules.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "2000", value_parser = clap::value_parser!(u32).range(20..=20_000))]
    rate: u32,
    /// Number of processes. The first one is never restarted, so that its memory can be watched.
    #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u8).range(2..=16))]
    processes: u8,
    /// Number of days, all of the same length. SIGTERM makes one shorter, and there is one more.
    #[arg(long, value_name = "N", default_value = "24", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    days: u32,
    /// Write a chart of all figures over time as SVG.
    #[arg(long, value_name = "FILE")]
    chart: Option<PathBuf>,
    /// Keep the data of the stores and all figures there. The next run with it goes on.
    #[arg(long, value_name = "DIR")]
    state: Option<PathBuf>,
}

impl SoakArgs {
    pub(super) fn options(self) -> soak::Options {
        soak::Options {
            seed: self.seed,
            seconds: self.seconds.into(),
            rate: self.rate,
            processes: self.processes.into(),
            days: self.days,
            chart: self.chart,
            state: self.state,
        }
    }
}

/// Arguments of `fairlane-bench counters`.
#[derive(Debug, Args)]
pub(crate) struct CountersArgs {
    /// Reads per second; 0: none.
    #[arg(long, value_name = "READS_PER_S", default_value = "15000")]
    rate: u32,
    /// Views per second; 0: none.
    #[arg(long, value_name = "VIEWS_PER_S", default_value = "450")]
    views: u32,
    /// Number of ads.
    #[arg(long, value_name = "N", default_value = "100000")]
    ads: NonZeroU32,
    /// Number of bots that the ads are spread over.
    #[arg(long, value_name = "N", default_value = "100")]
    bots: NonZeroU32,
    /// Ads per read, up to 1000.
    #[arg(long, value_name = "N", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=1_000))]
    per_read: u32,
    /// Share of the ads that is cached. The others are only in MongoDB, or unknown.
    #[arg(long, value_name = "0..1", default_value = "0.95", value_parser = share)]
    cached: f64,
    /// Duration.
    #[arg(long, value_name = "S", default_value = "60")]
    seconds: NonZeroU32,
    /// Number of connections. Each has one request in flight.
    #[arg(long, value_name = "N", default_value = "128", value_parser = clap::value_parser!(u32).range(1..=4_000))]
    connections: u32,
    /// The MongoDB for the documents, in a database that is dropped at the end. Default: a server
    /// that the bench starts (mongod, or the program that `FAIRLANE_MONGOD` names).
    #[arg(long, value_name = "URL")]
    mongodb: Option<String>,
    /// Search for the highest rate of reads at which 99 % are answered within 5 ms.
    #[arg(long)]
    saturate: bool,
    /// Fail if an ad does not have exactly its views. This is always checked.
    #[arg(long)]
    pub(super) verify: bool,
}

impl CountersArgs {
    pub(super) fn options(&self) -> Result<counters::Options, CommandError> {
        let size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let mongo = choice(self.mongodb.as_deref())?;
        Ok(counters::Options {
            rate: self.rate.into(),
            views: self.views.into(),
            ads: size(self.ads.get()),
            bots: size(self.bots.get()),
            per_read: size(self.per_read),
            cached: self.cached,
            seconds: self.seconds.get().into(),
            connections: size(self.connections),
            saturate: self.saturate,
            mongo,
        })
    }
}

/// Arguments of `fairlane-bench peers`.
#[derive(Debug, Args)]
pub(crate) struct PeersArgs {
    /// Number of tenants.
    #[arg(long, value_name = "N", default_value = "1000",
        value_parser = clap::value_parser!(u32).range(2..=5_000))]
    tenants: u32,
    /// Number of events per tenant. A queue per tenant in `BullMQ` gets a quarter.
    #[arg(long, value_name = "N", default_value = "20",
        value_parser = clap::value_parser!(u32).range(1..=10_000))]
    events: u32,
    /// Number of rounds. Figures are medians over the rounds.
    #[arg(long, value_name = "N", default_value = "3")]
    rounds: NonZeroU32,
    /// The measured properties.
    #[arg(long, alias = "measure", value_enum, value_delimiter = ',', value_name = "LIST",
        default_values_t = Measure::value_variants().to_vec())]
    measures: Vec<Measure>,
    /// The systems. Those other than fairlane and xreadgroup need Node.js.
    #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST",
        default_values_t = System::value_variants().to_vec())]
    systems: Vec<System>,
    /// Number of tenants with a backlog. The others are quiet.
    #[arg(long, value_name = "N", default_value = "20")]
    busy: NonZeroU32,
    /// Time for which events of quiet tenants are sent, or, of the measure faults, for which faults
    /// happen. Default: 4, and 45 of faults.
    #[arg(long, value_name = "S", value_parser = clap::value_parser!(u32).range(1..=300))]
    seconds: Option<u32>,
    /// Draws the faults and the events beside them. Each further round has the next seed. Equal seeds
    /// draw equal faults, for every system.
    #[arg(long, value_name = "N", default_value = "1",
        value_parser = clap::value_parser!(u64).range(0..=u64::from(u32::MAX)))]
    seed: u64,
    /// Events per second of all quiet tenants together.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "100",
        value_parser = clap::value_parser!(u32).range(1..=1_000))]
    rate: u32,
    /// The directory with the programs for Node.js and their packages.
    #[arg(long, value_name = "DIR", default_value = "benches/peers")]
    programs: PathBuf,
}

impl PeersArgs {
    pub(super) fn options(self) -> Result<peers::Options, CommandError> {
        let size = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
        let (tenants, busy) = (self.tenants, self.busy.get());
        if busy >= tenants {
            return Err(CommandError::NoQuietTenants { tenants, busy });
        }
        Ok(peers::Options {
            systems: once_each(self.systems),
            measures: once_each(self.measures),
            tenants: size(tenants),
            events: size(self.events),
            rounds: size(self.rounds.get()),
            busy: size(busy),
            seconds: self.seconds.unwrap_or(4).into(),
            seed: self.seed,
            fault_seconds: self.seconds.unwrap_or(45).into(),
            rate: self.rate,
            programs: self.programs,
        })
    }
}

/// The values without repetitions, in their order.
fn once_each<T: Copy + PartialEq>(values: Vec<T>) -> Vec<T> {
    let mut once = Vec::new();
    for value in values {
        if !once.contains(&value) {
            once.push(value);
        }
    }
    once
}

/// The MongoDB at this address, or a private one.
pub(super) fn choice(url: Option<&str>) -> Result<mongo::Choice, CommandError> {
    Ok(match url {
        Some(url) => mongo::Choice::Url(MongoUrl::parse(url)?),
        None => mongo::Choice::Private(sandbox::mongod()),
    })
}

/// Parses a multiple of the capacity.
pub(super) fn load(text: &str) -> Result<f64, String> {
    let load = text.parse::<f64>().ok().filter(|load| (0.1..=20.0).contains(load));
    load.ok_or_else(|| "write numbers from 0.1 to 20, such as 0.5,1,10".to_owned())
}

/// The arguments for a bench of the user's own deployment.
#[derive(Debug, Args)]
#[command(next_help_heading = "Your own deployment")]
pub(crate) struct DeploymentArgs {
    /// Send requests to this process instead of to servers that the bench starts.
    #[arg(long, value_name = "http://HOST:PORT", value_parser = site, requires = "route",
        conflicts_with_all = ["workloads", "loads", "rounds", "chart", "mongodb"])]
    pub(crate) url: Option<Url>,
    /// A class, a method, a path and optionally a JSON body: 'p1 GET /v1/pipelines'.
    #[arg(long, value_name = "ROUTE", requires = "url")]
    pub(crate) route: Vec<Route>,
    /// Requests per second of all routes together, in this order.
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "url", num_args = 1,
        default_values_t = [50, 100, 200, 400],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(deployment::RATE_MAX)))]
    pub(crate) rates: Vec<u32>,
    /// Deadline of each request, ms.
    #[arg(long, value_name = "MS", default_value = "1000", requires = "url",
        value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub(crate) deadline: u32,
    /// Maximum number of connections for each class.
    #[arg(long, value_name = "N", default_value = "200", requires = "url",
        value_parser = clap::value_parser!(u32).range(1..=2_000))]
    pub(crate) connections: u32,
    /// File with a token that each request carries.
    #[arg(long, value_name = "FILE", requires = "url")]
    pub(crate) token_file: Option<PathBuf>,
    /// Allow a process on another machine.
    #[arg(long, requires = "url")]
    pub(crate) remote: bool,
}

/// Parses `http://HOST:PORT`, without a path.
fn site(text: &str) -> Result<Url, String> {
    let example = "write http://HOST:PORT, such as http://127.0.0.1:8080";
    let url: Url = text.parse().map_err(|error| format!("{error}; {example}"))?;
    if url.scheme() != "http" {
        return Err(format!(
            "the scheme must be http; name the process behind the proxy: {example}"
        ));
    }
    let is_bare = matches!(url.path(), "" | "/") && url.query().is_none();
    if !is_bare || !url.username().is_empty() || url.password().is_some() {
        return Err(format!("the address must be a host and a port only; {example}"));
    }
    Ok(url)
}

/// Parses a share.
pub(super) fn share(text: &str) -> Result<f64, &'static str> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or("write a number from 0 to 1")
}
