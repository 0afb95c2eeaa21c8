//! The client of a request behind proxies.
//!
//! Any client can send `X-Forwarded-For` and `Forwarded` (RFC 7239), so Fairlane reads them only on
//! connections from a trusted proxy (`http.trusted_proxies`). Each proxy appends the address of its
//! peer. Fairlane therefore reads the entries backwards from the last one, and skips trusted
//! proxies. The first entry that is not a trusted proxy is the client. The entries before it come
//! from the client and are ignored.
//!
//! An entry without an address (`unknown`, `_hidden`, anything malformed) ends the search. The
//! proxy that wrote the entry then counts as the client. If both headers are present and name
//! different clients, the connected proxy counts as the client: a proxy that writes one of the
//! headers may pass the other one on unchanged.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use axum::http::{HeaderMap, HeaderName, header};
use ipnet::IpNet;

use super::proxy_protocol;

const FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");
/// Maximum number of proxies in front of Fairlane.
const HOPS_MAX: usize = 32;
/// Maximum length of an address with its port; a longer text is not an address.
const ADDRESS_MAX: usize = 64;

/// The trusted proxies.
#[derive(Debug, Clone, Default)]
pub(crate) struct Proxies {
    nets: Arc<[IpNet]>,
    /// Whether their connections start with a PROXY protocol header.
    pub(super) speak_first: bool,
}

impl Proxies {
    /// The proxies in `nets`. `speak_first`: each of their connections starts with a PROXY protocol
    /// header, version 2.
    pub(crate) fn new(nets: &[IpNet], speak_first: bool) -> Self {
        Self { nets: nets.into(), speak_first }
    }

    /// Whether the address belongs to a trusted proxy.
    pub(super) fn trusts(&self, address: IpAddr) -> bool {
        let address = address.to_canonical();
        self.nets.iter().any(|net| net.contains(&address))
    }

    /// The bytes that a probe from `address` must send before its request.
    pub(crate) fn greeting(&self, address: IpAddr) -> &'static [u8] {
        if self.speak_first && self.trusts(address) { &proxy_protocol::LOCAL } else { &[] }
    }

    /// The client of a request on a connection from `peer`.
    pub(super) fn client(&self, peer: IpAddr, headers: &HeaderMap) -> IpAddr {
        if !self.trusts(peer) {
            return peer;
        }
        let lines = headers.get_all(FORWARDED_FOR).iter().rev();
        let listed = lines.flat_map(|line| match line.to_str() {
            Ok(line) => Entries::List(line.rsplit(',')),
            Err(_) => Entries::Unreadable(Some(())),
        });
        let lines = headers.get_all(header::FORWARDED).iter().rev();
        let forwarded = lines.flat_map(|line| {
            let elements = line.to_str().ok().and_then(elements);
            elements.unwrap_or_else(|| vec![None]).into_iter().rev()
        });
        match (self.walk(peer, listed), self.walk(peer, forwarded)) {
            (Some(one), Some(other)) if one != other => peer,
            (Some(client), _) | (None, Some(client)) => client,
            (None, None) => peer,
        }
    }

    /// The first of `entries` (nearest first) that is not a trusted proxy; `None` if there is none.
    fn walk(&self, peer: IpAddr, entries: impl Iterator<Item = Option<IpAddr>>) -> Option<IpAddr> {
        let mut nearest = None;
        for entry in entries.take(HOPS_MAX) {
            match entry {
                None => return nearest.or(Some(peer)),
                Some(address) if self.trusts(address) => nearest = Some(address),
                Some(address) => return Some(address),
            }
        }
        nearest
    }
}

/// The entries of a line of `X-Forwarded-For`, last one first.
enum Entries<'a> {
    List(std::str::RSplit<'a, char>),
    Unreadable(Option<()>),
}

impl Iterator for Entries<'_> {
    type Item = Option<IpAddr>;

    fn next(&mut self) -> Option<Option<IpAddr>> {
        match self {
            Self::List(entries) => entries.next().map(|entry| address(entry.trim())),
            Self::Unreadable(once) => once.take().map(|()| None),
        }
    }
}

/// The addresses of the elements of a line of `Forwarded`, in order; `None`: the line is malformed.
fn elements(line: &str) -> Option<Vec<Option<IpAddr>>> {
    let mut elements = Vec::new();
    let (mut rest, mut client, mut seen) = (line, None, false);
    loop {
        rest = rest.trim_start_matches([' ', '\t']);
        let end = rest.find(['=', ',', ';']).unwrap_or(rest.len());
        let name = rest[..end].trim_end_matches([' ', '\t']);
        rest = &rest[end..];
        if let Some(behind) = rest.strip_prefix('=') {
            let (value, behind) = value(behind)?;
            if name.eq_ignore_ascii_case("for") {
                // An element with two of them is ambiguous.
                client = if seen { None } else { address(&value) };
                seen = true;
            }
            rest = behind.trim_start_matches([' ', '\t']);
        } else if !name.is_empty() {
            return None;
        }
        match rest.chars().next() {
            Some(';') => {}
            Some(',') | None => {
                elements.push(client.take());
                seen = false;
            }
            Some(_) => return None,
        }
        match rest.get(1..) {
            Some(behind) if !rest.is_empty() => rest = behind,
            _ => return Some(elements),
        }
    }
}

