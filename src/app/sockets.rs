//! The open sockets of an instance, for the next one in the same process. Both accept connections of
//! the same queue of the system, so no client is refused between them.

use std::io;
use std::net::{SocketAddr, TcpListener as StdListener};
use std::os::fd::AsFd as _;

use tokio::net::TcpListener;

use crate::http;

/// Copies of open sockets, each with the address in the configuration.
#[derive(Debug, Default)]
pub(crate) struct Sockets {
    pub(super) metrics: Option<(SocketAddr, StdListener)>,
    pub(super) http: Option<(SocketAddr, StdListener)>,
}

impl Sockets {
    /// Copies of all of them.
    pub(super) fn copied(&self) -> io::Result<Self> {
        let copy = |of: &Option<(SocketAddr, StdListener)>| -> io::Result<_> {
            let Some((address, listener)) = of else { return Ok(None) };
            Ok(Some((*address, listener.try_clone()?)))
        };
        Ok(Self { metrics: copy(&self.metrics)?, http: copy(&self.http)? })
    }
}

/// A copy of an open socket.
pub(super) fn copy(listener: &TcpListener) -> io::Result<StdListener> {
    listener.as_fd().try_clone_to_owned().map(StdListener::from)
}

/// The inherited socket if its address is still the one of the configuration; otherwise a new one.
pub(super) fn open(
    key: &'static str,
    address: SocketAddr,
    backlog: u32,
    inherited: Option<(SocketAddr, StdListener)>,
) -> Result<TcpListener, super::AppError> {
    if let Some((of, listener)) = inherited
        && of == address
    {
        return Ok(TcpListener::from_std(listener)?);
    }
    Ok(http::bind(key, address, backlog)?)
}
