//! Notifications.

mod change;
mod held;
mod lost;
mod results;
mod throttle;
mod wait;

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::id::{BotId, Sequence, ShardCount};
use fairlane::notifications::record::{
    Begun, Caps, Duplicates, Ended, Ending, NewNotification, NotificationId, When,
};
use fairlane::notifications::scripts::{
    Amend, Amended, Amendment, Begin, Finish, Release, Restore, Schedule, Scheduled, SendHold,
    Throttle,
};
use fairlane::quotas::{Quota, Quotas};
use fairlane::redis::scripts::{Promote, Redrive};
use redis::Commands;

use super::{SLICE_US, Shard, bot};

pub(super) const HOLD: SendHold =
    SendHold { send: Duration::from_secs(20), patience: Duration::from_secs(5) };
const HALF_HOUR: Duration = Duration::from_secs(1_800);
const SECOND: i64 = 1_000_000;
const DAY: Duration = Duration::from_secs(86_400);

pub(super) fn id() -> NotificationId {
    NotificationId::new(ShardCount::new(1).unwrap().shards().next().unwrap())
}

pub(super) fn new(of: &str, uid: &str, delay_ms: u64) -> NewNotification {
    NewNotification {
        bot: bot(of),
        uid: uid.to_owned(),
        kind: "none".to_owned(),
        when: When::After(Duration::from_millis(delay_ms)),
        expires_in: DAY,
        waits: false,
        url: "https://example.com/x".to_owned(),
        method: "POST".to_owned(),
        body: "{}".to_owned(),
        recheck: String::new(),
        headers: String::new(),
        trace: None,
        key: None,
    }
}

pub(super) fn begun(id: NotificationId) -> Begun {
    Begun {
        id,
        token: 1,
        bot: bot("a"),
        uid: "u".to_owned(),
        kind: "none".to_owned(),
        label: "none".to_owned(),
        url: String::new(),
        method: String::new(),
        body: String::new(),
        recheck: String::new(),
        headers: String::new(),
        key: String::new(),
        due_ms: 0,
        expires_ms: 0,
        attempts: 1,
        ready_ms: 0,
        counts_late: true,
        trace: String::new(),
        postponed: false,
    }
}

/// A shard of notifications, and its time in µs.
struct Notes {
    shard: Shard,
    now: i64,
    throttle: Throttle,
    /// What bots may hold.
    quota: Quota,
    /// The delay that every send reports.
    late: Option<Duration>,
}

impl Notes {
    fn new() -> Self {
        // Keys expire by the real time. The test time starts an hour into a day, so that no test
        // passes midnight.
        let tomorrow = SystemClock.now().as_secs() / 86_400 + 1;
        let now = i64::try_from((tomorrow * 24 + 1) * 3_600).unwrap() * SECOND;
        let throttle = Throttle {
            threshold: HALF_HOUR,
            by_kind: Vec::new(),
            caps: Caps::default(),
            defers: false,
        };
        Self { shard: Shard::of("notifications"), now, throttle, quota: Quota::NONE, late: None }
    }

    fn time(&self) -> Duration {
        Duration::from_micros(self.now.unsigned_abs())
    }

    fn pass(&mut self, seconds: i64) {
        self.now += seconds * SECOND;
    }

    fn schedule(&mut self, new: &NewNotification) -> NotificationId {
        let (id, scheduled) = self.schedule_over(new, None);
        assert!(matches!(scheduled, Scheduled::Ok { .. }), "{scheduled:?}");
        id
    }

    fn schedule_over(
        &mut self,
        new: &NewNotification,
        known: Option<(NotificationId, &str)>,
    ) -> (NotificationId, Scheduled) {
        let known = known.map(|(id, uid)| (id, uid.to_owned()));
        let (keys, now, id) = (&self.shard.keys.clone(), self.time(), id());
        let (label, quota) = (&*new.kind, self.quota);
        let call = Schedule { keys, now, id, new, label, quota, known };
        (id, self.call(&call))
    }

