mod waiting;

use super::circuit::{FAILURES, OPEN_MAX};
use super::*;
use crate::outbound::places::AGAIN_MIN;

fn limited(per_bot: usize, rate: u64) -> Arc<Breakers> {
    Breakers::new(Limits { per_bot, per_host: 2 * per_bot, rate })
}

fn bot(name: &str) -> BotId {
    BotId::parse(name).unwrap()
}

fn target(port: u16) -> Target {
    Target { secure: false, host: "a".to_owned(), port }
}

fn ask(breakers: &Arc<Breakers>, name: &str, now: Instant) -> Permission {
    breakers.ask(&bot(name), target(80), false, now)
}

fn go_of(breakers: &Arc<Breakers>, name: &str, now: Instant) -> Pass {
    match ask(breakers, name, now) {
        Permission::Go(pass) => pass,
        other => panic!("{name}: {other:?}"),
    }
}

fn go(breakers: &Arc<Breakers>, now: Instant) -> Pass {
    go_of(breakers, "bot", now)
}

fn opened_for(breakers: &Arc<Breakers>, name: &str, now: Instant) -> Option<Duration> {
    match ask(breakers, name, now) {
        Permission::Open(after) => Some(after),
        _ => None,
    }
}

fn opened(breakers: &Arc<Breakers>, now: Instant) -> Option<Duration> {
    opened_for(breakers, "bot", now)
}

fn fail_as(breakers: &Arc<Breakers>, name: &str, outcome: Outcome, times: u32, now: Instant) {
    for _ in 0..times {
        go_of(breakers, name, now).say(outcome, now);
    }
}

fn fail(breakers: &Arc<Breakers>, times: u32, now: Instant) {
    fail_as(breakers, "bot", Outcome::Failed, times, now);
}

#[test]
fn concurrent_requests_to_a_host_are_limited_and_the_others_are_spread() {
    let (breakers, now) = (limited(2, 0), Instant::now());
    let passes = [go(&breakers, now), go(&breakers, now)];
    let mut last = Duration::ZERO;
    for _ in 0..100 {
        let Permission::Full(after) = ask(&breakers, "bot", now) else { panic!("a third one") };
        assert!(after > last && after >= AGAIN_MIN);
        last = after;
    }
    assert!(last > Duration::from_secs(1) && last < Duration::from_millis(1_100));
    assert!(
        matches!(breakers.ask(&bot("bot"), target(81), false, now), Permission::Go(_)),
        "another one's"
    );
    drop(passes);
    assert!(matches!(ask(&breakers, "bot", now), Permission::Go(_)));
}

#[test]
fn a_host_gets_its_requests_a_second_and_a_burst() {
    let (breakers, begun) = (limited(1_000, 100), Instant::now());
    let (mut now, mut passed, mut turned_away) = (begun, 0, 0);
    let mut through = Vec::new();
    for _ in 0..5_000 {
        match ask(&breakers, "bot", now) {
            Permission::Go(pass) => {
                pass.say(Outcome::Answered, now);
                passed += 1;
                through.push(now);
            }
            Permission::Full(after) => {
                assert!(after >= AGAIN_MIN);
                turned_away += 1;
            }
            Permission::Open(after) => panic!("{after:?}"),
        }
        now += Duration::from_millis(1);
    }
    assert_eq!((passed, turned_away), (510, 4_490), "5 s of 100, and a tenth of a second more");
    assert!(through[..11].iter().all(|&at| at < begun + Duration::from_millis(12)));
}

#[test]
fn five_failures_in_a_row_open_the_breaker_and_one_success_between_does_not() {
    let (breakers, now) = (limited(16, 0), Instant::now());
    fail(&breakers, FAILURES - 1, now);
    go(&breakers, now).say(Outcome::Answered, now);
    fail(&breakers, FAILURES - 1, now);
    assert_eq!(breakers.open(now), []);
    fail(&breakers, 1, now);
    let breaker = Breaker { host: "a:80".to_owned(), failures: FAILURES, seconds: 5 };
    assert_eq!(breakers.open(now), [breaker]);
    let after = opened(&breakers, now).unwrap();
    assert!(after >= OPEN_FIRST && after < OPEN_FIRST + Duration::from_secs(1), "{after:?}");
}

#[test]
fn one_request_of_a_bot_probes_and_its_result_decides() {
    for outcome in [Outcome::Failed, Outcome::Unreached] {
        one_request_probes(outcome);
    }
}

fn one_request_probes(outcome: Outcome) {
    let (breakers, mut now) = (limited(16, 0), Instant::now());
    let fail = |breakers, times, now| fail_as(breakers, "bot", outcome, times, now);
    fail(&breakers, FAILURES, now);
    let mut open_for = OPEN_FIRST;
    for _ in 0..6 {
        assert!(opened(&breakers, now + open_for.mul_f64(0.999)).is_some());
        now += open_for;
        let probe = go(&breakers, now);
        assert!(opened(&breakers, now).is_some(), "one at a time");
        probe.say(outcome, now);
        open_for = (open_for * 2).min(OPEN_MAX);
    }
    assert_eq!(open_for, OPEN_MAX);
    now += OPEN_MAX;
    go(&breakers, now).say(Outcome::Answered, now);
    let passes: Vec<Pass> = (0..16).map(|_| go(&breakers, now)).collect();
    drop(passes);
    fail(&breakers, FAILURES, now);
    now += OPEN_FIRST;
    assert!(opened(&breakers, now).is_none(), "it begins with the first pause again");
}

