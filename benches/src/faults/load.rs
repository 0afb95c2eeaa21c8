//! The load of a campaign: every product at the same time, through the HTTP API.
//!
//! Each request is repeated until a process acknowledges it, as clients of a real deployment do.

use std::collections::{BTreeMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fairlane::clock::{Clock as _, SystemClock, millis};
use fairlane_testkit::http::Response;
use rand::rngs::SmallRng;
use rand::{Rng as _, SeedableRng as _};
use serde_json::{Value, json};
use tokio::time::sleep;

use super::api::{Api, json};
use super::hooks::Hooks;
use super::letters::PutBack;
use super::replays::Replayed;
use super::worker::{POISON, now_us, random_ms};
use super::world::{LIMIT, World};

/// One event in this many is poison, and so becomes a dead letter.
const POISON_ONE_IN: u32 = 700;
const RETRY: Duration = Duration::from_millis(50);
/// Maximum rate of the events that receivers complete later, events per second. A lease takes them a tenth
/// of a second, and after a failure each one has a lease of its own. More would only pile up.
const LEASED: u32 = 40;
/// A request whose answer is lost may be executed this much later, µs.
const LATE_US: u64 = 4_000_000;

/// The pipelines with events of their own, their bots, their keys per bot, and their part of the rate
/// in percent.
pub(crate) const PIPELINES: [(&str, usize, usize, u32); 5] = [
    ("plain", 24, 1, 55),
    ("keyed", 8, 5, 20),
    ("limited", 6, 1, 2),
    ("pushed", 16, 1, 16),
    ("leased", 8, 1, 7),
];
/// The bots with rules, and with counters.
const SHOPS: u64 = 6;
/// Events per second and shop that rules act on.
const SALES: u32 = 2;
/// Views and notifications per second.
const VIEWS: u32 = 10;
const NOTIFICATIONS: u32 = 10;

/// An event that the bus acknowledged.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sent {
    /// The place of its pipeline in [`PIPELINES`].
    pub(crate) pipeline: u8,
    pub(crate) bot: u16,
    pub(crate) key: u8,
    pub(crate) event: u32,
    /// Whether it fails until the end of the campaign.
    pub(crate) poison: bool,
    /// When it was published for the first time, see [`now_us`].
    pub(crate) asked: u64,
    /// When it was acknowledged.
    pub(crate) at: u64,
    /// How often it was published: the bus may have a copy of each.
    pub(crate) copies: u32,
}

impl Sent {
    /// The bot, or the bot and its key, as in the histories.
    pub(crate) fn lane(&self) -> String {
        let (name, _, keys, _) = PIPELINES[usize::from(self.pipeline)];
        if keys > 1 {
            format!("{name}-{}/k{}", self.bot, self.key)
        } else {
            format!("{name}-{}", self.bot)
        }
    }
}

/// A notification that was accepted.
#[derive(Debug, Clone)]
pub(crate) struct Due {
    /// Its id in calls.
    pub(crate) id: String,
    /// It must not be sent before, ms since 1970.
    pub(crate) earliest_ms: u64,
}

/// When an operator released or revoked the lease of a bot, see [`now_us`].
#[derive(Debug, Clone)]
pub(crate) struct Released {
    pub(crate) bot: String,
    pub(crate) from: u64,
    pub(crate) until: u64,
}

/// What was acknowledged.
#[derive(Debug, Default)]
pub(crate) struct Acknowledged {
    pub(crate) sent: Vec<Sent>,
    /// Views per bot and ad.
    pub(crate) views: BTreeMap<(String, String), u64>,
    /// Events that the rules of each bot act on.
    pub(crate) sales: BTreeMap<String, u64>,
    pub(crate) notifications: Vec<Due>,
    pub(crate) operations: u64,
    pub(crate) replays: Vec<Replayed>,
    pub(crate) released: Vec<Released>,
    /// By pipeline.
    pub(crate) put_back: BTreeMap<String, Vec<PutBack>>,
    /// Answers that no client should get.
    pub(crate) refused: Vec<String>,
}

