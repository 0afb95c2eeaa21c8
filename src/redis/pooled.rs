//! Connections that serve one call at a time. A call takes one from the pool for one write and its
//! answer, then puts it back. So a large answer delays no other call.
//!
//! Each is made like a shared one ([`Setup::connect`]): `recover` has run on it before the pool
//! gets it. A connection leaves the pool, and is closed, in these cases:
//!
//! * A call on it failed, or was cancelled before its answer came: the answer would be taken for
//!   that of the next call, or delay it.
//! * It is older than an event that puts all connections in doubt: a timeout, scripts that the
//!   server forgot, a server that is a replica now.
//! * The server closed it while it was idle. A check before use detects this.
//! * It was idle for [`REST`].

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use bb8::{ErrorSink, ManageConnection, Pool, PooledConnection, QueueStrategy, RunError};
use redis::{Pipeline, RedisResult, Value};
use tokio::sync::watch;
use tokio::time::Instant;

use super::error::RedisError;
use super::node::{Connected, Setup};
use super::target::CONNECT_TIMEOUT;

/// Maximum number of connections in one pool. It is twice the number that one listing uses (4, see
/// `queue::list`), so a second listing finds free connections. More would not help, since Redis
/// runs one command at a time. Every process has this many connections to every server of a
/// cluster, and they count towards its `maxclients`.
pub const POOLED_MAX: u32 = 8;

/// A connection is closed after this idle time. Making one costs the loading of all scripts and a
/// `recover` per shard, so connections that background work uses every few seconds are kept.
const REST: Duration = Duration::from_secs(60);

/// A connection used within this time is used again without a check: no server restarts so fast.
const FRESH: Duration = Duration::from_millis(10);

/// A pool of connections for one call at a time.
#[derive(Debug)]
pub(super) struct Pooled {
    setup: Arc<Setup>,
    /// Made at the first call, because the pool needs a running runtime.
    pool: OnceLock<Pool<Maker>>,
    /// Number of times that all connections were given up.
    closed: Arc<AtomicU64>,
    failure: watch::Sender<Option<RedisError>>,
}

/// A connection for one call.
#[derive(Debug)]
pub(super) enum Lent<'a> {
    /// Other calls use it concurrently.
    Shared(Connected),
    /// No other call uses it until it is put back.
    Own(PooledConnection<'a, Maker>),
}

impl Lent<'_> {
    /// Whether commands for a shard in `slot` are not allowed yet.
    pub(super) fn bars(&self, slot: u16) -> bool {
        match self {
            Self::Shared(connected) => connected.bars(slot),
            Self::Own(own) => own.connected.bars(slot),
        }
    }
}

impl Pooled {
    /// A pool without connections.
    pub(super) fn new(setup: Arc<Setup>) -> Self {
        let (pool, closed) = (OnceLock::new(), Arc::default());
        Self { setup, pool, closed, failure: watch::Sender::new(None) }
    }

    /// Gives up all connections: no further call uses one that was made before now.
    pub(super) fn close(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    /// A connection that is ready for use.
    ///
    /// # Errors
    /// Nothing was sent, whatever the error.
    pub(super) async fn take(&self) -> Result<PooledConnection<'_, Maker>, RedisError> {
        loop {
            let mut own = self.wait().await?;
            if !own.is_usable().await {
                // Dropping it makes room for another one.
                continue;
            }
            if !own.connected.is_settled() {
                own.under_way = true;
                self.setup.lift(&mut own.connected).await?;
                own.under_way = false;
            }
            return Ok(own);
        }
    }

    /// Waits for a connection that is free or newly made.
    async fn wait(&self) -> Result<PooledConnection<'_, Maker>, RedisError> {
        let pool = self.pool.get_or_init(|| self.build());
        // Only failures from here on count.
        let mut failures = self.failure.subscribe();
        let mut waiting = std::pin::pin!(pool.get());
        loop {
            // The pool itself does not report why a connection could not be made: each caller would
            // wait for its full timeout.
            let waited = tokio::select! {
                biased;
                waited = &mut waiting => waited,
                Ok(()) = failures.changed() => {
                    let failure = failures.borrow_and_update().clone();
                    // While other calls have connections, this call can wait for them.
                    match failure.filter(|_| pool.state().connections == 0) {
                        Some(failure) => return Err(failure),
                        None => continue,
                    }
                }
            };
            return waited.map_err(|error| match error {
                RunError::User(error) => error,
                RunError::TimedOut => self.all_in_use(),
            });
        }
    }

    fn build(&self) -> Pool<Maker> {
        let wiring = &self.setup.wiring;
        let maker = Maker { setup: Arc::clone(&self.setup), closed: Arc::clone(&self.closed) };
        Pool::builder()
            .max_size(POOLED_MAX)
            .min_idle(None)
            // The connection used last is taken first, so that the others become idle and are
            // closed.
            .queue_strategy(QueueStrategy::Lifo)
            .idle_timeout(REST)
            .max_lifetime(None)
            // Such a test would send a command and wait for its answer before every call.
            .test_on_check_out(false)
            // The callers get the failure and decide about a retry.
            .retry_connection(false)
            .error_sink(Box::new(Failures(self.failure.clone())))
            // As long as connecting may take; otherwise its failure would be reported too late.
            .connection_timeout(wiring.response_timeout.max(CONNECT_TIMEOUT))
            .build_unchecked(maker)
    }

    fn all_in_use(&self) -> RedisError {
        let waited = self.setup.wiring.response_timeout.max(CONNECT_TIMEOUT);
        let text = format!(
            "within {waited:?}, none of the {POOLED_MAX} connections became free, and no other could be made"
        );
        let source = std::io::Error::new(std::io::ErrorKind::TimedOut, text).into();
        RedisError::Connect { target: self.setup.name(), source }
    }
}

