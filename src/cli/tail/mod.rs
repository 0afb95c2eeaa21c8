//! `fairlane tail`.

mod lines;
mod writer;

use std::collections::BTreeSet;
use std::time::Duration;

use clap::Args;
use futures_util::future::join_all;
use tokio::time::{Instant, sleep};

use self::lines::Lines;
use self::writer::Writer;
use super::error::CliError;
use super::output::{Output, duration, tell};
use super::session::Session;
use crate::clock::millis;
use crate::config::Config;
use crate::id::{BotId, PipelineName};
use crate::queue::{Follower, News, Outcome, Wanted};
use crate::redis::RedisError;
use crate::signals::Signals;

/// Interval of looks. The processes write their attempts as often.
const INTERVAL: Duration = Duration::from_millis(500);
/// The same while Redis does not answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Interval of looking for new pipelines.
const PIPELINES: Duration = Duration::from_secs(10);
/// Interval of notes that attempts may be missing.
const GAPS: Duration = Duration::from_secs(60);

const EXAMPLES: &str = "\
Examples:
  fairlane tail                                all pipelines, from the last 10 attempts on
  fairlane tail --failing                      only what went wrong
  fairlane tail --bot shop-7 --pipeline orders
  fairlane tail -n 0 --json | jq -c '{bot, result, status}'

An attempt appears within about a second after it ends. Press Ctrl-C to stop.";

/// Arguments of `fairlane tail`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct TailArgs {
    /// Only attempts of this bot. May be repeated.
    #[arg(long, value_name = "BOT")]
    bot: Vec<BotId>,
    /// Only attempts in this pipeline. May be repeated. Default: all pipelines.
    #[arg(long, short, value_name = "P")]
    pipeline: Vec<PipelineName>,
    /// Only attempts that failed: at least one event is tried again or became a dead letter.
    #[arg(long)]
    failing: bool,
    /// Number of attempts before now that are shown first.
    #[arg(long, short = 'n', value_name = "N", default_value_t = 10, value_parser = clap::value_parser!(u32).range(0..=1_000))]
    last: u32,
    /// Print one JSON object per attempt instead of a line.
    #[arg(long)]
    json: bool,
}

/// Follows attempts until a signal, or until nothing reads standard output.
pub(super) async fn tail(config: Config, args: TailArgs) -> Result<(), CliError> {
    let mut signals = Signals::listen().map_err(CliError::Signals)?;
    Session::briefly(config, async |session| {
        let writer = Writer::start()?;
        let mut tail = Tail::new(session, &args, &writer);
        tokio::select! {
            biased;
            () = signals.next() => Ok(()),
            // Nothing reads the output any more, as after `| head`.
            result = writer.closed() => result,
            result = tail.run() => result,
        }
    })
    .await
}

struct Tail<'a> {
    session: &'a Session,
    args: &'a TailArgs,
    writer: &'a Writer,
    wanted: Wanted,
    lines: Lines,
    followers: Vec<Follower>,
    /// Pipelines that keep no attempts by the configuration.
    without: BTreeSet<PipelineName>,
    /// Since when Redis does not answer.
    silent: Option<Instant>,
    /// When a note about missing attempts was printed.
    noted: Option<Instant>,
}

impl<'a> Tail<'a> {
    fn new(session: &'a Session, args: &'a TailArgs, writer: &'a Writer) -> Self {
        let bots = args.bot.iter().cloned().collect();
        Self {
            session,
            args,
            writer,
            wanted: Wanted { bots, failing: args.failing },
            lines: Lines::new(Output::new(args.json), args.json, writer::columns()),
            followers: Vec::new(),
            without: BTreeSet::new(),
            silent: None,
            noted: None,
        }
    }

    async fn run(&mut self) -> Result<(), CliError> {
        self.start().await?;
        let mut listed = Instant::now();
        loop {
            let (more, failed) = self.look().await?;
            if let Some(error) = failed {
                self.waits(error)?;
                sleep(PATIENCE).await;
                continue;
            }
            self.answers();
            if self.args.pipeline.is_empty() && listed.elapsed() >= PIPELINES {
                listed = Instant::now();
                if let Err(error) = self.add_new_pipelines().await {
                    self.waits(error)?;
                }
            }
            if !more {
                sleep(INTERVAL).await;
            }
        }
    }

