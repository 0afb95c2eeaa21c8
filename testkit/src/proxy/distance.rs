//! A long way to a server: every byte arrives later, however many are under way. Unlike
//! [`ProxyMode::Delay`](super::ProxyMode::Delay), messages do not wait for each other.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// Maximum number of reads that are under way in one direction.
const UNDER_WAY: usize = 10_000;

/// Runs until it is dropped.
#[derive(Debug)]
pub struct Distance {
    address: SocketAddr,
    delay: watch::Sender<Duration>,
    _accepting: JoinSet<()>,
}

impl Distance {
    /// Starts without a delay.
    pub async fn start(upstream: SocketAddr) -> Self {
        Self::on(TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap(), upstream)
    }

    /// [`Self::start`], for a server that tells its clients where this listens.
    pub fn on(listener: TcpListener, upstream: SocketAddr) -> Self {
        let address = listener.local_addr().unwrap();
        let (delay, known) = watch::channel(Duration::ZERO);
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            loop {
                let Ok((client, _)) = listener.accept().await else { return };
                while connections.try_join_next().is_some() {}
                connections.spawn(serve(client, upstream, known.clone()));
            }
        });
        Self { address, delay, _accepting: accepting }
    }

    pub fn address(&self) -> SocketAddr {
        self.address
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.address)
    }

    /// Each direction takes this long from now on.
    pub fn set(&self, delay: Duration) {
        self.delay.send_replace(delay);
    }
}

async fn serve(client: TcpStream, upstream: SocketAddr, delay: watch::Receiver<Duration>) {
    let Ok(server) = TcpStream::connect(upstream).await else { return };
    let _ = client.set_nodelay(true).and(server.set_nodelay(true));
    let (client_reads, client_writes) = client.into_split();
    let (server_reads, server_writes) = server.into_split();
    tokio::select! {
        () = carry(client_reads, server_writes, &delay) => {}
        () = carry(server_reads, client_writes, &delay) => {}
    }
}

/// Ends when either side ends.
async fn carry(mut from: OwnedReadHalf, mut to: OwnedWriteHalf, delay: &watch::Receiver<Duration>) {
    let (sender, mut under_way) = mpsc::channel::<(Instant, Vec<u8>)>(UNDER_WAY);
    let reads = async {
        loop {
            let mut bytes = Vec::with_capacity(16 << 10);
            if !from.read_buf(&mut bytes).await.is_ok_and(|read| read > 0) {
                return;
            }
            let arrives = Instant::now() + *delay.borrow();
            if sender.send((arrives, bytes)).await.is_err() {
                return;
            }
        }
    };
    let writes = async {
        while let Some((arrives, bytes)) = under_way.recv().await {
            // The sleep is the fault itself.
            tokio::time::sleep_until(arrives).await;
            if to.write_all(&bytes).await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = reads => {}
        () = writes => {}
    }
}
