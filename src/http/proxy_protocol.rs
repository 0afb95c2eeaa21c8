//! The header of the PROXY protocol, version 2: a load balancer that does not speak HTTP uses it to
//! report the client of a connection
//! (<https://www.haproxy.org/download/3.0/doc/proxy-protocol.txt>).
//!
//! ```text
//! \r\n\r\n\0\r\nQUIT\n   signature, 12 bytes
//! 0x21                   version 2, command PROXY; 0x20: LOCAL, the balancer's own connection
//! 0x11                   TCP over IPv4; 0x21: over IPv6; 0x00 and 0x31: no address
//! 0x000c                 number of following bytes: addresses, ports, optional fields
//! ```
//!
//! Version 1, a line of text, is not supported.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use tokio::io::{AsyncRead, AsyncReadExt as _};

const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The header of a connection that no client opened, such as a probe.
pub(super) const LOCAL: [u8; 16] = *b"\r\n\r\n\0\r\nQUIT\n\x20\0\0\0";
const VERSION_1: &[u8] = b"PROXY ";
/// Maximum length of the part after the first 16 bytes.
const LENGTH_MAX: usize = 4 << 10;

/// Why a connection is closed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Unusable {
    /// Version 1 of the protocol.
    Version1,
    /// The connection starts with other data.
    Missing,
    /// The header violates the protocol, or ends early.
    Malformed,
    /// The header did not arrive in time.
    Timeout,
    /// The peer closed the connection without a byte, as load balancers do for health checks.
    Nothing,
}

impl Unusable {
    /// All reasons that are counted.
    pub(crate) const COUNTED: [Self; 4] =
        [Self::Version1, Self::Missing, Self::Malformed, Self::Timeout];

    /// Its name, as a label.
    pub(crate) fn as_str(self) -> &'static str {
        match self {
            Self::Version1 => "v1",
            Self::Missing => "missing",
            Self::Malformed => "malformed",
            Self::Timeout => "timeout",
            Self::Nothing => "nothing",
        }
    }

    /// The remedy for an operator.
    pub(super) fn remedy(self) -> &'static str {
        match self {
            Self::Version1 => "let the proxy send version 2 (send-proxy-v2 of HAProxy)",
            Self::Missing => {
                "let the proxy send the PROXY protocol, version 2, or set http.proxy_protocol = false"
            }
            Self::Malformed | Self::Timeout | Self::Nothing => "check what the proxy sends",
        }
    }
}

