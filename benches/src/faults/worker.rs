//! A process of the campaign: an instance with all roles, whose handlers write a history.

use std::borrow::Cow;
use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use fairlane::app::{self, App};
use fairlane::config::Config;
use fairlane::event::Event;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane_testkit::history::{HistoryLog, Outcome, Record};
use rand::Rng as _;
use rustix::time::{ClockId, clock_gettime};
use tokio::time::Instant;

use super::replays;
use crate::error::BenchError;

/// The pipelines with a handler in the process, which is named like its pipeline.
pub(crate) const RECORDED: [&str; 3] = ["plain", "keyed", "limited"];
/// The percentage of events that fail once more.
const FAIL_PERCENT: u32 = 1;
/// The type of events that fail until the file `cured` exists, as the second part of the type.
pub(crate) const POISON: &str = "poison";

/// µs since the start of the machine: a clock that all processes share and that no step changes.
pub(crate) fn now_us() -> u64 {
    let now = clock_gettime(ClockId::Monotonic);
    let (seconds, nanos) = (now.tv_sec.unsigned_abs(), now.tv_nsec.unsigned_abs());
    seconds * 1_000_000 + nanos / 1_000
}

/// A random time in this range of milliseconds.
pub(crate) fn random_ms(range: std::ops::Range<u64>) -> Duration {
    Duration::from_millis(rand::rng().random_range(range))
}

/// The bot of an event in a history: with ordering keys, each key of a bot has an order of its own.
pub(crate) fn lane(pipeline: &str, bot: &str, event: &Event) -> String {
    match (pipeline, event.subject()) {
        ("keyed", Some(subject)) => format!("{bot}/{subject}"),
        _ => bot.to_owned(),
    }
}

/// The history of a pipeline in a process.
pub(crate) fn history(directory: &Path, pipeline: &str, process: u32) -> PathBuf {
    directory.join(format!("{pipeline}-{process}.history"))
}

/// Runs until it is told to stop. `directory` has the histories of all processes.
///
/// # Errors
/// If the configuration cannot be used, or the instance fails.
pub(crate) async fn run(config: &Path, directory: &Path, process: u32) -> Result<(), BenchError> {
    let config =
        Config::load(Some(config)).map_err(|error| BenchError::Campaign(error.to_string()))?;
    let directory = directory.to_owned();
    let builder = move |config| {
        RECORDED.iter().fold(App::builder(config), |app, &pipeline| {
            app.handler(pipeline, Recorder::new(&directory, pipeline, process))
        })
    };
    Ok(app::serve(config, builder).await?)
}

struct Recorder {
    pipeline: &'static str,
    process: u32,
    log: HistoryLog,
    /// The history of replayed events.
    replays: HistoryLog,
    cured: PathBuf,
    /// When the handling of the first event under a fence ended. Its completion was requested later.
    ended: Mutex<HashMap<Call, u64>>,
}

/// A bot, a fence, and the id of the first event. With ordering keys, several calls share a fence.
type Call = (String, u64, String);

impl Recorder {
    fn new(directory: &Path, pipeline: &'static str, process: u32) -> Self {
        let open = |name| {
            HistoryLog::append(&history(directory, name, process))
                .expect("the history of the campaign can be opened")
        };
        let (log, replays) = (open(pipeline), open(replays::HISTORY));
        let cured = directory.join("cured");
        Self { pipeline, process, log, replays, cured, ended: Mutex::default() }
    }

    fn fails(&self, event: &Event) -> bool {
        let poison = event.kind().ends_with(POISON) && !self.cured.exists();
        poison || rand::rng().random_range(0..100) < FAIL_PERCENT
    }

    /// The history of an event, and its bot there.
    fn place(&self, slice: &Slice, event: &Event) -> (&HistoryLog, String) {
        let bot = slice.bot.as_str();
        match replays::lane(bot, event) {
            Some(lane) => (&self.replays, lane),
            None => (&self.log, lane(self.pipeline, bot, event)),
        }
    }

    fn call(slice: &Slice) -> Call {
        let first = slice.events.first().map_or("", |first| first.event.id());
        (slice.bot.as_str().to_owned(), slice.fence.get(), first.to_owned())
    }
}

impl Handler for Recorder {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let mut ended = Ok(slice.events.len());
        for (index, delivery) in slice.events.iter().enumerate() {
            if index > 0 && Instant::now() >= slice.deadline {
                ended = Ok(index);
                break;
            }
            let started = now_us();
            if rand::rng().random_range(0..20) == 0 {
                tokio::time::sleep(random_ms(1..10)).await;
            }
            let fails = self.fails(&delivery.event);
            let (log, bot) = self.place(slice, &delivery.event);
            let Some(event) = position(&delivery.event) else { continue };
            let record = Record::Handled {
                bot: &bot,
                event,
                sequence: delivery.sequence.get(),
                fence: slice.fence.get(),
                started,
                ended: now_us(),
                outcome: if fails { Outcome::Failed } else { Outcome::Done },
                process: self.process,
            };
            log.write([record]).expect("the history of the campaign can be written");
            if fails {
                ended = Err(index);
                break;
            }
        }
        let mut calls = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        calls.insert(Self::call(slice), now_us());
        match ended {
            Ok(done) => Ok(Outcomes::first(done)),
            Err(index) => Err(Failure::transient(index, "the campaign wants it to fail")),
        }
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        let mut calls = self.ended.lock().unwrap_or_else(PoisonError::into_inner);
        // Without a handling, as of an event whose consumers vanished, it is not known.
        let asked = calls.remove(&Self::call(slice)).unwrap_or(0);
        drop(calls);
        let mut lanes: HashMap<String, (&HistoryLog, Vec<u32>)> = HashMap::new();
        for delivery in &slice.events[..settled] {
            let (log, bot) = self.place(slice, &delivery.event);
            let (_, events) = lanes.entry(bot).or_insert((log, Vec::new()));
            events.extend(position(&delivery.event));
        }
        let at = now_us();
        for (bot, (log, events)) in &lanes {
            let record = Record::Committed {
                bot,
                events: Cow::Borrowed(events),
                fence: slice.fence.get(),
                asked,
                at,
                process: self.process,
            };
            log.write([record]).expect("the history of the campaign can be written");
        }
    }
}

/// The position of an event among those of its bot, or of its key. It is the event's id.
pub(crate) fn position(event: &Event) -> Option<u32> {
    event.id().rsplit('-').next()?.parse().ok()
}
