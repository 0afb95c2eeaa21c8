//! `fairlane publish`.
//!
//! A thread reads and checks lines. Batches go through a bounded channel to the connection, which
//! sends one batch while the thread reads the next. Batches are published whole and in order, so
//! after any failure the accepted events are a prefix of the input.

use std::fs::File;
use std::io::{self, BufRead, BufReader, IsTerminal as _, Read};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;
use tokio::sync::mpsc;

use super::error::CliError;
use super::output::{Output, count, plain, tell};
use super::session::Session;
use crate::bus;
use crate::config::Config;
use crate::event::{EVENT_MAX_BYTES, Event};
use crate::expression::Glob;
use crate::http::taken;
use crate::products::Kinds;
use crate::redis::RedisError;

/// Maximum number of events of one batch.
const BATCH_EVENTS: usize = 1_000;
/// Bytes after which a batch takes no further event.
const BATCH_BYTES: usize = 1 << 20;
/// Number of batches read ahead.
const AHEAD: usize = 2;
const READ_BYTES: usize = 256 << 10;
/// Maximum number of bad lines to show. Further ones are only counted.
const SHOWN_MAX: u64 = 20;

const EXAMPLES: &str = r#"Examples:
  fairlane publish events.ndjson
  zcat events.ndjson.gz | fairlane publish
  fairlane publish --stream fairlane:replay events.ndjson
  echo '{"specversion":"1.0","id":"1","source":"shop","type":"tag.applied","botid":"b1"}' | fairlane publish -

Invalid lines are reported with their numbers; the others are published, and the exit code is 1."#;

/// Arguments of `fairlane publish`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(super) struct PublishArgs {
    /// File with one CloudEvent per line, in JSON; `-`: standard input.
    #[arg(default_value = "-")]
    file: PathBuf,
    /// The target stream of Redis. Default: bus.publish.
    #[arg(long)]
    stream: Option<String>,
    /// Print one JSON object instead of a sentence.
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Summary {
    stream: String,
    published: u64,
    refused: u64,
}

/// Publishes events.
pub(super) async fn publish(config: Config, args: PublishArgs) -> Result<(), CliError> {
    let name = args.file.display().to_string();
    let (input, size) =
        open(&args.file).map_err(|source| CliError::InputMissing { name: name.clone(), source })?;
    let stream = args.stream.or_else(|| config.bus.published_stream().map(str::to_owned));
    let stream = stream.filter(|stream| !stream.is_empty());
    let stream = stream.ok_or(CliError::NoStream { command: "publish" })?;
    if !config.bus.streams.contains(&stream) {
        tell(format_args!(
            "note: {stream} is not among bus.streams, so no `fairlane serve` with this configuration reads it"
        ));
    }
    let taken = taken::written(&config, &Kinds::today(&config));
    let (summary, untaken) = Session::with(config, async |session| {
        let mut job = Job::new(&name, stream, size);
        let sent = job.send(session, read_ahead(input, taken)).await;
        job.progress.finish_and_clear();
        sent.map(|()| (job.summary, job.unmatched))
    })
    .await?;
    Output::new(args.json).show(&summary, |summary| {
        let refused = match summary.refused {
            0 => String::new(),
            lines => format!(", {} refused", count(lines, "line")),
        };
        format!("published {} to {}{refused}", count(summary.published, "event"), summary.stream)
    })?;
    if let Some((kind, events)) = untaken {
        let more = if events > 1 { " and others" } else { "" };
        tell(format_args!(
            "note: {} of a type that no pipeline of this configuration takes ({}{more}); `events` of a pipeline names its types",
            count(events, "event"),
            plain(&kind)
        ));
    }
    if summary.refused > 0 {
        return Err(CliError::LinesRefused(summary.refused));
    }
    Ok(())
}

type Input = Box<dyn Read + Send>;

fn open(path: &Path) -> io::Result<(Input, Option<u64>)> {
    if path == Path::new("-") {
        let input = io::stdin();
        if input.is_terminal() {
            tell("reading events from the terminal, one a line; Ctrl-D ends");
        }
        return Ok((Box::new(input), None));
    }
    let file = File::open(path)?;
    let about = file.metadata()?;
    let size = about.is_file().then_some(about.len());
    Ok((Box::new(file), size))
}

/// The progress so far.
struct Job<'a> {
    name: &'a str,
    summary: Summary,
    /// The first type that no pipeline takes, and the number of events of such types.
    unmatched: Option<(String, u64)>,
    /// Every valid line up to this one was accepted.
    line: u64,
    progress: ProgressBar,
}

