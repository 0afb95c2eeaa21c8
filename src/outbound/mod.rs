//! The HTTP client for servers of other parties.
//!
//! Every call has: a checked address ([`CheckedUrl`]), no redirects, no proxies (proxy variables of
//! the environment are ignored), a deadline for the whole call, a maximum size of the answer, a
//! maximum number of concurrent requests per host, and reused connections. Calls of tenants and of
//! operators never share a connection, a limit, or the resolution of names.

mod address;
pub(crate) mod answer;
pub mod breakers;
pub(crate) mod headers;
mod hosts;
pub(crate) mod places;
pub(crate) mod resolve;
pub mod sign;

use std::error::Error as StdError;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
pub use reqwest::dns::{Addrs, Name, Resolve, Resolving};
pub use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
pub use reqwest::{Method, StatusCode};
use tokio::time::{Instant, timeout_at};

pub use self::address::{AddressRefused, CheckedUrl, Policy, URL_MAX_BYTES, UrlError};
pub(crate) use self::answer::Response;
use self::hosts::Hosts;
use self::resolve::{CALLER, Judging, LookupError, System};
use crate::id::BotId;

/// Maximum number of bytes that the client reads of an answer's body.
pub const ANSWER_MAX_BYTES: usize = 64 * 1024;
/// Maximum time to connect, including name resolution and TLS.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// An idle connection is closed after this time, before common servers close it: many do after 5 s. A request
/// that meets the end of its connection fails, and it is unknown whether it was handled.
pub(crate) const IDLE: Duration = Duration::from_secs(4);
/// Maximum number of idle connections of tenants to one host.
const TENANTS_IDLE_MAX: usize = 16;
const DEADLINE: HeaderName = HeaderName::from_static("x-deadline-ms");
const USER_AGENT: &str = concat!("fairlane/", env!("CARGO_PKG_VERSION"));

/// The limits of the client.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Networks that tenants' URLs may reach in addition to public addresses.
    pub allow_nets: Arc<[IpNet]>,
    /// Maximum number of concurrent requests to one host and port, at least 1.
    pub max_per_host: usize,
    /// See [`CONNECT_TIMEOUT`].
    pub connect_timeout: Duration,
    /// The name servers to ask, instead of those of the machine.
    pub name_servers: Arc<[SocketAddr]>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            allow_nets: Arc::default(),
            max_per_host: 64,
            connect_timeout: CONNECT_TIMEOUT,
            name_servers: Arc::default(),
        }
    }
}

/// A call.
#[derive(Debug)]
pub struct Request<'a> {
    /// The bot that makes it: limits count for this bot.
    pub bot: &'a BotId,
    /// The method.
    pub method: Method,
    /// The target.
    pub url: &'a CheckedUrl,
    /// Headers in addition to `host`, `user-agent`, `accept` and `content-length`.
    pub headers: HeaderMap,
    /// The body.
    pub body: Vec<u8>,
    /// The deadline of the whole call.
    pub deadline: Instant,
    /// The deadline of waiting for a place at the host.
    pub place_by: Instant,
    /// Whether the connection may stay open for further requests. Only for calls of tenants;
    /// those of operators always may.
    pub keep_connection: bool,
    /// Whether the header `x-deadline-ms` reports the remaining time when the request is sent.
    pub tell_deadline: bool,
}

/// An answer with any status.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, or what was read of it.
    pub body: Vec<u8>,
    /// Why the body is not complete, if it is not. The status and the headers say what they say.
    pub cut: Option<Cut>,
}

/// Why the body of an answer is not complete.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Cut {
    /// It has more than [`ANSWER_MAX_BYTES`]. The rest was not read.
    #[error("the answer has more than {ANSWER_MAX_BYTES} bytes")]
    TooBig,
    /// The deadline passed.
    #[error("the answer did not end in time")]
    TimedOut,
    /// The connection broke.
    #[error("the connection broke within the answer: {0}")]
    Broken(String),
}

impl Answer {
    /// The complete body.
    ///
    /// # Errors
    /// Why it is not complete.
    pub fn whole(&self) -> Result<&[u8], &Cut> {
        self.cut.as_ref().map_or(Ok(&self.body), Err)
    }
}

