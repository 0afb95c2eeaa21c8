//! Notifications through crashes: none is lost, and none is repeated after its end was recorded.

mod outages;
mod paused;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use fairlane::app::Roles;
use fairlane::clock::{Clock as _, SystemClock, millis};
use fairlane::id::{BotId, PipelineName, Prefix, ShardCount};
use fairlane::notifications::record::{Caps, NewNotification, NotificationId, State, When};
use fairlane::notifications::scripts::{Begin, Finish, SendHold, Throttle};
use fairlane::quotas::{NO_QUOTAS, Quota};
use fairlane::redis::keys::ShardKeys;
use fairlane::redis::scripts::{Call as _, Promote};
use futures_util::future::{join, join_all};
use redis::Arg;
use tokio::sync::Semaphore;

use crate::support::config::configs;
use crate::support::counter_fleet::acknowledged;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::interceptor::{Interception, Interceptor};
use crate::support::kills::{Kill, Kills};
use crate::support::notification_rig::{LONG, Rig, accept, bot, ends, kept, to};
use crate::support::proxy::{Proxy, holds};
use crate::support::receiver::{Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence};
use crate::support::served::Served;
use crate::support::wait::eventually;

const LASTING: Options = Options { persistence: Persistence::Always, max_memory: 0, tcp: true };
/// The number of processes.
const NODES: usize = 3;

/// The steps at which a process is killed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Step {
    BeforeItIsMoved,
    Moved,
    BeforeItIsClaimed,
    Claimed,
    Sending,
    Answered,
    Noted,
}

const STEPS: [Step; 7] = [
    Step::BeforeItIsMoved,
    Step::Moved,
    Step::BeforeItIsClaimed,
    Step::Claimed,
    Step::Sending,
    Step::Answered,
    Step::Noted,
];

/// The SHA by which a script is called.
fn sha(command: &redis::Cmd) -> Vec<u8> {
    let mut arguments = command.args_iter().filter_map(|argument| match argument {
        Arg::Simple(bytes) => Some(bytes.to_vec()),
        _ => None,
    });
    arguments.nth(1).expect("EVALSHA has one")
}

struct Shas {
    promote: Vec<u8>,
    begin: Vec<u8>,
    finish: Vec<u8>,
}

impl Shas {
    fn new() -> Self {
        let name = PipelineName::parse("notifications").unwrap();
        let shard = ShardCount::new(1).unwrap().shards().next().unwrap();
        let (keys, now) = (&ShardKeys::new(&Prefix::default(), &name, shard), Duration::ZERO);
        let throttle =
            &Throttle { threshold: now, by_kind: Vec::new(), caps: Caps::default(), defers: false };
        let bot = &bot("b");
        let hold = SendHold { send: now, patience: now };
        let (quota, quotas) = (Quota::NONE, &NO_QUOTAS);
        let begin = Begin { keys, now, bot, hold, throttle, dead_max: 1, quota, events: &[] };
        let finish = Finish { keys, now, dead_max: 1, quotas, throttle, endings: &[] };
        Self {
            promote: sha(&Promote { keys, slice_us: 1, events: &[] }.command()),
            begin: sha(&begin.command()),
            finish: sha(&finish.command()),
        }
    }
}

/// A process behind its own proxy.
struct Node {
    redis: Proxy,
    served: Served,
    config: String,
}

impl Node {
    async fn start(rig: &Rig) -> Self {
        let redis = Proxy::start(rig.redis.tcp_addr()).await;
        let config = rig.config.replace(&rig.redis.url(), &redis.url());
        assert_ne!(config, rig.config);
        let served = Served::start(&config).await;
        Self { redis, served, config }
    }

    async fn restart(&mut self) {
        self.served.kill9();
        self.served = Served::start(&self.config).await;
    }
}

/// The state of the kill test.
struct Site {
    shas: Shas,
    receiver: Receiver,
    /// While a gate is set, the receiver answers only after the gate is closed.
    gate: Arc<std::sync::Mutex<Option<Arc<Semaphore>>>>,
    clients: RefCell<Vec<Client>>,
    kills: Kills<Step>,
    accepted: RefCell<BTreeMap<String, NotificationId>>,
}

