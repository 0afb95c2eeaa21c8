//! Replays of a campaign: an operator puts the last seconds of a bot into its queue again.
//!
//! A replay has a history of its own, in which its events are named like those of the bus. Each event
//! that was handled before the replay must be in it, in order, and as often as it is on the bus. The
//! second copy of an event may be anywhere behind the first one: a process that was frozen puts it there
//! when it goes on.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane_testkit::history::{Outcome, Record};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::load::{PIPELINES, Sent};
use super::verdict::{self, Course, Expected};
use super::watch::FirstDone;
use super::worker::now_us;
use crate::error::BenchError;

/// The name of the histories of replayed events.
pub(super) const HISTORY: &str = "replays";
/// A replay starts with what was published this long ago, µs, and ends before what is newest.
const BACK_US: u64 = 6_000_000;
const NEWEST_US: u64 = 300_000;
/// Events so near to the start or the end may be in the replay or not, µs.
const MARGIN_US: u64 = 100_000;
/// After this time the bus may have lost the first events, µs. It is less than `bus.retention`.
const TRIMMED_US: u64 = 20_000_000;

/// A replay that was acknowledged. All times are µs, see [`now_us`].
#[derive(Debug, Clone)]
pub(crate) struct Replayed {
    id: String,
    bot: usize,
    from: u64,
    to: u64,
    asked: u64,
    ended: u64,
}

/// What was found of all replays.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(crate) struct Replays {
    /// Number of replays that were acknowledged.
    pub(crate) acknowledged: usize,
    /// Number of events that had to be in one of them, and were.
    pub(crate) events: usize,
    /// Events in a replay that were handled again because their first holder never committed them.
    pub(crate) repeated: usize,
    /// Replays with events of which the bus may have copies. Of these the order of the other events is
    /// judged.
    pub(crate) with_copies: usize,
}

impl Replays {
    pub(crate) fn add(&mut self, other: &Self) {
        self.acknowledged += other.acknowledged;
        self.events += other.events;
        self.repeated += other.repeated;
        self.with_copies += other.with_copies;
    }
}

impl Replayed {
    /// One of the last seconds. `None`: the load has just started.
    pub(super) fn draw(bot: usize, since: u64) -> Option<Self> {
        let now = now_us();
        let (from, to) = ((now - BACK_US).max(since), now - NEWEST_US);
        let id = uuid::Uuid::now_v7().to_string();
        (from < to).then_some(Self { id, bot, from, to, asked: now, ended: now })
    }

    pub(super) fn ends(self) -> Self {
        Self { ended: now_us(), ..self }
    }

    /// The body of the request. A repeated one puts nothing twice.
    pub(super) fn request(&self, bot: &str) -> Value {
        json!({
            "id": self.id, "bot": bot, "from": wall(self.from), "to": wall(self.to), "limit": 1_000,
        })
    }

    fn lane(&self) -> String {
        format!("{}/{}-{}", self.id, PIPELINES[0].0, self.bot)
    }
}

/// A time as the API reads it.
fn wall(at: u64) -> String {
    let then = SystemClock.now().saturating_sub(Duration::from_micros(now_us() - at));
    let micros = i64::try_from(then.as_micros()).unwrap_or(i64::MAX);
    jiff::Timestamp::from_microsecond(micros).unwrap_or_default().to_string()
}

/// The bot of a replayed event in the history: each replay has an order of its own. `None`: the event
/// was not replayed.
pub(super) fn lane(bot: &str, event: &Event) -> Option<String> {
    let id = event.extension("fairlanereplay")?;
    Some(format!("{}/{bot}", id.as_str().unwrap_or_default()))
}

