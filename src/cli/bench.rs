//! `fairlane bench`.

use std::fmt::Write as _;
use std::num::NonZeroU32;
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, Subcommand};
use indicatif::ProgressBar;
use serde::Serialize;
use serde_json::Value;

use super::error::CliError;
use super::output::{Output, Table};
use crate::bench::overload::deployment::{self, Route};
use crate::bench::overload::{self, Protection, Workload};
use crate::bench::{
    automations, counters, fairness, http, latency, mongo, notifications, pipeline,
};
use crate::config::{self, MongoUrl};

const EXAMPLES: &str = "\
Examples:
  fairlane bench pipeline
  fairlane bench latency --rate 5000 --seconds 10
  fairlane bench fairness --json
  fairlane bench counters --seconds 10
  fairlane bench notifications --seconds 10
  fairlane bench overload --workloads cpu,dependency";
const PIPELINE_EXAMPLES: &str = "\
Examples:
  fairlane bench pipeline
  fairlane bench pipeline --bots 500000 --events 500000 --json
  fairlane bench pipeline --verify
  FAIRLANE_MONGOD=/opt/mongodb/bin/mongod fairlane bench pipeline --handler automation";
const LATENCY_EXAMPLES: &str = "\
Examples:
  fairlane bench latency
  fairlane bench latency --rate 10000 --seconds 30 --json";
const FAIRNESS_EXAMPLES: &str = "\
Examples:
  fairlane bench fairness
  fairlane bench fairness --giant 0 --seconds 10 --json";

const HTTP_EXAMPLES: &str = "\
Examples:
  fairlane bench http
  fairlane bench http --batch 1 --connections 32 --json";

const NOTIFICATIONS_EXAMPLES: &str = "\
Examples:
  fairlane bench notifications
  fairlane bench notifications --seconds 10 --idle 1000000 --json
  fairlane bench notifications --seconds 10 --notifications 2000 --dead 10000 --hanging 5";

const OVERLOAD_EXAMPLES: &str = "\
Examples:
  fairlane bench overload
  fairlane bench overload --workloads cpu,dependency --rounds 1 --json
  fairlane bench overload --chart overload.svg

Your own deployment: each rate runs for some seconds, and the first rate runs again at the end. The
requests are real and have their effects. Other clients of that process may be refused meanwhile.
  fairlane bench overload --url http://127.0.0.1:8080 --rates 100,200,400 \\
    --route 'p0 GET /healthz' --route 'p1 GET /v1/bots/shop-{n}/counters?ids=ad-1'
  fairlane bench overload --url http://10.0.0.7:8080 --remote --token-file bench.token \\
    --route 'p2 POST /v1/bots/shop-{n}/automations/test {\"event\":{\"type\":\"x\"}}' --json

In a path or body, {n} is a number from 0 to 99. Every route gets the same share of the requests;
write a route twice for two shares. The class is that of the route, or a lower one.";

const COUNTERS_EXAMPLES: &str = "\
Examples:
  fairlane bench counters
  FAIRLANE_MONGOD=/opt/mongodb/bin/mongod fairlane bench counters --saturate --json
  fairlane bench counters --mongodb mongodb://127.0.0.1:27017
  fairlane bench counters --rate 0 --views 10000 --seconds 10 --verify";

/// Milliseconds. Clients that send later than planned by more than this are too slow to measure
/// with.
const LATE_MS: f64 = 2.0;

/// Arguments of `fairlane bench`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct BenchArgs {
    /// Print one JSON object instead of a table.
    #[arg(long, global = true)]
    pub json: bool,
    /// The scenario to measure.
    #[command(subcommand)]
    pub scenario: Scenario,
}

/// The scenario to measure.
#[derive(Debug, Subcommand)]
pub enum Scenario {
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
        /// What protects the workload from overload.
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
    },
}

/// The handler of the events of `fairlane bench pipeline`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Handled {
    /// A handler that only checks the order.
    Check,
    /// The rules of the bots, in MongoDB.
    Automation,
}