/// A request that is repeated until it is acknowledged.
struct Request<'a> {
    method: &'a str,
    path: &'a str,
    kind: &'a str,
    /// The idempotency key.
    key: Option<&'a str>,
    body: String,
}

impl<'a> Request<'a> {
    fn json(method: &'a str, path: &'a str, body: &Value) -> Self {
        let body = if body.is_null() { String::new() } else { body.to_string() };
        Self { method, path, kind: "application/json", key: None, body }
    }

    async fn send(&self, api: &Api) -> Response {
        let mut headers = vec![("content-type", self.kind)];
        headers.extend(self.key.map(|key| ("idempotency-key", key)));
        api.send(self.method, self.path, &headers, &self.body).await
    }
}

/// The load, until it is told to end.
pub(crate) struct Load {
    pub(crate) world: Arc<World>,
    pub(crate) hooks: Arc<Hooks>,
    pub(crate) ending: AtomicBool,
    /// The part of the rate that is published now, percent.
    pub(crate) pace: AtomicU32,
    /// The number of the load, in the ids of its events. A soak starts one each day.
    pub(crate) day: AtomicU32,
    /// When events ceased to fail on purpose, see [`now_us`].
    pub(crate) cured: AtomicU64,
    acknowledged: Mutex<Acknowledged>,
    /// When the load started, see [`now_us`].
    pub(crate) since: AtomicU64,
    /// Repeated requests.
    pub(crate) repeated: AtomicU64,
}

impl Load {
    pub(crate) fn new(world: Arc<World>, hooks: Arc<Hooks>) -> Self {
        Self {
            world,
            hooks,
            ending: AtomicBool::new(false),
            pace: AtomicU32::new(100),
            day: AtomicU32::new(0),
            cured: AtomicU64::new(u64::MAX),
            acknowledged: Mutex::default(),
            since: AtomicU64::new(0),
            repeated: AtomicU64::new(0),
        }
    }

    pub(crate) fn acknowledged(&self) -> MutexGuard<'_, Acknowledged> {
        self.acknowledged.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ends(&self) -> bool {
        self.ending.load(Ordering::Relaxed)
    }

    fn api(&self) -> &Api {
        let place = rand::rng().random_range(0..self.world.nodes.len());
        &self.world.nodes[place].api
    }

    /// Repeats a request at changing processes until it is acknowledged with one of `codes`. Returns the
    /// answer, and the number of requests.
    async fn until(&self, codes: &[u16], request: &Request<'_>) -> (Response, u32) {
        for requests in 1.. {
            let answer = request.send(self.api()).await;
            if codes.contains(&answer.code) {
                return (answer, requests);
            }
            // No answer, a process that stops, backpressure.
            if !matches!(answer.code, 0 | 429 | 503 | 504) {
                let mut all = self.acknowledged();
                let text = String::from_utf8_lossy(&answer.body).chars().take(300).collect();
                if all.refused.len() < 20 && !all.refused.contains(&text) {
                    all.refused.push(text);
                }
            }
            self.repeated.fetch_add(1, Ordering::Relaxed);
            sleep(RETRY).await;
        }
        unreachable!("the loop ends with an answer")
    }

