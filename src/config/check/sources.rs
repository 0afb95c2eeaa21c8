//! `[[bus.sources]]`: what the types leave open.

use std::collections::BTreeSet;
use std::fs::File;
use std::path::Path;
use std::time::Duration;

use super::Fault;
use super::bounds::{DAY, at_most, names, within};
use super::subjects::{is_pattern, is_plain, reads};
use crate::config::certificates::{self, Unusable};
use crate::config::{
    BotFrom, Config, KafkaSection, NatsLogin, NatsSection, SOURCES, Sasl, SourceConfig, SourceKind,
    SourceStart, TlsFiles, TypeFrom,
};

const SOURCES_MAX: usize = 16;
/// Maximum number of servers, brokers, topics and subjects of a source.
const PARTS_MAX: usize = 64;
/// Maximum length of the name of a source, in bytes.
const NAME_MAX_BYTES: usize = 64;
/// Maximum length of the name of a topic, by Kafka, in bytes.
const TOPIC_MAX_BYTES: usize = 249;
/// Maximum length of the name of a stream, a consumer or a group, in bytes.
const GROUP_MAX_BYTES: usize = 255;
/// Maximum length of a header's name, or of a type, in bytes.
const TEXT_MAX_BYTES: usize = 1_024;
/// The last token of a subject that can name the bot.
const TOKEN_MAX: u8 = 64;

/// Which kinds this build has. The tests of settings run without them.
const NATS: bool = cfg!(any(feature = "nats", test));
const KAFKA: bool = cfg!(any(feature = "kafka", test));

pub(super) fn key_of(place: usize, name: &str) -> String {
    format!("{SOURCES}[{place}].{name}")
}

impl Config {
    pub(super) fn check_sources(&self) -> Result<(), Fault> {
        let sources = &self.bus.sources;
        at_most(SOURCES, sources.len(), SOURCES_MAX)?;
        let mut seen = BTreeSet::new();
        for (place, source) in sources.iter().enumerate() {
            let key = |name: &str| key_of(place, name);
            if let Some(problem) = missing(&source.kind, NATS, KAFKA) {
                return Err(Fault::new(key("kind"), problem));
            }
            check_name(&source.name).map_err(|problem| Fault::new(key("name"), problem))?;
            if !seen.insert(&source.name) {
                let problem = format!("is {:?} once more; give each its own", source.name);
                return Err(Fault::new(key("name"), problem));
            }
            check_records(source, &key)?;
            match &source.kind {
                SourceKind::Nats(nats) => check_nats(nats, place)?,
                SourceKind::Kafka(kafka) => check_kafka(kafka, place)?,
            }
        }
        Ok(())
    }
}

/// The problem if the build lacks this kind.
fn missing(kind: &SourceKind, nats: bool, kafka: bool) -> Option<String> {
    let (has, product) = match kind {
        SourceKind::Nats(_) => (nats, "NATS"),
        SourceKind::Kafka(_) => (kafka, "Kafka"),
    };
    let kind = kind.as_str();
    (!has).then(|| {
        format!(
            "= {kind:?}: this build has no {product}; use a package or the image, or build with --features {kind}"
        )
    })
}

fn check_name(name: &str) -> Result<(), String> {
    let is_allowed = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-';
    match name {
        "" => Err("is not set; give the source a name, such as \"orders\"".to_owned()),
        name if name.len() > NAME_MAX_BYTES || !name.chars().all(is_allowed) => {
            Err(format!("is {name:?}; write 1 to {NAME_MAX_BYTES} of a-z, 0-9 and '-'"))
        }
        _ => Ok(()),
    }
}

fn check_records(source: &SourceConfig, key: &impl Fn(&str) -> String) -> Result<(), Fault> {
    let text = |name: &str, text: &str, what: &str| {
        let is_bad =
            text.is_empty() || text.len() > TEXT_MAX_BYTES || text.chars().any(char::is_control);
        if is_bad {
            let rule = format!("1 to {TEXT_MAX_BYTES} bytes without control characters");
            return Err(Fault::new(key(name), format!("has an unusable {what}; it has {rule}")));
        }
        Ok(())
    };
    if let SourceStart::Group(group) = &source.start
        && !is_group(group)
    {
        let problem = match group.as_str() {
            "" => "names no group; write \"group:NAME\", or \"pipeline\"".to_owned(),
            _ => format!("has an unusable group; it {GROUP_RULE}"),
        };
        return Err(Fault::new(key("start"), problem));
    }
    match &source.bot {
        Some(BotFrom::Header(name)) => text("bot", name, "header")?,
        None | Some(BotFrom::Key | BotFrom::Subject(1..=TOKEN_MAX)) => {}
        Some(BotFrom::Subject(token)) => {
            let problem = format!(
                "is \"subject:{token}\"; tokens count from 1: write \"subject:1\" to \"subject:{TOKEN_MAX}\""
            );
            return Err(Fault::new(key("bot"), problem));
        }
    }
    match &source.event_type {
        TypeFrom::Topic => {}
        TypeFrom::Header(name) => text("type", name, "header")?,
        TypeFrom::Fixed(kind) => text("type", kind, "text")?,
    }
    let is_default = source.event_type == TypeFrom::Topic;
    if source.bot.is_none() && !is_default {
        let problem = "has no effect on CloudEvents, which have their own; set bot, or remove it";
        return Err(Fault::new(key("type"), problem));
    }
    match (&source.bot, &source.kind) {
        (Some(BotFrom::Key), SourceKind::Nats(_)) => {
            let problem = "is \"key\", but messages of NATS have no key; write \"header:NAME\" or \"subject:N\"";
            Err(Fault::new(key("bot"), problem).or(key("kind")))
        }
        (Some(BotFrom::Subject(_)), SourceKind::Kafka(_)) => {
            let problem = "names a token of a subject, but records of Kafka have none; write \"key\" or \"header:NAME\"";
            Err(Fault::new(key("bot"), problem).or(key("kind")))
        }
        _ => Ok(()),
    }
}