/// Arguments of `fairlane bench counters`.
#[derive(Debug, Args)]
pub struct CountersArgs {
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
    verify: bool,
}

impl CountersArgs {
    fn options(&self) -> Result<counters::Options, CliError> {
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

/// The MongoDB at this address, or a private one.
fn choice(url: Option<&str>) -> Result<mongo::Choice, CliError> {
    Ok(match url {
        Some(url) => mongo::Choice::Url(MongoUrl::parse(url)?),
        None => mongo::Choice::Private(config::mongod()),
    })
}

/// Parses a multiple of the capacity.
fn load(text: &str) -> Result<f64, String> {
    let load = text.parse::<f64>().ok().filter(|load| (0.1..=20.0).contains(load));
    load.ok_or_else(|| "write numbers from 0.1 to 20, such as 0.5,1,10".to_owned())
}

/// The arguments for a bench of the user's own deployment.
#[derive(Debug, Args)]
#[command(next_help_heading = "Your own deployment")]
pub struct DeploymentArgs {
    /// Send requests to this process instead of to servers that the bench starts.
    #[arg(long, value_name = "http://HOST:PORT", value_parser = site, requires = "route",
        conflicts_with_all = ["workloads", "loads", "rounds", "chart", "mongodb"])]
    pub url: Option<reqwest::Url>,
    /// A class, a method, a path and optionally a JSON body: 'p1 GET /v1/pipelines'.
    #[arg(long, value_name = "ROUTE", requires = "url")]
    pub route: Vec<Route>,
    /// Requests per second of all routes together, in this order.
    #[arg(long, value_delimiter = ',', value_name = "LIST", requires = "url", num_args = 1,
        default_values_t = [50, 100, 200, 400],
        value_parser = clap::value_parser!(u32).range(1..=i64::from(deployment::RATE_MAX)))]
    pub rates: Vec<u32>,
    /// Deadline of each request, ms.
    #[arg(long, value_name = "MS", default_value = "1000", requires = "url",
        value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub deadline: u32,
    /// Maximum number of connections for each class.
    #[arg(long, value_name = "N", default_value = "200", requires = "url",
        value_parser = clap::value_parser!(u32).range(1..=2_000))]
    pub connections: u32,
    /// File with a token that each request carries.
    #[arg(long, value_name = "FILE", requires = "url")]
    pub token_file: Option<PathBuf>,
    /// Allow a process on another machine.
    #[arg(long, requires = "url")]
    pub remote: bool,
}

/// Parses `http://HOST:PORT`, without a path.
fn site(text: &str) -> Result<reqwest::Url, String> {
    let example = "write http://HOST:PORT, such as http://127.0.0.1:8080";
    let url: reqwest::Url = text.parse().map_err(|error| format!("{error}; {example}"))?;
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

fn share(text: &str) -> Result<f64, &'static str> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or("write a number from 0 to 1")
}