    /// Publishes the events of one pipeline, `rate` a second, in batches.
    pub(crate) async fn publish(&self, pipeline: usize, rate: u32, seed: u64) {
        let (name, bots, keys, _) = PIPELINES[pipeline];
        let mut random = SmallRng::seed_from_u64(seed ^ pipeline as u64);
        let mut next = vec![0_u32; bots * keys];
        let rate = match name {
            "limited" => rate.min(LIMIT * 4),
            "leased" => rate.min(LEASED),
            _ => rate,
        };
        let rate = rate.max(1);
        let batches = (rate / 20).clamp(1, 20);
        let day = self.day.load(Ordering::Relaxed);
        while !self.ends() {
            let started = tokio::time::Instant::now();
            let (mut events, mut batch) = (Vec::new(), Vec::new());
            let now = (rate * self.pace.load(Ordering::Relaxed) / 100).max(1);
            for _ in 0..now.div_ceil(batches) {
                let (bot, key) = (random.random_range(0..bots), random.random_range(0..keys));
                let position = &mut next[bot * keys + key];
                let poison = random.random_range(0..POISON_ONE_IN) == 0;
                let kind = if poison { format!("{name}.{POISON}") } else { name.to_owned() };
                events.push(json!({
                    "specversion": "1.0", "id": format!("d{day}-k{key}-{position}"), "source": "campaign",
                    "type": kind, "botid": format!("{name}-{bot}"), "subject": format!("k{key}"),
                }));
                batch.push(Sent {
                    pipeline: u8::try_from(pipeline).unwrap_or_default(),
                    bot: u16::try_from(bot).unwrap_or_default(),
                    key: u8::try_from(key).unwrap_or_default(),
                    event: *position,
                    poison,
                    asked: 0,
                    at: 0,
                    copies: 0,
                });
                *position += 1;
            }
            let asked = now_us();
            let copies = self.put_on_the_bus(&events).await;
            let at = now_us();
            let sent = batch.into_iter().map(|sent| Sent { asked, at, copies, ..sent });
            self.acknowledged().sent.extend(sent);
            sleep((Duration::from_secs(1) / batches).saturating_sub(started.elapsed())).await;
        }
    }

    /// Returns the number of requests.
    async fn put_on_the_bus(&self, events: &[Value]) -> u32 {
        let kind = "application/cloudevents-batch+json";
        let request = Request { kind, ..Request::json("POST", "/v1/events", &json!(events)) };
        self.until(&[202], &request).await.1
    }

    /// Stores the rules of all shops: a sale emits one event now and one later, and all are counted.
    pub(crate) async fn store_rules(&self) {
        let count = |ad: &str| json!({ "count": { "ad": ad } });
        let url = format!("http://{}/notified", self.hooks.address);
        let rules = [
            (
                "sold",
                json!({ "on": ["sale"], "actions": [
                    count("made"), { "set_tag": { "tag": "buyer" } },
                    { "emit": { "type": "seen" } }, { "emit": { "type": "later", "delay": 1 } } ] }),
            ),
            ("seen", json!({ "on": ["seen"], "actions": [count("seen")] })),
            ("later", json!({ "on": ["later"], "actions": [count("later")] })),
            ("tagged", json!({ "on": ["tag.applied"], "actions": [{ "notify": { "url": url } }] })),
        ];
        for shop in 0..SHOPS {
            for (name, rule) in &rules {
                let path = format!("/v1/bots/shop-{shop}/automations/{name}");
                self.until(&[200, 201], &Request::json("PUT", &path, rule)).await;
            }
        }
    }

    /// Publishes the events that rules act on.
    pub(crate) async fn sell(&self) {
        let day = self.day.load(Ordering::Relaxed);
        for sale in 0_u64.. {
            if self.ends() {
                return;
            }
            let events: Vec<_> = (0..SHOPS)
                .map(|shop| {
                    json!({
                        "specversion": "1.0", "id": format!("d{day}-s{sale}"), "source": "campaign",
                        "type": "sale", "botid": format!("shop-{shop}"),
                        "subject": format!("u{}", sale % 50),
                    })
                })
                .collect();
            self.put_on_the_bus(&events).await;
            {
                let mut all = self.acknowledged();
                for shop in 0..SHOPS {
                    *all.sales.entry(format!("shop-{shop}")).or_default() += 1;
                }
            }
            sleep(Duration::from_secs(1) / SALES).await;
        }
    }

