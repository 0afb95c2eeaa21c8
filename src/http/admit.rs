//! Admission at the edge: who is let in, before anything is read or looked up.
//!
//! 1. The class of the route ([`routes`](super::routes)), which `x-priority` may lower, never raise.
//! 2. The deadline: `x-deadline-ms`, in milliseconds from now. Past it, or when less is left than the
//!    route usually takes, nothing is begun; a request that misses it is given up: 504. Without the
//!    header, the default of the class only bounds how long it may take.
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

use std::borrow::Cow;
use std::future::{Future, poll_fn};
use std::hash::{Hash as _, Hasher as _};
use std::net::IpAddr;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError, RwLock};
use std::task::{Context, Poll};
use std::time::Duration;

use ::metrics::Histogram;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::http::request::Parts;
use axum::http::{Extensions, HeaderMap, HeaderName, HeaderValue, StatusCode, Uri, header};
use axum::middleware::Next;
use axum::response::Response;
use hyper::body::{Body as _, Bytes};
use rand::Rng as _;
use rustc_hash::FxHasher;
use tokio::sync::Semaphore;
use tokio::time::Instant;

use super::auth::{Access, Caller};
use super::body::Keeping;
use super::extract;
use super::listen::{Peer, network};
use super::page::Cursors;
use super::problem::{Kind, PROBLEM_JSON, Problem};
use super::routes::{Route, Routes, Row};
use super::stopwatch::{Meters, Stopwatch};
use crate::admission::quota::{Exceeded, Quota, Quotas, Taken};
use crate::admission::turns::Turns;
use crate::admission::{Admission, Answer, Ask, Class, Permit, Reason, ShedCounts};
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
/// A request takes a place for each of so many bytes of its body, begun or full: about sixty events.
const BYTES_OF_A_PLACE: u64 = 16 << 10;
/// Bodies that are waited for outside, at once.
const SLOW_BODIES: usize = 512;
/// Refusals in a period that nobody has to pay for.
const FREE_REFUSALS: u64 = 50;
const REFUSALS_PERIOD: Duration = Duration::from_millis(100);
/// Most bots of a body that a refusal is counted for.
const NAMED_MAX: usize = 16;
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
    /// Per class, how long a request may take that brings no deadline, µs; 0: any time.
    deadlines: [AtomicU64; 4],
    /// Who has which token, to tell whose requests are refused.
    access: OnceLock<Arc<Access>>,
}

