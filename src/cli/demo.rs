//! `fairlane demo`.

use std::io::{self, IsTerminal, Write as _};
use std::num::NonZeroU32;

use clap::Args;

use super::error::CliError;
use crate::demo::{self, Addresses, Look, Options, Summary, WAITING_MAX};
use crate::sandbox::SandboxError;

const EXAMPLES: &str = "\
Examples:
  fairlane demo
  fairlane demo --bots 1000 --rate 20000 --seconds 60

Ctrl-C stops it early: it prints its results so far, and exits with 0.";

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
    let ended = Box::pin(demo::run(options, started, show)).await;
    if matches!(ended, Err(SandboxError::Interrupted)) {
        say("Stopped early, before the first event.");
        return Ok(());
    }
    let summary = ended?;
    say(&format!("\n{}", in_words(&summary)));
    if summary.held_back {
        say(&format!("\n{}", held_back(rate)));
    } else if summary.seconds > seconds + KEPT_UP_S {
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

/// What to do when too many events waited.
fn held_back(rate: u64) -> String {
    format!(
        "{WAITING_MAX} events waited, so the demo sent fewer than {rate} a second. The events of one bot\n\
         are handled one after the other: take more bots, or fewer events: fairlane demo --rate {}",
        (rate / 4).max(1)
    )
}

fn in_words(summary: &Summary) -> String {
    let Summary { sent, handled, retried, lost, reordered, seconds, .. } = summary;
    let count = format!(
        "{handled} of {sent} events handled in {seconds:.1} s. {retried} slices failed and were retried."
    );
    let faults = if summary.stopped_early {
        format!(
            "Stopped early: the other events were not handled. Handled out of order: {reordered}."
        )
    } else {
        format!("Lost: {lost}. Handled out of order: {reordered}.")
    };
    if *handled == 0 {
        return format!("{count}\n{faults}");
    }
    format!(
        "{count}\n{faults}\n\
         Half of the quiet bots' events were handled within {:.1} ms, 99 of 100 within {:.1} ms\n\
         (one that fails comes back after 50 ms). The campaigns' took {:.1} ms and {:.1} ms:\n\
         a campaign delays only its own bot.",
        summary.quiet_p50_ms, summary.quiet_p99_ms, summary.busy_p50_ms, summary.busy_p99_ms
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_demo_that_was_stopped_early_tells_no_loss_and_no_time_of_no_event() {
        let mut summary = Summary {
            sent: 100,
            held_back: false,
            stopped_early: true,
            handled: 90,
            retried: 1,
            lost: 0,
            reordered: 0,
            seconds: 1.5,
            quiet_p50_ms: 0.5,
            quiet_p99_ms: 5.0,
            busy_p50_ms: 10.0,
            busy_p99_ms: 90.0,
        };
        let told = in_words(&summary);
        let start = "90 of 100 events handled in 1.5 s. 1 slices failed and were retried.\n\
                     Stopped early: the other events were not handled. Handled out of order: 0.\n\
                     Half of";
        assert!(told.starts_with(start), "{told}");
        summary.handled = 0;
        let told = in_words(&summary);
        assert!(told.ends_with("Handled out of order: 0."), "{told}");
        summary.stopped_early = false;
        assert!(in_words(&summary).contains("\nLost: 0. Handled out of order: 0."));
    }
}
