//! `fairlane top`: the live view of an operator.
//!
//! Three parts run concurrently, so that a Redis that is slow or gone never holds up a key: the
//! [reader](read) reads figures, the [actor](act) pauses and resumes, and the loop below handles keys and
//! draws. The [drawing](draw) is a function of the [state](state) and the time, and the state changes only
//! through keys and readings.

mod act;
mod draw;
mod keys;
mod read;
mod rows;
mod screen;
mod state;
#[cfg(test)]
mod tests;

use std::io::{self, IsTerminal as _};
use std::time::Duration;

use clap::Args;
use crossterm::event::{Event, EventStream, KeyEventKind};
use futures_util::StreamExt as _;
use tokio::sync::mpsc;
use tokio::time::{MissedTickBehavior, interval};

use self::keys::Effect;
use self::read::Reader;
use self::screen::Screen;
use self::state::State;
use super::error::CliError;
use super::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::config::Config;
use crate::signals::Signals;
use crate::telemetry;

/// Interval of drawing without news: ages grow.
const TICK: Duration = Duration::from_secs(1);
/// Number of commands of the operator that wait for the one before.
const COMMANDS: usize = 8;

const EXAMPLES: &str = "\
Examples:
  fairlane top
  fairlane top --interval 10s     read less often
  NO_COLOR=1 fairlane top

Keys: Tab changes the pane, s the order, / filters by the start of a name, p pauses or resumes what is
selected, Enter shows more, ? helps, q ends.";

/// Arguments of `fairlane top`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct TopArgs {
    /// Time between two updates, from 500ms to 1m. It grows if Redis is slow: reading takes at most a
    /// fifth of the time.
    #[arg(long, value_name = "DURATION", default_value = "2s", value_parser = pause)]
    interval: Duration,
}

fn pause(text: &str) -> Result<Duration, String> {
    let pause = humantime::parse_duration(text).map_err(|error| error.to_string())?;
    let fits = (Duration::from_millis(500)..=Duration::from_secs(60)).contains(&pause);
    fits.then_some(pause).ok_or_else(|| "write a duration from 500ms to 1m, such as 2s".to_owned())
}

/// Shows the view until a key or a signal ends it.
pub(super) async fn top(config: Config, args: TopArgs) -> Result<(), CliError> {
    if !io::stdout().is_terminal() {
        return Err(CliError::NoTerminal);
    }
    let mut signals = Signals::listen().map_err(CliError::Signals)?;
    Session::briefly(config, async |session| {
        let (commands, for_actor) = mpsc::channel(COMMANDS);
        let (told, mut answers) = mpsc::channel(COMMANDS);
        let (reader, mut readings) = Reader::new(session, args.interval);
        let wishes = reader.wishes();
        let mut state = State::new(!telemetry::no_colour(), args.interval);
        let look = async {
            let mut screen = Screen::open()?;
            let mut events = EventStream::new();
            let mut tick = interval(TICK);
            tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                screen.draw(&state, millis(SystemClock.now()))?;
                let effect = tokio::select! {
                    () = signals.next() => return Ok(()),
                    event = events.next() => match event {
                        Some(Ok(Event::Key(key))) if key.kind != KeyEventKind::Release => {
                            state.press(key)
                        }
                        Some(Ok(_)) => None,
                        Some(Err(error)) => return Err(CliError::Terminal(error)),
                        // The terminal is gone.
                        None => return Ok(()),
                    },
                    Some(reading) = readings.recv() => {
                        state.take(reading);
                        None
                    }
                    Some(answer) = answers.recv() => {
                        state.tell(answer, millis(SystemClock.now()));
                        Some(Effect::Read)
                    }
                    _ = tick.tick() => None,
                };
                match effect {
                    None => {}
                    Some(Effect::Quit) => return Ok(()),
                    Some(Effect::Read) => wishes.want(state.wanted()),
                    Some(Effect::Do(command)) => {
                        let sent = commands.try_send(command);
                        if sent.is_err() {
                            let text = "the commands before are not done yet".to_owned();
                            state.tell(Err(text), millis(SystemClock.now()));
                        }
                    }
                }
            }
        };
        tokio::select! {
            biased;
            result = look => result,
            () = reader.run() => Ok(()),
            () = act::run(session, for_actor, told) => Ok(()),
        }
    })
    .await
}
