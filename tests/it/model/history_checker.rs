//! Tests of the checker itself. Clean histories pass, with every accident that the promise allows,
//! and a fault put into one is found.

use std::borrow::Cow;
use std::io::Write;

use rand::rngs::StdRng;
use rand::{Rng, SeedableRng};

use crate::support::history::{Checker, HistoryError, HistoryLog, Outcome, Record, Report};

mod operators;

const BOTS: [&str; 5] = ["shop", "a b", "*", "日本", "|||"];

fn judge(records: &[Record<'_>]) -> Report {
    let mut checker = Checker::new();
    for record in records {
        checker.add(record);
    }
    checker.report()
}

fn sent(bot: &'static str, event: u32) -> Record<'static> {
    Record::Sent { bot, event }
}

fn handled(
    bot: &'static str,
    event: u32,
    fence: u64,
    (started, ended): (u64, u64),
    outcome: Outcome,
) -> Record<'static> {
    let sequence = u64::from(event) * 10;
    Record::Handled { bot, event, sequence, fence, started, ended, outcome, process: 1 }
}

fn committed(
    bot: &'static str,
    events: &[u32],
    fence: u64,
    (asked, at): (u64, u64),
) -> Record<'static> {
    Record::Committed { bot, events: Cow::Owned(events.to_vec()), fence, asked, at, process: 1 }
}

/// Random slices, failures with retries, dead letters, and crashes between handling and commit.
struct Clean {
    records: Vec<Record<'static>>,
    /// Events that were done twice because of a crash.
    repeated: usize,
    given_up: usize,
}

fn clean(seed: u64) -> Clean {
    let mut random = StdRng::seed_from_u64(seed);
    let mut history = Clean { records: Vec::new(), repeated: 0, given_up: 0 };
    for bot in BOTS {
        one_bot(&mut random, bot, &mut history);
    }
    history
}

fn one_bot(random: &mut StdRng, bot: &'static str, history: &mut Clean) {
    let events = random.random_range(4..30);
    history.records.extend((0..events).map(|event| sent(bot, event)));
    let (mut head, mut fence, mut now) = (0, random.random_range(1..100), 1_000);
    let mut done = vec![false; events as usize];
    while head < events {
        fence += random.random_range(1..5);
        now += 10;
        let slice = head..events.min(head + random.random_range(1..6));
        let mut through = head;
        for event in slice {
            let failed = random.random_bool(0.1);
            let outcome = if failed { Outcome::Failed } else { Outcome::Done };
            history.records.push(handled(bot, event, fence, (now, now + 5), outcome));
            now += 5;
            let give_up = failed && !done[event as usize] && random.random_bool(0.3);
            history.given_up += usize::from(give_up);
            if failed && !give_up {
                break;
            }
            history.repeated += usize::from(!failed && done[event as usize]);
            done[event as usize] |= !failed;
            through = event + 1;
            if give_up {
                break;
            }
        }
        let dead_letter_pending = through > head && !done[through as usize - 1];
        if through > head && (dead_letter_pending || random.random_bool(0.8)) {
            let events: Vec<u32> = (head..through).collect();
            history.records.push(committed(bot, &events, fence, (now, now + 2)));
            head = through;
        }
        now += 3;
    }
}

#[test]
fn a_redriven_dead_letter_may_be_done_twice_until_its_success_is_committed() {
    let mut records = vec![
        sent("b", 0),
        handled("b", 0, 1, (10, 11), Outcome::Failed),
        committed("b", &[0], 1, (12, 13)),
        handled("b", 0, 2, (20, 21), Outcome::Done),
        handled("b", 0, 3, (30, 31), Outcome::Done),
        committed("b", &[0], 3, (32, 33)),
    ];
    let report = judge(&records);
    assert!(report.is_clean() && report.duplicates_explained == 1, "{report}");
    records.push(handled("b", 0, 4, (40, 41), Outcome::Done));
    assert_eq!(judge(&records).duplicates_unexplained, 1);
}

