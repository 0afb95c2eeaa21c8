//! Resolves names, and checks every address before a connection to it.
//!
//! Look-ups are asynchronous, so one that is cancelled ends. The resolver of the C library cannot be
//! cancelled: a thread would wait for each silent name server, long after its request was given up.
//!
//! Each look-up has a place ([`Places`]), so that a bot whose names do not resolve leaves places for
//! the names of other bots. Names in the configuration and names of tenants have a resolver of
//! their own each, with its own places and its own cache.
//!
//! The cache keeps some addresses of each name. That of the library would keep whole answers, and a tenant
//! decides how large the answers for its names are: up to 64 KiB each, which take more than a megabyte.

use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::system_conf::read_system_conf;
use moka::Expiry;
use moka::sync::Cache;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::time::timeout;

use super::address::{AddressRefused, Policy};
use super::places::Places;
use crate::id::BotId;
use crate::telemetry::OncePerSubject;

/// Maximum number of concurrent look-ups of a process: of tenants' names, and of those in the
/// configuration.
const LOOKUPS: usize = 64;
/// Maximum number of names in a cache.
const CACHE: u64 = 8_192;
/// Maximum number of addresses of a name that are used.
const ADDRESSES: usize = 16;
/// The bounds of how long an answer is kept, whatever its record says: a change is known after
/// these times.
const KEEP_MAX: Duration = Duration::from_secs(300);
/// The same of an answer without an IPv4 address. The library asks for both families, and for the name in each
/// search domain, and does not tell that one of these questions failed.
const KEEP_DOUBTFUL: RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(5);
/// Number of times that a silent name server is asked.
const TRIES: u32 = 3;
/// Interval of looking for changes of the files.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];
/// The name server of a machine that names none.
const THIS_MACHINE: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 53);

/// Limits the log line about names at addresses that are not allowed.
static REFUSED: OncePerSubject = OncePerSubject::new();

tokio::task_local! {
    /// The bot whose request makes the connection.
    pub(super) static CALLER: BotId;
}

/// Why a name has no address.
#[derive(Debug, thiserror::Error)]
pub(crate) enum LookupError {
    /// The bot has as many look-ups in progress as it may have now.
    #[error("{LOOKUPS} names are being looked up, the maximum, or this bot's part of it")]
    Busy {
        /// When to ask again.
        after: Duration,
    },
    /// A connection that no request waits for.
    #[error("no request waits for the connection")]
    NoCaller,
    /// No name server knows the name.
    #[error("the name cannot be looked up: there is no such name")]
    NoSuchName,
    /// The name exists, but has no address.
    #[error("the name cannot be looked up: it has no address")]
    NoAddress,
    /// No name server answered.
    #[error("the name cannot be looked up: no name server answers")]
    Silent,
    /// Another failure.
    #[error("the name cannot be looked up: {0}")]
    Failed(#[source] NetError),
}

impl From<NetError> for LookupError {
    fn from(error: NetError) -> Self {
        match error {
            NetError::Timeout => Self::Silent,
            error => Self::Failed(error),
        }
    }
}

/// Uses the name servers of the machine and its `/etc/hosts`.
pub(crate) struct System {
    /// Instead of those of the machine.
    name_servers: Arc<[SocketAddr]>,
    within: Duration,
    current: Mutex<Current>,
}

/// What the files said.
struct Current {
    names: Names,
    changed: [Option<SystemTime>; FILES.len()],
    looked: Instant,
}

impl System {
    /// Look-ups take up to `within`. Without `name_servers`, those of `/etc/resolv.conf` are used.
    ///
    /// # Errors
    /// If the resolver cannot be created.
    pub(crate) fn new(
        name_servers: &Arc<[SocketAddr]>,
        within: Duration,
    ) -> Result<Self, NetError> {
        let current = Current {
            changed: FILES.map(changed),
            names: Names::new(name_servers, within)?,
            looked: Instant::now(),
        };
        let (name_servers, current) = (Arc::clone(name_servers), Mutex::new(current));
        Ok(Self { name_servers, within, current })
    }

