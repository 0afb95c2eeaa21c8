//! Requests to the process: whole answers over persistent connections, and heads of streams.

use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Mutex, PoisonError};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};

use crate::http::is_whole;

/// A request without a body.
pub(crate) fn request(method: &str, path: &str, host: SocketAddr, token: Option<&str>) -> Vec<u8> {
    with_body(method, path, host, token, "", b"")
}

/// A request with a body of a content type.
pub(super) fn with_body(
    method: &str,
    path: &str,
    host: SocketAddr,
    token: Option<&str>,
    kind: &str,
    body: &[u8],
) -> Vec<u8> {
    let mut head = format!("{method} {path} HTTP/1.1\r\nhost: {host}\r\n");
    if let Some(token) = token {
        head.extend(["authorization: Bearer ", token, "\r\n"]);
    }
    if !kind.is_empty() {
        head.extend(["content-type: ", kind, "\r\n"]);
        head.extend(["content-length: ", &body.len().to_string(), "\r\n"]);
    }
    head.push_str("\r\n");
    [head.as_bytes(), body].concat()
}

/// The same request, after which the server closes the connection.
pub(super) fn closing(request: &[u8]) -> Vec<u8> {
    let end = request.windows(2).position(|window| window == b"\r\n").map_or(0, |at| at + 2);
    [&request[..end], b"connection: close\r\n", &request[end..]].concat()
}

/// Persistent connections to one process: as many as there are concurrent requests.
#[derive(Debug)]
pub(crate) struct Client {
    address: SocketAddr,
    idle: Mutex<Vec<TcpStream>>,
}

impl Client {
    pub(crate) fn new(address: SocketAddr) -> Self {
        Self { address, idle: Mutex::default() }
    }

    /// The status and the answer. An idle connection that the server closed is replaced once.
    pub(crate) async fn ask(&self, request: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        if let Some(stream) = idle
            && let Ok(answer) = self.on(stream, request).await
        {
            return Ok(answer);
        }
        let stream = TcpStream::connect(self.address).await?;
        stream.set_nodelay(true)?;
        self.on(stream, request).await
    }

    /// The status; 0: no answer.
    pub(super) async fn status(&self, request: &[u8]) -> u16 {
        self.ask(request).await.map_or(0, |(status, _)| status)
    }

    async fn on(&self, mut stream: TcpStream, request: &[u8]) -> io::Result<(u16, Vec<u8>)> {
        stream.write_all(request).await?;
        let mut answer = Vec::new();
        while !is_whole(&answer) {
            if stream.read_buf(&mut answer).await? == 0 {
                return Err(io::ErrorKind::UnexpectedEof.into());
            }
        }
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(stream);
        Ok((status_of(&answer), answer))
    }
}

/// A connection from an address of the loopback.
pub(super) async fn connect_from(last: u8, to: SocketAddr) -> io::Result<TcpStream> {
    let socket = TcpSocket::new_v4()?;
    socket.bind(SocketAddr::from((Ipv4Addr::new(127, 0, 0, last), 0)))?;
    socket.connect(to).await
}

/// Sends a request over a connection of its own and returns the status, and the connection, from
/// which the rest of the answer can be read.
pub(super) async fn open(to: SocketAddr, request: &[u8]) -> io::Result<(u16, TcpStream)> {
    let mut stream = TcpStream::connect(to).await?;
    stream.write_all(request).await?;
    let mut head = Vec::new();
    while !head.windows(4).any(|window| window == b"\r\n\r\n") {
        if stream.read_buf(&mut head).await? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
    }
    Ok((status_of(&head), stream))
}

/// Reads an answer to its end, without keeping it. The request must ask to close the connection.
pub(super) async fn read_away(to: SocketAddr, request: &[u8]) -> io::Result<()> {
    let (_, mut stream) = open(to, request).await?;
    tokio::io::copy(&mut stream, &mut tokio::io::sink()).await.map(drop)
}

fn status_of(answer: &[u8]) -> u16 {
    let text = answer.get(9..12).and_then(|status| std::str::from_utf8(status).ok());
    text.and_then(|status| status.parse().ok()).unwrap_or(0)
}
