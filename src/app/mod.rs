//! Assembles the parts. It is the only folder that knows all of them.
//!
//! | file | holds |
//! |---|---|
//! | `builder` | checks the configuration, and plans each pipeline |
//! | `register` | values that are fixed with the first data of an environment |
//! | `formats` | refuses data of a later version, and marks the data |
//! | `start` | starts the parts |
//! | `export` | exports spans |
//! | `supervise` | supervises the private servers, and stops them |
//! | `relay` | reloads: instances that follow each other in one process |
//! | `sockets` | the sockets that they hand on |
//! | `serve` | runs a whole process: signals and reloads |
//! | `service_manager` | what it reports to systemd |

mod builder;
pub(crate) mod buses;
mod control;
mod error;
pub(crate) mod export;
pub(crate) mod files;
mod findings;
mod formats;
mod observe;
mod reach;
mod register;
mod relay;
mod serve;
mod service_manager;
mod sockets;
mod start;
mod supervise;

use std::collections::HashMap;
use std::fmt;
use std::io;
use std::net::SocketAddr;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use futures_util::FutureExt as _;
use tokio::net::TcpListener;
use tokio::runtime::Handle;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;
use tracing::debug;

pub use self::builder::Builder;
use self::builder::{Needs, Plan, Plans};
use self::buses::Buses;
pub use self::control::Control;
pub use self::error::AppError;
use self::export::Export;
use self::formats::Formats;
use self::register::register;
pub use self::serve::serve;
use self::sockets::Sockets;
use crate::bus::Published;
use crate::bus::backlog::Backlog;
use crate::clock::{SharedClock, SystemClock};
use crate::config::Config;
use crate::fanout::starts::Starts;
use crate::handler::LogHandler;
use crate::http::{Access, Ending, Health};
use crate::id::PipelineName;
use crate::lifecycle::Shutdown;
use crate::metrics::Shown;
use crate::mongo::private::PrivateMongo;
use crate::mongo::watch;
use crate::notifications::Notifications;
use crate::product::{Offering, Route, Services};
use crate::products::Products;
use crate::queue::{FAIR_SLICE_US, Queue, memory};
use crate::redis::keys::ShardKeys;
use crate::redis::private::PrivateRedis;
use crate::redis::{Link, Target};
use crate::reload::Reloads;
pub use crate::roles::Roles;
use crate::signed_token::SigningKey;
use crate::startup::Startup;
use crate::trace::Tracer;

/// Timeout of most calls. The outcome of a call that takes longer is unknown.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout of claims, reads and completions. When the answer to a claim comes later, its leases
/// have almost expired, and until then the pool claims nothing else.
const POOL_TIMEOUT: Duration = Duration::from_millis(1_500);
/// Timeout of the calls of the fan-out, which can be repeated. Until then it copies nothing else.
const INGEST_TIMEOUT: Duration = Duration::from_millis(800);
/// How long HTTP clients have to receive their last answer.
const LAST_ANSWERS: Duration = Duration::from_secs(2);
/// How long the connections to MongoDB may take to close.
const LAST_CALLS: Duration = Duration::from_secs(1);

/// One instance of the service. Several may run in one process.
///
/// All instances of a process share its metrics. Counters add up. A gauge of the whole process, such
/// as `fairlane_redis_up` or `fairlane_bus_pipelines`, has the value of the instance that set it last.
/// A reload by [`serve()`] hides the pipelines of all other instances, and their MongoDB if the new one
/// has none. The recorder of the metrics is that of [`metrics::install`](crate::metrics::install).
pub struct App {
    site: Site,
    private: Private,
    metrics_listener: TcpListener,
    http_listener: Option<(TcpListener, Access)>,
    /// Whether it follows another instance, which accepts connections until this one has started.
    inherits: bool,
    export: Export,
}

/// The shared components of an instance.
struct Site {
    config: Config,
    roles: Roles,
    clock: SharedClock,
    target: Target,
    links: Links,
    /// The events that this process publishes over HTTP and that are not copied yet.
    backlog: Arc<Backlog>,
    buses: Buses,
    plans: Vec<Plan>,
    signing_key: SigningKey,
    formats: Formats,
    needs: Needs,
    services: Services,
    routes: Vec<Route>,
    control: Control,
    tracer: Tracer,
    /// How requests ask for a reload, if this process can.
    reloads: Option<Reloads>,
}