/// A token or a quoted string, and the rest of the text.
fn value(text: &str) -> Option<(String, &str)> {
    let Some(quoted) = text.strip_prefix('"') else {
        let end = text.find([',', ';', ' ', '\t', '"']).unwrap_or(text.len());
        return Some((text[..end].to_owned(), &text[end..]));
    };
    let (mut value, mut escaped) = (String::new(), false);
    for (at, letter) in quoted.char_indices() {
        match letter {
            _ if escaped => {
                value.push(letter);
                escaped = false;
            }
            '\\' => escaped = true,
            '"' => return Some((value, &quoted[at + 1..])),
            _ => value.push(letter),
        }
    }
    None
}

/// An address, with or without a port. An IPv6 address with a port is in brackets.
fn address(text: &str) -> Option<IpAddr> {
    if text.len() > ADDRESS_MAX {
        return None;
    }
    if let Some(inner) = text.strip_prefix('[') {
        let (address, port) = inner.split_once(']')?;
        let is_port = port.is_empty() || port.strip_prefix(':').is_some_and(is_port);
        let address = address.parse::<Ipv6Addr>().ok().filter(|_| is_port)?;
        return Some(IpAddr::from(address).to_canonical());
    }
    if let Ok(address) = text.parse::<IpAddr>() {
        return Some(address.to_canonical());
    }
    let (address, port) = text.split_once(':')?;
    address.parse::<Ipv4Addr>().ok().filter(|_| is_port(port)).map(IpAddr::from)
}

