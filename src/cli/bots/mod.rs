//! `fairlane bots`.

mod condition;
mod held;
mod list;
mod set_aside;
mod show;

use std::str::FromStr;

use clap::{Args, Subcommand};
use serde::Serialize;

use self::list::{OnlyState, Sort, list};
use self::show::show;
use super::error::CliError;
use super::operator;
use super::output::{Output, count, plain};
use super::pipelines::confirm;
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::queue::{BotChange, BotFilter, BotState, BotView, PauseNote};
use crate::rate::{BURST_MAX, BotRate, Change, LimitError, Weight};
use crate::trail::{Action as Act, Reason};

const EXAMPLES: &str = "\
Examples:
  fairlane bots list --sort age
  fairlane bots show shop-7 --pipeline billing
  fairlane bots set shop-7 --weight 3
  fairlane bots pause shop-7

--pipeline may be omitted if you have only one pipeline besides the built-in ones. Write a bot whose
name starts with '-' after '--': fairlane bots show -- -7";
const LIST_EXAMPLES: &str = "\
Examples:
  fairlane bots list                             the longest queues of all pipelines
  fairlane bots list --sort age --limit 10
  fairlane bots list --failing                   the bots that need help, and why
  fairlane bots list --state paused --prefix shop-
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
  fairlane bots pause shop-7     a running slice ends normally; new events are still queued
  fairlane bots pause shop-7 --reason 'the shop asked for it'";
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
        /// Only bots in this state.
        #[arg(long, value_enum)]
        state: Option<OnlyState>,
        /// Only bots whose ids start with this text.
        #[arg(long, value_name = "TEXT")]
        prefix: Option<String>,
        /// Only failing bots: the last attempt failed, or lanes are set aside, or there are dead letters.
        #[arg(long)]
        failing: bool,
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
    /// Set the weight of a bot, its share of the service, or its rate. Omitted values stay unchanged.
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
        /// Maximum number of its events that may start without a wait: 1 to 1000000; "default": that of the pipeline.
        #[arg(long, value_name = "N", group = "setting", value_parser = change_to::<Burst>)]
        burst: Option<Change<Burst>>,
    },
    /// Pause a bot: stop handing out its events.
    #[command(after_help = PAUSE_EXAMPLES)]
    Pause {
        /// The bot.
        bot: BotId,
        /// Why: up to 200 characters, for other operators and for readers of the bot.
        #[arg(long, value_name = "TEXT")]
        reason: Option<Reason>,
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
        Action::List { sort, limit, state, prefix, failing } => {
            let prefix = prefix.as_deref().unwrap_or_default();
            let only = |bot: &BotId| bot.as_str().starts_with(prefix);
            let state = state.map(OnlyState::state);
            let filter = BotFilter { wanted: &only, state, failing: *failing };
            list(session, output, wanted, *sort, *limit, filter).await
        }
        Action::Show { bot, limit } => show(session, output, wanted, bot, *limit).await,
        Action::Attempts { bot, limit } => attempts(session, output, wanted, bot, *limit).await,
        action => change(session, output, &session.choose(wanted).await?, action).await,
    })
    .await
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
            let work =
                async { queue.set(bot, change).await?.then_some(()).ok_or(CliError::TooManySet) };
            let action = on(pipeline, "set", bot).details(&change.to_string());
            session.act(action, work, |()| "done".to_owned()).await?;
            let view = queue.view_bot(bot, SystemClock.now()).await?;
            let (rate, burst) = (view.rate, view.burst);
            let set = Done { weight: Some(view.weight), rate, burst, ..done(bot) };
            output.show(&set, |_| said(bot, &format!("has {}", limits(&view))))
        }
        Action::Pause { bot, reason } => {
            let note = PauseNote::new(&operator::name(), reason.as_ref());
            let work = async { Ok(queue.pause_noting(Some(bot), &note).await?) };
            let action = on(pipeline, "pause", bot).reason(reason.as_ref());
            let changed = session.act(action, work, operator::changed).await?;
            output.show(&Done { changed: Some(changed), ..done(bot) }, |_| {
                said(bot, if changed { "is paused" } else { "was paused already" })
            })
        }
        Action::Resume { bot } => {
            let work = async { Ok(queue.resume(Some(bot)).await?) };
            let action = on(pipeline, "resume", bot);
            let changed = session.act(action, work, operator::changed).await?;
            output.show(&Done { changed: Some(changed), ..done(bot) }, |_| {
                said(bot, if changed { "goes on" } else { "was not paused" })
            })
        }
        Action::Release { bot } => {
            let work = async { Ok(queue.revoke(bot).await?) };
            let action = on(pipeline, "release", bot);
            let changed = session.act(action, work, operator::changed).await?;
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
            let work = async { Ok(queue.purge(bot).await?) };
            let events = session.act(on(pipeline, "purge", bot), work, operator::number).await?;
            output.show(&Done { events: Some(events), ..done(bot) }, |_| {
                said(bot, &format!("is purged: deleted {}", count(events, "event")))
            })
        }
    }
}

/// An action on a bot.
fn on(pipeline: &PipelineName, name: &str, bot: &BotId) -> Act {
    Act::new(name).in_pipeline(pipeline).of_bot(Some(bot))
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
