//! Values that are fixed with the first data of an environment, and the checks before that.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tracing::{debug, info, warn};

use super::{AppError, RESPONSE_TIMEOUT};
use crate::config::Config;
use crate::lifecycle::Shutdown;
use crate::redis::{Link, Server, keys};
use crate::signed_token::{KEY_BYTES, SigningKey};

/// Interval of looking at the signing key.
const LOOK: Duration = Duration::from_secs(5);

/// Stores the number of shards and the signing key with the first data. Returns the key.
pub(super) async fn register(link: &Link, config: &Config) -> Result<SigningKey, AppError> {
    let (shards, prefix) = (config.redis.shards.get(), link.prefix());
    let (shards_key, signing_key) = (keys::shards(prefix), keys::signing_key(prefix));
    let damaged = || AppError::SigningKey { key: signing_key.clone() };
    let mut look = redis::Pipeline::new();
    look.cmd("GET").arg(&shards_key);
    look.cmd("GET").arg(&signing_key);
    let mut found = link.run_checked("GET", &look).await?;
    // Existing values are not written again: a full Redis would refuse that too.
    if found.contains(&Value::Nil) {
        if found[0] == Value::Nil {
            Box::pin(check_environment(link, config)).await?;
        }
        let fresh: [u8; KEY_BYTES] = rand::random();
        let mut write = redis::Pipeline::new();
        write.cmd("SET").arg(&shards_key).arg(shards).arg("NX");
        write.cmd("SET").arg(&signing_key).arg(&fresh[..]).arg("NX");
        link.run_checked("SET", &write).await.map_err(|source| {
            if source.is_full() { AppError::Full { source } } else { source.into() }
        })?;
        found = link.run_checked("GET", &look).await?;
    }
    let mut found = found.into_iter();
    let stored = match found.next() {
        Some(Value::BulkString(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
        _ => String::new(),
    };
    if stored != shards.to_string() {
        return Err(AppError::Shards { configured: shards, stored });
    }
    match found.next() {
        Some(Value::BulkString(bytes)) => {
            let key = bytes.as_slice().try_into().map_err(|_| damaged())?;
            Ok(SigningKey::new(key))
        }
        _ => Err(damaged()),
    }
}

/// Keeps the signing key that of all processes, until the soft stop: a Redis that lost it, for example
/// in a failover, gets it back from the first process that looks, and the others follow.
pub(super) async fn keep_key(key: SigningKey, link: Arc<Link>, shutdown: Shutdown) {
    let name = keys::signing_key(link.prefix());
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(LOOK) => {}
        }
        let found = match link.command("GET", redis::Cmd::get(&name)).await {
            // The next look finds this one, or that of another process that was faster.
            Ok(Value::Nil) => {
                warn!("Redis has lost the signing key; storing it again");
                let mut store = redis::cmd("SET");
                store.arg(&name).arg(&key.current()[..]).arg("NX");
                link.command("SET", store).await
            }
            found => found,
        };
        match found {
            Ok(Value::BulkString(bytes)) => {
                if let Ok(stored) = <[u8; KEY_BYTES]>::try_from(bytes.as_slice())
                    && stored != key.current()
                {
                    warn!("Redis has another signing key; using it from now on");
                    key.replace(stored);
                }
            }
            Ok(_) => {}
            Err(error) => debug!(%error, "whether Redis has the signing key is not known"),
        }
    }
}

/// Looks for other environments in this Redis before the first data of an environment is written.
async fn check_environment(link: &Link, config: &Config) -> Result<(), AppError> {
    let server = Server::new(link.target().clone(), RESPONSE_TIMEOUT);
    let others = match server.environments().await {
        Ok(others) if others.is_empty() => return Ok(()),
        Ok(others) => others,
        Err(error) => {
            debug!(%error, "whether other environments are in this Redis is not known");
            return Ok(());
        }
    };
    let prefix = link.prefix();
    info!(%prefix, ?others, "new data: this Redis has other environments (redis.prefix)");
    // A process that does not trim may read a stream of another environment.
    if !config.bus.trim {
        return Ok(());
    }
    match server.read_elsewhere(&config.bus.streams).await?.pop_first() {
        Some((stream, other)) => {
            Err(AppError::StreamShared { stream, other, prefix: prefix.clone() })
        }
        None => Ok(()),
    }
}