    /// Queues the notifications that are due, and returns their number.
    fn promote(&mut self) -> u64 {
        let keys = &self.shard.keys.clone();
        let due: Vec<String> = self.shard.harness.plain().zrange(&keys.due, 0, -1).unwrap();
        let mut events = Vec::new();
        for id in due {
            let later: Vec<u8> = self.shard.harness.plain().hget(&keys.later, &id).unwrap();
            let text = String::from_utf8_lossy(&later).into_owned();
            let (length, rest) = text.split_once(':').unwrap();
            events.push((id, bot(&rest[..length.parse().unwrap()])));
        }
        if events.is_empty() {
            return 0;
        }
        self.call(&Promote { keys, slice_us: SLICE_US, events: &events }).moved
    }

    fn queued(&mut self, of: &BotId) -> Vec<(Sequence, Event)> {
        let key = self.shard.keys.queue(of);
        let records: Vec<Vec<u8>> = self.shard.harness.plain().lrange(key, 0, -1).unwrap();
        records.iter().map(|record| Event::decode(record, of).unwrap()).collect()
    }

    /// Handles the queued notifications. The queue keeps them, as after a crash.
    fn handle(&mut self, of: &str) -> Vec<Begun> {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot(of));
        let queued = self.queued(bot);
        let events: Vec<(NotificationId, &str, Sequence)> = queued
            .iter()
            .map(|(sequence, event)| {
                assert_eq!((event.kind(), event.source()), ("notification.due", "fairlane"));
                (event.id().parse().unwrap(), event.subject().unwrap_or_default(), *sequence)
            })
            .collect();
        if events.is_empty() {
            return Vec::new();
        }
        let throttle = &self.throttle.clone();
        let (quota, events) = (self.quota, &events);
        let call = Begin { keys, now, bot, hold: HOLD, throttle, dead_max: 100, quota, events };
        self.call(&call).begun
    }

    fn forget_queue(&mut self, of: &str) {
        let key = self.shard.keys.queue(&bot(of));
        let () = self.shard.harness.plain().del(key).unwrap();
    }

    /// Queues the notifications that are due, and handles them.
    fn step(&mut self, of: &str) -> Vec<Begun> {
        self.promote();
        let begun = self.handle(of);
        self.forget_queue(of);
        begun
    }

    fn finish(&mut self, begun: &Begun, ending: Ending) -> Option<String> {
        let (keys, now) = (&self.shard.keys.clone(), self.time());
        let endings = &[Ended { begun: begun.clone(), ending, late: self.late }];
        let quotas = &Quotas::new(self.quota, BTreeMap::new(), 100);
        let throttle = &self.throttle.clone();
        let call = Finish { keys, now, dead_max: 100, quotas, throttle, endings };
        self.call(&call).outcomes.pop().unwrap()
    }

    fn amend(&mut self, id: NotificationId, uid: &str, amendment: Amendment) -> Amended {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot("b"));
        let ended_bytes = self.quota.ended_bytes;
        self.call(&Amend { keys, now, id, bot, uid, key: "k", ended_bytes, amendment })
    }

    fn online(&mut self, uid: &str) -> bool {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot("b"));
        let threshold = Duration::from_secs(10);
        self.call(&Release { keys, now, bot, uid, threshold })
    }

    fn restore(&mut self, id: NotificationId, uid: &str, sequence: u64) -> bool {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot("b"));
        self.call(&Restore { keys, now, id, bot, uid, sequence })
    }

    fn state(&mut self, id: NotificationId) -> String {
        let key = self.shard.keys.notification(id);
        self.shard.harness.plain().hget(key, "state").unwrap()
    }

    /// The number of notifications that have a due time.
    fn armed(&mut self) -> usize {
        let (due, later) = (self.shard.keys.due.clone(), self.shard.keys.later.clone());
        let armed: usize = self.shard.harness.plain().zcard(due).unwrap();
        assert_eq!(armed, self.shard.harness.plain().hlen::<_, usize>(later).unwrap());
        armed
    }

    fn stats(&mut self) -> BTreeMap<String, u64> {
        let [day, hour] = self.shard.keys.stats(self.time());
        let of_day: BTreeMap<String, u64> = self.shard.harness.plain().hgetall(day).unwrap();
        let of_hour: BTreeMap<String, u64> = self.shard.harness.plain().hgetall(hour).unwrap();
        assert!(of_hour.iter().all(|(name, n)| of_day[name] >= *n));
        of_day
    }
}

