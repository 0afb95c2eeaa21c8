//! Where Redis is, and how it is connected to.

use std::fmt;
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2};
use redis::{Client, IntoConnectionInfo as _};

use super::error::StoreError;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Where Redis is.
#[derive(Clone)]
pub struct Target {
    pub(super) client: Client,
    pub(super) shown: String,
}

impl Target {
    /// Parses a URL: `redis://…` or `redis+unix:///path`.
    ///
    /// # Errors
    /// When the text is no such URL.
    pub fn new(url: &str) -> Result<Self, redis::RedisError> {
        // Without it, small writes wait for the acknowledgement of earlier ones.
        // Keepalive finds a peer that vanished; a subscription would wait for it forever.
        let alive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(2))
            .with_retries(3);
        let settings = TcpSettings::default().set_nodelay(true).set_keepalive(alive);
        let client = Client::open(url.into_connection_info()?.set_tcp_settings(settings))?;
        let shown = client.get_connection_info().addr().to_string();
        Ok(Self { client, shown })
    }

    /// The client behind it, for connections of another kind.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.client
    }

    pub(super) fn connect_error(&self, source: redis::RedisError) -> StoreError {
        StoreError::Connect { target: self.shown.clone(), source }
    }

    pub(crate) fn unknown(&self, source: redis::RedisError) -> StoreError {
        StoreError::Unknown { target: self.shown.clone(), source }
    }

    /// A connection of its own for subscriptions.
    ///
    /// # Errors
    /// When no connection can be made.
    pub async fn subscriber(&self) -> Result<redis::aio::PubSub, StoreError> {
        let connecting = self.client.get_async_pubsub();
        match tokio::time::timeout(CONNECT_TIMEOUT, connecting).await {
            Ok(Ok(connection)) => Ok(connection),
            Ok(Err(source)) => Err(self.connect_error(source)),
            Err(_) => Err(self.connect_error(timed_out())),
        }
    }
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

fn timed_out() -> redis::RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "connecting took too long").into()
}
