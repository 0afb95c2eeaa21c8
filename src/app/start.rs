//! Starts the parts of an instance.

use std::sync::Arc;

use tokio::net::TcpListener;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio_util::task::TaskTracker;
use tracing::info;

use super::register::keep_key;
use super::{INGEST_TIMEOUT, RESPONSE_TIMEOUT, Site, findings};
use crate::admission::lull;
use crate::bus::Source;
use crate::bus::reader::{self, Reading};
use crate::bus::redis_stream::{RedisStream, Retention};
use crate::config::{SourceConfig, SourceKind};
use crate::fanout::starts::Starts;
use crate::fanout::{Fanout, Interest};
use crate::http::taken::Taken;
use crate::http::{
    self, Access, Api, Ending, Health, LargeReads, Limits, Live, Problems, Proxies, Queues,
};
use crate::id::PipelineName;
use crate::lifecycle::Shutdown;
use crate::metrics::{self, PipelineMetrics};
use crate::mongo::watch::Reachable;
use crate::outbound::Policy;
use crate::outbound::breakers::Breakers;
use crate::pool::open::OpenLeases;
use crate::presence::{self, Reported};
use crate::product::Seat;
use crate::queue::FAIR_SLICE_US;
use crate::queue::memory;
use crate::queue::sample::{self, Activity, ActivityEar, Sampled};
use crate::queue::schedule::{self, DueBoard, DueEar};
use crate::queue::wake::{self, Listener};
use crate::redis::Link;
use crate::startup::{Start, Starting, Startup};
use crate::trail::Trail;

impl Site {
    /// Records the start of every pipeline on the bus before the process is ready.
    pub(super) fn place_pipelines(
        &self,
        starts: &Arc<Starts>,
        mongodb: Option<Arc<Reachable>>,
        shutdown: &Shutdown,
    ) -> Startup {
        let Self { config, roles, clock, links, plans, .. } = self;
        let meters = plans.iter().map(|plan| (plan.name.clone(), Arc::clone(&plan.meter)));
        let gates = self.services.get::<Arc<Breakers>>().filter(|_| roles.work).cloned();
        // On this link, the process stays visible while operators use all pooled connections.
        let link = Arc::clone(&links.prompt);
        let reported = Reported {
            meters: meters.collect(),
            gates,
            mongodb,
            streams: config.bus.streams.clone(),
            buses: if roles.ingest { self.buses.meters().to_vec() } else { Vec::new() },
            roles: roles.names(),
            started: clock.now(),
        };
        let starting = |plan: &super::Plan| Starting {
            queue: plan.queue(config, &links.admin),
            from_earliest: plan.starts_earliest(),
        };
        let start = Start {
            names: plans.iter().map(|plan| plan.name.clone()).collect(),
            pipelines: plans.iter().filter(|plan| plan.takes_of_bus()).map(starting).collect(),
            buses: self.buses(&links.admin),
            starts: Arc::clone(starts),
            link: Arc::clone(&links.admin),
            clock: Arc::clone(clock),
            heard: presence::begin(reported, link, shutdown),
        };
        start.begin(shutdown)
    }

    /// Sets the gauges of the whole process once the instance has started: until then, they are those of
    /// the instance that it follows.
    pub(super) fn show(&self, startup: Startup, shutdown: &Shutdown) {
        let count = self.plans.iter().filter(|plan| plan.takes_of_bus()).count();
        let admission = self.roles.http.then(|| Arc::clone(&self.control.0.admission));
        let stops = shutdown.clone();
        shutdown.spawn(async move {
            tokio::select! {
                biased;
                () = stops.soft.cancelled() => return,
                () = startup.is_over() => {}
            }
            metrics::bus_pipelines(count);
            if let Some(admission) = admission {
                lull::watch(admission, stops).await;
            }
        });
    }

    /// Logs which parts run, and their addresses.
    pub(super) fn announce(&self, metrics: &TcpListener, http: Option<&TcpListener>) {
        if let Ok(address) = metrics.local_addr() {
            let http = http.and_then(|listener| listener.local_addr().ok());
            let http = http.map(tracing::field::display);
            let pipelines: Vec<&str> = self.plans.iter().map(|plan| plan.name.as_str()).collect();
            info!(redis = %self.target, metrics = %address, http, ?pipelines, "fairlane is running");
        }
    }

    /// The interests of the selective pipelines, if the process tracks them.
    fn interests(&self) -> Vec<(PipelineName, Arc<dyn Interest>)> {
        if !self.roles.work && !self.roles.ingest {
            return Vec::new();
        }
        let interest = |plan: &super::Plan| Some((plan.name.clone(), plan.interest()?));
        self.plans.iter().filter_map(interest).collect()
    }