/// Why a call has no answer.
#[derive(Debug, thiserror::Error)]
pub enum OutboundError {
    /// No connection: name resolution, network or TLS failed. Nothing was sent.
    #[error("no connection: {}", Root(.0))]
    NotReached(#[source] reqwest::Error),
    /// The host has the maximum number of concurrent requests. Nothing was sent.
    #[error("{host} has {max} requests in flight, the maximum, and answered none of them in time")]
    Busy {
        /// The host.
        host: String,
        /// The maximum.
        max: usize,
    },
    /// The process or the bot has the maximum of concurrent name look-ups. Nothing was sent.
    #[error("this process or this bot has the maximum of concurrent name look-ups")]
    Lookups {
        /// When to try again.
        after: Duration,
    },
    /// The address is not allowed. No connection was made.
    #[error(transparent)]
    Refused(#[from] AddressRefused),
    /// The deadline passed. The server may or may not have handled the request.
    #[error("no answer in time")]
    TimedOut,
    /// The connection broke. The server may or may not have handled the request.
    #[error("the connection broke: {}", Root(.0))]
    Broken(#[source] reqwest::Error),
}

impl OutboundError {
    /// Whether the host was unreachable, so that nothing was sent.
    #[must_use]
    pub fn is_unreached(&self) -> bool {
        matches!(self, Self::NotReached(_) | Self::Busy { .. } | Self::Lookups { .. })
    }
}

/// The innermost cause, because the caller knows the context. Never contains a URL.
struct Root<'a>(&'a reqwest::Error);

impl fmt::Display for Root<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match causes(self.0).last() {
            Some(root) => write!(f, "{root}"),
            None => f.write_str("the client gave up"),
        }
    }
}

fn causes(error: &reqwest::Error) -> impl Iterator<Item = &(dyn StdError + 'static)> {
    std::iter::successors(error.source(), |error| (*error).source())
}

/// The client cannot be created.
#[derive(Debug, thiserror::Error)]
#[error("cannot create the HTTP client for callbacks: {0}")]
pub struct OutboundSetupError(#[source] Box<dyn StdError + Send + Sync>);

/// Makes calls. Clones share connections and limits.
#[derive(Debug, Clone)]
pub struct Outbound {
    tenants: Side,
    /// For calls of tenants whose connections do not stay open.
    once: reqwest::Client,
    operators: Side,
    policy: Policy,
}

/// What the calls of tenants, or those of operators, share.
#[derive(Debug, Clone)]
struct Side {
    client: reqwest::Client,
    hosts: Arc<Hosts>,
}

impl Outbound {
    /// A client that asks the name servers of the settings or of the machine.
    ///
    /// # Errors
    /// If the client cannot be created.
    pub fn new(settings: &Settings) -> Result<Self, OutboundSetupError> {
        // A silent name server is reported before the connection is given up.
        let within = settings.connect_timeout * 7 / 8;
        let system = || {
            let system = System::new(&settings.name_servers, within);
            system.map_err(|error| OutboundSetupError(error.into()))
        };
        Self::open(settings, Arc::new(system()?), Arc::new(system()?))
    }

    /// A client that uses `resolver`. The resolved addresses are still checked.
    ///
    /// # Errors
    /// If the client cannot be created.
    pub fn with_resolver(
        settings: &Settings,
        resolver: &Arc<dyn Resolve>,
    ) -> Result<Self, OutboundSetupError> {
        Self::open(settings, Arc::clone(resolver), Arc::clone(resolver))
    }

    fn open(
        settings: &Settings,
        tenants: Arc<dyn Resolve>,
        operators: Arc<dyn Resolve>,
    ) -> Result<Self, OutboundSetupError> {
        // Only the first call in a process installs the provider; any provider will do.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let policy = Policy::Tenant(Arc::clone(&settings.allow_nets));
        let judging = |resolver, policy: &Policy| Arc::new(Judging::new(resolver, policy.clone()));
        let (tenants, operators) =
            (judging(tenants, &policy), judging(operators, &Policy::Operator));
        let open = |judging: &Arc<Judging>, idle_max| {
            client(settings, judging, idle_max).map_err(|error| OutboundSetupError(error.into()))
        };
        let max = settings.max_per_host.max(1);
        let side = |client| Side { client, hosts: Hosts::new(max) };
        Ok(Self {
            tenants: side(open(&tenants, TENANTS_IDLE_MAX)?),
            once: open(&tenants, 0)?,
            operators: side(open(&operators, max)?),
            policy,
        })
    }

    /// The policy for URLs of tenants.
    #[must_use]
    pub fn tenants(&self) -> &Policy {
        &self.policy
    }

    /// Makes one call, without retries.
    ///
    /// A call of a tenant waits for a place at its host without regard to its bot: callers that
    /// share hosts between bots ask [`breakers`] before.
    ///
    /// # Errors
    /// See [`OutboundError`]; an answer with any status is not an error.
    ///
    /// # Cancel safety
    /// The connection is closed; the server may or may not have handled the request.
    pub async fn call(&self, request: Request<'_>) -> Result<Answer, OutboundError> {
        let Request { bot, method, url, mut headers, body, deadline, place_by, .. } = request;
        let Side { client, hosts } = if url.is_operators() {
            &self.operators
        } else {
            // Checked again here: for a literal address the client does not use the resolver.
            url.judge(&self.policy)?;
            &self.tenants
        };
        let keep = request.keep_connection || url.is_operators();
        let client = if keep { client } else { &self.once };
        let place = hosts.place(url.host(), url.port(), place_by.min(deadline)).await;
        let Some(_place) = place else {
            return Err(OutboundError::Busy { host: url.host().to_owned(), max: hosts.max() });
        };
        if Instant::now() >= deadline {
            // A process that was suspended may get the place later, and then the first poll would send.
            return Err(OutboundError::TimedOut);
        }
        if request.tell_deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            headers.insert(DEADLINE, crate::clock::millis(left).into());
        }
        let request = client.request(method, url.expose().clone()).headers(headers).body(body);
        let exchange = CALLER.scope(bot.clone(), async {
            let head = timeout_at(deadline, request.send()).await;
            let answer = head.map_err(|_| OutboundError::TimedOut)?.map_err(unanswered)?;
            Ok(read(answer, deadline).await)
        });
        exchange.await
    }
}

