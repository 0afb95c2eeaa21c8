use super::*;

/// Simulates a server with `slots` that take `service` each. `offered` requests arrive
/// concurrently, and the limit decides how many are in flight. Returns the limits over time.
fn drive(
    limiter: &mut Limiter,
    from: Duration,
    slots: f64,
    service: f64,
    offered: f64,
    seconds: u64,
) -> (Duration, usize, usize) {
    let (mut now, mut peak, mut low) = (from, 0, usize::MAX);
    let end = from + Duration::from_secs(seconds);
    while now < end {
        let in_flight = offered.min(limiter.limit_low.floor());
        // Little's law: requests beyond the slots wait behind them.
        let took = Duration::from_secs_f64(service * (in_flight / slots).max(1.0));
        now += took.mul_f64(1.0 / in_flight.max(1.0));
        let sample = Sample {
            operation: Operation(1),
            took,
            given: None,
            in_flight: in_flight as usize,
            places: 1,
        };
        let is_bound = offered > limiter.limit() as f64;
        if let Some(window) = limiter.observe(sample, now) {
            let verdict = limiter.adjust(&window, is_bound, 1_000, now, |_, _| {});
            if now > from + Duration::from_secs(2) && matches!(limiter.probe, Probe::No { .. }) {
                peak = peak.max(verdict.limit);
                low = low.min(verdict.limit);
            }
        }
    }
    (now, low, peak)
}

#[test]
fn the_limit_settles_where_the_slots_are_full_and_the_latency_is_a_small_multiple() {
    let mut limiter = Limiter::new(1_000);
    let (now, ..) = drive(&mut limiter, Duration::ZERO, 8.0, 0.004, 4.0, 3);
    let (_, low, peak) = drive(&mut limiter, now, 8.0, 0.004, 10_000.0, 120);
    assert!(low >= 8, "the slots are used: {low}");
    assert!(peak <= 48, "and the queue behind them is short, also after minutes: {peak}");
}

#[test]
fn without_enough_load_the_limit_stays_and_nothing_is_probed() {
    let mut limiter = Limiter::new(1_000);
    let (_, low, peak) = drive(&mut limiter, Duration::ZERO, 8.0, 0.004, 6.0, 60);
    assert_eq!((low, peak), (FIRST as usize, FIRST as usize));
}

#[test]
fn a_dependency_that_becomes_ten_times_slower_keeps_its_slots_and_recovers() {
    let mut limiter = Limiter::new(1_000);
    let (now, ..) = drive(&mut limiter, Duration::ZERO, 8.0, 0.004, 4.0, 3);
    let (now, ..) = drive(&mut limiter, now, 8.0, 0.004, 200.0, 20);
    let (now, ..) = drive(&mut limiter, now, 8.0, 0.040, 200.0, 10);
    let (now, low, peak) = drive(&mut limiter, now, 8.0, 0.040, 200.0, 30);
    assert!(low >= 8 && peak <= 64, "slow: {low} to {peak}");
    let (now, ..) = drive(&mut limiter, now, 8.0, 0.004, 200.0, 10);
    let (_, low, peak) = drive(&mut limiter, now, 8.0, 0.004, 200.0, 30);
    assert!(low >= 8 && peak <= 48, "fast again: {low} to {peak}");
}

#[test]
fn the_time_that_callers_give_bounds_the_time_under_load() {
    let mut limiter = Limiter::new(1_000);
    let mut now = Duration::ZERO;
    // 8 slots of 40 ms, and callers with a deadline of 100 ms.
    while now < Duration::from_secs(60) {
        let in_flight = limiter.limit_low.floor();
        let took = Duration::from_secs_f64(0.04 * (in_flight / 8.0).max(1.0));
        now += took.mul_f64(1.0 / in_flight);
        let given = Some(Duration::from_millis(100));
        let sample = Sample {
            operation: Operation(1),
            took,
            given,
            in_flight: in_flight as usize,
            places: 1,
        };
        if let Some(window) = limiter.observe(sample, now) {
            limiter.adjust(&window, true, 1_000, now, |_, _| {});
        }
    }
    let limit = limiter.limit();
    assert!((8..=18).contains(&limit), "40 to 90 ms: {limit}");
}

