//! Accepting connections. Each connection is bounded in time and size before any route runs.
//!
//! 1. The backlog of the operating system is bounded; further connections are refused there.
//! 2. At [`Limits::connections`] open connections Fairlane accepts no more; further ones wait in
//!    the backlog.
//! 3. Connections beyond [`Limits::per_address`] from one address are closed immediately, so that
//!    one machine cannot lock out the others. A trusted proxy has no such limit. If it speaks the
//!    PROXY protocol, the connections of each of its clients are counted instead.
//! 4. The head of a request must arrive within [`HEAD_TIME`], or within [`HEAD_TIME_SHORT`] once
//!    half of the connections are in use. Slow and idle clients are disconnected.
//! 5. A client that reads nothing for [`STALL_TIME`] is disconnected.
//!
//! This listener speaks only HTTP/1.1: one request at a time per connection. So each connection has
//! at most one request in flight, and there are no streams to limit.

use std::convert::Infallible;
use std::future::Future as _;
use std::io;
use std::net::{IpAddr, Ipv6Addr, SocketAddr};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use ::metrics::{Counter, Gauge};
use axum::Router;
use axum::extract::Request;
use axum::http::{HeaderValue, header};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::server::graceful::{GracefulShutdown, Watcher};
use rustc_hash::FxHashMap;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;
use tokio::time::Sleep;
use tokio_util::sync::CancellationToken;
use tower::Service as _;
use tracing::{debug, warn};

use super::forwarded::Proxies;
use super::metrics;
use super::proxy_protocol::{self, Unusable};
use super::stopwatch::Stopwatch;
use crate::telemetry::OncePerMinute;

/// Maximum time for the head of a request to arrive, and maximum idle time between two requests.
const HEAD_TIME: Duration = Duration::from_secs(5);
/// The same maximum while many connections are in use.
const HEAD_TIME_SHORT: Duration = Duration::from_secs(1);
/// A client that reads nothing of an answer for this time is disconnected.
const STALL_TIME: Duration = Duration::from_secs(20);
/// Maximum length of a head, in bytes.
const HEAD_MAX: usize = 32 << 10;
/// Maximum number of bytes read ahead on a connection.
const BUFFER_MAX: usize = 64 << 10;
/// Pause in accepting when the operating system has no more resources.
const EXHAUSTED: Duration = Duration::from_millis(500);

/// The limits of a listener.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Limits {
    /// Its label in the metrics.
    pub(crate) name: &'static str,
    /// Maximum number of open connections.
    pub(crate) connections: usize,
    /// Maximum number of open connections per address (IPv6: per /64 network).
    pub(crate) per_address: usize,
}

/// The shutdown signals of a listener.
#[derive(Debug, Clone)]
pub(crate) struct Ending {
    /// Cancelled: requests are still accepted, and each answer asks the client to open its next
    /// connection elsewhere.
    pub(crate) leaving: CancellationToken,
    /// Cancelled: as `leaving`, and another listener of the same socket accepts the connections.
    pub(crate) handed: CancellationToken,
    /// Cancelled: no connection is accepted any more.
    pub(crate) stop: CancellationToken,
}

impl From<CancellationToken> for Ending {
    /// For a listener without clients that need an announcement.
    fn from(stop: CancellationToken) -> Self {
        Self { leaving: CancellationToken::new(), handed: CancellationToken::new(), stop }
    }
}

/// The client of a request, as reported by trusted proxies.
#[derive(Debug, Clone, Copy)]
pub(super) struct Peer(pub(super) IpAddr);

/// Serves `routes` until [`Ending::stop`], then finishes the requests in flight.
///
/// # Cancel safety
/// Dropping the future closes every connection.
pub(crate) async fn serve(
    listener: TcpListener,
    routes: Router,
    limits: Limits,
    proxies: Proxies,
    ending: Ending,
) {
    let Ending { leaving, handed, stop } = ending;
    let patient = Arc::new(server(HEAD_TIME));
    let hurried = Arc::new(server(HEAD_TIME_SHORT));
    let graceful = GracefulShutdown::new();
    let mut connections = JoinSet::new();
    let exhausted = OncePerMinute::default();
    let (open, refused) = metrics::connections(limits.name);
    let front = Arc::new(Front {
        routes: routes.with_state::<()>(()),
        leaving,
        handed: handed.clone(),
        proxies,
        per_address: limits.per_address,
        addresses: Addresses::default(),
        refused,
        refused_lately: OncePerMinute::default(),
        unusable: UnusableHeaders::new(limits.name),
    });
    let mut accepts = true;
    loop {
        tokio::select! {
            biased;
            () = stop.cancelled() => break,
            () = handed.cancelled(), if accepts => accepts = false,
            Some(_) = connections.join_next(), if !connections.is_empty() => {}
            accepted = listener.accept(), if accepts && connections.len() < limits.connections => match accepted {
                Ok((stream, peer)) => {
                    let peer = peer.ip().to_canonical();
                    let is_proxy = front.proxies.trusts(peer);
                    let place = if is_proxy { None } else { front.place(peer) };
                    if place.is_none() && !is_proxy {
                        continue;
                    }
                    // An answer must not wait for the acknowledgement of the previous one (Nagle's
                    // algorithm).
                    let _ = stream.set_nodelay(true);
                    let is_full = connections.len() >= limits.connections / 2;
                    let server = Arc::clone(if is_full { &hurried } else { &patient });
                    let (front, watcher) = (Arc::clone(&front), graceful.watcher());
                    let open = Open::new(open.clone());
                    connections.spawn(async move {
                        front.serve(stream, peer, place, &server, watcher).await;
                        drop(open);
                    });
                }
                Err(error) if is_the_peers(&error) => {}
                Err(error) => {
                    if let Some(suppressed) = exhausted.take() {
                        warn!(%error, suppressed, "cannot accept connections; raise the limit of open files");
                    }
                    tokio::time::sleep(EXHAUSTED).await;
                }
            },
        }
    }
    drop(listener);
    graceful.shutdown().await;
}

