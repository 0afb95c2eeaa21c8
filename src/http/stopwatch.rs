//! The duration of a request for its client: from the first byte of its head to the last byte of
//! the answer.
//!
//! HTTP libraries report neither moment, so the connection does. A request starts when its first
//! byte is read after the previous answer. It ends when the operating system has taken the last
//! byte of its answer. The time includes the rest of the head, the wait for admission, the body,
//! the handler, and a client that reads slowly. A pipelined request, whose bytes arrive before the
//! previous answer, starts when its turn comes.
//!
//! If the client disconnects or stalls, its request ends with the connection. A streamed answer
//! ends with its head.
//!
//! A request is counted here too: with the status of its answer when the head is ready, with
//! [`LEFT`] if the connection ended while the request was handled, or with [`PANICKED`] if its
//! handler panicked.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use ::metrics::Histogram;
use axum::response::Response;
use tokio::time::Instant;

use super::admit::{Unhurried, Unread};
use super::body::Keeping;
use super::metrics::{http_answered, http_route};

/// The status code of a request whose connection ended while it was handled, as proxies count it.
const LEFT: u16 = 499;
/// The status code of a request whose handler panicked, which ends its connection.
const PANICKED: u16 = 500;

/// The times of one connection. Clones share them.
#[derive(Clone, Default)]
pub(super) struct Stopwatch(Arc<Mutex<State>>);

#[derive(Default)]
struct State {
    /// When the first byte arrived of a request whose head is still incomplete.
    first_byte: Option<Instant>,
    /// The request in flight.
    current: Option<Exchange>,
    /// Answered requests whose last bytes may not have left yet. There is more than one only with
    /// pipelining. The buffer of the connection bounds their number.
    leaving: Vec<Exchange>,
}

struct Exchange {
    began: Instant,
    /// When the head of the answer was ready.
    answered: Option<Instant>,
    meters: Option<Meters>,
    /// Counts the answer until it is read.
    unread: Option<Unread>,
}

/// The metrics of a request.
pub(super) struct Meters {
    /// The template of the route that it is counted for; `None`: it is not counted.
    pub(super) route: Option<String>,
    /// From the first byte of the request to the last byte of the answer.
    pub(super) whole: Histogram,
    /// From the head of the answer to its last byte.
    pub(super) answer: Option<Histogram>,
}

impl Meters {
    /// Those of the route with this template.
    pub(super) fn of(route: &str) -> Self {
        let times = http_route(route);
        Self { route: Some(route.to_owned()), whole: times.whole, answer: Some(times.answer) }
    }
}

impl Stopwatch {
    /// Notes that bytes were read.
    pub(super) fn read(&self) {
        let mut state = self.state();
        if state.current.is_none() && state.first_byte.is_none() {
            state.first_byte = Some(Instant::now());
        }
    }

    /// Notes that the head of a request is complete.
    pub(super) fn begin(&self) {
        let mut state = self.state();
        let began = state.first_byte.take().unwrap_or_else(Instant::now);
        state.current = Some(Exchange { began, answered: None, meters: None, unread: None });
    }

    /// Sets the metrics of the request in flight; the first call wins.
    pub(super) fn measure(&self, meters: impl FnOnce() -> Meters) {
        if let Some(exchange) = &mut self.state().current
            && exchange.meters.is_none()
        {
            exchange.meters = Some(meters());
        }
    }

    /// Keeps this until the answer of the request in flight is read.
    pub(super) fn keep(&self, unread: Unread) {
        if let Some(exchange) = &mut self.state().current {
            exchange.unread = Some(unread);
        }
    }

    /// Notes that the head of an answer is ready, and that its body follows.
    pub(super) fn answer(&self, response: Response) -> Response<Keeping<Option<Given>>> {
        if let Some(exchange) = &mut self.state().current {
            exchange.answered = Some(Instant::now());
            exchange.count(response.status().as_u16());
        }
        let is_endless = response.extensions().get::<Unhurried>().is_some();
        if is_endless {
            self.given();
        }
        let given = (!is_endless).then(|| Given(self.clone()));
        response.map(|body| Keeping::new(body, given))
    }

    /// Notes that all of the answer is in the buffer of the connection.
    fn given(&self) {
        let mut state = self.state();
        if let Some(exchange) = state.current.take() {
            state.leaving.push(exchange);
        }
    }

