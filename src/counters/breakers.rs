//! The circuit breakers of Redis: each server of a cluster has its own, because one that hangs says nothing
//! about the others.

use std::sync::{Arc, PoisonError, RwLock};

use crate::breaker::Breaker;

/// One breaker per server, by the number of the server. There are never more than servers.
#[derive(Debug)]
pub(super) struct Breakers(RwLock<Vec<Arc<Breaker>>>);

impl Breakers {
    pub(super) fn new() -> Self {
        // The first one is there from the start: it makes the metric.
        Self(RwLock::new(vec![closed()]))
    }

    /// The breaker of the server with this number.
    pub(super) fn of(&self, server: usize) -> Arc<Breaker> {
        let known = self.0.read().unwrap_or_else(PoisonError::into_inner).get(server).cloned();
        known.unwrap_or_else(|| {
            let mut all = self.0.write().unwrap_or_else(PoisonError::into_inner);
            while all.len() <= server {
                all.push(closed());
            }
            Arc::clone(&all[server])
        })
    }
}

fn closed() -> Arc<Breaker> {
    Arc::new(Breaker::new("redis"))
}

#[cfg(test)]
mod tests {
    use std::future::{pending, ready};
    use std::time::Duration;

    use super::*;
    use crate::breaker::Unanswered;
    use crate::redis::RedisError;

    const WITHIN: Duration = Duration::from_millis(100);

    #[tokio::test(start_paused = true)]
    async fn a_server_that_hangs_opens_only_its_own_breaker() {
        let breakers = Breakers::new();
        let hangs = pending::<Result<u32, RedisError>>();
        let late = breakers.of(2).read(WITHIN, hangs).await;
        assert!(matches!(late, Err(Unanswered::Late(_))), "{late:?}");
        for (server, is_open) in [(0, false), (1, false), (2, true), (3, false)] {
            let read = breakers.of(server).read(WITHIN, ready(Ok::<_, RedisError>(7))).await;
            assert_eq!(matches!(read, Err(Unanswered::Open)), is_open, "{server}: {read:?}");
        }
    }
}
