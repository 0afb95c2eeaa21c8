//! Admission at the edge: who is let in, before anything is read or looked up.
//!
//! 1. The class of the route ([`routes`](super::routes)), which `x-priority` may lower, never raise.
//! 2. The deadline: `x-deadline-ms`, in milliseconds from now. Past it, or when less is left than the
//!    route usually takes, nothing is begun; a request that misses it is given up: 504.
//! 3. [`Admission`]: begin, wait a little, or a refusal that was made before.
//! 4. What was let in begins one after the other, the highest class first, with a look at what
//!    arrived in between ([`Door::begin`]): else requests that need the processor would keep
//!    everybody waiting, even for a refusal.
//! 5. The body, if there is one. While it is on its way, the request gives its place back: who sends
//!    slowly holds nobody up.
//!
//! Refusals keep the connection; when there are many, each is held back a little, which costs nothing
//! here and keeps callers that try again at once from spending the processor on refusals.
//!
//! After the token is known, quotas are charged ([`Door::charge`]).

use std::future::{Future, poll_fn};
use std::hash::{Hash as _, Hasher as _};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use ::metrics::Histogram;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Body as _, Bytes, Frame, SizeHint};
use rand::Rng as _;
use rustc_hash::FxHasher;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::extract;
use super::listen::Peer;
use super::page::Cursors;
use super::problem::{Kind, PROBLEM_JSON, Problem};
use super::routes::{Route, Routes, Row};
use crate::admission::quota::{Exceeded, Quota, Quotas, Taken};
use crate::admission::turns::Turns;
use crate::admission::{Admission, Answer, Ask, Class, Permit, Reason};
use crate::deadline;
use crate::id::BotId;
use crate::metrics as table;

/// How much time a caller gives.
const DEADLINE: HeaderName = HeaderName::from_static("x-deadline-ms");
/// The class that a caller wants at most.
const PRIORITY: HeaderName = HeaderName::from_static("x-priority");
/// Why a request was refused.
pub(super) const SHED_REASON: HeaderName = HeaderName::from_static("x-shed-reason");
/// Longest deadline.
const DEADLINE_MAX_MS: u64 = 3_600_000;
/// A body that is on its way for longer gives its place back.
const BODY_AT_ONCE: Duration = Duration::from_millis(20);
/// Bodies that are waited for outside, at once.
const SLOW_BODIES: usize = 512;
/// Refusals in a period that nobody has to pay for.
const FREE_REFUSALS: u64 = 50;
const REFUSALS_PERIOD: Duration = Duration::from_millis(100);
/// Longest time that a refusal is held back, and most of them at once.
const HELD_BACK: Duration = Duration::from_millis(100);
const HELD_BACK_MAX: usize = 4_096;

/// Who is let in.
pub(crate) struct Door {
    pub(crate) admission: Arc<Admission>,
    pub(crate) cursors: Cursors,
    quotas: UsedQuotas,
    routes: Routes,
    pace: Pace,
    slow_bodies: Semaphore,
    turns: Arc<Turns>,
    /// Per reason, as it is sent.
    refusals: [Bytes; Reason::ALL.len()],
    shed_seconds: Histogram,
}

/// The quotas, and what is used of them.
struct UsedQuotas {
    settings: RwLock<QuotaSettings>,
    bots: Arc<Quotas>,
    tokens: Arc<Quotas>,
}

/// What bots and tokens may have.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct QuotaSettings {
    pub(crate) bot: Quota,
    pub(crate) token: Quota,
}

impl Door {
    /// For the routes of `table`; what is not there is of the second class.
    pub(crate) fn new(admission: Arc<Admission>, quotas: QuotaSettings, table: &[Row]) -> Self {
        let quotas = UsedQuotas {
            settings: RwLock::new(quotas),
            bots: Arc::default(),
            tokens: Arc::default(),
        };
        Self {
            admission,
            cursors: Cursors::default(),
            quotas,
            routes: Routes::new(table),
            pace: Pace::default(),
            slow_bodies: Semaphore::new(SLOW_BODIES),
            turns: Turns::new(std::thread::available_parallelism().map_or(1, usize::from)),
            refusals: Reason::ALL.map(refusal),
            shed_seconds: table::shed_seconds(),
        }
    }

