//! Notifications.

use std::collections::BTreeMap;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::event::Event;
use fairlane::id::{BotId, Sequence, ShardCount};
use fairlane::keyspace::scripts::{Promote, Redrive};
use fairlane::notifications::record::{
    Begun, Cap, Caps, Duplicates, Ended, Ending, NewNotification, NotificationId, State, When,
};
use fairlane::notifications::scripts::{
    Amend, Amended, Amendment, Begin, Finish, Release, Restore, Schedule, Scheduled, SendHold,
    Throttle,
};
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
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
        due_ms: 0,
        expires_ms: 0,
        attempts: 1,
        ready_ms: 0,
        counts_late: true,
    }
}

/// A shard of notifications, and its time in µs.
struct Notes {
    shard: Shard,
    now: i64,
    throttle: Throttle,
    /// How late every send is said to be.
    late: Option<Duration>,
}

impl Notes {
    fn new() -> Self {
        // What runs out does so by the real time; an hour into a day, so that no test passes midnight.
        let tomorrow = SystemClock.now().as_secs() / 86_400 + 1;
        let now = i64::try_from((tomorrow * 24 + 1) * 3_600).unwrap() * SECOND;
        let throttle = Throttle {
            threshold: HALF_HOUR,
            by_kind: Vec::new(),
            caps: Caps::default(),
            defers: false,
        };
        Self { shard: Shard::of("notifications"), now, throttle, late: None }
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
        let call = Schedule { keys, now, id, new, label: &new.kind, known };
        (id, self.shard.call(self.now, &call))
    }

    /// Queues what is due; answers how many that were.
    fn promote(&mut self) -> u64 {
        let keys = &self.shard.keys.clone();
        let due: Vec<String> = self.shard.clocked.plain().zrange(&keys.due, 0, -1).unwrap();
        let mut events = Vec::new();
        for id in due {
            let later: Vec<u8> = self.shard.clocked.plain().hget(&keys.later, &id).unwrap();
            let text = String::from_utf8_lossy(&later).into_owned();
            let (length, rest) = text.split_once(':').unwrap();
            events.push((id, bot(&rest[..length.parse().unwrap()])));
        }
        if events.is_empty() {
            return 0;
        }
        self.shard.call(self.now, &Promote { keys, slice_us: SLICE_US, events: &events }).moved
    }

    fn queued(&mut self, of: &BotId) -> Vec<(Sequence, Event)> {
        let key = self.shard.keys.queue(of);
        let records: Vec<Vec<u8>> = self.shard.clocked.plain().lrange(key, 0, -1).unwrap();
        records.iter().map(|record| Event::decode(record, of).unwrap()).collect()
    }

    /// Handles what is queued, but the queue keeps it, as after a crash.
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
        let throttle = &self.throttle;
        let call = Begin { keys, now, bot, hold: HOLD, throttle, dead_max: 100, events: &events };
        self.shard.call(self.now, &call).begun
    }

    fn forget_queue(&mut self, of: &str) {
        let key = self.shard.keys.queue(&bot(of));
        let () = self.shard.clocked.plain().del(key).unwrap();
    }

    /// Queues what is due and handles it.
    fn step(&mut self, of: &str) -> Vec<Begun> {
        self.promote();
        let begun = self.handle(of);
        self.forget_queue(of);
        begun
    }

    fn finish(&mut self, begun: &Begun, ending: Ending) -> Option<String> {
        let (keys, now) = (&self.shard.keys.clone(), self.time());
        let endings = &[Ended { begun: begun.clone(), ending, late: self.late }];
        let call = Finish { keys, now, dead_max: 100, throttle: &self.throttle, endings };
        self.shard.call(self.now, &call).outcomes.pop().unwrap()
    }

    fn amend(&mut self, id: NotificationId, uid: &str, amendment: Amendment) -> Amended {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot("b"));
        self.shard.call(self.now, &Amend { keys, now, id, bot, uid, key: "k", amendment })
    }

    fn online(&mut self, uid: &str) -> bool {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot("b"));
        let threshold = Duration::from_secs(10);
        self.shard.call(self.now, &Release { keys, now, bot, uid, threshold })
    }

    fn restore(&mut self, id: NotificationId, uid: &str, sequence: u64) -> bool {
        let (keys, now, bot) = (&self.shard.keys.clone(), self.time(), &bot("b"));
        self.shard.call(self.now, &Restore { keys, now, id, bot, uid, sequence })
    }

    fn state(&mut self, id: NotificationId) -> String {
        let key = self.shard.keys.notification(id);
        self.shard.clocked.plain().hget(key, "state").unwrap()
    }

    /// Notifications that fall due some time.
    fn armed(&mut self) -> usize {
        let (due, later) = (self.shard.keys.due.clone(), self.shard.keys.later.clone());
        let armed: usize = self.shard.clocked.plain().zcard(due).unwrap();
        assert_eq!(armed, self.shard.clocked.plain().hlen::<_, usize>(later).unwrap());
        armed
    }

    fn stats(&mut self) -> BTreeMap<String, u64> {
        let [day, hour] = self.shard.keys.stats(self.time());
        let of_day: BTreeMap<String, u64> = self.shard.clocked.plain().hgetall(day).unwrap();
        let of_hour: BTreeMap<String, u64> = self.shard.clocked.plain().hgetall(hour).unwrap();
        assert!(of_hour.iter().all(|(name, n)| of_day[name] >= *n));
        of_day
    }
}

