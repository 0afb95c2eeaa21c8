//! `fairlane bus`.

use std::collections::BTreeMap;
use std::sync::Arc;

use clap::{Args, Subcommand};
use redis::Value;
use serde::Serialize;

use super::error::CliError;
use super::output::{self, Output, Table, number};
use super::session::Session;
use crate::app::buses::Buses;
use crate::bus::Source;
use crate::bus::redis_stream::RedisStream;
use crate::clock::SystemClock;
use crate::config::Config;
use crate::fanout::starts;
use crate::id::{Offset, PipelineName};
use crate::redis::keys;
use crate::redis::scripts::{Advance, Advanced, Span};
use crate::trail::Action as Act;

const LIST: &str = "\
Examples:
  fairlane bus list
  fairlane bus list --json | jq '.[] | select(.lag > 0)'";

const EXAMPLES: &str = "\
Examples:
  fairlane bus list
  fairlane bus skip kafka:orders/orders/3 --to 1-118   shows what is passed over, and asks
  fairlane bus skip kafka:orders/orders/3 --to 1-118 --yes";

const SKIP: &str = "\
Examples:
  fairlane bus skip kafka:orders/orders/3 --to 1-118   shows what is passed over, and asks
  fairlane bus skip kafka:orders/orders/3 --to 1-118 --yes";

/// Arguments of `fairlane bus`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct BusArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the logs of all buses: streams, and partitions of topics.
    #[command(after_help = LIST)]
    List {
        /// Print JSON instead of text.
        #[arg(long)]
        json: bool,
    },
    /// Pass over entries of a log that cannot be read, in all pipelines. They are never handled.
    #[command(after_help = SKIP)]
    Skip {
        /// The log, as `fairlane bus list` and the error name it.
        #[arg(value_name = "LOG")]
        log: String,
        /// The last entry to pass over, as `fairlane bus list` writes offsets. On Kafka: 1, a hyphen,
        /// and the offset of the next record.
        #[arg(long, value_name = "OFFSET")]
        to: Offset,
        /// Do not ask.
        #[arg(long)]
        yes: bool,
    },
}

/// A log, for people.
#[derive(Debug, Serialize)]
struct Shown {
    log: String,
    first: Option<String>,
    /// `None`: not known, its server does not answer.
    last: Option<String>,
    /// Up to where every shard of every pipeline has it. `None`: no pipeline reads it.
    copied: Option<String>,
    /// Number of entries that were not read when a process last noted it.
    lag: Option<u64>,
}

/// Runs the action.
pub(super) async fn bus(config: Config, args: BusArgs) -> Result<(), CliError> {
    match args.action {
        Action::List { json } => {
            let output = Output::new(json);
            Session::with(config, async |session| {
                let logs = list(session).await?;
                output.show(&logs, |logs| shown(output, logs))
            })
            .await
        }
        Action::Skip { log, to, yes } => {
            Session::with(config, async |session| skip(session, &log, to, yes).await).await
        }
    }
}

async fn list(session: &Session) -> Result<Vec<Shown>, CliError> {
    let mut all = Vec::new();
    for bus in buses(session)? {
        let logs = bus.logs().await.map_err(|error| CliError::Bus(error.to_string()))?;
        for log in logs {
            let mut copied: Option<Offset> = None;
            for pipeline in on(session, &log.name).await? {
                for at in starts::standing(&session.view(&pipeline), &log.name).await? {
                    copied = Some(copied.map_or(at, |copied| copied.min(at)));
                }
            }
            all.push(Shown {
                log: log.name.to_string(),
                first: log.first.map(|first| first.to_string()),
                last: log.unknown.is_none().then(|| log.last.to_string()),
                copied: copied.map(|at| at.to_string()),
                lag: lag(session, &log.name).await?,
            });
        }
    }
    all.sort_by(|one, other| one.log.cmp(&other.log));
    Ok(all)
}

/// All buses of the configuration.
fn buses(session: &Session) -> Result<Vec<Arc<dyn Source>>, CliError> {
    let config = &session.config.bus;
    let clock = Arc::new(SystemClock);
    let others = Buses::open(config, &[], &(clock as _))?;
    let link = session.shared_link();
    let streams = config.streams.iter().map(|name| {
        let stream = RedisStream::new(name, Arc::clone(link), Arc::clone(link));
        Arc::new(stream) as Arc<dyn Source>
    });
    Ok(streams.chain(others.with(config).map(|(_, bus)| Arc::clone(bus))).collect())
}

