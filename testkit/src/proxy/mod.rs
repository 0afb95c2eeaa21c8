//! A faulty network in front of a server. It cuts or slows connections, stops all traffic, and
//! holds or loses single messages. What a server sends to its replicas can only be cut.

pub mod distance;
mod line;
mod resp;
mod tests;

use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

use self::line::Line;
use self::resp::Resp;
use super::interceptor::{Intercepted, Interception, Interceptor, Interceptors, Matcher};

/// The effect on the bytes in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum ProxyMode {
    #[default]
    Pass,
    /// Each command and each reply waits this long.
    Delay(Duration),
    /// No byte moves and no connection is refused until the mode changes.
    Hold,
    /// All connections together get this many bytes a second through, in each direction. Sent bytes
    /// occupy the line, also after their sender has ended.
    Rate(u32),
    /// Like `Rate`, but for each connection separately.
    RateEach(u32),
    /// New connections are closed immediately.
    Refuse,
}

/// How to separate messages, and to match replies with their commands.
pub trait Protocol: Send + Sync + 'static {
    /// The length of the first complete message.
    fn frame(bytes: &[u8]) -> Option<usize>;

    /// A number for this command, which is the `nth` (from 0) of its connection.
    fn number(command: &[u8], nth: u64) -> u64;

    /// Whether this command turns its connection into a stream, whose bytes are no replies.
    fn streams(_: &[u8]) -> bool {
        false
    }

    /// The number of the command that this reply answers. The reply is the `nth` (from 0) that
    /// answers a command. `None` means that it answers no command.
    fn answers(reply: &[u8], nth: u64) -> Option<u64>;
}

/// Runs until it is dropped.
#[derive(Debug)]
pub struct Proxy<P = Resp> {
    pub(crate) address: SocketAddr,
    shared: Arc<Shared>,
    /// The accepting task. It is aborted when the proxy is dropped, and every connection with it.
    _accepting: JoinSet<()>,
    protocol: PhantomData<P>,
}

#[derive(Debug)]
struct Shared {
    upstream: Mutex<SocketAddr>,
    mode: watch::Sender<ProxyMode>,
    /// The number of cuts. A connection ends when the number changes.
    cuts: watch::Sender<u64>,
    /// The number of losses. When it changes, no further reply of an existing connection arrives.
    losses: watch::Sender<u64>,
    interceptors: Interceptors,
    swallows: Mutex<Vec<Interceptor>>,
    replies: AtomicU64,
    swallowed: AtomicU64,
    /// The lines to the server and back, for [`ProxyMode::Rate`].
    lines: [Line; 2],
}

impl Proxy {
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::before(upstream).await
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Lets the `nth` command (from 1) that contains these bytes through, but not its reply: the
    /// connection ends there. The server executed the command, and the client does not learn of it.
    pub fn swallow(&self, needle: impl Into<Vec<u8>>, nth: u32) {
        let interceptor = self.intercept(holds([needle.into()]), nth, Interception::LoseReply);
        self.shared.swallows.lock().unwrap().push(interceptor);
    }
}

impl<P: Protocol> Proxy<P> {
    pub(crate) async fn before(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            upstream: Mutex::new(upstream),
            mode: watch::Sender::default(),
            cuts: watch::Sender::default(),
            losses: watch::Sender::default(),
            interceptors: Interceptors::default(),
            swallows: Mutex::default(),
            replies: AtomicU64::default(),
            swallowed: AtomicU64::default(),
            lines: <[Line; 2]>::default(),
        });
        let mut accepting = JoinSet::new();
        accepting.spawn(accept::<P>(listener, Arc::clone(&shared)));
        Self { address, shared, _accepting: accepting, protocol: PhantomData }
    }

    pub fn set(&self, mode: ProxyMode) {
        self.shared.mode.send_replace(mode);
    }

    /// New connections lead to another server. The existing ones stay.
    pub fn lead_to(&self, upstream: SocketAddr) {
        *self.shared.upstream.lock().unwrap() = upstream;
    }

    /// Ends every connection. New connections are served.
    pub fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Loses every further reply of the existing connections. They stay open, and their commands
    /// reach the server. New connections are served.
    pub fn lose_replies(&self) {
        self.shared.losses.send_modify(|losses| *losses += 1);
    }

    /// Intercepts the `nth` (from 1) command that `matches`.
    pub fn intercept(&self, matches: Matcher, nth: u32, interception: Interception) -> Interceptor {
        self.shared.interceptors.set(matches, nth, interception)
    }

    /// The number of replies handed to clients so far.
    pub fn replies(&self) -> u64 {
        self.shared.replies.load(Ordering::Relaxed)
    }

    /// The number of replies lost on purpose so far.
    pub fn swallowed(&self) -> u64 {
        self.shared.swallowed.load(Ordering::Relaxed)
    }
}

/// Matches commands that contain all of these.
pub fn holds<const N: usize>(needles: [impl Into<Vec<u8>>; N]) -> Matcher {
    let needles = needles.map(Into::into);
    Box::new(move |command| needles.iter().all(|needle| contains(command, needle)))
}

