//! `[callbacks]`.

use std::net::SocketAddr;
use std::num::NonZeroUsize;

use ipnet::IpNet;

use crate::config::HeadersConfig;
use crate::outbound::sign::Secret;

/// The section `[callbacks]`: calls to other servers.
#[derive(Debug, Clone)]
pub struct CallbacksConfig {
    /// Networks that URLs in requests and rules may reach in addition to public addresses: at most
    /// 1,000. The URL of a pipeline may be in any network.
    pub allow_nets: Vec<IpNet>,
    /// Signing secrets; each one signs every call: at most 8. None: calls are not signed.
    pub secrets: Vec<Secret>,
    /// Maximum number of concurrent calls to one host and port from this process: 1 to 1,024. Calls
    /// of tenants and of operators count separately.
    pub max_per_host: NonZeroUsize,
    /// The name servers that resolve names in URLs: at most 8. None: those of `/etc/resolv.conf`.
    pub name_servers: Vec<SocketAddr>,
    /// Header sets for requests and rules: at most 100, each with a unique name.
    pub headers: Vec<HeadersConfig>,
}
