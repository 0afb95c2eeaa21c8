//! The scripts of the products, and those of the core with a ledger.

use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::counters::scripts::{Counting, IncrementIfExists, Replace, Upsert, Viewed, Views};
use fairlane::counters::view::AdId;
use fairlane::id::Sequence;
use fairlane::ledger::{Account, Leaving, Posting};
use fairlane::notifications::record::{
    Begun, Caps, Duplicates, Ended, Ending, NewNotification, NotificationId,
};
use fairlane::notifications::scripts::{
    Amend, Amendment, Begin, Finish, Release, Schedule, Throttle,
};
use fairlane::quotas::{NO_QUOTAS, Quota};
use fairlane::redis::scripts::{Call as _, Completion, Mode, Postings, Promote, Promoted};

use super::super::super::notifications::{HOLD, id, new};
use super::super::super::{LIMITS, SLICE_US, bot, keys};
use super::super::stage::{EVENT, Meter, Stage, ended, some};

const CACHED: u64 = 1_000;

pub(super) fn register() {
    let (keys, bot, ad) = (&keys("p"), &bot("bot-0"), &AdId::parse("ad-0").unwrap());
    let counting = Counting { keys, limits: LIMITS, cached_ads: CACHED, bot, ad };
    Replace { counting, total: 0, event: &EVENT }.command();
    let now = SystemClock.now();
    Release { keys, now, bot, uid: "u", threshold: Duration::ZERO }.command();
}

/// The counts of views.
pub(super) async fn counters<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("counters").await;
    let keys = &stage.keys.clone();
    let (bot, ad) = (&bot("bot-0"), &AdId::parse("ad-0").unwrap());
    let counting = Counting { keys, limits: LIMITS, cached_ads: CACHED, bot, ad };
    let views = Views { counting, n: 1, event: &EVENT, idempotency: None };
    let missed = stage.measure("not cached", &IncrementIfExists(views)).await;
    assert_eq!(missed, Viewed::Ask(String::new()));
    let upsert = Upsert { views, acked: "", stored: Some((7, Sequence::new(0))) };
    assert_eq!(stage.measure("one view", &upsert).await, Viewed::Counted(Some(8)));
    let counted = stage.measure("one view", &IncrementIfExists(views)).await;
    assert_eq!(counted, Viewed::Counted(Some(9)));
    let keyed = Views { idempotency: Some(("key", 60_000)), ..views };
    stage.measure("one view with a key", &IncrementIfExists(keyed)).await;
    stage.measure("one view with a known key", &IncrementIfExists(keyed)).await;
    stage.measure("one ad", &Replace { counting, total: 1, event: &EVENT }).await;

    let accounts = |n| (0..n).map(|n| Account::from(&*format!("ad-{n}")));
    for (situation, bots, ads) in
        [("one bot, one view", 1, 1), ("10 bots, 10 views of 10 ads each", 10, 10)]
    {
        stage.clear("counters").await;
        let mut copy = stage.copy(keys, &some(bots), ads, LIMITS);
        let posted: Vec<Posting> =
            accounts(ads).map(|account| Posting { account, amount: 1 }).collect();
        let of_bot = posted.iter().map(Some).collect();
        copy.postings = Some(Postings { cached_accounts: CACHED, bots: vec![of_bot; bots] });
        stage.measure(situation, &copy).await;
    }
    // The last situation left 10 events in each queue.
    let mut claimed = stage.claim().await;
    let leaving = |ads| {
        let accounts = accounts(ads).map(|account| (account, (1, 0))).collect();
        Some(Leaving { last: Sequence::new(1), accounts })
    };
    let items: Vec<Completion> = (1..10)
        .map(|at| Completion { leaving: leaving(10), ..ended(&claimed, at, 10, Mode::Release) })
        .collect();
    stage.complete("release, 9 bots, their last 10 views", &items).await;
    claimed.leases.truncate(1);
    let item = Completion { leaving: leaving(5), ..ended(&claimed, 0, 5, Mode::Release) };
    stage.complete("release, one bot, 5 views, views left", &[item]).await;
}

fn throttle() -> Throttle {
    let threshold = Duration::from_secs(1_800);
    Throttle { threshold, by_kind: Vec::new(), caps: Caps::default(), defers: false }
}

impl<M: Meter> Stage<M> {
    async fn schedule(&mut self, situation: Option<&str>, new: &NewNotification) -> NotificationId {
        let (keys, now, id) = (&self.keys.clone(), SystemClock.now(), id());
        let call = Schedule { keys, now, id, new, label: "none", quota: Quota::NONE, known: None };
        self.run(situation, &call).await;
        id
    }

