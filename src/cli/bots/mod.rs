//! `fairlane bots`.

mod condition;
mod held;
mod set_aside;

use std::str::FromStr;

use clap::{Args, Subcommand, ValueEnum};
use serde::Serialize;

use super::error::CliError;
use super::output::{Output, Table, Tone, age, count, duration, number, plain};
use super::pipelines::confirm;
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, micros, millis};
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::queue::{
    BotChange, BotOrder, BotState, BotView, DeadOfBot, Holdings, LaneAside, LastFailure, Queue,
    QueuedEvent, memory,
};
use crate::rate::{BURST_MAX, BotRate, Change, LimitError, Weight};

const EXAMPLES: &str = "\
Examples:
  fairlane bots list --sort age
  fairlane bots show shop-7 --pipeline billing
  fairlane bots set shop-7 --weight 3
  fairlane bots pause shop-7

--pipeline may be omitted if only one pipeline exists. Write a bot whose name starts with '-' after
'--': fairlane bots show -- -7";
const LIST_EXAMPLES: &str = "\
Examples:
  fairlane bots list                             the longest queues of all pipelines
  fairlane bots list --sort age --limit 10
  fairlane bots list --pipeline billing --json";
const SHOW_EXAMPLES: &str = "\
Examples:
  fairlane bots show shop-7
  fairlane bots show shop-7 --pipeline billing --limit 50";
const ATTEMPTS_EXAMPLES: &str = "\
Examples:
  fairlane bots attempts shop-7
  fairlane bots attempts shop-7 --pipeline billing --limit 100";
const SET_EXAMPLES: &str = "\
Examples:
  fairlane bots set shop-7 --weight 3     three times the share of a bot with weight 1
  fairlane bots set shop-7 --weight 0.1   a tenth of that share
  fairlane bots set shop-7 --weight 1     back to the default
  fairlane bots set shop-7 --rate 10/s --burst 5
  fairlane bots set shop-7 --rate default --burst default";
const PAUSE_EXAMPLES: &str = "\
Examples:
  fairlane bots pause shop-7     a running slice ends normally; new events are still queued";
const RESUME_EXAMPLES: &str = "\
Examples:
  fairlane bots resume shop-7";
const RELEASE_EXAMPLES: &str = "\
Examples:
  fairlane bots release shop-7     take it from a worker that hangs, or retry immediately";
const PURGE_EXAMPLES: &str = "\
Examples:
  fairlane bots purge shop-7           asks first; keeps delayed events and dead letters
  fairlane bots purge shop-7 --yes     for scripts: does not ask";

/// Arguments of `fairlane bots`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct BotsArgs {
    /// The pipeline. Required if there are several, except for list.
    #[arg(long, short, global = true, value_name = "P")]
    pipeline: Option<PipelineName>,
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the bots with queued events and the paused bots.
    #[command(after_help = LIST_EXAMPLES)]
    List {
        /// The order of the list.
        #[arg(long, value_enum, default_value_t)]
        sort: Sort,
        /// Maximum number of bots.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
        limit: u32,
    },
    /// Show one bot and its next events.
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// The bot.
        bot: BotId,
        /// Maximum number of events.
        #[arg(long, value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=10_000))]
        limit: u32,
    },
    /// List the last attempts of a bot: what its handler answered.
    #[command(after_help = ATTEMPTS_EXAMPLES)]
    Attempts {
        /// The bot.
        bot: BotId,
        /// Maximum number of attempts.
        #[arg(long, value_name = "N", default_value_t = 20, value_parser = clap::value_parser!(u32).range(1..=1_000))]
        limit: u32,
    },
    /// Set the weight of a bot, its share of the service, or its rate. What is not named stays.
    #[command(after_help = SET_EXAMPLES, group(clap::ArgGroup::new("setting").required(true).multiple(true)))]
    Set {
        /// The bot.
        bot: BotId,
        /// Relative to 1, the default weight of every bot: 0.01 to 1000.
        #[arg(long, value_name = "N", group = "setting")]
        weight: Option<Weight>,
        /// Maximum rate of its events: "10/s", "30/m", "100/h"; "unlimited"; "default": that of the pipeline.
        #[arg(long, value_name = "RATE", group = "setting", value_parser = change_to::<BotRate>)]
        rate: Option<Change<BotRate>>,
        /// Maximum number of its events at once: 1 to 1000000; "default": that of the pipeline.
        #[arg(long, value_name = "N", group = "setting", value_parser = change_to::<Burst>)]
        burst: Option<Change<Burst>>,
    },
    /// Pause a bot: stop handing out its events.
    #[command(after_help = PAUSE_EXAMPLES)]
    Pause {
        /// The bot.
        bot: BotId,
    },
    /// Resume a paused bot.
    #[command(after_help = RESUME_EXAMPLES)]
    Resume {
        /// The bot.
        bot: BotId,
    },
    /// Break the lease of a bot, or end its backoff: workers get its events again.
    #[command(after_help = RELEASE_EXAMPLES)]
    Release {
        /// The bot.
        bot: BotId,
    },
    /// Delete the queued events of a bot.
    #[command(after_help = PURGE_EXAMPLES)]
    Purge {
        /// The bot.
        bot: BotId,
        /// Do not ask for a confirmation.
        #[arg(long)]
        yes: bool,
    },
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum Sort {
    /// The longest queues first.
    #[default]
    Depth,
    /// The queues with the oldest first event first.
    Age,
}

