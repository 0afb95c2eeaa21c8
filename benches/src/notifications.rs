//! `fairlane-bench notifications`: how late notifications are sent to a receiver that answers
//! immediately. They are spread evenly over time, then all due in the same instant, then sent
//! beside hosts that are dead or hang. Also measures the cost of waiting notifications.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::get;
use fairlane::app::App;
use fairlane::clock::{Clock as _, SystemClock, micros, millis, rfc3339};
use fairlane::id::BotId;
use fairlane::notifications::Notifications;
use fairlane::notifications::record::{NO_KIND, NewNotification, When};
use fairlane::outbound::sign::Secret;
use fairlane::sandbox::{Rig, drained, quantile_ms, waits};
use fairlane_testkit::redis::free_address;
use futures_util::StreamExt as _;
use futures_util::future::try_join_all;
use futures_util::stream;
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::error::BenchError;
use crate::http::{Connection, failed};
use crate::{cpu, probe};

/// The options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Number of notifications of each part.
    pub(crate) notifications: u64,
    /// Time over which the notifications fall due evenly, except those of the second part.
    pub(crate) seconds: u64,
    /// Number of bots.
    pub(crate) bots: u64,
    /// Number of further notifications, due tomorrow.
    pub(crate) idle: u64,
    /// Number of further notifications of one bot to a dead host, in a third part.
    pub(crate) dead: u64,
    /// Number of hosts in that part that never answer, each with a hundred notifications.
    pub(crate) hanging: u64,
}

/// The results. Lateness is the time from the due time to the arrival at the receiver.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) notifications: u64,
    pub(crate) seconds: u64,
    /// Notifications that `/send_delayed` accepted per second, over 32 connections.
    pub(crate) per_second: f64,
    /// Number of arrivals before the due time.
    pub(crate) early: u64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
    /// Processor time of Redis for accepting and sending one of the first part, µs.
    pub(crate) redis_cpu_us_each: f64,
    /// That of this process, with the clients and the receiver.
    pub(crate) own_cpu_us_each: f64,
    /// From the common due time to the last arrival.
    pub(crate) at_once_seconds: f64,
    /// Number of notifications that arrived more than once.
    pub(crate) repeated: u64,
    pub(crate) idle: u64,
    /// Memory in Redis of an idle notification.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_bytes_each: Option<f64>,
    /// Commands that Redis runs per second while the idle notifications wait and none is due,
    /// including those of scripts.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_commands_per_second: Option<f64>,
    /// Processor time of this process meanwhile, in percent of one core.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) idle_cpu_percent: Option<f64>,
    pub(crate) dead: u64,
    pub(crate) hanging: u64,
    /// Lateness of the other notifications in the third part.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) beside_p50_ms: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) beside_p99_ms: Option<f64>,
    /// Number of requests to the hanging hosts.
    pub(crate) hanging_requests: u64,
}

/// Number of connections that schedule notifications over HTTP.
const CONNECTIONS: u64 = 32;
/// Duration of the measurement of waiting, during which no notification is due.
const REST: Duration = Duration::from_secs(30);
/// Time for earlier work to end.
const SETTLE: Duration = Duration::from_secs(5);
/// Number of notifications for each hanging host.
const FOR_HANGING: u64 = 100;
/// Number of concurrently scheduled notifications.
const AT_ONCE: usize = 64;
/// Time between the last scheduling and the first due time.
const LEAD: Duration = Duration::from_secs(1);

/// A secret for signatures that the receiver does not verify.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// The records of the receiver.
#[derive(Debug)]
struct Arrivals {
    late: Mutex<Histogram<u64>>,
    early: AtomicU64,
    count: AtomicU64,
}

impl Arrivals {
    fn new() -> Arc<Self> {
        let late = Mutex::new(waits());
        Arc::new(Self { late, early: AtomicU64::new(0), count: AtomicU64::new(0) })
    }

    fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// The lateness of the arrivals since the last call.
    fn take(&self) -> Histogram<u64> {
        let mut late = self.late.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::replace(&mut *late, waits())
    }

    fn arrived(&self, due_us: u64) {
        let now = micros(SystemClock.now());
        if now < due_us {
            self.early.fetch_add(1, Ordering::Relaxed);
        }
        let late = now.saturating_sub(due_us).max(1);
        self.late.lock().unwrap_or_else(PoisonError::into_inner).saturating_record(late);
        self.count.fetch_add(1, Ordering::Relaxed);
    }
}

