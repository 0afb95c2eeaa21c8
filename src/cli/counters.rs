//! `fairlane counters`.
//!
//! An import reads its file twice. The first pass checks every line and derives the key of the
//! import from the content. The second pass sends the lines, starting after the last line that an
//! earlier call imported.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{self, BufRead, BufReader, Read as _};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use clap::{Args, Subcommand};
use indicatif::{ProgressBar, ProgressStyle};
use jiff::civil::Date;
use serde::Serialize;
use sha2::{Digest as _, Sha256};

use super::error::CliError;
use super::operator;
use super::output::{Output, count, plain, tell};
use super::session::Session;
use crate::clock::SystemClock;
use crate::config::Config;
use crate::counters::import::{ImportError, import};
use crate::counters::view::{self, BadLine, Calendar, Line};
use crate::id::{BotId, PipelineName};
use crate::queue::Queue;
use crate::trail::Action as Act;

/// Maximum number of lines of one step, so that all its bad lines are counted.
const LINES: u64 = view::BAD_MAX as u64;
/// Bytes after which a step takes no further line. Also the maximum length of a line.
const BYTES: usize = 1 << 20;
/// Maximum number of bad lines to show. Further ones are only counted.
const SHOWN_MAX: u64 = 20;
/// Pause before a retry while Fairlane has no room for the import.
const AGAIN: Duration = Duration::from_millis(250);
/// Interval of messages during such a wait.
const SAY: Duration = Duration::from_secs(30);

const EXAMPLES: &str = "\
Examples:
  fairlane counters import history.ndjson --bot shop-7";
const IMPORT_EXAMPLES: &str = r#"Examples:
  fairlane counters import history.ndjson --bot shop-7
  fairlane counters import history.ndjson --bot shop-7 --key moved-in-2026 --json

A line replaces all views counted for its ad:
  {"ad":"ad-1","total":1200,"days":{"2026-11-01":3,"2026-11-02":5}}

All lines are checked first: a file with a bad line is not imported at all. To continue after
a failure, run the command again: imported lines are skipped for 7 days."#;

/// Arguments of `fairlane counters`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct CountersArgs {
    #[command(subcommand)]
    action: Action,
}

#[derive(Debug, Subcommand)]
enum Action {
    /// Import totals and days from another system: one ad per line, in JSON.
    #[command(after_help = IMPORT_EXAMPLES)]
    Import(ImportArgs),
}

#[derive(Debug, Args)]
struct ImportArgs {
    /// The file, one ad per line.
    file: PathBuf,
    /// The bot of the ads.
    #[arg(long)]
    bot: BotId,
    /// The key of the import. Default: derived from the content of the file.
    #[arg(long, value_parser = key)]
    key: Option<String>,
    /// Print one JSON object instead of a sentence.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Summary {
    key: String,
    imported: u64,
    skipped: u64,
}

fn key(text: &str) -> Result<String, String> {
    let usable = (1..=255).contains(&text.len()) && text.bytes().all(|c| c.is_ascii_graphic());
    if usable { Ok(text.to_owned()) } else { Err("write 1 to 255 visible characters".to_owned()) }
}

/// Imports counters.
pub(super) async fn counters(config: Config, args: CountersArgs) -> Result<(), CliError> {
    let Action::Import(ImportArgs { file, bot, key, json }) = args.action;
    let name = file.display().to_string();
    let unreadable = |source| CliError::InputMissing { name: name.clone(), source };
    let days = Calendar::new(Arc::new(SystemClock), config.counters.time_zone.clone()).days();
    let (size, found) = check(&file, &name, &days).map_err(unreadable)?;
    let key = key.unwrap_or(found);
    if size.bad > 0 {
        return Err(CliError::ImportRefused(size.bad));
    }
    let summary = Session::with(config, async |session| {
        let pipeline = PipelineName::parse(crate::counters::PIPELINE)
            .expect("every configuration has the built-in pipelines, with this name");
        let queue = session.queue(&pipeline);
        let action = Act::new("import counters").in_pipeline(&pipeline).of_bot(Some(&bot));
        let action = action.target(&key);
        session.note(action.clone(), "started").await;
        let progress = bar(size.bytes);
        let job = Job { queue, bot, key, days, name: &name, progress };
        let told = |summary: &Summary| operator::number(&summary.imported);
        let summary = session.act(action, job.run(&file), told).await;
        job.progress.finish_and_clear();
        summary
    })
    .await?;
    Output::new(json).show(&summary, |summary| {
        let skipped = match summary.skipped {
            0 => String::new(),
            lines => format!(", {} imported before", count(lines, "line")),
        };
        format!("imported {}{skipped}", count(summary.imported, "line"))
    })
}

