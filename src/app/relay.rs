//! Reloads: instances that follow each other in one process.
//!
//! 1. A new instance is built with the new configuration and the sockets of the old one. If that
//!    fails, the old one goes on, and nothing has changed.
//! 2. It starts beside the old one, as another process would, until it is ready.
//! 3. The old one accepts no further connections, and each of its answers asks the client to connect
//!    again. For [`HANDOVER`] both work, so that idle connections end by themselves.
//! 4. The old one stops as after SIGTERM: its slices end, and no lease is lost.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior};
use tracing::{error, info};

use super::sockets::Sockets;
use super::{App, AppError, Builder, Control};
use crate::config::{Config, ConfigError, Effective};
use crate::lifecycle::{Shutdown, Times};
use crate::metrics;
use crate::reload::{Answer, ReloadError, Reloaded, Reloads, Request};

/// Idle connections end after 5 s without a request.
const HANDOVER: Duration = Duration::from_secs(6);
/// Interval of looking for changes of files that settings name: tokens, secrets, certificates.
const LOOK: Duration = Duration::from_secs(5);
/// When a change of these files is tried again that could not be applied: a store may have been down.
const AGAIN_FIRST: Duration = Duration::from_secs(10);
/// The pause doubles with each try, up to this.
const AGAIN_LAST: Duration = Duration::from_secs(60);
const PANICKED: &str =
    "it made the program panic; the log has the message and the place in the code";
/// How long a new instance may take to be ready.
const READY: Duration = Duration::from_secs(30);

/// Instances of one process, one after the other.
pub(crate) struct Relay<L, B> {
    /// Loads the configuration and the settings in force.
    load: L,
    /// Prepares an instance with a configuration.
    builder: B,
    process: Shutdown,
    times: Times,
    reloads: Reloads,
    known: Known,
    /// What the last look found.
    looked: Stamps,
    /// What could not be applied.
    failed: Option<Failed>,
    /// Whether the Redis of the current instance is private.
    is_private: bool,
    current: Runner,
    /// All instances that have not ended. Each tells whether it was the current one, by its number.
    running: Running,
}

/// A change of files that could not be applied.
struct Failed {
    files: Stamps,
    at: Instant,
    /// How long it is not tried again.
    pause: Duration,
}

/// Instances by their numbers.
type Running = JoinSet<(u64, Result<(), AppError>)>;

/// A running instance.
struct Runner {
    number: u64,
    shutdown: Shutdown,
    sockets: Sockets,
    control: Control,
    /// Its `shutdown_grace`.
    grace: Duration,
}

