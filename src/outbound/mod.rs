//! Calling other people's HTTP servers.
//!
//! What every call has: an address that was judged ([`CheckedUrl`]), no redirects, no proxies (the
//! variables of the environment are ignored), a deadline for everything, an answer of bounded
//! size, a bound on the requests that one host gets at once, connections that are kept and used
//! again. Tenants' and operators' calls never share a connection.

mod address;
pub(crate) mod answer;
pub(crate) mod headers;
mod hosts;
mod resolve;
pub mod sign;

use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
pub use reqwest::dns::{Addrs, Name, Resolve, Resolving};
pub use reqwest::header::{HeaderMap, HeaderName, HeaderValue};
pub use reqwest::{Method, StatusCode};
use tokio::time::{Instant, timeout_at};

pub use self::address::{AddressRefused, CheckedUrl, Policy, URL_MAX_BYTES, UrlError};
use self::hosts::Hosts;
use self::resolve::{Judging, System};

/// Most bytes of an answer's body that are read.
pub const ANSWER_MAX_BYTES: usize = 64 * 1024;
/// A connection is made within this, look-up of the name and TLS included.
pub const CONNECT_TIMEOUT: Duration = Duration::from_secs(3);
/// A connection that nobody used for this long is closed: before most servers do.
const IDLE: Duration = Duration::from_secs(30);
const DEADLINE: HeaderName = HeaderName::from_static("x-deadline-ms");
const USER_AGENT: &str = concat!("fairlane/", env!("CARGO_PKG_VERSION"));

/// What bounds the calls.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Networks that tenants' URLs may reach beside public addresses.
    pub allow_nets: Arc<[IpNet]>,
    /// Requests that one host and port gets at once, at least 1.
    pub max_per_host: usize,
    /// See [`CONNECT_TIMEOUT`].
    pub connect_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self { allow_nets: Arc::default(), max_per_host: 64, connect_timeout: CONNECT_TIMEOUT }
    }
}

/// A call.
#[derive(Debug)]
pub struct Request<'a> {
    /// How.
    pub method: Method,
    /// Where to.
    pub url: &'a CheckedUrl,
    /// Beside `host`, `user-agent`, `accept` and `content-length`, which are set.
    pub headers: HeaderMap,
    /// What is sent.
    pub body: Vec<u8>,
    /// Everything is over by then.
    pub deadline: Instant,
    /// The call waits for a place at its host until then.
    pub place_by: Instant,
    /// Whether the header `x-deadline-ms` tells how much time is left when the request is sent.
    pub tell_deadline: bool,
}

/// What came back, whatever the status.
#[derive(Debug)]
pub struct Answer {
    /// The status.
    pub status: StatusCode,
    /// The headers.
    pub headers: HeaderMap,
    /// The body, or the first [`ANSWER_MAX_BYTES`] of it.
    pub body: Vec<u8>,
    /// Whether the body was longer. Then the rest was not waited for.
    pub cut: bool,
}

impl Answer {
    /// The whole body.
    ///
    /// # Errors
    /// [`OutboundError::TooBig`] when it was longer than [`ANSWER_MAX_BYTES`].
    pub fn whole(&self) -> Result<&[u8], OutboundError> {
        if self.cut { Err(OutboundError::TooBig) } else { Ok(&self.body) }
    }
}

