//! Watches the memory of Redis: quotas of bytes depend on it.

use std::sync::Arc;
use std::time::Duration;

use redis::Value;
use tracing::debug;

use crate::lifecycle::Shutdown;
use crate::quotas::Quotas;
use crate::redis::{Link, RedisError, ServerInfo};

/// Interval of samples while Redis has a maximum: the quotas shrink before it is full.
const BOUNDED: Duration = Duration::from_millis(500);
/// Interval of samples while Redis has no maximum.
const UNBOUNDED: Duration = Duration::from_secs(10);

/// Samples until the soft stop.
pub(crate) async fn watch(link: Arc<Link>, quotas: Quotas, shutdown: Shutdown) {
    let mut pause = BOUNDED;
    loop {
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(pause) => {}
        }
        match observe(&link, &quotas).await {
            Ok(max) => pause = if max > 0 { BOUNDED } else { UNBOUNDED },
            Err(error) => debug!(%error, "cannot ask Redis for its memory"),
        }
    }
}

/// Takes one sample for the quotas; returns the maximum.
pub(crate) async fn observe(link: &Link, quotas: &Quotas) -> Result<u64, RedisError> {
    let (used, max) = memory(link).await?;
    quotas.observe_memory(used, max);
    Ok(max)
}

/// Used and maximum memory of the server, bytes; in a cluster, of the primary with the highest
/// share in use, of those that answer.
///
/// # Errors
/// If none answers.
pub(crate) async fn memory(link: &Link) -> Result<(u64, u64), RedisError> {
    let mut command = redis::cmd("INFO");
    command.arg("memory");
    let (mut infos, mut failed) = (Vec::new(), None);
    for answer in link.ask_each("INFO", &command).await? {
        match answer {
            Ok(answer) => infos.push(parsed(answer)),
            Err(error) => failed = Some(error),
        }
    }
    match (ServerInfo::worst(infos), failed) {
        (None, Some(error)) => Err(error),
        (info, _) => {
            let info = info.unwrap_or_default();
            Ok((info.memory_used, info.memory_max))
        }
    }
}

/// The same, and the replicas; in a cluster, of the primary with the fewest.
pub(crate) async fn memory_and_replicas(link: &Link) -> Result<ServerInfo, RedisError> {
    sections(link, &["memory", "replication"]).await
}

async fn sections(link: &Link, names: &[&str]) -> Result<ServerInfo, RedisError> {
    let mut command = redis::cmd("INFO");
    command.arg(names);
    let answers = link.ask_every("INFO", &command).await?;
    Ok(ServerInfo::worst(answers.into_iter().map(parsed)).unwrap_or_default())
}

fn parsed(answer: Value) -> ServerInfo {
    ServerInfo::parse(&redis::from_redis_value::<String>(answer).unwrap_or_default())
}
