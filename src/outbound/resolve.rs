//! Resolves names and checks every address before a connection to it.

use std::net::SocketAddr;
use std::sync::Arc;

use reqwest::dns::{Addrs, Name, Resolve, Resolving};
use tokio::sync::Semaphore;

use super::address::{AddressRefused, Policy};

/// Maximum number of concurrent lookups. Each may block a thread while a name server does not
/// answer.
const LOOKUPS: usize = 32;

/// Uses the resolver of the operating system, `/etc/hosts` included.
#[derive(Debug)]
pub(super) struct System {
    lookups: Arc<Semaphore>,
}

impl Default for System {
    fn default() -> Self {
        Self { lookups: Arc::new(Semaphore::new(LOOKUPS)) }
    }
}

impl Resolve for System {
    fn resolve(&self, name: Name) -> Resolving {
        let lookups = Arc::clone(&self.lookups);
        Box::pin(async move {
            let _place = lookups.acquire().await?;
            // The client replaces the port by that of the URL.
            let addresses = tokio::net::lookup_host((name.as_str(), 0)).await?;
            Ok(Box::new(addresses.collect::<Vec<_>>().into_iter()) as Addrs)
        })
    }
}

/// Refuses a name if any of its addresses is not allowed. The client connects to exactly the
/// returned addresses, so nothing can change in between.
pub(super) struct Judging {
    pub(super) inner: Arc<dyn Resolve>,
    pub(super) policy: Policy,
}

impl Resolve for Judging {
    fn resolve(&self, name: Name) -> Resolving {
        let host = name.as_str().to_owned();
        let policy = self.policy.clone();
        let resolving = self.inner.resolve(name);
        Box::pin(async move {
            let addresses: Vec<SocketAddr> = resolving.await?.collect();
            match addresses.iter().find(|address| !policy.allows(address.ip())) {
                Some(refused) => Err(AddressRefused { host, address: refused.ip() }.into()),
                None => Ok(Box::new(addresses.into_iter()) as Addrs),
            }
        })
    }
}