/// The pipelines that have a start in the log.
async fn on(session: &Session, log: &str) -> Result<Vec<PipelineName>, CliError> {
    let link = session.link();
    let command = redis::Cmd::hkeys(keys::starts(link.prefix(), log));
    let names: Vec<String> = link.read("HKEYS", link.command("HKEYS", command).await?)?;
    Ok(names.iter().filter_map(|name| PipelineName::parse(name).ok()).collect())
}

async fn lag(session: &Session, log: &str) -> Result<Option<u64>, CliError> {
    let link = session.link();
    let command = redis::Cmd::hget(keys::read(link.prefix(), log), "lag");
    let found = link.command("HGET", command).await?;
    Ok(match found {
        Value::Nil => None,
        found => Some(link.read("HGET", found)?),
    })
}

fn shown(output: Output, logs: &[Shown]) -> String {
    if logs.is_empty() {
        return "no log yet: no stream or topic of the configuration exists".to_owned();
    }
    let mut table = Table::new(&["LOG", ">FIRST", ">LAST", ">COPIED", ">LAG"]);
    let dash = || "-".to_owned();
    for Shown { log, first, last, copied, lag } in logs {
        table.row(&[
            log.clone(),
            first.clone().unwrap_or_else(dash),
            last.clone().unwrap_or_else(dash),
            copied.clone().unwrap_or_else(dash),
            lag.map_or_else(dash, number),
        ]);
    }
    output.table(&table)
}

/// The last entry of a stream or partition. A bus that does not answer matters only if no other has it.
async fn last_of(session: &Session, log: &str) -> Result<Offset, CliError> {
    let mut failed = None;
    for bus in buses(session)? {
        match bus.logs().await {
            Ok(logs) => {
                if let Some(found) = logs.iter().find(|found| *found.name == *log) {
                    return match &found.unknown {
                        None => Ok(found.last),
                        Some(cause) => Err(CliError::Bus(format!("{log}: {cause}"))),
                    };
                }
            }
            Err(error) => failed = Some(CliError::Bus(error.to_string())),
        }
    }
    Err(failed.unwrap_or_else(|| CliError::UnknownLog { log: log.to_owned() }))
}

async fn skip(session: &Session, log: &str, to: Offset, yes: bool) -> Result<(), CliError> {
    let last = last_of(session, log).await?;
    if to > last {
        return Err(CliError::BeyondEnd { log: log.to_owned(), last, to });
    }
    let mut behind = BTreeMap::new();
    for pipeline in on(session, log).await? {
        let queue = session.queue(&pipeline);
        let standing = starts::standing(&queue, log).await?;
        let ahead: Vec<_> = queue.shard_count().shards().zip(standing).collect();
        let ahead: Vec<_> = ahead.into_iter().filter(|(_, at)| *at < to).collect();
        if let Some(lowest) = ahead.iter().map(|(_, at)| *at).min() {
            behind.insert(pipeline, (queue, ahead, lowest));
        }
    }
    if behind.is_empty() {
        return output::print(&format!(
            "nothing to pass over: no pipeline is before {to} in {log}"
        ));
    }
    let from: Vec<_> =
        behind.iter().map(|(name, (_, _, lowest))| format!("{name} from {lowest}")).collect();
    let question =
        format!("pass over all entries of {log} up to {to}, in {}? They are lost", from.join(", "));
    super::pipelines::confirm(&question, yes, "passing over entries")?;
    let action = Act::new("bus.skip").target(log).details(&format!("up to {to}"));
    let work = async {
        for (name, (queue, ahead, _)) in &behind {
            let calls: Vec<_> = ahead
                .iter()
                .map(|(shard, at)| Advance {
                    keys: queue.keys(*shard),
                    spans: vec![Span { log, prev: *at, last: to }],
                })
                .collect();
            for answer in queue.link().call_all(&calls).await? {
                if let Advanced::Gap(_) = answer? {
                    return Err(CliError::Moving { pipeline: name.clone() });
                }
            }
        }
        Ok(())
    };
    session.act(action, work, |()| "done".to_owned()).await?;
    output::print(&format!("passed over: all pipelines go on behind {to} in {log}"))
}
