//! Puts the parts together. The only file that knows every one of them.

mod builder;
mod control;
pub(crate) mod files;
mod observe;
mod supervise;

use std::collections::HashMap;
use std::fmt;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::{OptionFuture, join3};
use redis::Value;
use tokio::net::TcpListener;
use tokio_util::sync::CancellationToken;
use tracing::{debug, info};

pub use self::builder::Builder;
use self::builder::{Plan, Stores};
pub use self::control::Control;
use crate::automation::effects::Effects;
use crate::automation::stats::{self, RuleNotes};
use crate::automation::{self, Editor, RulesEar, Subscriptions};
use crate::bus::reader::{self, Retention};
use crate::bus::redis_stream::RedisStream;
use crate::bus::starts::Starts;
use crate::clock::{SharedClock, SystemClock};
use crate::config::{Config, ConfigError};
use crate::counters::{Counters, upkeep};
use crate::fanout::Fanout;
use crate::filter::FilterError;
use crate::handler::LogHandler;
use crate::http::{
    self, Access, Api, AuthError, BindError, Ending, Exports, Health, Limits, Proxies, Queues,
};
use crate::id::{PipelineName, Prefix};
use crate::keyspace::keys::{self, ShardKeys};
use crate::keyspace::private::{PrivateRedis, PrivateRedisError};
use crate::keyspace::{Link, Server, StoreError, Target};
use crate::lifecycle::Shutdown;
use crate::metrics::{CounterMetrics, DueMetrics, PipelineMetrics};
use crate::notifications::{Notifications, audit};
use crate::outbound::headers::HeadersError;
use crate::outbound::{OutboundSetupError, Policy};
use crate::pool::open::OpenLeases;
use crate::presence;
use crate::queue::sample::{self, Activity, ActivityEar, Sampled};
use crate::queue::schedule::{self, DueBoard, DueEar};
use crate::queue::wake::{self, Listener};
use crate::queue::{FAIR_SLICE_US, Queue};
use crate::signing::{KEY_BYTES, SigningKey};
use crate::startup::{Start, Starting};
use crate::store::mongo::MongoError;
use crate::store::private::{PrivateMongo, PrivateMongoError};
use crate::store::watch;
use crate::unmatched::Taken;

/// A call that takes longer has an unknown outcome.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// The same for claims, reads and completions. An answer to a claim that comes later finds its
/// leases all but run out, and until then nothing else is claimed.
const POOL_TIMEOUT: Duration = Duration::from_millis(1_500);
/// The same for the fan-out, whose calls can be repeated. Until then nothing else is copied.
const INGEST_TIMEOUT: Duration = Duration::from_millis(800);
/// HTTP clients have this long to take their last answer.
const LAST_ANSWERS: Duration = Duration::from_secs(2);

/// What a process does.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "any combination of the four is a process")]
pub struct Roles {
    /// Reads the bus.
    pub ingest: bool,
    /// Handles events.
    pub work: bool,
    /// Answers HTTP.
    pub http: bool,
    /// Moves delayed events when they are due.
    pub schedule: bool,
}

impl Roles {
    /// Everything.
    pub const ALL: Self = Self { ingest: true, work: true, http: true, schedule: true };

    /// Those it has, as `--roles` names them.
    #[must_use]
    pub fn names(self) -> Vec<&'static str> {
        let Self { ingest, work, http, schedule } = self;
        let all = [(ingest, "ingest"), (work, "work"), (http, "http"), (schedule, "schedule")];
        all.into_iter().filter(|(has, _)| *has).map(|(_, name)| name).collect()
    }
}

