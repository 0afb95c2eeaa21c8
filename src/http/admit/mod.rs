//! Admission control for HTTP: decides before anything is read or looked up.
//!
//! 0. Sender ([`Identity`]): by the token, session or lease in the head. Only known senders are
//!    callers. A stranger ranks last and never waits, and its body is not read.
//! 1. Class: that of the route ([`routes`](super::routes)). `x-priority` and the token may lower
//!    it, never raise it.
//! 2. Deadline: `x-deadline-ms`, in milliseconds from now. A request does not start if the deadline
//!    has passed, or if the remaining time is shorter than the route usually takes. A request that
//!    misses its deadline is cancelled: 504. Without the header, the default of the class only
//!    limits the duration.
//! 3. Decision by [`Admission`]: start, wait a little, or a refusal that was encoded in advance.
//! 4. Admitted requests start one after the other, the highest class first. Between them the
//!    runtime looks for new arrivals ([`AdmissionGate::begin`]). Otherwise requests that need much
//!    processor time would delay all others, even refusals.
//! 5. Body, if there is one. While a request waits for a slow body, it gives its place back: slow
//!    senders delay no other request. Once its body is there, a large request takes further places,
//!    or waits for them like one that comes then. The number and the bytes of bodies that wait are
//!    bounded, in all and for each sender ([`SlowBodies`]).
//! 6. Answer: what its client has not read yet is bounded, in all and for each reader
//!    ([`UnreadAnswers`]).
//!
//! Refusals keep the connection open. When there are many, each is delayed a little. The delay
//! costs almost nothing here, and keeps callers that retry immediately from using up the processor
//! time.
//!
//! Once the route has accepted the token, quotas are charged ([`AdmissionGate::charge`]).

mod answers;
mod bodies;
mod charge;
mod refuse;
mod request;
mod within;

use std::future::{Future, poll_fn};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::task::Poll;
use std::time::Duration;

use ::metrics::Histogram;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::{Extensions, HeaderName, HeaderValue, Method, StatusCode, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse as _, Response};
use hyper::body::Body as _;
use tokio::time::Instant;

pub(super) use self::answers::Unread;
use self::answers::{SMALL, UnreadAnswers, readers};
use self::bodies::{SlowBodies, discard, senders};
pub(crate) use self::charge::QuotaSettings;
use self::charge::{UsedQuotas, Whose};
use self::refuse::{Pace, Refusal};
use self::request::{class, covered_bot, deadline, lease_of, number, places, tenant};
use self::within::Within;
use super::auth::{Access, Caller, Identity, Stranger};
use super::body::Keeping;
use super::metrics::http_body;
use super::page::Cursors;
use super::problem::{Kind, Problem};
use super::routes::{Route, Routes, Row};
use super::stopwatch::Stopwatch;
use super::{cors, extract, pages};
use crate::admission::aside::{permit_of, permitted};
use crate::admission::metrics::shed_seconds;
use crate::admission::turns::Turns;
use crate::admission::{
    Admission, Class, Decision, Permit, Reason, Request as AdmissionRequest, ShedCounts,
};
use crate::id::BotId;
use crate::{request_deadline, request_tenant};

/// The header with the reason of a refusal.
pub(super) const SHED_REASON: HeaderName = HeaderName::from_static("x-shed-reason");
/// A request gives its place back if its body takes longer than this.
const BODY_AT_ONCE: Duration = Duration::from_millis(20);
/// Maximum number of bots in a body for which a refusal is counted.
const NAMED_MAX: usize = 16;

/// Decides which HTTP requests start.
pub(crate) struct AdmissionGate {
    pub(crate) admission: Arc<Admission>,
    pub(crate) cursors: Cursors,
    quotas: UsedQuotas,
    routes: Routes,
    pace: Pace,
    slow_bodies: SlowBodies,
    unread: Arc<UnreadAnswers>,
    turns: Arc<Turns>,
    /// The refusal of each reason.
    refusals: [Refusal; Reason::ALL.len()],
    shed_seconds: Histogram,
    /// The deadline of requests without one, per class, in µs; 0: no limit.
    deadlines: [AtomicU64; 4],
    /// The tokens. Without them, every sender is the anonymous caller.
    access: OnceLock<Arc<Access>>,
    anonymous: Caller,
}

impl AdmissionGate {
    /// Decides about the routes of `table`. Requests that match no route have the class p2.
    pub(crate) fn new(admission: Arc<Admission>, quotas: QuotaSettings, table: &[Row]) -> Self {
        let quotas = UsedQuotas {
            settings: RwLock::new(quotas),
            bots: Arc::default(),
            tokens: Arc::default(),
            public: Arc::default(),
        };
        Self {
            admission,
            cursors: Cursors::default(),
            quotas,
            routes: Routes::new(table),
            pace: Pace::default(),
            slow_bodies: SlowBodies::default(),
            unread: Arc::default(),
            turns: Turns::new(std::thread::available_parallelism().map_or(1, usize::from)),
            refusals: Reason::ALL.map(Refusal::new),
            shed_seconds: shed_seconds(),
            deadlines: Default::default(),
            access: OnceLock::new(),
            anonymous: Caller::anonymous(),
        }
    }