#[test]
fn a_cancelled_request_says_nothing_and_a_cancelled_probe_lets_another_one_try() {
    let (breakers, mut now) = (limited(1, 0), Instant::now());
    drop(go(&breakers, now));
    fail(&breakers, FAILURES, now);
    now += OPEN_FIRST;
    drop(go(&breakers, now));
    go(&breakers, now).say(Outcome::Answered, now);
    assert_eq!(breakers.open(now), []);
}

#[test]
fn those_begun_before_it_opened_do_not_prolong_it() {
    let (breakers, now) = (limited(16, 0), Instant::now());
    let passes: Vec<Pass> = (0..16).map(|_| go(&breakers, now)).collect();
    for pass in passes {
        pass.say(Outcome::Failed, now);
    }
    assert!(opened(&breakers, now + OPEN_FIRST).is_none());
}

#[test]
fn unused_hosts_are_forgotten() {
    let (breakers, mut now) = (limited(1, 0), Instant::now());
    for port in 0..100 {
        drop(breakers.ask(&bot("bot"), target(port), false, now));
    }
    now += FORGET;
    drop(breakers.ask(&bot("other"), target(80), false, now));
    let state = breakers.lock();
    assert_eq!((state.hosts.len(), state.bots.len(), state.seats), (1, 1, 1));
}

#[test]
fn an_open_breaker_of_a_host_that_is_no_longer_called_ends_after_ten_minutes() {
    let (breakers, now) = (limited(16, 0), Instant::now());
    fail(&breakers, FAILURES, now);
    let before = now + FORGET - Duration::from_millis(1);
    assert_eq!(breakers.open(before).len(), 1);
    assert_eq!(breakers.open(before + SWEEP), []);
    let state = breakers.lock();
    assert!(state.hosts.is_empty() && state.bots.is_empty(), "{state:?}");
}

#[test]
fn a_failing_path_of_one_bot_opens_the_breaker_of_no_other() {
    let (breakers, mut now) = (limited(16, 0), Instant::now());
    for _ in 0..10 {
        while let Permission::Go(pass) = ask(&breakers, "hostile", now) {
            pass.say(Outcome::Failed, now);
        }
        assert!(opened_for(&breakers, "hostile", now).is_some());
        // Probes that hang or fail are its own.
        go_of(&breakers, "quiet", now).say(Outcome::Answered, now);
        now += OPEN_MAX;
        let probe = go_of(&breakers, "hostile", now);
        go_of(&breakers, "quiet", now).say(Outcome::Answered, now);
        probe.say(Outcome::Failed, now);
    }
    let shown = breakers.open(now);
    assert_eq!(shown.len(), 1, "{shown:?}");
    assert_eq!((&*shown[0].host, shown[0].seconds), ("a:80", 60));
}

#[test]
fn connection_errors_open_the_breaker_for_all_and_each_bot_may_probe() {
    let (breakers, mut now) = (limited(16, 0), Instant::now());
    fail_as(&breakers, "first", Outcome::Unreached, FAILURES, now);
    assert!(opened_for(&breakers, "second", now).is_some());
    now += OPEN_FIRST;
    let hanging = go_of(&breakers, "first", now);
    assert!(opened_for(&breakers, "first", now).is_some(), "one of each bot at a time");
    go_of(&breakers, "second", now).say(Outcome::Answered, now);
    go_of(&breakers, "third", now).say(Outcome::Answered, now);
    hanging.say(Outcome::Failed, now);
    go_of(&breakers, "third", now).say(Outcome::Answered, now);
    assert_eq!(breakers.open(now), []);
}

#[test]
fn another_scheme_is_another_server() {
    let (breakers, now) = (limited(16, 0), Instant::now());
    let wrong = || Target { secure: true, ..target(80) };
    for _ in 0..FAILURES {
        let Permission::Go(pass) = breakers.ask(&bot("hostile"), wrong(), false, now) else {
            panic!()
        };
        pass.say(Outcome::Unreached, now);
    }
    assert!(matches!(breakers.ask(&bot("hostile"), wrong(), false, now), Permission::Open(_)));
    drop(go_of(&breakers, "quiet", now));
}