impl Sort {
    fn order(self) -> BotOrder {
        match self {
            Self::Depth => BotOrder::Depth,
            Self::Age => BotOrder::Age,
        }
    }
}

#[derive(Debug, Serialize)]
struct Listed {
    pipeline: PipelineName,
    #[serde(flatten)]
    view: BotView,
}

#[derive(Debug, Serialize)]
struct Shown {
    pipeline: PipelineName,
    #[serde(flatten)]
    view: BotView,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_failure: Option<LastFailure>,
    holds: Holdings,
    quotas: Holdings,
    dead_letters: DeadOfBot,
    next: Vec<QueuedEvent>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    lanes_aside: Vec<LaneAside>,
}

/// The result of an action. Fields that do not apply are omitted.
#[derive(Debug, Serialize)]
struct Done<'a> {
    pipeline: &'a PipelineName,
    bot: &'a BotId,
    #[serde(skip_serializing_if = "Option::is_none")]
    changed: Option<bool>,
    #[serde(skip_serializing_if = "Option::is_none")]
    weight: Option<Weight>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rate: Option<BotRate>,
    #[serde(skip_serializing_if = "Option::is_none")]
    burst: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    events: Option<u64>,
}

/// Inspects and changes bots.
pub(super) async fn bots(config: Config, args: BotsArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    let wanted = args.pipeline.as_ref();
    Session::with(config, async |session| match &args.action {
        Action::List { sort, limit } => list(session, output, wanted, *sort, *limit).await,
        Action::Show { bot, limit } => show(session, output, wanted, bot, *limit).await,
        Action::Attempts { bot, limit } => attempts(session, output, wanted, bot, *limit).await,
        action => change(session, output, &session.choose(wanted).await?, action).await,
    })
    .await
}

async fn list(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    sort: Sort,
    limit: u32,
) -> Result<(), CliError> {
    let limit = limit as usize;
    let mut found = Vec::new();
    for pipeline in session.pipelines_or(wanted).await? {
        let queue = session.view(&pipeline);
        let page = queue.list_bots(sort.order(), None, limit, &|_| true, SystemClock.now()).await?;
        found.extend(page.bots.into_iter().map(|view| Listed { pipeline: pipeline.clone(), view }));
    }
    found.sort_by_key(|Listed { view, .. }| {
        std::cmp::Reverse(if sort == Sort::Age { view.oldest_age_ms } else { view.depth })
    });
    found.truncate(limit);
    output.show(&found, |found| {
        let mut table =
            Table::new(&["BOT", "PIPELINE", "STATE", ">DEPTH", ">OLDEST", ">ATTEMPTS", ">WEIGHT"]);
        for Listed { pipeline, view } in found {
            table.row(&[
                view.bot.to_string(),
                pipeline.to_string(),
                state(view.state).to_owned(),
                number(view.depth),
                age(view.oldest_age_ms, view.depth > 0),
                number(view.attempts.into()),
                view.weight.to_string(),
            ]);
        }
        if table.is_empty() { "no bot has queued events".to_owned() } else { output.table(&table) }
    })
}

