//! Every page in a real browser: for screen readers, the keyboard and narrow windows, in light and
//! dark, and without scripts. The pages are taken from the routes, so that none is forgotten.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use fairlane::handler::{Failure, Outcomes};
use serde_json::{Value, json};

use crate::support::automation_rig::{RULES, put};
use crate::support::browser::{NONE, Page, button, css, field};
use crate::support::config::config;
use crate::support::counter_fleet::Stores;
use crate::support::http::Client;
use crate::support::instance::Instance;
use crate::support::receiver::{Call, Receiver, Reply};
use crate::support::recorder::Log;
use crate::support::redis::{Options, Persistence, RedisServer};
use crate::support::wait::eventually;

const LONG: Duration = Duration::from_secs(60);
/// Common widths of telephones, tablets and desks.
const WIDTHS: [u32; 3] = [390, 768, 1280];
const TOKEN: &str = "operator-0123456789abcdef";
/// The number of minutes of a day.
const DAY: u64 = 1_440;

/// A busy installation: pipelines that run, fail and are paused, dead letters, rules, notifications
/// and counters.
struct Scene {
    _stores: Stores,
    _receiver: Receiver,
    _directory: tempfile::TempDir,
    instance: Instance,
    client: Client,
    /// A dead letter of the pipeline `mail`.
    letter: String,
}

impl Scene {
    async fn start() -> Self {
        let directory = tempfile::tempdir().unwrap();
        let file = directory.path().join("token");
        std::fs::write(&file, TOKEN).unwrap();
        let scopes = r#"["read", "operate", "publish"]"#;
        let file = file.display();
        let tokens = format!("[{{ name = \"ops\", token_file = \"{file}\", scopes = {scopes} }}]");
        let stores = Stores::start(Persistence::Always);
        let mut settings = vec![("auth.tokens".to_owned(), tokens)];
        for (name, events) in [("orders", "order.*"), ("mail", "mail.*"), ("search", "order.*")] {
            let events = format!("[{events:?}]");
            for (key, value) in [
                ("handler", "\"recorder\""),
                ("events", &*events),
                ("start", "\"earliest\""),
                ("lease_ttl", "\"3s\""),
                ("handler_timeout", "\"5s\""),
                ("workers.max", "8"),
                ("backoff", "{ initial = \"1s\", max = \"10m\", jitter = 0.2 }"),
            ] {
                settings.push((format!("pipelines.{name}.{key}"), value.to_owned()));
            }
        }
        let settings: Vec<_> = settings.iter().map(|(key, value)| (&**key, &**value)).collect();
        let config = stores.direct(&[RULES, &settings].concat());
        let handler = Log::default().handler(|slice| async move {
            let has = |kind: &str| slice.events.iter().any(|of| of.event.kind() == kind);
            if has("mail.broken") {
                Err(Failure::permanent(0, "550 no such mailbox"))
            } else if has("mail.flaky") {
                Err(Failure::transient(0, "451 try again later"))
            } else {
                Ok(Outcomes::done())
            }
        });
        // The sampler adds its points after these.
        remember(&stores).await;
        let instance = Instance::start(&config, handler).await;
        let client = instance.client().with_token(TOKEN);
        let receiver = Receiver::start(async |call: Call| {
            let is_refused = call.line.contains("/refused");
            Reply::new(if is_refused { 410 } else { 200 }, "")
        })
        .await;
        let letter = fill(&client, &receiver).await;
        Self {
            _stores: stores,
            _receiver: receiver,
            _directory: directory,
            instance,
            client,
            letter,
        }
    }

    /// The paths of all pages, and of some with parameters.
    fn paths(&self) -> Vec<String> {
        let mut paths: Vec<String> = templates().iter().map(|path| self.filled(path)).collect();
        paths.extend(
            [
                "/?range=24h",
                "/pipelines/orders?range=1h&sort=age",
                "/pipelines/mail/dead?bot=bakery",
                "/events?id=order-1&bot=shop",
                "/bots/bakery",
                "/bots/never-seen",
                "/notifications?by=hour",
                "/counters?bot=shop&ads=banner",
            ]
            .map(str::to_owned),
        );
        paths
    }