fn counted(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
    pairs.iter().map(|(outcome, n)| (format!("none|{outcome}"), *n)).collect()
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
    let left: i64 = notes.shard.clocked.plain().ttl(key).unwrap();
    assert!((604_700..=604_800).contains(&left), "{left}");
}

#[test]
fn an_event_that_comes_again_after_a_crash_begins_nothing_twice() {
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
fn what_a_killed_process_was_sending_comes_due_again_and_its_late_answer_means_nothing() {
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
    // For an hour nobody reached Redis. Then the schedulers come first.
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
fn the_end_of_a_send_is_believed_by_a_redis_that_lost_its_begin() {
    for ending in [Ending::Sent, Ending::Retry(Duration::from_secs(5), "500".into())] {
        let mut notes = Notes::new();
        let note = notes.schedule(&new("b", "u", 0));
        let key = notes.shard.keys.notification(note);
        let dump = |notes: &mut Notes| -> Vec<u8> {
            redis::cmd("DUMP").arg(&key).query(notes.shard.clocked.plain()).unwrap()
        };
        let before = dump(&mut notes);
        notes.promote();
        let begun = notes.handle("b").remove(0);
        let mut restore = redis::cmd("RESTORE");
        restore.arg(&key).arg(0).arg(before).arg("REPLACE");
        restore.exec(notes.shard.clocked.plain()).unwrap();
        let () = notes
            .shard
            .clocked
            .plain()
            .zrem(notes.shard.keys.due.clone(), note.to_string())
            .unwrap();
        assert_eq!(notes.state(note), "scheduled");
        assert_eq!(notes.finish(&begun, ending.clone()), Some(ending.word().to_owned()));
        assert_eq!(notes.step("b"), [], "{ending:?}: the event that is still queued means nothing");
        notes.pass(6);
        let again = notes.step("b");
        assert_eq!(again.len(), usize::from(ending != Ending::Sent), "{ending:?}");
        assert_eq!(notes.finish(&begun, Ending::Sent), None, "and it is believed once");
    }
}

#[test]
fn what_has_ended_keeps_no_body_unless_it_may_be_redriven() {
    let mut notes = Notes::new();
    let recheck =
        || NewNotification { recheck: "https://example.com/ok".to_owned(), ..new("b", "u", 0) };
    for (ending, kept) in [(Ending::Sent, 0), (Ending::Dead("410".into()), 3)] {
        let note = notes.schedule(&NewNotification { uid: format!("{ending:?}"), ..recheck() });
        let begun = notes.step("b").remove(0);
        notes.finish(&begun, ending);
        let key = notes.shard.keys.notification(note);
        let held: Vec<Option<String>> =
            notes.shard.clocked.plain().hmget(key, &["body", "recheck", "method"]).unwrap();
        assert_eq!(held.iter().flatten().count(), kept);
    }
}

#[test]
fn a_user_gets_one_at_a_time_and_the_others_are_dropped_once_it_is_sent() {
    let mut notes = Notes::new();
    for _ in 0..50 {
        notes.schedule(&new("b", "u", 0));
    }
    // Neither another user nor nobody is throttled by it.
    notes.schedule(&new("b", "v", 0));
    notes.schedule(&new("b", "", 0));
    notes.schedule(&new("b", "", 0));
    let begun = notes.step("b");
    assert_eq!(begun.len(), 4);
    assert_eq!(notes.step("b"), [], "the user is taken");
    notes.pass(1);
    assert_eq!(notes.step("b"), [], "and still is");
    for begun in &begun {
        assert_eq!(notes.finish(begun, Ending::Sent), Some("sent".into()));
    }
    notes.pass(1);
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.armed(), 0);
    let expected = counted(&[("received", 53), ("sent", 4), ("throttled", 49)]);
    assert_eq!(notes.stats(), expected);
    notes.schedule(&new("b", "u", 1_795_000));
    notes.pass(1_799);
    assert_eq!(notes.step("b").len(), 1, "half an hour later");
}

#[test]
fn a_failed_send_frees_its_user_for_another_one() {
    let mut notes = Notes::new();
    let (first, second) = (notes.schedule(&new("b", "u", 0)), notes.schedule(&new("b", "u", 0)));
    let begun = notes.step("b");
    let (begun, other) = (&begun[0], if begun[0].id == first { second } else { first });
    let retry = Ending::Retry(Duration::from_secs(5), "500".into());
    assert_eq!(notes.finish(begun, retry), Some("retry".into()));
    notes.pass(1);
    let next = notes.step("b");
    assert_eq!(next.iter().map(|begun| begun.id).collect::<Vec<_>>(), [other]);
    assert_eq!(notes.finish(&next[0], Ending::Sent), Some("sent".into()));
    notes.pass(5);
    assert_eq!(notes.step("b"), [], "the first one comes too soon now");
    assert_eq!(notes.state(begun.id), "throttled");
}

#[test]
fn a_type_may_have_a_threshold_of_its_own_and_throttled_ones_may_be_deferred() {
    let mut notes = Notes::new();
    notes.throttle.by_kind = vec![("urgent".to_owned(), Duration::ZERO)];
    notes.throttle.defers = true;
    notes.schedule(&new("b", "u", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    let later = notes.schedule(&new("b", "u", 0));
    notes.schedule(&NewNotification { kind: "urgent".to_owned(), ..new("b", "u", 0) });
    let urgent = notes.step("b");
    assert_eq!(urgent.iter().map(|begun| &*begun.kind).collect::<Vec<_>>(), ["urgent"]);
    notes.finish(&urgent[0], Ending::Sent);
    assert_eq!(notes.state(later), "scheduled");
    notes.pass(1_799);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    assert_eq!(notes.step("b").remove(0).id, later);
}

fn cap(text: &str) -> Cap {
    text.parse().unwrap()
}

/// A shard where nothing but caps holds a user back.
fn capped(all: &[&str], by_kind: &[(&str, &[&str])]) -> Notes {
    let mut notes = Notes::new();
    let caps = |texts: &[&str]| texts.iter().map(|text| cap(text)).collect();
    let by_kind = by_kind.iter().map(|(kind, texts)| ((*kind).to_owned(), caps(texts)));
    notes.throttle.threshold = Duration::ZERO;
    notes.throttle.caps = Caps { all: caps(all), by_bot: Vec::new(), by_kind: by_kind.collect() };
    notes
}

fn of_kind(kind: &str, uid: &str) -> NewNotification {
    NewNotification { kind: kind.to_owned(), ..new("b", uid, 0) }
}

#[test]
fn a_cap_drops_what_is_one_too_many_until_the_oldest_leaves_the_window() {
    let mut notes = capped(&["2/100s"], &[]);
    for _ in 0..2 {
        notes.schedule(&new("b", "u", 0));
        let begun = notes.step("b").remove(0);
        notes.finish(&begun, Ending::Sent);
        notes.pass(30);
    }
    let dropped = notes.schedule(&new("b", "u", 0));
    // Neither another user nor what has none is held back.
    notes.schedule(&new("b", "v", 0));
    notes.schedule(&new("b", "", 0));
    assert_eq!(notes.step("b").len(), 2);
    let key = notes.shard.keys.notification(dropped);
    let reason: String = notes.shard.clocked.plain().hget(key, "reason").unwrap();
    assert_eq!(
        (notes.state(dropped), &*reason),
        ("throttled".to_owned(), "the user got 2 within 100 s")
    );
    assert_eq!(notes.stats()["none|throttled"], 1);
    // 60 s passed since the first.
    notes.pass(39);
    let early = notes.schedule(&new("b", "u", 0));
    notes.step("b");
    assert_eq!(notes.state(early), "throttled");
    notes.pass(1);
    notes.schedule(&new("b", "u", 0));
    assert_eq!(notes.step("b").len(), 1, "a hundred seconds after it");
}

#[test]
fn a_cap_defers_to_when_there_is_room_and_counts_a_retried_one_once() {
    let mut notes = capped(&["2/100s"], &[]);
    notes.throttle.defers = true;
    let first = notes.schedule(&new("b", "u", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Retry(Duration::from_secs(5), "500".into()));
    notes.pass(6);
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.id, begun.attempts), (first, 2));
    notes.finish(&begun, Ending::Sent);
    notes.schedule(&new("b", "u", 0));
    let second = notes.step("b").remove(0);
    notes.pass(10);
    notes.finish(&second, Ending::Sent);
    let third = notes.schedule(&new("b", "u", 0));
    assert_eq!(notes.step("b"), [], "two were sent, one of them at the second attempt");
    assert_eq!(notes.state(third), "scheduled");
    notes.pass(89);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.id, third);
    assert!((100_000..101_000).contains(&(begun.ready_ms - begun.due_ms + 10_000)), "{begun:?}");
    // One that cannot be sent before it expires is throttled.
    notes.finish(&begun, Ending::Sent);
    let short = NewNotification { expires_in: Duration::from_secs(5), ..new("b", "u", 0) };
    let short = notes.schedule(&short);
    notes.step("b");
    assert_eq!(notes.state(short), "throttled");
}

#[test]
fn a_type_is_counted_by_itself_and_with_the_others_unless_it_has_no_caps() {
    let mut notes = capped(&["3/1h"], &[("promo", &["1/1h"]), ("receipt", &[])]);
    let send = |notes: &mut Notes, kind: &str| {
        let id = notes.schedule(&of_kind(kind, "u"));
        for begun in notes.step("b") {
            notes.finish(&begun, Ending::Sent);
        }
        notes.pass(1);
        notes.state(id)
    };
    let mut run =
        |kinds: &[&str]| kinds.iter().map(|kind| send(&mut notes, kind)).collect::<Vec<_>>();
    assert_eq!(run(&["receipt", "receipt", "receipt", "receipt"]), ["sent"; 4]);
    assert_eq!(run(&["promo", "promo", "none"]), ["sent", "throttled", "sent"]);
    assert_eq!(run(&["other", "none", "receipt"]), ["sent", "throttled", "sent"]);
    let user = notes.shard.keys.user(&bot("b"), "u");
    let fields: BTreeMap<String, Vec<u8>> = notes.shard.clocked.plain().hgetall(&user).unwrap();
    let logs = fields.iter().filter(|(name, _)| name.starts_with("log"));
    let logs: Vec<(&str, usize)> = logs.map(|(name, log)| (&**name, log.len())).collect();
    assert_eq!(logs, [("log", 18), ("log|promo", 6)], "no more than the caps ask");
    let left: i64 = notes.shard.clocked.plain().ttl(&user).unwrap();
    assert!((3_000..=3_600).contains(&left), "{left}");
}

#[test]
fn a_user_is_not_free_before_it_can_be_told_how_the_last_one_ended() {
    let mut notes = Notes::new();
    notes.schedule(&new("b", "u", 0));
    let sent = notes.step("b").remove(0);
    let second = notes.schedule(&new("b", "u", 1_000));
    // Redis is unavailable for ten minutes.
    notes.pass(600);
    for _ in 0..3 {
        assert_eq!(notes.step("b"), [], "the first may have been sent");
        notes.pass(1);
    }
    assert_eq!(notes.finish(&sent, Ending::Sent), Some("sent".into()));
    notes.step("b");
    assert_eq!(notes.state(second), "throttled");

    // The process of this one is gone.
    let lost = notes.schedule(&new("b", "v", 0));
    assert_eq!(notes.step("b").remove(0).id, lost);
    notes.schedule(&new("b", "v", 0));
    notes.pass(40);
    let mut begun = Vec::new();
    for _ in 0..8 {
        begun.extend(notes.step("b"));
        notes.pass(1);
    }
    assert_eq!(begun.len(), 1, "one of the two, and not for ever none: {begun:?}");
}

#[test]
fn a_cap_holds_also_who_is_online_and_a_killed_process_does_not_count() {
    let mut notes = capped(&["1/1h"], &[]);
    let waits = || NewNotification { waits: true, ..new("b", "u", 0) };
    let (first, second) = (notes.schedule(&waits()), notes.schedule(&waits()));
    assert!(notes.online("u"));
    let lost = notes.step("b").remove(0);
    assert_eq!(lost.id, first);
    notes.pass(21);
    assert_eq!(notes.step("b"), []);
    notes.pass(6);
    let again = notes.step("b").remove(0);
    assert_eq!(again.id, first, "what was lost did not count");
    notes.finish(&again, Ending::Sent);
    assert!(notes.online("u"));
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.state(second), "throttled");
}

