//! The listening addresses and the accepted requests: `[http]`, `[admission]` and `[metrics]`.

use std::net::SocketAddr;
use std::time::Duration;

use ipnet::IpNet;

use crate::admission::Settings;
use crate::admission::quota::Quota;

/// The HTTP interface.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// The listening address.
    pub listen: SocketAddr,
    /// Host names that requests without tokens may use, in addition to `localhost` and addresses.
    /// At most 100.
    pub hosts: Vec<String>,
    /// Sites whose pages may count views and read totals: at most 100 origins as browsers send
    /// them.
    pub cors_origins: Vec<String>,
    /// Maximum number of connections waiting to be accepted: 1 to 65,535.
    pub backlog: u32,
    /// Maximum number of open connections: 16 to 100,000.
    pub max_connections: usize,
    /// Maximum number of open connections per address: 1 to [`Self::max_connections`].
    pub max_connections_per_address: usize,
    /// Networks of the trusted proxies: at most 1,000.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether connections of trusted proxies start with a PROXY protocol header, version 2.
    pub proxy_protocol: bool,
}

/// The section `[admission]`: which HTTP requests to accept under overload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// The mode of each class, and the maximum number of requests in flight: 4 to 100,000.
    pub settings: Settings,
    /// The guaranteed share of one bot, at most 1,000,000 each.
    pub bot: Quota,
    /// The guaranteed share of one token, at most 1,000,000 each.
    pub token: Quota,
    /// Per class, the deadline of a request that brings none; `None`: no deadline. At most 1 h;
    /// always `None` for the first class.
    pub deadlines: [Option<Duration>; 4],
}

/// The metrics and health endpoint.
#[derive(Debug, Clone)]
pub struct MetricsConfig {
    /// The listening address.
    pub listen: SocketAddr,
}
