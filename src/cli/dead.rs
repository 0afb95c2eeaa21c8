//! `fairlane dead`.

use clap::{Args, Subcommand};
use serde::Serialize;

use super::error::CliError;
use super::operator;
use super::output::{Output, Table, Tone, count, duration, number, plain};
use super::pipelines::confirm;
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::id::{BotId, LetterId, PipelineName};
use crate::queue::{BulkStopped, DeadLetter};
use crate::telemetry::harmless_json;
use crate::trail::Action as Act;

const EXAMPLES: &str = "\
Examples:
  fairlane dead list --pipeline billing
  fairlane dead show 3.1763640000000-0
  fairlane dead redrive 3.1763640000000-0
  fairlane dead redrive --bot shop-7
  fairlane dead drop --all --yes

--pipeline may be omitted if you have only one pipeline besides the built-in ones.";
const LIST_EXAMPLES: &str = "\
Examples:
  fairlane dead list                          the newest of all pipelines
  fairlane dead list --bot shop-7 --limit 10
  fairlane dead list --pipeline billing --json | jq -r '.[].reason' | sort | uniq -c";
const SHOW_EXAMPLES: &str = "\
Examples:
  fairlane dead show 3.1763640000000-0
  fairlane dead show 3.1763640000000-0 --json | jq .event";
const REDRIVE_EXAMPLES: &str = "\
Examples:
  fairlane dead redrive 3.1763640000000-0   one, back to its place in the order of its bot
  fairlane dead redrive --bot shop-7        all of that bot; asks first
  fairlane dead redrive --all               all of the pipeline; asks first
  fairlane dead redrive --all --yes         for scripts: does not ask";
const DROP_EXAMPLES: &str = "\
Examples:
  fairlane dead drop 3.1763640000000-0
  fairlane dead drop --bot shop-7           all of that bot; asks first
  fairlane dead drop --all --yes            all of the pipeline; for scripts: does not ask";

/// Arguments of `fairlane dead`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct DeadArgs {
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
    /// List dead letters, newest first.
    #[command(after_help = LIST_EXAMPLES)]
    List {
        /// Only dead letters of this bot.
        #[arg(long)]
        bot: Option<BotId>,
        /// Maximum number of dead letters.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=100_000))]
        limit: u32,
    },
    /// Show one dead letter with its event.
    #[command(after_help = SHOW_EXAMPLES)]
    Show {
        /// The id of the dead letter.
        id: LetterId,
    },
    /// Redrive dead letters: queue them again, in order (counters, automations: at the end of the queue).
    #[command(after_help = REDRIVE_EXAMPLES)]
    Redrive {
        #[command(flatten)]
        which: Which,
        /// Do not ask for a confirmation if all letters of a bot or pipeline are meant.
        #[arg(long)]
        yes: bool,
    },
    /// Drop (delete) dead letters.
    #[command(after_help = DROP_EXAMPLES)]
    Drop {
        #[command(flatten)]
        which: Which,
        /// Do not ask for a confirmation if all letters of a bot or pipeline are meant.
        #[arg(long)]
        yes: bool,
    },
}

/// One letter by its id, all letters of a bot, or all letters of the pipeline.
#[derive(Debug, Args)]
#[group(required = true, multiple = false)]
struct Which {
    /// The id of the dead letter.
    id: Option<LetterId>,
    /// All dead letters of this bot.
    #[arg(long)]
    bot: Option<BotId>,
    /// All dead letters of the pipeline.
    #[arg(long)]
    all: bool,
}

#[derive(Debug, Serialize)]
struct Listed {
    pipeline: PipelineName,
    #[serde(flatten)]
    letter: DeadLetter,
}

#[derive(Debug, Serialize)]
struct Counted {
    pipeline: PipelineName,
    letters: u64,
}

