//! Sends requests at their due times, regardless of earlier answers, and measures from the due
//! time. So if the service stalls, all delayed requests show this as latency.
//!
//! One thread sends and one receives. Each connection has at most one request in flight. When all
//! connections are busy, due requests wait, which counts as latency too.

use std::collections::VecDeque;
use std::io::{self, ErrorKind};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc};
use std::thread::{self, Thread};
use std::time::{Duration, Instant};

use fairlane::clock::micros;
use fairlane::sandbox::waits;
use hdrhistogram::Histogram;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use super::answer::{Asked, Tally, whole};
use super::exact::Ledger;
use super::plan::{Requests, Schedule, What};
use crate::cpu;
use crate::error::BenchError;

/// Timeout of an answer.
const PATIENCE: Duration = Duration::from_secs(30);

/// The requests and their times.
#[derive(Debug)]
pub(super) struct Load {
    pub(super) address: SocketAddr,
    /// Number of connections. At most the number of requests per second, because the server closes
    /// idle ones.
    pub(super) connections: usize,
    pub(super) reads: Arc<Requests>,
    pub(super) views: Arc<Requests>,
    pub(super) schedule: Schedule,
    /// Number of views sent before.
    pub(super) first_view: usize,
    /// Requests that are due earlier are not measured.
    pub(super) warm_up: Duration,
    /// Counts the answers.
    pub(super) progress: Arc<AtomicU64>,
}

/// The results.
#[derive(Debug)]
pub(super) struct Outcome {
    /// From the due time to the answer of reads, µs.
    pub(super) reads: Histogram<u64>,
    /// The same for views.
    pub(super) views: Histogram<u64>,
    /// From the due time to sending, µs, as far as the sender itself was the cause.
    pub(super) late: Histogram<u64>,
    /// From the end of the warm-up to the last answer.
    pub(super) measured: Duration,
    /// Duration of the whole run.
    pub(super) took: Duration,
    /// Processor time of the sending and of the receiving thread.
    pub(super) cpu: Option<Duration>,
    /// The acknowledged views.
    pub(super) ledger: Ledger,
    /// Number of sent views.
    pub(super) sent_views: usize,
    /// Number of requests that were due while every connection was busy.
    pub(super) waited: u64,
    /// Number of answers without a total.
    pub(super) nulls: u64,
    /// Number of failed requests.
    pub(super) errors: u64,
    /// The answer to the first failed request.
    pub(super) first_error: Option<String>,
}

impl Load {
    /// Sends all requests and waits for the answers.
    ///
    /// # Cancel safety
    /// The threads end by themselves soon after.
    pub(super) async fn run(self) -> Result<Outcome, BenchError> {
        let stop = CancellationToken::new();
        let _stops = stop.clone().drop_guard();
        let done = tokio::task::spawn_blocking(move || self.run_here(&stop)).await;
        done.map_err(io::Error::from).and_then(|outcome| outcome).map_err(BenchError::Http)
    }

    fn run_here(self, stop: &CancellationToken) -> io::Result<Outcome> {
        let hall = Arc::new(Hall::new(&self));
        let (tell, told) = mpsc::channel();
        thread::scope(|scope| {
            // The end of the sender ends the receiver.
            let _stops = stop.clone().drop_guard();
            let (address, connections) = (self.address, self.connections);
            let receiver = {
                let hall = Arc::clone(&hall);
                scope.spawn(move || receive(&hall, address, connections, &tell, stop))
            };
            let Ok(lines) = told.recv() else {
                return Err(hall.failure());
            };
            let begun = cpu::of_this_thread();
            let sent = self.send(&hall, &lines, stop)?;
            hall.wait_for_all(lines.len());
            let ended = cpu::of_this_thread();
            let took = hall.origin.elapsed();
            stop.cancel();
            let answers = receiver.join().map_err(|_| io::Error::from(ErrorKind::Other))?;
            let mut tally = std::mem::replace(&mut *hall.tally(), Tally::new(0));
            for line in lines {
                if let Some(asked) = line.take() {
                    tally.lose(&asked, &self.views, "it was not answered");
                }
            }
            let own = ended.zip(begun).map(|(ended, begun)| ended.saturating_sub(begun));
            Ok(Outcome {
                cpu: own.zip(answers).map(|(sender, receiver)| sender + receiver),
                measured: tally.last.saturating_sub(self.warm_up),
                reads: tally.reads,
                views: tally.views,
                late: sent.late,
                took,
                ledger: tally.ledger,
                sent_views: sent.views,
                waited: sent.waited,
                nulls: tally.nulls,
                errors: tally.errors,
                first_error: tally.first_error,
            })
        })
    }

