//! The load generator: sends at the times of a schedule, regardless of the answers.
//!
//! Open loop: requests arrive as a Poisson process. Each uses its own connection while it lasts,
//! like independent clients. Latency counts from the scheduled time. A client gives up at its
//! deadline and closes the connection. A client without a free connection fails immediately. One
//! thread sends everything; beside a server of the bench, it is pinned to its own processor.

use std::cell::{Cell, RefCell};
use std::net::SocketAddr;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::sync::oneshot;
use tokio::task::LocalSet;
use tokio::time::Instant;

use super::outcome::{Outcome, Processor, histogram, quantile_ms};
use super::served::pin;
use super::server;
use crate::error::BenchError;

/// Maximum number of connections per class: those of a few clients with common pool sizes.
pub(super) const CONNECTIONS: [usize; 4] = [16, 256, 192, 64];
/// Number of tenants.
pub(super) const TENANTS: usize = 100;
/// The interval of the timeline.
pub(super) const TICK: Duration = Duration::from_millis(100);

/// A time of steady load.
#[derive(Debug, Clone, Copy)]
pub(super) struct Phase {
    pub(super) lasts: Duration,
    /// Requests per second of each class.
    pub(super) rates: [f64; 4],
}

/// The load to send.
#[derive(Debug, Clone)]
pub(super) struct Load {
    pub(super) address: SocketAddr,
    pub(super) phases: Vec<Phase>,
    /// Per class, the request of each tenant.
    pub(super) requests: [Vec<Vec<u8>>; 4],
    pub(super) deadline: Duration,
    /// Number of retries of a client.
    pub(super) retries: u32,
    /// The load of tenant 0, as a multiple of another tenant's load.
    pub(super) heavy: f64,
    /// Maximum number of connections per class.
    pub(super) connections: [usize; 4],
    pub(super) seed: u64,
}

