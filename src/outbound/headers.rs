//! Additional headers for targets, such as access tokens. They form sets, each in a file that the
//! configuration names. Callers name a set and never see its values.
//!
//! A set is restricted to some bots and some hosts, so a tenant cannot have it sent elsewhere. The
//! values go only to these hosts: no log, page, answer or store ever contains one.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use reqwest::header::{HeaderMap, HeaderName, HeaderValue};

use super::CheckedUrl;
use crate::expression::Glob;
use crate::id::BotId;

/// Maximum length of a set's name, in bytes.
pub(crate) const NAME_MAX_BYTES: usize = 64;

/// Headers that some hosts receive with calls of some bots. Their values exist only in their file.
#[derive(Debug, Clone)]
pub struct HeadersConfig {
    /// The name for requests and rules: 1 to 64 bytes.
    pub name: String,
    /// The file with the headers, one per line.
    pub headers_file: PathBuf,
    /// Globs over the bots that may name the set; at least one.
    pub bots: Vec<String>,
    /// Globs over the hosts that receive the headers, each with or without a port; at least one.
    pub hosts: Vec<String>,
}

/// Maximum size of a file, in bytes.
const FILE_MAX_BYTES: usize = 8 * 1024;
/// Maximum number of headers of a set.
const HEADERS_MAX: usize = 16;
/// Headers that the connection, the signature and the client set themselves.
const OURS: [&str; 13] = [
    "host",
    "content-length",
    "transfer-encoding",
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "upgrade",
    "expect",
    "x-deadline-ms",
    "accept-encoding",
    "proxy-authorization",
];
const SIGNATURES: &str = "webhook-";

/// Why a set cannot be used. Never quotes a value.
#[derive(Debug, thiserror::Error)]
pub enum HeadersError {
    /// The file cannot be read.
    #[error("callbacks.headers: the file {} of {name:?} cannot be read: {source}", path.display())]
    Read {
        /// The name of the set.
        name: String,
        /// The path of the file.
        path: PathBuf,
        /// The error of the operating system.
        #[source]
        source: io::Error,
    },
    /// The content of the file is invalid.
    #[error("callbacks.headers: the file {} of {name:?} {problem}", path.display())]
    Unusable {
        /// The name of the set.
        name: String,
        /// The path of the file.
        path: PathBuf,
        /// The problem and the remedy.
        problem: String,
    },
}

/// The sets by their names. Clones share them.
#[derive(Clone, Default)]
pub(crate) struct HeaderSets(Arc<BTreeMap<String, Set>>);

struct Set {
    bots: Vec<Glob>,
    hosts: Vec<Host>,
    headers: HeaderMap,
}

/// A pattern of hosts, with or without a port.
struct Host {
    name: Glob,
    /// `None`: every port.
    port: Option<u16>,
}

impl fmt::Debug for HeaderSets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.keys()).finish()
    }
}

impl HeaderSets {
    /// Reads the files.
    ///
    /// # Errors
    /// With the first file that cannot be read or is invalid.
    pub(crate) fn open(config: &[HeadersConfig]) -> Result<Self, HeadersError> {
        let read = |set: &HeadersConfig| {
            let (name, path) = (set.name.clone(), set.headers_file.clone());
            let text = match std::fs::read(&path) {
                Ok(text) => text,
                Err(source) => return Err(HeadersError::Read { name, path, source }),
            };
            let headers = match parse(&text) {
                Ok(headers) => headers,
                Err(problem) => return Err(HeadersError::Unusable { name, path, problem }),
            };
            let bots = set.bots.iter().map(|glob| Glob::new(glob)).collect();
            let hosts = set.hosts.iter().map(|host| Host::new(host)).collect();
            Ok((name, Set { bots, hosts, headers }))
        };
        let sets: Result<_, _> = config.iter().map(read).collect();
        sets.map(|sets| Self(Arc::new(sets)))
    }

    /// The headers of a set for a call of this bot to this URL.
    ///
    /// # Errors
    /// Says why the call does not get them. A set for other bots is reported as missing.
    pub(crate) fn of(
        &self,
        name: &str,
        bot: &BotId,
        url: &CheckedUrl,
    ) -> Result<&HeaderMap, String> {
        let set =
            self.0.get(name).filter(|set| set.bots.iter().any(|glob| glob.matches(bot.as_str())));
        let set = set.ok_or_else(|| {
            format!("is {name:?}, but callbacks.headers has no set of this name for bot {bot}")
        })?;
        if !set.hosts.iter().any(|host| host.matches(url)) {
            let (host, port) = (url.host(), url.port());
            return Err(format!(
                "is {name:?}, which callbacks.headers does not allow for {host}:{port}"
            ));
        }
        Ok(&set.headers)
    }
}

impl Host {
    fn new(text: &str) -> Self {
        // In a bracketed IPv6 address, only the part after the brackets can be a port.
        let after = text.rfind(']').map_or(0, |at| at + 1);
        let port = text[after..].rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        let name = match port {
            Some(_) => text.rsplit_once(':').map_or(text, |(name, _)| name),
            None => text,
        };
        Self { name: Glob::new(&name.to_ascii_lowercase()), port }
    }

    fn matches(&self, url: &CheckedUrl) -> bool {
        self.name.matches(url.host()) && self.port.is_none_or(|port| port == url.port())
    }
}

