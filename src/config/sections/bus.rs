//! `[bus]`: where events come from.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

/// The section `[bus]`: the sources of events.
#[derive(Debug, Clone)]
pub struct BusConfig {
    /// The Redis streams to read: up to 64, each once. May be empty if there are [`Self::sources`].
    pub streams: Vec<String>,
    /// The buses beside Redis: up to 16, each with a unique name.
    pub sources: Vec<SourceConfig>,
    /// Where HTTP and rules publish: one of [`Self::streams`], or the name of one of
    /// [`Self::sources`]. `None`: see [`Self::published`].
    pub publish: Option<String>,
    /// The age after which copied entries are trimmed. At most 3,650 days.
    pub retention: Duration,
    /// Whether to trim Redis streams at all.
    pub trim: bool,
    /// An event is dropped if one with its source and id was copied within this time. Zero: off. At
    /// most 7 days.
    pub dedup: Duration,
}

impl BusConfig {
    /// Where HTTP and rules publish: the name of a stream or a source. Without
    /// [`Self::publish`]: the first stream, or else the first source.
    #[must_use]
    pub fn published(&self) -> &str {
        let first = || self.streams.first().or(self.sources.first().map(|source| &source.name));
        self.publish.as_ref().or_else(first).map_or("", String::as_str)
    }

    /// The Redis stream that [`Self::published`] names; `None` if that is a source.
    #[must_use]
    pub fn published_stream(&self) -> Option<&str> {
        let name = self.published();
        self.streams.iter().find(|stream| *stream == name).map(String::as_str)
    }

    /// The source that [`Self::published`] names; `None` if that is a Redis stream.
    #[must_use]
    pub fn published_source(&self) -> Option<&SourceConfig> {
        let name = self.published();
        self.sources.iter().find(|source| source.name == name)
    }
}

/// One bus beside Redis: a table `[[bus.sources]]`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceConfig {
    /// Its unique name: 1 to 64 of `a-z`, `0-9` and `-`. Part of the names of its logs, under which
    /// positions are stored.
    pub name: String,
    /// Its servers, and what it reads of them.
    pub kind: SourceKind,
    /// Where a pipeline starts that is new to it.
    pub start: SourceStart,
    /// The bot of plain records. `None`: records are `CloudEvents`.
    pub bot: Option<BotFrom>,
    /// The type of plain records.
    pub event_type: TypeFrom,
    /// The form of the events that are published to it.
    pub format: PublishFormat,
}

impl SourceConfig {
    /// The name of the bus in positions, messages and metrics: `nats:NAME` or `kafka:NAME`.
    #[must_use]
    pub fn bus(&self) -> String {
        format!("{}:{}", self.kind.as_str(), self.name)
    }

    /// What the names of all its logs start with: `nats:NAME/` or `kafka:NAME/`.
    #[must_use]
    pub fn log_prefix(&self) -> String {
        format!("{}/", self.bus())
    }

    /// The name of its log, if it has exactly one.
    #[must_use]
    pub fn only_log(&self) -> Option<String> {
        match &self.kind {
            SourceKind::Nats(nats) => Some(format!("{}{}", self.log_prefix(), nats.stream)),
            SourceKind::Kafka(_) => None,
        }
    }
}

/// The kind of a source, with the settings that only this kind has.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceKind {
    /// A stream of NATS `JetStream`.
    Nats(NatsSection),
    /// Topics of Kafka.
    Kafka(KafkaSection),
}

impl SourceKind {
    /// Its name in the configuration.
    #[must_use]
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Nats(_) => "nats",
            Self::Kafka(_) => "kafka",
        }
    }
}

/// A stream of NATS `JetStream`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NatsSection {
    /// Some servers of one cluster: 1 to 64, either all `nats://HOST[:PORT]` or all
    /// `tls://HOST[:PORT]`, without user and password.
    pub servers: Vec<String>,
    /// The name of the stream.
    pub stream: String,
    /// The subjects to read, with wildcards: at most 64. None: all.
    pub subjects: Vec<String>,
    /// The subject to publish to, with [`Self::BOT`] in place of the bot. Always present if
    /// [`BusConfig::published`] is this source.
    pub publish_subject: Option<String>,
    /// Whether to delete copied messages older than [`BusConfig::retention`].
    pub trim: bool,
    /// How to log in.
    pub login: NatsLogin,
    /// The certificates.
    pub tls: TlsFiles,
}

impl NatsSection {
    /// Stands for the bot in [`Self::publish_subject`].
    pub const BOT: &'static str = "{bot}";