/// The quotas, and what is used of them.
struct UsedQuotas {
    settings: RwLock<QuotaSettings>,
    bots: Arc<Quotas>,
    tokens: Arc<Quotas>,
    /// Of tokens that everybody may know, and of their addresses.
    public: Arc<Quotas>,
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
            public: Arc::default(),
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
            deadlines: Default::default(),
            access: OnceLock::new(),
        }
    }

    /// Tells whose tokens there are, once.
    pub(super) fn know(&self, access: &Arc<Access>) {
        let _ = self.access.set(Arc::clone(access));
    }

    /// The quotas that hold.
    pub(super) fn quotas(&self) -> QuotaSettings {
        *self.quotas.settings.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes how long requests may take that bring no deadline, per class.
    pub(crate) fn set_deadlines(&self, deadlines: [Option<Duration>; 4]) {
        for (deadline, new) in self.deadlines.iter().zip(deadlines) {
            let micros = new.map_or(0, |new| u64::try_from(new.as_micros()).unwrap_or(u64::MAX));
            deadline.store(micros, Ordering::Relaxed);
        }
    }

    /// How long a request of a class may take that brings no deadline.
    pub(super) fn deadline(&self, class: Class) -> Option<Duration> {
        let micros = self.deadlines[class as usize].load(Ordering::Relaxed);
        (micros > 0).then(|| Duration::from_micros(micros))
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
        let settings = self.quotas();
        if settings == QuotaSettings::default() {
            return Ok([None, None]);
        }
        let now = self.admission.now();
        let of_token = token.map(|token| self.quotas.tokens.take(token, 1, settings.token, now));
        let route = self.routes.find(request.method(), request.extensions());
        let bot = bot_of(request.uri()).map(decoded);
        let named = bot.as_deref();
        let whose = Whose { token, bots: named.as_slice(), ..Whose::of(request.extensions()) };
        let of_token = self.judge(of_token, "token", route, &whose)?;
        let of_bot = named.map(|bot| self.quotas.bots.take(bot, 1, settings.bot, now));
        Ok([of_token, self.judge(of_bot, "bot", route, &whose)?])
    }

    /// Charges a bot with `n` events.
    pub(super) fn charge_bot(
        &self,
        bot: &BotId,
        n: u32,
        parts: &Parts,
    ) -> Result<Option<Taken>, Problem> {
        let quota = self.quotas().bot;
        let of_bot = self.quotas.bots.take(bot.as_str(), n, quota, self.admission.now());
        let route = self.routes.find(&parts.method, &parts.extensions);
        let caller = parts.extensions.get::<Caller>().filter(|caller| caller.has_token());
        let (token, bots) = (caller.map(Caller::name), &[bot.as_str()][..]);
        let whose = Whose { token, bots, ..Whose::of(&parts.extensions) };
        self.judge(Some(of_bot), "bot", route, &whose)
    }

    /// Charges the bot of a request that may name it in the body, once the body is read. A bot that
    /// the path or query names was charged before.
    pub(super) fn charge_named(
        &self,
        bot: &BotId,
        parts: &Parts,
    ) -> Result<Option<Taken>, Problem> {
        if bot_of(&parts.uri).is_some() {
            return Ok(None);
        }
        self.charge_bot(bot, 1, parts)
    }

    /// Charges a token that everybody may know: by the address, and as a whole. These are bounds even
    /// while there is room for more.
    pub(super) fn charge_public(
        &self,
        token: &str,
        [of_address, of_all]: [Quota; 2],
        request: &Request,
    ) -> Result<(), Problem> {
        let now = self.admission.now();
        let route = self.routes.find(request.method(), request.extensions());
        let bot = bot_of(request.uri()).map(decoded);
        let named = bot.as_deref();
        let whose =
            Whose { token: Some(token), bots: named.as_slice(), ..Whose::of(request.extensions()) };
        let address = whose.address.map(|address| format!("{token}\n{address}"));
        let charged = match address {
            Some(address) => self.quotas.public.take(&address, 1, of_address, now).map(drop),
            None => Ok(()),
        };
        let charge_all = || self.quotas.public.take(token, 1, of_all, now).map(drop);
        let charged = charged.and_then(|()| charge_all());
        charged.map_err(|exceeded| self.over_quota("token", route, &whose, exceeded))
    }

    /// Over its quota, one is served while there is room for all.
    fn judge(
        &self,
        taken: Option<Result<Option<Taken>, Exceeded>>,
        what: &str,
        route: &Route,
        whose: &Whose<'_>,
    ) -> Result<Option<Taken>, Problem> {
        match taken.transpose() {
            Ok(taken) => Ok(taken.flatten()),
            Err(_) if !self.admission.is_tight() => Ok(None),
            Err(exceeded) => Err(self.over_quota(what, route, whose, exceeded)),
        }
    }

    /// Counts a refusal, and says when to come again.
    fn over_quota(
        &self,
        what: &str,
        route: &Route,
        whose: &Whose<'_>,
        Exceeded { retry_after }: Exceeded,
    ) -> Problem {
        route.shed(route.class, Reason::Quota).increment(1);
        self.admission.refused(route.class, Reason::Quota);
        whose.note(self.admission.counts(), Reason::Quota);
        let detail = format!("the quota of this {what} is used up; nothing was done");
        let seconds = u32::try_from(retry_after.as_secs()).unwrap_or(u32::MAX);
        let reason = HeaderValue::from_static(Reason::Quota.as_str());
        let problem = Problem::new(Kind::Quota, detail).header(SHED_REASON, reason);
        problem.retry_after(seconds.saturating_add(jitter(1)))
    }

    /// Begins what was let in. Under load that is done by as many at once as there are processors,
    /// each up to where it waits for the first time; and before each, the runtime looks for what
    /// arrived. So a request that needs the processor for long delays the judgement of others by
    /// itself alone, not by all that were let in before it; and a higher class does not wait for
    /// the lower ones that were let in before it.
    ///
    /// `waited`: how long it waited for its place.
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

    /// Refuses, after a while if there are many.
    async fn refuse(
        &self,
        route: &Route,
        ask: &Ask,
        request: &Seen<'_>,
        reason: Reason,
    ) -> Response {
        route.shed(ask.class, reason).increment(1);
        request.note(self.admission.counts(), reason);
        if !request.waited.is_zero() {
            self.admission.waited(ask.class, request.waited);
        }
        if let Some(watch) = &request.watch {
            watch.measure(|| Meters { whole: self.shed_seconds.clone(), answer: None });
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

/// Whose a request is.
#[derive(Debug, Clone, Copy, Default)]
struct Whose<'a> {
    token: Option<&'a str>,
    address: Option<IpAddr>,
    bots: &'a [&'a str],
}

impl Whose<'_> {
    /// Where it comes from, and nothing else yet.
    fn of(extensions: &Extensions) -> Self {
        let address = extensions.get().map(|Peer(address)| network(*address));
        Self { address, ..Self::default() }
    }

    /// Counts a refusal for each that it is of.
    fn note(&self, counts: &ShedCounts, reason: Reason) {
        for bot in self.bots {
            counts.bots.note(*bot, reason);
        }
        if let Some(token) = self.token {
            counts.tokens.note(token, reason);
        }
        if let Some(address) = &self.address {
            counts.addresses.note(address, reason);
        }
    }
}