/// The private servers, if any.
#[derive(Default)]
struct Private {
    redis: Option<PrivateRedis>,
    mongo: Option<PrivateMongo>,
}

/// The connections of one instance. All links but `admin` and `due` are hot: the calls of each share a
/// connection per server and are pipelined on it, so no call may request a large answer.
struct Links {
    /// Claims, reads and completions of every pool.
    pool: Arc<Link>,
    /// The fan-out.
    ingest: Arc<Link>,
    /// Views and totals.
    views: Arc<Link>,
    /// Short calls that must not wait for those of operators: leases that receivers complete over
    /// HTTP, the presence of the process, pushed events.
    prompt: Arc<Link>,
    /// Calls that may be slow or rare: operators' reads and changes, listings, dead letters,
    /// audits, samples. Pooled: a large answer delays no other call.
    admin: Arc<Link>,
    /// Due events, and large slices whose leases receivers complete over HTTP: the answers are large, and
    /// do not wait for reads of operators and tenants.
    due: Arc<Link>,
}

impl fmt::Debug for App {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("App").field("target", &self.site.target).finish_non_exhaustive()
    }
}

impl App {
    /// Starts with the configuration and the built-in handlers.
    #[must_use]
    pub fn builder(config: Config) -> Builder {
        let builder = Builder {
            config,
            roles: Roles::ALL,
            handlers: HashMap::new(),
            clock: Arc::new(SystemClock),
            products: Products::default(),
            reloads: None,
            inherited: Sockets::default(),
        };
        builder.handler("log", LogHandler)
    }

    async fn assemble(builder: Builder, plans: Plans, target: Target) -> Result<Self, AppError> {
        let Builder { config, roles, clock, products, reloads, inherited, .. } = builder;
        let Plans { all: plans, needs, mut services, routes } = plans;
        let (shards, config_admission) = (config.redis.shards, config.admission);
        let all: Vec<ShardKeys> = plans
            .iter()
            .flat_map(|plan| {
                shards.shards().map(|shard| ShardKeys::new(target.prefix(), &plan.name, shard))
            })
            .collect();
        let link =
            |timeout| Arc::new(Link::new(target.clone(), all.clone(), FAIR_SLICE_US, timeout));
        let pooled = || {
            let (target, shards) = (target.clone(), all.clone());
            Arc::new(Link::pooled(target, shards, FAIR_SLICE_US, RESPONSE_TIMEOUT))
        };
        let links = Links {
            pool: link(POOL_TIMEOUT),
            ingest: link(INGEST_TIMEOUT),
            views: link(RESPONSE_TIMEOUT),
            prompt: link(RESPONSE_TIMEOUT),
            admin: pooled(),
            due: pooled(),
        };
        let mut formats = Formats::new(&products, &plans, &clock);
        let mongo = needs.mongo.as_ref().ok();
        let accepted = reach::again(async || formats.accept(&links.admin, mongo).await).await;
        let accepted = formats.or_later(accepted, &links.admin, mongo).await?;
        let signing_key = reach::again(async || register(&links.admin, &config).await).await?;
        if let Err(error) = memory::observe(&links.admin, &needs.quotas).await {
            debug!(%error, "cannot ask Redis for its memory; asking again");
        }
        files::make_room(&config, roles)?;
        let inherits = !inherited.is_empty();
        let (listen, backlog) = (config.metrics.listen, config.http.backlog);
        let metrics_listener = inherited.open("metrics.listen", listen, backlog)?;
        let http_listener = if roles.http {
            let access = Access::open(&config)?;
            Some((inherited.open("http.listen", config.http.listen, backlog)?, access))
        } else {
            None
        };
        for plan in &plans {
            let queue = plan.queue(&config, &links.admin);
            let requests = queue.over(Arc::clone(&links.views));
            let offering =
                Offering { config: &config, clock: &clock, queue: &queue, requests: &requests };
            plan.part.offer(&offering, &mut services);
        }
        let control = Control::new(config_admission, &routes);
        let (tracer, export) = Export::open(&config, &clock)?;
        let buses = Buses::open(&config.bus, &needs.kinds.reserved(), &clock)?;
        if let Some(source) = buses.published(&config.bus) {
            services.offer(Published(source));
        }
        let backlog = match config.bus.published_source() {
            None => Backlog::new(Arc::clone(&links.prompt), Some(config.bus.published())),
            Some(source) => Backlog::new(Arc::clone(&links.prompt), source.only_log().as_deref()),
        };
        services.offer(Arc::clone(&backlog));
        // Not before: an earlier version refuses marked data, also after a start that was refused.
        formats.mark(&links.admin, mongo, &accepted).await;
        let site = Site {
            config,
            roles,
            clock,
            target,
            links,
            backlog,
            buses,
            plans,
            signing_key,
            formats,
            needs,
            services,
            routes,
            control,
            tracer,
            reloads,
        };
        let private = Private::default();
        Ok(Self { site, private, metrics_listener, http_listener, inherits, export })
    }