fn counted(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
    pairs.iter().map(|(outcome, n)| (format!("none|{outcome}"), *n)).collect()
}

#[test]
fn a_notification_that_is_due_first_wakes_the_schedulers_and_its_key_ends_a_week_after_it() {
    let mut notes = Notes::new();
    let key = Some(("k".to_owned(), Duplicates::Ignore));
    for (delay, wakes) in [(60_000, true), (90_000, false), (30_000, true)] {
        let new = NewNotification {
            key: key.clone().filter(|_| delay == 60_000),
            ..new("b", "u", delay)
        };
        let (keys, now) = (&notes.shard.keys.clone(), notes.time());
        let (quota, known, label) = (Quota::NONE, None, "none");
        let call = Schedule { keys, now, id: id(), new: &new, label, quota, known };
        let (_, heard) = notes.shard.harness.call(notes.now, &call);
        let due = format!("due {}", notes.time().as_millis() + u128::from(delay) + 1);
        assert_eq!(heard, if wakes { vec![due] } else { Vec::new() }, "{delay}");
    }
    let key = notes.shard.keys.notification_key(&bot("b"), "k");
    let lives: i64 = notes.shard.harness.plain().pttl(key).unwrap();
    let expected = i64::try_from((8 * DAY).as_millis()).unwrap() + 60_000;
    assert!((expected - 60_000..=expected + 1).contains(&lives), "{lives}");
}

#[test]
fn a_notification_is_received_due_sent_and_counted_never_early() {
    let mut notes = Notes::new();
    let sent = notes.schedule(&new("b", "u", 1_000));
    notes.pass(1);
    assert_eq!(notes.promote(), 0, "within the millisecond that had begun");
    notes.now += 1_000;
    let begun = notes.step("b");
    assert_eq!(begun.len(), 1);
    notes.late = Some(Duration::from_micros(1_001));
    let first = &begun[0];
    assert_eq!((first.id, first.attempts, &*first.url), (sent, 1, "https://example.com/x"));
    assert_eq!((&*first.method, &*first.body, &*first.recheck), ("POST", "{}", ""));
    assert_eq!(first.expires_ms - first.due_ms, 86_400_000);
    assert_eq!((notes.state(sent), notes.armed()), ("sending".to_owned(), 1));
    assert_eq!(notes.finish(first, Ending::Sent), Some("sent".to_owned()));
    assert_eq!((notes.state(sent), notes.armed()), ("sent".to_owned(), 0));
    assert_eq!(notes.finish(first, Ending::Sent), None, "once only");
    let expected = counted(&[("late2", 1), ("received", 1), ("sent", 1)]);
    assert_eq!(notes.stats(), expected, "nor is how late it was told twice");
    let key = notes.shard.keys.notification(sent);
    let left: i64 = notes.shard.harness.plain().ttl(key).unwrap();
    assert!((604_700..=604_800).contains(&left), "{left}");
}

#[test]
fn an_event_that_comes_again_after_a_crash_starts_nothing_twice() {
    let mut notes = Notes::new();
    let note = notes.schedule(&new("b", "u", 0));
    notes.promote();
    let begun = notes.handle("b");
    assert_eq!(begun.len(), 1);
    assert_eq!(notes.handle("b"), [], "the send is under way");
    assert_eq!(notes.finish(&begun[0], Ending::Dead("410".into())), Some("dead".into()));
    assert_eq!(notes.handle("b"), [], "nor is a dead one brought back by it");
    assert_eq!(notes.state(note), "dead");
}