    /// Sets the tokens, once.
    pub(super) fn know(&self, access: &Arc<Access>) {
        let _ = self.access.set(Arc::clone(access));
    }

    /// The current quotas.
    pub(super) fn quotas(&self) -> QuotaSettings {
        *self.quotas.settings.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the deadlines of requests without one, per class.
    pub(crate) fn set_deadlines(&self, deadlines: [Option<Duration>; 4]) {
        for (deadline, new) in self.deadlines.iter().zip(deadlines) {
            let micros = new.map_or(0, |new| u64::try_from(new.as_micros()).unwrap_or(u64::MAX));
            deadline.store(micros, Ordering::Relaxed);
        }
    }

    /// The deadline of requests of a class without one.
    pub(super) fn deadline(&self, class: Class) -> Option<Duration> {
        let micros = self.deadlines[class as usize].load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
    }

    /// Changes the quotas; requests in flight continue.
    pub(crate) fn set_quotas(&self, quotas: QuotaSettings) {
        *self.quotas.settings.write().unwrap_or_else(PoisonError::into_inner) = quotas;
    }

    /// Starts an admitted request. Under load, only as many requests start concurrently as there
    /// are processors, each up to its first wait. Before each start, the runtime looks for new
    /// arrivals. So the decision about a new arrival waits only for requests that are just
    /// starting, not for all requests admitted before it. A higher class also does not wait for
    /// lower classes that were admitted before it.
    ///
    /// `waited`: how long the request waited for its place.
    async fn begin<T>(
        &self,
        class: Class,
        waited: Duration,
        mut work: Pin<&mut impl Future<Output = T>>,
    ) -> T {
        let since = Instant::now();
        let is_tight = self.admission.is_tight();
        let turn = if is_tight { Some(self.turns.take(class).await) } else { None };
        tokio::task::yield_now().await;
        self.admission.waited(class, waited + since.elapsed());
        let first = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
        drop(turn);
        match first {
            Poll::Ready(done) => done,
            Poll::Pending => work.await,
        }
    }
}

/// The properties of a request that are still needed after its memory is freed.
struct Seen {
    watch: Option<Stopwatch>,
    waited: Duration,
    identity: Identity,
    address: Option<IpAddr>,
    method: Method,
    uri: Uri,
    wants_page: bool,
    /// The bots in its body, once it was read.
    named: NamedBots,
}

impl Seen {
    /// The answer that tells of a problem, as the client wants it.
    fn told(&self, problem: Problem) -> Response {
        if self.wants_page {
            pages::Refusal::from(problem).into_response()
        } else {
            problem.into_response()
        }
    }

    fn note(&self, counts: &ShedCounts, reason: Reason) {
        let caller = self.identity.caller();
        let named = self.named.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_uri = caller.and_then(|caller| covered_bot(&self.uri, caller));
        // A token could name the bots of others.
        let is_own = |bot: &&str| {
            let bot = BotId::parse(bot);
            bot.is_ok_and(|bot| caller.is_some_and(|caller| caller.covers(&bot)))
        };
        let mut bots: Vec<&str> = named.iter().map(|bot| &**bot).filter(is_own).collect();
        bots.extend(of_uri.as_ref().map(BotId::as_str).filter(|bot| !bots.contains(bot)));
        let token = caller.filter(|caller| caller.has_token()).map(Caller::name);
        Whose { token, address: self.address, bots: &bots }.note(counts, reason);
    }
}

impl AdmissionGate {
    /// Refuses a request whose answer would find no room.
    fn has_room(&self, ask: &AdmissionRequest, seen: &Seen) -> Result<(), Reason> {
        let of = || readers(&seen.identity, seen.address);
        let refused = self.unread.refuses(&seen.method, of).filter(|_| ask.class != Class::P0);
        let Some(reason) = refused else { return Ok(()) };
        self.admission.refused(ask.class, reason);
        Err(reason)
    }