#[test]
fn a_redriven_dead_letter_is_no_fault() {
    use Outcome::{Done, Failed};
    let report = judge(&[
        sent("shop", 0),
        sent("shop", 1),
        handled("shop", 0, 1, (10, 11), Failed),
        committed("shop", &[0], 1, (12, 13)),
        handled("shop", 1, 2, (14, 15), Done),
        committed("shop", &[1], 2, (16, 17)),
        handled("shop", 0, 3, (18, 19), Done),
        committed("shop", &[0], 3, (20, 21)),
    ]);
    assert!(report.is_clean() && report.given_up == 0, "{report}");
}

/// Puts the same fault into many clean histories. `None` means that this history has no place for
/// it.
fn every_time(
    fault: impl Fn(&mut Vec<Record<'static>>, &mut StdRng) -> Option<()>,
    found: impl Fn(&Report) -> usize,
) {
    let mut seeded = 0;
    for seed in 0..200 {
        let mut history = clean(seed).records;
        let before = judge(&history);
        assert!(before.is_clean() && found(&before) == 0, "seed {seed}\n{before}");
        if fault(&mut history, &mut StdRng::seed_from_u64(seed)).is_some() {
            seeded += 1;
            let report = judge(&history);
            assert!(found(&report) > 0, "seed {seed}\n{report}");
        }
    }
    assert!(seeded > 100, "only {seeded} histories had a place for the fault");
}

/// The index of a random record of this kind.
fn pick(
    history: &[Record<'_>],
    random: &mut StdRng,
    kind: impl Fn(&Record<'_>) -> bool,
) -> Option<usize> {
    let all: Vec<usize> = (0..history.len()).filter(|&index| kind(&history[index])).collect();
    (!all.is_empty()).then(|| all[random.random_range(0..all.len())])
}

#[test]
fn retries_crashes_and_dead_letters_are_no_faults() {
    let (mut repeated, mut given_up) = (0, 0);
    for seed in 0..500 {
        let history = clean(seed);
        let report = judge(&history.records);
        assert!(report.is_clean(), "seed {seed}\n{report}");
        assert_eq!(report.overlaps, 0);
        assert_eq!(report.duplicates_explained, history.repeated, "seed {seed}\n{report}");
        assert_eq!(report.given_up, history.given_up, "seed {seed}\n{report}");
        repeated += history.repeated;
        given_up += history.given_up;
    }
    assert!(repeated > 100 && given_up > 100, "{repeated} repeated, {given_up} given up");
}

#[test]
fn the_order_in_which_logs_are_read_does_not_matter() {
    let mut history = clean(1).records;
    let before = judge(&history);
    history.reverse();
    // Within one log the order counts, but no two handlings start at the same time here.
    let after = judge(&history);
    assert_eq!(
        (before.handled, before.duplicates_explained),
        (after.handled, after.duplicates_explained)
    );
    assert!(after.is_clean(), "{after}");
}

#[test]
fn a_lost_event_is_found() {
    every_time(
        |history, random| {
            let index = pick(history, random, |r| matches!(r, Record::Sent { .. }))?;
            let Record::Sent { bot: of, event: gone } = history[index] else { return None };
            history.retain(
                |r| !matches!(*r, Record::Handled { bot, event, .. } if bot == of && event == gone),
            );
            for record in history {
                if let Record::Committed { bot, events, .. } = record
                    && *bot == of
                {
                    events.to_mut().retain(|&event| event != gone);
                }
            }
            Some(())
        },
        |report| report.lost,
    );
}

#[test]
fn events_handled_in_another_order_are_found() {
    every_time(
        |history, random| {
            let index = pick(history, random, |r| matches!(r, Record::Sent { event: 1.., .. }))?;
            let Record::Sent { bot: of, event: later } = history[index] else { return None };
            let swap = |event: &mut u32| {
                if *event == later {
                    *event = later - 1;
                } else if *event + 1 == later {
                    *event = later;
                }
            };
            for record in history {
                match record {
                    Record::Handled { bot, event, .. } if *bot == of => swap(event),
                    Record::Committed { bot, events, .. } if *bot == of => {
                        events.to_mut().iter_mut().for_each(swap);
                    }
                    _ => {}
                }
            }
            Some(())
        },
        |report| report.reordered,
    );
}

#[test]
fn an_event_that_overtakes_a_retry_is_found() {
    let report = judge(&[
        sent("b", 0),
        sent("b", 1),
        handled("b", 0, 1, (10, 11), Outcome::Failed),
        handled("b", 1, 2, (20, 21), Outcome::Done),
        handled("b", 0, 3, (30, 31), Outcome::Done),
    ]);
    assert_eq!((report.reordered, report.lost), (1, 0), "{report}");
}

#[test]
fn events_reversed_inside_one_slice_are_found_though_they_began_together() {
    let report = judge(&[
        sent("b", 0),
        sent("b", 1),
        handled("b", 1, 1, (10, 11), Outcome::Done),
        handled("b", 0, 1, (10, 11), Outcome::Done),
    ]);
    assert_eq!(report.reordered, 1, "{report}");
}

#[test]
fn two_handlings_at_once_are_found_but_are_no_fault_by_themselves() {
    every_time(
        |history, random| {
            let index = pick(history, random, |r| matches!(r, Record::Handled { .. }))?;
            let (of, under, end) = match &history[index] {
                Record::Handled { bot, fence, started, .. } => (*bot, *fence, *started + 1),
                _ => return None,
            };
            let earlier = history.iter_mut().find_map(|r| match r {
                Record::Handled { bot, fence, ended, .. } if *bot == of && *fence < under => {
                    Some(ended)
                }
                _ => None,
            });
            *earlier? = end;
            let report = judge(history);
            assert!(report.is_clean(), "{report}");
            Some(())
        },
        |report| report.overlaps,
    );
}

#[test]
fn a_commit_of_a_holder_that_was_superseded_is_found() {
    every_time(
        |history, random| {
            let index = pick(history, random, |r| matches!(r, Record::Committed { .. }))?;
            let Record::Committed { bot: of, fence: old, .. } = history[index] else { return None };
            let newer = history.iter().find_map(|r| match *r {
                Record::Handled { bot, fence, started, .. } if bot == of && fence > old => {
                    Some(started)
                }
                _ => None,
            })?;
            let Record::Committed { asked, at, .. } = &mut history[index] else { return None };
            (*asked, *at) = (newer + 1, newer + 2);
            Some(())
        },
        |report| report.stale_commits,
    );
}

#[test]
fn an_old_holder_that_commits_what_a_newer_one_committed_is_found_by_the_event() {
    let report = judge(&[
        sent("b", 0),
        handled("b", 0, 1, (10, 11), Outcome::Done),
        handled("b", 0, 2, (20, 21), Outcome::Done),
        committed("b", &[0], 2, (22, 23)),
        // Requested in time, but accepted after the other commit.
        committed("b", &[0], 1, (12, 30)),
    ]);
    assert_eq!(report.stale_commits, 1, "{report}");
}

#[test]
fn a_confirmation_read_late_is_no_fault() {
    let report = judge(&[
        sent("b", 0),
        sent("b", 1),
        handled("b", 0, 1, (10, 11), Outcome::Done),
        committed("b", &[0], 1, (12, 30)),
        handled("b", 1, 2, (20, 21), Outcome::Done),
        committed("b", &[1], 2, (22, 23)),
    ]);
    assert!(report.is_clean(), "{report}");
}

#[test]
fn a_handling_that_begins_under_an_older_fence_is_found() {
    every_time(
        |history, random| {
            // The first handling of a bot follows no other.
            let later = (0..history.len()).find(|&i| has_earlier_handling(history, i))?;
            let index = random.random_range(later..history.len());
            let index = if has_earlier_handling(history, index) { index } else { later };
            let Record::Handled { fence, .. } = &mut history[index] else { return None };
            *fence = 0;
            Some(())
        },
        |report| report.fence_regressions,
    );
}

#[test]
fn only_a_call_over_a_network_may_arrive_after_one_of_the_next_lease() {
    let judged = |checker: Checker| {
        let mut checker = checker;
        for record in [
            sent("b", 0),
            handled("b", 0, 2, (20, 21), Outcome::Done),
            committed("b", &[0], 2, (22, 23)),
            handled("b", 0, 1, (30, 31), Outcome::Done),
        ] {
            checker.add(&record);
        }
        let report = checker.report();
        (report.is_clean(), report.fence_regressions, report.late, report.duplicates_unexplained)
    };
    assert_eq!(judged(Checker::new()), (false, 1, 0, 0));
    assert_eq!(judged(Checker::new().calls_may_arrive_late()), (true, 0, 1, 0));
}

fn has_earlier_handling(history: &[Record<'_>], index: usize) -> bool {
    let Record::Handled { bot: of, started: at, .. } = history[index] else { return false };
    history
        .iter()
        .any(|r| matches!(*r, Record::Handled { bot, started, .. } if bot == of && started < at))
}

#[test]
fn an_event_handled_again_after_its_commit_is_found() {
    every_time(
        |history, random| {
            let index = pick(history, random, |r| {
                matches!(r, Record::Handled { outcome: Outcome::Done, .. })
            })?;
            let mut again = history[index].clone();
            if let Record::Handled { fence, started, ended, .. } = &mut again {
                *fence = 1 << 40;
                (*started, *ended) = (1 << 40, (1 << 40) + 1);
            }
            history.push(again);
            Some(())
        },
        |report| report.duplicates_unexplained,
    );
}

#[test]
fn an_event_committed_without_any_handling_is_found() {
    every_time(
        |history, random| {
            let bot = BOTS[random.random_range(0..BOTS.len())];
            history.push(sent(bot, 1_000));
            history.push(committed(bot, &[1_000], 1 << 40, (1 << 40, 1 << 40)));
            Some(())
        },
        |report| report.unhandled,
    );
}

#[test]
fn the_log_of_a_killed_process_is_read_up_to_its_torn_line() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("history");
    HistoryLog::append(&path).unwrap().write(clean(3).records).unwrap();
    let mut file = std::fs::OpenOptions::new().append(true).open(&path).unwrap();
    // The line is cut in the middle of a character, and would otherwise be a record of another bot.
    file.write_all(b"S\t7\t\xe6\x97").unwrap();
    let mut checker = Checker::new();
    checker.read_file(&path).unwrap();
    assert_eq!(checker.report(), judge(&clean(3).records));

    file.write_all(b"\n").unwrap();
    let error = Checker::new().read_file(&path).unwrap_err();
    assert!(matches!(error, HistoryError::Malformed { .. }), "{error}");
    let missing = Checker::new().read_file(&directory.path().join("none")).unwrap_err();
    assert_eq!(missing.to_string(), "the history cannot be read");
}

#[test]
fn the_report_reads_like_a_table() {
    let report = judge(&[sent("b", 0), sent("b", 1), handled("b", 1, 1, (1, 2), Outcome::Done)]);
    let text = report.to_string();
    assert!(
        text.starts_with("history                 BROKEN\nbots                    1\n"),
        "{text}"
    );
    assert!(text.contains("\nlost                    1\n"), "{text}");
    assert!(text.ends_with("  bot \"b\": event 0 is lost\n"), "{text}");
}

#[test]
fn half_a_million_events_of_fifty_thousand_bots_are_judged() {
    let names: Vec<String> = (0..50_000).map(|bot| format!("bot-{bot}")).collect();
    let mut checker = Checker::new();
    let started = std::time::Instant::now();
    for slice in 0..2_u32 {
        for bot in &names {
            let events: Vec<u32> = (slice * 5..slice * 5 + 5).collect();
            let fence = u64::from(slice) + 1;
            let at = fence * 100;
            for &event in &events {
                checker.add(&Record::Sent { bot, event });
                checker.add(&Record::Handled {
                    bot,
                    event,
                    sequence: u64::from(event),
                    fence,
                    started: at,
                    ended: at + 1,
                    outcome: Outcome::Done,
                    process: 1,
                });
            }
            let events = Cow::Owned(events);
            checker.add(&Record::Committed {
                bot,
                events,
                fence,
                asked: at + 2,
                at: at + 3,
                process: 1,
            });
        }
    }
    let added = started.elapsed();
    let report = checker.report();
    println!("added in {added:?}, judged after {:?}", started.elapsed());
    assert!(report.is_clean(), "{report}");
    assert_eq!((report.sent, report.handled, report.committed), (500_000, 500_000, 500_000));
}