/// The first pass over a file.
#[derive(Debug, Default)]
struct Size {
    bytes: u64,
    /// Number of unusable lines.
    bad: u64,
}

/// Checks every line, and derives the key from the content.
fn check(path: &Path, name: &str, days: &RangeInclusive<Date>) -> io::Result<(Size, String)> {
    let (mut size, mut hash) = (Size::default(), Sha256::new());
    let mut steps = Steps::open(path)?;
    while let Some(step) = steps.next()? {
        hash.update(&step.text);
        size.bytes += step.text.len() as u64;
        let Err(bad) = step.lines(days) else { continue };
        for (number, reason) in bad {
            size.bad += 1;
            if size.bad <= SHOWN_MAX {
                tell(format_args!("{name}: line {number}: {}", plain(&reason.to_string())));
            }
            if size.bad == SHOWN_MAX {
                tell(format_args!("{name}: further bad lines are only counted"));
            }
        }
    }
    let mut key = "sha256:".to_owned();
    for byte in hash.finalize() {
        // Writing to a `String` cannot fail.
        let _ = write!(key, "{byte:02x}");
    }
    Ok((size, key))
}

fn bar(bytes: u64) -> ProgressBar {
    // Shows nothing if standard error is not a terminal.
    let bar = ProgressBar::new(bytes);
    let template = "{bar:30} {percent:>3}%  {msg}  {eta} left";
    bar.set_style(ProgressStyle::with_template(template).expect("a constant, and well-formed"));
    bar.enable_steady_tick(Duration::from_millis(100));
    bar
}

struct Job<'a> {
    queue: Queue,
    bot: BotId,
    key: String,
    /// The days that a line may have.
    days: RangeInclusive<Date>,
    name: &'a str,
    progress: ProgressBar,
}

impl Job<'_> {
    async fn run(&self, path: &Path) -> Result<Summary, CliError> {
        let done = self.queue.imported(&self.bot, &self.key).await?;
        let mut summary = Summary { key: self.key.clone(), imported: 0, skipped: 0 };
        let broken = |source| CliError::ImportInput { name: self.name.to_owned(), source };
        let mut steps = Steps::open(path).map_err(broken)?;
        while let Some(step) = steps.next().map_err(broken)? {
            let lines =
                step.lines(&self.days).map_err(|bad| CliError::ImportRefused(bad.len() as u64))?;
            let before = lines.partition_point(|line| line.number <= done);
            summary.skipped += before as u64;
            self.send(&lines[before..], &mut summary).await?;
            self.progress.set_message(count(summary.imported, "line"));
            self.progress.inc(step.text.len() as u64);
        }
        Ok(summary)
    }

    /// Sends these lines until all are accepted. Waits while Fairlane has no room.
    async fn send(&self, mut lines: &[Line], summary: &mut Summary) -> Result<(), CliError> {
        let mut waits: Option<Wait> = None;
        while !lines.is_empty() {
            match import(&self.queue, &self.bot, &self.key, lines).await {
                Ok(progress) => {
                    summary.imported += progress.imported;
                    summary.skipped += progress.skipped;
                    let taken = lines.partition_point(|line| line.number <= progress.last);
                    lines = &lines[taken..];
                    waits = None;
                }
                Err(wait @ (ImportError::Waiting { .. } | ImportError::Full { .. })) => {
                    let now = Instant::now();
                    if let Some(line) = waits.get_or_insert(Wait::since(now)).line(&wait, now) {
                        self.progress.suspend(|| tell(line));
                    }
                    tokio::time::sleep(AGAIN).await;
                }
                Err(error) => {
                    let (passing, imported) = (error.is_passing(), summary.imported);
                    let source = Box::new(error);
                    return Err(CliError::ImportStopped { source, passing, imported });
                }
            }
        }
        Ok(())
    }
}

/// A wait for room, in which nothing is imported.
#[derive(Debug, Clone, Copy)]
struct Wait {
    since: Instant,
    say_at: Instant,
}

impl Wait {
    fn since(since: Instant) -> Self {
        Self { since, say_at: since }
    }

    /// What to say now, if something.
    fn line(&mut self, reason: &ImportError, now: Instant) -> Option<String> {
        if now < self.say_at {
            return None;
        }
        self.say_at = now + SAY;
        let waited = now.duration_since(self.since).as_secs();
        Some(if waited == 0 {
            format!("waiting: {reason}")
        } else {
            format!(
                "still waiting after {waited} s: {reason}; check that a fairlane serve with the role work runs, and that it reaches MongoDB"
            )
        })
    }
}

/// Consecutive lines, and the number of the first one.
#[derive(Debug)]
struct Step {
    text: Vec<u8>,
    first: u64,
    /// The number of a line that is too long. It ends the step, which holds only its start.
    too_long: Option<u64>,
}