#[test]
fn failures_of_several_bots_open_the_breaker_except_for_bots_without_a_failure() {
    let (breakers, mut now) = (limited(16, 0), Instant::now());
    for name in ["a", "b"] {
        fail_as(&breakers, name, Outcome::Failed, FAILURES - 1, now);
    }
    drop(go_of(&breakers, "a", now));
    fail_as(&breakers, "c", Outcome::Failed, 1, now);
    for name in ["a", "b", "c"] {
        assert!(opened_for(&breakers, name, now).is_some(), "{name}");
    }
    fail_as(&breakers, "d", Outcome::Failed, 1, now);
    assert!(opened_for(&breakers, "d", now).is_some(), "its first failure is enough");

    // It is half open. The probes of one bot, that fail, leave the others theirs.
    now += OPEN_FIRST;
    fail_as(&breakers, "a", Outcome::Failed, 1, now);
    assert!(opened_for(&breakers, "a", now).is_some());
    drop(go_of(&breakers, "b", now));

    // A bot without a failure is let through concurrently, and its success closes the breaker.
    let passes = [go_of(&breakers, "quiet", now), go_of(&breakers, "quiet", now)];
    for pass in passes {
        pass.say(Outcome::Answered, now);
    }
    drop((go_of(&breakers, "b", now), go_of(&breakers, "b", now)));
    assert!(opened_for(&breakers, "a", now).is_some(), "its own stays open");
}

#[test]
fn however_many_places_of_a_host_one_bot_asks_for_another_one_has_its_own() {
    let breakers = Breakers::new(Limits { per_bot: 16, per_host: 64, rate: 0 });
    let now = Instant::now();
    let take = |name: &str| -> Vec<Pass> {
        let one = || match ask(&breakers, name, now) {
            Permission::Go(pass) => Some(pass),
            _ => None,
        };
        std::iter::from_fn(one).collect()
    };
    let held: Vec<Vec<Pass>> = ["a", "b", "c", "d", "e"].map(take).into();
    let counts: Vec<usize> = held.iter().map(Vec::len).collect();
    assert_eq!(counts, [16, 16, 16, 8, 4]);
}

#[test]
fn a_bot_that_uses_less_than_its_part_of_the_rate_is_not_delayed_by_one_that_uses_it_up() {
    let (breakers, mut now) = (limited(1_000, 100), Instant::now());
    let (mut hostile, mut refused) = (0, 0);
    for step in 0..10_000 {
        for _ in 0..3 {
            if let Permission::Go(pass) = ask(&breakers, "hostile", now) {
                pass.say(Outcome::Answered, now);
                hostile += 1;
            }
        }
        // 40 of 100 requests a second.
        if step % 25 == 0 {
            match ask(&breakers, "quiet", now) {
                Permission::Go(pass) => pass.say(Outcome::Answered, now),
                _ => refused += 1,
            }
        }
        now += Duration::from_millis(1);
    }
    assert_eq!(refused, 0);
    assert!((595..=620).contains(&hostile), "the rest of 1,000 in 10 s: {hostile}");
}

#[test]
fn the_hosts_of_a_bot_and_of_all_are_bounded_and_those_of_another_bot_stay() {
    let (breakers, mut now) = (limited(16, 0), Instant::now());
    fail_as(&breakers, "quiet", Outcome::Failed, FAILURES, now);
    let hostile = bot("hostile");
    let held = breakers.ask(&hostile, target(81), false, now);
    for port in 1_000..3_000 {
        now += Duration::from_micros(1);
        drop(breakers.ask(&hostile, target(port), false, now));
    }
    assert!(opened_for(&breakers, "quiet", now).is_some());
    let state = breakers.lock();
    assert!(state.bots[&hostile].at.len() <= HOSTS_MAX && state.seats <= HOSTS_MAX + 1);
    assert!(state.hosts.len() <= HOSTS_MAX + 2, "{}", state.hosts.len());
    assert!(state.bots[&hostile].at.contains_key(&target(81)), "a request is in flight");
    drop(state);
    drop(held);

    for number in 0..2 * SEATS_MAX / 100 {
        for port in 0..100 {
            now += Duration::from_micros(1);
            drop(breakers.ask(&bot(&format!("bot-{number}")), target(port), false, now));
        }
    }
    let state = breakers.lock();
    assert!(state.seats <= SEATS_MAX, "{}", state.seats);
    assert_eq!(state.bots.values().map(|seats| seats.at.len()).sum::<usize>(), state.seats);
    assert_eq!(state.hosts.values().map(|host| host.bots).sum::<usize>(), state.seats);
}

#[test]
fn connections_to_so_many_hosts_of_a_bot_stay_open() {
    let (breakers, mut now) = (limited(16, 0), Instant::now());
    let keeps = |name: &str, port, now| match breakers.ask(&bot(name), target(port), false, now) {
        Permission::Go(pass) => pass.keeps_connection(),
        other => panic!("{other:?}"),
    };
    let kept = (0..200).filter(|&port| keeps("hostile", port, now)).count();
    assert_eq!(kept, KEPT_MAX);
    assert!(keeps("hostile", 0, now) && !keeps("hostile", 100, now) && keeps("quiet", 100, now));
    now += IDLE;
    assert!(keeps("hostile", 100, now), "the others are closed");
}