impl Site {
    fn interceptors(&self, step: Step, node: &Node) -> Option<Interceptor> {
        let interceptor = |sha: &Vec<u8>, interception| {
            Some(node.redis.intercept(holds([sha.clone()]), 1, interception))
        };
        match step {
            Step::BeforeItIsMoved => interceptor(&self.shas.promote, Interception::HoldCommand),
            Step::Moved => interceptor(&self.shas.promote, Interception::HoldReply),
            Step::BeforeItIsClaimed => interceptor(&self.shas.begin, Interception::HoldCommand),
            Step::Claimed => interceptor(&self.shas.begin, Interception::HoldReply),
            Step::Sending => None,
            Step::Answered => interceptor(&self.shas.finish, Interception::HoldCommand),
            Step::Noted => interceptor(&self.shas.finish, Interception::HoldReply),
        }
    }

    /// Kills a process at every step.
    async fn kill(&self, place: usize, mut node: Node) -> Node {
        let mut round = 0;
        while let Some(Kill { step, arrives }) = self.kills.next(place, round) {
            let caught = if let Some(interceptor) = self.interceptors(step, &node) {
                let caught = interceptor.catches(Duration::from_secs(3)).await;
                node.served.kill9();
                if arrives {
                    interceptor.release();
                }
                caught
            } else {
                let gate = Arc::new(Semaphore::new(0));
                *self.gate.lock().unwrap() = Some(Arc::clone(&gate));
                let called = self.receiver.called();
                let more = async || self.receiver.called() > called + 3;
                eventually(LONG, "some are being sent", more).await;
                node.served.kill9();
                *self.gate.lock().unwrap() = None;
                gate.close();
                true
            };
            self.kills.note(step, caught);
            node.restart().await;
            self.clients.borrow_mut()[place] = Client::new(&node.served.http());
            round += 1;
        }
        node
    }

