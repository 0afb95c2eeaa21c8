//! Where Redis is, and how it is connected to.

use std::fmt;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2};
use redis::{Client, ConnectionAddr, ErrorKind, IntoConnectionInfo as _, TlsCertificates};
use tokio::sync::Notify;

use super::error::StoreError;
use crate::config::{RedisUrl, RedisUrlError};
use crate::id::Prefix;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// Where Redis is: one server, or a cluster. Cheap to clone; clones share what they learn.
#[derive(Clone)]
pub struct Target(Arc<Inner>, Prefix);

struct Inner {
    /// What the URL names: one, or nodes of a cluster.
    seeds: Vec<Client>,
    cluster: bool,
    shown: String,
    /// The primaries that a cluster was last seen to have.
    primaries: RwLock<Vec<Client>>,
    /// Where the next subscription begins to look for a node.
    next: AtomicUsize,
    /// How often an answer did not come in time.
    doubts: AtomicU64,
    doubted: Notify,
}

impl Target {
    /// Parses a URL, see [`RedisUrl`]. TLS trusts the system's roots.
    ///
    /// # Errors
    /// When the text is no such URL.
    pub fn new(url: &str) -> Result<Self, redis::RedisError> {
        let url = RedisUrl::parse(url).map_err(|error: RedisUrlError| {
            let what = "the address of Redis";
            redis::RedisError::from((ErrorKind::InvalidClientConfig, what, error.to_string()))
        })?;
        Self::open(&url, None)
    }

    /// Where `url` says. `certificates`: what TLS trusts instead of the system's roots, and shows.
    ///
    /// # Errors
    /// When the client cannot use the URL or the certificates.
    pub fn open(
        url: &RedisUrl,
        certificates: Option<&TlsCertificates>,
    ) -> Result<Self, redis::RedisError> {
        if url.is_tls() {
            // Fails when it was done before; then another library of the process has chosen.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        // Without it, small writes wait for the acknowledgement of earlier ones.
        // Keepalive finds a peer that vanished; a subscription would wait for it forever.
        let alive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(2))
            .with_retries(3);
        let settings = TcpSettings::default().set_nodelay(true).set_keepalive(alive);
        let open = |seed: String| {
            let info = seed.into_connection_info()?.set_tcp_settings(settings.clone());
            // One right less for the user to have.
            let spoken = info.redis_settings().clone().set_skip_set_lib_name();
            let info = info.set_redis_settings(spoken);
            match certificates {
                Some(certificates) if url.is_tls() => {
                    Client::build_with_tls(info, certificates.clone())
                }
                _ => Client::open(info),
            }
        };
        let seeds: Vec<Client> = url.seeds().into_iter().map(open).collect::<Result<_, _>>()?;
        let shown: Vec<String> = seeds.iter().map(address).collect();
        let inner = Inner {
            seeds,
            cluster: url.is_cluster(),
            shown: shown.join(","),
            primaries: RwLock::default(),
            next: AtomicUsize::new(rand::random::<u16>().into()),
            doubts: AtomicU64::new(0),
            doubted: Notify::new(),
        };
        Ok(Self(Arc::new(inner), Prefix::default()))
    }

    /// The same place, of which keys with this prefix are ours.
    #[must_use]
    pub fn with_prefix(self, prefix: Prefix) -> Self {
        Self(self.0, prefix)
    }

    /// What our keys begin with.
    #[must_use]
    pub fn prefix(&self) -> &Prefix {
        &self.1
    }

