//! Loading: finds the file, combines the layers, and converts settings to their types.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fmt::Display;
use std::fs;
use std::net::IpAddr;
use std::num::NonZeroU64;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use super::built_in::is_built_in;
use super::certificates;
use super::check::{between, limits};
use super::error::{ConfigError, Origin};
use super::layers::{ENV_PREFIX, Layers, Value};
use super::{
    AdmissionConfig, AuthConfig, BackoffConfig, BusConfig, BusSource, CallbacksConfig, Cap,
    CapError, Config, CountersConfig, DeadConfig, HeadersConfig, HttpConfig, MetricsConfig,
    MongoConfig, MongoUrl, NotificationsConfig, OnOverflow, OnThrottle, PipelineConfig,
    RedisConfig, RedisUrl, Scope, Start, TokenConfig, WorkersConfig,
};
use ipnet::IpNet;
use jiff::tz::TimeZone;

use crate::admission::quota::Quota;
use crate::admission::{Class, Mode, Settings};
use crate::id::{Prefix, ShardCount};
use crate::outbound::sign::Secret;
use crate::outbound::{CheckedUrl, Policy};

/// The default paths, in the order in which they are tried.
const FILES: [&str; 2] = ["./fairlane.toml", "/etc/fairlane/fairlane.toml"];
/// The variable that names the program of a private MongoDB. It describes the machine rather than
/// the service, so no file contains it.
const MONGOD: &str = "FAIRLANE_MONGOD";

impl Config {
    /// Loads the configuration of this process: the defaults, overridden by the file `explicit` or
    /// else the first existing one of `./fairlane.toml` and `/etc/fairlane/fairlane.toml`,
    /// overridden by the environment.
    ///
    /// Variables are named `FAIRLANE__SECTION__KEY` in any case. `FAIRLANE_…` with a single
    /// underscore is not a setting, except `FAIRLANE_MONGOD`: [`MongoConfig::program`]. A pipeline
    /// whose name contains `-` can only be set in a file.
    ///
    /// # Errors
    /// If a file cannot be read (a missing file only if `explicit` names it), if a key is unknown,
    /// has the wrong type or is not supported, and if values are out of bounds or contradict each
    /// other.
    pub fn load(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        let mut variables = Vec::new();
        for (name, text) in environment() {
            let Ok(name) = name.into_string() else { continue };
            match text.into_string() {
                Ok(text) => variables.push((name, text)),
                Err(_) if is_setting(&name) || name == MONGOD => {
                    let key = "the value".to_owned();
                    let problem = "is not UTF-8; unset or correct it".to_owned();
                    return Err(ConfigError::Invalid {
                        at: Origin::Environment(name),
                        key,
                        problem,
                    });
                }
                Err(_) => {}
            }
        }
        let file = explicit
            .map(PathBuf::from)
            .or_else(|| FILES.iter().map(PathBuf::from).find(|path| may_exist(path)));
        Self::load_with(file.as_deref(), variables.into_iter())
    }

    /// Loads from one file, or none, and the given environment.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn load_with(
        path: Option<&Path>,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let mut layers = Layers::defaults();
        if let Some(path) = path {
            let text = fs::read_to_string(path)
                .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
            layers.add_toml(&text, &path.display().to_string())?;
        }
        let (mut variables, mut program) = (Vec::new(), None);
        for (name, text) in environment {
            if name == MONGOD {
                program = Some(text).filter(|text| !text.is_empty()).map(PathBuf::from);
            } else if is_setting(&name) {
                variables.push((name, text));
            }
        }
        // Sorted: the order of an environment is arbitrary, the reported mistake should not be.
        variables.sort();
        for (name, text) in variables {
            layers.add_variable(&name, &text)?;
        }
        let mut config = build(&layers)?;
        config.file = path.map(Path::to_owned);
        config.mongodb.program = program;
        Ok(config)
    }

    /// Reads TOML over the defaults, without the environment. `origin` is its name in messages.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn from_toml(text: &str, origin: &str) -> Result<Self, ConfigError> {
        let mut layers = Layers::defaults();
        layers.add_toml(text, origin)?;
        build(&layers)
    }
}