/// Inspects, redrives and drops dead letters.
pub(super) async fn dead(config: Config, args: DeadArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    let wanted = args.pipeline.as_ref();
    Session::with(config, async |session| match &args.action {
        Action::List { bot, limit } => list(session, output, wanted, bot.as_ref(), *limit).await,
        Action::Show { id } => {
            let pipeline = session.choose(wanted).await?;
            let found = session.view(&pipeline).dead_letter(*id).await?;
            let letter = found.ok_or_else(|| no_letter(&pipeline, *id))?;
            output.show(&Listed { pipeline, letter }, |listed| describe(output, listed))
        }
        Action::Redrive { which, yes } => redrive(session, output, wanted, which, *yes).await,
        Action::Drop { which, yes } => drop_letters(session, output, wanted, which, *yes).await,
    })
    .await
}

async fn list(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    bot: Option<&BotId>,
    limit: u32,
) -> Result<(), CliError> {
    let limit = limit as usize;
    let mut found = Vec::new();
    for pipeline in session.pipelines_or(wanted).await? {
        let letters = session.view(&pipeline).dead_letters(bot, limit).await?;
        let listed = |letter| Listed { pipeline: pipeline.clone(), letter };
        found.extend(letters.into_iter().map(listed));
    }
    found.sort_by_key(|listed| std::cmp::Reverse(listed.letter.time_ms));
    found.truncate(limit);
    let now = millis(SystemClock.now());
    output.show(&found, |found| {
        let mut table =
            Table::new(&["ID", "BOT", "PIPELINE", ">DIED", ">ATTEMPTS", "TYPE", "REASON"]);
        for Listed { pipeline, letter } in found {
            table.row(&[
                letter.id.to_string(),
                letter.bot.to_string(),
                pipeline.to_string(),
                format!("{} ago", duration(now.saturating_sub(letter.time_ms))),
                number(letter.attempts.into()),
                letter.event.as_ref().map_or("-", |event| event.kind()).to_owned(),
                letter.reason.clone(),
            ]);
        }
        if table.is_empty() { "no dead letters".to_owned() } else { output.table(&table) }
    })
}

fn describe(output: Output, Listed { pipeline, letter }: &Listed) -> String {
    let died = duration(millis(SystemClock.now()).saturating_sub(letter.time_ms));
    let event = match &letter.event {
        Some(event) => serde_json::to_string_pretty(event).map_or_else(
            |error| format!("(cannot be shown: {error})"),
            |event| harmless_json(&event).into_owned(),
        ),
        None => "(not readable: the record is damaged or of a newer version)".to_owned(),
    };
    format!(
        "{} of bot {} in pipeline {pipeline}\ndied      {died} ago\nattempts  {}\nreason    {}\n\n{event}",
        output.paint(Tone::Strong, &letter.id.to_string()),
        plain(letter.bot.as_str()),
        number(letter.attempts.into()),
        plain(&letter.reason),
    )
}

async fn redrive(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    which: &Which,
    yes: bool,
) -> Result<(), CliError> {
    let pipeline = session.choose(wanted).await?;
    let queue = session.queue(&pipeline);
    let letters = if let Some(id) = which.id {
        let letter = queue.dead_letter(id).await?;
        let letter = letter.ok_or_else(|| no_letter(&pipeline, id))?;
        let work = async {
            if queue.redrive(&letter.bot, id).await? {
                return Ok(1);
            }
            let stays = queue.dead_letter(id).await?.is_some_and(|left| left.event.is_some());
            let gone = || CliError::NotificationGone(pipeline.clone(), id);
            Err(if stays { gone() } else { no_letter(&pipeline, id) })
        };
        let action = on(&pipeline, "redrive", Some(&letter.bot)).target(id);
        session.act(action, work, operator::number).await?
    } else {
        let (bot, until) = (which.bot.as_ref(), session.server.time().await?);
        let letters = count(queue.count_dead_letters(bot, until).await?, "dead letter");
        let (question, what) = match bot {
            Some(bot) => (
                format!(
                    "Put back {letters} of bot {} in pipeline {pipeline}?",
                    plain(bot.as_str())
                ),
                "putting back all dead letters of a bot",
            ),
            None => (
                format!("Put back {letters} of all bots of pipeline {pipeline}?"),
                "putting back all dead letters of a pipeline",
            ),
        };
        confirm(&question, yes, what)?;
        let work = async {
            let redriven = queue.redrive_all(bot, until).await;
            redriven.map_err(|error| stopped("put back", error))
        };
        session.act(on(&pipeline, "redrive all", bot), work, operator::number).await?
    };
    output.show(&Counted { pipeline, letters }, |counted| {
        format!("put back {} of pipeline {}", count(letters, "dead letter"), counted.pipeline)
    })
}