async fn show(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    bot: &BotId,
    limit: u32,
) -> Result<(), CliError> {
    let pipeline = session.choose(wanted).await?;
    let (queue, now) = (session.view(&pipeline), SystemClock.now());
    let view = queue.view_bot(bot, now).await?;
    let next = queue.next_events(bot, limit as usize).await?;
    let lanes_aside = queue.lanes_aside(bot, limit as usize, Queue::ASIDE_BYTES).await?;
    let last_failure = queue.last_failure(&view).await?;
    let dead_letters = queue.dead_of(bot).await?;
    let holds = queue.holdings(bot).await?;
    memory::observe(queue.link(), queue.quotas()).await?;
    let quotas = queue.quotas().of(bot).into();
    let words =
        condition::words(session, &queue, &view, (last_failure.as_ref(), &holds), now).await?;
    let shown =
        Shown { pipeline, view, last_failure, holds, quotas, dead_letters, next, lanes_aside };
    output.show(&shown, |shown| {
        let Shown { pipeline, view, last_failure, holds, quotas, dead_letters, next, lanes_aside } =
            shown;
        let until = view.until_ms.map_or_else(String::new, |until| {
            format!(", {} left", duration(until.saturating_sub(millis(now))))
        });
        let mut text = format!(
            "{} in pipeline {pipeline}\n{words}\nstate     {}{until}\ndepth     {}\noldest    {}\nfence     {}\nattempts  {}\nweight    {}",
            output.paint(Tone::Strong, view.bot.as_str()),
            state(view.state),
            number(view.depth),
            age(view.oldest_age_ms, view.depth > 0),
            view.fence.map_or_else(|| "-".to_owned(), |fence| fence.to_string()),
            number(view.attempts.into()),
            view.weight,
        );
        if view.rate.is_some() || view.burst.is_some() {
            text.extend(["\nlimits    ", &limits(view)]);
        }
        if let Some(since) = view.throttled_since_ms {
            let ago = duration(millis(now).saturating_sub(since));
            text.extend(["\nthrottled for ", &ago, ": its rate holds it back"]);
        }
        if let Some(LastFailure { reason, time_ms, since_ms }) = last_failure {
            let ago = |ms: u64| duration(millis(now).saturating_sub(ms));
            text.extend(["\nfailed    ", &ago(*time_ms), " ago: ", &plain(reason)]);
            text.extend(["\nfailing   since ", &ago(*since_ms), " ago"]);
        }
        text.push_str(&held::quotas(holds, quotas));
        text.push_str(&held::dead(dead_letters, holds, (pipeline, &view.bot), millis(now)));
        if !next.is_empty() {
            let mut table = Table::new(&["NEXT EVENT", "TYPE", ">AGE"]);
            for QueuedEvent { sequence, event } in next {
                let (id, kind) = event.as_ref().map_or(("(not readable)", "-"), |e| (e.id(), e.kind()));
                let old = micros(now).saturating_sub(*sequence) / 1_000;
                table.row(&[id.to_owned(), kind.to_owned(), duration(old)]);
            }
            text.push_str("\n\n");
            text.push_str(&output.table(&table));
        }
        text.push_str(&set_aside::text(lanes_aside, output, now));
        text
    })
}

async fn attempts(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    bot: &BotId,
    limit: u32,
) -> Result<(), CliError> {
    let pipeline = session.choose(wanted).await?;
    let attempts = session.view(&pipeline).attempts(bot, limit as usize).await?;
    output.show(&attempts, |attempts| {
        if attempts.is_empty() {
            return format!(
                "no attempt of bot {} in pipeline {pipeline} is kept",
                plain(bot.as_str())
            );
        }
        super::attempts::table(output, attempts, millis(SystemClock.now()))
    })
}

