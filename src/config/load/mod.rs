//! Loading: finds the file, combines the layers, and converts settings to their types.

mod auth;
mod bus;
mod callbacks;
mod counters;
mod http;
mod limits;
mod notifications;
mod pipelines;
mod quotas;
mod reader;
#[cfg(test)]
mod tests;
mod tracing;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};

use self::auth::token;
use self::bus::bus;
use self::callbacks::callbacks;
use self::counters::counters;
use self::http::{admission, http};
use self::notifications::notifications;
use self::pipelines::pipeline;
use self::quotas::quotas;
use self::reader::Reader;
use self::tracing::tracing;
use super::built_in::is_built_in;
use super::certificates;
use super::check::between;
use super::effective::{self, Effective};
use super::error::{ConfigError, Origin};
use super::layers::{ENV_PREFIX, Layers};
use super::{
    AuthConfig, Config, MetricsConfig, MongoConfig, MongoUrl, PipelineConfig, RedisConfig, RedisUrl,
};
use crate::id::{Prefix, ShardCount};

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
    /// whose name contains `-` can only be set in a file. `OTEL_EXPORTER_OTLP_ENDPOINT` is used if
    /// `tracing.endpoint` is empty, and ignored if it cannot be used: [`TracingConfig::unusable`](super::TracingConfig::unusable).
    ///
    /// # Errors
    /// If a file cannot be read (a missing file only if `explicit` names it), if a key is unknown,
    /// has the wrong type or is not supported, and if values are out of bounds or contradict each
    /// other.
    pub fn load(explicit: Option<&Path>) -> Result<Self, ConfigError> {
        let (file, variables) = sources(explicit)?;
        let config = Self::load_with(file.as_deref(), variables.into_iter())?;
        Ok(Self { is_loaded: true, ..config })
    }

    /// The settings that [`Self::load`] uses, each with its origin, in the order of their keys.
    /// Secrets are left out.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn effective(explicit: Option<&Path>) -> Result<Vec<Effective>, ConfigError> {
        let (file, variables) = sources(explicit)?;
        // It may be refused as a whole.
        Self::load_with(file.as_deref(), variables.iter().cloned())?;
        layered(file.as_deref(), variables).map(|layers| effective::of(&layers))
    }

    /// Loads from one file, or none, and the given environment.
    ///
    /// # Errors
    /// As for [`Self::load`].
    pub fn load_with(
        path: Option<&Path>,
        environment: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, ConfigError> {
        let environment: Vec<_> = environment.collect();
        let of = |name: &str| {
            let found = environment.iter().find(|(known, _)| known == name);
            found.map(|(_, text)| text.clone())
        };
        let (program, protocol) = (of(MONGOD), of(tracing::PROTOCOL));
        let collector = of(tracing::ENDPOINT).filter(|text| !text.is_empty());
        let layers = layered(path, environment)?;
        let mut config = build(&layers)?;
        config.file = path.map(Path::to_owned);
        config.mongodb.program = program.filter(|text| !text.is_empty()).map(PathBuf::from);
        tracing::follow(&mut config, collector.as_deref(), protocol.as_deref());
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

    /// For [`crate::fuzzing`]: the same, with an environment over it.
    #[cfg(any(test, fuzzing))]
    pub(crate) fn from_toml_and(
        text: &str,
        origin: &str,
        environment: Variables,
    ) -> Result<Self, ConfigError> {
        let mut layers = Layers::defaults();
        layers.add_toml(text, origin)?;
        add_variables(&mut layers, environment)?;
        let _ = effective::of(&layers);
        build(&layers)
    }
}

/// The environment variables that concern Fairlane, with their texts.
type Variables = Vec<(String, String)>;

/// The file and the variables of this process.
fn sources(explicit: Option<&Path>) -> Result<(Option<PathBuf>, Variables), ConfigError> {
    let mut variables = Vec::new();
    for (name, text) in environment() {
        let Ok(name) = name.into_string() else { continue };
        match text.into_string() {
            Ok(text) => variables.push((name, text)),
            // No URL has such characters, so it is reported as one that cannot be used.
            Err(text) if name == tracing::ENDPOINT => {
                variables.push((name, text.to_string_lossy().into_owned()));
            }
            Err(_) if is_setting(&name) || name == MONGOD => {
                let key = "the value".to_owned();
                let problem = "is not UTF-8; unset or correct it".to_owned();
                return Err(ConfigError::Invalid { at: Origin::Environment(name), key, problem });
            }
            Err(_) => {}
        }
    }
    let file = explicit
        .map(PathBuf::from)
        .or_else(|| FILES.iter().map(PathBuf::from).find(|path| may_exist(path)));
    Ok((file, variables))
}

/// The defaults, the file and the settings among the variables.
fn layered(path: Option<&Path>, environment: Variables) -> Result<Layers, ConfigError> {
    let mut layers = Layers::defaults();
    if let Some(path) = path {
        let text = fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.to_owned(), source })?;
        layers.add_toml(&text, &path.display().to_string())?;
    }
    add_variables(&mut layers, environment)?;
    Ok(layers)
}

/// Adds the settings among the variables.
fn add_variables(layers: &mut Layers, environment: Variables) -> Result<(), ConfigError> {
    let mut variables: Variables =
        environment.into_iter().filter(|(name, _)| is_setting(name)).collect();
    // The order of an environment is arbitrary; the reported mistake must not depend on it.
    variables.sort();
    for (name, text) in variables {
        layers.add_variable(&name, &text)?;
    }
    Ok(())
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
    let config = Config {
        file: None,
        is_loaded: false,
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
            wait_replicas: top.count("redis.wait_replicas", (0, WAIT_REPLICAS_MAX))?,
            wait_timeout: top.duration("redis.wait_timeout")?,
        },
        mongodb: MongoConfig {
            url: mongo_url,
            database: top.text("mongodb.database").to_owned(),
            program: None,
        },
        bus: bus(&top, &prefix)?,
        http: http(&top)?,
        admission: admission(&top)?,
        quotas: quotas(&top)?,
        limited_bots: limits::bots(&top)?,
        callbacks: callbacks(&top)?,
        counters: counters(&top)?,
        notifications: notifications(&top)?,
        metrics: MetricsConfig { listen: top.address("metrics.listen")? },
        tracing: tracing(&top)?,
        auth: AuthConfig { tokens, allow_anonymous: top.flag("auth.allow_anonymous") },
        pipelines,
        products: layers.products.clone(),
    };
    config.find_fault().map_or(Ok(config), |fault| Err(fault.into_error(layers)))
}

/// Maximum of `redis.wait_replicas`.
const WAIT_REPLICAS_MAX: u64 = 10;

fn shards(top: &Reader<'_>) -> Result<ShardCount, ConfigError> {
    let number = top.number("redis.shards", (1, ShardCount::MAX.into()))?;
    u16::try_from(number)
        .ok()
        .and_then(ShardCount::new)
        .ok_or_else(|| top.invalid("redis.shards", between(1, ShardCount::MAX.into())))
}
