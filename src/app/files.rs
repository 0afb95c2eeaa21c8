//! Whether as many files may be open as there may be connections.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use super::{AppError, Roles};
use crate::config::Config;

/// Files beside connections of callers and workers: to the stores, listeners, logs, the runtime.
const AT_REST: u64 = 256;

/// How many files may have to be open at once: every worker may hold a connection to its target.
pub(crate) fn needed(config: &Config, roles: Roles) -> u64 {
    let pipelines = config.pipelines.values().filter(|pipeline| roles.work && pipeline.enabled);
    let workers: u64 = pipelines.map(|pipeline| pipeline.workers.max.get() as u64).sum();
    let callers = if roles.http { config.http.max_connections as u64 } else { 0 };
    AT_REST + workers + callers
}

/// How many may be open at most, whatever this process asks for; `None`: any number.
pub(crate) fn allowed() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// Raises the soft limit as far as it has to be; `false`: it is not allowed so many.
pub(crate) fn raise(needed: u64) -> bool {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current.is_none_or(|current| current >= needed) {
        return true;
    }
    let raised = Rlimit { current: Some(needed), maximum };
    maximum.is_none_or(|maximum| maximum >= needed) && setrlimit(Resource::Nofile, raised).is_ok()
}

/// Sees to it that so many may be open as may be needed.
pub(super) fn make_room(config: &Config, roles: Roles) -> Result<(), AppError> {
    let needed = needed(config, roles);
    if raise(needed) {
        return Ok(());
    }
    let connections = config.http.max_connections;
    Err(AppError::Files { connections, needed, allowed: allowed().unwrap_or(u64::MAX) })
}