/// What a model of caps knows: when each user got which type.
#[derive(Default)]
struct Got(Vec<(i64, String, String)>);

impl Got {
    /// Whether the caps let another one through.
    fn has_room(&self, caps: &Caps, now: i64, uid: &str, kind: &str) -> bool {
        let within = |window: Duration, of: Option<&str>| {
            let after = now - i64::try_from(window.as_micros()).unwrap();
            let counted = |(at, user, sent): &&(i64, String, String)| {
                let exempt = caps.of_kind(sent) == Some(&[]);
                *at > after && user == uid && !exempt && of.is_none_or(|of| of == sent)
            };
            self.0.iter().filter(counted).count()
        };
        let room = |cap: &Cap, of| within(cap.window, of) < cap.n as usize;
        match caps.of_kind(kind) {
            Some([]) => true,
            own => {
                caps.all.iter().all(|cap| room(cap, None))
                    && own.unwrap_or_default().iter().all(|cap| room(cap, Some(kind)))
            }
        }
    }
}

/// Random notifications of three users and four types, whose sends end in every way or never, beside
/// a model that counts what was sent: what is begun has room, what is throttled has none.
#[test]
fn caps_agree_with_a_model_that_counts_every_window() {
    let mut all = (0, 0);
    for seed in 0..6 {
        let mut random = SmallRng::seed_from_u64(seed);
        let mut notes = capped(
            &["4/60s", "9/300s"],
            &[("promo", &["2/90s"]), ("receipt", &[]), ("digest", &["1/40s", "3/200s"])],
        );
        notes.throttle.defers = seed % 2 == 1;
        let caps = notes.throttle.caps.clone();
        let (mut got, mut open, mut known) = (Got::default(), Vec::new(), Vec::new());
        let (mut sent, mut throttled) = (0, 0);
        // How a send ends, and what the model learns from it.
        let mut end = |notes: &mut Notes, got: &mut Got, begun: &Begun, ending| {
            if notes.finish(begun, ending) == Some("sent".into()) {
                let room = got.has_room(&caps, notes.now, &begun.uid, &begun.kind);
                assert!(room, "seed {seed}: one too many: {begun:?}");
                got.0.push((notes.now, begun.uid.clone(), begun.kind.clone()));
                sent += 1;
            }
        };
        for _ in 0..700 {
            let mut looks = 0;
            match random.random_range(0..20) {
                0..8 => {
                    let uid = ["u", "v", "w"][random.random_range(0..3)];
                    let kind = ["none", "promo", "receipt", "digest"][random.random_range(0..4)];
                    known.push((notes.schedule(&of_kind(kind, uid)), uid, kind));
                }
                8..11 => {
                    let until = notes.now + random.random_range(1..9_000_000);
                    // A send is over within 20 s.
                    open.retain(|(at, begun): &(i64, Begun)| {
                        let goes_on = at + 20 * SECOND > until;
                        if !goes_on {
                            end(&mut notes, &mut got, begun, Ending::Sent);
                        }
                        goes_on
                    });
                    notes.now = until;
                }
                11..16 => looks = 1,
                16..18 if !open.is_empty() => {
                    let (_, begun) = open.swap_remove(random.random_range(0..open.len()));
                    let ending = match random.random_range(0..6) {
                        0..4 => Ending::Sent,
                        4 => Ending::Retry(Duration::from_secs(2), "500".into()),
                        _ => Ending::Dead("410".into()),
                    };
                    end(&mut notes, &mut got, &begun, ending);
                }
                // The process of one is killed.
                18 => drop(open.pop()),
                // Redis is unavailable; when it is back, schedulers come before those who sent.
                19 if random.random_bool(0.3) => {
                    notes.now += random.random_range(1..120_000_000);
                    looks = 2;
                }
                _ => {}
            }
            for look in 0..looks {
                for begun in notes.step("b") {
                    let room = got.has_room(&caps, notes.now, &begun.uid, &begun.kind);
                    assert!(room, "seed {seed}: one too many begins: {begun:?}");
                    open.push((notes.now, begun));
                }
                if look == 1 {
                    for (_, begun) in open.drain(..) {
                        end(&mut notes, &mut got, &begun, Ending::Sent);
                    }
                }
                let now = notes.now;
                known.retain(|(id, uid, kind)| {
                    let is_throttled = notes.state(*id) == "throttled";
                    let room = is_throttled && look == 0 && got.has_room(&caps, now, uid, kind);
                    assert!(!room, "seed {seed}: held back for nothing: {uid} {kind}");
                    throttled += usize::from(is_throttled);
                    !is_throttled
                });
            }
        }
        all = (all.0 + sent, all.1 + throttled);
    }
    // Else it looked at little but users who may get more.
    assert!(all.0 > 200 && all.1 > 20, "{} sent, {} throttled", all.0, all.1);
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
    assert_eq!(begun.attempts, 1);
    notes.finish(&begun, Ending::Retry(seconds(20), "500".into()));
    notes.pass(19);
    assert_eq!(notes.step("b"), []);
    notes.pass(2);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.attempts, 2);
    let late = Ending::Retry(seconds(40), "the receiver answered 500".into());
    assert_eq!(notes.finish(&begun, late), Some("dead".into()));
    assert_eq!((notes.state(note), notes.armed()), ("dead".to_owned(), 0));
    assert_eq!(notes.stats(), counted(&[("received", 1), ("retried", 1), ("dead", 1)]));

    // Redriven, it begins anew.
    let (keys, letter) = (&notes.shard.keys.clone(), notes.shard.letters()[0]);
    let redrive = Redrive { keys, id: letter, bot: &bot("b"), slice_us: SLICE_US, renews: false };
    assert!(notes.shard.call(notes.now, &redrive));
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.id, begun.attempts), (note, 1));
    assert_eq!(notes.finish(&begun, Ending::Sent), Some("sent".into()));
}

