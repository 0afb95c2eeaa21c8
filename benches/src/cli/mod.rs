//! The command line.

mod arguments;
mod campaigns;
mod plan;
mod run;
mod show;
mod show_peers;

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::path::PathBuf;

use clap::{Parser, Subcommand, ValueEnum as _};
use fairlane::telemetry::LogFormat;

use self::arguments::{
    BusArg, CountersArgs, DeploymentArgs, FaultsArgs, Handled, PeersArgs, SoakArgs, load, share,
};
use self::plan::PlanArgs;
use crate::growth::Axis;
use crate::isolation::Resource;
use crate::overload::{Protection, Workload};
use crate::peers::System;

const EXAMPLES: &str = "\
Examples:
  fairlane-bench pipeline
  fairlane-bench latency --rate 5000 --seconds 10
  fairlane-bench fairness --json
  fairlane-bench counters --seconds 10
  fairlane-bench notifications --seconds 10
  fairlane-bench overload --workloads cpu,dependency
  fairlane-bench isolation --seconds 5
  fairlane-bench limits --seconds 10
  fairlane-bench faults --seed 7 --seconds 60
  fairlane-bench soak --seconds 14400 --chart soak.svg
  fairlane-bench peers --rounds 1
  fairlane-bench plan --events-per-second 20000 --bots 50000

Exit codes: 0 success, 1 failure, 64 bad usage, 69 a needed service is unavailable.";
const PIPELINE_EXAMPLES: &str = "\
Examples:
  fairlane-bench pipeline
  fairlane-bench pipeline --bots 500000 --events 500000 --json
  fairlane-bench pipeline --verify
  fairlane-bench pipeline --handler push --events 200000
  FAIRLANE_MONGOD=/opt/mongodb/bin/mongod fairlane-bench pipeline --handler automation
  fairlane-bench pipeline --bus nats
  fairlane-bench pipeline --bus kafka --partitions 16 --server kafka.test:9092

With --bus nats and --bus kafka, the events are also read from a Redis stream, by turns, and compared. In the
given server, the stream or topic fairlane-bench is deleted and made anew.";
const LATENCY_EXAMPLES: &str = "\
Examples:
  fairlane-bench latency
  fairlane-bench latency --rate 10000 --seconds 30 --json";
const FAIRNESS_EXAMPLES: &str = "\
Examples:
  fairlane-bench fairness
  fairlane-bench fairness --seed 7
  fairlane-bench fairness --lanes 8
  fairlane-bench fairness --giant 0 --seconds 10 --json";

const ISOLATION_EXAMPLES: &str = "\
Examples:
  fairlane-bench isolation
  fairlane-bench isolation --only tarpits --only shared-host --seconds 20
  FAIRLANE_MONGOD=/opt/mongodb/bin/mongod fairlane-bench isolation --json

A resource is isolated if the p99 of the quiet bots beside a hostile tenant is at most 1.5 times what
it is alone, or 25 ms above, and none of their work is refused or lost. Exit code 1: one is not.";

const LIMITS_EXAMPLES: &str = "\
Examples:
  fairlane-bench limits
  fairlane-bench limits --bots 20 --rate 5 --seconds 12 --json

Halfway, one process is killed and replaced. Windows over the rest of a bot whose slice the process
had do not count for its rate. Exit code 1: a figure is outside its bound.";

const SOAK_EXAMPLES: &str = "\
Examples:
  fairlane-bench soak --seconds 14400 --days 24 --chart soak.svg
  fairlane-bench soak --seconds 120 --days 4 --rate 200 --json
  fairlane-bench soak --state soak-data

Starts redis-server and the MongoDB of the tests, which `make setup` installs. Each day, the load has two
peaks, the processes are restarted one after the other, and the first one reloads its configuration.
After each day, the chart is drawn again. SIGTERM ends the day early: the night follows, then the report.
With --state, a soak is made of several runs: each one goes on with the data of the one before, until all
of them together have lasted --seconds.
Exit code 1: a promise did not hold, or something grows.";

const FAULTS_EXAMPLES: &str = "\
Examples:
  fairlane-bench faults --seed 7 --seconds 60
  fairlane-bench faults --seed 7 --seconds 3600 --rate 2000 --json
  fairlane-bench faults --only redis-killed --only process-frozen
  fairlane-bench faults --cluster --seed 7 --seconds 60
  fairlane-bench faults --seed 7 --shrink

