//! Checks the parts of an [`App`], and makes a plan for each pipeline.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::fmt;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;

use futures_util::future::{BoxFuture, FutureExt as _};
use tracing::{info, warn};

use super::sockets::Sockets;
use super::{App, AppError, Private, Roles};
use crate::clock::SharedClock;
use crate::config::{Config, PUSH, PipelineConfig, Start};
use crate::expression::{Filter, Glob, Sees};
use crate::fanout;
use crate::handler::{AnyHandler, Environment, Handler, PushHandler};
use crate::history::{self, Recorder};
use crate::http::ROUTES;
use crate::id::PipelineName;
use crate::metrics::{self, PipelineMetrics};
use crate::mongo::client::Mongo;
use crate::mongo::private::PrivateMongo;
use crate::outbound::{self, CONNECT_TIMEOUT, Outbound};
use crate::pipeline::Kind;
use crate::pool::open::OpenPipeline;
use crate::pool::retry::Backoff;
use crate::pool::scale::Bounds;
use crate::pool::{Lanes, Places, Pool, Settings, Work};
use crate::presence::Meter;
use crate::product::{OpenError, Opening, Part, Product, Route, Seat, Services, SharedHandler};
use crate::products::{Kinds, Products};
use crate::queue::Queue;
use crate::quotas::Quotas;
use crate::redis::private::PrivateRedis;
use crate::redis::{Link, Target};
use crate::reload::Reloads;
use crate::signed_token::SigningKey;
use crate::telemetry::OncePerMinute;

/// Collects the parts of an [`App`].
pub struct Builder {
    pub(super) config: Config,
    pub(super) roles: Roles,
    pub(super) handlers: HashMap<String, Arc<dyn AnyHandler>>,
    pub(super) clock: SharedClock,
    pub(super) products: Products,
    pub(super) reloads: Option<Reloads>,
    /// Open sockets of an earlier instance.
    pub(super) inherited: Sockets,
}

impl fmt::Debug for Builder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Builder").field("roles", &self.roles).finish_non_exhaustive()
    }
}

impl Builder {
    /// Registers a handler under the name that `pipelines.NAME.handler` uses. Replaces a built-in
    /// one of the same name.
    #[must_use]
    pub fn handler(mut self, name: impl Into<String>, handler: impl Handler) -> Self {
        self.handlers.insert(name.into(), Arc::new(handler));
        self
    }

    /// Adds a product. It replaces another one with the same pipeline. Its pipeline runs if the
    /// configuration contains and enables it.
    #[must_use]
    pub fn product(mut self, product: impl Product) -> Self {
        self.products.add(Arc::new(product));
        self
    }

    /// The roles of the process; default: [`Roles::ALL`].
    #[must_use]
    pub fn roles(mut self, roles: Roles) -> Self {
        self.roles = roles;
        self
    }