impl<L, B> Relay<L, B>
where
    L: Fn() -> Result<(Config, Vec<Effective>), ConfigError>,
    B: Fn(Config) -> Builder,
{
    /// Starts the first instance. `known` is from the time when its configuration was loaded.
    ///
    /// # Errors
    /// If it cannot be built.
    pub(crate) async fn start(
        (first, known): (Builder, Known),
        (load, builder): (L, B),
        process: Shutdown,
        times: Times,
        reloads: Reloads,
    ) -> Result<Self, AppError> {
        let is_private = first.config.redis.url.is_none();
        let app = Box::pin(first.reloads(reloads.clone()).build()).await?;
        let mut running = JoinSet::new();
        let (current, _) = run(app, &process, 0, &mut running)?;
        let looked = known.files.clone();
        Ok(Self {
            load,
            builder,
            process,
            times,
            reloads,
            known,
            looked,
            failed: None,
            is_private,
            current,
            running,
        })
    }

    /// Serves requests to reload, until the process stops and all instances have ended.
    ///
    /// # Errors
    /// If an instance fails.
    pub(crate) async fn serve(
        mut self,
        mut requests: mpsc::Receiver<Request>,
    ) -> Result<(), AppError> {
        let mut look = tokio::time::interval(LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                Some(ended) = self.running.join_next() => {
                    match ended {
                        Ok((number, Err(error))) if number == self.current.number => {
                            return Err(error);
                        }
                        // The current one works on.
                        Ok((_, Err(error))) => error!(%error, "an instance of this process with an earlier or a refused configuration failed; the current instance continues"),
                        // None is aborted, and their panics are caught.
                        Ok((_, Ok(()))) | Err(_) => {}
                    }
                    if self.running.is_empty() {
                        return Ok(());
                    }
                }
                // A part of it has failed for good.
                () = self.current.shutdown.soft.cancelled(), if !self.process.soft.is_cancelled() => {
                    self.process.soft.cancel();
                }
                // Requests that wait are told so, since each instance waits for its answers.
                () = self.process.soft.cancelled(), if !requests.is_closed() => {
                    requests.close();
                    while requests.recv().await.is_some() {}
                }
                Some(Request(answer)) = requests.recv(), if !self.process.soft.is_cancelled() => {
                    let reloaded = self.reload().await;
                    match &reloaded {
                        Ok(Reloaded { changed }) => info!(?changed, "the configuration is reloaded"),
                        Err(error) => error!(%error, "nothing is reloaded"),
                    }
                    let _ = answer.send(reloaded);
                }
                _ = look.tick(), if !self.process.soft.is_cancelled() => {
                    let now = stamps(&self.known.settings);
                    // A file that is being written is looked at again.
                    if now == self.known.files
                        || now != std::mem::replace(&mut self.looked, now.clone())
                    {
                        continue;
                    }
                    let failed = self.failed.as_ref().filter(|failed| failed.files == now);
                    if failed.is_some_and(|failed| failed.at.elapsed() < failed.pause) {
                        continue;
                    }
                    let pause =
                        failed.map_or(AGAIN_FIRST, |failed| AGAIN_LAST.min(2 * failed.pause));
                    info!("a file that the configuration names has changed");
                    if let Err(error) = self.reload().await {
                        error!(%error, again_in = ?pause, "nothing is reloaded");
                        self.failed = Some(Failed { files: now, at: Instant::now(), pause });
                    }
                }
            }
        }
    }

    async fn reload(&mut self) -> Answer {
        let refused = |error: AppError| match error {
            AppError::Panicked => ReloadError::Refused(PANICKED.to_owned()),
            error => ReloadError::Refused(error.to_string()),
        };
        let (config, settings) = (self.load)().map_err(|error| refused(error.into()))?;
        // The code of the program that embeds this one must not end the current instance.
        let next = catch_unwind(AssertUnwindSafe(|| (self.builder)(config)))
            .map_err(|_| refused(AppError::Panicked))?;
        // That code may have changed what was loaded.
        let config = &next.config;
        // An empty file, for example while it is being written, would otherwise start an empty Redis.
        let is_private = config.redis.url.is_none();
        if is_private && !self.is_private {
            let problem = "redis.url is no longer set; to use a private Redis instead, restart";
            return Err(ReloadError::Refused(problem.to_owned()));
        }
        let changed = changes(&self.known.settings, &settings);
        let is_of_admission = |key: &String| key.starts_with("admission.");
        let known = Known::new(settings);
        let only_admission = !changed.is_empty() && changed.iter().all(is_of_admission);
        if only_admission && known.files == self.known.files {
            config.check().map_err(|error| refused(error.into()))?;
            // No other instance is needed, which matters during an overload.
            self.current.control.set_admission(config.admission);
            self.known = known;
            return Ok(Reloaded { changed });
        }
        let (times, backlog) = (times(config), config.http.backlog);
        let sockets = self.current.sockets.copied().map_err(|error| refused(error.into()))?;
        let next = next.reloads(self.reloads.clone()).inheriting(sockets);
        let app = tokio::select! {
            biased;
            () = self.process.soft.cancelled() => return Err(ReloadError::Stops),
            app = Box::pin(next.build()) => app.map_err(refused)?,
        };
        let shown = app.shown();
        let number = self.current.number + 1;
        let (next, ready) = run(app, &self.process, number, &mut self.running).map_err(refused)?;
        let ready = ready_within(ready, &self.process).await;
        // Not before: both instances share the sockets, and a refused reload changes nothing.
        let ready = ready.and_then(|()| {
            let set = next.sockets.set_backlog(backlog);
            set.map_err(|error| ReloadError::NotReady(format!("http.backlog: {error}")))
        });
        if let Err(error) = ready {
            next.retire(Duration::ZERO, &self.process);
            return Err(error);
        }
        std::mem::replace(&mut self.current, next).retire(HANDOVER, &self.process);
        metrics::show_only(shown);
        self.times.set(times);
        (self.known, self.is_private) = (known, is_private);
        Ok(Reloaded { changed })
    }
}

