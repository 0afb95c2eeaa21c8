//! The judgement of a campaign: what happened to the acknowledged events, for all systems alike.
//!
//! Every worker appends a line to its history when a handling starts, and another one when it ends. A
//! kill thus loses no record. The producer appends a line for each event that was acknowledged.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fairlane_testkit::history::{Checker, Outcome, Record};

use crate::error::BenchError;

/// An event: its tenant, and its position among the events of the tenant.
pub(super) type Place = (u32, u32);

/// An event that was acknowledged.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Sent {
    pub(super) place: Place,
    /// When it was due, µs.
    pub(super) due: u64,
}

/// A handling of an event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Handling {
    pub(super) place: Place,
    pub(super) process: u32,
    pub(super) started: u64,
    /// When it ended, or when its process was killed.
    pub(super) until: u64,
    /// `false`: its process was killed before.
    pub(super) has_ended: bool,
}

/// What happened in a campaign.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Verdict {
    pub(super) acknowledged: usize,
    /// Never handled to the end, although a later event of the tenant was.
    pub(super) lost: usize,
    /// First handled before an earlier event of the tenant, or while it waited to be handled again.
    pub(super) reordered: usize,
    /// Handlings that started while another one of the tenant was running.
    pub(super) overlapping: usize,
    /// Handlings that started after one of the same event had ended.
    pub(super) repeated: usize,
    /// Tenants whose last event was not handled.
    pub(super) stranded: usize,
    /// The events that wait in them.
    pub(super) waiting: usize,
    /// From the time when an event of a quiet tenant was due to its first handling, µs, ascending.
    pub(super) waits: Vec<u32>,
}

/// The acknowledged events in the history of the producer.
pub(super) fn sent(text: &str) -> Vec<Sent> {
    let lines = text.lines().map(|line| fields::<4>(line.strip_prefix("S\t")?));
    // The last line may be incomplete.
    lines
        .flatten()
        .map(|[tenant, position, due, _]| Sent { place: (small(tenant), small(position)), due })
        .collect()
}

/// The handlings in the history of a process that was killed at `end`.
pub(super) fn handlings(text: &str, process: u32, end: u64) -> Vec<Handling> {
    let mut handlings: Vec<Handling> = Vec::new();
    // Those that run, by event. A process may handle an event twice at a time.
    let mut running: BTreeMap<Place, Vec<usize>> = BTreeMap::new();
    for line in text.lines() {
        let Some((kind, rest)) = line.split_once('\t') else { continue };
        let Some([tenant, position, at]) = fields::<3>(rest) else { continue };
        let place = (small(tenant), small(position));
        if kind == "B" {
            running.entry(place).or_default().push(handlings.len());
            let until = end.max(at);
            handlings.push(Handling { place, process, started: at, until, has_ended: false });
        } else if let Some(first) = running.get_mut(&place).filter(|first| !first.is_empty()) {
            let handling = &mut handlings[first.remove(0)];
            (handling.until, handling.has_ended) = (at, true);
        }
    }
    handlings
}

/// The fields of a line, without one that a kill interrupted.
fn fields<const N: usize>(text: &str) -> Option<[u64; N]> {
    let numbers: Option<Vec<u64>> = text.split('\t').map(|field| field.parse().ok()).collect();
    numbers?.try_into().ok()
}

