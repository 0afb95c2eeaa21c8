//! The products: what makes more of a pipeline than a handler. The core names none of them; here they
//! are listed, once.

use std::sync::Arc;

use crate::app::Roles;
use crate::clock::{SharedClock, SystemClock};
use crate::config::Config;
use crate::counters::Counters;
use crate::fanout::Interest;
use crate::handler::AnyHandler;
use crate::id::PipelineName;
use crate::keyspace::scripts::Table;
use crate::lifecycle::Shutdown;
use crate::notifications::Notifications;
use crate::pipeline::Kind;
use crate::pressure::Pressure;
use crate::queue::Queue;
use crate::queue::sample::Gauges;
use crate::queue::wake::Listener;
use crate::{automations, counters, notifications};

/// What a product says of its pipeline before anything runs.
pub(crate) trait Product: Sync {
    /// The name of its pipeline.
    fn pipeline(&self) -> &'static str;

    /// The kind of it.
    fn kind(&self, config: &Config, clock: &SharedClock) -> Kind;

    /// Scripts that it runs in Redis beside those of the core.
    fn scripts(&self) -> Option<&'static Table> {
        None
    }
}

/// What handles the events of one pipeline in one instance, and what goes with that.
pub(crate) trait Part: Send + Sync {
    /// The handler, where the process handles events.
    fn handler(&self, seat: &Seat<'_>) -> Arc<dyn AnyHandler>;

    /// What it wants of the events of its types; `None`: all.
    fn interest(&self) -> Option<Arc<dyn Interest>> {
        None
    }

    /// What it shows beside the metrics of every pipeline.
    fn gauges(&self) -> Option<Box<dyn Gauges>> {
        None
    }

    /// What hears the wake channels.
    fn listener(&self, seat: &Seat<'_>) -> Option<Box<dyn Listener>> {
        let _ = seat;
        None
    }

    /// Starts what runs beside the pipeline, until the soft stop.
    fn start(&self, seat: &Seat<'_>) {
        let _ = seat;
    }

    /// The stores that a handler waits for, Redis aside.
    fn stores(&self) -> Vec<Arc<Pressure>> {
        Vec::new()
    }
}

/// What a part works with.
pub(crate) struct Seat<'a> {
    pub(crate) config: &'a Config,
    pub(crate) roles: &'a Roles,
    pub(crate) clock: &'a SharedClock,
    pub(crate) shutdown: &'a Shutdown,
    /// The queues of its pipeline, for everything that may be slow or rare.
    pub(crate) queue: &'a Queue,
    /// The same on the hot path.
    pub(crate) pool: &'a Queue,
    /// The products that it may act on.
    pub(crate) fellows: &'a Fellows,
}

/// The products that others act on.
pub(crate) struct Fellows {
    /// Or why views are not counted here.
    pub(crate) counters: Result<Counters, String>,
    /// `None`: they do not run here.
    pub(crate) notifications: Option<Notifications>,
}

/// The built-in products.
static BUILT_IN: [&dyn Product; 3] =
    [&counters::Product, &notifications::Product, &automations::Product];

/// The kinds of all pipelines under one configuration.
#[derive(Debug, Clone)]
pub(crate) struct Kinds(Vec<(&'static str, Kind)>);

impl Kinds {
    /// From here on, connections load the scripts of the products too.
    pub(crate) fn new(config: &Config, clock: &SharedClock) -> Self {
        BUILT_IN.iter().filter_map(|product| product.scripts()).for_each(Table::register);
        let kind = |product: &&dyn Product| (product.pipeline(), product.kind(config, clock));
        Self(BUILT_IN.iter().map(kind).collect())
    }

    /// Attributes that nothing of the bus may bring.
    pub(crate) fn reserved(&self) -> Vec<&'static str> {
        self.0.iter().flat_map(|(_, kind)| kind.reserved).copied().collect()
    }

    /// By the clock of the system.
    pub(crate) fn today(config: &Config) -> Self {
        let clock: SharedClock = Arc::new(SystemClock);
        Self::new(config, &clock)
    }

    /// The kind of a pipeline.
    pub(crate) fn of(&self, name: &PipelineName) -> Kind {
        let known = self.0.iter().find(|(pipeline, _)| name.is(pipeline));
        known.map(|(_, kind)| kind.clone()).unwrap_or_default()
    }
}
