//! How to reach a cluster, and which topics to read.

use std::fmt;
use std::path::PathBuf;

use rdkafka::ClientConfig;
use rdkafka::config::RDKafkaLogLevel;

use crate::bus::record::{Mapping, Mode};

/// Maximum size of the entries that are fetched ahead, over all partitions of a source, in KiB.
const AHEAD_MAX_KIB: usize = 32 * 1_024;
/// Maximum size of one answer of a broker, in bytes. A larger batch is still read, alone.
const ANSWER_MAX_BYTES: usize = 8 * 1_024 * 1_024;
/// Maximum number of events that wait to be sent.
const UNSENT_MAX: usize = 50_000;
/// Maximum size of the events that wait to be sent, in KiB.
const UNSENT_MAX_KIB: usize = 32 * 1_024;
/// How long a broker may take to answer, in ms. A frozen broker is noticed after this time.
const ANSWER_WITHIN_MS: u32 = 6_000;
/// How old the client's knowledge of topics, partitions and leaders may be, in ms.
const METADATA_AGE_MS: u32 = 5_000;
/// How long an event is sent again after failures, in ms.
pub(super) const DELIVER_WITHIN_MS: u32 = 5_000;

/// A text that is never printed: a password.
#[derive(Clone, PartialEq, Eq)]
pub struct Password(String);

impl Password {
    /// Takes the text.
    #[must_use]
    pub fn new(text: impl Into<String>) -> Self {
        Self(text.into())
    }
}

impl fmt::Debug for Password {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Password(..)")
    }
}

/// How connections are encrypted.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct KafkaTls {
    /// All certificates to trust, in PEM. `None`: those of the system.
    pub trusted: Option<String>,
    /// PEM files of the certificate of this client and of its key.
    pub client: Option<(PathBuf, PathBuf)>,
}

/// Leaves out the certificates, which are long.
impl fmt::Debug for KafkaTls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KafkaTls").field("client", &self.client).finish_non_exhaustive()
    }
}

/// How this client logs in.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum KafkaLogin {
    /// SASL PLAIN. Sends the password as it is: only with TLS.
    Plain {
        /// The user.
        user: String,
        /// Its password.
        password: Password,
    },
    /// SASL SCRAM-SHA-256.
    ScramSha256 {
        /// The user.
        user: String,
        /// Its password.
        password: Password,
    },
    /// SASL SCRAM-SHA-512.
    ScramSha512 {
        /// The user.
        user: String,
        /// Its password.
        password: Password,
    },
    /// SASL OAUTHBEARER. The token is read from this file before each login, so another program can
    /// renew it. Fairlane does not ask an identity provider itself.
    Token(PathBuf),
}

/// A source on Kafka.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct KafkaSettings {
    /// The name of the source, a part of the names of its logs.
    pub name: String,
    /// Some brokers of one cluster, as `host:port`. At least one.
    pub brokers: Vec<String>,
    /// The topics to read. At least one.
    pub topics: Vec<String>,
    /// The topic to publish to. `None`: the first one.
    pub publish_topic: Option<String>,
    /// The consumer group under which offsets are committed. Nothing is ever read from there, and
    /// no consumer joins it. `fairlane-PREFIX/NAME` unless the operator chose another.
    pub group: String,
    /// A new pipeline starts behind what this consumer group has handled.
    pub start_group: Option<String>,
    /// Encrypts connections.
    pub tls: Option<KafkaTls>,
    /// Logs in.
    pub login: Option<KafkaLogin>,
    /// Maximum size of a request with one event, in bytes. Brokers have a limit of their own, 1 MiB by
    /// default.
    pub message_max_bytes: usize,
    /// Whether the client checks the checksum of each batch. Behind a wrong one, librdkafka reads the rest of
    /// the answer from the wrong place, and may abort the process (`rd_kafka_buf_skip_to` in
    /// `rd_kafka_msgset_reader_v2` of 2.12.1).
    pub check_crcs: bool,
    /// How records that are not CloudEvents become events.
    pub mapping: Mapping,
    /// How events are published.
    pub mode: Mode,
    /// Attributes that events of the bus must not have; they are removed.
    pub reserved: Vec<&'static str>,
}

