//! Why a process cannot start.

use crate::bus::BusError;
use crate::config::ConfigError;
use crate::expression::FilterError;
use crate::formats::TooNew;
use crate::http::{AuthError, BindError};
use crate::id::{PipelineName, Prefix};
use crate::metrics::RecorderTaken;
use crate::mongo::client::MongoError;
use crate::mongo::private::PrivateMongoError;
use crate::outbound::OutboundSetupError;
use crate::outbound::headers::HeadersError;
use crate::redis::RedisError;
use crate::redis::private::PrivateRedisError;

/// Why a process cannot start.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum AppError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The client of a bus does not take its settings.
    #[error("the source {name:?} of bus.sources cannot be used: {cause}")]
    Bus {
        /// The name of the source.
        name: String,
        /// The error of its client.
        cause: BusError,
    },
    /// This build lacks the client of a bus.
    #[error(
        "the source {name:?} of bus.sources has kind = {kind:?}, which this build does not have; use a package or the image, or build with --features {kind}"
    )]
    NoBus {
        /// The name of the source.
        name: String,
        /// Its kind.
        kind: &'static str,
    },
    /// A pipeline names a handler that is not registered.
    #[error(
        "pipelines.{pipeline}.handler is {handler:?}, which this program does not have; it has {known}"
    )]
    Handler {
        /// The pipeline.
        pipeline: PipelineName,
        /// The configured name.
        handler: String,
        /// The registered names.
        known: String,
    },
    /// A push pipeline has no URL.
    #[error(
        "pipelines.{pipeline}.url is not set, which handler = \"push\" needs; set it to the receiver's http:// or https:// URL"
    )]
    PushUrl {
        /// The pipeline.
        pipeline: PipelineName,
    },
    /// Outgoing HTTP calls cannot be set up.
    #[error(transparent)]
    Outbound(#[from] OutboundSetupError),
    /// The signing key in Redis is damaged.
    #[error(
        "the key {key} in Redis is damaged; delete it while no fairlane runs, and a new one is made"
    )]
    SigningKey {
        /// Its Redis key.
        key: String,
    },
    /// The process may open fewer files than its connections need.
    #[error(
        "http.max_connections is {connections}, which needs {needed} open files, but this process may open {allowed}; raise the limit (LimitNOFILE in systemd, ulimit -n) or lower http.max_connections"
    )]
    Files {
        /// The setting.
        connections: usize,
        /// Files for the connections and all else.
        needed: u64,
        /// The hard limit.
        allowed: u64,
    },
    /// The operating system cannot start a thread.
    #[error("cannot serve metrics.listen: {0}")]
    Observe(#[from] std::io::Error),
    /// The operating system refuses a signal handler.
    #[error("cannot listen for signals: {0}")]
    Signals(#[source] std::io::Error),
    /// A filter cannot be used.
    #[error("pipelines.{pipeline}.filter: {source}")]
    Filter {
        /// The pipeline.
        pipeline: PipelineName,
        /// The cause.
        #[source]
        source: FilterError,
    },
    /// An ordering key cannot be used.
    #[error("pipelines.{pipeline}.order_by: {}", said(.source))]
    OrderBy {
        /// The pipeline.
        pipeline: PipelineName,
        /// The cause.
        #[source]
        source: FilterError,
    },
    /// The data was created with another number of shards.
    #[error(
        "redis.shards is {configured}, but the data in Redis was created with {stored}; set it to {stored}"
    )]
    Shards {
        /// The setting.
        configured: u16,
        /// The stored value.
        stored: String,
    },
    /// The data has a later format.
    #[error(transparent)]
    TooNew(#[from] TooNew),
    /// Another environment reads a stream.
    #[error(
        "bus.streams names {stream:?}, which the environment with redis.prefix = {other:?} reads: both would handle its events, and each trim what the other needs; under redis.prefix = {prefix:?} there is no data yet, so set redis.prefix = {other:?} if that one is meant, or else another bus.streams (or bus.trim = false, to look on)"
    )]
    StreamShared {
        /// The stream.
        stream: String,
        /// The prefix of that environment.
        other: Prefix,
        /// The prefix of this environment.
        prefix: Prefix,
    },
    /// Redis has no memory left for the first data.
    #[error(
        "Redis is full, and holds none of Fairlane's data yet ({source}); raise its maxmemory or free memory, then start again"
    )]
    Full {
        /// The refused command.
        #[source]
        source: RedisError,
    },
    /// A product has a route that already exists, or that is not below `/v1/`.
    #[error("a product cannot serve {template:?}: it is served already, or not below /v1/")]
    Route {
        /// The route.
        template: &'static str,
    },
    /// No private Redis could be started.
    #[error(transparent)]
    PrivateRedis(#[from] PrivateRedisError),
    /// The private MongoDB cannot be started or stopped.
    #[error(transparent)]
    PrivateMongo(#[from] PrivateMongoError),
    /// `redis.url` cannot be read.
    #[error("redis.url cannot be used: {0}")]
    RedisUrl(#[source] redis::RedisError),
    /// Redis does not answer.
    #[error(transparent)]
    Store(#[from] RedisError),
    /// A listener cannot be opened.
    #[error(transparent)]
    Bind(#[from] BindError),
    /// `mongodb.url` cannot be used.
    #[error(transparent)]
    Mongo(#[from] MongoError),
    /// The tokens cannot be used.
    #[error(transparent)]
    Auth(#[from] AuthError),
    /// A set of `callbacks.headers` cannot be used.
    #[error(transparent)]
    Headers(#[from] HeadersError),
    /// The program has installed another recorder of metrics.
    #[error(transparent)]
    Recorder(#[from] RecorderTaken),
    /// A product or another part of the program panicked.
    #[error(
        "a part of the program panicked; the log above has the message and the place in the code"
    )]
    Panicked,
    /// Spans cannot be exported.
    #[error("{problem}")]
    Tracing {
        /// The setting, the problem and the remedy.
        problem: String,
    },
}

/// The error without the word that filters have for themselves.
fn said(error: &FilterError) -> String {
    error.to_string().replace("the filter", "the expression")
}
