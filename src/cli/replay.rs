//! `fairlane replay`.

use std::fmt::Write as _;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::time::Instant;

use super::error::CliError;
use super::output::{Output, Table, count, duration, number, plain, tell};
use super::pipelines::confirm;
use super::session::Session;
use crate::clock::{millis, rfc3339};
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::products::Kinds;
use crate::rate::Rate;
use crate::replay::{Replay, ReplayRefused, Run, Spec, Survey, read_time};
use crate::trail::Action;

/// Maximum number of events per step.
const STEP: usize = 500;
/// Number of bots to name.
const NAMED: usize = 5;

const EXAMPLES: &str = "\
Examples:
  fairlane replay --pipeline billing --from '2h ago' --dry-run
  fairlane replay --pipeline billing --from 2026-11-24T14:00:00Z --to 2026-11-24T15:00:00Z --bot shop-7
  fairlane replay --pipeline billing --from 30m --type 'order.*' --rate 100/s --yes
  fairlane replay --continue 019ab3c2-6f6e-7d52-a1c4-0f6a5b0e7c11

The bus has its entries for bus.retention. Replayed events have the attribute fairlanereplay, the
id of the replay. Other pipelines get nothing. Dead letters are queued again by `fairlane dead redrive`.";

/// Arguments of `fairlane replay`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct ReplayArgs {
    /// The pipeline that gets the events. Required if there are several.
    #[arg(long, short, value_name = "P")]
    pipeline: Option<PipelineName>,
    /// Only events of this bot.
    #[arg(long)]
    bot: Option<BotId>,
    /// Only events that were published at this time or later: with a zone (2026-11-24T14:00:00Z), or
    /// how long ago ("2h ago").
    #[arg(long, value_name = "TIME", required_unless_present = "continued")]
    from: Option<String>,
    /// Only events that were published before this time.
    #[arg(long, value_name = "TIME", default_value = "now")]
    to: String,
    /// Only events of this type, such as "order.*"; may be repeated.
    #[arg(long = "type", value_name = "GLOB")]
    types: Vec<String>,
    /// Count the events and change nothing.
    #[arg(long)]
    dry_run: bool,
    /// Maximum number of events per unit of time, such as 100/s. Default: as fast as Redis takes them.
    #[arg(long, value_name = "N/s")]
    rate: Option<Rate>,
    /// Continue a replay that was interrupted, or whose bots had full queues.
    #[arg(
        long = "continue",
        id = "continued",
        value_name = "ID",
        conflicts_with_all = ["pipeline", "bot", "from", "to", "types", "dry_run"]
    )]
    continued: Option<String>,
    /// Do not ask for a confirmation.
    #[arg(long)]
    yes: bool,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Summary {
    id: String,
    pipeline: PipelineName,
    /// Number of events that this run put.
    put: u64,
    /// The same with earlier runs of the id.
    put_in_all: u64,
    /// Whether everything is put.
    done: bool,
    held: Vec<Held>,
    /// Number of bots whose queues are full.
    held_bots: u64,
    /// Number of their events that are not put.
    waiting: u64,
}

#[derive(Debug, Serialize)]
struct Held {
    bot: BotId,
    limit: String,
}

/// Replays events.
pub(super) async fn replay(config: Config, args: ReplayArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    Session::with(config, async |session| match &args.continued {
        Some(id) => {
            let run = Run::load(session.link(), id).await?;
            let mut run = run.ok_or_else(|| ReplayRefused::Unknown(id.clone()))?;
            let replay = open(session, run.spec.clone())?;
            run.retry();
            session.note(on("continue replay", &replay.spec, id), "started").await;
            put(output, &replay, run, args.rate).await
        }
        None => begin(session, output, &args).await,
    })
    .await
}

async fn begin(session: &Session, output: Output, args: &ReplayArgs) -> Result<(), CliError> {
    let pipeline = session.choose(args.pipeline.as_ref()).await?;
    let now = session.server.time().await?;
    let time = |place, text: &str| {
        let time = read_time(text, now).map_err(|source| ReplayRefused::Time { place, source })?;
        Ok::<_, ReplayRefused>(millis(time.min(now)))
    };
    let spec = Spec {
        pipeline,
        bot: args.bot.clone(),
        types: args.types.clone(),
        from_ms: time("--from", args.from.as_deref().unwrap_or("now"))?,
        until_ms: time("--to", &args.to)?,
        streams: session.config.bus.streams.clone(),
    };
    let replay = open(session, spec)?;
    let copied = replay.copied().await?;
    let (found, _) = replay.survey(replay.start(), &copied, None).await?;
    if args.dry_run {
        return output.show(&found, |found| describe(output, &replay.spec, found, millis(now)));
    }
    if found.not_copied > 0 {
        tell(format_args!("note: {}", left_alone(found.not_copied)));
    }
    if let Some(gone) = found.gone_until_ms {
        let gone = rfc3339(gone);
        tell(format_args!("note: the bus no longer has all entries from before {gone}"));
    }
    if found.events > 0 {
        let question = format!(
            "Put {} of {} at the end of their queues in pipeline {}?",
            count(found.events, "event"),
            count(found.bots, "bot"),
            replay.spec.pipeline
        );
        confirm(&question, args.yes, "replaying events")?;
    }
    let id = uuid::Uuid::now_v7().to_string();
    let run = replay.run(&id, Some((found.events, copied))).await??;
    tell(format_args!("replay {id}; if it is interrupted: fairlane replay --continue {id}"));
    session.note(on("replay", &replay.spec, &id), "started").await;
    put(output, &replay, run, args.rate).await
}

