//! Checks what an [`App`] is made of, and makes a plan for each pipeline.

use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::sync::Arc;

use futures_util::future::OptionFuture;
use tracing::{info, warn};

use super::{App, AppError, Private, Roles};
use crate::automations::Automations;
use crate::automations::part::AutomationPart;
use crate::clock::SharedClock;
use crate::config::{Config, NotificationsConfig, OnThrottle, PUSH, PipelineConfig, Start};
use crate::counters::part::CounterPart;
use crate::counters::store::CounterStore;
use crate::fanout::Route;
use crate::filter::{Filter, Glob, Sees};
use crate::handler::{AnyHandler, Environment, Handler, PushHandler, store_patience};
use crate::id::PipelineName;
use crate::keyspace::private::PrivateRedis;
use crate::keyspace::{Link, Target};
use crate::metrics::{self, PipelineMetrics};
use crate::notifications::part::NotificationPart;
use crate::notifications::record::Caps;
use crate::notifications::scripts::Throttle;
use crate::notifications::{Gates, PER_HOST, Sending};
use crate::outbound::headers::HeaderSets;
use crate::outbound::{self, CONNECT_TIMEOUT, Outbound};
use crate::pipeline::Kind;
use crate::pool::open::OpenPipeline;
use crate::pool::retry::Backoff;
use crate::pool::scale::Bounds;
use crate::pool::{Pool, Settings, Work};
use crate::presence::Meter;
use crate::product::{Kinds, Part, Seat};
use crate::queue::{self, Queue};
use crate::signing::SigningKey;
use crate::store::mongo::Mongo;
use crate::store::private::PrivateMongo;
use crate::telemetry::OncePerMinute;

/// Collects what an [`App`] is made of.
pub struct Builder {
    pub(super) config: Config,
    pub(super) roles: Roles,
    pub(super) handlers: HashMap<String, Arc<dyn AnyHandler>>,
    pub(super) clock: SharedClock,
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

    /// What the process does; [`Roles::ALL`] if not said.
    #[must_use]
    pub fn roles(mut self, roles: Roles) -> Self {
        self.roles = roles;
        self
    }

    /// Another wall clock.
    #[must_use]
    pub fn clock(mut self, clock: SharedClock) -> Self {
        self.clock = clock;
        self
    }

    /// Checks everything, starts a private Redis where none is named, and opens the listeners.
    ///
    /// # Errors
    /// See [`AppError`]; nothing is left running.
    pub async fn build(mut self) -> Result<App, AppError> {
        self.config.check()?;
        metrics::install();
        let (mongo, private_mongo) = self.mongo().await?;
        let outbound = self.outbound()?;
        let products = self.products(mongo, outbound.as_ref())?;
        let mut plans = Vec::new();
        for (name, config) in self.config.pipelines.iter().filter(|(_, config)| config.enabled) {
            plans.push(self.plan(name, config, outbound.as_ref(), &products)?);
        }
        if plans.is_empty() {
            warn!("no pipeline is enabled: events stay on the bus; add [pipelines.NAME]");
        }
        let certificates = self.config.redis.certificates()?;
        let private = match self.config.redis.url {
            Some(_) => None,
            None => Some(PrivateRedis::start(&self.config.data_dir).await?),
        };
        let url = self.config.redis.url.as_ref().or(private.as_ref().map(PrivateRedis::url));
        let prefix = &self.config.redis.prefix;
        let open = |url| {
            let target = Target::open(url, certificates.as_ref());
            target.map(|target| target.with_prefix(prefix.clone()))
        };
        let Some(target) = url.map(open).transpose().map_err(AppError::RedisUrl)? else {
            unreachable!("without a url a private Redis was started, and that has one")
        };
        match App::assemble(self, plans, target, products).await {
            Ok(app) => Ok(App { private: Private { redis: private, mongo: private_mongo }, ..app }),
            Err(error) => {
                if let Some(Err(stop)) = OptionFuture::from(private.map(PrivateRedis::stop)).await {
                    warn!(error = %stop, "cannot stop the private Redis");
                }
                let stopping = private_mongo.map(PrivateMongo::stop);
                if let Some(Err(stop)) = OptionFuture::from(stopping).await {
                    warn!(error = %stop, "cannot stop the private MongoDB");
                }
                Err(error)
            }
        }
    }

