//! Connections that try to exhaust the server, beside requests of the critical classes. 2,000
//! connections from several addresses send a head slowly, or nothing at all.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use fairlane::sandbox;
use tokio::io::AsyncWriteExt as _;
use tokio::net::TcpSocket;
use tokio::task::JoinSet;

use super::load::Phase;
use super::outcome::quantile_ms;
use super::runs::{Bench, P0_RATE};
use super::served::Served;
use super::synthetic::requests;
use super::{Flood, Protection, Workload};
use crate::error::BenchError;

/// Number of connections of the flood.
const CONNECTIONS: usize = 2_000;
/// Number of open files that the process needs, including those of the generator.
const FILES: u64 = 4_096;
/// Number of source addresses on the loopback.
const ADDRESSES: usize = 4;

pub(super) async fn measure() -> Result<Flood, BenchError> {
    if !sandbox::raise_open_files(FILES) {
        let what = format!("a flood needs {FILES} open files; raise the limit (ulimit -Hn)");
        return Err(BenchError::stuck(Duration::ZERO, what));
    }
    let server = Served::start(Workload::Dependency, Protection::Admission, 1)?;
    let address = server.address;
    let flood = std::thread::Builder::new().name("flood".to_owned());
    let (stop, stopped) = tokio::sync::oneshot::channel::<()>();
    let flood = flood.spawn(move || {
        super::served::pin(1);
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        runtime.block_on(async {
            let mut connections = JoinSet::new();
            for number in 0..CONNECTIONS {
                connections.spawn(hold(address, number));
            }
            let _ = stopped.await;
            connections.shutdown().await;
        });
        Ok::<(), std::io::Error>(())
    })?;
    tokio::time::sleep(Duration::from_secs(1)).await;
    let deadline = Duration::from_millis(100);
    let mut bench = Bench::new(requests(deadline), deadline);
    let phase = Phase { lasts: Duration::from_secs(5), rates: [P0_RATE, 500.0, 0.0, 0.0] };
    let load = bench.load(address, vec![phase]);
    let outcome = bench.send(&load).await?;
    drop(stop);
    match flood.join() {
        Ok(ended) => ended?,
        Err(_) => {
            return Err(BenchError::stuck(Duration::ZERO, "the flood ended early".to_owned()));
        }
    }
    Ok(Flood {
        connections: CONNECTIONS,
        p0_success: outcome.success(0),
        p1_success: outcome.success(1),
        p1_p99_ms: quantile_ms(&outcome.classes[1].latency, 0.99),
    })
}

/// Keeps one connection open, and reopens it whenever the server closes it.
async fn hold(address: SocketAddr, number: usize) {
    loop {
        let _ = slowly(address, number).await;
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

async fn slowly(address: SocketAddr, number: usize) -> std::io::Result<()> {
    let socket = TcpSocket::new_v4()?;
    let last = u8::try_from(2 + number % ADDRESSES).unwrap_or(2);
    socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0)))?;
    let mut stream = socket.connect(address).await?;
    if number.is_multiple_of(2) {
        // This one sends nothing. The read ends when the server closes the connection.
        stream.readable().await?;
        return Ok(());
    }
    stream.write_all(b"GET /p1 HTTP/1.1\r\nhost: 127.0.0.1\r\nx-slow: ").await?;
    loop {
        stream.write_all(b"a").await?;
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
}
