//! What bots hold while their notifications are pending.

use std::collections::BTreeMap;

use fairlane::notifications::record::Duplicates::{Ignore, Replace};
use fairlane::notifications::record::{Ending, NewNotification, NotificationId};
use fairlane::notifications::scripts::Schedule;
use fairlane::quotas::{Quota, QuotaExceeded};
use fairlane::redis::scripts::{Call, exceeded};
use redis::Commands;

use super::{Notes, id, new};

pub(super) const ENDED: [&str; 6] =
    ["sent", "refused", "throttled", "expired", "dead", "cancelled"];

impl Notes {
    /// Calls a script. Whatever it did, what bots hold is counted.
    pub(super) fn call<C: Call>(&mut self, call: &C) -> C::Reply {
        let reply = self.shard.call(self.now, call);
        let (truth, held) = (self.truth(), self.held());
        assert_eq!(held, truth, "after {}", C::NAME);
        reply
    }

    /// What is counted, without the queues: these tests delete them by hand.
    pub(super) fn held(&mut self) -> BTreeMap<String, u64> {
        let key = self.shard.keys.held().to_owned();
        let mut held: BTreeMap<String, u64> = self.shard.harness.plain().hgetall(key).unwrap();
        held.retain(|field, _| !field.starts_with('q'));
        held
    }

    fn truth(&mut self) -> BTreeMap<String, u64> {
        let keys = self.shard.keys.clone();
        let redis = self.shard.harness.plain();
        let mut truth = BTreeMap::new();
        let mut add = |kind: &str, bot: &str, by: u64| {
            *truth.entry(format!("{kind}{bot}")).or_default() += by;
        };
        let records: Vec<String> = redis.keys(format!("{}n:*", keys.prefix())).unwrap();
        let mut ask = redis::pipe();
        for record in &records {
            ask.cmd("HMGET").arg(record).arg("state").arg("bot").arg("held");
        }
        let mut all: Vec<(Option<String>, Option<String>, Option<u64>)> = Vec::new();
        // An empty pipeline is refused.
        if !records.is_empty() {
            all = ask.query(redis).unwrap();
        }
        for (state, bot, held) in all {
            // An ended one may have expired meanwhile.
            if state.is_some_and(|state| !ENDED.contains(&&*state)) {
                let bot = bot.unwrap();
                add("n", &bot, 1);
                add("N", &bot, held.unwrap());
            }
        }
        let later: BTreeMap<String, Vec<u8>> = redis.hgetall(&keys.later).unwrap();
        for entry in later.values() {
            let text = String::from_utf8_lossy(entry);
            let (length, rest) = text.split_once(':').unwrap();
            let bot = &rest[..length.parse().unwrap()];
            add("l", bot, 1);
            add("L", bot, (entry.len() - length.len() - 1 - bot.len()) as u64);
        }
        let mut letters = redis::cmd("XRANGE");
        letters.arg(&keys.dlq).arg("-").arg("+");
        let letters: Vec<(String, BTreeMap<String, Vec<u8>>)> = letters.query(redis).unwrap();
        for (_, fields) in letters {
            let bot = String::from_utf8(fields["bot"].clone()).unwrap();
            let more = String::from_utf8(fields["more"].clone()).unwrap();
            add("d", &bot, 1);
            add("D", &bot, fields["record"].len() as u64 + more.parse::<u64>().unwrap());
        }
        truth
    }

    pub(super) fn try_schedule(
        &mut self,
        new: &NewNotification,
        quota: Quota,
        known: Option<NotificationId>,
    ) -> Result<NotificationId, QuotaExceeded> {
        let (keys, now, id) = (&self.shard.keys.clone(), self.time(), id());
        let known = known.map(|id| (id, new.uid.clone()));
        let call = Schedule { keys, now, id, new, label: &new.kind, quota, known };
        let command = self.shard.harness.command(&call);
        let (reply, ..) = self.shard.harness.run(self.now, command, &redis::pipe()).unwrap();
        let (truth, held) = (self.truth(), self.held());
        assert_eq!(held, truth);
        exceeded(&reply).map_or(Ok(id), Err)
    }
}

#[test]
fn a_bot_at_its_quota_of_notifications_schedules_again_when_one_has_ended() {
    let mut notes = Notes::new();
    let two = Quota { pending: 2, ..Quota::NONE };
    notes.try_schedule(&new("b", "u", 0), two, None).unwrap();
    notes.try_schedule(&new("b", "v", 60_000), two, None).unwrap();
    let refused = notes.try_schedule(&new("b", "w", 0), two, None).unwrap_err();
    assert_eq!(refused, QuotaExceeded { name: "notifications", held: 2, limit: 2 });
    notes.try_schedule(&new("c", "w", 0), two, None).expect("each bot has its own");
    let begun = notes.step("b").remove(0);
    notes.try_schedule(&new("b", "w", 0), two, None).expect_err("the send is in flight");
    assert_eq!(notes.finish(&begun, Ending::Sent), Some("sent".into()));
    notes.try_schedule(&new("b", "w", 0), two, None).unwrap();
}