    /// Changes the quotas; what is in flight goes on.
    pub(crate) fn set_quotas(&self, quotas: QuotaSettings) {
        *self.quotas.settings.write().unwrap_or_else(PoisonError::into_inner) = quotas;
    }

    /// Charges the token of a request; and its bot, where the path names one.
    pub(super) fn charge(
        &self,
        token: Option<&str>,
        request: &Request,
    ) -> Result<[Option<Taken>; 2], Problem> {
        let settings = *self.quotas.settings.read().unwrap_or_else(PoisonError::into_inner);
        if settings == QuotaSettings::default() {
            return Ok([None, None]);
        }
        let now = self.admission.now();
        let token = token.map(|token| self.quotas.tokens.take(token, 1, settings.token, now));
        let route = self.routes.find(request.method(), request.extensions());
        let token = self.judge(token, "token", route)?;
        let bot = bot_of(request.uri()).map(|bot| {
            let bot = extract::percent_decoded(bot.as_bytes());
            self.quotas.bots.take(&String::from_utf8_lossy(&bot), 1, settings.bot, now)
        });
        Ok([token, self.judge(bot, "bot", route)?])
    }

    /// Charges a bot with `n` events.
    pub(super) fn charge_bot(
        &self,
        bot: &BotId,
        n: u32,
        parts: &Parts,
    ) -> Result<Option<Taken>, Problem> {
        let quota = self.quotas.settings.read().unwrap_or_else(PoisonError::into_inner).bot;
        let taken = self.quotas.bots.take(bot.as_str(), n, quota, self.admission.now());
        let route = self.routes.find(&parts.method, &parts.extensions);
        self.judge(Some(taken), "bot", route)
    }

    /// Over its quota, one is served while there is room for all.
    fn judge(
        &self,
        taken: Option<Result<Option<Taken>, Exceeded>>,
        whose: &str,
        route: &Route,
    ) -> Result<Option<Taken>, Problem> {
        match taken.transpose() {
            Ok(taken) => Ok(taken.flatten()),
            Err(_) if !self.admission.is_tight() => Ok(None),
            Err(Exceeded { retry_after }) => {
                route.shed(route.class, Reason::Quota).increment(1);
                self.admission.refused(route.class, Reason::Quota);
                let detail = format!("the quota of this {whose} is used up; nothing was done");
                let seconds = u32::try_from(retry_after.as_secs()).unwrap_or(u32::MAX);
                let reason = HeaderValue::from_static(Reason::Quota.as_str());
                let problem = Problem::new(Kind::Quota, detail).header(SHED_REASON, reason);
                Err(problem.retry_after(seconds.saturating_add(jitter(1))))
            }
        }
    }

    /// Begins what was let in. Under load that is done by as many at once as there are processors,
    /// each up to where it waits for the first time; and before each, the runtime looks for what
    /// arrived. So a request that needs the processor for long delays the judgement of others by
    /// itself alone, not by all that were let in before it; and a higher class does not wait for
    /// the lower ones that were let in before it.
    async fn begin<T>(&self, class: Class, mut work: Pin<&mut impl Future<Output = T>>) -> T {
        let is_tight = self.admission.is_tight();
        let turn = if is_tight { Some(self.turns.take(class).await) } else { None };
        tokio::task::yield_now().await;
        let first = poll_fn(|context| Poll::Ready(work.as_mut().poll(context))).await;
        drop(turn);
        match first {
            Poll::Ready(done) => done,
            Poll::Pending => work.await,
        }
    }

