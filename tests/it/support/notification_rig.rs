//! Processes that send notifications, and their reports.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock};
use fairlane::id::BotId;
use fairlane::notifications::queue::{Span, Tally};
use fairlane::notifications::record::{Kept, NewNotification, NotificationId, State, When};
use tokio::sync::Semaphore;

use super::config::configs;
use super::instance::Instance;
use super::receiver::{Receiver, Reply};
use super::recorder::Log;
use super::redis::{Options, RedisServer};
use super::wait::eventually;

pub(crate) const LONG: Duration = Duration::from_secs(60);
const DAY: Duration = Duration::from_secs(86_400);

/// Processes that may send notifications to the loopback too.
pub(crate) struct Rig {
    pub(crate) redis: RedisServer,
    pub(crate) config: String,
}

impl Rig {
    pub(crate) fn new(settings: &[(&str, &str)]) -> Self {
        Self::on(Options::default(), settings)
    }

    /// Starts with a Redis of these options.
    pub(crate) fn on(options: Options, settings: &[(&str, &str)]) -> Self {
        let redis = RedisServer::start(options);
        let mut all = vec![
            ("pipelines.notifications.enabled", "true"),
            ("pipelines.notifications.lease_ttl", "\"3s\""),
            ("callbacks.allow_nets", "[\"127.0.0.1\"]"),
        ];
        all.extend(settings);
        let config = configs(&redis, &[], &all);
        Self { redis, config }
    }

    pub(crate) async fn start(&self) -> Instance {
        Instance::start(&self.config, Log::default().content()).await
    }
}

/// A receiver that answers once its gate is closed.
pub(crate) async fn gated() -> (Arc<Semaphore>, Receiver) {
    let gate = Arc::new(Semaphore::new(0));
    let shut = Arc::clone(&gate);
    let answer = move |_| {
        let shut = Arc::clone(&shut);
        async move {
            drop(shut.acquire().await);
            Reply::new(200, "")
        }
    };
    (gate, Receiver::start(answer).await)
}

pub(crate) fn bot(text: &str) -> BotId {
    BotId::parse(text).unwrap()
}

pub(crate) fn to(url: impl Into<String>) -> NewNotification {
    NewNotification {
        bot: bot("shop"),
        uid: String::new(),
        kind: "none".to_owned(),
        when: When::After(Duration::ZERO),
        expires_in: DAY,
        waits: false,
        url: url.into(),
        method: "GET".to_owned(),
        body: String::new(),
        recheck: String::new(),
        headers: String::new(),
        trace: None,
        key: None,
    }
}

pub(crate) fn of(uid: &str, url: impl Into<String>) -> NewNotification {
    NewNotification { uid: uid.to_owned(), ..to(url) }
}

pub(crate) async fn accept(at: &Instance, new: &NewNotification) -> NotificationId {
    at.notifications().accept(new).await.unwrap().id
}

pub(crate) async fn kept(at: &Instance, id: NotificationId) -> Kept {
    at.notifications().find(id).await.unwrap().expect("the notification exists")
}

pub(crate) async fn ends(at: &Instance, id: NotificationId, state: State) -> Kept {
    eventually(LONG, "it ends", async || kept(at, id).await.ended_ms.is_some()).await;
    let kept = kept(at, id).await;
    assert_eq!(kept.state, state, "{kept:?}");
    kept
}

/// The number of notifications for each outcome, of all types, today and yesterday.
pub(crate) async fn stats(at: &Instance) -> BTreeMap<String, u64> {
    let today = SystemClock.now().as_secs() / 86_400;
    let days = [Span::Day(today - 1), Span::Day(today)];
    let mut all = Tally::default();
    for stats in at.notifications().stats(&days).await.unwrap() {
        all.add(&Tally::sum(stats.values()));
    }
    all.outcomes
}

pub(crate) fn counted(pairs: &[(&str, u64)]) -> BTreeMap<String, u64> {
    pairs.iter().map(|(outcome, n)| ((*outcome).to_owned(), *n)).collect()
}
