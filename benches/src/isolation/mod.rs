//! `fairlane-bench isolation`: what a hostile tenant does to quiet ones, for each resource that all
//! bots share.
//!
//! 1. A process of the service starts on a Redis of its own. It has a receiver and three tokens: of
//!    the quiet tenant, of the hostile tenant, and of the operator.
//! 2. Ten quiet bots do a steady, small amount of work, alone.
//! 3. The hostile tenant uses up the resource with everything that its token permits. The quiet
//!    bots do the same work beside it.
//! 4. All of this is repeated with a new process, so that the phases alternate: a machine that is
//!    busy with something else disturbs both.
//!
//! The resource is isolated if the p99 of the quiet bots beside the hostile tenant is at most 1.5
//! times what it is alone, or 25 ms above, and none of their work is refused or lost.

mod attack;
mod client;
mod deployment;
mod figures;
mod load;
mod name_server;
mod quiet;
mod receiver;
mod resource;

use std::time::Duration;

use fairlane::sandbox::Rig;
use serde::Serialize;

pub(crate) use self::client::{Client, request};
pub(crate) use self::deployment::{PATIENCE, until};
pub(crate) use self::figures::{Line, Verdict};
pub(crate) use self::resource::Resource;

use self::attack::{Attack, Target};
use self::deployment::Deployment;
use self::figures::Phase;
use self::name_server::NameServer;
use crate::error::BenchError;
use crate::mongo::{self, Choice, Database};

/// Time for the hostile bots to take effect.
const WARM_UP: Duration = Duration::from_secs(1);
/// Open files of this process: hostile connections, and both ends of others.
const OPEN_FILES: u64 = 8_192;

/// The options.
#[derive(Debug, Clone)]
pub(crate) struct Options {
    /// The resources, in this order.
    pub(crate) resources: Vec<Resource>,
    /// Duration of each phase.
    pub(crate) seconds: u64,
    /// Number of processes per resource. In each, the quiet bots are measured alone and beside.
    pub(crate) rounds: u64,
    /// The MongoDB for rules and exports.
    pub(crate) mongo: Choice,
}

/// The results.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Report {
    /// Duration of each phase.
    pub(crate) seconds: u64,
    /// Number of phases alone, and of phases beside the hostile tenant.
    pub(crate) rounds: u64,
    pub(crate) held: usize,
    pub(crate) failed: usize,
    pub(crate) skipped: usize,
    pub(crate) resources: Vec<Line>,
}

/// Runs the bench.
///
/// # Errors
/// If a private server or the service cannot be started.
pub(crate) async fn run(
    options: Options,
    mut watch: impl FnMut(&'static str, u64),
) -> Result<Report, BenchError> {
    let Options { resources, seconds, rounds, mongo } = options;
    // With fewer files, fewer hostile connections are open.
    let _ = fairlane::sandbox::raise_open_files(OPEN_FILES);
    let mut lines = Vec::new();
    for resource in resources {
        lines.push(measure(resource, rounds, seconds, &mongo, &mut watch).await?);
    }
    let count = |verdict| lines.iter().filter(|line: &&Line| line.verdict == verdict).count();
    let [held, failed, skipped] = [Verdict::Held, Verdict::Failed, Verdict::Skipped].map(count);
    Ok(Report { seconds, rounds, held, failed, skipped, resources: lines })
}

async fn measure(
    resource: Resource,
    rounds: u64,
    seconds: u64,
    mongo: &Choice,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<Line, BenchError> {
    if let Some(missing) = resource.missing() {
        return Ok(Line::skipped(resource, missing.to_owned()));
    }
    let (mut alone, mut beside) = (Phase::default(), Phase::default());
    for round in 1..=rounds {
        let phases = if resource.needs_mongo() {
            let measured = mongo::with_database(mongo, async |rig, database| {
                phases(rig, Some(database), resource, seconds, round, watch).await
            });
            match measured.await {
                // Nothing else is measured there.
                Err(BenchError::PrivateMongo(error)) => {
                    return Ok(Line::skipped(resource, format!("skipped: {error}")));
                }
                measured => measured?,
            }
        } else {
            let measured =
                async |rig: &Rig| phases(rig, None, resource, seconds, round, watch).await;
            Rig::with(measured).await?
        };
        alone.add(&phases[0]);
        beside.add(&phases[1]);
    }
    Ok(Line::new(resource, &alone, &beside))
}

/// The quiet bots alone, and beside the hostile ones.
async fn phases(
    rig: &Rig,
    database: Option<&Database>,
    resource: Resource,
    seconds: u64,
    round: u64,
    watch: &mut impl FnMut(&'static str, u64),
) -> Result<[Phase; 2], BenchError> {
    let lasts = Duration::from_secs(seconds);
    watch(resource.starting(), round);
    let name_server = NameServer::start().await?;
    let deployment = Deployment::start(rig, database, resource, name_server.address).await?;
    load::of_quiet(&deployment, resource).await?;
    // The first work of a process takes longer.
    quiet::measure(&deployment, resource, 0, WARM_UP).await?;
    watch(resource.alone(), round);
    let alone = quiet::measure(&deployment, resource, 1, lasts).await?;
    watch(resource.starting(), round);
    load::of_hostile(&deployment, resource, lasts).await?;
    let attack = Attack::start(resource, Target::new(&deployment))?;
    tokio::time::sleep(WARM_UP).await;
    watch(resource.beside(), round);
    let mut beside = quiet::measure(&deployment, resource, 2, lasts).await?;
    drop(attack);
    load::removed(&deployment, resource, &mut beside).await;
    Ok([alone, beside])
}
