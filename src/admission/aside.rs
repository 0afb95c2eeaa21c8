//! The work of a request, which can leave its places in flight while it waits for something other than
//! capacity: for its turn, or for others to make room.
//!
//! Any code that works for the request can wait in this way. Code that works for no request just waits.

use std::cell::{Cell, RefCell};
use std::collections::hash_map::Entry;
use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;
use std::time::Duration;

use rustc_hash::FxHashMap;
use tokio::task::futures::TaskLocalFuture;
use tokio::time::Instant;

use super::{Admission, Permit};

/// Maximum number of requests of a caller that wait in a line. Each holds its body and a connection.
const WAITING_MAX: usize = 32;

tokio::task_local! {
    static PERMIT: RefCell<Permit>;
    static WATCH: Cell<Watch>;
}

/// The work of a request, with its permit.
pub(crate) type Permitted<F> = TaskLocalFuture<RefCell<Permit>, F>;

/// Work that holds this permit.
pub(crate) fn permitted<F: Future>(permit: Permit, work: F) -> Permitted<F> {
    PERMIT.scope(RefCell::new(permit), work)
}

/// The permit of work that has ended.
pub(crate) fn permit_of<F: Future>(work: Pin<&mut Permitted<F>>) -> Option<Permit> {
    work.take_value().map(RefCell::into_inner)
}

/// Runs work. Returns how long it took as well, without the time for which it waited [`aside`].
pub(crate) async fn timed<T>(work: impl Future<Output = T>) -> (T, Duration) {
    let now = Instant::now();
    let watch = Cell::new(Watch { began: now, parts: 0, since: now });
    let measured = async { (work.await, WATCH.with(|watch| watch.get().began.elapsed())) };
    WATCH.scope(watch, measured).await
}

/// Waits for something other than capacity. Meanwhile the request holds no place in flight, so that those
/// of one token that wait for their turn keep out no others. Afterwards it has its places again, above the
/// limit if need be: whatever is waited for must bound how many go on.
///
/// # Cancel safety
/// As that of `waiting`. A request that gives up its wait says nothing about latency.
pub(crate) async fn aside<T>(waiting: impl Future<Output = T>) -> T {
    let mut waiting = pin!(waiting);
    if let Poll::Ready(done) = once(waiting.as_mut()).await {
        return done;
    }
    let mut stepped = Aside::step();
    let waited = waiting.await;
    stepped.is_over = true;
    drop(stepped);
    waited
}

/// [`aside`] in a line in which few requests of each caller wait.
///
/// # Errors
/// If this one would have to wait, and as many of its caller as may wait already do.
///
/// # Cancel safety
/// As that of [`aside`].
pub(crate) async fn in_line<T>(waiting: impl Future<Output = T>) -> Result<T, Crowded> {
    let mut waiting = pin!(waiting);
    if let Poll::Ready(done) = once(waiting.as_mut()).await {
        return Ok(done);
    }
    let place = PERMIT.try_with(|permit| InLine::enter(&permit.borrow())).unwrap_or(Ok(None));
    let _place = place?;
    Ok(aside(waiting).await)
}

/// As many requests of a caller as may wait already do.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{WAITING_MAX} requests of this caller already wait for their turn")]
pub struct Crowded;

async fn once<T>(mut work: Pin<&mut impl Future<Output = T>>) -> Poll<T> {
    poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await
}

struct Aside {
    is_over: bool,
}

impl Aside {
    fn step() -> Self {
        // Without a permit, as in a live page, there is no place to leave.
        let _ = PERMIT.try_with(|permit| permit.borrow_mut().step_aside());
        let _ = WATCH.try_with(|watch| watch.set(watch.get().stopped()));
        Self { is_over: false }
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = PERMIT.try_with(|permit| permit.borrow_mut().come_back(self.is_over));
        let _ = WATCH.try_with(|watch| watch.set(watch.get().resumed()));
    }
}

/// Measures work.
#[derive(Debug, Clone, Copy)]
struct Watch {
    /// The beginning of the work. Each wait moves it on.
    began: Instant,
    /// The parts that wait.
    parts: usize,
    since: Instant,
}

impl Watch {
    fn stopped(self) -> Self {
        let since = if self.parts == 0 { Instant::now() } else { self.since };
        Self { parts: self.parts + 1, since, ..self }
    }

    fn resumed(self) -> Self {
        let parts = self.parts - 1;
        let waited = if parts == 0 { self.since.elapsed() } else { Duration::ZERO };
        Self { began: self.began + waited, parts, ..self }
    }
}

/// The callers with requests in a line, and the number of these requests.
#[derive(Debug, Default)]
pub(super) struct Lines(Mutex<FxHashMap<u64, usize>>);

impl Lines {
    fn enter(&self, caller: u64) -> bool {
        let mut all = self.waiting();
        let waiting = all.entry(caller).or_default();
        let enters = *waiting < WAITING_MAX;
        *waiting += usize::from(enters);
        enters
    }

    fn leave(&self, caller: u64) {
        if let Entry::Occupied(mut waiting) = self.waiting().entry(caller) {
            *waiting.get_mut() -= 1;
            if *waiting.get() == 0 {
                waiting.remove();
            }
        }
    }