/// Runs a scenario and prints its report.
#[expect(clippy::too_many_lines, reason = "from the arguments of each scenario to its options")]
pub(super) async fn bench(args: BenchArgs) -> Result<(), CliError> {
    let size = |number: NonZeroU32| usize::try_from(number.get()).unwrap_or(usize::MAX);
    if let Scenario::OverloadServer { workload, protection, rounds } = args.scenario {
        // The bench needs a runtime of its own, on a thread that is in none.
        let serving =
            std::thread::spawn(move || overload::server::serve(workload, protection, rounds));
        let ended = tokio::task::spawn_blocking(|| serving.join()).await;
        return match ended {
            Ok(Ok(served)) => Ok(served?),
            _ => Err(CliError::BenchServer),
        };
    }
    let progress = Progress::new();
    let watch = |stage: &'static str, count: u64| progress.show(stage, count);
    match args.scenario {
        Scenario::Pipeline {
            handler: Handled::Automation,
            bots,
            events,
            workers,
            rules,
            matching,
            mongodb,
            verify,
            ..
        } => {
            let options = automations::Options {
                bots: bots.map_or(1_000, size),
                events: size(events),
                rules: usize::try_from(rules).unwrap_or(usize::MAX),
                matching,
                workers: size(workers),
                mongo: choice(mongodb.as_deref())?,
            };
            let report = Box::pin(automations::run(options, watch)).await?;
            progress.clear();
            print(args.json, &report)?;
            faultless(verify, report.lost, report.repeated)
        }
        Scenario::Pipeline { bots, events, bytes, workers, verify, .. } => {
            let options = pipeline::Options {
                bots: bots.map_or(50_000, size),
                events: size(events),
                bytes: size(bytes),
                workers: size(workers),
            };
            let report = Box::pin(pipeline::run(options, watch)).await?;
            progress.clear();
            print(args.json, &report)?;
            faultless(verify, report.lost, report.reordered)
        }
        Scenario::Latency { bots, rate, seconds, workers, verify } => {
            let options = latency::Options {
                rate: rate.get().into(),
                seconds: seconds.get().into(),
                bots: size(bots),
                workers: size(workers),
            };
            let report = Box::pin(latency::run(options, watch)).await?;
            progress.clear();
            print(args.json, &report)?;
            faultless(verify, report.lost, report.reordered)
        }
        Scenario::Http { events, batch, bytes, connections } => {
            let many = |number: u32| usize::try_from(number).unwrap_or(usize::MAX);
            let options = http::Options {
                events: size(events),
                batch: many(batch),
                bytes: many(bytes),
                connections: many(connections),
            };
            let report = Box::pin(http::run(options, watch)).await?;
            progress.clear();
            print(args.json, &report)
        }
        Scenario::Counters(counters) => {
            let report = Box::pin(counters::run(counters.options()?, watch)).await?;
            progress.clear();
            print(args.json, &report)?;
            judge(&counters, &report)
        }
        Scenario::Notifications { notifications, seconds, bots, idle, dead, hanging } => {
            let options = notifications::Options {
                notifications: notifications.get().into(),
                seconds: seconds.get().into(),
                bots: bots.get().into(),
                idle: idle.into(),
                dead: dead.into(),
                hanging: hanging.into(),
            };
            let report = Box::pin(notifications::run(options, watch)).await?;
            progress.clear();
            print(args.json, &report)
        }
        Scenario::Overload { workloads, loads, seconds, rounds, chart, mongodb, deployment } => {
            if let Some(url) = deployment.url.clone() {
                let report = ask_deployment(url, *deployment, seconds.into(), watch).await?;
                progress.clear();
                return print_deployment(args.json, &report);
            }
            let options = overload::Options {
                workloads,
                loads,
                seconds: seconds.into(),
                rounds: size(rounds),
                mongo: choice(mongodb.as_deref())?,
            };
            let report = Box::pin(overload::run(options, watch)).await?;
            progress.clear();
            if let Some(path) = &chart {
                overload::draw(&report, path)
                    .map_err(|source| CliError::WriteChart { path: path.clone(), source })?;
            }
            print_overload(args.json, &report)
        }
        Scenario::OverloadServer { .. } => unreachable!("ended above"),
        Scenario::Fairness { seconds, busy, backlog, quiet, rate, consumers, giant } => {
            let options = fairness::Options {
                busy: size(busy),
                backlog: size(backlog),
                quiet: size(quiet),
                quiet_rate: rate.get().into(),
                handling: Duration::from_millis(3),
                consumers: size(consumers),
                giant: usize::try_from(giant).unwrap_or(usize::MAX),
                window: Duration::from_secs(seconds.get().into()),
            };
            let report = Box::pin(fairness::run(options, watch)).await?;
            progress.clear();
            print(args.json, &report)
        }
    }
}

/// With `--verify`, a lost or reordered event fails the command.
fn faultless(verify: bool, lost: u64, reordered: u64) -> Result<(), CliError> {
    if verify && lost + reordered > 0 {
        return Err(CliError::Faults { lost, reordered });
    }
    Ok(())
}

