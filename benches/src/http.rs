//! `fairlane-bench http`: `POST /v1/events` in batches over persistent connections, compared with
//! direct pipelined `XADD` of the same events in the same run.
//!
//! Both sides use the same number of connections, and wait for the answer to a batch before they
//! send the next one. Client, server and Redis share the machine.

use std::io::ErrorKind;
use std::net::SocketAddr;
use std::time::Duration;

use fairlane::app::{App, Roles};
use fairlane::clock::micros;
use fairlane::config::{Config, PipelineConfig};
use fairlane::id::BotId;
use fairlane::sandbox::{Rig, STREAM, event, pipeline_name, quantile_ms, waits};
use hdrhistogram::Histogram;
use redis::Pipeline;
use serde::Serialize;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::error::BenchError;
use crate::probe;

/// Number of prepared batches. Each connection sends them in turn.
const PREPARED: usize = 64;

/// The options.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Options {
    /// Number of events of each side.
    pub(crate) events: usize,
    /// Number of events per request.
    pub(crate) batch: usize,
    /// Size of an event, bytes.
    pub(crate) bytes: usize,
    /// Number of connections of each side.
    pub(crate) connections: usize,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    pub(crate) events: u64,
    pub(crate) batch: usize,
    pub(crate) connections: usize,
    pub(crate) events_per_second: f64,
    pub(crate) xadd_per_second: f64,
    pub(crate) ratio: f64,
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    /// Events that were accepted but are not on the bus.
    pub(crate) lost: u64,
}

/// Runs the bench.
///
/// # Errors
/// If the private Redis fails or an event is not accepted.
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
    let mut config = Config::default();
    config.redis.url = Some(rig.url().clone());
    config.bus.streams = vec![STREAM.to_owned()];
    config.metrics.listen = ([127, 0, 0, 1], 0).into();
    config.http.listen = ([127, 0, 0, 1], 0).into();
    config.pipelines.insert(pipeline_name(), PipelineConfig::new("log", ["*"]));
    let roles = Roles { ingest: false, work: false, http: true, schedule: false };
    let app = App::builder(config).roles(roles).build().await?;
    let address = app.http_address()?.ok_or_else(|| failed(ErrorKind::AddrNotAvailable.into()))?;
    let running = Rig::spawn(app);

    let batches = prepare(options)?;
    let each = (options.events / options.batch / options.connections).max(1);
    let total = (each * options.connections * options.batch) as u64;
    // XADD runs half before and half after HTTP, so that other load of the machine affects both
    // sides.
    watch("direct XADD", 0);
    let before = direct(rig, options, &batches, each / 2 + 1).await?;
    probe::forget(rig).await?;
    watch("POST /v1/events", 0);
    let (begun, mut histogram) = (Instant::now(), waits());
    let mut clients = JoinSet::new();
    for client in 0..options.connections {
        let requests: Vec<Vec<u8>> =
            batches.iter().map(|events| request(&address.to_string(), events)).collect();
        clients.spawn(post(address, requests, client, each));
    }
    while let Some(ended) = clients.join_next().await {
        let took = ended.map_err(|error| failed(error.into()))??;
        histogram.add(took).map_err(|error| failed(std::io::Error::other(error)))?;
    }
    let http = total as f64 / begun.elapsed().as_secs_f64();
    let stored = probe::stored(rig).await?;
    probe::forget(rig).await?;
    watch("direct XADD", 0);
    let after = direct(rig, options, &batches, each / 2 + 1).await?;
    running.stop().await?;
    // Harmonic mean: the events of both halves divided by the time of both.
    let xadd = 2.0 / (1.0 / before + 1.0 / after);
    Ok(Report {
        events: total,
        batch: options.batch,
        connections: options.connections,
        events_per_second: http,
        xadd_per_second: xadd,
        ratio: http / xadd,
        p50_ms: quantile_ms(&histogram, 0.5),
        p99_ms: quantile_ms(&histogram, 0.99),
        lost: total.saturating_sub(stored),
    })
}

fn prepare(options: Options) -> Result<Vec<Vec<Vec<u8>>>, BenchError> {
    let make = |number: usize| {
        let bot = BotId::parse(&format!("bot-{}", number % 1_000))?;
        Ok::<_, BenchError>(event(&bot, &number.to_string(), "bench", options.bytes)?)
    };
    (0..PREPARED)
        .map(|batch| (0..options.batch).map(|at| make(batch * options.batch + at)).collect())
        .collect()
}