    /// The addresses of a name, with port 0.
    ///
    /// # Errors
    /// See [`LookupError`].
    ///
    /// # Cancel safety
    /// The look-up ends.
    pub(crate) async fn look_up(&self, name: &str) -> Result<Vec<SocketAddr>, LookupError> {
        self.current().look_up(name).await
    }

    /// The resolver, created again after a change of the files.
    fn current(&self) -> Names {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.looked.elapsed() >= LOOK_AGAIN {
            current.looked = Instant::now();
            let changed = FILES.map(changed);
            if changed != current.changed {
                match Names::new(&self.name_servers, self.within) {
                    Ok(names) => (current.names, current.changed) = (names, changed),
                    Err(error) => {
                        tracing::warn!(%error, "cannot use the changed settings of the name servers");
                    }
                }
            }
        }
        current.names.clone()
    }
}

impl std::fmt::Debug for System {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("System").field("name_servers", &self.name_servers).finish_non_exhaustive()
    }
}

/// A resolver, and what it has found lately.
#[derive(Clone)]
struct Names {
    resolver: TokioResolver,
    within: Duration,
    found: Cache<String, Found>,
}

/// What is known of a name.
#[derive(Debug, Clone)]
struct Found {
    /// None: there is no such name, or it has no address.
    addresses: Arc<[SocketAddr]>,
    exists: bool,
    keep: Duration,
}

/// Each name is kept for its own time.
struct UntilStale;

impl Expiry<String, Found> for UntilStale {
    fn expire_after_create(&self, _: &String, found: &Found, _: Instant) -> Option<Duration> {
        Some(found.keep)
    }

    fn expire_after_update(
        &self,
        _: &String,
        found: &Found,
        _: Instant,
        _: Option<Duration>,
    ) -> Option<Duration> {
        Some(found.keep)
    }
}

impl Names {
    fn new(name_servers: &[SocketAddr], within: Duration) -> Result<Self, NetError> {
        let found = Cache::builder().max_capacity(CACHE).expire_after(UntilStale).build();
        Ok(Self { resolver: resolver(name_servers, within)?, within, found })
    }

    async fn look_up(&self, name: &str) -> Result<Vec<SocketAddr>, LookupError> {
        let found = match self.found.get(name) {
            Some(found) => found,
            None => self.ask(name).await?,
        };
        match &*found.addresses {
            [] if found.exists => Err(LookupError::NoAddress),
            [] => Err(LookupError::NoSuchName),
            addresses => Ok(addresses.to_vec()),
        }
    }

    /// Asks the name servers, and keeps the answer.
    async fn ask(&self, name: &str) -> Result<Found, LookupError> {
        let answer = timeout(self.within, self.resolver.lookup_ip(name)).await;
        let found = match answer.map_err(|_| LookupError::Silent)? {
            Ok(answer) => {
                let keep = answer.valid_until().saturating_duration_since(Instant::now());
                let has_ipv4 = answer.iter().any(|ip| ip.is_ipv4());
                let longest = if has_ipv4 { KEEP_MAX } else { *KEEP_DOUBTFUL.end() };
                let addresses = answer.iter().take(ADDRESSES).map(|ip| (ip, 0).into()).collect();
                Found { addresses, exists: true, keep: keep.min(longest) }
            }
            Err(NetError::Dns(DnsError::NoRecordsFound(none))) => {
                let keep = Duration::from_secs(none.negative_ttl.unwrap_or_default().into());
                Found {
                    exists: !NetError::from(none).is_nx_domain(),
                    addresses: Arc::default(),
                    keep: keep.clamp(*KEEP_DOUBTFUL.start(), *KEEP_DOUBTFUL.end()),
                }
            }
            Err(error) => return Err(error.into()),
        };
        if !found.keep.is_zero() {
            self.found.insert(name.to_owned(), found.clone());
        }
        Ok(found)
    }
}