/// Warns if the clients were too slow to measure with.
fn judge(counters: &CountersArgs, report: &counters::Report) -> Result<(), CliError> {
    let late = report.answered.late_p99_ms;
    if late > LATE_MS {
        eprintln!(
            "note: the clients of the bench could not keep up: 1 % of the requests were sent {late:.1} ms late or more, which is part of the times above; this machine is too small, or busy with other things"
        );
    }
    if counters.verify && !report.exact {
        return Err(CliError::Inexact { ads: report.differ });
    }
    Ok(())
}

/// Prints the fields of the report, one per line, or as JSON.
fn print(json: bool, report: &impl Serialize) -> Result<(), CliError> {
    let report = serde_json::to_value(report).map_err(CliError::Json)?;
    Output::new(json).show(&report, |report| {
        let fields = report.as_object().into_iter().flatten();
        // Lists are shown only in JSON.
        let fields = fields.filter(|(_, value)| !value.is_array());
        let width = fields.clone().map(|(name, _)| name.len()).max().unwrap_or(0);
        let line = |(name, value): (&String, &Value)| {
            let text = match value {
                Value::Null => "-".to_owned(),
                Value::Number(number) if number.is_f64() => {
                    format!("{:.3}", number.as_f64().unwrap_or_default())
                }
                other => other.to_string(),
            };
            format!("{:<width$}  {text:>14}", name.replace('_', " "))
        };
        fields.map(line).collect::<Vec<_>>().join("\n")
    })
}

/// Warns the user about real requests, then measures a deployment.
async fn ask_deployment(
    url: reqwest::Url,
    args: DeploymentArgs,
    seconds: u64,
    watch: impl FnMut(&'static str, u64),
) -> Result<deployment::Report, CliError> {
    let DeploymentArgs { route: routes, rates, deadline, connections, token_file, remote, .. } =
        args;
    let steps = rates.len() as u64 + u64::from(rates.len() > 1);
    let (seconds_in_all, most) = (seconds * steps, deployment::SECONDS_MAX);
    if seconds_in_all > most {
        return Err(CliError::BenchTooLong { seconds: seconds_in_all, most });
    }
    if !remote && !deployment::is_loopback(&url).await? {
        return Err(CliError::Remote(url.to_string()));
    }
    let token = token_file.map(|path| token_of(&path)).transpose()?;
    eprintln!(
        "note: {url} receives up to {} requests a second for {} s in all; the requests are real, and other clients may be refused meanwhile",
        rates.iter().max().copied().unwrap_or_default(),
        seconds_in_all,
    );
    let options = deployment::Options {
        url,
        routes,
        token,
        rates,
        seconds,
        deadline: Duration::from_millis(deadline.into()),
        connections: connections as usize,
    };
    Ok(deployment::run(options, watch).await?)
}

fn token_of(path: &std::path::Path) -> Result<String, CliError> {
    let refused = |problem: String| CliError::TokenFile { path: path.to_owned(), problem };
    let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let token = text.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refused("it holds no token of visible characters".to_owned()));
    }
    Ok(token.to_owned())
}

/// A line per rate and class.
fn print_deployment(json: bool, report: &deployment::Report) -> Result<(), CliError> {
    let output = Output::new(json);
    output.show(report, |report| {
        let mut table = Table::new(&[
            ">RATE/S",
            "CLASS",
            ">ASKED",
            ">IN TIME/S",
            ">SUCCESS",
            ">P50 MS",
            ">P99 MS",
            ">SHED",
            ">LATE",
            ">FAILED",
        ]);
        for step in &report.steps {
            for class in &step.classes {
                let again = if step.again { " again" } else { "" };
                table.row(&[
                    format!("{}{again}", step.rate),
                    class.class.to_owned(),
                    class.offered.to_string(),
                    format!("{:.1}", class.in_time_per_second),
                    format!("{:.4}", class.success),
                    format!("{:.1}", class.p50_ms),
                    format!("{:.1}", class.p99_ms),
                    class.shed.to_string(),
                    class.late.to_string(),
                    class.failed.to_string(),
                ]);
            }
        }
        output.table(&table)
    })?;
    let lag = report.steps.iter().map(|step| step.lag_p99_ms).fold(0.0, f64::max);
    if lag > overload::LAG_MAX_MS {
        eprintln!(
            "note: this machine could not keep up: at one rate 1 % of the requests were sent {lag:.1} ms late or more; ask from another machine, or for less"
        );
    }
    Ok(())
}