#[test]
fn the_bytes_of_what_a_request_stores_are_bounded() {
    let mut notes = Notes::new();
    let large = NewNotification { body: "x".repeat(1_000), ..new("b", "u", 0) };
    let quota = Quota { pending_bytes: 2_500, ..Quota::NONE };
    notes.try_schedule(&large, quota, None).unwrap();
    notes.try_schedule(&large, quota, None).unwrap();
    let refused = notes.try_schedule(&large, quota, None).unwrap_err();
    assert_eq!((refused.name, refused.limit), ("notification_bytes", 2_500));
    assert_eq!(refused.held, notes.held()["Nb"]);
    notes.try_schedule(&new("b", "u", 0), quota, None).expect("a small one fits");
    // A dead one can be redriven, so its letter counts with all it keeps.
    let begun = notes.step("b").remove(0);
    assert_eq!(notes.finish(&begun, Ending::Dead("410".into())), Some("dead".into()));
    assert!(notes.held()["Db"] > 1_000);
    notes.try_schedule(&large, quota, None).unwrap();
}

#[test]
fn a_replacement_and_what_fits_exactly_are_accepted_at_the_quota_of_bytes() {
    let mut notes = Notes::new();
    let keyed = |bytes: usize| {
        let key = Some(("k".to_owned(), Replace));
        NewNotification { key, body: "x".repeat(bytes), ..new("b", "u", 60_000) }
    };
    let first = notes.try_schedule(&keyed(1_000), Quota::NONE, None).unwrap();
    let held = notes.held()["Nb"];
    let exact = Quota { pending_bytes: held, ..Quota::NONE };
    let second = notes.try_schedule(&keyed(1_000), exact, Some(first)).unwrap();
    assert_eq!(notes.held()["Nb"], held);
    notes.try_schedule(&new("b", "v", 0), exact, None).unwrap_err();
    notes.try_schedule(&keyed(10), exact, Some(second)).unwrap();
    assert_eq!(notes.held()["Nb"], held - 990);
}

#[test]
fn each_byte_of_the_type_counts() {
    let mut notes = Notes::new();
    for (bot, kind) in [("c", "ab"), ("d", "abcdef")] {
        let new = NewNotification { kind: kind.to_owned(), ..new(bot, "u", 0) };
        notes.try_schedule(&new, Quota::NONE, None).unwrap();
    }
    let held = notes.held();
    assert_eq!(held["Nd"] - held["Nc"], 4);
}

#[test]
fn a_repetition_and_a_replacement_are_accepted_at_the_quota() {
    let mut notes = Notes::new();
    let keyed = |duplicates| {
        let key = Some(("k".to_owned(), duplicates));
        NewNotification { key, ..new("b", "u", 60_000) }
    };
    let one = Quota { pending: 1, ..Quota::NONE };
    let first = notes.try_schedule(&keyed(Ignore), one, None).unwrap();
    notes.try_schedule(&keyed(Ignore), one, Some(first)).expect("it is answered as before");
    let second = notes.try_schedule(&keyed(Replace), one, Some(first)).unwrap();
    assert_eq!((notes.state(first), notes.state(second)), ("cancelled".into(), "scheduled".into()));
    assert_eq!(notes.held()["nb"], 1);
    notes.try_schedule(&new("b", "u", 0), one, None).unwrap_err();
}

/// One that is replaced leaves its event in the queue. Otherwise a paused bot could fill Redis.
#[test]
fn events_that_are_queued_count_towards_the_quota_of_bytes() {
    let mut notes = Notes::new();
    let quota = Quota { pending_bytes: 10_000, ..Quota::NONE };
    let keyed = NewNotification { key: Some(("k".to_owned(), Replace)), ..new("b", "u", 0) };
    let (mut last, mut queued) = (None, 0);
    let refused = loop {
        match notes.try_schedule(&keyed, quota, last) {
            Ok(id) => last = Some(id),
            Err(refused) => break refused,
        }
        queued += notes.promote();
    };
    assert_eq!((refused.name, refused.limit), ("notification_bytes", 10_000));
    assert!((10_001..10_200).contains(&refused.held), "{refused:?}");
    assert!(queued > 50, "{queued}");
    assert_eq!(notes.step("b").len(), 1);
}
