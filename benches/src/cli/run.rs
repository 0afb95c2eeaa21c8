//! Runs a scenario.

use std::ffi::OsString;
use std::num::NonZeroU32;
use std::time::Duration;

use clap::{Parser as _, ValueEnum as _};
use fairlane::cli::CliError;
use indicatif::ProgressBar;
use url::Url;

use super::arguments::{BusArg, CountersArgs, DeploymentArgs, Handled, choice};
use super::campaigns::{print_faults, print_soak};
use super::show::{
    print, print_deployment, print_growth, print_isolation, print_limits, print_overload,
};
use super::show_peers::print_peers;
use super::{Cli, Scenario};
use crate::buses::{self, Bus};
use crate::error::CommandError;
use crate::isolation::{self, Resource};
use crate::overload::{self, Protection, Workload, deployment};
use crate::{
    automations, counters, fairness, faults, growth, http, latency, limits, notifications, peers,
    pipeline,
};

/// In ms. Clients that send later than planned by more than this are too slow for a measurement.
const LATE_MS: f64 = 2.0;

impl Cli {
    /// Runs the scenario and prints its report, or runs a server that a scenario has started.
    ///
    /// # Errors
    /// The text of the error is meant for the user. [`CommandError::exit`] returns its exit code.
    pub(crate) async fn run(self) -> Result<(), CommandError> {
        match self.scenario {
            Scenario::OverloadServer { workload, protection, rounds } => {
                serve_overload(workload, protection, rounds).await
            }
            Scenario::FaultsWorker { config, directory, process } => {
                Ok(Box::pin(faults::worker::run(&config, &directory, process)).await?)
            }
            Scenario::PeersWorker { system, url, directory, process } => {
                Ok(Box::pin(peers::campaign::worker::run(system, &url, &directory, process))
                    .await?)
            }
            Scenario::Serve { arguments } => Box::pin(serve(arguments)).await,
            scenario => Box::pin(bench(self.json, scenario)).await,
        }
    }
}

/// Runs the server of `overload`.
async fn serve_overload(
    workload: Workload,
    protection: Protection,
    rounds: u64,
) -> Result<(), CommandError> {
    // The bench needs a separate runtime, on a thread without one.
    let serving = std::thread::spawn(move || overload::server::serve(workload, protection, rounds));
    let ended = tokio::task::spawn_blocking(|| serving.join()).await;
    match ended {
        Ok(Ok(served)) => Ok(served?),
        _ => Err(CommandError::Server),
    }
}

/// Runs `fairlane serve`.
async fn serve(arguments: Vec<OsString>) -> Result<(), CommandError> {
    let words = ["fairlane", "serve"].map(OsString::from).into_iter().chain(arguments);
    let command = fairlane::cli::Cli::try_parse_from(words)?;
    Ok(Box::pin(command.run()).await?)
}

