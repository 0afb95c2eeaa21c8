//! A whole process: signals, reloads, and the service manager.

use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::info;

use super::relay::{Known, Relay};
use super::{AppError, Builder, reach, service_manager};
use crate::config::Config;
use crate::lifecycle::{Shutdown, Times};
use crate::reload::{self, Reloads};

/// Runs a process until SIGTERM or SIGINT, as `fairlane serve` does.
///
/// `builder` prepares the instance. It is called again for each reload, with the configuration that
/// was loaded from the file of `config`: at SIGHUP, at `POST /v1/reload`, and when a file of tokens,
/// secrets or certificates changes. The new instance then starts beside the old one, and both work
/// for about 6 s. So handlers that count or cache share what they keep, for example in an `Arc`.
/// A configuration that cannot be used changes nothing, and the log says why.
///
/// At the start it waits up to 5 s for a Redis that is unavailable, up to 15 s for one that does not
/// answer, and up to 60 s for one that loads its data.
///
/// systemd is told when the process is ready and when it stops, if it started the process with
/// `Type=notify`.
///
/// # Errors
/// If the file of `config` can no longer be read, the first instance cannot be built, or the current
/// one fails.
///
/// # Panics
/// Outside a tokio runtime.
pub async fn serve<B>(config: Config, builder: B) -> Result<(), AppError>
where
    B: Fn(Config) -> Builder,
{
    let times = Times::new((config.shutdown_delay, config.shutdown_grace));
    let process = Shutdown::new();
    process.listen_with(&times).map_err(AppError::Signals)?;
    // Registered before anything is started, so that an early signal does not end the process.
    let hangups = signal(SignalKind::hangup()).map_err(AppError::Signals)?;
    let file = config.file.clone();
    // Before the wait for Redis: an edit during the wait is a change.
    let settings = Config::effective(file.as_deref());
    // Without a file, the program made the configuration itself.
    let known = Known::new(if file.is_some() { settings? } else { settings.unwrap_or_default() });
    let load = move || Ok((Config::load(file.as_deref())?, Config::effective(file.as_deref())?));
    let (reloads, requests) = reload::channel();
    process.spawn(hang_ups(hangups, reloads.clone(), process.clone()));
    tokio::select! {
        biased;
        () = process.soft.cancelled() => return Ok(()),
        reached = reach::redis(&config) => reached?,
    }
    let has_private = config.redis.url.is_none();
    let relay = Relay::start((config, known), (load, builder), process.clone(), times, reloads);
    let relay = tokio::select! {
        biased;
        // Private servers are stopped by the instance that started them.
        () = process.soft.cancelled(), if !has_private => return Ok(()),
        relay = Box::pin(relay) => relay?,
    };
    service_manager::report(&process);
    Box::pin(relay.serve(requests)).await
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
