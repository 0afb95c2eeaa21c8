//! The verdict of a campaign: which promises did not hold.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;

use fairlane_testkit::history::{Checker, Outcome, Record, Report as History};
use serde::{Deserialize, Serialize};

use super::hooks::Called;
use super::letters::PutBack;
use super::load::{Acknowledged, Due, PIPELINES, Released, Sent};
use super::watch::FirstDone;
use super::world::LIMIT;
use crate::error::BenchError;

/// A window of the rate of a bot, µs.
const WINDOW_US: u64 = 10_000_000;
/// The pipelines whose handlers are behind HTTP.
const PUSHED: [&str; 2] = ["pushed", "leased"];

/// The failures of an event that became a dead letter.
#[derive(Clone, Copy)]
struct Died {
    first: u64,
    last: u64,
    /// The newest one.
    fence: u64,
}

/// What was found of one pipeline.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(crate) struct Pipeline {
    pub(crate) name: String,
    pub(crate) sent: usize,
    pub(crate) handled: usize,
    pub(crate) lost: usize,
    pub(crate) reordered: usize,
    /// Completions that were accepted beside a newer lease.
    pub(crate) stale_commits: usize,
    /// Handlings under an older fence than an earlier one, also those that are no fault.
    pub(crate) fence_regressions: usize,
    /// Events handled again although they were committed.
    pub(crate) repeated_after_commit: usize,
    /// Events handled again because the first holder never committed them.
    pub(crate) repeated: usize,
    pub(crate) dead_letters_unhandled: usize,
}

impl Pipeline {
    /// Adds the counts of another day.
    pub(crate) fn add(&mut self, day: &Self) {
        self.sent += day.sent;
        self.handled += day.handled;
        self.lost += day.lost;
        self.reordered += day.reordered;
        self.stale_commits += day.stale_commits;
        self.fence_regressions += day.fence_regressions;
        self.repeated_after_commit += day.repeated_after_commit;
        self.repeated += day.repeated;
        self.dead_letters_unhandled += day.dead_letters_unhandled;
    }
}

/// An event that must have been handled.
pub(super) struct Expected {
    pub(super) lane: String,
    pub(super) event: u32,
    /// Whether it fails until `cured`.
    pub(super) poison: bool,
}

/// Where the histories are, and what else happened.
#[derive(Clone, Copy)]
pub(super) struct Course<'a> {
    pub(super) directory: &'a Path,
    /// When events ceased to fail on purpose.
    pub(super) cured: u64,
    pub(super) released: &'a [Released],
    /// The dead letters that were put back, by pipeline.
    pub(super) put_back: &'a BTreeMap<String, Vec<PutBack>>,
}

/// Reads the histories of all pipelines.
pub(super) fn pipelines(
    course: Course<'_>,
    sent: &[Sent],
    first_done: &mut FirstDone,
    violations: &mut Vec<String>,
) -> Result<Vec<Pipeline>, BenchError> {
    let mut all = Vec::new();
    for (place, (pipeline, ..)) in PIPELINES.into_iter().enumerate() {
        let expected: Vec<_> = sent
            .iter()
            .filter(|event| usize::from(event.pipeline) == place)
            .map(|sent| Expected { lane: sent.lane(), event: sent.event, poison: sent.poison })
            .collect();
        let mut handled: BTreeMap<String, Vec<u64>> = BTreeMap::new();
        let found = history_of(course, pipeline, &expected, violations, |record| {
            first_done.note(record);
            if pipeline == "limited"
                && let Record::Handled { bot, started, .. } = *record
            {
                handled.entry(bot.to_owned()).or_default().push(started);
            }
            true
        })?;
        too_fast(&handled, violations);
        all.push(judged(pipeline, &found, violations));
    }
    Ok(all)
}

