//! The rules for URLs that Fairlane may call, against server-side request forgery.
//!
//! | rule | tenant | operator |
//! |---|---|---|
//! | `http` or `https`, a host, without user name, password and fragment, at most 2,048 bytes | yes | yes |
//! | no port that browsers refuse (mail, shells and similar services) | yes | yes |
//! | every address public, or in `callbacks.allow_nets` | yes | – |
//!
//! Literal addresses are checked after the URL is parsed by the WHATWG rules. So decimal,
//! hexadecimal, octal, short, percent-encoded and full-width notations are all the same address.
//! Names are checked when they are resolved ([`super::resolve`]), and the client connects to
//! exactly the checked addresses. So changing the DNS record meanwhile (DNS rebinding) has no
//! effect.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::sync::Arc;

use hyper::Uri;
use ipnet::IpNet;
use url::{Host, Url};

/// Maximum length of a URL, in bytes.
pub const URL_MAX_BYTES: usize = 2_048;

/// The ports that the fetch standard refuses (<https://fetch.spec.whatwg.org/#port-blocking>). An
/// HTTP request could trick the services behind them into an action.
const BAD_PORTS: &[u16] = &[
    0, 1, 7, 9, 11, 13, 15, 17, 19, 20, 21, 22, 23, 25, 37, 42, 43, 53, 69, 77, 79, 87, 95, 101,
    102, 103, 104, 109, 110, 111, 113, 115, 117, 119, 123, 135, 137, 139, 143, 161, 179, 389, 427,
    465, 512, 513, 514, 515, 526, 530, 531, 532, 540, 548, 554, 556, 563, 587, 601, 636, 989, 990,
    993, 995, 1719, 1720, 1723, 2049, 3659, 4045, 4190, 5060, 5061, 6000, 6566, 6665, 6666, 6667,
    6668, 6669, 6679, 6697, 10080,
];

/// The origin of a URL. It decides which addresses the URL may reach.
#[derive(Debug, Clone)]
pub enum Policy {
    /// From a request or a rule: it may reach public addresses, and these networks.
    Tenant(Arc<[IpNet]>),
    /// From the configuration: it may reach every address.
    Operator,
}

impl Policy {
    /// Whether this address may be connected to.
    #[must_use]
    pub fn allows(&self, address: IpAddr) -> bool {
        match self {
            Self::Operator => true,
            Self::Tenant(nets) => {
                let inner = translated(address).map(IpAddr::V4);
                is_public(address)
                    || nets.iter().any(|net| {
                        net.contains(&address) || inner.is_some_and(|inner| net.contains(&inner))
                    })
            }
        }
    }
}

/// Why a URL is refused. Never quotes possible secrets.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum UrlError {
    /// Longer than [`URL_MAX_BYTES`].
    #[error("has {0} bytes; at most {URL_MAX_BYTES} are allowed")]
    TooLong(usize),
    /// White space or a control character, which URL parsers remove silently.
    #[error("holds white space or a control character; write it percent-encoded")]
    Character,
    /// Not a URL.
    #[error("is not a URL ({0}); write http://HOST/PATH or https://HOST/PATH")]
    Malformed(#[from] url::ParseError),
    /// Another scheme than http or https.
    #[error("does not start with http:// or https://")]
    Scheme,
    /// A user name or password.
    #[error(
        "holds a user name or password, which would show up in logs; remove it: receivers authenticate requests by the signatures with callbacks.secrets"
    )]
    Credentials,
    /// A fragment, which is never sent.
    #[error("holds a fragment (#…), which is never sent; remove it")]
    Fragment,
    /// No host.
    #[error("names no host")]
    NoHost,
    /// A port of another service, which browsers refuse too.
    #[error("names port {0}, which is reserved for another protocol; choose another port")]
    Port(u16),
    /// A character that the client cannot send.
    #[error("holds a character that cannot be sent in a host or path; write it percent-encoded")]
    Unsendable,
    /// An address that is not public.
    #[error(transparent)]
    Address(#[from] AddressRefused),
}

/// An address that a URL of a tenant may not reach.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{}; callbacks.allow_nets may allow its network", self.place())]
pub struct AddressRefused {
    /// The host in the URL.
    pub host: String,
    /// The address of the host.
    pub address: IpAddr,
}

/// A URL that a [`Policy`] accepted.
///
/// `Debug` and `Display` leave out the query: it may hold a token.
#[derive(Clone, PartialEq, Eq)]
pub struct CheckedUrl {
    url: Url,
    operators: bool,
}

impl AddressRefused {
    /// The host, without the address of a name: a tenant could learn the addresses of internal names.
    fn place(&self) -> String {
        let Self { host, address } = self;
        let plain = host.trim_start_matches('[').trim_end_matches(']');
        if plain == address.to_string() {
            format!("the address is {address}, which is not public")
        } else {
            format!("{host} has an address that is not public")
        }
    }
}

