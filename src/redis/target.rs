//! The address of Redis, and how to connect to it.

use std::fmt;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use redis::io::tcp::{TcpSettings, socket2};
use redis::{Client, ConnectionAddr, ErrorKind, IntoConnectionInfo as _, TlsCertificates};
use tokio::sync::watch;

use super::error::RedisError;
use super::replicas::{ReplicaWait, Replicas};
use super::sentinel::Sentinels;
use super::url::{RedisUrl, RedisUrlError};
use crate::id::Prefix;

pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);

/// A Redis deployment: one server, a cluster, or the primary that sentinels name. Cheap to clone;
/// clones share what they learn.
#[derive(Clone)]
pub struct Target(Arc<Inner>, Prefix, Option<Arc<Replicas>>);

struct Inner {
    /// The servers in the URL: one, or nodes of a cluster. Of sentinels: settings for the primary,
    /// with a host that stands for its own.
    seeds: Vec<Client>,
    cluster: bool,
    sentinels: Option<Sentinels>,
    shown: String,
    /// The last known primaries of a cluster.
    primaries: RwLock<Vec<Client>>,
    /// The index of the node that is asked first the next time.
    next: AtomicUsize,
    /// Number of timeouts so far.
    doubts: watch::Sender<u64>,
}

impl Target {
    /// Parses a URL, see [`RedisUrl`]. TLS trusts the system's roots.
    ///
    /// # Errors
    /// If the URL is not valid.
    pub fn new(url: &str) -> Result<Self, redis::RedisError> {
        let url = RedisUrl::parse(url).map_err(|error: RedisUrlError| {
            let what = "the address of Redis";
            redis::RedisError::from((ErrorKind::InvalidClientConfig, what, error.to_string()))
        })?;
        Self::open(&url, None)
    }

    /// The deployment at `url`. `certificates`: the ones that TLS trusts instead of the system's
    /// roots, and the client certificate.
    ///
    /// # Errors
    /// If the client cannot use the URL or the certificates.
    pub fn open(
        url: &RedisUrl,
        certificates: Option<&TlsCertificates>,
    ) -> Result<Self, redis::RedisError> {
        if url.is_tls() {
            // Fails if the provider is already installed, by this or another library of the
            // process.
            let _ = rustls::crypto::ring::default_provider().install_default();
        }
        // Without it, small writes wait for the acknowledgement of earlier ones.
        // Keepalive detects a peer that vanished; a subscription would wait for it for ever.
        let alive = socket2::TcpKeepalive::new()
            .with_time(Duration::from_secs(5))
            .with_interval(Duration::from_secs(2))
            .with_retries(3);
        let settings = TcpSettings::default().set_nodelay(true).set_keepalive(alive);
        let open = |seed: String| {
            let info = seed.into_connection_info()?.set_tcp_settings(settings.clone());
            // So the user needs one permission less.
            let spoken = info.redis_settings().clone().set_skip_set_lib_name();
            let info = info.set_redis_settings(spoken);
            match certificates {
                Some(certificates) if url.is_tls() => {
                    Client::build_with_tls(info, certificates.clone())
                }
                _ => Client::open(info),
            }
        };
        let mut seeds: Vec<Client> = url.seeds().into_iter().map(open).collect::<Result<_, _>>()?;
        let sentinels = match (url.service(), url.primary()) {
            (Some(service), Some(primary)) => {
                let template = open(primary)?;
                let clients = std::mem::replace(&mut seeds, vec![template.clone()]);
                Some(Sentinels::new(clients, service.to_owned(), template))
            }
            _ => None,
        };
        let shown: Vec<String> = seeds.iter().map(address).collect();
        let inner = Inner {
            seeds,
            cluster: url.is_cluster(),
            sentinels,
            shown: shown.join(","),
            primaries: RwLock::default(),
            next: AtomicUsize::new(rand::random::<u16>().into()),
            doubts: watch::Sender::new(0),
        };
        Ok(Self(Arc::new(inner), Prefix::default(), None))
    }

    /// The same deployment with this prefix for our keys.
    #[must_use]
    pub fn with_prefix(self, prefix: Prefix) -> Self {
        Self(self.0, prefix, self.2)
    }

    /// The same deployment. The results of lasting writes are used only once replicas have them.
    #[must_use]
    pub fn with_wait(self, wait: Option<ReplicaWait>) -> Self {
        Self(self.0, self.1, wait.map(|wait| Arc::new(Replicas::new(wait))))
    }

    /// The number of replicas that must have a lasting write before its result is used; 0: none.
    #[must_use]
    pub fn wait_replicas(&self) -> u8 {
        self.2.as_ref().map_or(0, |replicas| replicas.wanted())
    }

    /// How to wait for replicas, if at all.
    pub(super) fn replicas(&self) -> Option<&Replicas> {
        self.2.as_deref()
    }

    /// The prefix of our keys.
    #[must_use]
    pub fn prefix(&self) -> &Prefix {
        &self.1
    }

    /// The underlying client, for other kinds of connections; of a cluster, that of the first node
    /// in the URL. Behind sentinels it has settings, but no address: see [`Self::primary`].
    #[must_use]
    pub fn client(&self) -> &Client {
        &self.0.seeds[0]
    }

