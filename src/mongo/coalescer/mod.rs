//! Coalesces concurrent queries and writes into shared commands. While commands are in flight, new
//! calls collect in the next group. So groups grow with the load, and an idle system has no added
//! latency.
//!
//! Members of different tenants share groups. So the failure of one group fails others only if it
//! concerns the whole server. A group that must be alone is long, and takes no slot of the others.
//!
//! There is no background task. A group is a future that all its members share. Each poll of a
//! member drives the group, and the group is dropped with its last member. A member must be polled
//! until it ends, or be dropped.

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use futures_util::FutureExt as _;
use futures_util::future::{BoxFuture, Shared, WeakShared};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::Instant;

use crate::mongo::client::MongoError;

type Ended<O> = Result<Arc<O>, MongoError>;
type Group<O> = Shared<BoxFuture<'static, Ended<O>>>;
/// A group that only its members keep alive.
type WeakGroup<O> = WeakShared<BoxFuture<'static, Ended<O>>>;
type Run<I, O> = dyn Fn(Vec<I>, Slot) -> BoxFuture<'static, Result<O, MongoError>> + Send + Sync;
/// The slot of a group in flight. It becomes free when its last clone is dropped. A command that
/// still runs in the server after all members have left keeps a clone.
pub(crate) type Slot = Arc<Option<OwnedSemaphorePermit>>;
/// The items of a group; `None` once it is in flight.
type Items<I> = Arc<Mutex<Option<Vec<I>>>>;

/// The limits of groups.
#[derive(Debug, Clone, Copy)]
pub(crate) struct BatchLimits {
    /// Maximum number of items of a group, unless a single member has more.
    pub(crate) items_max: usize,
    /// Maximum number of groups in flight. In addition, one group of [`Coalescer::alone`] may be.
    pub(crate) in_flight: usize,
    /// After a failure, all calls fail immediately for this time. Then one probing call is let
    /// through, and the others fail until it succeeds. A time limit of the server does not count.
    /// Zero: only the calls that are already waiting fail, and only if no server was found.
    pub(crate) pause: Duration,
}

/// Processes items of type `I` in groups, with one result per group. Clones share the groups.
pub(crate) struct Coalescer<I, O>(Arc<Inner<I, O>>);

struct Inner<I, O> {
    rules: BatchLimits,
    permits: Arc<Semaphore>,
    /// The permit of the groups that are alone.
    alone: Arc<Semaphore>,
    run: Box<Run<I, O>>,
    state: Mutex<State<I, O>>,
}

/// Holds groups weakly, because only their members may keep them alive.
struct State<I, O> {
    gathering: Option<(Items<I>, WeakGroup<O>)>,
    failure: Option<Failure<O>>,
}

/// The last failure that concerns other groups, if no group succeeded since.
struct Failure<O> {
    at: Instant,
    error: MongoError,
    /// The group of the probing call, if one is in flight.
    probe: Option<WeakGroup<O>>,
}

impl<I, O> Clone for Coalescer<I, O> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<I, O> fmt::Debug for Coalescer<I, O> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Coalescer({:?})", self.0.rules)
    }
}

impl<I, O> Coalescer<I, O>
where
    I: Send + 'static,
    O: Send + Sync + 'static,
{
    /// A coalescer whose groups `run` processes. `run` must have a time limit.
    pub(crate) fn new<F>(rules: BatchLimits, run: F) -> Self
    where
        F: Fn(Vec<I>, Slot) -> BoxFuture<'static, Result<O, MongoError>> + Send + Sync + 'static,
    {
        Self(Arc::new(Inner {
            rules,
            permits: Arc::new(Semaphore::new(rules.in_flight)),
            alone: Arc::new(Semaphore::new(1)),
            run: Box::new(run),
            state: Mutex::new(State { gathering: None, failure: None }),
        }))
    }

    /// Processes the items together with those of other calls. Returns the result of the group, and
    /// the position of the items in it.
    ///
    /// # Errors
    /// The failure of the group, or of an earlier group as [`BatchLimits::pause`] says.
    ///
    /// # Cancel safety
    /// The items may or may not be processed, because other members continue the group.
    pub(crate) async fn join(&self, items: Vec<I>) -> Result<(Arc<O>, Range<usize>), MongoError> {
        let (group, place) = self.enter(items)?;
        Ok((group.await?, place))
    }

    /// [`Self::join`] with a group of its own, which waits only for other such groups.
    pub(crate) async fn alone(&self, items: Vec<I>) -> Result<(Arc<O>, Range<usize>), MongoError> {
        let place = 0..items.len();
        let (_, group) = self.begin(&mut self.0.state(), items, true)?;
        Ok((group.await?, place))
    }

    fn enter(&self, items: Vec<I>) -> Result<(Group<O>, Range<usize>), MongoError> {
        let mut state = self.0.state();
        let count = items.len();
        if let Some((gathered, group)) = &state.gathering
            && let Some(group) = group.upgrade()
            && let Some(gathered) = &mut *lock(gathered)
            && gathered.len() + count <= self.0.rules.items_max
        {
            let first = gathered.len();
            gathered.extend(items);
            return Ok((group, first..first + count));
        }
        let (items, group) = self.begin(&mut state, items, false)?;
        state.gathering = group.downgrade().map(|weak| (items, weak));
        Ok((group, 0..count))
    }

    fn begin(
        &self,
        state: &mut State<I, O>,
        items: Vec<I>,
        alone: bool,
    ) -> Result<(Items<I>, Group<O>), MongoError> {
        let pause = self.0.rules.pause;
        let probed = state.failure.as_mut().filter(|_| !pause.is_zero());
        if let Some(Failure { at, error, probe }) = &probed {
            let in_flight = probe.as_ref().and_then(WeakShared::upgrade);
            if at.elapsed() < pause || in_flight.is_some() {
                return Err(error.clone());
            }
        }
        let items: Items<I> = Arc::new(Mutex::new(Some(items)));
        let group = Arc::clone(&self.0).drive(Arc::clone(&items), alone).boxed().shared();
        if let Some(failure) = probed {
            failure.probe = group.downgrade();
        }
        Ok((items, group))
    }
}

impl<I, O> Inner<I, O> {
    async fn drive(self: Arc<Self>, items: Items<I>, alone: bool) -> Ended<O> {
        let begun = Instant::now();
        let permits = if alone { &self.alone } else { &self.permits };
        // The semaphore is never closed. Without a permit, groups would only exceed the limit.
        let place: Slot = Arc::new(Arc::clone(permits).acquire_owned().await.ok());
        let items = lock(&items).take().unwrap_or_default();
        if let Some(failure) = &self.state().failure
            && failure.at > begun
        {
            return Err(failure.error.clone());
        }
        let ended = (self.run)(items, Arc::clone(&place)).await;
        match &ended {
            Ok(_) => self.state().failure = None,
            Err(error) if self.concerns_others(error, alone) => {
                let (at, error) = (Instant::now(), error.clone());
                self.state().failure = Some(Failure { at, error, probe: None });
            }
            Err(_) => {}
        }
        ended.map(Arc::new)
    }

    /// Whether other groups fail with this error too. Otherwise the statements of one tenant, which
    /// take too long, would fail those of others.
    fn concerns_others(&self, error: &MongoError, alone: bool) -> bool {
        let pauses = !self.rules.pause.is_zero() && !alone;
        error.is_unreachable() || pauses && !error.is_time_limit()
    }

    fn state(&self) -> MutexGuard<'_, State<I, O>> {
        lock(&self.state)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