/// Compares replays with what was on the bus.
pub(super) fn judge(
    course: Course<'_>,
    replays: &[Replayed],
    sent: &[Sent],
    first_done: &FirstDone,
    violations: &mut Vec<String>,
) -> Result<Replays, BenchError> {
    let found = fates(course.directory)?;
    let (mut judged, mut expected) = (BTreeSet::new(), Vec::new());
    let mut report = Replays { acknowledged: replays.len(), ..Replays::default() };
    for replay in replays {
        let lane = replay.lane();
        let nothing = BTreeMap::new();
        let found = found.get(&lane).unwrap_or(&nothing);
        let of_bot =
            sent.iter().filter(|sent| sent.pipeline == 0 && usize::from(sent.bot) == replay.bot);
        let of_bot: BTreeMap<u32, &Sent> = of_bot.map(|sent| (sent.event, sent)).collect();
        let due = due(replay, &of_bot, first_done);
        report.events += due.len();
        let missing = due.iter().filter(|event| !found.contains_key(event)).count();
        if missing > 0 {
            violations
                .push(format!("replay {lane}: {missing} of {} events are missing", due.len()));
        }
        let (mut has_copies, mut put_once) = (false, Vec::<u64>::new());
        for (event, fate) in found {
            let Some(sent) = of_bot.get(event) else { continue };
            let times = fate.sequences.len();
            if sent.poison || fate.died() {
                continue;
            }
            has_copies |= sent.copies > 1;
            if times > sent.copies as usize {
                violations.push(format!("replay {lane}: {event} was put {times} times"));
            }
            if sent.copies == 1 {
                put_once.extend(fate.sequences.first());
            }
        }
        if has_copies {
            report.with_copies += 1;
            if !put_once.is_sorted() {
                violations.push(format!("replay {lane}: events without copies are out of order"));
            }
            continue;
        }
        expected.extend(found.keys().map(|&event| Expected {
            lane: lane.clone(),
            event,
            poison: of_bot.get(&event).is_some_and(|sent| sent.poison),
        }));
        judged.insert(lane);
    }
    let keep = |record: &Record<'_>| match record {
        Record::Sent { bot, .. } | Record::Handled { bot, .. } | Record::Committed { bot, .. } => {
            judged.contains(*bot)
        }
    };
    let history = verdict::history_of(course, HISTORY, &expected, violations, keep)?;
    if !history.is_clean() {
        violations.extend(history.examples.iter().take(3).map(|text| format!("replay: {text}")));
        if history.examples.is_empty() {
            violations.push(format!("replays: {history}"));
        }
    }
    report.repeated = history.duplicates_explained;
    Ok(report)
}

/// The events that must be in a replay: they were copied before it, and still on the bus.
fn due(replay: &Replayed, of_bot: &BTreeMap<u32, &Sent>, first_done: &FirstDone) -> Vec<u32> {
    if replay.ended - replay.asked > TRIMMED_US {
        return Vec::new();
    }
    let is_due = |sent: &&&Sent| {
        sent.asked >= replay.from + MARGIN_US
            && sent.at + MARGIN_US <= replay.to
            && first_done.at(&sent.lane(), sent.event).is_some_and(|done| done < replay.asked)
    };
    of_bot.values().filter(is_due).map(|sent| sent.event).collect()
}

/// What happened to a replayed event.
#[derive(Debug, Default)]
struct Fate {
    sequences: BTreeSet<u64>,
    done: Option<u64>,
    /// When it was removed from its queue for the first time.
    removed: Option<u64>,
}

impl Fate {
    /// Whether it was a dead letter, which may get another sequence when it is put back.
    fn died(&self) -> bool {
        self.removed.is_some_and(|removed| self.done.is_none_or(|done| removed < done))
    }
}

