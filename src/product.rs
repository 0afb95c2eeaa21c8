//! The products: what makes more of a pipeline than a handler. The core names none of them; here they
//! are listed, once.

use std::sync::Arc;

use crate::clock::{SharedClock, SystemClock};
use crate::config::Config;
use crate::id::PipelineName;
use crate::pipeline::Kind;
use crate::{automations, counters, notifications};

/// What a product says of its pipeline before anything runs.
pub(crate) trait Product: Sync {
    /// The name of its pipeline.
    fn pipeline(&self) -> &'static str;

    /// The kind of it.
    fn kind(&self, config: &Config, clock: &SharedClock) -> Kind;
}

/// The built-in products.
static BUILT_IN: [&dyn Product; 3] =
    [&counters::Product, &notifications::Product, &automations::Product];

/// The kinds of all pipelines under one configuration.
#[derive(Debug, Clone)]
pub(crate) struct Kinds(Vec<(&'static str, Kind)>);

impl Kinds {
    pub(crate) fn new(config: &Config, clock: &SharedClock) -> Self {
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