fn changed(file: &str) -> Option<SystemTime> {
    std::fs::metadata(file).and_then(|file| file.modified()).ok()
}

fn resolver(name_servers: &[SocketAddr], within: Duration) -> Result<TokioResolver, NetError> {
    let this_machine = |error: NetError| {
        tracing::debug!(%error, "/etc/resolv.conf names no name server; asking this machine");
        let config = ResolverConfig::from_name_servers(vec![server(&THIS_MACHINE)]);
        (config, ResolverOpts::default())
    };
    let (system, mut options) = read_system_conf().unwrap_or_else(this_machine);
    let (domain, search, mut servers) = system.into_parts();
    if !name_servers.is_empty() {
        servers = name_servers.iter().map(server).collect();
    }
    // The tries end shortly before the look-up would.
    options.timeout = within / (TRIES + 1);
    options.attempts = (TRIES - 1) as usize;
    // Most targets, and many machines, have no IPv6.
    options.ip_strategy = LookupIpStrategy::Ipv4AndIpv6;
    options.cache_size = 0;
    // Long answers come over TCP: every place may need it.
    options.max_active_requests = 2 * LOOKUPS;
    let config = ResolverConfig::from_parts(domain, search, servers);
    let builder = TokioResolver::builder_with_config(config, TokioRuntimeProvider::default());
    builder.with_options(options).build()
}

fn server(address: &SocketAddr) -> NameServerConfig {
    let mut server = NameServerConfig::udp_and_tcp(address.ip());
    server.connections = vec![ConnectionConfig::udp(), ConnectionConfig::tcp()];
    for connection in &mut server.connections {
        connection.port = address.port();
    }
    server
}

impl Resolve for System {
    fn resolve(&self, name: Name) -> Resolving {
        let names = self.current();
        Box::pin(async move {
            let found = names.look_up(name.as_str()).await?;
            Ok(Box::new(found.into_iter()) as Addrs)
        })
    }
}

/// Gives each look-up a place, and refuses a name if any of its addresses is not allowed. The
/// client connects to exactly the returned addresses, so nothing can change in between.
pub(super) struct Judging {
    pub(super) inner: Arc<dyn Resolve>,
    pub(super) policy: Policy,
    pub(super) places: Arc<Places>,
}

impl Judging {
    pub(super) fn new(inner: Arc<dyn Resolve>, policy: Policy) -> Self {
        Self { inner, policy, places: Places::new(LOOKUPS) }
    }
}

impl Resolve for Judging {
    fn resolve(&self, name: Name) -> Resolving {
        let place = CALLER
            .try_with(|bot| (bot.clone(), self.places.take(bot, tokio::time::Instant::now())))
            .map_err(|_| LookupError::NoCaller)
            .and_then(|(bot, place)| match place {
                Ok(place) => Ok((bot, place)),
                Err(after) => Err(LookupError::Busy { after }),
            });
        let (bot, place) = match place {
            Ok(taken) => taken,
            Err(error) => return Box::pin(async move { Err(error.into()) }),
        };
        let host = name.as_str().to_owned();
        let policy = self.policy.clone();
        let resolving = self.inner.resolve(name);
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = resolving.await?.collect();
            drop(place);
            match addresses.iter().find(|address| !policy.allows(address.ip())) {
                Some(refused) => {
                    let address = refused.ip();
                    // The caller, who may be a tenant, does not get to know it.
                    if REFUSED.take(bot.to_string()) {
                        tracing::warn!(%bot, host, %address,
                            "a callback names a host at an address that is not public; callbacks.allow_nets may allow its network");
                    }
                    Err(AddressRefused { host, address }.into())
                }
                None => Ok(Box::new(addresses.into_iter()) as Addrs),
            }
        })
    }
}
