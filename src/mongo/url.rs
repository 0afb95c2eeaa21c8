//! The address of a MongoDB deployment. It may contain a password and is therefore never printed in
//! full.

use std::fmt;

use mongodb::options::{ConnectionString, HostInfo, ServerAddress};

/// Why a text is not the address of a MongoDB deployment. Never quotes the text.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum MongoUrlError {
    /// The scheme is missing or unknown.
    #[error("does not start with a known scheme; {REMEDY}")]
    Scheme,
    /// The rest of the address is not usable.
    #[error(
        "is not a usable MongoDB URL; {REMEDY}; characters such as @ : / % in a user or password are written as %40 %3A %2F %25"
    )]
    Malformed,
}

const DEFAULT_PORT: u16 = 27_017;
const REMEDY: &str =
    "write mongodb://[USER:PASSWORD@]HOST[:PORT][,HOST…][/?OPTIONS] or mongodb+srv://HOST";

/// The address of a MongoDB deployment: `mongodb://` or `mongodb+srv://`.
///
/// `Debug` and `Display` show scheme and hosts only: no user, no password, no option.
#[derive(Clone, PartialEq, Eq)]
pub struct MongoUrl {
    text: String,
    shown: String,
}

impl MongoUrl {
    /// Checks the scheme and that the driver can parse the rest. Does not contact a name server.
    ///
    /// # Errors
    /// If the scheme is unknown, or credentials, hosts or options are unusable.
    pub fn parse(text: &str) -> Result<Self, MongoUrlError> {
        let Some((scheme @ ("mongodb" | "mongodb+srv"), _)) = text.split_once("://") else {
            return Err(MongoUrlError::Scheme);
        };
        // The driver panics at a `%` before a character of several bytes.
        if text.split('%').skip(1).any(|rest| rest.len() > 2 && !rest.is_char_boundary(2)) {
            return Err(MongoUrlError::Malformed);
        }
        // The driver's error is dropped on purpose: it may quote the address.
        let parsed = ConnectionString::parse(text).map_err(|_| MongoUrlError::Malformed)?;
        let hosts = match parsed.host_info {
            HostInfo::HostIdentifiers(hosts) => {
                hosts.iter().map(server).collect::<Vec<_>>().join(",")
            }
            HostInfo::DnsRecord(host) => host,
            _ => return Err(MongoUrlError::Malformed),
        };
        let secret = if parsed.credential.is_some() { "***@" } else { "" };
        Ok(Self { text: text.to_owned(), shown: format!("{scheme}://{secret}{hosts}") })
    }

    /// The complete address with its credentials. For the driver only, never for a log.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.text
    }
}

/// One server in the notation of a URL.
pub(crate) fn server(address: &ServerAddress) -> String {
    match address {
        // The driver omits the brackets of IPv6.
        ServerAddress::Tcp { host, port } if host.contains(':') && !host.starts_with('[') => {
            format!("[{host}]:{}", port.unwrap_or(DEFAULT_PORT))
        }
        address => address.to_string(),
    }
}

impl fmt::Display for MongoUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for MongoUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MongoUrl({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_address_is_printed_without_its_credentials() {
        let shown = [
            ("mongodb://localhost", "mongodb://localhost:27017"),
            ("mongodb://u:secret@a:1,b:2/x?replicaSet=r", "mongodb://***@a:1,b:2"),
            ("mongodb://u:sec%40ret@[::1]:1/?w=1&appName=secret", "mongodb://***@[::1]:1"),
            ("mongodb+srv://u:secret@db.example.com/?w=1", "mongodb+srv://***@db.example.com"),
        ];
        for (whole, bare) in shown {
            let url = MongoUrl::parse(whole).unwrap();
            assert_eq!(url.to_string(), bare);
            assert_eq!(format!("{url:?}"), format!("MongoUrl({bare})"));
            assert_eq!(url.expose(), whole);
        }
    }

    #[test]
    fn a_url_that_the_driver_cannot_use_is_refused_without_being_quoted() {
        let refused = [
            "",
            "localhost:27017",
            "http://secret@db",
            "mongodb://",
            "mongodb://u:sec@ret@db",
            "mongodb://u:sec/ret@db",
            "mongodb://u:secret@db:notaport",
            "mongodb://u:secret@db/?w=notanumber&w=",
            "mongodb+srv://u:secret@db:1",
            "mongodb+srv://u:secret@a,b",
            "mongodb://u:sec%ret@db",
            "mongodb://u:secret%é@db",
            "mongodb+srv://u:secret%．2@db.example.com",
        ];
        for text in refused {
            let error = MongoUrl::parse(text).unwrap_err();
            assert!(!error.to_string().contains("ret"), "{error}");
        }
    }
}
