//! The state of the pipelines in the last 15 minutes, for the charts of the web page. The process
//! that samples the shared values adds a point every few seconds while there is activity. No other
//! component depends on it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::millis;
use crate::id::PipelineName;
use crate::redis::{Link, RedisError, Reply, keys};

/// The time span of the charts.
pub(crate) const SPAN: Duration = Duration::from_secs(15 * 60);
/// Minimum time between two points.
pub(crate) const EVERY: Duration = Duration::from_secs(5);
/// Maximum number of points.
const POINTS: isize = 180;

/// One pipeline at one time.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "(u64, u64, f64, f64)", into = "(u64, u64, f64, f64)")]
pub(crate) struct Sample {
    pub(crate) depth: u64,
    pub(crate) oldest_age_ms: u64,
    pub(crate) queued_per_second: f64,
    pub(crate) settled_per_second: f64,
}

impl From<(u64, u64, f64, f64)> for Sample {
    fn from(fields: (u64, u64, f64, f64)) -> Self {
        let (depth, oldest_age_ms, queued_per_second, settled_per_second) = fields;
        Self { depth, oldest_age_ms, queued_per_second, settled_per_second }
    }
}

impl From<Sample> for (u64, u64, f64, f64) {
    fn from(sample: Sample) -> Self {
        (sample.depth, sample.oldest_age_ms, sample.queued_per_second, sample.settled_per_second)
    }
}

/// All pipelines at one time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Point {
    /// Milliseconds since 1970.
    #[serde(rename = "t")]
    pub(crate) at_ms: u64,
    #[serde(rename = "p")]
    pub(crate) pipelines: BTreeMap<PipelineName, Sample>,
}

/// Adds a point; deletes the oldest ones.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn add(link: &Link, point: &Point) -> Result<(), RedisError> {
    // Names and numbers always serialise.
    let text = serde_json::to_string(point).unwrap_or_default();
    let (mut pipe, trend) = (redis::Pipeline::with_capacity(3), keys::trend(link.prefix()));
    pipe.cmd("RPUSH").arg(&trend).arg(text);
    pipe.cmd("LTRIM").arg(&trend).arg(-POINTS).arg(-1);
    pipe.cmd("PEXPIRE").arg(&trend).arg(millis(SPAN));
    link.run_checked("RPUSH", &pipe).await.map(drop)
}

/// The stored points, oldest first.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn read(link: &Link) -> Result<Vec<Point>, RedisError> {
    let mut command = redis::cmd("LRANGE");
    command.arg(keys::trend(link.prefix())).arg(0).arg(-1);
    let misread = |source| link.misread("LRANGE", source);
    let mut reply = Reply::new(link.command("LRANGE", command).await?).map_err(misread)?;
    let mut points = Vec::with_capacity(reply.len());
    while reply.len() > 0 {
        // Another version may use another format.
        points.extend(serde_json::from_str(&reply.text().map_err(misread)?).ok());
    }
    Ok(points)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_point_is_short_and_read_back() {
        let sample = Sample { depth: 12, oldest_age_ms: 340, ..Sample::default() };
        let pipelines = BTreeMap::from([(PipelineName::parse("p").unwrap(), sample)]);
        let point = Point { at_ms: 1, pipelines };
        let text = serde_json::to_string(&point).unwrap();
        assert_eq!(text, r#"{"t":1,"p":{"p":[12,340,0.0,0.0]}}"#);
        assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), point);
    }
}
