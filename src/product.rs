//! A product adds more to a pipeline than a handler. The core names no product; one list, in
//! `products`, names the built-in ones. A program that uses the crate adds its own with
//! [`Builder::product`](crate::app::Builder::product).
//!
//! A product describes the kind of its pipeline before anything runs ([`Product`]). Each instance
//! then opens it once. The result is its [`Part`] of the instance: the handler, the routes, the
//! background tasks, the metrics, and the services that other products use.
//!
//! Two sections of the configuration belong to a product: `[pipelines.NAME]`, as for every
//! pipeline, and `[products.NAME]`, whose keys the product defines ([`Opening::section`]).

use std::any::{Any, TypeId};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use ::axum::routing::MethodRouter;
use serde::de::DeserializeOwned;

pub use ::{axum, metrics};

pub use crate::admission::Class;
use crate::clock::SharedClock;
pub use crate::config::Scope;
use crate::config::{Config, ConfigError, PipelineConfig};
pub use crate::fanout::Interest;
pub use crate::formats::{Change, Format};
use crate::handler::{AnyHandler, Handler};
use crate::id::PipelineName;
use crate::lifecycle::Shutdown;
use crate::mongo::client::Mongo;
use crate::outbound::Outbound;
use crate::outbound::headers::HeadersError;
use crate::pipeline::Kind;
use crate::pressure::Pressure;
use crate::queue::Queue;
pub use crate::queue::sample::{Gauges, Seen};
pub use crate::queue::wake::{Listener, Wake};
use crate::redis::scripts::Table;
use crate::roles::Roles;
use crate::trace::Tracer;

/// Describes a product and its pipeline before anything runs.
pub trait Product: Send + Sync + 'static {
    /// The name of its pipeline, and of its section `[products.NAME]`.
    fn pipeline(&self) -> &'static str;

    /// How its queues differ from those of other pipelines.
    fn kind(&self, config: &Config, clock: &SharedClock) -> Kind {
        let _ = (config, clock);
        Kind::default()
    }

    /// Whether it stores documents in MongoDB.
    #[doc(hidden)]
    fn needs_mongo(&self) -> bool {
        false
    }

    /// Whether it calls external HTTP servers.
    #[doc(hidden)]
    fn calls_out(&self) -> bool {
        false
    }

    /// The formats of its own data. A process does not start on data of a later format, if its
    /// pipeline runs.
    fn formats(&self) -> &'static [Format] {
        &[]
    }

    /// The scripts that it runs in Redis in addition to those of the core.
    #[doc(hidden)]
    fn scripts(&self) -> Option<&'static Table> {
        None
    }

    /// Opens its part of one instance. Called only if its pipeline is enabled.
    ///
    /// # Errors
    /// [`OpenError::Unavailable`] leaves the pipeline out. Every other error stops the start.
    fn open(&self, opening: &Opening<'_>) -> Result<Arc<dyn Part>, OpenError>;
}

/// Why a product does not open.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpenError {
    /// A service that it needs is missing. The instance runs without its pipeline, and logs the
    /// reason.
    #[error("{0}")]
    Unavailable(String),
    /// A setting is wrong. The instance does not start.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A file with request headers cannot be used. The instance does not start.
    #[doc(hidden)]
    #[error(transparent)]
    Headers(#[from] HeadersError),
}

/// What a product receives when it opens.
pub struct Opening<'a> {
    /// The whole configuration.
    pub config: &'a Config,
    /// The settings of its pipeline.
    pub pipeline: &'a PipelineConfig,
    /// The wall clock.
    pub clock: &'a SharedClock,
    pub(crate) name: &'a PipelineName,
    /// The MongoDB of the instance, or the reason why there is none.
    pub(crate) mongo: &'a Result<Mongo, String>,
    /// The client for external HTTP servers, if a pipeline calls them.
    pub(crate) outbound: Option<&'a Outbound>,
}

impl Opening<'_> {
    /// Reads the section `[products.NAME]` of the product. A missing section is read as an empty
    /// one.
    ///
    /// # Errors
    /// [`ConfigError::Invalid`] if a key is unknown or a value has the wrong type. It names the
    /// section.
    pub fn section<T: DeserializeOwned>(&self) -> Result<T, ConfigError> {
        self.config.product_section(self.name)
    }

    /// The MongoDB of the instance.
    pub(crate) fn mongo(&self) -> Result<Mongo, OpenError> {
        self.mongo.clone().map_err(OpenError::Unavailable)
    }
}

/// The handler of a product.
#[derive(Clone)]
pub struct SharedHandler(pub(crate) Arc<dyn AnyHandler>);

impl<H: Handler> From<H> for SharedHandler {
    fn from(handler: H) -> Self {
        Self(Arc::new(handler))
    }
}

impl std::fmt::Debug for SharedHandler {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("SharedHandler").finish_non_exhaustive()
    }
}