/// `shutdown_delay` and `shutdown_grace`.
pub(super) fn times(config: &Config) -> (Duration, Duration) {
    (config.shutdown_delay, config.shutdown_grace)
}

/// Runs an instance. The receiver is told when it is ready.
fn run(
    app: App,
    process: &Shutdown,
    number: u64,
    running: &mut Running,
) -> Result<(Runner, oneshot::Receiver<()>), AppError> {
    let shutdown = process.of_an_instance();
    let (sockets, control) = (app.sockets()?, app.control());
    let grace = app.site.config.shutdown_grace;
    let (tell, ready) = oneshot::channel();
    let ran = Box::pin(app.run_telling(shutdown.clone(), Some(tell)));
    running.spawn(process.tracker.track_future(async move { (number, ran.await) }));
    Ok((Runner { number, shutdown, sockets, control, grace }, ready))
}

async fn ready_within(ready: oneshot::Receiver<()>, process: &Shutdown) -> Result<(), ReloadError> {
    let told = tokio::select! {
        biased;
        () = process.soft.cancelled() => return Err(ReloadError::Stops),
        told = tokio::time::timeout(READY, ready) => told,
    };
    let reason = match told {
        Ok(Ok(())) => return Ok(()),
        Ok(Err(_)) => "it has ended; the log says why".to_owned(),
        Err(_) => format!("it is not ready after {} s; the log says why", READY.as_secs()),
    };
    Err(ReloadError::NotReady(reason))
}

impl Runner {
    /// Hands its clients over to the next instance for some time, and then stops.
    fn retire(self, handover: Duration, process: &Shutdown) {
        let Self { shutdown, grace, .. } = self;
        process.spawn(async move {
            shutdown.handed.cancel();
            let over = Instant::now() + handover;
            tokio::select! {
                biased;
                () = shutdown.soft.cancelled() => {}
                () = tokio::time::sleep_until(over) => {}
            }
            shutdown.stop_within(grace).await;
        });
    }
}

/// Loaded settings, and the files that they name, as they were at that time.
pub(crate) struct Known {
    settings: Vec<Effective>,
    files: Stamps,
}

impl Known {
    pub(crate) fn new(settings: Vec<Effective>) -> Self {
        Self { files: stamps(&settings), settings }
    }
}

/// The files that settings name, with the times of their last changes. A file that cannot be looked at
/// has none.
type Stamps = Vec<(PathBuf, Option<(SystemTime, u64)>)>;

fn stamps(settings: &[Effective]) -> Stamps {
    let look = |path: &PathBuf| {
        let found = std::fs::metadata(path).ok()?;
        Some((found.modified().ok()?, found.len()))
    };
    let files = settings.iter().filter_map(|setting| setting.file.as_ref());
    files.map(|path| (path.clone(), look(path))).collect()
}

/// The keys whose value differs, or that only one side has.
fn changes(before: &[Effective], now: &[Effective]) -> Vec<String> {
    let is_in = |one: &Effective, all: &[Effective]| {
        all.iter().any(|other| other.key == one.key && other.print == one.print)
    };
    let gone = before.iter().filter(|one| !is_in(one, now));
    let new = now.iter().filter(|one| !is_in(one, before));
    let keys: std::collections::BTreeSet<&String> = gone.chain(new).map(|one| &one.key).collect();
    keys.into_iter().cloned().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changed_added_and_removed_settings_are_changes() {
        let of = |all: &[(&str, &str)]| -> Vec<Effective> {
            let one = |(key, value): &(&str, &str)| Effective {
                key: (*key).to_owned(),
                value: (*value).to_owned(),
                from: "default".to_owned(),
                is_default: true,
                file: None,
                print: u64::from(value.as_bytes()[0]),
            };
            all.iter().map(one).collect()
        };
        let before = of(&[("a", "1"), ("b", "2"), ("c", "3")]);
        let now = of(&[("a", "1"), ("b", "3"), ("d", "4")]);
        assert_eq!(changes(&before, &now), ["b", "c", "d"]);
        assert_eq!(changes(&before, &before), [""; 0]);
    }
}
