//! The configuration: defaults, overridden by one TOML file, overridden by the environment.
//!
//! The defaults *are* the files `default.toml` and `pipeline.toml` beside this one, and one file
//! per built-in pipeline. [`default_text`] prints the same text that is loaded, and the known keys
//! and their types come from it. A loaded [`Config`] is complete, typed and free of contradictions.
//! A [`Config`] built in code is checked by [`Config::check`].

mod built_in;
mod cap;
mod certificates;
mod check;
mod duplicate;
mod error;
mod layers;
mod load;
mod products;

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::num::{NonZeroU32, NonZeroU64, NonZeroUsize};
use std::path::PathBuf;
use std::time::Duration;

pub use built_in::{AUTOMATION, COUNTER, NOTIFY, PUSH, is_built_in};
pub(crate) use built_in::{AUTOMATIONS, COUNTERS, NOTIFICATIONS};
pub use cap::{Cap, CapError};
pub use error::{ConfigError, Origin};
pub(crate) use load::mongod;
pub use products::ProductSection;

use built_in::BUILT_IN;
use ipnet::IpNet;
use jiff::tz::TimeZone;

use crate::admission::quota::Quota;
use crate::admission::{Class, Settings};
use crate::clock::millis;
use crate::id::{PipelineName, Prefix, ShardCount};
pub use crate::mongo::{MongoUrl, MongoUrlError};
use crate::outbound::CheckedUrl;
pub use crate::outbound::headers::HeadersConfig;
use crate::outbound::sign::Secret;
use crate::queue::FAIR_SLICE_US;
pub use crate::queue::OnOverflow;
use crate::redis::scripts::Limits;
pub use crate::redis::{RedisUrl, RedisUrlError};

const DEFAULT_TOML: &str = include_str!("default.toml");
const PIPELINE_TOML: &str = include_str!("pipeline.toml");
const TOKEN_TOML: &str = include_str!("token.toml");
const HEADERS_TOML: &str = include_str!("headers.toml");

/// The complete configuration of a process.
#[derive(Debug, Clone)]
pub struct Config {
    /// The file it was read from, if any.
    pub file: Option<PathBuf>,
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
    /// The section `[admission]`.
    pub admission: AdmissionConfig,
    /// The section `[auth]`.
    pub auth: AuthConfig,
    /// The built-in pipelines and the sections `[pipelines.NAME]`, including disabled ones.
    pub pipelines: BTreeMap<PipelineName, PipelineConfig>,
    /// The sections `[products.NAME]` of products from outside the crate.
    pub products: BTreeMap<String, ProductSection>,
}

/// The Redis to use, and how its data is divided.
#[derive(Debug, Clone)]
pub struct RedisConfig {
    /// `None`: a private server under [`Config::data_dir`].
    pub url: Option<RedisUrl>,
    /// Certificates in PEM that TLS trusts in addition to the system's.
    pub ca_file: Option<PathBuf>,
    /// The client certificate in PEM, for a Redis that asks for one. Used with [`Self::key_file`].
    pub cert_file: Option<PathBuf>,
    /// The private key of that certificate, in PEM.
    pub key_file: Option<PathBuf>,
    /// The prefix of every key and channel.
    pub prefix: Prefix,
    /// The number of shards of each pipeline. Fixed when the data is created.
    pub shards: ShardCount,
}

impl RedisConfig {
    /// Reads the certificates that the settings name; `None` if they name none.
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

/// The MongoDB and the database to use.
#[derive(Debug, Clone)]
pub struct MongoConfig {
    /// `None`: a private server under [`Config::data_dir`] beside a private Redis. Without a
    /// private server, components that need MongoDB do not run.
    pub url: Option<MongoUrl>,
    /// The database for all data: 1 to 63 bytes that MongoDB allows in a name, and none of its own
    /// databases.
    pub database: String,
    /// The program of a private server, from the environment variable `FAIRLANE_MONGOD`. `None`:
    /// the `mongod` in `PATH`.
    pub program: Option<PathBuf>,
}

/// The section `[counters]`: view counters.
#[derive(Debug, Clone)]
pub struct CountersConfig {
    /// The time zone whose midnight ends the day of a daily figure.
    pub time_zone: TimeZone,
    /// Maximum number of ads per bot whose totals are cached, in each of two generations: 1,000 to
    /// 10,000,000.
    pub cached_ads: u64,
    /// Timeout of the stores for requests that read totals, days, rules or profiles: 10 ms to 10 s.
    pub read_timeout: Duration,
}

/// The section `[notifications]`: delayed notifications.
#[derive(Debug, Clone)]
pub struct NotificationsConfig {
    /// Minimum time between two notifications to a user. At most 3,650 days.
    pub user_poll_threshold: Duration,
    /// Exceptions for single types: at most 100, each once.
    pub type_thresholds: Vec<(String, Duration)>,
    /// Maximum numbers of notifications to a user of a bot, per sliding window. At most 8.
    pub caps: Vec<Cap>,
    /// Caps that replace those for bots whose ids match: at most 100 globs, each once; none: no
    /// bound.
    pub bot_caps: Vec<(String, Vec<Cap>)>,
    /// Additional caps for single types; at most 100, each once. None: the type is not counted.
    pub type_caps: Vec<(String, Vec<Cap>)>,
    /// What happens to a notification that comes too soon or exceeds a cap.
    pub on_throttle: OnThrottle,
    /// Minimum time between two waiting notifications to a user that is online. At most 3,650 days.
    pub online_threshold: Duration,
    /// Maximum requests per second to one host and port from this process; 0: no bound. At most
    /// 1,000,000.
    pub host_rate: u64,
}

/// What happens to a notification that comes too soon after the last one of its user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OnThrottle {
    /// The notification ends, and is counted as throttled.
    Drop,
    /// The notification is sent later, as soon as the rules allow it.
    Defer,
}