/// The action of a replay.
fn on(name: &str, spec: &Spec, id: &str) -> Action {
    Action { action: name.to_owned(), ..spec.action() }.target(id)
}

fn open(session: &Session, spec: Spec) -> Result<Replay, ReplayRefused> {
    let queue = session.queue(&spec.pipeline);
    let config = session.config.pipelines.get(&spec.pipeline);
    Replay::new(queue, config, &Kinds::today(&session.config).reserved(), spec)
}

/// Makes all steps.
async fn put(
    output: Output,
    replay: &Replay,
    mut run: Run,
    rate: Option<Rate>,
) -> Result<(), CliError> {
    // Shows nothing if standard error is not a terminal.
    let (progress, template) = match run.matched {
        Some(matched) => (ProgressBar::new(matched), "{bar:30} {percent:>3}%  {msg}  {eta} left"),
        None => (ProgressBar::new_spinner(), "{spinner} {msg}  {elapsed}"),
    };
    progress.set_style(ProgressStyle::with_template(template).expect("constants, and well-formed"));
    progress.enable_steady_tick(Duration::from_millis(100));
    let (started, mut put, mut more) = (Instant::now(), 0, !run.is_done());
    // A short step each tenth of a second keeps the rate even.
    let size = rate.map_or(STEP, |rate| (rate.of_a_second() as usize / 10).clamp(1, STEP));
    while more {
        let step = replay.step(&mut run, size).await.map_err(|source| {
            let (source, id) = (Box::new(source.into()), run.id.clone());
            CliError::ReplayStopped { source, id, put: run.put }
        })?;
        put += step.put;
        more = step.more;
        progress.set_position(run.put);
        progress.set_message(count(run.put, "event"));
        if let Some(rate) = rate.filter(|_| more) {
            #[expect(clippy::cast_precision_loss, reason = "for a pause")]
            let due = Duration::from_secs_f64(rate.interval_us() / 1e6 * put as f64);
            tokio::time::sleep_until(started + due).await;
        }
    }
    progress.finish_and_clear();
    let held = run.held().map(|(bot, limit)| Held { bot: bot.clone(), limit: limit.to_owned() });
    let summary = Summary {
        pipeline: run.spec.pipeline.clone(),
        put,
        put_in_all: run.put,
        done: run.is_done(),
        held: held.collect(),
        held_bots: run.held().len() as u64,
        waiting: run.waiting,
        id: run.id.clone(),
    };
    output.show(&summary, told)?;
    if summary.done { Ok(()) } else { Err(CliError::ReplayHeld(summary.id)) }
}

/// The result in words.
fn told(summary: &Summary) -> String {
    let mut text = format!(
        "put {} at the end of the queues of pipeline {}",
        count(summary.put, "event"),
        summary.pipeline
    );
    if summary.put_in_all > summary.put {
        let _ = write!(text, ", {} with the earlier runs", number(summary.put_in_all));
    }
    if !summary.held.is_empty() {
        let some = summary.held.iter().take(NAMED);
        let mut names: Vec<_> =
            some.map(|held| format!("{} ({})", plain(held.bot.as_str()), held.limit)).collect();
        if summary.held.len() > NAMED {
            names.push("…".to_owned());
        }
        let _ = write!(
            text,
            "\n{} of {} wait, because their queues are full: {}",
            count(summary.waiting, "event"),
            count(summary.held_bots, "bot"),
            names.join(", ")
        );
    }
    text
}

fn describe(output: Output, spec: &Spec, found: &Survey, now_ms: u64) -> String {
    let mut text = format!(
        "{} of {} would be put at the end of the queues of pipeline {}",
        count(found.events, "event"),
        count(found.bots, "bot"),
        spec.pipeline
    );
    let at = |ms: u64| format!("{} ({} ago)", rfc3339(ms), duration(now_ms.saturating_sub(ms)));
    let _ = write!(text, "\nrange     {} to {}", at(spec.from_ms), rfc3339(spec.until_ms));
    if let (Some(first), Some(last)) = (found.first_ms, found.last_ms) {
        let _ = write!(text, "\nfirst     {}\nlast      {}", at(first), at(last));
    }
    let _ = write!(text, "\nread      {} of the bus", entries(found.entries));
    if found.not_copied > 0 {
        let _ = write!(text, "\nleft      {}", left_alone(found.not_copied));
    }
    if let Some(gone) = found.gone_until_ms {
        let _ =
            write!(text, "\nmissing   the bus no longer has all entries from before {}", at(gone));
    }
    if !found.top.is_empty() {
        let mut table = Table::new(&["BOT", ">EVENTS"]);
        for one in &found.top {
            table.row(&[one.bot.to_string(), number(one.events)]);
        }
        text.push_str("\n\n");
        text.push_str(&output.table(&table));
        if found.bots > found.top.len() as u64 {
            let more = found.bots - found.top.len() as u64;
            let _ = write!(text, "\nand {}", count(more, "other bot"));
        }
    }
    text
}

fn left_alone(events: u64) -> String {
    format!(
        "not queued yet: {} of the range; the replay leaves them alone, because they are handled anyway",
        count(events, "event")
    )
}

fn entries(entries: u64) -> String {
    match entries {
        1 => "1 entry".to_owned(),
        entries => format!("{} entries", number(entries)),
    }
}