impl KafkaSettings {
    /// Default of [`Self::message_max_bytes`], as of librdkafka.
    pub const MESSAGE_MAX_BYTES: usize = 1_000_000;

    /// Settings without TLS and login, with defaults.
    #[must_use]
    pub fn new(name: &str, brokers: Vec<String>, topics: Vec<String>) -> Self {
        Self {
            name: name.to_owned(),
            brokers,
            topics,
            publish_topic: None,
            group: format!("fairlane/{name}"),
            start_group: None,
            tls: None,
            login: None,
            message_max_bytes: Self::MESSAGE_MAX_BYTES,
            check_crcs: false,
            mapping: Mapping::events_only(name),
            mode: Mode::Structured,
            reserved: Vec::new(),
        }
    }

    /// The kind and the address, without credentials.
    pub(super) fn bus(&self) -> String {
        format!("Kafka source {} at {}", self.name, self.brokers.join(","))
    }

    /// The topic to publish to.
    pub(super) fn to(&self) -> &str {
        match &self.publish_topic {
            Some(topic) => topic,
            None => self.topics.first().map_or("", String::as_str),
        }
    }

    fn client(&self) -> ClientConfig {
        let mut config = ClientConfig::new();
        config
            .set_log_level(RDKafkaLogLevel::Warning)
            .set("client.id", "fairlane")
            .set("bootstrap.servers", self.brokers.join(","))
            .set("socket.timeout.ms", ANSWER_WITHIN_MS.to_string())
            .set("socket.connection.setup.timeout.ms", ANSWER_WITHIN_MS.to_string())
            .set("api.version.request.timeout.ms", ANSWER_WITHIN_MS.to_string())
            .set("socket.keepalive.enable", "true")
            .set("socket.nagle.disable", "true")
            .set("reconnect.backoff.ms", "100")
            .set("reconnect.backoff.max.ms", "2000")
            .set("topic.metadata.refresh.interval.ms", METADATA_AGE_MS.to_string())
            .set("topic.metadata.propagation.max.ms", "1000")
            .set(
                "security.protocol",
                match (&self.tls, &self.login) {
                    (None, None) => "plaintext",
                    (Some(_), None) => "ssl",
                    (None, Some(_)) => "sasl_plaintext",
                    (Some(_), Some(_)) => "sasl_ssl",
                },
            );
        if let Some(tls) = &self.tls {
            match &tls.trusted {
                Some(certificates) => config.set("ssl.ca.pem", certificates.as_str()),
                // Finds the certificates of the system on every distribution.
                None => config.set("ssl.ca.location", "probe"),
            };
            if let Some((certificate, key)) = &tls.client {
                config.set("ssl.certificate.location", certificate.to_string_lossy());
                config.set("ssl.key.location", key.to_string_lossy());
            }
        }
        let (mechanism, user) = match &self.login {
            None => return config,
            Some(KafkaLogin::Plain { user, password }) => ("PLAIN", Some((user, password))),
            Some(KafkaLogin::ScramSha256 { user, password }) => {
                ("SCRAM-SHA-256", Some((user, password)))
            }
            Some(KafkaLogin::ScramSha512 { user, password }) => {
                ("SCRAM-SHA-512", Some((user, password)))
            }
            Some(KafkaLogin::Token(_)) => ("OAUTHBEARER", None),
        };
        config.set("sasl.mechanism", mechanism);
        if let Some((user, Password(password))) = user {
            config.set("sasl.username", user.as_str()).set("sasl.password", password.as_str());
        }
        config
    }

    /// A consumer that only asks, and commits for `group`.
    pub(super) fn asking(&self, group: &str) -> ClientConfig {
        let mut config = self.client();
        config
            .set("group.id", group)
            .set("enable.auto.commit", "false")
            .set("enable.auto.offset.store", "false")
            .set("allow.auto.create.topics", "false")
            .set("isolation.level", "read_committed");
        config
    }

    /// A consumer that only asks for the ends of partitions, behind transactions that are still open.
    pub(super) fn counting(&self) -> ClientConfig {
        let mut config = self.asking(&self.group);
        config.set("isolation.level", "read_uncommitted");
        config
    }

