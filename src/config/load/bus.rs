//! `[bus]`, with its sources.

use std::fs;
use std::path::PathBuf;

use super::reader::Reader;
use crate::config::certificates::path;
use crate::config::{
    BotFrom, BusConfig, ConfigError, Hidden, KafkaSection, NatsLogin, NatsSection, PublishFormat,
    SOURCES, Sasl, SaslMechanism, SourceConfig, SourceKind, SourceStart, TlsFiles, TypeFrom,
};
use crate::id::Prefix;

/// Maximum size of a file with a password, a token or a seed, in bytes.
const SECRET_MAX_BYTES: usize = 64 << 10;
/// Prefix and length of the seed of a user's nkey.
const SEED_PREFIX: &str = "SU";
const SEED_BYTES: usize = 58;

/// The keys that only sources of NATS have.
const NATS_KEYS: [&str; 10] = [
    "servers",
    "stream",
    "subjects",
    "publish_subject",
    "trim",
    "user",
    "token",
    "nkey_seed",
    "nkey_seed_file",
    "creds_file",
];
/// The keys that only sources of Kafka have.
const KAFKA_KEYS: [&str; 9] = [
    "brokers",
    "topics",
    "publish_topic",
    "group",
    "security",
    "sasl_mechanism",
    "username",
    "check_crcs",
    "partition_wait",
];

pub(super) fn bus(top: &Reader<'_>, prefix: &Prefix) -> Result<BusConfig, ConfigError> {
    if top.text("bus.source") != "redis" {
        let remedy = "write \"redis\", or remove it; other buses are [[bus.sources]]";
        let problem = format!("is {:?}; {remedy}", top.text("bus.source"));
        return Err(top.invalid("bus.source", problem));
    }
    // By default, environments in one Redis do not read each other's events.
    let streams = if top.layers.is_made("bus.streams") {
        top.list("bus.streams")
    } else {
        vec![prefix.events_stream()]
    };
    Ok(BusConfig {
        streams,
        sources: (0..top.tables(SOURCES))
            .map(|place| {
                let keys = format!("{SOURCES}[{place}].");
                let read = Reader { layers: top.layers, prefix: &keys };
                Table { read: &read, place }.source(prefix)
            })
            .collect::<Result<_, _>>()?,
        publish: Some(top.text("bus.publish")).filter(|name| !name.is_empty()).map(str::to_owned),
        retention: top.duration("bus.retention")?,
        trim: top.flag("bus.trim"),
        dedup: top.duration("bus.dedup")?,
    })
}

/// One table of the list.
struct Table<'a> {
    read: &'a Reader<'a>,
    place: usize,
}