    /// The address of the HTTP API; `None` without that role.
    ///
    /// # Errors
    /// If the operating system does not report it.
    pub fn http_address(&self) -> io::Result<Option<SocketAddr>> {
        self.http_listener.as_ref().map(|(listener, _)| listener.local_addr()).transpose()
    }

    /// The address of metrics and health.
    ///
    /// # Errors
    /// If the operating system does not report it.
    pub fn metrics_address(&self) -> io::Result<SocketAddr> {
        self.metrics_listener.local_addr()
    }

    /// Settings that can be changed while it runs.
    #[must_use]
    pub fn control(&self) -> Control {
        self.site.control.clone()
    }

    /// What its metrics are about.
    pub(crate) fn shown(&self) -> Shown {
        let pipelines = self.site.plans.iter().map(|plan| plan.name.clone()).collect();
        Shown { pipelines, mongodb: self.site.needs.mongo.is_ok() }
    }

    /// Copies of its open sockets.
    pub(crate) fn sockets(&self) -> io::Result<Sockets> {
        let config = &self.site.config;
        let mut sockets = Sockets::default();
        sockets.add("metrics.listen", config.metrics.listen, &self.metrics_listener)?;
        if let Some((listener, _)) = &self.http_listener {
            sockets.add("http.listen", config.http.listen, listener)?;
        }
        Ok(sockets)
    }