    /// Refuses, after a while if there are many.
    async fn refuse(&self, route: &Route, ask: &Ask, request: &Seen, reason: Reason) -> Response {
        route.shed(ask.class, reason).increment(1);
        if let Some(bot) = &request.bot {
            self.admission.counts().note_tenant(bot);
        }
        let now = self.admission.now();
        if let Some(pause) = self.pace.pause(now) {
            // An answer that comes too late is none: the caller would be gone, and come again.
            let left = ask.deadline.map(|deadline| deadline.saturating_sub(now) * 2 / 3);
            let pause = left.map_or(pause, |left| left.min(pause));
            let held = Held::new(&self.pace.held);
            if held.is_some() {
                tokio::time::sleep(pause).await;
            }
        }
        self.shed_seconds.record(request.begun.elapsed().as_secs_f64());
        let mut response = Response::new(Body::from(self.refusals[reason as usize].clone()));
        *response.status_mut() = status(reason);
        let headers = response.headers_mut();
        headers.insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_JSON));
        headers.insert(SHED_REASON, HeaderValue::from_static(reason.as_str()));
        if reason != Reason::Deadline {
            headers.insert(header::RETRY_AFTER, self.pace.retry_after().into());
        }
        response
    }
}

/// What is known of a request before it is let in.
struct Seen {
    begun: Instant,
    /// As the path has it.
    bot: Option<Box<str>>,
}

/// Lets requests in.
pub(super) async fn admit(State(door): State<Arc<Door>>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = door.routes.find(request.method(), request.extensions());
    let (class, deadline) = match (class(route, request.headers()), deadline(request.headers())) {
        (Ok(class), Ok(deadline)) => (class, deadline),
        (Err(problem), _) | (_, Err(problem)) => return problem.into(),
    };
    let ask = Ask {
        class,
        operation: route.operation,
        continues: door.cursors.continues(request.uri()),
        caller: caller(&request),
        deadline: deadline.map(|within| door.admission.now() + within),
    };
    let permit = match let_in(&door, &ask).await {
        Ok(permit) => permit,
        Err(reason) => {
            let seen = Seen { begun, bot: bot_of(request.uri()).map(Into::into) };
            // It may be held back: its memory is not.
            drop((request, next));
            return door.refuse(route, &ask, &seen, reason).await;
        }
    };
    let (permit, request) = match with_body(&door, &ask, route, permit, request).await {
        Ok(both) => both,
        Err(Turned::Away(problem)) => return (*problem).into(),
        Err(Turned::Shed(reason, bot)) => {
            return door.refuse(route, &ask, &Seen { begun, bot }, reason).await;
        }
    };
    let work = pin!(async {
        match deadline {
            None => Ok(next.run(request).await),
            Some(within) => {
                let until = begun + within;
                Within::new(until, deadline::until(until, next.run(request))).await
            }
        }
    });
    let answered = if class == Class::P0 { work.await } else { door.begin(class, work).await };
    if let Ok(response) = answered {
        return hold(permit, response);
    }
    drop(permit);
    door.admission.refused(class, Reason::Deadline);
    route.shed(class, Reason::Deadline).increment(1);
    let detail = "the deadline passed while this was done; how far it came is not known";
    let reason = HeaderValue::from_static(Reason::Deadline.as_str());
    Problem::new(Kind::Deadline, detail).header(SHED_REASON, reason).into()
}

async fn let_in(door: &Door, ask: &Ask) -> Result<Permit, Reason> {
    match door.admission.ask(ask) {
        Answer::Begin(permit) => Ok(permit),
        Answer::Wait(place) => place.wait().await,
        Answer::Shed(reason) => Err(reason),
    }
}

enum Turned {
    Away(Box<Problem>),
    Shed(Reason, Option<Box<str>>),
}

