//! Which primaries serve. All are asked together, so one that is slow or missing hides no other.

use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, timeout, timeout_at};

use super::error::RedisError;
use super::keys;
use super::link::Link;
use super::node::server_error;

/// How long the others are waited for once a primary has answered.
const OTHERS: Duration = Duration::from_millis(500);

/// The primaries, by whether they serve.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Serving {
    /// The number of those that do.
    pub(crate) primaries: usize,
    /// The addresses of the others. Empty if no primary is known.
    pub(crate) silent: Vec<String>,
}

impl Link {
    /// Asks every primary whether it answers. Returns whether all accept writes: one that cannot write to
    /// its disk answers, but it refuses every write, and `PING` too.
    ///
    /// # Errors
    /// If there is no answer, or another refusal.
    pub(crate) async fn ping(&self) -> Result<bool, RedisError> {
        match self.command("PING", redis::cmd("PING")).await {
            Err(error) if error.is_misconf() => Ok(false),
            answer => answer.map(|_| true),
        }
    }

    /// Asks every primary, for at most `within`.
    ///
    /// # Cancel safety
    /// Nothing has changed.
    pub(crate) async fn serving(&self, within: Duration) -> Serving {
        let until = Instant::now() + within;
        if !self.wiring.cluster {
            return match timeout_at(until, self.ping()).await {
                Ok(Ok(_)) => Serving { primaries: 1, silent: Vec::new() },
                _ => Serving { primaries: 0, silent: vec![self.target.to_string()] },
            };
        }
        // The known topology is better than none: the nodes that are asked for it may be silent.
        let found = timeout(within / 2, self.topology()).await.ok().and_then(Result::ok);
        let Some(topology) = found.or_else(|| self.current()) else { return Serving::default() };
        // A node that answers `PING` may refuse all commands with keys: the cluster is down.
        let mut probe = Pipeline::with_capacity(1);
        probe.add_command(Cmd::get(keys::shards(self.prefix())));
        let probe = &probe;
        let asked = topology.nodes().iter().enumerate().map(|(at, node)| async move {
            (at, self.send(node, (probe, false), &[]).await.is_ok_and(|found| serves(&found)))
        });
        let serving = answering(asked.collect(), until).await;
        let silent = topology.nodes().iter().enumerate().filter(|(at, _)| !serving.contains(at));
        let silent: Vec<String> = silent.map(|(_, node)| node.name().to_owned()).collect();
        if !silent.is_empty() {
            self.mark_stale();
        }
        Serving { primaries: serving.len(), silent }
    }
}

/// Whether a node serves its own keys: it finds the one that it was asked for, names the primary that has
/// it, or says that none has it.
fn serves(found: &[Value]) -> bool {
    let mut refusals = found.iter().filter_map(server_error);
    refusals.all(|error| match error.code() {
        "MOVED" | "ASK" | "TRYAGAIN" => true,
        // With another reason, the node refuses all keys.
        "CLUSTERDOWN" => error.details() == Some("Hash slot not served"),
        _ => false,
    })
}

/// The places that answer well until then. After the first one, the others have [`OTHERS`].
async fn answering(
    mut asked: FuturesUnordered<impl Future<Output = (usize, bool)>>,
    mut until: Instant,
) -> Vec<usize> {
    let mut serving = Vec::new();
    while let Ok(Some((at, serves))) = timeout_at(until, asked.next()).await {
        if serves {
            serving.push(at);
            until = until.min(Instant::now() + OTHERS);
        }
    }
    serving
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How long it takes to know which of three places answer after so many ms; `None`: never.
    async fn after(ms: [Option<u64>; 3]) -> (Vec<usize>, u128) {
        let began = Instant::now();
        let asked = ms.into_iter().enumerate().map(|(at, ms)| async move {
            match ms {
                Some(ms) => tokio::time::sleep(Duration::from_millis(ms)).await,
                None => std::future::pending().await,
            }
            (at, true)
        });
        let found = answering(asked.collect(), began + Duration::from_secs(1)).await;
        (found, began.elapsed().as_millis())
    }

    #[tokio::test(start_paused = true)]
    async fn a_primary_that_is_slow_or_silent_delays_the_answer_by_little() {
        assert_eq!(after([Some(3), Some(1), Some(2)]).await, (vec![1, 2, 0], 3));
        assert_eq!(after([Some(1), None, Some(400)]).await, (vec![0, 2], 501));
        assert_eq!(after([Some(1), Some(700), None]).await, (vec![0], 501));
        assert_eq!(after([None, Some(800), None]).await, (vec![1], 1_000));
        assert_eq!(after([None, None, None]).await, (vec![], 1_000));
    }

    #[test]
    fn a_primary_serves_unless_it_refuses_all_keys() {
        let answer = |line: &str| redis::parse_redis_value(line.as_bytes()).unwrap();
        for line in [
            "$-1\r\n",
            "$1\r\n4\r\n",
            "-MOVED 1 a:1\r\n",
            "-TRYAGAIN later\r\n",
            "-CLUSTERDOWN Hash slot not served\r\n",
        ] {
            assert!(serves(&[answer(line)]), "{line}");
        }
        for line in ["-CLUSTERDOWN The cluster is down\r\n", "-LOADING Redis is loading\r\n"] {
            assert!(!serves(&[answer(line)]), "{line}");
        }
    }
}
