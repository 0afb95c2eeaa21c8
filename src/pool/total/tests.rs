use super::*;

/// 1,000 events a second, 10 of them at once.
const RATE: Bucket = Bucket { interval_us: 1_000.0, burst: 10 };

const SLICES: Totals = Totals { rate: None, concurrency: Some(8) };
const EVENTS: Totals = Totals { rate: Some(RATE), concurrency: None };
const BOTH: Totals = Totals { rate: Some(RATE), concurrency: Some(8) };

fn answer(slices: usize, tokens: usize) -> Budgeted {
    Budgeted { slices, tokens, wait_ms: 0, stamp: 7 }
}

/// The state after a first answer to a wish for many.
fn with(limits: Totals, granted: Budgeted, now: Instant) -> State {
    let mut state = State::new(now);
    let wish = state.wish(limits, 0, 100, 10);
    state.granted(limits, &wish, granted, (now, now));
    state
}

#[test]
fn leases_are_the_slices_that_are_neither_held_nor_asked_for() {
    let now = Instant::now();
    let mut state = with(SLICES, answer(5, 0), now);
    assert_eq!(state.take(SLICES, 1, 3, now).leases, 3, "the room");
    let last = state.take(SLICES, 1, 3, now);
    assert_eq!(last.leases, 1, "1 is held, 3 are asked for");
    assert_eq!(state.take(SLICES, 1, 3, now).leases, 0);
    state.answered(SLICES, last, 1);
    assert_eq!(state.take(SLICES, 2, 3, now).leases, 0, "it is held now");
    assert_eq!(state.take(SLICES, 1, 3, now).leases, 1);
}

#[test]
fn slices_are_used_until_shortly_before_they_end() {
    let now = Instant::now();
    let end = now + TTL - MARGIN;
    for (at, leases) in [(end - Duration::from_nanos(1), 2), (end, 0)] {
        assert_eq!(with(SLICES, answer(2, 0), now).take(SLICES, 0, 9, at).leases, leases);
    }
}

#[test]
fn a_process_never_uses_more_slices_than_it_asked_for() {
    let now = Instant::now();
    let mut state = with(SLICES, answer(8, 0), now);
    let wish = state.wish(SLICES, 2, 1, 10);
    assert_eq!(wish.slices, Some((3, 8)));
    assert_eq!(state.take(SLICES, 2, 9, now).leases, 1, "also before the answer");
    state.granted(SLICES, &wish, answer(8, 0), (now, now));
    assert_eq!(state.slices, 3);
    assert_eq!(state.wish(SLICES, 7, 9, 10).slices, Some((8, 8)), "no more than the limit");
    let mut state = with(SLICES, answer(8, 0), now);
    state.take(SLICES, 1, 2, now);
    assert_eq!(state.wish(SLICES, 1, 1, 10).slices, Some((4, 8)), "also those that are asked for");
}

#[test]
fn each_lease_needs_a_token_that_is_fresh() {
    let now = Instant::now();
    for (limits, tokens, slices, leases) in [(EVENTS, 3, 0, 3), (BOTH, 3, 2, 2), (BOTH, 1, 2, 1)] {
        let mut state = with(limits, answer(slices, tokens), now);
        let asked = state.take(limits, 0, 9, now);
        assert_eq!((asked.leases, asked.stamp, state.tokens), (leases, 7, tokens - leases));
    }
    for (age, leases) in [(BATCH.saturating_sub(Duration::from_nanos(1)), 3), (BATCH, 0)] {
        let mut state = with(EVENTS, answer(0, 3), now);
        assert_eq!(state.take(EVENTS, 0, 9, now + age).leases, leases);
    }
}

#[test]
fn tokens_are_asked_for_the_events_of_a_moment_and_the_rest_goes_back() {
    let now = Instant::now();
    let mut state = State::new(now);
    assert_eq!(state.wish(EVENTS, 0, 2, 10).tokens, Some((20, RATE)));
    assert_eq!(state.wish(EVENTS, 0, 100, 10).tokens, Some((50, RATE)), "those of 50 ms");
    assert_eq!(state.wish(EVENTS, 0, 0, 10).tokens, Some((0, RATE)));
    let slow = Totals { rate: Some(Bucket { interval_us: 1e6, burst: 1 }), concurrency: None };
    assert_eq!(state.wish(slow, 0, 9, 10).tokens.map(|(tokens, _)| tokens), Some(1));
    let mut state = with(EVENTS, answer(0, 9), now);
    assert_eq!(state.wish(EVENTS, 0, 1, 10).unused, (9, 7));
    assert_eq!(state.wish(EVENTS, 0, 1, 10).unused, (0, 7), "only once");
    assert_eq!(state.wish(SLICES, 0, 1, 10).tokens, None);
}

