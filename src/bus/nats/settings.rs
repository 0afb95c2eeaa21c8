//! The settings of a stream of NATS.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use crate::bus::record::{Mapping, Mode};

/// A stream of NATS `JetStream`, and how to reach it.
#[derive(Clone)]
pub struct NatsSettings {
    /// The name of the source: part of the name of its log.
    pub name: String,
    /// Some servers of one cluster, `nats://HOST[:PORT]` or `tls://HOST[:PORT]`: at least one. The
    /// others are discovered.
    pub servers: Vec<String>,
    /// How to log in.
    pub login: NatsLogin,
    /// Certificates to trust in addition to the system's, in PEM.
    pub ca_file: Option<PathBuf>,
    /// The client certificate in PEM. Used with [`Self::key_file`].
    pub cert_file: Option<PathBuf>,
    /// The private key of that certificate, in PEM.
    pub key_file: Option<PathBuf>,
    /// The stream.
    pub stream: String,
    /// The subjects to read, with wildcards; none: all.
    pub subjects: Vec<String>,
    /// The subject to publish to, with [`Self::BOT`] in place of the bot. `None`: the first subject
    /// of the stream, if that has no wildcard.
    pub publish_subject: Option<String>,
    /// The form of published events.
    pub mode: Mode,
    /// Deletes copied messages that are older than this. `None`: the stream's own limits delete.
    pub trim: Option<Duration>,
    /// A durable consumer of the stream. New pipelines start behind what it has handled.
    pub group: Option<String>,
    /// How to read records that are not `CloudEvents`.
    pub mapping: Mapping,
    /// Attributes that events must not have: pipelines set them on their own events.
    pub reserved: Vec<&'static str>,
}

impl NatsSettings {
    /// Stands for the bot in [`Self::publish_subject`].
    pub const BOT: &'static str = "{bot}";

    /// The name of the log: `nats:NAME/STREAM`.
    #[must_use]
    pub fn log(&self) -> String {
        format!("nats:{}/{}", self.name, self.stream)
    }
}

/// Leaves out secrets.
impl fmt::Debug for NatsSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("NatsSettings")
            .field("name", &self.name)
            .field("servers", &self.servers)
            .field("stream", &self.stream)
            .field("subjects", &self.subjects)
            .field("publish_subject", &self.publish_subject)
            .finish_non_exhaustive()
    }
}

/// How to log in to NATS.
#[derive(Clone, Default)]
pub enum NatsLogin {
    /// Not at all, or only by a client certificate.
    #[default]
    None,
    /// As a user.
    User {
        /// The user.
        user: String,
        /// The password.
        password: String,
    },
    /// With a token.
    Token(String),
    /// With an nkey: its seed, `SU…`.
    Nkey(String),
    /// With a file that holds a JWT and a seed. It is read at every connection.
    Credentials(PathBuf),
}

/// Leaves out secrets.
impl fmt::Debug for NatsLogin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::None => "None",
            Self::User { .. } => "User",
            Self::Token(_) => "Token",
            Self::Nkey(_) => "Nkey",
            Self::Credentials(_) => "Credentials",
        })
    }
}