#[test]
fn answers_in_no_time_leave_the_limit_a_number() {
    let mut limiter = Limiter::new(1_000);
    let mut now = Duration::ZERO;
    let (took, given) = (Duration::ZERO, Some(Duration::ZERO));
    for _ in 0..200 {
        now += Duration::from_millis(10);
        let sample = Sample { operation: Operation(1), took, given, in_flight: 1, places: 1 };
        if let Some(window) = limiter.observe(sample, now) {
            limiter.adjust(&window, true, 1_000, now, |_, _| {});
        }
    }
    assert!(limiter.limit() >= FIRST as usize, "{}", limiter.limit());
}

#[test]
fn a_refusal_while_the_latency_is_good_was_a_mistake_and_the_limit_grows() {
    let mut limiter = Limiter::new(1_000);
    let mut now = Duration::ZERO;
    let mut verdict = None;
    for step in 0..1_000 {
        now += Duration::from_millis(1);
        let took = Duration::from_millis(1);
        // The load is low at first, so that the limiter learns the baseline.
        let in_flight = if step < 100 { 1 } else { limiter.limit() };
        let sample = Sample { operation: Operation(1), took, given: None, in_flight, places: 1 };
        if let Some(window) = limiter.observe(sample, now) {
            verdict = Some(limiter.adjust(&window, step >= 100, 1_000, now, |_, _| {}));
        }
    }
    let verdict = verdict.unwrap();
    assert!(verdict.had_room && verdict.limit > 64);
}

fn answer(took: Duration, in_flight: usize) -> Sample {
    Sample { operation: Operation(1), took, given: None, in_flight, places: 1 }
}

#[test]
fn the_demand_is_what_was_served_and_refused_by_the_capacity() {
    // 20 answers of 10 ms in 100 ms need 2 places; with as many refused requests, 4.
    let (lasted, took) = (Duration::from_millis(100), Duration::from_millis(200));
    let window = Window { lasted, answered: 20, took, peak: 4 };
    let ratio = |is_bound, limit, refused| {
        let verdict = Verdict { limit, limit_low: limit, had_room: false, window, is_bound };
        (verdict.demand_ratio(refused) * 100.0).round() as usize
    };
    assert_eq!(ratio(false, 8, 20), 50);
    assert_eq!(ratio(true, 8, 20), 200, "the two places were all there are");
    assert_eq!(ratio(true, 1, 0), 200);
    assert_eq!(window.answered_in(Duration::from_millis(250)), 50);
}

#[test]
fn a_window_ends_with_enough_answers_or_after_a_second() {
    let ends = |answers: usize, at: Duration| {
        let mut limiter = Limiter::new(1_000);
        for _ in 1..answers {
            assert!(limiter.observe(answer(WINDOW, 1), Duration::ZERO).is_none());
        }
        limiter.observe(answer(WINDOW, 1), at).is_some()
    };
    let before = |time: Duration| time.saturating_sub(Duration::from_millis(1));
    assert!(ends(WINDOW_SAMPLES, WINDOW) && !ends(WINDOW_SAMPLES, before(WINDOW)));
    assert!(!ends(WINDOW_SAMPLES - 1, WINDOW));
    assert!(ends(2, WINDOW_LAST) && !ends(2, before(WINDOW_LAST)));
}

/// Answers of this time in one window. Returns the usual latency that the limiter tells, ms.
fn window_of(limiter: &mut Limiter, took_ms: u64, is_bound: bool, now: Duration) -> u32 {
    let peak = if is_bound { limiter.limit() } else { 1 };
    for _ in 0..SAMPLES_MIN {
        limiter.observe(answer(Duration::from_millis(took_ms), peak), now);
    }
    let window = Window { peak, ..EMPTY };
    let mut usual = 0;
    limiter.adjust(&window, is_bound, 1_000, now, |_, median| usual = median / 1_000);
    usual
}

