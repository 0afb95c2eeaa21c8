//! The address of Redis. It may contain a password and is therefore never printed in full.

use std::fmt;

use redis::IntoConnectionInfo;

/// Why a text is not the address of Redis. Never quotes the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RedisUrlError {
    /// The scheme is missing or unknown.
    #[error("does not start with a known scheme; {REMEDY}")]
    Scheme,
    /// A cluster address with a database number.
    #[error("names a database of a cluster, which has only one; leave out what follows the last /")]
    Database,
    /// An address of sentinels without a usable service name.
    #[error(
        "names no service of the sentinels; write the name of `sentinel monitor` behind the \
        sentinels: redis+sentinel://HOST:PORT,HOST:PORT/NAME"
    )]
    Service,
    /// The rest of the address is not usable.
    #[error("is not a usable Redis URL; {REMEDY}")]
    Malformed,
}

const REMEDY: &str = "write redis://[USER:PASSWORD@]HOST[:PORT][/DB], rediss://… for TLS, \
    redis+cluster://[USER:PASSWORD@]HOST:PORT,HOST:PORT, \
    redis+sentinel://[USER:PASSWORD@]HOST[:PORT],HOST[:PORT]/NAME[/DB] or redis+unix:///PATH";

/// The port of a sentinel without one in the address.
const SENTINEL_PORT: u16 = 26_379;

/// The address of Redis: a server (`redis://`, with TLS `rediss://`, `redis+unix:///`, `unix:///`),
/// some nodes of a cluster, separated by commas (`redis+cluster://`, with TLS
/// `rediss+cluster://`), or sentinels and the name of their service (`redis+sentinel://`, with TLS
/// `rediss+sentinel://`).
///
/// User and password are those of Redis. Those of the sentinels are `sentinel_user` and
/// `sentinel_password` behind a `?`.
///
/// `Debug` and `Display` leave out user, password and everything after a `?`.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// Checks the scheme and that the client can parse the rest.
    ///
    /// # Errors
    /// If the scheme is unknown, or host, port, database number or path are unusable.
    pub fn parse(text: &str) -> Result<Self, RedisUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(RedisUrlError::Scheme)?;
        match scheme {
            "redis" => {}
            // The fragments that the client knows weaken TLS.
            "rediss" | "rediss+cluster" | "redis+cluster" | "redis+sentinel"
            | "rediss+sentinel"
                if !rest.contains('#') => {}
            // Without an absolute path the client would take the first part for a host.
            "redis+unix" | "unix" if rest.starts_with('/') => {}
            "rediss" | "rediss+cluster" | "redis+cluster" | "redis+sentinel"
            | "rediss+sentinel" | "redis+unix" | "unix" => {
                return Err(RedisUrlError::Malformed);
            }
            _ => return Err(RedisUrlError::Scheme),
        }
        let url = Self(text.to_owned());
        if url.is_cluster() && url.hosts().contains('/') {
            return Err(RedisUrlError::Database);
        }
        if url.is_sentinel() && !url.service().is_some_and(is_name) {
            return Err(RedisUrlError::Service);
        }
        for seed in url.seeds().into_iter().chain(url.primary()) {
            // The client's error is dropped on purpose: it may quote the address.
            seed.into_connection_info().map_err(|_| RedisUrlError::Malformed)?;
        }
        Ok(url)
    }

    /// The complete address with its credentials: for the client, never for a log.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }

    /// Whether it names nodes of a cluster.
    #[must_use]
    pub fn is_cluster(&self) -> bool {
        self.scheme().ends_with("+cluster")
    }

    /// Whether it names sentinels.
    #[must_use]
    pub fn is_sentinel(&self) -> bool {
        self.scheme().ends_with("+sentinel")
    }

    /// The service whose primary the sentinels name.
    pub(crate) fn service(&self) -> Option<&str> {
        let (_, path) = self.hosts().split_once('/').filter(|_| self.is_sentinel())?;
        path.split('/').next()
    }

    /// Whether connections are encrypted.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.scheme().starts_with("rediss")
    }

    /// One address per named server, credentials included. Of sentinels: with their own
    /// credentials.
    pub(crate) fn seeds(&self) -> Vec<String> {
        if !self.is_cluster() && !self.is_sentinel() {
            return vec![self.0.clone()];
        }
        let (mut at, mut query) = (self.credentials(), self.query());
        let own;
        if self.is_sentinel() {
            let named = |name| query.split('&').find_map(|pair| pair.strip_prefix(name));
            let (user, password) = (named("sentinel_user="), named("sentinel_password="));
            own = password.map_or_else(String::new, |password| {
                format!("{}:{password}@", user.unwrap_or_default())
            });
            (at, query) = (&own, "");
        }
        let scheme = self.plain_scheme();
        let hosts = self.hosts().split('/').next().unwrap_or_default();
        let seed = |host: &str| {
            let port = if self.is_sentinel() && !has_port(host.trim()) {
                format!(":{SENTINEL_PORT}")
            } else {
                String::new()
            };
            format!("{scheme}://{at}{}{port}?{query}", host.trim())
        };
        hosts.split(',').map(seed).collect()
    }

    /// The address of the primary that sentinels name, with a host that stands for its own.
    pub(crate) fn primary(&self) -> Option<String> {
        if !self.is_sentinel() {
            return None;
        }
        let (_, path) = self.hosts().split_once('/')?;
        let database = path.split_once('/').map_or("", |(_, database)| database);
        let (scheme, at, query) = (self.plain_scheme(), self.credentials(), self.query());
        Some(format!("{scheme}://{at}primary:6379/{database}?{query}"))
    }

    /// The scheme of one server.
    fn plain_scheme(&self) -> &'static str {
        if self.is_tls() { "rediss" } else { "redis" }
    }

    /// The part before the hosts, up to the last `@`.
    fn credentials(&self) -> &str {
        let bare = self.0.split('?').next().unwrap_or_default();
        let rest = bare.split_once("://").map_or("", |(_, rest)| rest);
        rest.rfind('@').map_or("", |end| &rest[..=end])
    }

    fn query(&self) -> &str {
        self.0.split_once('?').map_or("", |(_, query)| query)
    }

    fn scheme(&self) -> &str {
        self.0.split_once("://").map_or("", |(scheme, _)| scheme)
    }

    /// The part after the credentials, up to a `?`.
    fn hosts(&self) -> &str {
        let bare = self.0.split(['?', '#']).next().unwrap_or_default();
        let rest = bare.split_once("://").map_or("", |(_, rest)| rest);
        // The last `@` counts: a password may contain one. A path may, too.
        match rest.rsplit_once('@') {
            Some((_, hosts)) if !self.scheme().ends_with("unix") => hosts,
            _ => rest,
        }
    }
}

