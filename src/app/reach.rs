//! Waits for Redis before the first instance is built, and while an instance is built.
//!
//! A restart of Redis, a failover, or a machine that starts both, lets Fairlane arrive first. A process
//! that ended then would wait for its service manager, which may take minutes.

use std::pin::pin;
use std::time::Duration;

use redis::{ErrorKind, ServerErrorKind};
use tokio::time::{Instant, sleep, timeout};
use tracing::{info, warn};

use super::{AppError, RESPONSE_TIMEOUT};
use crate::config::Config;
use crate::queue::FAIR_SLICE_US;
use crate::redis::{Link, RedisError, Serving, Target};

/// How long a start waits for a Redis that is unavailable.
const AVAILABLE: Duration = Duration::from_secs(5);
/// How long a start waits for a Redis that is loading its data.
const LOADED: Duration = Duration::from_secs(60);
/// How long a start waits for a Redis that accepts connections and does not answer: it is slow or
/// frozen. One answer is awaited for up to 5 s.
const SLOW: Duration = Duration::from_secs(15);
/// After this time without an answer, a start says that it waits.
const SILENT: Duration = Duration::from_secs(1);
/// How long the primaries of a cluster are asked which of them serve.
const SERVING: Duration = Duration::from_secs(2);
/// Pause between two tries.
const RETRY: Duration = Duration::from_millis(200);

/// Returns when the Redis at `redis.url` answers; of a cluster, when one primary serves. A private one is
/// started later.
///
/// # Errors
/// If Redis is still unavailable after 5 s, without an answer after 15 s, still loading after 60 s, or
/// refuses for good.
///
/// # Cancel safety
/// Nothing has changed.
pub(super) async fn redis(config: &Config) -> Result<(), AppError> {
    let Some(url) = &config.redis.url else { return Ok(()) };
    config.check()?;
    let certificates = config.redis.certificates()?;
    let target = Target::open(url, certificates.as_ref()).map_err(AppError::RedisUrl)?;
    let target = target.with_prefix(config.redis.prefix.clone());
    let link = Link::new(target, Vec::new(), FAIR_SLICE_US, RESPONSE_TIMEOUT);
    let start = Instant::now();
    let mut said = None;
    loop {
        let mut asking = pin!(ask(&link));
        let answer = if let Ok(answer) = timeout(SILENT, asking.as_mut()).await {
            answer
        } else {
            // A frozen server accepts the connection and is silent.
            if said < Some(SLOW) {
                said = Some(SLOW);
                let seconds = SLOW.as_secs();
                warn!(seconds, "waiting for Redis before the start: it does not answer");
            }
            asking.await
        };
        let error = match answer {
            Ok(primaries) => {
                if !primaries.is_empty() {
                    warn!(?primaries, "starting although these primaries of Redis do not answer");
                } else if said.is_some() {
                    info!("Redis answers: starting");
                }
                return Ok(());
            }
            Err(error) => error,
        };
        // A server that is busy with its data may also not answer in time.
        let patience = patience(&error).map(|patience| patience.max(said.unwrap_or_default()));
        let patience = patience.unwrap_or_default();
        if start.elapsed() + RETRY > patience {
            return Err(error.into());
        }
        // Again when its state changes from unavailable to loading.
        if said.replace(patience) != Some(patience) {
            warn!(%error, seconds = patience.as_secs(), "waiting for Redis before the start");
        }
        sleep(RETRY).await;
    }
}

/// Asks Redis whether it answers. Returns the primaries of a cluster that do not although others serve:
/// their bots wait, and all others must not.
async fn ask(link: &Link) -> Result<Vec<String>, RedisError> {
    if link.target().is_cluster() {
        let Serving { primaries, silent } = link.serving(SERVING).await;
        if primaries > 0 && silent.is_empty() {
            return Ok(silent);
        }
        if primaries > 0 {
            // One that refuses for good, for example because it is too old, is not missing.
            return match link.command("PING", redis::cmd("PING")).await {
                Err(error) if patience(&error).is_none() => Err(error),
                _ => Ok(silent),
            };
        }
    }
    // If none serves, the refusal says why.
    link.command("PING", redis::cmd("PING")).await.map(|_| Vec::new())
}

/// Asks Redis again while it is unavailable: it is slow, or it restarts. Nothing else waits for it.
///
/// # Errors
/// Those of `ask`: the last one after 15 s (after 60 s if Redis loads its data), or one that waiting
/// does not help.
///
/// # Cancel safety
/// That of `ask`.
pub(super) async fn again<T>(
    mut ask: impl AsyncFnMut() -> Result<T, AppError>,
) -> Result<T, AppError> {
    let start = Instant::now();
    let mut said = false;
    loop {
        let error = match ask().await {
            Err(AppError::Store(error)) => error,
            done => return done,
        };
        let patience = patience(&error).map_or(Duration::ZERO, |patience| patience.max(SLOW));
        if start.elapsed() + RETRY > patience {
            return Err(error.into());
        }
        if !std::mem::replace(&mut said, true) {
            warn!(%error, seconds = patience.as_secs(), "Redis did not answer; asking it again");
        }
        sleep(RETRY).await;
    }
}

/// How long to wait after such an error; `None` if waiting does not help.
fn patience(error: &RedisError) -> Option<Duration> {
    match error {
        RedisError::Connect { source, .. }
            if source.kind() == ErrorKind::Server(ServerErrorKind::BusyLoading) =>
        {
            Some(LOADED)
        }
        RedisError::Refused { message, .. } if message.starts_with("LOADING") => Some(LOADED),
        RedisError::Connect { source, .. } if source.is_timeout() => Some(SLOW),
        error => error.is_passing().then_some(AVAILABLE),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(message: &str) -> Option<Duration> {
        patience(&RedisError::Refused {
            target: "127.0.0.1:6379".to_owned(),
            command: "PING",
            message: message.to_owned(),
        })
    }

    #[test]
    fn only_errors_that_may_end_are_waited_for() {
        assert_eq!(refused("LOADING Redis is loading the dataset in memory"), Some(LOADED));
        assert_eq!(refused("MISCONF Errors writing to the AOF file"), Some(AVAILABLE));
        assert_eq!(refused("NOPERM this user has no permissions"), None);
        let target = || "127.0.0.1:6379".to_owned();
        let source = std::io::Error::from(std::io::ErrorKind::ConnectionRefused).into();
        let unavailable = RedisError::Connect { target: target(), source };
        assert_eq!(patience(&unavailable), Some(AVAILABLE));
        let source = std::io::Error::from(std::io::ErrorKind::TimedOut).into();
        let silent = RedisError::Connect { target: target(), source };
        assert_eq!(patience(&silent), Some(SLOW));
        let old = RedisError::Version { target: target(), version: "6.2.0".to_owned() };
        assert_eq!(patience(&old), None);
    }
}