impl Shared {
    /// The lines to the server and back that a connection uses. `own` are the lines of the
    /// connection.
    fn lines<'a>(&'a self, own: &'a [Line; 2]) -> &'a [Line; 2] {
        let each = matches!(*self.mode.borrow(), ProxyMode::RateEach(_));
        if each { own } else { &self.lines }
    }

    /// Waits as the mode requires.
    async fn pass(&self) {
        let mut mode = self.mode.subscribe();
        // The sender lives in `self`.
        let now = *mode.wait_for(|mode| *mode != ProxyMode::Hold).await.unwrap();
        if let ProxyMode::Delay(delay) = now {
            // The sleep is the fault itself.
            tokio::time::sleep(delay).await;
        }
    }
}

async fn accept<P: Protocol>(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        while connections.try_join_next().is_some() {}
        if *shared.mode.borrow() != ProxyMode::Refuse {
            connections.spawn(serve::<P>(client, Arc::clone(&shared)));
        }
    }
}

async fn connect(shared: &Shared) -> std::io::Result<TcpStream> {
    let upstream = *shared.upstream.lock().unwrap();
    TcpStream::connect(upstream).await
}

/// Intercepted commands that were handed on, by their numbers.
type UnderWay = Mutex<HashMap<u64, Intercepted>>;

/// What both directions of a connection share.
struct Connection {
    /// Its own lines.
    own: [Line; 2],
    under_way: UnderWay,
    /// It is a stream: that of a replica.
    streams: AtomicBool,
}

/// Ends when either side ends, when the connection is cut, or when a reply is lost.
async fn serve<P: Protocol>(client: TcpStream, shared: Arc<Shared>) {
    let (mut cuts, losses) = (shared.cuts.subscribe(), shared.losses.subscribe());
    let Ok(server) = connect(&shared).await else { return };
    let _ = client.set_nodelay(true).and(server.set_nodelay(true));
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    let connection = Connection {
        own: Default::default(),
        under_way: UnderWay::default(),
        streams: false.into(),
    };
    tokio::select! {
        biased;
        _ = cuts.changed() => {}
        () = commands::<P>(client_reads, server_writes, &shared, &connection) => {}
        () = replies::<P>(server_reads, client_writes, &shared, &connection, losses) => {}
    }
}

async fn commands<P: Protocol>(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    Connection { own, under_way, streams }: &Connection,
) {
    let mut buffer = Vec::new();
    let mut count = 0;
    while from.read_buf(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {
        while let Some(length) = P::frame(&buffer) {
            if P::streams(&buffer[..length]) {
                streams.store(true, Ordering::Release);
            }
            if streams.load(Ordering::Relaxed) {
                if to.write_all(&buffer[..length]).await.is_err() {
                    return;
                }
                buffer.drain(..length);
                continue;
            }
            shared.pass().await;
            let caught = shared.interceptors.catch(&buffer[..length]);
            let held =
                caught.clone().filter(|caught| caught.interception == Interception::HoldCommand);
            if let Some(caught) = caught {
                under_way.lock().unwrap().insert(P::number(&buffer, count), caught);
            }
            count += 1;
            if let Some(held) = &held
                && !held.held().await
            {
                return;
            }
            let [there, _] = shared.lines(own);
            if there.write(&mut to, &buffer[..length], &shared.mode).await.is_err() {
                return;
            }
            if let Some(held) = held {
                // The client may be gone, and the end of the connection must not overtake the
                // command.
                held.is_answered().await;
            }
            buffer.drain(..length);
        }
    }
}

async fn replies<P: Protocol>(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    Connection { own, under_way, streams }: &Connection,
    losses: watch::Receiver<u64>,
) {
    let mut buffer = Vec::new();
    let mut count = 0;
    while from.read_buf(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {
        if streams.load(Ordering::Acquire) {
            if to.write_all(&buffer).await.is_err() {
                return;
            }
            buffer.clear();
            continue;
        }
        while let Some(length) = P::frame(&buffer) {
            shared.pass().await;
            if losses.has_changed().unwrap_or(true) {
                buffer.drain(..length);
                continue;
            }
            let answered = P::answers(&buffer, count);
            let caught = answered.and_then(|number| under_way.lock().unwrap().remove(&number));
            match &caught {
                Some(caught) if caught.interception == Interception::LoseReply => {
                    shared.swallowed.fetch_add(1, Ordering::Relaxed);
                    return caught.report();
                }
                Some(caught)
                    if caught.interception == Interception::HoldReply && !caught.held().await =>
                {
                    return;
                }
                Some(caught) => caught.answered(),
                None => {}
            }
            let [_, back] = shared.lines(own);
            if back.write(&mut to, &buffer[..length], &shared.mode).await.is_err() {
                return;
            }
            if let Some(caught) = caught {
                caught.report();
            }
            shared.replies.fetch_add(u64::from(answered.is_some()), Ordering::Relaxed);
            count += u64::from(answered.is_some());
            buffer.drain(..length);
        }
    }
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    memchr::memmem::find(bytes, needle).is_some()
}
