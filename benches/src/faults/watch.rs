//! What a campaign measures beside its verdict: resources, log lines, keys, and delays by fault.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use fairlane_testkit::history::{Outcome, Record};
use redis::aio::MultiplexedConnection;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::inject::Injected;
use super::load::{PIPELINES, Sent};
use crate::error::BenchError;

/// What a process has in use.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Resources {
    /// Resident memory, MB.
    pub(crate) memory_mb: u64,
    pub(crate) descriptors: u64,
    pub(crate) threads: u64,
}

impl Resources {
    /// `None` if the process has ended.
    pub(crate) fn of(id: u32) -> Option<Self> {
        let status = fs::read_to_string(format!("/proc/{id}/status")).ok()?;
        let number = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name))?;
            line.split_whitespace().next()?.parse::<u64>().ok()
        };
        let descriptors = fs::read_dir(format!("/proc/{id}/fd")).ok()?.count();
        Some(Self {
            memory_mb: number("VmRSS:")? / 1024,
            descriptors: u64::try_from(descriptors).unwrap_or(u64::MAX),
            threads: number("Threads:")?,
        })
    }

    pub(crate) fn max(self, other: Self) -> Self {
        Self {
            memory_mb: self.memory_mb.max(other.memory_mb),
            descriptors: self.descriptors.max(other.descriptors),
            threads: self.threads.max(other.threads),
        }
    }
}

/// The log lines of all processes by level, and the first panics.
pub(crate) fn log_lines(
    directory: &Path,
    places: usize,
) -> Result<(BTreeMap<String, u64>, Vec<String>), BenchError> {
    let (mut levels, mut panics) = (BTreeMap::new(), Vec::new());
    for place in 0..places {
        let text = fs::read(super::world::log_file(directory, place))?;
        for line in String::from_utf8_lossy(&text).lines() {
            let line: &str = line;
            let parsed: Value = serde_json::from_str(line).unwrap_or_default();
            let level = parsed["level"].as_str().unwrap_or("none").to_lowercase();
            *levels.entry(level).or_default() += 1;
            // A killed process leaves an incomplete line. A process that starts while Redis is
            // unavailable says so, and ends.
            let explained =
                line.starts_with('{') || (line.starts_with("error: ") && line.contains("Redis"));
            let is_odd = line.contains("panicked") || (parsed.is_null() && !explained);
            if is_odd && panics.len() < 10 {
                panics.push(line.chars().take(300).collect());
            }
        }
    }
    Ok((levels, panics))
}

/// When each event was acknowledged, and of which pipeline and bot it is, a line each.
pub(crate) fn sent_lines(sent: &[Sent]) -> String {
    let mut lines = String::new();
    for event in sent {
        let pipeline = PIPELINES[usize::from(event.pipeline)].0;
        let _ = writeln!(lines, "{}\t{pipeline}\t{}\t{}", event.at, event.event, event.lane());
    }
    lines
}

/// When each fault started, which it was, at which process, and how long it lasted in ms.
pub(crate) fn fault_lines(faults: &[Injected]) -> String {
    let mut lines = String::new();
    for Injected { planned, started } in faults {
        let (fault, process) = (planned.fault.name(), planned.process);
        let _ = writeln!(lines, "{started}\t{fault}\t{process}\t{}", planned.lasts_ms);
    }
    lines
}

/// The keys by kind, with numbers and names of bots replaced.
pub(crate) async fn keys(
    primaries: &mut [MultiplexedConnection],
) -> Result<BTreeMap<String, u64>, BenchError> {
    let mut kinds = BTreeMap::new();
    for primary in primaries {
        let mut cursor = 0_u64;
        loop {
            let (next, keys): (u64, Vec<Vec<u8>>) =
                redis::cmd("SCAN").arg(cursor).arg("COUNT").arg(1_000).query_async(primary).await?;
            for key in keys {
                *kinds.entry(kind(&String::from_utf8_lossy(&key))).or_default() += 1;
            }
            if next == 0 {
                break;
            }
            cursor = next;
        }
    }
    Ok(kinds)
}

