//! The configuration: defaults, over them one TOML file, over that the environment.
//!
//! The defaults *are* the files `default.toml` and `pipeline.toml` beside this one, and one for each
//! built-in pipeline: what [`default_text`] prints is what is loaded, and the set of known keys and
//! their types is read from there. A [`Config`] that was loaded is complete, typed and free of
//! contradictions; one that was put together in code is checked by [`Config::check`].

mod built_in;
mod certificates;
mod check;
mod duplicate;
mod error;
mod layers;
mod load;
mod mongo_url;
mod redis_url;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

pub use built_in::{AUTOMATION, COUNTER, NOTIFY, PUSH, is_built_in};
pub use error::{ConfigError, Origin};
pub(crate) use load::{mongod, no_colour};
pub(crate) use mongo_url::server as mongo_server;
pub use mongo_url::{MongoUrl, MongoUrlError};
pub use redis_url::{RedisUrl, RedisUrlError};

use built_in::BUILT_IN;
use ipnet::IpNet;
use jiff::tz::TimeZone;
use serde::de::DeserializeOwned;

use crate::admission::quota::Quota;
use crate::admission::{Class, Settings};
use crate::id::{PipelineName, Prefix, ShardCount};
use crate::notifications::record::Cap;
use crate::outbound::CheckedUrl;
use crate::outbound::sign::Secret;

const DEFAULT_TOML: &str = include_str!("default.toml");
const PIPELINE_TOML: &str = include_str!("pipeline.toml");
const TOKEN_TOML: &str = include_str!("token.toml");
const HEADERS_TOML: &str = include_str!("headers.toml");

/// The whole configuration of a process.
#[derive(Debug, Clone)]
pub struct Config {
    /// The file it was read from, if any.
    pub file: Option<PathBuf>,
    /// Where a private Redis and a private MongoDB keep their files.
    pub data_dir: PathBuf,
    /// How long running slices may go on after the first signal. 1 ms to 1 h.
    pub shutdown_grace: Duration,
    /// How long requests are still taken after the first signal, while `/readyz` says that it stops.
    /// At most 1 h.
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
    /// The section `[admission]`.
    pub admission: AdmissionConfig,
    /// The section `[auth]`.
    pub auth: AuthConfig,
    /// The built-in pipelines and the sections `[pipelines.NAME]`, disabled ones among them.
    pub pipelines: BTreeMap<PipelineName, PipelineConfig>,
    /// The sections `[products.NAME]` of products from outside the crate.
    pub products: BTreeMap<String, ProductSection>,
}

/// The section of one product. Only the product knows its keys.
#[derive(Debug, Clone)]
pub struct ProductSection {
    /// Its keys.
    pub table: toml::Table,
    /// Where it is.
    pub at: Origin,
}

impl Config {
    /// Reads the section of a product as `T`; a section that is missing as an empty one.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`], with the place of the section.
    pub(crate) fn product_section<T: DeserializeOwned>(
        &self,
        name: &PipelineName,
    ) -> Result<T, ConfigError> {
        let section = self.products.get(name.as_str());
        let table = section.map(|section| section.table.clone()).unwrap_or_default();
        table.try_into().map_err(|error: toml::de::Error| ConfigError::Invalid {
            at: section.map_or(Origin::Code, |section| section.at.clone()),
            key: format!("products.{name}"),
            problem: format!("is not usable: {}", error.message()),
        })
    }

    /// Refuses the section of a product that the program does not have.
    pub(crate) fn check_products<'a>(
        &self,
        known: impl Iterator<Item = &'a str>,
    ) -> Result<(), ConfigError> {
        let known: Vec<&str> = known.collect();
        match self.products.iter().find(|(name, _)| !known.contains(&name.as_str())) {
            None => Ok(()),
            Some((name, section)) => Err(ConfigError::UnknownKey {
                at: section.at.clone(),
                key: format!("products.{name}"),
                remedy: format!("this program has the products {}", known.join(", ")),
            }),
        }
    }
}

