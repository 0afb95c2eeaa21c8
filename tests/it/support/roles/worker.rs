//! A whole instance whose handler writes a history, and misbehaves as the test demands.

use std::borrow::Cow;
use std::collections::HashMap;
use std::panic::resume_unwind;
use std::path::PathBuf;
use std::sync::Mutex;
use std::time::Duration;

use fairlane::app::App;
use fairlane::clock::{Clock as _, SystemClock, micros};
use fairlane::config::Config;
use fairlane::handler::{Environment, Failure, Handler, Outcomes, Slice};
use fairlane::lifecycle::Shutdown;
use rand::Rng as _;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::say;
use crate::support::history::{HistoryLog, Outcome, Record};
use crate::support::process::variable;

/// The configuration as TOML.
pub(crate) const CONFIG: &str = "FAIRLANE_TEST_CONFIG";
/// A [`Behaviour`] as JSON.
pub(crate) const BEHAVIOUR: &str = "FAIRLANE_TEST_BEHAVIOUR";
/// The text that the worker prints before the address of its metrics once it runs.
pub(crate) const READY: &str = "ready ";

/// The behaviour of the handler `recorder`, apart from writing the history.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Behaviour {
    /// The file of the history.
    pub(crate) history: PathBuf,
    /// The number of the process in the history.
    pub(crate) process: u32,
    /// The percentage of handlings that fail.
    pub(crate) fail_percent: u32,
    /// The duration of each event.
    pub(crate) delay: Duration,
    pub(crate) poison: Vec<Poison>,
    /// Once this file exists, no event is poison any more.
    pub(crate) antidote: PathBuf,
}

/// An event that can never be handled.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Poison {
    pub(crate) bot: String,
    pub(crate) event: u32,
    pub(crate) effect: Effect,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Effect {
    Fails,
    Panics,
    /// Ends the whole process.
    Aborts,
}

/// Runs until SIGTERM. Ends with code 0 if it stopped without an error.
pub(super) fn run() {
    let config = Config::from_toml(&variable(CONFIG).unwrap(), "the test").unwrap();
    let behaviour: Behaviour = serde_json::from_str(&variable(BEHAVIOUR).unwrap()).unwrap();
    tracing_subscriber::fmt()
        .with_max_level(tracing::Level::INFO)
        .with_ansi(false)
        .with_writer(std::io::stdout)
        .init();
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    runtime.block_on(async {
        let shutdown = Shutdown::new();
        shutdown.listen_for_signals(config.shutdown_delay, config.shutdown_grace).unwrap();
        let app = App::builder(config).handler("recorder", Recorder::new(behaviour));
        let app = app.build().await.unwrap();
        say(&format!("{READY}{}", app.metrics_address().unwrap()));
        app.run(shutdown).await.unwrap();
    });
}

struct Recorder {
    behaviour: Behaviour,
    log: HistoryLog,
    /// When the handling under a fence ended. Its completion was requested after that.
    ended: Mutex<HashMap<(String, u64), u64>>,
}

fn now() -> u64 {
    micros(SystemClock.now())
}

impl Recorder {
    fn new(behaviour: Behaviour) -> Self {
        let log = HistoryLog::append(&behaviour.history).unwrap();
        Self { behaviour, log, ended: Mutex::default() }
    }

    /// The reason why the event cannot be handled now.
    fn refusal(&self, bot: &str, event: u32) -> Option<Effect> {
        let is_it = |poison: &&Poison| poison.bot == bot && poison.event == event;
        if let Some(poison) = self.behaviour.poison.iter().find(is_it)
            && !self.behaviour.antidote.exists()
        {
            return Some(poison.effect);
        }
        let unlucky = self.behaviour.fail_percent > 0
            && rand::rng().random_range(0..100) < self.behaviour.fail_percent;
        unlucky.then_some(Effect::Fails)
    }

    /// Handles the events and records them. Returns how many are done, or the event and the effect
    /// that stopped it.
    async fn work(&self, slice: &Slice) -> Result<usize, (usize, Effect)> {
        let bot = slice.bot.as_str();
        let mut lines = Vec::new();
        for (index, delivery) in slice.events.iter().enumerate() {
            if index > 0 && Instant::now() >= slice.deadline {
                self.log.write(lines).unwrap();
                return Ok(index);
            }
            let started = now();
            if !self.behaviour.delay.is_zero() {
                // The sleep simulates work.
                tokio::time::sleep(self.behaviour.delay).await;
            }
            let event = delivery.event.id().parse().unwrap();
            let refusal = self.refusal(bot, event);
            lines.push(Record::Handled {
                bot,
                event,
                sequence: delivery.sequence.get(),
                fence: slice.fence.get(),
                started,
                ended: now(),
                outcome: if refusal.is_some() { Outcome::Failed } else { Outcome::Done },
                process: self.behaviour.process,
            });
            if !self.behaviour.delay.is_zero() || refusal.is_some() {
                self.log.write(std::mem::take(&mut lines)).unwrap();
            }
            if let Some(effect) = refusal {
                return Err((index, effect));
            }
        }
        self.log.write(lines).unwrap();
        Ok(slice.events.len())
    }
}

impl Handler for Recorder {
    async fn handle(&self, _: &Environment, slice: &Slice) -> Result<Outcomes, Failure> {
        let ended = self.work(slice).await;
        let lease = (slice.bot.as_str().to_owned(), slice.fence.get());
        self.ended.lock().unwrap().insert(lease, now());
        match ended {
            Ok(done) => Ok(Outcomes::first(done)),
            Err((index, Effect::Fails)) => Err(Failure::transient(index, "it always fails")),
            // This prints nothing, because finding the names of all callers would block the process
            // too long.
            Err((_, Effect::Panics)) => resume_unwind(Box::new("it always panics")),
            Err((_, Effect::Aborts)) => std::process::abort(),
        }
    }

    fn committed(&self, slice: &Slice, settled: usize) {
        let lease = (slice.bot.as_str().to_owned(), slice.fence.get());
        // Without an entry, the handler got none of the events or was aborted. Then it is only known that
        // the call was sent after the lease was granted, and a fence is the time of that.
        let asked = self.ended.lock().unwrap().remove(&lease).unwrap_or(slice.fence.get());
        let ids = slice.events[..settled].iter().map(|delivery| delivery.event.id().parse());
        let events: Vec<u32> = ids.map(Result::unwrap).collect();
        let record = Record::Committed {
            bot: slice.bot.as_str(),
            events: Cow::Owned(events),
            fence: slice.fence.get(),
            asked,
            at: now(),
            process: self.behaviour.process,
        };
        self.log.write([record]).unwrap();
    }
}