    /// Notes that the buffer of the connection is empty.
    pub(super) fn flushed(&self) {
        let mut state = self.state();
        let now = Instant::now();
        for exchange in state.leaving.drain(..) {
            exchange.end(now);
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Exchange {
    /// Counts the request; the first call wins.
    fn count(&mut self, code: u16) {
        if let Some(route) = self.meters.as_mut().and_then(|meters| meters.route.take()) {
            http_answered(route, code);
        }
    }

    fn end(mut self, now: Instant) {
        self.count(if std::thread::panicking() { PANICKED } else { LEFT });
        let Self { began, answered, meters, unread } = self;
        drop(unread);
        let Some(Meters { whole, answer, .. }) = meters else { return };
        whole.record((now - began).as_secs_f64());
        if let Some((answer, answered)) = answer.zip(answered) {
            answer.record((now - answered).as_secs_f64());
        }
    }
}

impl Drop for State {
    fn drop(&mut self) {
        let now = Instant::now();
        for exchange in self.leaving.drain(..).chain(self.current.take()) {
            exchange.end(now);
        }
    }
}

/// Kept with an answer body. Dropped when the connection has taken the whole body, or closes.
pub(super) struct Given(Stopwatch);

impl Drop for Given {
    fn drop(&mut self) {
        self.0.given();
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use ::metrics::HistogramFn;
    use axum::body::Body;

    use super::*;

    #[derive(Default)]
    struct Recorded(Mutex<Vec<f64>>);

    impl HistogramFn for Recorded {
        fn record(&self, value: f64) {
            self.0.lock().unwrap().push(value);
        }
    }

    #[derive(Default)]
    struct Times {
        whole: Arc<Recorded>,
        answer: Arc<Recorded>,
    }

    impl Times {
        fn meters(&self) -> Meters {
            Meters {
                route: None,
                whole: Histogram::from_arc(Arc::clone(&self.whole)),
                answer: Some(Histogram::from_arc(Arc::clone(&self.answer))),
            }
        }

        /// In whole milliseconds.
        fn of(recorded: &Recorded) -> Vec<u64> {
            let recorded = recorded.0.lock().unwrap();
            let ms = |s: &f64| Duration::from_secs_f64(*s).as_millis().try_into().unwrap();
            recorded.iter().map(ms).collect()
        }

        fn all(&self) -> (Vec<u64>, Vec<u64>) {
            (Self::of(&self.whole), Self::of(&self.answer))
        }
    }

    async fn pass(ms: u64) {
        tokio::time::advance(Duration::from_millis(ms)).await;
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_lasts_from_its_first_byte_to_the_last_byte_of_its_answer() {
        let (watch, times) = (Stopwatch::default(), Times::default());
        watch.read();
        pass(100).await; // a slow head
        watch.read();
        watch.begin();
        watch.measure(|| times.meters());
        pass(200).await; // a slow body
        watch.read();
        pass(400).await; // the handler
        let body = watch.answer(Response::new(Body::from("x")));
        watch.flushed();
        assert_eq!(times.all().0, Vec::<u64>::new(), "something of it is still here");
        drop(body);
        pass(800).await; // a slow reader
        watch.flushed();
        assert_eq!(times.all(), (vec![1_500], vec![800]));

        pass(5_000).await; // rest
        watch.flushed();
        watch.read();
        watch.begin();
        watch.measure(|| times.meters());
        drop(watch.answer(Response::new(Body::empty())));
        pass(1).await;
        watch.flushed();
        assert_eq!(times.all(), (vec![1_500, 1], vec![800, 1]), "rest counts for nothing");
    }

    #[tokio::test(start_paused = true)]
    async fn pipelined_requests_start_when_it_is_their_turn_and_end_when_the_buffer_is_empty() {
        let (watch, times) = (Stopwatch::default(), Times::default());
        watch.read();
        for _ in 0..2 {
            watch.begin();
            watch.measure(|| times.meters());
            pass(10).await;
            watch.read();
            drop(watch.answer(Response::new(Body::empty())));
        }
        pass(5).await;
        watch.flushed();
        assert_eq!(times.all(), (vec![25, 15], vec![15, 5]));
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_whose_client_leaves_lasts_until_then_and_a_live_page_until_its_head() {
        let (watch, times) = (Stopwatch::default(), Times::default());
        watch.read();
        watch.begin();
        watch.measure(|| times.meters());
        pass(30).await;
        drop(watch);
        assert_eq!(times.all(), (vec![30], vec![]));

        let (watch, times) = (Stopwatch::default(), Times::default());
        watch.read();
        watch.begin();
        watch.measure(|| times.meters());
        pass(7).await;
        let mut response = Response::new(Body::empty());
        response.extensions_mut().insert(Unhurried);
        let live = watch.answer(response);
        watch.flushed();
        pass(60_000).await;
        drop((live, watch));
        assert_eq!(times.all(), (vec![7], vec![0]));
    }
}