    /// Whether it is a cluster.
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        self.0.cluster
    }

    /// Whether sentinels name the primary.
    #[must_use]
    pub fn is_sentinel(&self) -> bool {
        self.0.sentinels.is_some()
    }

    /// Whether connections to it are encrypted.
    pub(crate) fn is_tls(&self) -> bool {
        is_tls(self.client())
    }

    /// How many sentinels name the same primary, and how many there are; `None` without sentinels.
    pub(crate) async fn agreeing_sentinels(&self) -> Option<(usize, usize)> {
        match &self.0.sentinels {
            Some(sentinels) => Some(sentinels.agreeing().await),
            None => None,
        }
    }

    /// The server to connect to when `client` is known: behind sentinels the current primary.
    ///
    /// # Errors
    /// If the sentinels name none.
    pub(super) async fn primary(&self, client: &Client) -> Result<Client, RedisError> {
        match &self.0.sentinels {
            Some(sentinels) => sentinels.primary().await,
            None => Ok(client.clone()),
        }
    }

    /// A node of the cluster, with the connection settings of the URL.
    pub(super) fn node(&self, host: &str, port: u16) -> Client {
        at(self.client(), host, port)
    }

    /// One node as a single server.
    pub(super) fn alone(&self, client: Client) -> Self {
        let inner = Inner {
            shown: address(&client),
            seeds: vec![client],
            cluster: false,
            sentinels: None,
            primaries: RwLock::default(),
            next: AtomicUsize::new(0),
            doubts: watch::Sender::new(0),
        };
        Self(Arc::new(inner), self.1.clone(), None)
    }

    /// Notes a timeout: other connections of the process may be dead too. Existing connections are
    /// not used for further calls.
    pub(super) fn doubt(&self) {
        self.0.doubts.send_modify(|doubts| *doubts += 1);
    }

    /// The number of timeouts so far.
    pub(super) fn doubts(&self) -> u64 {
        *self.0.doubts.borrow()
    }

    /// Waits for a timeout.
    pub(crate) async fn doubted(&self) {
        self.doubted_since(self.doubts()).await;
    }

    /// Waits until there were more timeouts than `doubts`.
    pub(super) async fn doubted_since(&self, doubts: u64) {
        let mut changes = self.0.doubts.subscribe();
        if changes.wait_for(|now| *now > doubts).await.is_err() {
            // The sender is in `self`: it is never dropped meanwhile.
            std::future::pending::<()>().await;
        }
    }

    /// Remembers the primaries of a cluster: they remain reachable if all nodes in the URL are
    /// gone.
    pub(super) fn learn(&self, primaries: Vec<Client>) {
        *self.0.primaries.write().unwrap_or_else(PoisonError::into_inner) = primaries;
    }

    /// All known nodes, each once, starting with a different one at every call.
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

    pub(super) fn connect_error(&self, source: redis::RedisError) -> RedisError {
        connect_error(self.to_string(), self.client(), source)
    }

    pub(crate) fn unknown(&self, source: redis::RedisError) -> RedisError {
        RedisError::Unknown { target: self.to_string(), source }
    }
}

/// The error of a failed connection to `client`, with a remedy if there is a known one.
pub(super) fn connect_error(
    target: String,
    client: &Client,
    source: redis::RedisError,
) -> RedisError {
    let text = source.to_string();
    let met = |parts: &[&str]| parts.iter().any(|part| text.contains(part));
    let tls = is_tls(client);
    let remedy = if source.kind() == redis::ErrorKind::AuthenticationFailed {
        "correct USER:PASSWORD in redis.url"
    } else if tls && met(&["UnknownIssuer", "BadSignature"]) {
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
        return RedisError::Connect { target, source };
    };
    let source = std::io::Error::other(format!("{text}; {remedy}")).into();
    RedisError::Connect { target, source }
}

/// The server at another host and port, with the settings of `client`.
pub(super) fn at(client: &Client, host: &str, port: u16) -> Client {
    let info = client.get_connection_info();
    let host = host.to_owned();
    let addr = match info.addr() {
        ConnectionAddr::TcpTls { insecure, tls_params, .. } => {
            let (insecure, tls_params) = (*insecure, tls_params.clone());
            ConnectionAddr::TcpTls { host, port, insecure, tls_params }
        }
        _ => ConnectionAddr::Tcp(host, port),
    };
    Client::open(info.clone().set_addr(addr)).unwrap_or_else(|_| client.clone())
}

fn is_tls(client: &Client) -> bool {
    matches!(client.get_connection_info().addr(), ConnectionAddr::TcpTls { .. })
}

/// Host and port, or the path of the socket.
pub(super) fn address(client: &Client) -> String {
    client.get_connection_info().addr().to_string()
}

impl fmt::Debug for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0.sentinels {
            Some(sentinels) => f.write_str(&sentinels.shown()),
            None => f.write_str(&self.0.shown),
        }
    }
}

pub(crate) fn timed_out() -> redis::RedisError {
    std::io::Error::new(std::io::ErrorKind::TimedOut, "connecting took too long").into()
}
