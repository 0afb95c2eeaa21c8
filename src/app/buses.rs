//! The buses of an instance.

#[cfg(any(feature = "nats", feature = "kafka"))]
use std::num::NonZeroU8;
use std::sync::Arc;

use super::AppError;
#[cfg(feature = "kafka")]
use crate::bus::BusError;
use crate::bus::Source;
#[cfg(feature = "kafka")]
use crate::bus::kafka::{KafkaLogin, KafkaSettings, KafkaSource, KafkaTls, Password};
#[cfg(feature = "nats")]
use crate::bus::nats::{NatsLogin, NatsSettings, NatsSource};
#[cfg(any(feature = "nats", feature = "kafka"))]
use crate::bus::record::{self, Mapping, Mode};
use crate::clock::SharedClock;
#[cfg(feature = "kafka")]
use crate::config::KafkaSection;
#[cfg(feature = "nats")]
use crate::config::NatsSection;
#[cfg(any(feature = "nats", feature = "kafka"))]
use crate::config::{self, PublishFormat, SourceStart};
use crate::config::{BusConfig, SourceConfig, SourceKind};
use crate::presence::BusMeter;

/// The buses beside Redis, in the order of `bus.sources`. They connect when they are first used.
#[derive(Debug, Clone, Default)]
pub(crate) struct Buses {
    sources: Vec<Arc<dyn Source>>,
    /// Where the reader of each notes its state.
    meters: Vec<Arc<BusMeter>>,
}

impl Buses {
    /// The buses of the configuration. Events must not have the attributes `reserved`.
    ///
    /// # Errors
    /// If a client does not take a setting, or this build lacks it.
    #[cfg_attr(not(feature = "nats"), expect(unused_variables, reason = "no client takes them"))]
    pub(crate) fn open(
        config: &BusConfig,
        reserved: &[&'static str],
        clock: &SharedClock,
    ) -> Result<Self, AppError> {
        let open = |source: &SourceConfig| match &source.kind {
            #[cfg(feature = "nats")]
            SourceKind::Nats(nats) => Ok(open_nats(source, nats, config, reserved, clock)),
            #[cfg(not(feature = "nats"))]
            SourceKind::Nats(_) => Err(lacks(source)),
            #[cfg(not(feature = "kafka"))]
            SourceKind::Kafka(_) => Err(lacks(source)),
            #[cfg(feature = "kafka")]
            SourceKind::Kafka(kafka) => open_kafka(source, kafka, reserved),
        };
        let sources = config.sources.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        let meter = |source: &Arc<dyn Source>| Arc::new(BusMeter::new(source.name()));
        let meters = sources.iter().map(meter).collect();
        Ok(Self { sources, meters })
    }

    /// Where the reader of each notes its state.
    pub(crate) fn meters(&self) -> &[Arc<BusMeter>] {
        &self.meters
    }

    /// All of them, each with its configuration.
    pub(crate) fn with<'a>(
        &'a self,
        config: &'a BusConfig,
    ) -> impl Iterator<Item = (&'a SourceConfig, &'a Arc<dyn Source>)> {
        config.sources.iter().zip(&self.sources)
    }

    /// The one that events are published to; `None`: they are published to Redis.
    pub(crate) fn published(&self, config: &BusConfig) -> Option<Arc<dyn Source>> {
        let published = config.published_source()?;
        let found = self.with(config).find(|(source, _)| source.name == published.name);
        found.map(|(_, source)| Arc::clone(source))
    }
}

