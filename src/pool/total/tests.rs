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
    let wish = state.wish(limits, 0, 100, 10, BATCH);
    state.granted(limits, &wish, granted, (now, now), LATE);
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
    let wish = state.wish(SLICES, 2, 1, 10, BATCH);
    assert_eq!(wish.slices, Some((3, 8)));
    assert_eq!(state.take(SLICES, 2, 9, now).leases, 1, "also before the answer");
    state.granted(SLICES, &wish, answer(8, 0), (now, now), LATE);
    assert_eq!(state.slices, 3);
    assert_eq!(state.wish(SLICES, 7, 9, 10, BATCH).slices, Some((8, 8)), "no more than the limit");
    let mut state = with(SLICES, answer(8, 0), now);
    state.take(SLICES, 1, 2, now);
    assert_eq!(
        state.wish(SLICES, 1, 1, 10, BATCH).slices,
        Some((4, 8)),
        "also those that are asked for"
    );
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
    assert_eq!(state.wish(EVENTS, 0, 2, 10, BATCH).tokens, Some((20, RATE)));
    assert_eq!(state.wish(EVENTS, 0, 100, 10, BATCH).tokens, Some((50, RATE)), "those of 50 ms");
    assert_eq!(state.wish(EVENTS, 0, 100, 10, 4 * BATCH).tokens, Some((200, RATE)));
    assert_eq!(state.wish(EVENTS, 0, 0, 10, BATCH).tokens, Some((0, RATE)));
    let slow = Totals { rate: Some(Bucket { interval_us: 1e6, burst: 1 }), concurrency: None };
    assert_eq!(state.wish(slow, 0, 9, 10, BATCH).tokens.map(|(tokens, _)| tokens), Some(1));
    let mut state = with(EVENTS, answer(0, 9), now);
    assert_eq!(state.wish(EVENTS, 0, 1, 10, BATCH).unused, (9, 7));
    assert_eq!(state.wish(EVENTS, 0, 1, 10, BATCH).unused, (0, 7), "only once");
    assert_eq!(state.wish(SLICES, 0, 1, 10, BATCH).tokens, None);
}

#[test]
fn a_process_without_a_token_asks_again_when_the_next_one_comes() {
    let now = Instant::now();
    let later = now + Duration::from_millis(3);
    let again = |limits, granted: Budgeted| {
        let mut state = State::new(now);
        let wish = state.wish(limits, 0, 9, 10, BATCH);
        state.granted(limits, &wish, granted, (now, later), LATE);
        state.again.duration_since(later)
    };
    let none = |wait_ms| Budgeted { wait_ms, ..answer(1, 0) };
    assert_eq!(again(EVENTS, none(40)), Duration::from_millis(40));
    assert_eq!(again(EVENTS, none(1)), PAUSE);
    assert_eq!(again(EVENTS, Budgeted { wait_ms: 40, ..answer(1, 1) }), Duration::ZERO);
    assert_eq!(again(SLICES, none(40)), Duration::ZERO);
}

#[test]
fn what_the_limits_refuse_is_no_demand() {
    let now = Instant::now();
    let mut state = with(SLICES, answer(2, 0), now);
    assert_eq!(state.needed(SLICES, 100, 2, now), 8, "all processes may use 8");
    assert_eq!(state.needed(EVENTS, 100, 2, now), 100);
    state.again = now + Duration::from_secs(60);
    assert_eq!(state.close(now), state.again);
    let end = state.again + AGAIN;
    for (at, needed) in [(now, 2), (end - Duration::from_nanos(1), 2), (end, 100)] {
        assert_eq!(state.needed(EVENTS, 100, 2, at), needed);
    }
}

#[test]
fn the_slices_of_a_claim_share_the_tokens_that_are_left() {
    let now = Instant::now();
    for (tokens, leases, usual, share, left) in
        [(10, 3, 9, 3, 1), (10, 3, 2, 1, 7), (10, 0, 5, 4, 10), (2, 3, 9, 0, 2), (9, 1, 1, 0, 9)]
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
    let slices = Arc::new(total(SLICES));
    let share = slices.share(Asked { leases: 3, stamp: 7 }, 3, 9);
    assert!(share.events == 9 && share.total.is_none(), "nothing limits events: {share:?}");
    assert!(total(EVENTS).deadline().is_none());
    assert!(total(SLICES).deadline().is_some());
}

#[test]
fn tokens_that_a_slice_does_not_use_go_back_to_their_grants_also_if_it_was_not_read() {
    let total = Arc::new(Total::new(EVENTS).unwrap());
    *total.state() = with(EVENTS, answer(0, 30), Instant::now());
    let share = total.share(Asked { leases: 3, stamp: 7 }, 3, 9);
    assert_eq!((share.events, total.state().tokens), (9, 6), "one of each was reserved before");
    share.tokens().used(4);
    assert_eq!(total.state().tokens, 11);
    share.tokens().used(10);
    assert_eq!(total.state().tokens, 11);
    drop(share.tokens());
    assert_eq!(total.state().tokens, 20);
    Share::unlimited(9).tokens().used(1);
    assert_eq!(total.state().tokens, 20);
    let older = total.share(Asked { leases: 1, stamp: 6 }, 1, 5);
    assert_eq!((older.events, total.state().tokens), (5, 16));
    drop(older.tokens());
    assert_eq!(total.state().tokens, 20, "the reserved one is of an older grant");
}

#[test]
fn tokens_are_as_old_as_their_answer_unless_the_process_was_frozen() {
    let now = Instant::now();
    let leases = |took, late| {
        let mut state = State::new(now);
        let wish = state.wish(EVENTS, 0, 9, 1, BATCH);
        state.granted(EVENTS, &wish, answer(0, 3), (now, now + took), late);
        state.take(EVENTS, 0, 9, now + took).leases
    };
    let slow = Duration::from_millis(400);
    assert_eq!(leases(LATE, LATE), 3);
    assert_eq!(leases(slow, LATE), 0, "Redis usually answers earlier");
    assert_eq!(leases(slow, LATE + CALLS * slow), 3, "Redis is slow");
}

#[test]
fn an_answer_without_tokens_makes_those_of_its_grant_no_younger() {
    let now = Instant::now();
    let mut state = with(BOTH, answer(8, 3), now);
    let asked = state.take(BOTH, 0, 3, now);
    let later = now + BATCH;
    let wish = state.wish(BOTH, 3, 0, 1, BATCH);
    state.granted(BOTH, &wish, answer(8, 0), (later, later), LATE);
    state.answered(BOTH, asked, 0);
    assert_eq!((state.tokens, state.take(BOTH, 0, 9, later).leases), (3, 0));
    let wish = state.wish(BOTH, 0, 3, 1, BATCH);
    state.granted(BOTH, &wish, answer(8, 3), (later, later), LATE);
    assert_eq!(state.take(BOTH, 0, 9, later).leases, 3, "they were returned, and taken again");
}

#[test]
fn a_renewal_that_confirms_fewer_slices_than_are_in_use_does_not_extend_them() {
    let now = Instant::now();
    let later = now + TTL;
    for (answered, extended) in [(5, true), (4, false), (0, false)] {
        let mut state = with(SLICES, answer(8, 0), now);
        state.take(SLICES, 3, 2, now);
        let wish = state.wish(SLICES, 3, 0, 1, BATCH);
        assert_eq!((wish.slices, wish.used), (Some((5, 8)), 5), "3 are held, 2 are asked for");
        state.granted(SLICES, &wish, answer(answered, 0), (later, later), LATE);
        assert_eq!(state.until > later, extended, "{answered} of 5");
    }
}