#[test]
fn a_process_without_a_token_asks_again_when_the_next_one_comes() {
    let now = Instant::now();
    let later = now + Duration::from_millis(3);
    let again = |limits, granted: Budgeted| {
        let mut state = State::new(now);
        let wish = state.wish(limits, 0, 9, 10);
        state.granted(limits, &wish, granted, (now, later));
        state.again.duration_since(later)
    };
    let none = |wait_ms| Budgeted { wait_ms, ..answer(1, 0) };
    assert_eq!(again(EVENTS, none(40)), Duration::from_millis(40));
    assert_eq!(again(EVENTS, none(1)), PAUSE);
    assert_eq!(again(EVENTS, Budgeted { wait_ms: 40, ..answer(1, 1) }), Duration::ZERO);
    assert_eq!(again(SLICES, none(40)), Duration::ZERO);
}

#[test]
fn the_slices_of_a_claim_share_the_tokens_that_are_left() {
    let now = Instant::now();
    for (tokens, leases, usual, share, left) in
        [(10, 3, 9, 4, 1), (10, 3, 2, 2, 7), (10, 0, 5, 5, 10), (2, 3, 9, 1, 2), (9, 1, 1, 1, 9)]
    {
        let mut state = with(EVENTS, answer(0, tokens), now);
        assert_eq!(state.share(leases, usual), (share, 7), "{tokens} {leases} {usual}");
        assert_eq!(state.tokens, left, "{tokens} {leases} {usual}");
    }
}

#[test]
fn tokens_that_a_claim_did_not_use_can_be_taken_again_and_older_ones_are_dropped() {
    let now = Instant::now();
    let mut state = with(BOTH, answer(8, 5), now);
    let asked = state.take(BOTH, 0, 4, now);
    state.answered(BOTH, asked, 1);
    assert_eq!((state.asked, state.tokens), (0, 4));
    state.put_back(BOTH, 2, 7);
    state.put_back(BOTH, 100, 6);
    assert_eq!(state.tokens, 6, "the second ones are of an older grant");
    state.put_back(SLICES, 3, 7);
    assert_eq!(state.tokens, 6, "nothing limits events");
    state.answered(BOTH, Asked { leases: 4, stamp: 7 }, 9);
    assert_eq!((state.asked, state.tokens), (0, 6), "more leases than it asked for");
}

#[test]
fn events_cost_the_time_of_their_tokens() {
    let total = |limits| Total::new(limits).unwrap();
    assert_eq!(total(EVENTS).cost_us(3), 3_000);
    assert_eq!(total(SLICES).cost_us(3), 0);
    assert_eq!([EVENTS, SLICES, BOTH].map(|limits| total(limits).has_rate()), [true, false, true]);
    assert!(Total::new(Totals::default()).is_none());
    assert_eq!(total(SLICES).share(3, 9), (9, 0), "nothing limits events");
    assert!(total(EVENTS).deadline().is_none());
    assert!(total(SLICES).deadline().is_some());
}

#[test]
fn tokens_that_a_slice_does_not_use_go_back_also_if_it_was_not_read() {
    let total = Arc::new(Total::new(EVENTS).unwrap());
    *total.state() = with(EVENTS, answer(0, 30), Instant::now());
    let (share, stamp) = total.share(3, 9);
    assert_eq!((share, total.state().tokens), (9, 6), "one of each was reserved before");
    let tokens = || Tokens::new(Some(&total), share, stamp);
    tokens().used(4);
    assert_eq!(total.state().tokens, 11);
    tokens().used(10);
    assert_eq!(total.state().tokens, 11);
    drop(tokens());
    assert_eq!(total.state().tokens, 20);
    Tokens::new(None, share, stamp).used(1);
    assert_eq!(total.state().tokens, 20);
}