/// Whether sentinels allow this name.
fn is_name(name: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || matches!(c, '.' | '-' | '_');
    !name.is_empty() && name.chars().all(allowed)
}

/// Whether `host` has a port; the colons of an IPv6 address are in brackets.
fn has_port(host: &str) -> bool {
    host.rsplit(']').next().is_some_and(|end| end.contains(':'))
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (scheme, hosts) = (self.scheme(), self.hosts());
        let bare = self.0.split(['?', '#']).next().unwrap_or_default();
        let hidden = bare.len() > scheme.len() + "://".len() + hosts.len();
        write!(f, "{scheme}://{}{hosts}", if hidden { "***@" } else { "" })
    }
}

impl fmt::Debug for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RedisUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_printed_without_its_credentials() {
        let shown = [
            ("redis://localhost", "redis://localhost"),
            ("redis://u:secret@db:6380/2", "redis://***@db:6380/2"),
            ("redis://:sec@ret@db", "redis://***@db"),
            ("redis://u:secret@[::1]:6380/2?protocol=resp3", "redis://***@[::1]:6380/2"),
            ("redis+unix:///run/redis.sock?user=u&pass=secret", "redis+unix:///run/redis.sock"),
            ("unix:///run/a@b.sock?db=1", "unix:///run/a@b.sock"),
            ("rediss://u:secret@db:6380/2", "rediss://***@db:6380/2"),
            ("redis+cluster://a:1,b:2", "redis+cluster://a:1,b:2"),
            ("redis+cluster://u:secret@a:1,b:2?protocol=resp3", "redis+cluster://***@a:1,b:2"),
            ("rediss+cluster://:sec@ret@a:1,[::1]:2", "rediss+cluster://***@a:1,[::1]:2"),
            ("redis+sentinel://u:sec@ret@a:1,b/main/2", "redis+sentinel://***@a:1,b/main/2"),
            ("redis+sentinel://a/main?sentinel_password=secret", "redis+sentinel://a/main"),
        ];
        for (whole, bare) in shown {
            let url = RedisUrl::parse(whole).unwrap();
            assert_eq!(url.to_string(), bare);
            assert_eq!(format!("{url:?}"), format!("RedisUrl({bare})"));
            assert_eq!(url.expose(), whole);
        }
    }

    #[test]
    fn a_url_that_the_client_cannot_use_is_refused_without_being_quoted() {
        let refused = [
            "",
            "localhost:6379",
            "http://secret@db",
            "rediss://:secret@db#insecure",
            "rediss+cluster://:secret@a:1,b:2#insecure",
            "redis+cluster://",
            "redis+cluster://:secret@a:1,",
            "redis+cluster://:secret@a:1,b:notaport",
            "redis+cluster://:secret@a:1,b:2/3",
            "redis+cluster://:sec/ret@a:1",
            "redis+sentinel://:secret@a:1,b:2",
            "redis+sentinel://:secret@a:1/",
            "redis+sentinel://:secret@a:1/two words",
            "redis+sentinel://:secret@a:1/main/notadatabase",
            "redis+sentinel://:secret@a:notaport/main",
            "redis+sentinel://:secret@/main",
            "rediss+sentinel://:secret@a:1/main#insecure",
            "valkey://:secret@db",
            "redis://",
            "redis://:secret@db:notaport",
            "redis://:secret@db/notadatabase",
            "redis://:sec/ret@db",
            "unix://run/redis.sock",
        ];
        for text in refused {
            let error = RedisUrl::parse(text).unwrap_err();
            assert!(!error.to_string().contains("ret"), "{error}");
        }
    }

    #[test]
    fn every_node_of_a_cluster_gets_the_credentials() {
        let url = RedisUrl::parse("rediss+cluster://u:s%40@a:1, b,[::1]:3?protocol=resp3").unwrap();
        assert!(url.is_cluster() && url.is_tls());
        assert_eq!(
            url.seeds(),
            [
                "rediss://u:s%40@a:1?protocol=resp3",
                "rediss://u:s%40@b?protocol=resp3",
                "rediss://u:s%40@[::1]:3?protocol=resp3",
            ]
        );
        let plain = RedisUrl::parse("redis://u:p@a/3").unwrap();
        assert!(!plain.is_cluster() && !plain.is_tls());
        assert_eq!(plain.seeds(), ["redis://u:p@a/3"]);
        let database = RedisUrl::parse("redis+cluster://a:1/3").unwrap_err();
        assert_eq!(database, RedisUrlError::Database);
    }

    #[test]
    fn sentinels_have_their_own_credentials_and_port() {
        let text = "rediss+sentinel://u:s%40@a:1, b,[::1]/main/3?protocol=resp3&sentinel_user=v&sentinel_password=t%2F";
        let url = RedisUrl::parse(text).unwrap();
        assert!(url.is_sentinel() && url.is_tls() && !url.is_cluster());
        assert_eq!(url.service(), Some("main"));
        let seeds =
            ["rediss://v:t%2F@a:1?", "rediss://v:t%2F@b:26379?", "rediss://v:t%2F@[::1]:26379?"];
        assert_eq!(url.seeds(), seeds);
        let primary = url.primary().unwrap();
        assert_eq!(
            primary.split("&sentinel").next(),
            Some("rediss://u:s%40@primary:6379/3?protocol=resp3")
        );
        let plain = RedisUrl::parse("redis+sentinel://a/main").unwrap();
        assert_eq!(plain.seeds(), ["redis://a:26379?"]);
        assert_eq!(plain.primary().unwrap(), "redis://primary:6379/?");
        let nameless = RedisUrl::parse("redis+sentinel://a:1").unwrap_err();
        assert_eq!(nameless, RedisUrlError::Service);
        assert_eq!(RedisUrl::parse("redis://a/main").unwrap_err(), RedisUrlError::Malformed);
    }
}