    /// The path of a page, with values for the parameters in its template.
    fn filled(&self, template: &str) -> String {
        let mut path = template.to_owned();
        for (name, value) in
            [("pipeline", "mail"), ("bot", "shop"), ("id", &*self.letter), ("event", "order-1")]
        {
            path = path.replace(&format!("{{{name}}}"), value);
        }
        assert!(!path.contains('{'), "{path}: give this parameter a value here");
        path
    }

    async fn log_in(&self) -> Page {
        let page = Page::open(&self.client.address).await;
        page.goto("/login").await;
        page.fill(field("Token"), TOKEN).await;
        assert_eq!(page.follow(button("Log in")).await, 200);
        page
    }
}

/// The templates of the routes that answer `GET` with a page, as the source lists them.
fn templates() -> Vec<String> {
    let mut files = Vec::new();
    sources(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src/http/pages"), &mut files);
    let mut found = Vec::new();
    for file in files {
        let text = std::fs::read_to_string(file).unwrap();
        for route in text.split(".route(").skip(1) {
            let mut parts = route.trim_start().splitn(3, '"');
            let (Some(""), Some(path), Some(handler)) = (parts.next(), parts.next(), parts.next())
            else {
                continue;
            };
            let handler = handler.split_once(".route(").map_or(handler, |(own, _)| own);
            if handler.contains("routing::get(") && !handler.contains("asset(") {
                found.push(path.to_owned());
            }
        }
    }
    found.sort();
    found.dedup();
    assert!(found.len() > 10 && found.contains(&"/bots/{bot}".to_owned()), "{found:?}");
    found
}

fn sources(directory: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(directory).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            sources(&path, found);
        } else if path.extension().is_some_and(|kind| kind == "rs") {
            found.push(path);
        }
    }
}