    /// Replaces the wall clock.
    #[must_use]
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = clock;
        self
    }

    /// How requests ask for a reload.
    pub(crate) fn reloads(mut self, reloads: Reloads) -> Self {
        self.reloads = Some(reloads);
        self
    }

    /// Takes over these sockets where the configuration has their addresses.
    pub(crate) fn inheriting(mut self, sockets: Sockets) -> Self {
        self.inherited = sockets;
        self
    }

    /// Checks everything, starts private servers where none are named, and opens the listeners.
    ///
    /// # Errors
    /// See [`AppError`]; nothing is left running, also after a panic of a product, except a private
    /// server that was too slow: the next start uses it.
    ///
    /// # Cancel safety
    /// If the future is dropped, or an [`App`] that never runs, private servers that were started go
    /// on. The next instance with their `data_dir` uses them, and stops them at its end.
    pub async fn build(self) -> Result<App, AppError> {
        let mut private = Private::default();
        // Boxed: it is large, and callers hold it beside their own.
        let built = AssertUnwindSafe(Box::pin(self.build_with(&mut private))).catch_unwind().await;
        match built.unwrap_or(Err(AppError::Panicked)) {
            Ok(app) => Ok(App { private, ..app }),
            Err(error) => Err(private.stop_after(error).await),
        }
    }

    /// The same. The private servers that it starts are in `private`, whatever it returns.
    async fn build_with(mut self, private: &mut Private) -> Result<App, AppError> {
        self.config.check()?;
        self.config.check_products(self.products.all().map(Product::pipeline))?;
        metrics::install()?;
        let outbound = self.outbound()?;
        let certificates = self.config.redis.certificates()?;
        let mongo = self.mongo(private).await?;
        let kinds = Kinds::new(&self.products, &self.config, &self.clock);
        let quotas = self.config.quotas.quotas();
        let needs = Needs { mongo, outbound, kinds, quotas };
        let (mut plans, mut services) = (Vec::new(), Services::default());
        for (name, config) in &self.config.pipelines {
            if config.enabled {
                plans.extend(self.plan(name, config, &needs, &mut services)?);
            } else {
                services.lacks(name.as_str(), format!("pipelines.{name}.enabled is false"));
            }
        }
        let runs = |name: &PipelineName| plans.iter().any(|plan| plan.name == *name);
        // A pipeline that does not run here reserves no connection, file or memory.
        self.config.pipelines.retain(|name, config| !config.enabled || runs(name));
        let routes: Vec<Route> = plans.iter().flat_map(|plan| plan.part.routes()).collect();
        Self::check_routes(&routes)?;
        if plans.is_empty() {
            warn!("no pipeline is enabled: events stay on the bus; add [pipelines.NAME]");
        }
        let redis = &self.config.redis;
        let url = match &redis.url {
            Some(url) => url,
            None => private.redis.insert(PrivateRedis::start(&self.config.data_dir).await?).url(),
        };
        let target = Target::open(url, certificates.as_ref()).map_err(AppError::RedisUrl)?;
        let target = target.with_prefix(redis.prefix.clone()).with_wait(redis.wait());
        let plans = Plans { all: plans, needs, services, routes };
        Box::pin(App::assemble(self, plans, target)).await
    }

    /// The MongoDB at `mongodb.url`, or a private one beside a private Redis, if this machine has its
    /// program. Without the program, data of an earlier start is an error. With a shared Redis there is
    /// no private MongoDB, because every process would keep separate counters.
    async fn mongo(&self, private: &mut Private) -> Result<Result<Mongo, String>, AppError> {
        let config = &self.config;
        let database = &config.mongodb.database;
        if let Some(url) = &config.mongodb.url {
            let mongo = Mongo::open(url, database).await?;
            return match mongo.lookup_error() {
                // A reload: the current instance goes on, and mostly knows the servers.
                Some(error) if !self.inherited.is_empty() => Err(error.into()),
                // A start: they are looked up until they are found.
                _ => Ok(Ok(mongo)),
            };
        }
        let needs = |(name, pipeline): (&PipelineName, &PipelineConfig)| {
            pipeline.enabled && self.products.of(name).is_some_and(Product::needs_mongo)
        };
        if !config.pipelines.iter().any(needs) {
            let reason = "no pipeline that needs MongoDB is enabled";
            return Ok(Err(reason.to_owned()));
        }
        if config.redis.url.is_some() {
            return Ok(Err("mongodb.url is not set".to_owned()));
        }
        match PrivateMongo::start(&config.data_dir, config.mongodb.program.as_deref()).await {
            Ok(started) => {
                let url = private.mongo.insert(started).url();
                Ok(Ok(Mongo::open(url, database).await?))
            }
            Err(error) if error.lacks_program() => Ok(Err(error.to_string())),
            // The next start may succeed. Until then the bus keeps the events.
            Err(error) => Err(error.into()),
        }
    }

    /// The HTTP client of push handlers and products; `None` if none of them calls out.
    fn outbound(&self) -> Result<Option<Outbound>, AppError> {
        let calls = |(name, pipeline): &(&PipelineName, &PipelineConfig)| {
            let product = self.products.of(name);
            pipeline.enabled && product.map_or_else(|| self.is_push(pipeline), Product::calls_out)
        };
        let pipelines = self.config.pipelines.iter().filter(calls);
        let Some(shortest) = pipelines.map(|(_, pipeline)| pipeline.handler_timeout).min() else {
            return Ok(None);
        };
        let callbacks = &self.config.callbacks;
        let settings = outbound::Settings {
            allow_nets: callbacks.allow_nets.clone().into(),
            max_per_host: callbacks.max_per_host.get(),
            // An unreachable target must be known before the handler times out.
            connect_timeout: CONNECT_TIMEOUT.min(shortest / 2),
            name_servers: callbacks.name_servers.clone().into(),
        };
        Ok(Some(Outbound::new(&settings)?))
    }

    /// Whether the configuration means the built-in push handler.
    fn is_push(&self, config: &PipelineConfig) -> bool {
        config.handler == PUSH && !self.handlers.contains_key(PUSH)
    }

    /// The handler of a pipeline without a product.
    fn handled(
        &self,
        name: &PipelineName,
        config: &PipelineConfig,
        outbound: Option<&Outbound>,
    ) -> Result<Arc<dyn Part>, AppError> {
        if let Some(outbound) = outbound
            && self.is_push(config)
        {
            let Some(url) = config.url.clone() else {
                return Err(AppError::PushUrl { pipeline: name.clone() });
            };
            let secrets = self.config.callbacks.secrets.clone();
            if secrets.is_empty() {
                warn!(pipeline = %name, %url,
                    "pushes are not signed, so the receiver cannot verify that Fairlane sends them; set callbacks.secrets");
            }
            let handler = PushHandler::new(outbound.clone(), url, secrets, config.handler_timeout);
            return Ok(Arc::new(Handled(Arc::new(handler))));
        }
        let handler = self.handlers.get(&config.handler).map(Arc::clone);
        let part = handler.map(|handler| Arc::new(Handled(handler)) as Arc<dyn Part>);
        part.ok_or_else(|| {
            let known: BTreeSet<_> =
                self.handlers.keys().map(String::as_str).chain([PUSH]).collect();
            let known: Vec<_> = known.into_iter().map(|name| format!("{name:?}")).collect();
            AppError::Handler {
                pipeline: name.clone(),
                handler: config.handler.clone(),
                known: known.join(", "),
            }
        })
    }

    /// A plan for a pipeline. `None`: its product cannot run here, for the reason in `services`.
    fn plan(
        &self,
        name: &PipelineName,
        config: &PipelineConfig,
        needs: &Needs,
        services: &mut Services,
    ) -> Result<Option<Plan>, AppError> {
        let outbound = needs.outbound.as_ref();
        let opened = self.products.of(name).map(|product| {
            let (mongo, clock) = (&needs.mongo, &self.clock);
            let config = &self.config;
            product.open(&Opening {
                config,
                pipeline: &config.pipelines[name],
                clock,
                name,
                mongo,
                outbound,
            })
        });
        let part = match opened {
            None => self.handled(name, config, outbound)?,
            Some(Ok(part)) => part,
            Some(Err(OpenError::Unavailable(reason))) => {
                info!(pipeline = %name, reason, "the pipeline does not run here");
                services.lacks(name.as_str(), reason);
                return Ok(None);
            }
            Some(Err(OpenError::Config(error))) => return Err(error.into()),
            Some(Err(OpenError::Headers(error))) => return Err(error.into()),
        };
        let filter =
            config.filter.as_deref().map(|text| Filter::compile(text, Sees::Event)).transpose();
        let filter =
            filter.map_err(|source| AppError::Filter { pipeline: name.clone(), source })?;
        let lanes = Lanes::new(&config.order_by, config.concurrency.get())
            .map_err(|source| AppError::OrderBy { pipeline: name.clone(), source })?;
        let max = if self.roles.work { config.workers.max.get() } else { 0 };
        Ok(Some(Plan {
            name: name.clone(),
            config: config.clone(),
            part,
            filter,
            lanes: lanes.map(Arc::new),
            kind: needs.kinds.of(name),
            quotas: needs.quotas.clone(),
            meter: Arc::new(Meter { max, ..Meter::default() }),
        }))
    }

    /// Refuses routes that already exist, and routes outside `/v1/`.
    fn check_routes(routes: &[Route]) -> Result<(), AppError> {
        let shape = |template: &str| -> Vec<String> {
            let part = |part: &str| if part.starts_with('{') { "{}" } else { part }.to_owned();
            template.split('/').map(part).collect()
        };
        let mut known: HashSet<_> = ROUTES.iter().map(|row| shape(row.1)).collect();
        for Route { template, .. } in routes {
            if !template.starts_with("/v1/") || !known.insert(shape(template)) {
                return Err(AppError::Route { template });
            }
        }
        Ok(())
    }
}

