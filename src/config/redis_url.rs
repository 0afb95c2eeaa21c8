//! The address of a Redis server, which may hold a password and is therefore never printed whole.

use std::fmt;

use redis::IntoConnectionInfo;

/// Why a text is not the address of a Redis server. Never quotes the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum RedisUrlError {
    /// A scheme that a later version may speak.
    #[error("begins with {scheme}://, which is not supported by this version; {REMEDY}")]
    Unsupported {
        /// The scheme.
        scheme: &'static str,
    },
    /// Another scheme, or none.
    #[error("does not begin with a known scheme; {REMEDY}")]
    Scheme,
    /// The rest is not usable.
    #[error("is not a usable Redis URL; {REMEDY}")]
    Malformed,
}

const REMEDY: &str = "write redis://[USER:PASSWORD@]HOST[:PORT][/DB] or redis+unix:///PATH";

/// The address of a Redis server: `redis://`, `redis+unix:///` or `unix:///`.
///
/// `Debug` and `Display` leave out user, password and everything after a `?`.
#[derive(Clone, PartialEq, Eq)]
pub struct RedisUrl(String);

impl RedisUrl {
    /// Checks the scheme and that the client can read the rest.
    ///
    /// # Errors
    /// When the scheme is another one, or host, port, database number or path are unusable.
    pub fn parse(text: &str) -> Result<Self, RedisUrlError> {
        let (scheme, rest) = text.split_once("://").ok_or(RedisUrlError::Scheme)?;
        match scheme {
            "redis" => {}
            // Without an absolute path the client would take the first part for a host.
            "redis+unix" | "unix" if rest.starts_with('/') => {}
            "redis+unix" | "unix" => return Err(RedisUrlError::Malformed),
            "rediss" => return Err(RedisUrlError::Unsupported { scheme: "rediss" }),
            "redis+cluster" => return Err(RedisUrlError::Unsupported { scheme: "redis+cluster" }),
            _ => return Err(RedisUrlError::Scheme),
        }
        // The client's error is dropped on purpose: it may quote the address.
        text.into_connection_info().map_err(|_| RedisUrlError::Malformed)?;
        Ok(Self(text.to_owned()))
    }

    /// The whole address with its credentials: for the client, never for a log.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Display for RedisUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bare = self.0.split(['?', '#']).next().unwrap_or_default();
        let (scheme, rest) = bare.split_once("://").unwrap_or(("", bare));
        // The last `@`: a password may hold one.
        match rest.rsplit_once('@') {
            Some((_, host)) if scheme == "redis" => write!(f, "{scheme}://***@{host}"),
            _ => write!(f, "{scheme}://{rest}"),
        }
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
        ];
        for (whole, bare) in shown {
            let url = RedisUrl::parse(whole).unwrap();
            assert_eq!(url.to_string(), bare);
            assert_eq!(format!("{url:?}"), format!("RedisUrl({bare})"));
            assert_eq!(url.expose(), whole);
        }
    }

    #[test]
    fn what_the_client_cannot_use_is_refused_without_being_quoted() {
        let refused = [
            "",
            "localhost:6379",
            "http://secret@db",
            "rediss://:secret@db",
            "redis+cluster://:secret@db",
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
}