    /// Whether the servers ask for TLS.
    #[must_use]
    pub fn is_tls(&self) -> bool {
        self.servers.iter().any(|server| server.starts_with("tls://"))
    }
}

/// How to log in to NATS.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NatsLogin {
    /// Not at all, or only by a client certificate.
    None,
    /// As a user with a password.
    User {
        /// The user.
        user: String,
        /// The password.
        password: Hidden,
    },
    /// With a token.
    Token(Hidden),
    /// With an nkey: its seed, `SU…`.
    Nkey(Hidden),
    /// With a file that holds a JWT and a seed.
    Credentials(PathBuf),
}

/// Topics of Kafka.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KafkaSection {
    /// Some brokers of one cluster as `HOST:PORT`: 1 to 64.
    pub brokers: Vec<String>,
    /// The topics to read: 1 to 64, each once.
    pub topics: Vec<String>,
    /// The topic to publish to: one of [`Self::topics`].
    pub publish_topic: String,
    /// The group under which the copied offsets are committed.
    pub group: String,
    /// Whether connections use TLS.
    pub encrypted: bool,
    /// How to log in. `None`: not at all, or only by a client certificate.
    pub sasl: Option<Sasl>,
    /// The certificates. None unless [`Self::encrypted`].
    pub tls: TlsFiles,
    /// Whether the client checks the checksum of each batch. The process ends if one is wrong.
    pub check_crcs: bool,
    /// How long new partitions wait until no producer uses the old number of partitions. At most 1
    /// day.
    pub partition_wait: Duration,
}

impl KafkaSection {
    /// The value of `security.protocol` in clients of Kafka.
    #[must_use]
    pub fn security_protocol(&self) -> &'static str {
        match (self.encrypted, &self.sasl) {
            (false, None) => "PLAINTEXT",
            (true, None) => "SSL",
            (false, Some(_)) => "SASL_PLAINTEXT",
            (true, Some(_)) => "SASL_SSL",
        }
    }
}

/// How to log in to Kafka.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Sasl {
    /// As a user with a password.
    Password {
        /// The mechanism.
        mechanism: SaslMechanism,
        /// The user.
        username: String,
        /// The password.
        password: Hidden,
    },
    /// With a bearer token from a file. Tokens expire, so each login must read it again.
    OauthBearer {
        /// The file.
        token_file: PathBuf,
    },
}

impl Sasl {
    /// The value of `sasl.mechanism` in clients of Kafka.
    #[must_use]
    pub fn mechanism(&self) -> &'static str {
        match self {
            Self::Password { mechanism, .. } => mechanism.as_str(),
            Self::OauthBearer { .. } => "OAUTHBEARER",
        }
    }
}

/// How a password is proved to Kafka.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SaslMechanism {
    /// It is sent.
    Plain,
    /// By a challenge with SHA-256.
    ScramSha256,
    /// By a challenge with SHA-512.
    ScramSha512,
}

impl SaslMechanism {
    /// Its name in Kafka.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Plain => "PLAIN",
            Self::ScramSha256 => "SCRAM-SHA-256",
            Self::ScramSha512 => "SCRAM-SHA-512",
        }
    }
}

/// The certificates of TLS connections: files in PEM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct TlsFiles {
    /// Certificates to trust in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// The client certificate. Used with [`Self::key_file`].
    pub cert_file: Option<PathBuf>,
    /// The private key of that certificate.
    pub key_file: Option<PathBuf>,
}

/// Where a pipeline starts that is new to a source.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceStart {
    /// As [`PipelineConfig::start`](crate::config::PipelineConfig::start) says.
    Pipeline,
    /// Behind what this consumer group (NATS: durable consumer) has handled: 1 to 255 bytes.
    Group(String),
}

/// The bot of a plain record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum BotFrom {
    /// Its key. Only Kafka.
    Key,
    /// The value of this header.
    Header(String),
    /// This token of its subject: 1 to 64. Only NATS.
    Subject(u8),
}

/// The type of a plain record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TypeFrom {
    /// Its topic, or its subject.
    Topic,
    /// The value of this header.
    Header(String),
    /// This text.
    Fixed(String),
}

/// The form of published events. Both are read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PublishFormat {
    /// A `CloudEvent` as JSON.
    Structured,
    /// The attributes in headers, and the data as the value.
    Binary,
}

/// A text that may not be shown. `Debug` leaves it out.
#[derive(Clone, PartialEq, Eq)]
pub struct Hidden(String);

impl Hidden {
    /// A text to hide.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }

    /// The text, for the client of the bus only.
    #[must_use]
    pub fn expose(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Hidden {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}
