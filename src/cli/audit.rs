//! `fairlane audit`.

use clap::Args;

use super::error::CliError;
use super::output::{Output, Table, duration};
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::replay::{ReplayRefused, read_time};
use crate::trail::{self, Action, Filter, Noted};

const EXAMPLES: &str = "\
Examples:
  fairlane audit                                 the last 50 actions, the newest first
  fairlane audit --bot shop-7 --since '2h ago'
  fairlane audit --pipeline billing -n 1000 --json";

/// Arguments of `fairlane audit`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct AuditArgs {
    /// Only actions on this bot.
    #[arg(long, value_name = "B")]
    bot: Option<BotId>,
    /// Only actions on this pipeline and its bots.
    #[arg(long, short, value_name = "P")]
    pipeline: Option<PipelineName>,
    /// Only actions since this time: RFC 3339 with a zone, or how long ago, such as '2h ago'.
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Maximum number of actions.
    #[arg(short = 'n', long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u32).range(1..=2_000))]
    limit: u32,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// Shows what operators did.
pub(super) async fn audit(config: Config, args: AuditArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    Session::with(config, async |session| {
        let now = session.server.time().await?;
        let since_ms = match &args.since {
            None => 0,
            Some(text) => millis(
                read_time(text, now)
                    .map_err(|source| ReplayRefused::Time { place: "--since", source })?,
            ),
        };
        let filter = Filter { bot: args.bot.clone(), pipeline: args.pipeline.clone(), since_ms };
        let page = trail::read(session.link(), &filter, None, args.limit as usize).await?;
        output.show(&page.actions, |actions| shown(output, actions))
    })
    .await
}

fn shown(output: Output, actions: &[Noted]) -> String {
    if actions.is_empty() {
        return "no action of an operator is kept".to_owned();
    }
    let now_ms = millis(SystemClock.now());
    let mut table = Table::new(&[">AGE", "WHO", "ACTION", "PIPELINE", "BOT", "RESULT", "DETAILS"]);
    for Noted { time_ms, action } in actions {
        let Action { who, action: name, pipeline, bot, result, .. } = action;
        table.row(&[
            duration(now_ms.saturating_sub(*time_ms)),
            who.clone(),
            name.clone(),
            pipeline.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
            bot.as_ref().map_or_else(|| "-".to_owned(), ToString::to_string),
            result.clone(),
            action.about(),
        ]);
    }
    output.table(&table)
}