Starts redis-server and the MongoDB of the tests, which `make setup` installs. A seed draws the same
faults again; what they meet differs. Exit code 1: a promise did not hold.";

const PEERS_EXAMPLES: &str = "\
Examples:
  fairlane-bench peers
  fairlane-bench peers --measures throughput --systems fairlane,groupmq --rounds 6 --json
  fairlane-bench peers --systems fairlane,xreadgroup
  fairlane-bench peers --measures faults --seed 7 --seconds 45

With --measures faults, every system gets the same events and the same faults at the same times: workers
and Redis are killed or frozen, and connections are cut. 50 tenants get 100 events a second; --tenants,
--events, --busy and --rate do not apply. A run of a system takes up to two minutes.

The other systems need Node.js 20 or later, and npm packages: `make peers` installs both.";

const GROWTH_EXAMPLES: &str = "\
Examples:
  fairlane-bench growth
  fairlane-bench growth --axes bots,shards --rounds 1 --json
  fairlane-bench growth --chart growth.svg

One size varies at a time. The others are: a tenth as many bots as events, 200 bytes, 16 shards, one
instance, one Redis. The axis `primaries` needs redis-server with clusters.";

const HTTP_EXAMPLES: &str = "\
Examples:
  fairlane-bench http
  fairlane-bench http --batch 1 --connections 32 --json";

const NOTIFICATIONS_EXAMPLES: &str = "\
Examples:
  fairlane-bench notifications
  fairlane-bench notifications --seconds 10 --idle 1000000 --json
  fairlane-bench notifications --seconds 10 --notifications 2000 --dead 10000 --hanging 5";

const OVERLOAD_EXAMPLES: &str = "\
Examples:
  fairlane-bench overload
  fairlane-bench overload --workloads cpu,dependency --rounds 1 --json
  fairlane-bench overload --chart overload.svg

Your own deployment: each rate runs for some seconds, and the first rate runs again at the end. The
requests are real and have their effects. Other clients of that process may be refused meanwhile.
  fairlane-bench overload --url http://127.0.0.1:8080 --rates 100,200,400 \\
    --route 'p0 GET /healthz' --route 'p1 GET /v1/bots/shop-{n}/counters?ids=ad-1'
  fairlane-bench overload --url http://10.0.0.7:8080 --remote --token-file bench.token \\
    --route 'p2 POST /v1/bots/shop-{n}/automations/test {\"event\":{\"type\":\"x\"}}' --json

In a path or body, {n} is a number from 0 to 99. Every route gets the same share of the requests;
write a route twice for two shares. The class is that of the route, or a lower one.";

const COUNTERS_EXAMPLES: &str = "\
Examples:
  fairlane-bench counters
  FAIRLANE_MONGOD=/opt/mongodb/bin/mongod fairlane-bench counters --saturate --json
  fairlane-bench counters --mongodb mongodb://127.0.0.1:27017
  fairlane-bench counters --rate 0 --views 10000 --seconds 10 --verify";

/// Measures the performance of this machine, or of your own deployment.
#[derive(Debug, Parser)]
#[command(name = "fairlane-bench", version, after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct Cli {
    /// Print one JSON object instead of a table.
    #[arg(long, global = true)]
    json: bool,
    /// The format of log lines. RUST_LOG sets the level.
    #[arg(long, global = true, value_name = "FORMAT", value_enum, default_value_t)]
    log_format: LogFormat,
    /// The scenario to measure.
    #[command(subcommand)]
    scenario: Scenario,
}

