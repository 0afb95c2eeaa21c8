//! `fairlane bench notifications`: how late notifications are sent, to a receiver that answers at
//! once; first evenly over a time, then all in the same instant.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use axum::extract::{Path, State};
use axum::routing::get;
use futures_util::StreamExt as _;
use futures_util::stream;
use hdrhistogram::Histogram;
use serde::Serialize;
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::latency::{quantile_ms, waits};
use super::{BenchError, Rig, drained};
use crate::app::App;
use crate::clock::{Clock as _, SystemClock, micros, millis};
use crate::id::{BotId, PipelineName};
use crate::notification::{NO_KIND, NewNotification, When};
use crate::notifications::Notifications;
use crate::outbound::sign::Secret;

/// What to run.
#[derive(Debug, Clone, Copy)]
pub struct Options {
    /// Notifications of each part.
    pub notifications: u64,
    /// The first part falls due evenly over this.
    pub seconds: u64,
    /// Tenants.
    pub bots: u64,
    /// More that are scheduled for tomorrow.
    pub idle: u64,
}

/// What came out. Lateness is from the due time to the arrival at the receiver.
#[derive(Debug, Clone, Serialize)]
#[expect(missing_docs, reason = "named by the interface")]
pub struct Report {
    pub notifications: u64,
    pub seconds: u64,
    /// Accepted, one call each, 64 at once.
    pub per_second: f64,
    /// Arrived before they were due.
    pub early: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    /// From the instant at which all were due to the last arrival.
    pub at_once_seconds: f64,
    /// Arrived more than once.
    pub repeated: u64,
    pub idle: u64,
}

/// Accepted at once.
const AT_ONCE: usize = 64;
/// The first one is due so long after the last one was accepted.
const LEAD: Duration = Duration::from_secs(1);

/// Signs what nobody verifies.
const SECRET: &str = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw";

/// What the receiver noted.
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

/// Runs it.
///
/// # Errors
/// When the private Redis fails or nothing moves for a minute.
pub async fn run(
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
    let listener = TcpListener::bind(("127.0.0.1", 0)).await?;
    let url = format!("http://{}", listener.local_addr()?);
    let receive = async |State(arrivals): State<Arc<Arrivals>>, Path(due_us): Path<u64>| {
        arrivals.arrived(due_us);
    };
    let receiver =
        axum::Router::new().route("/{due}", get(receive)).with_state(Arc::clone(&arrivals));
    let mut receiving = tokio::task::JoinSet::new();
    receiving.spawn(async move { axum::serve(listener, receiver).await });

    let app = app(rig).await?;
    let Some(notifications) = app.notifications() else {
        unreachable!("their pipeline was enabled above")
    };
    let running = Rig::spawn(app);
    let tomorrow = SystemClock.now() + Duration::from_secs(86_400);
    let accepting = Accepting { notifications, bots: options.bots, url };
    let idle = Part { count: options.idle, from: tomorrow, over: Duration::ZERO };
    accepting.accept(idle, &mut watch).await?;

    let (count, over) = (options.notifications, Duration::from_secs(options.seconds));
    let accepted_in = Duration::from_secs(1 + count / 2_000);
    let from = SystemClock.now() + accepted_in + LEAD;
    let begun = Instant::now();
    accepting.accept(Part { count, from, over }, &mut watch).await?;
    let per_second = count as f64 / begun.elapsed().as_secs_f64();
    let arrived = || arrivals.count.load(Ordering::Relaxed);
    drained(arrived, count, |n| watch("sending", n)).await?;
    let late = std::mem::replace(
        &mut *arrivals.late.lock().unwrap_or_else(PoisonError::into_inner),
        waits(),
    );

    let from = SystemClock.now() + accepted_in + LEAD;
    accepting.accept(Part { count, from, over: Duration::ZERO }, &mut watch).await?;
    drained(arrived, 2 * count, |n| watch("sending at once", n - count)).await?;
    let at_once = arrivals.late.lock().unwrap_or_else(PoisonError::into_inner).max();
    running.stop().await?;
    Ok(Report {
        notifications: count,
        seconds: options.seconds,
        per_second,
        early: arrivals.early.load(Ordering::Relaxed),
        p50_ms: quantile_ms(&late, 0.5),
        p99_ms: quantile_ms(&late, 0.99),
        max_ms: quantile_ms(&late, 1.0),
        at_once_seconds: at_once as f64 / 1e6,
        repeated: arrived().saturating_sub(2 * count),
        idle: options.idle,
    })
}

/// An instance that sends notifications and nothing else.
async fn app(rig: &Rig) -> Result<App, BenchError> {
    let mut config = rig.config();
    config.callbacks.allow_nets = vec![std::net::IpAddr::from([127, 0, 0, 1]).into()];
    // Signing is a part of sending.
    config.callbacks.secrets = vec![Secret::parse(SECRET).map_err(std::io::Error::other)?];
    config.pipelines.retain(|name, _| name.notifies());
    if let Some(pipeline) = PipelineName::parse(PipelineName::NOTIFICATIONS)
        .ok()
        .and_then(|name| config.pipelines.get_mut(&name))
    {
        pipeline.enabled = true;
    }
    let roles = crate::app::Roles { http: false, ..crate::app::Roles::ALL };
    Ok(App::builder(config).roles(roles).build().await?)
}

/// Some notifications, due evenly over a time.
#[derive(Clone, Copy)]
struct Part {
    count: u64,
    from: Duration,
    over: Duration,
}

/// What accepts notifications, and where they go to.
struct Accepting {
    notifications: Notifications,
    bots: u64,
    url: String,
}

impl Accepting {
    async fn accept(
        &self,
        part: Part,
        watch: &mut impl FnMut(&'static str, u64),
    ) -> Result<(), BenchError> {
        let one = |n: u64| async move {
            let new = self.new_one(part, n)?;
            Ok::<_, BenchError>(self.notifications.accept(&new).await?)
        };
        let mut accepted = stream::iter(0..part.count).map(one).buffer_unordered(AT_ONCE);
        let mut n = 0;
        while let Some(id) = accepted.next().await {
            id?;
            n += 1;
            watch("accepting", n);
        }
        Ok(())
    }

    #[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
    fn new_one(&self, part: Part, n: u64) -> Result<NewNotification, BenchError> {
        // Whole milliseconds, as Redis has them.
        let due = part.from + part.over.mul_f64(n as f64 / part.count as f64);
        let due = Duration::from_millis(millis(due));
        Ok(NewNotification {
            bot: BotId::parse(&format!("bot-{}", n % self.bots))?,
            uid: String::new(),
            kind: NO_KIND.to_owned(),
            when: When::At(due),
            expires_in: Duration::from_secs(3_600),
            waits: false,
            url: format!("{}/{}", self.url, micros(due)),
            method: "GET".to_owned(),
            body: String::new(),
            recheck: String::new(),
            key: None,
        })
    }
}
