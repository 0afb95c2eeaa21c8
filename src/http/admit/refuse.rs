//! Refusals: the answer, and its delay.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

use axum::http::{HeaderValue, StatusCode, header};
use axum::response::{IntoResponse as _, Response};
use hyper::body::Bytes;
use rand::Rng as _;

use super::super::pages;
use super::super::problem::{Kind, PROBLEM_JSON, Problem};
use super::super::routes::Route;
use super::super::stopwatch::Meters;
use super::{AdmissionGate, SHED_REASON, Seen};
use crate::admission::{Reason, Request as AdmissionRequest};

/// Number of refusals per period that are not delayed.
const FREE_REFUSALS: u64 = 50;
const REFUSALS_PERIOD: Duration = Duration::from_millis(100);
/// Maximum delay of a refusal, and maximum number of delayed refusals.
const HELD_BACK: Duration = Duration::from_millis(100);
const HELD_BACK_MAX: usize = 4_096;

impl AdmissionGate {
    /// Refuses, with a delay if there are many refusals.
    pub(super) async fn refuse(
        &self,
        route: &Route,
        ask: &AdmissionRequest,
        request: &Seen,
        reason: Reason,
    ) -> Response {
        route.shed(ask.class, reason).increment(1);
        request.note(self.admission.counts(), reason);
        if !request.waited.is_zero() {
            self.admission.waited(ask.class, request.waited);
        }
        if let Some(watch) = &request.watch {
            watch.measure(|| {
                let whole = self.shed_seconds.clone();
                Meters { route: None, whole, answer: None }
            });
        }
        let now = self.admission.now();
        if let Some(pause) = self.pace.pause(now) {
            // A refusal after the deadline is useless: by then the caller has given up and retries.
            let left = ask.deadline.map(|deadline| deadline.saturating_sub(now) * 2 / 3);
            let pause = left.map_or(pause, |left| left.min(pause));
            let held = Held::new(&self.pace.held);
            if held.is_some() {
                tokio::time::sleep(pause).await;
            }
        }
        let Refusal { problem, page } = &self.refusals[reason as usize];
        let mut response = if request.wants_page {
            pages::framed(page.clone())
        } else {
            ([(header::CONTENT_TYPE, PROBLEM_JSON)], problem.clone()).into_response()
        };
        *response.status_mut() = status(reason);
        let headers = response.headers_mut();
        headers.insert(SHED_REASON, HeaderValue::from_static(reason.as_str()));
        if reason != Reason::Deadline {
            headers.insert(header::RETRY_AFTER, self.pace.retry_after().into());
        }
        response
    }
}

/// Counts refusals, and determines the delay of the next one.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// The number of the period in the upper half, its refusals in the lower half.
    this: AtomicU64,
    /// Refusals in the previous period.
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
            // If two threads start the period concurrently, one of the refusals is not counted.
            self.this.store(u64::from(period) << 32 | 1, Ordering::Relaxed);
            let gone = period.wrapping_sub(known) == 1;
            self.last.store(if gone { this & u64::from(u32::MAX) } else { 0 }, Ordering::Relaxed);
        }
        let many = self.last.load(Ordering::Relaxed).max(this & u64::from(u32::MAX));
        let beyond = many.checked_sub(FREE_REFUSALS)?;
        let pause = Duration::from_micros(beyond.saturating_mul(200));
        (!pause.is_zero()).then(|| pause.min(HELD_BACK))
    }

    /// The time until a retry, in seconds: longer with more refusals, and random to spread the
    /// retries.
    fn retry_after(&self) -> u32 {
        let many = self.last.load(Ordering::Relaxed) / FREE_REFUSALS;
        jitter(u32::try_from(many).unwrap_or(u32::MAX).clamp(1, 10))
    }
}

/// A random number from 1 to `most`.
pub(super) fn jitter(most: u32) -> u32 {
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

/// The status of a refusal. 429: a limit of the caller; 503: overload of this server; 504: the
/// deadline.
fn status(reason: Reason) -> StatusCode {
    match reason {
        Reason::Share | Reason::Quota | Reason::Bus | Reason::Unread => {
            StatusCode::TOO_MANY_REQUESTS
        }
        Reason::Deadline => StatusCode::GATEWAY_TIMEOUT,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    }
}

/// A refusal, encoded in advance: as a document, and as a page for people with a browser.
pub(super) struct Refusal {
    problem: Bytes,
    page: Bytes,
}

impl Refusal {
    pub(super) fn new(reason: Reason) -> Self {
        let problem = explanation(reason);
        let page = pages::page_of(&problem);
        // Strings and numbers always serialise.
        let problem = Bytes::from(serde_json::to_vec(&problem).unwrap_or_default());
        Self { problem, page }
    }
}

fn explanation(reason: Reason) -> Problem {
    let (kind, detail) = match reason {
        Reason::Capacity | Reason::Wait | Reason::Displaced => (
            Kind::Overloaded,
            "nothing was done: the server is overloaded; retry later, or call another process",
        ),
        Reason::Share => (
            Kind::Quota,
            "nothing was done: the server is overloaded, and this caller sends more than its fair share; send fewer concurrent requests",
        ),
        Reason::Quota => (Kind::Quota, "nothing was done: the quota is used up; retry later"),
        Reason::Deadline => (
            Kind::Deadline,
            "nothing was done: the request usually takes longer than x-deadline-ms allows; send a longer deadline",
        ),
        Reason::Bus => {
            (Kind::Quota, "nothing was stored: too many events of this sender are not copied yet")
        }
        Reason::Unread => (
            Kind::Quota,
            "nothing was done: this caller does not read its answers, and too much of them is in memory; read each answer, or close its connection, and retry",
        ),
        Reason::Critical => {
            (Kind::Overloaded, "nothing was done: too many p0 requests are in flight; retry later")
        }
        Reason::Switch => {
            (Kind::Overloaded, "nothing was done: an operator switched off requests of this class")
        }
    };
    Problem::new(kind, detail)
}
