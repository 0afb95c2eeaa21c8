//! `fairlane notifications`.

use std::time::Duration;

use clap::{Args, Subcommand};
use serde::Serialize;

use super::error::CliError;
use super::operator;
use super::output::{Output, Table, duration, number};
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::notifications::PIPELINE;
use crate::notifications::record::{Kept, NotificationId, State, When};
use crate::notifications::scripts::{Amended, Amendment};
use crate::trail::Action as Act;

const EXAMPLES: &str = "\
Examples:
  fairlane notifications list shop-7
  fairlane notifications cancel 3.0192f1b0c1d27c3e8f00112233445566
  fairlane notifications send 3.0192f1b0c1d27c3e8f00112233445566";
const LIST_EXAMPLES: &str = "\
Examples:
  fairlane notifications list shop-7
  fairlane notifications list shop-7 --limit 10 --json";
const CANCEL_EXAMPLES: &str = "\
Examples:
  fairlane notifications cancel 3.0192f1b0c1d27c3e8f00112233445566";
const SEND_EXAMPLES: &str = "\
Examples:
  fairlane notifications send 3.0192f1b0c1d27c3e8f00112233445566     due now, in the order of its bot";

/// Arguments of `fairlane notifications`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct NotificationsArgs {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// List the notifications of a bot that have not ended, in the order of their next times.
    #[command(after_help = LIST_EXAMPLES)]
    List {
        /// The bot.
        bot: BotId,
        /// Maximum number of notifications.
        #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=10_000))]
        limit: u32,
    },
    /// Cancel a notification.
    #[command(after_help = CANCEL_EXAMPLES)]
    Cancel {
        /// The notification.
        id: NotificationId,
    },
    /// Send a notification now: it is due, and is sent in the order of its bot.
    #[command(after_help = SEND_EXAMPLES)]
    Send {
        /// The notification.
        id: NotificationId,
    },
}

#[derive(Debug, Serialize)]
struct Listed {
    id: NotificationId,
    bot: BotId,
    uid: String,
    #[serde(rename = "type")]
    kind: String,
    state: State,
    due_ms: u64,
    attempts: u32,
    reason: String,
    url: String,
}

impl From<Kept> for Listed {
    fn from(kept: Kept) -> Self {
        let Kept { id, bot, uid, kind, state, due_ms, attempts, reason, url, .. } = kept;
        Self { id, bot, uid, kind, state, due_ms, attempts, reason, url }
    }
}

#[derive(Debug, Serialize)]
struct Done {
    id: NotificationId,
    bot: BotId,
}

/// Lists notifications, and changes one.
pub(super) async fn notifications(config: Config, args: NotificationsArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    Session::with(config, async |session| {
        let pipeline: PipelineName = PIPELINE.parse().map_err(|_| CliError::NoPipeline)?;
        match &args.action {
            Action::List { bot, limit } => list(session, output, &pipeline, bot, *limit).await,
            Action::Cancel { id } => {
                let done = amend(session, &pipeline, *id, Amendment::Cancel).await?;
                output.show(&done, |done| format!("notification {} is cancelled", done.id))
            }
            Action::Send { id } => {
                let now = Amendment::Move(When::After(Duration::ZERO));
                let done = amend(session, &pipeline, *id, now).await?;
                output.show(&done, |done| {
                    format!("notification {} is due; it is sent in the order of its bot", done.id)
                })
            }
        }
    })
    .await
}

async fn list(
    session: &Session,
    output: Output,
    pipeline: &PipelineName,
    bot: &BotId,
    limit: u32,
) -> Result<(), CliError> {
    let (queue, limit) = (session.view(pipeline), limit as usize);
    let (mut found, mut after) = (Vec::new(), None);
    while found.len() < limit {
        let part = queue.pending_of(bot, after, limit - found.len()).await?;
        found.extend(part.found.into_iter().map(Listed::from));
        after = part.next;
        if after.is_none() {
            break;
        }
    }
    let now_ms = millis(SystemClock.now());
    output.show(&found, |found| {
        let mut table = Table::new(&["ID", "DUE", "STATE", "USER", "TYPE", ">ATTEMPTS", "URL"]);
        for one in found {
            let due = match one.due_ms.checked_sub(now_ms) {
                Some(left) => format!("in {}", duration(left)),
                None => format!("{} ago", duration(now_ms - one.due_ms)),
            };
            table.row(&[
                one.id.to_string(),
                due,
                one.state.to_string(),
                one.uid.clone(),
                one.kind.clone(),
                number(one.attempts.into()),
                one.url.clone(),
            ]);
        }
        if table.is_empty() {
            "no notification of this bot is scheduled".to_owned()
        } else {
            output.table(&table)
        }
    })
}

async fn amend(
    session: &Session,
    pipeline: &PipelineName,
    id: NotificationId,
    amendment: Amendment,
) -> Result<Done, CliError> {
    let queue = session.queue(pipeline);
    let kept = queue.notification(id).await?.ok_or(CliError::NoNotification)?;
    let cancels = amendment == Amendment::Cancel;
    let work = async {
        match queue.amend(&kept, amendment, SystemClock.now()).await? {
            Amended::Done => Ok(true),
            Amended::Not(State::Cancelled) if cancels => Ok(false),
            Amended::Not(state) => Err(CliError::NotificationOver(state)),
            Amended::Gone => Err(CliError::NoNotification),
        }
    };
    let action = Act::new(if cancels { "cancel notification" } else { "send notification" });
    let action = action.in_pipeline(pipeline).of_bot(Some(&kept.bot)).target(id);
    session.act(action, work, operator::changed).await?;
    Ok(Done { id, bot: kept.bot })
}