/// What is known of a request without its memory.
struct Seen<'a> {
    watch: Option<Stopwatch>,
    waited: Duration,
    /// Whose token it seems to have.
    claimed: Option<&'a Caller>,
    address: Option<IpAddr>,
    uri: Uri,
    /// The bots that its body names, once that was read.
    named: NamedBots,
}

impl Seen<'_> {
    fn note(&self, counts: &ShedCounts, reason: Reason) {
        let named = self.named.0.lock().unwrap_or_else(PoisonError::into_inner);
        let of_uri = bot_of(&self.uri).map(decoded);
        let mut bots: Vec<&str> = named.iter().map(|bot| &**bot).collect();
        bots.extend(of_uri.as_deref().filter(|bot| !bots.contains(bot)));
        let token = self.claimed.map(Caller::name);
        Whose { token, address: self.address, bots: &bots }.note(counts, reason);
    }
}

/// The bots that the body of a request names, as whoever reads it tells.
#[derive(Debug, Clone, Default)]
pub(super) struct NamedBots(Arc<Mutex<Vec<Box<str>>>>);

impl NamedBots {
    /// Notes a bot in a request that may be refused later.
    pub(super) fn note(extensions: &Extensions, bot: &str) {
        let Some(Self(named)) = extensions.get() else { return };
        let mut named = named.lock().unwrap_or_else(PoisonError::into_inner);
        if named.len() < NAMED_MAX && !named.iter().any(|known| **known == *bot) {
            named.push(bot.into());
        }
    }
}

/// Lets requests in.
pub(super) async fn admit(State(door): State<Arc<Door>>, request: Request, next: Next) -> Response {
    let begun = Instant::now();
    let route = door.routes.find(request.method(), request.extensions());
    let mut seen = Seen {
        watch: request.extensions().get::<Stopwatch>().cloned(),
        waited: Duration::ZERO,
        claimed: door.access.get().and_then(|access| access.claimed(request.headers())),
        address: Whose::of(request.extensions()).address,
        uri: request.uri().clone(),
        named: NamedBots::default(),
    };
    let (class, deadline) = match (class(route, request.headers()), deadline(request.headers())) {
        (Ok(class), Ok(deadline)) => (class, deadline),
        (Err(problem), _) | (_, Err(problem)) => {
            return route.answered(seen.watch.as_ref(), problem.into());
        }
    };
    let class = seen.claimed.map_or(class, |caller| caller.class(class));
    let ask = Ask {
        class,
        operation: route.operation,
        continues: door.cursors.continues(request.uri()),
        caller: caller(&request, seen.claimed),
        deadline: deadline.map(|within| door.admission.now() + within),
        places: places(extract::announced(request.headers()).unwrap_or_default()),
    };
    // A default is no wish of the caller: it cuts what takes too long, and nothing is refused for it.
    let within = deadline.or_else(|| door.deadline(class));
    let permit = match let_in(&door, &ask, &mut seen.waited).await {
        Ok(permit) => permit,
        Err(reason) => {
            // It may be held back: its memory is not.
            drop((request, next));
            return door.refuse(route, &ask, &seen, reason).await;
        }
    };
    let (permit, request) = match with_body(&door, &ask, route, permit, request, &mut seen).await {
        Ok(both) => both,
        Err(Turned::Away(problem)) => {
            return route.answered(seen.watch.as_ref(), (*problem).into());
        }
        Err(Turned::Shed(reason)) => return door.refuse(route, &ask, &seen, reason).await,
    };
    let work = pin!(async {
        match within {
            None => Ok(next.run(request).await),
            Some(within) => {
                let until = begun + within;
                Within::new(until, deadline::until(until, next.run(request))).await
            }
        }
    });
    let answered =
        if class == Class::P0 { work.await } else { door.begin(class, seen.waited, work).await };
    if let Ok(response) = answered {
        return hold(permit, response);
    }
    drop(permit);
    door.admission.refused(class, Reason::Deadline);
    route.shed(class, Reason::Deadline).increment(1);
    seen.note(door.admission.counts(), Reason::Deadline);
    let detail = "the deadline passed while this was done (x-deadline-ms, or else admission.p1_deadline, p2_deadline, p3_deadline); how far it came is not known";
    let reason = HeaderValue::from_static(Reason::Deadline.as_str());
    let cut = Problem::new(Kind::Deadline, detail).header(SHED_REASON, reason);
    route.answered(seen.watch.as_ref(), cut.into())
}