/// What pipelines need besides their configuration.
pub(super) struct Needs {
    /// Or the reason why there is none.
    pub(super) mongo: Result<Mongo, String>,
    outbound: Option<Outbound>,
    pub(super) kinds: Kinds,
    /// How much bots may hold.
    pub(super) quotas: Quotas,
}

/// A pipeline without a product.
struct Handled(Arc<dyn AnyHandler>);

impl Part for Handled {
    fn handler(&self, _: &Seat<'_>) -> SharedHandler {
        SharedHandler(Arc::clone(&self.0))
    }
}

/// The plans of all pipelines.
pub(super) struct Plans {
    pub(super) all: Vec<Plan>,
    pub(super) needs: Needs,
    pub(super) services: Services,
    /// The HTTP routes of the products.
    pub(super) routes: Vec<Route>,
}

/// A pipeline with a checked configuration.
pub(super) struct Plan {
    pub(super) name: PipelineName,
    pub(super) config: PipelineConfig,
    pub(super) part: Arc<dyn Part>,
    pub(super) filter: Option<Filter>,
    /// `None`: each bot has one order.
    pub(super) lanes: Option<Arc<Lanes>>,
    pub(super) kind: Kind,
    pub(super) quotas: Quotas,
    pub(super) meter: Arc<Meter>,
}