    /// The MongoDB of `mongodb.url`, or a private one beside a private Redis: with a Redis that is
    /// shared, every process would keep counters of its own.
    async fn mongo(&self) -> Result<(Result<Mongo, String>, Option<PrivateMongo>), AppError> {
        let config = &self.config;
        let database = &config.mongodb.database;
        if let Some(url) = &config.mongodb.url {
            return Ok((Ok(Mongo::open(url, database).await?), None));
        }
        let needs = |(name, pipeline): (&PipelineName, &PipelineConfig)| {
            (name.is(crate::counters::PIPELINE) || name.is(crate::automations::PIPELINE))
                && pipeline.enabled
        };
        if !config.pipelines.iter().any(needs) {
            let reason = "neither pipelines.counters nor pipelines.automations is enabled";
            return Ok((Err(reason.to_owned()), None));
        }
        if config.redis.url.is_some() {
            return Ok((Err("mongodb.url is not set".to_owned()), None));
        }
        match PrivateMongo::start(&config.data_dir, config.mongodb.program.as_deref()).await {
            Ok(private) => {
                let mongo = Mongo::open(private.url(), database).await?;
                Ok((Ok(mongo), Some(private)))
            }
            Err(error) => Ok((Err(error.to_string()), None)),
        }
    }

    /// What the products share; without MongoDB, the pipelines that keep something there are left
    /// out.
    fn products(
        &mut self,
        mongo: Result<Mongo, String>,
        outbound: Option<&Outbound>,
    ) -> Result<Products, AppError> {
        let kinds = Kinds::new(&self.config, &self.clock);
        let counters = self.kept(&mongo, crate::counters::PIPELINE).map(|mongo| {
            let pipelines = &self.config.pipelines;
            let pipeline = pipelines.iter().find(|(name, _)| name.is(crate::counters::PIPELINE));
            let timeout = pipeline.map(|(_, pipeline)| pipeline.handler_timeout);
            let within = store_patience(timeout.unwrap_or_default());
            CounterStore::writing_within(mongo, within)
        });
        if let Err(reason) = &counters {
            info!(reason, "views are not counted");
            self.config.pipelines.retain(|name, _| !name.is(crate::counters::PIPELINE));
        }
        let automations = self.kept(&mongo, crate::automations::PIPELINE);
        let automations = automations.map(|mongo| Automations::new(&mongo));
        if let Err(reason) = &automations {
            info!(reason, "rules of bots are not evaluated");
            self.config.pipelines.retain(|name, _| !name.is(crate::automations::PIPELINE));
        }
        let enabled = |name: &str| {
            self.config.pipelines.iter().any(|(other, config)| other.is(name) && config.enabled)
        };
        let outbound = outbound.filter(|_| enabled(crate::notifications::PIPELINE));
        let sending = outbound.map(|outbound| self.sending(outbound)).transpose()?;
        Ok(Products { mongo: mongo.ok(), counters, automations, sending, kinds })
    }

    /// The MongoDB for a pipeline, or why it does not run.
    fn kept(&self, mongo: &Result<Mongo, String>, pipeline: &str) -> Result<Mongo, String> {
        let is_enabled = |(name, config): (&PipelineName, &PipelineConfig)| {
            name.as_str() == pipeline && config.enabled
        };
        if !self.config.pipelines.iter().any(is_enabled) {
            return Err(format!("pipelines.{pipeline}.enabled is false"));
        }
        mongo.clone()
    }

