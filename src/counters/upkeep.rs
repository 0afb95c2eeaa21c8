//! A background task of the counters: detecting how Redis persists.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use tracing::info;

use crate::counters::handler::MinAge;
use crate::lifecycle::Shutdown;
use crate::redis::{Link, RedisError};

/// Interval between two checks of how Redis persists.
const ASK: Duration = Duration::from_secs(60);

/// Sets `min_age` to the time span that Redis can lose. It is zero if Redis syncs every write
/// before it answers, and no replica can take over: a replica may lack the last writes. Otherwise,
/// and if the setting is unreadable, it is [`MinAge::EVERYSEC`]. A first replica is noticed within a
/// minute.
pub(crate) async fn watch_persistence(link: Arc<Link>, min_age: MinAge, shutdown: Shutdown) {
    let mut known = None;
    loop {
        let loses_nothing = tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            answer = loses_nothing(&link) => answer.unwrap_or(false),
        };
        min_age.set(if loses_nothing { Duration::ZERO } else { MinAge::EVERYSEC });
        if loses_nothing && known != Some(true) {
            info!("Redis syncs every write before it answers: views are flushed immediately");
        }
        known = Some(loses_nothing);
        tokio::select! {
            biased;
            () = shutdown.soft.cancelled() => return,
            () = tokio::time::sleep(ASK) => {}
        }
    }
}

async fn loses_nothing(link: &Link) -> Result<bool, RedisError> {
    if link.target().is_cluster() || link.target().is_sentinel() {
        return Ok(false);
    }
    let mut command = redis::cmd("INFO");
    command.arg("replication");
    let infos = link.ask_every("INFO", &command).await?;
    let is_alone = |info| redis::from_redis_value::<String>(info).is_ok_and(|info| is_alone(&info));
    if !infos.into_iter().all(is_alone) {
        return Ok(false);
    }
    let mut command = redis::cmd("CONFIG");
    command.arg("GET").arg("appendonly").arg("appendfsync");
    let answers = link.ask_every("CONFIG", &command).await?;
    let is = |settings: &HashMap<String, String>, name: &str, wanted: &str| {
        settings.get(name).is_some_and(|value| value == wanted)
    };
    Ok(answers.into_iter().all(|answer| {
        let settings = redis::from_redis_value::<HashMap<String, String>>(answer);
        settings.is_ok_and(|settings| {
            is(&settings, "appendonly", "yes") && is(&settings, "appendfsync", "always")
        })
    }))
}

/// Whether a server has no replicas, by its `INFO replication`. It keeps its backlog for a while after
/// the last replica was disconnected: such a replica can still take over.
fn is_alone(info: &str) -> bool {
    let has = |line: &str| info.lines().any(|found| found.trim_end() == line);
    has("role:master") && has("connected_slaves:0") && has("repl_backlog_active:0")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_server_with_replicas_now_or_lately_is_not_alone() {
        let info = |role: &str, replicas: u32, backlog: u32| {
            format!(
                "# Replication\r\nrole:{role}\r\nconnected_slaves:{replicas}\r\nrepl_backlog_active:{backlog}\r\n"
            )
        };
        assert!(is_alone(&info("master", 0, 0)));
        for other in [
            info("master", 1, 1),
            info("master", 10, 0),
            info("master", 0, 1),
            info("slave", 0, 0),
            String::new(),
        ] {
            assert!(!is_alone(&other), "{other}");
        }
    }
}