impl<'a> Job<'a> {
    fn new(name: &'a str, stream: String, size: Option<u64>) -> Self {
        // Shows nothing if standard error is not a terminal.
        let (progress, template) = match size {
            Some(size) => (
                ProgressBar::new(size),
                "{bar:30} {percent:>3}%  {msg}  {bytes_per_sec}  {eta} left",
            ),
            None => (ProgressBar::new_spinner(), "{spinner} {msg}  {bytes_per_sec}  {elapsed}"),
        };
        let style = ProgressStyle::with_template(template).expect("constants, and well-formed");
        progress.set_style(style);
        let summary = Summary { stream, published: 0, refused: 0 };
        Self { name, summary, unmatched: None, line: 0, progress }
    }

    async fn send(
        &mut self,
        session: &Session,
        mut batches: mpsc::Receiver<io::Result<Batch>>,
    ) -> Result<(), CliError> {
        self.progress.enable_steady_tick(Duration::from_millis(100));
        while let Some(batch) = batches.recv().await {
            let batch = batch.map_err(|source| CliError::Input {
                name: self.name.to_owned(),
                source,
                published: self.summary.published,
            })?;
            self.report(&batch);
            let events = batch.events.len() as u64;
            if events > 0 {
                let link = session.server.link();
                bus::publish(link, &self.summary.stream, &batch.events)
                    .await
                    .map_err(|error| self.stopped(error, events))?;
            }
            self.summary.published += events;
            if let Some((kind, events)) = batch.unmatched {
                self.unmatched.get_or_insert((kind, 0)).1 += events;
            }
            self.line = batch.last_line;
            self.progress.set_message(count(self.summary.published, "event"));
            self.progress.inc(batch.bytes);
        }
        Ok(())
    }

    fn report(&mut self, batch: &Batch) {
        self.summary.refused += batch.refused;
        self.progress.suspend(|| {
            for (line, reason) in &batch.shown {
                tell(format_args!("{}: line {line}: {}", self.name, plain(reason)));
                if *line == batch.hush_after {
                    tell(format_args!("{}: further bad lines are only counted", self.name));
                }
            }
        });
    }

    fn stopped(&self, error: RedisError, events: u64) -> CliError {
        CliError::publish_stopped(error, self.summary.published, events, Some(self.line))
    }
}

/// Consecutive lines.
#[derive(Debug, Default)]
struct Batch {
    events: Vec<Vec<u8>>,
    /// Size of the lines.
    bytes: u64,
    last_line: u64,
    /// The first type that no pipeline takes, and the number of events of such types.
    unmatched: Option<(String, u64)>,
    /// Number of lines that are not events.
    refused: u64,
    /// Some of those lines: number and reason.
    shown: Vec<(u64, String)>,
    /// The number of the last bad line that is shown. Later ones are only counted.
    hush_after: u64,
}

fn read_ahead(input: Input, taken: Vec<Glob>) -> mpsc::Receiver<io::Result<Batch>> {
    let (sender, receiver) = mpsc::channel(AHEAD);
    // A separate thread outside the runtime, because it may still wait for terminal input when the
    // process ends.
    std::thread::spawn(move || {
        let mut batches = Batches::new(input, taken);
        while let Some(batch) = batches.next().transpose() {
            let failed = batch.is_err();
            if sender.blocking_send(batch).is_err() || failed {
                break;
            }
        }
    });
    receiver
}

/// Cuts an input into batches. Keeps at most one line and one batch in memory.
struct Batches<R> {
    input: BufReader<R>,
    line: Vec<u8>,
    lines: u64,
    refused: u64,
    taken: Vec<Glob>,
}

/// One line of the input.
#[derive(Debug, PartialEq, Eq)]
enum Line {
    /// The line is in `Batches::line`.
    Whole,
    /// The line is longer than the maximum size of an event.
    TooLong,
}

impl<R: Read> Batches<R> {
    fn new(input: R, taken: Vec<Glob>) -> Self {
        let input = BufReader::with_capacity(READ_BYTES, input);
        Self { input, line: Vec::new(), lines: 0, refused: 0, taken }
    }

    /// Returns the next batch. A batch ends early if the next line is not yet available, so that
    /// events that arrive one by one are published one by one.
    fn next(&mut self) -> io::Result<Option<Batch>> {
        let mut batch = Batch::default();
        let mut size = 0;
        while let Some((line, bytes)) = self.read_line()? {
            self.lines += 1;
            batch.last_line = self.lines;
            batch.bytes += bytes;
            match self.check(&line) {
                Ok(None) => {}
                Ok(Some((event, kind))) => {
                    size += event.len();
                    batch.events.push(event);
                    if !self.taken.iter().any(|glob| glob.matches(&kind)) {
                        batch.unmatched.get_or_insert((kind, 0)).1 += 1;
                    }
                }
                Err(reason) => {
                    self.refused += 1;
                    batch.refused += 1;
                    if self.refused <= SHOWN_MAX {
                        batch.shown.push((self.lines, reason));
                    }
                    if self.refused == SHOWN_MAX {
                        batch.hush_after = self.lines;
                    }
                }
            }
            let full = batch.events.len() >= BATCH_EVENTS || size >= BATCH_BYTES;
            if full || self.input.buffer().is_empty() {
                break;
            }
        }
        Ok((batch.last_line > 0).then_some(batch))
    }

