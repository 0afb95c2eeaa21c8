//! Which primaries serve. All are asked together, so one that is slow or missing hides no other.

use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::stream::FuturesUnordered;
use redis::{Cmd, Pipeline, Value};
use tokio::time::{Instant, timeout, timeout_at};

use super::error::RedisError;
use super::keys;
use super::link::Link;
use super::node::server_error;
use super::topology::Topology;
use crate::breaker::Away as _;

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
        let Some(topology) = self.known(within / 2).await else { return Serving::default() };
        // A node that answers `PING` may refuse all commands with keys: the cluster is down.
        let probe = Cmd::get(keys::shards(self.prefix()));
        let serving = self.ask_nodes(&topology, probe, serves, until).await;
        let is_silent = |at: usize| !serving.iter().any(|(known, _)| *known == at);
        let silent = topology.nodes().iter().enumerate().filter(|(at, _)| is_silent(*at));
        let silent: Vec<String> = silent.map(|(_, node)| node.name().to_owned()).collect();
        if !silent.is_empty() {
            self.mark_stale();
        }
        Serving { primaries: serving.len(), silent }
    }

    /// The primaries of a cluster that do not serve although others do. Always empty for a single server.
    ///
    /// # Cancel safety
    /// Nothing has changed.
    pub(crate) async fn missing(&self, within: Duration) -> Vec<String> {
        if !self.wiring.cluster {
            return Vec::new();
        }
        let Serving { primaries, silent } = self.serving(within).await;
        if primaries > 0 { silent } else { Vec::new() }
    }

    /// The same if one of them may be the reason of `error`. Empty if not.
    ///
    /// # Cancel safety
    /// Nothing has changed.
    pub(crate) async fn missing_behind(&self, error: &RedisError, within: Duration) -> Vec<String> {
        if is_silence(error) { self.missing(within).await } else { Vec::new() }
    }

    /// Sends a command to every primary of a cluster, as [`Self::serving`] does. Returns the answers of those
    /// that do not refuse it.
    pub(crate) async fn ask_serving(&self, command: Cmd, within: Duration) -> Vec<Value> {
        let until = Instant::now() + within;
        let Some(topology) = self.known(within / 2).await else { return Vec::new() };
        let answers = self.ask_nodes(&topology, command, answers, until).await;
        answers.into_iter().flat_map(|(_, values)| values).collect()
    }

    /// The topology. The last one is better than none: the nodes that are asked for it may be silent.
    async fn known(&self, within: Duration) -> Option<Arc<Topology>> {
        let found = timeout(within, self.topology()).await.ok().and_then(Result::ok);
        found.or_else(|| self.current())
    }

    /// The good answers of the nodes until then, each with the place of its node.
    async fn ask_nodes(
        &self,
        topology: &Topology,
        command: Cmd,
        is_good: fn(&[Value]) -> bool,
        until: Instant,
    ) -> Vec<(usize, Vec<Value>)> {
        let mut pipe = Pipeline::with_capacity(1);
        pipe.add_command(command);
        let pipe = &pipe;
        let asked = topology.nodes().iter().enumerate().map(|(at, node)| async move {
            let found = self.send(node, (pipe, false), &[]).await;
            (at, found.ok().filter(|found| is_good(found)))
        });
        answering(asked.collect(), until).await
    }
}

/// Whether a node did not refuse.
fn answers(found: &[Value]) -> bool {
    found.iter().all(|value| server_error(value).is_none())
}

/// Whether the error may come from a primary that does not serve.
fn is_silence(error: &RedisError) -> bool {
    match error {
        RedisError::Refused { message, .. } => {
            ["LOADING", "CLUSTERDOWN"].iter().any(|code| message.starts_with(code))
        }
        error => !error.has_answered(),
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

/// The good answers until then, each with its place. After the first one, the others have [`OTHERS`].
async fn answering<T>(
    mut asked: FuturesUnordered<impl Future<Output = (usize, Option<T>)>>,
    mut until: Instant,
) -> Vec<(usize, T)> {
    let mut found = Vec::new();
    while let Ok(Some((at, answer))) = timeout_at(until, asked.next()).await {
        if let Some(answer) = answer {
            found.push((at, answer));
            until = until.min(Instant::now() + OTHERS);
        }
    }
    found
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
            (at, Some(()))
        });
        let found = answering(asked.collect(), began + Duration::from_secs(1)).await;
        (found.into_iter().map(|(at, ())| at).collect(), began.elapsed().as_millis())
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

    #[test]
    fn only_an_error_of_a_server_that_does_not_serve_may_come_from_a_missing_primary() {
        let target = || "a:1".to_owned();
        let refused = |message: &str| {
            let message = message.to_owned();
            RedisError::Refused { target: target(), command: "GET", message }
        };
        let source = || redis::RedisError::from(std::io::Error::from(std::io::ErrorKind::TimedOut));
        for error in [
            RedisError::Connect { target: target(), source: source() },
            RedisError::Unknown { target: target(), source: source() },
            refused("LOADING Redis is loading the dataset in memory"),
            refused("CLUSTERDOWN Hash slot not served"),
        ] {
            assert!(is_silence(&error), "{error}");
        }
        for message in ["OOM command not allowed", "NOPERM no permissions", "MISCONF errors"] {
            assert!(!is_silence(&refused(message)), "{message}");
        }
    }
}