#[test]
fn one_whose_time_passed_before_any_attempt_has_expired() {
    let mut notes = Notes::new();
    let short = NewNotification { expires_in: Duration::from_secs(60), ..new("b", "u", 0) };
    let note = notes.schedule(&short);
    notes.pass(61);
    assert_eq!(notes.step("b"), []);
    assert_eq!((notes.state(note), notes.armed()), ("expired".to_owned(), 0));
    assert_eq!(notes.stats(), counted(&[("received", 1), ("expired", 1)]));
}

#[test]
fn one_that_waits_for_its_user_is_released_when_due_one_a_call_oldest_first() {
    let mut notes = Notes::new();
    let waits = |delay_ms| NewNotification { waits: true, ..new("b", "u", delay_ms) };
    let (late, early) = (notes.schedule(&waits(5_000)), notes.schedule(&waits(1_000)));
    assert!(!notes.online("u"), "neither is due");
    notes.pass(60);
    assert_eq!(notes.step("b"), []);
    assert!(!notes.online("v"));
    assert!(notes.online("u"));
    assert!(!notes.online("u"), "too soon after the last one");
    let begun = notes.step("b");
    assert_eq!(begun.iter().map(|begun| begun.id).collect::<Vec<_>>(), [early]);
    notes.finish(&begun[0], Ending::Sent);
    notes.pass(11);
    assert!(notes.online("u"), "the half hour is not asked");
    assert_eq!(notes.step("b").remove(0).id, late);
    assert!(!notes.online("u"));
}

