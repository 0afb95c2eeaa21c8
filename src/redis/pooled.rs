//! Connections to one server that a call has to itself: taken from a pool for one write and its
//! answer, then put back. A large answer delays no other call.
//!
//! Each is made as a shared one is ([`Setup::connect`]): `recover` has run on it before the pool has
//! it. It leaves the pool, and is closed,
//!
//! * when a call on it failed, or was given up before the answer was there: the answer would be
//!   taken for that of the next call, or delay it;
//! * when it was made before something that puts all into doubt: an answer that did not come in
//!   time, scripts that the server forgot, a server that is a replica now;
//! * when the server closed it while it rested, which a look tells before it is used;
//! * after a rest of [`REST`].

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

/// Connections of one pool at most. Twice what one listing takes (4, see `queue::list`): a second one
/// finds connections free. More would not help, since Redis runs one command at a time; and every
/// process has as many to every server of a cluster, of whose `maxclients` they are a part.
pub const POOLED_MAX: u32 = 8;

/// A connection that was not used for so long is closed. Making one costs all scripts and a
/// `recover` per shard, so those that background work uses every few seconds stay.
const REST: Duration = Duration::from_secs(60);

/// One that was used within this time is used again without a look: no server restarts so fast.
const FRESH: Duration = Duration::from_millis(10);

/// The connections that calls have to themselves.
#[derive(Debug)]
pub(super) struct Pooled {
    setup: Arc<Setup>,
    /// Made with the first call, which is within a runtime, as the pool asks for.
    pool: OnceLock<Pool<Maker>>,
    /// Counts how often all were given up.
    closed: Arc<AtomicU64>,
    failure: watch::Sender<Option<RedisError>>,
}

/// A connection for one call.
#[derive(Debug)]
pub(super) enum Lent<'a> {
    /// Others use it at the same time.
    Shared(Connected),
    /// No other call uses it until it is put back.
    Own(PooledConnection<'a, Maker>),
}

impl Lent<'_> {
    /// Whether a shard in `slot` may not be spoken to yet.
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

    /// Gives all up: none that was made before now is used for a further call.
    pub(super) fn close(&self) {
        self.closed.fetch_add(1, Ordering::Relaxed);
    }

    /// A connection that may be used.
    ///
    /// # Errors
    /// Nothing was sent, whatever the error.
    pub(super) async fn take(&self) -> Result<PooledConnection<'_, Maker>, RedisError> {
        loop {
            let mut own = self.wait().await?;
            if !own.is_usable().await {
                // Dropped, which makes room for another one.
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

    /// Waits for a connection that is free, or is made.
    async fn wait(&self) -> Result<PooledConnection<'_, Maker>, RedisError> {
        let pool = self.pool.get_or_init(|| self.build());
        // Failures from here on count.
        let mut failures = self.failure.subscribe();
        let mut waiting = std::pin::pin!(pool.get());
        loop {
            // The pool itself tells no caller why a connection could not be made: each would wait
            // until its time is over.
            let waited = tokio::select! {
                biased;
                waited = &mut waiting => waited,
                Ok(()) = failures.changed() => {
                    let failure = failures.borrow_and_update().clone();
                    // While other calls have connections, they put them back.
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
            // The one that was used last is taken first, so that the others may rest.
            .queue_strategy(QueueStrategy::Lifo)
            .idle_timeout(REST)
            .max_lifetime(None)
            // It would ask the server, and wait for the answer, before every call.
            .test_on_check_out(false)
            // The failure is told to the callers, which may come again.
            .retry_connection(false)
            .error_sink(Box::new(Failures(self.failure.clone())))
            // As long as making one may take: else its failure would come too late to be told.
            .connection_timeout(wiring.response_timeout.max(CONNECT_TIMEOUT))
            .build_unchecked(maker)
    }

    fn all_in_use(&self) -> RedisError {
        let waited = self.setup.wiring.response_timeout.max(CONNECT_TIMEOUT);
        let text = format!(
            "within {waited:?}, none of the {POOLED_MAX} connections became free, and no other could be made"
        );
        let source = std::io::Error::new(std::io::ErrorKind::TimedOut, text).into();
        RedisError::Connect { target: self.setup.name().to_owned(), source }
    }
}

/// A connection in the pool, or lent to a call.
#[derive(Debug)]
pub(super) struct Own {
    connected: Connected,
    setup: Arc<Setup>,
    /// Counts how often all were given up, and what that was before this one was made.
    closed: Arc<AtomicU64>,
    closed_before: u64,
    /// A call has begun, and no whole answer has come. It stays so when the call is given up.
    under_way: bool,
    /// When it was made, or an answer came.
    used: Instant,
}

impl Own {
    /// Sends commands in one write.
    ///
    /// # Cancel safety
    /// Dropping the future leaves open which commands ran, and closes the connection.
    pub(super) async fn send(&mut self, pipe: &Pipeline) -> RedisResult<Vec<Value>> {
        self.under_way = true;
        let sent = self.connected.connection.send_packed_commands(pipe, 0, pipe.len()).await;
        self.under_way = sent.is_err();
        self.used = Instant::now();
        sent
    }

    /// How often answers did not come in time before it was made.
    pub(super) fn doubts(&self) -> u64 {
        self.connected.doubts()
    }

    /// Whether a call may take it. A server that restarts closes it while it rests; then it takes no
    /// command any more.
    async fn is_usable(&mut self) -> bool {
        if self.is_broken() {
            return false;
        }
        if self.used.elapsed() < FRESH {
            return true;
        }
        // Waits for no answer; that of the call comes behind it.
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
        // Before: one that is under way while all are given up is one of them.
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
        Err(RedisError::Connect { target: self.setup.name().to_owned(), source })
    }

    fn has_broken(&self, own: &mut Own) -> bool {
        own.is_broken()
    }
}

/// Tells those who wait that a connection could not be made. The pool calls it after it has noted
/// that itself: a call that comes later asks for another one.
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