    /// The state of the routes.
    pub(super) fn api(
        &self,
        access: Access,
        health: &Health,
        servers: &mut JoinSet<()>,
        tasks: TaskTracker,
    ) -> Api {
        let Self { config, clock, links, plans, signing_key, .. } = self;
        // Not pooled: receivers complete leases as often as workers do, with a few small calls
        // each, and a lease would expire while it waits for a connection that an operator uses.
        let open = |plan: &super::Plan| {
            // Receivers may end leases as long as HTTP is served.
            let spawn = |task| drop(servers.spawn(task));
            let recorder = plan.recorder(&plan.queue(config, &links.admin), clock, spawn);
            plan.open(plan.queue(config, &links.prompt), recorder)
        };
        // Its answers may be large, and it waits for no operator.
        let large = Arc::clone(&links.due);
        let leases = OpenLeases::new(signing_key, clock, large, plans.iter().map(open));
        self.control.0.cursors.sign_with(signing_key.clone());
        access.sign_sessions(signing_key.clone(), Arc::clone(clock));
        let (shards, kinds) = (config.redis.shards, self.needs.kinds.clone());
        let (pipelines, admin) = (config.pipelines.clone(), Arc::clone(&links.admin));
        Api {
            queues: Queues::new(
                pipelines,
                shards,
                kinds,
                self.needs.quotas.clone(),
                admin,
                RESPONSE_TIMEOUT,
            ),
            reloads: self.reloads.clone(),
            bus: self.published(&health.link),
            buses: config.bus.sources.iter().map(SourceConfig::bus).collect(),
            streams: config.bus.streams.clone(),
            backlog: Arc::clone(&self.backlog),
            taken: Taken::new(config, &self.needs.kinds, self.interests()),
            startup: health.startup.clone(),
            clock: Arc::clone(clock),
            access: Arc::new(access),
            gate: Arc::clone(&self.control.0),
            leases,
            services: self.services.clone(),
            targets: Policy::Tenant(config.callbacks.allow_nets.clone().into()),
            live: Live::new(health.clone()),
            tracer: self.tracer.clone(),
            trail: Trail::new(Arc::clone(&links.admin), tasks),
            problems: Arc::clone(&health.problems.0),
            searches: LargeReads::searches(),
            large_reads: LargeReads::lists(),
            checks: LargeReads::checks(),
            trials: LargeReads::trials(),
        }
    }

    /// Where the findings are read.
    pub(super) fn problems(&self, prompt: &Arc<Link>, mongodb: Option<Arc<Reachable>>) -> Problems {
        let Self { config, clock, links, needs, .. } = self;
        let queues = Queues::new(
            config.pipelines.clone(),
            config.redis.shards,
            needs.kinds.clone(),
            needs.quotas.clone(),
            Arc::clone(&links.admin),
            RESPONSE_TIMEOUT,
        );
        Problems {
            queues,
            prompt: Arc::clone(prompt),
            streams: config.bus.streams.clone(),
            buses: config.bus.sources.iter().map(SourceConfig::bus).collect(),
            mongodb,
            clock: Arc::clone(clock),
            kept: Mutex::default(),
        }
    }

