//! The configuration: defaults, overridden by one TOML file, overridden by the environment.
//!
//! The defaults are the files `default.toml` and `pipeline.toml` beside this one, one file per
//! built-in pipeline, and one per list of tables. [`default_text`] prints the same text that is loaded. The known keys and
//! their types come from it. A loaded [`Config`] is complete, typed and free of contradictions. A
//! [`Config`] built in code is checked by [`Config::check`].

mod built_in;
mod cap;
mod certificates;
mod check;
mod duplicate;
mod effective;
mod error;
mod layers;
mod load;
mod nearest;
mod products;
mod sections;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

pub use built_in::{AUTOMATION, COUNTER, NOTIFY, PUSH, is_built_in};
pub(crate) use built_in::{AUTOMATIONS, COUNTERS, NOTIFICATIONS};
pub use cap::{Cap, CapError};
pub use effective::Effective;
pub use error::{ConfigError, Origin};
pub(crate) use load::mongod;
pub use products::ProductSection;
pub(crate) use sections::{ANONYMOUS, WEIGHT_MAX};
pub use sections::{
    AdmissionConfig, AuthConfig, BackoffConfig, BotFrom, BotLimitsConfig, BotQuotaConfig,
    BusConfig, CallbacksConfig, CountersConfig, DeadConfig, Hidden, HttpConfig, KafkaSection,
    MetricsConfig, MongoConfig, NatsLogin, NatsSection, NotificationsConfig, OnThrottle,
    PipelineConfig, PublishFormat, QuotasConfig, RedisConfig, Sasl, SaslMechanism, Scope,
    SourceConfig, SourceKind, SourceStart, Start, TlsFiles, TokenConfig, TracingConfig, TypeFrom,
    WorkersConfig,
};

use built_in::BUILT_IN;

use crate::id::PipelineName;
pub use crate::mongo::{MongoUrl, MongoUrlError};
pub use crate::outbound::headers::HeadersConfig;
pub use crate::queue::{OnOverflow, OrderBy};
pub use crate::redis::{RedisUrl, RedisUrlError};

const DEFAULT_TOML: &str = include_str!("default.toml");
const PIPELINE_TOML: &str = include_str!("pipeline.toml");
const SOURCE_TOML: &str = include_str!("source.toml");
/// The key of the list of buses beside Redis.
const SOURCES: &str = "bus.sources";
/// Lists of tables: the key of the list, and the keys of each table with their defaults.
const TABLES: [(&str, &str); 5] = [
    ("auth.tokens", include_str!("token.toml")),
    (SOURCES, SOURCE_TOML),
    ("callbacks.headers", include_str!("headers.toml")),
    ("quotas.bots", include_str!("quota.toml")),
    ("limits.bots", include_str!("limit.toml")),
];

/// The complete configuration of a process.
#[derive(Debug, Clone)]
pub struct Config {
    /// The file it was read from, if any.
    pub file: Option<PathBuf>,
    /// Whether [`Self::load`] made it, so that it can be loaded again.
    pub(crate) is_loaded: bool,
    /// Directory for the files of a private Redis and a private MongoDB.
    pub data_dir: PathBuf,
    /// Time that running slices get after the first signal. 1 ms to 1 h.
    pub shutdown_grace: Duration,
    /// Time in which requests are still accepted after the first signal, while `/readyz` answers
    /// 503. At most 1 h.
    pub shutdown_delay: Duration,
    /// The section `[redis]`.
    pub redis: RedisConfig,
    /// The section `[mongodb]`.
    pub mongodb: MongoConfig,
    /// The section `[bus]`.
    pub bus: BusConfig,
    /// The section `[http]`.
    pub http: HttpConfig,
    /// The section `[callbacks]`.
    pub callbacks: CallbacksConfig,
    /// The section `[counters]`.
    pub counters: CountersConfig,
    /// The section `[notifications]`.
    pub notifications: NotificationsConfig,
    /// The section `[metrics]`.
    pub metrics: MetricsConfig,
    /// The section `[tracing]`.
    pub tracing: TracingConfig,
    /// The section `[admission]`.
    pub admission: AdmissionConfig,
    /// The section `[quotas]`.
    pub quotas: QuotasConfig,
    /// The bots of `[[limits.bots]]`: at most 1,000, each once per pipeline.
    pub limited_bots: Vec<BotLimitsConfig>,
    /// The section `[auth]`.
    pub auth: AuthConfig,
    /// The built-in pipelines and the sections `[pipelines.NAME]`, including disabled ones.
    pub pipelines: BTreeMap<PipelineName, PipelineConfig>,
    /// The sections `[products.NAME]` of products from outside the crate.
    pub products: BTreeMap<String, ProductSection>,
}

impl Default for Config {
    /// The defaults, with only the built-in pipelines.
    fn default() -> Self {
        Self::from_toml("", "defaults").expect("the built-in defaults are valid: tests load them")
    }
}

/// The complete default configuration with comments: what `fairlane config` prints.
///
/// It is itself a valid configuration; the blocks of pipelines and sources are commented out.
#[must_use]
pub fn default_text() -> String {
    let mut text = DEFAULT_TOML.to_owned();
    let about = "One section per pipeline. Its name consists of a-z, 0-9, '-' and '_'.";
    add_block(&mut text, about, "[pipelines.NAME]", PIPELINE_TOML);
    for (name, defaults) in BUILT_IN {
        let about =
            "Built in: runs without this section, unless enabled = false. Other settings as above.";
        add_block(&mut text, about, &format!("[pipelines.{name}]"), defaults);
    }
    let about = "A bus beside Redis: a stream of NATS JetStream, or topics of Kafka. Up to 16.";
    add_block(&mut text, about, &format!("[[{SOURCES}]]"), SOURCE_TOML);
    text.push_str(
        "\n# The settings of a product that a program adds to Fairlane. The product names the keys.\n\
         # [products.NAME]\n",
    );
    text
}

fn add_block(text: &mut String, about: &str, head: &str, defaults: &str) {
    text.extend(["\n# ", about, "\n# ", head, "\n"]);
    for line in defaults.lines() {
        text.push_str(format!("# {line}").trim_end());
        text.push('\n');
    }
}