impl Table<'_> {
    fn source(&self, prefix: &Prefix) -> Result<SourceConfig, ConfigError> {
        let kind = match self.read.text("kind") {
            "nats" => {
                self.refuse(&KAFKA_KEYS, "is a key of Kafka, but kind is \"nats\"; remove it")?;
                SourceKind::Nats(self.nats()?)
            }
            "kafka" => {
                self.refuse(&NATS_KEYS, "is a key of NATS, but kind is \"kafka\"; remove it")?;
                SourceKind::Kafka(self.kafka(prefix)?)
            }
            "redis" => {
                let remedy = "name the streams of Redis in bus.streams, and remove this table";
                return Err(self.read.invalid("kind", format_args!("is \"redis\"; {remedy}")));
            }
            "" => return Err(self.invalid("kind", "is not set; write \"nats\" or \"kafka\"")),
            other => {
                let problem = format_args!("is {other:?}; write \"nats\" or \"kafka\"");
                return Err(self.read.invalid("kind", problem));
            }
        };
        Ok(SourceConfig {
            name: self.read.text("name").to_owned(),
            kind,
            start: self.start()?,
            bot: self.bot()?,
            event_type: self.event_type()?,
            format: self.read.choice(
                "format",
                &[("structured", PublishFormat::Structured), ("binary", PublishFormat::Binary)],
            )?,
        })
    }

    fn invalid(&self, key: &str, problem: &str) -> ConfigError {
        self.read.invalid(key, problem)
    }

    fn is_set(&self, key: &str) -> bool {
        self.read.layers.differs(SOURCES, self.place, key)
    }

    /// Refuses the first of these keys that is set.
    fn refuse(&self, keys: &[&str], problem: &str) -> Result<(), ConfigError> {
        match keys.iter().find(|key| self.is_set(key)) {
            Some(key) => Err(self.invalid(key, problem)),
            None => Ok(()),
        }
    }

    fn start(&self) -> Result<SourceStart, ConfigError> {
        let text = self.read.text("start");
        if text == "pipeline" {
            return Ok(SourceStart::Pipeline);
        }
        let Some(group) = text.strip_prefix("group:") else {
            let remedy = "write \"pipeline\" or \"group:NAME\"";
            return Err(self.read.invalid("start", format_args!("is {text:?}; {remedy}")));
        };
        Ok(SourceStart::Group(group.to_owned()))
    }

    fn bot(&self) -> Result<Option<BotFrom>, ConfigError> {
        let text = self.read.text("bot");
        let bot = match text.split_once(':') {
            None if text.is_empty() => return Ok(None),
            None if text == "key" => Some(BotFrom::Key),
            Some(("header", name)) => Some(BotFrom::Header(name.to_owned())),
            Some(("subject", token)) => token.parse().ok().map(BotFrom::Subject),
            _ => None,
        };
        let remedy = "write \"key\", \"header:NAME\" or \"subject:N\"";
        bot.map(Some).ok_or_else(|| self.read.invalid("bot", format_args!("is {text:?}; {remedy}")))
    }

    fn event_type(&self) -> Result<TypeFrom, ConfigError> {
        let text = self.read.text("type");
        match text.split_once(':') {
            None if text == "topic" => Ok(TypeFrom::Topic),
            Some(("header", name)) => Ok(TypeFrom::Header(name.to_owned())),
            Some(("fixed", kind)) => Ok(TypeFrom::Fixed(kind.to_owned())),
            _ => {
                let remedy = "write \"topic\", \"header:NAME\" or \"fixed:TEXT\"";
                Err(self.read.invalid("type", format_args!("is {text:?}; {remedy}")))
            }
        }
    }

    fn tls(&self) -> TlsFiles {
        let [ca_file, cert_file, key_file] =
            ["ca_file", "cert_file", "key_file"].map(|key| path(self.read.text(key)));
        TlsFiles { ca_file, cert_file, key_file }
    }

    fn nats(&self) -> Result<NatsSection, ConfigError> {
        let subjects = self.read.list("subjects");
        let publish_subject = match (self.read.text("publish_subject"), subjects.as_slice()) {
            ("", [only]) if !only.contains(['*', '>']) => Some(only.clone()),
            ("", _) => None,
            (subject, _) => Some(subject.to_owned()),
        };
        Ok(NatsSection {
            servers: self.read.list("servers"),
            stream: self.read.text("stream").to_owned(),
            subjects,
            publish_subject,
            trim: self.read.flag("trim"),
            login: self.nats_login()?,
            tls: self.tls(),
        })
    }

    fn nats_login(&self) -> Result<NatsLogin, ConfigError> {
        const WAYS: [&[&str]; 4] = [
            &["user", "password", "password_file"],
            &["token", "token_file"],
            &["nkey_seed", "nkey_seed_file"],
            &["creds_file"],
        ];
        let made = |way: &&[&'static str]| way.iter().copied().find(|key| self.is_set(key));
        let mut made = WAYS.iter().filter_map(made);
        let Some(first) = made.next() else { return Ok(NatsLogin::None) };
        if let Some(second) = made.next() {
            let problem =
                format_args!("is set beside {first}; log in one way, and remove the other");
            return Err(self.read.invalid(second, problem));
        }
        Ok(match first {
            "user" | "password" | "password_file" => {
                let (user, password) = self.password("user")?;
                NatsLogin::User { user, password }
            }
            "token" | "token_file" => NatsLogin::Token(self.secret("token", "token_file")?),
            "creds_file" => NatsLogin::Credentials(PathBuf::from(self.read.text("creds_file"))),
            _ => NatsLogin::Nkey(self.seed()?),
        })
    }

    fn seed(&self) -> Result<Hidden, ConfigError> {
        let seed = self.secret("nkey_seed", "nkey_seed_file")?;
        let text = seed.expose();
        let is_base32 = |c: char| c.is_ascii_uppercase() || ('2'..='7').contains(&c);
        if text.len() == SEED_BYTES && text.starts_with(SEED_PREFIX) && text.chars().all(is_base32)
        {
            return Ok(seed);
        }
        let key = if self.is_set("nkey_seed") { "nkey_seed" } else { "nkey_seed_file" };
        Err(self.invalid(key, "is no seed of a user; it has 58 characters and starts with SU"))
    }

    fn kafka(&self, prefix: &Prefix) -> Result<KafkaSection, ConfigError> {
        let topics = self.read.list("topics");
        let or = |key: &str, default: Option<String>| match self.read.text(key) {
            "" => default.unwrap_or_default(),
            text => text.to_owned(),
        };
        let (encrypted, logs_in) = self.read.choice(
            "security",
            &[
                ("plaintext", (false, false)),
                ("tls", (true, false)),
                ("sasl", (false, true)),
                ("sasl_tls", (true, true)),
            ],
        )?;
        Ok(KafkaSection {
            brokers: self.read.list("brokers"),
            publish_topic: or("publish_topic", topics.first().cloned()),
            topics,
            group: or("group", Some(format!("fairlane-{prefix}"))),
            encrypted,
            sasl: self.sasl(logs_in)?,
            tls: self.tls(),
            check_crcs: self.read.flag("check_crcs"),
            partition_wait: self.read.duration("partition_wait")?,
        })
    }

    fn sasl(&self, logs_in: bool) -> Result<Option<Sasl>, ConfigError> {
        const NAMES: [&str; 4] = ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512", "OAUTHBEARER"];
        const USER_KEYS: [&str; 3] = ["username", "password", "password_file"];
        if !logs_in {
            let problem = "is set, but security does not ask for SASL; write \"sasl_tls\" there, or remove it";
            self.refuse(&["sasl_mechanism"], problem)?;
            self.refuse(&USER_KEYS, problem)?;
            self.refuse(&["token_file"], problem)?;
            return Ok(None);
        }
        let mechanism = self.read.text("sasl_mechanism");
        let mechanism = match mechanism {
            "PLAIN" => SaslMechanism::Plain,
            "SCRAM-SHA-256" => SaslMechanism::ScramSha256,
            "SCRAM-SHA-512" => SaslMechanism::ScramSha512,
            "OAUTHBEARER" => {
                let remedy = "is set, but OAUTHBEARER has a token; remove it";
                self.refuse(&USER_KEYS, remedy)?;
                let Some(token_file) = path(self.read.text("token_file")) else {
                    let problem =
                        "is not set, but OAUTHBEARER needs it; name a file that holds the token";
                    return Err(self.invalid("token_file", problem));
                };
                return Ok(Some(Sasl::OauthBearer { token_file }));
            }
            other => {
                let problem = if other.is_empty() {
                    "is not set".to_owned()
                } else {
                    format!("is {other:?}")
                };
                let names = NAMES.map(|name| format!("{name:?}")).join(" or ");
                return Err(self.invalid("sasl_mechanism", &format!("{problem}; write {names}")));
            }
        };
        self.refuse(&["token_file"], "is set, but only OAUTHBEARER has a token; remove it")?;
        let (username, password) = self.password("username")?;
        Ok(Some(Sasl::Password { mechanism, username, password }))
    }

    fn password(&self, user_key: &str) -> Result<(String, Hidden), ConfigError> {
        let user = self.read.text(user_key);
        if user.is_empty() {
            return Err(
                self.invalid(user_key, "is not set, but it belongs to the password; set it")
            );
        }
        Ok((user.to_owned(), self.secret("password", "password_file")?))
    }

    /// The text of `key`, or what the file in `file_key` contains. Errors never quote it.
    fn secret(&self, key: &str, file_key: &str) -> Result<Hidden, ConfigError> {
        let (text, file) = (self.read.text(key), path(self.read.text(file_key)));
        let Some(file) = file else {
            if text.is_empty() {
                return Err(self.invalid(key, &format!("is not set; set it or {file_key}")));
            }
            return Ok(Hidden::new(text));
        };
        if !text.is_empty() {
            return Err(self.invalid(file_key, &format!("is set beside {key}; remove one of them")));
        }
        let problem = match fs::read_to_string(&file) {
            Err(error) => format!("cannot be read ({error})"),
            Ok(text) if text.trim().is_empty() => "is empty".to_owned(),
            Ok(text) if text.len() > SECRET_MAX_BYTES => {
                format!("has more than {SECRET_MAX_BYTES} bytes")
            }
            Ok(text) => return Ok(Hidden::new(text.trim())),
        };
        Err(self.invalid(file_key, &format!("names {}, which {problem}", file.display())))
    }
}