/// A port: digits, or an obfuscated name.
fn is_port(text: &str) -> bool {
    let digits = text.len() <= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let hidden =
        |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    !text.is_empty() && (digits || text.strip_prefix('_').is_some_and(hidden))
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;
    use proptest::prelude::*;

    use super::*;

    fn proxies() -> Proxies {
        let nets = ["10.0.0.0/8", "127.0.0.1/32", "fd00::/8"].map(|net| net.parse().unwrap());
        Proxies::new(&nets, false)
    }

    fn client_of(peer: &str, lines: &[(&'static str, &str)]) -> String {
        let mut headers = HeaderMap::new();
        for (name, value) in lines {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        proxies().client(peer.parse().unwrap(), &headers).to_string()
    }

    const XFF: &str = "x-forwarded-for";
    const FWD: &str = "forwarded";
    const PROXY: &str = "10.0.0.1";

    #[test]
    fn the_client_is_the_last_address_that_is_no_trusted_proxy() {
        for (lines, client) in [
            (&[][..], PROXY),
            (&[(XFF, "203.0.113.7")], "203.0.113.7"),
            (&[(XFF, " 203.0.113.7 ")], "203.0.113.7"),
            (&[(XFF, "203.0.113.7:4711")], "203.0.113.7"),
            (&[(XFF, "2001:db8::7")], "2001:db8::7"),
            (&[(XFF, "[2001:db8::7]")], "2001:db8::7"),
            (&[(XFF, "[2001:db8::7]:443")], "2001:db8::7"),
            (&[(XFF, "::ffff:203.0.113.7")], "203.0.113.7"),
            // The entries before the client's address come from the client.
            (&[(XFF, "6.6.6.6, 203.0.113.7")], "203.0.113.7"),
            (&[(XFF, "6.6.6.6,10.0.0.9, 203.0.113.7 ,10.2.3.4,  fd00::1")], "203.0.113.7"),
            // Several lines form one list, in order.
            (&[(XFF, "6.6.6.6"), (XFF, "203.0.113.7"), (XFF, "10.0.0.3")], "203.0.113.7"),
            // All entries are proxies: the farthest one counts as the client.
            (&[(XFF, "10.0.0.7, 10.0.0.8")], "10.0.0.7"),
            (&[(FWD, "for=203.0.113.7")], "203.0.113.7"),
            (&[(FWD, "For=203.0.113.7;proto=https;by=10.0.0.1")], "203.0.113.7"),
            (&[(FWD, "proto=http; FOR=\"203.0.113.7:80\" ;host=x")], "203.0.113.7"),
            (&[(FWD, "for=\"[2001:db8::7]:4711\"")], "2001:db8::7"),
            (&[(FWD, "for=\"[2001:db8::7]:_port\"")], "2001:db8::7"),
            (&[(FWD, "for=\"\\[2001:db8::7\\]\"")], "2001:db8::7"),
            (&[(FWD, "for=6.6.6.6, for=203.0.113.7, for=10.1.1.1")], "203.0.113.7"),
            (&[(FWD, "for=6.6.6.6"), (FWD, "for=203.0.113.7")], "203.0.113.7"),
            (&[(FWD, "for=\"6.6.6.6, for=7.7.7.7\", for=203.0.113.7")], "203.0.113.7"),
            (&[(XFF, "203.0.113.7"), (FWD, "for=203.0.113.7")], "203.0.113.7"),
        ] {
            assert_eq!(client_of(PROXY, lines), client, "{lines:?}");
        }
    }

    #[test]
    fn an_entry_that_tells_no_address_counts_as_the_proxy_that_wrote_it() {
        let long = format!("{}1.2.3.4", "0".repeat(200));
        for (lines, client) in [
            (&[(XFF, "unknown")][..], PROXY),
            (&[(XFF, "203.0.113.7, unknown, 10.0.0.2")], "10.0.0.2"),
            (&[(XFF, "203.0.113.7, ")], PROXY),
            (&[(XFF, "203.0.113.7,,10.0.0.2")], "10.0.0.2"),
            (&[(XFF, "")], PROXY),
            (&[(XFF, "203.0.113.7:port")], PROXY),
            (&[(XFF, "203.0.113.7:")], PROXY),
            (&[(XFF, "203.0.113.7:123456")], PROXY),
            (&[(XFF, "[203.0.113.7]")], PROXY),
            (&[(XFF, "[2001:db8::7")], PROXY),
            (&[(XFF, "[2001:db8::7]443")], PROXY),
            (&[(XFF, "fe80::1%eth0")], PROXY),
            (&[(XFF, "010.0.0.2")], PROXY),
            (&[(XFF, "localhost")], PROXY),
            (&[(XFF, &long)], PROXY),
            (&[(FWD, "for=unknown")], PROXY),
            (&[(FWD, "for=_hidden")], PROXY),
            (&[(FWD, "for=203.0.113.7, for=_SEVKISEK, for=10.0.0.2")], "10.0.0.2"),
            (&[(FWD, "proto=https")], PROXY),
            (&[(FWD, "for=1.1.1.1;for=203.0.113.7")], PROXY),
            (&[(FWD, "for=\"203.0.113.7")], PROXY),
            (&[(FWD, "for=\", for=203.0.113.7")], PROXY),
            (&[(FWD, "for=\"203.0.113.7\"x")], PROXY),
            (&[(FWD, "203.0.113.7")], PROXY),
            (&[(FWD, "")], PROXY),
            // The headers disagree: the client may have sent one of them.
            (&[(XFF, "203.0.113.7"), (FWD, "for=6.6.6.6")], PROXY),
            (&[(XFF, "203.0.113.7"), (FWD, "for=_x")], PROXY),
        ] {
            assert_eq!(client_of(PROXY, lines), client, "{lines:?}");
        }
        let mut headers = HeaderMap::new();
        headers.append(XFF, HeaderValue::from_static("203.0.113.7"));
        headers.append(XFF, HeaderValue::from_bytes(b"203.0.113.8\xff").unwrap());
        let peer = PROXY.parse().unwrap();
        assert_eq!(proxies().client(peer, &headers), peer);
    }

    #[test]
    fn of_very_many_proxies_only_the_nearest_are_looked_at() {
        let many = vec!["10.0.0.5"; HOPS_MAX + 1].join(",");
        let lines = [(XFF, &*format!("203.0.113.7,{many}"))];
        assert_eq!(client_of(PROXY, &lines), "10.0.0.5");
    }

    #[test]
    fn headers_of_untrusted_peers_are_not_read() {
        for peer in ["203.0.113.50", "2001:db8::50"] {
            for lines in [[(XFF, "6.6.6.6")], [(FWD, "for=6.6.6.6")]] {
                assert_eq!(client_of(peer, &lines), peer);
            }
        }
        let headers = HeaderMap::from_iter([(FORWARDED_FOR, HeaderValue::from_static("6.6.6.6"))]);
        let peer = PROXY.parse().unwrap();
        assert_eq!(Proxies::default().client(peer, &headers), peer, "nobody is trusted");
        assert_eq!(client_of("::ffff:10.0.0.1", &[(XFF, "203.0.113.7")]), "203.0.113.7");
    }

    proptest! {
        #[test]
        fn the_client_is_found_by_the_entry_of_the_proxy_whatever_precedes_it(
            before in "[ -~]{0,80}", forwarded in prop::bool::ANY,
        ) {
            let added = if forwarded { "for=203.0.113.7" } else { "203.0.113.7" };
            let name = if forwarded { FWD } else { XFF };
            // Some proxies cannot parse the client's line, and add a line of their own.
            let found = client_of(PROXY, &[(name, before.trim()), (name, added)]);
            prop_assert_eq!(&found, "203.0.113.7");
            // On the same line, a client can hide its address but not claim another one.
            let joined = format!("{}, {added}", before.trim());
            let found = client_of(PROXY, &[(name, &joined)]);
            prop_assert!(found == "203.0.113.7" || found == PROXY, "{found} of {joined:?}");
        }
    }
}