    /// Serves HTTP until the stop.
    pub(super) fn serve(
        &self,
        listener: TcpListener,
        api: Api,
        health: Health,
        ending: Ending,
    ) -> impl Future<Output = ()> + Send + 'static + use<> {
        let http = &self.config.http;
        let proxies = Proxies::new(&http.trusted_proxies, http.proxy_protocol);
        let limits = Limits {
            name: "http",
            connections: http.max_connections,
            per_address: http.max_connections_per_address,
        };
        http::serve(listener, http::routes(api, health, &self.routes), limits, proxies, ending)
    }

    /// Starts the parts of each pipeline, and the shared ones. Consumes the plans.
    pub(super) fn start_pipelines(
        &mut self,
        starts: Arc<Starts>,
        mongodb: Option<Arc<Reachable>>,
        shutdown: &Shutdown,
    ) {
        let plans = std::mem::take(&mut self.plans);
        let problems = Arc::new(self.problems(&self.links.prompt, mongodb));
        let Self { config, roles, clock, links, signing_key, services, needs, .. } = self;
        let (tracer, window) = (&self.tracer, config.bus.dedup);
        let activity = Arc::new(Activity::default());
        let (mut listening, mut sampled, mut routes) = (Vec::new(), Vec::new(), Vec::new());
        for plan in plans {
            let queue = plan.queue(config, &links.admin);
            let pool = queue.over(Arc::clone(&links.pool));
            let seat = Seat {
                config,
                roles,
                clock,
                shutdown,
                services,
                tracer,
                queue: &queue,
                pool: &pool,
            };
            let mut ears: Vec<Box<dyn Listener>> =
                vec![Box::new(ActivityEar(Arc::clone(&activity)))];
            if roles.schedule {
                let board = DueBoard::new(queue.shard_count());
                ears.push(Box::new(DueEar(Arc::clone(&board))));
                let queue = queue.over(Arc::clone(&links.due));
                shutdown.spawn(schedule::run(queue, board, shutdown.clone()));
            }
            plan.part.start(&seat);
            ears.extend(plan.part.listener(&seat));
            let mut places = None;
            if roles.work {
                let pool = plan.pool(&seat, signing_key);
                ears.push(pool.listener());
                places = Some(pool.places());
                shutdown.spawn(pool.run());
            }
            sampled.push(Sampled {
                queue: queue.clone(),
                metrics: PipelineMetrics::new(&plan.name),
                gauges: plan.part.gauges(),
                keep_dead: plan.config.dead.keep,
            });
            if roles.ingest && plan.takes_of_bus() {
                routes.push(plan.route(queue.over(Arc::clone(&links.ingest)), places));
            }
            listening.push((queue, ears));
        }
        let (key, link) = (signing_key.clone(), Arc::clone(&links.admin));
        shutdown.spawn(self.formats.kept(Arc::clone(&link), needs.mongo.clone().ok(), shutdown));
        shutdown.spawn(keep_key(key, link, shutdown.clone()));
        shutdown.spawn(wake::listen(listening, shutdown.clone()));
        let quotas = needs.quotas.clone();
        shutdown.spawn(memory::watch(Arc::clone(&links.admin), quotas, shutdown.clone()));
        shutdown.spawn(findings::watch(problems, Arc::clone(&activity), shutdown.clone()));
        let (link, clock) = (Arc::clone(&links.admin), Arc::clone(clock));
        shutdown.spawn(sample::run(sampled, link, activity, clock, shutdown.clone()));
        if !routes.is_empty() {
            self.read_bus(
                &Arc::new(Fanout::new(routes, starts, self.tracer.clone(), window)),
                shutdown,
            );
        }
    }

    /// Starts a reader per bus.
    fn read_bus(&self, fanout: &Arc<Fanout>, shutdown: &Shutdown) {
        let Self { config, links, target, clock, .. } = self;
        for stream in &config.bus.streams {
            // Blocking commands need their own connection all the time: a connection from a pool
            // would never be returned, and the others would have one less.
            let timeout = INGEST_TIMEOUT + RedisStream::WAIT_MAX;
            let blocking = Link::new(target.clone(), Vec::new(), FAIR_SLICE_US, timeout);
            let source = RedisStream::new(stream, Arc::new(blocking), Arc::clone(&links.ingest))
                .reserving(self.needs.kinds.reserved())
                .retaining(Retention {
                    trim: config.bus.trim,
                    keep: config.bus.retention,
                    clock: Arc::clone(clock),
                });
            let is_published = stream == config.bus.published();
            let reading = Reading {
                source: Arc::new(source),
                fanout: Arc::clone(fanout),
                link: Arc::clone(&links.ingest),
                clock: Arc::clone(clock),
                backlog: is_published.then(|| Arc::clone(&self.backlog)),
                partition_wait: None,
                meter: None,
            };
            shutdown.spawn(reader::run(reading, shutdown.clone()));
        }
        let others = self.buses.with(&config.bus).zip(self.buses.meters());
        for ((settings, source), meter) in others {
            let is_published = config.bus.published() == settings.name;
            let reading = Reading {
                source: Arc::clone(source),
                fanout: Arc::clone(fanout),
                link: Arc::clone(&links.ingest),
                clock: Arc::clone(clock),
                backlog: is_published.then(|| Arc::clone(&self.backlog)),
                partition_wait: match &settings.kind {
                    SourceKind::Nats(_) => None,
                    SourceKind::Kafka(kafka) => Some(kafka.partition_wait),
                },
                meter: Some(Arc::clone(meter)),
            };
            shutdown.spawn(reader::run(reading, shutdown.clone()));
        }
    }

    /// All buses, to ask for their logs.
    fn buses(&self, link: &Arc<Link>) -> Vec<Arc<dyn Source>> {
        let stream = |name: &String| {
            Arc::new(RedisStream::new(name, Arc::clone(link), Arc::clone(link))) as Arc<dyn Source>
        };
        let others = self.buses.with(&self.config.bus).map(|(_, source)| Arc::clone(source));
        self.config.bus.streams.iter().map(stream).chain(others).collect()
    }

    /// The bus that events are published to.
    fn published(&self, link: &Arc<Link>) -> Arc<dyn Source> {
        let Self { config, buses, .. } = self;
        buses.published(&config.bus).unwrap_or_else(|| {
            let (reading, adding) = (Arc::clone(link), Arc::clone(link));
            Arc::new(RedisStream::new(config.bus.published(), reading, adding))
        })
    }
}
