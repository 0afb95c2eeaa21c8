//! The state of the pipelines in the last 15 minutes and the last 24 hours, for the charts of the
//! web page. The process that samples the shared values adds a point every few seconds while there
//! is activity, and one for each minute. No other component depends on it.

use std::collections::BTreeMap;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::clock::millis;
use crate::id::PipelineName;
use crate::redis::{Link, RedisError, Reply, keys};

/// Minimum time between two recent points.
pub(crate) const EVERY: Duration = Duration::from_secs(5);
/// Minimum time between two points of the last 24 hours.
pub(crate) const MINUTE: Duration = Duration::from_secs(60);
/// Maximum size of the points of a series. With very many pipelines it reaches less far back.
const BYTES_MAX: usize = 8 << 20;

/// The points of a time span.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Series {
    /// The last 15 minutes, a point every 5 s.
    Recent,
    /// The last 24 hours, a point every minute.
    Minutes,
}

impl Series {
    /// How far it reaches back.
    pub(crate) const fn span(self) -> Duration {
        match self {
            Self::Recent => Duration::from_secs(15 * 60),
            Self::Minutes => Duration::from_secs(24 * 3_600),
        }
    }

    /// Maximum number of points, of this size in bytes.
    fn points(self, size: usize) -> usize {
        let count = match self {
            Self::Recent => 180,
            Self::Minutes => 1_440,
        };
        count.min(BYTES_MAX / size.max(1)).max(1)
    }

    fn key(self, link: &Link) -> String {
        match self {
            Self::Recent => keys::trend(link.prefix()),
            Self::Minutes => keys::trend_minutes(link.prefix()),
        }
    }
}

/// One pipeline at one time, or in one minute.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(from = "Vec<f64>", into = "[f64; 8]")]
pub(crate) struct Sample {
    /// Events queued; the maximum of a minute.
    pub(crate) depth: f64,
    /// Age of the oldest event; the maximum of a minute.
    pub(crate) oldest_age_ms: f64,
    pub(crate) queued_per_second: f64,
    pub(crate) settled_per_second: f64,
    /// Calls of the handler, in all processes.
    pub(crate) calls_per_second: f64,
    /// Those that failed.
    pub(crate) failed_per_second: f64,
    /// Mean duration of a call, over all processes.
    pub(crate) call_ms: f64,
    /// The slowest call of all processes.
    pub(crate) call_max_ms: f64,
}

impl From<Vec<f64>> for Sample {
    /// Another version may write fewer or more numbers.
    fn from(numbers: Vec<f64>) -> Self {
        let at = |place: usize| numbers.get(place).copied().unwrap_or_default();
        Self {
            depth: at(0),
            oldest_age_ms: at(1),
            queued_per_second: at(2),
            settled_per_second: at(3),
            calls_per_second: at(4),
            failed_per_second: at(5),
            call_ms: at(6),
            call_max_ms: at(7),
        }
    }
}