async fn change(
    session: &Session,
    output: Output,
    pipeline: &PipelineName,
    action: &Action,
) -> Result<(), CliError> {
    let queue = session.queue(pipeline);
    let done = |bot| Done {
        pipeline,
        bot,
        changed: None,
        weight: None,
        rate: None,
        burst: None,
        events: None,
    };
    let said = |bot: &BotId, what: &str| {
        format!("bot {} of pipeline {pipeline} {what}", plain(bot.as_str()))
    };
    match action {
        Action::List { .. } | Action::Show { .. } | Action::Attempts { .. } => Ok(()),
        Action::Set { bot, weight, rate, burst } => {
            let change = BotChange {
                weight: *weight,
                rate: rate.unwrap_or_default(),
                burst: burst.unwrap_or_default().map(|burst| burst.0),
            };
            if !queue.set(bot, change).await? {
                return Err(CliError::TooManySet);
            }
            let view = queue.view_bot(bot, SystemClock.now()).await?;
            let (rate, burst) = (view.rate, view.burst);
            let set = Done { weight: Some(view.weight), rate, burst, ..done(bot) };
            output.show(&set, |_| said(bot, &format!("has {}", limits(&view))))
        }
        Action::Pause { bot } => {
            let changed = queue.pause(Some(bot)).await?;
            output.show(&Done { changed: Some(changed), ..done(bot) }, |_| {
                said(bot, if changed { "is paused" } else { "was paused already" })
            })
        }
        Action::Resume { bot } => {
            let changed = queue.resume(Some(bot)).await?;
            output.show(&Done { changed: Some(changed), ..done(bot) }, |_| {
                said(bot, if changed { "goes on" } else { "was not paused" })
            })
        }
        Action::Release { bot } => {
            let changed = queue.revoke(bot).await?;
            output.show(&Done { changed: Some(changed), ..done(bot) }, |_| {
                said(bot, if changed { "is released" } else { "was neither leased nor parked" })
            })
        }
        Action::Purge { bot, yes } => {
            if let Some(kept) = queue.protected() {
                return Err(kept.into());
            }
            let depth = queue.view_bot(bot, SystemClock.now()).await?.depth;
            let question = format!(
                "Delete the {} of bot {} in pipeline {pipeline} for good?",
                count(depth, "queued event"),
                plain(bot.as_str()),
            );
            confirm(&question, *yes, "purging a bot")?;
            let events = queue.purge(bot).await?;
            output.show(&Done { events: Some(events), ..done(bot) }, |_| {
                said(bot, &format!("is purged: deleted {}", count(events, "event")))
            })
        }
    }
}

/// What is set for a bot.
fn limits(view: &BotView) -> String {
    let rate = view.rate.map_or_else(String::new, |rate| format!(", rate {rate}"));
    let burst = view.burst.map_or_else(String::new, |burst| format!(", burst {burst}"));
    format!("weight {}{rate}{burst}", view.weight)
}

/// The change to a value, or to that of other bots for the text "default".
fn change_to<T: FromStr>(text: &str) -> Result<Change<T>, T::Err> {
    if text == "default" { Ok(Change::Reset) } else { text.parse().map(Change::To) }
}

#[derive(Debug, Clone, Copy)]
struct Burst(u32);

impl FromStr for Burst {
    type Err = LimitError;

    fn from_str(text: &str) -> Result<Self, LimitError> {
        let burst = text.parse().ok().filter(|burst| (1..=BURST_MAX).contains(burst));
        burst.map(Self).ok_or(LimitError::Burst)
    }
}

fn state(state: BotState) -> &'static str {
    match state {
        BotState::Ready => "ready",
        BotState::Leased => "leased",
        BotState::Parked => "parked",
        BotState::Paused => "paused",
        BotState::Idle => "idle",
    }
}