/// The section `[bus]`: the source of events.
#[derive(Debug, Clone)]
pub struct BusConfig {
    /// The kind of bus.
    pub source: BusSource,
    /// The streams to read: 1 to 64, each once.
    pub streams: Vec<String>,
    /// The age after which copied entries are trimmed. At most 3,650 days.
    pub retention: Duration,
    /// Whether to trim at all.
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
    /// The listening address.
    pub listen: SocketAddr,
    /// Host names that requests without tokens may use, in addition to `localhost` and addresses.
    /// At most 100.
    pub hosts: Vec<String>,
    /// Sites whose pages may count views and read totals: at most 100 origins as browsers send
    /// them.
    pub cors_origins: Vec<String>,
    /// Maximum number of connections waiting to be accepted: 1 to 65,535.
    pub backlog: u32,
    /// Maximum number of open connections: 16 to 100,000.
    pub max_connections: usize,
    /// Maximum number of open connections per address: 1 to [`Self::max_connections`].
    pub max_connections_per_address: usize,
    /// Networks of the trusted proxies: at most 1,000.
    pub trusted_proxies: Vec<IpNet>,
    /// Whether connections of trusted proxies start with a PROXY protocol header, version 2.
    pub proxy_protocol: bool,
}

/// The section `[admission]`: which HTTP requests to accept under overload.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AdmissionConfig {
    /// The mode of each class, and the maximum number of requests in flight: 4 to 100,000.
    pub settings: Settings,
    /// The guaranteed share of one bot, at most 1,000,000 each.
    pub bot: Quota,
    /// The guaranteed share of one token, at most 1,000,000 each.
    pub token: Quota,
    /// Per class, the deadline of a request that brings none; `None`: no deadline. At most 1 h;
    /// always `None` for the first class.
    pub deadlines: [Option<Duration>; 4],
}

/// The section `[auth]`: access to the HTTP interface.
#[derive(Debug, Clone)]
pub struct AuthConfig {
    /// At most 1,000, each with a unique name. None: every client that connects may do everything.
    pub tokens: Vec<TokenConfig>,
    /// Whether to listen beyond the loopback without tokens.
    pub allow_anonymous: bool,
}

/// One bearer token. Its text exists only in its file.
#[derive(Debug, Clone)]
pub struct TokenConfig {
    /// Its name in the log.
    pub name: String,
    /// The file with the token, trimmed: 16 to 4,096 bytes.
    pub token_file: PathBuf,
    /// The permissions; at least one.
    pub scopes: Vec<Scope>,
    /// Globs over the bots that it gives access to; at least one.
    pub bots: Vec<String>,
    /// With [`Scope::Count`]: the allowed sites of [`HttpConfig::cors_origins`]; none: all of them.
    pub origins: Vec<String>,
    /// With [`Scope::Count`]: maximum requests per second: 1 to 1,000,000.
    pub rate: u32,
    /// With [`Scope::Count`]: the same maximum per client address.
    pub address_rate: u32,
    /// The highest class of its requests; `None`: the class of the route.
    pub class: Option<Class>,
}

/// A permission of a token. None implies another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Scope {
    /// Publish events.
    Publish,
    /// Read pipelines, bots and dead letters.
    Read,
    /// Change pipelines, bots and dead letters.
    Operate,
    /// Count single views and read totals with a public token. Must be the only scope.
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

/// The section `[callbacks]`: calls to other servers.
#[derive(Debug, Clone)]
pub struct CallbacksConfig {
    /// Networks that URLs in requests and rules may reach in addition to public addresses: at most
    /// 1,000. The URL of a pipeline may be in any network.
    pub allow_nets: Vec<IpNet>,
    /// Signing secrets; each one signs every call: at most 8. None: calls are not signed.
    pub secrets: Vec<Secret>,
    /// Maximum number of concurrent calls to one host and port from this process: 1 to 1,024.
    pub max_per_host: NonZeroUsize,
    /// Header sets for requests and rules: at most 100, each with a unique name.
    pub headers: Vec<HeadersConfig>,
}