/// Events per second over as many connections as the HTTP side has.
#[expect(clippy::cast_precision_loss, reason = "counts of a bench")]
async fn direct(
    rig: &Rig,
    options: Options,
    batches: &[Vec<Vec<u8>>],
    each: usize,
) -> Result<f64, BenchError> {
    let mut pipes = Vec::with_capacity(batches.len());
    for events in batches {
        let mut pipe = Pipeline::with_capacity(events.len());
        for event in events {
            pipe.cmd("XADD").arg(STREAM).arg("*").arg("event").arg(event);
        }
        pipes.push(pipe);
    }
    let begun = Instant::now();
    let mut producers = JoinSet::new();
    for producer in 0..options.connections {
        let (to, pipes) = (rig.producer(), pipes.clone());
        producers.spawn(async move {
            for pipe in pipes.iter().cycle().skip(producer).take(each) {
                to.send(pipe).await?;
            }
            Ok::<_, BenchError>(())
        });
    }
    while let Some(ended) = producers.join_next().await {
        ended.map_err(|error| failed(error.into()))??;
    }
    Ok((each * options.connections * options.batch) as f64 / begun.elapsed().as_secs_f64())
}

fn request(host: &str, events: &[Vec<u8>]) -> Vec<u8> {
    let body = [&b"["[..], &events.join(&b","[..]), b"]"].concat();
    let head = format!(
        "POST /v1/events HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/cloudevents-batch+json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    [head.into_bytes(), body].concat()
}

/// Sends `count` requests, one after the other. Returns the duration of each, in microseconds.
async fn post(
    address: SocketAddr,
    requests: Vec<Vec<u8>>,
    first: usize,
    count: usize,
) -> Result<Histogram<u64>, BenchError> {
    let (mut took, mut connection) = (waits(), Connection::open(address).await?);
    for request in requests.iter().cycle().skip(first).take(count) {
        let sent = Instant::now();
        connection.send(request, b"HTTP/1.1 202 ").await?;
        took.saturating_record(micros(sent.elapsed()).max(1));
    }
    Ok(took)
}

pub(crate) fn failed(error: std::io::Error) -> BenchError {
    BenchError::Http(error)
}

/// Pause before a shed request is sent again.
const SHED_AGAIN: Duration = Duration::from_millis(25);
/// Maximum number of retries of a shed request.
const SHED_AGAIN_MAX: usize = 400;

/// A persistent connection for a minimal client.
#[derive(Debug)]
pub(crate) struct Connection {
    stream: TcpStream,
    answer: Vec<u8>,
}

impl Connection {
    pub(crate) async fn open(address: SocketAddr) -> Result<Self, BenchError> {
        let stream = TcpStream::connect(address).await.map_err(failed)?;
        stream.set_nodelay(true).map_err(failed)?;
        Ok(Self { stream, answer: Vec::new() })
    }

    /// Sends a request until it is accepted. Retries it while it is shed, as all clients should do.
    pub(crate) async fn send_until_accepted(
        &mut self,
        request: &[u8],
        good: &[u8],
    ) -> Result<(), BenchError> {
        for _ in 0..SHED_AGAIN_MAX {
            match self.send(request, good).await {
                Err(_) if self.answer.starts_with(b"HTTP/1.1 503 ") => {
                    tokio::time::sleep(SHED_AGAIN).await;
                }
                ended => return ended,
            }
        }
        self.send(request, good).await
    }

    /// Sends a request and waits for the complete answer, which must start with `good`.
    pub(crate) async fn send(&mut self, request: &[u8], good: &[u8]) -> Result<(), BenchError> {
        let Self { stream, answer } = self;
        stream.write_all(request).await.map_err(failed)?;
        answer.clear();
        while !is_whole(answer) {
            if stream.read_buf(answer).await.map_err(failed)? == 0 {
                return Err(failed(ErrorKind::UnexpectedEof.into()));
            }
        }
        if !answer.starts_with(good) {
            let said = String::from_utf8_lossy(answer).into_owned();
            return Err(failed(std::io::Error::other(said)));
        }
        Ok(())
    }
}

/// Whether the answer is complete, by its content-length.
pub(crate) fn is_whole(answer: &[u8]) -> bool {
    let Some(end) = answer.windows(4).position(|window| window == b"\r\n\r\n") else {
        return false;
    };
    let head = String::from_utf8_lossy(&answer[..end]).to_ascii_lowercase();
    let length = head.lines().find_map(|line| line.strip_prefix("content-length:"));
    let length = length.and_then(|length| length.trim().parse().ok()).unwrap_or(0);
    answer.len() - end - 4 >= length
}