fn small(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Reads a file that may not exist yet.
pub(super) fn read(path: &Path) -> Result<String, BenchError> {
    match std::fs::read(path) {
        Ok(bytes) => {
            // Without the line that is being written.
            let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |end| end + 1);
            Ok(String::from_utf8_lossy(&bytes[..whole]).into_owned())
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(String::new()),
        Err(error) => Err(error.into()),
    }
}

impl Verdict {
    /// Judges all handlings. The tenants before `busy` are busy, the others are quiet.
    pub(super) fn of(sent: &[Sent], handlings: &[Handling], busy: u32) -> Self {
        let mut handlings = handlings.to_vec();
        handlings.sort_by_key(|handling| (handling.started, handling.place));
        let mut verdict = Self { acknowledged: sent.len(), ..Self::default() };
        verdict.judge_times(&handlings);
        let unhandled = verdict.judge_events(sent, &handlings);
        let mut first_start: BTreeMap<Place, u64> = BTreeMap::new();
        let mut latest: BTreeMap<u32, u32> = BTreeMap::new();
        for handling in &handlings {
            first_start.entry(handling.place).or_insert(handling.started);
            if handling.has_ended {
                let latest = latest.entry(handling.place.0).or_insert(handling.place.1);
                *latest = handling.place.1.max(*latest);
            }
        }
        let mut stranded: Vec<u32> = Vec::new();
        for (tenant, position) in unhandled {
            if latest.get(&tenant).is_some_and(|latest| position < *latest) {
                verdict.lost += 1;
            } else {
                verdict.waiting += 1;
                stranded.push(tenant);
            }
        }
        stranded.sort_unstable();
        stranded.dedup();
        verdict.stranded = stranded.len();
        let quiet = sent.iter().filter(|sent| sent.place.0 >= busy);
        let waits = quiet.filter_map(|sent| {
            let started = first_start.get(&sent.place)?;
            Some(small(started.saturating_sub(sent.due)))
        });
        verdict.waits = waits.collect();
        verdict.waits.sort_unstable();
        verdict
    }

    /// Overlapping and repeated handlings, of handlings in the order of their starts.
    fn judge_times(&mut self, handlings: &[Handling]) {
        let mut until: BTreeMap<u32, u64> = BTreeMap::new();
        let mut ended: BTreeMap<Place, u64> = BTreeMap::new();
        for handling in handlings {
            let until = until.entry(handling.place.0).or_default();
            self.overlapping += usize::from(handling.started < *until);
            *until = handling.until.max(*until);
            let ends = ended.get(&handling.place);
            self.repeated += usize::from(ends.is_some_and(|end| *end <= handling.started));
            if handling.has_ended {
                let end = ended.entry(handling.place).or_insert(handling.until);
                *end = handling.until.min(*end);
            }
        }
    }

    /// The order, and the acknowledged events that were not handled to the end.
    fn judge_events(&mut self, sent: &[Sent], handlings: &[Handling]) -> Vec<Place> {
        let mut checker = Checker::new();
        let mut left: BTreeSet<Place> = BTreeSet::new();
        for Sent { place, .. } in sent {
            checker.add(&Record::Sent { bot: &place.0.to_string(), event: place.1 });
            left.insert(*place);
        }
        for handling in handlings {
            if handling.has_ended {
                left.remove(&handling.place);
            }
            checker.add(&Record::Handled {
                bot: &handling.place.0.to_string(),
                event: handling.place.1,
                sequence: handling.place.1.into(),
                // The peers have none, and overlaps are judged above.
                fence: 1,
                started: handling.started,
                ended: handling.until,
                outcome: if handling.has_ended { Outcome::Done } else { Outcome::Failed },
                process: handling.process,
            });
        }
        self.reordered = checker.report().reordered;
        left.into_iter().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Events 0 to 9 of the tenants 0 and 1, one after the other, 2 µs each, in process 1.
    fn clean() -> (Vec<Sent>, Vec<Handling>) {
        let places = (0..10).flat_map(|position| [(0, position), (1, position)]);
        let events = places.zip(0..).map(|(place, number)| {
            let started = 100 + 10 * number;
            let handling =
                Handling { place, process: 1, started, until: started + 2, has_ended: true };
            (Sent { place, due: started - 5 }, handling)
        });
        events.unzip()
    }

    fn verdict(change: impl FnOnce(&mut Vec<Handling>)) -> Verdict {
        let (sent, mut handlings) = clean();
        change(&mut handlings);
        Verdict::of(&sent, &handlings, 1)
    }

    fn at(handlings: &mut [Handling], place: Place) -> &mut Handling {
        handlings.iter_mut().find(|handling| handling.place == place).unwrap()
    }

    #[test]
    fn a_clean_history_has_no_mistakes_and_the_waits_of_the_quiet_tenant() {
        let clean = verdict(|_| {});
        let expected = Verdict { acknowledged: 20, waits: vec![5; 10], ..Verdict::default() };
        assert_eq!(clean, expected);
    }

    #[test]
    fn a_missing_event_is_lost_if_its_tenant_has_gone_on() {
        let found = verdict(|all| all.retain(|handling| handling.place != (0, 4)));
        assert_eq!((found.lost, found.stranded, found.reordered), (1, 0, 0));
        // A handling that a kill interrupted is none, and the next event overtook it.
        let found = verdict(|all| at(all, (0, 4)).has_ended = false);
        assert_eq!((found.lost, found.stranded, found.overlapping), (1, 0, 0));
    }

    #[test]
    fn a_tenant_whose_last_events_wait_is_stranded() {
        let found = verdict(|all| all.retain(|handling| handling.place < (1, 7)));
        assert_eq!((found.lost, found.stranded, found.waiting), (0, 1, 3));
        let found = verdict(Vec::clear);
        assert_eq!((found.lost, found.stranded, found.waiting), (0, 2, 20));
    }

    #[test]
    fn an_event_that_overtakes_an_earlier_one_is_reordered() {
        let found = verdict(|all| {
            let times = [(0, 4), (0, 5)].map(|place| *at(all, place));
            for (place, times) in [((0, 5), times[0]), ((0, 4), times[1])] {
                *at(all, place) = Handling { place, ..times };
            }
        });
        assert_eq!((found.reordered, found.overlapping, found.repeated), (1, 0, 0));
    }

    #[test]
    fn an_event_that_overtakes_an_interrupted_one_is_reordered() {
        let found = verdict(|all| {
            at(all, (0, 4)).has_ended = false;
            let after = at(all, (0, 5)).until + 1;
            all.push(Handling {
                process: 2,
                started: after,
                until: after + 2,
                has_ended: true,
                place: (0, 4),
            });
        });
        assert_eq!((found.reordered, found.lost, found.repeated), (1, 0, 0));
    }

    #[test]
    fn handlings_beside_another_one_overlap_and_those_of_other_tenants_do_not() {
        // It is frozen while another worker handles the next two events.
        let found = verdict(|all| at(all, (0, 4)).until = at(all, (0, 6)).until + 1);
        assert_eq!((found.overlapping, found.reordered, found.repeated), (2, 0, 0));
    }

    #[test]
    fn an_event_that_is_handled_again_is_repeated_only_after_an_end() {
        let found = verdict(|all| {
            let again = at(all, (1, 3));
            let again =
                Handling { process: 2, started: again.until, until: again.until + 2, ..*again };
            all.push(again);
        });
        assert_eq!((found.repeated, found.overlapping), (1, 0));
        let found = verdict(|all| {
            let again = at(all, (1, 3));
            let again = Handling { process: 2, started: again.started + 1, ..*again };
            all.push(again);
        });
        assert_eq!((found.repeated, found.overlapping), (0, 1));
    }

    #[test]
    fn lines_are_read_without_one_that_a_kill_interrupted() {
        let text = "B\t3\t0\t100\nE\t3\t0\t120\nB\t3\t1\t130\nB\t4";
        let first =
            Handling { place: (3, 0), process: 2, started: 100, until: 120, has_ended: true };
        let second =
            Handling { place: (3, 1), started: 130, until: 150, has_ended: false, ..first };
        assert_eq!(handlings(text, 2, 150), [first, second]);
        assert_eq!(sent("S\t3\t0\t90\t95\nS\t3\t1"), [Sent { place: (3, 0), due: 90 }]);
    }
}