/// A table per workload, and its curve.
fn print_overload(json: bool, report: &overload::Report) -> Result<(), CliError> {
    let value = serde_json::to_value(report).map_err(CliError::Json)?;
    Output::new(json).show(&value, |_| {
        let mut text = String::new();
        for figures in &report.workloads {
            let name = serde_json::to_value(figures.workload).unwrap_or_default();
            let _ = writeln!(text, "{}", name.as_str().unwrap_or_default());
            let fields = serde_json::to_value(figures).unwrap_or_default();
            let fields = fields.as_object().into_iter().flatten();
            for (name, value) in fields.filter(|(_, value)| value.is_number()) {
                let value = value.as_f64().unwrap_or_default();
                let _ = writeln!(text, "  {:<24} {value:>12.3}", name.replace('_', " "));
            }
            let _ = writeln!(
                text,
                "  {:<10} {:>6} {:>12} {:>8} {:>8} {:>8} {:>9} {:>9} {:>9}",
                "before it", "load", "in time/s", "p99 ms", "p0", "p1", "shed", "late", "failed"
            );
            for point in &figures.curve {
                let protection = serde_json::to_value(point.protection).unwrap_or_default();
                let _ = writeln!(
                    text,
                    "  {:<10} {:>5}x {:>12.0} {:>8.1} {:>8.4} {:>8.4} {:>9} {:>9} {:>9}",
                    protection.as_str().unwrap_or_default(),
                    point.load,
                    point.goodput_per_second,
                    point.p99_ms,
                    point.p0_success,
                    point.p1_success,
                    point.shed,
                    point.late,
                    point.failed
                );
            }
            text.push('\n');
        }
        if let Some(flood) = report.flood {
            let _ = writeln!(
                text,
                "beside {} connections that send slowly or nothing: p0 {:.4}, p1 {:.4}, p99 {:.1} ms",
                flood.connections, flood.p0_success, flood.p1_success, flood.p1_p99_ms
            );
        }
        text.trim_end().to_owned()
    })?;
    let worst = |figure: fn(&overload::Figures) -> f64| {
        report.workloads.iter().map(figure).fold(0.0, f64::max)
    };
    let away = worst(|figures| figures.away);
    if away > overload::AWAY_MAX {
        eprintln!(
            "note: in five tries of one run the machine withheld the processor from the server for {:.1} % of the time or more; its figures say nothing, run it again on a machine with less to do",
            away * 100.0
        );
    }
    let speed = worst(|figures| figures.speed);
    if speed > overload::SPEED_MAX {
        eprintln!(
            "note: in five tries of one run the server's processor was faster or slower by {:.0} % than while the capacity was measured; its figures say nothing, run it again on a machine with less to do",
            speed * 100.0
        );
    }
    let lag = worst(|figures| figures.lag_p99_ms);
    if lag > overload::LAG_MAX_MS {
        eprintln!(
            "note: the generator could not keep up, in five tries: in one run 1 % of the requests were sent {lag:.1} ms late or more; its figures say nothing, run it again on a machine with less to do"
        );
    }
    Ok(())
}

/// Shows the current step on a terminal.
struct Progress(ProgressBar);

impl Progress {
    fn new() -> Self {
        let bar = ProgressBar::new_spinner();
        bar.enable_steady_tick(Duration::from_millis(200));
        Self(bar)
    }

    fn show(&self, stage: &'static str, count: u64) {
        self.0.set_message(if count == 0 { stage.to_owned() } else { format!("{stage}: {count}") });
    }

    fn clear(&self) {
        self.0.finish_and_clear();
    }
}