/// Parses one header per line. Skips empty lines and lines that start with `#`.
///
/// # Errors
/// Says what is wrong, and never quotes a value.
pub(crate) fn parse(text: &[u8]) -> Result<HeaderMap, String> {
    if text.len() > FILE_MAX_BYTES {
        return Err(format!("has more than {FILE_MAX_BYTES} bytes; shorten it"));
    }
    let text = std::str::from_utf8(text).map_err(|_| "is not UTF-8; write ASCII".to_owned())?;
    let mut headers = HeaderMap::new();
    for (line, text) in (1..).zip(text.lines()) {
        let text = text.trim();
        if text.is_empty() || text.starts_with('#') {
            continue;
        }
        let wrong = |what: &str| Err(format!("holds {what} in line {line}; write Name: value"));
        let Some((name, value)) = text.split_once(':') else {
            return wrong("no header");
        };
        let Ok(name) = HeaderName::from_bytes(name.trim_end().as_bytes()) else {
            return wrong("an invalid header name");
        };
        let Ok(mut value) = HeaderValue::from_str(value.trim()) else {
            return wrong("an invalid header value");
        };
        if OURS.contains(&name.as_str()) || name.as_str().starts_with(SIGNATURES) {
            return Err(format!("holds {name} in line {line}, which Fairlane sets; remove it"));
        }
        value.set_sensitive(true);
        if headers.insert(&name, value).is_some() {
            return Err(format!("holds {name} twice; write it once"));
        }
    }
    if headers.is_empty() || headers.len() > HEADERS_MAX {
        let count = headers.len();
        return Err(format!(
            "holds {count} headers; write 1 to {HEADERS_MAX}, one per line, as Name: value"
        ));
    }
    Ok(headers)
}

#[cfg(test)]
mod tests {
    use super::super::Policy;
    use super::*;

    fn url(text: &str) -> CheckedUrl {
        CheckedUrl::parse(text, &Policy::Operator).unwrap()
    }

    fn sets(text: &str, bots: &[&str], hosts: &[&str]) -> Result<HeaderSets, HeadersError> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), text).unwrap();
        let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
        HeaderSets::open(&[HeadersConfig {
            name: "crm".to_owned(),
            headers_file: file.path().to_owned(),
            bots: texts(bots),
            hosts: texts(hosts),
        }])
    }

    #[test]
    fn a_set_is_for_its_bots_and_hosts_and_no_others() {
        let text = "# of the CRM\nAuthorization: Bearer s3cret\n\nX-Tenant:7\n";
        let hosts = ["crm.example.com", "*.internal:8443", "[2001:db8::1]", "[2001:db8::2]:81"];
        let sets = sets(text, &["shop-*"], &hosts).unwrap();
        let of = |name: &str, bot: &str, to: &str| {
            sets.of(name, &BotId::parse(bot).unwrap(), &url(to)).map(HeaderMap::len)
        };
        for good in [
            "https://crm.example.com/",
            "http://CRM.example.com:8080/x?y",
            "https://a.internal:8443/",
            "http://[2001:db8::1]:99/",
            "http://[2001:db8::2]:81/",
        ] {
            assert_eq!(of("crm", "shop-7", good), Ok(2), "{good}");
        }
        for bad in [
            "https://evil.example.com/",
            "https://crm.example.com.evil.com/",
            "https://xcrm.example.com/",
            "https://a.internal/",
            "https://evil.com/crm.example.com",
            "http://[2001:db8::2]:82/",
        ] {
            assert!(of("crm", "shop-7", bad).unwrap_err().contains("does not allow"), "{bad}");
        }
        for (name, bot) in [("crm", "other"), ("erp", "shop-7")] {
            let error = of(name, bot, "https://crm.example.com/").unwrap_err();
            assert!(error.contains("no set of this name"), "{error}");
        }
    }

    #[test]
    fn a_value_is_never_printed() {
        let sets = sets("Authorization: Bearer s3cret", &["*"], &["*"]).unwrap();
        let headers = sets.of("crm", &BotId::parse("b").unwrap(), &url("http://a/")).unwrap();
        let printed = format!("{sets:?} {headers:?}");
        assert!(printed.contains("crm") && !printed.contains("s3cret"), "{printed}");
    }

    #[test]
    fn an_unsendable_or_reserved_header_is_refused_by_its_line_and_not_quoted() {
        let long = "X: ".to_owned() + &"y".repeat(FILE_MAX_BYTES);
        let many: Vec<_> = (0..17).map(|n| format!("X-{n}: s3cret")).collect();
        let many = many.join("\n");
        for (text, problem) in [
            ("", "holds 0 headers"),
            ("s3cret", "no header in line 1"),
            ("X: a\nX y: s3cret", "an invalid header name in line 2"),
            ("X: s3cret\u{7}", "an invalid header value in line 1"),
            ("Host: s3cret", "host in line 1, which Fairlane sets"),
            ("Content-Length: 3", "content-length in line 1"),
            ("Transfer-Encoding: chunked", "transfer-encoding"),
            ("Connection: close", "connection in line 1"),
            ("Webhook-Signature: s3cret", "webhook-signature"),
            ("X-Deadline-Ms: 1", "x-deadline-ms"),
            ("X: s3cret\nx: s3cret", "holds x twice"),
            (&long, "more than 8192 bytes"),
            (&many, "holds 17 headers"),
        ] {
            let error = sets(text, &["*"], &["*"]).unwrap_err().to_string();
            assert!(error.contains(problem) && !error.contains("s3cret"), "{error}");
            assert!(error.starts_with("callbacks.headers: the file "), "{error}");
        }
    }
}
