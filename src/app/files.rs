//! Checks that the process may open enough files for its connections.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{AppError, Roles};
use crate::config::Config;

/// Files besides the connections of clients and workers: stores, listeners, logs, the runtime.
const AT_REST: u64 = 256;
/// Calls outside the workers, and look-ups of names.
const CALLS: u64 = 2_048;

/// The soft limit, if the hard one permits it: connections that rest between calls to the servers of tenants
/// come on top.
const PLENTY: u64 = 65_536;

/// Maximum number of files open at the same time. Every worker may hold a connection to its target.
pub(crate) fn needed(config: &Config, roles: Roles) -> u64 {
    let pipelines = config.pipelines.values().filter(|pipeline| roles.work && pipeline.enabled);
    let workers: u64 = pipelines.map(|pipeline| pipeline.workers.max.get() as u64).sum();
    let callers = if roles.http { config.http.max_connections as u64 } else { 0 };
    let calls = if roles.work { CALLS } else { 0 };
    AT_REST + workers + callers + calls
}

/// The hard limit of open files; `None`: no limit.
pub(crate) fn allowed() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Raises the soft limit; `false`: the hard limit is lower than what is needed.
pub(crate) fn raise(needed: u64) -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    let wanted = maximum.map_or(PLENTY, |maximum| maximum.min(PLENTY)).max(needed);
    if current.is_none_or(|current| current >= wanted) {
        return true;
    }
    let raised = Rlimit { current: Some(wanted), maximum };
    maximum.is_none_or(|maximum| maximum >= wanted) && setrlimit(Resource::Nofile, raised).is_ok()
}

/// Ensures that the process may open as many files as it may need.
pub(super) fn make_room(config: &Config, roles: Roles) -> Result<(), AppError> {
    let needed = needed(config, roles);
    if raise(needed) {
        return Ok(());
    }
    let connections = config.http.max_connections;
    Err(AppError::Files { connections, needed, allowed: allowed().unwrap_or(u64::MAX) })
}