#[test]
fn one_that_waits_in_vain_expires() {
    let mut notes = Notes::new();
    let expires_in = Duration::from_secs(60);
    let note = notes.schedule(&NewNotification { waits: true, expires_in, ..new("b", "u", 0) });
    notes.pass(61);
    assert_eq!(notes.step("b"), []);
    assert_eq!((notes.state(note), notes.armed()), ("expired".to_owned(), 0));
    assert!(!notes.online("u"));
}

#[test]
fn one_is_cancelled_or_moved_until_it_is_being_sent_also_when_its_event_is_queued() {
    let mut notes = Notes::new();
    let (cancelled, moved) = (notes.schedule(&new("b", "u", 0)), notes.schedule(&new("b", "v", 0)));
    notes.promote();
    assert_eq!(notes.amend(cancelled, "u", Amendment::Cancel), Amended::Done);
    let hour = When::After(Duration::from_secs(3_600));
    assert_eq!(notes.amend(moved, "v", Amendment::Move(hour)), Amended::Done);
    assert_eq!(notes.handle("b"), []);
    notes.forget_queue("b");
    assert_eq!(notes.amend(cancelled, "u", Amendment::Cancel), Amended::Not(State::Cancelled));
    notes.pass(3_601);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.id, moved);
    assert_eq!(begun.expires_ms - begun.due_ms, 86_400_000, "it expires later too");
    assert_eq!(notes.amend(moved, "v", Amendment::Cancel), Amended::Not(State::Sending));
    assert_eq!(notes.amend(id(), "v", Amendment::Cancel), Amended::Gone);

    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "w", 0) });
    assert_eq!(notes.amend(waits, "w", Amendment::Move(hour)), Amended::Done);
    assert!(!notes.online("w"), "it is not due any more");
    assert_eq!(notes.amend(waits, "w", Amendment::Cancel), Amended::Done);
    notes.pass(3_601);
    assert!(!notes.online("w"));
}