/// Reads the header, and no byte after it. `None`: it contains no address.
///
/// # Cancel safety
/// The bytes already read are lost, so the connection cannot be used afterwards.
pub(super) async fn read<S: AsyncRead + Unpin>(stream: &mut S) -> Result<Option<IpAddr>, Unusable> {
    let mut head = [0; 16];
    let mut have = 0;
    while have < head.len() {
        match stream.read(&mut head[have..]).await {
            Ok(0) if have == 0 => return Err(Unusable::Nothing),
            Ok(0) => return Err(Unusable::Malformed),
            Ok(read) => have += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(_) => return Err(Unusable::Malformed),
        }
        let given = &head[..have.min(SIGNATURE.len())];
        // Fail as soon as the data is certainly wrong: an HTTP client may send nothing more and
        // wait.
        if !SIGNATURE.starts_with(given) {
            let first = &given[..given.len().min(VERSION_1.len())];
            if first == VERSION_1 {
                return Err(Unusable::Version1);
            }
            if !VERSION_1.starts_with(first) {
                return Err(Unusable::Missing);
            }
        }
    }
    let [.., version, family, high, low] = head;
    let length = usize::from(u16::from_be_bytes([high, low]));
    if version >> 4 != 2 || length > LENGTH_MAX {
        return Err(Unusable::Malformed);
    }
    let mut rest = vec![0; length];
    stream.read_exact(&mut rest).await.map_err(|_| Unusable::Malformed)?;
    match (version & 0x0f, family) {
        // LOCAL: the rest of the header is skipped.
        (0, _) | (1, 0x00) => Ok(None),
        (1, 0x11) if length >= 12 => {
            let source: [u8; 4] = rest[..4].try_into().map_err(|_| Unusable::Malformed)?;
            Ok(Some(Ipv4Addr::from(source).into()))
        }
        (1, 0x21) if length >= 36 => {
            let source: [u8; 16] = rest[..16].try_into().map_err(|_| Unusable::Malformed)?;
            Ok(Some(IpAddr::from(Ipv6Addr::from(source)).to_canonical()))
        }
        (1, 0x31) if length >= 216 => Ok(None),
        _ => Err(Unusable::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(version: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [&SIGNATURE[..], &[version, family], &length, rest].concat()
    }

    fn ipv4(source: [u8; 4]) -> Vec<u8> {
        [&source[..], &[127, 0, 0, 1, 0x12, 0x34, 0, 80]].concat()
    }

    /// The result for these bytes, and the number of bytes that were not read.
    async fn read_all(bytes: &[u8]) -> (Result<Option<IpAddr>, Unusable>, usize) {
        let mut left = bytes;
        let read = read(&mut left).await;
        (read, left.len())
    }

    #[tokio::test]
    async fn the_source_is_read_and_not_a_byte_behind_the_header() {
        let behind = b"GET / HTTP/1.1\r\n";
        let ipv6 = |source: &str| {
            let source: Ipv6Addr = source.parse().unwrap();
            [&source.octets()[..], &[0; 20]].concat()
        };
        let with_more = [ipv4([203, 0, 113, 7]), vec![4, 0, 1, 0]].concat();
        for (bytes, source) in [
            (header(0x21, 0x11, &ipv4([203, 0, 113, 7])), Some("203.0.113.7")),
            (header(0x21, 0x11, &with_more), Some("203.0.113.7")),
            (header(0x21, 0x21, &ipv6("2001:db8::7")), Some("2001:db8::7")),
            (header(0x21, 0x21, &ipv6("::ffff:203.0.113.7")), Some("203.0.113.7")),
            (header(0x21, 0x00, &[]), None),
            (header(0x21, 0x31, &[0; 216]), None),
            (LOCAL.to_vec(), None),
            (header(0x20, 0x11, &ipv4([203, 0, 113, 7])), None),
        ] {
            let source = source.map(|text| text.parse().unwrap());
            let (read, left) = read_all(&[&bytes[..], behind].concat()).await;
            assert_eq!((read, left), (Ok(source), behind.len()), "{bytes:02x?}");
        }
    }

    #[tokio::test]
    async fn everything_else_is_refused_with_its_reason() {
        let good = header(0x21, 0x11, &ipv4([203, 0, 113, 7]));
        for (bytes, reason) in [
            (&b""[..], Unusable::Nothing),
            (b"PROXY TCP4 203.0.113.7 127.0.0.1 1 80\r\n", Unusable::Version1),
            (b"PROXY UNKNOWN\r\n", Unusable::Version1),
            (b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", Unusable::Missing),
            (b"GET", Unusable::Missing),
            (b"PUT / HTTP/1.1\r\n", Unusable::Missing),
            (b"\r\n\r\nGET / HTTP/1.1", Unusable::Missing),
            (b"PROX", Unusable::Malformed),
            (&good[..10], Unusable::Malformed),
            (&good[..20], Unusable::Malformed),
            (&header(0x11, 0x11, &ipv4([1; 4])), Unusable::Malformed),
            (&header(0x22, 0x11, &ipv4([1; 4])), Unusable::Malformed),
            (&header(0x21, 0x11, &[1; 11]), Unusable::Malformed),
            (&header(0x21, 0x21, &[1; 35]), Unusable::Malformed),
            (&header(0x21, 0x12, &ipv4([1; 4])), Unusable::Malformed),
            (&header(0x21, 0x31, &[0; 215]), Unusable::Malformed),
            (&header(0x21, 0x11, &[0; LENGTH_MAX + 1]), Unusable::Malformed),
        ] {
            assert_eq!(read_all(bytes).await.0, Err(reason), "{bytes:02x?}");
        }
    }

    #[tokio::test]
    async fn it_may_arrive_byte_by_byte() {
        let (mut ours, mut theirs) = tokio::io::duplex(1);
        let bytes = header(0x21, 0x11, &ipv4([203, 0, 113, 7]));
        let sending = async {
            use tokio::io::AsyncWriteExt as _;
            theirs.write_all(&bytes).await.unwrap();
        };
        let (read, ()) = tokio::join!(read(&mut ours), sending);
        assert_eq!(read, Ok(Some("203.0.113.7".parse().unwrap())));
    }

    proptest! {
        #[test]
        fn no_bytes_make_it_panic_or_read_more_than_it_says(
            tail in prop::collection::vec(any::<u8>(), 0..80),
        ) {
            let bytes = [&SIGNATURE[..], &tail].concat();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            let (read, left) = runtime.block_on(read_all(&bytes));
            if read.is_ok() {
                let length = usize::from(u16::from_be_bytes([bytes[14], bytes[15]]));
                prop_assert_eq!(left, bytes.len() - 16 - length);
            }
        }
    }
}