impl Plan {
    /// Whether the pipeline takes events from the bus.
    pub(super) fn takes_of_bus(&self) -> bool {
        !self.kind.off_bus
    }

    /// Whether the pipeline starts at the first entry of a stream that is new to it; otherwise at
    /// the next entry.
    pub(super) fn starts_earliest(&self) -> bool {
        self.config.start == Start::Earliest
    }

    pub(super) fn queue(&self, config: &Config, link: &Arc<Link>) -> Queue {
        let shards = config.redis.shards;
        let limits = self.config.limits(shards);
        Queue::new(self.name.clone(), shards, limits, Arc::clone(link))
            .of_kind(self.kind.clone())
            .with_quotas(self.quotas.clone())
    }

    /// The events of its types that it takes.
    pub(super) fn interest(&self) -> Option<Arc<dyn fanout::Interest>> {
        self.part.interest().map(|interest| fanout::guarded(&self.name, interest))
    }

    pub(super) fn route(self, queue: Queue, places: Option<Places>) -> fanout::Route {
        fanout::Route {
            from_earliest: self.starts_earliest(),
            interest: self.interest(),
            metrics: PipelineMetrics::new(&self.name),
            meter: self.meter,
            warned: OncePerMinute::default(),
            full: OncePerMinute::default(),
            types: self.config.events.iter().map(|glob| Glob::new(glob)).collect(),
            filter: self.filter,
            queue,
            places,
        }
    }

    pub(super) fn settings(&self) -> Settings {
        let config = &self.config;
        Settings {
            batch: config.batch.get(),
            slice_time: config.slice_time,
            lease_ttl: config.lease_ttl,
            handler_timeout: config.handler_timeout,
            workers: Bounds { min: config.workers.min.get(), max: config.workers.max.get() },
            // An event that is posted to a ledger is never dead-lettered because of failures of
            // other systems.
            max_attempts: match &self.kind.ledger {
                Some(_) => u32::MAX,
                None => config.max_attempts.get(),
            },
            backoff: Backoff {
                initial: config.backoff.initial,
                max: config.backoff.max,
                jitter: config.backoff.jitter,
            },
            max_age: config.max_age,
        }
    }

    pub(super) fn open(&self, queue: Queue, recorder: Option<Recorder>) -> OpenPipeline {
        OpenPipeline::new(queue, self.settings(), Arc::clone(&self.meter), recorder)
    }

    /// Keeps attempts for operators, by a task that ends after the last clone is dropped. `None`: none
    /// is kept.
    pub(super) fn recorder(
        &self,
        queue: &Queue,
        clock: &SharedClock,
        spawn: impl FnOnce(BoxFuture<'static, ()>),
    ) -> Option<Recorder> {
        let places = history::Places {
            pipeline: self.name.clone(),
            shards: Arc::clone(queue.shards()),
            count: queue.shard_count(),
            link: Arc::clone(queue.link()),
        };
        let (recorder, task) = Recorder::new(self.config.history, places, Arc::clone(clock))?;
        spawn(Box::pin(task));
        Some(recorder)
    }

    pub(super) fn pool(&self, seat: &Seat<'_>, signing_key: &SigningKey) -> Pool {
        let environment =
            Environment { clock: Arc::clone(seat.clock), pipeline: self.name.clone() };
        let work = Work {
            handler: self.part.handler(seat).0,
            environment,
            signing_key: signing_key.clone(),
            meter: Arc::clone(&self.meter),
            limits: seat.config.limits_of_bots(&self.name),
            stores: self.part.stores(),
            lanes: self.lanes.clone(),
            tracer: seat.tracer.clone(),
            recorder: self.recorder(seat.queue, seat.clock, |task| {
                seat.shutdown.spawn(task);
            }),
        };
        Pool::new(seat.pool.clone(), self.settings(), work, seat.shutdown.clone())
    }
}