    fn send(&self, hall: &Hall, lines: &[Arc<Line>], stop: &CancellationToken) -> io::Result<Sent> {
        let mut sent = Sent { late: waits(), waited: 0, views: 0 };
        // When the sender last waited for a connection. It did not cause the delays until then.
        let mut released = Duration::ZERO;
        for ticket in self.schedule.clone() {
            if stop.is_cancelled() {
                return Err(hall.failure());
            }
            let early = ticket.due.saturating_sub(hall.origin.elapsed());
            if !early.is_zero() {
                thread::sleep(early);
            }
            let late = hall.origin.elapsed().saturating_sub(ticket.due.max(released));
            sent.late.saturating_record(micros(late).max(1));
            let number = if let Some(number) = hall.next() {
                number
            } else {
                sent.waited += 1;
                let number = hall.wait_for_one(stop)?;
                released = hall.origin.elapsed();
                number
            };
            let (bytes, what) = match ticket.what {
                What::Read(number) => (self.reads.get(number), ticket.what),
                What::View(number) => {
                    sent.views += 1;
                    let number = self.first_view + number;
                    (self.views.get(number), What::View(number))
                }
            };
            lines[number].ask(Asked { due: ticket.due, what }, bytes)?;
        }
        Ok(sent)
    }
}

struct Sent {
    late: Histogram<u64>,
    waited: u64,
    views: usize,
}

/// One connection.
struct Line {
    writer: OwnedWriteHalf,
    asked: Mutex<Option<Asked>>,
}