/// Which Redis, and how the data is cut.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// `None`: a private server under [`Config::data_dir`].
    pub url: Option<RedisUrl>,
    /// Certificates in PEM that TLS trusts beside the system's.
    pub ca_file: Option<PathBuf>,
    /// The certificate in PEM that is shown to a Redis that asks for one. With [`Self::key_file`].
    pub cert_file: Option<PathBuf>,
    /// Its private key in PEM.
    pub key_file: Option<PathBuf>,
    /// What every key and channel begins with.
    pub prefix: Prefix,
    /// Into how many parts the bots of each pipeline are cut. Fixed when the data is created.
    pub shards: ShardCount,
}

impl RedisConfig {
    /// Reads the certificates that the settings name; `None` where they name none.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] with the setting whose file cannot be used.
    pub fn certificates(&self) -> Result<Option<redis::TlsCertificates>, ConfigError> {
        certificates::read(self).map_err(|unusable| ConfigError::Invalid {
            at: Origin::Code,
            key: unusable.key.to_owned(),
            problem: unusable.problem,
        })
    }
}

/// Which MongoDB, and which database of it.
#[derive(Debug, Clone)]
pub struct MongoConfig {
    /// `None`: a private server under [`Config::data_dir`] beside a private Redis; where there is
    /// none, nothing that needs MongoDB runs.
    pub url: Option<MongoUrl>,
    /// The database everything is kept in: 1 to 63 bytes of what MongoDB allows in a name, and
    /// none of its own databases.
    pub database: String,
    /// The program of a private server, from the environment variable `FAIRLANE_MONGOD`. `None`:
    /// the `mongod` of the search path.
    pub program: Option<PathBuf>,
}

/// View counters.
#[derive(Debug, Clone)]
pub struct CountersConfig {
    /// Whose midnight ends the day of a daily figure.
    pub time_zone: TimeZone,
    /// Most ads of a bot whose totals are cached, in each of two generations: 1,000 to 10,000,000.
    pub cached_ads: u64,
    /// Who reads totals or days waits so long for the stores: 10 ms to 10 s.
    pub read_timeout: Duration,
}

/// Delayed notifications.
#[derive(Debug, Clone)]
pub struct NotificationsConfig {
    /// A user gets the next one this long after the last one. At most 3,650 days.
    pub user_poll_threshold: Duration,
    /// The same for single types: at most 100, each once.
    pub type_thresholds: Vec<(String, Duration)>,
    /// A user of a bot gets at most so many in any window. At most 8.
    pub caps: Vec<Cap>,
    /// The same for bots whose ids match, instead: at most 100 globs, each once; none: no bound.
    pub bot_caps: Vec<(String, Vec<Cap>)>,
    /// For single types, beside those; at most 100, each once. None: the type is not counted.
    pub type_caps: Vec<(String, Vec<Cap>)>,
    /// What is done with one that comes too soon.
    pub on_throttle: OnThrottle,
    /// A user that is online gets the next one that waited for it this long after the last one. At
    /// most 3,650 days.
    pub online_threshold: Duration,
    /// Requests that one host and port gets from this process in a second; 0: no bound. At most
    /// 1,000,000.
    pub host_rate: u64,
}

/// What is done with a notification that comes too soon after the last one of its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnThrottle {
    /// It ends, and is counted.
    Drop,
    /// It is sent when it may be.
    Defer,
}

/// Where events come from.
#[derive(Debug, Clone)]
pub struct BusConfig {
    /// The kind of bus.
    pub source: BusSource,
    /// The streams to read: 1 to 64, each once.
    pub streams: Vec<String>,
    /// Copied entries older than this are trimmed. At most 3,650 days.
    pub retention: Duration,
    /// Whether anything is trimmed at all.
    pub trim: bool,
}

/// The kind of bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum BusSource {
    /// Redis Streams on the server that holds the queues.
    Redis,
}