const GROUP_RULE: &str = "has 1 to 255 bytes without control characters";

fn is_group(name: &str) -> bool {
    (1..=GROUP_MAX_BYTES).contains(&name.len()) && !name.chars().any(char::is_control)
}

fn check_nats(nats: &NatsSection, place: usize) -> Result<(), Fault> {
    let key = |name: &str| key_of(place, name);
    filled(&key("servers"), &nats.servers, "some servers, such as [\"nats://host:4222\"]")?;
    for server in &nats.servers {
        check_server(server).map_err(|problem| Fault::new(key("servers"), problem))?;
    }
    let is_tls = |server: &String| server.starts_with("tls://");
    if nats.is_tls() && !nats.servers.iter().all(is_tls) {
        let problem = "holds nats:// and tls://; write tls:// for all servers, or for none";
        return Err(Fault::new(key("servers"), problem));
    }
    check_stream(&nats.stream).map_err(|problem| Fault::new(key("stream"), problem))?;
    at_most(&key("subjects"), nats.subjects.len(), PARTS_MAX)?;
    if let Some(bad) = nats.subjects.iter().find(|subject| !is_pattern(subject)) {
        let problem = format!(
            "holds {bad:?}; write tokens between dots, such as \"events.*\" or \"orders.>\""
        );
        return Err(Fault::new(key("subjects"), problem));
    }
    if let Some(subject) = &nats.publish_subject {
        if !is_plain(subject) {
            let problem = format!(
                "is {subject:?}; write a subject without wildcards, such as \"events.{{bot}}\""
            );
            return Err(Fault::new(key("publish_subject"), problem));
        }
        if !reads(&nats.subjects, subject) {
            let problem = format!(
                "is {subject:?}, which `subjects` does not hold: Fairlane would not read what it publishes; add it there"
            );
            return Err(Fault::new(key("publish_subject"), problem).or(key("subjects")));
        }
    }
    if let NatsLogin::Credentials(path) = &nats.login {
        readable(&key("creds_file"), path)?;
    }
    let remedy = "servers do not ask for TLS; write tls://… there, or leave it out";
    check_tls(&nats.tls, nats.is_tls(), remedy, place)
}

/// Checks an address like `nats://HOST:PORT`. The problem quotes no password.
fn check_server(server: &str) -> Result<(), String> {
    const REMEDY: &str = "write nats://HOST[:PORT], or tls://HOST[:PORT] with TLS";
    let Some(rest) = server.strip_prefix("nats://").or_else(|| server.strip_prefix("tls://"))
    else {
        return Err(format!("holds an address without a known scheme; {REMEDY}"));
    };
    if rest.contains('@') {
        return Err("holds a user, password or token, which would show up in logs; use user and password_file, or token_file".to_owned());
    }
    let is_usable = url::Url::parse(server).is_ok_and(|url| {
        url.host_str().is_some_and(|host| !host.is_empty())
            && matches!(url.path(), "" | "/")
            && url.query().is_none()
            && url.fragment().is_none()
            && url.port() != Some(0)
    });
    if is_usable { Ok(()) } else { Err(format!("holds {server:?}; {REMEDY}")) }
}

fn check_stream(stream: &str) -> Result<(), String> {
    let is_bad = |c: char| c.is_whitespace() || c.is_control() || ".*>/\\".contains(c);
    match stream {
        "" => Err("is not set; name the stream".to_owned()),
        stream if stream.len() > GROUP_MAX_BYTES || stream.contains(is_bad) => {
            let rule =
                format!("1 to {GROUP_MAX_BYTES} bytes without spaces and without . * > / \\");
            Err(format!("is {stream:?}; write {rule}"))
        }
        _ => Ok(()),
    }
}

