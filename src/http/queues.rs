//! The known pipelines, and their queues.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use redis::Value;

use super::problem::{Kind, Problem};
use crate::config::{PipelineConfig, is_built_in};
use crate::id::{PipelineName, ShardCount};
use crate::products::Kinds;
use crate::queue::{FAIR_SLICE_US, Queue};
use crate::quotas::Quotas;
use crate::redis::keys::{self, ShardKeys};
use crate::redis::{Link, RedisError, Reply};

/// The pipelines of the configuration, enabled or not, and those that have run before.
pub(crate) struct Queues {
    configured: BTreeMap<PipelineName, PipelineConfig>,
    shards: ShardCount,
    kinds: Kinds,
    quotas: Quotas,
    /// Serves the shards of the enabled pipelines.
    link: Arc<Link>,
    /// Timeout of one call.
    timeout: Duration,
    /// Queues of the other pipelines, each with a link that serves its shards. Bounded by the
    /// number of pipelines that Redis knows.
    others: Mutex<BTreeMap<PipelineName, Queue>>,
}

impl Queues {
    /// `link` serves the shards of the enabled pipelines of the configuration.
    pub(crate) fn new(
        configured: BTreeMap<PipelineName, PipelineConfig>,
        shards: ShardCount,
        kinds: Kinds,
        quotas: Quotas,
        link: Arc<Link>,
        timeout: Duration,
    ) -> Self {
        Self { configured, shards, kinds, quotas, link, timeout, others: Mutex::default() }
    }

    /// Whether this process runs the pipeline.
    pub(crate) fn is_enabled(&self, name: &PipelineName) -> bool {
        self.configured.get(name).is_some_and(|config| config.enabled)
    }

    /// Whether events of the bus are copied for a pipeline.
    pub(crate) fn takes_of_bus(&self, name: &PipelineName) -> bool {
        !self.kinds.of(name).off_bus
    }

    /// The pipelines of the configuration.
    pub(crate) fn all_configured(&self) -> impl Iterator<Item = (&PipelineName, &PipelineConfig)> {
        self.configured.iter()
    }

    /// The configuration of a pipeline.
    pub(crate) fn configured(&self, name: &PipelineName) -> Option<&PipelineConfig> {
        self.configured.get(name)
    }

    /// Attributes that events of the bus must not have.
    pub(crate) fn reserved(&self) -> Vec<&'static str> {
        self.kinds.reserved()
    }

    /// The link for calls that concern no pipeline.
    pub(crate) fn link(&self) -> &Link {
        &self.link
    }

    /// The clock of Redis, since 1970.
    pub(crate) async fn time(&self) -> Result<Duration, RedisError> {
        self.link.time().await
    }

    /// The names of the known pipelines.
    pub(crate) async fn names(&self) -> Result<BTreeSet<PipelineName>, RedisError> {
        // A disabled built-in pipeline is not listed: the user did not configure it.
        let asked =
            self.configured.iter().filter(|(name, config)| config.enabled || !is_built_in(name));
        let mut names: BTreeSet<_> = asked.map(|(name, _)| name.clone()).collect();
        let misread = |source| self.link.misread("HKEYS", source);
        let known = redis::Cmd::hkeys(keys::pipelines(self.link.prefix()));
        let known = self.link.command("HKEYS", known).await?;
        let known = match known {
            Value::Set(values) => Value::Array(values),
            value => value,
        };
        let mut known = Reply::new(known).map_err(misread)?;
        while known.len() > 0 {
            let name = known.text().map_err(misread)?;
            names.extend(PipelineName::parse(&name));
        }
        Ok(names)
    }

    /// The queues of a pipeline, whose name must come from [`Self::names`].
    pub(crate) fn of(&self, name: &PipelineName) -> Queue {
        if self.is_enabled(name) {
            return self.make(name, &self.link);
        }
        let mut others = self.others.lock().unwrap_or_else(PoisonError::into_inner);
        let make = || {
            let target = self.link.target().clone();
            let keys = |shard| ShardKeys::new(target.prefix(), name, shard);
            let keys = self.shards.shards().map(keys).collect();
            self.make(name, &Arc::new(Link::pooled(target, keys, FAIR_SLICE_US, self.timeout)))
        };
        others.entry(name.clone()).or_insert_with(make).clone()
    }

    /// The queues of a pipeline, or a problem that lists the known pipelines.
    pub(crate) async fn find(&self, name: &PipelineName) -> Result<Queue, Problem> {
        if self.is_enabled(name) {
            return Ok(self.of(name));
        }
        let known = self.names().await?;
        if known.contains(name) {
            return Ok(self.of(name));
        }
        let known: Vec<_> = known.iter().map(PipelineName::as_str).collect();
        let known = match known.as_slice() {
            [] => "there is none yet".to_owned(),
            known => format!("there is: {}", known.join(", ")),
        };
        Err(Problem::new(Kind::NoPipeline, format!("there is no pipeline {name:?}; {known}")))
    }

    fn make(&self, name: &PipelineName, link: &Arc<Link>) -> Queue {
        let defaults = || PipelineConfig::new("", [""; 0]);
        let config = self.configured.get(name).cloned().unwrap_or_else(defaults);
        let limits = config.limits(self.shards);
        Queue::new(name.clone(), self.shards, limits, Arc::clone(link))
            .of_kind(self.kinds.of(name))
            .with_quotas(self.quotas.clone())
    }
}