    /// Schedules until all kills are over.
    async fn schedule(&self, writer: usize) {
        let mut number = 0_u32;
        while !self.kills.are_over() {
            let key = format!("{writer}-{number}");
            number += 1;
            let path = format!(
                "/send_delayed?bot=bot-{}&delay=0.{}&key={key}&url={}/{key}",
                number % 20,
                number % 9,
                self.receiver.url(),
            );
            let mut turn = writer;
            let answer = acknowledged(async || {
                turn += 1;
                let client = self.clients.borrow()[turn % NODES].clone();
                client.get(&path).await
            })
            .await;
            let id = answer.header("x-event-id").unwrap().parse().unwrap();
            self.accepted.borrow_mut().insert(key, id);
            // All processes share the processor with the writers.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test]
async fn three_processes_killed_at_every_step_of_a_send_lose_none_and_repeat_none_that_was_noted() {
    killed_at_every_step(&[]).await;
}

#[tokio::test]
async fn with_a_rate_killed_processes_lose_none_and_repeat_none_that_was_noted() {
    // A little more than each of the 20 bots gets.
    killed_at_every_step(&[
        ("pipelines.notifications.rate", "\"20/s\""),
        ("pipelines.notifications.burst", "2"),
    ])
    .await;
}

async fn killed_at_every_step(settings: &[(&str, &str)]) {
    let rig = Rig::on(LASTING, settings);
    let gate: Arc<std::sync::Mutex<Option<Arc<Semaphore>>>> = Arc::default();
    let shut = Arc::clone(&gate);
    let receiver = Receiver::start(move |_| {
        let shut = shut.lock().unwrap().clone();
        async move {
            if let Some(shut) = shut {
                drop(shut.acquire().await);
            }
            Reply::new(200, "")
        }
    })
    .await;
    let nodes = join_all((0..NODES).map(|_| Node::start(&rig))).await;
    let site = Site {
        shas: Shas::new(),
        receiver,
        gate,
        clients: RefCell::new(nodes.iter().map(|node| Client::new(&node.served.http())).collect()),
        kills: Kills::new(NODES, &STEPS),
        accepted: RefCell::default(),
    };
    let killing =
        join_all(nodes.into_iter().enumerate().map(|(place, node)| site.kill(place, node)));
    // The processes go on until the end of the test.
    let (_nodes, _) = join(killing, join_all((0..4).map(|writer| site.schedule(writer)))).await;

    let accepted = site.accepted.take();
    let watching = Instance::start_as(
        Roles { ingest: false, work: false, http: false, schedule: false },
        &rig.config,
        Log::default().content(),
    )
    .await;
    let mut calls: BTreeMap<String, Vec<(Duration, String)>> = BTreeMap::new();
    let mut repeated = 0;
    for id in accepted.values() {
        let ended = ends(&watching, *id, State::Sent).await;
        if ended.attempts > 1 {
            repeated += 1;
        }
    }
    for call in site.receiver.calls() {
        let key = call.line.split(' ').nth(1).unwrap().rsplit_once('/').unwrap().1.to_owned();
        calls.entry(key).or_default().push((call.at, call.headers["webhook-id"].clone()));
    }
    println!(
        "{} notifications, {} calls, {repeated} begun more than once, {:?}",
        accepted.len(),
        site.receiver.called(),
        site.kills.met()
    );
    for (key, id) in &accepted {
        let ended = kept(&watching, *id).await;
        let calls = &calls[key];
        assert!(calls.len() <= ended.attempts as usize, "{ended:?}: {calls:?}");
        for (at, name) in calls {
            assert_eq!(*name, id.message().as_str(), "always by the same id");
            assert!(millis(*at) >= ended.due_ms, "early: {ended:?}");
            assert!(millis(*at) <= ended.ended_ms.unwrap(), "after its end was noted: {ended:?}");
        }
    }
    let unknown = calls.keys().filter(|key| !accepted.contains_key(*key)).count();
    assert_eq!(unknown, 0, "nobody else's");
    site.kills.assert_each_was_met();
    watching.stop().await;
}

fn later(number: usize, url: &str, delay: Duration) -> NewNotification {
    NewNotification {
        bot: bot(&format!("bot-{}", number % 7)),
        when: When::After(delay),
        ..to(format!("{url}?{number}"))
    }
}

#[tokio::test]
async fn after_a_crash_of_all_and_of_redis_everything_scheduled_is_still_sent() {
    let mut rig = Rig::on(LASTING, &[]);
    let receiver = Receiver::content().await;
    let crashed = Served::start(&rig.config).await;
    let client = Client::new(&crashed.http());
    let mut ids = Vec::new();
    for number in 0..300 {
        let (bot, delay) = (number % 7, 1 + number % 3);
        let path =
            format!("/send_delayed?bot=bot-{bot}&delay={delay}&url={}?{number}", receiver.url());
        let answer = client.get(&path).await;
        ids.push(answer.header("x-event-id").expect("it is accepted").parse().unwrap());
    }
    drop(crashed);
    rig.redis.kill9();
    rig.redis.restart();
    let (first, second) = (rig.start().await, rig.start().await);
    for id in &ids {
        ends(&first, *id, State::Sent).await;
    }
    // A send in flight at the crash may have arrived twice, so the test counts distinct requests.
    let mut lines: BTreeMap<String, u32> = BTreeMap::new();
    for call in receiver.calls() {
        *lines.entry(call.line).or_default() += 1;
    }
    assert_eq!(lines.len(), 300);
    first.stop().await;
    second.stop().await;
}

#[tokio::test]
async fn lost_replies_lose_no_notification_and_repeat_none() {
    let rig = Rig::on(LASTING, &[]);
    let receiver = Receiver::content().await;
    let shas = Shas::new();
    let node = Node::start(&rig).await;
    for nth in [1, 5, 9, 14] {
        node.redis.swallow(shas.promote.clone(), nth);
        node.redis.swallow(shas.begin.clone(), nth);
        node.redis.swallow(shas.finish.clone(), nth);
    }
    let client = Client::new(&node.served.http());
    let mut ids: Vec<NotificationId> = Vec::new();
    for number in 0..100 {
        let path = format!(
            "/send_delayed?bot=bot-{}&delay=0.{}&key={number}&url={}?{number}",
            number % 7,
            number % 5,
            receiver.url()
        );
        let answer = acknowledged(async || client.get(&path).await).await;
        ids.push(answer.header("x-event-id").unwrap().parse().unwrap());
    }
    let watching = Roles { ingest: false, work: false, http: false, schedule: false };
    let watching = Instance::start_as(watching, &rig.config, Log::default().content()).await;
    for id in ids {
        ends(&watching, id, State::Sent).await;
    }
    assert!(node.redis.swallowed() >= 6, "{}", node.redis.swallowed());
    let mut calls: BTreeMap<String, u32> = BTreeMap::new();
    for call in receiver.calls() {
        *calls.entry(call.headers["webhook-id"].clone()).or_default() += 1;
    }
    assert!(calls.values().all(|calls| *calls == 1), "{calls:?}");
    watching.stop().await;
}

/// Deletes the due times of the notifications.
async fn forget_when(rig: &Rig) {
    let mut connection = rig.redis.connection().await;
    for part in ["due", "later"] {
        for shard in 0..8 {
            let key = format!("fl:{{notifications:{shard}}}:{part}");
            redis::cmd("DEL").arg(key).query_async::<u64>(&mut connection).await.unwrap();
        }
    }
}

#[tokio::test]
async fn the_audit_finds_notifications_in_no_structure_and_leaves_the_rest_alone() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let found = instance.notifications().audit().await.unwrap();
    assert_eq!((found.records, found.restored), (0, 0));
    let receiver = Receiver::content().await;
    let url = receiver.url();
    let hour = Duration::from_secs(3_600);
    let lost = accept(&instance, &later(0, &url, Duration::from_secs(3))).await;
    let waits =
        NewNotification { waits: true, uid: "user".to_owned(), ..later(1, &url, Duration::ZERO) };
    let waits = accept(&instance, &waits).await;
    forget_when(&rig).await;
    let fine = accept(&instance, &later(2, &url, hour)).await;
    let sent = accept(&instance, &later(3, &url, Duration::ZERO)).await;
    ends(&instance, sent, State::Sent).await;
    assert_eq!(kept(&instance, lost).await.next_ms, None);

    let found = instance.notifications().audit().await.unwrap();
    assert_eq!((found.records, found.restored), (4, 2));
    ends(&instance, lost, State::Sent).await;
    let (waiting, hourly) = (kept(&instance, waits).await, kept(&instance, fine).await);
    assert_eq!((waiting.state, waiting.next_ms), (State::Waiting, Some(waiting.expires_ms)));
    assert_eq!((hourly.state, hourly.next_ms), (State::Scheduled, Some(hourly.due_ms)));
    let found = instance.notifications().audit().await.unwrap();
    assert_eq!((found.records, found.restored), (4, 0), "once");
    let bot: &BotId = &waiting.bot;
    assert_eq!(instance.notifications().online(bot, "user").await.unwrap(), 1);
    ends(&instance, waits, State::Sent).await;
    assert_eq!(receiver.called(), 3);
    instance.stop().await;
}

#[tokio::test]
async fn a_process_that_starts_finds_notifications_in_no_structure() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let id = accept(&instance, &later(0, &receiver.url(), Duration::from_millis(500))).await;
    forget_when(&rig).await;
    instance.stop().await;
    let instance = rig.start().await;
    ends(&instance, id, State::Sent).await;
    instance.stop().await;
}

#[tokio::test]
async fn the_audit_repeats_nothing_that_is_queued_or_being_sent() {
    let rig = Rig::new(&[]);
    let instance = rig.start().await;
    let receiver = Receiver::content().await;
    let url = receiver.url();
    let queue = instance.queue("notifications");
    queue.pause(None).await.unwrap();
    let news: Vec<NewNotification> =
        (0..1_500).map(|n| later(7 * n, &url, Duration::ZERO)).collect();
    let ids = join_all(news.iter().map(|new| accept(&instance, new))).await;
    let now = || SystemClock.now();
    eventually(LONG, "all are queued", async || queue.view(now()).await.unwrap().depth == 1_500)
        .await;
    assert_eq!(kept(&instance, ids[0]).await.next_ms, None);
    assert_eq!(instance.notifications().audit().await.unwrap().restored, 0);
    queue.resume(None).await.unwrap();
    // Audits run while the notifications leave the queue, are sent and end.
    let mut audits = 0;
    while receiver.called() < 1_500 {
        assert_eq!(instance.notifications().audit().await.unwrap().restored, 0);
        audits += 1;
    }
    for id in ids {
        ends(&instance, id, State::Sent).await;
    }
    assert_eq!(receiver.called(), 1_500, "each once, in spite of {audits} audits");
    instance.stop().await;
}

#[tokio::test]
async fn on_a_cluster_notifications_are_sent_looked_up_counted_and_audited() {
    let cluster = crate::support::cluster::Cluster::start(Options::default(), 3, false).await;
    let settings =
        [("pipelines.notifications.enabled", "true"), ("callbacks.allow_nets", "[\"127.0.0.1\"]")];
    let config = configs(&cluster, &[], &settings);
    let (first, second) = (
        Instance::start(&config, Log::default().content()).await,
        Instance::start(&config, Log::default().content()).await,
    );
    let receiver = Receiver::content().await;
    let url = receiver.url();
    let news: Vec<NewNotification> = (0..200)
        .map(|number| later(number, &url, Duration::from_millis(number as u64)))
        .map(|new| NewNotification { uid: new.url.clone(), ..new })
        .collect();
    let ids = join_all(news.iter().map(|new| accept(&first, new))).await;
    for id in ids {
        ends(&second, id, State::Sent).await;
    }
    assert_eq!(receiver.called(), 200);
    let sums = crate::support::notification_rig::stats(&second).await;
    assert_eq!((sums["received"], sums["sent"]), (200, 200));
    let found = second.notifications().audit().await.unwrap();
    assert_eq!((found.records, found.restored), (200, 0));
    first.stop().await;
    second.stop().await;
}