#[cfg(feature = "nats")]
fn open_nats(
    source: &SourceConfig,
    nats: &NatsSection,
    bus: &BusConfig,
    reserved: &[&'static str],
    clock: &SharedClock,
) -> Arc<dyn Source> {
    let settings = nats_settings(source, nats, bus, reserved);
    Arc::new(NatsSource::new(settings, Arc::clone(clock)))
}

/// The source, to look at; `None`: it is no NATS.
#[cfg(feature = "nats")]
pub(crate) fn nats(source: &SourceConfig, bus: &BusConfig) -> Option<NatsSource> {
    let SourceKind::Nats(nats) = &source.kind else { return None };
    let settings = nats_settings(source, nats, bus, &[]);
    Some(NatsSource::new(settings, Arc::new(crate::clock::SystemClock)))
}

#[cfg(feature = "nats")]
fn nats_settings(
    source: &SourceConfig,
    nats: &NatsSection,
    bus: &BusConfig,
    reserved: &[&'static str],
) -> NatsSettings {
    let text = |hidden: &config::Hidden| hidden.expose().to_owned();
    NatsSettings {
        name: source.name.clone(),
        servers: nats.servers.clone(),
        login: match &nats.login {
            config::NatsLogin::None => NatsLogin::None,
            config::NatsLogin::User { user, password } => {
                NatsLogin::User { user: user.clone(), password: text(password) }
            }
            config::NatsLogin::Token(token) => NatsLogin::Token(text(token)),
            config::NatsLogin::Nkey(seed) => NatsLogin::Nkey(text(seed)),
            config::NatsLogin::Credentials(file) => NatsLogin::Credentials(file.clone()),
        },
        ca_file: nats.tls.ca_file.clone(),
        cert_file: nats.tls.cert_file.clone(),
        key_file: nats.tls.key_file.clone(),
        stream: nats.stream.clone(),
        subjects: nats.subjects.clone(),
        publish_subject: nats.publish_subject.clone(),
        mode: mode(source),
        trim: nats.trim.then_some(bus.retention),
        group: group(source),
        mapping: mapping(source),
        reserved: reserved.to_vec(),
    }
}

#[cfg(feature = "kafka")]
fn open_kafka(
    source: &SourceConfig,
    kafka: &KafkaSection,
    reserved: &[&'static str],
) -> Result<Arc<dyn Source>, AppError> {
    let open = kafka_settings(source, kafka, reserved).and_then(KafkaSource::new);
    let open = open.map_err(|cause| AppError::Bus { name: source.name.clone(), cause })?;
    Ok(Arc::new(open))
}

/// The source, to look at; `None`: it is no Kafka.
#[cfg(feature = "kafka")]
pub(crate) fn kafka(source: &SourceConfig) -> Option<Result<KafkaSource, BusError>> {
    let SourceKind::Kafka(kafka) = &source.kind else { return None };
    Some(kafka_settings(source, kafka, &[]).and_then(KafkaSource::new))
}

#[cfg(feature = "kafka")]
fn kafka_settings(
    source: &SourceConfig,
    kafka: &KafkaSection,
    reserved: &[&'static str],
) -> Result<KafkaSettings, BusError> {
    let trusted = match &kafka.tls.ca_file {
        // The client library would trust only the ones of the file.
        Some(_) => Some(
            kafka.tls.trusted().map_err(|cause| BusError::Refused { bus: source.bus(), cause })?,
        ),
        None => None,
    };
    let tls = kafka.encrypted.then(|| KafkaTls {
        trusted: trusted.map(|pem| String::from_utf8_lossy(&pem).into_owned()),
        client: kafka.tls.cert_file.clone().zip(kafka.tls.key_file.clone()),
    });
    let login = kafka.sasl.as_ref().map(|sasl| match sasl {
        config::Sasl::OauthBearer { token_file } => KafkaLogin::Token(token_file.clone()),
        config::Sasl::Password { mechanism, username, password } => {
            let (user, password) = (username.clone(), Password::new(password.expose()));
            match mechanism {
                config::SaslMechanism::Plain => KafkaLogin::Plain { user, password },
                config::SaslMechanism::ScramSha256 => KafkaLogin::ScramSha256 { user, password },
                config::SaslMechanism::ScramSha512 => KafkaLogin::ScramSha512 { user, password },
            }
        }
    });
    Ok(KafkaSettings {
        publish_topic: Some(kafka.publish_topic.clone()),
        group: kafka.group.clone(),
        start_group: group(source),
        tls,
        login,
        mapping: mapping(source),
        mode: mode(source),
        check_crcs: kafka.check_crcs,
        reserved: reserved.to_vec(),
        ..KafkaSettings::new(&source.name, kafka.brokers.clone(), kafka.topics.clone())
    })
}

#[cfg(not(all(feature = "nats", feature = "kafka")))]
fn lacks(source: &SourceConfig) -> AppError {
    AppError::NoBus { name: source.name.clone(), kind: source.kind.as_str() }
}

#[cfg(any(feature = "nats", feature = "kafka"))]
fn mode(source: &SourceConfig) -> Mode {
    match source.format {
        PublishFormat::Structured => Mode::Structured,
        PublishFormat::Binary => Mode::Binary,
    }
}

#[cfg(any(feature = "nats", feature = "kafka"))]
fn group(source: &SourceConfig) -> Option<String> {
    match &source.start {
        SourceStart::Pipeline => None,
        SourceStart::Group(group) => Some(group.clone()),
    }
}

#[cfg(any(feature = "nats", feature = "kafka"))]
fn mapping(source: &SourceConfig) -> Mapping {
    let bot = source.bot.as_ref().map(|bot| match bot {
        config::BotFrom::Key => record::BotFrom::Key,
        config::BotFrom::Header(name) => record::BotFrom::Header(name.as_str().into()),
        config::BotFrom::Subject(token) => {
            record::BotFrom::Token(NonZeroU8::new(*token).unwrap_or(NonZeroU8::MIN))
        }
    });
    let kind = match &source.event_type {
        config::TypeFrom::Topic => record::TypeFrom::Topic,
        config::TypeFrom::Header(name) => record::TypeFrom::Header(name.as_str().into()),
        config::TypeFrom::Fixed(text) => record::TypeFrom::Text(text.as_str().into()),
    };
    Mapping { name: source.name.as_str().into(), bot, kind }
}