impl From<Sample> for [f64; 8] {
    fn from(sample: Sample) -> Self {
        let tenths = |value: f64| (value * 10.0).round() / 10.0;
        [
            sample.depth,
            sample.oldest_age_ms,
            tenths(sample.queued_per_second),
            tenths(sample.settled_per_second),
            tenths(sample.calls_per_second),
            tenths(sample.failed_per_second),
            tenths(sample.call_ms),
            tenths(sample.call_max_ms),
        ]
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

/// Combines the points of a minute.
#[derive(Debug, Default)]
pub(crate) struct Minute {
    /// When the last minute ended, ms since 1970. `None`: this is the first one.
    ended_ms: Option<u64>,
    /// The sums, and the number of points.
    sums: BTreeMap<PipelineName, (Sample, f64)>,
}

impl Minute {
    /// Adds a point. Returns that of the minute if it is over. The first point is also that of a
    /// first minute, so that charts start with the process.
    pub(crate) fn add(&mut self, point: &Point) -> Option<Point> {
        for (name, sample) in &point.pipelines {
            let (sum, count) = self.sums.entry(name.clone()).or_default();
            sum.depth = sum.depth.max(sample.depth);
            sum.oldest_age_ms = sum.oldest_age_ms.max(sample.oldest_age_ms);
            sum.queued_per_second += sample.queued_per_second;
            sum.settled_per_second += sample.settled_per_second;
            sum.calls_per_second += sample.calls_per_second;
            sum.failed_per_second += sample.failed_per_second;
            // A mean over calls, not over points.
            sum.call_ms += sample.call_ms * sample.calls_per_second;
            sum.call_max_ms = sum.call_max_ms.max(sample.call_max_ms);
            *count += 1.0;
        }
        // A clock that was set back starts a new minute.
        let is_over = self
            .ended_ms
            .is_none_or(|ended| point.at_ms < ended || point.at_ms - ended >= millis(MINUTE));
        if !is_over {
            return None;
        }
        self.ended_ms = Some(point.at_ms);
        let pipelines = std::mem::take(&mut self.sums);
        let mean = |(name, (sum, count)): (PipelineName, (Sample, f64))| {
            let calls = sum.calls_per_second;
            let sample = Sample {
                queued_per_second: sum.queued_per_second / count,
                settled_per_second: sum.settled_per_second / count,
                calls_per_second: calls / count,
                failed_per_second: sum.failed_per_second / count,
                call_ms: if calls > 0.0 { sum.call_ms / calls } else { 0.0 },
                ..sum
            };
            (name, sample)
        };
        Some(Point { at_ms: point.at_ms, pipelines: pipelines.into_iter().map(mean).collect() })
    }
}

/// Adds a point; deletes the oldest ones.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn add(link: &Link, series: Series, point: &Point) -> Result<(), RedisError> {
    // Names and numbers always serialise.
    let text = serde_json::to_string(point).unwrap_or_default();
    let (mut pipe, trend) = (redis::Pipeline::with_capacity(3), series.key(link));
    let kept = series.points(text.len());
    pipe.cmd("RPUSH").arg(&trend).arg(text);
    pipe.cmd("LTRIM").arg(&trend).arg(format!("-{kept}")).arg(-1);
    pipe.cmd("PEXPIRE").arg(&trend).arg(millis(series.span()));
    link.run_checked("RPUSH", &pipe).await.map(drop)
}

/// The stored points, oldest first.
///
/// # Errors
/// If Redis is unavailable or refuses.
pub(crate) async fn read(link: &Link, series: Series) -> Result<Vec<Point>, RedisError> {
    let mut command = redis::cmd("LRANGE");
    command.arg(series.key(link)).arg(0).arg(-1);
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

    fn point(at_ms: u64, sample: Sample) -> Point {
        let pipelines = BTreeMap::from([(PipelineName::parse("p").unwrap(), sample)]);
        Point { at_ms, pipelines }
    }

    #[test]
    fn a_point_is_short_and_read_back() {
        let sample =
            Sample { depth: 12.0, oldest_age_ms: 340.0, call_ms: 1.5, ..Sample::default() };
        let point = point(1, sample);
        let text = serde_json::to_string(&point).unwrap();
        assert_eq!(text, r#"{"t":1,"p":{"p":[12.0,340.0,0.0,0.0,0.0,0.0,1.5,0.0]}}"#);
        assert_eq!(serde_json::from_str::<Point>(&text).unwrap(), point);
        // Written by the version before, and by one after.
        for other in ["[12,340,0.0,0.0]", "[12,340,0,0,0,0,0,0,7]"] {
            let text = format!(r#"{{"t":1,"p":{{"p":{other}}}}}"#);
            let read: Point = serde_json::from_str(&text).unwrap();
            let sample = read.pipelines.values().next().unwrap();
            assert_eq!((sample.depth, sample.oldest_age_ms), (12.0, 340.0), "{other}");
        }
    }

    #[test]
    fn a_minute_has_the_maxima_and_the_means_over_its_calls() {
        let mut minute = Minute::default();
        let first = minute.add(&point(1_000, Sample { depth: 7.0, ..Sample::default() }));
        assert_eq!(first.unwrap().at_ms, 1_000, "a first point makes a chart immediately");
        let busy = Sample {
            depth: 9.0,
            calls_per_second: 30.0,
            failed_per_second: 2.0,
            call_ms: 10.0,
            call_max_ms: 80.0,
            ..Sample::default()
        };
        let slow = Sample { depth: 1.0, calls_per_second: 10.0, call_ms: 50.0, ..busy };
        assert_eq!(minute.add(&point(2_000, busy)), None);
        let whole = minute.add(&point(61_000, slow)).unwrap();
        let expected = Sample {
            depth: 9.0,
            calls_per_second: 20.0,
            failed_per_second: 2.0,
            call_ms: 20.0,
            call_max_ms: 80.0,
            ..Sample::default()
        };
        assert_eq!(whole, point(61_000, expected));
        // Nothing of it is in the next one, and a clock that was set back stops nothing.
        let quiet = minute.add(&point(500, Sample::default())).unwrap();
        assert_eq!(quiet, point(500, Sample::default()));
    }

    #[test]
    fn a_series_is_bounded_in_points_and_bytes() {
        assert_eq!([Series::Recent, Series::Minutes].map(|of| of.points(100)), [180, 1_440]);
        assert_eq!(Series::Minutes.points(1 << 20), 8);
        assert_eq!(Series::Recent.points(usize::MAX), 1);
    }
}
