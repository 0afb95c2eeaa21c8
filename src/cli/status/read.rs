//! Reads the status from Redis.

use super::problems::find_problems;
use super::{PipelineState, PipelineStatus, RedisStatus, Status};
use crate::cli::error::CliError;
use crate::cli::session::Session;
use crate::clock::{Clock as _, SystemClock, millis};
use crate::presence::{self, Process};

pub(super) async fn read(session: &Session) -> Result<Status, CliError> {
    let target = session.server.target().to_string();
    let redis = RedisStatus { target, info: session.server.info().await? };
    let mut streams = Vec::new();
    for stream in &session.config.bus.streams {
        streams.push(session.server.stream(stream).await?);
    }
    let processes = session.processes().await?;
    let pipelines = read_pipelines(session, &processes).await?;
    let invalid = session.server.invalid_entries().await?;
    let (problems, invalid_stream) = (Vec::new(), session.config.redis.prefix.invalid_stream());
    let mut status =
        Status { redis, streams, invalid, invalid_stream, processes, pipelines, problems };
    status.problems = find_problems(&status, millis(SystemClock.now()));
    Ok(status)
}

/// Collects the views of all pipelines.
pub(in super::super) async fn read_pipelines(
    session: &Session,
    processes: &[Process],
) -> Result<Vec<PipelineStatus>, CliError> {
    let names = session.pipelines().await?;
    let mut found = Vec::with_capacity(names.len());
    for name in names {
        let queue = session.view(&name);
        let view = queue.view(SystemClock.now()).await?;
        let failing = if view.depth > 0 { queue.failing().await? } else { None };
        let throttled = if view.parked > 0 { queue.throttled().await? } else { None };
        let state = match session.config.pipelines.get(&name) {
            None => PipelineState::Unconfigured,
            Some(config) if !config.enabled => PipelineState::Disabled,
            Some(_) if view.stopped => PipelineState::Paused,
            Some(_) => PipelineState::Enabled,
        };
        let pace = presence::pace(processes, &name);
        found.push(PipelineStatus { name, state, view, failing, throttled, pace });
    }
    Ok(found)
}