#[expect(clippy::disallowed_methods, reason = "the one place that reads the environment")]
fn environment() -> impl Iterator<Item = (OsString, OsString)> {
    std::env::vars_os()
}

/// [`MongoConfig::program`], for callers that need nothing else of the configuration.
#[expect(clippy::disallowed_methods, reason = "it belongs to the machine, not to the settings")]
pub(crate) fn mongod() -> Option<PathBuf> {
    std::env::var_os(MONGOD).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Whether the file exists. If that cannot be determined, it counts as existing, and reading it
/// reports the error.
fn may_exist(path: &Path) -> bool {
    path.try_exists().unwrap_or(true)
}

fn is_setting(name: &str) -> bool {
    name.get(..ENV_PREFIX.len()).is_some_and(|prefix| prefix.eq_ignore_ascii_case(ENV_PREFIX))
}

/// The defaults of a pipeline. Handler and events are still empty.
pub(super) fn default_pipeline() -> PipelineConfig {
    let mut layers = Layers::defaults();
    layers
        .add_toml("[pipelines.x]", "defaults")
        .and_then(|()| pipeline(&Reader { layers: &layers, prefix: "pipelines.x." }))
        .expect("the built-in defaults are valid: tests load them")
}

fn build(layers: &Layers) -> Result<Config, ConfigError> {
    let top = Reader { layers, prefix: "" };
    let shutdown_grace = top.duration("shutdown_grace")?;
    let mut pipelines = BTreeMap::new();
    for name in layers.pipelines.keys() {
        let prefix = format!("pipelines.{name}.");
        let mut pipeline = pipeline(&Reader { layers, prefix: &prefix })?;
        // A user's own setting is not refused because of a default.
        if is_built_in(name) && !layers.is_made(&format!("{prefix}handler_timeout")) {
            pipeline.handler_timeout = pipeline.handler_timeout.min(shutdown_grace);
        }
        pipelines.insert(name.clone(), pipeline);
    }
    let tokens = (0..top.tables("auth.tokens"))
        .map(|place| {
            let prefix = format!("auth.tokens[{place}].");
            token(&Reader { layers, prefix: &prefix })
        })
        .collect::<Result<_, _>>()?;
    let url = match top.text("redis.url") {
        "" => None,
        text => Some(RedisUrl::parse(text).map_err(|error| top.invalid("redis.url", error))?),
    };
    let mongo_url = match top.text("mongodb.url") {
        "" => None,
        text => Some(MongoUrl::parse(text).map_err(|error| top.invalid("mongodb.url", error))?),
    };
    let prefix = top.text("redis.prefix");
    let prefix = Prefix::parse(prefix).map_err(|error| top.invalid("redis.prefix", error))?;
    // By default, environments in one Redis do not read each other's events.
    let streams = if layers.is_made("bus.streams") {
        top.list("bus.streams")
    } else {
        vec![prefix.events_stream()]
    };
    let config = Config {
        file: None,
        data_dir: PathBuf::from(top.text("data_dir")),
        shutdown_grace,
        shutdown_delay: top.duration("shutdown_delay")?,
        redis: RedisConfig {
            url,
            ca_file: certificates::path(top.text("redis.ca_file")),
            cert_file: certificates::path(top.text("redis.cert_file")),
            key_file: certificates::path(top.text("redis.key_file")),
            shards: shards(&top)?,
            prefix: prefix.clone(),
        },
        mongodb: MongoConfig {
            url: mongo_url,
            database: top.text("mongodb.database").to_owned(),
            program: None,
        },
        bus: BusConfig {
            source: top.choice("bus.source", &[("redis", BusSource::Redis)])?,
            streams,
            retention: top.duration("bus.retention")?,
            trim: top.flag("bus.trim"),
        },
        http: http(&top)?,
        admission: admission(&top)?,
        callbacks: callbacks(&top)?,
        counters: counters(&top)?,
        notifications: notifications(&top)?,
        metrics: MetricsConfig { listen: top.address("metrics.listen")? },
        auth: AuthConfig { tokens, allow_anonymous: top.flag("auth.allow_anonymous") },
        pipelines,
        products: layers.products.clone(),
    };
    config.find_fault().map_or(Ok(config), |fault| Err(fault.into_error(layers)))
}

fn pipeline(read: &Reader<'_>) -> Result<PipelineConfig, ConfigError> {
    Ok(PipelineConfig {
        enabled: read.flag("enabled"),
        handler: read.text("handler").to_owned(),
        events: read.list("events"),
        start: read.choice("start", &[("new", Start::New), ("earliest", Start::Earliest)])?,
        filter: Some(read.text("filter").to_owned()).filter(|text| !text.trim().is_empty()),
        url: url(read)?,
        batch: read.positive("batch", limits::BATCH)?,
        slice_time: read.duration("slice_time")?,
        lease_ttl: read.duration("lease_ttl")?,
        handler_timeout: read.duration("handler_timeout")?,
        workers: WorkersConfig {
            min: read.positive("workers.min", limits::WORKERS)?,
            max: read.positive("workers.max", limits::WORKERS)?,
        },
        max_attempts: read.positive("max_attempts", limits::ATTEMPTS)?,
        backoff: BackoffConfig {
            initial: read.duration("backoff.initial")?,
            max: read.duration("backoff.max")?,
            jitter: read.fraction("backoff.jitter"),
        },
        linger: read.duration("linger")?,
        max_queue: NonZeroU64::new(read.number("max_queue", (0, limits::QUEUE))?),
        on_overflow: read.choice(
            "on_overflow",
            &[("dead", OnOverflow::Dead), ("drop_new", OnOverflow::DropNew)],
        )?,
        max_age: Some(read.duration("max_age")?).filter(|age| !age.is_zero()),
        dead: DeadConfig {
            max: read.positive("dead.max", limits::DEAD)?,
            keep: read.duration("dead.keep")?,
        },
    })
}

fn url(read: &Reader<'_>) -> Result<Option<CheckedUrl>, ConfigError> {
    match read.text("url") {
        "" => Ok(None),
        text => CheckedUrl::parse(text, &Policy::Operator)
            .map(Some)
            .map_err(|error| read.invalid("url", error)),
    }
}

fn http(top: &Reader<'_>) -> Result<HttpConfig, ConfigError> {
    Ok(HttpConfig {
        listen: top.address("http.listen")?,
        hosts: top.list("http.hosts"),
        cors_origins: top.list("http.cors_origins"),
        backlog: top.count("http.backlog", limits::BACKLOG)?,
        max_connections: top.count("http.max_connections", limits::CONNECTIONS)?,
        max_connections_per_address: top
            .count("http.max_connections_per_address", (1, limits::CONNECTIONS.1))?,
        trusted_proxies: nets(top, "http.trusted_proxies")?,
        proxy_protocol: top.flag("http.proxy_protocol"),
    })
}

fn admission(top: &Reader<'_>) -> Result<AdmissionConfig, ConfigError> {
    let mode = |class: Class| {
        let modes = [
            ("enforce", Mode::Enforce),
            ("shadow", Mode::Shadow),
            ("off", Mode::Off),
            ("refuse", Mode::Refuse),
        ];
        top.choice(&format!("admission.{}", class.as_str()), &modes)
    };
    let number = |key: &str| top.count(&format!("admission.{key}"), limits::QUOTA);
    let quota = |rate, in_flight| {
        Ok::<_, ConfigError>(Quota { rate: number(rate)?, in_flight: number(in_flight)? })
    };
    let deadline = |class: Class| {
        let time = top.duration(&format!("admission.{}_deadline", class.as_str()))?;
        Ok::<_, ConfigError>(Some(time).filter(|time| !time.is_zero()))
    };
    let modes = [Mode::Enforce, mode(Class::P1)?, mode(Class::P2)?, mode(Class::P3)?];
    let limit_max = top.count("admission.limit_max", limits::IN_FLIGHT)?;
    Ok(AdmissionConfig {
        settings: Settings { modes, limit_max },
        bot: quota("bot_rate", "bot_in_flight")?,
        token: quota("token_rate", "token_in_flight")?,
        deadlines: [None, deadline(Class::P1)?, deadline(Class::P2)?, deadline(Class::P3)?],
    })
}

fn callbacks(top: &Reader<'_>) -> Result<CallbacksConfig, ConfigError> {
    let secret = |(index, text): (usize, String)| {
        // The error never quotes the secret.
        Secret::parse(&text).map_err(|error| {
            top.invalid("callbacks.secrets", format_args!("number {} {error}", index + 1))
        })
    };
    let secrets = top.list("callbacks.secrets").into_iter().enumerate();
    Ok(CallbacksConfig {
        allow_nets: nets(top, "callbacks.allow_nets")?,
        secrets: secrets.map(secret).collect::<Result<_, _>>()?,
        max_per_host: top.positive("callbacks.max_per_host", limits::PER_HOST)?,
        headers: (0..top.tables("callbacks.headers"))
            .map(|place| {
                let prefix = format!("callbacks.headers[{place}].");
                let read = Reader { layers: top.layers, prefix: &prefix };
                HeadersConfig {
                    name: read.text("name").to_owned(),
                    headers_file: PathBuf::from(read.text("headers_file")),
                    bots: read.list("bots"),
                    hosts: read.list("hosts"),
                }
            })
            .collect(),
    })
}

fn nets(top: &Reader<'_>, key: &str) -> Result<Vec<IpNet>, ConfigError> {
    let net = |text: String| {
        // An address without bits is a network of one address.
        let net = text.parse::<IpNet>().or_else(|_| text.parse::<IpAddr>().map(IpNet::from));
        net.map_err(|_| {
            let remedy = "write ADDRESS/BITS, such as \"10.0.0.0/8\" or \"fd00::/8\"";
            top.invalid(key, format_args!("holds {text:?}; {remedy}"))
        })
    };
    top.list(key).into_iter().map(net).collect()
}

fn counters(top: &Reader<'_>) -> Result<CountersConfig, ConfigError> {
    let name = top.text("counters.time_zone");
    // "Etc/Unknown" is in the database too.
    let known = TimeZone::get(name).ok().filter(|zone| !zone.is_unknown());
    let time_zone = known.ok_or_else(|| {
        let remedy = "write an IANA name, such as \"UTC\" or \"Europe/Berlin\"";
        let problem = format_args!("is {name:?}, which is no known time zone; {remedy}");
        top.invalid("counters.time_zone", problem)
    })?;
    let cached_ads = top.number("counters.cached_ads", limits::CACHED_ADS)?;
    let read_timeout = top.duration("counters.read_timeout")?;
    Ok(CountersConfig { time_zone, cached_ads, read_timeout })
}

fn notifications(top: &Reader<'_>) -> Result<NotificationsConfig, ConfigError> {
    const KEY: &str = "notifications.type_thresholds";
    let threshold = |text: String| {
        let parsed = text.split_once('=').and_then(|(kind, time)| {
            let kind = kind.trim().to_owned();
            Some((kind, humantime::parse_duration(time.trim()).ok()?))
        });
        parsed.filter(|(kind, _)| !kind.is_empty()).ok_or_else(|| {
            let remedy = "write TYPE = DURATION, such as \"digest = 1d\"";
            top.invalid(KEY, format_args!("holds {text:?}; {remedy}"))
        })
    };
    Ok(NotificationsConfig {
        user_poll_threshold: top.duration("notifications.user_poll_threshold")?,
        type_thresholds: top.list(KEY).into_iter().map(threshold).collect::<Result<_, _>>()?,
        caps: top
            .list("notifications.caps")
            .into_iter()
            .map(|text| {
                text.parse::<Cap>().map_err(|error| {
                    top.invalid("notifications.caps", format_args!("holds {text:?}; {error}"))
                })
            })
            .collect::<Result<_, _>>()?,
        bot_caps: named_caps(top, "notifications.bot_caps", "shop-7")?,
        type_caps: named_caps(top, "notifications.type_caps", "promo")?,
        on_throttle: top.choice(
            "notifications.on_throttle",
            &[("drop", OnThrottle::Drop), ("defer", OnThrottle::Defer)],
        )?,
        online_threshold: top.duration("notifications.online_threshold")?,
        host_rate: top.number("notifications.host_rate", limits::HOST_RATE)?,
    })
}

/// Parses caps by name, in the order of the names. Several `NAME = N/TIME` entries of one name add
/// up; `NAME = none` removes all caps.
fn named_caps(
    top: &Reader<'_>,
    key: &str,
    example: &str,
) -> Result<Vec<(String, Vec<Cap>)>, ConfigError> {
    let mut all: Vec<(String, Vec<Cap>)> = Vec::new();
    for text in top.list(key) {
        let refused = |problem: &dyn Display| {
            let examples = format!("such as \"{example} = 10/day\" or \"{example} = none\"");
            top.invalid(key, format_args!("holds {text:?}; {problem}, {examples}"))
        };
        // The name may contain an equals sign; the cap cannot.
        let (name, cap) = text
            .rsplit_once('=')
            .map(|(name, cap)| (name.trim(), cap.trim()))
            .filter(|(name, _)| !name.is_empty())
            .ok_or_else(|| refused(&"write NAME = NUMBER/TIME"))?;
        let cap = match cap {
            "none" => None,
            cap => Some(cap.parse::<Cap>().map_err(|error: CapError| refused(&error))?),
        };
        match all.iter_mut().find(|(known, _)| known == name) {
            None => all.push((name.to_owned(), cap.into_iter().collect())),
            Some((_, caps)) => match cap {
                Some(cap) if !caps.is_empty() => caps.push(cap),
                _ => {
                    let remedy = "remove that, or the others of this name";
                    let problem = format_args!("holds {text:?} beside \"{name} = none\"; {remedy}");
                    return Err(top.invalid(key, problem));
                }
            },
        }
    }
    Ok(all)
}

fn token(read: &Reader<'_>) -> Result<TokenConfig, ConfigError> {
    const SCOPES: [Scope; 4] = [Scope::Publish, Scope::Read, Scope::Operate, Scope::Count];
    let scope = |name: String| {
        SCOPES.into_iter().find(|scope| scope.as_str() == name).ok_or_else(|| {
            let remedy = "write \"publish\", \"read\", \"operate\" or \"count\"";
            read.invalid("scopes", format_args!("holds {name:?}; {remedy}"))
        })
    };
    Ok(TokenConfig {
        name: read.text("name").to_owned(),
        token_file: PathBuf::from(read.text("token_file")),
        scopes: read.list("scopes").into_iter().map(scope).collect::<Result<_, _>>()?,
        bots: read.list("bots"),
        origins: read.list("origins"),
        rate: read.count("rate", limits::PUBLIC_RATE)?,
        address_rate: read.count("address_rate", limits::PUBLIC_RATE)?,
        class: read.choice(
            "class",
            &[
                ("", None),
                ("p1", Some(Class::P1)),
                ("p2", Some(Class::P2)),
                ("p3", Some(Class::P3)),
            ],
        )?,
    })
}

fn shards(top: &Reader<'_>) -> Result<ShardCount, ConfigError> {
    let number = top.number("redis.shards", (1, ShardCount::MAX.into()))?;
    u16::try_from(number)
        .ok()
        .and_then(ShardCount::new)
        .ok_or_else(|| top.invalid("redis.shards", between(1, ShardCount::MAX.into())))
}

/// Converts the settings below `prefix` to their types.
struct Reader<'a> {
    layers: &'a Layers,
    prefix: &'a str,
}