impl CheckedUrl {
    /// Checks a URL. A literal address is checked immediately, a name when the client connects.
    ///
    /// # Errors
    /// Names the violated rule.
    pub fn parse(text: &str, policy: &Policy) -> Result<Self, UrlError> {
        if text.len() > URL_MAX_BYTES {
            return Err(UrlError::TooLong(text.len()));
        }
        if text.chars().any(|c| c.is_control() || c.is_whitespace()) {
            return Err(UrlError::Character);
        }
        let url = Url::parse(text)?;
        if !matches!(url.scheme(), "http" | "https") {
            return Err(UrlError::Scheme);
        }
        if !url.username().is_empty() || url.password().is_some() {
            return Err(UrlError::Credentials);
        }
        if url.fragment().is_some() {
            return Err(UrlError::Fragment);
        }
        let checked = Self { url, operators: matches!(policy, Policy::Operator) };
        if checked.host().is_empty() {
            return Err(UrlError::NoHost);
        }
        if BAD_PORTS.contains(&checked.port()) {
            return Err(UrlError::Port(checked.port()));
        }
        checked.judge(policy)?;
        // The client must send exactly the URL that was checked.
        let uri: Option<Uri> = checked.url.as_str().parse().ok();
        if uri.is_none_or(|uri| uri.host() != Some(checked.host())) {
            return Err(UrlError::Unsendable);
        }
        Ok(checked)
    }

    /// Checks the host if it is a literal address, because such a host is never resolved.
    pub(super) fn judge(&self, policy: &Policy) -> Result<(), AddressRefused> {
        let refused = |address| Err(AddressRefused { host: self.host().to_owned(), address });
        match self.literal() {
            Some(address) if !policy.allows(address) => refused(address),
            // `localhost` is this machine for every resolver (RFC 6761, 6.3).
            None if self.is_localhost() => {
                let loopback = [IpAddr::from(Ipv4Addr::LOCALHOST), Ipv6Addr::LOCALHOST.into()];
                let allowed = loopback.iter().any(|address| policy.allows(*address));
                if allowed { Ok(()) } else { refused(loopback[0]) }
            }
            _ => Ok(()),
        }
    }

    fn is_localhost(&self) -> bool {
        let name = self.host().trim_end_matches('.');
        name == "localhost" || name.ends_with(".localhost")
    }

    /// The address, if the host is one.
    #[must_use]
    pub fn literal(&self) -> Option<IpAddr> {
        match self.url.host()? {
            Host::Ipv4(address) => Some(address.into()),
            Host::Ipv6(address) => Some(address.into()),
            Host::Domain(_) => None,
        }
    }

    /// The name or address, in lower case.
    #[must_use]
    pub fn host(&self) -> &str {
        self.url.host_str().unwrap_or_default()
    }

    /// The port; default 80 or 443.
    #[must_use]
    pub fn port(&self) -> u16 {
        // Both schemes have a default port.
        self.url.port_or_known_default().unwrap_or_default()
    }

    /// Whether the URL comes from the configuration.
    #[must_use]
    pub fn is_operators(&self) -> bool {
        self.operators
    }

    /// The complete URL with its query: for the client, never for a log.
    #[must_use]
    pub fn expose(&self) -> &Url {
        &self.url
    }
}

impl fmt::Display for CheckedUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.url.as_str().split('?').next().unwrap_or_default())
    }
}

impl fmt::Debug for CheckedUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CheckedUrl({self})")
    }
}

/// Whether an address is public: the registries of IANA name no special purpose for it.
fn is_public(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => is_public_v4(address),
        IpAddr::V6(address) => match translated(address.into()) {
            Some(inner) => is_public_v4(inner),
            None => is_public_v6(address),
        },
    }
}

fn is_public_v4(address: Ipv4Addr) -> bool {
    !matches!(
        address.octets(),
        [0 | 10 | 127 | 224..=255, ..] // this network, private, loopback, multicast, reserved
            | [100, 64..=127, ..] // shared by carriers
            | [169, 254, ..] // link-local, where clouds keep their metadata
            | [172, 16..=31, ..]
            | [192, 0, 0 | 2, _] // protocols, documentation
            | [192, 88, 99, _] // 6to4 relays
            | [192, 168, ..]
            | [198, 18..=19, ..] // benchmarks
            | [198, 51, 100, _]
            | [203, 0, 113, _]
    )
}

fn is_public_v6(address: Ipv6Addr) -> bool {
    let segments = address.segments();
    match segments {
        // Protocols (Teredo, ORCHID, benchmarks) and documentation.
        [0x2001, 0..=0x01ff | 0x0db8, ..] | [0x3fff, 0..=0x0fff, ..] => false,
        // 6to4: packets go to the embedded IPv4 address.
        [0x2002, high, low, ..] => is_public_v4(join(high, low)),
        // The only range that IANA has allocated to public addresses.
        [first, ..] => (0x2000..0x4000).contains(&first),
    }
}

/// The IPv4 address that a connection to this IPv6 address reaches, if it is mapped or behind a
/// NAT64.
fn translated(address: IpAddr) -> Option<Ipv4Addr> {
    match address {
        IpAddr::V4(_) => None,
        IpAddr::V6(address) => match address.segments() {
            [0, 0, 0, 0, 0, 0xffff, high, low] | [0x64, 0xff9b, 0, 0, 0, 0, high, low] => {
                Some(join(high, low))
            }
            _ => None,
        },
    }
}

fn join(high: u16, low: u16) -> Ipv4Addr {
    Ipv4Addr::from((u32::from(high) << 16) | u32::from(low))
}

#[cfg(test)]
mod tests;
