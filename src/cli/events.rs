//! `fairlane events`.

use std::time::Duration;

use clap::{Args, Subcommand};

use super::attempts;
use super::error::CliError;
use super::output::{Output, Tone, duration, plain, tell};
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::find::{EventState, Found, InPipeline, Places, Wanted, find};
use crate::id::BotId;

/// The search of the bus ends after this time.
const WITHIN: Duration = Duration::from_secs(15);

const EXAMPLES: &str = "\
Examples:
  fairlane events find 01890a5d-ac96-774b-bcce-b302099a8057
  fairlane events find order-77 --bot shop-7";
const FIND_EXAMPLES: &str = "\
Examples:
  fairlane events find order-77                  where it is, and the attempts at it
  fairlane events find order-77 --bot shop-7     faster, and after the bus has forgotten it
  fairlane events find order-77 --since 2h --source /orders";

/// Arguments of `fairlane events`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct EventsArgs {
    /// Print JSON instead of text.
    #[arg(long, global = true)]
    json: bool,
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Find an event: on the bus, in a queue, done, dead, or why no pipeline has it.
    #[command(after_help = FIND_EXAMPLES)]
    Find {
        /// The id of the event.
        id: String,
        /// The bot of the event.
        #[arg(long, value_name = "BOT")]
        bot: Option<BotId>,
        /// The source of the event.
        #[arg(long, value_name = "SOURCE")]
        source: Option<String>,
        /// Read only the bus entries of the last DURATION, such as "2h".
        #[arg(long, value_name = "DURATION", value_parser = humantime::parse_duration)]
        since: Option<Duration>,
    },
}

/// Finds events.
pub(super) async fn events(config: Config, args: EventsArgs) -> Result<(), CliError> {
    let output = Output::new(args.json);
    let Action::Find { id, bot, source, since } = args.action;
    let now = SystemClock.now();
    let since = since.map(|since| now.saturating_sub(since));
    let wanted = Wanted { id, source, bot, since };
    let is_partial = !config.bus.sources.is_empty();
    Session::with(config, async |session| {
        let mut pipelines = Vec::new();
        for name in session.pipelines().await? {
            let config = session.config.pipelines.get(&name).cloned();
            pipelines.push((session.view(&name), config));
        }
        let places = Places {
            link: session.link(),
            streams: &session.config.bus.streams,
            pipelines,
            now,
            within: WITHIN,
            sees_all: true,
        };
        let found = find(&places, &wanted).await?;
        output.show(&found, |found| text(output, found, millis(now)))?;
        if is_partial {
            tell("note: the search reads queues and Redis streams, not bus.sources");
        }
        if found.known { Ok(()) } else { Err(CliError::NoEvent) }
    })
    .await
}

fn text(output: Output, found: &Found, now_ms: u64) -> String {
    let mut text = output.paint(Tone::Strong, &plain(&found.id));
    if let Some(event) = &found.event {
        text.extend(["\ntype      ", &plain(event.kind()), "\nsource    ", &plain(event.source())]);
        if let Some(subject) = event.subject() {
            text.extend(["\nsubject   ", &plain(subject)]);
        }
    }
    if let Some(bot) = &found.bot {
        text.extend(["\nbot       ", &plain(bot.as_str())]);
    }
    if let Some(bus) = &found.bus {
        let ago = duration(now_ms.saturating_sub(bus.time_ms));
        let offset = bus.offset.to_string();
        text.extend(["\nbus       ", &plain(&bus.stream), " ", &offset, ", ", &ago, " ago"]);
    }
    if let Some(bad) = &found.unreadable {
        let reason = plain(&bad.reason);
        text.extend(["\ninvalid   ", &plain(&bad.stream), " ", &plain(&bad.offset), ": ", &reason]);
    }
    let shown = |one: &&InPipeline| one.state != EventState::OtherType;
    for one in found.pipelines.iter().filter(shown) {
        let words = plain(&one.words(now_ms, duration));
        let name = output.paint(tone(one.state), one.pipeline.as_str());
        text.extend([
            "

", &name, "  ", &words,
        ]);
        if let Some(letter) = one.letter {
            let (letter, pipeline) = (letter.to_string(), one.pipeline.as_str());
            text.extend([
                "
  fairlane dead show ",
                &letter,
                " --pipeline ",
                pipeline,
            ]);
        }
        if !one.attempts.is_empty() {
            text.push('\n');
            text.push_str(&attempts::table(output, &one.attempts, now_ms));
        }
    }
    if found.event.is_some() && !found.pipelines.iter().any(|one| shown(&one)) {
        text.push_str("\n\nno pipeline takes its type");
    }
    if !found.known {
        text.push_str("\nnothing is known of it");
        if found.bot.is_none() {
            text.push_str("; name its bot (--bot) to search its queues too");
        }
    }
    text.extend(["\n\nsearched ", &found.searched_words(now_ms, duration)]);
    text
}

fn tone(state: EventState) -> Tone {
    match state {
        EventState::Done => Tone::Good,
        EventState::Dead | EventState::Expired => Tone::Bad,
        EventState::Parked | EventState::Paused => Tone::Warning,
        _ => Tone::Strong,
    }
}