/// Adds to `waited` how long it had to wait.
async fn let_in(door: &Door, ask: &Ask, waited: &mut Duration) -> Result<Permit, Reason> {
    match door.admission.ask(ask) {
        Answer::Begin(permit) => Ok(permit),
        Answer::Wait(place) => {
            let since = Instant::now();
            let told = place.wait().await;
            *waited += since.elapsed();
            told
        }
        Answer::Shed(reason) => Err(reason),
    }
}

enum Turned {
    Away(Box<Problem>),
    Shed(Reason),
}

/// The request with its whole body. What is not there at once is waited for without a place.
async fn with_body(
    door: &Door,
    ask: &Ask,
    route: &Route,
    mut permit: Permit,
    request: Request,
    seen: &mut Seen<'_>,
) -> Result<(Permit, Request), Turned> {
    if request.body().is_end_stream() {
        return Ok((permit, request));
    }
    let (mut parts, body) = request.into_parts();
    parts.extensions.insert(seen.named.clone());
    let away = |problem| Turned::Away(Box::new(problem));
    let since = Instant::now();
    let mut reading = Box::pin(extract::collect(&parts.headers, body, route.body_max));
    if let Ok(read) = tokio::time::timeout(BODY_AT_ONCE, &mut reading).await {
        let bytes = read.map_err(away)?;
        table::http_body(route.template).record(since.elapsed().as_secs_f64());
        drop(reading);
        // Its size may not have been announced.
        permit.grow(places(bytes.len() as u64));
        return Ok((permit.restarted(), Request::from_parts(parts, Body::from(bytes))));
    }
    drop(permit);
    let Ok(_slow) = door.slow_bodies.try_acquire() else {
        return Err(Turned::Shed(Reason::Capacity));
    };
    let bytes = reading.await.map_err(away)?;
    table::http_body(route.template).record(since.elapsed().as_secs_f64());
    let ask = Ask { places: places(bytes.len() as u64), ..*ask };
    match let_in(door, &ask, &mut seen.waited).await {
        Ok(permit) => Ok((permit, Request::from_parts(parts, Body::from(bytes)))),
        Err(reason) => Err(Turned::Shed(reason)),
    }
}

/// As how many requests one with such a body counts.
fn places(bytes: u64) -> usize {
    usize::try_from(bytes.div_ceil(BYTES_OF_A_PLACE)).unwrap_or(usize::MAX).max(1)
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

/// A bot as it is called, of what a path or query has.
fn decoded(bot: &str) -> Cow<'_, str> {
    if !bot.contains('%') {
        return bot.into();
    }
    let bytes = extract::percent_decoded(bot.as_bytes());
    String::from_utf8_lossy(&bytes).into_owned().into()
}

/// Who asks, as a number: whoever sends this token, or comes from this address, for this bot. Nobody
/// can use up what is another's without its token. A token that everybody may know is no caller:
/// each address with it is one.
fn caller(request: &Request, claimed: Option<&Caller>) -> u64 {
    let mut hasher = FxHasher::default();
    let token = request.headers().get(header::AUTHORIZATION);
    if let Some(token) = token {
        token.as_bytes().hash(&mut hasher);
    }
    if let Some(Peer(peer)) = request.extensions().get()
        && (token.is_none() || claimed.is_some_and(Caller::is_public))
    {
        network(*peer).hash(&mut hasher);
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
    response.map(|body| Body::new(Keeping::new(body, permit)))
}

/// Marks an answer that goes on for minutes and mostly rests: it takes no place from others. Whoever
/// gives such answers bounds them.
#[derive(Debug, Clone, Copy)]
pub(super) struct Unhurried;

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