impl Line {
    fn ask(&self, asked: Asked, mut bytes: &[u8]) -> io::Result<()> {
        *self.asked.lock().unwrap_or_else(PoisonError::into_inner) = Some(asked);
        while !bytes.is_empty() {
            match self.writer.try_write(bytes) {
                Ok(written) => bytes = &bytes[written..],
                // Nothing else is in flight on this connection, so the socket accepts it soon.
                Err(error) if error.kind() == ErrorKind::WouldBlock => thread::yield_now(),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn take(&self) -> Option<Asked> {
        self.asked.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// The shared state of sender and receiver.
struct Hall {
    origin: Instant,
    warm_up: Duration,
    views: Arc<Requests>,
    progress: Arc<AtomicU64>,
    idle: Mutex<VecDeque<usize>>,
    tally: Mutex<Tally>,
    sender: Thread,
    /// Whether the sender waits for a connection.
    starved: AtomicBool,
    failure: Mutex<Option<io::Error>>,
}

impl Hall {
    fn new(load: &Load) -> Self {
        Self {
            origin: Instant::now(),
            warm_up: load.warm_up,
            views: Arc::clone(&load.views),
            progress: Arc::clone(&load.progress),
            idle: Mutex::new((0..load.connections).collect()),
            tally: Mutex::new(Tally::new(load.views.ads_end())),
            sender: thread::current(),
            starved: AtomicBool::new(false),
            failure: Mutex::default(),
        }
    }

    fn idle(&self) -> MutexGuard<'_, VecDeque<usize>> {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The connection that has been idle for longest.
    fn next(&self) -> Option<usize> {
        self.idle().pop_front()
    }

    fn tally(&self) -> MutexGuard<'_, Tally> {
        self.tally.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn fail(&self, error: io::Error) {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
    }

    /// Why it was stopped.
    fn failure(&self) -> io::Error {
        let failure = self.failure.lock().unwrap_or_else(PoisonError::into_inner).take();
        failure.unwrap_or_else(|| ErrorKind::Interrupted.into())
    }

    fn wait_for_one(&self, stop: &CancellationToken) -> io::Result<usize> {
        let since = Instant::now();
        // Set before the check, so that a connection that is returned meanwhile wakes the sender.
        self.starved.store(true, Ordering::SeqCst);
        loop {
            if let Some(number) = self.next() {
                self.starved.store(false, Ordering::SeqCst);
                return Ok(number);
            }
            if stop.is_cancelled() {
                return Err(self.failure());
            }
            if since.elapsed() > PATIENCE {
                return Err(ErrorKind::TimedOut.into());
            }
            thread::park_timeout(Duration::from_millis(100));
        }
    }

    /// Waits until nothing is in flight, with a time limit.
    fn wait_for_all(&self, connections: usize) {
        let since = Instant::now();
        while self.idle().len() < connections && since.elapsed() < PATIENCE {
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn answered(&self, number: usize, line: &Line, answer: &[u8]) {
        let now = self.origin.elapsed();
        if let Some(asked) = line.take() {
            self.tally().note(&asked, answer, now, asked.due >= self.warm_up, &self.views);
            self.progress.fetch_add(1, Ordering::Relaxed);
        }
        self.idle().push_back(number);
        if self.starved.load(Ordering::SeqCst) {
            self.sender.unpark();
        }
    }
}

/// Connects, hands the connections to the sender and reads answers until the stop. Returns the
/// processor time of this thread.
fn receive(
    hall: &Arc<Hall>,
    address: SocketAddr,
    connections: usize,
    tell: &mpsc::Sender<Vec<Arc<Line>>>,
    stop: &CancellationToken,
) -> Option<Duration> {
    let work = async {
        let mut listening = JoinSet::new();
        let mut lines = Vec::with_capacity(connections);
        for number in 0..connections {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            let (reader, writer) = stream.into_split();
            let line = Arc::new(Line { writer, asked: Mutex::default() });
            lines.push(Arc::clone(&line));
            listening.spawn(listen(Arc::clone(hall), number, line, reader));
        }
        let _ = tell.send(lines);
        while let Some(ended) = listening.join_next().await {
            ended.map_err(io::Error::from).flatten()?;
        }
        Ok(())
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let ended = runtime.and_then(|runtime| {
        runtime.block_on(async {
            tokio::select! {
                biased;
                () = stop.cancelled() => Ok(()),
                ended = work => ended,
            }
        })
    });
    if let Err(error) = ended {
        hall.fail(error);
        stop.cancel();
        hall.sender.unpark();
    }
    cpu::of_this_thread()
}

/// Reads the answers of one connection until the server closes it.
async fn listen(
    hall: Arc<Hall>,
    number: usize,
    line: Arc<Line>,
    mut reader: OwnedReadHalf,
) -> io::Result<()> {
    let mut answer = Vec::with_capacity(16 << 10);
    loop {
        match whole(&answer)? {
            Some(length) => {
                hall.answered(number, &line, &answer[..length]);
                answer.drain(..length);
            }
            None => {
                if reader.read_buf(&mut answer).await? == 0 {
                    // The server closes idle connections after a while, which is not an error.
                    return match line.take() {
                        Some(_) => Err(ErrorKind::UnexpectedEof.into()),
                        None => Ok(()),
                    };
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Answers the requests of each connection, each after the time `after`.
    fn serve(listener: &std::net::TcpListener, after: Duration, answers: &'static [&'static str]) {
        use std::io::{Read as _, Write as _};
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            thread::spawn(move || {
                let (mut request, mut answers) = ([0; 4096], answers.iter().cycle());
                while stream.read(&mut request).is_ok_and(|length| length > 0) {
                    thread::sleep(after);
                    let (status, body) = answers.next().unwrap().split_once(' ').unwrap();
                    let length = body.len();
                    let answer =
                        format!("HTTP/1.1 {status} X\r\ncontent-length: {length}\r\n\r\n{body}");
                    let _ = stream.write_all(answer.as_bytes());
                }
            });
        }
    }

    async fn run(
        connections: usize,
        schedule: Schedule,
        after: Duration,
        answers: &'static [&'static str],
    ) -> Outcome {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        thread::spawn(move || serve(&listener, after, answers));
        let ads = super::super::plan::Ads::new(4, 2, 1.0);
        let mut random = rand::rng();
        let load = Load {
            address,
            connections,
            reads: Arc::new(Requests::reads(ads, "h", 10, (2, 1.0), &mut random)),
            views: Arc::new(Requests::first_views(ads, "h")),
            schedule,
            first_view: 0,
            warm_up: Duration::ZERO,
            progress: Arc::default(),
        };
        load.run().await.unwrap()
    }

    #[tokio::test]
    async fn the_latency_of_a_delayed_request_counts_from_its_planned_time() {
        let slow = Duration::from_millis(50);
        let apart = run(20, Schedule::steady(20, 0, 1), slow, &["200 {}"]).await;
        assert_eq!((apart.reads.len(), apart.views.len(), apart.waited), (20, 0, 0));
        assert!(apart.reads.min() >= 49_000, "{}", apart.reads.min());

        // All eight are due now, and the last waits for seven others.
        let at_once = run(1, Schedule::at_once(8), slow, &["200 {}"]).await;
        assert_eq!((at_once.views.len(), at_once.waited), (8, 7));
        assert!(at_once.views.max() >= 8 * 49_000, "{}", at_once.views.max());
        assert_eq!(at_once.sent_views, 8);
    }

    #[tokio::test]
    async fn acknowledged_refused_and_unknown_requests_are_told_apart() {
        let answers = &["200 {\"total\":1}", "200 {\"total\":null}", "400 bad", "503 away"];
        let outcome = run(1, Schedule::at_once(4), Duration::ZERO, answers).await;
        let counts: Vec<_> = (0..4).map(|ad| outcome.ledger.of(ad)).collect();
        assert_eq!(counts, [(1, 1), (1, 1), (0, 0), (0, 1)]);
        assert_eq!((outcome.nulls, outcome.errors), (1, 2));
        assert!(outcome.first_error.unwrap().contains("400"));
    }
}