    /// Counts an answer until its client has read it, or refuses it. A streamed one is made while it
    /// is read.
    async fn send(
        &self,
        route: &Route,
        ask: &AdmissionRequest,
        seen: &Seen,
        response: Response,
    ) -> Response {
        let bytes = response.body().size_hint().exact();
        let bytes = bytes.and_then(|bytes| usize::try_from(bytes).ok()).unwrap_or_default();
        let Some(watch) = seen.watch.as_ref().filter(|_| bytes > SMALL) else { return response };
        match self.unread.take(&seen.method, readers(&seen.identity, seen.address), bytes) {
            Ok(unread) => {
                watch.keep(unread);
                response
            }
            Err(reason) => {
                drop(response);
                self.admission.refused(ask.class, reason);
                self.refuse(route, ask, seen, reason).await
            }
        }
    }
}

/// The bots in the body of a request. The code that reads the body adds them.
#[derive(Debug, Clone, Default)]
pub(super) struct NamedBots(Arc<Mutex<Vec<Box<str>>>>);

impl NamedBots {
    /// Adds a bot of a request that may be refused later.
    pub(super) fn note(extensions: &Extensions, bot: &str) {
        let Some(Self(named)) = extensions.get() else { return };
        let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
        if named.len() < NAMED_MAX && !named.iter().any(|known| **known == *bot) {
            named.push(bot.into());
        }
    }
}

impl AdmissionGate {
    /// The sender of a request.
    fn identify(&self, route: &Route, request: &Request) -> Identity {
        if route.is_of_leases() {
            let lease = lease_of(request.uri());
            let is_known = lease.is_some_and(|lease| self.cursors.is_lease(&lease));
            return if is_known {
                Identity::Receiver
            } else {
                Identity::Stranger(Stranger::NoToken)
            };
        }
        match self.access.get() {
            Some(access) => access.identify(request),
            None => Identity::Caller(self.anonymous.clone()),
        }
    }
}

/// Whether the body of a request is read. A public token opens few routes, and everybody knows it.
fn reads_body(identity: &Identity, route: &Route) -> bool {
    match identity {
        Identity::Stranger(_) => route.takes_bodies_of_strangers(),
        Identity::Receiver => true,
        Identity::Caller(caller) | Identity::Browser(caller) => {
            !caller.is_public() || cors::is_shared(route.template)
        }
    }
}

/// Admits or refuses requests.
pub(super) async fn admit(
    State(gate): State<Arc<AdmissionGate>>,
    mut request: Request,
    next: Next,
) -> Response {
    let begun = Instant::now();
    let route = gate.routes.find(request.method(), request.extensions());
    let mut seen = Seen {
        watch: request.extensions().get::<Stopwatch>().cloned(),
        waited: Duration::ZERO,
        identity: gate.identify(route, &request),
        address: Whose::of(request.extensions()).address,
        method: request.method().clone(),
        uri: request.uri().clone(),
        wants_page: pages::wants_page(&request),
        named: NamedBots::default(),
    };
    let (class, deadline) = match (class(route, request.headers()), deadline(request.headers())) {
        (Ok(class), Ok(deadline)) => (class, deadline),
        (Err(problem), _) | (_, Err(problem)) => {
            return route.answered(seen.watch.as_ref(), seen.told(problem));
        }
    };
    let caller = seen.identity.caller();
    let is_stranger = seen.identity.is_stranger() && !route.is_of_health();
    let class = match caller {
        Some(caller) => caller.class(class),
        // Nobody completes work with a lease that nobody has.
        None if is_stranger && class == Class::P0 => Class::P3,
        None => class,
    };
    let reads_body = reads_body(&seen.identity, route);
    let ask = AdmissionRequest {
        class,
        operation: route.operation,
        continues: caller.is_some() && gate.cursors.continues(request.uri()),
        caller: caller.map_or(0, |caller| number(&seen.uri, caller, seen.address)),
        asks_again: false,
        is_stranger,
        deadline: deadline.map(|within| gate.admission.now() + within),
        places: 1,
    };
    // A default deadline does not come from the caller: it cancels long requests, but refuses none.
    let within = deadline.or_else(|| gate.deadline(class));
    let permit = match gate.has_room(&ask, &seen) {
        Ok(()) => let_in(&gate, &ask, &mut seen.waited).await,
        Err(reason) => Err(reason),
    };
    let permit = match permit {
        Ok(permit) => permit,
        Err(reason) => {
            // The refusal may be delayed, so the memory of the request is freed first.
            drop((request, next));
            return gate.refuse(route, &ask, &seen, reason).await;
        }
    };
    request.extensions_mut().insert(seen.identity.clone());
    if !reads_body && !request.body().is_end_stream() {
        let (parts, body) = request.into_parts();
        let headers = parts.headers.clone();
        let response = next.run(Request::from_parts(parts, Body::empty())).await;
        let response = hold(Some(permit), response);
        discard(&headers, body).await;
        return gate.send(route, &ask, &seen, response).await;
    }
    let (permit, request) = match with_body(&gate, &ask, route, permit, request, &mut seen).await {
        Ok(both) => both,
        Err(Turned::Away(problem)) => {
            return route.answered(seen.watch.as_ref(), seen.told(*problem));
        }
        Err(Turned::Shed(reason)) => return gate.refuse(route, &ask, &seen, reason).await,
    };
    let running = request_tenant::of(tenant(&seen.identity), next.run(request));
    let mut work = pin!(permitted(permit, async {
        match within {
            None => Ok(running.await),
            Some(within) => {
                let until = begun + within;
                Within::new(until, request_deadline::until(until, running)).await
            }
        }
    }));
    let answered = match class {
        Class::P0 => work.as_mut().await,
        _ => gate.begin(class, seen.waited, work.as_mut()).await,
    };
    let permit = permit_of(work);
    if let Ok(response) = answered {
        return gate.send(route, &ask, &seen, hold(permit, response)).await;
    }
    drop(permit);
    gate.admission.refused(class, Reason::Deadline);
    route.shed(class, Reason::Deadline).increment(1);
    seen.note(gate.admission.counts(), Reason::Deadline);
    let detail = "the deadline passed while the request ran, so it may have been done; check the result, or retry with a longer deadline (x-deadline-ms; default: admission.p1_deadline to p3_deadline)";
    let reason = HeaderValue::from_static(Reason::Deadline.as_str());
    let cut = Problem::new(Kind::Deadline, detail).header(SHED_REASON, reason);
    route.answered(seen.watch.as_ref(), seen.told(cut))
}

/// Asks for admission; adds the waiting time to `waited`.
async fn let_in(
    gate: &AdmissionGate,
    ask: &AdmissionRequest,
    waited: &mut Duration,
) -> Result<Permit, Reason> {
    match gate.admission.ask(ask) {
        Decision::Begin(permit) => Ok(permit),
        Decision::Wait(place) => {
            let since = Instant::now();
            let told = place.wait().await;
            *waited += since.elapsed();
            told
        }
        Decision::Shed(reason) => Err(reason),
    }
}

enum Turned {
    Away(Box<Problem>),
    Shed(Reason),
}

/// The request with its complete body, and as many places as its size takes. If the body is not there
/// immediately, or these places are not free, the request waits without a place.
async fn with_body(
    gate: &AdmissionGate,
    ask: &AdmissionRequest,
    route: &Route,
    permit: Permit,
    request: Request,
    seen: &mut Seen,
) -> Result<(Permit, Request), Turned> {
    if request.body().is_end_stream() {
        return Ok((permit, request));
    }
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(seen.named.clone());
    let away = |problem| Turned::Away(Box::new(problem));
    let keep = |bytes| {
        let senders = senders(&seen.identity, seen.address);
        gate.slow_bodies.take(senders, bytes).ok_or(Turned::Shed(Reason::Capacity))
    };
    let since = Instant::now();
    let mut reading = Box::pin(extract::collect(&parts.headers, body, route.body_max));
    let at_once = tokio::time::timeout(BODY_AT_ONCE, &mut reading).await;
    let permit = at_once.is_ok().then_some(permit);
    let (bytes, kept) = if let Ok(read) = at_once {
        (read.map_err(away)?, None)
    } else {
        let announced = extract::announced(&parts.headers);
        let announced = announced.and_then(|bytes| usize::try_from(bytes).ok());
        let kept = keep(announced.unwrap_or(route.body_max))?;
        (reading.as_mut().await.map_err(away)?, Some(kept))
    };
    drop(reading);
    http_body(route.template).record(since.elapsed().as_secs_f64());
    let ask = AdmissionRequest { places: places(bytes.len() as u64), asks_again: true, ..*ask };
    if let Some(mut permit) = permit
        && permit.try_grow(ask.places)
    {
        return Ok((permit.restarted(), Request::from_parts(parts, Body::from(bytes))));
    }
    let _kept = kept.map_or_else(|| keep(bytes.len()), Ok)?;
    match let_in(gate, &ask, &mut seen.waited).await {
        Ok(permit) => Ok((permit, Request::from_parts(parts, Body::from(bytes)))),
        Err(reason) => Err(Turned::Shed(reason)),
    }
}

/// Frees the place and counts the duration once the head is ready. A streamed body holds the place
/// until it ends, and its duration does not count.
fn hold(permit: Option<Permit>, response: Response) -> Response {
    let is_refusal = response.status() == StatusCode::TOO_MANY_REQUESTS
        || response.headers().contains_key(SHED_REASON);
    // A refusal says nothing about durations.
    let Some(permit) = permit.filter(|_| !is_refusal) else { return response };
    let unhurried = response.extensions().get::<Unhurried>().is_some();
    if unhurried || response.body().size_hint().exact().is_some() {
        permit.answered();
        return response;
    }
    response.map(|body| Body::new(Keeping::new(body, permit)))
}

/// Marks an answer that lasts for minutes and is mostly idle: it holds no place. The routes with
/// such answers bound their number.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unhurried;

#[cfg(test)]
mod tests;
