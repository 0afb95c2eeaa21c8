//! Resolves names, and checks every address before a connection to it.
//!
//! Look-ups are asynchronous, so one that is cancelled ends. The resolver of the C library cannot be
//! cancelled: a thread would wait for each silent name server, long after its request was given up.
//!
//! Each look-up has a place ([`Places`]), so that a bot whose names do not resolve leaves places for
//! the names of other bots. Names in the configuration and names of tenants have a resolver of
//! their own each, with its own places and its own cache.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use hickory_resolver::TokioResolver;
use hickory_resolver::config::{
    ConnectionConfig, LookupIpStrategy, NameServerConfig, ResolverConfig, ResolverOpts,
};
use hickory_resolver::net::NetError;
use hickory_resolver::net::runtime::TokioRuntimeProvider;
use hickory_resolver::system_conf::read_system_conf;
use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::time::timeout;

use super::address::{AddressRefused, Policy};
use super::places::Places;
use crate::id::BotId;

/// Maximum number of concurrent look-ups of a process: of tenants' names, and of those in the
/// configuration.
const LOOKUPS: usize = 64;
/// Maximum number of answers in a cache.
const CACHE: u64 = 8_192;
/// The bounds of how long an answer is kept, whatever its record says: a change is known after
/// these times.
const KEEP_MAX: Duration = Duration::from_secs(300);
const KEEP_NEGATIVE_MIN: Duration = Duration::from_secs(1);
const KEEP_NEGATIVE_MAX: Duration = Duration::from_secs(30);
/// Number of times that a silent name server is asked.
const TRIES: u32 = 3;
/// Interval of looking for changes of the files.
const LOOK_AGAIN: Duration = Duration::from_secs(5);
const FILES: [&str; 2] = ["/etc/resolv.conf", "/etc/hosts"];
/// The name server of a machine that names none.
const THIS_MACHINE: SocketAddr =
    SocketAddr::new(std::net::IpAddr::V4(std::net::Ipv4Addr::LOCALHOST), 53);

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
            error if error.is_nx_domain() => Self::NoSuchName,
            error if error.is_no_records_found() => Self::NoAddress,
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
    resolver: TokioResolver,
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
            resolver: resolver(name_servers, within)?,
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
        look_up(&self.current(), self.within, name).await
    }

    /// The resolver, created again after a change of the files.
    fn current(&self) -> TokioResolver {
        let mut current = self.current.lock().unwrap_or_else(PoisonError::into_inner);
        if current.looked.elapsed() >= LOOK_AGAIN {
            current.looked = Instant::now();
            let changed = FILES.map(changed);
            if changed != current.changed {
                match resolver(&self.name_servers, self.within) {
                    Ok(resolver) => (current.resolver, current.changed) = (resolver, changed),
                    Err(error) => {
                        tracing::warn!(%error, "cannot use the changed settings of the name servers");
                    }
                }
            }
        }
        current.resolver.clone()
    }
}

impl std::fmt::Debug for System {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("System").field("name_servers", &self.name_servers).finish_non_exhaustive()
    }
}

async fn look_up(
    resolver: &TokioResolver,
    within: Duration,
    name: &str,
) -> Result<Vec<SocketAddr>, LookupError> {
    let found = timeout(within, resolver.lookup_ip(name)).await;
    let found = found.map_err(|_| LookupError::Silent)??;
    let addresses: Vec<SocketAddr> = found.iter().map(|address| (address, 0).into()).collect();
    if addresses.is_empty() { Err(LookupError::NoAddress) } else { Ok(addresses) }
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
    options.cache_size = CACHE;
    options.positive_max_ttl = Some(KEEP_MAX);
    options.negative_min_ttl = Some(KEEP_NEGATIVE_MIN);
    options.negative_max_ttl = Some(KEEP_NEGATIVE_MAX);
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
        let resolver = self.current();
        let within = self.within;
        Box::pin(async move {
            let found = look_up(&resolver, within, name.as_str()).await?;
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
            .try_with(|bot| self.places.take(bot, tokio::time::Instant::now()))
            .map_err(|_| LookupError::NoCaller)
            .and_then(|place| place.map_err(|after| LookupError::Busy { after }));
        let place = match place {
            Ok(place) => place,
            Err(error) => return Box::pin(async move { Err(error.into()) }),
        };
        let host = name.as_str().to_owned();
        let policy = self.policy.clone();
        let resolving = self.inner.resolve(name);
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = resolving.await?.collect();
            drop(place);
            match addresses.iter().find(|address| !policy.allows(address.ip())) {
                Some(refused) => Err(AddressRefused { host, address: refused.ip() }.into()),
                None => Ok(Box::new(addresses.into_iter()) as Addrs),
            }
        })
    }
}