/// The HTTP interface.
#[derive(Debug, Clone)]
pub struct HttpConfig {
    /// Where it listens.
    pub listen: SocketAddr,
    /// Names under which it may be called without tokens, beside `localhost` and addresses. At
    /// most 100.
    pub hosts: Vec<String>,
    /// Sites whose pages may count views and read totals: at most 100, as browsers write them.
    pub cors_origins: Vec<String>,
    /// Connections that wait to be accepted: 1 to 65,535.
    pub backlog: u32,
    /// Connections at once: 16 to 100,000.
    pub max_connections: usize,
    /// Connections of one address at once: 1 to [`Self::max_connections`].
    pub max_connections_per_address: usize,
    /// Networks of the proxies that are believed: at most 1,000.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether their connections start with the header of the PROXY protocol, version 2.
    pub proxy_protocol: bool,
}

/// Which HTTP requests are begun while more come than can be answered in time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// What is done with each class, and most requests in flight: 4 to 100,000.
    pub settings: Settings,
    /// What one bot has for sure, at most 1,000,000 each.
    pub bot: Quota,
    /// What one token has for sure, at most 1,000,000 each.
    pub token: Quota,
    /// Per class, how long a request may take that brings no deadline; `None`: any time. At most
    /// 1 h; none for the first.
    pub deadlines: [Option<Duration>; 4],
}

/// Who may do what over HTTP.
#[derive(Debug, Clone)]
pub struct AuthConfig {
    /// At most 1,000, each with a name of its own. None: everybody who reaches it may do all.
    pub tokens: Vec<TokenConfig>,
    /// Whether to listen beyond the loopback without tokens.
    pub allow_anonymous: bool,
}

/// One bearer token. Its text is in a file and nowhere else.
#[derive(Debug, Clone)]
pub struct TokenConfig {
    /// What the log calls it.
    pub name: String,
    /// The file with the token, trimmed: 16 to 4,096 bytes.
    pub token_file: PathBuf,
    /// What it may do; one at least.
    pub scopes: Vec<Scope>,
    /// Globs over the bots for which it may do that; one at least.
    pub bots: Vec<String>,
    /// With [`Scope::Count`], the sites it is for, of [`HttpConfig::cors_origins`]; none: all of them.
    pub origins: Vec<String>,
    /// With [`Scope::Count`], requests a second: 1 to 1,000,000.
    pub rate: u32,
    /// The same of one address.
    pub address_rate: u32,
    /// The highest class of its requests; `None`: as their routes say.
    pub class: Option<Class>,
}

/// What a token may do. None implies another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Put events on the bus.
    Publish,
    /// Look at pipelines, bots and dead letters.
    Read,
    /// Change them.
    Operate,
    /// Count single views and read totals, with a token that everybody may know. Stands alone.
    Count,
}

impl Scope {
    /// Its name in the configuration.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Publish => "publish",
            Self::Read => "read",
            Self::Operate => "operate",
            Self::Count => "count",
        }
    }
}

/// Calls to other people's servers.
#[derive(Debug, Clone)]
pub struct CallbacksConfig {
    /// Networks that URLs in requests and rules may reach beside public addresses: at most 1,000.
    /// A pipeline's own URL may reach any.
    pub allow_nets: Vec<IpNet>,
    /// Each one signs every call: at most 8. None: calls are not signed.
    pub secrets: Vec<Secret>,
    /// Calls that one host and port gets at once from this process: 1 to 1,024.
    pub max_per_host: NonZeroUsize,
    /// Headers that requests and rules may name: at most 100 sets, each with a name of its own.
    pub headers: Vec<HeadersConfig>,
}

/// Headers that some hosts get with calls of some bots. Their values are in a file and nowhere else.
#[derive(Debug, Clone)]
pub struct HeadersConfig {
    /// What requests and rules call it: 1 to 64 bytes.
    pub name: String,
    /// The file with the headers, one a line.
    pub headers_file: PathBuf,
    /// Globs over the bots that may name it; one at least.
    pub bots: Vec<String>,
    /// Globs over the hosts that get it, each with or without a port; one at least.
    pub hosts: Vec<String>,
}

