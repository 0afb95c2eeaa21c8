//! A bad network in front of a server: cut, slow, silent, or holding and losing single messages.

use std::collections::HashMap;
use std::marker::PhantomData;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;
use tokio::time::Instant;

use super::trap::{Caught, Deed, Matcher, Trap, Traps};

/// What becomes of bytes on their way, in both directions.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum Mode {
    #[default]
    Pass,
    /// Each command and each reply waits this long.
    Delay(Duration),
    /// Nothing moves, nothing is refused, until the mode changes.
    Hold,
    /// All connections together get so many bytes a second through, in each direction. What was
    /// sent occupies the line, also when its sender has left.
    Rate(u32),
    /// The same, but each connection gets so many.
    RateEach(u32),
    /// New connections are closed at once.
    Refuse,
}

/// How messages are told apart, and replies find their commands.
pub(crate) trait Protocol: Send + Sync + 'static {
    /// The length of the first whole message.
    fn frame(bytes: &[u8]) -> Option<usize>;

    /// A number of this command, the `nth` (from 0) of its connection.
    fn number(command: &[u8], nth: u64) -> u64;

    /// The number of the command that this answers, being the `nth` (from 0) that answers one.
    /// `None`: it answers none.
    fn answers(reply: &[u8], nth: u64) -> Option<u64>;
}

/// What Redis speaks: replies come in the order of the commands.
#[derive(Debug)]
pub(crate) struct Resp;

impl Protocol for Resp {
    fn frame(bytes: &[u8]) -> Option<usize> {
        frame(bytes)
    }

    fn number(_: &[u8], nth: u64) -> u64 {
        nth
    }

    fn answers(reply: &[u8], nth: u64) -> Option<u64> {
        // A push answers no command.
        (reply[0] != b'>').then_some(nth)
    }
}

/// Runs until dropped.
#[derive(Debug)]
pub(crate) struct Proxy<P = Resp> {
    pub(super) address: SocketAddr,
    shared: Arc<Shared>,
    /// Aborted, and with it every connection, when the proxy is dropped.
    _accepting: JoinSet<()>,
    protocol: PhantomData<P>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    mode: watch::Sender<Mode>,
    /// Counts the cuts: a connection ends when the number moves.
    cuts: watch::Sender<u64>,
    /// Counts the losses: no reply of a connection arrives any more when the number moves.
    losses: watch::Sender<u64>,
    traps: Traps,
    swallows: Mutex<Vec<Trap>>,
    replies: AtomicU64,
    swallowed: AtomicU64,
    /// The lines to the server and back, for [`Mode::Rate`].
    lines: [Line; 2],
}

/// One direction of a slow line.
#[derive(Debug, Default)]
struct Line {
    /// When all that was sent has arrived. Held in turns.
    free_at: tokio::sync::Mutex<Option<Instant>>,
}

/// A slow line carries so many bytes of a connection before the next one gets its turn.
const PACKET: usize = 1_460;

/// Timers know no less.
const TICK: Duration = Duration::from_millis(1);

impl Line {
    /// Writes as fast as the mode allows.
    async fn write(
        &self,
        to: &mut OwnedWriteHalf,
        bytes: &[u8],
        mode: &watch::Sender<Mode>,
    ) -> std::io::Result<()> {
        let mut rest = bytes;
        while !rest.is_empty() {
            let now = *mode.borrow();
            let (rate, length) = match now {
                Mode::Rate(rate) => (rate, PACKET),
                // No other connection waits for its turn, and timers are too coarse for less.
                Mode::RateEach(rate) => (rate, PACKET.max(usize::try_from(rate / 50).unwrap())),
                _ => return to.write_all(rest).await,
            };
            let (packet, after) = rest.split_at(length.min(rest.len()));
            let took = Duration::from_secs(1) * u32::try_from(packet.len()).unwrap() / rate;
            let mut free_at = self.free_at.lock().await;
            let arrives = free_at.unwrap_or_else(Instant::now).max(Instant::now()) + took;
            *free_at = Some(arrives);
            let coarse = if matches!(now, Mode::RateEach(_)) { TICK } else { Duration::ZERO };
            if arrives.saturating_duration_since(Instant::now()) >= coarse {
                // Not a test that waits: the fault itself.
                tokio::time::sleep_until(arrives).await;
            }
            to.write_all(packet).await?;
            rest = after;
        }
        Ok(())
    }
}

impl Proxy {
    pub(crate) async fn start(upstream: SocketAddr) -> Self {
        Self::before(upstream).await
    }