#[test]
fn a_key_is_taken_once_and_kept_or_replaced() {
    let mut notes = Notes::new();
    let keyed = |duplicates| NewNotification {
        key: Some(("k".to_owned(), duplicates)),
        ..new("b", "u", 60_000)
    };
    let first = notes.schedule(&keyed(Duplicates::Ignore));
    let due = notes.schedule_over(&keyed(Duplicates::Ignore), Some((first, "u"))).1;
    assert!(matches!(due, Scheduled::Duplicate(_)), "{due:?}");
    let unknown = notes.schedule_over(&keyed(Duplicates::Ignore), None).1;
    assert_eq!(unknown, Scheduled::Again, "somebody took it in between");
    let (second, scheduled) = notes.schedule_over(&keyed(Duplicates::Replace), Some((first, "u")));
    assert!(matches!(scheduled, Scheduled::Ok { .. }), "{scheduled:?}");
    assert_eq!((notes.state(first), notes.armed()), ("cancelled".to_owned(), 1));
    notes.pass(61);
    let begun = notes.step("b").remove(0);
    assert_eq!(begun.id, second);
    notes.finish(&begun, Ending::Sent);
    let repeated = notes.schedule_over(&keyed(Duplicates::Ignore), Some((second, "u"))).1;
    assert!(matches!(repeated, Scheduled::Duplicate(_)), "its answer may be lost: {repeated:?}");
    notes.pass(240);
    let (third, scheduled) = notes.schedule_over(&keyed(Duplicates::Ignore), Some((second, "u")));
    assert!(
        matches!(scheduled, Scheduled::Ok { .. }),
        "what has ended keeps no key: {scheduled:?}"
    );
    assert_eq!(notes.state(third), "scheduled");
}