    /// The Redis deployment.
    #[doc(hidden)]
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.site.target
    }

    /// The queues of a pipeline, to push to or to inspect.
    #[must_use]
    pub fn queue(&self, pipeline: &PipelineName) -> Option<Queue> {
        let plan = self.site.plans.iter().find(|plan| plan.name == *pipeline)?;
        Some(plan.queue(&self.site.config, &self.site.links.prompt))
    }

    /// The delayed notifications, to create and inspect; `None` without their pipeline.
    #[must_use]
    pub fn notifications(&self) -> Option<Notifications> {
        self.site.services.get().cloned()
    }

    /// Runs until `shutdown` stops it and all started work has ended. Each instance needs its own
    /// [`Shutdown`]. To stop it with a grace period, call [`Shutdown::stop_within`], or let signals do
    /// it: [`Shutdown::listen_for_signals`].
    ///
    /// # Errors
    /// If a product panics while it starts, the private Redis cannot be stopped, or MongoDB turns out
    /// to have data of a later version. The instance has stopped then, and `shutdown` is cancelled.
    ///
    /// # Cancel safety
    /// If the future is dropped, `shutdown.soft` is cancelled: the HTTP servers end, no further event
    /// is handled, and the tasks end in the background, see [`Shutdown::wait`]. Private servers go on.
    /// The next instance with their `data_dir` uses them, and stops them at its end.
    pub async fn run(self, shutdown: Shutdown) -> Result<(), AppError> {
        Box::pin(self.run_telling(shutdown, None)).await
    }

    /// The same. Tells `ready` when the instance is ready for everything.
    pub(crate) async fn run_telling(
        mut self,
        shutdown: Shutdown,
        ready: Option<oneshot::Sender<()>>,
    ) -> Result<(), AppError> {
        // Also if this future is dropped.
        let _stops = shutdown.soft.clone().drop_guard();
        let grace = self.site.config.shutdown_grace;
        let mut private = std::mem::take(&mut self.private);
        let running = Box::pin(self.run_on(&mut private, &shutdown, ready));
        let ran = AssertUnwindSafe(running).catch_unwind().await;
        match ran.unwrap_or(Err(AppError::Panicked)) {
            Ok(()) => private.stop().await,
            Err(error) => {
                // Some of its tasks may have started.
                shutdown.stop_within(grace).await;
                Err(private.stop_after(error).await)
            }
        }
    }

    /// Runs on these private servers, and leaves no connection to them.
    async fn run_on(
        self,
        private: &mut Private,
        shutdown: &Shutdown,
        ready: Option<oneshot::Sender<()>>,
    ) -> Result<(), AppError> {
        let Self { mut site, metrics_listener, http_listener, inherits, export, .. } = self;
        let exporting = export.start();
        // Health is served until the very end, so it has a separate stop signal.
        let stop = CancellationToken::new();
        // It stops after a panic too: another instance may serve the same socket.
        let _stops = stop.clone().drop_guard();
        let starts = Arc::new(Starts::default());
        let mongodb = watch::begin(site.needs.mongo.clone().ok(), shutdown);
        let startup = site.place_pipelines(&starts, mongodb.clone(), shutdown);
        site.announce(&metrics_listener, http_listener.as_ref().map(|(listener, _)| listener));
        // Separate links: when all connections of the others are waiting, Redis must not seem to be
        // unavailable. One is for `metrics.listen`, which has its own runtime. One is for HTTP,
        // which also publishes events over it.
        let link = || {
            let target = site.target.clone();
            Arc::new(Link::new(target, Vec::new(), FAIR_SLICE_US, RESPONSE_TIMEOUT))
        };
        let health = |link: Arc<Link>| Health {
            problems: (Arc::new(site.problems(&link, mongodb.clone())), Handle::current()),
            link,
            mongodb: mongodb.clone(),
            leaving: shutdown.leaving.clone(),
            stopping: shutdown.soft.clone(),
            startup: startup.clone(),
        };
        let mut servers = JoinSet::new();
        if let Some((listener, access)) = http_listener {
            let health = health(link());
            let tasks = shutdown.tracker.clone();
            let api = site.api(access, &health, &mut servers, tasks);
            let ending = Ending {
                leaving: shutdown.leaving.clone(),
                handed: shutdown.handed.clone(),
                stop: stop.clone(),
            };
            let (after, stop) = (inherits.then(|| startup.clone()), stop.clone());
            let serving = site.serve(listener, api, health, ending);
            servers.spawn(async move {
                accepts(after, &stop).await;
                serving.await;
            });
        }
        let handed = shutdown.handed.clone();
        let after = inherits.then(|| startup.clone());
        let observing =
            observe::spawn((metrics_listener, after), health(link()), handed, stop.clone())?;
        site.start_pipelines(starts, mongodb.clone(), shutdown);
        // Not before: a product may panic while it starts.
        if let Some(ready) = ready {
            let startup = startup.clone();
            shutdown.spawn(async move {
                startup.is_over().await;
                let _ = ready.send(());
            });
        }
        site.show(startup, shutdown);

        private.supervise(&site, shutdown).await;
        shutdown.wait().await;
        stop.cancel();
        let ending = async {
            let answers = async { while servers.join_next().await.is_some() {} };
            tokio::join!(answers, exporting.end(), observing)
        };
        // Neither a client that stalls during a request nor a store that hangs may keep the process
        // running: it ends within 6 s after the grace period.
        let _ = tokio::time::timeout(LAST_ANSWERS, ending).await;
        drop(servers);
        if let Ok(mongo) = site.needs.mongo.clone() {
            let _ = tokio::time::timeout(LAST_CALLS, mongo.close()).await;
        }
        site.formats.refused().map_or(Ok(()), Err)
    }
}

/// Waits until an instance that follows another one has started, or must stop. Until then the other one
/// accepts the connections.
async fn accepts(after: Option<Startup>, stop: &CancellationToken) {
    if let Some(startup) = after {
        tokio::select! {
            () = stop.cancelled() => {}
            () = startup.is_over() => {}
        }
    }
}