#[test]
fn the_send_of_a_killed_process_comes_due_again_and_its_late_answer_changes_nothing() {
    let mut notes = Notes::new();
    let note = notes.schedule(&new("b", "u", 0));
    let lost = notes.step("b").remove(0);
    notes.pass(19);
    assert_eq!((notes.promote(), notes.step("b")), (0, Vec::new()));
    notes.pass(2);
    assert_eq!(notes.step("b"), [], "its process may live");
    notes.pass(3);
    assert_eq!(notes.step("b"), []);
    notes.pass(3);
    let again = notes.step("b").remove(0);
    assert_eq!((again.id, again.attempts), (note, 2));
    assert!(again.token > lost.token);
    for ending in [Ending::Sent, Ending::Dead("x".into()), Ending::Refused("x".into())] {
        assert_eq!(notes.finish(&lost, ending), None);
    }
    assert_eq!((notes.state(note), notes.armed()), ("sending".to_owned(), 1));
    assert_eq!(notes.finish(&again, Ending::Sent), Some("sent".into()));
    assert_eq!(notes.stats(), counted(&[("received", 1), ("sent", 1)]));
}

#[test]
fn a_send_whose_process_lives_is_ended_however_long_redis_was_unavailable() {
    let mut notes = Notes::new();
    let note = notes.schedule(&new("b", "u", 0));
    let sent = notes.step("b").remove(0);
    // No process reached Redis for an hour. After that, the schedulers come first.
    notes.pass(3_600);
    assert_eq!(notes.promote(), 1);
    assert_eq!(notes.handle("b"), [], "it is asked for first");
    assert_eq!(notes.handle("b"), [], "also when its event is handled twice");
    notes.pass(4);
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.finish(&sent, Ending::Sent), Some("sent".into()));
    assert_eq!((notes.state(note), notes.armed()), ("sent".to_owned(), 0));
    notes.pass(60);
    assert_eq!(notes.step("b"), []);
}

#[test]
fn a_retry_told_late_waits_for_its_pause_although_the_safety_net_is_queued() {
    let mut notes = Notes::new();
    notes.schedule(&new("b", "u", 0));
    let failed = notes.step("b").remove(0);
    notes.pass(21);
    assert_eq!(notes.promote(), 1);
    let retry = Ending::Retry(Duration::from_secs(30), "500".into());
    assert_eq!(notes.finish(&failed, retry), Some("retry".into()));
    assert_eq!(notes.step("b"), [], "what is queued means nothing any more");
    notes.pass(29);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    assert_eq!(notes.step("b").remove(0).attempts, 2);
}

#[test]
fn deleted_dead_letters_are_told_with_those_above_the_quota_of_the_bot() {
    let three = Quota { dead_letters: 3, ..Quota::NONE };
    for (dead_max, own, told) in
        [(1, None, (2, 0)), (9, Some(three), (1, 1)), (2, Some(three), (2, 0))]
    {
        let mut notes = Notes::new();
        for _ in 0..if own.is_some() { 4 } else { 3 } {
            notes.schedule(&new("b", "", 0));
        }
        let dead = |begun| Ended { begun, ending: Ending::Dead("410".into()), late: None };
        let endings: Vec<Ended> = notes.step("b").into_iter().map(dead).collect();
        let (keys, now) = (&notes.shard.keys.clone(), notes.time());
        let own = own.map(|own| (bot("b"), own)).into_iter().collect();
        let quotas = &Quotas::new(Quota { dead_letters: 9, ..Quota::NONE }, own, 100);
        let throttle = &notes.throttle.clone();
        let finished =
            notes.call(&Finish { keys, now, dead_max, quotas, throttle, endings: &endings });
        assert_eq!((finished.letters_removed, finished.letters_over_quota), told, "{dead_max}");
    }
}

#[test]
fn an_ended_notification_keeps_no_body_unless_it_may_be_redriven() {
    let mut notes = Notes::new();
    let recheck =
        || NewNotification { recheck: "https://example.com/ok".to_owned(), ..new("b", "u", 0) };
    for (ending, kept) in [(Ending::Sent, 0), (Ending::Dead("410".into()), 3)] {
        let note = notes.schedule(&NewNotification { uid: format!("{ending:?}"), ..recheck() });
        let begun = notes.step("b").remove(0);
        notes.finish(&begun, ending);
        let key = notes.shard.keys.notification(note);
        let held: Vec<Option<String>> =
            notes.shard.harness.plain().hmget(key, &["body", "recheck", "method"]).unwrap();
        assert_eq!(held.iter().flatten().count(), kept);
    }
}