/// The scenario to measure.
#[derive(Debug, Subcommand)]
pub(crate) enum Scenario {
    /// Measure throughput from the bus through the queues to a handler that does nothing.
    #[command(after_help = PIPELINE_EXAMPLES)]
    Pipeline {
        /// The handler of the events.
        #[arg(long, value_enum, default_value_t = Handled::Check)]
        handler: Handled,
        /// Number of bots that the events are spread over. Default: 50000; with rules 1000.
        #[arg(long, value_name = "N")]
        bots: Option<NonZeroU32>,
        /// Number of events.
        #[arg(long, value_name = "N", default_value = "500000")]
        events: NonZeroU32,
        /// Size of an event on the bus. With rules: about 200.
        #[arg(long, value_name = "BYTES", default_value = "200")]
        bytes: NonZeroU32,
        /// Maximum number of workers.
        #[arg(long, value_name = "N", default_value = "64")]
        workers: NonZeroU32,
        /// Number of rules per bot.
        #[arg(long, value_name = "N", default_value = "20", value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rules: u32,
        /// Share of the events that a rule matches.
        #[arg(long, value_name = "0..1", default_value = "0.05", value_parser = share)]
        matching: f64,
        /// The MongoDB for rules and profiles, in a database that is dropped at the end. Default: a
        /// server that the bench starts (mongod, or the program that `FAIRLANE_MONGOD` names).
        #[arg(long, value_name = "URL")]
        mongodb: Option<String>,
        /// The bus. Those beside Redis need the handler `check`.
        #[arg(long, value_enum, default_value_t = BusArg::Redis)]
        bus: BusArg,
        /// The server of --bus nats or kafka. Default: a private one (nats-server or noida-db, or the
        /// program that `FAIRLANE_NATS_SERVER` or `FAIRLANE_NOIDA_DB` names).
        #[arg(long, value_name = "HOST:PORT")]
        server: Option<String>,
        /// Number of partitions of the topic of --bus kafka.
        #[arg(long, value_name = "N", default_value = "1", value_parser = clap::value_parser!(u16).range(1..=1_000))]
        partitions: u16,
        /// Number of rounds of --bus nats or kafka. Figures are medians.
        #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=100))]
        rounds: u32,
        /// Keep no attempts (`history.slices = 0`), to see what they cost.
        #[arg(long)]
        without_history: bool,
        /// Fail if an event is lost or handled out of order. Both are always counted.
        #[arg(long)]
        verify: bool,
    },
    /// Measure goodput and latency at up to ten times the capacity.
    #[command(after_help = OVERLOAD_EXAMPLES)]
    Overload {
        /// The resource that requests need.
        #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST",
            default_values_t = [Workload::Cpu, Workload::Dependency, Workload::Reads])]
        workloads: Vec<Workload>,
        /// Offered load as multiples of the capacity, in this order. Default: 0.5 to 10; for reads
        /// 0.5 to 3.
        #[arg(long, value_delimiter = ',', value_name = "LIST", value_parser = load)]
        loads: Vec<f64>,
        /// Duration of each load.
        #[arg(long, value_name = "S", default_value = "3", value_parser = clap::value_parser!(u32).range(1..=300))]
        seconds: u32,
        /// Number of rounds. Figures are medians over the rounds.
        #[arg(long, value_name = "N", default_value = "3")]
        rounds: NonZeroU32,
        /// Write a chart of goodput and p99 over the load to this file, as SVG.
        #[arg(long, value_name = "FILE")]
        chart: Option<PathBuf>,
        /// The MongoDB for the views of `reads`, in a database that is dropped at the end. Default:
        /// a server that the bench starts (mongod, or the program that `FAIRLANE_MONGOD` names).
        #[arg(long, value_name = "URL")]
        mongodb: Option<String>,
        #[command(flatten)]
        deployment: Box<DeploymentArgs>,
    },
    /// The server that `overload` sends requests to. `overload` starts it itself.
    #[command(hide = true)]
    OverloadServer {
        /// The resource that requests need.
        #[arg(long, value_enum)]
        workload: Workload,
        /// The protection of the workload against overload.
        #[arg(long, value_enum)]
        protection: Protection,
        /// Rounds of the loop that a request needs the processor for.
        #[arg(long)]
        rounds: u64,
    },
    /// Measure the time from publishing to handling, at a steady rate.
    #[command(after_help = LATENCY_EXAMPLES)]
    Latency {
        /// Number of bots that the events are spread over.
        #[arg(long, value_name = "N", default_value = "10000")]
        bots: NonZeroU32,
        /// Events per second.
        #[arg(long, value_name = "EVENTS_PER_S", default_value = "5000")]
        rate: NonZeroU32,
        /// Duration.
        #[arg(long, value_name = "S", default_value = "10")]
        seconds: NonZeroU32,
        /// Maximum number of workers.
        #[arg(long, value_name = "N", default_value = "64")]
        workers: NonZeroU32,
        /// Keep no attempts (`history.slices = 0`), to see what they cost.
        #[arg(long)]
        without_history: bool,
        /// Fail if an event is lost or handled out of order. Both are always counted.
        #[arg(long)]
        verify: bool,
    },
    /// Compare publishing over HTTP with direct XADD.
    #[command(after_help = HTTP_EXAMPLES)]
    Http {
        /// Number of events each way.
        #[arg(long, value_name = "N", default_value = "500000")]
        events: NonZeroU32,
        /// Events per request, up to 1000.
        #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=1_000))]
        batch: u32,
        /// Size of an event.
        #[arg(long, value_name = "BYTES", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=1_000))]
        bytes: u32,
        /// Number of connections each way.
        #[arg(long, value_name = "N", default_value = "8", value_parser = clap::value_parser!(u32).range(1..=1_000))]
        connections: u32,
    },
    /// Measure reads of totals and writes of views over HTTP at steady rates, then check every ad.
    #[command(after_help = COUNTERS_EXAMPLES)]
    Counters(CountersArgs),
    /// Measure how late notifications are sent: spread over time, all due together, and beside dead
    /// hosts.
    #[command(after_help = NOTIFICATIONS_EXAMPLES)]
    Notifications {
        /// Number of notifications in each part.
        #[arg(long, value_name = "N", default_value = "10000")]
        notifications: NonZeroU32,
        /// They fall due evenly over this time.
        #[arg(long, value_name = "S", default_value = "60")]
        seconds: NonZeroU32,
        /// Number of bots that they are spread over.
        #[arg(long, value_name = "N", default_value = "100")]
        bots: NonZeroU32,
        /// Number of further notifications, due tomorrow.
        #[arg(long, value_name = "N", default_value = "0")]
        idle: u32,
        /// Number of further notifications of one bot to a dead host, in a third part.
        #[arg(long, value_name = "N", default_value = "0")]
        dead: u32,
        /// Number of hosts in that part that never answer. Each has a hundred notifications.
        #[arg(long, value_name = "N", default_value = "0")]
        hanging: u32,
    },
    /// Measure how throughput, latency, memory and idle commands grow with each size.
    #[command(after_help = GROWTH_EXAMPLES)]
    Growth {
        /// The sizes that vary, one at a time.
        #[arg(long, value_enum, value_delimiter = ',', value_name = "LIST",
            default_values_t = Axis::value_variants().to_vec())]
        axes: Vec<Axis>,
        /// Number of events in a backlog. At least one per bot; large events are fewer.
        #[arg(long, value_name = "N", default_value = "200000",
            value_parser = clap::value_parser!(u32).range(1_000..=10_000_000))]
        events: u32,
        /// Number of rounds. Figures are medians over the rounds.
        #[arg(long, value_name = "N", default_value = "3")]
        rounds: NonZeroU32,
        /// Write a chart of throughput and Redis' processor time to this file, as SVG.
        #[arg(long, value_name = "FILE")]
        chart: Option<PathBuf>,
        /// Fail if an event is lost or handled out of order. Both are always counted.
        #[arg(long)]
        verify: bool,
    },
    /// Measure how much busy bots delay quiet bots.
    #[command(after_help = FAIRNESS_EXAMPLES)]
    Fairness {
        /// Maximum time that the quiet bots are measured beside the backlog.
        #[arg(long, value_name = "S", default_value = "20")]
        seconds: NonZeroU32,
        /// Number of bots with a backlog. One more has weight 3.
        #[arg(long, value_name = "N", default_value = "20")]
        busy: NonZeroU32,
        /// Number of events of each of them.
        #[arg(long, value_name = "N", default_value = "5000")]
        backlog: NonZeroU32,
        /// Number of quiet bots.
        #[arg(long, value_name = "N", default_value = "500")]
        quiet: NonZeroU32,
        /// Events per second of all quiet bots together.
        #[arg(long, value_name = "EVENTS_PER_S", default_value = "100")]
        rate: NonZeroU32,
        /// Number of workers in two instances together. The handler takes 3 ms per event.
        #[arg(long, value_name = "N", default_value = "8")]
        consumers: NonZeroU32,
        /// Number of events of one more, very large bot; 0: none.
        #[arg(long, value_name = "N", default_value = "1000000")]
        giant: u32,
        /// Maximum number of lanes of a bot that are handled concurrently. The busy bots then have 1 to 10,000
        /// ordering keys. 0: bots have no lanes.
        #[arg(long, value_name = "N", default_value = "0", value_parser = clap::value_parser!(u8).range(0..=64))]
        lanes: u8,
        /// Another seed has the quiet events in another order, and the bots in other shards.
        #[arg(long, value_name = "N", default_value = "13")]
        seed: u64,
    },
    /// Measure what a hostile tenant does to quiet ones, for each resource that all bots share.
    #[command(after_help = ISOLATION_EXAMPLES)]
    Isolation {
        /// Duration of each phase: in each round one alone and one beside the hostile tenant, per resource.
        #[arg(long, value_name = "S", default_value = "5", value_parser = clap::value_parser!(u32).range(1..=300))]
        seconds: u32,
        /// Number of rounds, each with a new process. Figures are over all rounds.
        #[arg(long, value_name = "N", default_value = "2")]
        rounds: NonZeroU32,
        /// Measure only this resource. Can be repeated. Default: all.
        #[arg(long, value_enum, value_name = "NAME")]
        only: Vec<Resource>,
        /// The MongoDB for rules and exports, in a database that is dropped at the end. Default: a
        /// server that the bench starts (mongod, or the program that `FAIRLANE_MONGOD` names).
        #[arg(long, value_name = "URL")]
        mongodb: Option<String>,
    },
    /// Measure whether each bot gets its rate and never more, over processes of which one is killed.
    #[command(after_help = LIMITS_EXAMPLES)]
    Limits {
        /// Number of bots with a rate.
        #[arg(long, value_name = "N", default_value = "100", value_parser = clap::value_parser!(u32).range(1..=5_000))]
        bots: u32,
        /// Events per second of each of them. Its bucket holds those of one second.
        #[arg(long, value_name = "EVENTS_PER_S", default_value = "10", value_parser = clap::value_parser!(u32).range(1..=1_000))]
        rate: u32,
        /// Duration. A window is 5 s long, or a third of this.
        #[arg(long, value_name = "S", default_value = "30", value_parser = clap::value_parser!(u32).range(2..=600))]
        seconds: u32,
        /// Number of processes.
        #[arg(long, value_name = "N", default_value = "3", value_parser = clap::value_parser!(u32).range(2..=16))]
        processes: u32,
    },
    /// Run every product under random faults, and check that nothing is lost, repeated or reordered.
    #[command(after_help = FAULTS_EXAMPLES)]
    Faults(FaultsArgs),
    /// Run every product for hours with the load of many days, and check everything each night.
    #[command(after_help = SOAK_EXAMPLES)]
    Soak(SoakArgs),
    /// A process of `faults` and `soak`, which start it themselves.
    #[command(hide = true)]
    FaultsWorker {
        /// The configuration.
        #[arg(long)]
        config: PathBuf,
        /// The directory of the histories.
        #[arg(long)]
        directory: PathBuf,
        /// The number of the process.
        #[arg(long)]
        process: u32,
    },
    /// Compute what a load needs of Redis, Fairlane and MongoDB, from a measured model.
    #[command(after_help = plan::EXAMPLES)]
    Plan(Box<PlanArgs>),
    /// Compare with other queues on Redis: GroupMQ, BullMQ, and a plain worker of a stream.
    #[command(after_help = PEERS_EXAMPLES)]
    Peers(Box<PeersArgs>),
    /// A worker of `peers` under faults, which starts it itself.
    #[command(hide = true)]
    PeersWorker {
        /// What it is: `fairlane` or `xreadgroup`.
        #[arg(long, value_enum)]
        system: System,
        /// The address of Redis.
        #[arg(long)]
        url: String,
        /// The directory of the histories.
        #[arg(long)]
        directory: PathBuf,
        /// The number of the process.
        #[arg(long)]
        process: u32,
    },
    /// `fairlane serve`, with the same arguments. `overload` starts it itself.
    #[command(hide = true)]
    Serve {
        /// The arguments of `fairlane serve`.
        #[arg(last = true)]
        arguments: Vec<OsString>,
    },
}

impl Cli {
    /// The format of log lines, from `--log-format`.
    pub(crate) fn log_format(&self) -> LogFormat {
        self.log_format
    }
}

#[cfg(test)]
mod tests;