#[test]
fn one_that_waits_and_is_replaced_by_one_for_another_user_waits_no_more() {
    let mut notes = Notes::new();
    let waits = |uid: &str| NewNotification {
        waits: true,
        key: Some(("k".to_owned(), Duplicates::Replace)),
        ..new("b", uid, 0)
    };
    let first = notes.schedule(&waits("old"));
    let (_, scheduled) = notes.schedule_over(&waits("new"), Some((first, "old")));
    assert!(matches!(scheduled, Scheduled::Ok { .. }), "{scheduled:?}");
    assert_eq!(notes.state(first), "cancelled");
    assert_eq!((notes.online("old"), notes.online("new")), (false, true));
}

#[test]
fn one_that_is_moved_while_its_event_is_queued_is_sent_once() {
    let mut notes = Notes::new();
    let moved = notes.schedule(&new("b", "u", 0));
    notes.promote();
    for _ in 0..3 {
        let now = Amendment::Move(When::After(Duration::ZERO));
        assert_eq!(notes.amend(moved, "u", now), Amended::Done);
        notes.promote();
    }
    assert_eq!(notes.queued(&bot("b")).len(), 4);
    let begun = notes.step("b");
    assert_eq!(begun.iter().map(|begun| begun.id).collect::<Vec<_>>(), [moved]);
    notes.finish(&begun[0], Ending::Dead("410".into()));
    assert_eq!(notes.step("b"), []);
    assert_eq!(notes.state(moved), "dead");
}

#[test]
fn a_key_is_kept_as_long_as_its_notification_however_far_it_is_moved() {
    let mut notes = Notes::new();
    let keyed = NewNotification {
        key: Some(("k".to_owned(), Duplicates::Ignore)),
        ..new("b", "u", 60_000)
    };
    let moved = notes.schedule(&keyed);
    let far = Amendment::Move(When::After(100 * DAY));
    assert_eq!(notes.amend(moved, "u", far), Amended::Done);
    let key = notes.shard.keys.notification_key(&bot("b"), "k");
    let left: i64 = notes.shard.clocked.plain().ttl(key).unwrap();
    assert!(left > 107 * 86_400, "{left}");
}

