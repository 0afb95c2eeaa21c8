//! The products of a program: the built-in ones, and those that the program adds.

use std::sync::Arc;

use crate::clock::{SharedClock, SystemClock};
use crate::config::Config;
use crate::formats::{CORE, Format};
use crate::id::PipelineName;
use crate::pipeline::Kind;
use crate::product::Product;
use crate::redis::scripts::Table;
use crate::{automations, counters, notifications};

/// The built-in products.
static BUILT_IN: [&dyn Product; 3] =
    [&counters::Product, &notifications::Product, &automations::Product];

/// Whether a built-in product has this pipeline.
pub(crate) fn is_product(pipeline: &str) -> bool {
    BUILT_IN.iter().any(|product| product.pipeline() == pipeline)
}

/// The formats of the core and of the built-in products.
pub(crate) fn formats() -> impl Iterator<Item = &'static Format> {
    CORE.iter().chain(BUILT_IN.into_iter().flat_map(Product::formats))
}

/// The products of one program.
#[derive(Clone, Default)]
pub(crate) struct Products(Vec<Arc<dyn Product>>);

impl Products {
    /// Adds a product. It replaces an earlier one with the same pipeline.
    pub(crate) fn add(&mut self, product: Arc<dyn Product>) {
        self.0.retain(|other| other.pipeline() != product.pipeline());
        self.0.push(product);
    }

    /// All of them, the built-in ones first.
    pub(crate) fn all(&self) -> impl Iterator<Item = &dyn Product> {
        let replaced = |product: &&dyn Product| {
            !self.0.iter().any(|other| other.pipeline() == product.pipeline())
        };
        let built_in = BUILT_IN.into_iter().filter(replaced);
        built_in.chain(self.0.iter().map(|product| &**product as &dyn Product))
    }

    /// The product of a pipeline.
    pub(crate) fn of(&self, pipeline: &PipelineName) -> Option<&dyn Product> {
        self.all().find(|product| pipeline.is(product.pipeline()))
    }
}

/// The kinds of all pipelines under one configuration.
#[derive(Debug, Clone)]
pub(crate) struct Kinds(Vec<(&'static str, Kind)>);

impl Kinds {
    /// Determines the kinds. Also registers the scripts of the products, for all later connections.
    pub(crate) fn new(products: &Products, config: &Config, clock: &SharedClock) -> Self {
        products.all().filter_map(Product::scripts).for_each(Table::register);
        let kind = |product: &dyn Product| (product.pipeline(), product.kind(config, clock));
        Self(products.all().map(kind).collect())
    }

    /// Attributes that a bus event must not have.
    pub(crate) fn reserved(&self) -> Vec<&'static str> {
        self.0.iter().flat_map(|(_, kind)| kind.reserved).copied().collect()
    }

    /// The kinds of the built-in products, with the system clock.
    pub(crate) fn today(config: &Config) -> Self {
        let clock: SharedClock = Arc::new(SystemClock);
        Self::new(&Products::default(), config, &clock)
    }

    /// The kind of a pipeline.
    pub(crate) fn of(&self, name: &PipelineName) -> Kind {
        let known = self.0.iter().find(|(pipeline, _)| name.is(pipeline));
        known.map(|(_, kind)| kind.clone()).unwrap_or_default()
    }
}