impl Step {
    fn lines(&self, days: &RangeInclusive<Date>) -> Result<Vec<Line>, Vec<(u64, BadLine)>> {
        let lines = view::lines(&self.text, self.first, days);
        let Some(number) = self.too_long else { return lines };
        let mut bad = lines.err().unwrap_or_default();
        bad.retain(|(other, _)| *other != number);
        bad.push((number, BadLine::TooLong { max: BYTES }));
        Err(bad)
    }
}

/// Cuts a file into steps. Every step but the last has at least one line that is not empty.
struct Steps {
    input: BufReader<File>,
    /// Number of lines read so far.
    lines: u64,
}

impl Steps {
    fn open(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::other("not a regular file; an import reads its file twice"));
        }
        Ok(Self { input: BufReader::with_capacity(256 << 10, file), lines: 0 })
    }

    fn next(&mut self) -> io::Result<Option<Step>> {
        let first = self.lines + 1;
        let (mut text, mut too_long, mut empty) = (Vec::new(), None, true);
        while empty || self.lines + 1 < first + LINES && text.len() < BYTES {
            let start = text.len();
            let limit = BYTES as u64 + 1;
            if self.input.by_ref().take(limit).read_until(b'\n', &mut text)? == 0 {
                break;
            }
            self.lines += 1;
            empty &= text[start..].trim_ascii().is_empty();
            if text.last() != Some(&b'\n') && text.len() - start > BYTES {
                self.skip_line()?;
                too_long = Some(self.lines);
                break;
            }
        }
        Ok((!text.is_empty()).then_some(Step { text, first, too_long }))
    }

    /// Skips the rest of a line.
    fn skip_line(&mut self) -> io::Result<()> {
        loop {
            let chunk = self.input.fill_buf()?;
            let (used, ended) = match chunk.iter().position(|byte| *byte == b'\n') {
                Some(end) => (end + 1, true),
                None => (chunk.len(), chunk.is_empty()),
            };
            self.input.consume(used);
            if ended {
                return Ok(());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    fn steps(text: &[u8]) -> Vec<Step> {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(text).unwrap();
        let mut steps = Steps::open(file.path()).unwrap();
        std::iter::from_fn(|| steps.next().unwrap()).collect()
    }

    fn read(step: &Step) -> Result<Vec<Line>, Vec<(u64, BadLine)>> {
        step.lines(&(view::FIRST_DAY..=view::FIRST_DAY))
    }

    #[test]
    fn steps_are_bounded_follow_each_other_and_lose_nothing() {
        let mut text = Vec::new();
        for number in 0..2_500 {
            let empty = if number % 1_000 == 999 { "\n".repeat(1_500) } else { String::new() };
            writeln!(text, "{empty}{{\"ad\":\"{number}\",\"total\":{number}}}").unwrap();
        }
        text.pop();
        let steps = steps(&text);
        assert_eq!(steps.iter().flat_map(|step| step.text.clone()).collect::<Vec<_>>(), text);
        let lines: Vec<Line> = steps.iter().flat_map(|step| read(step).unwrap()).collect();
        assert!(steps.iter().all(|step| !read(step).unwrap().is_empty()));
        assert_eq!(lines.len(), 2_500);
        let follow = lines.windows(2).all(|pair| pair[0].upto == pair[1].before);
        assert!(follow && lines[0].before == 0);
    }

    #[test]
    fn a_long_wait_is_told_again_and_again() {
        let start = Instant::now();
        let mut wait = Wait::since(start);
        let mut line = |seconds: u64| {
            let reason = ImportError::Waiting { waiting: 2_000 };
            wait.line(&reason, start + Duration::from_secs(seconds))
        };
        let first = line(0).unwrap();
        assert!(first.starts_with("waiting: 2000 replacements"), "{first}");
        assert_eq!((line(1), line(29)), (None, None));
        let again = line(31).unwrap();
        assert!(again.starts_with("still waiting after 31 s: 2000"), "{again}");
        assert_eq!(line(60), None);
        assert!(line(61).is_some());
    }

    #[test]
    fn a_line_that_is_too_long_is_told_and_those_behind_it_are_checked() {
        let mut text = b"{\"ad\":\"a\",\"total\":1}\n".to_vec();
        text.extend(vec![b'x'; 3 * BYTES]);
        text.extend(b"\nnonsense\n");
        let bad: Vec<_> =
            steps(&text).iter().filter_map(|step| read(step).err()).flatten().collect();
        assert_eq!(bad.len(), 2, "{bad:?}");
        assert_eq!((bad[0].0, bad[0].1.to_string()), (2, "longer than 1048576 bytes".to_owned()));
        assert_eq!(bad[1].0, 3);
    }
}