    fn waiting(&self) -> MutexGuard<'_, FxHashMap<u64, usize>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A request in a line, until it is dropped.
struct InLine {
    admission: Arc<Admission>,
    caller: u64,
}

impl InLine {
    fn enter(permit: &Permit) -> Result<Option<Self>, Crowded> {
        let Some(admission) = &permit.admission else { return Ok(None) };
        let caller = permit.caller;
        let place = || Self { admission: Arc::clone(admission), caller };
        admission.lines.enter(caller).then(place).ok_or(Crowded).map(Some)
    }
}

impl Drop for InLine {
    fn drop(&mut self) {
        self.admission.lines.leave(self.caller);
    }
}

#[cfg(test)]
mod tests {
    use std::task::Context;

    use futures_util::FutureExt as _;
    use futures_util::task::noop_waker_ref;
    use tokio::sync::oneshot;

    use super::*;
    use crate::admission::{Class, Decision, Operation, Request, Settings, system_ticks};

    fn begin(admission: &Arc<Admission>, caller: u64) -> Permit {
        let ask = Request {
            class: Class::P1,
            operation: Operation(0),
            continues: false,
            caller,
            asks_again: false,
            is_stranger: false,
            deadline: None,
            places: 3,
        };
        match admission.ask(&ask) {
            Decision::Begin(permit) => permit,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_request_holds_its_place_before_and_after_it_waits_for_its_turn_and_none_once_it_is_dropped()
     {
        let admission = Admission::new(Settings::default(), system_ticks());
        let in_flight = || admission.state().in_flight;
        let mut context = Context::from_waker(noop_waker_ref());
        let (tell, told) = oneshot::channel::<()>();
        let seen = Arc::new(Mutex::new(Vec::new()));
        let mut work = pin!(permitted(begin(&admission, 0), async {
            seen.lock().unwrap().push(in_flight());
            let _ = aside(told).await;
            seen.lock().unwrap().push(in_flight());
        }));
        assert!(work.as_mut().poll(&mut context).is_pending());
        assert_eq!(in_flight(), 0, "it waits");
        tell.send(()).unwrap();
        assert_eq!(work.as_mut().poll(&mut context), Poll::Ready(()));
        assert_eq!(*seen.lock().unwrap(), [3, 3]);
        drop(permit_of(work));
        assert_eq!(in_flight(), 0);

        let forever = aside(std::future::pending::<()>());
        let mut cancelled = Box::pin(permitted(begin(&admission, 0), forever));
        assert!(cancelled.as_mut().poll(&mut context).is_pending());
        drop(cancelled);
        assert_eq!(in_flight(), 0, "a cancelled request frees its places once");
    }

    #[test]
    fn a_request_that_need_not_wait_keeps_its_places() {
        let admission = Admission::new(Settings::default(), system_ticks());
        let in_flight = || std::future::ready(admission.state().in_flight);
        let work = async { (aside(in_flight()).await, in_line(in_flight()).await) };
        let done = permitted(begin(&admission, 0), work).now_or_never();
        assert_eq!(done, Some((3, Ok(3))));
    }

    #[test]
    fn few_requests_of_a_caller_wait_in_a_line_and_others_may_wait_too() {
        let admission = Admission::new(Settings::default(), system_ticks());
        let wait = |caller| {
            let waiting = in_line(std::future::pending::<()>());
            let mut work = Box::pin(permitted(begin(&admission, caller), waiting));
            let done = work.as_mut().now_or_never();
            (work, done)
        };
        let mut waiting: Vec<_> = (0..WAITING_MAX).map(|_| wait(1)).collect();
        assert!(waiting.iter().all(|(_, done)| done.is_none()));
        assert_eq!(admission.state().in_flight, 0);
        assert_eq!(wait(1).1, Some(Err(Crowded)));
        assert_eq!(wait(2).1, None);
        drop(waiting.pop());
        assert_eq!(wait(1).1, None);
        drop(waiting);
        assert!(admission.lines.waiting().is_empty());
    }

    #[tokio::test(start_paused = true)]
    async fn the_time_of_work_is_without_its_waits_whether_they_end_or_are_given_up() {
        let pass = |ms| tokio::time::sleep(Duration::from_millis(ms));
        let work = async {
            pass(100).await;
            tokio::join!(aside(pass(3_000)), aside(pass(5_000)), pass(1_000));
            let _ = tokio::time::timeout(Duration::from_secs(7), aside(pass(9_000))).await;
            pass(100).await;
            "done"
        };
        let (done, took) = timed(work).await;
        assert_eq!(done, "done");
        assert!((200..300).contains(&took.as_millis()), "{took:?}");
    }

    #[test]
    fn work_for_no_request_waits_in_any_number() {
        let (mut all, waits) = (Vec::new(), || in_line(std::future::pending::<()>()).boxed());
        for _ in 0..=WAITING_MAX {
            let mut one = waits();
            assert_eq!(one.as_mut().now_or_never(), None);
            all.push(one);
        }
    }
}
