//! How often requests that wait are asked for, and how late they pass.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use super::*;
use crate::outbound::places::AFTER_BREAKER;

#[test]
fn requests_of_many_bots_that_are_due_at_once_use_the_whole_rate() {
    const BOTS: u64 = 100;
    const EACH: u64 = 200;
    // Each request takes `cost` to ask, and the bots come by turns with `slice` of them.
    for (cost, slice, late) in [(0, 1, 20), (50, 1, 20), (50, 16, 20), (50, 64, 100), (50, 200, 5)]
    {
        let (breakers, begun) = (limited(1_000, 2_000), Instant::now());
        let mut coming: BTreeSet<(Instant, u64, u64, u64)> = (0..EACH)
            .flat_map(|nth| (0..BOTS).map(move |bot| (begun, nth / slice, bot, nth)))
            .collect();
        let mut returned = HashSet::new();
        let (mut now, mut last, mut refused) = (begun, begun, 0);
        while let Some((at, turn, number, nth)) = coming.pop_first() {
            now = now.max(at) + Duration::from_micros(cost);
            let again = returned.contains(&(number, nth));
            match breakers.ask(&bot(&format!("bot-{number}")), target(80), again, now) {
                Permission::Go(pass) => {
                    pass.say(Outcome::Answered, now);
                    last = now;
                }
                Permission::Full(after) => {
                    refused += 1;
                    returned.insert((number, nth));
                    let late = (number * 7_919 + nth * 104_729) % (late * 1_000);
                    coming.insert((now + after + Duration::from_micros(late), turn, number, nth));
                }
                Permission::Open(_) => panic!("no request failed"),
            }
        }
        let took = (last - begun).as_secs_f64();
        assert!((9.8..10.2).contains(&took), "20,000 at 2,000/s in slices of {slice}: {took} s");
        assert!(refused < BOTS * EACH * 8 / 5, "few are refused twice: {refused}");
    }
}

/// These requests of a bot are due after a time; `true`: another process refused it before. How often they
/// are asked for within `time`, and how late each is that passes. One that passes after a time takes as long
/// as `takes` says.
fn asked_for(
    breakers: &Arc<Breakers>,
    due: &[(Duration, bool)],
    takes: impl Fn(Duration) -> Duration,
    time: Duration,
) -> (usize, Vec<Option<Duration>>) {
    let begun = Instant::now();
    let coming = due.iter().enumerate();
    let mut coming: BTreeSet<(Instant, usize, bool)> =
        coming.map(|(number, (after, again))| (begun + *after, number, *again)).collect();
    let mut in_flight: BTreeMap<(Instant, usize), Pass> = BTreeMap::new();
    let (mut now, mut asked, mut late) = (begun, 0, vec![None; due.len()]);
    while let Some((at, number, again)) = coming.pop_first() {
        now = now.max(at) + Duration::from_micros(300);
        if now > begun + time {
            break;
        }
        while let Some(first) = in_flight.first_entry().filter(|first| first.key().0 <= now) {
            let ((end, _), pass) = first.remove_entry();
            pass.say(Outcome::Answered, end);
        }
        asked += 1;
        match ask_again(breakers, again, now) {
            Permission::Go(pass) => {
                late[number] = Some(now.duration_since(begun + due[number].0));
                in_flight.insert((now + takes(now - begun), number), pass);
            }
            Permission::Full(after) | Permission::Open(after) => {
                coming.insert((now + after, number, true));
            }
        }
    }
    (asked, late)
}

fn due_now(requests: usize, again: bool) -> Vec<(Duration, bool)> {
    vec![(Duration::ZERO, again); requests]
}

fn passed(late: &[Option<Duration>]) -> usize {
    late.iter().flatten().count()
}

fn ask_again(breakers: &Arc<Breakers>, again: bool, now: Instant) -> Permission {
    breakers.ask(&bot("bot"), target(80), again, now)
}