    /// Starts to follow, and shows the last attempts.
    async fn start(&mut self) -> Result<(), CliError> {
        let mut names = BTreeSet::new();
        for name in &self.args.pipeline {
            names.extend(self.session.pipelines_or(Some(name)).await?);
        }
        if self.args.pipeline.is_empty() {
            names.extend(self.session.pipelines().await?);
        }
        if names.is_empty() {
            return Err(CliError::NoPipeline);
        }
        let last = self.args.last as usize;
        let mut outcomes = Vec::new();
        for name in names {
            let found = self.follow(&name, last).await?;
            outcomes.extend(found.into_iter().map(|outcome| (name.clone(), outcome)));
        }
        if self.followers.is_empty() {
            let names = self.without.iter().cloned().collect();
            return Err(CliError::NoHistory(names));
        }
        self.say();
        self.show(outcomes, Some(last)).await
    }

    /// Says what is followed.
    fn say(&self) {
        let names: Vec<_> =
            self.followers.iter().map(|follower| follower.queue().name().as_str()).collect();
        let bots: Vec<_> =
            self.wanted.bots.iter().map(|bot| super::output::plain(bot.as_str())).collect();
        let of = if bots.is_empty() { String::new() } else { format!(" of {}", bots.join(", ")) };
        let what = if self.wanted.failing { "failed attempts" } else { "attempts" };
        tell(format_args!("following {what}{of} in {}; Ctrl-C ends it", names.join(", ")));
    }

    /// Follows a pipeline, unless it keeps no attempts. Returns its last ones.
    async fn follow(
        &mut self,
        name: &PipelineName,
        last: usize,
    ) -> Result<Vec<Outcome>, RedisError> {
        let config = self.session.config.pipelines.get(name);
        if config.is_some_and(|config| config.history.slices == 0) {
            if self.without.insert(name.clone()) {
                tell(format_args!(
                    "pipeline {name} keeps no attempts (history.slices = 0), so none of it are shown"
                ));
            }
            return Ok(Vec::new());
        }
        let queue = self.session.view(name);
        let (follower, outcomes) = Follower::start(queue, self.wanted.clone(), last).await?;
        self.lines.widen(name);
        self.followers.push(follower);
        Ok(outcomes)
    }

    async fn add_new_pipelines(&mut self) -> Result<(), RedisError> {
        for name in self.session.pipelines().await? {
            let is_known = self.followers.iter().any(|known| *known.queue().name() == name);
            if !is_known && !self.without.contains(&name) {
                self.follow(&name, 0).await?;
                if !self.without.contains(&name) {
                    tell(format_args!("following pipeline {name} too"));
                }
            }
        }
        Ok(())
    }

    /// Shows what is new in all pipelines. Returns whether there is more, and an error of Redis.
    async fn look(&mut self) -> Result<(bool, Option<RedisError>), CliError> {
        let looks = self.followers.iter_mut().map(|follower| async {
            let news = follower.look().await;
            (follower.queue().name().clone(), news)
        });
        let mut outcomes = Vec::new();
        let (mut more, mut gap, mut failed) = (false, false, None);
        for (name, news) in join_all(looks).await {
            match news {
                Ok(News { outcomes: new, more: of_it, gap: missing }) => {
                    outcomes.extend(new.into_iter().map(|outcome| (name.clone(), outcome)));
                    (more, gap) = (more || of_it, gap || missing);
                }
                Err(error) => failed = Some(error),
            }
        }
        self.show(outcomes, None).await?;
        if gap && self.noted.is_none_or(|noted| noted.elapsed() >= GAPS) {
            self.noted = Some(Instant::now());
            tell(
                "some attempts may be missing: there are more of them than history.max_bytes keeps until they are shown",
            );
        }
        Ok((more, failed))
    }

    async fn show(
        &mut self,
        mut outcomes: Vec<(PipelineName, Outcome)>,
        last: Option<usize>,
    ) -> Result<(), CliError> {
        outcomes.sort_by_key(|(_, outcome)| outcome.attempt.end_ms());
        if let Some(last) = last {
            outcomes.drain(..outcomes.len().saturating_sub(last));
        }
        for line in self.lines.of(&outcomes)? {
            self.writer.write(line).await;
        }
        Ok(())
    }

    /// Notes that Redis does not answer. Returns the error if waiting does not help.
    fn waits(&mut self, error: RedisError) -> Result<(), CliError> {
        if !error.is_passing() {
            return Err(error.into());
        }
        if self.silent.is_none() {
            self.silent = Some(Instant::now());
            tell(format_args!("{error}; waiting until Redis answers"));
        }
        Ok(())
    }

    fn answers(&mut self) {
        if let Some(since) = self.silent.take() {
            let after = duration(millis(since.elapsed()));
            tell(format_args!("Redis answers again, after {after}"));
        }
    }
}