fn check_kafka(kafka: &KafkaSection, place: usize) -> Result<(), Fault> {
    let key = |name: &str| key_of(place, name);
    filled(&key("brokers"), &kafka.brokers, "some brokers, such as [\"host:9092\"]")?;
    if let Some(bad) = kafka.brokers.iter().find(|broker| !is_broker(broker)) {
        let remedy = "write HOST:PORT, such as \"kafka-1.example:9092\" or \"[fd00::2]:9092\"";
        return Err(Fault::new(key("brokers"), format!("holds {bad:?}; {remedy}")));
    }
    filled(&key("topics"), &kafka.topics, "at least one topic")?;
    let mut seen = BTreeSet::new();
    for topic in &kafka.topics {
        if !is_topic(topic) {
            let rule = format!("1 to {TOPIC_MAX_BYTES} of A-Z, a-z, 0-9, '.', '_' and '-'");
            return Err(Fault::new(key("topics"), format!("holds {topic:?}; each has {rule}")));
        }
        if !seen.insert(topic) {
            let problem = format!("names {topic:?} twice; name each topic once");
            return Err(Fault::new(key("topics"), problem));
        }
    }
    if !seen.contains(&kafka.publish_topic) {
        let problem = format!(
            "is {:?}, which `topics` does not hold: Fairlane would not read what it publishes; add it there",
            kafka.publish_topic
        );
        return Err(Fault::new(key("publish_topic"), problem).or(key("topics")));
    }
    if !is_group(&kafka.group) {
        return Err(Fault::new(key("group"), format!("is unusable; it {GROUP_RULE}")));
    }
    within(&key("partition_wait"), kafka.partition_wait, Duration::ZERO..=DAY)?;
    if let Some(Sasl::OauthBearer { token_file }) = &kafka.sasl {
        readable(&key("token_file"), token_file)?;
    }
    let remedy =
        "security does not ask for TLS; write \"tls\" or \"sasl_tls\" there, or leave it out";
    check_tls(&kafka.tls, kafka.encrypted, remedy, place)
}

fn is_broker(text: &str) -> bool {
    let Some((host, port)) = text.rsplit_once(':') else { return false };
    let is_host = |c: char| c.is_ascii_alphanumeric() || ".-_".contains(c);
    let is_address = |inner: &str| inner.parse::<std::net::Ipv6Addr>().is_ok();
    let host_is_usable = match host.strip_prefix('[').and_then(|host| host.strip_suffix(']')) {
        Some(inner) => is_address(inner),
        None => !host.is_empty() && host.chars().all(is_host),
    };
    host_is_usable && port.parse::<u16>().is_ok_and(|port| port > 0)
}

fn is_topic(name: &str) -> bool {
    let is_allowed = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    (1..=TOPIC_MAX_BYTES).contains(&name.len())
        && name.chars().all(is_allowed)
        && !matches!(name, "." | "..")
}

/// A list that may not be empty.
fn filled(key: &str, list: &[String], what: &str) -> Result<(), Fault> {
    if list.is_empty() {
        return Err(Fault::new(key, format!("is not set; name {what}")));
    }
    names(key, list, PARTS_MAX, "entry")
}

fn check_tls(files: &TlsFiles, encrypted: bool, remedy: &str, place: usize) -> Result<(), Fault> {
    let key = |name: &str| key_of(place, name);
    let named = [
        ("ca_file", &files.ca_file),
        ("cert_file", &files.cert_file),
        ("key_file", &files.key_file),
    ];
    if let Some((name, _)) = named.iter().find(|(_, path)| path.is_some())
        && !encrypted
    {
        return Err(Fault::new(key(name), format!("is set, but {remedy}")));
    }
    certificates::check(&key(""), files)
        .map_err(|Unusable { key: unusable, problem }| Fault::new(unusable, problem))
}

fn readable(key: &str, path: &Path) -> Result<(), Fault> {
    match File::open(path) {
        Ok(_) => Ok(()),
        Err(error) => {
            let problem = format!("names {}, which cannot be read ({error})", path.display());
            Err(Fault::new(key, problem))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;

    #[test]
    fn a_build_without_a_kind_says_how_to_get_it() {
        let text = "[[bus.sources]]\nname = \"k\"\nkind = \"kafka\"\nbrokers = [\"h:1\"]\ntopics = [\"t\"]";
        let kind = Config::from_toml(text, "f").unwrap().bus.sources.remove(0).kind;
        assert_eq!(missing(&kind, false, true), None);
        assert_eq!(
            missing(&kind, true, false).unwrap(),
            "= \"kafka\": this build has no Kafka; use a package or the image, or build with --features kafka"
        );
    }

    #[test]
    fn addresses_of_brokers_have_a_host_and_a_port() {
        for fine in ["h:9092", "kafka-1.example.com:1", "[::1]:9092", "10.0.0.1:9092", "a_b:65535"]
        {
            assert!(is_broker(fine), "{fine}");
        }
        for bad in
            ["h", "h:", ":9092", "h:0", "h:70000", "::1:9092", "kafka://h:1", "a,b:1", "u@h:1"]
        {
            assert!(!is_broker(bad), "{bad}");
        }
    }
}
