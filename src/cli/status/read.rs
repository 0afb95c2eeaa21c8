//! Where an operator command reads the facts.

use std::time::Duration;

use crate::cli::error::CliError;
use crate::cli::session::Session;
use crate::clock::{Clock as _, SystemClock};
use crate::config::SourceConfig;
use crate::id::PipelineName;
use crate::presence::Process;
use crate::problems::{PipelineFacts, PipelineState, Site, look_at};
use crate::queue::Queue;
use crate::redis::{Link, RedisError};

/// The connections and the configuration of a command.
pub(in super::super) struct CliSite<'a>(pub(in super::super) &'a Session);

impl Site for CliSite<'_> {
    fn link(&self) -> &Link {
        self.0.link()
    }

    fn prompt(&self) -> &Link {
        self.0.server.link()
    }

    fn streams(&self) -> &[String] {
        &self.0.config.bus.streams
    }

    fn buses(&self) -> Vec<String> {
        self.0.config.bus.sources.iter().map(SourceConfig::bus).collect()
    }

    async fn pipelines(&self) -> Result<Vec<PipelineName>, RedisError> {
        self.0.pipelines().await
    }

    fn configured(&self, name: &PipelineName) -> PipelineState {
        PipelineState::of(self.0.config.pipelines.get(name).map(|config| config.enabled))
    }

    fn takes_of_bus(&self, name: &PipelineName) -> bool {
        !self.0.kind(name).off_bus
    }

    fn linger(&self, name: &PipelineName) -> Duration {
        self.0.config.pipelines.get(name).map_or(Duration::ZERO, |config| config.linger)
    }

    fn queue(&self, name: &PipelineName) -> Queue {
        self.0.view(name)
    }

    fn mongodb(&self) -> Option<bool> {
        None
    }

    fn now(&self) -> Duration {
        SystemClock.now()
    }
}

/// Collects the views of all pipelines.
pub(in super::super) async fn read_pipelines(
    session: &Session,
    processes: &[Process],
) -> Result<Vec<PipelineFacts>, CliError> {
    let names = session.pipelines().await?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        found.push(look_at(&CliSite(session), name, processes).await?);
    }
    Ok(found)
}
