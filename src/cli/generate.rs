//! `fairlane generate`.

use std::num::NonZeroU32;
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::Instant;

use super::error::CliError;
use super::output::{Output, count};
use super::session::Session;
use crate::bus;
use crate::config::Config;
use crate::demo::{BUSY, Generator, Ids};
use crate::redis::Link;

const TICK: Duration = Duration::from_millis(20);
/// Maximum number of events per tick. A machine that was suspended then does not send everything
/// that it missed in one burst.
const TICK_MAX: usize = 10_000;

const EXAMPLES: &str = "\
Examples:
  fairlane generate
  fairlane generate --bots 1000 --rate 2000 --seconds 60";

/// Arguments of `fairlane generate`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct GenerateArgs {
    /// Number of bots with events: bot-5, bot-6 and so on. The first ones get the largest share.
    #[arg(long, value_name = "N", default_value = "200", value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    bots: u32,
    /// Events published per second.
    #[arg(long, value_name = "EVENTS_PER_S", default_value = "500")]
    rate: NonZeroU32,
    /// Duration. Default: until the command is stopped.
    #[arg(long, value_name = "S")]
    seconds: Option<NonZeroU32>,
    /// The target stream of Redis. Default: bus.publish.
    #[arg(long, value_name = "STREAM")]
    stream: Option<String>,
    /// Print one JSON object instead of a line.
    #[arg(long)]
    json: bool,
}

/// The result.
#[derive(Debug, Serialize)]
struct Summary {
    stream: String,
    published: u64,
}

/// Publishes generated events.
pub(super) async fn generate(config: Config, args: GenerateArgs) -> Result<(), CliError> {
    let stream = args.stream.clone().or_else(|| config.bus.published_stream().map(str::to_owned));
    let stream = stream.filter(|stream| !stream.is_empty());
    let stream = stream.ok_or(CliError::NoStream { command: "generate" })?;
    let output = Output::new(args.json);
    let summary = Session::with(config, async |session| {
        let mut terminate = signal(SignalKind::terminate()).map_err(CliError::Signals)?;
        let mut summary = Summary { stream, published: 0 };
        let publishing = publish(session.server.link(), &args, &mut summary);
        // Print the summary after an interrupt too.
        tokio::select! {
            biased;
            _ = tokio::signal::ctrl_c() => {}
            _ = terminate.recv() => {}
            done = publishing => done?,
        }
        Ok(summary)
    })
    .await?;
    output.show(&summary, |summary| {
        format!("published {} to {}", count(summary.published, "event"), summary.stream)
    })
}

async fn publish(link: &Link, args: &GenerateArgs, summary: &mut Summary) -> Result<(), CliError> {
    let progress = ProgressBar::new_spinner();
    let style = ProgressStyle::with_template("{spinner} {pos} events  {per_sec}  {elapsed}");
    progress.set_style(style.expect("a constant, and well-formed"));
    let bots = BUSY + usize::try_from(args.bots).unwrap_or(usize::MAX - BUSY);
    let mut generator = Generator::new(bots, Ids::unique());
    let (begun, mut asked) = (Instant::now(), 0);
    let mut ticks = tokio::time::interval(TICK);
    loop {
        ticks.tick().await;
        let elapsed = begun.elapsed();
        if args.seconds.is_some_and(|seconds| elapsed.as_secs() >= seconds.get().into()) {
            progress.finish_and_clear();
            return Ok(());
        }
        let due = u128::from(args.rate.get()) * elapsed.as_millis() / 1_000;
        let missing = usize::try_from(due.saturating_sub(asked)).unwrap_or(usize::MAX);
        asked = due;
        let mut batch = Vec::with_capacity(missing.min(TICK_MAX));
        for _ in 0..missing.min(TICK_MAX) {
            let bot = generator.quiet();
            batch.push(generator.event(bot)?);
        }
        if !batch.is_empty() {
            let events = batch.len() as u64;
            bus::publish(link, &summary.stream, &batch).await.map_err(|error| {
                CliError::publish_stopped(error, summary.published, events, None)
            })?;
            summary.published += events;
            progress.set_position(summary.published);
        }
    }
}