/// Lets everything happen that the pages show. Returns the id of a dead letter.
async fn fill(client: &Client, receiver: &Receiver) -> String {
    assert_eq!(client.post("/v1/pipelines/search/pause").await.code, 204);
    assert_eq!(client.post("/v1/pipelines/orders/bots/depot/pause").await.code, 204);
    let long = "a-customer-whose-id-is-as-long-as-ids-of-some-systems-are-0192f1b0c1d27c3e";
    let mut events = Vec::new();
    for (bot, kind, count) in [
        ("shop", "order.created", 40),
        ("depot", "order.created", 120),
        (long, "order.created", 12),
        ("bakery", "mail.broken", 4),
        ("florist", "mail.flaky", 9),
        ("shop", "mail.sent", 3),
    ] {
        for n in 1..=count {
            let id = format!("{}-{n}", kind.split('.').next().unwrap());
            events.push(event(bot, &id, kind));
        }
    }
    let body = serde_json::to_vec(&events).unwrap();
    let answer = client.publish("application/cloudevents-batch+json", body).await;
    assert_eq!(answer.code, 202, "{}", answer.problem());

    let rule = json!({
        "name": "Thank for large orders", "on": ["order.created"], "enabled": true,
        "filter": "event.data.total > 100",
        "actions": [{ "set_tag": { "tag": "thanked" } }],
    });
    put(client, "shop", "thank", &rule).await;
    let views = json!({ "n": 41 }).to_string();
    let headers = [("content-type", "application/json")];
    let path = "/v1/bots/shop/counters/banner/views";
    let answer = client.send("POST", path, &headers, views.as_bytes()).await;
    assert_eq!(answer.code, 200, "{answer:?}");
    for (delay, kind, path) in
        [(0, "reminder", "refused"), (0, "greeting", "taken"), (3_600, "reminder", "later")]
    {
        let url = format!("{}/{path}?{}", receiver.url(), "x".repeat(120));
        let body = json!({ "delay": delay, "url": url, "bot": "shop", "type": kind }).to_string();
        let answer = client.send("POST", "/send_delayed", &headers, body.as_bytes()).await;
        assert!(answer.code < 300, "{answer:?}");
    }

    let dead = async |pipeline: &str| {
        let all = client.get(&format!("/v1/pipelines/{pipeline}/dead")).await.json();
        let all = all["dead_letters"].as_array().unwrap().iter();
        all.map(|letter| letter["id"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    eventually(LONG, "all dead letters are there", async || {
        dead("mail").await.len() == 4 && dead("notifications").await.len() == 1
    })
    .await;
    eventually(LONG, "a bot is retried", async || {
        let bot = client.get("/v1/pipelines/mail/bots/florist").await.json();
        bot["attempts"].as_u64().is_some_and(|attempts| attempts > 1)
    })
    .await;
    dead("mail").await.remove(0)
}

fn event(bot: &str, id: &str, kind: &str) -> Value {
    json!({
        "specversion": "1.0", "id": id, "source": "shop/checkout", "type": kind, "botid": bot,
        "data": { "total": 129.5, "currency": "EUR" },
    })
}

/// Writes the points of a day with a gap, as the sampler would have done.
async fn remember(stores: &Stores) {
    let now = std::time::SystemTime::UNIX_EPOCH.elapsed().unwrap().as_millis();
    let now = u64::try_from(now).unwrap();
    let mut connection = stores.redis.connection().await;
    let mut pipe = redis::pipe();
    let sample = |place: u64| {
        let turn = f64::from(u32::try_from(place).unwrap()) / 40.0;
        let wave = (turn.sin() + (turn * 2.7).cos() + 2.0) / 4.0;
        let depth = (wave * 900.0).round();
        json!([depth, depth * 20.0, 40.0 * wave, 38.0 * wave, 20.0, 2.0 * wave, 35.0, 400.0 * wave])
    };
    let mut add = |key: &str, age_ms: u64, place: u64| {
        let sample = sample(place);
        let point = json!({ "t": now - age_ms, "p": { "orders": sample, "mail": sample } });
        pipe.cmd("RPUSH").arg(key).arg(point.to_string()).ignore();
    };
    for minute in (2..DAY).rev().filter(|minute| !(500..560).contains(minute)) {
        add("fl:trend-minutes", minute * 60_000, minute);
    }
    for place in (4..180).rev() {
        add("fl:trend", place * 5_000, place);
    }
    let (): () = pipe.query_async(&mut connection).await.unwrap();
}

#[tokio::test]
async fn every_page_obeys_the_rules_of_axe_in_light_and_dark_and_at_every_width() {
    let scene = Scene::start().await;
    let page = scene.log_in().await;
    let mut found: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let mut add = |problem: String, place: String| found.entry(problem).or_default().push(place);
    for path in scene.paths() {
        assert_eq!(page.goto(&path).await, 200, "{path}");
        for scheme in ["light", "dark"] {
            page.colours(scheme).await;
            for width in WIDTHS {
                page.resize(width, 800).await;
                let broken = page.violations().await.into_iter();
                let broken = broken.map(|one| format!("{}: {}", one.impact, one.about));
                let all = broken.chain(page.barriers().await);
                all.for_each(|one| add(one, format!("{path}, {width} px, {scheme}")));
            }
        }
        page.problems().into_iter().for_each(|one| add(one, path.clone()));
    }
    assert!(found.is_empty(), "{found:#?}");
    scene.instance.stop().await;
}

/// The elements that users operate, in order, each with its place in the list of all elements.
const OPERATED: &str = "[...document.querySelectorAll(
    'a[href], button, input:not([type=hidden]), select, textarea, summary, [tabindex=\"0\"]')]
  .filter((element) => element.checkVisibility({ visibilityProperty: true }))
  .map((element) => [[...document.querySelectorAll('*')].indexOf(element), element.outerHTML.slice(0, 120)])";
/// The focused element in the same list, and whether its focus can be seen.
const FOCUSED: &str = "(() => {
  const style = getComputedStyle(document.activeElement);
  return [[...document.querySelectorAll('*')].indexOf(document.activeElement),
    style.outlineStyle !== 'none' && parseFloat(style.outlineWidth) >= 2];
})()";