async fn drop_letters(
    session: &Session,
    output: Output,
    wanted: Option<&PipelineName>,
    which: &Which,
    yes: bool,
) -> Result<(), CliError> {
    let pipeline = session.choose(wanted).await?;
    let queue = session.view(&pipeline);
    let letters = if let Some(id) = which.id {
        // A letter that cannot be read can be dropped.
        let letter = queue.dead_letter(id).await.ok().flatten();
        let action = on(&pipeline, "drop", letter.as_ref().map(|letter| &letter.bot)).target(id);
        let work = async {
            let dropped = queue.drop_dead_letter(id).await?;
            dropped.then_some(1).ok_or_else(|| no_letter(&pipeline, id))
        };
        session.act(action, work, operator::number).await?
    } else {
        let (bot, until) = (which.bot.as_ref(), session.server.time().await?);
        let letters = count(queue.count_dead_letters(bot, until).await?, "dead letter");
        let (question, what) = match bot {
            Some(bot) => (
                format!(
                    "Delete {letters} of bot {} in pipeline {pipeline} for good?",
                    plain(bot.as_str())
                ),
                "dropping all dead letters of a bot",
            ),
            None => (
                format!("Delete {letters} of all bots of pipeline {pipeline} for good?"),
                "dropping all dead letters of a pipeline",
            ),
        };
        confirm(&question, yes, what)?;
        let work = async {
            let dropped = queue.drop_dead_letters(bot, until).await;
            dropped.map_err(|error| stopped("deleted", error))
        };
        session.act(on(&pipeline, "drop all", bot), work, operator::number).await?
    };
    output.show(&Counted { pipeline, letters }, |counted| {
        format!("deleted {} of pipeline {}", count(letters, "dead letter"), counted.pipeline)
    })
}

/// An action on dead letters.
fn on(pipeline: &PipelineName, name: &str, bot: Option<&BotId>) -> Act {
    Act::new(name).in_pipeline(pipeline).of_bot(bot)
}

/// `deed`: what was done to the letters before that.
fn stopped(deed: &str, BulkStopped { done, source }: BulkStopped) -> CliError {
    let source = CliError::from(source);
    if done == 0 {
        return source;
    }
    let done = format!("{deed} at least {}", count(done, "dead letter"));
    CliError::LettersStopped { source: Box::new(source), done }
}

fn no_letter(pipeline: &PipelineName, id: LetterId) -> CliError {
    CliError::NoDeadLetter { pipeline: pipeline.clone(), id }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::Event;

    #[test]
    fn an_event_is_shown_as_json_that_cannot_control_the_terminal() {
        let (bot, data) = (BotId::parse("a\u{202e}b").unwrap(), "\u{7f} \u{9b}2J \u{2066}");
        let event = Event::builder("t", &bot).id("1").data(&data).unwrap().build().unwrap();
        let letter = DeadLetter {
            id: "3.1763640000000-0".parse().unwrap(),
            bot,
            reason: "because".to_owned(),
            attempts: 1,
            time_ms: 0,
            event: Some(event),
        };
        let listed = Listed { pipeline: PipelineName::parse("p").unwrap(), letter };
        let shown = describe(Output::new(false), &listed);
        let harmful = ['\u{202e}', '\u{7f}', '\u{9b}', '\u{2066}'];
        assert!(!shown.contains(harmful), "{shown:?}");
        let (_, json) = shown.split_once("\n\n").unwrap();
        let json: serde_json::Value = serde_json::from_str(json).unwrap();
        assert_eq!((&json["botid"], &json["data"]), (&"a\u{202e}b".into(), &data.into()));
    }
}
