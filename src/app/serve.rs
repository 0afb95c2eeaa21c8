//! A whole process: signals, reloads, and the service manager.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::{info, warn};

use super::relay::{self, Known, Relay};
use super::{AppError, Builder, reach, service_manager};
use crate::config::{Config, ConfigError, Effective};
use crate::lifecycle::{Shutdown, Times};
use crate::reload::{self, Reloads};

/// Runs a process until SIGTERM or SIGINT, as `fairlane serve` does.
///
/// `builder` prepares the instance. It may change every setting, and what it returns counts. It is
/// called again for each reload: at SIGHUP, at `POST /v1/reload`, and when a file of tokens, secrets
/// or certificates changes. The new instance then starts beside the old one, and both work for about
/// 6 s. So handlers that count or cache share what they keep, for example in an `Arc`. If only
/// `[admission]` has changed, the old instance goes on and takes just that from the result.
/// A configuration that cannot be used changes nothing, and the log says why.
///
/// A reload loads a `config` of [`Config::load`] again, from its file and the environment. So change
/// settings in `builder`: a change before this call is lost at a reload. Any other `config` was made
/// by the program, and `builder` gets the same one again. A reload then only reads the files that it
/// names, and needs SIGHUP or `POST /v1/reload`.
///
/// At the start it waits up to 5 s for a Redis that is unavailable, up to 15 s for one that does not
/// answer, and up to 60 s for one that loads its data. In a cluster, one primary that serves suffices, unless
/// the signing key or the number of shards is on another one. It waits without a limit for a private Redis that loads its data, or a
/// private MongoDB that recovers its data: a second signal or the end of `shutdown_grace` ends this wait.
///
/// systemd is told when the process is ready and when it stops, if it started the process with
/// `Type=notify`.
///
/// Only signals stop it. To stop from code, use [`App::run`](super::App::run). Its handlers of SIGTERM,
/// SIGINT and SIGHUP stay after it has returned: these signals do not end the process any more.
///
/// # Errors
/// If the file of `config` can no longer be read, the first instance cannot be built, or the current
/// one fails.
///
/// # Panics
/// Outside a tokio runtime, or if the first call of `builder` panics.
///
/// # Cancel safety
/// If the future is dropped, all instances stop as at the end of a dropped
/// [`App::run`](super::App::run), within `shutdown_grace`.
pub async fn serve<B>(config: Config, builder: B) -> Result<(), AppError>
where
    B: Fn(Config) -> Builder,
{
    let times = Times::new(relay::times(&config));
    let process = Shutdown::new();
    // Also if this future is dropped.
    let _stops = process.soft.clone().drop_guard();
    process.listen_with(&times).map_err(AppError::Signals)?;
    // Registered before anything is started, so that an early signal does not end the process.
    let hangups = signal(SignalKind::hangup()).map_err(AppError::Signals)?;
    // Before the wait for Redis: an edit during the wait is a change.
    let known = Known::new(settings(&config)?);
    let loaded = config.clone();
    let load = move || {
        let config = again(&loaded)?;
        let settings = settings(&config)?;
        Ok((config, settings))
    };
    let first = builder(config);
    times.set(relay::times(&first.config));
    let (reloads, requests) = reload::channel();
    process.spawn(hang_ups(hangups, reloads.clone(), process.clone()));
    tokio::select! {
        biased;
        () = process.soft.cancelled() => return Ok(()),
        reached = reach::redis(&first.config) => reached?,
    }
    let has_private = first.config.redis.url.is_none();
    let relay = Relay::start((first, known), (load, builder), process.clone(), times, reloads);
    let relay = tokio::select! {
        biased;
        // Private servers are stopped by the instance that started them.
        () = process.soft.cancelled(), if !has_private => return Ok(()),
        // A private Redis may load its data for long, or a private MongoDB recover its data.
        () = process.hard.cancelled() => {
            warn!("stopped during the start: private servers that it started go on, and the next start uses them");
            return Ok(());
        }
        relay = Box::pin(relay) => relay?,
    };
    service_manager::report(&process);
    Box::pin(relay.serve(requests)).await
}

/// The configuration for a reload: one that the program made itself is the same again.
fn again(first: &Config) -> Result<Config, ConfigError> {
    if first.is_loaded { Config::load(first.file.as_deref()) } else { Ok(first.clone()) }
}

/// The settings in force of a configuration that was loaded, to notice their changes.
fn settings(config: &Config) -> Result<Vec<Effective>, ConfigError> {
    if config.is_loaded { Config::effective(config.file.as_deref()) } else { Ok(Vec::new()) }
}

/// Reloads at every SIGHUP. The outcome is logged.
async fn hang_ups(mut hangups: Signal, reloads: Reloads, process: Shutdown) {
    loop {
        tokio::select! {
            biased;
            () = process.soft.cancelled() => return,
            heard = hangups.recv() => if heard.is_none() { return },
        }
        info!("SIGHUP: reloading the configuration");
        let _ = reloads.ask().await;
    }
}