/// The replayed events by lane.
fn fates(directory: &Path) -> Result<BTreeMap<String, BTreeMap<u32, Fate>>, BenchError> {
    let mut found: BTreeMap<String, BTreeMap<u32, Fate>> = BTreeMap::new();
    let earliest = |one: Option<u64>, other: u64| Some(one.map_or(other, |one| one.min(other)));
    for file in verdict::histories(directory, HISTORY)? {
        for line in String::from_utf8_lossy(&fs::read(file)?).lines() {
            match Record::parse(line) {
                Some(Record::Handled { bot, event, sequence, ended, outcome, .. }) => {
                    let of_lane = found.entry(bot.to_owned()).or_default();
                    let fate = of_lane.entry(event).or_default();
                    fate.sequences.insert(sequence);
                    if outcome == Outcome::Done {
                        fate.done = earliest(fate.done, ended);
                    }
                }
                Some(Record::Committed { bot, events, at, .. }) => {
                    let of_lane = found.entry(bot.to_owned()).or_default();
                    for &event in &*events {
                        let fate = of_lane.entry(event).or_default();
                        fate.removed = earliest(fate.removed, at);
                    }
                }
                _ => {}
            }
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use std::fmt::Write as _;

    use super::super::verdict::tests::course;
    use super::*;

    const SECOND: u64 = 1_000_000;

    fn sent(event: u32, copies: u32) -> Sent {
        let at = (10 + u64::from(event)) * SECOND;
        Sent { pipeline: 0, bot: 3, key: 0, event, poison: false, asked: at, at, copies }
    }

    /// The violations of a replay of the events 0 to 2, with these positions and sequences in its history.
    fn violations(handled: &[(u32, u64)], copies: [u32; 3]) -> Vec<String> {
        let directory = tempfile::tempdir().unwrap();
        let replay = Replayed {
            id: "r".to_owned(),
            bot: 3,
            from: 9 * SECOND,
            to: 14 * SECOND,
            asked: 15 * SECOND,
            ended: 15 * SECOND,
        };
        let sent: Vec<_> = (0..).zip(copies).map(|(event, copies)| sent(event, copies)).collect();
        let mut first_done = FirstDone::default();
        let mut text = String::new();
        for (place, &(event, sequence)) in handled.iter().enumerate() {
            let started = 20 * SECOND + place as u64;
            let lane = replay.lane();
            let _ = writeln!(text, "H\t{event}\t{sequence}\t1\t{started}\t{started}\t+\t1\t{lane}");
        }
        for event in &sent {
            first_done.note(
                &Record::parse(&format!(
                    "H\t{}\t1\t1\t{}\t{}\t+\t1\tplain-3",
                    event.event, event.at, event.at
                ))
                .unwrap(),
            );
        }
        fs::write(directory.path().join("replays-1.history"), text).unwrap();
        let mut violations = Vec::new();
        let course = course(directory.path());
        judge(course, &[replay], &sent, &first_done, &mut violations).unwrap();
        violations
    }

    #[test]
    fn a_whole_replay_in_order_is_right() {
        assert_eq!(violations(&[(0, 5), (1, 6), (2, 7)], [1; 3]), [""; 0]);
    }

    #[test]
    fn a_missing_a_reordered_and_a_repeated_event_are_found() {
        assert_eq!(violations(&[(0, 5), (2, 7)], [1; 3]).len(), 1);
        assert!(!violations(&[(1, 6), (0, 5), (2, 7)], [1; 3]).is_empty());
        assert!(violations(&[(0, 5), (1, 6), (1, 7), (2, 8)], [1; 3])[0].contains("put 2 times"));
    }

    #[test]
    fn a_dead_letter_may_have_another_sequence_when_it_is_put_back() {
        let fate = |done, removed| Fate { done, removed, ..Fate::default() };
        assert!(fate(Some(9), Some(5)).died() && fate(None, Some(5)).died());
        assert!(!fate(Some(5), Some(9)).died() && !fate(Some(5), None).died());
    }

    #[test]
    fn an_event_with_a_copy_on_the_bus_may_be_there_twice() {
        assert_eq!(violations(&[(0, 5), (1, 6), (2, 7), (0, 8), (1, 9), (2, 10)], [2; 3]), [""; 0]);
    }

    #[test]
    fn of_an_event_with_copies_only_the_last_one_may_be_in_the_time_of_the_replay() {
        assert_eq!(violations(&[(1, 5), (0, 6), (2, 7)], [2, 1, 1]), [""; 0]);
        let wrong = violations(&[(2, 5), (0, 6), (1, 7)], [2, 1, 1]);
        assert!(wrong.len() == 1 && wrong[0].contains("out of order"), "{wrong:?}");
    }

    #[test]
    fn a_time_of_the_past_is_written_as_the_api_reads_it() {
        let then = wall(now_us() - SECOND);
        let then: jiff::Timestamp = then.parse().unwrap();
        let ago = jiff::Timestamp::now().duration_since(then).as_millis();
        assert!((900..5_000).contains(&ago), "{ago}");
    }
}