    pub(crate) fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Lets the `nth` command (from 1) that contains these bytes through, but not its reply: the
    /// connection ends there. The command was executed and nobody knows.
    pub(crate) fn swallow(&self, needle: impl Into<Vec<u8>>, nth: u32) {
        let trap = self.trap(holds([needle.into()]), nth, Deed::LoseReply);
        self.shared.swallows.lock().unwrap().push(trap);
    }
}

impl<P: Protocol> Proxy<P> {
    pub(super) async fn before(upstream: SocketAddr) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let shared = Arc::new(Shared {
            upstream,
            mode: watch::Sender::default(),
            cuts: watch::Sender::default(),
            losses: watch::Sender::default(),
            traps: Traps::default(),
            swallows: Mutex::default(),
            replies: AtomicU64::default(),
            swallowed: AtomicU64::default(),
            lines: <[Line; 2]>::default(),
        });
        let mut accepting = JoinSet::new();
        accepting.spawn(accept::<P>(listener, Arc::clone(&shared)));
        Self { address, shared, _accepting: accepting, protocol: PhantomData }
    }

    pub(crate) fn set(&self, mode: Mode) {
        self.shared.mode.send_replace(mode);
    }

    /// Ends every connection. New ones are served.
    pub(crate) fn cut(&self) {
        self.shared.cuts.send_modify(|cuts| *cuts += 1);
    }

    /// Loses every further reply of the connections there are; they stay open, and their commands
    /// reach the server. New ones are served.
    pub(crate) fn lose_replies(&self) {
        self.shared.losses.send_modify(|losses| *losses += 1);
    }

    /// Waits for the `nth` (from 1) command that `is_meant`.
    pub(crate) fn trap(&self, is_meant: Matcher, nth: u32, deed: Deed) -> Trap {
        self.shared.traps.set(is_meant, nth, deed)
    }

    /// Replies handed to clients so far.
    pub(crate) fn replies(&self) -> u64 {
        self.shared.replies.load(Ordering::Relaxed)
    }

    /// Replies lost on purpose so far.
    pub(crate) fn swallowed(&self) -> u64 {
        self.shared.swallowed.load(Ordering::Relaxed)
    }
}

/// Means commands that contain all of these.
pub(crate) fn holds<const N: usize>(needles: [impl Into<Vec<u8>>; N]) -> Matcher {
    let needles = needles.map(Into::into);
    Box::new(move |command| needles.iter().all(|needle| contains(command, needle)))
}

impl Shared {
    /// The lines to the server and back that a connection uses, whose own ones are `own`.
    fn lines<'a>(&'a self, own: &'a [Line; 2]) -> &'a [Line; 2] {
        let each = matches!(*self.mode.borrow(), Mode::RateEach(_));
        if each { own } else { &self.lines }
    }

    /// Waits as the mode says.
    async fn pass(&self) {
        let mut mode = self.mode.subscribe();
        // The sender lives in `self`.
        let now = *mode.wait_for(|mode| *mode != Mode::Hold).await.unwrap();
        if let Mode::Delay(delay) = now {
            // Not a test that waits: the fault itself.
            tokio::time::sleep(delay).await;
        }
    }
}

async fn accept<P: Protocol>(listener: TcpListener, shared: Arc<Shared>) {
    let mut connections = JoinSet::new();
    loop {
        let Ok((client, _)) = listener.accept().await else { return };
        while connections.try_join_next().is_some() {}
        if *shared.mode.borrow() != Mode::Refuse {
            connections.spawn(serve::<P>(client, Arc::clone(&shared)));
        }
    }
}

/// Caught commands that were handed on, by their numbers.
type UnderWay = Mutex<HashMap<u64, Caught>>;

/// Ends when either side ends, the connection is cut, or a reply is lost.
async fn serve<P: Protocol>(client: TcpStream, shared: Arc<Shared>) {
    let (mut cuts, losses) = (shared.cuts.subscribe(), shared.losses.subscribe());
    let Ok(server) = TcpStream::connect(shared.upstream).await else { return };
    let _ = client.set_nodelay(true).and(server.set_nodelay(true));
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    let (under_way, own) = (UnderWay::default(), <[Line; 2]>::default());
    tokio::select! {
        biased;
        _ = cuts.changed() => {}
        () = commands::<P>(client_reads, server_writes, &shared, &own, &under_way) => {}
        () = replies::<P>(server_reads, client_writes, &shared, &own, &under_way, losses) => {}
    }
}