    /// What push handlers and notifications call with; `None` without any.
    fn outbound(&self) -> Result<Option<Outbound>, AppError> {
        let calls = |(name, pipeline): &(&PipelineName, &PipelineConfig)| {
            pipeline.enabled && (self.is_push(pipeline) || name.is(crate::notifications::PIPELINE))
        };
        let pipelines = self.config.pipelines.iter().filter(calls);
        let Some(shortest) = pipelines.map(|(_, pipeline)| pipeline.handler_timeout).min() else {
            return Ok(None);
        };
        let callbacks = &self.config.callbacks;
        let settings = outbound::Settings {
            allow_nets: callbacks.allow_nets.clone().into(),
            max_per_host: callbacks.max_per_host.get(),
            // Who cannot be reached must be known before the handler has taken too long.
            connect_timeout: CONNECT_TIMEOUT.min(shortest / 2),
        };
        Ok(Some(Outbound::new(&settings)?))
    }

    /// Whether the built-in push handler is meant.
    fn is_push(&self, config: &PipelineConfig) -> bool {
        config.handler == PUSH && !self.handlers.contains_key(PUSH)
    }

    fn part(
        &self,
        name: &PipelineName,
        config: &PipelineConfig,
        outbound: Option<&Outbound>,
        products: &Products,
    ) -> Result<Arc<dyn Part>, AppError> {
        let timeout = config.handler_timeout;
        let pressure = products.mongo.as_ref().map(|mongo| Arc::clone(mongo.pressure()));
        if name.is(crate::notifications::PIPELINE)
            && let Some(sending) = &products.sending
        {
            return Ok(Arc::new(NotificationPart(sending.clone())));
        }
        if name.is(crate::automations::PIPELINE)
            && let (Ok(automations), Some(pressure)) = (&products.automations, &pressure)
        {
            let pressure = Arc::clone(pressure);
            return Ok(Arc::new(AutomationPart::new(automations.clone(), timeout, pressure)));
        }
        if name.is(crate::counters::PIPELINE)
            && let (Ok(store), Some(pressure)) = (&products.counters, pressure)
        {
            return Ok(Arc::new(CounterPart::new(store.clone(), timeout, pressure)));
        }
        if let Some(outbound) = outbound
            && self.is_push(config)
        {
            let Some(url) = config.url.clone() else {
                return Err(AppError::PushUrl { pipeline: name.clone() });
            };
            let secrets = self.config.callbacks.secrets.clone();
            if secrets.is_empty() {
                warn!(pipeline = %name, %url,
                    "pushes are not signed, so the receiver cannot know who calls; set callbacks.secrets");
            }
            let handler = PushHandler::new(outbound.clone(), url, secrets, timeout);
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

    /// What sends notifications.
    fn sending(&self, outbound: &Outbound) -> Result<Sending, AppError> {
        let (config, secrets) = (&self.config.notifications, &self.config.callbacks.secrets);
        if secrets.is_empty() {
            // Many send none; `fairlane check` warns of it.
            info!(
                "notifications are not signed, so the receivers cannot know who calls; set callbacks.secrets"
            );
        }
        let throttle = Throttle {
            threshold: config.user_poll_threshold,
            by_kind: config.type_thresholds.clone(),
            caps: caps(config),
            defers: config.on_throttle == OnThrottle::Defer,
        };
        let gates = Gates::new(PER_HOST, config.host_rate);
        let sets = HeaderSets::open(&self.config.callbacks.headers)?;
        let (outbound, secrets) = (outbound.clone(), secrets.clone());
        Ok(Sending { outbound, secrets, sets, throttle, gates })
    }

    fn plan(
        &self,
        name: &PipelineName,
        config: &PipelineConfig,
        outbound: Option<&Outbound>,
        products: &Products,
    ) -> Result<Plan, AppError> {
        let part = self.part(name, config, outbound, products)?;
        let filter =
            config.filter.as_deref().map(|text| Filter::compile(text, Sees::Event)).transpose();
        let filter =
            filter.map_err(|source| AppError::Filter { pipeline: name.clone(), source })?;
        let max = if self.roles.work { config.workers.max.get() } else { 0 };
        Ok(Plan {
            name: name.clone(),
            config: config.clone(),
            part,
            filter,
            kind: products.kinds.of(name),
            meter: Arc::new(Meter { max, ..Meter::default() }),
        })
    }
}

/// The caps of the configuration.
fn caps(config: &NotificationsConfig) -> Caps {
    let by_bot = config.bot_caps.iter().map(|(glob, caps)| (Glob::new(glob), caps.clone()));
    Caps { all: config.caps.clone(), by_bot: by_bot.collect(), by_kind: config.type_caps.clone() }
}

/// What the products share.
pub(super) struct Products {
    pub(super) mongo: Option<Mongo>,
    /// Or why views are not counted, for callers.
    pub(super) counters: Result<CounterStore, String>,
    /// Or why no rules are evaluated, for callers.
    pub(super) automations: Result<Automations, String>,
    /// What sends notifications, where they run.
    pub(super) sending: Option<Sending>,
    pub(super) kinds: Kinds,
}

impl Products {
    /// What decides whether a host gets another notification.
    pub(super) fn gates(&self) -> Option<Arc<Gates>> {
        self.sending.as_ref().map(|sending| Arc::clone(&sending.gates))
    }
}

/// A pipeline that no product has.
struct Handled(Arc<dyn AnyHandler>);

impl Part for Handled {
    fn handler(&self, _: &Seat<'_>) -> Arc<dyn AnyHandler> {
        Arc::clone(&self.0)
    }
}

/// A pipeline, checked.
pub(super) struct Plan {
    pub(super) name: PipelineName,
    pub(super) config: PipelineConfig,
    pub(super) part: Arc<dyn Part>,
    pub(super) filter: Option<Filter>,
    pub(super) kind: Kind,
    pub(super) meter: Arc<Meter>,
}

impl Plan {
    /// Whether events of the bus are copied for it.
    pub(super) fn takes_of_bus(&self) -> bool {
        !self.kind.off_bus
    }

    /// Whether it begins at the first entry of a stream that it never read; else at the next.
    pub(super) fn starts_earliest(&self) -> bool {
        self.config.start == Start::Earliest
    }

    pub(super) fn queue(&self, config: &Config, link: &Arc<Link>) -> Queue {
        let shards = config.redis.shards;
        let limits = queue::limits(&self.config, shards);
        Queue::new(self.name.clone(), shards, limits, Arc::clone(link)).of_kind(self.kind.clone())
    }

    pub(super) fn route(self, queue: Queue) -> Route {
        Route {
            from_earliest: self.starts_earliest(),
            interest: self.part.interest(),
            metrics: PipelineMetrics::new(&self.name),
            meter: self.meter,
            warned: OncePerMinute::default(),
            full: OncePerMinute::default(),
            types: self.config.events.iter().map(|glob| Glob::new(glob)).collect(),
            filter: self.filter,
            queue,
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
            // What is posted to a ledger is never given up for the failures of others.
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

    pub(super) fn open(&self, queue: Queue) -> OpenPipeline {
        OpenPipeline::new(queue, self.settings(), Arc::clone(&self.meter))
    }

    pub(super) fn pool(&self, seat: &Seat<'_>, signing_key: &SigningKey) -> Pool {
        let environment =
            Environment { clock: Arc::clone(seat.clock), pipeline: self.name.clone() };
        let work = Work {
            handler: self.part.handler(seat),
            environment,
            signing_key: signing_key.clone(),
            meter: Arc::clone(&self.meter),
            stores: self.part.stores(),
        };
        Pool::new(seat.pool.clone(), self.settings(), work, seat.shutdown.clone())
    }
}