/// `idle_max`: maximum number of connections to a host that stay open.
fn client(
    settings: &Settings,
    resolver: &Arc<Judging>,
    idle_max: usize,
) -> Result<reqwest::Client, reqwest::Error> {
    let builder = || {
        reqwest::Client::builder()
            .user_agent(USER_AGENT)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .no_proxy()
            .connect_timeout(settings.connect_timeout)
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(idle_max)
            .dns_resolver(Arc::clone(resolver))
    };
    builder().build().or_else(|error| {
        // A machine without CA certificates can still call http:// URLs.
        let client = builder().tls_certs_only([]).build()?;
        tracing::warn!(error = %Root(&error), "this process cannot call https:// URLs, because the machine has no usable CA certificates; install them (package ca-certificates) and restart");
        Ok(client)
    })
}

fn unanswered(error: reqwest::Error) -> OutboundError {
    let error = error.without_url();
    if let Some(refused) = causes(&error).find_map(|cause| cause.downcast_ref::<AddressRefused>()) {
        return OutboundError::Refused(refused.clone());
    }
    if let Some(LookupError::Busy { after }) = causes(&error).find_map(|cause| cause.downcast_ref())
    {
        return OutboundError::Lookups { after: *after };
    }
    if error.is_connect() { OutboundError::NotReached(error) } else { OutboundError::Broken(error) }
}

/// Reads the body. An answer that has its head is an answer, whatever happens to its body.
async fn read(mut answer: reqwest::Response, deadline: Instant) -> Answer {
    let mut body = Vec::new();
    let cut = loop {
        let chunk = match timeout_at(deadline, answer.chunk()).await {
            Ok(Ok(Some(chunk))) => chunk,
            Ok(Ok(None)) => break None,
            Ok(Err(error)) => break Some(Cut::Broken(Root(&error.without_url()).to_string())),
            Err(_) => break Some(Cut::TimedOut),
        };
        let room = ANSWER_MAX_BYTES - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if chunk.len() > room {
            break Some(Cut::TooBig);
        }
    };
    Answer { status: answer.status(), headers: std::mem::take(answer.headers_mut()), body, cut }
}