/// The metrics and health endpoint.
#[derive(Debug, Clone)]
pub struct MetricsConfig {
    /// Where it listens.
    pub listen: SocketAddr,
}

/// One pipeline: which events it takes, which handler gets them, its limits.
#[derive(Debug, Clone)]
pub struct PipelineConfig {
    /// A disabled pipeline takes no events and has no workers; what it holds stays.
    pub enabled: bool,
    /// The name of the handler. Whether one of that name exists is known to the application only.
    pub handler: String,
    /// Globs over the event's type; `*` spans dots. At most 1,000, and one at least when enabled.
    pub events: Vec<String>,
    /// Where a new pipeline begins on the bus.
    pub start: Start,
    /// CEL over `event`. Compiled, and so checked, where it is used.
    pub filter: Option<String>,
    /// Where the handler `push` posts events to. For that handler alone, which needs it.
    pub url: Option<CheckedUrl>,
    /// Most events of one slice: 1 to 5,000.
    pub batch: NonZeroUsize,
    /// A slice takes no further event after this: 1 ms to a third of [`Self::lease_ttl`].
    pub slice_time: Duration,
    /// A bot whose consumer is silent this long goes to another: 1 s to 1 h.
    pub lease_ttl: Duration,
    /// A handler that runs longer is cancelled: 1 ms to [`Config::shutdown_grace`].
    pub handler_timeout: Duration,
    /// How many slices one process handles at once.
    pub workers: WorkersConfig,
    /// An event that failed this often becomes a dead letter: 1 to 1,000,000.
    pub max_attempts: NonZeroU32,
    /// How long a bot waits after a failure.
    pub backoff: BackoffConfig,
    /// How long a bot waits for more events before its slice: at most 1 h.
    pub linger: Duration,
    /// Most events queued per bot: up to 1,000,000,000. `None`: no bound.
    pub max_queue: Option<NonZeroU64>,
    /// What happens to an event beyond [`Self::max_queue`].
    pub on_overflow: OnOverflow,
    /// Older events are not handled any more: at most 3,650 days. `None`: no bound.
    pub max_age: Option<Duration>,
    /// How many dead letters are kept, and for how long.
    pub dead: DeadConfig,
}

/// Where a new pipeline begins on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// With the events that arrive from now on.
    New,
    /// With the oldest event the bus still has.
    Earliest,
}

/// How many slices one process handles at once: `1 <= min <= max <= 1024`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkersConfig {
    /// Workers that are always there.
    pub min: NonZeroUsize,
    /// Workers under full load.
    pub max: NonZeroUsize,
}

/// Waiting after a failure: doubles from `initial` to `max`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackoffConfig {
    /// After the first failure: 1 ms to `max`.
    pub initial: Duration,
    /// At most this: up to 7 days.
    pub max: Duration,
    /// The fraction by which each wait is varied, so that bots that failed together do not come
    /// back together: 0.0 to 1.0.
    pub jitter: f64,
}

/// What happens to an event beyond the bound of its bot's queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnOverflow {
    /// It becomes a dead letter.
    Dead,
    /// It is dropped and counted.
    DropNew,
}

/// The bounds of the dead letters of a pipeline. The oldest go first. Each shard keeps its part of
/// `max`, so one bot at most `max / redis.shards`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadConfig {
    /// Most dead letters: 1 to 100,000,000.
    pub max: NonZeroU64,
    /// For how long: 1 s to 3,650 days.
    pub keep: Duration,
}

impl Default for Config {
    /// The defaults, with the built-in pipelines alone.
    fn default() -> Self {
        Self::from_toml("", "defaults").expect("the built-in defaults are valid: tests load them")
    }
}

impl PipelineConfig {
    /// An enabled pipeline with the default limits.
    ///
    /// `handler` is the name under which the handler is registered; `events` are globs over the
    /// event's type, for example `["subscriber.*"]`.
    #[must_use]
    pub fn new<E: Into<String>>(
        handler: impl Into<String>,
        events: impl IntoIterator<Item = E>,
    ) -> Self {
        Self {
            handler: handler.into(),
            events: events.into_iter().map(Into::into).collect(),
            ..load::default_pipeline()
        }
    }
}