/// `fl:{plain:3}:q:plain-7` is of the kind `fl:{plain}:q`.
fn kind(key: &str) -> String {
    let Some((before, rest)) = key.split_once('{') else { return first_words(key) };
    let Some((tag, after)) = rest.split_once('}') else { return first_words(key) };
    let tag: String = tag.split(':').next().unwrap_or_default().to_owned();
    let name = after.trim_start_matches(':').split(':').next().unwrap_or_default();
    format!("{before}{{{tag}}}:{name}")
}

fn first_words(key: &str) -> String {
    let words: Vec<_> = key.split(':').take(2).collect();
    words.join(":")
}

/// The largest delay of an event that was sent while a fault of this kind was the last one that had
/// started, ms.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct Recovery {
    pub(crate) fault: String,
    pub(crate) times: usize,
    pub(crate) median_ms: u64,
    pub(crate) max_ms: u64,
}

/// When each event was done for the first time.
#[derive(Debug, Default)]
pub(crate) struct FirstDone(BTreeMap<(String, u32), u64>);

impl FirstDone {
    pub(crate) fn note(&mut self, record: &Record<'_>) {
        if let Record::Handled { bot, event, ended, outcome: Outcome::Done, .. } = *record {
            let first = self.0.entry((bot.to_owned(), event)).or_insert(ended);
            *first = ended.min(*first);
        }
    }

    /// When this event was done, see [`now_us`].
    ///
    /// [`now_us`]: super::worker::now_us
    pub(crate) fn at(&self, lane: &str, event: u32) -> Option<u64> {
        self.0.get(&(lane.to_owned(), event)).copied()
    }

    /// When each event of the pipeline `plain` was acknowledged, and how much later it was done, both
    /// in µs. Without events that fail on purpose.
    pub(crate) fn delays(&self, sent: &[Sent]) -> Vec<(u64, u64)> {
        let plain =
            |event: &&Sent| PIPELINES[usize::from(event.pipeline)].0 == "plain" && !event.poison;
        let delay = |event: &Sent| {
            let done = self.0.get(&(event.lane(), event.event))?;
            Some((event.at, done.saturating_sub(event.at)))
        };
        sent.iter().filter(plain).filter_map(delay).collect()
    }

    /// The delays by kind of fault. Only of the pipeline `plain`, and without events that fail on
    /// purpose: others wait for other reasons, too.
    pub(crate) fn recoveries(&self, sent: &[Sent], faults: &[Injected]) -> Vec<Recovery> {
        let mut faults: Vec<_> = faults.to_vec();
        faults.sort_by_key(|fault| fault.started);
        let mut worst = vec![0_u64; faults.len()];
        for (at, delay) in self.delays(sent) {
            let before = faults.partition_point(|fault| fault.started <= at);
            if before > 0 {
                worst[before - 1] = worst[before - 1].max(delay / 1_000);
            }
        }
        let mut kinds: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        for (fault, worst) in faults.iter().zip(worst) {
            kinds.entry(fault.planned.fault.name()).or_default().push(worst);
        }
        let recovery = |(fault, mut delays): (String, Vec<u64>)| {
            delays.sort_unstable();
            Recovery {
                fault,
                times: delays.len(),
                median_ms: delays[delays.len() / 2],
                max_ms: delays.last().copied().unwrap_or_default(),
            }
        };
        kinds.into_iter().map(recovery).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_one_kind_count_together() {
        assert_eq!(kind("fl:{plain:3}:q:plain-7"), "fl:{plain}:q");
        assert_eq!(kind("fl:{plain:3}:meta"), "fl:{plain}:meta");
        assert_eq!(kind("fairlane:events"), "fairlane:events");
        assert_eq!(kind("fl:read:fairlane:events"), "fl:read");
    }

    #[test]
    fn this_process_has_memory_descriptors_and_threads() {
        let own = Resources::of(std::process::id()).unwrap();
        assert!(own.memory_mb > 0 && own.descriptors > 0 && own.threads > 0, "{own:?}");
        assert!(Resources::of(u32::MAX).is_none());
    }
}
