//! `[callbacks]`.

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
    /// Maximum number of concurrent calls to one host and port from this process: 1 to 1,024.
    pub max_per_host: NonZeroUsize,
    /// Header sets for requests and rules: at most 100, each with a unique name.
    pub headers: Vec<HeadersConfig>,
}