#[test]
fn the_usual_latency_follows_the_median_and_the_baseline_the_latency_without_load() {
    let mut limiter = Limiter::new(1_000);
    limiter.is_sure = true;
    let mut step = |took_ms, is_bound| {
        let usual = window_of(&mut limiter, took_ms, is_bound, Duration::ZERO);
        let baseline = limiter.operations[1].baseline.unwrap();
        (usual, (baseline / 1_000.0).round() as usize)
    };
    assert_eq!(step(10, true), (10, 10));
    assert_eq!(step(20, true), (13, 10), "load says nothing of the baseline");
    assert_eq!(step(5, true), (10, 5));
    assert_eq!(step(15, false), (11, 8), "without load it follows slowly");
}

#[test]
fn a_probe_is_due_after_ten_seconds_or_while_the_latency_is_far_too_high_after_one() {
    let probes = |pause_ms, slow_windows, took_ms| {
        let mut limiter = Limiter::new(1_000);
        limiter.is_sure = true;
        limiter.slow = slow_windows;
        limiter.operations[1].baseline = Some(10_000.0);
        window_of(&mut limiter, took_ms, true, Duration::from_millis(pause_ms));
        matches!(limiter.probe, Probe::Settling { .. })
    };
    assert!(probes(10_000, 0, 30) && !probes(9_999, 9, 30));
    assert!(!probes(10_000, 0, 20), "twice the baseline is good");
    assert!(probes(1_000, PROBE_AFTER - 1, 50) && !probes(999, PROBE_AFTER - 1, 50));
    assert!(!probes(1_000, PROBE_AFTER - 2, 50));
}

#[test]
fn a_window_keeps_the_latest_samples_of_an_operation_and_notes_it_once() {
    let mut limiter = Limiter::new(1_000);
    for took in 0..SAMPLES_MAX as u64 + 3 {
        limiter.observe(answer(Duration::from_micros(took), 1), Duration::ZERO);
    }
    assert_eq!(limiter.touched, [Operation(1)]);
    let latency = &limiter.operations[1];
    assert_eq!((latency.samples.len(), latency.seen), (SAMPLES_MAX, SAMPLES_MAX + 3));
    let first = [0, 1, 2, 3].map(|place| latency.samples[place] as usize);
    assert_eq!(first, [SAMPLES_MAX, SAMPLES_MAX + 1, SAMPLES_MAX + 2, 3]);
}

#[test]
fn too_few_samples_say_nothing_and_do_not_count_for_the_next_window() {
    let mut limiter = Limiter::new(1_000);
    for _ in 1..SAMPLES_MIN {
        limiter.observe(answer(Duration::from_millis(9), 1), Duration::ZERO);
    }
    let verdict = limiter.adjust(&EMPTY, false, 1_000, Duration::ZERO, |_, _| panic!("too few"));
    assert!(!verdict.had_room, "nothing was measured");
    let latency = &limiter.operations[1];
    assert_eq!((latency.samples.len(), latency.seen, latency.baseline), (0, 0, None));
}

#[test]
fn the_time_that_callers_give_is_a_slow_average() {
    let mut limiter = Limiter::new(1_000);
    let mut given = |ms| {
        let given = Some(Duration::from_millis(ms));
        limiter.observe(Sample { given, ..answer(WINDOW, 1) }, Duration::ZERO);
        limiter.operations[1].given.map(|micros| micros.round() as usize)
    };
    assert_eq!(given(100), Some(100_000));
    assert_eq!(given(200), Some(105_000));
    assert_eq!(given(5), Some(100_000));
}