    /// Counts views over HTTP.
    pub(crate) async fn count_views(&self) {
        while !self.ends() {
            let bot = format!("ads-{}", rand::rng().random_range(0..SHOPS));
            let ad = format!("ad-{}", rand::rng().random_range(0..4));
            let views = rand::rng().random_range(1..=3_u64);
            let path = format!("/v1/bots/{bot}/counters/{ad}/views");
            let key = uuid::Uuid::now_v7().to_string();
            let request = Request::json("POST", &path, &json!({ "n": views }));
            self.until(&[200], &Request { key: Some(&key), ..request }).await;
            *self.acknowledged().views.entry((bot, ad)).or_default() += views;
            sleep(Duration::from_secs(1) / VIEWS).await;
        }
    }

    /// Schedules notifications.
    pub(crate) async fn notify(&self) {
        let url = format!("http://{}/notified", self.hooks.address);
        while !self.ends() {
            let key = uuid::Uuid::now_v7().to_string();
            let delay = rand::rng().random_range(0..4_000_u64);
            let mut body = json!({
                "url": url, "bot": format!("ads-{}", rand::rng().random_range(0..SHOPS)),
                "uid": key, "key": key, "body": { "n": 1 },
            });
            body["delay"] = json!(Duration::from_millis(delay).as_secs_f64());
            let asked = millis(SystemClock.now());
            let request = Request::json("POST", "/send_delayed", &body);
            let (answer, _) = self.until(&[200, 202], &request).await;
            let id = answer.header("x-event-id").unwrap_or_default().replace('.', "-");
            // A repeated request names the notification of the first one.
            let due = Due { id, earliest_ms: asked + delay };
            self.acknowledged().notifications.push(due);
            sleep(Duration::from_secs(1) / NOTIFICATIONS).await;
        }
    }

    /// What operators do: they look, pause, resume, break leases, and replay.
    pub(crate) async fn operate(&self) {
        // Each action comes once, also in a short campaign on a slow machine. Then chance decides.
        let (mut paused, mut first) = (VecDeque::new(), 0..7);
        while !self.ends() {
            // A pause whose answer was lost may take effect after the operator ended it.
            while paused.front().is_some_and(|&(at, _): &(u64, String)| now_us() > at + LATE_US) {
                if let Some((_, resume)) = paused.pop_front() {
                    self.resume(&resume).await;
                }
            }
            let pipeline = rand::rng().random_range(0..PIPELINES.len());
            let (name, bots, ..) = PIPELINES[pipeline];
            let bot = format!("{name}-{}", rand::rng().random_range(0..bots));
            let of_bot = format!("/v1/pipelines/{name}/bots/{bot}");
            let action = first.next().unwrap_or_else(|| rand::rng().random_range(0..7));
            match action {
                0 => {
                    let body = json!({ "reason": "the campaign" });
                    self.api().post(&format!("{of_bot}/pause"), &body).await;
                    sleep(random_ms(50..600)).await;
                    let resume = format!("{of_bot}/resume");
                    self.resume(&resume).await;
                    paused.push_back((now_us(), resume));
                }
                1 => {
                    let asked = now_us();
                    self.api().post(&format!("{of_bot}/release"), &json!({})).await;
                    // The holder learns it with its next renewal.
                    let until = now_us() + LATE_US;
                    self.acknowledged().released.push(Released { bot, from: asked, until });
                }
                2 => drop(self.api().get(&format!("/v1/pipelines/{name}/bots?sort=age")).await),
                3 => drop(self.api().get(&format!("{of_bot}/attempts")).await),
                4 => drop(self.api().get("/v1/problems").await),
                5 => self.replay().await,
                _ => {
                    let of_all = format!("/v1/pipelines/{name}");
                    self.api().post(&format!("{of_all}/pause"), &json!({})).await;
                    sleep(random_ms(50..400)).await;
                    let resume = format!("{of_all}/resume");
                    self.resume(&resume).await;
                    paused.push_back((now_us(), resume));
                }
            }
            self.acknowledged().operations += 1;
            sleep(random_ms(100..900)).await;
        }
    }

