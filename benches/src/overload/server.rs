//! The overloaded server: its own process, pinned to one processor, behind one of three
//! protections. Its work needs the processor, or waits for a dependency.

use std::io::{BufRead as _, Write as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::error_handling::HandleErrorLayer;
use axum::extract::State;
use axum::http::StatusCode;
use axum::{Router, routing};
use fairlane::admission::Class;
use fairlane::sandbox::{self, Row};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower::ServiceBuilder;
use tower::limit::GlobalConcurrencyLimitLayer;
use tower::load_shed::LoadShedLayer;

use super::served::pin;
use super::{Protection, Workload};
use crate::error::BenchError;

/// The processor time of one request.
const CPU: Duration = Duration::from_millis(2);
/// The concurrency of the dependency.
const SLOTS: usize = 8;
/// The duration of a call to the dependency, ms.
const SERVICE_MS: u64 = 4;
/// The concurrency limit of `tower`: a plausible choice without knowledge of the service.
const TOWER_LIMIT: usize = 64;
const ROUTES: &[Row] = &[
    ("*", "/p0", Class::P0, 1_024),
    ("*", "/p1", Class::P1, 1_024),
    ("*", "/p2", Class::P2, 1_024),
    ("*", "/p3", Class::P3, 1_024),
];

struct Work {
    workload: Workload,
    /// The number of loop rounds that take [`CPU`].
    rounds: u64,
    slots: Semaphore,
    service_ms: AtomicU64,
}

/// Serves until standard input ends, with `rounds` loop rounds per request. Prints its address
/// first. A line `slow N` on standard input sets the duration of a dependency call to N ms.
///
/// # Errors
/// If it cannot listen.
pub(crate) fn serve(
    workload: Workload,
    protection: Protection,
    rounds: u64,
) -> Result<(), BenchError> {
    // The threads of the runtime inherit the processor.
    pin(0);
    let runtime =
        tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build()?;
    let work = Arc::new(Work {
        workload,
        rounds,
        slots: Semaphore::new(SLOTS),
        service_ms: AtomicU64::new(SERVICE_MS),
    });
    let stop = CancellationToken::new();
    let (told, stopped) = (Arc::clone(&work), stop.clone());
    let listening = async {
        let listener = sandbox::listen()?;
        println!("{}", listener.local_addr()?);
        std::io::stdout().flush()?;
        sandbox::serve(listener, routes(work, protection), stopped).await;
        Ok(())
    };
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines().map_while(Result::ok) {
            if let Some(ms) = line.strip_prefix("slow ").and_then(|ms| ms.parse().ok()) {
                told.service_ms.store(ms, Ordering::Relaxed);
            }
        }
        stop.cancel();
    });
    runtime.block_on(listening)
}

fn routes(work: Arc<Work>, protection: Protection) -> Router {
    let routes = Router::new()
        .route("/p0", routing::get(async || "ok"))
        .route("/p1", routing::get(serve_one))
        .route("/p2", routing::get(serve_one))
        .route("/p3", routing::get(serve_one))
        .with_state(work);
    match protection {
        Protection::None => routes,
        Protection::Tower => routes.layer(
            ServiceBuilder::new()
                .layer(HandleErrorLayer::new(async |_| StatusCode::SERVICE_UNAVAILABLE))
                .layer(LoadShedLayer::new())
                .layer(GlobalConcurrencyLimitLayer::new(TOWER_LIMIT)),
        ),
        Protection::Admission => sandbox::admitted(routes, ROUTES),
    }
}

async fn serve_one(State(work): State<Arc<Work>>) -> &'static str {
    if work.workload == Workload::Cpu {
        std::hint::black_box(burn(work.rounds));
    } else {
        let _slot = work.slots.acquire().await;
        let time = Duration::from_millis(work.service_ms.load(Ordering::Relaxed));
        tokio::time::sleep(time).await;
    }
    "ok"
}

pub(super) fn burn(rounds: u64) -> u64 {
    let block = [7_u8; 256];
    (0..rounds)
        .fold(0, |hash, _| std::hint::black_box(xxhash_rust::xxh3::xxh3_64_with_seed(&block, hash)))
}

/// The number of loop rounds that take [`CPU`] without disturbance. Measured once, so that all
/// servers do the same work.
pub(super) fn calibrated() -> u64 {
    const ROUNDS: u64 = 20_000;
    let fastest = (0..20).map(|_| {
        let begun = Instant::now();
        std::hint::black_box(burn(ROUNDS));
        begun.elapsed()
    });
    let fastest = fastest.min().unwrap_or(CPU).as_secs_f64().max(1e-9);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        clippy::cast_precision_loss,
        reason = "a count of rounds"
    )]
    let rounds = (ROUNDS as f64 * CPU.as_secs_f64() / fastest) as u64;
    rounds.max(1)
}