#[test]
fn those_that_wait_for_a_slow_host_are_asked_for_at_its_speed_also_after_a_restart() {
    let seconds = Duration::from_secs;
    for again in [false, true] {
        let due = due_now(10_000, again);
        let (asked, late) = asked_for(&limited(16, 2_000), &due, |_| seconds(10), seconds(30));
        assert!(asked < 10_000 + 4_000, "again: {again}: {asked} in 30 s");
        assert!(passed(&late) >= 44, "16 each 10 s: {}", passed(&late));
    }
    let due = due_now(1_000, false);
    let (asked, late) = asked_for(&limited(16, 2_000), &due, |_| seconds(2), seconds(150));
    assert_eq!(passed(&late), 1_000, "16 each 2 s");
    assert!(asked < 6_000, "{asked}");
}

#[test]
fn new_requests_do_not_wait_behind_those_of_a_time_at_which_the_host_was_slow() {
    const BEFORE: usize = 400;
    let seconds = Duration::from_secs;
    let due = [due_now(BEFORE, false), vec![(seconds(90), false); 1_000]].concat();
    let fast = Duration::from_millis(20);
    let takes = |since| if since < seconds(60) { seconds(10) } else { fast };
    let (asked, late) = asked_for(&limited(16, 2_000), &due, takes, seconds(300));
    assert_eq!(passed(&late), due.len());
    let last = late[BEFORE..].iter().flatten().max().unwrap();
    assert!(*last < seconds(3), "1,000 at 800 a second: {last:?}");
    assert!(asked < 6_000, "{asked}");
}

#[test]
fn those_that_wait_for_a_host_whose_answers_vary_are_asked_for_at_its_speed() {
    // 0 to 40 ms.
    let takes =
        |since: Duration| Duration::from_micros(u64::from(since.subsec_micros()) * 7_919 % 40_000);
    let due = due_now(10_000, false);
    let (asked, late) = asked_for(&limited(16, 2_000), &due, takes, Duration::from_secs(20));
    assert_eq!(passed(&late), due.len(), "800 a second");
    assert!(asked < due.len() * 3, "{asked}");
}

#[test]
fn those_that_wait_for_the_rate_are_asked_for_at_its_speed_also_after_a_restart() {
    for again in [false, true] {
        let (due, minute) = (due_now(30_000, again), Duration::from_secs(60));
        let (asked, late) = asked_for(&limited(16, 100), &due, |_| Duration::ZERO, minute);
        assert!(asked < 30_000 + 10_000, "again: {again}: {asked} in a minute");
        assert!(passed(&late) >= 5_700, "100 a second: {}", passed(&late));
    }
}

#[test]
fn those_that_wait_for_a_breaker_return_one_after_the_other() {
    let (breakers, now) = (limited(16, 2_000), Instant::now());
    fail(&breakers, FAILURES, now);
    let opened = |again| match ask_again(&breakers, again, now) {
        Permission::Open(after) => after,
        other => panic!("{other:?}"),
    };
    let times: Vec<Duration> = (0..10_000).map(|number| opened(number % 2 == 0)).collect();
    assert!(times[0] >= OPEN_FIRST);
    assert!(times.windows(2).all(|pair| pair[1] == pair[0] + AFTER_BREAKER), "{:?}", &times[..9]);
}

#[test]
fn however_many_ports_a_bot_calls_those_that_wait_for_breakers_return_as_often_as_for_one() {
    let (breakers, now) = (limited(16, 2_000), Instant::now());
    let ask = |port, name: &str| breakers.ask(&bot(name), target(port), false, now);
    let opened = |port, name: &str| match ask(port, name) {
        Permission::Open(after) => after,
        other => panic!("{other:?}"),
    };
    let ports = 1_000..1_200;
    for (port, name) in ports.clone().map(|port| (port, "hostile")).chain([(80, "quiet")]) {
        for _ in 0..FAILURES {
            let Permission::Go(pass) = ask(port, name) else { panic!("{port} is closed") };
            pass.say(Outcome::Failed, now);
        }
    }
    let mut times: Vec<Duration> = ports
        .flat_map(|port| (0..50).map(move |_| port))
        .map(|port| opened(port, "hostile"))
        .collect();
    times.sort_unstable();
    let turns = (0..).map(|turn| AFTER_BREAKER * turn);
    let early = times.iter().zip(turns).filter(|(time, turn)| *time < turn);
    assert_eq!(early.count(), 0);
    assert!(opened(80, "quiet") < OPEN_FIRST + Duration::from_secs(1));
}