    /// Replays the last seconds of a bot of the first pipeline.
    async fn replay(&self) {
        let (name, bots, ..) = PIPELINES[0];
        let bot = rand::rng().random_range(0..bots);
        let Some(replayed) = Replayed::draw(bot, self.since.load(Ordering::Relaxed)) else {
            return;
        };
        let path = format!("/v1/pipelines/{name}/replay");
        let body = replayed.request(&format!("{name}-{bot}"));
        loop {
            let (answer, _) = self.until(&[200], &Request::json("POST", &path, &body)).await;
            if json(&answer)["done"] == true {
                break;
            }
            sleep(RETRY).await;
        }
        self.acknowledged().replays.push(replayed.ends());
    }

    async fn resume(&self, path: &str) {
        // A bot that has no events any more may be unknown.
        let known = [200, 204, 404, 409];
        self.until(&known, &Request::json("POST", path, &json!({}))).await;
    }

    /// Ends all pauses.
    pub(crate) async fn resume_all(&self) {
        for (name, bots, ..) in PIPELINES {
            self.resume(&format!("/v1/pipelines/{name}/resume")).await;
            for bot in 0..bots {
                self.resume(&format!("/v1/pipelines/{name}/bots/{name}-{bot}/resume")).await;
            }
        }
    }

    /// Puts all dead letters back into their queues, which revokes the leases of their bots. Returns how
    /// many. Rules have some too: an action that a full Redis refuses counts as an attempt.
    pub(crate) async fn redrive(&self) -> u64 {
        let mut redriven = 0;
        let own = PIPELINES.iter().map(|&(name, bots, ..)| (name, bots));
        for (name, bots) in own.chain([("automations", 0)]) {
            if bots > 0 {
                self.note_dead(name).await;
            }
            let path = format!("/v1/pipelines/{name}/dead/redrive");
            let from = now_us();
            let (answer, requests) =
                self.until(&[200], &Request::json("POST", &path, &json!({}))).await;
            let count = json(&answer)["redriven"].as_u64().unwrap_or_default();
            if count > 0 || requests > 1 {
                let until = now_us() + LATE_US;
                let bots = (0..bots).map(|bot| format!("{name}-{bot}"));
                let released = bots.map(|bot| Released { bot, from, until });
                self.acknowledged().released.extend(released);
            }
            redriven += count;
        }
        redriven
    }

    /// Notes the dead letters of a pipeline, before they are put back. An event that becomes one in between
    /// is not noted: it is put back before many events behind it are handled.
    async fn note_dead(&self, pipeline: &str) {
        let mut cursor = String::new();
        loop {
            let at = now_us();
            let path = format!("/v1/pipelines/{pipeline}/dead?limit=1000{cursor}");
            let (answer, _) = self.until(&[200], &Request::json("GET", &path, &Value::Null)).await;
            let page = json(&answer);
            let letters = page["dead_letters"].as_array().into_iter().flatten();
            let letters = letters.filter_map(|letter| PutBack::read(pipeline, letter, at));
            self.acknowledged().put_back.entry(pipeline.to_owned()).or_default().extend(letters);
            match page["cursor"].as_str() {
                Some(next) => cursor = format!("&cursor={next}"),
                None => return,
            }
        }
    }

    /// The totals of these ads as a process reports them.
    pub(crate) async fn totals(&self, bot: &str, ads: &[&str]) -> BTreeMap<String, u64> {
        let path = format!("/v1/bots/{bot}/counters?ids={}", ads.join(","));
        let (answer, _) = self.until(&[200], &Request::json("GET", &path, &Value::Null)).await;
        let totals = json(&answer)["totals"].clone();
        serde_json::from_value(totals).unwrap_or_default()
    }
}