/// A connection in the gauge of open ones, until it is dropped: also one that outlives the accepting.
struct Open(Gauge);

impl Open {
    fn new(gauge: Gauge) -> Self {
        gauge.increment(1.0);
        Self(gauge)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.decrement(1.0);
    }
}

/// The state that all connections of a listener share.
struct Front {
    routes: Router,
    leaving: CancellationToken,
    handed: CancellationToken,
    proxies: Proxies,
    per_address: usize,
    addresses: Addresses,
    refused: Counter,
    refused_lately: OncePerMinute,
    unusable: UnusableHeaders,
}

impl Front {
    /// Reserves one of the connections of an address. `None`: the address has too many. A refusal
    /// is counted.
    fn place(&self, address: IpAddr) -> Option<AddressPlace> {
        let place = self.addresses.take(address, self.per_address);
        if place.is_none() {
            self.refused.increment(1);
            if let Some(suppressed) = self.refused_lately.take() {
                warn!(%address, limit = self.per_address, suppressed, "too many connections from one address; closing further ones (raise http.max_connections_per_address; for a proxy, set http.trusted_proxies)");
            }
        }
        place
    }

    /// Serves a connection from `peer` to its end. `place`: the reservation of a peer that is not a
    /// trusted proxy.
    async fn serve(
        self: Arc<Self>,
        mut stream: TcpStream,
        mut peer: IpAddr,
        mut place: Option<AddressPlace>,
        server: &http1::Builder,
        watcher: Watcher,
    ) {
        if place.is_none() && self.proxies.speak_first {
            let read = tokio::time::timeout(HEAD_TIME, proxy_protocol::read(&mut stream)).await;
            match read.unwrap_or(Err(Unusable::Timeout)) {
                // The connection is the proxy's own, or the proxy does not know the client.
                Ok(None) => {}
                Ok(Some(client)) => {
                    if !self.proxies.trusts(client) {
                        place = self.place(client);
                        if place.is_none() {
                            return;
                        }
                    }
                    peer = client;
                }
                Err(unusable) => return self.unusable.note(unusable, peer),
            }
        }
        let watch = Stopwatch::default();
        let stream = Impatient { stream, watch: watch.clone(), stalled: None };
        let front = Arc::clone(&self);
        let service = service_fn(move |mut request: Request<Incoming>| {
            watch.begin();
            let client = front.proxies.client(peer, request.headers());
            request.extensions_mut().insert(Peer(client));
            request.extensions_mut().insert(watch.clone());
            let (front, watch) = (Arc::clone(&front), watch.clone());
            let answering = front.routes.clone().call(request);
            async move {
                let mut response = answering.await?;
                // `connection: close` tells a client that pools connections not to reuse this one.
                if front.leaving.is_cancelled() || front.handed.is_cancelled() {
                    let close = HeaderValue::from_static("close");
                    response.headers_mut().insert(header::CONNECTION, close);
                }
                Ok::<_, Infallible>(watch.answer(response))
            }
        });
        let serving = watcher.watch(server.serve_connection(TokioIo::new(stream), service));
        if let Err(error) = serving.await {
            debug!(%error, "a connection ended");
        }
        drop(place);
    }
}

/// Counts connections that do not start with a valid PROXY protocol header.
struct UnusableHeaders {
    counters: [(Unusable, Counter); Unusable::COUNTED.len()],
    lately: OncePerMinute,
}

impl UnusableHeaders {
    fn new(listener: &'static str) -> Self {
        let counters = Unusable::COUNTED.map(|why| (why, metrics::unusable_header(listener, why)));
        Self { counters, lately: OncePerMinute::default() }
    }

    fn note(&self, why: Unusable, proxy: IpAddr) {
        let Some((_, counter)) = self.counters.iter().find(|(known, _)| *known == why) else {
            return;
        };
        counter.increment(1);
        if let Some(suppressed) = self.lately.take() {
            let (reason, remedy) = (why.as_str(), why.remedy());
            warn!(%proxy, reason, remedy, suppressed, "closed a connection: a trusted proxy sent no valid PROXY protocol header");
        }
    }
}

