//! What a soak measured in each part of the time, and what has grown.

use serde::{Deserialize, Serialize};

use crate::faults::watch::Resources;

/// The first day fills caches and histories. From the second one to the last, nothing may grow by more
/// than a quarter and this.
const SLACK: [(&str, u64); 4] =
    [("MB of memory", 25), ("keys without a TTL", 200), ("descriptors", 25), ("threads", 6)];

/// What was measured in one part of the time.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Period {
    /// Its start, seconds after the start of the soak.
    pub(crate) from_s: u64,
    pub(crate) events_per_s: u64,
    /// From the acknowledgement of an event to its effect, ms.
    pub(crate) p50_ms: f64,
    pub(crate) p99_ms: f64,
    pub(crate) max_ms: f64,
    /// Maximum of what is used.
    #[serde(flatten)]
    pub(crate) used: Used,
}

/// What is used: by the process that is never restarted, and in Redis.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Used {
    #[serde(flatten)]
    pub(crate) process: Resources,
    pub(crate) redis_mb: u64,
    pub(crate) keys: u64,
    /// Those without a TTL. Results of notifications, for example, stay for a week.
    pub(crate) lasting_keys: u64,
}

impl Used {
    fn max(self, other: Self) -> Self {
        Self {
            process: self.process.max(other.process),
            redis_mb: self.redis_mb.max(other.redis_mb),
            keys: self.keys.max(other.keys),
            lasting_keys: self.lasting_keys.max(other.lasting_keys),
        }
    }

    /// In the order of [`SLACK`].
    fn figures(self) -> [u64; SLACK.len()] {
        let Resources { memory_mb, descriptors, threads } = self.process;
        [memory_mb, self.lasting_keys, descriptors, threads]
    }
}

/// What was found at a time, µs after the start of the soak.
#[derive(Debug, Clone, Copy, Serialize, Deserialize)]
pub(super) struct Sample {
    pub(super) at: u64,
    pub(super) day: u32,
    pub(super) used: Used,
}

/// What has grown from the day after `first` to the last.
pub(super) fn grown(samples: &[Sample], first: u32) -> Vec<String> {
    let last = samples.last().map_or(0, |sample| sample.day);
    if last < first + 2 {
        return Vec::new();
    }
    let of_day = |day: u32, figure: usize| {
        let mut figures: Vec<u64> = samples
            .iter()
            .filter(|sample| sample.day == day)
            .map(|sample| sample.used.figures()[figure])
            .collect();
        figures.sort_unstable();
        figures.get(figures.len() / 2).copied().unwrap_or_default()
    };
    SLACK
        .iter()
        .enumerate()
        .filter_map(|(figure, (what, slack))| {
            let (before, after) = (of_day(first + 1, figure), of_day(last, figure));
            (after > before + before / 4 + slack).then(|| {
                format!("{after} {what} on the last day, and {before} on day {}", first + 2)
            })
        })
        .collect()
}

/// Divides the time into equal parts. `delays` are sorted by their times, µs after the start of the soak.
pub(super) fn periods(delays: &[(u64, u32)], samples: &[Sample], parts: usize) -> Vec<Period> {
    let end = samples.last().map_or(0, |sample| sample.at).max(1);
    let length = end.div_ceil(parts.max(1) as u64).max(1);
    let mut all = Vec::with_capacity(parts);
    for part in 0..parts as u64 {
        let (from, to) = (part * length, (part + 1) * length);
        let first = delays.partition_point(|(at, _)| *at < from);
        let behind = delays.partition_point(|(at, _)| *at < to);
        let mut within: Vec<u32> = delays[first..behind].iter().map(|(_, delay)| *delay).collect();
        within.sort_unstable();
        let at = |percent: usize| {
            let place = within.len().saturating_sub(1) * percent / 100;
            within.get(place).map_or(0.0, |us| f64::from(*us) / 1_000.0)
        };
        let used = samples
            .iter()
            .filter(|sample| (from..to).contains(&sample.at))
            .fold(Used::default(), |most, sample| most.max(sample.used));
        all.push(Period {
            from_s: from / 1_000_000,
            events_per_s: within.len() as u64 * 1_000_000 / length,
            p50_ms: at(50),
            p99_ms: at(99),
            max_ms: at(100),
            used,
        });
    }
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(at: u64, day: u32, memory_mb: u64) -> Sample {
        let process = Resources { memory_mb, ..Resources::default() };
        Sample { at, day, used: Used { process, ..Used::default() } }
    }

    #[test]
    fn growth_is_found_from_the_second_day_on_and_not_on_the_first() {
        let days = |memory: [u64; 4]| {
            let samples = (0..4).map(|day: u32| sample(u64::from(day), day, memory[day as usize]));
            grown(&samples.collect::<Vec<_>>(), 0)
        };
        assert!(days([50, 100, 105, 110]).is_empty());
        assert_eq!(days([50, 100, 200, 300]).len(), 1);
    }

    #[test]
    fn periods_have_the_percentiles_of_their_own_events() {
        let delays: Vec<(u64, u32)> = (0..200)
            .map(|event| (event * 10_000, if event < 100 { 1_000 } else { 9_000 }))
            .collect();
        let samples = [sample(0, 0, 10), sample(2_000_000, 0, 30)];
        let halves = periods(&delays, &samples, 2);
        let shown = halves.iter().map(|half| format!("{} {}", half.p50_ms, half.p99_ms));
        assert_eq!(shown.collect::<Vec<_>>(), ["1 1", "9 9"]);
        assert_eq!((halves[0].events_per_s, halves[0].used.process.memory_mb), (100, 10));
    }
}