impl<'a> Reader<'a> {
    fn value(&self, key: &str) -> &'a Value {
        let setting = self.layers.settings.get(&format!("{}{key}", self.prefix));
        &setting.expect("every key has a default: tests load them").value
    }

    fn invalid(&self, key: &str, problem: impl Display) -> ConfigError {
        let key = format!("{}{key}", self.prefix);
        let at = self.layers.origin(std::slice::from_ref(&key));
        ConfigError::Invalid { at, key, problem: problem.to_string() }
    }

    // The layers hold each value in the type of its default, so the other arms are unreachable.

    fn text(&self, key: &str) -> &'a str {
        match self.value(key) {
            Value::Text(text) => text,
            other => unreachable!("{key} is a text by default, not {other:?}"),
        }
    }

    fn flag(&self, key: &str) -> bool {
        match self.value(key) {
            Value::Flag(flag) => *flag,
            other => unreachable!("{key} is a flag by default, not {other:?}"),
        }
    }

    fn list(&self, key: &str) -> Vec<String> {
        match self.value(key) {
            Value::List(items) => items.clone(),
            other => unreachable!("{key} is a list by default, not {other:?}"),
        }
    }

    fn tables(&self, key: &str) -> usize {
        match self.value(key) {
            Value::Tables(count) => *count,
            other => unreachable!("{key} is a list of tables by default, not {other:?}"),
        }
    }

    fn fraction(&self, key: &str) -> f64 {
        match self.value(key) {
            Value::Float(number) => *number,
            other => unreachable!("{key} is a fraction by default, not {other:?}"),
        }
    }

    fn whole(&self, key: &str) -> i64 {
        match self.value(key) {
            Value::Integer(number) => *number,
            other => unreachable!("{key} is a whole number by default, not {other:?}"),
        }
    }

    fn number(&self, key: &str, (least, most): (u64, u64)) -> Result<u64, ConfigError> {
        let number = self.whole(key);
        u64::try_from(number)
            .ok()
            .filter(|number| (least..=most).contains(number))
            .ok_or_else(|| self.invalid(key, format_args!("is {number}; {}", between(least, most))))
    }

    /// A number whose bounds fit its type.
    fn count<T: TryFrom<u64>>(&self, key: &str, bounds: (u64, u64)) -> Result<T, ConfigError> {
        let number = self.number(key, bounds)?;
        T::try_from(number).map_err(|_| {
            self.invalid(key, format_args!("is {number}; {}", between(bounds.0, bounds.1)))
        })
    }

    fn positive<T: TryFrom<NonZeroU64>>(&self, key: &str, most: u64) -> Result<T, ConfigError> {
        let number = self.number(key, (1, most))?;
        NonZeroU64::new(number)
            .and_then(|number| T::try_from(number).ok())
            .ok_or_else(|| self.invalid(key, format_args!("is {number}; {}", between(1, most))))
    }

    fn duration(&self, key: &str) -> Result<Duration, ConfigError> {
        let text = self.text(key);
        humantime::parse_duration(text.trim()).map_err(|error| {
            let remedy = "write a number with a unit, such as \"200ms\", \"30s\" or \"7d\"";
            self.invalid(key, format_args!("is {text:?}, not a duration ({error}); {remedy}"))
        })
    }

    fn address<T: FromStr>(&self, key: &str) -> Result<T, ConfigError> {
        let text = self.text(key);
        text.parse().map_err(|_| {
            let remedy = "write IP:PORT, such as \"127.0.0.1:8080\" or \"[::]:8080\"";
            self.invalid(key, format_args!("is {text:?}; {remedy}"))
        })
    }

    fn choice<T: Copy>(&self, key: &str, choices: &[(&str, T)]) -> Result<T, ConfigError> {
        let text = self.text(key);
        choices.iter().find(|(name, _)| *name == text).map(|(_, choice)| *choice).ok_or_else(|| {
            let names: Vec<_> = choices.iter().map(|(name, _)| format!("{name:?}")).collect();
            self.invalid(key, format_args!("is {text:?}; write {}", names.join(" or ")))
        })
    }
}

#[cfg(test)]
mod counters_tests;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod token_tests;