#[test]
fn one_that_is_being_sent_is_not_replaced_and_ends_by_its_answer() {
    let mut notes = Notes::new();
    let keyed =
        NewNotification { key: Some(("k".to_owned(), Duplicates::Replace)), ..new("b", "u", 0) };
    let first = notes.schedule(&keyed);
    let begun = notes.step("b").remove(0);
    let (second, scheduled) = notes.schedule_over(&keyed, Some((first, "u")));
    assert!(matches!(scheduled, Scheduled::Ok { cancelled: None, .. }), "{scheduled:?}");
    assert_eq!(notes.state(first), "sending");
    assert_eq!(notes.finish(&begun, Ending::Sent), Some("sent".into()));
    notes.pass(1);
    assert_eq!(notes.step("b"), [], "the user got one");
    assert_eq!(notes.state(second), "throttled");
}

#[test]
fn what_was_only_put_off_until_it_expired_is_a_dead_letter() {
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
fn waiting_for_a_user_or_for_a_threshold_is_not_late_nor_is_what_was_told_before() {
    let mut notes = Notes::new();
    notes.throttle.defers = true;
    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "w", 0) });
    notes.pass(60);
    assert!(notes.online("w"));
    let begun = notes.step("b").remove(0);
    assert_eq!((begun.id, begun.counts_late), (waits, false));
    notes.finish(&begun, Ending::Sent);
    for uid in ["u", "u"] {
        notes.schedule(&new("b", uid, 0));
    }
    let first = notes.step("b").remove(0);
    assert_eq!((first.ready_ms, first.counts_late), (first.due_ms, true));
    notes.late = Some(Duration::from_millis(3));
    notes.finish(&first, Ending::Sent);
    notes.pass(1);
    assert_eq!(notes.step("b"), []);
    notes.pass(1_800);
    let deferred = notes.step("b").remove(0);
    assert_eq!(deferred.ready_ms, deferred.due_ms + 1_800_000);
    // What a killed process was sending is late: nothing of it was told.
    notes.pass(21);
    assert_eq!(notes.step("b").len(), 0);
    notes.pass(6);
    let again = notes.step("b");
    let again = again.iter().find(|begun| begun.id == deferred.id).unwrap();
    assert_eq!((again.attempts, again.counts_late), (2, true));
    notes.finish(again, Ending::Retry(Duration::from_secs(5), "500".into()));
    notes.pass(6);
    let third = notes.step("b");
    let third = third.iter().find(|begun| begun.id == deferred.id).unwrap();
    assert!(!third.counts_late);
    assert_eq!(notes.stats()["none|late3"], 2);
}

#[test]
fn what_is_in_no_structure_falls_due_again_unless_it_was_acted_on_since() {
    let mut notes = Notes::new();
    let lost = notes.schedule(&new("b", "u", 60_000));
    let waits = notes.schedule(&NewNotification { waits: true, ..new("b", "w", 0) });
    let sent = notes.schedule(&new("b", "x", 0));
    let begun = notes.step("b").remove(0);
    notes.finish(&begun, Ending::Sent);
    for (id, uid) in [(lost, "u"), (waits, "w"), (sent, "x"), (id(), "u")] {
        assert!(!notes.restore(id, uid, 0), "it is armed, has ended, or is not there");
    }
    for key in [notes.shard.keys.due.clone(), notes.shard.keys.later.clone()] {
        let () = notes.shard.clocked.plain().del(key).unwrap();
    }
    assert!(!notes.restore(lost, "u", 1), "an event was acted on since");
    assert!(notes.restore(lost, "u", 0) && notes.restore(waits, "w", 0));
    assert!(!notes.restore(lost, "u", 0) && !notes.restore(sent, "x", begun.token));
    assert_eq!(notes.armed(), 2);
    assert_eq!(notes.step("b"), [], "neither is due");
    notes.pass(61);
    assert_eq!(notes.step("b").iter().map(|begun| begun.id).collect::<Vec<_>>(), [lost]);
    assert!(notes.online("w"), "it still waits");
    assert_eq!(notes.step("b").iter().map(|begun| begun.id).collect::<Vec<_>>(), [waits]);
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
