//! `[callbacks]`, with its sets of headers.

use std::collections::BTreeSet;

use super::bounds::{NETS_MAX, TOKEN_BOTS_MAX, at_most, names, number};
use super::{Fault, limits};
use crate::config::Config;
use crate::outbound::headers;

/// Maximum number of secrets: each one makes every call longer.
const SECRETS_MAX: usize = 8;
const HEADER_SETS_MAX: usize = 100;
const NAME_SERVERS_MAX: usize = 8;

impl Config {
    pub(super) fn check_callbacks(&self) -> Result<(), Fault> {
        let callbacks = &self.callbacks;
        at_most("callbacks.allow_nets", callbacks.allow_nets.len(), NETS_MAX)?;
        at_most("callbacks.secrets", callbacks.secrets.len(), SECRETS_MAX)?;
        at_most("callbacks.name_servers", callbacks.name_servers.len(), NAME_SERVERS_MAX)?;
        let per_host = callbacks.max_per_host.get() as u64;
        number("callbacks.max_per_host", per_host, (1, limits::PER_HOST))
    }

    pub(super) fn check_headers(&self) -> Result<(), Fault> {
        let sets = &self.callbacks.headers;
        at_most("callbacks.headers", sets.len(), HEADER_SETS_MAX)?;
        let mut seen = BTreeSet::new();
        for (place, set) in sets.iter().enumerate() {
            let key = |name: &str| format!("callbacks.headers[{place}].{name}");
            names(&key("name"), std::slice::from_ref(&set.name), 1, "name")?;
            let max = headers::NAME_MAX_BYTES;
            if set.name.len() > max {
                let problem = format!("has {} bytes; at most {max} are allowed", set.name.len());
                return Err(Fault::new(key("name"), problem));
            }
            if !seen.insert(&set.name) {
                let problem = format!("is {:?} once more; give each its own", set.name);
                return Err(Fault::new(key("name"), problem));
            }
            if set.headers_file.as_os_str().is_empty() {
                return Err(Fault::new(key("headers_file"), "is not set; name a file"));
            }
            names(&key("bots"), &set.bots, TOKEN_BOTS_MAX, "glob")?;
            names(&key("hosts"), &set.hosts, TOKEN_BOTS_MAX, "host")?;
            if set.bots.is_empty() {
                let problem = "is empty; name globs over bots, such as [\"shop-*\"] or [\"*\"]";
                return Err(Fault::new(key("bots"), problem));
            }
            if set.hosts.is_empty() {
                let problem = "is empty; name the hosts that get these headers, such as [\"crm.example.com\"]";
                return Err(Fault::new(key("hosts"), problem));
            }
        }
        Ok(())
    }
}