/// Runs on its own thread, pinned to processor `core` if given.
async fn on_thread<T: Send + 'static>(
    core: Option<usize>,
    work: impl AsyncFnOnce() -> T + Send + 'static,
) -> Result<T, BenchError> {
    let (tell, told) = oneshot::channel();
    let run = move || {
        if let Some(core) = core {
            pin(core);
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let result = runtime.map(|runtime| LocalSet::new().block_on(&runtime, work()));
        let _ = tell.send(result);
    };
    std::thread::Builder::new().name("load".to_owned()).spawn(run)?;
    match told.await {
        Ok(result) => Ok(result?),
        Err(_) => Err(BenchError::stuck(Duration::ZERO, "the generator ended early".to_owned())),
    }
}

/// Sends a load.
pub(super) async fn send(core: usize, load: Load) -> Result<Outcome, BenchError> {
    let lookout = Lookout::start(1 - core)?;
    let mut outcome = on_thread(Some(core), async move || drive(load).await).await?;
    outcome.processor = lookout.end();
    Ok(outcome)
}

/// Sends a load to an unknown server, from any processor.
pub(super) async fn send_unpinned(load: Load) -> Result<Outcome, BenchError> {
    on_thread(None, async move || drive(load).await).await
}

/// Checks every millisecond whether the server's processor is available and how fast it is. Has
/// priority over other threads on that processor, so the machine causes its delays, not the server.
struct Lookout {
    stop: Arc<AtomicBool>,
    thread: std::thread::JoinHandle<Processor>,
}

impl Lookout {
    fn start(core: usize) -> Result<Self, BenchError> {
        const LOOK: Duration = Duration::from_millis(1);
        /// The longest wait that a busy server can cause.
        const USUAL: Duration = Duration::from_millis(5);
        /// Loop rounds of the measured work, which takes one or two hundredths of the processor.
        const ROUNDS: u64 = 500;
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let look = move || {
            pin(core);
            // Raises the priority of this thread. If that is not permitted, the measurement is
            // slightly less accurate.
            let _ = rustix::process::setpriority_process(None, -20);
            let (mut away, mut work, begun) = (Duration::ZERO, histogram(), Instant::now());
            while !stopped.load(Ordering::Relaxed) {
                let before = Instant::now();
                std::thread::sleep(LOOK);
                let late = before.elapsed().saturating_sub(LOOK);
                if late > USUAL {
                    away += late;
                }
                let before = Instant::now();
                std::hint::black_box(server::burn(ROUNDS));
                let nanos = before.elapsed().as_nanos();
                work.saturating_record(u64::try_from(nanos).unwrap_or(u64::MAX));
            }
            let away = away.as_secs_f64() / begun.elapsed().as_secs_f64();
            // The recorded unit is ns.
            Processor { away, work_us: quantile_ms(&work, 0.5) }
        };
        let thread = std::thread::Builder::new().name("lookout".to_owned()).spawn(look)?;
        Ok(Self { stop, thread })
    }

    fn end(self) -> Processor {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap_or_default()
    }
}

/// Measures the number of answers per second, and the state of the processor. Each of the clients
/// sends one request after the other.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
pub(super) async fn saturate(
    core: usize,
    address: SocketAddr,
    request: Vec<u8>,
    clients: usize,
    lasts: Duration,
) -> Result<(f64, Processor), BenchError> {
    let lookout = Lookout::start(1 - core)?;
    let rate = on_thread(Some(core), async move || {
        let (begun, count) = (Instant::now(), Rc::new(Cell::new(0_u64)));
        let warm = lasts / 4;
        let mut tasks = tokio::task::JoinSet::new();
        for _ in 0..clients {
            let (request, count) = (request.clone(), Rc::clone(&count));
            tasks.spawn_local(async move {
                let Ok(mut connection) = Connection::open(address).await else { return };
                while begun.elapsed() < warm + lasts {
                    if !matches!(connection.ask(&request).await, Ok(200)) {
                        return;
                    }
                    if begun.elapsed() >= warm {
                        count.set(count.get() + 1);
                    }
                }
            });
        }
        while tasks.join_next().await.is_some() {}
        count.get() as f64 / lasts.as_secs_f64()
    })
    .await?;
    Ok((rate, lookout.end()))
}

struct Sender {
    load: Load,
    idle: [RefCell<Vec<Connection>>; 4],
    open: [Cell<usize>; 4],
    outcome: RefCell<Outcome>,
    begun: Instant,
    under_way: Cell<usize>,
}

async fn drive(load: Load) -> Outcome {
    let mut random = SmallRng::seed_from_u64(load.seed);
    let phases = load.phases.clone();
    let sender = Rc::new(Sender {
        load,
        idle: Default::default(),
        open: Default::default(),
        outcome: RefCell::new(Outcome::new()),
        begun: Instant::now(),
        under_way: Cell::new(0),
    });
    let (mut begin, mut lag) = (sender.begun, histogram());
    for phase in phases {
        let end = begin + phase.lasts;
        let gap = |random: &mut SmallRng, rate: f64| {
            if rate <= 0.0 {
                return phase.lasts * 2;
            }
            Duration::from_secs_f64(-(1.0 - random.random::<f64>()).ln() / rate)
        };
        let mut next = phase.rates.map(|rate| begin + gap(&mut random, rate));
        while let Some((class, at)) = next.iter().copied().enumerate().min_by_key(|(_, at)| *at) {
            if at >= end {
                break;
            }
            next[class] = at + gap(&mut random, phase.rates[class]);
            let now = Instant::now();
            if at > now + Duration::from_millis(2) {
                tokio::time::sleep_until(at - Duration::from_millis(1)).await;
            }
            while Instant::now() < at {
                tokio::task::yield_now().await;
            }
            lag.saturating_record(micros(at.elapsed()));
            let tenant = tenant(&mut random, sender.load.heavy);
            tokio::task::spawn_local(request(
                Rc::clone(&sender),
                class,
                tenant,
                at,
                random.random(),
            ));
        }
        begin = end;
    }
    // All requests end by their deadlines.
    let patience = (sender.load.deadline + Duration::from_millis(200)) * (sender.load.retries + 1);
    let waited = Instant::now();
    while sender.under_way.get() > 0 && waited.elapsed() < patience {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    let mut outcome = sender.outcome.replace(Outcome::new());
    outcome.seconds = begin.duration_since(sender.begun).as_secs_f64();
    outcome.lag_p99_ms = quantile_ms(&lag, 0.99);
    outcome
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX).max(1)
}

/// A random tenant: tenant 0 has the weight `heavy`, all others 1.
fn tenant(random: &mut SmallRng, heavy: f64) -> usize {
    #[expect(clippy::cast_precision_loss, reason = "a hundred")]
    let others = (TENANTS - 1) as f64;
    if random.random_bool(heavy / (heavy + others)) { 0 } else { random.random_range(1..TENANTS) }
}

#[derive(Debug, Clone, Copy)]
enum End {
    Good(Duration),
    Shed,
    Late,
    Failed,
}

async fn request(sender: Rc<Sender>, class: usize, tenant: usize, at: Instant, seed: u64) {
    sender.under_way.set(sender.under_way.get() + 1);
    let mut begun = at;
    let mut end = End::Failed;
    for attempt in 0..=sender.load.retries {
        end = sender.attempt(class, tenant, begun).await;
        if matches!(end, End::Shed) {
            sender.tick(Instant::now()).1 += 1;
        }
        if matches!(end, End::Good(_)) || attempt == sender.load.retries {
            break;
        }
        // Impatient clients: they ignore `Retry-After`.
        let mut random = SmallRng::seed_from_u64(seed ^ u64::from(attempt));
        tokio::time::sleep(Duration::from_millis(random.random_range(5..50))).await;
        begun = Instant::now();
    }
    sender.note(class, tenant, at, end);
    sender.under_way.set(sender.under_way.get() - 1);
}

impl Sender {
    fn note(&self, class: usize, tenant: usize, at: Instant, end: End) {
        if matches!(end, End::Good(_)) {
            self.tick(at).0 += 1;
        }
        let mut outcome = self.outcome.borrow_mut();
        if tenant > 0 {
            outcome.others_offered += 1;
        }
        let tally = &mut outcome.classes[class];
        tally.offered += 1;
        match end {
            End::Good(took) => {
                tally.good += 1;
                tally.latency.saturating_record(micros(took));
                if tenant > 0 {
                    outcome.others.saturating_record(micros(took));
                }
            }
            End::Shed => tally.shed += 1,
            End::Late => tally.late += 1,
            End::Failed => tally.failed += 1,
        }
    }

    /// The entry of a moment in the timeline.
    fn tick(&self, at: Instant) -> std::cell::RefMut<'_, (u64, u64)> {
        let tick = (at - self.begun).as_millis() / TICK.as_millis();
        let tick = usize::try_from(tick).unwrap_or(usize::MAX).min(100_000);
        std::cell::RefMut::map(self.outcome.borrow_mut(), |outcome| {
            if outcome.timeline.len() <= tick {
                outcome.timeline.resize(tick + 1, (0, 0));
            }
            &mut outcome.timeline[tick]
        })
    }

    async fn attempt(&self, class: usize, tenant: usize, begun: Instant) -> End {
        let deadline = begun + self.load.deadline;
        match tokio::time::timeout_at(deadline, self.exchange(class, tenant)).await {
            Err(_) => End::Late,
            Ok(Some(200..=299)) => End::Good(begun.elapsed()),
            Ok(Some(429 | 503 | 504)) => End::Shed,
            Ok(_) => End::Failed,
        }
    }

    async fn exchange(&self, class: usize, tenant: usize) -> Option<u16> {
        let request = &self.load.requests[class][tenant];
        // An idle connection that the server closed is not a failure.
        for _ in 0..2 {
            let idle = self.idle[class].borrow_mut().pop();
            let is_new = idle.is_none();
            let place = match &idle {
                Some(_) => Place(&self.open[class]),
                None if self.open[class].get() >= self.load.connections[class] => return None,
                None => {
                    self.open[class].set(self.open[class].get() + 1);
                    Place(&self.open[class])
                }
            };
            let mut connection = match idle {
                Some(connection) => connection,
                None => Connection::open(self.load.address).await.ok()?,
            };
            match connection.ask(request).await {
                Ok(status) => {
                    if !connection.is_closing {
                        std::mem::forget(place);
                        self.idle[class].borrow_mut().push(connection);
                    }
                    return Some(status);
                }
                Err(_) if is_new => return None,
                Err(_) => {}
            }
        }
        None
    }
}