/// The request with its whole body. What is not there at once is waited for without a place.
async fn with_body(
    door: &Door,
    ask: &Ask,
    route: &Route,
    permit: Permit,
    request: Request,
) -> Result<(Permit, Request), Turned> {
    if request.body().is_end_stream() {
        return Ok((permit, request));
    }
    let (parts, body) = request.into_parts();
    let away = |problem| Turned::Away(Box::new(problem));
    let mut reading = Box::pin(extract::collect(&parts.headers, body, route.body_max));
    if let Ok(read) = tokio::time::timeout(BODY_AT_ONCE, &mut reading).await {
        let bytes = read.map_err(away)?;
        drop(reading);
        return Ok((permit.restarted(), Request::from_parts(parts, Body::from(bytes))));
    }
    drop(permit);
    let Ok(_slow) = door.slow_bodies.try_acquire() else {
        return Err(Turned::Shed(Reason::Capacity, bot_of(&parts.uri).map(Into::into)));
    };
    let bytes = reading.await.map_err(away)?;
    match let_in(door, ask).await {
        Ok(permit) => Ok((permit, Request::from_parts(parts, Body::from(bytes)))),
        Err(reason) => Err(Turned::Shed(reason, bot_of(&parts.uri).map(Into::into))),
    }
}

/// The class of a request: its route's, or a lower one that it wants.
fn class(route: &Route, headers: &HeaderMap) -> Result<Class, Problem> {
    let Some(wanted) = headers.get(&PRIORITY) else { return Ok(route.class) };
    let known = Class::ALL.into_iter().find(|class| wanted.as_bytes() == class.as_str().as_bytes());
    let detail = "write p1, p2 or p3; it can lower the class of a request, not raise it";
    known.map(|class| class.max(route.class)).ok_or_else(|| Problem::field("x-priority", detail))
}

/// How much time is left for a request.
fn deadline(headers: &HeaderMap) -> Result<Option<Duration>, Problem> {
    let Some(value) = headers.get(&DEADLINE) else { return Ok(None) };
    let ms = value.to_str().ok().and_then(|text| text.parse().ok());
    let ms = ms.filter(|ms| *ms <= DEADLINE_MAX_MS).ok_or_else(|| {
        let detail = format!("write whole milliseconds from now, 0 to {DEADLINE_MAX_MS}");
        Problem::field("x-deadline-ms", detail)
    })?;
    Ok(Some(Duration::from_millis(ms)))
}

/// The bot that a path or query names, as it is written there.
fn bot_of(uri: &Uri) -> Option<&str> {
    let Some((_, rest)) = uri.path().split_once("/bots/") else {
        return uri.query()?.split('&').find_map(|pair| pair.strip_prefix("bot="));
    };
    rest.split('/').next().filter(|bot| !bot.is_empty())
}

/// Who asks, as a number: whoever sends this token, or comes from this address, for this bot. Nobody
/// can use up what is another's without its token.
fn caller(request: &Request) -> u64 {
    let mut hasher = FxHasher::default();
    match request.headers().get(header::AUTHORIZATION) {
        Some(token) => token.as_bytes().hash(&mut hasher),
        None => {
            if let Some(Peer(peer)) = request.extensions().get() {
                peer.hash(&mut hasher);
            }
        }
    }
    bot_of(request.uri()).hash(&mut hasher);
    hasher.finish().max(1)
}

/// Counts how long it took when the head is there; a body that is made while it is sent holds the
/// place until it ends.
fn hold(permit: Permit, response: Response) -> Response {
    let unhurried = response.extensions().get::<Unhurried>().is_some();
    if unhurried || response.body().size_hint().exact().is_some() {
        permit.answered();
        return response;
    }
    response.map(|body| Body::new(HeldBody { body, _permit: permit }))
}

/// Marks an answer that goes on for minutes and mostly rests: it takes no place from others. Whoever
/// gives such answers bounds them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unhurried;

struct HeldBody {
    body: Body,
    _permit: Permit,
}

impl hyper::body::Body for HeldBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        Pin::new(&mut self.body).poll_frame(context)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The deadline passed.
struct Late;

/// A future that is not polled any more once its deadline passed, so that it begins nothing new.
struct Within<F> {
    deadline: Pin<Box<tokio::time::Sleep>>,
    inner: Pin<Box<F>>,
}

impl<F> Within<F> {
    fn new(deadline: Instant, inner: F) -> Self {
        Self { deadline: Box::pin(tokio::time::sleep_until(deadline)), inner: Box::pin(inner) }
    }
}