/// Runs the bench.
///
/// # Errors
/// If the private Redis fails or nothing moves for a minute.
pub(crate) async fn run(
    options: Options,
    watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    Rig::with(async |rig| measure(rig, options, watch).await).await
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn measure(
    rig: &Rig,
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let arrivals = Arrivals::new();
    let receiver = Receiver::start(&arrivals).await?;
    let (app, hanging) = (app(rig).await?, hang(options.hanging).await?);
    let Some(notifications) = app.notifications() else {
        unreachable!("their pipeline is enabled")
    };
    let door = app.http_address()?.ok_or_else(|| failed(ErrorKind::AddrNotAvailable.into()))?;
    let running = Rig::spawn(app);
    let accepting = Accepting { notifications, door, bots: options.bots, url: receiver.url() };
    let tomorrow = SystemClock.now() + Duration::from_secs(86_400);
    let idle = Part { count: options.idle, from: tomorrow, over: Duration::ZERO };
    let empty = probe::memory(rig).await?;
    accepting.accept(idle, &mut watch).await?;
    let idle_bytes = probe::memory(rig).await? - empty;
    let cost = if options.idle > 0 { Some(cost_of_waiting(rig, &mut watch).await?) } else { None };

    let (count, over) = (options.notifications, Duration::from_secs(options.seconds));
    let accepted_in = Duration::from_secs(1 + count / 2_000);
    let from = || SystemClock.now() + accepted_in + LEAD;
    let own = || cpu::of_process(std::process::id()).unwrap_or_default();
    let (redis_before, own_before) = (probe::cpu(rig).await?, own());
    let begun = Instant::now();
    watch("accepting by HTTP", 0);
    accepting.accept_by_http(Part { count, from: from(), over }).await?;
    let per_second = count as f64 / begun.elapsed().as_secs_f64();
    drained(|| arrivals.count(), count, |n| watch("sending", n)).await?;
    let redis_cpu = probe::cpu(rig).await? - redis_before;
    let own_cpu = own().saturating_sub(own_before).as_secs_f64();
    let late = arrivals.take();

    accepting.accept(Part { count, from: from(), over: Duration::ZERO }, &mut watch).await?;
    drained(|| arrivals.count(), 2 * count, |n| watch("sending at once", n - count)).await?;
    let at_once = arrivals.take().max();

    let (mut all, mut beside) = (2 * count, None);
    if options.dead + options.hanging > 0 {
        accepting.accept_for_the_dead(options.dead, &hanging, &mut watch).await?;
        let one = Accepting { bots: 1, ..accepting };
        one.accept(Part { count, from: SystemClock.now() + LEAD, over }, &mut watch).await?;
        all += count;
        drained(|| arrivals.count(), all, |n| watch("sending beside", n - 2 * count)).await?;
        beside = Some(arrivals.take());
    }
    running.stop().await?;
    Ok(Report {
        notifications: count,
        seconds: options.seconds,
        per_second,
        early: arrivals.early.load(Ordering::Relaxed),
        p50_ms: quantile_ms(&late, 0.5),
        p99_ms: quantile_ms(&late, 0.99),
        max_ms: quantile_ms(&late, 1.0),
        redis_cpu_us_each: redis_cpu * 1e6 / count as f64,
        own_cpu_us_each: own_cpu * 1e6 / count as f64,
        at_once_seconds: at_once as f64 / 1e6,
        repeated: arrivals.count().saturating_sub(all),
        idle: options.idle,
        idle_bytes_each: cost.map(|_| idle_bytes / options.idle as f64),
        idle_commands_per_second: cost.map(|cost| cost.commands_per_second),
        idle_cpu_percent: cost.and_then(|cost| cost.cpu_percent),
        dead: options.dead,
        hanging: options.hanging,
        beside_p50_ms: beside.as_ref().map(|late| quantile_ms(late, 0.5)),
        beside_p99_ms: beside.as_ref().map(|late| quantile_ms(late, 0.99)),
        hanging_requests: hanging.iter().map(|host| host.requests.load(Ordering::Relaxed)).sum(),
    })
}

#[derive(Debug, Clone, Copy)]
struct Cost {
    commands_per_second: f64,
    cpu_percent: Option<f64>,
}

#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn cost_of_waiting(
    rig: &Rig,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<Cost, BenchError> {
    watch("waiting", 0);
    tokio::time::sleep(SETTLE).await;
    let own = || cpu::of_process(std::process::id());
    let (begun, before, commands) = (Instant::now(), own(), probe::all_commands(rig).await?);
    tokio::time::sleep(REST).await;
    // This query is a command itself.
    let commands = probe::all_commands(rig).await?.saturating_sub(commands + 1);
    let seconds = begun.elapsed().as_secs_f64();
    let used = before.zip(own()).map(|(before, after)| after.saturating_sub(before));
    Ok(Cost {
        commands_per_second: commands as f64 / seconds,
        cpu_percent: used.map(|used| used.as_secs_f64() / seconds * 100.0),
    })
}

/// Accepts notifications and answers immediately, until dropped.
struct Receiver {
    address: SocketAddr,
    _running: JoinSet<()>,
}

impl Receiver {
    async fn start(arrivals: &Arc<Arrivals>) -> Result<Self, BenchError> {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?;
        let receive = async |State(arrivals): State<Arc<Arrivals>>, Path(due_us): Path<u64>| {
            arrivals.arrived(due_us);
        };
        let router =
            axum::Router::new().route("/{due}", get(receive)).with_state(Arc::clone(arrivals));
        let mut running = JoinSet::new();
        // The server ends only when it is dropped.
        running.spawn(async move { drop(axum::serve(listener, router).await) });
        Ok(Self { address, _running: running })
    }

    fn url(&self) -> String {
        format!("http://{}", self.address)
    }
}

/// A host that accepts requests and never answers.
struct Hanging {
    address: SocketAddr,
    requests: Arc<AtomicU64>,
    _running: JoinSet<()>,
}

async fn hang(hosts: u64) -> Result<Vec<Hanging>, BenchError> {
    let mut hanging = Vec::new();
    for _ in 0..hosts {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
        let (address, requests) = (listener.local_addr()?, Arc::new(AtomicU64::new(0)));
        let (counted, mut running) = (Arc::clone(&requests), JoinSet::new());
        running.spawn(async move {
            let mut open = Vec::new();
            while let Ok((stream, _)) = listener.accept().await {
                counted.fetch_add(1, Ordering::Relaxed);
                open.push(stream);
            }
        });
        hanging.push(Hanging { address, requests, _running: running });
    }
    Ok(hanging)
}

/// An instance that only sends notifications.
async fn app(rig: &Rig) -> Result<App, BenchError> {
    let mut config = rig.config();
    config.callbacks.allow_nets = vec![std::net::IpAddr::from([127, 0, 0, 1]).into()];
    // Signing is a part of sending.
    config.callbacks.secrets = vec![Secret::parse(SECRET).map_err(std::io::Error::other)?];
    config.pipelines.retain(|name, _| name.is(fairlane::notifications::PIPELINE));
    Ok(App::builder(config).build().await?)
}

/// Some notifications, due evenly over a time.
#[derive(Clone, Copy)]
struct Part {
    count: u64,
    from: Duration,
    over: Duration,
}

/// The instance that schedules notifications, and the target of the notifications.
struct Accepting {
    notifications: Notifications,
    door: SocketAddr,
    bots: u64,
    url: String,
}

impl Accepting {
    async fn accept(
        &self,
        part: Part,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(), BenchError> {
        let all = (0..part.count).map(|n| {
            let due = part.due(n);
            (self.bot(n), When::At(due), format!("{}/{}", self.url, micros(due)))
        });
        self.accept_all(all, watch).await
    }

    /// Schedules notifications of one bot, all due now: for a dead host, and for hosts that hang.
    async fn accept_for_the_dead(
        &self,
        dead: u64,
        hanging: &[Hanging],
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(), BenchError> {
        let free = free_address();
        let of_dead = (0..dead).map(|_| free);
        let of_hanging = (0..FOR_HANGING).flat_map(|_| hanging.iter().map(|host| host.address));
        let now = When::After(Duration::ZERO);
        let all =
            of_hanging.chain(of_dead).map(|host| (self.bot(0), now, format!("http://{host}/")));
        self.accept_all(all, watch).await
    }

    async fn accept_all(
        &self,
        all: impl Iterator<Item = (String, When, String)>,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(), BenchError> {
        let one = |(bot, when, url): (String, When, String)| async move {
            let new = NewNotification {
                bot: BotId::parse(&bot)?,
                uid: String::new(),
                kind: NO_KIND.to_owned(),
                when,
                expires_in: Duration::from_secs(3_600),
                waits: false,
                url,
                method: "GET".to_owned(),
                body: String::new(),
                recheck: String::new(),
                headers: String::new(),
                trace: None,
                key: None,
            };
            Ok::<_, BenchError>(self.notifications.accept(&new).await?)
        };
        let mut accepted = stream::iter(all).map(one).buffer_unordered(AT_ONCE);
        let mut n = 0;
        while let Some(id) = accepted.next().await {
            id?;
            n += 1;
            watch("accepting", n);
        }
        Ok(())
    }

    async fn accept_by_http(&self, part: Part) -> Result<(), BenchError> {
        let host = self.door;
        let clients = (0..CONNECTIONS).map(|client| async move {
            let mut connection = Connection::open(host).await?;
            for n in (client..part.count).step_by(usize::try_from(CONNECTIONS).unwrap_or(1)) {
                let (due, bot, url) = (part.due(n), self.bot(n), &self.url);
                let (at, us) = (rfc3339(millis(due)), micros(due));
                let request = format!(
                    "GET /send_delayed?bot={bot}&at={at}&url={url}/{us} HTTP/1.1\r\nhost: {host}\r\n\r\n"
                );
                connection.send_until_accepted(request.as_bytes(), b"HTTP/1.1 200 ").await?;
            }
            Ok::<_, BenchError>(())
        });
        try_join_all(clients).await.map(drop)
    }

    fn bot(&self, n: u64) -> String {
        format!("bot-{}", n % self.bots)
    }
}

impl Part {
    /// When the `n`th is due: whole milliseconds, as in Redis.
    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    fn due(&self, n: u64) -> Duration {
        let due = self.from + self.over.mul_f64(n as f64 / self.count as f64);
        Duration::from_millis(millis(due))
    }
}
