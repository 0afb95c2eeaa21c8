//! The open sockets of an instance, for the next one in the same process. Both accept connections of
//! the same queue of the system, so no client is refused between them.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, SocketAddr, TcpListener as StdListener};
use std::os::fd::AsFd as _;

use tokio::net::TcpListener;

use super::AppError;
use crate::http;

/// Copies of open sockets.
#[derive(Debug, Default)]
pub(crate) struct Sockets(Vec<Socket>);

#[derive(Debug)]
struct Socket {
    /// The setting with its address.
    key: &'static str,
    /// The value of that setting. Port 0 there is not the port that it got.
    address: SocketAddr,
    listener: StdListener,
}

impl Sockets {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a copy of a listener that was opened for the setting `key` with the value `address`.
    pub(super) fn add(
        &mut self,
        key: &'static str,
        address: SocketAddr,
        listener: &TcpListener,
    ) -> io::Result<()> {
        let listener = listener.as_fd().try_clone_to_owned()?.into();
        self.0.push(Socket { key, address, listener });
        Ok(())
    }

    /// Copies of all of them.
    pub(super) fn copied(&self) -> io::Result<Self> {
        let copy = |socket: &Socket| -> io::Result<_> {
            Ok(Socket { listener: socket.listener.try_clone()?, ..*socket })
        };
        self.0.iter().map(copy).collect::<io::Result<Vec<_>>>().map(Self)
    }

    /// Changes how many connections may wait to be accepted, for all copies of the sockets.
    pub(super) fn set_backlog(&self, backlog: u32) -> io::Result<()> {
        // The system bounds it to a smaller number anyway.
        let backlog = i32::try_from(backlog).unwrap_or(i32::MAX);
        for Socket { listener, .. } in &self.0 {
            rustix::net::listen(listener, backlog)?;
        }
        Ok(())
    }

    /// The socket of the setting `key` if its value is still `address`; otherwise a new one.
    pub(super) fn open(
        &self,
        key: &'static str,
        address: SocketAddr,
        backlog: u32,
    ) -> Result<TcpListener, AppError> {
        let mut all = self.0.iter();
        if let Some(same) = all.find(|socket| socket.key == key && socket.address == address) {
            return Ok(TcpListener::from_std(same.listener.try_clone()?)?);
        }
        http::bind(key, address, backlog).map_err(|mut error| {
            if error.source.kind() == ErrorKind::AddrInUse
                && let Some((own, of)) = self.colliding(address)
            {
                error.remedy = format!(
                    "this process itself listens on {own} ({of}), so restart it to change {key}"
                );
            }
            error.into()
        })
    }

    /// The socket that prevents one at `address`: its address and its setting.
    fn colliding(&self, address: SocketAddr) -> Option<(SocketAddr, &'static str)> {
        self.0.iter().find_map(|socket| {
            let own = socket.listener.local_addr().ok()?;
            collide(own, address).then_some((own, socket.key))
        })
    }
}

/// Whether the system refuses a listener at one of the addresses while another one has the other.
fn collide(one: SocketAddr, other: SocketAddr) -> bool {
    // `[::]` accepts IPv4 too.
    let covers = |all: IpAddr, ip: IpAddr| {
        all == ip || (all.is_unspecified() && (all.is_ipv6() || ip.is_ipv4()))
    };
    let (a, b) = (one.ip().to_canonical(), other.ip().to_canonical());
    one.port() == other.port() && (covers(a, b) || covers(b, a))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::net::TcpStream;
    use tokio::time::timeout;

    use super::*;

    /// Sockets with one listener, which was opened for `http.listen`, and its address.
    fn listening(backlog: u32) -> (Sockets, SocketAddr) {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        let listener = http::bind("http.listen", any, backlog).unwrap();
        let own = listener.local_addr().unwrap();
        let mut sockets = Sockets::default();
        sockets.add("http.listen", own, &listener).unwrap();
        (sockets, own)
    }

    /// How many of 20 connections find a place in the queue of a listener that accepts none.
    async fn waiting(address: SocketAddr) -> usize {
        let mut all = Vec::new();
        while all.len() < 20 {
            let connecting = TcpStream::connect(address);
            let Ok(Ok(stream)) = timeout(Duration::from_secs(1), connecting).await else { break };
            all.push(stream);
        }
        all.len()
    }

    #[tokio::test]
    async fn an_open_socket_takes_another_backlog() {
        let (sockets, own) = listening(2);
        let few = waiting(own).await;
        assert!(few < 20, "{few}");
        // A copy of the socket is the same socket.
        sockets.copied().unwrap().set_backlog(64).unwrap();
        assert_eq!(waiting(own).await, 20);
    }

    #[tokio::test]
    async fn an_address_that_the_process_itself_has_needs_a_restart() {
        let (sockets, own) = listening(8);
        let reused = sockets.open("http.listen", own, 8).unwrap();
        assert_eq!(reused.local_addr().unwrap(), own);
        let refusal = |sockets: &Sockets, key, address| {
            sockets.open(key, address, 8).unwrap_err().to_string()
        };
        let all = SocketAddr::from(([0, 0, 0, 0], own.port()));
        // The second one is half of a swap.
        for (key, address) in [("http.listen", all), ("metrics.listen", own)] {
            let remedy = format!(
                "; this process itself listens on {own} (http.listen), so restart it to change {key}"
            );
            let said = refusal(&sockets, key, address);
            assert!(said.ends_with(&remedy), "{said}");
        }
        let said = refusal(&Sockets::default(), "http.listen", own);
        assert!(said.ends_with("; set http.listen to a free address (port 0 picks one)"), "{said}");
    }

    #[test]
    fn addresses_collide_if_one_covers_the_other() {
        let table = [
            ("127.0.0.1:80", "127.0.0.1:80", true),
            ("127.0.0.1:80", "127.0.0.1:81", false),
            ("127.0.0.1:80", "127.0.0.2:80", false),
            ("127.0.0.1:80", "0.0.0.0:80", true),
            ("127.0.0.1:80", "[::]:80", true),
            ("127.0.0.1:80", "[::ffff:127.0.0.1]:80", true),
            ("[::1]:80", "[::]:80", true),
            ("[::1]:80", "0.0.0.0:80", false),
            ("[::1]:80", "127.0.0.1:80", false),
        ];
        for (one, other, expected) in table {
            let (a, b) = (one.parse().unwrap(), other.parse().unwrap());
            assert_eq!((collide(a, b), collide(b, a)), (expected, expected), "{one} {other}");
        }
    }
}