/// The complete default configuration with comments: what `fairlane config` prints.
///
/// It is itself a valid configuration; the blocks of pipelines are commented out.
#[must_use]
pub fn default_text() -> String {
    let mut text = DEFAULT_TOML.to_owned();
    let about = "One block for each pipeline; any name of a-z, 0-9, '-' and '_'.";
    add_block(&mut text, about, "NAME", PIPELINE_TOML);
    for (name, defaults) in BUILT_IN {
        let about =
            "Built in: runs without being written, unless enabled = false. The rest is as above.";
        add_block(&mut text, about, name, defaults);
    }
    text.push_str(
        "\n# The settings of a product that a program adds to Fairlane. The product names the keys.\n\
         # [products.NAME]\n",
    );
    text
}

fn add_block(text: &mut String, about: &str, name: &str, defaults: &str) {
    text.extend(["\n# ", about, "\n# [pipelines.", name, "]\n"]);
    for line in defaults.lines() {
        text.push_str(format!("# {line}").trim_end());
        text.push('\n');
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_printed_default_text_loads_as_the_defaults() {
        let printed = Config::from_toml(&default_text(), "printed").unwrap();
        assert_eq!(format!("{printed:?}"), format!("{:?}", Config::default()));
    }

    #[test]
    fn the_printed_pipeline_block_loads_once_it_is_uncommented_and_filled_in() {
        let text = default_text();
        let (top, block) = text.split_once("# [pipelines.NAME]\n").unwrap();
        let block = uncommented(block)
            .replace("handler = \"\"", "handler = \"log\"")
            .replace("events = []", "events = [\"*\"]");
        let loaded =
            Config::from_toml(&format!("{top}[pipelines.log]\n{block}"), "printed").unwrap();
        let name = PipelineName::parse("log").unwrap();
        assert_eq!(
            format!("{:?}", loaded.pipelines[&name]),
            format!("{:?}", PipelineConfig::new("log", ["*"]))
        );
    }

    /// The lines of a block up to the first empty one.
    fn uncommented(block: &str) -> String {
        let lines = block.lines().take_while(|line| !line.is_empty());
        lines.map(|line| line.strip_prefix("# ").unwrap().to_owned() + "\n").collect()
    }

    #[test]
    fn the_printed_blocks_of_the_built_in_pipelines_load_as_their_defaults() {
        let text = default_text();
        for (name, _) in BUILT_IN {
            let head = format!("[pipelines.{name}]\n");
            let (_, block) = text.split_once(&format!("# {head}")).unwrap();
            let loaded = Config::from_toml(&(head + &uncommented(block)), "printed").unwrap();
            assert_eq!(format!("{loaded:?}"), format!("{:?}", Config::default()));
        }
    }

    #[test]
    fn the_defaults_are_those_of_the_outside_contract() {
        let config = Config::default();
        assert_eq!(config.data_dir, PathBuf::from("./fairlane-data"));
        assert_eq!(config.shutdown_grace, Duration::from_secs(25));
        assert_eq!(config.shutdown_delay, Duration::ZERO);
        assert!(config.redis.url.is_none());
        assert!(config.redis.ca_file.is_none() && config.redis.cert_file.is_none());
        assert!(config.redis.key_file.is_none());
        assert_eq!(config.redis.shards.get(), 16);
        assert!(config.mongodb.url.is_none());
        assert_eq!(config.mongodb.database, "fairlane");
        assert_eq!(config.bus.source, BusSource::Redis);
        assert_eq!(config.bus.streams, ["fairlane:events"]);
        assert_eq!(config.bus.retention, Duration::from_secs(600));
        assert!(config.bus.trim);
        assert_eq!(config.http.listen, SocketAddr::from(([127, 0, 0, 1], 8080)));
        assert!(config.callbacks.allow_nets.is_empty() && config.callbacks.secrets.is_empty());
        assert_eq!(config.callbacks.max_per_host.get(), 64);
        assert!(config.http.hosts.is_empty() && config.http.cors_origins.is_empty());
        let deadlines = [10, 30, 300].map(|seconds| Some(Duration::from_secs(seconds)));
        assert_eq!(config.admission.deadlines[1..], deadlines);
        assert_eq!(config.admission.deadlines[0], None);
        assert!(config.http.trusted_proxies.is_empty() && !config.http.proxy_protocol);
        assert!(config.auth.tokens.is_empty() && !config.auth.allow_anonymous);
        assert_eq!(config.metrics.listen, SocketAddr::from(([127, 0, 0, 1], 9464)));
        assert_eq!(config.counters.time_zone, TimeZone::UTC);
        assert_eq!(config.counters.cached_ads, 100_000);
        assert_eq!(config.counters.read_timeout, Duration::from_millis(250));
        assert_eq!(config.mongodb.program, None);
        let names: Vec<_> = config.pipelines.keys().map(PipelineName::as_str).collect();
        assert_eq!(names, ["automations", "counters", "notifications"]);
        let notifications = &config.notifications;
        assert_eq!(notifications.user_poll_threshold, Duration::from_secs(1_800));
        assert_eq!(notifications.type_thresholds, []);
        assert_eq!(notifications.on_throttle, OnThrottle::Drop);
        assert_eq!(notifications.online_threshold, Duration::from_secs(10));
        assert_eq!(notifications.host_rate, 2_000);
        let notifications = &config.pipelines[&PipelineName::parse("notifications").unwrap()];
        assert!(notifications.enabled && notifications.events.is_empty());
        assert_eq!(notifications.handler, "notify");

        let counters = &config.pipelines[&PipelineName::parse("counters").unwrap()];
        assert!(counters.enabled);
        assert_eq!(counters.handler, "counter");
        assert_eq!(counters.events, ["ad.viewed"]);
        assert_eq!(counters.batch.get(), 5_000);
        assert_eq!(counters.linger, Duration::from_secs(2));
        assert_eq!((counters.workers.min.get(), counters.workers.max.get()), (1, 16));
        assert_eq!(counters.backoff.initial, Duration::from_millis(250));
        assert_eq!(counters.backoff.max, Duration::from_secs(10));
        assert!((counters.backoff.jitter - 0.2).abs() < f64::EPSILON);
        assert_eq!(counters.max_attempts.get(), 1_000_000);
        assert_eq!(counters.handler_timeout, Duration::from_secs(20));
        assert_eq!(counters.start, Start::New);

        let pipeline = PipelineConfig::new("log", ["tag.*"]);
        assert!(pipeline.enabled);
        assert_eq!(pipeline.handler, "log");
        assert_eq!(pipeline.events, ["tag.*"]);
        assert_eq!(pipeline.start, Start::New);
        assert_eq!(pipeline.filter, None);
        assert_eq!(pipeline.url, None);
        assert_eq!(pipeline.batch.get(), 100);
        assert_eq!(pipeline.slice_time, Duration::from_millis(200));
        assert_eq!(pipeline.lease_ttl, Duration::from_secs(30));
        assert_eq!(pipeline.handler_timeout, Duration::from_secs(20));
        assert_eq!((pipeline.workers.min.get(), pipeline.workers.max.get()), (1, 64));
        assert_eq!(pipeline.max_attempts.get(), 10);
        assert_eq!(pipeline.backoff.initial, Duration::from_secs(1));
        assert_eq!(pipeline.backoff.max, Duration::from_secs(300));
        assert!((pipeline.backoff.jitter - 0.2).abs() < f64::EPSILON);
        assert_eq!(pipeline.linger, Duration::ZERO);
        assert_eq!(pipeline.max_queue, None);
        assert_eq!(pipeline.on_overflow, OnOverflow::Dead);
        assert_eq!(pipeline.max_age, None);
        assert_eq!(pipeline.dead.max.get(), 100_000);
        assert_eq!(pipeline.dead.keep, Duration::from_secs(7 * 86_400));
    }
}
