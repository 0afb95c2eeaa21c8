//! The work of a request, which can leave its place in flight while it waits for its turn.

use std::cell::RefCell;
use std::future::Future;
use std::pin::Pin;

use tokio::task::futures::TaskLocalFuture;

use crate::admission::Permit;

tokio::task_local! {
    static PERMIT: RefCell<Permit>;
}

/// The work of a request, with its permit.
pub(super) type Permitted<F> = TaskLocalFuture<RefCell<Permit>, F>;

/// Work that holds this permit.
pub(super) fn permitted<F: Future>(permit: Permit, work: F) -> Permitted<F> {
    PERMIT.scope(RefCell::new(permit), work)
}

/// The permit of work that has ended.
pub(super) fn permit_of<F: Future>(work: Pin<&mut Permitted<F>>) -> Option<Permit> {
    work.take_value().map(RefCell::into_inner)
}

/// Waits for something other than capacity. Meanwhile the request holds no place in flight, so that those
/// of one token that wait for their turn keep out no others. Afterwards it has its place again, above the
/// limit if need be: whatever is waited for must bound how many go on.
///
/// # Cancel safety
/// As that of `waiting`.
pub(in super::super) async fn aside<T>(waiting: impl Future<Output = T>) -> T {
    let stepped = Aside::step();
    let waited = waiting.await;
    drop(stepped);
    waited
}

struct Aside;

impl Aside {
    fn step() -> Self {
        // Without a permit, as in a live page, there is no place to leave.
        let _ = PERMIT.try_with(|permit| permit.borrow_mut().step_aside());
        Self
    }
}

impl Drop for Aside {
    fn drop(&mut self) {
        let _ = PERMIT.try_with(|permit| permit.borrow_mut().come_back());
    }
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::sync::Arc;
    use std::task::{Context, Poll};

    use futures_util::task::noop_waker_ref;
    use tokio::sync::oneshot;

    use super::*;
    use crate::admission::{
        Admission, Class, Decision, Operation, Request, Settings, system_ticks,
    };

    #[test]
    fn a_request_holds_its_place_before_and_after_it_waits_for_its_turn_and_none_once_it_is_dropped()
     {
        let admission = Admission::new(Settings::default(), system_ticks());
        let ask = Request {
            class: Class::P1,
            operation: Operation(0),
            continues: false,
            caller: 0,
            is_stranger: false,
            deadline: None,
            places: 3,
        };
        let begin = || match admission.ask(&ask) {
            Decision::Begin(permit) => permit,
            other => panic!("{other:?}"),
        };
        let in_flight = || admission.state().in_flight;
        let mut context = Context::from_waker(noop_waker_ref());
        let (tell, told) = oneshot::channel::<()>();
        let seen = Arc::new(std::sync::Mutex::new(Vec::new()));
        let mut work = pin!(permitted(begin(), async {
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

        let mut cancelled = Box::pin(permitted(begin(), aside(std::future::pending::<()>())));
        assert!(cancelled.as_mut().poll(&mut context).is_pending());
        drop(cancelled);
        assert_eq!(in_flight(), 0, "a cancelled request frees its places once");
    }
}