/// A connection in the pool, or lent to a call.
#[derive(Debug)]
pub(super) struct Own {
    connected: Connected,
    setup: Arc<Setup>,
    /// Number of times that all connections were given up, and its value before this one was made.
    closed: Arc<AtomicU64>,
    closed_before: u64,
    /// A call started, and its complete answer has not come. It stays `true` if the call is
    /// cancelled.
    under_way: bool,
    /// When the connection was made, or the last answer came.
    used: Instant,
}

impl Own {
    /// Sends commands in one write.
    ///
    /// # Cancel safety
    /// If the future is dropped, any of the commands may have run, and the connection is closed.
    pub(super) async fn send(&mut self, pipe: &Pipeline) -> RedisResult<Vec<Value>> {
        self.under_way = true;
        let sent = self.connected.connection.send_packed_commands(pipe, 0, pipe.len()).await;
        self.under_way = sent.is_err();
        self.used = Instant::now();
        sent
    }

    /// Number of timeouts before the connection was made.
    pub(super) fn doubts(&self) -> u64 {
        self.connected.doubts()
    }

    /// The run of the server.
    pub(super) fn run(&self) -> Arc<str> {
        self.connected.run()
    }

    /// Whether a call may use it. A server that restarts closes an idle connection; then it accepts
    /// no more commands.
    async fn is_usable(&mut self) -> bool {
        if self.is_broken() {
            return false;
        }
        if self.used.elapsed() < FRESH {
            return true;
        }
        // Does not wait for the answer; the answer to the call follows it.
        let mut look = redis::cmd("PING");
        look.set_no_response(true);
        self.under_way = self.connected.connection.send_packed_command(&look).await.is_err();
        !self.under_way
    }

    fn is_broken(&self) -> bool {
        let closed = self.closed.load(Ordering::Relaxed) != self.closed_before;
        self.under_way || closed || !self.connected.is_undoubted(&self.setup.wiring)
    }
}

/// Makes connections for the pool.
#[derive(Debug)]
pub(super) struct Maker {
    setup: Arc<Setup>,
    closed: Arc<AtomicU64>,
}

impl ManageConnection for Maker {
    type Connection = Own;
    type Error = RedisError;

    async fn connect(&self) -> Result<Own, RedisError> {
        // Read before connecting: a connection that is being made while all are given up is given
        // up too.
        let closed_before = self.closed.load(Ordering::Relaxed);
        let connected = self.setup.connect().await?;
        let (setup, closed) = (Arc::clone(&self.setup), Arc::clone(&self.closed));
        let used = Instant::now();
        Ok(Own { connected, setup, closed, closed_before, under_way: false, used })
    }

    async fn is_valid(&self, own: &mut Own) -> Result<(), RedisError> {
        if own.is_usable().await {
            return Ok(());
        }
        let source = std::io::Error::from(std::io::ErrorKind::BrokenPipe).into();
        Err(RedisError::Connect { target: self.setup.name(), source })
    }

    fn has_broken(&self, own: &mut Own) -> bool {
        own.is_broken()
    }
}

/// Tells the waiting callers that a connection could not be made. The pool calls it after it has
/// recorded the failure itself, so a later call requests another connection.
#[derive(Debug, Clone)]
struct Failures(watch::Sender<Option<RedisError>>);

impl ErrorSink<RedisError> for Failures {
    fn sink(&self, error: RedisError) {
        self.0.send_replace(Some(error));
    }

    fn boxed_clone(&self) -> Box<dyn ErrorSink<RedisError>> {
        Box::new(self.clone())
    }
}