/// Why there is no answer.
#[derive(Debug, thiserror::Error)]
pub enum OutboundError {
    /// No connection: the name, the network, TLS. Nothing of the request was sent.
    #[error("no connection: {}", Root(.0))]
    NotReached(#[source] reqwest::Error),
    /// The host has all the requests it gets at once. Nothing was sent.
    #[error("{host} has {max} requests already and answered none of them in time")]
    Busy {
        /// The host.
        host: String,
        /// The bound.
        max: usize,
    },
    /// The address may not be reached. Nothing was sent, and no connection was made.
    #[error(transparent)]
    Refused(#[from] AddressRefused),
    /// The deadline passed. Whether the request was handled is unknown.
    #[error("no answer in time")]
    TimedOut,
    /// The connection broke. Whether the request was handled is unknown.
    #[error("the connection broke: {}", Root(.0))]
    Broken(#[source] reqwest::Error),
    /// More than [`ANSWER_MAX_BYTES`].
    #[error("the answer has more than {ANSWER_MAX_BYTES} bytes")]
    TooBig,
}

impl OutboundError {
    /// Whether certainly nothing was sent, because the host could not be reached.
    #[must_use]
    pub fn is_unreached(&self) -> bool {
        matches!(self, Self::NotReached(_) | Self::Busy { .. })
    }
}

/// The innermost cause: what the layers above say is known. Never a URL.
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

/// The client cannot be made.
#[derive(Debug, thiserror::Error)]
#[error("no HTTP client can be made for callbacks: {0}")]
pub struct OutboundSetupError(#[source] reqwest::Error);

/// Makes calls. Clones share connections and bounds.
#[derive(Debug, Clone)]
pub struct Outbound {
    tenants: reqwest::Client,
    operators: reqwest::Client,
    policy: Policy,
    hosts: Arc<Hosts>,
}

impl Outbound {
    /// Names are looked up by the operating system.
    ///
    /// # Errors
    /// When the client cannot be made.
    pub fn new(settings: &Settings) -> Result<Self, OutboundSetupError> {
        let system: Arc<dyn Resolve> = Arc::new(System::default());
        Self::with_resolver(settings, &system)
    }

    /// Names are looked up by `resolver`; what it answers is judged all the same.
    ///
    /// # Errors
    /// When the client cannot be made.
    pub fn with_resolver(
        settings: &Settings,
        resolver: &Arc<dyn Resolve>,
    ) -> Result<Self, OutboundSetupError> {
        // The first one in the process wins; whichever it is does.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let policy = Policy::Tenant(Arc::clone(&settings.allow_nets));
        let client = |policy: &Policy| {
            let judging = Judging { inner: Arc::clone(resolver), policy: policy.clone() };
            client(settings, &Arc::new(judging)).map_err(OutboundSetupError)
        };
        Ok(Self {
            tenants: client(&policy)?,
            operators: client(&Policy::Operator)?,
            policy,
            hosts: Hosts::new(settings.max_per_host.max(1)),
        })
    }

    /// The policy for tenants' URLs.
    #[must_use]
    pub fn tenants(&self) -> &Policy {
        &self.policy
    }

    /// Makes one call. Nothing is tried again.
    ///
    /// # Errors
    /// See [`OutboundError`]; an answer with any status is an answer.
    ///
    /// # Cancel safety
    /// The connection is closed; whether the request was handled is unknown.
    pub async fn call(&self, request: Request<'_>) -> Result<Answer, OutboundError> {
        let Request { method, url, mut headers, body, deadline, place_by, tell_deadline } = request;
        let client = if url.is_operators() {
            &self.operators
        } else {
            // Once more: the client connects to an address without asking the resolver.
            url.judge(&self.policy)?;
            &self.tenants
        };
        let place = self.hosts.place(url.host(), url.port(), place_by.min(deadline)).await;
        let Some(_place) = place else {
            return Err(OutboundError::Busy { host: url.host().to_owned(), max: self.hosts.max() });
        };
        if tell_deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            headers.insert(DEADLINE, crate::clock::millis(left).into());
        }
        let request = client.request(method, url.expose().clone()).headers(headers).body(body);
        let exchange = async {
            let answer = request.send().await.map_err(unanswered)?;
            read(answer).await
        };
        timeout_at(deadline, exchange).await.unwrap_or(Err(OutboundError::TimedOut))
    }
}

fn client(settings: &Settings, resolver: &Arc<Judging>) -> Result<reqwest::Client, reqwest::Error> {
    let builder = || {
        reqwest::Client::builder()
            .user_agent(USER_AGENT)
            .redirect(reqwest::redirect::Policy::none())
            .retry(reqwest::retry::never())
            .referer(false)
            .no_proxy()
            .connect_timeout(settings.connect_timeout)
            .pool_idle_timeout(IDLE)
            .pool_max_idle_per_host(settings.max_per_host)
            .dns_resolver(Arc::clone(resolver))
    };
    builder().build().or_else(|error| {
        // A machine without certificates of authorities can still call http:// URLs.
        let client = builder().tls_certs_only([]).build()?;
        tracing::warn!(error = %Root(&error), "https:// URLs cannot be called from this machine");
        Ok(client)
    })
}

fn unanswered(error: reqwest::Error) -> OutboundError {
    let error = error.without_url();
    if let Some(refused) = causes(&error).find_map(|cause| cause.downcast_ref::<AddressRefused>()) {
        return OutboundError::Refused(refused.clone());
    }
    if error.is_connect() { OutboundError::NotReached(error) } else { OutboundError::Broken(error) }
}

async fn read(mut answer: reqwest::Response) -> Result<Answer, OutboundError> {
    let mut body = Vec::new();
    let mut cut = false;
    while let Some(chunk) =
        answer.chunk().await.map_err(|error| OutboundError::Broken(error.without_url()))?
    {
        let room = ANSWER_MAX_BYTES - body.len();
        body.extend_from_slice(&chunk[..chunk.len().min(room)]);
        if chunk.len() > room {
            cut = true;
            break;
        }
    }
    Ok(Answer { status: answer.status(), headers: std::mem::take(answer.headers_mut()), body, cut })
}