    /// Returns the serialised event and its type.
    fn check(&self, line: &Line) -> Result<Option<(Vec<u8>, String)>, String> {
        if *line == Line::TooLong {
            return Err(format!("longer than {EVENT_MAX_BYTES} bytes"));
        }
        let text = self.line.trim_ascii();
        if text.is_empty() {
            return Ok(None);
        }
        match Event::from_json(text) {
            Ok(event) => Ok(Some((text.to_vec(), event.kind().to_owned()))),
            // The parser sees a single line and numbers it 1, so its line number is removed.
            Err(error) => Err(error.to_string().replace(" at line 1 column ", " at column ")),
        }
    }

    /// Reads the next line and its size. A line that is too long is skipped, not kept.
    fn read_line(&mut self) -> io::Result<Option<(Line, u64)>> {
        self.line.clear();
        let (mut line, mut bytes) = (Line::Whole, 0);
        loop {
            let chunk = match self.input.fill_buf() {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                chunk => chunk?,
            };
            if chunk.is_empty() {
                return Ok((bytes > 0).then_some((line, bytes)));
            }
            let end = chunk.iter().position(|&byte| byte == b'\n');
            let part = &chunk[..end.unwrap_or(chunk.len())];
            if self.line.len() + part.len() > EVENT_MAX_BYTES {
                line = Line::TooLong;
                self.line.clear();
            }
            if line == Line::Whole {
                self.line.extend_from_slice(part);
            }
            let used = part.len() + usize::from(end.is_some());
            bytes += used as u64;
            self.input.consume(used);
            if end.is_some() {
                return Ok(Some((line, bytes)));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn event(id: usize) -> String {
        format!(r#"{{"specversion":"1.0","id":"{id}","source":"s","type":"t","botid":"b"}}"#)
    }

    fn all(input: &[u8]) -> Vec<Batch> {
        let mut batches = Batches::new(input, vec![Glob::new("t")]);
        std::iter::from_fn(|| batches.next().unwrap()).collect()
    }

    #[test]
    fn lines_are_counted_whatever_they_hold_and_empty_ones_are_skipped() {
        let input = format!("{}\r\n\n  \nnonsense\n{}", event(1), event(2));
        let batches = all(input.as_bytes());
        assert_eq!(batches.len(), 1);
        assert_eq!(batches[0].events, [event(1).into_bytes(), event(2).into_bytes()]);
        assert_eq!((batches[0].refused, batches[0].last_line), (1, 5));
        assert_eq!(batches[0].bytes, input.len() as u64);
        let (line, reason) = &batches[0].shown[0];
        assert_eq!(*line, 4);
        assert!(reason.ends_with("at column 2"), "{reason}");
    }

    #[test]
    fn a_line_longer_than_any_event_is_refused_and_the_next_one_is_read() {
        let mut input = vec![b'x'; 3 * EVENT_MAX_BYTES];
        input.push(b'\n');
        input.extend(event(1).into_bytes());
        let mut batches = Batches::new(input.as_slice(), Vec::new());
        let mut good = Vec::new();
        let mut refused = Vec::new();
        while let Some(batch) = batches.next().unwrap() {
            good.extend(batch.events);
            refused.extend(batch.shown);
        }
        assert_eq!(good, [event(1).into_bytes()]);
        assert_eq!(refused, [(1, "longer than 1048576 bytes".to_owned())]);
        assert!(batches.line.capacity() <= 2 * EVENT_MAX_BYTES);
    }

    #[test]
    fn batches_are_bounded_and_lose_nothing() {
        let lines: Vec<_> = (0..5_000).map(event).collect();
        let batches = all(lines.join("\n").as_bytes());
        assert!(batches.iter().all(|batch| batch.events.len() <= BATCH_EVENTS));
        let read: Vec<_> = batches.into_iter().flat_map(|batch| batch.events).collect();
        assert!(read.iter().map(Vec::as_slice).eq(lines.iter().map(String::as_bytes)));
    }

    #[test]
    fn events_of_a_type_that_nothing_takes_are_counted_and_the_first_type_is_told() {
        let other = |id, kind| event(id).replace(r#""type":"t""#, &format!(r#""type":"{kind}""#));
        let input = [event(1), other(2, "x"), other(3, "y"), event(4)].join("\n");
        let batches = all(input.as_bytes());
        assert_eq!(batches[0].unmatched, Some(("x".to_owned(), 2)));
        assert_eq!(all(event(1).as_bytes())[0].unmatched, None);
    }

    #[test]
    fn only_the_first_bad_lines_are_shown() {
        let batches = all("bad\n".repeat(50).as_bytes());
        assert_eq!(batches.iter().map(|batch| batch.refused).sum::<u64>(), 50);
        assert_eq!(batches[0].shown.len(), 20);
        assert_eq!(batches[0].hush_after, 20);
    }
}