#[tokio::test]
async fn the_tab_key_reaches_everything_in_order_and_shows_where_it_is() {
    let scene = Scene::start().await;
    let page = scene.log_in().await;
    // Updates would move elements between two looks.
    page.scripts(false).await;
    for path in scene.paths() {
        page.goto(&path).await;
        let operated: Vec<(usize, String)> = page.eval(OPERATED).await;
        assert!(operated.len() > 5, "{path}: {operated:?}");
        let mut reached = Vec::new();
        for _ in 0..operated.len() + 10 {
            page.press("Tab").await;
            let (place, is_visible): (usize, bool) = page.eval(FOCUSED).await;
            let Some((_, element)) = operated.iter().find(|(known, _)| *known == place) else {
                continue;
            };
            if reached.contains(&place) {
                break;
            }
            assert!(is_visible, "{path}: the focus on {element} cannot be seen");
            reached.push(place);
        }
        let missed = operated.iter().filter(|(place, _)| !reached.contains(place));
        let missed: Vec<_> = missed.collect();
        assert!(missed.is_empty(), "{path}: the Tab key does not reach {missed:#?}");
        // The field that has the focus at first may be in the middle of the page.
        let back = reached.windows(2).filter(|two| two[0] > two[1]).count();
        let is_whole = back == 0 || back == 1 && reached.first() > reached.last();
        assert!(is_whole, "{path}: {reached:?} is not the order of the page");
    }
    scene.instance.stop().await;
}

#[tokio::test]
async fn every_page_is_complete_without_scripts() {
    let scene = Scene::start().await;
    let page = scene.log_in().await;
    page.scripts(false).await;
    for path in scene.paths() {
        assert_eq!(page.goto(&path).await, 200, "{path}");
        for (wrong, what) in [
            ("button:not(form button), form:not([action])", "does nothing"),
            ("a:not([href]), a[href^='javascript:']", "leads nowhere"),
            ("[onclick], [onchange], [onsubmit], [style]", "is inline"),
            ("noscript, template, main [hidden]", "needs a script"),
        ] {
            assert_eq!(page.count(wrong).await, 0, "{path}: an element {what}: {wrong}");
        }
        let search = "header form[role=search][action='/events'] input[name=id]";
        assert_eq!(page.count(search).await, 1, "{path}");
        assert_eq!(page.count("main h1").await, 1, "{path}");
        assert_eq!(page.problems(), NONE, "{path}");
    }
    page.goto("/notifications").await;
    page.sees("reminder").await;
    page.follow(button("Redrive all…")).await;
    assert_eq!(page.barriers().await, NONE, "the question");
    page.follow(button("Redrive them")).await;
    assert_eq!(page.path().await, "/notifications#dead");
    // A page that is not there is a page too.
    assert_eq!(page.goto("/nowhere").await, 404);
    assert_eq!(page.text(css("h1")).await, "Page not found");
    assert_eq!(page.barriers().await, NONE);
    scene.instance.stop().await;
}

#[tokio::test]
#[ignore = "writes pictures for people: make screenshots"]
async fn screenshots() {
    let target = Path::new(env!("CARGO_TARGET_TMPDIR")).parent().unwrap().join("screenshots");
    std::fs::create_dir_all(&target).unwrap();
    let draw = async |page: &Page, path: &str, name: &str| {
        page.goto(path).await;
        for scheme in ["light", "dark"] {
            page.colours(scheme).await;
            for width in WIDTHS {
                page.resize(width, 800).await;
                page.screenshot(&target.join(format!("{name}-{width}-{scheme}.png"))).await;
            }
        }
    };
    let server = RedisServer::start(Options::default());
    let config = config(&server, "test", &[]);
    let unused = Instance::start(&config, Log::default().content()).await;
    let page = Page::open(&unused.client().address).await;
    draw(&page, "/", "unused").await;
    drop(page);
    unused.stop().await;

    let scene = Scene::start().await;
    let page = scene.log_in().await;
    let mut paths = scene.paths();
    paths.push("/nowhere".to_owned());
    for path in paths {
        let name = path.replace(&scene.letter, "letter");
        let name = name.replace(|c: char| !c.is_ascii_alphanumeric(), "-");
        let name = name.trim_matches('-');
        draw(&page, &path, if name.is_empty() { "overview" } else { name }).await;
    }
    scene.instance.stop().await;
    println!("the pictures are in {}", target.display());
}