/// The running part of a product in one instance.
pub trait Part: Send + Sync {
    /// Handles the events of its pipeline. Called once, and only if the process handles events.
    fn handler(&self, seat: &Seat<'_>) -> SharedHandler;

    /// Offers the services that routes and other products use. Called once, before anything starts.
    fn offer(&self, offering: &Offering<'_>, services: &mut Services) {
        let _ = (offering, services);
    }

    /// The routes it serves on `http.listen`.
    fn routes(&self) -> Vec<Route> {
        Vec::new()
    }

    /// Starts the background tasks beside the pipeline. They run until the soft stop.
    fn start(&self, seat: &Seat<'_>) {
        let _ = seat;
    }

    /// The events of its types that it takes. `None`: all of them.
    fn interest(&self) -> Option<Arc<dyn Interest>> {
        None
    }

    /// Its metrics in addition to those of every pipeline, set each time the queues are sampled.
    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        None
    }

    /// Listens to the wake channels of its pipeline.
    fn listener(&self, seat: &Seat<'_>) -> Option<Box<dyn Listener>> {
        let _ = seat;
        None
    }

    /// The stores that its handler waits for, except Redis. While they are slow, fewer workers run.
    fn stores(&self) -> Vec<Arc<Pressure>> {
        Vec::new()
    }
}

/// What a product receives to build its services.
pub struct Offering<'a> {
    /// The whole configuration.
    pub config: &'a Config,
    /// The wall clock.
    pub clock: &'a SharedClock,
    /// For calls that may be slow or rare.
    pub queue: &'a Queue,
    /// For requests that a client waits for.
    pub requests: &'a Queue,
}

/// What a running part receives.
pub struct Seat<'a> {
    /// The whole configuration.
    pub config: &'a Config,
    /// The roles of the process.
    pub roles: &'a Roles,
    /// The wall clock.
    pub clock: &'a SharedClock,
    /// Stops the instance; background tasks are spawned on it.
    pub shutdown: &'a Shutdown,
    /// The queues of its pipeline, for calls that may be slow or rare.
    pub queue: &'a Queue,
    /// The services of the products.
    pub services: &'a Services,
    /// The queues of its pipeline on the hot path.
    pub(crate) pool: &'a Queue,
    /// Creates spans.
    pub(crate) tracer: &'a Tracer,
}

/// The services that the products of one instance offer to routes and to each other. There is at
/// most one value of each type.
#[derive(Clone, Default)]
pub struct Services {
    offered: HashMap<TypeId, Arc<dyn Any + Send + Sync>>,
    /// Per pipeline that does not run here: the reason.
    absent: BTreeMap<String, String>,
}

impl Services {
    /// Offers a value. It replaces an earlier one of the same type.
    pub fn offer<T: Send + Sync + 'static>(&mut self, service: T) {
        self.offered.insert(TypeId::of::<T>(), Arc::new(service));
    }

    /// The value of a type. `None`: no product that runs here offers one.
    #[must_use]
    pub fn get<T: Send + Sync + 'static>(&self) -> Option<&T> {
        self.offered.get(&TypeId::of::<T>())?.downcast_ref()
    }

    /// As [`Self::get`], or the reason why the pipeline that offers it does not run here.
    ///
    /// # Errors
    /// The reason, as text for people.
    pub fn of<T: Send + Sync + 'static>(&self, pipeline: &str) -> Result<&T, String> {
        self.get().ok_or_else(|| {
            let reason = self.absent.get(pipeline).cloned();
            reason.unwrap_or_else(|| format!("pipelines.{pipeline} is not enabled"))
        })
    }

    /// Notes why a pipeline does not run here.
    pub(crate) fn lacks(&mut self, pipeline: &str, reason: String) {
        self.absent.insert(pipeline.to_owned(), reason);
    }
}

impl std::fmt::Debug for Services {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Self { offered, absent } = self;
        f.debug_struct("Services").field("offered", &offered.len()).field("absent", absent).finish()
    }
}

/// A route that a product serves on `http.listen`. It passes admission control, quotas, metrics and
/// authentication as the built-in ones do. The `OpenAPI` document does not describe it.
#[derive(Debug, Clone)]
pub struct Route {
    pub(crate) template: &'static str,
    pub(crate) scope: Scope,
    pub(crate) class: Class,
    pub(crate) body_max: usize,
    pub(crate) handler: MethodRouter,
}

impl Route {
    /// A route below `/v1/`. A template with `{bot}` requires a token that covers this bot; every
    /// other template requires a token that covers all bots. Under overload, the class decides
    /// which requests are shed first. A body has at most 16 KiB.
    #[must_use]
    pub fn new(template: &'static str, scope: Scope, class: Class, handler: MethodRouter) -> Self {
        Self { template, scope, class, body_max: 16 << 10, handler }
    }

    /// Takes bodies up to this size in bytes, at most 1 MiB.
    #[must_use]
    pub fn body_max(mut self, bytes: usize) -> Self {
        self.body_max = bytes.min(1 << 20);
        self
    }
}