/// The metrics and health endpoint.
#[derive(Debug, Clone)]
pub struct MetricsConfig {
    /// The listening address.
    pub listen: SocketAddr,
}

/// One pipeline: its events, its handler, its limits.
#[derive(Debug, Clone)]
pub struct PipelineConfig {
    /// A disabled pipeline takes no events and has no workers; its queued events are kept.
    pub enabled: bool,
    /// The name of the handler. Only the application knows whether it exists.
    pub handler: String,
    /// Globs over the event's type; `*` spans dots. At most 1,000, and at least one if enabled.
    pub events: Vec<String>,
    /// Where a new pipeline starts on the bus.
    pub start: Start,
    /// A CEL expression over `event`. Compiled, and so checked, where it is used.
    pub filter: Option<String>,
    /// The target of the handler `push`. Required for that handler, refused for others.
    pub url: Option<CheckedUrl>,
    /// Maximum number of events per slice: 1 to 5,000.
    pub batch: NonZeroUsize,
    /// A slice takes no further event after this: 1 ms to a third of [`Self::lease_ttl`].
    pub slice_time: Duration,
    /// Time without a renewal after which another worker takes the bot: 1 s to 1 h.
    pub lease_ttl: Duration,
    /// A handler that runs longer is cancelled: 1 ms to [`Config::shutdown_grace`].
    pub handler_timeout: Duration,
    /// Number of concurrent slices of one process.
    pub workers: WorkersConfig,
    /// An event that failed this often becomes a dead letter: 1 to 1,000,000.
    pub max_attempts: NonZeroU32,
    /// How long a bot waits after a failure.
    pub backoff: BackoffConfig,
    /// How long a bot waits for more events before its slice: at most 1 h.
    pub linger: Duration,
    /// Maximum number of queued events per bot: up to 1,000,000,000. `None`: no bound.
    pub max_queue: Option<NonZeroU64>,
    /// What happens to an event beyond [`Self::max_queue`].
    pub on_overflow: OnOverflow,
    /// Age above which events are not handled: at most 3,650 days. `None`: no bound.
    pub max_age: Option<Duration>,
    /// Number of dead letters kept, and for how long.
    pub dead: DeadConfig,
}

/// Where a new pipeline starts on the bus.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Start {
    /// At the end: with events published from now on.
    New,
    /// At the oldest event that the bus still has.
    Earliest,
}

/// Number of concurrent slices of one process: `1 <= min <= max <= 1024`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WorkersConfig {
    /// Workers that always run.
    pub min: NonZeroUsize,
    /// Workers under full load.
    pub max: NonZeroUsize,
}

/// The wait after a failure: doubles from `initial` to `max`.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BackoffConfig {
    /// The wait after the first failure: 1 ms to `max`.
    pub initial: Duration,
    /// The longest wait: up to 7 days.
    pub max: Duration,
    /// The fraction by which each wait varies, so that bots that failed together do not retry
    /// together: 0.0 to 1.0.
    pub jitter: f64,
}

/// The bounds of the dead letters of a pipeline. The oldest are deleted first. Each shard keeps its
/// part of `max`, so one bot at most `max / redis.shards`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeadConfig {
    /// Maximum number of dead letters: 1 to 100,000,000.
    pub max: NonZeroU64,
    /// How long they are kept: 1 s to 3,650 days.
    pub keep: Duration,
}

impl Default for Config {
    /// The defaults, with only the built-in pipelines.
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

    /// Its limits, divided over its `shards`.
    #[must_use]
    pub fn limits(&self, shards: ShardCount) -> Limits {
        Limits {
            slice_us: FAIR_SLICE_US,
            linger_ms: millis(self.linger),
            max_queue: self.max_queue.map_or(0, NonZeroU64::get),
            overflow_dead: self.on_overflow == OnOverflow::Dead,
            // The bound applies to the pipeline; each shard keeps its part of it.
            dead_max: self.dead.max.get().div_ceil(u64::from(shards.get())),
        }
    }
}

/// The complete default configuration with comments: what `fairlane config` prints.
///
/// It is itself a valid configuration; the blocks of pipelines are commented out.
#[must_use]
pub fn default_text() -> String {
    let mut text = DEFAULT_TOML.to_owned();
    let about = "One section per pipeline. Its name consists of a-z, 0-9, '-' and '_'.";
    add_block(&mut text, about, "NAME", PIPELINE_TOML);
    for (name, defaults) in BUILT_IN {
        let about =
            "Built in: runs without this section, unless enabled = false. Other settings as above.";
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