impl<F: Future> Future for Within<F> {
    type Output = Result<F::Output, Late>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        if Instant::now() >= self.deadline.deadline() {
            return Poll::Ready(Err(Late));
        }
        if let Poll::Ready(output) = self.inner.as_mut().poll(context) {
            return Poll::Ready(Ok(output));
        }
        self.deadline.as_mut().poll(context).map(|()| Err(Late))
    }
}

/// Counts refusals, and says how long the next is held back.
#[derive(Debug, Default)]
struct Pace {
    /// The number of the period in the upper half, refusals in it in the lower.
    this: AtomicU64,
    /// Refusals of the period before.
    last: AtomicU64,
    held: AtomicUsize,
}

impl Pace {
    fn pause(&self, now: Duration) -> Option<Duration> {
        #[expect(clippy::cast_possible_truncation, reason = "wraps after years")]
        let period = (now.as_millis() / REFUSALS_PERIOD.as_millis()) as u32;
        let this = self.this.load(Ordering::Relaxed);
        let known = (this >> 32) as u32;
        if known == period {
            self.this.fetch_add(1, Ordering::Relaxed);
        } else {
            // Where two begin it at once, one of them is not counted.
            self.this.store(u64::from(period) << 32 | 1, Ordering::Relaxed);
            let gone = period.wrapping_sub(known) == 1;
            self.last.store(if gone { this & u64::from(u32::MAX) } else { 0 }, Ordering::Relaxed);
        }
        let many = self.last.load(Ordering::Relaxed).max(this & u64::from(u32::MAX));
        let beyond = many.checked_sub(FREE_REFUSALS)?;
        let pause = Duration::from_micros(beyond.saturating_mul(200));
        (!pause.is_zero()).then(|| pause.min(HELD_BACK))
    }

    /// When to come again, in seconds: the more are refused the later, and not all at once.
    fn retry_after(&self) -> u32 {
        let many = self.last.load(Ordering::Relaxed) / FREE_REFUSALS;
        jitter(u32::try_from(many).unwrap_or(u32::MAX).clamp(1, 10))
    }
}

/// 1 to `most` seconds.
fn jitter(most: u32) -> u32 {
    rand::rng().random_range(1..=most)
}

struct Held<'a>(&'a AtomicUsize);

impl<'a> Held<'a> {
    fn new(held: &'a AtomicUsize) -> Option<Self> {
        let guard = Self(held);
        (held.fetch_add(1, Ordering::Relaxed) < HELD_BACK_MAX).then_some(guard)
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::Relaxed);
    }
}

/// 429: the tenant; 503: this server; 504: the time.
fn status(reason: Reason) -> StatusCode {
    match reason {
        Reason::Share | Reason::Quota => StatusCode::TOO_MANY_REQUESTS,
        Reason::Deadline => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// The document of a refusal.
fn refusal(reason: Reason) -> Bytes {
    let (kind, detail) = match reason {
        Reason::Capacity | Reason::Wait | Reason::Displaced => {
            (Kind::Overloaded, "nothing was done: more requests come than can be answered in time")
        }
        Reason::Share => (
            Kind::Quota,
            "nothing was done: there is not room for all, and this caller asks for much more than the others",
        ),
        Reason::Quota => (Kind::Quota, "nothing was done: the quota is used up"),
        Reason::Deadline => {
            (Kind::Deadline, "nothing was done: less time is left than it takes (x-deadline-ms)")
        }
        Reason::Critical => (Kind::Overloaded, "nothing was done: too many of these at once"),
        Reason::Switch => {
            (Kind::Overloaded, "nothing was done: an operator switched off requests of this class")
        }
    };
    let problem = Problem::new(kind, detail);
    // Texts and numbers always encode.
    Bytes::from(serde_json::to_vec(&problem).unwrap_or_default())
}

impl From<Problem> for Response {
    fn from(problem: Problem) -> Self {
        axum::response::IntoResponse::into_response(problem)
    }
}