/// Reads the histories of this name, and judges those of their records that `keep` keeps.
pub(super) fn history_of(
    Course { directory, cured, released, put_back }: Course<'_>,
    name: &str,
    expected: &[Expected],
    violations: &mut Vec<String>,
    mut keep: impl FnMut(&Record<'_>) -> bool,
) -> Result<History, BenchError> {
    let mut checker = Checker::new();
    if PUSHED.contains(&name) {
        checker = checker.calls_may_arrive_late();
    }
    let mut lanes = BTreeSet::new();
    for Expected { lane, event, .. } in expected {
        checker.add(&Record::Sent { bot: lane, event: *event });
        lanes.insert(lane.as_str());
    }
    for Released { bot, from, until } in released {
        // A lane is the bot, with its key behind or its replay before it.
        for lane in lanes.iter().filter(|lane| lane.split('/').any(|part| part == bot)) {
            checker.released(lane, *from, *until);
        }
    }
    for PutBack { lane, event, at, .. } in put_back.get(name).into_iter().flatten() {
        checker.put_back(lane, *event, *at);
    }
    // Events that fail on purpose become dead letters, and bots go on. It is not known when: the
    // completion that did it may have no reply. The last failure is taken for it, and the first one
    // for its request, so that no lease in between makes it stale. When they are put back later,
    // they may fail for another reason, which does not count.
    let poison = expected.iter().filter(|expected| expected.poison);
    let poison: BTreeSet<_> = poison.map(|event| (event.lane.as_str(), event.event)).collect();
    let mut died: BTreeMap<(String, u32), Died> = BTreeMap::new();
    for file in histories(directory, name)? {
        let bytes = fs::read(&file)?;
        let complete = bytes.iter().rposition(|&byte| byte == b'\n').map_or(0, |end| end + 1);
        for line in String::from_utf8_lossy(&bytes[..complete]).lines() {
            let Some(record) = Record::parse(line) else {
                violations.push(format!("{}: no record: {line:?}", file.display()));
                continue;
            };
            if !keep(&record) {
                continue;
            }
            checker.add(&record);
            if let Record::Handled { bot, event, fence, ended, outcome: Outcome::Failed, .. } =
                record
                && ended <= cured
                && poison.contains(&(bot, event))
            {
                let first = Died { first: ended, last: ended, fence };
                let died = died.entry((bot.to_owned(), event)).or_insert(first);
                died.first = died.first.min(ended);
                (died.last, died.fence) = (died.last.max(ended), died.fence.max(fence));
            }
        }
    }
    for ((bot, event), &Died { first: asked, last: at, fence }) in &died {
        let events = Cow::Owned(vec![*event]);
        checker.add(&Record::Committed { bot, events, fence, asked, at, process: 0 });
    }
    Ok(checker.report())
}

fn judged(pipeline: &'static str, history: &History, violations: &mut Vec<String>) -> Pipeline {
    if !history.is_clean() {
        let examples = history.examples.iter().take(3);
        violations.extend(examples.map(|example| format!("{pipeline}: {example}")));
        if history.examples.is_empty() {
            violations.push(format!("{pipeline}: {history}"));
        }
    }
    Pipeline {
        name: pipeline.to_owned(),
        sent: history.sent,
        handled: history.handled,
        lost: history.lost,
        reordered: history.reordered,
        stale_commits: history.stale_commits,
        fence_regressions: history.fence_regressions + history.late,
        repeated_after_commit: history.duplicates_unexplained,
        repeated: history.duplicates_explained,
        dead_letters_unhandled: history.unhandled,
    }
}

/// The files of the histories of this name.
pub(super) fn histories(
    directory: &Path,
    name: &str,
) -> Result<Vec<std::path::PathBuf>, BenchError> {
    let (start, end) = (format!("{name}-"), ".history");
    let mut found = Vec::new();
    for entry in fs::read_dir(directory)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.starts_with(&start) && name.ends_with(end) {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

/// A bot may be handled `rate` times a second, with a burst of one second. What a killed process had
/// taken counts again.
fn too_fast(handled: &BTreeMap<String, Vec<u64>>, violations: &mut Vec<String>) {
    let seconds = usize::try_from(WINDOW_US / 1_000_000).unwrap_or(1);
    // The burst, and one slice of a process that was killed or frozen.
    let most = LIMIT as usize * (seconds + 3);
    for (bot, times) in handled {
        let mut times = times.clone();
        times.sort_unstable();
        let over = times.iter().enumerate().find(|&(first, start)| {
            times.get(first + most).is_some_and(|last| last - start < WINDOW_US)
        });
        if over.is_some() {
            violations
                .push(format!("limited: {bot} was handled more than {most} times in {seconds} s"));
        }
    }
}

/// Notifications that were never sent, or too early. Returns how many calls were repetitions.
pub(crate) fn notifications(
    due: &[Due],
    called: &BTreeMap<String, Called>,
    clocks_were_set: bool,
    violations: &mut Vec<String>,
) -> u64 {
    let (mut missing, mut early) = (0, 0);
    for one in due {
        match called.get(&one.id) {
            None => missing += 1,
            Some(called) if called.first_ms < one.earliest_ms && !clocks_were_set => early += 1,
            Some(_) => {}
        }
    }
    if missing > 0 {
        violations.push(format!("notifications: {missing} of {} were not sent", due.len()));
    }
    if early > 0 {
        violations.push(format!("notifications: {early} of {} came too early", due.len()));
    }
    let ids: BTreeSet<_> = due.iter().map(|one| &one.id).collect();
    let times = called.iter().filter(|(id, _)| ids.contains(id));
    times.map(|(_, called)| u64::from(called.times.saturating_sub(1))).sum()
}

/// The expected totals per bot: views over HTTP, and what the rules count.
pub(crate) fn totals(acknowledged: &Acknowledged) -> BTreeMap<String, BTreeMap<String, u64>> {
    let mut all: BTreeMap<String, BTreeMap<String, u64>> = BTreeMap::new();
    for ((bot, ad), views) in &acknowledged.views {
        all.entry(bot.clone()).or_default().insert(ad.clone(), *views);
    }
    for (bot, sales) in &acknowledged.sales {
        let ads = all.entry(bot.clone()).or_default();
        for ad in ["made", "seen", "later"] {
            ads.insert(ad.to_owned(), *sales);
        }
    }
    all
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    #[test]
    fn only_a_push_under_way_may_arrive_after_one_of_the_next_lease() {
        let directory = tempfile::tempdir().unwrap();
        // The next lease handles and completes the event, and then the older push arrives.
        let lines =
            "H\t0\t0\t2\t20\t21\t+\t0\tb\nC\t2\t22\t23\t0\t0\tb\nH\t0\t0\t1\t30\t31\t+\t0\tb\n";
        let judge = |pipeline| {
            fs::write(directory.path().join(format!("{pipeline}-0.history")), lines).unwrap();
            let course = course(directory.path());
            let expected = [Expected { lane: "b".to_owned(), event: 0, poison: false }];
            let mut found = Vec::new();
            let history = history_of(course, pipeline, &expected, &mut found, |_| true).unwrap();
            assert_eq!(judged(pipeline, &history, &mut found).fence_regressions, 1);
            found
        };
        assert_eq!(judge("plain").len(), 1);
        assert_eq!((judge("pushed"), judge("leased")), (Vec::new(), Vec::new()));
    }

    pub(in super::super) fn course(directory: &Path) -> Course<'_> {
        static NONE: BTreeMap<String, Vec<PutBack>> = BTreeMap::new();
        Course { directory, cured: u64::MAX, released: &[], put_back: &NONE }
    }

    fn due(id: &str, earliest_ms: u64) -> Due {
        Due { id: id.to_owned(), earliest_ms }
    }

    #[test]
    fn a_missing_and_an_early_notification_are_found() {
        let called = [("a", 2, 100), ("b", 1, 99)];
        let called =
            called.map(|(id, times, first_ms)| (id.to_owned(), Called { times, first_ms }));
        let called = BTreeMap::from(called);
        let mut found = Vec::new();
        assert_eq!(notifications(&[due("a", 100)], &called, false, &mut found), 1);
        assert!(found.is_empty());
        notifications(&[due("b", 100), due("c", 0)], &called, false, &mut found);
        assert_eq!(found.len(), 2, "{found:?}");
        found.clear();
        notifications(&[due("b", 100)], &called, true, &mut found);
        assert!(found.is_empty(), "the clocks of the processes were set");
    }

    #[test]
    fn a_bot_above_its_rate_is_found() {
        let mut found = Vec::new();
        let at_rate: Vec<u64> =
            (0..500).map(|event| event * 1_000_000 / u64::from(LIMIT)).collect();
        too_fast(&BTreeMap::from([("b".to_owned(), at_rate)]), &mut found);
        assert!(found.is_empty(), "{found:?}");
        let twice: Vec<u64> = (0..500).map(|event| event * 500_000 / u64::from(LIMIT)).collect();
        too_fast(&BTreeMap::from([("b".to_owned(), twice)]), &mut found);
        assert_eq!(found.len(), 1);
    }
}
