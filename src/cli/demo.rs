//! `fairlane demo`.

use std::io::{self, IsTerminal, Write as _};
use std::num::NonZeroU32;

use clap::Args;

use super::error::CliError;
use crate::demo::{self, Addresses, Look, Options, Summary};

const EXAMPLES: &str = "\
Examples:
  fairlane demo
  fairlane demo --bots 1000 --rate 20000 --seconds 60";

/// The last events may take this long after the last one was sent.
const KEPT_UP_S: f64 = 2.0;

/// Arguments of `fairlane demo`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub struct DemoArgs {
    /// Number of bots with traffic.
    #[arg(long, value_name = "N", default_value = "5000")]
    pub bots: NonZeroU32,
    /// Events published per second.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "2000")]
    pub rate: NonZeroU32,
    /// Duration.
    #[arg(long, value_name = "S", default_value = "20")]
    pub seconds: NonZeroU32,
}

/// Runs the demo.
pub(super) async fn demo(args: DemoArgs) -> Result<(), CliError> {
    let options = Options {
        bots: usize::try_from(args.bots.get()).unwrap_or(usize::MAX),
        rate: args.rate.get().into(),
        seconds: args.seconds.get().into(),
    };
    say(&format!(
        "For {} seconds, {} bots put {} events a second on a private bus; now and then one of\n\
         five busy bots adds a campaign. Fairlane hands every bot's events to a handler, in order,\n\
         and no busy bot delays a quiet one. One slice in a hundred fails and is tried again.\n",
        options.seconds, options.bots, options.rate
    ));
    let (rate, seconds) = (options.rate, f64::from(args.seconds.get()));
    let terminal = io::stdout().is_terminal();
    let mut drawn = 0;
    let started = |at: &Addresses| {
        if let Some(page) = at.page {
            say(&format!("  Look on at    http://{page}/"));
        }
        if let Some(metrics) = at.metrics {
            say(&format!("  Metrics at    http://{metrics}/metrics"));
        }
        say("  Stop early    Ctrl-C\n");
    };
    let show = |look: &Look| {
        let text = demo::draw(look);
        // Without a terminal, figures cannot be overwritten: print one look in ten.
        if terminal {
            say(&format!("{}{}", up(drawn), text.trim_end()));
            drawn = text.lines().count();
        } else if look.stage == "done" || look.elapsed.as_millis() % 5_000 < 500 {
            say(&text);
        }
    };
    let summary = Box::pin(demo::run(options, started, show)).await?;
    say(&format!("\n{}", in_words(&summary)));
    if summary.seconds > seconds + KEPT_UP_S {
        say(&format!("\n{}", too_fast(rate)));
    }
    if summary.lost + summary.reordered > 0 {
        return Err(CliError::Faults { lost: summary.lost, reordered: summary.reordered });
    }
    Ok(())
}

/// Prints a line. A closed pipe ends the figures, not the demo.
fn say(text: &str) {
    let _ = writeln!(io::stdout(), "{text}");
}

/// Moves the cursor to the first of the lines drawn last, and clears them.
fn up(lines: usize) -> String {
    if lines == 0 { String::new() } else { format!("\x1b[{lines}A\x1b[J") }
}

/// What to do when events arrived faster than this machine could handle them.
fn too_fast(rate: u64) -> String {
    format!(
        "This machine could not keep up with {rate} events a second, so all events waited for the\n\
         processor. See how a campaign delays only its own bot: fairlane demo --rate {}",
        (rate / 4).max(1)
    )
}

fn in_words(summary: &Summary) -> String {
    let Summary { sent, handled, retried, lost, reordered, seconds, .. } = summary;
    format!(
        "{handled} of {sent} events handled in {seconds:.1} s. {retried} slices failed and were retried.\n\
         Lost: {lost}. Handled out of order: {reordered}.\n\
         Half of the quiet bots' events were handled within {:.1} ms, 99 of 100 within {:.1} ms\n\
         (one that fails comes back after 50 ms). The campaigns' took {:.1} ms and {:.1} ms:\n\
         a campaign delays only its own bot.",
        summary.quiet_p50_ms, summary.quiet_p99_ms, summary.busy_p50_ms, summary.busy_p99_ms
    )
}