    /// A consumer that reads this number of partitions.
    pub(super) fn reading(&self, partitions: usize) -> ClientConfig {
        // Each partition has its own queue, so the client applies these bounds to each.
        let partitions = partitions.max(1);
        let kib = (AHEAD_MAX_KIB / partitions).clamp(64, 8 * 1_024);
        let mut config = self.asking(&self.group);
        config
            .set("auto.offset.reset", "error")
            .set("enable.partition.eof", "true")
            .set("check.crcs", self.check_crcs.to_string())
            .set("queued.min.messages", (100_000 / partitions).clamp(1_000, 50_000).to_string())
            .set("queued.max.messages.kbytes", kib.to_string())
            .set("max.partition.fetch.bytes", (kib * 1_024).min(1_024 * 1_024).to_string())
            .set("fetch.max.bytes", ANSWER_MAX_BYTES.to_string())
            .set("fetch.wait.max.ms", "500")
            .set("fetch.queue.backoff.ms", "5")
            .set("fetch.error.backoff.ms", "200");
        config
    }

    /// A producer.
    pub(super) fn producing(&self) -> ClientConfig {
        let mut config = self.client();
        config
            .set("acks", "all")
            .set("enable.idempotence", "true")
            // As Java's default: other producers that key by bot use the same partition.
            .set("partitioner", "murmur2_random")
            .set("linger.ms", "1")
            .set("compression.type", "lz4")
            .set("message.max.bytes", self.message_max_bytes.to_string())
            .set("message.timeout.ms", DELIVER_WITHIN_MS.to_string())
            .set("queue.buffering.max.messages", UNSENT_MAX.to_string())
            .set("queue.buffering.max.kbytes", UNSENT_MAX_KIB.to_string());
        config
    }

    /// Checks what can be checked without a broker.
    ///
    /// # Errors
    /// A text that names the option and never quotes a secret.
    pub fn check(&self) -> Result<(), String> {
        if self.brokers.is_empty() || self.topics.is_empty() {
            return Err("at least one broker and one topic are needed".to_owned());
        }
        for config in [self.reading(1), self.producing()] {
            config.create_native_config().map_err(|error| super::error::words(&error))?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings() -> KafkaSettings {
        KafkaSettings::new("orders", vec!["b1:9092".into()], vec!["events".into()])
    }

    #[test]
    fn a_password_is_never_printed() {
        let login = KafkaLogin::Plain { user: "u".into(), password: Password::new("hunter2") };
        let settings = KafkaSettings { login: Some(login), ..settings() };
        assert!(!format!("{settings:?}").contains("hunter2"));
        assert!(!settings.bus().contains("hunter2"));
        assert_eq!(settings.check(), Ok(()));
    }

    #[test]
    fn every_login_is_known_to_the_client_library() {
        let (user, password) = (String::from("u"), Password::new("p"));
        let logins = [
            KafkaLogin::Plain { user: user.clone(), password: password.clone() },
            KafkaLogin::ScramSha256 { user: user.clone(), password: password.clone() },
            KafkaLogin::ScramSha512 { user, password },
            KafkaLogin::Token("/run/token".into()),
        ];
        for login in logins {
            for tls in [None, Some(KafkaTls::default())] {
                let settings = KafkaSettings { login: Some(login.clone()), tls, ..settings() };
                assert_eq!(settings.check(), Ok(()), "{settings:?}");
            }
        }
    }

    #[test]
    fn prefetched_records_are_bounded_for_any_number_of_partitions() {
        for partitions in [1, 3, 32, 512] {
            let config = settings().reading(partitions);
            let kib: usize = config.get("queued.max.messages.kbytes").unwrap().parse().unwrap();
            assert!(kib * partitions <= AHEAD_MAX_KIB, "{partitions}");
        }
    }

    #[test]
    fn a_checksum_is_compared_only_if_the_settings_say_so() {
        for check_crcs in [false, true] {
            let settings = KafkaSettings { check_crcs, ..settings() };
            assert_eq!(settings.reading(1).get("check.crcs"), Some(&*check_crcs.to_string()));
        }
        assert!(!settings().check_crcs, "a damaged batch would end the process");
    }

    #[test]
    fn an_unknown_broker_address_is_no_reason_to_fail_at_start() {
        let settings = KafkaSettings { message_max_bytes: 1, ..settings() };
        let error = settings.check().unwrap_err();
        assert!(error.contains("message.max.bytes"), "{error}");
    }
}