async fn commands<P: Protocol>(
    mut from: OwnedReadHalf,
    mut to: OwnedWriteHalf,
    shared: &Shared,
    own: &[Line; 2],
    under_way: &UnderWay,
) {
    let mut buffer = Vec::new();
    let mut count = 0;
    while from.read_buf(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {
        while let Some(length) = P::frame(&buffer) {
            shared.pass().await;
            let caught = shared.traps.catch(&buffer[..length]);
            let held = caught.clone().filter(|caught| caught.deed == Deed::HoldCommand);
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
                // Its client may be gone: the end of the connection must not overtake it.
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
    own: &[Line; 2],
    under_way: &UnderWay,
    losses: watch::Receiver<u64>,
) {
    let mut buffer = Vec::new();
    let mut count = 0;
    while from.read_buf(&mut buffer).await.is_ok_and(|bytes| bytes > 0) {
        while let Some(length) = P::frame(&buffer) {
            shared.pass().await;
            if losses.has_changed().unwrap_or(true) {
                buffer.drain(..length);
                continue;
            }
            let answered = P::answers(&buffer, count);
            let caught = answered.and_then(|number| under_way.lock().unwrap().remove(&number));
            match &caught {
                Some(caught) if caught.deed == Deed::LoseReply => {
                    shared.swallowed.fetch_add(1, Ordering::Relaxed);
                    return caught.spring();
                }
                Some(caught) if caught.deed == Deed::HoldReply && !caught.held().await => return,
                Some(caught) => caught.answered(),
                None => {}
            }
            let [_, back] = shared.lines(own);
            if back.write(&mut to, &buffer[..length], &shared.mode).await.is_err() {
                return;
            }
            if let Some(caught) = caught {
                caught.spring();
            }
            shared.replies.fetch_add(u64::from(answered.is_some()), Ordering::Relaxed);
            count += u64::from(answered.is_some());
            buffer.drain(..length);
        }
    }
}

fn contains(bytes: &[u8], needle: &[u8]) -> bool {
    needle.is_empty() || bytes.windows(needle.len()).any(|window| window == needle)
}

/// The length of the first whole RESP value, RESP 2 or 3; an inline command counts as a line.
fn frame(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|end| end == b"\r\n")? + 2;
    // Null is written as a count of -1 and has nothing after its line.
    let count = || std::str::from_utf8(&bytes[1..line - 2]).ok()?.parse().ok();
    let values: usize = match bytes[0] {
        b'$' | b'!' | b'=' => {
            let length = count().map_or(line, |length: usize| line + length + 2);
            return (length <= bytes.len()).then_some(length);
        }
        b'*' | b'~' | b'>' => count().unwrap_or(0),
        b'%' => 2 * count().unwrap_or(0),
        // An attribute precedes the value it describes.
        b'|' => 2 * count().unwrap_or(0) + 1,
        _ => 0,
    };
    (0..values).try_fold(line, |at, _| Some(at + frame(&bytes[at..])?))
}

#[cfg(test)]
mod tests {
    use redis::AsyncCommands;
    use redis::aio::MultiplexedConnection;

    use super::*;
    use crate::support::redis::{Options, RedisServer};
    use crate::support::wait::eventually;

    const LONG: Duration = Duration::from_secs(10);

    async fn behind_proxy() -> (RedisServer, Proxy) {
        let server = RedisServer::start(Options { tcp: true, ..Options::default() });
        let proxy = Proxy::start(server.tcp_addr()).await;
        (server, proxy)
    }

    async fn connect(proxy: &Proxy) -> redis::RedisResult<MultiplexedConnection> {
        redis::Client::open(proxy.url())?.get_multiplexed_async_connection().await
    }

    #[test]
    fn a_frame_is_found_once_it_is_whole() {
        let frames: [&[u8]; 9] = [
            b"+OK\r\n",
            b"$-1\r\n",
            b"$3\r\na\r\n\r\n",
            b"*-1\r\n",
            b"*2\r\n$1\r\na\r\n*1\r\n:5\r\n",
            b"%1\r\n+a\r\n_\r\n",
            b">2\r\n+message\r\n+x\r\n",
            b"|1\r\n+ttl\r\n:1\r\n$1\r\na\r\n",
            b"PING\r\n",
        ];
        for whole in frames {
            let shown = String::from_utf8_lossy(whole);
            assert_eq!(frame(whole), Some(whole.len()), "{shown:?}");
            assert_eq!(frame(&[whole, b"+next\r\n"].concat()), Some(whole.len()), "{shown:?}");
            for cut in 0..whole.len() {
                assert_eq!(frame(&whole[..cut]), None, "{shown:?} cut at {cut}");
            }
        }
    }

    #[tokio::test]
    async fn a_swallowed_reply_leaves_the_command_executed() {
        let (server, proxy) = behind_proxy().await;
        let mut connection = connect(&proxy).await.unwrap();
        proxy.swallow("counted", 2);
        assert_eq!(connection.incr::<_, _, i32>("counted", 1).await.unwrap(), 1);
        assert_eq!(connection.incr::<_, _, i32>("other", 1).await.unwrap(), 1);
        connection.incr::<_, _, i32>("counted", 1).await.unwrap_err();
        assert_eq!(proxy.swallowed(), 1);
        assert_eq!(server.connection().await.get::<_, i32>("counted").await.unwrap(), 2);
        let mut again = connect(&proxy).await.unwrap();
        assert_eq!(again.incr::<_, _, i32>("counted", 1).await.unwrap(), 3);
    }

    #[tokio::test]
    async fn of_a_pipeline_only_the_replies_before_the_swallowed_one_arrive() {
        let (server, proxy) = behind_proxy().await;
        let mut connection = connect(&proxy).await.unwrap();
        let before = proxy.replies();
        proxy.swallow("second", 1);
        let mut pipeline = redis::pipe();
        pipeline.incr("first", 1).incr("second", 1).incr("third", 1);
        pipeline.query_async::<Vec<i32>>(&mut connection).await.unwrap_err();
        assert_eq!((proxy.replies() - before, proxy.swallowed()), (1, 1));
        assert!(server.connection().await.exists::<_, bool>("second").await.unwrap());
    }

    #[tokio::test]
    async fn cut_connections_fail_and_new_ones_work() {
        let (_server, proxy) = behind_proxy().await;
        let mut connection = connect(&proxy).await.unwrap();
        proxy.cut();
        connection.set::<_, _, ()>("a", 1).await.unwrap_err();
        let () = connect(&proxy).await.unwrap().set("a", 1).await.unwrap();
        proxy.set(Mode::Refuse);
        proxy.cut();
        assert!(connect(&proxy).await.is_err());
        proxy.set(Mode::Pass);
        let () = connect(&proxy).await.unwrap().set("a", 1).await.unwrap();
    }

    #[tokio::test]
    async fn lost_replies_leave_the_commands_executed_and_new_connections_work() {
        let (server, proxy) = behind_proxy().await;
        let mut connection = connect(&proxy).await.unwrap();
        proxy.lose_replies();
        let timeout = connection.set::<_, _, ()>("a", 1).await.unwrap_err();
        assert!(timeout.is_timeout(), "{timeout}");
        assert!(server.connection().await.exists::<_, bool>("a").await.unwrap());
        let () = connect(&proxy).await.unwrap().set("a", 2).await.unwrap();
    }

    #[tokio::test]
    async fn what_is_held_arrives_when_it_is_let_go() {
        let (server, proxy) = behind_proxy().await;
        let mut connection = connect(&proxy).await.unwrap();
        proxy.set(Mode::Hold);
        let timeout = connection.set::<_, _, ()>("a", 1).await.unwrap_err();
        assert!(timeout.is_timeout(), "{timeout}");
        let mut direct = server.connection().await;
        assert!(!direct.exists::<_, bool>("a").await.unwrap());
        proxy.set(Mode::Pass);
        eventually(LONG, "the write arrives late", async || direct.exists("a").await.unwrap())
            .await;
    }

    #[tokio::test]
    async fn a_delay_is_added_both_ways() {
        let (_server, proxy) = behind_proxy().await;
        let mut connection = connect(&proxy).await.unwrap();
        let delay = Duration::from_millis(30);
        proxy.set(Mode::Delay(delay));
        let started = std::time::Instant::now();
        let () = connection.set("a", 1).await.unwrap();
        assert!(started.elapsed() >= 2 * delay);
    }

    #[tokio::test]
    async fn a_slow_line_is_shared_by_all_connections() {
        let (_server, proxy) = behind_proxy().await;
        let mut connections = [connect(&proxy).await.unwrap(), connect(&proxy).await.unwrap()];
        proxy.set(Mode::Rate(100_000));
        let started = std::time::Instant::now();
        let [first, second] = &mut connections;
        let sets = async |connection: &mut MultiplexedConnection| {
            connection.set::<_, _, ()>("a", "x".repeat(10_000)).await.unwrap();
        };
        tokio::join!(sets(first), sets(second));
        assert!(started.elapsed() >= Duration::from_millis(200), "{:?}", started.elapsed());
    }

    #[tokio::test]
    async fn a_slow_line_of_one_connection_delays_no_other() {
        let (_server, proxy) = behind_proxy().await;
        let mut connections = [connect(&proxy).await.unwrap(), connect(&proxy).await.unwrap()];
        proxy.set(Mode::RateEach(20_000));
        let [first, second] = &mut connections;
        let large = first.set::<_, _, ()>("a", "x".repeat(40_000));
        let small = second.set::<_, _, ()>("b", "x");
        tokio::select! {
            biased;
            _ = large => panic!("it takes two seconds"),
            done = small => done.unwrap(),
        }
    }
}
