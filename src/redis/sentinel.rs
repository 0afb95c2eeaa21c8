//! Sentinels: asks them which server is the primary.
//!
//! All sentinels are asked concurrently. The answer is the address that most of them name, known as
//! soon as more than half of them agree. So one sentinel that was cut off with the old primary does
//! not lead back to it. The role of the server is checked after connecting: see [`super::node`].
//!
//! The client has its own module for sentinels, which this one does not use. It asks one sentinel
//! after the other and takes the first answer, and a frozen sentinel would hold it up.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::FuturesUnordered;
use redis::{AsyncConnectionConfig, Client, ErrorKind, Value};
use tracing::info;

use super::error::RedisError;
use super::target::{address, at, connect_error};

/// Timeout of connecting to a sentinel, and of its answer.
const ASK_TIMEOUT: Duration = Duration::from_secs(1);

const COMMAND: &str = "SENTINEL get-master-addr-by-name";
const WRONG_PASSWORD: &str =
    "wrong password; correct ?sentinel_user=USER&sentinel_password=PASSWORD in redis.url";
const WRONG_USER: &str = "add ?sentinel_user=USER&sentinel_password=PASSWORD to redis.url, with a right for this command";

/// The sentinels of a Redis.
pub(super) struct Sentinels {
    clients: Vec<Client>,
    /// The service whose primary they name.
    service: String,
    /// The connection settings of the primary, with a host that stands for its own.
    template: Client,
    /// The address of the last primary.
    last: Mutex<Option<String>>,
}

/// The answer of one sentinel: host and port of the primary; `None` if it knows no such service.
type Named = Option<(String, u16)>;

impl Sentinels {
    pub(super) fn new(clients: Vec<Client>, service: String, template: Client) -> Self {
        Self { clients, service, template, last: Mutex::default() }
    }

    /// The service, and the last known primary or the sentinels.
    pub(super) fn shown(&self) -> String {
        let last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match &*last {
            Some(last) => format!("{last} ({} of the sentinels)", self.service),
            None => self.name(),
        }
    }

    /// The service and the sentinels.
    fn name(&self) -> String {
        let at: Vec<_> = self.clients.iter().map(address).collect();
        format!("{} of the sentinels {}", self.service, at.join(","))
    }

    /// The current primary. Within about two seconds, also if some sentinels are frozen.
    ///
    /// # Errors
    /// [`RedisError::Connect`] if no sentinel answers. [`RedisError::Refused`] if they know no
    /// service of this name, or refuse.
    pub(super) async fn primary(&self) -> Result<Client, RedisError> {
        let mut asked: FuturesUnordered<_> =
            self.clients.iter().map(|client| self.ask(client)).collect();
        let mut votes: Vec<((String, u16), usize)> = Vec::new();
        let (mut unknown, mut failure) = (false, None);
        while let Some(answer) = asked.next().await {
            match answer {
                Ok(Some(named)) => {
                    let place = votes.iter().position(|(known, _)| *known == named);
                    let place = place.unwrap_or_else(|| {
                        votes.push((named, 0));
                        votes.len() - 1
                    });
                    votes[place].1 += 1;
                    if votes[place].1 * 2 > self.clients.len() {
                        break;
                    }
                }
                Ok(None) => unknown = true,
                // A refusal says more than a connection that cannot be made.
                Err(error @ RedisError::Refused { .. }) => failure = Some(error),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        if let Some(((host, port), _)) = votes.into_iter().max_by_key(|(_, votes)| *votes) {
            return Ok(self.adopt(&host, port));
        }
        Err(match failure {
            Some(error) if !unknown => self.unanswered(error),
            _ => {
                let message = format!(
                    "the sentinels know no service {:?}; write the name of `sentinel monitor` behind the sentinels in redis.url",
                    self.service
                );
                RedisError::Refused { target: self.name(), command: COMMAND, message }
            }
        })
    }

    /// How many sentinels name the primary that most of them name, and how many there are.
    pub(super) async fn agreeing(&self) -> (usize, usize) {
        let named = join_all(self.clients.iter().map(|client| self.ask(client))).await;
        let votes = |of: &(String, u16)| {
            named.iter().filter(|named| matches!(named, Ok(Some(named)) if named == of)).count()
        };
        let most = named.iter().flatten().flatten().map(votes).max();
        (most.unwrap_or(0), self.clients.len())
    }

    /// No sentinel named a primary, and at least one did not answer.
    fn unanswered(&self, error: RedisError) -> RedisError {
        match error {
            RedisError::Connect { source, .. } => {
                let text =
                    format!("no sentinel answers; start them, or correct redis.url: {source}");
                let source = std::io::Error::new(std::io::ErrorKind::NotConnected, text).into();
                RedisError::Connect { target: self.name(), source }
            }
            error => error,
        }
    }

    fn adopt(&self, host: &str, port: u16) -> Client {
        let client = at(&self.template, host, port);
        let found = address(&client);
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        if last.as_ref() != Some(&found) {
            info!(
                service = self.service,
                primary = found,
                before = last.as_deref(),
                "the sentinels name the primary"
            );
            *last = Some(found);
        }
        client
    }

    async fn ask(&self, client: &Client) -> Result<Named, RedisError> {
        let config = AsyncConnectionConfig::new()
            .set_connection_timeout(Some(ASK_TIMEOUT))
            .set_response_timeout(Some(ASK_TIMEOUT));
        let answer = async {
            let mut connection =
                client.get_multiplexed_async_connection_with_config(&config).await?;
            let mut command = redis::cmd("SENTINEL");
            command.arg("GET-MASTER-ADDR-BY-NAME").arg(&self.service);
            match connection.send_packed_command(&command).await? {
                Value::ServerError(error) => Err(error.into()),
                value => redis::from_redis_value::<Named>(value).map_err(redis::RedisError::from),
            }
        };
        answer.await.map_err(|source: redis::RedisError| match source.code() {
            Some(code) => {
                let remedy = match code {
                    "NOAUTH" | "WRONGPASS" | "NOPERM" => WRONG_USER,
                    _ => "for a server by itself write redis:// in redis.url",
                };
                let message = format!("{code} {} ({remedy})", source.detail().unwrap_or_default());
                RedisError::Refused { target: address(client), command: COMMAND, message }
            }
            None if source.kind() == ErrorKind::AuthenticationFailed => {
                let message = WRONG_PASSWORD.to_owned();
                RedisError::Refused { target: address(client), command: COMMAND, message }
            }
            None => connect_error(address(client), client, source),
        })
    }
}