fn server(head_time: Duration) -> http1::Builder {
    let mut server = http1::Builder::new();
    server.timer(TokioTimer::new()).header_read_timeout(head_time);
    server.max_header_size(HEAD_MAX).max_buf_size(BUFFER_MAX);
    server
}

/// Whether the error concerns one connection, not the listener.
fn is_the_peers(error: &io::Error) -> bool {
    use io::ErrorKind::{ConnectionAborted, ConnectionRefused, ConnectionReset, Interrupted};
    matches!(error.kind(), ConnectionAborted | ConnectionRefused | ConnectionReset | Interrupted)
}

/// Open connections by address.
#[derive(Debug, Default, Clone)]
struct Addresses(Arc<Mutex<FxHashMap<IpAddr, usize>>>);

/// A reserved connection, until it is dropped.
#[derive(Debug)]
struct AddressPlace {
    addresses: Addresses,
    address: IpAddr,
}

impl Addresses {
    fn take(&self, peer: IpAddr, max: usize) -> Option<AddressPlace> {
        let address = network(peer);
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(address).or_default();
        if *count >= max {
            return None;
        }
        *count += 1;
        Some(AddressPlace { addresses: self.clone(), address })
    }
}

impl Drop for AddressPlace {
    fn drop(&mut self) {
        let mut counts = self.addresses.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(count) = counts.get_mut(&self.address) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.address);
            }
        }
    }
}

/// The unit of the limit per address: a client with an IPv6 network can use all of its addresses.
pub(super) fn network(peer: IpAddr) -> IpAddr {
    match peer {
        IpAddr::V4(_) => peer,
        IpAddr::V6(address) => {
            let [a, b, c, d, ..] = address.segments();
            Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0).into()
        }
    }
}

/// A connection that ends when its peer reads nothing for [`STALL_TIME`]. It notes when bytes
/// arrive, and when all bytes have left.
struct Impatient<S> {
    stream: S,
    watch: Stopwatch,
    stalled: Option<Pin<Box<Sleep>>>,
}

impl<S> Impatient<S> {
    /// Checks the result of a write; an error if there was no progress for too long.
    fn judge<T>(
        &mut self,
        written: Poll<io::Result<T>>,
        context: &mut Context<'_>,
    ) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stalled = None;
            return written;
        }
        let stalled = self.stalled.get_or_insert_with(|| Box::pin(tokio::time::sleep(STALL_TIME)));
        ready!(stalled.as_mut().poll(context));
        Poll::Ready(Err(io::ErrorKind::TimedOut.into()))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Impatient<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.stream).poll_read(context, buffer);
        if buffer.filled().len() > before {
            self.watch.read();
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Impatient<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.judge(written, context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, buffers);
        self.judge(written, context)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        if matches!(flushed, Poll::Ready(Ok(()))) {
            self.watch.flushed();
        }
        flushed
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

/// Binds `address`, the value of the setting `key`.
pub(crate) fn bind(
    key: &'static str,
    address: SocketAddr,
    backlog: u32,
) -> Result<TcpListener, BindError> {
    let listen = || {
        let socket = if address.is_ipv6() { TcpSocket::new_v6() } else { TcpSocket::new_v4() }?;
        // Allows to reuse a port while old connections are still closing.
        socket.set_reuseaddr(true)?;
        socket.bind(address)?;
        socket.listen(backlog)
    };
    let remedy = || format!("set {key} to a free address (port 0 picks one)");
    listen().map_err(|source| BindError { address, remedy: remedy(), source })
}

/// A listener that cannot be opened.
#[derive(Debug, thiserror::Error)]
#[error("cannot listen on {address}: {source}; {remedy}")]
pub struct BindError {
    address: SocketAddr,
    pub(crate) remedy: String,
    #[source]
    pub(crate) source: io::Error,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_stalled_client_is_disconnected_and_a_slow_one_is_not() {
        use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
        let (ours, mut theirs) = tokio::io::duplex(100);
        let mut ours = Impatient { stream: ours, stalled: None, watch: Stopwatch::default() };
        let reading = async {
            let mut taken = [0; 50];
            for _ in 0..10 {
                tokio::time::sleep(STALL_TIME / 2).await;
                theirs.read_exact(&mut taken).await.unwrap();
            }
            theirs
        };
        let (written, theirs) = tokio::join!(ours.write_all(&[1; 600]), reading);
        written.unwrap();
        let error = ours.write_all(&[1; 600]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
        drop(theirs);
    }

    #[test]
    fn an_address_has_so_many_connections_and_an_ipv6_network_counts_as_one() {
        let addresses = Addresses::default();
        let [one, two, far] = ["2001:db8::1", "2001:db8::2", "2001:db8:1::1"]
            .map(|address| address.parse::<IpAddr>().unwrap());
        let first = addresses.take(one, 2).unwrap();
        let _second = addresses.take(two, 2).unwrap();
        assert!(addresses.take(one, 2).is_none(), "both are of one network");
        assert!(addresses.take(far, 2).is_some());
        drop(first);
        assert!(addresses.take(two, 2).is_some(), "there is room again");
        assert_eq!(addresses.0.lock().unwrap().len(), 1, "nothing is kept of those that ended");
    }
}