/// An open connection, counted until it is closed.
struct Place<'a>(&'a Cell<usize>);

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.0.set(self.0.get() - 1);
    }
}

/// A connection, and the part of the answer that was read.
struct Connection {
    stream: TcpStream,
    buffer: Vec<u8>,
    is_closing: bool,
}

impl Connection {
    async fn open(address: SocketAddr) -> std::io::Result<Self> {
        let stream = TcpStream::connect(address).await?;
        stream.set_nodelay(true)?;
        Ok(Self { stream, buffer: Vec::with_capacity(4_096), is_closing: false })
    }

    async fn ask(&mut self, request: &[u8]) -> std::io::Result<u16> {
        self.stream.write_all(request).await?;
        self.buffer.clear();
        loop {
            if self.stream.read_buf(&mut self.buffer).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            if let Some((status, whole, is_closing)) = answer(&self.buffer)
                && self.buffer.len() >= whole
            {
                self.is_closing = is_closing;
                return Ok(status);
            }
        }
    }
}

/// The status of an answer, its length, and whether the connection ends with it.
fn answer(bytes: &[u8]) -> Option<(u16, usize, bool)> {
    let end = bytes.windows(4).position(|window| window == b"\r\n\r\n")?;
    let head = std::str::from_utf8(&bytes[..end]).ok()?;
    let status = head.get(9..12)?.parse().ok()?;
    let field = |name: &str| {
        head.lines().skip(1).find_map(|line| {
            let (found, value) = line.split_once(':')?;
            found.eq_ignore_ascii_case(name).then(|| value.trim())
        })
    };
    let length: usize = field("content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    let is_closing = field("connection").is_some_and(|text| text.eq_ignore_ascii_case("close"));
    Some((status, end + 4 + length, is_closing))
}

/// The status of the answer to one request, over a new connection.
pub(super) async fn ask_once(address: SocketAddr, request: &[u8]) -> Option<u16> {
    Connection::open(address).await.ok()?.ask(request).await.ok()
}

/// The complete answer to one request, over a new connection.
pub(super) async fn read_once(address: SocketAddr, request: &[u8]) -> Option<String> {
    let mut connection = Connection::open(address).await.ok()?;
    connection.ask(request).await.ok()?;
    String::from_utf8(connection.buffer).ok()
}

/// The answer to one request, at least its head, over a new connection.
pub(super) async fn answer_once(address: SocketAddr, request: &[u8]) -> std::io::Result<String> {
    let mut connection = Connection::open(address).await?;
    connection.ask(request).await?;
    Ok(String::from_utf8_lossy(&connection.buffer).into_owned())
}
