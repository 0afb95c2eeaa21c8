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
