//! The sections of the configuration.

mod auth;
mod bus;
mod callbacks;
mod counters;
mod http;
mod limits;
mod notifications;
mod pipelines;
mod quotas;
mod stores;
mod tracing;

pub(crate) use self::auth::{ANONYMOUS, WEIGHT_MAX};
pub use self::auth::{AuthConfig, Scope, TokenConfig};
pub use self::bus::{
    BotFrom, BusConfig, Hidden, KafkaSection, NatsLogin, NatsSection, PublishFormat, Sasl,
    SaslMechanism, SourceConfig, SourceKind, SourceStart, TlsFiles, TypeFrom,
};
pub use self::callbacks::CallbacksConfig;
pub use self::counters::CountersConfig;
pub use self::http::{AdmissionConfig, HttpConfig, MetricsConfig};
pub use self::limits::BotLimitsConfig;
pub use self::notifications::{NotificationsConfig, OnThrottle};
pub use self::pipelines::{BackoffConfig, DeadConfig, PipelineConfig, Start, WorkersConfig};
pub use self::quotas::{BotQuotaConfig, QuotasConfig};
pub use self::stores::{MongoConfig, RedisConfig};
pub use self::tracing::TracingConfig;
