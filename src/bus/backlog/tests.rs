use super::*;

fn at(ms: u64) -> Offset {
    Offset { ms, seq: 0 }
}

/// Adds events of a sender, all at one offset.
fn add(senders: &mut Senders, sender: u64, events: u64, last: u64, now: Instant) -> bool {
    let parts = [(sender, events)];
    let entered = senders.enter(&parts, Offset::default(), (now, now)).is_ok();
    if entered {
        senders.added(&parts, at(last), Offset::default(), now);
    }
    entered
}

#[tokio::test(start_paused = true)]
async fn a_sender_with_too_many_uncopied_events_waits_and_others_pass() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    for last in 1..=7 {
        assert!(add(&mut senders, 1, 100, last, now), "{last}");
    }
    assert!(!add(&mut senders, 1, 1, 8, now));
    assert!(add(&mut senders, 2, 1_000, 9, now), "a first request is never too large");
    assert!(!add(&mut senders, 2, 1, 10, now));
    assert!(add(&mut senders, 3, 1, 11, now));
    let entered = senders.enter(&[(3, 1), (1, 1)], at(1), (now, now));
    assert_eq!(entered, Ok(Copying::Goes), "the first hundred are copied");
    senders.left(&[(3, 1), (1, 1)]);
    let entered = senders.enter(&[(3, 1), (1, 200)], at(1), (now, now));
    assert_eq!(entered, Err(Exceeded { place: 1, events: 600 }));
}

#[tokio::test(start_paused = true)]
async fn events_that_are_being_added_count_until_they_are_given_up() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    let enter = |senders: &mut Senders| senders.enter(&[(1, 350)], Offset::default(), (now, now));
    assert!(enter(&mut senders).is_ok() && enter(&mut senders).is_ok());
    assert!(enter(&mut senders).is_err());
    senders.left(&[(1, 350)]);
    assert!(enter(&mut senders).is_ok());
}

#[tokio::test(start_paused = true)]
async fn events_of_a_request_that_was_cancelled_while_they_were_sent_count_for_a_while() {
    let target = crate::redis::Target::new("redis://127.0.0.1:1").unwrap();
    let link = Link::new(target, Vec::new(), 0, Duration::from_secs(1));
    let backlog = Backlog::new(Arc::new(link), Some("events"));
    let enter = || backlog.enter(vec![(1, 350)]);
    let mut sent = enter().await.unwrap();
    let waiting = enter().await.unwrap();
    sent.sends();
    drop(sent);
    let events = || backlog.senders().uncopied[&1].total();
    assert_eq!(events(), 700);
    drop(waiting);
    assert_eq!(events(), 350, "it had sent nothing");
    let mut refused = enter().await.unwrap();
    refused.sends();
    refused.failed();
    tokio::time::advance(Duration::from_millis(1_999)).await;
    drop(enter().await.unwrap());
    assert_eq!(events(), 350);
    tokio::time::advance(Duration::from_millis(1)).await;
    drop(enter().await.unwrap());
    assert_eq!(events(), 0);
}

#[tokio::test(start_paused = true)]
async fn entries_that_the_reader_has_not_reported_yet_delay_no_publisher() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    assert!(add(&mut senders, 1, TOLD_EVERY, 1, now));
    assert!(add(&mut senders, 1, 1_000, 2, now));
    assert!(!add(&mut senders, 1, 1, 3, now));
}

#[tokio::test(start_paused = true)]
async fn while_nothing_is_copied_all_pass_until_something_is() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    assert!(add(&mut senders, 1, 1_000, 1, now));
    let later = now + 2 * STUCK;
    assert!(!add(&mut senders, 1, 1, 2, later), "it begins to wait");
    let mut enter =
        |waited| senders.enter(&[(1, 1)], Offset::default(), (later, later + waited)).is_ok();
    assert!(!enter(STUCK));
    assert!(enter(STUCK + STUCK / 10));
    let now = later + 2 * STUCK;
    for last in 3..100 {
        assert!(add(&mut senders, 1, 1_000, last, now), "{last}");
    }
    senders.moved(now);
    let now = now + SWEEP;
    assert!(add(&mut senders, 1, 1_000, 100, now), "what passed meanwhile does not count");
    assert!(!add(&mut senders, 1, 1, 101, now));
}

#[tokio::test(start_paused = true)]
async fn several_waiting_senders_share_the_room() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    for sender in 1..=3 {
        assert!(add(&mut senders, sender, 240, sender, now));
        assert!(senders.wait(sender));
    }
    assert!(!add(&mut senders, 1, 20, 9, now), "each has a third, but at least 250");
    for sender in 2..=3 {
        senders.waited(sender);
    }
    assert!(add(&mut senders, 1, 20, 9, now));
}

#[tokio::test(start_paused = true)]
async fn few_requests_wait_and_senders_without_events_are_forgotten() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    for sender in 0..20 {
        for nth in 0..=WAITING_PER_SENDER {
            let waits = nth < WAITING_PER_SENDER && sender * WAITING_PER_SENDER + nth < WAITING_MAX;
            assert_eq!(senders.wait(u64::from(sender)), waits, "{sender} {nth}");
        }
    }
    for sender in 0..WAITING_MAX / WAITING_PER_SENDER {
        for _ in 0..WAITING_PER_SENDER {
            senders.waited(u64::from(sender));
        }
    }
    assert!(add(&mut senders, 99, 5, 7, now));
    assert!(senders.enter(&[], at(6), (now, now + SWEEP)).is_ok());
    assert_eq!(senders.uncopied.keys().collect::<Vec<_>>(), [&99]);
    assert!(senders.enter(&[], at(7), (now, now + 2 * SWEEP)).is_ok());
    assert!(senders.uncopied.is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_sender_of_many_small_requests_is_remembered_in_bounded_memory() {
    let (mut senders, now) = (Senders::default(), Instant::now());
    senders.uncopied.entry(1).or_default();
    for last in 1..=2_000 {
        senders.added(&[(1, 1)], at(last), Offset::default(), now);
    }
    let uncopied = senders.uncopied.get_mut(&1).unwrap();
    assert_eq!((uncopied.added.len(), uncopied.total()), (REMEMBERED_MAX, 2_000));
    uncopied.forget(at(500));
    assert_eq!(uncopied.total(), 1_500);
    uncopied.forget(at(2_000));
    assert!(uncopied.is_idle());
}