#[test]
fn the_load_is_low_with_two_requests_or_a_sixteenth_of_the_limit() {
    let is_sure = |limit, peak, is_bound| {
        let mut limiter = Limiter::new(1_000);
        limiter.limit = limit;
        limiter.adjust(&Window { peak, ..EMPTY }, is_bound, 1_000, Duration::ZERO, |_, _| {});
        limiter.is_sure
    };
    assert!(is_sure(64.0, 4, false) && !is_sure(64.0, 5, false));
    assert!(is_sure(16.0, 2, false) && !is_sure(16.0, 3, false));
    assert!(!is_sure(64.0, 1, true), "a request found no place");
}

/// A window of answers of this time, against a baseline of 10 ms. The limit is 64.
fn judge(limiter: &mut Limiter, took_us: u64, peak: usize, is_bound: bool) -> Verdict {
    limiter.limit = 64.0;
    limiter.is_sure = true;
    limiter.operations[1].baseline = Some(10_000.0);
    for _ in 0..SAMPLES_MIN {
        limiter.observe(answer(Duration::from_micros(took_us), peak), Duration::ZERO);
    }
    limiter.adjust(&Window { peak, ..EMPTY }, is_bound, 1_000, Duration::ZERO, |_, _| {})
}

#[test]
fn there_was_room_if_the_latency_was_below_the_good_one_and_no_probe_ran() {
    let had_room = |took_us, given_ms: Option<u64>, probe| {
        let mut limiter = Limiter::new(1_000);
        limiter.probe = probe;
        limiter.operations[1].given = given_ms.map(|ms| ms as f64 * 1_000.0);
        limiter.operations[1].timed = if given_ms.is_some() { SAMPLES_MIN } else { 0 };
        judge(&mut limiter, took_us, 5, true).had_room
    };
    let none = Probe::No { last: Duration::ZERO };
    assert!(had_room(19_999, None, none) && !had_room(20_000, None, none));
    assert!(!had_room(19_999, None, Probe::Settling { from: 64.0 }));
    // Half of the deadline is good, but not less than a quarter more than without load.
    assert!(had_room(14_999, Some(30), none) && !had_room(15_000, Some(30), none));
    assert!(had_room(12_499, Some(10), none) && !had_room(12_500, Some(10), none));
}

#[test]
fn a_few_callers_with_a_short_deadline_hardly_change_what_is_good_for_all() {
    let had_room = |took_us, timed| {
        let mut limiter = Limiter::new(1_000);
        limiter.operations[1].given = Some(1_000.0);
        limiter.operations[1].timed = timed;
        judge(&mut limiter, took_us, 5, true).had_room
    };
    // Between the 20 ms of those without a deadline and 12.5 ms.
    let mixed = |timed: usize| 20_000 - 7_500 * timed as u64 / SAMPLES_MIN as u64;
    for timed in [1, SAMPLES_MIN / 2, SAMPLES_MIN] {
        let good = mixed(timed);
        assert!(had_room(good - 1, timed) && !had_room(good + 1, timed), "{timed}");
    }
    assert!(mixed(1) > 19_000);
}

#[test]
fn a_window_is_far_too_slow_above_twice_the_good_latency() {
    let slow = |took_us| {
        let mut limiter = Limiter::new(1_000);
        judge(&mut limiter, took_us, 5, false);
        limiter.slow
    };
    assert_eq!([slow(40_000), slow(40_001)], [0, 1]);
}

#[test]
fn only_a_limit_that_is_nearly_reached_follows_the_latency() {
    let limit = |peak, is_bound, took_us| {
        let mut limiter = Limiter::new(1_000);
        judge(&mut limiter, took_us, peak, is_bound);
        (limiter.limit * 10.0).round() as usize
    };
    assert_eq!(limit(31, false, 40_000), 640, "less than half of it was used");
    assert_eq!(limit(32, false, 40_000), 544, "a third of the way to half");
    assert_eq!(limit(5, true, 20_000), 664, "a third of the way to 8 more");
    assert_eq!(limit(5, true, 80_000), 568, "at most half, and 8 more");
}