    /// The client behind it, for connections of another kind; of a cluster, that of the first node
    /// that the URL names.
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.0.seeds[0]
    }

    /// Whether it is a cluster.
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        self.0.cluster
    }

    /// A node of the cluster, spoken to like those that the URL names.
    pub(super) fn node(&self, host: &str, port: u16) -> Client {
        let info = self.client().get_connection_info();
        let host = host.to_owned();
        let addr = match info.addr() {
            ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
                let (insecure, tls_params) = (*insecure, tls_params.clone());
                ConnectionAddr::TcpTls { host, port, insecure, tls_params }
            }
            _ => ConnectionAddr::Tcp(host, port),
        };
        Client::open(info.clone().set_addr(addr)).unwrap_or_else(|_| self.client().clone())
    }

    /// One node of it, as a server by itself.
    pub(super) fn alone(&self, client: Client) -> Self {
        let inner = Inner {
            shown: address(&client),
            seeds: vec![client],
            cluster: false,
            primaries: RwLock::default(),
            next: AtomicUsize::new(0),
            doubts: AtomicU64::new(0),
            doubted: Notify::new(),
        };
        Self(Arc::new(inner), self.1.clone())
    }

    /// An answer did not come in time: what happened to one connection may have happened to all of
    /// the process. Connections made before are not used for further calls.
    pub(super) fn doubt(&self) {
        self.0.doubts.fetch_add(1, Ordering::Relaxed);
        self.0.doubted.notify_waiters();
    }

    /// How often that happened.
    pub(super) fn doubts(&self) -> u64 {
        self.0.doubts.load(Ordering::Relaxed)
    }

    /// Waits until it happens.
    pub(crate) async fn doubted(&self) {
        self.0.doubted.notified().await;
    }

    /// Remembers the primaries of a cluster: when all that the URL names are gone, they are left.
    pub(super) fn learn(&self, primaries: Vec<Client>) {
        *self.0.primaries.write().unwrap_or_else(PoisonError::into_inner) = primaries;
    }

    /// Every node that is known, each once; the first is another one every time.
    pub(super) fn candidates(&self) -> Vec<Client> {
        let primaries = self.0.primaries.read().unwrap_or_else(PoisonError::into_inner).clone();
        let mut found: Vec<Client> = Vec::new();
        for client in primaries.into_iter().chain(self.0.seeds.iter().cloned()) {
            if !found.iter().any(|known| address(known) == address(&client)) {
                found.push(client);
            }
        }
        let first = self.0.next.fetch_add(1, Ordering::Relaxed) % found.len();
        found.rotate_left(first);
        found
    }

    pub(super) fn connect_error(&self, source: redis::RedisError) -> StoreError {
        connect_error(self.0.shown.clone(), self.client(), source)
    }

    pub(crate) fn unknown(&self, source: redis::RedisError) -> StoreError {
        StoreError::Unknown { target: self.0.shown.clone(), source }
    }

    /// A connection of its own for subscriptions. In a cluster to any node, since what is published
    /// reaches them all, and to another one every time. Not one of a pool: it is kept as long as the
    /// process runs, it needs neither scripts nor `recover`, and it can send no other command.
    ///
    /// # Errors
    /// When no connection can be made.
    pub async fn subscriber(&self) -> Result<redis::aio::PubSub, StoreError> {
        let mut failed = timed_out();
        for client in self.candidates() {
            match tokio::time::timeout(CONNECT_TIMEOUT, client.get_async_pubsub()).await {
                Ok(Ok(connection)) => return Ok(connection),
                Ok(Err(error)) => failed = error,
                Err(_) => failed = timed_out(),
            }
        }
        Err(self.connect_error(failed))
    }
}

/// No connection could be made to `client`; says what helps where that can be told.
pub(super) fn connect_error(
    target: String,
    client: &Client,
    source: redis::RedisError,
) -> StoreError {
    let text = source.to_string();
    let met = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    let tls = matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. });
    let remedy = if tls && met(&["UnknownIssuer", "BadSignature"]) {
        "name a file with the certificate of its authority in redis.ca_file"
    } else if tls && met(&["CertificateRequired", "broken pipe", "reset"]) {
        "if it asks for a certificate, set redis.cert_file and redis.key_file"
    } else if tls && met(&["InvalidContentType", "handshake eof"]) {
        "it does not speak TLS at this port; write redis:// in redis.url, or the port of TLS"
    } else if tls && met(&["timed out", "too long"]) {
        "if it does not speak TLS at this port, write redis:// in redis.url, or the port of TLS"
    } else if !tls && met(&["closed", "reset", "broken pipe", "end of file"]) {
        "if it speaks TLS at this port, write rediss:// in redis.url"
    } else {
        return StoreError::Connect { target, source };
    };
    let source = std::io::Error::other(format!("{text}; {remedy}")).into();
    StoreError::Connect { target, source }
}

/// Host and port, or the path of the socket.
pub(super) fn address(client: &Client) -> String {
    client.get_connection_info().addr().to_string()
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.shown)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0.shown)
    }
}

fn timed_out() -> redis::RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "connecting took too long").into()
}