    /// Queues these notifications, which are due.
    async fn promote(&mut self, situation: Option<&str>, ids: &[NotificationId]) -> Promoted {
        let keys = &self.keys.clone();
        let events: Vec<_> = ids.iter().map(|id| (id.to_string(), bot("bot-0"))).collect();
        let call = Promote { keys, slice_us: SLICE_US, events: &events };
        self.run(situation, &call).await
    }

    /// Starts these notifications, each of another user.
    async fn begin(
        &mut self,
        situation: Option<&str>,
        of: &[(NotificationId, &str)],
    ) -> Vec<Begun> {
        let (keys, now, bot) = (&self.keys.clone(), SystemClock.now(), &bot("bot-0"));
        // Above every sequence that the notifications have.
        let sequence = Sequence::new(1 << 52);
        let events: Vec<_> = of.iter().map(|(id, uid)| (*id, *uid, sequence)).collect();
        let (throttle, hold, quota, events) = (&throttle(), HOLD, Quota::NONE, &events);
        let call = Begin { keys, now, bot, hold, throttle, dead_max: 100, quota, events };
        self.run(situation, &call).await.begun
    }

    async fn finish(&mut self, situation: &str, begun: &[Begun], ending: Ending) {
        let (keys, now, throttle) = (&self.keys.clone(), SystemClock.now(), &throttle());
        let late = Some(Duration::from_millis(1));
        let ended = |begun: &Begun| Ended { begun: begun.clone(), ending: ending.clone(), late };
        let endings: &Vec<Ended> = &begun.iter().map(ended).collect();
        let quotas = &NO_QUOTAS;
        let call = Finish { keys, now, dead_max: 100, quotas, throttle, endings };
        let finished = self.measure(situation, &call).await;
        let as_told = |outcome: &Option<String>| outcome.as_deref() == Some(ending.word());
        assert!(finished.outcomes.iter().all(as_told), "{situation}: {finished:?}");
    }
}

/// Notifications that are sent when they are due.
pub(super) async fn notifications<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("notifications").await;
    let first = stage.schedule(Some("one notification"), &new("bot-0", "u", 0)).await;
    stage.promote(Some("one notification"), &[first]).await;
    let begun = stage.begin(Some("one notification"), &[(first, "u")]).await;
    assert_eq!(begun.len(), 1);
    let retry = Ending::Retry(Duration::from_secs(5), "the receiver answered 500".to_owned());
    stage.finish("one retry", &begun, retry).await;

    for (situation, ending) in [
        ("10 sent", Ending::Sent),
        ("10 dead", Ending::Dead("the receiver answered 410".to_owned())),
    ] {
        stage.clear("notifications").await;
        let uids: Vec<String> = (0..10).map(|n| format!("user-{n}")).collect();
        let mut ids = Vec::new();
        for uid in &uids {
            ids.push(stage.schedule(None, &new("bot-0", uid, 0)).await);
        }
        let name = (ending == Ending::Sent).then_some("10 notifications");
        stage.promote(name, &ids).await;
        let of: Vec<(NotificationId, &str)> =
            ids.into_iter().zip(uids.iter().map(String::as_str)).collect();
        let begun = stage.begin(name, &of).await;
        assert_eq!(begun.len(), 10);
        stage.finish(situation, &begun, ending).await;
    }
    let key = Some(("key".to_owned(), Duplicates::Ignore));
    stage.clear("notifications").await;
    let keyed = NewNotification { key, ..new("bot-0", "u", 60_000) };
    let id = stage.schedule(Some("one notification with a key"), &keyed).await;
    let (keys, now, bot) = (&stage.keys.clone(), SystemClock.now(), &bot("bot-0"));
    let amend = Amend {
        keys,
        now,
        id,
        bot,
        uid: "u",
        key: "key",
        ended_bytes: 0,
        amendment: Amendment::Move(keyed.when),
    };
    stage.measure("moved", &amend).await;
    let amend = Amend { amendment: Amendment::Cancel, ..amend };
    stage.measure("cancelled", &amend).await;
}

/// Notifications that wait for their user.
pub(super) async fn waiting_notifications<M: Meter>(stage: &mut Stage<M>) {
    stage.clear("notifications").await;
    let waits = NewNotification { waits: true, ..new("bot-0", "u", 0) };
    stage.schedule(Some("one notification that waits for its user"), &waits).await;
    let (keys, now, bot) = (&stage.keys.clone(), SystemClock.now(), &bot("bot-0"));
    let release = Release { keys, now, bot, uid: "u", threshold: Duration::from_secs(10) };
    assert!(stage.measure("a user with a notification", &release).await);
    let absent = Release { uid: "v", ..release };
    assert!(!stage.measure("a user without one", &absent).await);
}