#[test]
fn a_retry_counts_a_postponement_does_not_and_both_end_where_it_expires() {
    let mut notes = Notes::new();
    let short = NewNotification { expires_in: Duration::from_secs(60), ..new("b", "u", 0) };
    let note = notes.schedule(&short);
    let seconds = Duration::from_secs;
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Postpone(seconds(2), "busy".into()));
    notes.pass(3);
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.attempts, begun.postponed), (1, true));
    notes.finish(&begun, Ending::Retry(seconds(20), "500".into()));
    notes.pass(19);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.attempts, begun.postponed), (2, false));
    let late = Ending::Retry(seconds(40), "the receiver answered 500".into());
    assert_eq!(notes.finish(&begun, late), Some("dead".into()));
    assert_eq!((notes.state(note), notes.armed()), ("dead".to_owned(), 0));
    assert_eq!(notes.stats(), counted(&[("received", 1), ("retried", 1), ("dead", 1)]));

    // After a redrive, its attempts start at one again.
    let (keys, letter) = (&notes.shard.keys.clone(), notes.shard.letters()[0]);
    let redrive = Redrive { keys, id: letter, bot: &bot("b"), slice_us: SLICE_US, renews: false };
    assert!(notes.shard.call(notes.now, &redrive));
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.id, begun.attempts), (note, 1));
    assert_eq!(notes.finish(&begun, Ending::Sent), Some("sent".into()));
}

#[test]
fn a_notification_whose_time_passed_before_any_attempt_has_expired() {
    let mut notes = Notes::new();
    let short = NewNotification { expires_in: Duration::from_secs(60), ..new("b", "u", 0) };
    let note = notes.schedule(&short);
    notes.pass(61);
    assert_eq!(notes.step("b"), []);
    assert_eq!((notes.state(note), notes.armed()), ("expired".to_owned(), 0));
    assert_eq!(notes.stats(), counted(&[("received", 1), ("expired", 1)]));
}

#[test]
fn a_notification_postponed_until_it_expired_is_a_dead_letter() {
    let mut notes = Notes::new();
    let short = NewNotification { expires_in: Duration::from_secs(60), ..new("b", "u", 0) };
    let note = notes.schedule(&short);
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Postpone(Duration::from_secs(30), "left alone".into()));
    notes.pass(61);
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.state(note), "dead");
    assert_eq!(notes.stats(), counted(&[("dead", 1), ("received", 1)]));
}

#[test]
fn a_notification_postponed_for_longer_than_it_lasts_ends_when_it_expires() {
    let mut notes = Notes::new();
    let short = NewNotification { expires_in: Duration::from_secs(60), ..new("b", "u", 0) };
    let note = notes.schedule(&short);
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Postpone(Duration::from_secs(300), "full".into()));
    notes.pass(60);
    assert_eq!(notes.step("b"), []);
    assert_eq!((notes.state(note), notes.armed()), ("dead".to_owned(), 0));
}

#[test]
fn hostile_users_and_types_stay_apart() {
    let mut notes = Notes::new();
    let uids = ["*", "{}", "a b", "1|2", "日本", "'", "\\", "%s", &"x".repeat(256)];
    for uid in uids {
        notes.schedule(&NewNotification { kind: format!("|{uid}|"), ..new("b", uid, 0) });
    }
    let begun = notes.step("b");
    assert_eq!(begun.iter().map(|begun| &*begun.uid).collect::<Vec<_>>(), uids);
    for begun in &begun {
        assert_eq!(begun.kind, format!("|{}|", begun.uid));
        assert_eq!(notes.finish(begun, Ending::Sent), Some("sent".into()));
    }
    let stats = notes.stats();
    for uid in uids {
        assert_eq!(stats[&format!("|{uid}||sent")], 1);
    }
}