/// Runs a scenario and prints its report.
#[expect(clippy::too_many_lines, reason = "from the arguments of each scenario to its options")]
async fn bench(json: bool, scenario: Scenario) -> Result<(), CommandError> {
    let size = |number: NonZeroU32| usize::try_from(number.get()).unwrap_or(usize::MAX);
    let progress = Progress::new();
    let watch = |stage: &'static str, count: u64| progress.show(stage, count);
    match scenario {
        Scenario::Pipeline {
            handler: Handled::Automation,
            bus: BusArg::Nats | BusArg::Kafka,
            ..
        } => Err(CommandError::BusNeedsCheck),
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
            print(json, &report)?;
            faultless(verify, report.lost, report.repeated)
        }
        Scenario::Pipeline {
            handler,
            bots,
            events,
            bytes,
            workers,
            bus,
            server,
            partitions,
            rounds,
            without_history,
            verify,
            ..
        } => {
            let options = pipeline::Options {
                bots: bots.map_or(50_000, size),
                events: size(events),
                bytes: size(bytes),
                workers: size(workers),
                push: handler == Handled::Push,
                has_history: !without_history,
            };
            let bus = match bus {
                BusArg::Nats => Some(Bus::Nats),
                BusArg::Kafka => Some(Bus::Kafka),
                BusArg::Redis => None,
            };
            let Some(bus) = bus else {
                let report = Box::pin(pipeline::run(options, watch)).await?;
                progress.clear();
                print(json, &report)?;
                return faultless(verify, report.lost, report.reordered);
            };
            if options.push {
                return Err(CommandError::BusNeedsCheck);
            }
            let rounds = usize::try_from(rounds).unwrap_or(usize::MAX);
            let options = buses::Options { bus, server, partitions, rounds, load: options };
            let report = Box::pin(buses::run(options, watch)).await?;
            progress.clear();
            print(json, &report)?;
            faultless(verify, report.lost, report.reordered)
        }
        Scenario::Latency { bots, rate, seconds, workers, without_history, verify } => {
            let options = latency::Options {
                rate: rate.get().into(),
                seconds: seconds.get().into(),
                bots: size(bots),
                workers: size(workers),
                has_history: !without_history,
            };
            let report = Box::pin(latency::run(options, watch)).await?;
            progress.clear();
            print(json, &report)?;
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
            print(json, &report)
        }
        Scenario::Counters(counters) => {
            let report = Box::pin(counters::run(counters.options()?, watch)).await?;
            progress.clear();
            print(json, &report)?;
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
            print(json, &report)
        }
        Scenario::Growth { axes, events, rounds, chart, verify } => {
            let options = growth::Options {
                axes,
                events: usize::try_from(events).unwrap_or(usize::MAX),
                rounds: size(rounds),
            };
            let report = Box::pin(growth::run(&options, watch)).await?;
            progress.clear();
            if let Some(path) = &chart {
                std::fs::write(path, growth::svg(&report))
                    .map_err(|source| CommandError::WriteChart { path: path.clone(), source })?;
            }
            print_growth(json, &report)?;
            let sum = |of: fn(&growth::Figures) -> u64| {
                report.rows.iter().map(|row| of(&row.figures)).sum()
            };
            faultless(verify, sum(|row| row.lost), sum(|row| row.reordered))
        }
        Scenario::Overload { workloads, loads, seconds, rounds, chart, mongodb, deployment } => {
            if let Some(url) = deployment.url.clone() {
                let report = ask_deployment(url, *deployment, seconds.into(), watch).await?;
                progress.clear();
                return print_deployment(json, &report);
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
                    .map_err(|source| CommandError::WriteChart { path: path.clone(), source })?;
            }
            print_overload(json, &report)
        }
        Scenario::Isolation { seconds, rounds, only, mongodb } => {
            let all = || Resource::value_variants().to_vec();
            let options = isolation::Options {
                resources: if only.is_empty() { all() } else { only },
                seconds: seconds.into(),
                rounds: rounds.get().into(),
                mongo: choice(mongodb.as_deref())?,
            };
            let report = Box::pin(isolation::run(options, watch)).await?;
            progress.clear();
            print_isolation(json, &report)
        }
        Scenario::Limits { bots, rate, seconds, processes } => {
            let options = limits::Options {
                bots: bots.into(),
                rate: rate.into(),
                seconds: seconds.into(),
                processes: usize::try_from(processes).unwrap_or(usize::MAX),
            };
            let report = Box::pin(limits::run(options, watch)).await?;
            progress.clear();
            print_limits(json, &report)
        }
        Scenario::Peers(args) => {
            let report = Box::pin(peers::run(args.options()?, watch)).await?;
            progress.clear();
            print_peers(json, &report)
        }
        Scenario::Faults(args) => {
            let report = Box::pin(faults::run(args.options(), watch)).await?;
            progress.clear();
            print_faults(json, &report)
        }
        Scenario::Soak(args) => {
            let report = Box::pin(faults::soak::run(args.options(), watch)).await?;
            progress.clear();
            print_soak(json, &report)
        }
        Scenario::Plan(args) => Box::pin(args.run(json, watch, || progress.clear())).await,
        Scenario::OverloadServer { .. }
        | Scenario::Serve { .. }
        | Scenario::PeersWorker { .. }
        | Scenario::FaultsWorker { .. } => unreachable!("no scenario"),
        Scenario::Fairness {
            seconds,
            busy,
            backlog,
            quiet,
            rate,
            consumers,
            giant,
            lanes,
            seed,
        } => {
            let options = fairness::Options {
                busy: size(busy),
                backlog: size(backlog),
                quiet: size(quiet),
                quiet_rate: rate.get().into(),
                handling: Duration::from_millis(3),
                consumers: size(consumers),
                giant: usize::try_from(giant).unwrap_or(usize::MAX),
                window: Duration::from_secs(seconds.get().into()),
                lanes: lanes.into(),
                seed,
            };
            let report = Box::pin(fairness::run(options, watch)).await?;
            progress.clear();
            print(json, &report)
        }
    }
}

/// With `--verify`, a lost or reordered event fails the command.
fn faultless(verify: bool, lost: u64, reordered: u64) -> Result<(), CommandError> {
    if verify && lost + reordered > 0 {
        return Err(CliError::Faults { lost, reordered }.into());
    }
    Ok(())
}

/// Warns if the clients were too slow for a measurement. With `--verify`, wrong totals fail the
/// command.
fn judge(counters: &CountersArgs, report: &counters::Report) -> Result<(), CommandError> {
    let late = report.answered.late_p99_ms;
    if late > LATE_MS {
        eprintln!(
            "note: the clients of the bench could not keep up: 1 % of the requests were sent {late:.1} ms late or more, which is part of the times above; this machine is too small, or busy with other things"
        );
    }
    if counters.verify && !report.exact {
        return Err(CommandError::Inexact { ads: report.differ });
    }
    Ok(())
}

/// Warns the user about real requests, then measures a deployment.
async fn ask_deployment(
    url: Url,
    args: DeploymentArgs,
    seconds: u64,
    watch: impl FnMut(&'static str, u64),
) -> Result<deployment::Report, CommandError> {
    let DeploymentArgs { route: routes, rates, deadline, connections, token_file, remote, .. } =
        args;
    let steps = rates.len() as u64 + u64::from(rates.len() > 1);
    let (seconds_in_all, most) = (seconds * steps, deployment::SECONDS_MAX);
    if seconds_in_all > most {
        return Err(CommandError::TooLong { seconds: seconds_in_all, most });
    }
    if !remote && !deployment::is_loopback(&url).await? {
        return Err(CommandError::Remote(url.to_string()));
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

fn token_of(path: &std::path::Path) -> Result<String, CommandError> {
    let refused = |problem: String| CommandError::TokenFile { path: path.to_owned(), problem };
    let text = std::fs::read_to_string(path).map_err(|error| refused(error.to_string()))?;
    let token = text.trim();
    if token.is_empty() || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
        return Err(refused("it holds no token of visible characters".to_owned()));
    }
    Ok(token.to_owned())
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