/// Why a process cannot start.
#[derive(Debug, thiserror::Error)]
pub enum AppError {
    /// The configuration contradicts itself.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// A pipeline names a handler that nobody registered.
    #[error(
        "pipelines.{pipeline}.handler is {handler:?}, which this program does not have; it has {known}"
    )]
    Handler {
        /// The pipeline.
        pipeline: PipelineName,
        /// What it names.
        handler: String,
        /// What there is.
        known: String,
    },
    /// A push pipeline does not say where to.
    #[error(
        "pipelines.{pipeline}.url is not set, which handler = \"push\" needs; set it to the receiver's http:// or https:// URL"
    )]
    PushUrl {
        /// The pipeline.
        pipeline: PipelineName,
    },
    /// Nobody can be called.
    #[error(transparent)]
    Outbound(#[from] OutboundSetupError),
    /// The key that signs is damaged.
    #[error(
        "the key {key} in Redis is damaged; delete it while no fairlane runs, and a new one is made"
    )]
    SigningKey {
        /// Where it is.
        key: String,
    },
    /// Fewer files may be open than there may be connections.
    #[error(
        "http.max_connections is {connections}, which needs {needed} open files, but this process may open {allowed}; raise the limit (LimitNOFILE in systemd, ulimit -n) or lower http.max_connections"
    )]
    Files {
        /// The setting.
        connections: usize,
        /// For these and all else.
        needed: u64,
        /// The hard limit.
        allowed: u64,
    },
    /// The operating system gives no thread.
    #[error("cannot serve metrics.listen: {0}")]
    Observe(#[from] std::io::Error),
    /// A filter cannot be used.
    #[error("pipelines.{pipeline}.filter: {source}")]
    Filter {
        /// The pipeline.
        pipeline: PipelineName,
        /// Why.
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
        /// What the data says.
        stored: String,
    },
    /// Another environment reads a stream.
    #[error(
        "bus.streams names {stream:?}, which the environment with redis.prefix = {other:?} reads: both would handle its events, and each trim what the other needs; under redis.prefix = {prefix:?} there is no data yet, so set redis.prefix = {other:?} if that one is meant, or else another bus.streams (or bus.trim = false, to look on)"
    )]
    StreamShared {
        /// The stream.
        stream: String,
        /// Who reads it.
        other: Prefix,
        /// The setting.
        prefix: Prefix,
    },
    /// Redis has no memory left for the first data.
    #[error(
        "Redis is full, and holds none of Fairlane's data yet ({source}); raise its maxmemory or free memory, then start again"
    )]
    Full {
        /// What was refused.
        #[source]
        source: StoreError,
    },
    /// No private Redis could be started.
    #[error(transparent)]
    PrivateRedis(#[from] PrivateRedisError),
    /// The private MongoDB cannot be stopped.
    #[error(transparent)]
    PrivateMongo(#[from] PrivateMongoError),
    /// `redis.url` cannot be read.
    #[error("redis.url cannot be used: {0}")]
    RedisUrl(#[source] redis::RedisError),
    /// Redis does not answer.
    #[error(transparent)]
    Store(#[from] StoreError),
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
}

/// One instance of the service. Several may run in one process.
pub struct App {
    config: Config,
    roles: Roles,
    clock: SharedClock,
    target: Target,
    private: Option<PrivateRedis>,
    private_mongo: Option<PrivateMongo>,
    links: Links,
    plans: Vec<Plan>,
    signing_key: SigningKey,
    stores: Stores,
    metrics_listener: TcpListener,
    http_door: Option<(TcpListener, Access)>,
    control: Control,
}

/// The connections of one instance.
struct Links {
    /// Claims, reads and completions of every pool.
    pool: Arc<Link>,
    /// The fan-out.
    ingest: Arc<Link>,
    /// Views and totals.
    views: Arc<Link>,
    /// Everything that may be slow or rare.
    admin: Arc<Link>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").field("target", &self.target).finish_non_exhaustive()
    }
}

impl App {
    /// Begins with the configuration and the built-in handlers.
    #[must_use]
    pub fn builder(config: Config) -> Builder {
        let builder = Builder {
            config,
            roles: Roles::ALL,
            handlers: HashMap::new(),
            clock: Arc::new(SystemClock),
        };
        builder.handler("log", LogHandler)
    }

    async fn assemble(
        builder: Builder,
        plans: Vec<Plan>,
        target: Target,
        stores: Stores,
    ) -> Result<Self, AppError> {
        let Builder { config, roles, clock, .. } = builder;
        let (shards, config_admission) = (config.redis.shards, config.admission);
        let all: Vec<ShardKeys> = plans
            .iter()
            .flat_map(|plan| {
                shards.shards().map(|shard| ShardKeys::new(target.prefix(), &plan.name, shard))
            })
            .collect();
        let link =
            |timeout| Arc::new(Link::new(target.clone(), all.clone(), FAIR_SLICE_US, timeout));
        let links = Links {
            pool: link(POOL_TIMEOUT),
            ingest: link(INGEST_TIMEOUT),
            views: link(RESPONSE_TIMEOUT),
            admin: link(RESPONSE_TIMEOUT),
        };
        let signing_key = register(&links.admin, &config).await?;
        files::make_room(&config, roles)?;
        let (listen, backlog) = (config.metrics.listen, config.http.backlog);
        let metrics_listener = http::bind("metrics.listen", listen, backlog)?;
        let http_door = if roles.http {
            let access = Access::open(&config)?;
            Some((http::bind("http.listen", config.http.listen, backlog)?, access))
        } else {
            None
        };
        Ok(Self {
            config,
            roles,
            clock,
            target,
            private: None,
            private_mongo: None,
            links,
            plans,
            signing_key,
            stores,
            metrics_listener,
            http_door,
            control: Control::new(config_admission),
        })
    }

    /// Where HTTP is served; `None` without that role.
    ///
    /// # Errors
    /// When the operating system does not tell.
    pub fn http_address(&self) -> std::io::Result<Option<SocketAddr>> {
        self.http_door.as_ref().map(|(listener, _)| listener.local_addr()).transpose()
    }

    /// Where metrics and health are served.
    ///
    /// # Errors
    /// When the operating system does not tell.
    pub fn metrics_address(&self) -> std::io::Result<SocketAddr> {
        self.metrics_listener.local_addr()
    }

    /// What can be changed while it runs.
    #[must_use]
    pub fn control(&self) -> Control {
        self.control.clone()
    }

    /// Where Redis is.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// The queues of a pipeline, to push to or to look at.
    #[must_use]
    pub fn queue(&self, pipeline: &PipelineName) -> Option<Queue> {
        let plan = self.plans.iter().find(|plan| plan.name == *pipeline)?;
        Some(plan.queue(&self.config, &self.links.admin))
    }

    /// The delayed notifications, to accept and look at; `None` without their pipeline.
    #[must_use]
    pub fn notifications(&self) -> Option<Notifications> {
        let plan = self.plans.iter().find(|plan| plan.name.notifies())?;
        let queue = plan.queue(&self.config, &self.links.views);
        let threshold = self.config.notifications.online_threshold;
        let sets = plan.header_sets();
        Some(Notifications::new(queue, Arc::clone(&self.clock), threshold, sets))
    }

    /// Runs until `shutdown` stops it and everything that was begun has ended.
    ///
    /// # Errors
    /// When the private Redis cannot be stopped.
    #[expect(clippy::too_many_lines, reason = "starts and stops every part, one after the other")]
    pub async fn run(self, shutdown: Shutdown) -> Result<(), AppError> {
        let notifications = self.notifications();
        let App { config, roles, clock, target, private, links, plans, signing_key, .. } = self;
        let stores = self.stores;
        // Health is answered until the very end, so it has a stop of its own.
        let stop = CancellationToken::new();
        let starts = Arc::new(Starts::default());
        let startup = {
            let meters = plans.iter().map(|plan| (plan.name.clone(), Arc::clone(&plan.meter)));
            let gates = plans.iter().find_map(Plan::gates).filter(|_| roles.work);
            let (meters, link) = (meters.collect(), Arc::clone(&links.admin));
            let (roles, now) = (roles.names(), clock.now());
            let starting = |plan: &Plan| Starting {
                queue: plan.queue(&config, &links.admin),
                from_earliest: plan.starts_earliest(),
            };
            let start = Start {
                names: plans.iter().map(|plan| plan.name.clone()).collect(),
                pipelines: plans.iter().filter(|plan| plan.takes_of_bus()).map(starting).collect(),
                streams: config.bus.streams.clone(),
                starts: Arc::clone(&starts),
                link: Arc::clone(&links.admin),
                clock: Arc::clone(&clock),
                heard: presence::begin(meters, gates, &roles, link, now, &shutdown),
            };
            start.begin(&shutdown)
        };
        let health = Health {
            link: Arc::clone(&links.admin),
            mongodb: watch::begin(stores.mongo.clone(), &shutdown),
            leaving: shutdown.leaving.clone(),
            stopping: shutdown.soft.clone(),
            startup: startup.clone(),
        };
        if let Ok(address) = self.metrics_listener.local_addr() {
            let http = self.http_door.as_ref().and_then(|(listener, _)| listener.local_addr().ok());
            let http = http.map(tracing::field::display);
            let pipelines: Vec<&str> = plans.iter().map(|plan| plan.name.as_str()).collect();
            info!(redis = %target, metrics = %address, http, ?pipelines, "fairlane is running");
        }
        let counters = counters(&stores, &plans, &config, &links.views);
        let mut servers = tokio::task::JoinSet::new();
        if let Some((listener, access)) = self.http_door {
            let open = |plan: &Plan| plan.open(plan.queue(&config, &links.admin));
            let leases = OpenLeases::new(&signing_key, &clock, plans.iter().map(open));
            let automations = editor(&stores, &plans, &config, &links.admin);
            let admin = Arc::clone(&links.admin);
            let (shards, views) = (config.redis.shards, stores.views.clone());
            let pipelines = config.pipelines.clone();
            let bus = Link::new(target.clone(), Vec::new(), FAIR_SLICE_US, RESPONSE_TIMEOUT);
            self.control.0.cursors.sign_with(signing_key.clone());
            let api = Api {
                queues: Queues::new(pipelines, shards, views, admin, RESPONSE_TIMEOUT),
                bus: Arc::new(bus),
                stream: config.bus.streams.first().cloned().unwrap_or_default(),
                taken: Taken::new(&config, rules(&plans, roles)),
                startup,
                clock: Arc::clone(&clock),
                access: Arc::new(access),
                door: Arc::clone(&self.control.0),
                leases,
                counters: counters.clone(),
                automations,
                exports: Exports::default(),
                notifications: notifications.clone(),
                targets: Policy::Tenant(config.callbacks.allow_nets.clone().into()),
                live: http::Live::new(health.clone()),
            };
            let (proxies, speak_first) = (&config.http.trusted_proxies, config.http.proxy_protocol);
            let proxies = Proxies::new(proxies, speak_first);
            let limits = Limits {
                name: "http",
                connections: config.http.max_connections,
                per_address: config.http.max_connections_per_address,
            };
            let routes = http::routes(api, health.clone());
            let ending = Ending { leaving: shutdown.leaving.clone(), stop: stop.clone() };
            servers.spawn(http::serve(listener, routes, limits, proxies, ending));
        }
        // Its own connection: what the others wait for must not make Redis seem to be away.
        let link = Link::new(target.clone(), Vec::new(), FAIR_SLICE_US, RESPONSE_TIMEOUT);
        let Health { link: admin, mongodb, leaving, stopping, startup } = health;
        // It would keep Redis from being stopped.
        drop(admin);
        let health = Health { link: Arc::new(link), mongodb, leaving, stopping, startup };
        let observing = observe::spawn(self.metrics_listener, health, stop.clone())?;
        if let Ok(store) = &stores.counters {
            shutdown.spawn(upkeep::prepare(store.clone(), shutdown.clone()));
            let (link, min_age) = (Arc::clone(&links.admin), stores.min_age.clone());
            shutdown.spawn(upkeep::watch_persistence(link, min_age, shutdown.clone()));
        }
        let activity = Arc::new(Activity::default());
        let (mut listening, mut sampled, mut fanout) = (Vec::new(), Vec::new(), Vec::new());
        for plan in plans {
            let queue = plan.queue(&config, &links.admin);
            let mut ears: Vec<Box<dyn Listener>> =
                vec![Box::new(ActivityEar(Arc::clone(&activity)))];
            if roles.schedule {
                let board = DueBoard::new(&queue);
                ears.push(Box::new(DueEar(Arc::clone(&board))));
                let clock = Arc::clone(&clock);
                if plan.name.notifies() {
                    let (link, clock) = (Arc::clone(&links.admin), Arc::clone(&clock));
                    shutdown.spawn(audit::at_start(queue.clone(), link, clock, shutdown.clone()));
                }
                shutdown.spawn(schedule::run(queue.clone(), board, clock, shutdown.clone()));
            }
            if let Some(automations) = plan.automations().filter(|_| roles.work || roles.ingest) {
                ears.push(Box::new(RulesEar(automations.clone())));
                shutdown.spawn(automation::watch::run(automations.clone(), shutdown.clone()));
            }
            if roles.work {
                let effects = |queue: Queue| {
                    let notes = Arc::new(RuleNotes::new(Arc::clone(&clock)));
                    let adding = stats::run(Arc::clone(&notes), queue.clone(), shutdown.clone());
                    shutdown.spawn(adding);
                    Effects {
                        bus: Arc::clone(&links.pool),
                        stream: config.bus.streams.first().cloned().unwrap_or_default(),
                        queue,
                        notifications: notifications.clone(),
                        counters: counters.clone(),
                        clock: Arc::clone(&clock),
                        notes,
                    }
                };
                let queue = queue.over(Arc::clone(&links.pool));
                let pool = plan.pool(
                    queue,
                    &clock,
                    &signing_key,
                    stores.mongo.as_ref(),
                    effects,
                    &shutdown,
                );
                ears.push(pool.listener());
                shutdown.spawn(pool.run());
            }
            sampled.push(Sampled {
                queue: queue.clone(),
                metrics: PipelineMetrics::new(&plan.name),
                views: plan.name.counts_views().then(CounterMetrics::new),
                due: plan.name.notifies().then(DueMetrics::new),
                keep_dead: plan.config.dead.keep,
            });
            if roles.ingest && plan.takes_of_bus() {
                fanout.push(plan.route(queue.over(Arc::clone(&links.ingest))));
            }
            listening.push((queue, ears));
        }
        shutdown.spawn(wake::listen(target.clone(), listening, shutdown.clone()));
        let (link, sample_clock) = (Arc::clone(&links.admin), Arc::clone(&clock));
        shutdown.spawn(sample::run(sampled, link, activity, sample_clock, shutdown.clone()));
        if !fanout.is_empty() {
            let fanout = Arc::new(Fanout::new(fanout, starts));
            read_bus(&config, &target, &links.ingest, &fanout, &clock, &shutdown);
        }

        let redis = private.map(|redis| supervise::redis(redis, &config, &links.admin, &shutdown));
        let mongo = self.private_mongo.zip(stores.mongo.clone());
        let mongo =
            mongo.map(|(private, mongo)| supervise::mongo(private, &config, mongo, &shutdown));
        let (redis, mongo) = (OptionFuture::from(redis), OptionFuture::from(mongo));
        let (private, private_mongo, ()) = join3(redis, mongo, shutdown.soft.cancelled()).await;
        shutdown.wait().await;
        stop.cancel();
        let ending = async { while servers.join_next().await.is_some() {} };
        // A client that stalls in mid-request must not keep the process.
        let _ = tokio::time::timeout(LAST_ANSWERS, ending).await;
        drop(servers);
        let _ = tokio::time::timeout(LAST_ANSWERS, observing).await;
        if let Some(mongo) = stores.mongo {
            mongo.close().await;
        }
        // Our connections must be gone before the last one out turns off the light.
        drop((links, counters, notifications));
        if let Some(private) = private {
            if private.stop().await? {
                info!("stopped the private Redis");
            } else {
                info!("left the private Redis running: others still use it");
            }
        }
        if let Some(private) = private_mongo {
            if private.stop().await? {
                info!("stopped the private MongoDB");
            } else {
                info!("left the private MongoDB running: others still use it");
            }
        }
        Ok(())
    }
}

/// Fixes the number of shards and the key that signs with the first data. Answers the key.
async fn register(link: &Link, config: &Config) -> Result<SigningKey, AppError> {
    let (shards, prefix) = (config.redis.shards.get(), link.prefix());
    let (shards_key, signing_key) = (keys::shards(prefix), keys::signing_key(prefix));
    let damaged = || AppError::SigningKey { key: signing_key.clone() };
    let mut look = redis::Pipeline::new();
    look.cmd("GET").arg(&shards_key);
    look.cmd("GET").arg(&signing_key);
    let mut found = link.run_checked("GET", &look).await?;
    // What is there is not written again: a Redis that is full refuses that too.
    if found.contains(&Value::Nil) {
        if found[0] == Value::Nil {
            Box::pin(check_environment(link, config)).await?;
        }
        let fresh: [u8; KEY_BYTES] = rand::random();
        let mut write = redis::Pipeline::new();
        write.cmd("SET").arg(&shards_key).arg(shards).arg("NX");
        write.cmd("SET").arg(&signing_key).arg(&fresh[..]).arg("NX");
        link.run_checked("SET", &write).await.map_err(|source| {
            if source.is_full() { AppError::Full { source } } else { source.into() }
        })?;
        found = link.run_checked("GET", &look).await?;
    }
    let mut found = found.into_iter();
    let stored = match found.next() {
        Some(Value::BulkString(bytes)) => String::from_utf8_lossy(&bytes).into_owned(),
        _ => String::new(),
    };
    if stored != shards.to_string() {
        return Err(AppError::Shards { configured: shards, stored });
    }
    match found.next() {
        Some(Value::BulkString(bytes)) => {
            let key = bytes.as_slice().try_into().map_err(|_| damaged())?;
            Ok(SigningKey::new(key))
        }
        _ => Err(damaged()),
    }
}

/// Looks around before the first data of an environment is written: others may be in this Redis.
async fn check_environment(link: &Link, config: &Config) -> Result<(), AppError> {
    let server = Server::new(link.target().clone(), RESPONSE_TIMEOUT);
    let others = match server.environments().await {
        Ok(others) if others.is_empty() => return Ok(()),
        Ok(others) => others,
        Err(error) => {
            debug!(%error, "whether other environments are in this Redis is not known");
            return Ok(());
        }
    };
    let prefix = link.prefix();
    info!(%prefix, ?others, "new data: this Redis has other environments (redis.prefix)");
    // Who trims nothing may look on.
    if !config.bus.trim {
        return Ok(());
    }
    match server.read_elsewhere(&config.bus.streams).await?.pop_first() {
        Some((stream, other)) => {
            Err(AppError::StreamShared { stream, other, prefix: prefix.clone() })
        }
        None => Ok(()),
    }
}

/// What counts views, or why nothing does.
fn counters(
    stores: &Stores,
    plans: &[Plan],
    config: &Config,
    link: &Arc<Link>,
) -> Result<Counters, String> {
    let store = stores.counters.clone()?;
    let plan = plans.iter().find(|plan| plan.name.counts_views());
    let plan = plan.ok_or_else(|| "pipelines.counters is not enabled".to_owned())?;
    let read_timeout = config.counters.read_timeout;
    Ok(Counters::new(plan.queue(config, link), store, read_timeout))
}

/// The rules of bots, where the process keeps up with them.
fn rules(plans: &[Plan], roles: Roles) -> Option<Arc<Subscriptions>> {
    let known = plans.iter().find_map(Plan::automations).filter(|_| roles.work || roles.ingest);
    known.map(|automations| Arc::clone(automations.subscriptions()))
}

/// What changes rules, or why nobody evaluates them.
fn editor(
    stores: &Stores,
    plans: &[Plan],
    config: &Config,
    link: &Arc<Link>,
) -> Result<Editor, String> {
    let automations = stores.automations.clone()?;
    let plan = plans.iter().find(|plan| plan.name.automates());
    let plan = plan.ok_or_else(|| "pipelines.automations is not enabled".to_owned())?;
    let read_timeout = config.counters.read_timeout;
    Ok(Editor::new(automations, plan.queue(config, link), read_timeout))
}

/// Starts a reader per bus stream.
fn read_bus(
    config: &Config,
    target: &Target,
    link: &Arc<Link>,
    fanout: &Arc<Fanout>,
    clock: &SharedClock,
    shutdown: &Shutdown,
) {
    let retention = Retention { trim: config.bus.trim, keep: config.bus.retention };
    for stream in &config.bus.streams {
        // Commands that block need a connection of their own.
        let timeout = INGEST_TIMEOUT + RedisStream::WAIT_MAX;
        let blocking = Link::new(target.clone(), Vec::new(), FAIR_SLICE_US, timeout);
        let source = RedisStream::new(stream, Arc::new(blocking), Arc::clone(link));
        let (fanout, clock) = (Arc::clone(fanout), Arc::clone(clock));
        shutdown.spawn(reader::run(source, fanout, retention, clock, shutdown.clone()));
    }
}
